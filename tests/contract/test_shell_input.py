"""Commands in a live shell, and processes that begin with its state, with an open stdin; over every way."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Iterator

import pytest

from holdfast import OutputChunk, Sandbox
from holdfast.client.shell import Shell
from holdfast.errors import InvalidParams, StdinClosed
from holdfast.testing.sandbox_suite import TIMEOUTS
from holdfast.types import CommandEnded
from tests.contract.shell_ways import SHELL_SETTINGS, Running, shell_box, until_queued
from tests.support.parts import require
from tests.support.servers import RunningServer, running_server

#: Echoes each line, with the shell's own variable in front, until the end of its input.
ECHO = 'word=kept; echo ready; while read -r line; do echo "$word $line"; done; echo over; cd /; (exit 3)'


@pytest.fixture(scope="module")
def shell_server() -> Iterator[RunningServer]:
    with running_server(["unix", "ws"], settings=SHELL_SETTINGS) as server:
        yield server


@pytest.fixture
async def box(way: str, shell_server: RunningServer) -> AsyncIterator[Sandbox]:
    async with shell_box(way, shell_server) as box:
        yield box


@pytest.fixture
async def sh(box: Sandbox) -> Shell:
    return await box.shell()


@pytest.fixture(params=["bash", "dash", "busybox", "zsh"])
def family(request: pytest.FixtureRequest) -> str:
    require(request.param)
    return str(request.param)


# --- run ----------------------------------------------------------------------------------------------------------


async def test_the_shell_itself_reads_what_is_written(box: Sandbox, family: str) -> None:
    sh = await box.shell(family)
    running = Running(sh, ECHO, stdin="open")
    await running.until(b"ready\n")
    await sh.write("one\n")
    await running.until(b"kept one\n")
    await sh.write(b"two\n")
    await running.until(b"kept two\n")
    await sh.close_stdin()
    result = await running.task
    assert (result.stdout, result.exit_code, result.cwd) == ("ready\nkept one\nkept two\nover\n", 3, "/")
    assert (await sh.run("echo $word; cat")).stdout == "kept\n"


async def test_a_program_has_the_shells_state_and_reads(sh: Shell) -> None:
    await sh.run("cd /; export EXPORTED=yes; f() { cat; }")
    running = Running(sh, 'echo "$EXPORTED $PWD"; f; f', stdin="open")
    await running.until(b"yes /\n")
    await sh.write("to f")
    await running.until(b"to f")
    await sh.close_stdin()
    assert (await running.task).stdout == "yes /\nto f"


async def test_what_is_written_before_the_command_reads_is_read(sh: Shell) -> None:
    for _ in range(20):
        running = Running(sh, "echo; read -r a; read -r b; echo $a-$b; cat", stdin="open")
        first = Running(sh, "true")
        await running.until(b"\n")
        await sh.write("1\n2\nrest")
        await sh.close_stdin()
        assert (await running.task).stdout == "\n1-2\nrest"
        await first.task


async def test_a_command_that_waits_for_its_turn_takes_input(sh: Shell) -> None:
    first = Running(sh, "echo first; cat", stdin="open")
    await first.until(b"first\n")
    writing = Shell(sh._api, await sh.describe())
    second = Running(writing, "cat; echo end", stdin="open")
    await until_queued(sh, 1)
    await writing.write("early")
    await writing.close_stdin()
    await sh.close_stdin()
    assert (await first.task).stdout == "first\n"
    assert (await second.task).stdout == "earlyend\n"


async def test_a_command_that_reads_nothing_ends_all_the_same(sh: Shell) -> None:
    running = Running(sh, "echo begun; exit_code() { return 4; }; exit_code", stdin="open")
    assert (await running.task).exit_code == 4
    with pytest.raises(StdinClosed):
        await sh.write("late")
    await sh.close_stdin()
    assert (await sh.run("nowhere", cwd="/no/such/place", stdin="open")).exit_code != 0


async def test_much_input_arrives_whole(sh: Shell) -> None:
    data = random.Random(1).randbytes(3_000_000)
    running = Running(sh, "echo ready; sha256sum", stdin="open")
    await running.until(b"ready\n")
    await sh.write(data)
    await sh.close_stdin()
    assert (await running.task).stdout.split()[1] == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("command", ["echo begun; read line; echo never", "echo begun; cat; echo never"])
async def test_a_timeout_ends_a_command_that_waits_for_input_and_keeps_the_shell(sh: Shell, command: str) -> None:
    await sh.run("word=kept")
    pid = sh.pid
    for timeout in TIMEOUTS:
        result = await sh.run(command, timeout=timeout, stdin="open")
        if result.stdout:
            break
    assert (result.timed_out, result.exit_code, result.stdout) == (True, 124, "begun\n")
    assert not result.shell_restarted
    assert (await sh.run("echo $word $$")).stdout == f"kept {pid}\n"
    with pytest.raises(StdinClosed):
        await sh.write("late")


async def test_an_interrupt_and_a_cancelled_caller_end_it(sh: Shell) -> None:
    running = Running(sh, "echo begun; read line; echo never", stdin="open")
    await running.until(b"begun\n")
    assert await sh.interrupt()
    assert (await running.task).exit_code == 130
    running = Running(sh, "echo begun; cat; echo never", stdin="open")
    await running.until(b"begun\n")
    running.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running.task
    assert (await sh.run("echo on")).stdout == "on\n"


async def test_what_a_command_leaves_behind_reads_an_end(box: Sandbox) -> None:
    sh = await box.shell("sh")
    running = Running(sh, "{ cat <&3; } 3<&0 & echo begun", stdin="open")
    assert (await running.task).stdout == "begun\n"
    assert (await sh.run("wait; echo waited")).stdout == "waited\n"


async def test_a_stream_reads_too(sh: Shell) -> None:
    printed = b""
    async for event in sh.stream("echo name?; read name; echo hello $name", stdin="open"):
        if isinstance(event, OutputChunk):
            printed += event.data
            if printed == b"name?\n":
                await sh.write("you\n")
        elif isinstance(event, CommandEnded):
            assert event.exit_code == 0
    assert printed == b"name?\nhello you\n"


async def test_what_cannot_be_written_is_said(sh: Shell) -> None:
    with pytest.raises(StdinClosed, match="stdin='open'"):
        await sh.write("nobody reads")
    with pytest.raises(StdinClosed, match="stdin='open'"):
        await sh.close_stdin()
    with pytest.raises(InvalidParams, match="input"):
        await sh.run("cat", input="x", stdin="open")
    running = Running(sh, "echo begun; sleep 1000")
    await running.until(b"begun\n")
    status = await sh.describe()
    assert status.command_id is not None
    with pytest.raises(StdinClosed):
        await sh._api.write(status.command_id, b"x")
    running.task.cancel()


# --- start --------------------------------------------------------------------------------------------------------


async def test_a_process_with_the_shells_state_reads(box: Sandbox, family: str) -> None:
    sh = await box.shell(family)
    await sh.run("cd /; word=kept")
    process = await sh.start('echo "$PWD"; while read -r l; do echo "$word $l"; done; exec cat', stdin="open")
    await process.wait_for_output("/\n", timeout=30)
    await process.write("one\n")
    await process.wait_for_output("kept one\n", timeout=30)
    await process.close_stdin()
    assert (await process.wait(timeout=30)).exit_code == 0
    assert (await process.snapshot()).stdout == b"/\nkept one\n"
    assert (await sh.run("echo free")).stdout == "free\n"


async def test_a_started_process_without_input_reads_an_end(sh: Shell) -> None:
    process = await sh.start("cat; echo end")
    assert await process.communicate() == (b"end\n", b"")
    with pytest.raises(StdinClosed):
        await process.write("x")


async def test_input_of_a_started_process_is_only_its_input(sh: Shell) -> None:
    process = await sh.start("exec cat; ls -l /proc/self/fd", stdin="open")
    out, err = await process.communicate("text\n")
    assert (out, err) == (b"text\n", b"")
    process = await sh.start('for fd in /proc/$$/fd/*; do readlink "$fd"; done | grep -c pipe', stdin="open")
    await process.communicate()
    assert await (await sh.start("cat", stdin="open")).communicate("x" * 500_000) == (b"x" * 500_000, b"")
