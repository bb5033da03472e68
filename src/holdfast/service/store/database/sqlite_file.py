"""The lock and the change notification of a SQLite file that several processes use.

SQLite writes its log, flushes it, and then commits; only the first step changes a file in a way that inotify
reports. So a writer touches the file after the commit (`signal_change`), which wakes followers without polling or
threads. Touches `PATH-lock`, since closing a descriptor of the database itself would drop SQLite's own locks, and
the C library through ctypes.
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


def signal_change(path: str) -> None:
    """Wake the followers of the file. A file that was removed has no followers."""
    with contextlib.suppress(OSError):
        os.utime(path)


class FileWatch:
    """Watches a database file for changes."""

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
        """Wait for a change since the last call."""
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
    """Return the lock of the only service on this file, until closed; `NotNow` names the process that holds it."""
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
            f"store {path}: another service uses it (pid {owner or 'unknown'}); several services need PostgreSQL",
            reason="STORE_TAKEN",
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n".encode())
    return file
