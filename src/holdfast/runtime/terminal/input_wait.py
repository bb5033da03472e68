"""Whether a program waits for input from its terminal, by the kernel's state. Reads /proc and the master of a PTY.

A program waits if the terminal holds no unread input and one of its threads is blocked in a read of the terminal,
or in a poll, select or epoll that watches it for input. Programs that count are those of the terminal's foreground
group and those that a member of it has started in another session (`su USER -c`, `setsid -w`): job control stops
readers of the terminal's own session alone. /proc/PID/syscall has the call in which a thread is blocked; a thread
that was woken and has not run yet is shown as running. Not detected: programs that wait in io_uring, and 32-bit
programs on a 64-bit kernel.
"""

from __future__ import annotations

import errno
import os
import re
import select
import stat
import struct
import termios
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import chain, islice
from typing import Final, Literal, NamedTuple

from holdfast.runtime.libc import open_pty_peer, stat_cached
from holdfast.runtime.tree.process_table import read_entry, stat_fields

CallKind = Literal["read", "poll", "select", "epoll", "restart", "ring"]

#: The calls that can wait for a terminal. A `splice` reads its first descriptor as `read` does.
_KINDS: Final[dict[str, CallKind]] = {
    "read": "read",
    "readv": "read",
    "splice": "read",
    "poll": "poll",
    "ppoll": "poll",
    "select": "select",
    "pselect6": "select",
    "epoll_wait": "epoll",
    "epoll_pwait": "epoll",
    "epoll_pwait2": "epoll",
    "restart_syscall": "restart",
    "io_uring_enter": "ring",
}
_NUMBERS: Final = {
    "x86_64": "read 0 readv 19 splice 275 poll 7 ppoll 271 select 23 pselect6 270 epoll_wait 232 epoll_pwait 281"
    " epoll_pwait2 441 restart_syscall 219 io_uring_enter 426",
    "aarch64": "read 63 readv 65 splice 76 ppoll 73 pselect6 72 epoll_pwait 22 epoll_pwait2 441"
    " restart_syscall 128 io_uring_enter 426",
}
#: Their kinds by number, for each architecture.
CALLS: Final[dict[str, dict[int, CallKind]]] = {
    machine: {int(number): _KINDS[name] for name, number in re.findall(r"(\w+) (\d+)", table)}
    for machine, table in _NUMBERS.items()
}

_LOCAL_FLAGS: Final = 3
_DEV_TTY: Final = os.makedev(5, 0)
#: poll(2) and epoll(7) give both the same numbers.
_FOR_INPUT: Final = select.POLLIN | select.POLLRDNORM
_POLLFD: Final = struct.Struct("=ihh")
_EPOLL_TARGET: Final = re.compile(rb"^tfd:\s*(\d+)\s+events:\s*([0-9a-f]+)", re.MULTILINE)
_INT: Final = 0xFFFF_FFFF
#: The stack and the code of a 32-bit program lie below, and its calls have other numbers.
_WIDE: Final = 1 << 32
_HIGHEST_ADDRESS: Final = 1 << 63

#: How often to probe again when the foreground changes during a probe. It changes twice a command of a shell.
_PROBES: Final = 4
#: 10 us each. With more threads the result is unknown, rather than a delay of every other terminal.
_MOST_THREADS: Final = 1024
#: 5 to 9 us each, the lowest first: a program has its terminal before it has its thousand sockets.
_MOST_DESCRIPTORS: Final = 1024
#: 8192 entries of poll(2).
_MOST_MEMORY: Final = 64 * 1024
#: 10,000 descriptors in an epoll.
_MOST_FDINFO: Final = 1024 * 1024
#: 8,000 pids.
_MOST_CHILDREN: Final = 64 * 1024
#: The kernel gives files of /proc a few pages at a time.
_PAGES: Final = 16 * 1024

#: Returns the pids that may be in the foreground, or descend from it: a superset.
Candidates = Callable[[], Iterable[int]]


def every_process() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name[0].isdecimal())


class InputState(NamedTuple):
    """The state of the input of a terminal."""

    #: None if it cannot be read: no permission, an unknown architecture.
    awaiting: bool | None
    #: The process that waits, if any; else the leader of the foreground group, if it lives.
    pid: int | None
    echo: bool
    #: The terminal delivers whole lines, which can be edited.
    canonical: bool


def input_state(master: int, candidates: Candidates = every_process) -> InputState:
    """The state of the terminal with this `master`. Neither reads from it nor blocks.

    `candidates` are called only if the leader of the foreground group does not wait.

    Valid for all that was written to `master` before. A process must have the other side open, or have had it: the
    first open and close, as done here, would cause a hang-up.
    """
    awaiting: bool | None
    try:
        peer = open_pty_peer(master, os.O_RDONLY)
        try:
            awaiting, pid = _probe_input(master, peer, candidates)
        finally:
            os.close(peer)
    except OSError as error:
        # Hung up; else out of descriptors, a kernel without this call, or a program that set TIOCEXCL.
        awaiting, pid = (False if error.errno == errno.EIO else None), None
    # The modes last: a program sets them before it waits.
    mode = line_mode(master)
    return InputState(False, None, False, False) if mode is None else InputState(awaiting, pid, *mode)


def line_mode(master: int) -> tuple[bool, bool] | None:
    """Whether the terminal echoes, and whether it delivers whole lines; None if it was hung up."""
    try:
        flags: int = termios.tcgetattr(master)[_LOCAL_FLAGS]
    except termios.error as error:
        if error.args[0] != errno.EIO:
            raise OSError(*error.args) from None  # not a terminal at all
        return None
    return bool(flags & termios.ECHO), bool(flags & termios.ICANON)


def blocked_in_read(pid: int) -> int | None:
    """The descriptor on which a process is blocked in read(2); None if it is not, or it cannot be read."""
    try:
        call = parse_call(_contents(f"/proc/{pid}/syscall"))
    except OSError:
        return None
    if call is None or CALLS.get(os.uname().machine, {}).get(call.number) != "read":
        return None
    return call.arguments[0] & _INT


# --- the foreground ------------------------------------------------------------------------------------------


def _probe_input(master: int, peer: int, candidates: Candidates) -> tuple[bool | None, int | None]:
    calls = CALLS.get(os.uname().machine)
    poll = select.poll()
    poll.register(peer, select.POLLIN)
    for _ in range(_PROBES):
        group = os.tcgetpgrp(master)
        # A poll of a terminal first flushes all that was written to the master, so input is at every moment either
        # unread or read.
        if group <= 0 or poll.poll(0):
            return False, _living(group)
        if calls is None:
            return None, _living(group)
        probe = _InputProbe(calls, os.fstat(peer), candidates)
        waiter = probe.first_waiting(group)
        if os.tcgetpgrp(master) != group or (waiter is not None and poll.poll(0)):
            continue
        if waiter is not None:
            return True, waiter
        return (None if probe.incomplete else False), _living(group)
    return False, _living(os.tcgetpgrp(master))


def _living(group: int) -> int | None:
    return group if group > 0 and _group_of(group) == group else None


def _group_of(pid: int) -> int:
    """-1 if there is no such process."""
    try:
        return os.getpgid(pid)
    except OSError:
        return -1


def _session_of(pid: int) -> int:
    """-1 if there is no such process."""
    try:
        return os.getsid(pid)
    except OSError:
        return -1


class _InputProbe:
    """One probe of the members of a group, and of the processes that they have started in other sessions."""

    def __init__(self, calls: dict[int, CallKind], terminal: os.stat_result, candidates: Candidates) -> None:
        self._calls = calls
        self._candidates = candidates
        #: Not the device number: each mounted devpts has a terminal of that number.
        self._terminal = (terminal.st_dev, terminal.st_ino)
        self._number = tty_number(terminal.st_rdev)
        self._threads_left = self._children_left = _MOST_THREADS
        #: A thread sleeps in a call that could not be read.
        self.incomplete = False

    def first_waiting(self, group: int) -> int | None:
        """The pid of the first process that waits: mostly the leader, which is probed first."""
        if self._process_waits(group):
            return group
        # getpgid(2) takes 0.3 us for each process; reading its stat would take 9.
        others = [pid for pid in self._candidates() if pid != group and _group_of(pid) == group]
        members = chain(others, self._behind([group, *others]))
        return next((pid for pid in members if self._process_waits(pid)), None)

    def _behind(self, members: list[int]) -> Iterator[int]:
        """The descendants of members of the group in other sessions than theirs.

        Job control does not stop them if they read. It does stop a job in the background, so neither that job nor
        its descendants are in the foreground.
        """
        sessions = {-1, *map(_session_of, members)}
        seen, parents = set(members), deque(members)
        while parents:
            for child in self._children(parents.popleft()):
                if child not in seen and _session_of(child) not in sessions:
                    seen.add(child)
                    parents.append(child)
                    yield child

    def _children(self, pid: int) -> list[int]:
        found: list[int] = []
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                self._children_left -= 1
                text = _contents(f"/proc/{pid}/task/{thread}/children", _MOST_CHILDREN)
                if self._children_left < 0 or len(text) == _MOST_CHILDREN:
                    self.incomplete = True
                    break
                found += map(int, text.split())
        except OSError:
            if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
                return self._by_parent.get(pid, [])  # a kernel without this file
        return found  # without the children of a thread that has ended meanwhile

    @cached_property
    def _by_parent(self) -> dict[int, list[int]]:
        table: dict[int, list[int]] = {}
        for entry in filter(None, map(read_entry, self._candidates())):
            table.setdefault(entry.parent, []).append(entry.pid)
        return table

    def _process_waits(self, pid: int) -> bool:
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            # Gone, unless /proc hides the processes of other users (hidepid).
            self.incomplete |= _group_of(pid) != -1
            return False
        return any(self._thread_waits(f"/proc/{pid}/task/{thread}") for thread in threads)

    def _thread_waits(self, task: str) -> bool:
        # The thread's own directory throughout: after the end of its first thread a process shows no descriptors.
        self._threads_left -= 1
        if self._threads_left < 0:
            self.incomplete = True
            return False
        try:
            call = parse_call(_contents(f"{task}/syscall"))
            if call is None:
                return False
            kind = self._calls.get(call.number)
            if call.narrow or kind == "ring":
                self.incomplete |= _is_sleeping(task)
                return False
            if kind is None:
                return False
            # A thread that was stopped inside a call still shows this call.
            return any(self._is_source(task, fd) for fd in _watched(task, kind, call)) and _is_sleeping(task)
        except OSError:
            # Gone, or no permission, or no such file in this kernel. A sleeping thread exists.
            self.incomplete |= _is_sleeping(task)
            return False

    def _is_source(self, task: str, fd: int, nested: bool = True) -> bool:
        """Whether a descriptor is the terminal, or an epoll that watches it."""
        try:
            file = stat_cached(f"{task}/fd/{fd}")
        except FileNotFoundError:
            return False  # an epoll can hold the number of a descriptor that was closed
        if stat.S_ISCHR(file.mode):
            if (file.device, file.inode) == self._terminal:
                return True
            return file.node == _DEV_TTY and _controlling_terminal(task) == self._number
        if not nested or stat.S_ISSOCK(file.mode) or stat.S_ISFIFO(file.mode):
            return False
        return any(self._is_source(task, target, nested=False) for target in _epoll_targets(task, fd))


# --- one thread in /proc -------------------------------------------------------------------------------------


def _watched(task: str, kind: CallKind, call: BlockedCall) -> Iterable[int]:
    """The descriptors from which this call waits for input."""
    first, second = call.arguments[:2]
    if kind == "read":
        return (first & _INT,)
    if kind == "epoll":
        return _epoll_targets(task, first & _INT)
    if kind == "select":
        count = first & _INT
        return islice(fd_set_members(_read_memory(task, second, (count + 7) // 8), count), _MOST_DESCRIPTORS)
    if kind == "restart" and b"poll" not in _contents(f"{task}/wchan"):
        # Of the calls above, only poll(2) continues as this one after a stop, with its arguments; sleeps do, too.
        return ()
    return islice(polled_for_input(_read_memory(task, first, (second & _INT) * _POLLFD.size)), _MOST_DESCRIPTORS)


def _epoll_targets(task: str, fd: int) -> Iterable[int]:
    targets = epoll_targets(_contents(f"{task}/fdinfo/{fd}", _MOST_FDINFO))
    return islice(sorted(targets), _MOST_DESCRIPTORS)


def _read_memory(task: str, address: int, size: int) -> bytes:
    """Read memory of a process; empty where nothing is mapped."""
    size = min(size, _MOST_MEMORY)
    if not 0 < address < _HIGHEST_ADDRESS - size:
        return b""
    fd = os.open(f"{task}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, size, address)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""
    finally:
        os.close(fd)


def _contents(path: str, limit: int = 1024) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces: list[bytes] = []
        while limit > 0 and (piece := os.read(fd, min(limit, _PAGES))):
            pieces.append(piece)
            limit -= len(piece)
        return b"".join(pieces)
    finally:
        os.close(fd)


def _stat(task: str) -> list[bytes]:
    """The fields of a thread's stat; empty if the thread is gone."""
    try:
        return stat_fields(_contents(f"{task}/stat"))
    except OSError:
        return []


def _is_sleeping(task: str) -> bool:
    return _stat(task)[:1] == [b"S"]


def _controlling_terminal(task: str) -> int:
    fields = _stat(task)
    return int(fields[4]) & _INT if fields else 0


# --- the kernel's formats ------------------------------------------------------------------------------------


class BlockedCall(NamedTuple):
    """A system call in which a thread is blocked."""

    number: int
    #: Registers: where the call takes an int, the upper half may hold anything.
    arguments: tuple[int, ...]
    #: Made by a 32-bit program, by its addresses.
    narrow: bool


def parse_call(text: bytes) -> BlockedCall | None:
    """Parse /proc/PID/syscall; None if the thread runs, or is blocked outside of a call."""
    words = text.split()
    if len(words) != 9:  # `running`, or `-1 SP PC`
        return None
    *arguments, stack, counter = (int(word, 16) for word in words[1:])
    return BlockedCall(int(words[0]), tuple(arguments), 0 < stack < _WIDE and 0 < counter < _WIDE)


def polled_for_input(array: bytes) -> Iterator[int]:
    """The descriptors of an array of `struct pollfd` that are polled for input."""
    whole = len(array) - len(array) % _POLLFD.size
    for fd, events, _ in _POLLFD.iter_unpack(array[:whole]):
        if fd >= 0 and events & _FOR_INPUT:
            yield fd


def fd_set_members(bits: bytes, count: int) -> Iterator[int]:
    """The descriptors below `count` in an `fd_set` of a little-endian machine."""
    for index, byte in enumerate(bits):
        if byte:
            for bit in range(8):
                fd = index * 8 + bit
                if byte >> bit & 1 and fd < count:
                    yield fd


def epoll_targets(fdinfo: bytes) -> list[int]:
    """The descriptors that an epoll watches for input, from its /proc/PID/fdinfo/N; none for other files."""
    return [int(fd) for fd, events in _EPOLL_TARGET.findall(fdinfo) if int(events, 16) & _FOR_INPUT]


def tty_number(device: int) -> int:
    """A device number as /proc/PID/stat has it for the controlling terminal (the kernel's new_encode_dev)."""
    major, minor = os.major(device), os.minor(device)
    return minor & 0xFF | major << 8 | (minor & ~0xFF) << 12
