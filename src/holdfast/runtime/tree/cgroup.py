"""A cgroup for each process that lives long enough to be worth one. Touches the cgroup file systems.

Membership cannot be shed: not by a double fork, not by another user, not by resetting limits. So the pids of a
cgroup join those that the process tree finds, and version 2 kills them all at once (`cgroup.kill`).

Moving a process waits for a grace period of the kernel's RCU, 5 to 20 ms each (measured), so it happens on one
thread, beside the event loop, and only for processes that are still there after a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from holdfast.runtime.confine.resource_groups import ResourceGroups

if TYPE_CHECKING:
    from holdfast.runtime.tree.process_tree import Tree
    from holdfast.types import Confinement

#: Most commands are over before this; moving them would be work for nothing.
JOIN_AFTER_SECONDS: Final = 0.25
_PROCS_BYTES: Final = 64 * 1024


class Cgroup:
    """The cgroup of one process. It exists from the first `join`."""

    __slots__ = ("_busy", "_limiting", "_path", "joined_at")

    def __init__(self, path: str, limiting: Sequence[str] = (), busy: set[str] | None = None) -> None:
        """`limiting` are directories of the same in other hierarchies, which limit it (`resource_groups`). What
        somebody is in when it is given back goes to `busy`."""
        self._path = path
        self._limiting = tuple(limiting)
        self._busy = busy
        #: By the monotonic clock: what its process forked later is inside.
        self.joined_at: float | None = None

    def join(self, pid: int) -> None:
        """Move a process in; its later children are born inside. Blocks: call it on the thread."""
        try:
            # With the one above it: once our keeper is gone, a server that starts elsewhere takes that for stale.
            os.makedirs(self._path)
            _write(f"{self._path}/cgroup.procs", b"%d" % pid)
            self.joined_at = time.monotonic()
        except OSError:
            self.remove()  # the process is gone, or not ours to move: the tree finds it all the same

    @property
    def path(self) -> str:
        return self._path

    @property
    def name(self) -> str:
        return os.path.basename(self._path)

    @property
    def directories(self) -> tuple[tuple[str, bool], ...]:
        """All that a process is to be in, and whether it limits it: then it must be."""
        return tuple((path, path in self._limiting) for path in dict.fromkeys((self._path, *self._limiting)))

    def take(self, pid: int) -> None:
        """Move in one that another keeper had; it may have ended meanwhile."""
        with contextlib.suppress(OSError):
            os.makedirs(self._path, exist_ok=True)
            _write(f"{self._path}/cgroup.procs", b"%d" % pid)

    def exists(self) -> bool:
        return os.path.isdir(self._path)

    def pids(self) -> list[int]:
        try:
            fd = os.open(f"{self._path}/cgroup.procs", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return []
        pids = b""
        try:
            while piece := os.read(fd, _PROCS_BYTES):
                pids += piece
        except OSError:
            return []  # removed meanwhile
        finally:
            os.close(fd)
        return [int(line) for line in pids.splitlines()]

    def kill(self) -> None:
        """KILL to every member at once, where the kernel can (version 2, since 5.14)."""
        with contextlib.suppress(OSError):
            _write(f"{self._path}/cgroup.kill", b"1")

    def remove(self) -> None:
        """Give it back; refused while somebody is in it, and then tried again by whoever ends them."""
        for directory, _ in self.directories:
            try:
                os.rmdir(directory)
            except OSError as error:
                if error.errno == errno.EBUSY and self._busy is not None:
                    self._busy.add(directory)


class Cgroups:
    """Makes cgroups below one of our own, and moves processes into them in the background."""

    def __init__(self, parent: str) -> None:
        self.parent = parent
        self._limits = ResourceGroups(os.path.basename(parent))
        #: Directories that were to be removed while a process was at its end in them.
        self._busy: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self._young: deque[tuple[float, Tree, int]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-cgroup")

    @classmethod
    def open(cls, keeper: int | None = None) -> Cgroups | None:
        """Ours, or None where no cgroup can be written. All servers of one keeper have the same."""
        for mount, path in _hierarchies():
            name = f"holdfast-{os.getpid()}-{secrets.token_hex(4)}" if keeper is None else _name_of(keeper)
            parent = f"{mount}{path.rstrip('/')}/{name}"
            with contextlib.suppress(OSError):
                _sweep(os.path.dirname(parent))
                os.makedirs(parent, exist_ok=keeper is not None)
                return cls(parent)
        return None

    @property
    def kind(self) -> str:
        """For people: what a kill does here."""
        return "cgroup.kill" if os.path.exists(f"{self.parent}/cgroup.kill") else "cgroup"

    def inherit(self, keeper: int) -> None:
        """What was in the cgroups of a keeper that was killed is in ours, under the same names."""
        for former in former_cgroups(keeper):
            own = Cgroup(f"{self.parent}/{former.name}")
            for pid in former.pids():
                own.take(pid)
        remove_former(keeper)

    def make(self, confinement: Confinement, key: int) -> Cgroup:
        """A cgroup for a process that is about to start, with the limits of all that it will be, if it has some."""
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
        """Those that nobody is in any more; the kernel tells nobody when that comes about."""
        busy = list(self._busy)
        self._busy.clear()
        for directory in busy:
            Cgroup(directory, busy=self._busy).remove()

    def join_later(self, tree: Tree, key: int) -> None:
        """Give a process a cgroup once it has lived for a while. One timer serves all that wait.

        `key` names its cgroup, so that the next server finds it.
        """
        self._young.append((self._loop.time() + JOIN_AFTER_SECONDS, tree, key))
        if self._timer is None:
            self._timer = self._loop.call_later(JOIN_AFTER_SECONDS, self._join_due)

    def rejoin(self, tree: Tree, key: int) -> None:
        """The same for a process of an earlier server, which may have its cgroup."""
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
                tree.cgroup = Cgroup(f"{self.parent}/{key}")
                # Without a pid for the thread it waits for the next: until then the tree is enough to find it.
                with contextlib.suppress(RuntimeError):
                    self._thread.submit(tree.cgroup.join, tree.leader)
        if self._young:
            self._timer = self._loop.call_at(self._young[0][0], self._join_due)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)
        _remove_below(self.parent)
        self._limits.close()


def _hierarchies() -> Iterator[tuple[str, str]]:
    """Where we are in each hierarchy that may serve: version 2 first, then the version 1 freezer."""
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
    """The cgroups of processes whose keeper had this pid; none if somebody has it."""
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
    """Give them back, and the one above them."""
    if not os.path.exists(f"/proc/{keeper}"):
        for mount, path in _hierarchies():
            _remove_below(f"{mount}{path.rstrip('/')}/{_name_of(keeper)}")


def _name_of(keeper: int) -> str:
    return f"holdfast-{keeper}-kept"


def _sweep(directory: str) -> None:
    """Remove what servers left that were killed; a cgroup that somebody is in stays."""
    for name in os.listdir(directory):
        prefix, _, rest = name.partition("-")
        pid = rest.partition("-")[0]
        if prefix == "holdfast" and pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
            _remove_below(f"{directory}/{name}")


def _remove_below(parent: str) -> None:
    try:
        names = os.listdir(parent)
    except FileNotFoundError:
        return  # swept by another server: its keeper is gone, or it does not see our pid
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
