"""Plays the recording of a terminal on ours, with its timing, and keys that pause, step, seek and leave.

Only the recorded output is written; the position is shown in the window's title. Seeking writes all output up to
the new position at once, backwards from the beginning of the recording.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Final

from holdfast.cli.support.byte_streams import ByteSource
from holdfast.cli.support.command_request import STDIN
from holdfast.cli.support.terminal_view import ShownOutput
from holdfast.client.screen.asciicast import OUTPUT, CastEvent

#: Seconds of the recording that an arrow key skips.
SEEK_SECONDS: Final = 5.0
SLOWEST, FASTEST = 1 / 64, 64.0

#: Our terminal answers queries in the recorded output: such an answer is read as one key, and ignored.
_KEY: Final = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|\x1bO.|\x1b[^\[\]OPX^_\x1b]|[^\x1b]",
    re.DOTALL,
)


class KeyReader:
    """Splits typed bytes into keys, however the bytes are split."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, typed: bytes) -> list[bytes]:
        data = self._held + typed
        keys, at = [], 0
        while (match := _KEY.match(data, at)) is not None:
            keys.append(match[0])
            at = match.end()
        # An answer without an end would hide every key after it.
        self._held = data[at:] if len(data) - at < 4096 else b""
        return keys


class Player:
    """Plays a recording once. Each call of `events` yields it from its beginning."""

    def __init__(
        self,
        events: Callable[[], Iterator[CastEvent]],
        out: ShownOutput,
        *,
        speed: float = 1.0,
        idle_limit: float | None = None,
        seek: float = 0.0,
        keys: bool = False,
    ) -> None:
        self._open = events
        self._out = out
        self._speed = speed
        self._idle_limit = idle_limit
        self._paused = False
        #: The position in seconds of the recording. All output before it is written.
        self._now = seek
        self._events = events()
        self._next = next(self._events, None)
        self._keys = KeyReader() if keys else None
        self._typed: asyncio.Task[bytes] | None = None

    async def play(self) -> bool:
        """Play to the end or until a key leaves; False after Ctrl-C."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._draw_until(self._now)
                if self._next is None:
                    return True
                if self._idle_limit is not None and not self._paused:
                    self._now = max(self._now, self._next.time - self._idle_limit)
                began = loop.time()
                typed = await self._wait(None if self._paused else (self._next.time - self._now) / self._speed)
                if typed is None:
                    self._now = self._next.time
                    continue
                if not self._paused:
                    passed = (loop.time() - began) * self._speed
                    self._now = min(self._now + passed, self._next.time)
                for key in typed:
                    if key in (b"q", b"Q", b"\x03"):
                        return key != b"\x03"
                    await self._pressed(key)
        finally:
            if self._typed is not None:
                self._typed.cancel()

    async def _wait(self, seconds: float | None) -> list[bytes] | None:
        """Return the keys pressed within a time, or None."""
        if self._keys is None:
            await asyncio.sleep(seconds or 0.0)
            return None
        if self._typed is None:
            self._typed = asyncio.create_task(ByteSource(STDIN).read())
        done, _ = await asyncio.wait((self._typed,), timeout=seconds)
        if not done:
            return None
        data, self._typed = self._typed.result(), None
        # End of file, of a terminal that was hung up, leaves as `q` does.
        return self._keys.feed(data) if data else [b"q"]

    async def _draw_until(self, time: float) -> None:
        while self._next is not None and self._next.time <= time:
            await self._step()

    async def _step(self) -> None:
        if self._next is not None:
            if self._next.code == OUTPUT:
                await self._out.write(self._next.data)
            self._next = next(self._events, None)

    async def _pressed(self, key: bytes) -> None:
        if key == b" ":
            self._paused = not self._paused
        elif key == b".":
            self._paused = True
            while self._next is not None and self._next.code != OUTPUT:
                await self._step()
            if self._next is not None:
                self._now = max(self._now, self._next.time)
                await self._step()
        elif key in (b"+", b"=", b"-"):
            faster = 0.5 if key == b"-" else 2.0
            self._speed = min(max(self._speed * faster, SLOWEST), FASTEST)
        elif key in (b"\x1b[C", b"\x1bOC"):
            self._now += SEEK_SECONDS
        elif key in (b"\x1b[D", b"\x1bOD"):
            self._now = max(0.0, self._now - SEEK_SECONDS)
            await self._out.clear()
            self._events = self._open()
            self._next = next(self._events, None)
        else:
            return
        await self._draw_until(self._now)
        await self._out.set_title(
            f"{'paused' if self._paused else 'playing'} at {self._now:.1f} s, speed {self._speed:g}"
        )
