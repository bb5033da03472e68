"""A command typed at a terminal's prompt: typed, awaited by the shell's marks, stopped after its timeout.

Its output is the terminal's output between the mark of its start and the mark of its end. Types into a
`LiveTerminal`, and touches nothing else.
"""

from __future__ import annotations

import asyncio
import builtins
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.errors import EXIT_TIMED_OUT, InvalidRequest, SandboxError, TimeoutError
from holdfast.runtime.durability.records import RunTyped
from holdfast.runtime.terminal.paste import keystrokes
from holdfast.types import TerminalCommandEnded

if TYPE_CHECKING:
    from holdfast.runtime.terminal.live import LiveTerminal

#: Printed by a shell that leaves its line editor; the output of a line that never ran follows.
_LINE_IS_OVER: Final = b"\x1b[?2004l\r"
#: How long a line editor has to show a new prompt after Ctrl-C, and how often it is typed: an editor that quotes
#: the next key takes the first for text.
INTERRUPT_SECONDS: Final = 0.5
_INTERRUPTS: Final = 3


class CommandInFlight:
    """A command that was typed: its place in the output, its times and its exit code."""

    def __init__(self, prompt_end: int, run_id: str) -> None:
        #: The offset of its line.
        self.prompt_end = prompt_end
        self.run_id = run_id
        self.was_typed = False
        self.start: int | None = None
        self.end: int | None = None
        self.exit_code: int | None = None
        #: The number of prompts before its end.
        self.prompts = 0
        #: When it was typed: the marks of a short command come in one read, so they do not give its duration.
        self.began_at = 0.0
        self.ended_at = 0.0

    def began(self, at: int) -> str:
        """Note the start of a command, and return the id of the run if the command belongs to it."""
        if not self.was_typed or self.exit_code is not None:
            return ""
        # Of several commands on one line, the first.
        if self.start is None:
            self.start = at
        return self.run_id

    def ended(self, at: int, exit_code: int, prompts: int) -> None:
        if self.exit_code is None:
            self.end, self.exit_code, self.prompts, self.ended_at = at, exit_code, prompts, time.monotonic()


#: Events of the shell: one of them after a recorded line means that the line was typed.
_SHELL_EVENTS: Final = frozenset(("command", "ended", "continuation", "promptStart", "prompt"))
#: Records that a command is about to be typed.
NoteRun = Callable[[RunTyped], None]


async def run_typed(
    terminal: LiveTerminal,
    command: str,
    *,
    timeout: float | None,
    max_bytes: int,
    run_id: str = "",
    note: NoteRun | None = None,
) -> TerminalCommandEnded:
    """Type a command at the prompt and wait for the next prompt; `note` records it first."""
    terminal.check_open()
    if not terminal.integration:
        raise InvalidRequest(
            f"terminal {terminal.id!r} runs {terminal.argv[0]!r}, which does not mark its prompt: "
            "type with send, and read"
        )
    keystrokes(command, paste=True)  # raises before the wait
    loop = asyncio.get_running_loop()
    deadline = None if timeout is None else loop.time() + timeout
    try:
        async with asyncio.timeout_at(deadline):
            await terminal.turn.acquire()
    except builtins.TimeoutError:
        raise TimeoutError(f"terminal {terminal.id!r} is busy: other commands came before") from None
    try:
        left = None if deadline is None else max(0.0, deadline - loop.time())
        if not await terminal.wait_for_line(left):
            raise TimeoutError(f"terminal {terminal.id!r} is busy: no prompt within {timeout or 0.0:g} s")
        await _empty_line(terminal)
        flight = CommandInFlight(terminal.process.logs[2].end, run_id)
        flight.began_at = time.monotonic()
        events, began_at = terminal.timeline.count, flight.began_at
        run = RunTyped(terminal.id, run_id, command, flight.prompt_end, events, began_at, deadline, max_bytes)
        if note is not None:
            note(run)
        return await _run_in_flight(terminal, flight, run)
    finally:
        terminal.turn.release()


def recover_flight(terminal: LiveTerminal, run: RunTyped) -> CommandInFlight | None:
    """A command that an earlier server typed or was about to type, by the events and the input of its terminal.

    None if the events are no longer kept.
    """
    events = terminal.timeline.after(run.events)
    if events is None:
        return None
    flight = CommandInFlight(run.prompt_end, run.run_id)
    flight.began_at = run.at
    # The marks of a line that was typed may be in a read that the earlier server did not store.
    flight.was_typed = terminal.process.input.has_taken(_write_id(run))
    for event in events:
        if event.type in _SHELL_EVENTS:
            flight.was_typed = True
        if event.type == "command":
            flight.began(event.offset)
        elif event.type == "ended" and event.exit_code is not None:
            flight.ended(event.offset, event.exit_code, terminal.prompts)
        elif event.type == "prompt" and flight.exit_code is not None:
            flight.prompts = -1  # the prompt after it was shown
    return flight


async def resume_run(terminal: LiveTerminal, flight: CommandInFlight | None, run: RunTyped) -> TerminalCommandEnded:
    """Wait for the end of a command of an earlier server."""
    if flight is None:
        raise SandboxError(
            f"the server was restarted after {_short(run.command)} was typed: read what it printed in the terminal"
        )
    if flight.exit_code is not None:
        # Its end may have been in a read that was printed again: then the flight is the terminal's.
        if terminal.in_flight is flight:
            terminal.in_flight = None
        return await _run(terminal, flight, run)
    async with terminal.turn:
        return await _run_in_flight(terminal, flight, run)


async def _run_in_flight(terminal: LiveTerminal, flight: CommandInFlight, run: RunTyped) -> TerminalCommandEnded:
    terminal.in_flight = flight
    try:
        return await _run(terminal, flight, run)
    except asyncio.CancelledError:
        if flight.was_typed:
            # In another task: before Python 3.11.4, `asyncio.timeout` does not end a wait of a cancelled one.
            await asyncio.create_task(_interrupt(terminal, flight))
        raise
    finally:
        terminal.in_flight = None


async def _interrupt(terminal: LiveTerminal, flight: CommandInFlight) -> None:
    """Type Ctrl-C until it has reached the program of a command, which may ignore it, or the command has ended.

    bash disregards an interrupt that arrives between its start of a program and the program's own group in the
    foreground; the child disregards it until it has executed the program.
    """

    def is_over() -> bool:
        return flight.exit_code is not None or terminal.is_over

    for _ in range(_INTERRUPTS):
        if is_over():
            return
        has_program = terminal.runs_program()
        terminal.interrupt()
        if has_program:
            return
        await terminal.until(
            lambda: is_over() or terminal.runs_program(), terminal.grace, polls=lambda: True, over_is_fine=True
        )


async def _empty_line(terminal: LiveTerminal) -> None:
    """Type Ctrl-C if text is on the line, a command is incomplete, or an interrupt has had no effect yet."""
    if not terminal.typed and not terminal.continuation:
        if terminal.interrupted:
            # The shell blocks in read(2) by now, where an interrupt takes effect at once. A shell that ignores
            # interrupts shows no new prompt, and has no interrupt pending.
            await _new_prompt(terminal)
        return
    for _ in range(_INTERRUPTS):
        if await _new_prompt(terminal):
            return
    raise InvalidRequest(f"terminal {terminal.id!r}: Ctrl-C does not remove the text on its line")


async def _new_prompt(terminal: LiveTerminal) -> bool:
    before = terminal.prompts
    terminal.interrupt()
    return await terminal.until(
        lambda: terminal.prompts > before and terminal.is_idle(), INTERRUPT_SECONDS, polls=lambda: True
    )


async def _run(terminal: LiveTerminal, flight: CommandInFlight, run: RunTyped) -> TerminalCommandEnded:
    loop = asyncio.get_running_loop()
    if not flight.was_typed and not terminal.is_over:
        flight.was_typed = True
        terminal.type_line(keystrokes(run.command, paste=terminal.modes.bracketed_paste), _write_id(run))

    def is_over() -> bool:
        return (flight.exit_code is not None and terminal.prompts > flight.prompts) or terminal.is_over

    def is_incomplete() -> bool:
        # A continuation prompt is also shown while a long text is still being read: the kernel is queried.
        return terminal.continuation and flight.start is None and terminal.is_input_awaited()

    left = None if run.deadline is None else max(0.0, run.deadline - loop.time())
    in_time = await terminal.until(
        lambda: is_over() or is_incomplete(), left, polls=lambda: terminal.continuation, over_is_fine=True
    )
    if in_time and not is_over():
        await _new_prompt(terminal)
        raise InvalidRequest(f"the command is not complete, the shell waits for more of it: {_short(run.command)}")
    if not in_time:
        await _stop(terminal, is_over)
    return _result(terminal, flight, run, timed_out=not in_time)


async def _stop(terminal: LiveTerminal, is_over: Callable[[], bool]) -> None:
    """Stop the foreground by Ctrl-C, TERM and KILL, in this order. The shell itself stays."""
    terminal.interrupt()
    for number in (signal.SIGTERM, signal.SIGKILL):
        if await terminal.until(is_over, terminal.grace, over_is_fine=True):
            return
        terminal.signal_foreground(number)
    await terminal.until(is_over, terminal.grace, over_is_fine=True)


def _result(
    terminal: LiveTerminal, flight: CommandInFlight, run: RunTyped, *, timed_out: bool
) -> TerminalCommandEnded:
    log = terminal.process.logs[2]
    end = log.end if flight.end is None else flight.end
    if flight.start is not None:
        start = flight.start
    elif run.command.strip():
        start = _line_end(terminal, flight.prompt_end, end)
    else:
        start = end  # nothing runs; zsh prints here, to begin its prompt on a new line
    output, truncated = log.tail(start, end, run.max_bytes)
    code = flight.exit_code
    if timed_out:
        code = EXIT_TIMED_OUT
    elif code is None:
        status = terminal.process.status
        code = status.exit_code if status is not None else 0
    return TerminalCommandEnded(
        exit_code=code,
        duration=(flight.ended_at or time.monotonic()) - flight.began_at,
        output=output,
        start_token=terminal.timeline.position_of(start),
        end_token=terminal.timeline.position_of(end),
        timed_out=timed_out,
        truncated=truncated,
        state=terminal.state,
        reason=terminal.reason,
        prompt=terminal.prompt,
        changes=terminal.changes,
        cwd=terminal.cwd,
    )


def _line_end(terminal: LiveTerminal, start: int, end: int) -> int:
    """The offset of the end of the echo of a line that never ran."""
    log = terminal.process.logs[2]
    shown = log.read(start, end - start)
    for mark in (_LINE_IS_OVER, b"\r\n"):
        at = shown.find(mark)
        if at >= 0:
            return start + at + len(mark)
    return start


def _write_id(run: RunTyped) -> str:
    """The id under which the line of a command is typed, once; empty if the command has no id."""
    return run.run_id and f"run {run.run_id}"


def _short(command: str) -> str:
    first = command.strip().partition("\n")[0]
    return repr(first if len(first) <= 60 else f"{first[:60]}…")
