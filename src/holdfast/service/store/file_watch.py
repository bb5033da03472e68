"""Wakes whoever follows a SQLite file that another process writes: the kernel tells when its log changes (inotify).

Touches the C library through ctypes; asyncio waits on the descriptor. There is nothing to poll and no thread.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from types import TracebackType
from typing import Final

IN_MODIFY: Final = 0x002
IN_CREATE: Final = 0x100
IN_NONBLOCK: Final = os.O_NONBLOCK
IN_CLOEXEC: Final = os.O_CLOEXEC


class FileWatch:
    """Watches the directory of a database for changes to the database's files."""

    def __init__(self, path: str) -> None:
        directory, name = os.path.split(os.path.abspath(path))
        self._names = (name.encode(), f"{name}-wal".encode())
        self._changed = asyncio.Event()
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(IN_NONBLOCK | IN_CLOEXEC)
        # The directory, not the file: SQLite removes its log when the last connection closes, and makes another.
        if self._fd < 0 or libc.inotify_add_watch(self._fd, os.fsencode(directory), IN_MODIFY | IN_CREATE) < 0:
            number = ctypes.get_errno()
            self.close()
            raise OSError(number, os.strerror(number), directory)
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    async def changed(self) -> None:
        """Wait for a change that came after the last one that was waited for."""
        await self._changed.wait()
        self._changed.clear()

    def close(self) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> FileWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        try:
            events = os.read(self._fd, 64 * 1024)
        except BlockingIOError:
            return
        # Each is 16 bytes, the last 4 of which say how long the name is that follows.
        at = 0
        while at + 16 <= len(events):
            length = int.from_bytes(events[at + 12 : at + 16], "little")
            name = events[at + 16 : at + 16 + length].rstrip(b"\0")
            if name in self._names:
                self._changed.set()
            at += 16 + length
