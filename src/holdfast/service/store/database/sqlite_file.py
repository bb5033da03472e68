"""Wakes whoever follows a SQLite file that another process writes: the kernel tells that its times changed.

SQLite writes its log, flushes it, and then makes what is in it count; only the first of these changes a file in a
way that the kernel tells (inotify). So whoever writes says afterwards that it is there: `tell_change`. Touches the
C library through ctypes; asyncio waits on the descriptor. There is nothing to poll and no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
from io import FileIO
from types import TracebackType
from typing import Final

from holdfast.service.problems import NotNow, Unavailable

IN_ATTRIB: Final = 0x004
IN_NONBLOCK: Final = os.O_NONBLOCK
IN_CLOEXEC: Final = os.O_CLOEXEC


def tell_change(path: str) -> None:
    """What was written counts now. A file that is gone has nobody who follows it."""
    with contextlib.suppress(OSError):
        os.utime(path)


class FileWatch:
    """Watches a database for changes."""

    def __init__(self, path: str) -> None:
        self._changed = asyncio.Event()
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(IN_NONBLOCK | IN_CLOEXEC)
        if self._fd < 0 or libc.inotify_add_watch(self._fd, os.fsencode(path), IN_ATTRIB) < 0:
            number = ctypes.get_errno()
            self.close()
            raise OSError(number, os.strerror(number), path)
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
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 64 * 1024)
            self._changed.set()


def claim_file(path: str) -> FileIO:
    """The lock, until it is closed. `NotNow` names the process that has it."""
    name = f"{path}-lock"
    try:
        file = FileIO(os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
    except OSError as error:
        raise Unavailable(f"store {name}: {error.strerror}", reason="STORE_UNAVAILABLE") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = file.read(32).decode("ascii", "replace").strip()
        file.close()
        raise NotNow(
            f"store {path}: another service has it (pid {owner or 'unknown'}); several need PostgreSQL",
            reason="STORE_TAKEN",
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n".encode())
    return file
