"""A number of a process group that has ended may be another's: a signal to the first does not reach the second."""

from __future__ import annotations

import signal
import subprocess

import pytest

from holdfast.runtime.local import LocalExec
from holdfast.types import ProcessSpec

LAST_PID = "/proc/sys/kernel/ns_last_pid"
#: Others start processes at the same time, and may get the number first.
TRIES = 200
#: Gives its terminal to a group of its own, which ends; the terminal names that group from then on.
LEFT_BEHIND = """
import os, signal, time
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
reading, writing = os.pipe()
pid = os.fork()
if not pid:
    os.setpgid(0, 0)
    os.write(writing, b".")
    signal.pause()
os.read(reading, 1)
os.tcsetpgrp(0, pid)
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
print(f"group {os.tcgetpgrp(0)} {pid}", flush=True)
signal.pause()
"""


def with_pid(wanted: int) -> subprocess.Popen[bytes] | None:
    """A process with this pid in a session of its own; None if others were always faster."""
    for _ in range(TRIES):
        try:
            with open(LAST_PID, "w") as file:
                file.write(str(wanted - 1))
        except OSError as error:
            pytest.skip(f"{LAST_PID}: {error.strerror}: the next pid cannot be chosen here")
        process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        if process.pid == wanted:
            return process
        process.kill()
        process.wait()
    return None


async def test_the_signal_of_a_terminal_does_not_reach_a_group_that_has_the_number_of_an_ended_one(
    box: LocalExec,
) -> None:
    await box.start(ProcessSpec("p", ("python3", "-I", "-S", "-c", LEFT_BEHIND), tty=True))
    events, printed = box.events("p"), b""
    while not printed.endswith(b"\n"):
        printed += getattr(await anext(events), "data", b"")
    _, group, ended = (int(word) if word.isdigit() else 0 for word in printed.split())
    assert group == ended, "the terminal names a group that has ended"
    stranger = with_pid(ended)
    if stranger is None:
        pytest.skip("others start processes too fast here to choose a pid")
    try:
        for name in ("INT", "QUIT"):
            await box.signal("p", name)
    finally:
        stranger.terminate()
    assert stranger.wait(60) == -signal.SIGTERM, "no other signal came before this one"
    assert (await box.describe("p")).running
    await box.signal("p", "KILL")
    status = await box.wait("p", timeout=60)
    assert status is not None
    assert status.signal == signal.SIGKILL.name
