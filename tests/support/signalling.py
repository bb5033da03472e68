"""Signals of tests: to what a test has started, and never to the program that runs the tests.

Pids are given anew after some thirty thousand processes, which a run of all tests starts. `send_signal` holds the
process by a pidfd and checks its ancestry before it signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Final

from holdfast.launch import pidfd_signals
from tests.support.servers import MARK_VARIABLE, is_alive

#: The longest that a process counts as being in the middle of execve(2).
EXEC_SECONDS: Final = 10.0
#: One of them is in the environment of what a test starts, and of all below that.
_OF_A_TEST = tuple(f"{name}=".encode() for name in (MARK_VARIABLE, "HOLDFAST_DIRECTORY", "PYTEST_CURRENT_TEST"))


def send_signal(pid: int, number: int) -> None:
    """Signal a process that a test has started. `ProcessLookupError` if it is gone.

    One that has ended and waits to be reaped by another program has no environment left, and counts as gone.
    `AssertionError` if it is neither a descendant of this process nor marked as started by a test.
    """

    def is_ours(pid: int) -> bool:
        if started_by_a_test(pid):
            return True
        if not is_alive(pid):
            return False
        raise AssertionError(f"signal {number} to process {pid}, which no test has started: {_shown(pid)}")

    if not pidfd_signals.signal_process(pid, number, is_ours):
        raise ProcessLookupError(f"process {pid} is gone")


def kill_group(leader: int) -> None:
    """Kill the group of a child that leads its session; nothing if the child was reaped."""
    pidfd_signals.signal_child_group(leader, signal.SIGKILL)


def started_by_a_test(pid: int) -> bool:
    """Whether a process is below this one, or was started with a variable that only tests set.

    The programs that run the tests, and their other workers, were started without it.
    """
    if _descends(pid, os.getpid()):
        return True
    if _descends(os.getpid(), pid):
        return False
    return any(variable.startswith(_OF_A_TEST) for variable in _environment(pid))


def _environment(pid: int) -> list[bytes]:
    """The variables of a process. In the middle of execve(2) it has none: then they are read again."""
    deadline = time.monotonic() + EXEC_SECONDS
    while True:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                text = file.read()
        except OSError:
            return []
        if text or time.monotonic() > deadline or not is_alive(pid):
            return text.split(b"\0")


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            return False  # gone
        if pid == ancestor:
            return True
    return False


def _shown(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "it is gone"
