"""Shows a terminal of the sandbox on our own: draws its screen, copies its output, and forwards our keys.

The screen is drawn from the retained output, and the copy begins at exactly that position. Modes that the program
set in our terminal are reset at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Final

from holdfast.cli.support.byte_streams import ByteSink
from holdfast.cli.support.command_request import STDERR, STDIN, STDOUT
from holdfast.cli.support.exit_codes import BROKEN_PIPE
from holdfast.cli.support.foreground import Foreground, SignalQueue
from holdfast.cli.support.own_terminal import DETACH_NAME, draws, terminal_size
from holdfast.cli.support.terminal_modes import ShownModes
from holdfast.cli.support.text import complain
from holdfast.client.terminal import Terminal
from holdfast.errors import TerminalClosed
from holdfast.exec_api import ExecApi
from holdfast.types import TerminalEvent, TerminalSize, TerminalStatus

#: Bytes of one read: on a slow terminal, up to this much output precedes the effect of a key.
_READ_BYTES: Final = 256 * 1024
#: How long one read waits for output.
_POLL_SECONDS: Final = 30.0
#: For resetting our own terminal. A terminal that no longer accepts output must not block the end.
_LEAVE_SECONDS: Final = 2.0
#: How long to wait for a shell to read its profile before input from a pipe is typed anyway.
_READY_SECONDS: Final = 10.0
_CLOSED_STATES: Final = ("CLOSED", "ERROR")
_CLEAR: Final = b"\x1b[H\x1b[2J"


class ShownOutput:
    """Our stdout as the screen of a remote terminal or a recording."""

    def __init__(self) -> None:
        self._sink = ByteSink(STDOUT)
        self._modes = ShownModes()
        self._has_title = False

    async def write(self, data: bytes) -> None:
        # First, because a cancelled write may have written a part.
        self._modes.feed(data)
        await self._sink.write(data)

    async def clear(self, rows: int = 1) -> None:
        """Clear the screen. With `rows`, the lines above the cursor first scroll into the history."""
        await self._sink.write(self._modes.reset() + b"\r\n" * (rows - 1) + _CLEAR)

    async def set_title(self, text: str) -> None:
        """Show a text in the window's title, which `leave` restores."""
        if not self._modes.unfinished:
            keep = b"" if self._has_title else b"\x1b[22;2t"
            self._has_title = True
            await self._sink.write(keep + b"\x1b]2;%s\x07" % text.encode())

    async def leave(self) -> None:
        """Reset our terminal, if stdout is one."""
        reset = self._modes.reset() + (b"\x1b[23;2t" if self._has_title else b"")
        try:
            if reset and os.isatty(STDOUT):
                with contextlib.suppress(TimeoutError, OSError):
                    async with asyncio.timeout(_LEAVE_SECONDS):
                        await self._sink.write(reset)
        finally:
            self._sink.close()


class TerminalForeground(Foreground):
    """Follows one terminal until its program ends. `redraw` draws its screen first, instead of all retained output.

    With `owner`, the terminal is closed when the reader of our stdout closes it.
    """

    def __init__(
        self,
        api: ExecApi,
        status: TerminalStatus,
        *,
        signals: SignalQueue,
        read_only: bool = False,
        redraw: bool = False,
        owner: bool = False,
    ) -> None:
        super().__init__(api, status.terminal_id, tty=True, signals=signals, read_only=read_only)
        self._terminal = Terminal(api, status, asyncio.create_task)
        self._redraw = redraw
        self._owner = owner

    async def _copy_output(self, after_seq: int) -> int:
        out = ShownOutput()
        try:
            return await self._show(out)
        except BrokenPipeError:
            if self._owner:
                await self._terminal.close(grace=1.0)
            return BROKEN_PIPE
        finally:
            await out.leave()
            await self._terminal.release()

    async def _show(self, out: ShownOutput) -> int:
        token = await self._draw(out) if self._redraw else 0
        wait = 0.0
        while True:
            found = await self._api.read_terminal(self._id, since=token, wait=wait, max_bytes=_READ_BYTES)
            token, wait = found.token, _POLL_SECONDS
            for event in found.events:
                if event.type == "output":
                    await out.write(event.payload)
                elif event.type == "state" and event.state in _CLOSED_STATES:
                    return event.exit_code or 0
                elif event.type == "gap":
                    if self._redraw or draws(STDOUT):
                        # Output was lost, so only the whole screen is correct.
                        token, wait = await self._draw(out), 0.0
                        break
                    _report_gap(event)
            if not found.events and (found.closed or found.state in _CLOSED_STATES):
                # The terminal closed before the position of the first read.
                return (await self._terminal.wait()).exit_code

    async def _draw(self, out: ShownOutput) -> int:
        drawn, token = await self._terminal.redraw()
        size = terminal_size(STDOUT, STDIN, STDERR) or self._terminal.size
        await out.clear(size.rows)
        await out.write(drawn)
        return token

    async def _forward_input(self, close_at_end: bool) -> None:
        if not os.isatty(STDIN):
            # A pipe has its input ready at once, and a shell echoes input twice that comes before its first prompt.
            await self._wait_until_it_reads(_READY_SECONDS)
        await super()._forward_input(close_at_end)

    async def _end_input(self) -> None:
        # A line editor recognises the end-of-file character only while it is reading.
        await self._wait_until_it_reads(None)
        await super()._end_input()

    async def _wait_until_it_reads(self, timeout: float | None) -> None:
        # The program may end before it has read everything.
        with contextlib.suppress(TerminalClosed):
            if (await self._terminal.describe()).awaiting_input is not None:
                await self._api.wait_terminal(self._id, "awaitingInput", timeout=timeout)


def _report_gap(event: TerminalEvent) -> None:
    complain(f"{event.length} bytes of output at offset {event.offset} are no longer kept")


def show_detach_key(terminal_id: str) -> None:
    """Print how to detach, if this program runs on a terminal."""
    if os.isatty(STDERR) and os.isatty(STDIN):
        complain(f"{DETACH_NAME} leaves {terminal_id} running")


def report_detached(message: str) -> None:
    """Print that this program detached, on a new line of the terminal."""
    if os.isatty(STDOUT):
        os.write(STDOUT, b"\r\n")
    complain(f"detached; {message}")


def too_small(theirs: TerminalSize, ours: TerminalSize | None) -> str:
    """Return a note about a terminal that is larger than ours; empty if it fits."""
    if ours is None or (ours.rows >= theirs.rows and ours.cols >= theirs.cols):
        return ""
    return (
        f"it has {theirs.rows} rows and {theirs.cols} columns, this terminal {ours.rows} and {ours.cols}: "
        "not all of it can be shown"
    )
