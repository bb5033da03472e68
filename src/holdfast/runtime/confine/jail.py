"""A bubblewrap jail seen from outside: who in it is the program that was to run, and how that ended.

bwrap stays outside as the process that we started; its child is the first process of a namespace, and the first
child of that is the program. Reads /proc. Why not SCM_CREDENTIALS on the control socket: only live shells have one.
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

#: pidfd_get_info, Linux 6.13; it tells how a process ended since 6.15, also after somebody else has reaped it.
_PIDFD_GET_INFO: Final = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT: Final = 1 << 3
_INFO: Final = struct.Struct("=QQ11Ii")


#: Seconds between looks for a program that is about to be started. The long ones are for a machine that has more to
#: do than it can: one that was never found cannot be told from bwrap later, when it is killed.
_LOOK_AGAIN: Final = (0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
#: How often to look who is inside, if somebody ends while we look.
_LOOKS_INSIDE: Final = 2
#: Files of 8 us each: with more of them a look at every process of the machine takes no longer.
_MOST_THREADS: Final = 64


class ProcessJail:
    """The jail whose bwrap has this pid."""

    def __init__(self, bwrap: int) -> None:
        self._bwrap = bwrap
        #: The first process of the namespace, and the program; 0 until they were seen.
        self._first = self._program = 0
        self._pidfd = -1

    @property
    def program(self) -> int:
        """The program's pid as we see it; bwrap's own until there is one, and after we could find none."""
        self.find()
        return self._program or self._bwrap

    @property
    def wrappers(self) -> frozenset[int]:
        """Those that are there for the program's sake."""
        self.find()
        return frozenset({self._bwrap, self._first} - {0})

    async def wait_found(self) -> None:
        """Until the program is there, or was: a jail that stands starts it at once, and no event tells of that."""
        for pause in _LOOK_AGAIN:
            self.find()
            if self._program or not children(self._bwrap):
                return
            await asyncio.sleep(pause)

    def find(self) -> None:
        """Look who is the program, if it is not known yet."""
        if self._program:
            return
        first = next(iter(children(self._bwrap)), 0)
        program = next((pid for pid in children(first) if inside_pid(pid) == 2), 0) if first else 0
        if program:
            # It may be another's by now, if it ended at once; then its parent is, too.
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(program)
                entry = read_entry(program)
                if entry is not None and entry.parent == first:
                    self._first, self._program = first, program
                    return
            self.close()

    def send(self, number: int) -> bool:
        """To the program alone; False if it is not known, or gone."""
        self.find()
        if self._pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def inside(self) -> Iterable[int]:
        """At least everybody in the namespace. Who is there has its first process above it, whatever it did.

        On a machine with 500 jails, a look at every process takes over a millisecond, this one a tenth of it.
        """
        self.find()
        for _ in range(_LOOKS_INSIDE if self._first else 0):
            found = descendants(self._first, _MOST_THREADS)
            if found is not None:
                return found
        return every_process()

    def killed_by(self) -> int:
        """The signal that ended the program; 0 if it exited by itself, or this kernel does not tell.

        bwrap says 128 + n for both, and a shell may well exit with 130 because its last command was interrupted.
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
    """A process and all below it; None if one of them ended meanwhile, if they have too many threads, or if the
    kernel has no such files.

    The kernel may leave out a child if the one that it has told of before is gone by then.
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
                    os.getpgid(each)  # it is still there
                found += below
    except OSError:
        return None
    return found


def inside_pid(pid: int) -> int:
    """The number that a process has in its own namespace; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"NSpid:"):
                    return int(line.split()[-1])
    except OSError:
        pass  # gone
    return 0
