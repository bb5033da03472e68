"""The thread with a descriptor table of its own, and starts of a server with many descriptors through it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from holdfast.errors import CommandNotFound
from holdfast.runtime.local import LocalExec
from holdfast.runtime.process import start
from holdfast.runtime.process.spawn import OomScore, SpawnCommand, StandardStreams, spawn
from holdfast.runtime.process.spawner import Spawner
from holdfast.types import Exited, OutputChunk, ProcessSpec, TerminalSize

#: Prints the numbers of its descriptors in a line; the fourth is the directory that it lists.
OWN_DESCRIPTORS = "ls -C /proc/self/fd"


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    with contextlib.closing(Spawner()) as spawner:
        yield spawner


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every server counts as one with many descriptors."""
    monkeypatch.setattr(start, "CROWDED_DESCRIPTORS", 0)


def threads() -> list[int]:
    return [thread.native_id or 0 for thread in threading.enumerate() if thread.name == "holdfast-spawner"]


def run(spawner: Spawner, *argv: str, path: str = "/bin/sh") -> bytes:
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    with open(os.devnull, "rb") as null, open(ours, "rb") as output:
        streams = StandardStreams(null.fileno(), theirs, theirs)
        try:
            pid = spawn(SpawnCommand(path, argv, [b"PATH=/bin:/usr/bin"], "/"), streams, {}, OomScore(0), spawner)
        finally:
            os.close(theirs)
        printed = output.read()
    assert os.waitpid(pid, 0)[1] == 0
    return printed


def test_the_thread_has_only_its_socket(spawner: Spawner) -> None:
    with open(os.devnull):
        assert run(spawner, "sh", "-c", "echo out; echo err >&2") == b"out\nerr\n"
        (thread,) = threads()
        held = [name for name in os.listdir(f"/proc/self/task/{thread}/fd") if int(name) > 2]
        assert len(held) == 1
        assert os.readlink(f"/proc/self/task/{thread}/fd/{held[0]}").startswith("socket:")


def test_a_child_gets_its_own_descriptors_alone(spawner: Spawner) -> None:
    with open(os.devnull) as other:
        os.set_inheritable(other.fileno(), True)
        numbers = run(spawner, "sh", "-c", OWN_DESCRIPTORS).split()
    assert numbers == [b"0", b"1", b"2", b"3"]


def test_an_error_is_that_of_the_caller(spawner: Spawner) -> None:
    with pytest.raises(CommandNotFound):
        run(spawner, "nothing", path="/bin/nothing-of-this-name")
    assert run(spawner, "sh", "-c", "echo again") == b"again\n"


def test_the_thread_takes_no_signals(spawner: Spawner) -> None:
    run(spawner, "sh", "-c", ":")
    (thread,) = threads()
    with open(f"/proc/self/task/{thread}/status") as file:
        blocked = next(int(line.split()[1], 16) for line in file if line.startswith("SigBlk:"))
    # A handler there would write to the wake-up descriptor of the event loop, in another table.
    assert all(blocked & 1 << number - 1 for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD))


def test_closing_ends_the_thread() -> None:
    before = len(os.listdir("/proc/self/fd"))
    Spawner().close()
    assert threads() == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("crowded")
async def test_a_server_with_many_descriptors_starts_through_the_thread(box: LocalExec) -> None:
    spec = ProcessSpec("p", ("sh", "-c", f"read line; echo $line; {OWN_DESCRIPTORS}"), pipe_stdin=True)
    info, events = await box.start_streaming(spec)
    assert len(threads()) == 1
    await box.write("p", b"a line\n")
    printed = b""
    async for event in events:
        printed += event.data if isinstance(event, OutputChunk) else b""
        if isinstance(event, Exited):
            assert event.status.exit_code == 0
    assert printed == b"a line\n0  1  2  3\n"
    # A child of the server as any other: it was reaped, and its parent was this process.
    assert info.pid > 0
    with pytest.raises(ChildProcessError):
        os.waitpid(info.pid, 0)  # noqa: ASYNC222 - returns at once, by the error


@pytest.mark.usefixtures("crowded")
async def test_a_terminal_through_the_thread_controls_its_program(box: LocalExec) -> None:
    spec = ProcessSpec("t", ("sh", "-c", "stty size </dev/tty"), tty=True, size=TerminalSize(7, 70))
    _, events = await box.start_streaming(spec)
    printed = b"".join([event.data async for event in events if isinstance(event, OutputChunk)])
    assert printed == b"7 70\r\n"


@pytest.mark.usefixtures("crowded")
async def test_without_a_table_of_its_own_the_server_spawns_itself(
    box: LocalExec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(keep: int) -> None:
        raise OSError(38, "close_range")

    monkeypatch.setattr("holdfast.runtime.process.spawner.unshare_descriptors", refuse)
    await box.start(ProcessSpec("p", ("true",)))
    assert (await box.wait("p")) is not None
    assert threads() == []
