"""Records of inotify(7) and the watches of its descriptor, as values; touches the descriptor and directories."""

from __future__ import annotations

import errno
import os
import struct
from typing import Final, NamedTuple

from holdfast.runtime import libc

# inotify(7)
MODIFY: Final = 0x2
ATTRIB: Final = 0x4
CLOSE_WRITE: Final = 0x8
MOVED_FROM: Final = 0x40
MOVED_TO: Final = 0x80
CREATE: Final = 0x100
DELETE: Final = 0x200
DELETE_SELF: Final = 0x400
MOVE_SELF: Final = 0x800
UNMOUNT: Final = 0x2000
Q_OVERFLOW: Final = 0x4000
IGNORED: Final = 0x8000
ONLYDIR: Final = 0x0100_0000
DONT_FOLLOW: Final = 0x0200_0000
ISDIR: Final = 0x4000_0000

MASK: Final = MODIFY | ATTRIB | CLOSE_WRITE | MOVED_FROM | MOVED_TO | CREATE | DELETE | ONLYDIR | DONT_FOLLOW
ROOT_MASK: Final = MASK | DELETE_SELF | MOVE_SELF
#: A removed directory that is a process's working directory remains as an inode: its parent reports the removal.
PARENT_MASK: Final = DELETE | MOVED_FROM | ONLYDIR
ENDS_ROOT: Final = DELETE_SELF | MOVE_SELF | UNMOUNT | IGNORED
_HEADER: Final = struct.Struct("iIII")
#: Hundreds of records: each has a header of 16 bytes and a name of up to 256.
READ_BYTES: Final = 64 * 1024


class InotifyRecord(NamedTuple):
    """One record of the kernel. `at` is the loop's time when it was read."""

    watch: int
    mask: int
    cookie: int
    name: str
    at: float


class Added(NamedTuple):
    """A directory that was added to the watch, or the reason why it was not."""

    name: str
    watch: int | None
    entries: tuple[tuple[str, bool], ...] = ()
    error: OSError | None = None


def parse(data: bytes, at: float) -> list[InotifyRecord]:
    """The records that one read of the descriptor returned."""
    records, start = [], 0
    while start < len(data):
        watch, mask, cookie, size = _HEADER.unpack_from(data, start)
        start += _HEADER.size + size
        name = os.fsdecode(data[start - size : start].rstrip(b"\0"))
        records.append(InotifyRecord(watch, mask, cookie, name, at))
    return records


def add(fd: int, path: str, name: str, mask: int) -> Added:
    """Watch a directory, then list it: an entry that is missing in the list becomes a record."""
    try:
        watch = libc.add_inotify_watch(fd, path, mask)
        with os.scandir(path) as entries:
            found = tuple((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            error = OSError(error.errno, "the user has no inotify watch left (fs.inotify.max_user_watches)", path)
        return Added(name, None, error=error)
    return Added(name, watch, found)
