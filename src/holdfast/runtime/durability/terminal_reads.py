"""Reads terminals; under a keeper into a buffer that survives a server that has not stored the bytes yet.

A terminal cannot be spliced. Between the read from the terminal and the write to the log, bytes would be in the
server's memory alone; so they are read into pages of a file on the spool. The kernel finishes a read before it
kills the reader, but the number of bytes is lost with the reader. So the buffer is filled with a byte that no text
has, and no more is read than FIONREAD counted before: bytes that differ from the filling were read.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import termios
from typing import Final, NamedTuple

#: Bytes that are collected for one write to the log. A terminal returns at most 4 KiB a read.
GATHER_BYTES: Final = 64 * 1024
_READ_BYTES: Final = 16 * 1024
#: A read of less has emptied the terminal, or nearly; mostly it is the echo of one key. A further read, which would
#: usually fail, is left to the next turn of the event loop.
_SHORT_READ_BYTES: Final = 1024
#: Not a byte of UTF-8.
_FILLING: Final = b"\xff"
#: The number of this read, the key of the job, the offset in the log, the largest number of bytes.
_HEADER: Final = struct.Struct("<QQQQ")


class UnstoredRead(NamedTuple):
    """Bytes that a dead server read from a terminal and may not have stored."""

    number: int
    key: int
    offset: int
    data: bytes


class ReadBuffer:
    """One buffer for all terminals of a server: the bytes of a read are stored before the next read."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = _HEADER.size + GATHER_BYTES
            # Without the allocation, a write to a page on a full file system would raise SIGBUS.
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._view = memoryview(self._map)
        number, key, offset, count = _HEADER.unpack_from(self._map)
        data = self._map[_HEADER.size : _HEADER.size + count].rstrip(_FILLING)
        #: The read that an earlier server left.
        self.unstored = UnstoredRead(number, key, offset, data) if data else None
        self._number: int = number
        self._used = GATHER_BYTES

    def close(self) -> None:
        self._view.release()
        self._map.close()

    def gather(self, fd: int, limit: int, key: int, offset: int) -> tuple[bytes, int]:
        """Read the terminal, see `Durability.read_terminal`."""
        self._map[_HEADER.size : _HEADER.size + self._used] = _FILLING * self._used
        self._number += 1
        limit = min(limit, GATHER_BYTES)
        size = self._used = 0
        while size < limit:
            # Bytes that arrive after the count are left for the next read. The count may be 0 before the kernel has
            # passed the first bytes on.
            waiting = _waiting(fd)
            count = min(limit - size, max(1, waiting))
            _HEADER.pack_into(self._map, 0, self._number, key, offset, size + count)
            start = _HEADER.size + size
            self._used = size + count
            try:
                got = os.readv(fd, [self._view[start : start + count]])
            except BlockingIOError:
                if not size:
                    raise
                break
            except OSError as error:
                # Linux returns EIO once no process holds the terminal: the end of file.
                if error.errno != errno.EIO:
                    raise
                break
            size += got
            if not got or 0 < waiting < _SHORT_READ_BYTES:
                break
        return self._map[_HEADER.size : _HEADER.size + size], self._number


def _waiting(fd: int) -> int:
    try:
        count: int = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0]
    except OSError:
        return 0  # hung up: the read returns the error
    return count


def read_terminal(fd: int, limit: int) -> bytes:
    """Read a terminal into memory; empty at its end, `BlockingIOError` if it has no output for now."""
    piece = _read(fd)
    data = bytearray(piece)
    while len(piece) >= _SHORT_READ_BYTES and len(data) < min(limit, GATHER_BYTES):
        try:
            piece = _read(fd)
        except BlockingIOError:
            break
        data += piece
    return bytes(data)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, _READ_BYTES)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""
