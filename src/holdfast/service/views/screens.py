"""The screens of terminals that are looked at: an emulator for each, advanced when a reader needs the screen.

All readers of a session share its emulator, so a thumbnail, a first paint and a reader that skips ahead cost one
pass over the output. The number of emulators is bounded; the one that was used longest ago makes room.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Final, NamedTuple

from holdfast.client.screen.screen import Emulator, Screen, emulator, preload
from holdfast.exec_api import ExecApi
from holdfast.service.positions import Position
from holdfast.service.sessions.backend.connections import SandboxConnections
from holdfast.service.types import SessionRecord, State
from holdfast.types import TerminalEvent, TerminalSize

#: Terminals with an emulator at a time: a wall of thumbnails and some open terminals. Each has some megabytes.
MOST_SCREENS: Final = 64
#: Lines above the screen that a first paint draws: the length of a long page of output.
SCROLLBACK: Final = 1_000
#: One read while a screen advances, and the time after which it returns although there is more output.
_STEP_BYTES: Final = 1024 * 1024
ADVANCE_SECONDS: Final = 0.25
#: Ends an incomplete escape sequence before a gap.
_CANCEL: Final = b"\x18"


class Drawing(NamedTuple):
    """A screen as bytes that draw it, and the position after it."""

    payload: bytes
    position: Position
    size: TerminalSize
    state: State
    #: Whether all output that there was is in it.
    is_current: bool
    timestamp: float


class SharedScreen:
    """The emulator of one terminal."""

    def __init__(self, record: SessionRecord) -> None:
        self.session_id = record.session_id
        self._emulator: Emulator = emulator(record.rows, record.cols, scrollback=SCROLLBACK)
        self._size = TerminalSize(record.rows, record.cols)
        self._position = Position()
        self._state: State = record.state
        self._timestamp = record.created_at
        self._lock = asyncio.Lock()

    async def draw(self, api: ExecApi, at_least: int = 0) -> Drawing:
        """Advance for at most `ADVANCE_SECONDS` and return the screen, at or after the position `at_least`."""
        async with self._lock:
            current = await self._advance(api, at_least)
            return Drawing(
                self._emulator.restore(), self._position, self._size, self._state, current, self._timestamp
            )

    async def screen(self, api: ExecApi) -> tuple[Screen, bytes]:
        """Return the text of the screen, and the bytes that draw it without the lines above."""
        async with self._lock:
            await self._advance(api, 0)
            small = emulator(self._size.rows, self._size.cols)
            try:
                small.feed(self._emulator.restore())
                return self._emulator.screen(), small.restore()
            finally:
                small.close()

    async def _advance(self, api: ExecApi, at_least: int) -> bool:
        end = time.monotonic() + ADVANCE_SECONDS
        while True:
            found = await api.read_terminal(self.session_id, since=self._position.seq, max_bytes=_STEP_BYTES)
            self._state = found.state
            if found.token == self._position.seq:
                return True
            printed = self._position.printed
            for event in found.events:
                printed = self._show(event, printed)
                self._timestamp = event.timestamp or self._timestamp
            self._position = Position(seq=found.token, printed=printed)
            if time.monotonic() > end and found.token >= at_least:
                return False
            # A flood of output must not keep the event loop from other sessions.
            await asyncio.sleep(0)

    def _show(self, event: TerminalEvent, printed: int) -> int:
        if event.type == "output":
            self._emulator.feed(event.payload)
            return event.offset + len(event.payload)
        if event.type == "resize" and event.size is not None:
            self._size = event.size
            self._emulator.resize(event.size.rows, event.size.cols)
        elif event.type == "gap":
            self._emulator.feed(_CANCEL)
        return max(printed, event.offset)

    async def close(self) -> None:
        async with self._lock:
            self._emulator.close()


class ScreenCache:
    """The screens of this replica."""

    def __init__(self, pool: SandboxConnections) -> None:
        self._pool = pool
        self._screens: OrderedDict[str, SharedScreen] = OrderedDict()
        self._users: dict[str, int] = {}

    async def draw(self, record: SessionRecord, at_least: int = 0) -> Drawing:
        async with self._pool.use(record.sandbox) as api, self._using(record) as screen:
            return await screen.draw(api, at_least)

    async def screen(self, record: SessionRecord) -> tuple[Screen, bytes]:
        async with self._pool.use(record.sandbox) as api, self._using(record) as screen:
            return await screen.screen(api)

    def _using(self, record: SessionRecord) -> _Use:
        return _Use(self, record)

    async def enter(self, record: SessionRecord) -> SharedScreen:
        name = record.session_id
        if name not in self._screens:
            await asyncio.to_thread(preload)
        if name not in self._screens:
            self._screens[name] = SharedScreen(record)
        self._screens.move_to_end(name)
        self._users[name] = self._users.get(name, 0) + 1
        return self._screens[name]

    async def leave(self, session_id: str, *, failed: bool) -> None:
        self._users[session_id] -= 1
        if not self._users[session_id]:
            del self._users[session_id]
        surplus = max(0, len(self._screens) - MOST_SCREENS)
        unused = [name for name in self._screens if name not in self._users]
        gone = unused[:surplus]
        if failed and session_id in unused and session_id not in gone:
            gone.append(session_id)  # the terminal may be a new one at the next use
        for name in gone:
            await self._screens.pop(name).close()

    async def aclose(self) -> None:
        while self._screens:
            _, screen = self._screens.popitem()
            await screen.close()


class _Use:
    def __init__(self, cache: ScreenCache, record: SessionRecord) -> None:
        self._cache = cache
        self._record = record

    async def __aenter__(self) -> SharedScreen:
        return await self._cache.enter(self._record)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._cache.leave(self._record.session_id, failed=kind is not None)
