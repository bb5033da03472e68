"""Signals to process groups and to single processes, never to this process or to a reused pid.

A process is opened as a pidfd, then checked against what the caller expects, and only then signalled through the
pidfd. Standard library only. Few other modules call kill(2) directly: `tests/unit/test_signalling.py` lists them.
"""

from __future__ import annotations

import errno
import os
import signal
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

#: PIDFD_SIGNAL_PROCESS_GROUP, Linux 6.9: the signal is for the whole group of the pidfd's process.
_PROCESS_GROUP = 4
#: Searches for members before Linux 6.9, where they are signalled one by one and may fork meanwhile.
_SEARCHES = 3


class OwnProcess(ValueError):
    """A signal was about to be sent to this process, to its group or session, or to every process."""


def signal_process(pid: int, number: int, is_it: Callable[[int], bool]) -> bool:
    """Signal the process with this pid if `is_it` holds for it; returns whether a signal was sent.

    `is_it` is called when the pid can no longer be reused. Raises `OwnProcess` for this process, and for numbers
    that kill(2) takes for more than one process; `OSError` if there is no descriptor for a pidfd.
    """
    if pid <= 1 or pid == os.getpid():
        raise OwnProcess(f"signal {number} is not sent to process {pid}")
    with _held(pid, is_it) as fd:
        if fd >= 0:
            signal.pidfd_send_signal(fd, number)
            return True
    return False


def signal_group(group: int, session: int, number: int, spared: Container[int] = ()) -> bool:
    """Signal the processes of a group in a session, except those `spared`; returns whether a signal was sent.

    Raises `OwnProcess` for a group or a session of this process, and for numbers that kill(2) takes for more than
    one group; `OSError` if there is no descriptor for a pidfd.
    """
    if group <= 1 or session <= 1 or group == os.getpgrp() or session == os.getsid(0):
        raise OwnProcess(f"signal {number} is not sent to process group {group} of session {session}")

    def is_member(pid: int) -> bool:
        return os.getpgid(pid) == group and os.getsid(pid) == session

    signalled: set[int] = set()
    for _ in range(_SEARCHES):
        before = len(signalled)
        for pid in _members(group, is_member):
            if pid in signalled or pid in spared:
                continue
            with _held(pid, is_member) as fd:
                if fd < 0:
                    continue
                if not spared and signal_group_of(fd, number):
                    return True
                signal.pidfd_send_signal(fd, number)
                signalled.add(pid)
        if len(signalled) == before:
            break
    return bool(signalled)


def signal_child_group(leader: int, number: int) -> bool:
    """Signal the group of a child that leads its session; returns whether a signal was sent.

    False if the child was reaped. Works without a free descriptor, too.
    """
    try:
        if os.getsid(leader) != leader:
            return False
        if hasattr(os, "pidfd_open"):
            return signal_group(leader, leader, number)
    except ProcessLookupError:
        return False
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    if not _is_child(leader):
        return False
    # A child that was not reaped retains its pid, and with it the number of its group.
    os.killpg(leader, number)
    return True


def signal_group_of(fd: int, number: int) -> bool:
    """Signal the whole group of a pidfd's process; False if the kernel cannot (before Linux 6.9)."""
    try:
        signal.pidfd_send_signal(fd, number, None, _PROCESS_GROUP)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


@contextmanager
def _held(pid: int, is_it: Callable[[int], bool]) -> Iterator[int]:
    """Open a pidfd of the process with this pid; -1 if `is_it` does not hold for it, or it has ended.

    The block ends early if the process ends, or changes to another user, before the signal.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        yield -1
        return
    try:
        is_the_one = is_it(pid)
        # Fails if the process was reaped: then `is_it` may have checked another process.
        signal.pidfd_send_signal(fd, 0)
    except (ProcessLookupError, PermissionError):
        is_the_one = False  # ended, or of another user
    try:
        yield fd if is_the_one else -1
    except (ProcessLookupError, PermissionError):
        return  # ended, or executed a program of another user
    finally:
        os.close(fd)


def _members(group: int, is_member: Callable[[int], bool]) -> Iterator[int]:
    """Yield the pids of a group, its leader first."""
    numbers = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    for pid in (group, *(number for number in numbers if number != group)):
        try:
            found = is_member(pid)
        except OSError:
            continue  # ended
        if found:
            yield pid


def _is_child(pid: int) -> bool:
    if not hasattr(os, "waitid"):  # macOS
        return True
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
