"""Ends a process and all its descendants, also those that left its session or its parent.

TERM, a grace period, KILL; before the KILL all members are stopped, so that none forks; repeated until the process
table has no member.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Container, Iterable
from typing import Final

from holdfast.errors import ResourceExhausted, SandboxError
from holdfast.runtime.tree.cgroup import Cgroup
from holdfast.runtime.tree.pid_handles import PidHandles
from holdfast.runtime.tree.process_table import Entry
from holdfast.runtime.tree.table_reader import TableReader

#: The time for killed processes to exit. One in uninterruptible sleep may never exit: that is an error.
KILL_TIMEOUT: Final = 10.0
#: Between two attempts of a server without descriptors: as short as a person notices.
SCARCE_SECONDS: Final = 0.05


class Tree:
    """One process and its descendants."""

    __slots__ = ("_mark", "_tables", "cgroup", "killed", "leader", "leader_lives", "leader_waits")

    def __init__(self, leader: int, mark: int, tables: TableReader) -> None:
        self.leader = leader
        #: False from the moment the leader was reaped.
        self.leader_lives = True
        #: Whether the leader only waits for the others and reports their exit status: then it gets no TERM.
        self.leader_waits = False
        #: Whether this server has sent, or is about to send, KILL.
        self.killed = False
        #: The cgroup of the leader, once it was moved.
        self.cgroup: Cgroup | None = None
        self._mark = mark
        self._tables = tables

    @property
    def mark(self) -> int:
        """The mark of every descendant."""
        return self._mark

    async def members(self, others: Container[int]) -> dict[int, Entry]:
        """Return the living members. `others`, the leaders of other processes, are skipped."""
        # From before the read: the leader may be reaped meanwhile, and in the table its children still have it as
        # their parent. As orphans they would not be found.
        leader_lives = self.leader_lives
        table = await self._tables.read()
        try:
            inside = self.cgroup.pids() if self.cgroup is not None else ()
            members = table.members(
                self.leader, leader_lives=leader_lives, mark=self._mark, others=others, inside=inside
            )
            return members if members or table.complete else await self._tables.hunt(self._mark)
        except OSError as error:
            raise ResourceExhausted(f"processes cannot be found: {error.strerror}") from None

    async def end(self, others: Container[int], grace: float) -> None:
        """End every member (`end_all`); a `grace` of 0 kills at once."""
        self.killed = True
        kill = self.cgroup.kill if self.cgroup is not None else None
        spared = (self.leader,) if self.leader_waits and self.leader_lives else ()
        await end_all(lambda: self.members(others), grace, kill, spared)


class Strays:
    """Children of the server that belong to no known process: adopted orphans and their descendants.

    The `keeper` has those of earlier servers.
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


#: Returns the living processes among those to end.
Find = Callable[[], Awaitable[dict[int, Entry]]]


async def end_all(
    find: Find, grace: float, kill_at_once: Callable[[], None] | None = None, spared: Iterable[int] = ()
) -> None:
    """Send TERM, wait up to `grace` seconds, send KILL; repeat until `find` returns none. `spared` get no TERM."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace
    signalled = set(spared)

    async def ask() -> bool:
        members = await find()
        with PidHandles(members.values()) as handles:
            # Once each: a second TERM would interrupt the handler of the first.
            handles.send(signal.SIGTERM, except_for=signalled)
            handles.send(signal.SIGCONT)  # a stopped process handles TERM only after SIGCONT
            signalled.update(members.keys() - handles.left_out)
            await handles.wait_gone(deadline - loop.time())
        return bool(members)

    async def kill() -> bool:
        members = await _freeze(find)
        with PidHandles(members.values()) as handles:
            handles.send(signal.SIGKILL)
            await handles.wait_gone(deadline - loop.time())
        return bool(members)

    while grace > 0 and await _with_descriptors(ask, deadline + KILL_TIMEOUT):
        if loop.time() >= deadline:
            break
    deadline = loop.time() + KILL_TIMEOUT
    if kill_at_once is not None:
        kill_at_once()
    while await _with_descriptors(kill, deadline):
        if loop.time() >= deadline:
            left = sorted(await find())
            if left:
                raise SandboxError(f"processes {left} do not die: they are blocked in the kernel")


async def _with_descriptors(step: Callable[[], Awaitable[bool]], deadline: float) -> bool:
    """Run a step, again while descriptors are scarce: a kill that is given up halfway leaves processes behind.

    Their release is no event, so this waits between two attempts. Raises `ResourceExhausted` after `deadline`.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await step()
        except ResourceExhausted:
            if loop.time() >= deadline:
                raise
        await asyncio.sleep(SCARCE_SECONDS)


async def _freeze(find: Find) -> dict[int, Entry]:
    """Stop all members, also those forked meanwhile; returns them."""
    stopped: dict[int, Entry] = {}
    while fresh := [entry for pid, entry in (await find()).items() if pid not in stopped]:
        with PidHandles(fresh) as handles:
            handles.send(signal.SIGSTOP)
        stopped.update((entry.pid, entry) for entry in fresh if entry.pid not in handles.left_out)
    return stopped
