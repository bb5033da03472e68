"""Our own stdin, stdout and stderr as exact bytes, without ever blocking the event loop.

A loop that blocks in write(2) because a pager does not read would not receive Ctrl-C. The descriptors are shared
with the parent process, and O_NONBLOCK belongs to the open file, so their flags are left alone.
"""

from __future__ import annotations

import asyncio
import os
import stat
from typing import Final

#: A pipe that polls writable accepts this much without blocking (PIPE_BUF).
_SURE_BYTES: Final = 4_096
#: More than a pipe holds, so that one read empties it.
READ_BYTES: Final = 128 * 1024


class ByteSink:
    """Writes to a descriptor. Pipes and terminals are opened a second time, so O_NONBLOCK is ours alone."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._own = _reopen(fd, os.O_WRONLY)
        self._piece = _SURE_BYTES if self._own is None else 1024 * 1024
        self._never_blocks = stat.S_ISREG(os.fstat(fd).st_mode)

    async def write(self, data: bytes | memoryview) -> None:
        """Write all of it, as fast as the reader reads. `BrokenPipeError` if the reader has closed the pipe."""
        view = memoryview(data)
        fd = self._fd if self._own is None else self._own
        while view:
            if self._own is None and not self._never_blocks:
                await _writable(fd)
            try:
                piece = view if self._never_blocks else view[: self._piece]
                view = view[os.write(fd, piece) :]
            except BlockingIOError:
                await _writable(fd)

    def close(self) -> None:
        """Close the second open file; the descriptor that was given stays open."""
        if self._own is not None:
            os.close(self._own)
            self._own = None


class ByteSource:
    """Reads from a descriptor. Regular files and /dev/null cannot be polled and never block."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    async def read(self) -> bytes:
        """Wait for bytes and return them; empty at end of file."""
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        try:
            loop.add_reader(self._fd, _resolve, ready)
        except PermissionError:
            # epoll refuses files that are always ready. Let other tasks run between two reads.
            await asyncio.sleep(0)
            return os.read(self._fd, READ_BYTES)
        try:
            await ready
        finally:
            loop.remove_reader(self._fd)
        try:
            return os.read(self._fd, READ_BYTES)
        except OSError as error:
            import errno

            if error.errno == errno.EIO:
                # The terminal was hung up, or this process is in the background: end of file.
                return b""
            raise


async def _writable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    try:
        loop.add_writer(fd, _resolve, ready)
    except PermissionError:
        return
    try:
        await ready
    finally:
        loop.remove_writer(fd)


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _reopen(fd: int, mode: int) -> int | None:
    """Open the same pipe or terminal again, with flags of its own; None if that is impossible."""
    kind = os.fstat(fd).st_mode
    if not stat.S_ISFIFO(kind) and not os.isatty(fd):
        return None
    try:
        return os.open(f"/proc/self/fd/{fd}", mode | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        # No /proc, or a terminal of another user (after `su`): small pieces are used instead.
        return None
