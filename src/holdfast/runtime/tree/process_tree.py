"""Ends everything that a process started, whatever it did to get away. Sends signals, by pidfd.

TERM, a grace, KILL; before the KILL everything is stopped, so that nothing forks away from it; and again until a
look at the process table finds nobody.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Awaitable, Callable, Container, Iterable
from typing import Final

from holdfast.errors import ResourceExhausted, SandboxError
from holdfast.runtime.tree.cgroup import Cgroup
from holdfast.runtime.tree.process_table import Entry, TableReader, newest_pids, read_entry, read_mark

#: How long killed processes may take to be gone. One in uninterruptible sleep can take for ever: that is told.
KILL_TIMEOUT: Final = 10.0
#: How often, and how many, when a process is hunted: some 20 ms in all.
HUNTS: Final = 40
HUNTED: Final = 16


class Tree:
    """One process and all it started."""

    __slots__ = ("_mark", "_tables", "cgroup", "leader", "leader_lives", "leader_waits")

    def __init__(self, leader: int, mark: int, tables: TableReader) -> None:
        self.leader = leader
        #: False from the moment the leader was reaped.
        self.leader_lives = True
        #: The leader does nothing but wait for the others, and tells how they ended: it gets no TERM.
        self.leader_waits = False
        #: Where the leader was put, once it was.
        self.cgroup: Cgroup | None = None
        self._mark = mark
        self._tables = tables

    @property
    def mark(self) -> int:
        """What everything that it started carries."""
        return self._mark

    async def members(self, others: Container[int]) -> dict[int, Entry]:
        """Who is alive of it. `others` are the leaders of other processes, so that they need not be looked at."""
        # As it was when the table was read: the leader may be reaped before we go on, and in the table its children
        # still hang from it. Taken for orphans by then, they would be found nowhere.
        leader_lives = self.leader_lives
        table = await self._tables.read()
        inside = self.cgroup.pids() if self.cgroup is not None else ()
        members = table.members(
            self.leader, leader_lives=leader_lives, mark=self._mark, others=others, inside=inside
        )
        return members if members or table.complete else self._hunt()

    def _hunt(self) -> dict[int, Entry]:
        """Stop one that is never there when we come: each of its kind forks the next and ends.

        A whole table takes longer to read than such a process lives, so look at the newest few alone, often.
        """
        for _ in range(HUNTS):
            for pid in newest_pids()[:HUNTED]:
                if read_mark(pid) != self._mark or (entry := read_entry(pid)) is None or entry.dead:
                    continue
                with PidHandles((entry,)) as handles:
                    handles.send(signal.SIGSTOP)
                return {pid: entry}
        return {}

    async def end(self, others: Container[int], grace: float) -> None:
        """TERM, up to `grace` seconds, KILL, until nothing is left. `grace` 0 kills at once."""
        kill = self.cgroup.kill if self.cgroup is not None else None
        spared = (self.leader,) if self.leader_waits and self.leader_lives else ()
        await end_all(lambda: self.members(others), grace, kill, spared)


class Strays:
    """Children of ours that belong to no process we know: orphans that we adopted, and all they started.

    `keeper` has those of the servers before us.
    """

    def __init__(self, tables: TableReader, keeper: int | None = None) -> None:
        self._tables = tables
        self._parents = (os.getpid(),) if keeper is None else (os.getpid(), keeper)

    async def end(self, leaders: Container[int], grace: float) -> None:
        await end_all(lambda: self._find(leaders), grace)

    async def _find(self, leaders: Container[int]) -> dict[int, Entry]:
        table = await self._tables.read()
        ours = [pid for parent in self._parents for pid in table.children.get(parent, ()) if pid != os.getpid()]
        return table.descendants(pid for pid in ours if pid not in leaders)


#: Looks who is alive of those that are to end.
Find = Callable[[], Awaitable[dict[int, Entry]]]


async def end_all(
    find: Find, grace: float, kill_at_once: Callable[[], None] | None = None, spared: Iterable[int] = ()
) -> None:
    """TERM, up to `grace` seconds, KILL, and again until `find` finds nobody. Those `spared` get no TERM."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace
    told = set(spared)
    while grace > 0 and (members := await find()):
        with PidHandles(members.values()) as handles:
            # Once each: a second TERM would cut short what the first made the process do.
            handles.send(signal.SIGTERM, except_for=told)
            handles.send(signal.SIGCONT)  # a stopped process takes its TERM only when it goes on
            told |= members.keys() - handles.left_out
            await handles.wait_gone(deadline - loop.time())
        if loop.time() >= deadline:
            break
    deadline = loop.time() + KILL_TIMEOUT
    if kill_at_once is not None:
        kill_at_once()
    while members := await _freeze(find):
        with PidHandles(members.values()) as handles:
            handles.send(signal.SIGKILL)
            await handles.wait_gone(deadline - loop.time())
        if loop.time() >= deadline:
            left = sorted(await find())
            if left:
                raise SandboxError(f"processes {left} do not die: the kernel keeps them in an operation")


async def _freeze(find: Find) -> dict[int, Entry]:
    """Stop all members, also those that are forked while we look; returns them, stopped."""
    stopped: dict[int, Entry] = {}
    while fresh := [entry for pid, entry in (await find()).items() if pid not in stopped]:
        with PidHandles(fresh) as handles:
            handles.send(signal.SIGSTOP)
        stopped.update((entry.pid, entry) for entry in fresh if entry.pid not in handles.left_out)
    return stopped


class PidHandles:
    """pidfds of some processes: signals reach these and no namesakes, and their end is an event.

    If there are not enough descriptors for all, the others are `left_out`: whoever looks again finds them.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._fds: dict[int, int] = {}
        self.left_out: set[int] = set()
        for entry in entries:
            if self.left_out:
                self.left_out.add(entry.pid)
                continue
            try:
                self._open(entry)
            except ProcessLookupError:
                continue
            except OSError as error:
                self.left_out.add(entry.pid)
                if error.errno in (errno.EMFILE, errno.ENFILE) and len(self._fds) > 1:
                    # Whoever looks at the process table meanwhile needs one.
                    pid, fd = self._fds.popitem()
                    self.left_out.add(pid)
                    os.close(fd)
                    continue
                self.__exit__()
                raise ResourceExhausted(f"process {entry.pid} cannot be signalled: {error.strerror}") from None

    def _open(self, entry: Entry) -> None:
        fd = os.pidfd_open(entry.pid)
        try:
            now = read_entry(entry.pid)
        except OSError:
            os.close(fd)
            raise
        if now is not None and now.started == entry.started:
            self._fds[entry.pid] = fd
        else:
            os.close(fd)

    def __enter__(self) -> PidHandles:
        return self

    def __exit__(self, *exc: object) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def send(self, number: signal.Signals, except_for: Container[int] = ()) -> None:
        for pid, fd in self._fds.items():
            if pid in except_for:
                continue
            try:
                signal.pidfd_send_signal(fd, number)
            except (ProcessLookupError, PermissionError):
                continue  # gone, or a setuid program that is not ours to signal: the end of `Tree.end` tells it

    async def wait_gone(self, timeout: float) -> None:
        """Until every one has ended, or `timeout` seconds."""
        loop = asyncio.get_running_loop()
        left = set(self._fds.values())
        done = asyncio.Event()

        def gone(fd: int) -> None:
            loop.remove_reader(fd)
            left.discard(fd)
            if not left:
                done.set()

        for fd in tuple(left):
            loop.add_reader(fd, gone, fd)
        try:
            if left:
                async with asyncio.timeout(max(0.0, timeout)):
                    await done.wait()
        except TimeoutError:
            pass
        finally:
            for fd in left:
                loop.remove_reader(fd)
