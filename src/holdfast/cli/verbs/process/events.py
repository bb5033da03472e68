"""`holdfast events`: prints starts and ends of processes, terminals and shells.

`LifeCycle` is pure: it compares the lists of a server with those of the poll before.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Iterable
from typing import Annotated, Final, Literal, get_args

import msgspec
import typer

from holdfast.cli.support.moments import moment, stamp
from holdfast.cli.support.sandbox_option import LOCAL, JsonOption, SandboxOption, open_exec
from holdfast.cli.support.text import one_line
from holdfast.cli.support.typed_verb import run_async
from holdfast.exec_api import ExecApi
from holdfast.types import ProcessInfo, ShellStatus, TerminalStatus

Kind = Literal["process", "terminal", "shell"]
#: As `ps --watch`. The events have the times of the server, so a poll delays an event and does not change it.
_POLL_SECONDS: Final = 1.0


class LifeEvent(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The start or the end of a process, a terminal or a shell."""

    time: float
    event: Literal["start", "end"]
    kind: Kind
    id: str
    pid: int
    argv: tuple[str, ...] = ()
    exit_code: int | None = None
    signal: str | None = None

    def line(self) -> str:
        """Return the event as one line of text."""
        if self.event == "start":
            detail = one_line(shlex.join(self.argv))
        else:
            detail = "exit -" if self.exit_code is None else f"exit {self.exit_code}"
            detail += f" ({self.signal})" if self.signal else ""
        return f"{stamp(self.time)}  {self.event}  {self.kind}  {self.id}  pid {self.pid}  {detail}"


class LifeCycle:
    """The events between two polls, in the order of their times."""

    def __init__(self) -> None:
        #: By kind, id and start: an id may be used again.
        self._started: set[tuple[str, str, float]] = set()
        self._ended: set[tuple[str, str, float]] = set()

    def update(
        self,
        processes: Iterable[ProcessInfo],
        terminals: Iterable[TerminalStatus],
        shells: Iterable[ShellStatus],
        now: float,
    ) -> list[LifeEvent]:
        """Return the starts and ends that the last call has not returned."""
        commands = {status.terminal_id: status.argv for status in terminals}
        found: list[LifeEvent] = []
        started: set[tuple[str, str, float]] = set()
        ended: set[tuple[str, str, float]] = set()
        for info in processes:
            id, kind = info.process_id, "terminal" if info.process_id in commands else "process"
            key = ("process", id, info.started_at)
            started.add(key)
            if key not in self._started:
                argv = commands.get(id, info.argv)
                found.append(LifeEvent(info.started_at, "start", _kind(kind), id, info.pid, argv))
            if info.running:
                continue
            ended.add(key)
            if key not in self._ended:
                at = now if info.exited_at is None else info.exited_at
                found.append(LifeEvent(at, "end", _kind(kind), id, info.pid, (), info.exit_code, info.signal))
        for status in shells:
            key = ("shell", status.shell_id, status.started_at)
            started.add(key)
            if key not in self._started:
                shell = (status.path,)
                found.append(LifeEvent(status.started_at, "start", "shell", status.shell_id, status.pid, shell))
            if status.state != "closed":
                continue
            ended.add(key)
            if key not in self._ended:
                found.append(LifeEvent(now, "end", "shell", status.shell_id, status.pid, (), status.exit_code))
        self._started, self._ended = started, ended
        return sorted(found, key=lambda event: event.time)


def _kind(name: str) -> Kind:
    return "terminal" if name == "terminal" else "process"


def command(
    sandbox: SandboxOption = LOCAL,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Also earlier ones, since 10m, 2h or 3d ago, a date, @SECONDS."),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Leave at this time.")] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="Only of process, terminal or shell; may be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Print starts and ends of processes, terminals and shells as they happen, until Ctrl-C.

    The server is polled each second; the times are those of the events. --json prints an object a line.
    """
    unknown = set(kind or ()) - set(get_args(Kind))
    if unknown:
        raise typer.BadParameter(f"--kind {min(unknown)}: one of {', '.join(get_args(Kind))}.")
    now = time.time()
    first = now if since is None else moment("--since", since, now)
    last = None if until is None else moment("--until", until, now)
    return run_async(_events(sandbox, first, last, tuple(kind or ()), as_json))


async def _events(sandbox: str, since: float, until: float | None, kinds: tuple[str, ...], as_json: bool) -> int:
    async with open_exec(sandbox) as api:
        life = LifeCycle()
        while True:
            polled = time.time()
            for event in await _poll(api, life):
                wanted = event.time >= since and (until is None or event.time <= until)
                if wanted and (not kinds or event.kind in kinds):
                    print(msgspec.json.encode(event).decode() if as_json else event.line(), flush=True)
            if until is not None and polled >= until:
                return 0
            left = _POLL_SECONDS if until is None else min(_POLL_SECONDS, until - polled)
            await asyncio.sleep(max(0.0, left))


async def _poll(api: ExecApi, life: LifeCycle) -> list[LifeEvent]:
    processes, terminals, shells = await asyncio.gather(api.list(), api.list_terminals(), api.list_shells())
    return life.update(processes, terminals, shells, time.time())
