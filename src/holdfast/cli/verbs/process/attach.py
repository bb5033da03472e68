"""`holdfast attach`: a running process or a terminal on ours: what it shows, what it prints, and our keys."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from holdfast.cli.support.command_request import STDERR, STDIN, STDOUT
from holdfast.cli.support.foreground import Detached, Foreground, SignalQueue
from holdfast.cli.support.own_terminal import draws, terminal_size
from holdfast.cli.support.sandbox_option import LOCAL, SandboxOption, open_exec
from holdfast.cli.support.terminal_view import TerminalForeground, tell_detach_key, tell_detached, too_small
from holdfast.cli.support.text import complain
from holdfast.cli.support.typed_verb import run_async
from holdfast.errors import UnknownTerminal
from holdfast.exec_api import ExecApi
from holdfast.types import ProcessInfo, TerminalStatus


def command(
    process_id: Annotated[str, typer.Argument(metavar="ID")],
    sandbox: SandboxOption = LOCAL,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Only look: no input, no signals, no size; Ctrl-C leaves.")
    ] = False,
    since: Annotated[int, typer.Option(metavar="N", min=0, help="Begin after event number N.")] = 0,
) -> int:
    """Stream a running process and type into it; exit with its code if it ends.

    Of a terminal the screen is drawn first, of a process what is kept of its output. With a terminal, it takes our
    size and follows it, Ctrl-\\ d leaves it running, and Ctrl-\\ twice sends one Ctrl-\\. Without, the first Ctrl-C
    interrupts the process, the second ends it with everything it started; Ctrl-D closes its stdin, the end of a
    pipe or file does not.
    """
    return run_async(_attach(sandbox, process_id, read_only, since))


async def _attach(sandbox: str, process_id: str, read_only: bool, since: int) -> int:
    signals = SignalQueue(detach_on_interrupt=read_only)
    with signals.listening():
        async with open_exec(sandbox) as api:
            terminal = await _terminal(api, process_id)
            info = await api.describe(process_id)
            forward = not read_only and info.running
            foreground = _foreground(api, info, terminal, signals, read_only=read_only, since=since)
            note = too_small(info.size, terminal_size(STDOUT)) if info.size is not None and read_only else ""
            try:
                if note:
                    complain(f"{process_id}: {note}")
                size = terminal_size(STDIN, STDOUT, STDERR)
                if info.tty and forward and size is not None:
                    tell_detach_key(process_id)
                    # The program draws itself anew for a terminal of our size.
                    await api.resize(process_id, size)
                return await foreground.follow(
                    after_seq=since, forward_input=forward, close_at_end=os.isatty(STDIN) and not info.tty
                )
            except Detached:
                goes_on = f"{process_id} goes on" + (f" ({note})" if note else "")
                if info.tty:
                    tell_detached(goes_on)
                else:
                    complain(f"detached; {goes_on}")
                return 0


async def _terminal(api: ExecApi, process_id: str) -> TerminalStatus | None:
    try:
        return await api.describe_terminal(process_id)
    except UnknownTerminal:
        return None


def _foreground(
    api: ExecApi,
    info: ProcessInfo,
    terminal: TerminalStatus | None,
    signals: SignalQueue,
    *,
    read_only: bool,
    since: int,
) -> Foreground:
    # Where nothing can be drawn, and from an event on that somebody names, it is a process like any other.
    if terminal is not None and not since and draws(STDOUT):
        return TerminalForeground(api, terminal, signals=signals, read_only=read_only, redraw=True)
    return Foreground(api, info.process_id, tty=info.tty, signals=signals, read_only=read_only)
