"""A cgroup for each process that is not short-lived. Touches the cgroup file systems.

A process cannot leave its cgroup by a double fork, by a change of user or by a reset of limits. So the pids of a
cgroup are added to those that the process tree finds, and version 2 kills them all at once (`cgroup.kill`).

To move a process waits for a grace period of the kernel's RCU, 5 to 20 ms each (measured), so one thread beside the
event loop does it, and only for processes that still run after a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from holdfast.runtime.confine.resource_groups import ResourceGroups, sweep
from holdfast.runtime.tree.process_table import NO_DESCRIPTOR

if TYPE_CHECKING:
    from holdfast.runtime.tree.process_tree import Tree
    from holdfast.types import Confinement

#: Most commands end before this and are not moved.
JOIN_AFTER_SECONDS: Final = 0.25
_PROCS_BYTES: Final = 64 * 1024


class Cgroup:
    """The cgroup of one process. It exists from the first `join`."""

    __slots__ = ("_busy", "_limiting", "joined_at", "path")

    def __init__(self, path: str, limiting: Sequence[str] = (), busy: set[str] | None = None) -> None:
        """`limiting` are its directories in other hierarchies, with limits (`resource_groups`). A directory that
        still has members when it is removed is added to `busy`."""
        self.path = path
        self._limiting = tuple(limiting)
        self._busy = busy
        #: By the monotonic clock: later forks of the process are inside.
        self.joined_at: float | None = None

    @property
    def limiting(self) -> tuple[str, ...]:
        """Its directories with limits, for this process alone."""
        return self._limiting

    def join(self, pid: int, pidfd: int) -> None:
        """Move a process in; its later children start inside. Blocks: call it on the thread."""
        try:
            # With its parent, which another server may have removed as stale after the keeper was killed.
            os.makedirs(self.path)
            # The thread may be late. The pid of a reaped process may belong to another, which would be killed.
            signal.pidfd_send_signal(pidfd, 0)
            _write(f"{self.path}/cgroup.procs", b"%d" % pid)
            self.joined_at = time.monotonic()
        except OSError:
            self.remove()  # the process ended, or may not be moved: the process tree finds it anyway

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def directories(self) -> tuple[tuple[str, bool], ...]:
        """Every directory to join, and whether it has limits: then a failure to join is an error."""
        return tuple((path, path in self._limiting) for path in dict.fromkeys((self.path, *self._limiting)))

    def take(self, pid: int) -> None:
        """Move in a process of another keeper, if it still runs."""
        with contextlib.suppress(OSError):
            os.makedirs(self.path, exist_ok=True)
            _write(f"{self.path}/cgroup.procs", b"%d" % pid)

    def exists(self) -> bool:
        return os.path.isdir(self.path)

    def pids(self) -> list[int]:
        """The members; `OSError` without a descriptor."""
        try:
            fd = os.open(f"{self.path}/cgroup.procs", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                raise
            return []
        pids = b""
        try:
            while piece := os.read(fd, _PROCS_BYTES):
                pids += piece
        except OSError:
            return []  # removed
        finally:
            os.close(fd)
        return [int(line) for line in pids.splitlines()]

    def kill(self) -> None:
        """Send KILL to every member at once, where the kernel supports it (version 2, since 5.14)."""
        with contextlib.suppress(OSError):
            _write(f"{self.path}/cgroup.kill", b"1")

    def remove(self) -> None:
        """Remove the directories; one that still has members is removed later (`busy`)."""
        for directory, _ in self.directories:
            try:
                os.rmdir(directory)
            except OSError as error:
                if error.errno == errno.EBUSY and self._busy is not None:
                    self._busy.add(directory)


class CgroupMembers:
    """The members of one cgroup, through a descriptor that stays open: a quarter of the time of `pids`."""

    def __init__(self, cgroup: Cgroup) -> None:
        """`OSError` if the cgroup is gone, or without a descriptor."""
        self._fd = os.open(f"{cgroup.path}/cgroup.procs", os.O_RDONLY | os.O_CLOEXEC)

    def pids(self) -> set[int]:
        """The first members, which are all unless they are thousands; `OSError` if the cgroup was removed."""
        return set(map(int, os.pread(self._fd, _PROCS_BYTES, 0).split()))

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class Cgroups:
    """Makes cgroups below one of the server, and moves processes into them in the background."""

    def __init__(self, parent: str) -> None:
        self.parent = parent
        self._limits = ResourceGroups(os.path.basename(parent))
        #: Directories that could not be removed because a process was exiting in them.
        self._busy: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self._young: deque[tuple[float, Tree, int]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        #: pidfds of the processes that the thread has yet to move.
        self._pidfds: set[int] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-cgroup")

    @classmethod
    def open(cls, keeper: int | None = None) -> Cgroups | None:
        """Open the server's cgroup; None where none is writable. All servers of one keeper share it."""
        for mount, path in _hierarchies():
            name = f"holdfast-{os.getpid()}-{secrets.token_hex(4)}" if keeper is None else _name_of(keeper)
            parent = f"{mount}{path.rstrip('/')}/{name}"
            with contextlib.suppress(OSError):
                sweep(os.path.dirname(parent))
                os.makedirs(parent, exist_ok=keeper is not None)
                return cls(parent)
        return None

    @property
    def kind(self) -> str:
        """How a tree is killed, for status output."""
        return "cgroup.kill" if os.path.exists(f"{self.parent}/cgroup.kill") else "cgroup"

    def inherit(self, keeper: int) -> None:
        """Move the members of a killed keeper's cgroups to cgroups of the same names here."""
        for former in former_cgroups(keeper):
            own = Cgroup(f"{self.parent}/{former.name}")
            for pid in former.pids():
                own.take(pid)
        remove_former(keeper)

    def make(self, confinement: Confinement, key: int) -> Cgroup:
        """Make a cgroup for a process that is about to start, with the limits of its whole tree."""
        self._remove_busy()
        name = str(key)
        own = Cgroup(f"{self.parent}/{name}")
        try:
            os.makedirs(f"{self.parent}/{name}", exist_ok=True)
            limited = Cgroup(f"{self.parent}/{name}", self._limits.make(name, confinement), self._busy)
        except BaseException:
            own.remove()
            raise
        limited.joined_at = time.monotonic()
        return limited

    def _remove_busy(self) -> None:
        """Retry the removal of busy directories; the kernel has no event for the last exit."""
        busy = list(self._busy)
        self._busy.clear()
        for directory in busy:
            Cgroup(directory, busy=self._busy).remove()

    def join_later(self, tree: Tree, key: int) -> None:
        """Move a process after a delay; one timer serves all. `key` names the cgroup, also for later servers."""
        self._young.append((self._loop.time() + JOIN_AFTER_SECONDS, tree, key))
        if self._timer is None:
            self._timer = self._loop.call_later(JOIN_AFTER_SECONDS, self._join_due)

    def rejoin(self, tree: Tree, key: int) -> None:
        """Find the cgroup of a process of an earlier server, or move the process to one later."""
        found = Cgroup(f"{self.parent}/{key}", self._limits.existing(str(key)), self._busy)
        if found.exists():
            tree.cgroup = found
        elif tree.leader_lives:
            self.join_later(tree, key)

    def _join_due(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._young and self._young[0][0] <= now:
            _, tree, key = self._young.popleft()
            if tree.leader_lives:
                self._join(tree, Cgroup(f"{self.parent}/{key}"))
        if self._young:
            self._timer = self._loop.call_at(self._young[0][0], self._join_due)

    def _join(self, tree: Tree, cgroup: Cgroup) -> None:
        """Move a process on the thread."""
        try:
            pidfd = os.pidfd_open(tree.leader)
        except OSError:
            return  # no descriptor is free: the process tree suffices
        tree.cgroup = cgroup
        self._pidfds.add(pidfd)
        # Without a pid for the thread, the next move starts it; the process tree suffices until then.
        with contextlib.suppress(RuntimeError):
            self._thread.submit(self._join_now, cgroup, tree.leader, pidfd)

    def _join_now(self, cgroup: Cgroup, pid: int, pidfd: int) -> None:
        try:
            cgroup.join(pid, pidfd)
        finally:
            self._pidfds.discard(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds.clear()
        _remove_below(self.parent)
        self._limits.close()


def _hierarchies() -> Iterator[tuple[str, str]]:
    """Yield mount point and path of the server in each usable hierarchy: version 2, then the version 1 freezer."""
    mounts: dict[str, str] = {}
    with open("/proc/self/mountinfo") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            fields, kind = before.split(), after.split()
            if kind[0] == "cgroup2":
                mounts["v2"] = fields[4]
            elif kind[0] == "cgroup" and "freezer" in kind[2].split(","):
                mounts["freezer"] = fields[4]
    with open("/proc/self/cgroup") as file:
        ours = {line.split(":", 2)[1]: line.rstrip("\n").split(":", 2)[2] for line in file}
    if "v2" in mounts and "" in ours:
        yield mounts["v2"], ours[""]
    if "freezer" in mounts and "freezer" in ours:
        yield mounts["freezer"], ours["freezer"]


def former_cgroups(keeper: int) -> list[Cgroup]:
    """Return the cgroups of a dead keeper with this pid; none if a process has the pid."""
    found: list[Cgroup] = []
    if os.path.exists(f"/proc/{keeper}"):
        return found
    for mount, path in _hierarchies():
        parent = f"{mount}{path.rstrip('/')}/{_name_of(keeper)}"
        with contextlib.suppress(OSError):
            names = os.listdir(parent)
            found += [Cgroup(f"{parent}/{name}") for name in names if os.path.isdir(f"{parent}/{name}")]
    return found


def remove_former(keeper: int) -> None:
    """Remove the cgroups of a dead keeper and their parent."""
    if not os.path.exists(f"/proc/{keeper}"):
        for mount, path in _hierarchies():
            _remove_below(f"{mount}{path.rstrip('/')}/{_name_of(keeper)}")


def _name_of(keeper: int) -> str:
    return f"holdfast-{keeper}-kept"


def _remove_below(parent: str) -> None:
    try:
        names = os.listdir(parent)
    except FileNotFoundError:
        return  # removed by another server: the keeper is gone, or in another pid namespace
    for name in names:
        if os.path.isdir(f"{parent}/{name}"):
            Cgroup(f"{parent}/{name}").remove()
    Cgroup(parent).remove()


def _write(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
