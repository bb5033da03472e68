"""`holdfast ps`: the processes that run, or all that are kept; once, or as a table that follows them."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import typer

from holdfast.cli.running_server import is_helper, may_be_helper
from holdfast.cli.sandbox_option import LOCAL, JsonOption, SandboxOption, open_exec
from holdfast.cli.text import age, amount, on_terminal, rich_table, show_table
from holdfast.cli.typed_verb import run_async
from holdfast.exec_api import ExecApi
from holdfast.local_server import is_running
from holdfast.model import ProcessInfo, TerminalStatus

HEADER: Final = ("ID", "PID", "STATE", "AGE", "EXIT", "OUTPUT", "COMMAND")
#: Ages are shown in seconds, so a table that is older shows wrong ones.
_REFRESH_SECONDS: Final = 1.0


class _Seen(NamedTuple):
    """What was there at one moment: processes, terminals among them, and what more is known of those."""

    processes: tuple[ProcessInfo, ...] = ()
    terminals: Mapping[str, TerminalStatus] = MappingProxyType({})
    #: The server's own command, by which the processes that Holdfast runs for itself are known.
    holdfast: tuple[str, ...] = ()


def command(
    sandbox: SandboxOption = LOCAL,
    all: Annotated[
        bool, typer.Option("--all", "-a", help="Also those that ended and are kept, and Holdfast's own.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow them until Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> int:
    """List processes.

    STATE is running, closing (the process ended, something that it started still holds its output) or ended; of a
    terminal that knows its prompt, idle or busy. Proxies that Holdfast runs for a bridge or for a session's network
    are listed with --all and in JSON, there with "internal": true. --json prints one array; with --watch one array
    a line.
    """
    if sandbox == LOCAL and not watch and not is_running():
        # No server, no processes: looking must not start one.
        _show(_Seen(), all, as_json)
        return 0
    return run_async(_ps(sandbox, all, watch, as_json))


async def _ps(sandbox: str, all: bool, watch: bool, as_json: bool) -> int:
    async with open_exec(sandbox) as api:
        if watch and on_terminal() and not as_json:
            await _live(api, all)
        else:
            _show(await _look(api), all, as_json)
            while watch:
                await asyncio.sleep(_REFRESH_SECONDS)
                _show(await _look(api), all, as_json)
    return 0


async def _live(api: ExecApi, all: bool) -> None:
    from rich.live import Live

    with Live(auto_refresh=False, screen=True) as live:
        while True:
            table = _table(await _look(api), all)
            live.update(rich_table(HEADER, table, live.console.width), refresh=True)
            await asyncio.sleep(_REFRESH_SECONDS)


async def _look(api: ExecApi) -> _Seen:
    processes, terminals = await asyncio.gather(api.list(), api.list_terminals())
    # Asked for only if it matters: the server examines its machine for the answer.
    holdfast = (await api.info()).holdfast if any(may_be_helper(info.argv) for info in processes) else ()
    by_id = {status.terminal_id: status for status in terminals}
    return _Seen(tuple(_as_asked(info, by_id.get(info.process_id)) for info in processes), by_id, holdfast)


def _as_asked(info: ProcessInfo, terminal: TerminalStatus | None) -> ProcessInfo:
    """What somebody asked to run, and not how its shell was made to mark its prompts."""
    return info if terminal is None else msgspec.structs.replace(info, argv=terminal.argv)


def _show(seen: _Seen, all: bool, as_json: bool) -> None:
    if as_json:
        print(
            msgspec.json.encode([_object(seen, info) for info in _chosen(seen.processes, all)]).decode(), flush=True
        )
    else:
        show_table(HEADER, _table(seen, all))


def _table(seen: _Seen, all: bool) -> list[tuple[str, ...]]:
    return rows(seen.processes, all=all, now=time.time(), terminals=seen.terminals, holdfast=seen.holdfast)


def _object(seen: _Seen, info: ProcessInfo) -> dict[str, Any]:
    terminal = seen.terminals.get(info.process_id)
    more = {} if terminal is None else {"terminalState": terminal.state}
    internal = {"internal": True} if is_helper(info.argv, seen.holdfast) else {}
    return {**msgspec.to_builtins(info), **more, **internal}


def _chosen(processes: tuple[ProcessInfo, ...], all: bool) -> list[ProcessInfo]:
    chosen = [info for info in processes if all or not info.closed]
    return sorted(chosen, key=lambda info: (info.started_at, info.process_id))


def _state(info: ProcessInfo, terminal: TerminalStatus | None) -> str:
    if info.running and terminal is not None and terminal.state in ("IDLE", "BUSY"):
        return terminal.state.lower()
    return "running" if info.running else "ended" if info.closed else "closing"


def rows(
    processes: tuple[ProcessInfo, ...],
    *,
    all: bool,
    now: float,
    terminals: Mapping[str, TerminalStatus] = MappingProxyType({}),
    holdfast: tuple[str, ...] = (),
) -> list[tuple[str, ...]]:
    """The cells of the table, oldest process first."""
    return [
        (
            info.process_id,
            str(info.pid),
            _state(info, terminals.get(info.process_id)),
            age((info.exited_at or now) - info.started_at),
            "-" if info.exit_code is None else str(info.exit_code),
            amount(info.stdout_bytes + info.stderr_bytes + info.pty_bytes),
            shlex.join(info.argv),
        )
        for info in _chosen(processes, all)
        if all or not is_helper(info.argv, holdfast)
    ]
