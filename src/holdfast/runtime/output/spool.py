"""Where the spool goes, by the room that is there: memory if it has enough, else a disk. Looks, and makes nothing.

A container's /dev/shm has 64 MiB unless somebody asked for more; /tmp may be a small tmpfs, too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, NamedTuple

from holdfast.errors import ResourceExhausted

#: Files that a place must have room for: a process that prints has one a stream.
WANTED_FILES: Final = 4_096


class FileSystem(NamedTuple):
    """What a directory is on, as the kernel names it."""

    kind: str
    options: tuple[str, ...]


def candidates() -> list[str]:
    """The places, the best first."""
    # Not tempfile.gettempdir(), which ends with the working directory: ours may be `/`.
    chosen = os.environ.get("TMPDIR")
    return ["/dev/shm", *([os.path.abspath(chosen)] if chosen else []), "/tmp", "/var/tmp", "/run"]


def choose_place(wanted_bytes: int, places: Sequence[str] | None = None) -> str:
    """The first place with so much room, else the one with most of it."""
    rooms = {place: room for place in places or candidates() if (room := room_in(place)) is not None}
    if not rooms:
        raise ResourceExhausted(
            f"no place for a spool: none of {', '.join(places or candidates())} can be written; set spool_directory"
        )
    enough = (place for place, room in rooms.items() if room >= wanted_bytes)
    return next(enough, max(rooms, key=lambda place: rooms[place]))


def room_in(place: str) -> int | None:
    """Bytes that are free there; none where there are too few inodes, None if we may not write there."""
    try:
        found = os.statvfs(place)
    except OSError:
        return None
    if not os.access(place, os.W_OK | os.X_OK):
        return None
    # A file system that makes inodes as it goes tells of none.
    if found.f_files and found.f_favail < WANTED_FILES:
        return 0
    return found.f_bavail * found.f_frsize


def file_system_of(path: str) -> FileSystem:
    """The mount that a path is in: the longest of their points, and of equal ones the last."""
    best, found = "", FileSystem("", ())
    with open("/proc/self/mountinfo") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            point = before.split()[4]
            if len(point) >= len(best) and os.path.commonpath((path, point)) == point:
                kind, _, options = after.split()
                best, found = point, FileSystem(kind, tuple(options.split(",")))
    return found
