"""`holdfast ps`: the processes that run, or all that are kept; once, or as a table that follows them."""

from __future__ import annotations

import asyncio
import shlex
import time
from typing import Annotated, Final

import msgspec
import typer

from holdfast.cli.sandbox_option import LOCAL, JsonOption, SandboxOption, open_exec
from holdfast.cli.text import age, amount, on_terminal, rich_table, show_table
from holdfast.cli.typed_verb import run_async
from holdfast.exec_api import ExecApi
from holdfast.local_server import is_running
from holdfast.model import ProcessInfo

HEADER: Final = ("ID", "PID", "STATE", "AGE", "EXIT", "OUTPUT", "COMMAND")
#: Ages are shown in seconds, so a table that is older shows wrong ones.
_REFRESH_SECONDS: Final = 1.0


def command(
    sandbox: SandboxOption = LOCAL,
    all: Annotated[bool, typer.Option("--all", "-a", help="Also those that ended and are kept.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow them until Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> int:
    """List processes.

    STATE is running, closing (the process ended, something that it started still holds its output) or ended. --json
    prints one array; with --watch one array a line.
    """
    if sandbox == LOCAL and not watch and not is_running():
        # No server, no processes: looking must not start one.
        _show((), all, as_json)
        return 0
    return run_async(_ps(sandbox, all, watch, as_json))


async def _ps(sandbox: str, all: bool, watch: bool, as_json: bool) -> int:
    async with open_exec(sandbox) as api:
        if watch and on_terminal() and not as_json:
            await _live(api, all)
        else:
            _show(await api.list(), all, as_json)
            while watch:
                await asyncio.sleep(_REFRESH_SECONDS)
                _show(await api.list(), all, as_json)
    return 0


async def _live(api: ExecApi, all: bool) -> None:
    from rich.live import Live

    with Live(auto_refresh=False, screen=True) as live:
        while True:
            live.update(rich_table(HEADER, rows(await api.list(), all=all, now=time.time())), refresh=True)
            await asyncio.sleep(_REFRESH_SECONDS)


def _show(processes: tuple[ProcessInfo, ...], all: bool, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(_chosen(processes, all)).decode(), flush=True)
    else:
        show_table(HEADER, rows(processes, all=all, now=time.time()))


def _chosen(processes: tuple[ProcessInfo, ...], all: bool) -> list[ProcessInfo]:
    chosen = [info for info in processes if all or not info.closed]
    return sorted(chosen, key=lambda info: (info.started_at, info.process_id))


def rows(processes: tuple[ProcessInfo, ...], *, all: bool, now: float) -> list[tuple[str, ...]]:
    """The cells of the table, oldest process first."""
    return [
        (
            info.process_id,
            str(info.pid),
            "running" if info.running else "ended" if info.closed else "closing",
            age((info.exited_at or now) - info.started_at),
            "-" if info.exit_code is None else str(info.exit_code),
            amount(info.stdout_bytes + info.stderr_bytes + info.pty_bytes),
            shlex.join(info.argv),
        )
        for info in _chosen(processes, all)
    ]
