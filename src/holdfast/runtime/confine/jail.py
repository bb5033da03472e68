"""A bubblewrap jail from outside: the pid of the program in it, and how the program ended.

bwrap stays outside as the process that was started; its child is the first process of a namespace, and the first
child of that is the program. Reads /proc. SCM_CREDENTIALS on the control socket is no alternative: only live shells
have one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
from collections.abc import Iterable
from typing import Final

from holdfast.runtime.terminal.input_wait import every_process
from holdfast.runtime.tree.process_table import newest_pids, read_entry

#: pidfd_get_info, Linux 6.13; it has the exit status since 6.15, also after another process has reaped it.
_PIDFD_GET_INFO: Final = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT: Final = 1 << 3
_INFO: Final = struct.Struct("=QQ11Ii")
#: Seconds between searches for a program that is about to be started. The long ones are for an overloaded machine:
#: a program that was never found could not be distinguished from bwrap later, when it is killed.
_SEARCH_PAUSES: Final = (0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
#: How often to list the processes inside, if one of them exits during the listing.
_LISTINGS: Final = 2
#: Files of 8 us each: with more of them, listing every process of the machine takes no longer.
_MOST_THREADS: Final = 64


class ProcessJail:
    """The jail whose bwrap has this pid."""

    def __init__(self, bwrap: int) -> None:
        self._bwrap = bwrap
        #: The first process of the namespace, and the program; 0 until they are found.
        self._first = self._program = 0
        self._pidfd = -1

    @property
    def program(self) -> int:
        """The program's pid in the server's namespace; bwrap's own pid as long as the program is not found."""
        self.find()
        return self._program or self._bwrap

    @property
    def wrappers(self) -> frozenset[int]:
        """The pids of bwrap and of the first process of the namespace."""
        self.find()
        return frozenset({self._bwrap, self._first} - {0})

    async def wait_found(self) -> None:
        """Wait until the program has started, or has ended: there is no event for its start."""
        for pause in _SEARCH_PAUSES:
            self.find()
            if self._program or not children(self._bwrap):
                return
            await asyncio.sleep(pause)

    def find(self) -> None:
        """Search the program, if it is not known yet."""
        if self._program:
            return
        first = next(iter(children(self._bwrap)), 0)
        program = next((pid for pid in children(first) if inside_pid(pid) == 2), 0) if first else 0
        if program:
            # The pid may have been reused, if the program ended at once; then its parent differs.
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(program)
                entry = read_entry(program)
                if entry is not None and entry.parent == first:
                    self._first, self._program = first, program
                    return
            self.close()

    def send(self, number: int) -> bool:
        """Send a signal to the program alone; False if it is not known, or has ended."""
        self.find()
        if self._pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def inside(self) -> Iterable[int]:
        """The pids of at least all processes of the namespace: all of them descend from its first process.

        On a machine with 500 jails, listing every process takes over a millisecond, this a tenth of it.
        """
        self.find()
        for _ in range(_LISTINGS if self._first else 0):
            found = descendants(self._first, _MOST_THREADS)
            if found is not None:
                return found
        return every_process()

    def killed_by(self) -> int:
        """The signal that ended the program; 0 if it exited by itself, or this kernel does not report it.

        The exit code of bwrap is 128 + n for both, and a shell exits with 130 if its last command was interrupted.
        """
        if self._pidfd < 0:
            return 0
        info = bytearray(_INFO.pack(_PIDFD_INFO_EXIT, *([0] * 13)))
        try:
            fcntl.ioctl(self._pidfd, _PIDFD_GET_INFO, info)
        except OSError:
            return 0
        mask, *_, status = _INFO.unpack(info)
        return os.WTERMSIG(status) if mask & _PIDFD_INFO_EXIT and os.WIFSIGNALED(status) else 0

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def children(pid: int) -> list[int]:
    """The children of a process with one thread, the oldest first."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        if os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):
            return []  # gone
    # A kernel without this file.
    entries = [entry for each in newest_pids() if (entry := read_entry(each)) is not None]
    return sorted(entry.pid for entry in entries if entry.parent == pid)


def descendants(pid: int, most_threads: int) -> list[int] | None:
    """A process and its descendants; None if one of them ended meanwhile, if they have too many threads, or if the
    kernel has no such files.

    The kernel may omit a child if the one that it has listed before has ended by then.
    """
    found = [pid]
    try:
        for parent in found:
            threads = os.listdir(f"/proc/{parent}/task")
            most_threads -= len(threads)
            if most_threads < 0:
                return None
            for thread in threads:
                with open(f"/proc/{parent}/task/{thread}/children", "rb", buffering=0) as file:
                    below = [int(child) for child in file.readall().split()]
                for each in (int(thread), *below):
                    os.getpgid(each)  # raises if it has ended
                found += below
    except OSError:
        return None
    return found


def inside_pid(pid: int) -> int:
    """The pid of a process in its own namespace; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"NSpid:"):
                    return int(line.split()[-1])
    except OSError:
        pass  # gone
    return 0
