"""Whether the kernel killed a process for memory: its count of such kills grew, and the process died by SIGKILL.

The count is that of a cgroup: the one of the process, if its confinement limits memory, else the server's own,
which is the container's or the jail's. Where neither is visible it is the machine's. Reads cgroups and /proc.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Sequence
from typing import Final

from holdfast.types import ExitStatus

#: Where a jail of the fleet shows the cgroup that limits its memory.
JAIL_GROUP: Final = "/run/holdfast/memory"
#: By version of cgroups. A count of version 2 includes the cgroups below; one of version 1 does not.
COUNT_FILES: Final = ("memory.events", "memory.oom_control")
_COUNT: Final = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_READ_BYTES: Final = 64 * 1024
#: A process that starts within this time of the last reading shares it: an older count counts at most a kill more.
_FRESH_SECONDS: Final = 1.0
#: 128 and the number of SIGKILL: a shell passes on the end of its child by it.
KILLED: Final = 137


class OomCounter:
    """The kills that the kernel counts for one place. Each explains the end of one process."""

    def __init__(self) -> None:
        self._path = next((path for path in _server_files() if _count(path) is not None), "")
        self._claimed = 0
        self._last = self._read()
        self._read_at = time.monotonic()

    def _read(self) -> int:
        return (_count(self._path) or 0) if self._path else 0

    def now(self) -> int:
        """The count at the start of a process."""
        if time.monotonic() - self._read_at > _FRESH_SECONDS:
            self._last, self._read_at = self._read(), time.monotonic()
        return self._last

    def judge(self, status: ExitStatus, since: int, groups: Sequence[str] = ()) -> bool:
        """Whether an exit status is that of a process killed for memory, started when the count was `since`.

        `groups` are the cgroups of the process alone, if it has some.
        """
        if status.exit_code != KILLED:
            return False
        for group in groups:
            for name in COUNT_FILES:
                if (count := _count(f"{group}/{name}")) is not None:
                    return count > 0
        accounted = max(since, self._claimed)
        if self._read() <= accounted:
            return False
        self._claimed = accounted + 1
        return True


def _server_files() -> Iterable[str]:
    """Files that may have the count of this process's cgroup, the closest first."""
    yield from (f"{JAIL_GROUP}/{name}" for name in COUNT_FILES)
    with contextlib.suppress(OSError):
        yield from _mounted_files()
    yield "/proc/vmstat"


def _mounted_files() -> Iterable[str]:
    with open("/proc/self/cgroup") as file:
        ours = [line.rstrip("\n").split(":", 2)[1:] for line in file]
    paths = {controller: path for names, path in ours for controller in names.split(",")}
    with open("/proc/self/mountinfo") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            root, mount = before.split()[3:5]
            kind, _, options, *_ = after.split()
            controller = "" if kind == "cgroup2" else "memory"
            if controller not in paths or not (
                kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(","))
            ):
                continue
            # In a container the mount begins at its own cgroup, and the path may be that of the host.
            inside = paths[controller].removeprefix(root.rstrip("/")) if root != "/" else paths[controller]
            yield f"{mount}{inside.rstrip('/')}/{COUNT_FILES[0] if kind == 'cgroup2' else COUNT_FILES[1]}"


def _count(path: str) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = _COUNT.search(os.read(fd, _READ_BYTES))
    except OSError:
        return None
    finally:
        os.close(fd)
    return None if found is None else int(found[1])
