"""Where a kept server reads terminals into: a buffer whose bytes outlive the server that has not used them yet.

A terminal cannot be spliced. Between the read that takes bytes out of it and the write that puts them into the log
they would be in our memory alone; so they are read into pages of a file on the spool. The kernel finishes a read
before it kills the reader, but how much it read is then told to nobody. So the buffer is filled with a byte that
no text has, and no more is read than was counted before: what differs from the filling was read.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import termios
from typing import Final, NamedTuple

#: Gathered before it goes into the log. A terminal gives at most 4 KiB a read.
GATHER_BYTES: Final = 64 * 1024
#: No byte of UTF-8 is this one.
_FILLING: Final = b"\xff"
#: The number of this gathering, whose bytes they are, where in the log they belong, how many there are at most.
_HEADER: Final = struct.Struct("<QQQQ")


class Unused(NamedTuple):
    """Bytes that were read and of which it is not known what became of them."""

    number: int
    key: int
    offset: int
    data: bytes


class ReadBuffer:
    """One for all terminals of a server: what is read is used before anything else is."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = _HEADER.size + GATHER_BYTES
            # A page that cannot be had later, when it is written to, would be a SIGBUS.
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._view = memoryview(self._map)
        number, key, offset, count = _HEADER.unpack_from(self._map)
        data = self._map[_HEADER.size : _HEADER.size + count].rstrip(_FILLING)
        #: What an earlier server left.
        self.unused = Unused(number, key, offset, data) if data else None
        self._number: int = number
        self._used = GATHER_BYTES

    def close(self) -> None:
        self._view.release()
        self._map.close()

    def gather(self, fd: int, limit: int, key: int, offset: int) -> tuple[bytes, int]:
        """What the terminal has to give, and the number of this gathering; empty at its end.

        Raises `BlockingIOError` if it has nothing for now.
        """
        self._map[_HEADER.size : _HEADER.size + self._used] = _FILLING * self._used
        self._number += 1
        limit = min(limit, GATHER_BYTES)
        size = self._used = 0
        while size < limit:
            # What comes in after it was counted is left for the next read.
            count = min(limit - size, max(1, _waiting(fd)))
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
                # Linux answers EIO once nobody holds the terminal: that is its end of file.
                if error.errno != errno.EIO:
                    raise
                break
            if not got:
                break
            size += got
        return self._map[_HEADER.size : _HEADER.size + size], self._number


def _waiting(fd: int) -> int:
    try:
        count: int = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0]
    except OSError:
        return 0  # hung up: the read tells
    return count
