"""`holdfast attach`: a running process on our terminal: what it printed so far, what it prints, and our keys."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from holdfast.cli.foreground import STDERR, STDIN, STDOUT, Detached, Foreground, SignalQueue
from holdfast.cli.own_terminal import DETACH_NAME, terminal_size
from holdfast.cli.sandbox_option import LOCAL, SandboxOption, open_exec
from holdfast.cli.typed_verb import complain, run_async


def command(
    process_id: Annotated[str, typer.Argument(metavar="ID")],
    sandbox: SandboxOption = LOCAL,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Only look: no input, no signals; Ctrl-C leaves.")
    ] = False,
    since: Annotated[int, typer.Option(metavar="N", min=0, help="Begin after event number N.")] = 0,
) -> int:
    """Stream a running process and type into it; exit with its code if it ends.

    What is kept of its output comes first. On a process with a terminal, Ctrl-\\ d leaves it running, Ctrl-\\ twice
    sends one Ctrl-\\. On others the first Ctrl-C interrupts the process, the second ends it with everything it
    started; Ctrl-D closes its stdin, the end of a pipe or file does not.
    """
    return run_async(_attach(sandbox, process_id, read_only, since))


async def _attach(sandbox: str, process_id: str, read_only: bool, since: int) -> int:
    signals = SignalQueue(detach_on_interrupt=read_only)
    with signals.listening():
        async with open_exec(sandbox) as api:
            info = await api.describe(process_id)
            foreground = Foreground(api, process_id, tty=info.tty, signals=signals)
            forward = not read_only and info.running
            size = terminal_size(STDIN, STDOUT, STDERR)
            try:
                if info.tty and forward and size is not None:
                    if os.isatty(STDERR):
                        complain(f"{DETACH_NAME} leaves {process_id} running")
                    # The program draws itself anew for a terminal of our size.
                    await api.resize(process_id, size)
                return await foreground.follow(
                    after_seq=since, forward_input=forward, close_at_end=os.isatty(STDIN) and not info.tty
                )
            except Detached:
                complain(f"detached; {process_id} goes on")
                return 0
