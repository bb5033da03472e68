"""A command typed at a terminal's prompt: typed, awaited by the shell's marks, stopped when its time is over.

What it printed is what the terminal showed between the mark of its start and the mark of its end. Types into a
`LiveTerminal`, and touches nothing else.
"""

from __future__ import annotations

import asyncio
import builtins
import signal
import time
from typing import TYPE_CHECKING, Final

from holdfast.errors import InvalidRequest, TimeoutError
from holdfast.model import TerminalCommandEnded
from holdfast.runtime.typing_in import keystrokes

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.runtime.terminal import LiveTerminal

#: What a shell prints when it leaves its line editor: behind it begins the output of a line that never ran.
_LINE_IS_OVER: Final = b"\x1b[?2004l\r"
#: A command whose time is over has the exit code that timeout(1) gives.
TIMED_OUT: Final = 124
#: How long a line editor has to show a new prompt after Ctrl-C, and how often it is tried: one that quotes the next
#: key takes the first for text.
INTERRUPT_SECONDS: Final = 0.5
_INTERRUPTS: Final = 3


class CommandInFlight:
    """What is known of a command that was typed."""

    def __init__(self, prompt_end: int) -> None:
        #: Where its line begins.
        self.prompt_end = prompt_end
        self.was_typed = False
        self.start: int | None = None
        self.end: int | None = None
        self.exit_code: int | None = None
        #: How many prompts there had been by its end.
        self.prompts = 0
        #: When it was typed: the marks of a short command come together, and say nothing of its time.
        self.began_at = 0.0
        self.ended_at = 0.0

    def began(self, place: int) -> None:
        # Of several commands on one line, the first.
        if self.start is None and self.was_typed:
            self.start = place

    def ended(self, place: int, exit_code: int, prompts: int) -> None:
        if self.exit_code is None:
            self.end, self.exit_code, self.prompts, self.ended_at = place, exit_code, prompts, time.monotonic()


async def run_typed(
    terminal: LiveTerminal, command: str, *, timeout: float | None, max_bytes: int
) -> TerminalCommandEnded:
    """Type a command at the prompt, and wait for the prompt to come back."""
    terminal.check_open()
    if not terminal.integration:
        raise InvalidRequest(
            f"terminal {terminal.id!r} runs {terminal.argv[0]!r}, which does not mark its prompt: "
            "type with send, and read"
        )
    keystrokes(command, paste=True)  # an error before anything is waited for
    loop = asyncio.get_running_loop()
    deadline = None if timeout is None else loop.time() + timeout
    try:
        async with asyncio.timeout_at(deadline):
            await terminal.turn.acquire()
    except builtins.TimeoutError:
        raise TimeoutError(f"terminal {terminal.id!r} is busy: other commands came before") from None
    try:
        left = None if deadline is None else max(0.0, deadline - loop.time())
        if not await terminal.wait("idle", left, 0):
            raise TimeoutError(f"terminal {terminal.id!r} is busy: no prompt within {timeout or 0.0:g} s")
        await _empty_line(terminal)
        flight = terminal.in_flight = CommandInFlight(terminal.process.logs[2].end)
        try:
            return await _run(terminal, flight, command, deadline, max_bytes)
        except asyncio.CancelledError:
            if flight.was_typed and flight.exit_code is None and not terminal.is_over:
                terminal.interrupt()
            raise
        finally:
            terminal.in_flight = None
    finally:
        terminal.turn.release()


async def _empty_line(terminal: LiveTerminal) -> None:
    """What somebody left on the line, or began over several, is not ours to run: Ctrl-C ends whatever it is."""
    if not terminal.typed and not terminal.continued:
        return
    for _ in range(_INTERRUPTS):
        if await _new_prompt(terminal):
            return
    raise InvalidRequest(f"terminal {terminal.id!r}: what stands on its line does not go away by Ctrl-C")


async def _new_prompt(terminal: LiveTerminal) -> bool:
    before = terminal.prompts
    terminal.interrupt()
    return await terminal.until(
        lambda: terminal.prompts > before and terminal.is_idle(), INTERRUPT_SECONDS, look=lambda: True
    )


async def _run(
    terminal: LiveTerminal, flight: CommandInFlight, command: str, deadline: float | None, max_bytes: int
) -> TerminalCommandEnded:
    loop = asyncio.get_running_loop()
    typed = keystrokes(command, paste=terminal.modes.bracketed_paste)
    flight.was_typed = True
    flight.began_at = time.monotonic()
    terminal.type_line(typed)

    def is_over() -> bool:
        return (flight.exit_code is not None and terminal.prompts > flight.prompts) or terminal.is_over

    def asks_for_more() -> bool:
        # A continuation prompt shows while a long text is still being read, too: the kernel tells when it is not.
        return terminal.continued and flight.start is None and terminal.wants_more()

    left = None if deadline is None else max(0.0, deadline - loop.time())
    in_time = await terminal.until(
        lambda: is_over() or asks_for_more(), left, look=lambda: terminal.continued, over_is_fine=True
    )
    if in_time and not is_over():
        await _new_prompt(terminal)
        raise InvalidRequest(f"the command is not complete, the shell asks for more of it: {_short(command)}")
    if not in_time:
        await _stop(terminal, is_over)
    return _result(terminal, flight, timed_out=not in_time, max_bytes=max_bytes)


async def _stop(terminal: LiveTerminal, is_over: Callable[[], bool]) -> None:
    """Ctrl-C as a person would, then ever harder on what runs in front. The shell itself stays."""
    terminal.interrupt()
    for number in (signal.SIGTERM, signal.SIGKILL):
        if await terminal.until(is_over, terminal.grace, over_is_fine=True):
            return
        terminal.signal_foreground(number)
    await terminal.until(is_over, terminal.grace, over_is_fine=True)


def _result(
    terminal: LiveTerminal, flight: CommandInFlight, *, timed_out: bool, max_bytes: int
) -> TerminalCommandEnded:
    log = terminal.process.logs[2]
    end = log.end if flight.end is None else flight.end
    start = _line_end(terminal, flight.prompt_end, end) if flight.start is None else flight.start
    output, truncated = log.tail(start, end, max_bytes)
    code = flight.exit_code
    if timed_out:
        code = TIMED_OUT
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
    )


def _line_end(terminal: LiveTerminal, start: int, end: int) -> int:
    """Where the echo of a line ends that never ran."""
    log = terminal.process.logs[2]
    shown = log.read(start, end - start)
    for mark in (_LINE_IS_OVER, b"\r\n"):
        place = shown.find(mark)
        if place >= 0:
            return start + place + len(mark)
    return start


def _short(command: str) -> str:
    first = command.strip().splitlines()[0]
    return repr(first if len(first) <= 60 else f"{first[:60]}…")
