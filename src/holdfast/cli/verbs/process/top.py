"""`holdfast top`: shows the operating system processes under processes and shells, with CPU time and memory."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
import typer

from holdfast.cli.support.sandbox_option import LOCAL, JsonOption, SandboxOption, open_exec
from holdfast.cli.support.text import age, amount, on_terminal, rich_table, show_table
from holdfast.cli.support.typed_verb import run_async
from holdfast.errors import UnknownProcess
from holdfast.exec_api import ExecApi
from holdfast.types import MemberUsage, ProcessUsage

HEADER: Final = ("ID", "PID", "CPU", "TIME", "MEMORY", "THREADS", "AGE", "COMMAND")


def command(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID...]", help="Processes, terminals and shells (default: all).")
    ] = None,
    sandbox: SandboxOption = LOCAL,
    once: Annotated[bool, typer.Option("--once", help="Print one sample and leave.")] = False,
    # A sample reads all of /proc, so the interval has a lower bound.
    interval: Annotated[float, typer.Option(metavar="S", min=0.2, help="Time between two samples.")] = 2.0,
    as_json: JsonOption = False,
) -> int:
    """Show what runs under processes, terminals and shells, with CPU and memory, until Ctrl-C.

    CPU is the share of one core since the previous sample, in the first sample since the start of the process. TIME
    is CPU time. --json prints one array a line for each sample.
    """
    return run_async(_top(sandbox, ids or [], once, interval, as_json))


async def _top(sandbox: str, ids: list[str], once: bool, interval: float, as_json: bool) -> int:
    async with open_exec(sandbox, ids=ids) as api:
        rates = CpuRates()
        usages = await _sample(api, ids)
        missing = set(ids) - {usage.process_id for usage in usages}
        if missing:
            raise UnknownProcess(f"no process, terminal or shell {min(missing)!r}")
        if once or as_json or not on_terminal():
            _show(usages, rates.update(usages, time.monotonic()), as_json)
            while not once:
                await asyncio.sleep(interval)
                usages = await _sample(api, ids)
                _show(usages, rates.update(usages, time.monotonic()), as_json)
            return 0
        from rich.live import Live

        with Live(auto_refresh=False, screen=True) as live:
            while True:
                table = rows(usages, rates.update(usages, time.monotonic()))
                live.update(rich_table(HEADER, table, live.console.width), refresh=True)
                await asyncio.sleep(interval)
                usages = await _sample(api, ids)
    return 0


async def _sample(api: ExecApi, ids: list[str]) -> tuple[ProcessUsage, ...]:
    if not ids:
        processes, shells = await asyncio.gather(api.list(), api.list_shells())
        ids = [info.process_id for info in processes if not info.closed]
        ids += [status.shell_id for status in shells if status.state != "closed"]
    return (await api.usage(ids, members=True)).usages


class CpuRates:
    """The CPU share of each process in percent of one core, from the CPU times of two samples; pure."""

    def __init__(self) -> None:
        self._at = 0.0
        self._before: dict[int, MemberUsage] = {}

    def update(self, usages: tuple[ProcessUsage, ...], now: float) -> dict[int, float]:
        """Return the shares by pid since the last call; of a new process, since its start."""
        members = {member.pid: member for usage in usages for member in usage.members}
        found: dict[int, float] = {}
        for pid, member in members.items():
            before = self._before.get(pid)
            cpu, elapsed = member.cpu_seconds, member.seconds
            # A process that is younger than the one of the last sample has a reused pid.
            if before is not None and before.seconds <= member.seconds:
                cpu, elapsed = cpu - before.cpu_seconds, now - self._at
            found[pid] = round(100 * cpu / elapsed, 1) if elapsed > 0 else 0.0
        self._at, self._before = now, members
        return found


def _show(usages: tuple[ProcessUsage, ...], rates: Mapping[int, float], as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode([_object(usage, rates) for usage in usages]).decode(), flush=True)
    else:
        show_table(HEADER, rows(usages, rates))


def _object(usage: ProcessUsage, rates: Mapping[int, float]) -> dict[str, Any]:
    members = [{**msgspec.to_builtins(each), "cpuPercent": rates[each.pid]} for each in usage.members]
    total = round(sum(rates[each.pid] for each in usage.members), 1)
    return {**msgspec.to_builtins(usage), "cpuPercent": total, "members": members}


def rows(usages: tuple[ProcessUsage, ...], rates: Mapping[int, float]) -> list[tuple[str, ...]]:
    """Return the rows of the table: each id with its processes, children below their parent and indented."""
    found: list[tuple[str, ...]] = []
    for usage in usages:
        for depth, member in _in_tree_order(usage.members):
            shown = shlex.join(member.argv) if member.argv else f"[{member.name}]"
            found.append(
                (
                    usage.process_id,
                    str(member.pid),
                    f"{rates[member.pid]:.1f}%",
                    f"{member.cpu_seconds:.2f}s",
                    amount(member.memory_bytes),
                    str(member.thread_count),
                    age(member.seconds),
                    "  " * depth + shown,
                )
            )
        if not usage.members:
            total = (f"{usage.cpu_seconds:.2f}s", amount(usage.memory_bytes), str(usage.thread_count))
            found.append((usage.process_id, "-", "-", *total, "-", f"{usage.process_count} processes"))
    return found


def _in_tree_order(members: tuple[MemberUsage, ...]) -> list[tuple[int, MemberUsage]]:
    """Return each member with its depth, after its parent. A member whose parent is not listed has depth 0."""
    listed = {member.pid for member in members}
    children: dict[int, list[MemberUsage]] = {}
    for member in members:
        children.setdefault(member.parent if member.parent in listed else 0, []).append(member)
    found: list[tuple[int, MemberUsage]] = []
    pending = [(0, member) for member in reversed(children.get(0, []))]
    while pending:
        depth, member = pending.pop()
        found.append((depth, member))
        pending += [(depth + 1, child) for child in reversed(children.get(member.pid, []))]
    return found
