"""The blocking facade, over real processes of this machine."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from typing import Any

import pytest

import holdfast.sync
from holdfast.client import exec_remote, process, sandbox
from holdfast.client.exec_remote import Completed, StdoutChunk
from holdfast.errors import CommandNotFound, InvalidRequest, TimeoutError
from holdfast.model import Closed, Exited, ExitStatus, OutputChunk, ProcessEvent
from holdfast.sync import LoopThread
from holdfast.testing import FakeExec, hangs


def test_exec_and_errors() -> None:
    with holdfast.sync.connect("inprocess") as box:
        result = box.exec(["cat"], input="text")
        assert (result.stdout, result.returncode) == ("text", 0)
        with pytest.raises(CommandNotFound):
            box.exec(["no-such-program"])
        assert box.exec_remote(["echo", "x"], stream=False).stdout == "x\n"
        assert box.info().arch


def test_streams() -> None:
    with holdfast.sync.connect("inprocess") as box:
        events = list(box.exec_remote(["sh", "-c", "echo one; exit 2"]))
        assert events == [StdoutChunk("one\n"), Completed(2, "one\n", "")]
        running = box.start(["sh", "-c", "echo out; exit 3"], id="p")
        assert [type(event) for event in running.events()] == [OutputChunk, Exited, Closed]
        assert list(running.output(since=1)) == []
        assert running.wait() == ExitStatus(3)
        assert [p.id for p in box.processes() if p.id == "p"] == ["p"]


def test_a_process_and_its_block() -> None:
    with holdfast.sync.connect("inprocess") as box:
        with box.start(["sh", "-c", "echo ready; exec cat"], stdin="open") as running:
            assert running.wait_for_output("ready", timeout=60).offset == 0
            with running.output() as output:
                assert isinstance(next(output), OutputChunk)
            running.write("more\n")
            running.wait_for_output("more", timeout=60)
        assert running.wait().signal == "SIGTERM"
        assert not box.process(running.id).info.running
        with pytest.raises(TimeoutError):
            box.exec(["sleep", "1000"], timeout=0.01, timeout_retry=False)


def test_exec_remote_is_hot_and_can_be_written_to() -> None:
    with holdfast.sync.connect("inprocess") as box:
        options = holdfast.ExecRemoteOptions(stdin_open=True)
        proc = box.exec_remote(["cat"], options)
        proc.write_stdin("in")
        proc.close_stdin()
        assert list(proc.events)[-1] == Completed(0, "in", "")
        assert isinstance(proc.pid, int)
        hung = box.exec_remote(["sleep", "1000"])
        hung.kill()
        assert list(hung) == []


class InterruptingStream:
    """A reader during which Ctrl-C is pressed."""

    def __aiter__(self) -> InterruptingStream:
        return self

    async def __anext__(self) -> ProcessEvent:
        # This runs in the loop's thread, so the main thread is waiting for it: the signal hits it there.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def aclose(self) -> None:
        pass


class InterruptingExec(FakeExec):
    def events(self, process_id: str, *, after_seq: int = 0, window: int | None = None) -> Any:
        return InterruptingStream()


def test_an_interrupt_kills_the_command_before_it_is_raised() -> None:
    fake = InterruptingExec({"hang": hangs()})
    loop = LoopThread()
    try:
        box = holdfast.sync.Sandbox(loop, sandbox.Sandbox(fake))
        with pytest.raises(KeyboardInterrupt):
            box.exec(["hang"])
        assert fake.process(fake.started[0].process_id).signals == ["KILL"]
        proc = box.exec_remote(["hang"])
        with pytest.raises(KeyboardInterrupt):
            next(proc)
        assert fake.process(fake.started[1].process_id).signals == ["KILL"]
        assert box.status().processes_running == 0
    finally:
        loop.close()


def test_several_threads_share_a_sandbox() -> None:
    with holdfast.sync.connect("inprocess") as box:
        results: list[str] = []
        threads = [
            threading.Thread(target=lambda n=n: results.append(box.exec(["echo", str(n)]).stdout)) for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(results) == [f"{n}\n" for n in range(8)]


def test_a_closed_sandbox_says_so_and_its_thread_is_gone() -> None:
    with holdfast.sync.connect("inprocess") as box:
        pass
    with pytest.raises(InvalidRequest, match="closed"):
        box.exec(["true"])
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-sync"]


def test_an_error_at_connect_leaves_no_thread() -> None:
    with pytest.raises(holdfast.CallerError), holdfast.sync.connect("nonsense"):
        raise AssertionError("connected")
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-sync"]


@pytest.mark.parametrize(
    ("blocking", "original"),
    [
        (holdfast.sync.Process, process.Process),
        (holdfast.sync.Sandbox, sandbox.Sandbox),
        (holdfast.sync.ExecRemoteProcess, exec_remote.ExecRemoteProcess),
    ],
)
def test_nothing_public_is_missing_from_the_facade(blocking: type, original: type) -> None:
    left_out = {"aclose", "api", "id"} - set(vars(blocking))
    wanted = {name for name, value in inspect.getmembers_static(original) if not name.startswith("_")} - left_out
    assert wanted <= set(dir(blocking))
