"""The end of a terminal: by its shell, by force, by a crash; and what becomes of what it had started."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from holdfast.client.terminal import Terminal
from holdfast.errors import InvalidParams, StdinClosed, TerminalClosed, UnknownTerminal
from tests.contract.terminals.ways import (
    PATIENCE,
    Opener,
    make_home,
    number_in,
    terminal_box,
    until_event,
    until_gone,
    until_shown,
    until_status,
)
from tests.contract.ways import kill_quietly
from tests.support.servers import RunningServer, is_alive
from tests.support.signalling import send_signal


async def started(terminal: Terminal, command: str) -> int:
    """The pid of a job that a command puts into the background. `setsid` forks: its own pid is not the job's."""
    if "setsid" in command:
        command = "mkfifo f; setsid sh -c 'echo $$ > f; exec sleep 1000' & read pid < f; rm f; echo pid:$pid"
    else:
        command = f"{command} echo pid:$!"
    result = await terminal.run(command, PATIENCE)
    return number_in(result.output.rpartition("pid:")[2])


# --- closing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["graceful", "force", "GRACEFUL", "FORCE"])
async def test_closing_at_the_prompt(terminal: Terminal, mode: str) -> None:
    states = asyncio.create_task(states_of(terminal))
    await until_event(terminal, lambda event: event.type == "prompt")
    status = await terminal.close(mode)  # type: ignore[arg-type]
    assert (status.state, terminal.state) == ("CLOSED", "CLOSED")
    assert status.exit_code == (0 if mode.lower() == "graceful" else 137)
    assert (await states)[-2:] == ["CLOSING", "CLOSED"]
    assert not is_alive(terminal.pid)
    # Again, and in another way, is nothing.
    again = await terminal.close()
    assert (again.state, again.exit_code) == ("CLOSED", status.exit_code)
    await terminal.close("force", jobs="keep")


async def states_of(terminal: Terminal) -> list[str]:
    return [event.state async for event in terminal.events() if event.type == "state"]


async def test_what_was_shown_can_be_read_after_its_end(opened: Opener) -> None:
    terminal = await opened(id="ended")
    await terminal.run("echo remembered")
    await terminal.close()
    found = await terminal.read()
    assert b"remembered" in b"".join(event.payload for event in found.events)
    assert found.closed
    assert (found.state, found.events[-1].state, found.events[-1].exit_code) == ("CLOSED", "CLOSED", 0)
    assert "remembered" in (await terminal.screen()).text
    handle = await opened.box.open_terminal("ended")
    assert handle.state == "CLOSED"
    assert '"version": 2' in await handle.recording() or '"version":2' in await handle.recording()
    with pytest.raises(TerminalClosed, match="exit code 0"):
        await terminal.run("true")
    with pytest.raises((StdinClosed, TerminalClosed)):
        await terminal.send("x")
    process = await opened.box.process("ended")
    await process.forget()
    with pytest.raises(UnknownTerminal):
        await handle.describe()
    # Its name is free.
    assert (await opened(id="ended")).state == "IDLE"


async def test_leaving_the_block_closes(opened: Opener) -> None:
    async with await opened() as terminal:
        assert (await terminal.run("echo on")).output == "on\n"
    assert (terminal.state, is_alive(terminal.pid)) == ("CLOSED", False)


async def test_closing_with_something_on_the_line(terminal: Terminal) -> None:
    await terminal.send("echo half a 'line")
    await until_shown(terminal, b"half")
    status = await terminal.close()
    assert (status.state, status.exit_code) == ("CLOSED", 0)


@pytest.mark.parametrize("what", ["sleep 1000", "cat", "python3 -q -i", "sh", "stty raw -echo; sleep 1000"])
@pytest.mark.parametrize("mode", ["graceful", "force"])
async def test_closing_while_something_runs(terminal: Terminal, what: str, mode: str) -> None:
    await terminal.send(f"{what}\n")
    name = what.split()[-2] if "sleep" in what else what.split()[0]
    status = await until_status(terminal, lambda status: (status.foreground or "").startswith(name))
    child = status.foreground_pid
    assert child is not None
    status = await terminal.close(mode)  # type: ignore[arg-type]
    assert status.state == "CLOSED"
    assert not is_alive(terminal.pid)
    assert not is_alive(child)


async def test_what_does_not_want_to_end_is_killed_after_the_grace(terminal: Terminal) -> None:
    await terminal.send("sh -c 'trap \"\" HUP TERM INT; echo pid:$$; while :; do sleep 0.01; done'\n")
    await until_shown(terminal, b"pid:")
    child = (await until_status(terminal, lambda status: status.foreground == "sh")).foreground_pid
    assert child is not None
    status = await terminal.close(grace=0.1)
    assert status.state == "CLOSED"
    assert not is_alive(child)


async def test_two_close_it_at_once(opened: Opener) -> None:
    terminal = await opened()
    other = await opened.box.open_terminal(terminal.id)
    await terminal.run("sleep 1000 &")
    first, second = await asyncio.gather(terminal.close(), other.close("force"))
    assert (first.state, second.state) == ("CLOSED", "CLOSED")


async def test_what_is_no_way_to_close(terminal: Terminal) -> None:
    with pytest.raises(InvalidParams, match="'softly'"):
        await terminal.close("softly")  # type: ignore[arg-type]
    with pytest.raises(InvalidParams, match="'maybe'"):
        await terminal.close(jobs="maybe")  # type: ignore[arg-type]
    assert (await terminal.run("echo on")).output == "on\n"


# --- jobs ---------------------------------------------------------------------------------------------------------

JOBS = [
    "sleep 1000 &",
    "nohup sleep 1000 >/dev/null 2>&1 &",
    "setsid sleep 1000 &",
    "(trap '' HUP TERM; exec sleep 1000) &",
    "sleep 1000 & disown;",
]


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("mode", ["graceful", "force"])
async def test_jobs_end_with_it(terminal: Terminal, job: str, mode: str) -> None:
    pid = await started(terminal, job)
    assert is_alive(pid)
    status = await terminal.close(mode, grace=0.3)  # type: ignore[arg-type]
    assert status.state == "CLOSED"
    assert not is_alive(pid)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("busy", [False, True])
async def test_jobs_are_kept(terminal: Terminal, job: str, busy: bool) -> None:
    pid = await started(terminal, job)
    if busy:
        await terminal.send("sleep 2000\n")
        await until_status(terminal, lambda status: status.foreground == "sleep")
    status = await terminal.close(jobs="keep", grace=2.0)
    try:
        assert status.state == "CLOSED"
        assert not is_alive(terminal.pid)
        assert is_alive(pid)
        # They can be ended later, by closing again.
        await terminal.close("force")
        await until_gone(pid)
    finally:
        kill_quietly(pid)


async def test_jobs_are_kept_by_force(terminal: Terminal) -> None:
    pid = await started(terminal, "nohup sleep 1000 >/dev/null 2>&1 &")
    try:
        status = await terminal.close("force", jobs="keep")
        assert status.state == "CLOSED"
        assert is_alive(pid)
    finally:
        kill_quietly(pid)


async def test_a_stopped_job_does_not_hold_it(terminal: Terminal) -> None:
    """A shell with stopped jobs refuses the first `exit`."""
    await terminal.send("sleep 1000\n")
    status = await until_status(terminal, lambda status: status.foreground == "sleep")
    pid = status.foreground_pid
    assert pid is not None
    await terminal.send_keys("C-z")
    await terminal.wait_until_idle(PATIENCE)
    status = await terminal.close()
    assert status.state == "CLOSED"
    assert not is_alive(pid)


async def test_jobs_of_a_shell_that_left_by_itself(terminal: Terminal) -> None:
    pid = await started(terminal, "sleep 1000 &")
    await terminal.send("exit\n")
    assert (await terminal.wait(PATIENCE)).exit_code == 0
    await until_status(terminal, lambda status: status.state == "CLOSED")
    assert is_alive(pid)
    await terminal.close()
    assert not is_alive(pid)


# --- crashes ------------------------------------------------------------------------------------------------------


async def test_a_crash_is_an_error_with_its_reason(terminal: Terminal) -> None:
    number = signal.SIGKILL  # bash has handlers for the others, and may take its time
    await terminal.run("echo last words")
    waiting = asyncio.create_task(terminal.wait(PATIENCE))
    send_signal(terminal.pid, number)
    status = await waiting
    assert (status.exit_code, status.signal) == (128 + number, number.name)
    event = await until_event(terminal, lambda event: event.state == "ERROR")
    assert (event.type, event.exit_code) == ("state", 128 + number)
    assert event.reason == f"/bin/bash was killed by {number.name}"
    described = await terminal.describe()
    assert (described.state, described.reason, described.signal) == ("ERROR", event.reason, number.name)
    with pytest.raises(TerminalClosed, match=number.name):
        await terminal.run("true")
    with pytest.raises(TerminalClosed, match=number.name):
        await terminal.wait_until_idle(PATIENCE)
    assert (await terminal.read()).closed
    assert (await terminal.close()).state == "ERROR"


async def test_a_crash_in_the_middle_of_a_command(terminal: Terminal) -> None:
    running = asyncio.create_task(terminal.run("echo up:$((1+1)); read word"))
    await until_shown(terminal, b"up:2")
    send_signal(terminal.pid, signal.SIGKILL)
    result = await running
    assert (result.exit_code, result.state, result.timed_out) == (137, "ERROR", False)
    assert result.output == "up:2\n"


async def test_closing_while_a_command_runs_tells_its_caller(terminal: Terminal) -> None:
    running = asyncio.create_task(terminal.run("sleep 1000"))
    waiting = asyncio.create_task(terminal.run("echo next"))
    await until_event(terminal, lambda event: event.type == "command")
    await terminal.close("force")
    result = await running
    # The shell may have seen the end of what ran before its own.
    assert result.state in ("CLOSING", "CLOSED")
    with pytest.raises(TerminalClosed):
        await waiting


async def test_a_profile_that_ends_the_shell(opened: Opener) -> None:
    (opened.home / ".bash_profile").write_text("echo leaving; exit 9\n")
    terminal = await opened()
    await until_status(terminal, lambda status: status.state == "CLOSED")
    assert (await terminal.describe()).exit_code == 9
    assert "leaving" in (await terminal.screen()).text


async def test_a_profile_that_asks_something(opened: Opener) -> None:
    (opened.home / ".bash_profile").write_text("PS1='$ '; read -p 'name? ' name\n")
    terminal = await opened(ready_timeout=0.05)
    assert terminal.state == "RUNNING"
    await until_shown(terminal, b"name? ")
    await terminal.wait_until_awaiting_input(PATIENCE)
    await terminal.send("me\n")
    await terminal.wait_until_idle(PATIENCE)
    assert (await terminal.run("echo $name")).output == "me\n"


async def test_the_first_command_may_come_before_the_first_prompt(opened: Opener, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    (opened.home / ".bash_profile").write_text(f"PS1='$ '; read x < {tmp_path}/go; word=profile\n")
    terminal = await opened(ready_timeout=0.0)
    running = asyncio.create_task(terminal.run("echo $word", PATIENCE))
    await asyncio.to_thread((tmp_path / "go").write_text, "x\n")
    assert (await running).output == "profile\n"


async def test_one_that_lives_with_its_connection(way: str, terminal_server: RunningServer, tmp_path: Path) -> None:
    async with terminal_box(way, terminal_server) as box:
        terminal = await Opener(box, make_home(tmp_path))(lifetime="connection")
        pid = await started(terminal, "sleep 1000 &")
        if way == "inprocess":
            await terminal.close()
    if way == "inprocess":
        assert not is_alive(pid)
    else:
        await until_gone(pid)
