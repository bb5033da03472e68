"""A terminal of the sandbox on our own terminal: its screen drawn anew, then its output as it comes, and our keys.

The screen is made from what the sandbox keeps, and the output goes on at exactly the position that it was made at.
What the program inside has switched on in our terminal is switched off when we leave.
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

#: What one read asks for: on a slow terminal, this much stands between a key and its effect.
_READ_BYTES: Final = 256 * 1024
#: How long one read waits for something to come.
_POLL_SECONDS: Final = 30.0
#: How long our own terminal may take to be put back. One that takes nothing any more must not hold us.
_LEAVE_SECONDS: Final = 2.0
#: How long a shell has to read its profile before input from a pipe is typed in any case.
_READY_SECONDS: Final = 10.0
_OVER: Final = ("CLOSED", "ERROR")
_CLEAR: Final = b"\x1b[H\x1b[2J"


class ShownOutput:
    """Our stdout as the screen of a terminal that somebody else drives."""

    def __init__(self) -> None:
        self._sink = ByteSink(STDOUT)
        self._modes = ShownModes()
        self._told = False

    async def write(self, data: bytes) -> None:
        # Noted first: half of it may be out when the write is cancelled.
        self._modes.feed(data)
        await self._sink.write(data)

    async def clear(self, rows: int = 1) -> None:
        """An empty screen. Of a screen with so many rows, what stands above the cursor moves into its history."""
        leaving = self._modes.leaving()
        self._modes.left()
        await self._sink.write(leaving + b"\r\n" * (rows - 1) + _CLEAR)

    async def tell(self, text: str) -> None:
        """Say something in the window's title, which is put back in the end."""
        if not self._modes.unfinished:
            keep = b"" if self._told else b"\x1b[22;2t"
            self._told = True
            await self._sink.write(keep + b"\x1b]2;%s\x07" % text.encode())

    async def leave(self) -> None:
        """Put our terminal back, if it is one."""
        leaving = self._modes.leaving() + (b"\x1b[23;2t" if self._told else b"")
        self._modes.left()
        try:
            if leaving and os.isatty(STDOUT):
                with contextlib.suppress(TimeoutError, OSError):
                    async with asyncio.timeout(_LEAVE_SECONDS):
                        await self._sink.write(leaving)
        finally:
            self._sink.close()


class TerminalForeground(Foreground):
    """Follows one terminal until its program ends. With `redraw` its screen comes first, else all that is kept.

    If we are its `owner`, it ends when nobody reads our stdout any more.
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
                elif event.type == "state" and event.state in _OVER:
                    return event.exit_code or 0
                elif event.type == "gap":
                    if self._redraw or draws(STDOUT):
                        # We were too slow. Where something is missing, only the whole screen is right.
                        token, wait = await self._draw(out), 0.0
                        break
                    _tell_gap(event)
            if not found.events and (found.closed or found.state in _OVER):
                # It was over before the position that we began at.
                return (await self._terminal.wait()).exit_code

    async def _draw(self, out: ShownOutput) -> int:
        drawn, token = await self._terminal.redraw()
        size = terminal_size(STDOUT, STDIN, STDERR) or self._terminal.size
        await out.clear(size.rows)
        await out.write(drawn)
        return token

    async def _pass_on_input(self, close_at_end: bool) -> None:
        if not os.isatty(STDIN):
            # A pipe types at once. What a shell gets before its first prompt is shown twice.
            await self._until_it_reads(_READY_SECONDS)
        await super()._pass_on_input(close_at_end)

    async def _end_input(self) -> None:
        # A line editor takes the end-of-file character for one only when it reads it itself.
        await self._until_it_reads(None)
        await super()._end_input()

    async def _until_it_reads(self, timeout: float | None) -> None:
        # It may end before, without having read everything; that is its right, and its output tells.
        with contextlib.suppress(TerminalClosed):
            if (await self._terminal.describe()).awaiting_input is not None:
                await self._api.wait_terminal(self._id, "awaitingInput", timeout=timeout)


def _tell_gap(event: TerminalEvent) -> None:
    complain(f"{event.length} bytes of output at offset {event.offset} are no longer kept")


def tell_detach_key(terminal_id: str) -> None:
    """How to leave, if somebody is there to read it."""
    if os.isatty(STDERR) and os.isatty(STDIN):
        complain(f"{DETACH_NAME} leaves {terminal_id} running")


def tell_detached(message: str) -> None:
    """We left in the middle of somebody's line."""
    if os.isatty(STDOUT):
        os.write(STDOUT, b"\r\n")
    complain(f"detached; {message}")


def too_small(theirs: TerminalSize, ours: TerminalSize | None) -> str:
    """What to say about a terminal that does not fit ours; empty if it does."""
    if ours is None or (ours.rows >= theirs.rows and ours.cols >= theirs.cols):
        return ""
    return (
        f"it has {theirs.rows} rows and {theirs.cols} columns, this terminal {ours.rows} and {ours.cols}: "
        "not all of it can be shown"
    )
