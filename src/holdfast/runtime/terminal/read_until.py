"""Reads a terminal once a condition holds: a prompt, a program that reads input, a text, an amount of output.

The runtime has the output, the state and the kernel's view of the terminal in one process, so a remote caller needs
one request instead of one for each. Reads a `LiveTerminal`, and touches nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from holdfast.types import ReadCondition, ReadOutcome, ReadUntil, TerminalRead

if TYPE_CHECKING:
    from holdfast.runtime.terminal.live import LiveTerminal

#: How long nothing must happen before the kernel is queried for a reader of input, and the longest time between two
#: queries. Most programs print or exit before they read, and a query reads a few files of /proc.
QUIET_SECONDS: Final = (0.02, 0.1)
#: How much output is searched before the event loop runs again.
_SEARCH_BYTES: Final = 1024 * 1024


class _TextSearch:
    """Finds a text in the output after an offset; each byte is searched about once."""

    def __init__(self, terminal: LiveTerminal, text: str, offset: int) -> None:
        self._log = terminal.process.logs[2]
        self._text = text.encode()
        self._offset = offset
        self.found = False

    async def catch_up(self) -> None:
        """Search the output that is there."""
        log, overlap = self._log, len(self._text) - 1
        while not self.found and log.end - self._offset > overlap:
            if log.lost_start <= self._offset < log.lost_end:
                self._offset = log.lost_end
            data = log.read(self._offset, _SEARCH_BYTES + overlap)
            if len(data) > overlap:
                self.found = self._text in data
                self._offset += len(data) - overlap
            elif self._offset < log.lost_end:
                self._offset = log.lost_end  # the lost range follows
            else:
                return
            await asyncio.sleep(0)


async def read_terminal(
    terminal: LiveTerminal,
    since: int,
    max_bytes: int,
    wait: float,
    *,
    timing: bool = False,
    marks: bool = False,
    until: ReadUntil | None = None,
    gather: float = 0.0,
) -> TerminalRead:
    """Wait up to `wait` seconds for anything, or for one of the conditions, and read after a position.

    With `gather`, a read that waits for anything waits that much longer for more, unless it can return no more.
    """
    outcome = None
    if until is not None:
        outcome = await _wait_until(terminal, until, since, wait)
    elif wait > 0:
        deadline = asyncio.get_running_loop().time() + wait
        await _grown(terminal, since + 1, deadline)
        if gather > 0 and terminal.token > since:
            await _grown(terminal, since + max_bytes, min(deadline, asyncio.get_running_loop().time() + gather))
    return replace(terminal.read(since, max_bytes, timing=timing, marks=marks), outcome=outcome)


async def _grown(terminal: LiveTerminal, position: int, deadline: float) -> None:
    """Wait until the terminal has reached a position or has ended."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            while terminal.token < position and not terminal.process.closed:
                await terminal.process.changed()


async def _wait_until(terminal: LiveTerminal, until: ReadUntil, since: int, wait: float) -> ReadOutcome:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait
    search = _TextSearch(terminal, until.text, terminal.timeline.offset_of(since)) if until.text else None
    shortest, longest = QUIET_SECONDS
    pause, polls = shortest, until.input or until.prompt
    # The terminal has not reached a position above its own, so there is nothing to wait for.
    while (left := deadline - loop.time()) > 0 and since <= terminal.token and not terminal.process.closed:
        if search is not None:
            await search.catch_up()
        if _reached(terminal, until, since, search) is not None:
            break
        try:
            async with asyncio.timeout(min(left, pause) if polls else left):
                await terminal.process.changed()
            pause = shortest
        except TimeoutError:
            if until.input and terminal.is_input_awaited() and _runs_program(terminal):
                break
            pause = min(2 * pause, longest)
    if until.settle_ms and _reached(terminal, until, since, search) == "size" and _asks(terminal):
        settle = min(until.settle_ms / 1000, deadline - loop.time())
        await terminal.until(lambda: terminal.is_input_awaited() or terminal.is_over, settle, polls=lambda: True)
    if search is not None:
        await search.catch_up()
    idle = terminal.is_idle()
    status = terminal.status(look=until.look or _runs_program(terminal))
    reached = _reached(terminal, until, since, search)
    if until.input and status.awaiting_input and _runs_program(terminal):
        reached = "input"
    return ReadOutcome(reached, idle, terminal.unfinished_line(), status)


def _reached(
    terminal: LiveTerminal, until: ReadUntil, since: int, search: _TextSearch | None
) -> ReadCondition | None:
    if until.prompt and terminal.is_idle():
        return "prompt"
    if search is not None and search.found:
        return "text"
    if until.size and terminal.token - since >= until.size:
        return "size"
    return None


def _runs_program(terminal: LiveTerminal) -> bool:
    """Whether a program may read input. A continuation prompt of the shell is an event of its own."""
    return terminal.state in ("BUSY", "RUNNING") and not terminal.continuation


def _asks(terminal: LiveTerminal) -> bool:
    """Whether the last output may be the question of a program that is about to read."""
    return _runs_program(terminal) and bool(terminal.unfinished_line())
