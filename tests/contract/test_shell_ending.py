"""How commands, shells and their children end, over every way: no hang, no leftovers, and a reason."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from holdfast import Sandbox
from holdfast.client.shell import Shell
from holdfast.errors import ShellClosed, UnknownShell
from tests.contract.shell_ways import SHELL_SETTINGS, Running, shell_box, until_queued
from tests.contract.ways import fifo, kill_quietly, open_box
from tests.support.servers import RunningServer, is_alive, running_server


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


# --- time is up ---------------------------------------------------------------------------------------------------

#: Commands that do not end by themselves, none of which may get to what is behind it.
ENDLESS = {
    "a busy loop": "while :; do :; done",
    "a function in a loop": "f() { g; }; g() { :; }; while f; do f; done",
    "loops in functions": "f() { while :; do g; done; }; g() { for i in 1 2 3; do :; done; }; f; f",
    "a child": "sleep 1000",
    "a child that ignores TERM": "sh -c 'trap \"\" TERM INT HUP; while :; do sleep 1000; done'",
    "children in a loop": "while :; do sleep 1000; done",
    "a pipeline in a subshell": "(sleep 1000 | cat; sleep 1000) | cat",
    "a substitution": "x=$(sleep 1000; echo more)",
    "a child in a session of its own": "setsid -w sleep 1000",
    "a builtin that waits": "read x < <(sleep 1000)",
    "a wait for a job": "sleep 1000 & wait",
}


async def test_a_command_whose_time_is_up_ends_and_the_shell_keeps_its_state(sh: Shell, tmp_path: Path) -> None:
    await sh.run(f"word=kept; export EXPORTED=too; kept() {{ echo $word $EXPORTED; }}; cd {tmp_path}")
    before = (await sh.run("echo $BASHPID")).stdout
    for what, endless in ENDLESS.items():
        result = await sh.run(f"{endless}\nword=lost; touch after", timeout=0.05)
        assert (result.timed_out, result.exit_code, result.stdout) == (True, 124, ""), what
        assert not result.shell_restarted, what
        after = await sh.run("echo $?; kept; ls; echo $BASHPID")
        assert after.stdout == f"124\nkept too\n{before}", what
        assert (after.cwd, after.timed_out) == (str(tmp_path), False), what


async def test_what_was_printed_before_the_end_is_in_the_result(sh: Shell) -> None:
    running = Running(sh, "echo out; echo err >&2; echo on; while :; do :; done; echo after")
    await running.until(b"on\n")
    assert await sh.interrupt()
    result = await running.task
    assert (result.stdout, result.stderr, result.exit_code) == ("out\non\n", "err\n", 130)


async def test_a_command_in_time_is_none_of_it(sh: Shell) -> None:
    result = await sh.run("echo quick", timeout=1000)
    assert (result.stdout, result.exit_code, result.timed_out) == ("quick\n", 0, False)
    background = await sh.run("sleep 1000 & echo $!", timeout=1000)
    child = int(background.stdout)
    assert (await sh.run("while :; do :; done", timeout=0.05)).timed_out
    # A background job is not the command's foreground.
    assert is_alive(child)
    await sh.close(grace=0)
    assert not is_alive(child)


# --- the shell ends -----------------------------------------------------------------------------------------------

#: The cause of a shell's end, the end of its command then, and the later error.
DEATHS = {
    "echo bye; exit 3": (3, "exited with code 3"),
    "echo bye; kill -9 $$": (137, "killed by SIGKILL"),
    # Whether another program ends at once, or the shell itself, cannot be distinguished for certain.
    "echo bye; exec true": (0, "exited with code 0|replaced by .*exec.* exit code 0"),
    "trap 'echo bye' EXIT; exit": (0, "exited with code 0"),
}


async def test_a_shell_that_ends_says_how_and_runs_nothing_more(box: Sandbox) -> None:
    for command, (code, why) in DEATHS.items():
        sh = await box.shell()
        result = await sh.run(command)
        assert (result.stdout, result.exit_code, result.state) == ("bye\n", code, "closed"), command
        assert result.shell_restarted is False
        assert (sh.state, (await sh.describe()).state) == ("closed", "closed"), command
        with pytest.raises(ShellClosed, match=f"{sh.id}.*({why})"):
            await sh.run("echo more")
        with pytest.raises(ShellClosed, match=why):
            await sh.start("echo more")
        with pytest.raises(ShellClosed, match=why):
            async for _ in sh.stream("echo more"):
                pass
        assert not await sh.interrupt()
        await sh.close()


async def test_a_shell_that_became_another_program_says_so(sh: Shell, tmp_path: Path) -> None:
    with fifo(str(tmp_path), "go") as (path, fd):
        running = Running(sh, f"exec sh -c 'echo on; read x < {path}; echo off; exit 9'")
        await running.until(b"on\n")
        os.write(fd, b"\n")
        result = await running.task
    assert (result.stdout, result.exit_code, result.state) == ("on\noff\n", 9, "closed")
    with pytest.raises(ShellClosed, match=r"replaced by .*exec.* exit code 9"):
        await sh.run("echo more")


async def test_those_who_wait_in_a_shell_that_ends_are_told(sh: Shell, tmp_path: Path) -> None:
    with fifo(str(tmp_path), "go") as (path, fd):
        running = Running(sh, f"echo on; read x < {path}; exit 5")
        await running.until(b"on")
        waiting = [asyncio.create_task(sh.run("touch ran", cwd=str(tmp_path))) for _ in range(2)]
        await until_queued(sh, 2)
        os.write(fd, b"\n")
        assert (await running.task).exit_code == 5
        for task in waiting:
            with pytest.raises(ShellClosed, match="exited with code 5"):
                await task
    assert os.listdir(tmp_path) == ["go"]


async def test_closing_while_a_command_runs_ends_it(sh: Shell) -> None:
    running = Running(sh, "sh -c 'trap \"\" TERM; echo $$; while :; do sleep 1000; done'; echo after")
    child = int(await running.until(b"\n"))
    waiting = asyncio.create_task(sh.run("echo waited"))
    await until_queued(sh, 1)
    await sh.close(grace=0.05)
    result = await running.task
    assert (result.state, result.reason, result.stdout) == ("closed", "closed", f"{child}\n")
    assert result.exit_code != 0
    with pytest.raises(ShellClosed, match="closed"):
        await waiting
    assert not is_alive(child)
    assert not is_alive(sh.pid)


async def test_a_closed_shell_leaves_nothing_behind(sh: Shell) -> None:
    result = await sh.run(
        "trap 'echo at exit' EXIT\n"
        "setsid sleep 1000 & echo $!\n"
        "nohup sleep 1000 >/dev/null 2>&1 & echo $!; disown\n"
        "(setsid sh -c 'echo $$; exec sleep 1000' &)\n"
        "env -i setsid sleep 1000 & echo $!\n"
        "coproc sleep 1000; echo $!\n"
    )
    # The one behind the double fork may print after the command has ended.
    while len(printed := (result.stdout_bytes + (await sh.snapshot()).stdout).split()) < 5:  # noqa: ASYNC110
        await asyncio.sleep(0)
    children = [int(pid) for pid in printed]
    assert [pid for pid in children if not is_alive(pid)] == []
    await sh.close(grace=0.5)
    assert [pid for pid in [sh.pid, *children] if is_alive(pid)] == []
    assert (await sh.snapshot()).stdout.endswith(b"at exit\n")
    await sh.close()
    status = await sh.describe()
    assert (status.state, status.reason) == ("closed", "closed")


async def test_a_closed_shell_leaves_its_jobs_if_asked_to(sh: Shell, tmp_path: Path) -> None:
    with fifo(str(tmp_path), "go") as (path, fd):
        job = int((await sh.run(f"{{ read x < {path}; echo late; exec sleep 1000; }} & echo $!")).stdout)
        try:
            await sh.close(jobs="keep")
            assert (is_alive(job), is_alive(sh.pid)) == (True, False)
            with pytest.raises(ShellClosed, match="closed"):
                await sh.run("true")
            os.write(fd, b"\n")
            # Its output is still the shell's.
            async for event in sh.output():
                assert (event.stream, event.offset) == ("stdout", 0)
                break
            assert (await sh.snapshot()).stdout == b"late\n"
        finally:
            kill_quietly(job)


async def test_a_shell_in_a_with_block_ends_with_it(box: Sandbox) -> None:
    async with await box.shell() as sh:
        child = int((await sh.run("setsid sleep 1000 & echo $!")).stdout)
    assert sh.state == "closed"
    assert not is_alive(child)


# --- other connections --------------------------------------------------------------------------------------------


async def test_a_shell_is_found_again_from_another_connection(remote_way: str, shell_server: RunningServer) -> None:
    async with open_box(remote_way, shell_server, SHELL_SETTINGS) as first:
        sh = await first.shell(id=f"long-lived-{remote_way}")
        await sh.run("word=kept; cd /usr")
    async with shell_box(remote_way, shell_server) as second:
        again = await second.open_shell(f"long-lived-{remote_way}")
        assert (again.cwd, again.pid) == ("/usr", sh.pid)
        assert (await again.run("echo $word")).stdout == "kept\n"


async def test_a_shell_may_end_with_its_connection(remote_way: str) -> None:
    settings = {**SHELL_SETTINGS, "detached_session_seconds": 0}
    with running_server(["unix", "ws"], settings=settings) as server:
        async with open_box(remote_way, server, settings) as first:
            sh = await first.shell(id="bound", lifetime="connection")
            child = int((await sh.run("setsid sleep 1000 & echo $!")).stdout)
        async with open_box(remote_way, server, settings) as second:
            # Joins the closing that is under way, or begins it: both end with nothing left.
            with contextlib.suppress(UnknownShell):
                await second.api.close_shell("bound", grace=0)
            assert not is_alive(child)
