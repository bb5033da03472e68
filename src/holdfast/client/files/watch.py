"""`DirectoryEvents`: the changes below a directory of the sandbox, as an async iterator. Touches only `FileApi`."""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from typing import Final, Self

from holdfast.client.connection.clean_up import clean_up
from holdfast.errors import HoldfastError, InvalidRequest, UnknownWatch
from holdfast.exec_api import FileApi
from holdfast.types import WatchEvent

#: How long one read waits for an event. Some engines end a command after half a minute.
READ_SECONDS: Final = 10.0


class DirectoryEvents:
    """The events of a watched directory, for an `async with` block. One task iterates over them at a time.

    The server holds unread events, and reads no more from the kernel once it holds many.
    """

    def __init__(self, files: FileApi, path: str, *, recursive: bool, user: str | None) -> None:
        self._files = files
        self._path = path
        self._recursive = recursive
        self._user = user
        self._watch_id: str | None = None
        self._events: deque[WatchEvent] = deque()
        #: The number of the last event that was received.
        self._after = 0
        self._ended = False

    async def start(self) -> None:
        """Watch; on return every later change becomes an event."""
        watch_id = secrets.token_hex(16)
        try:
            await self._files.watch(self._path, watch_id=watch_id, recursive=self._recursive, user=self._user)
        except BaseException:
            await self._unwatch(watch_id)
            raise
        self._watch_id, self._after = watch_id, 0

    async def aclose(self) -> None:
        """End the watch. Events that were not read are dropped."""
        watch_id, self._watch_id = self._watch_id, None
        if watch_id is not None:
            await self._unwatch(watch_id)

    async def _unwatch(self, watch_id: str) -> None:
        # Otherwise the server ends the watch, some time after the last read.
        with contextlib.suppress(HoldfastError):
            await clean_up(self._files, self._files.unwatch(watch_id))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchEvent:
        while not self._events:
            if self._ended:
                raise StopAsyncIteration
            if self._watch_id is None:
                raise InvalidRequest(f"{self._path}: not watched: iterate inside its `async with` block")
            try:
                read = await self._files.read_watch(self._watch_id, after=self._after, wait=READ_SECONDS)
            except UnknownWatch:
                await self.start()
                reason = "watched again, because the server had ended the watch"
                return WatchEvent(0, "overflow", "", directory=True, reason=reason)
            self._events.extend(read.events)
            self._ended = read.ended
            if read.events:
                self._after = read.events[-1].seq
        return self._events.popleft()
