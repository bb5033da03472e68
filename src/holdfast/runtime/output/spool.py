"""Chooses the directory of the spool by free space: memory if it has enough, else a disk. Only reads.

A container's /dev/shm has 64 MiB by default; /tmp may be a small tmpfs, too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, NamedTuple

from holdfast.errors import ResourceExhausted

#: Inodes that a directory must have free: a process has one file for each stream with output.
WANTED_FILES: Final = 4_096


class FileSystem(NamedTuple):
    """The file system of a directory, as the kernel names it."""

    kind: str
    options: tuple[str, ...]


def candidates() -> list[str]:
    """Return the directories that may hold a spool, the best first."""
    # Not tempfile.gettempdir(), which falls back to the working directory: the server's may be `/`.
    chosen = os.environ.get("TMPDIR")
    return ["/dev/shm", *([os.path.abspath(chosen)] if chosen else []), "/tmp", "/var/tmp", "/run"]


def choose_directory(wanted_bytes: int, directories: Sequence[str] | None = None) -> str:
    """Return the first directory with `wanted_bytes` free, else the one with the most."""
    rooms = {
        directory: room for directory in directories or candidates() if (room := room_in(directory)) is not None
    }
    if not rooms:
        raise ResourceExhausted(
            f"no directory for a spool: none of {', '.join(directories or candidates())} can be written; "
            "set spool_directory"
        )
    enough = (directory for directory, room in rooms.items() if room >= wanted_bytes)
    return next(enough, max(rooms, key=lambda directory: rooms[directory]))


def room_in(directory: str) -> int | None:
    """Return the free bytes of a directory; 0 if it has too few inodes, None if it is not writable."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    if not os.access(directory, os.W_OK | os.X_OK):
        return None
    # A file system with dynamic inodes reports none.
    if found.f_files and found.f_favail < WANTED_FILES:
        return 0
    return found.f_bavail * found.f_frsize


def file_system_of(path: str) -> FileSystem:
    """Return the file system of a path: the longest matching mount point, and the last of equal ones."""
    best, found = "", FileSystem("", ())
    with open("/proc/self/mountinfo") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            point = before.split()[4]
            if len(point) >= len(best) and os.path.commonpath((path, point)) == point:
                kind, _, options = after.split()
                best, found = point, FileSystem(kind, tuple(options.split(",")))
    return found
