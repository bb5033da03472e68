"""Resource usage of processes with their descendants, from one pass over /proc for any number of queries.

Reads /proc and the files of cgroups; changes nothing. Descendants are found as for a kill (`process_table`). A pass
runs in short slices between turns of the event loop, because a thousand processes take some tens of milliseconds.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from holdfast.errors import ResourceExhausted
from holdfast.runtime.shell.foreground import ticks_since_boot
from holdfast.runtime.tree.process_table import MARK_BASE, NO_DESCRIPTOR, ProcessTable, is_dead, read_mark
from holdfast.runtime.tree.process_tree import Tree
from holdfast.types import USAGE_PIDS, MemberUsage, ProcessUsage, UsageSample

#: The length of a slice: much longer than a turn of the event loop, which costs microseconds.
SLICE_SECONDS: Final = 0.001
#: The least age of a stray: a process that is being started has no owner for a moment.
STRAY_SECONDS: Final = 1.0
_FILE_BYTES: Final = 4096


class ForegroundActivity(NamedTuple):
    """The foreground of a process, from its terminal or shell."""

    #: The foreground group of a terminal; 0 if there is none.
    group: int = 0
    #: The run time of the command; None if none runs, or if it is unknown.
    seconds: float | None = None
    #: By the kernel's clock of process starts: earlier children of a shell are in the background.
    since_ticks: int | None = None
    awaiting: bool | None = False


class UsageQuery(NamedTuple):
    """One query: a shell may have had several programs, other processes have one."""

    process_id: str
    trees: tuple[Tree, ...]
    running: bool
    printed: int
    activity: ForegroundActivity = ForegroundActivity()
    #: Pids that are not commands: the program itself first, then the processes of its jail.
    own: tuple[int, ...] = ()


class Stat(NamedTuple):
    """One process as /proc/PID/stat shows it. Times are in clock ticks, memory is in pages."""

    name: str
    parent: int
    group: int
    session: int
    cpu: int
    threads: int
    started: bytes
    resident: int
    dead: bool
    #: Without the times of ended children.
    own_cpu: int = 0


def parse_stat(text: bytes) -> Stat:
    """Parse /proc/PID/stat; the name in parentheses may contain parentheses."""
    start, end = text.index(b"("), text.rindex(b")")
    f = text[end + 2 :].split(b" ", 22)
    # The times of ended children are in the parent after its wait.
    cpu = int(f[11]) + int(f[12]) + int(f[13]) + int(f[14])
    return Stat(
        text[start + 1 : end].decode("utf-8", "replace"),
        int(f[1]),
        int(f[2]),
        int(f[3]),
        cpu,
        int(f[17]),
        f[19],
        int(f[21]),
        is_dead(f),
        int(f[11]) + int(f[12]),
    )


def counter(text: bytes, name: bytes) -> int:
    """Return the number after a name at the start of a line, as in /proc/PID/io and cgroup files, or 0.

    The rest of the file is not parsed: a thousand processes are a thousand such files.
    """
    start = 0 if text.startswith(name) else text.find(b"\n" + name) + 1
    end = text.find(b"\n", start)
    if end < 0 or not text.startswith(name, start):
        return 0  # missing, or cut off at the end of the read
    return int(text[start + len(name) : end])


class StorageCounters(NamedTuple):
    """The storage counters of processes at a CPU time of their cgroup."""

    cpu_seconds: float
    processes: tuple[tuple[int, bytes], ...]
    read: int
    written: int


class UsageSampler:
    """Samples usage, one pass at a time."""

    def __init__(self, keeper: int | None = None) -> None:
        self._turn = asyncio.Lock()
        self._parents = (os.getpid(),) if keeper is None else (os.getpid(), keeper)
        #: Marks of orphans by pid and start, which do not change; from the last pass only.
        self._marks: dict[tuple[int, bytes], int | None] = {}
        #: By the mark of the tree; without forgotten processes.
        self._storage_counters: dict[int, StorageCounters] = {}
        self._tick = 1.0 / os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._slice_began = 0.0

    async def sample(
        self,
        query: Sequence[UsageQuery],
        *,
        leaders: Callable[[], Container[int]],
        known_marks: Callable[[], Container[int]],
        list_members: bool = False,
    ) -> UsageSample:
        """Return one sample for all queries; `ResourceExhausted` without a descriptor to read /proc.

        `leaders` are the processes of the server, `known_marks` the marks of those that are not forgotten; both are
        called after the table is read, since it may include processes that were started meanwhile.
        """
        try:
            async with self._turn:
                return await self._sample(query, leaders, known_marks, list_members)
        except OSError as error:
            raise ResourceExhausted(f"/proc cannot be read: {error.strerror}") from None

    async def _sample(
        self,
        query: Sequence[UsageQuery],
        leaders: Callable[[], Container[int]],
        known_marks: Callable[[], Container[int]],
        list_members: bool,
    ) -> UsageSample:
        self._slice_began = time.perf_counter()
        # From before the read: see `Tree.members`.
        lives = {tree.leader: tree.leader_lives for each in query for tree in each.trees}
        table = ProcessTable(await self._read_all())
        orphans = await self._orphans(table, leaders())
        now = ticks_since_boot()
        usages: list[ProcessUsage] = []
        for each in query:
            inside = {pid for tree in each.trees if tree.cgroup is not None for pid in tree.cgroup.pids()}
            members = self._members(each, table, orphans, lives, inside)
            usage = await self._usage(each, members, inside, now)
            listed = await self._list_members(members, now) if list_members else ()
            usages.append(msgspec.structs.replace(usage, members=listed) if listed else usage)
            if self._is_over_time():
                await self._yield_to_loop()
        known = known_marks()
        self._storage_counters = {mark: each for mark, each in self._storage_counters.items() if mark in known}
        return UsageSample(tuple(usages), self._strays(table, orphans, known, now))

    def _is_over_time(self) -> bool:
        return time.perf_counter() - self._slice_began > SLICE_SECONDS

    async def _yield_to_loop(self) -> None:
        await asyncio.sleep(0)
        self._slice_began = time.perf_counter()

    async def _read_all(self) -> dict[int, Stat]:
        stats: dict[int, Stat] = {}
        for name in os.listdir("/proc"):
            if name[0].isdecimal():
                text = _read(f"/proc/{name}/stat")
                if text:
                    stats[int(name)] = parse_stat(text)
                if self._is_over_time():
                    await self._yield_to_loop()
        return stats

    # --- membership ------------------------------------------------------------------------------------------

    async def _orphans(self, table: ProcessTable[Stat], leaders: Container[int]) -> dict[int, list[int]]:
        """Return the orphans by mark."""
        found: dict[int, list[int]] = {}
        marks: dict[tuple[int, bytes], int | None] = {}
        for pid in table.adopted:
            if pid in leaders:
                continue
            key = (pid, table.entries[pid].started)
            mark = marks[key] = self._marks[key] if key in self._marks else read_mark(pid)
            if mark is not None:
                found.setdefault(mark, []).append(pid)
            if self._is_over_time():
                await self._yield_to_loop()
        self._marks = marks
        return found

    def _members(
        self,
        query: UsageQuery,
        table: ProcessTable[Stat],
        orphans: Mapping[int, list[int]],
        lives: Mapping[int, bool],
        inside: Iterable[int],
    ) -> dict[int, Stat]:
        """Return the members as `ProcessTable.members` does, with the orphans found once for all queries."""
        roots = set(inside)
        for tree in query.trees:
            of_session = table.sessions.get(tree.leader, ())
            if lives[tree.leader]:
                roots.add(tree.leader)
                roots.update(of_session)
            else:
                roots.update(pid for pid in of_session if table.carries(pid, tree.mark))
            roots.update(orphans.get(tree.mark, ()))
        return table.descendants(roots)

    def _strays(
        self, table: ProcessTable[Stat], orphans: Mapping[int, list[int]], known_marks: Container[int], now: int
    ) -> tuple[int, ...]:
        ours = {child for parent in self._parents for child in table.children.get(parent, ())}
        roots = [
            pid
            for mark, pids in orphans.items()
            if mark >= MARK_BASE and mark not in known_marks
            for pid in pids
            if pid in ours and (now - int(table.entries[pid].started)) * self._tick > STRAY_SECONDS
        ]
        return tuple(sorted(table.descendants(roots))[:USAGE_PIDS])

    # --- usage -----------------------------------------------------------------------------------------------

    async def _usage(
        self, query: UsageQuery, members: Mapping[int, Stat], inside: Container[int], now: int
    ) -> ProcessUsage:
        ticks = threads = pages = 0
        for stat in members.values():
            ticks += stat.cpu
            threads += stat.threads
            pages += stat.resident
        cpu, memory, in_cgroups = ticks * self._tick, pages * self._page, 0.0
        cgroups = [tree.cgroup.path for tree in query.trees if tree.cgroup is not None]
        if cgroups:
            in_cgroups = sum(cgroup_cpu_seconds(path) for path in cgroups)
            # A cgroup includes ended processes without a wait; the tree includes the time before the cgroup.
            cpu = max(cpu, in_cgroups)
            memory = sum(cgroup_memory(path) for path in cgroups) or memory
        whole = bool(in_cgroups) and len(query.trees) == 1 and all(pid in inside for pid in members)
        read, written = await self._storage(members, query.trees[0].mark if whole else None, in_cgroups)
        name, seconds, background = _activity(query, members, now, self._tick)
        return ProcessUsage(
            process_id=query.process_id,
            running=query.running,
            process_count=len(members),
            thread_count=threads,
            pids=tuple(sorted(members)[:USAGE_PIDS]),
            cpu_seconds=round(cpu, 3),
            memory_bytes=memory,
            read_bytes=read,
            written_bytes=written,
            printed_bytes=query.printed,
            foreground=name,
            foreground_seconds=round(seconds, 3),
            awaiting_input=query.activity.awaiting if name is not None else False,
            background_seconds=round(background, 3),
        )

    async def _list_members(self, members: Mapping[int, Stat], now: int) -> tuple[MemberUsage, ...]:
        found: list[MemberUsage] = []
        for pid, stat in sorted(members.items())[:USAGE_PIDS]:
            line = _read(f"/proc/{pid}/cmdline")  # its first page, which bounds the reply
            found.append(
                MemberUsage(
                    pid=pid,
                    parent=stat.parent,
                    name=stat.name,
                    argv=tuple(line.decode("utf-8", "replace").rstrip("\0").split("\0")) if line else (),
                    cpu_seconds=round(stat.own_cpu * self._tick, 3),
                    memory_bytes=stat.resident * self._page,
                    thread_count=stat.threads,
                    seconds=round(max(0, now - int(stat.started)) * self._tick, 3),
                )
            )
            if self._is_over_time():
                await self._yield_to_loop()
        return tuple(found)

    async def _storage(self, members: Mapping[int, Stat], mark: int | None, cpu_seconds: float) -> tuple[int, int]:
        """Return the bytes read and written.

        With the mark of a tree that is all in one cgroup, an unchanged CPU time of the cgroup means unchanged
        counters. The CPU time of processes is too coarse: hundredths of a second, a cgroup's are millionths.
        """
        processes = tuple((pid, stat.started) for pid, stat in members.items()) if mark is not None else ()
        before = self._storage_counters.get(mark) if mark is not None else None
        if before is not None and before.cpu_seconds == cpu_seconds and before.processes == processes:
            return before.read, before.written
        read = written = 0
        complete = True
        for pid in members:
            counters = _read(f"/proc/{pid}/io")  # empty without permission or a process
            complete &= bool(counters)
            read += counter(counters, b"read_bytes:")
            written += counter(counters, b"write_bytes:")
            if self._is_over_time():
                await self._yield_to_loop()
        if mark is not None and complete:
            self._storage_counters[mark] = StorageCounters(cpu_seconds, processes, read, written)
        return read, written


def cgroup_cpu_seconds(path: str) -> float:
    """Return the CPU time of a cgroup; 0 where it is not counted: version 1 has it in another hierarchy."""
    return counter(_read(f"{path}/cpu.stat"), b"usage_usec ") / 1e6


def cgroup_memory(path: str) -> int:
    """Return the memory that counts for the limit of a cgroup, without the file pages that are reclaimed first.

    0 without a memory controller.
    """
    current = _read(f"{path}/memory.current").strip()
    if not current.isdigit():
        return 0
    spare = counter(_read(f"{path}/memory.stat"), b"inactive_file ")
    return max(0, int(current) - spare)


def _activity(
    query: UsageQuery, members: Mapping[int, Stat], now: int, tick: float
) -> tuple[str | None, float, float]:
    """Return the name and the run time of the foreground, and the age of the oldest background process."""
    activity = query.activity
    others = {pid: stat for pid, stat in members.items() if pid not in query.own}
    if activity.group:
        front = {pid: stat for pid, stat in others.items() if stat.group == activity.group}
    elif activity.since_ticks is not None:
        front = {pid: stat for pid, stat in others.items() if int(stat.started) >= activity.since_ticks}
    else:
        front = {}
    background = _oldest((stat for pid, stat in others.items() if pid not in front), now) * tick
    if front:
        first = front.get(activity.group) or min(front.values(), key=lambda stat: int(stat.started))
        return first.name, max(_oldest(front.values(), now) * tick, activity.seconds or 0.0), background
    if activity.seconds is not None:
        # A builtin, or a loop between two programs: the shell itself runs.
        own = next((members[pid].name for pid in query.own if pid in members), "")
        return own, activity.seconds, background
    return None, 0.0, background


def _oldest(stats: Iterable[Stat], now: int) -> int:
    return max((now - int(stat.started) for stat in stats), default=0)


def _read(path: str) -> bytes:
    """Return the content of a small kernel file; empty if it is missing or not readable."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return b""
    try:
        return os.read(fd, _FILE_BYTES)
    except OSError:
        return b""
    finally:
        os.close(fd)
