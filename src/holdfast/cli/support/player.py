"""Plays the recording of a terminal on ours: its output in its time, and keys that pause, step, seek and leave.

Only the output is written; where the player stands is told in the window's title, which garbles nothing. Seeking
draws everything up to the place at once, backwards from the recording's beginning.
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

#: What an arrow key skips, in seconds of the recording.
SEEK_SECONDS: Final = 5.0
SLOWEST, FASTEST = 1 / 64, 64.0

#: Our terminal answers what programs asked of theirs: such an answer is one key, which nobody pressed.
_KEY: Final = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|\x1bO.|\x1b[^\[\]OPX^_\x1b]|[^\x1b]",
    re.DOTALL,
)


class KeyReader:
    """What was typed, key by key, however the bytes are cut."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, typed: bytes) -> list[bytes]:
        data = self._held + typed
        keys, at = [], 0
        while (match := _KEY.match(data, at)) is not None:
            keys.append(match[0])
            at = match.end()
        # An answer without an end would swallow every key behind it.
        self._held = data[at:] if len(data) - at < 4096 else b""
        return keys


class Player:
    """One showing. `events` gives the recording from its beginning, as often as it is asked."""

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
        #: Where we are, in seconds of the recording. Everything before it is drawn.
        self._now = seek
        self._events = events()
        self._next = next(self._events, None)
        self._keys = KeyReader() if keys else None
        self._typed: asyncio.Task[bytes] | None = None

    async def play(self) -> bool:
        """To the end, or until somebody leaves; False if that was by Ctrl-C."""
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
        """The keys that came in time, or None."""
        if self._keys is None:
            await asyncio.sleep(seconds or 0.0)
            return None
        if self._typed is None:
            self._typed = asyncio.create_task(ByteSource(STDIN).read())
        done, _ = await asyncio.wait((self._typed,), timeout=seconds)
        if not done:
            return None
        data, self._typed = self._typed.result(), None
        # The end of a terminal that was hung up leaves as `q` does.
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
        await self._out.tell(
            f"{'paused' if self._paused else 'playing'} at {self._now:.1f} s, speed {self._speed:g}"
        )
