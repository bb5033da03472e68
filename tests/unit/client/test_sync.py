"""The blocking facade, over real processes of this machine."""

from __future__ import annotations

import asyncio
import inspect
import queue
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import holdfast.sync
from holdfast.bridge import agent_bridge
from holdfast.client import exec_remote, host_call, process, sandbox, shell, terminal
from holdfast.client.exec_remote import Completed, StdoutChunk
from holdfast.client.tools import unified_exec
from holdfast.errors import CommandNotFound, InvalidRequest, ShellClosed, TimeoutError, UnknownShell
from holdfast.fleet import fleet, pool
from holdfast.sync import LoopThread
from holdfast.testing import FakeExec, hangs
from holdfast.types import Closed, CommandEnded, Exited, ExitStatus, OutputChunk, OutputGap, ProcessEvent


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


def test_the_end_of_a_process_wakes_its_caller() -> None:
    with holdfast.sync.connect("inprocess") as box:
        endings = box.ended()
        running = box.start(["sh", "-c", "read line; exit 3"], stdin="open")
        statuses: queue.Queue[ExitStatus] = queue.Queue()
        running.on_exit(statuses.put)
        box.exec_remote(["sh", "-c", "exit 4"]).on_exit(statuses.put)
        assert statuses.get(timeout=60) == ExitStatus(4)
        running.write("go\n")
        assert statuses.get(timeout=60) == ExitStatus(3)
        assert [next(endings).info.exit_code, next(endings).id] == [4, running.id]


# --- shells -----------------------------------------------------------------------------------------------------


def test_a_shell_keeps_its_state_and_its_block_closes_it() -> None:
    with holdfast.sync.connect("inprocess") as box:
        with box.shell("sh", id="s", cwd="/", env={"COLOUR": "blue"}) as sh:
            assert (sh.id, sh.cwd, sh.state) == ("s", "/", "idle")
            assert sh.pid == sh.describe().pid > 0
            assert sh.run("cd /usr; x=kept").success
            result = sh.run(
                "echo $x $COLOUR $shade; cat; exit_with() { return 3; }; exit_with",
                input="in",
                env={"shade": "dark"},
                cwd="/tmp",
            )
            assert (result.stdout, result.exit_code, result.cwd) == ("kept blue dark\nin", 3, "/usr")
            assert sh.cwd == "/usr"
            assert box.open_shell("s").run("echo $x").stdout == "kept\n"
            assert [one.id for one in box.shells()] == ["s"]
        assert sh.state == "closed"
        with pytest.raises(ShellClosed, match="'s' is closed"):
            sh.run("true")
        with pytest.raises(UnknownShell, match="'nobody'"):
            box.open_shell("nobody")


def test_a_command_in_a_shell_is_streamed() -> None:
    with holdfast.sync.connect("inprocess") as box, box.shell("sh") as sh:
        *printed, ended = sh.stream("echo one; echo two >&2; exit 4")
        assert {event.stream: event.data for event in printed if isinstance(event, OutputChunk)} == {
            "stdout": b"one\n",
            "stderr": b"two\n",
        }
        assert isinstance(ended, CommandEnded)
        assert (ended.exit_code, ended.state, sh.state) == (4, "closed", "closed")


def test_a_command_in_a_shell_is_written_to(tmp_path: Path) -> None:
    with holdfast.sync.connect("inprocess", cwd=tmp_path, env={"GIVEN": "1"}) as box, box.shell("sh") as sh:

        def reply(event: OutputChunk | OutputGap) -> None:
            if isinstance(event, OutputChunk) and event.data == b"name?\n":
                sh.write("you\n")
                sh.close_stdin()

        command = "echo name?; read name; echo $GIVEN $name $(pwd); cat"
        result = sh.run(command, stdin="open", on_output=reply)
        assert result.stdout == f"name?\n1 you {tmp_path}\n"
        process = sh.start("cat", stdin="open")
        assert process.communicate("text") == (b"text", b"")
        box.write_file("file", b"x")
        assert (tmp_path / "file").exists()
        assert box.exec(["no-such-program"], start_errors="result").exit_code == 127


def test_the_callback_of_a_command_runs_in_our_thread() -> None:
    with holdfast.sync.connect("inprocess") as box, box.shell("sh", id="s") as sh:
        seen: list[tuple[bytes, int, str]] = []

        def take(event: OutputChunk | OutputGap) -> None:
            assert isinstance(event, OutputChunk)
            # From the loop's own thread this call would be refused.
            seen.append((event.data, threading.get_ident(), sh.describe().shell_id))

        result = sh.run("echo one; (exit 5)", on_output=take)
        assert seen == [(b"one\n", threading.get_ident(), "s")]
        assert (result.stdout, result.exit_code, result.cwd, result.truncated) == ("one\n", 5, sh.cwd, False)
        cut = sh.run("printf 12345", on_output=take, max_bytes=3)
        assert (cut.stdout, cut.truncated) == ("345", True)


def test_a_stream_that_is_left_and_a_callback_that_fails_end_the_command() -> None:
    with holdfast.sync.connect("inprocess") as box, box.shell("sh") as sh:
        sh.run("x=kept")
        with sh.stream("echo ready; sleep 1000") as events:
            assert isinstance(next(events), OutputChunk)
        assert sh.run("echo $x").stdout == "kept\n"

        def fail(event: OutputChunk | OutputGap) -> None:
            raise ValueError("enough")

        with pytest.raises(ValueError, match="enough"):
            sh.run("echo ready; sleep 1000", on_output=fail)
        assert sh.run("echo $x").stdout == "kept\n"


def test_an_interrupt_and_a_time_limit_leave_the_shell() -> None:
    with holdfast.sync.connect("inprocess") as box, box.shell("sh") as sh:
        assert not sh.interrupt()
        sh.run("x=kept")
        with sh.stream("echo ready; sleep 1000; echo no") as events:
            assert next(events) == OutputChunk("stdout", 0, b"ready\n", 1)
            assert sh.interrupt()
            ended = list(events)[-1]
        assert isinstance(ended, CommandEnded)
        assert (ended.exit_code, ended.shell_restarted) == (130, False)
        limited = sh.run("sleep 1000", timeout=0.01)
        assert (limited.exit_code, limited.timed_out) == (124, True)
        assert sh.run("echo $x").stdout == "kept\n"


def test_a_process_of_a_shell_and_what_background_jobs_print_late(tmp_path: Path) -> None:
    with holdfast.sync.connect("inprocess") as box:
        with box.shell("sh", cwd=str(tmp_path)) as sh:
            sh.run("x=kept; mkfifo gate")
            running = sh.start("echo $x; pwd; exec sleep 1000", id="job")
            assert isinstance(running, holdfast.sync.Process)
            running.wait_for_output(f"{tmp_path}\n", timeout=60)
            assert running.snapshot().stdout.decode() == f"kept\n{tmp_path}\n"
            assert running.terminate()
            sh.run("(read go < gate; echo late) &")
            assert sh.run("echo go > gate").stdout == ""
            with sh.output() as late:
                assert [next(late)] == [OutputChunk("stdout", 0, b"late\n", 1)]
            assert sh.snapshot().stdout == b"late\n"
            sh.close()
        assert sh.describe().reason == "closed"


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


def test_a_sandbox_without_a_block_is_closed_by_hand() -> None:
    """As in a notebook, where no block spans two cells."""
    box = holdfast.sync.connect("inprocess")
    assert box.exec(["echo", "x"]).stdout == "x\n"
    running = box.start(["sleep", "1000"])
    box.close()
    box.close()
    with pytest.raises(InvalidRequest, match="closed"):
        running.wait()
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-sync"]


def test_the_two_tool_calls_of_a_model() -> None:
    seen: list[str] = []
    with holdfast.sync.connect("inprocess") as box:
        with holdfast.sync.UnifiedExec(box, on_event=lambda event: seen.append(type(event).__name__)) as tools:
            assert tools.exec_command(["echo", "x"], yield_time_ms=30_000).exit_code == 0
            first = tools.exec_command(["cat"], tty=True, yield_time_ms=250)
            assert first.session_id is not None
            (running,) = tools.sessions().values()
            assert tools.write_stdin(first.session_id, "hello\n", yield_time_ms=250).session_id == first.session_id
            running.wait_for_output("hello", timeout=60)
            tools.terminate(first.session_id)
        assert running.wait(timeout=60).signal == "SIGTERM"
    assert seen[:3] == ["ExecCommandBegin", "ExecCommandOutputDelta", "ExecCommandEnd"]


def test_an_engine_or_field_that_does_not_exist_is_named() -> None:
    with pytest.raises(holdfast.CallerError, match="'vm'"):
        holdfast.sync.create("vm", image="debian:12")
    with pytest.raises(holdfast.CallerError, match="colour"):
        holdfast.sync.create("local", colour="red")
    with pytest.raises(holdfast.CallerError, match="image='debian:12'"):
        holdfast.sync.create("local", "debian:12")
    with pytest.raises(holdfast.CallerError, match="max is 0"):
        holdfast.sync.Pool("local", max=0)
    with pytest.raises(holdfast.CallerError, match="'vm'"):
        holdfast.sync.Fleet("vm")
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-sync"]


def test_an_error_at_connect_leaves_no_thread() -> None:
    with pytest.raises(holdfast.CallerError), holdfast.sync.connect("nonsense"):
        raise AssertionError("connected")
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-sync"]


@pytest.mark.parametrize(
    ("blocking", "original"),
    [
        (holdfast.sync.Process, process.Process),
        (holdfast.sync.Shell, shell.Shell),
        (holdfast.sync.Sandbox, sandbox.Sandbox),
        (holdfast.sync.Terminal, terminal.Terminal),
        (holdfast.sync.ExecRemoteProcess, exec_remote.ExecRemoteProcess),
        (holdfast.sync.HostService, host_call.HostService),
        (holdfast.sync.UnifiedExec, unified_exec.UnifiedExec),
        (holdfast.sync.Bridge, agent_bridge.Bridge),
        (holdfast.sync.Fleet, fleet.Fleet),
        (holdfast.sync.Pool, pool.Pool),
    ],
)
def test_nothing_public_is_missing_from_the_facade(blocking: type, original: type) -> None:
    # `start` of a host service is part of `Sandbox.offer`, and `aclose` is `close` or the end of a block. Pools use
    # `make` and `reset` of a fleet; the session service has sandboxes of a pool that outlive a block. The `loop` is
    # that of `asynchronous`.
    inner = {
        host_call.HostService: {"start"},
        fleet.Fleet: {"make", "reset"},
        pool.Pool: {"acquire", "forget", "give_back", "has", "keep"},
    }
    left_out = {"aclose", "api", "loop"} | inner.get(original, set())
    wanted = {name for name, value in inspect.getmembers_static(original) if not name.startswith("_")} - left_out
    assert wanted <= set(dir(blocking))
