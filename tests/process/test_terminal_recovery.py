"""Terminals across servers: the prompt is still known, positions stay where they were, nothing is typed twice."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import holdfast
from tests.support.servers import PATIENCE_SECONDS, RunningServer, running_server, server_environment
from tests.support.signalling import send_signal


def kill(server: RunningServer) -> None:
    send_signal(server.pid, signal.SIGKILL)


async def test_a_terminal_goes_on_with_its_prompt_and_its_positions() -> None:
    with running_server() as server:
        async with holdfast.connect(server.address("unix")) as box:
            terminal = await box.terminal(["bash"], env={"PS1": "$ ", "HISTFILE": ""}, login=False)
            assert (await terminal.run("echo one; cd /tmp; name=value")).output == "one\n"
            before = await terminal.describe()
            events = await terminal.read()
            kill(server)
            after = await terminal.describe()
            assert (after.state, after.prompt, after.token) == (before.state, before.prompt, before.token)
            assert (after.last_exit_code, after.integration, after.cwd) == (0, "bash", "/tmp")
            assert await terminal.read() == events
            server.pid = (await box.status()).pid
            ended = await terminal.run("echo $name; false")
            assert (ended.output, ended.exit_code) == ("value\n", 1)
            more = await terminal.read(since=events.token)
            assert next(event.type for event in more.events if event.type != "output") == "command"


async def test_a_command_that_runs_while_the_server_is_killed() -> None:
    with running_server() as server:
        async with holdfast.connect(server.address("unix")) as box:
            terminal = await box.terminal(["bash"], env={"PS1": "$ ", "HISTFILE": ""}, login=False)
            await terminal.wait_until_idle()
            running = asyncio.create_task(terminal.run("echo begun; read x; echo got $x; (exit 3)"))
            process = await box.process(terminal.id)
            await process.wait_for_output("begun\r\n")
            kill(server)
            status = await terminal.describe()
            assert status.state == "BUSY"
            await terminal.send("word\n")
            ended = await running
            assert (ended.exit_code, ended.output, ended.timed_out) == (3, "begun\nword\ngot word\n", False)
            assert (await terminal.run("echo next")).output == "next\n"
            printed = b"".join(
                [event.payload for event in (await terminal.read()).events if event.type == "output"]
            )
            assert printed.count(b"begun\r\n") == 1
            assert printed.count(b"got word\r\n") == 1


async def test_a_terminal_that_ends_while_no_server_is_there() -> None:
    with running_server() as server:
        async with holdfast.connect(server.address("unix")) as box:
            terminal = await box.terminal(["bash"], env={"PS1": "$ ", "HISTFILE": ""}, login=False)
            await terminal.wait_until_idle()
            server.process.send_signal(signal.SIGSTOP)
            kill(server)
            send_signal(terminal.pid, signal.SIGKILL)
            server.process.send_signal(signal.SIGCONT)
            assert (await terminal.wait()).signal == "SIGKILL"
            status = await terminal.describe()
            assert (status.state, status.reason) == ("ERROR", "bash was killed by SIGKILL")


async def test_a_terminal_is_closed_by_a_server_that_did_not_open_it() -> None:
    with running_server() as server:
        async with holdfast.connect(server.address("unix")) as box:
            terminal = await box.terminal(["bash"], env={"PS1": "$ ", "HISTFILE": ""}, login=False)
            await terminal.wait_until_idle()
            kill(server)
            await terminal.close()
            assert (await terminal.describe()).state == "CLOSED"


async def test_a_continuation_prompt_is_still_known() -> None:
    with running_server() as server:
        async with holdfast.connect(server.address("unix")) as box:
            terminal = await box.terminal(["bash"], env={"PS1": "$ ", "HISTFILE": ""}, login=False, cwd="/tmp")
            await terminal.send("echo 'one\n")
            while not (await terminal.wait_until_awaiting_input(30)).continuation:  # noqa: ASYNC110
                await asyncio.sleep(0)
            events = (await terminal.read()).events
            kill(server)
            after = await terminal.describe()
            assert (after.state, after.continuation) == ("BUSY", True)
            assert (await terminal.read()).events == events
            assert [event.cwd for event in events if event.type == "prompt"] == ["/tmp"]
            server.pid = (await box.status()).pid
            await terminal.send("two'; (exit 4)\n")
            status = await terminal.wait_until_idle(30)
            assert (status.state, status.continuation, status.last_exit_code) == ("IDLE", False, 4)


#: The next read of a terminal waits until the shell is about to print its prompt, and kills the server before the
#: bytes are stored: the marks of the start and of the end of a command are in that read.
DIE_AFTER_READ = """
import os, signal, sys, time
if "--kept" in sys.orig_argv:
    from holdfast.runtime.durability.recorder import ProcessRecorder
    real = ProcessRecorder.read_terminal
    def read_and_die(*arguments):
        if not os.path.exists({armed!r}):
            return real(*arguments)
        while not os.path.exists({prompted!r}):
            time.sleep(0.001)
        real(*arguments)
        os.rmdir({armed!r})
        os.kill(os.getpid(), signal.SIGKILL)
    ProcessRecorder.read_terminal = read_and_die
"""


async def test_a_command_whose_marks_are_in_the_last_read_of_a_killed_server(tmp_path: Path) -> None:
    armed, prompted = tmp_path / "armed", tmp_path / "prompted"
    (tmp_path / "sitecustomize.py").write_text(DIE_AFTER_READ.format(armed=str(armed), prompted=str(prompted)))
    paths = os.pathsep.join((str(tmp_path), server_environment()["PYTHONPATH"]))
    with running_server(environ={"PYTHONPATH": paths}) as server:
        async with holdfast.connect(server.address("unix")) as box:
            terminal = await box.terminal(["bash"], env={"HISTFILE": "", "HOME": str(tmp_path)}, login=False)
            # The shell expands its prompt after it has printed the mark of the command's end.
            await terminal.run(f"PS1='$(: >{prompted})$ '")
            prompted.unlink()
            armed.mkdir()
            async with asyncio.timeout(PATIENCE_SECONDS):
                ended = await terminal.run("echo one; (exit 3)")
            assert not armed.exists()
            assert (ended.exit_code, ended.output, ended.timed_out) == (3, "one\n", False)
            commands = [event.type for event in (await terminal.read()).events].count("ended")
            await terminal.send("\n")  # an empty line, which is not the end of that command
            await terminal.wait_until_idle(PATIENCE_SECONDS)
            assert [event.type for event in (await terminal.read()).events].count("ended") == commands
            assert (await terminal.run("echo next")).output == "next\n"
            printed = b"".join(
                [event.payload for event in (await terminal.read()).events if event.type == "output"]
            )
            assert printed.count(b"one\r\n") == 1


#: The server finds no room for the next bytes of a terminal, records them as lost, and dies.
DIE_AFTER_LOSS = """
import os, signal, sys
if "--kept" in sys.orig_argv:
    from holdfast.runtime.durability.recorder import DurableOutputLog
    real = DurableOutputLog.append
    def lose_and_die(self, data):
        if not os.path.exists({armed!r}):
            return real(self, data)
        self._lose(len(data))
        os.rmdir({armed!r})
        os.kill(os.getpid(), signal.SIGKILL)
    DurableOutputLog.append = lose_and_die
"""


async def test_bytes_that_a_killed_server_recorded_as_lost_keep_their_offset(tmp_path: Path) -> None:
    """The next server has read them again: they are printed once, where they belong, and nothing is lost."""
    armed = tmp_path / "armed"
    (tmp_path / "sitecustomize.py").write_text(DIE_AFTER_LOSS.format(armed=str(armed)))
    paths = os.pathsep.join((str(tmp_path), server_environment()["PYTHONPATH"]))
    with running_server(environ={"PYTHONPATH": paths}) as server:
        async with holdfast.connect(server.address("unix")) as box:
            script = "stty -echo; echo one; read x; echo two; read x; echo three"
            process = await box.start(["sh", "-c", script], tty=holdfast.TerminalSize(24, 80))
            await process.wait_for_output("one")
            armed.mkdir()
            await process.write(b"\n")
            await process.wait_for_output("two")
            assert not armed.exists()
            await process.write(b"\n")
            await process.wait(PATIENCE_SECONDS)
            read = await box.api.read(process.id)
    assert b"".join(chunk.data for chunk in read.chunks) == b"one\r\ntwo\r\nthree\r\n"
    assert [chunk.offset for chunk in read.chunks][:2] == [0, 5]
