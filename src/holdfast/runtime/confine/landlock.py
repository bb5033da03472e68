"""The rules of Landlock for one confined process: paths, and the rights beneath each.

Landlock only adds rights: a hidden path cannot be excluded from a directory above it. So a hidden path in a
writable directory is an error, and /etc is listed entry by entry. The system calls themselves are in `applying`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

from holdfast.errors import InvalidParams
from holdfast.runtime.confine.paths import VisiblePaths, is_beneath

#: Read, execute, list; and to write as well.
READ: Final = "rx"
WRITE: Final = "rwx"
LIST: Final = "l"
#: Write to existing files, and make none.
WRITE_EXISTING: Final = "rp"
#: Devices that do not control the machine. Not /dev/pts, which has the terminals of other processes.
DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
#: Files of /proc about the machine, and not about its processes.
MACHINE_FILES: Final = tuple(
    f"/proc/{name}" for name in ["cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "sys", "uptime", "version"]
)


def rules(
    visible: VisiblePaths, *, hide_processes: bool, executable: Iterable[str] | None = None
) -> list[tuple[str, str]]:
    """Pairs of a path and its rights as letters. With `executable`, only files there can be executed."""
    found = [(path, "rw") for path in DEVICES]
    found += [(path, "r") for path in (MACHINE_FILES if hide_processes else ("/proc",))]
    for path in visible.readable:
        found += _readable(path, visible.hidden)
    for path in visible.writable:
        if (hidden := _first_beneath(path, visible.hidden)) is not None:
            raise InvalidParams(f"confinement: Landlock cannot give {path} and hide {hidden}, which lies in it")
        found.append((path, WRITE))
    found += ((path, WRITE_EXISTING) for path in visible.pipes)
    if executable is None:
        return found
    # The kernel executes the loader of a program: both need the right.
    return [(path, letters.replace("x", "")) for path, letters in found] + [(path, "x") for path in executable]


def _readable(path: str, hidden: Iterable[str]) -> list[tuple[str, str]]:
    if path in hidden:
        return []
    if _first_beneath(path, hidden) is None:
        return [(path, READ)]
    found = [(path, LIST)]
    for entry in sorted(os.listdir(path)):
        found += _readable(os.path.join(path, entry), hidden)
    return found


def _first_beneath(path: str, hidden: Iterable[str]) -> str | None:
    return next((each for each in hidden if is_beneath(each, path)), None)
