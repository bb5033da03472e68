"""The process table of the machine, and the descendants of a process in it. Reads /proc only.

Descendants are found by parent, by session and by mark. The mark is a soft RLIMIT_RTTIME that no other process has:
it survives fork, exec, setsid, a double fork and `env -i`, it is readable in /proc/PID/limits, and it limits
nothing (over a hundred thousand years of real-time scheduling). A login (su, through pam_limits) resets it; the
cgroup, where there is one, still contains those processes.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import secrets
from collections.abc import Container, Iterable, Sequence
from functools import cached_property
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

#: Marks are large so that they limit nothing, and below 2**63 so that the kernel and Python agree on them.
MARK_BASE: Final = 1 << 62
_MARK_DIGITS: Final = 19
#: The mark where the limit cannot be set; `env -i` removes it.
MARK_VARIABLE: Final = "HOLDFAST_MARK"
#: Without a descriptor a process may exist, and may have a mark: these errors are raised.
NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
_MORE_THAN_ANY_PID: Final = 1 << 23
_LIMITS_LINE: Final = re.compile(rb"^Max realtime timeout +([0-9]{1,19}) ", re.MULTILINE)


class Entry(NamedTuple):
    """One process as /proc shows it."""

    pid: int
    parent: int
    session: int
    #: Clock ticks since boot: with the pid, it names this process and no later one with the same pid.
    started: bytes
    dead: bool


class Row(Protocol):
    """The fields of a process that a table needs."""

    @property
    def parent(self) -> int: ...
    @property
    def session(self) -> int: ...
    @property
    def started(self) -> bytes: ...
    @property
    def dead(self) -> bool: ...


RowT = TypeVar("RowT", bound=Row)


def new_mark() -> int:
    """Return a new mark for one process."""
    return MARK_BASE | secrets.randbits(61)


def limits_can_mark() -> bool:
    """Whether the server's hard limit permits marks; where it does not, an environment variable is the mark."""
    return resource.getrlimit(resource.RLIMIT_RTTIME)[1] == resource.RLIM_INFINITY


def read_mark(pid: int) -> int | None:
    """Return the mark of a process, or None; `OSError` without a descriptor."""
    return _read_limit_mark(pid) if limits_can_mark() else _read_environment_mark(pid)


def _read_environment_mark(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark_in_environment(file.read())
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return None  # ended, or of another user


def mark_in_environment(text: bytes) -> int | None:
    """Return the mark among variables that end with a NUL."""
    prefix = f"{MARK_VARIABLE}=".encode()
    marks = [variable.removeprefix(prefix) for variable in text.split(b"\0") if variable.startswith(prefix)]
    # A program may have set any text, and Python refuses to parse numbers of thousands of digits.
    return int(marks[-1]) if marks and marks[-1].isdigit() and len(marks[-1]) <= _MARK_DIGITS else None


def _read_limit_mark(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/limits", "rb") as file:
            return mark_in_limits(file.read())
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return None  # gone


def mark_in_limits(text: bytes) -> int | None:
    """Return the mark in the text of /proc/PID/limits."""
    found = _LIMITS_LINE.search(text)
    return None if found is None else int(found[1])


def stat_fields(text: bytes) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name, the state first.

    The name in parentheses may contain parentheses: the fields start after the last one.
    """
    return text[text.rindex(b")") + 2 :].split(b" ", 20)


def is_dead(fields: Sequence[bytes]) -> bool:
    """Whether a process with these fields has ended.

    A process whose first thread has ended is shown as a zombie while its other threads run; they are counted.
    """
    return fields[0] in (b"Z", b"X") and int(fields[17]) <= 1


def read_entry(pid: int) -> Entry | None:
    """Return one process, or None if it does not exist; `OSError` without a descriptor."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return None
    try:
        text = os.read(fd, 512)
    except OSError:
        return None
    finally:
        os.close(fd)
    fields = stat_fields(text)
    return Entry(pid, int(fields[1]), int(fields[3]), fields[19], is_dead(fields))


def newest_pids() -> list[int]:
    """Return every pid, the latest first; the kernel assigns pids in order and wraps at the highest."""
    pids = [int(name) for name in os.listdir("/proc") if name[0].isdecimal()]
    with open("/proc/loadavg", "rb") as file:
        last = int(file.read().split()[4])
    return sorted(pids, key=lambda pid: (last - pid) % _MORE_THAN_ANY_PID)


class ProcessTable(Generic[RowT]):
    """All processes at one moment. Derived tables are computed once, at the first use."""

    def __init__(self, entries: dict[int, RowT], *, complete: bool = True) -> None:
        self.entries = entries
        #: False if a new process had ended before its entry was read: it may have forked another.
        self.complete = complete
        self._marks: dict[int, int | None] = {}
        self._orphans: tuple[Container[int], list[int]] | None = None

    @staticmethod
    def read(seen: Container[int] = ()) -> ProcessTable[Entry]:
        """Read the table: about 10 us for each process. `seen` are pids of an earlier table."""
        pids = newest_pids()
        entries = {pid: entry for pid in pids if (entry := read_entry(pid)) is not None}
        return ProcessTable(entries, complete=all(pid in entries or pid in seen for pid in pids))

    @cached_property
    def children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for pid, entry in self.entries.items():
            children.setdefault(entry.parent, []).append(pid)
        return children

    @cached_property
    def sessions(self) -> dict[int, list[int]]:
        sessions: dict[int, list[int]] = {}
        for pid, entry in self.entries.items():
            sessions.setdefault(entry.session, []).append(pid)
        return sessions

    @cached_property
    def adopted(self) -> list[int]:
        """The possible orphans of this server: the children of the server, of its ancestors and of init."""
        adopters = {1}
        pid = os.getpid()
        while pid in self.entries and pid not in adopters:
            adopters.add(pid)
            pid = self.entries[pid].parent
        return [child for adopter in adopters for child in self.children.get(adopter, ())]

    def orphans(self, others: Container[int]) -> list[int]:
        """The possible orphans without `others`, computed once for all trees of a server that use this table."""
        if self._orphans is None or self._orphans[0] is not others:
            self._orphans = others, [pid for pid in self.adopted if pid not in others]
        return self._orphans[1]

    def carries(self, pid: int, mark: int) -> bool:
        """Whether a process has this mark, so descends from the process that got it."""
        if pid not in self._marks:
            self._marks[pid] = read_mark(pid)
        return self._marks[pid] == mark

    def members(
        self,
        leader: int,
        *,
        leader_lives: bool,
        mark: int,
        others: Container[int] = (),
        inside: Iterable[int] = (),
    ) -> dict[int, RowT]:
        """Return the living processes that belong to `leader`, itself included.

        They descend from the leader, from its session, from an orphan with the mark, or are `inside` its cgroup.
        The pid of a reaped leader may be reused: then the mark and the cgroup alone count. `others`, the leaders of
        other processes, are skipped.
        """
        roots = set(self.sessions.get(leader, ()))
        if leader_lives:
            roots.add(leader)
        else:
            roots = {pid for pid in roots if self.carries(pid, mark)}
        candidates = (pid for pid in self.orphans(others) if pid not in roots)
        roots |= {pid for pid in candidates if self.carries(pid, mark)}
        roots.update(inside)
        return self.descendants(roots)

    def descendants(self, roots: Iterable[int]) -> dict[int, RowT]:
        """Return the living processes among `roots` and their descendants."""
        found: dict[int, RowT] = {}
        pending = list(roots)
        while pending:
            pid = pending.pop()
            if pid in self.entries and pid not in found:
                found[pid] = self.entries[pid]
                pending.extend(self.children.get(pid, ()))
        return {pid: entry for pid, entry in found.items() if not entry.dead}
