"""`holdfast attach`: shows a running process or terminal on ours, and forwards our keys."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from holdfast.cli.support.command_request import STDERR, STDIN, STDOUT
from holdfast.cli.support.foreground import ClientDetached, Foreground, SignalQueue
from holdfast.cli.support.own_terminal import draws, terminal_size
from holdfast.cli.support.sandbox_option import LOCAL, SandboxOption, open_exec
from holdfast.cli.support.terminal_view import TerminalForeground, report_detached, show_detach_key, too_small
from holdfast.cli.support.text import complain
from holdfast.cli.support.typed_verb import run_async
from holdfast.errors import UnknownTerminal
from holdfast.exec_api import ExecApi
from holdfast.types import ProcessInfo, TerminalStatus


def command(
    process_id: Annotated[str, typer.Argument(metavar="ID")],
    sandbox: SandboxOption = LOCAL,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Send no input, no signals and no size; Ctrl-C leaves.")
    ] = False,
    since: Annotated[int, typer.Option(metavar="N", min=0, help="Begin after event number N.")] = 0,
) -> int:
    """Stream a running process and type into it; exit with its code if it ends.

    The screen of a terminal is drawn first, or the retained output of a process printed. A terminal gets our size,
    also when it changes; Ctrl-\\ d leaves it running, and Ctrl-\\ twice sends one Ctrl-\\. Of a process without a
    terminal, the first Ctrl-C interrupts it, the second ends it with everything it started; Ctrl-D closes its
    stdin, the end of a pipe or file does not.
    """
    return run_async(_attach(sandbox, process_id, read_only, since))


async def _attach(sandbox: str, process_id: str, read_only: bool, since: int) -> int:
    signals = SignalQueue(detach_on_interrupt=read_only)
    with signals.listening():
        async with open_exec(sandbox, ids=[process_id]) as api:
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
                    show_detach_key(process_id)
                    # The program redraws itself for a terminal of our size.
                    await api.resize(process_id, size)
                return await foreground.follow(
                    after_seq=since, forward_input=forward, close_at_end=os.isatty(STDIN) and not info.tty
                )
            except ClientDetached:
                message = f"{process_id} keeps running" + (f" ({note})" if note else "")
                if info.tty:
                    report_detached(message)
                else:
                    complain(f"detached; {message}")
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
    # Without a terminal to draw on, or with --since, a terminal is followed like any other process.
    if terminal is not None and not since and draws(STDOUT):
        return TerminalForeground(api, terminal, signals=signals, read_only=read_only, redraw=True)
    return Foreground(api, info.process_id, tty=info.tty, signals=signals, read_only=read_only)
