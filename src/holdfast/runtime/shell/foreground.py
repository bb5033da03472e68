"""The foreground processes of a shell, and what /proc shows of one process. Reads /proc only."""

from __future__ import annotations

import os
import time
from collections.abc import Container, Sequence
from typing import Final

from holdfast.runtime.terminal.input_wait import blocked_in_read
from holdfast.runtime.tree.process_table import Entry, ProcessTable, stat_fields

#: A shell without job control starts background jobs with both signals ignored.
_INT_AND_QUIT: Final = (1 << 1) | (1 << 2)


def ticks_since_boot() -> int:
    """The current time in the unit of process start times."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def foreground(table: ProcessTable[Entry], shell: int, since: int, jobs: Container[int]) -> dict[int, Entry]:
    """The children of the shell since a time and their descendants, without background jobs.

    Start times have a resolution of 10 ms, so known `jobs` are excluded by pid too.
    """
    children = (table.entries[pid] for pid in table.children.get(shell, ()) if pid not in jobs)
    return table.descendants(
        child.pid for child in children if int(child.started) >= since and not _is_background(child.pid)
    )


def _is_background(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"SigIgn:"):
                    return int(line.split()[1], 16) & _INT_AND_QUIT == _INT_AND_QUIT
    except OSError:
        pass  # gone
    return False


def open_stat(pid: int) -> int:
    """A descriptor of /proc/PID/stat, or -1."""
    try:
        return os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def reaped_faults(stat: int) -> int:
    """Page faults of the children that a process has waited for: a larger number means another child.

    -1 if it cannot be read.
    """
    try:
        text = os.pread(stat, 512, 0)
    except OSError:
        return -1
    return int(stat_fields(text)[8])


def has_blocking_output(pid: int) -> bool:
    """Whether writes to its stdout and stderr block, whatever these are; False if it cannot be read.

    A program that shares the open file descriptions with its shell may have changed them: Node.js makes a pipe
    non-blocking and leaves it so, and the next program fails when the pipe is full.
    """
    try:
        return all(fields is None or _blocks(fields) for fields in (_fdinfo(pid, 1), _fdinfo(pid, 2)))
    except OSError:
        return False


def has_blocking_pipes(pid: int, inodes: Sequence[int]) -> bool:
    """Whether its stdout and stderr are the files with these inodes, and writes to them block.

    False if it cannot be read, and before Linux 5.14, which does not show the inode.
    """
    try:
        for number, inode in enumerate(inodes, start=1):
            fields = _fdinfo(pid, number)
            if fields is None or fields[6:8] != [b"ino:", b"%d" % inode] or not _blocks(fields):
                return False
    except OSError:
        return False
    return True


def _fdinfo(pid: int, number: int) -> list[bytes] | None:
    """The names and values that the kernel shows of a descriptor; None if it is closed."""
    try:
        fd = os.open(f"/proc/{pid}/fdinfo/{number}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return os.read(fd, 512).split()
    except FileNotFoundError:
        return None
    finally:
        os.close(fd)


def _blocks(fields: list[bytes]) -> bool:
    return not int(fields[fields.index(b"flags:") + 1], 8) & os.O_NONBLOCK


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read(512)
    except OSError:
        return False
    return stat_fields(text)[0] == b"T"


def waits_for(pid: int, inode: int) -> bool:
    """Whether it is blocked in read(2) on the file with this inode; False where the kernel does not show it."""
    fd = blocked_in_read(pid)
    try:
        return fd is not None and os.stat(f"/proc/{pid}/fd/{fd}").st_ino == inode
    except OSError:
        return False


def command_line(pid: int) -> bytes:
    """The arguments it was executed with; empty for a process that is exiting."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def copies(pid: int, paths: dict[str, int]) -> list[tuple[int, int]]:
    """Descriptors 3 to 9 of files that have these paths, each with the value of its path.

    Higher descriptors are the shell's own: it may be in the middle of a redirection.
    """
    found: list[tuple[int, int]] = []
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return found
    for name in names:
        if len(name) > 1 or name < "3":
            continue
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target in paths:
            found.append((int(name), paths[target]))
    return found
