"""Finds and ends everything that a process started, whatever it did to get away. Touches /proc and signals.

Three threads lead to a descendant: its parents up to the leader; the leader's session; and the mark. The mark is a
soft RLIMIT_RTTIME that no other process has: it survives fork, exec, setsid, a double fork, `env -i` and sudo, it
can be read of any process in /proc/PID/limits, and it limits nothing (over a hundred thousand years of real-time
scheduling).
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import signal
from collections.abc import Container, Iterable
from typing import Final, NamedTuple

from holdfast.errors import SandboxError

#: Marks are large so that they limit nothing, and below 2**63 so that the kernel and Python agree on them.
_MARK_BASE: Final = 1 << 62
#: How long killed processes may take to be gone. One in uninterruptible sleep can take for ever: that is told.
KILL_TIMEOUT: Final = 10.0
_LIMITS_LINE: Final = b"Max realtime timeout"


class Entry(NamedTuple):
    """One process as /proc shows it."""

    pid: int
    parent: int
    session: int
    #: Clock ticks since boot: with the pid, it names this process and no later one with the same pid.
    started: bytes
    dead: bool


def new_mark() -> int | None:
    """A mark for one process, or None where the hard limit leaves no room for marks."""
    if resource.getrlimit(resource.RLIMIT_RTTIME)[1] != resource.RLIM_INFINITY:
        return None
    return _MARK_BASE | secrets.randbits(61)


def read_table() -> dict[int, Entry]:
    """Every process of the machine. One open, read and close each: about 10 us."""
    table: dict[int, Entry] = {}
    for name in os.listdir("/proc"):
        if name[0].isdecimal():
            entry = _read_entry(name)
            if entry is not None:
                table[entry.pid] = entry
    return table


def _read_entry(name: str) -> Entry | None:
    try:
        fd = os.open(f"/proc/{name}/stat", os.O_RDONLY)
    except OSError:
        return None
    try:
        text = os.read(fd, 512)
    except OSError:
        return None
    finally:
        os.close(fd)
    # The name in parentheses may hold anything, parentheses included: the fields start behind the last one.
    fields = text[text.rindex(b")") + 2 :].split(b" ", 20)
    return Entry(int(name), int(fields[1]), int(fields[3]), fields[19], fields[0] in (b"Z", b"X"))


def has_mark(pid: int, mark: int) -> bool:
    """Whether this process carries the mark: it descends from the process that was given it."""
    try:
        with open(f"/proc/{pid}/limits", "rb") as file:
            for line in file:
                if line.startswith(_LIMITS_LINE):
                    return line.split()[3] == b"%d" % mark
    except OSError:
        pass
    return False


def find_members(
    table: dict[int, Entry], leader: int, *, leader_lives: bool, mark: int | None, others: frozenset[int]
) -> dict[int, Entry]:
    """The living processes that belong to `leader`, itself included. `others` are leaders of other processes.

    They descend from the leader, from its session, or from an orphan (a child of ours, of init, or of another
    ancestor) with the mark. Once the leader was reaped its pid may be another's: then the mark alone counts.
    """
    children: dict[int, list[int]] = {}
    for entry in table.values():
        children.setdefault(entry.parent, []).append(entry.pid)
    roots = {entry.pid for entry in table.values() if entry.session == leader}
    if leader_lives:
        roots.add(leader)
    else:
        roots = {pid for pid in roots if mark is not None and has_mark(pid, mark)}
    if mark is not None:
        for adopter in _adopters(table):
            for orphan in children.get(adopter, ()):
                if orphan not in roots and orphan not in others and has_mark(orphan, mark):
                    roots.add(orphan)
    members: dict[int, Entry] = {}
    pending = list(roots)
    while pending:
        pid = pending.pop()
        if pid in table and pid not in members:
            members[pid] = table[pid]
            pending.extend(children.get(pid, ()))
    return {pid: entry for pid, entry in members.items() if not entry.dead}


def _adopters(table: dict[int, Entry]) -> set[int]:
    """Who gets our descendants when their parent dies: us as subreaper, or the next one up."""
    adopters = {1}
    pid = os.getpid()
    while pid in table and pid not in adopters:
        adopters.add(pid)
        pid = table[pid].parent
    return adopters


class TreeScanner:
    """Reads the process table for whoever asks in the same turn of the loop: a thousand kills read it once."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[dict[int, Entry]]] = []

    async def scan(self) -> dict[int, Entry]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[dict[int, Entry]] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._read)
        self._waiting.append(future)
        return await future

    def _read(self) -> None:
        waiting, self._waiting = self._waiting, []
        table = read_table()
        for future in waiting:
            if not future.done():
                future.set_result(table)


class Tree:
    """One process and all it started."""

    __slots__ = ("_mark", "_scanner", "leader", "leader_lives")

    def __init__(self, leader: int, mark: int | None, scanner: TreeScanner) -> None:
        self.leader = leader
        #: False from the moment the leader was reaped.
        self.leader_lives = True
        self._mark = mark
        self._scanner = scanner

    async def members(self, others: frozenset[int]) -> dict[int, Entry]:
        """Who is alive of it. `others` are the leaders of other processes, so that they need not be looked at."""
        table = await self._scanner.scan()
        return find_members(table, self.leader, leader_lives=self.leader_lives, mark=self._mark, others=others)

    async def end(self, others: frozenset[int], grace: float) -> None:
        """TERM, up to `grace` seconds, KILL, until nothing is left. `grace` 0 kills at once."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace
        told: set[int] = set()
        while grace > 0 and (members := await self.members(others)):
            with PidHandles(members.values()) as handles:
                # Once each: a second TERM would cut short what the first made the process do.
                handles.send(signal.SIGTERM, except_for=told)
                handles.send(signal.SIGCONT)  # a stopped process takes its TERM only when it goes on
                told |= members.keys()
                await handles.wait_gone(deadline - loop.time())
            if loop.time() >= deadline:
                break
        deadline = loop.time() + KILL_TIMEOUT
        while members := await self._freeze(others):
            with PidHandles(members.values()) as handles:
                handles.send(signal.SIGKILL)
                await handles.wait_gone(deadline - loop.time())
            if loop.time() >= deadline:
                left = sorted(await self.members(others))
                if left:
                    raise SandboxError(f"processes {left} do not die: the kernel keeps them in an operation")

    async def _freeze(self, others: frozenset[int]) -> dict[int, Entry]:
        """Stop all members, also those that are forked while we look; returns them, stopped."""
        stopped: dict[int, Entry] = {}
        while True:
            members = await self.members(others)
            fresh = [entry for pid, entry in members.items() if pid not in stopped]
            if not fresh:
                return stopped
            with PidHandles(fresh) as handles:
                handles.send(signal.SIGSTOP)
            stopped.update((entry.pid, entry) for entry in fresh)


class PidHandles:
    """pidfds of some processes: signals reach these and no namesakes, and their end is an event."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._fds: dict[int, int] = {}
        for entry in entries:
            try:
                fd = os.pidfd_open(entry.pid)
            except OSError:
                continue  # gone already, or no descriptors left: the next scan finds it again
            now = _read_entry(str(entry.pid))
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
