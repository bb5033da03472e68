"""A server is killed with -9, and its live shells go on: state, the command in flight, its output and its end."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

import holdfast
from holdfast.client.sandbox import Sandbox
from holdfast.client.shell import Shell
from holdfast.errors import ShellClosed, StdinClosed, UnknownProcess
from holdfast.testing.sandbox_suite import TIMEOUTS
from holdfast.types import CommandEnded, CommandSpec, OutputChunk, OutputGap, ShellStatus, StdinMode
from tests.process.test_recovery import Kill, gone, kept
from tests.support.descriptors import descriptors, settles
from tests.support.servers import (
    PATIENCE_SECONDS,
    RunningServer,
    is_alive,
    running_server,
    server_environment,
)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A command that reads it waits until it is opened for writing: until the test calls `go`."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


@pytest.fixture
def second_gate(tmp_path: Path) -> Path:
    """A gate opens once: an early second reader would still see the writer of the first time."""
    path = tmp_path / "second-gate"
    os.mkfifo(path)
    return path


async def go(gate: Path) -> None:
    await asyncio.to_thread(gate.write_text, "go\n")


@asynccontextmanager
async def nobody(server: RunningServer, kill: Kill) -> AsyncIterator[None]:
    """No server is there in the block: the keeper is stopped, so that none is started."""
    server.process.send_signal(signal.SIGSTOP)
    kill.at_once()
    await gone(server.pid)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)
    await kill.next()


class Started:
    """A command that runs by now: `begun` is set when it has printed something, or has ended without."""

    def __init__(
        self, shell: Shell, command: str, *, timeout: float | None = None, stdin: StdinMode = "closed"
    ) -> None:
        self.begun = asyncio.Event()
        self.printed = {"stdout": b"", "stderr": b""}
        self.task = asyncio.create_task(shell.run(command, timeout=timeout, stdin=stdin, on_output=self._printed))
        self.task.add_done_callback(lambda _: self.begun.set())

    def _printed(self, chunk: OutputChunk | OutputGap) -> None:
        assert isinstance(chunk, OutputChunk)
        self.printed[chunk.stream] += chunk.data
        self.begun.set()


async def started(shell: Shell, command: str) -> asyncio.Task[holdfast.CommandResult]:
    run = Started(shell, command)
    await run.begun.wait()
    return run.task


async def test_an_idle_shell_has_all_that_it_had() -> None:
    async with kept() as (_, box, kill):
        shell = await box.shell()
        await shell.run("cd /usr; x=kept; f() { echo $x; }; alias a='echo alias'; set -- one two; sleep 1000 &")
        await shell.run("(exit 7)")
        before = await shell.describe()
        await kill()
        assert await shell.describe() == before
        assert (await shell.run("echo $? $PWD $(f) $2; a; jobs")).stdout.splitlines()[:2] == [
            "7 /usr kept two",
            "alias",
        ]
        await kill()
        result = await shell.run("kill %1; wait %1; echo $?", cwd="/")
        assert (result.stdout, result.cwd) == ("143\n", "/usr")
        assert (await shell.run("pwd; pwd >&2", env={"x": "y"})).stderr == "/usr\n"
        status = await shell.describe()
        assert (status.pid, status.started_at, status.restarts) == (before.pid, before.started_at, 0)
        assert status.commands_run == before.commands_run + 3
        await shell.close()
        assert (await shell.describe()).state == "closed"


@pytest.mark.parametrize("program", ["bash", "sh"])
async def test_a_command_in_flight(gate: Path, second_gate: Path, program: str) -> None:
    """Printed before, during and after; its caller sees nothing but a pause."""
    async with kept() as (server, box, kill):
        shell = await box.shell(program)
        command = f"echo before; echo e1 >&2; read x <{gate}; echo $x; read x <{second_gate}; echo $x >&2; "
        command += "cd /usr; (exit 9)"
        run = Started(shell, command)
        await run.begun.wait()
        async with nobody(server, kill):
            await go(gate)
        await kill()
        await go(second_gate)
        result = await run.task
        assert (result.stdout, result.stderr) == ("before\ngo\n", "e1\ngo\n")
        assert (result.exit_code, result.cwd, result.shell_restarted) == (9, "/usr", False)
        assert run.printed == {"stdout": result.stdout_bytes, "stderr": result.stderr_bytes}
        assert (await shell.run("echo $? $PWD")).stdout == "9 /usr\n"


async def test_an_answer_while_no_server_is_there(gate: Path, tmp_path: Path) -> None:
    async with kept() as (server, box, kill):
        shell = await box.shell()
        running = await started(shell, f"echo begun; read x <{gate}; echo last; echo >>{tmp_path}/ran; (exit 4)")
        async with nobody(server, kill):
            await go(gate)
            pid = shell.pid
            while (tmp_path / "ran").exists() is False or not await _sleeps(pid):  # noqa: ASYNC110 - of another program
                await asyncio.sleep(0.001)
        result = await running
        assert (result.stdout, result.exit_code) == ("begun\nlast\n", 4)
        assert (tmp_path / "ran").read_text() == "\n"


async def _sleeps(pid: int) -> bool:
    """Whether it waits for something: here, after its command, that is our next line."""
    text = await asyncio.to_thread(Path(f"/proc/{pid}/stat").read_text)
    return text.rpartition(")")[2].split()[0] == "S"


async def test_the_queue_in_order_and_nothing_twice(gate: Path, tmp_path: Path) -> None:
    async with kept() as (_, box, kill):
        shell = await box.shell()
        first = await started(shell, f"echo begun; read x <{gate}")
        log = tmp_path / "log"
        waiting = [asyncio.create_task(shell.run(f"echo {n} | tee -a {log}")) for n in range(20)]
        while (await shell.describe()).queued < 20:  # noqa: ASYNC110 - no event reports a queue
            await asyncio.sleep(0.001)
        with_input = asyncio.create_task(shell.run("cat", input=b"given"))
        while (await shell.describe()).queued < 21:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await kill()
        assert (await shell.describe()).queued == 21
        await go(gate)
        kill.at_once()
        await first
        assert [(await each).stdout for each in waiting] == [f"{n}\n" for n in range(20)]
        assert (await with_input).stdout == "given"
        assert log.read_text().split() == [str(n) for n in range(20)]


async def test_what_ran_is_known(tmp_path: Path) -> None:
    """A command repeated under its id returns its result, or that this is no longer kept; it is not run."""
    async with kept() as (_, box, kill):
        shell = await box.shell()
        specs = [
            CommandSpec(f"id{n}", f"echo {n}; echo {n} >>{tmp_path}/log; exit_() {{ return {n}; }}; exit_")
            for n in range(8)
        ]
        for spec in specs:
            await _ended(box, shell.id, spec)
        await kill()
        assert await _ended(box, shell.id, specs[-1]) == (b"7\n", 7)
        with pytest.raises(UnknownProcess):
            await _ended(box, shell.id, specs[0])
        assert (tmp_path / "log").read_text().split() == [str(n) for n in range(8)]


async def _ended(box: Sandbox, shell_id: str, spec: CommandSpec) -> tuple[bytes, int]:
    printed = b""
    async with aclosing(box.api.run_in_shell(shell_id, spec)) as events:
        async for event in events:
            if isinstance(event, CommandEnded):
                return printed, event.exit_code
            if isinstance(event, OutputChunk):
                printed += event.data
    raise AssertionError("it did not end")


async def test_a_timeout_counts_from_when_the_command_began(gate: Path) -> None:
    async with kept() as (server, box, kill):
        shell = await box.shell()
        for timeout in TIMEOUTS:
            run = Started(shell, "x=kept; echo begun; sleep 1000", timeout=timeout)
            await run.begun.wait()
            if run.printed["stdout"]:
                break
        async with nobody(server, kill):
            await asyncio.sleep(timeout)
        result = await run.task
        assert (result.exit_code, result.timed_out, result.shell_restarted) == (124, True, False)
        assert (await shell.run("echo $x")).stdout == "kept\n"


async def test_an_interrupt_goes_on(tmp_path: Path) -> None:
    """The server dies while it waits for a program that does not end by TERM."""
    async with kept(interrupt_grace_seconds=0.5) as (_, box, kill):
        shell = await box.shell()
        child = "trap 'echo told' TERM; echo ready; while :; do sleep 1000 & wait; done"
        run = Started(shell, f"x=kept; bash -c {child!r}; echo no")
        await run.begun.wait()
        interrupt = asyncio.create_task(shell.interrupt())
        while b"told" not in run.printed["stdout"]:  # noqa: ASYNC110 - on_output reports it
            await asyncio.sleep(0.001)
        await kill()
        assert await interrupt is True
        result = await run.task
        assert result.exit_code == 130
        assert "no" not in result.stdout
        assert (await shell.run("echo $x")).stdout == "kept\n"


async def test_a_command_reads_on_under_the_next_server() -> None:
    async with kept() as (server, box, kill):
        shell = await box.shell()
        command = 'word=kept; echo ready; while read -r line; do echo "$word $line"; done; echo over; (exit 3)'
        run = Started(shell, command, stdin="open")
        await run.begun.wait()
        await shell.write("one\n")
        await kill()
        await shell.write("two\n")
        async with nobody(server, kill):
            writing = asyncio.create_task(shell.write("three\n"))
        await writing
        await shell.close_stdin()
        await kill()
        result = await run.task
        assert (result.stdout, result.exit_code) == ("ready\nkept one\nkept two\nkept three\nover\n", 3)
        with pytest.raises(StdinClosed):
            await shell.write("late")
        assert (await shell.run("echo $word; cat")).stdout == "kept\n"


async def test_input_that_a_command_does_not_read_yet_survives_the_server(gate: Path) -> None:
    data = random.Random(7).randbytes(400_000)
    async with kept() as (_, box, kill):
        shell = await box.shell()
        run = Started(shell, f"echo ready; read x <{gate}; sha256sum", stdin="open")
        await run.begun.wait()
        await shell.write(data)
        await shell.close_stdin()
        await kill()
        await go(gate)
        assert (await run.task).stdout.split()[1] == hashlib.sha256(data).hexdigest()


async def test_input_of_a_command_that_waits_survives_the_server(gate: Path) -> None:
    async with kept() as (_, box, kill):
        shell = await box.shell()
        first = await started(shell, f"echo ready; read x <{gate}")
        waiting = asyncio.create_task(shell.run("cat; echo end", stdin="open"))
        while not (await shell.describe()).queued:  # noqa: ASYNC110 - no event reports a queue
            await asyncio.sleep(0.001)
        await shell.write("early ")
        await kill()
        await shell.write("late ")
        await shell.close_stdin()
        await kill()
        await go(gate)
        await first
        assert (await waiting).stdout == "early late end\n"


async def test_an_open_stdin_leaves_nothing_with_the_keeper() -> None:
    async with kept() as (server, box, kill):
        shell = await box.shell()
        counts: set[int] = set()
        # Twice shows what each round adds; with every kill the keeper waits longer before the next start.
        for _ in range(2):
            run = Started(shell, "echo ready; cat", stdin="open")
            await run.begun.wait()
            await shell.write("x")
            await kill()
            await shell.write("y")
            await shell.close_stdin()
            assert (await run.task).stdout == "ready\nxy"
            assert (await shell.run("echo begun; cat", timeout=0.1, stdin="open")).timed_out
            await kill()
            counts.add(_descriptors(server))
        assert len(counts) == 1


def _descriptors(server: RunningServer) -> int:
    """How many the keeper has."""
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


async def test_a_process_with_the_shells_state_reads_on_under_the_next_server() -> None:
    async with kept() as (_, box, kill):
        shell = await box.shell()
        await shell.run("word=kept")
        process = await shell.start('echo ready; while read -r line; do echo "$word $line"; done', stdin="open")
        await process.wait_for_output("ready")
        await process.write("one\n")
        await kill()
        await process.write("two\n")
        await process.close_stdin()
        assert (await process.wait()).exit_code == 0
        assert (await process.snapshot()).stdout == b"ready\nkept one\nkept two\n"


async def test_much_output_with_a_kill_in_its_middle() -> None:
    lines = b"".join(b"%d\n" % n for n in range(1, 1_000_001))
    errors = b"".join(b"%d\n" % n for n in range(1, 20_001))
    async with kept() as (_, box, kill):
        shell = await box.shell()
        run = Started(shell, "seq 1 1000000; seq 1 20000 >&2; (exit 2)")
        await run.begun.wait()
        for _ in range(2):
            await kill()
        result = await run.task
        assert result.exit_code == 2
        assert hashlib.sha256(result.stdout_bytes).digest() == hashlib.sha256(lines).digest()
        assert result.stderr_bytes == errors
        assert run.printed == {"stdout": lines, "stderr": errors}


async def test_a_background_job_prints_for_the_shell_across_servers(gate: Path, second_gate: Path) -> None:
    async with kept() as (_, box, kill):
        shell = await box.shell()
        await shell.run(f"(read x <{gate}; echo late; read x <{second_gate}; echo later) & echo now")
        await kill()
        assert (await shell.run("/bin/echo between")).stdout == "between\n"
        await go(gate)
        late = shell.output()
        assert await _next(late) == b"late\n"
        await kill()
        await go(second_gate)
        assert await _next(late) == b"later\n"
        assert (await shell.run("wait; echo done")).stdout == "done\n"
        assert (await shell.snapshot()).stdout == b"late\nlater\n"


async def _next(output: AsyncIterator[OutputChunk | OutputGap]) -> bytes:
    chunk = await anext(output)
    assert isinstance(chunk, OutputChunk)
    return chunk.data


async def test_fifty_commands_and_five_kills() -> None:
    async with kept() as (_, box, kill):
        shell = await box.shell()
        await shell.run("n=0")
        command = "n=$((n+1)); echo $n; /bin/echo e$n >&2; (exit $n)"
        runs = [asyncio.create_task(shell.run(command)) for _ in range(50)]
        for number in range(5):
            await runs[number * 9]
            await kill()
        results = [await each for each in runs]
        assert [each.stdout for each in results] == [f"{n}\n" for n in range(1, 51)]
        assert [each.stderr for each in results] == [f"e{n}\n" for n in range(1, 51)]
        assert [each.exit_code for each in results] == list(range(1, 51))
        assert (await shell.describe()).commands_run == 51


async def test_a_shell_that_an_option_ended_comes_back_with_its_state(gate: Path) -> None:
    """The server dies first: the program ends, and is replaced, under the next one."""
    async with kept() as (server, box, kill):
        shell = await box.shell()
        running = await started(shell, f"x=kept; echo begun; read y <{gate}; set -u; : $missing; echo no")
        async with nobody(server, kill):
            await go(gate)
            await gone(shell.pid)
        result = await running
        assert (result.stdout, result.shell_restarted, result.restored) == ("begun\n", True, "state")
        await kill()
        assert (await shell.run("set +u; echo $x$y")).stdout == "keptgo\n"
        assert (await shell.describe()).restarts == 1


async def test_a_shell_that_ends_while_no_server_is_there(gate: Path) -> None:
    async with kept() as (server, box, kill):
        shell = await box.shell()
        running = await started(shell, f"echo begun; read x <{gate}; echo end; exit 6")
        queued = asyncio.create_task(shell.run("echo never"))
        while not (await shell.describe()).queued:  # noqa: ASYNC110 - no event reports a queue
            await asyncio.sleep(0.001)
        async with nobody(server, kill):
            await go(gate)
            await gone(shell.pid)
        result = await running
        assert (result.stdout, result.exit_code, result.state) == ("begun\nend\n", 6, "closed")
        with pytest.raises(ShellClosed, match="exited with code 6"):
            await queued
        await kill()
        status = await shell.describe()
        assert (status.state, status.reason, status.exit_code) == ("closed", "exited with code 6", 6)


async def test_a_start_that_is_under_way(tmp_path: Path, gate: Path) -> None:
    """A login shell with a profile that waits: the caller of `shell()` waits for both servers."""
    profile = tmp_path / ".bash_profile"
    profile.write_text(f"echo >>{tmp_path}/started; read x <{gate}; export FROM_PROFILE=$x\n")
    async with kept() as (_, box, kill):
        opening = asyncio.create_task(box.shell("bash", login=True, env={"HOME": str(tmp_path)}))
        while not (tmp_path / "started").exists():  # noqa: ASYNC110 - a file of another program
            await asyncio.sleep(0.001)
        await kill()
        await go(gate)
        shell = await opening
        assert (await shell.run("echo $FROM_PROFILE")).stdout == "go\n"
        assert (tmp_path / "started").read_text() == "\n"


async def test_a_first_answer_that_came_in_two_parts(tmp_path: Path, gate: Path) -> None:
    """A program named `sh` that sends half of its first answer, waits, and then continues as a real shell."""
    shell_program = tmp_path / "sh"
    shell_program.write_text(
        f"""#!/bin/bash
        while IFS= read -r line && [[ $line != *'>|'* ]]; do :; done
        eval "${{line%%; {{*}}"
        printf "trap -- 'x' USR1\\n\\0000:s::" >&0
        echo >{tmp_path}/started
        read x <{gate}
        printf ':\\0/\\0/\\0\\1' >&0
        exec /bin/sh -s
        """
    )
    shell_program.chmod(0o755)
    async with kept() as (_, box, kill):
        opening = asyncio.create_task(box.shell(str(shell_program)))
        while not (tmp_path / "started").exists():  # noqa: ASYNC110 - a file of another program
            await asyncio.sleep(0.001)
        await box.status()  # the server has read and recorded the half that was sent before the file was made
        await kill()
        await go(gate)
        shell = await opening
        assert (await shell.run("echo $0")).stdout == "/bin/sh\n"
        await kill()
        assert (await shell.run("echo on")).stdout == "on\n"


async def test_a_close_that_is_under_way(tmp_path: Path) -> None:
    async with kept() as (_, box, kill):
        shell = await box.shell()
        # It ignores TERM, and prints a line before its command ends.
        stubborn = 'trap "" TERM; echo ready >ready; while :; do sleep 1; done'
        started = await shell.run(f"mkfifo ready; bash -c {stubborn!r} & read x <ready; echo $!", cwd=str(tmp_path))
        job = int(started.stdout)
        closing = asyncio.create_task(shell.close(grace=0.5))
        while (await shell.describe()).state != "closed":  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.001)
        await kill()
        await closing
        assert not is_alive(job)
        assert (await shell.describe()).reason == "closed"


async def test_a_shell_bound_to_its_connection_ends_with_it() -> None:
    async with kept(detached_session_seconds=2.0) as (server, box, kill):
        async with holdfast.connect(server.address("unix")) as other:
            free, bound = await other.shell(), await other.shell(lifetime="connection")
            await kill()
            assert (await bound.run("echo on")).stdout == "on\n"
        found: dict[str, ShellStatus] = {}
        while found.get(bound.id) is None or found[bound.id].state != "closed":
            found = {each.id: await each.describe() for each in await box.shells()}
        assert found[free.id].state == "idle"


async def test_descriptors_do_not_pile_up(tmp_path: Path) -> None:
    async with kept() as (server, box, kill):
        shell = await box.shell()
        # The pipes of two commands are open, those of the last one and those for the next. With a timeout a command
        # saves the exports, and opens the file that a shell otherwise opens once it was idle for a moment.
        for _ in range(2):
            await shell.run("/bin/true", timeout=PATIENCE_SECONDS)
        before = descriptors(server.pid)
        gates = [tmp_path / f"gate{number}" for number in range(3)]
        for gate in gates:
            os.mkfifo(gate)
            await shell.run(f"read x <{gate} & /bin/true")
        assert descriptors(server.pid) - before
        for gate in gates:
            await go(gate)
        await shell.run("wait; /bin/true")
        for _ in range(3):
            await shell.run("/bin/true")
        # The pipes of the jobs end a moment after `wait` has returned.
        await settles("the server", server.pid, before)
        await kill()  # the keeper reads the messages
        kept_before = descriptors(server.process.pid)
        for _ in range(3):
            await shell.run("/bin/true")
        await settles("the next server", server.pid, before)
        await kill()
        await settles("the keeper", server.process.pid, kept_before)
        await shell.close()
        with pytest.raises(ShellClosed):
            await shell.run("true")


#: The server finds no descriptor for the second log of a command that it resumes, once: while the file is there.
NO_DESCRIPTOR = """
import errno, os
from holdfast.runtime.durability.recorder import DurableOutputLog
from holdfast.runtime.durability.shell_recorder import CommandRecorder
def reopen(self, *arguments, real=DurableOutputLog.reopen):
    if self._kind == 1 and isinstance(self._recorder, CommandRecorder) and os.path.exists({flag!r}):
        os.unlink({flag!r})
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    real(self, *arguments)
DurableOutputLog.reopen = reopen
"""


async def test_output_that_a_server_finds_whose_start_fails(tmp_path: Path, gate: Path) -> None:
    """It fails when it watches the pipes of the shell, and has not given them to the command that prints."""
    flag, begun, printed = tmp_path / "no-descriptor", tmp_path / "begun", tmp_path / "printed"
    (tmp_path / "sitecustomize.py").write_text(NO_DESCRIPTOR.format(flag=str(flag)))
    path = os.pathsep.join((str(tmp_path), server_environment()["PYTHONPATH"]))
    with running_server(environ={"PYTHONPATH": path}) as server:
        async with holdfast.connect(server.address("unix")) as box:
            kill = Kill(server, box)
            shell = await box.shell("bash")
            command = f"echo >{begun}; read x <{gate}; echo one; echo two >&2; echo >{printed}; (exit 3)"
            running = asyncio.create_task(shell.run(command))
            await exists(begun)
            async with nobody(server, kill):
                await go(gate)
                await exists(printed)
                flag.touch()
            result = await running
            assert (result.stdout, result.stderr, result.exit_code) == ("one\n", "two\n", 3)
            assert ((await box.status()).restarts, flag.exists()) == (2, False)
            assert (await shell.snapshot()).stdout == b""
            assert (await shell.run("echo next")).stdout == "next\n"


async def exists(path: Path) -> None:
    """Wait for a file of another program."""
    while not os.path.exists(path):  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.001)
