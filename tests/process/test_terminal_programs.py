"""Real programs in a terminal: shells, interpreters, editors, pagers, and a prompt for a password."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import ExecServerConfig, Sandbox
from holdfast.client.screen.screen import Screen
from holdfast.client.terminal import Terminal
from holdfast.types import TerminalStatus
from tests.support.parts import needs

PATIENCE = 60.0


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Sandbox]:
    config = ExecServerConfig(spool_directory=str(tmp_path), retained_output_bytes_per_process=4 * 1024 * 1024)
    async with holdfast.connect("inprocess", config=config) as box:
        yield box
        for terminal in await box.terminals():
            await terminal.close("force")


@pytest.fixture
async def opened(box: Sandbox, tmp_path: Path) -> Callable[..., Any]:
    home = tmp_path / "home"
    home.mkdir()
    for name in (".bash_profile", ".bashrc"):
        (home / name).write_text("PS1='$ '\nunset HISTFILE PROMPT_COMMAND\n")
    (home / ".zshrc").write_text("PS1='%% '\nunset HISTFILE\n")
    (home / ".vimrc").write_text("set nocompatible\n")
    env = {"HOME": str(home), "INPUTRC": "/dev/null", "PYTHONSTARTUP": "", "LESS": "", "LESSOPEN": "", "EDITOR": ""}

    async def open(command: Any = None, **options: Any) -> Terminal:
        return await box.terminal(command, env=env, cwd=str(home), **options)

    return open


async def until_screen(terminal: Terminal, holds: Callable[[Screen], bool]) -> Screen:
    """Check after each event, until the screen is as wanted."""
    async with asyncio.timeout(PATIENCE):
        while True:
            token = (await terminal.describe()).token
            screen = await terminal.screen()
            if holds(screen):
                return screen
            await terminal.read(token, wait=0.1)


async def until_status(terminal: Terminal, holds: Callable[[TerminalStatus], bool]) -> TerminalStatus:
    async with asyncio.timeout(PATIENCE):
        while not holds(status := await terminal.describe()):  # noqa: ASYNC110
            await asyncio.sleep(0)
    return status


# --- shells -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", [pytest.param("bash"), pytest.param("zsh", marks=needs("zsh"))])
async def test_a_shell_knows_its_prompt_and_its_commands(opened: Callable[..., Any], shell: str) -> None:
    terminal = await opened(shell)
    assert (terminal.status.integration, terminal.state, terminal.prompt) == (
        shell,
        "IDLE",
        {"bash": "$ ", "zsh": "% "}[shell],
    )
    for number in range(20):
        result = await terminal.run(f"echo {number}; (exit {number})")
        assert (result.output, result.exit_code) == (f"{number}\n", number)
    for number in range(50):
        await terminal.send(f"(exit {number})\n")
        assert (await terminal.wait_until_idle(PATIENCE)).last_exit_code == number
    await terminal.run("PS1='changed> '")
    assert (await terminal.describe()).prompt == "changed> "
    assert (await terminal.close()).exit_code == 0


@needs("zsh")
async def test_zsh_in_bash_and_back(opened: Callable[..., Any]) -> None:
    terminal = await opened()
    running = asyncio.create_task(terminal.run("zsh -f", PATIENCE))
    await until_status(terminal, lambda status: status.foreground == "zsh" and bool(status.awaiting_input))
    assert terminal.state == "BUSY"
    await terminal.send("exit 6\n")
    assert (await running).exit_code == 6


# --- interpreters -------------------------------------------------------------------------------------------------


async def test_python_toggles_whether_it_waits_for_input(opened: Callable[..., Any], tmp_path: Path) -> None:
    terminal = await opened([sys.executable, "-q", "-i", "-I"])
    status = await terminal.wait_until_awaiting_input(PATIENCE)
    assert (status.state, status.integration) == ("RUNNING", "")
    for number in range(10):
        token = (await terminal.describe()).token
        await terminal.send(f"{number} + 1000\n")
        await terminal.wait_until_awaiting_input(PATIENCE)
        text = b"".join([event.payload for event in (await terminal.read(token)).events])
        assert b"%d\r\n" % (number + 1000) in text
    await terminal.send("import time; time.sleep(1000)\n")
    await until_status(terminal, lambda status: status.awaiting_input is False)
    await terminal.send_keys("C-c")
    await terminal.wait_until_awaiting_input(PATIENCE)
    await until_screen(terminal, lambda screen: "KeyboardInterrupt" in screen.text)
    await terminal.send("exit(5)\n")
    assert (await terminal.wait(PATIENCE)).exit_code == 5


async def test_an_interpreter_in_the_shell_and_back(opened: Callable[..., Any]) -> None:
    terminal = await opened()
    await terminal.send(f"{sys.executable} -q -i -I\n")
    await until_screen(terminal, lambda screen: ">>>" in screen.text)
    status = await terminal.wait_until_awaiting_input(PATIENCE)
    assert (status.state, status.foreground_pid != terminal.pid) == ("BUSY", True)
    await terminal.send("input('name? ')\n")
    await until_screen(terminal, lambda screen: "name? " in screen.text + " " and bool(screen.lines))
    await terminal.wait_until_awaiting_input(PATIENCE)
    await terminal.send("me\n")
    await terminal.wait_until_awaiting_input(PATIENCE)
    assert "'me'" in (await terminal.screen()).lines
    await terminal.send_keys("C-d")
    status = await terminal.wait_until_idle(PATIENCE)
    assert (status.state, status.last_exit_code) == ("IDLE", 0)
    status = await terminal.wait_until_awaiting_input(PATIENCE)
    assert (status.foreground, status.foreground_pid) == ("bash", terminal.pid)


# --- programs with the whole screen -------------------------------------------------------------------------------


@needs("vim")
async def test_an_editor(opened: Callable[..., Any], tmp_path: Path) -> None:
    terminal = await opened(rows=20, cols=60)
    await terminal.send("vim -n -u NONE text\n")
    await until_screen(terminal, lambda screen: screen.alternate and "~" in screen.lines)
    status = await terminal.wait_until_awaiting_input(PATIENCE)
    assert (status.foreground, status.alternate_screen, status.canonical, status.echo) == (
        "vim",
        True,
        False,
        False,
    )
    await terminal.send("ifirst line")
    await terminal.send_keys("Enter", "s", "e", "c", "Escape")
    screen = await until_screen(terminal, lambda screen: "sec" in screen.lines)
    assert screen.lines[:2] == ("first line", "sec")
    await terminal.resize(10, 40)
    screen = await until_screen(terminal, lambda screen: screen.rows == 10 and screen.lines[0] == "first line")
    await terminal.send(":wq\r")
    status = await terminal.wait_until_idle(PATIENCE)
    assert (status.alternate_screen, status.last_exit_code) == (False, 0)
    assert (tmp_path / "home/text").read_text() == "first line\nsec\n"
    assert "first line" not in (await terminal.screen()).text


@needs("less")
async def test_a_pager(opened: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"line {number}\n" for number in range(1000)))
    terminal = await opened(rows=12)
    await terminal.send(f"less {tmp_path}/text\n")
    await until_screen(terminal, lambda screen: screen.lines[0] == "line 0")
    assert (await terminal.wait_until_awaiting_input(PATIENCE)).foreground == "less"
    await terminal.send_keys("PageDown")
    screen = await until_screen(terminal, lambda screen: screen.lines[0] == "line 11")
    await terminal.send("G")
    screen = await until_screen(terminal, lambda screen: "line 999" in screen.lines)
    assert screen.alternate
    await terminal.send("q")
    status = await terminal.wait_until_idle(PATIENCE)
    assert (status.last_exit_code, status.alternate_screen) == (0, False)


@needs("top")
async def test_a_program_that_draws_by_itself(opened: Callable[..., Any]) -> None:
    terminal = await opened(cols=100)
    await terminal.send("top -d 0.1\n")
    await until_screen(terminal, lambda screen: "PID" in screen.text and "load average" in screen.text)
    assert (await terminal.describe()).state == "BUSY"
    assert (await terminal.wait_until_awaiting_input(PATIENCE)).foreground == "top"
    token = (await terminal.describe()).token
    await terminal.read(token, wait=PATIENCE)
    await terminal.send("q")
    assert (await terminal.wait_until_idle(PATIENCE)).last_exit_code == 0


async def test_a_progress_bar_is_one_line(opened: Callable[..., Any]) -> None:
    terminal = await opened()
    result = await terminal.run("clear; for i in 1 2 3; do printf '\\r%s0%%' $i; done; echo")
    assert result.output_bytes.count(b"\r") >= 3
    assert (await terminal.screen()).lines[0] == "30%"


# --- input waits --------------------------------------------------------------------------------------------------


async def test_a_prompt_for_a_password(opened: Callable[..., Any]) -> None:
    script = "import getpass; print('got', len(getpass.getpass('Password: ')))"
    terminal = await opened(record_input=True)
    await terminal.send(f'{sys.executable} -I -c "{script}"\n')
    status = await until_status(terminal, lambda status: status.password_prompt is True)
    assert (status.awaiting_input, status.echo, status.canonical, status.state) == (True, False, True, "BUSY")
    await terminal.send("hunter2\n")
    await terminal.wait_until_idle(PATIENCE)
    assert "got 7" in (await terminal.screen()).lines
    assert "hunter2" not in await terminal.recording(input=True)
    everything = await terminal.read()
    assert b"hunter2" not in b"".join(event.payload for event in everything.events)


@pytest.mark.parametrize(
    ("command", "program"),
    [("sleep 1000", "sleep"), ("for ((;;)); do :; done", "bash"), ("sh -c 'while :; do :; done'", "sh")],
)
async def test_what_does_not_wait_for_input(opened: Callable[..., Any], command: str, program: str) -> None:
    terminal = await opened()
    await terminal.send(f"{command}\n")
    # A signal before the program is in the foreground would go to the shell, which disregards it.
    await until_status(terminal, lambda status: status.state == "BUSY" and status.foreground == program)
    for _ in range(50):
        status = await terminal.describe()
        assert status.awaiting_input is False
    await terminal.control("SIGINT")
    assert (await terminal.wait_until_idle(PATIENCE)).last_exit_code == 130


async def test_a_cancelled_command_is_interrupted_once_its_program_runs(tmp_path: Path) -> None:
    """The shell disregards the first interrupt, as bash does while it starts a program."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    config = ExecServerConfig(spool_directory=str(tmp_path), interrupt_grace_seconds=PATIENCE)
    async with holdfast.connect("inprocess", config=config) as box, await box.terminal("bash") as terminal:
        token = (await terminal.describe()).token
        command = f"trap '' INT; read -r <{gate}; trap - INT; sleep 1000"
        running = asyncio.create_task(terminal.run(command))
        while not any(event.type == "command" for event in (await terminal.read(token, wait=0.1)).events):
            pass
        running.cancel()
        await asyncio.wait([running])
        # Opened for both directions, the pipe holds the line until the shell reads it.
        pipe = os.open(gate, os.O_RDWR)
        os.write(pipe, b"go on\n")
        assert (await terminal.run("echo on", PATIENCE)).output == "on\n"
        os.close(pipe)


# --- several at once ----------------------------------------------------------------------------------------------


async def test_a_person_types_while_an_agent_works(
    box: Sandbox, opened: Callable[..., Any], tmp_path: Path
) -> None:
    """Every command of the agent is its own, whatever the person types between them and into them."""
    agent = await opened(id="shared")
    person = await box.open_terminal("shared")
    stop = asyncio.Event()

    async def type_on() -> int:
        count = 0
        while not stop.is_set():
            await person.wait_until_idle(PATIENCE)
            await person.send(f"echo p >> {tmp_path}/person\n")
            await person.wait_until_idle(PATIENCE)
            count += 1
        return count

    typing = asyncio.create_task(type_on())
    for number in range(30):
        with contextlib.suppress(holdfast.HoldfastError):
            result = await agent.run(f"echo a{number} >> {tmp_path}/agent", PATIENCE)
            assert result.exit_code in (0, 1, 2, 127, 130)
    stop.set()
    count = await typing
    assert count > 0
    # Two writers at one line at once spoil each other's at worst; the terminal stays whole.
    await agent.wait_until_awaiting_input(PATIENCE)
    await agent.send_keys("C-c")
    await agent.wait_until_idle(PATIENCE)
    assert (await agent.run("echo whole", PATIENCE)).output == "whole\n"
    lines = (tmp_path / "agent").read_text().split()
    assert len(lines) == len(set(lines))


async def test_a_flood_and_its_readers(box: Sandbox, opened: Callable[..., Any]) -> None:
    """One that follows sees everything or exact gaps; one that comes late finds the head and the tail."""
    size = 50_000_000
    terminal = await opened(id="flood")
    before = (await terminal.describe()).token
    seen = gaps = 0
    tail = b""

    async def follow() -> None:
        nonlocal seen, gaps, tail
        position = before
        async for event in terminal.events(before):
            assert event.token > position
            if event.type == "output":
                assert event.token == position + len(event.payload)
                seen += len(event.payload)
                tail = (tail + event.payload)[-100:]
            elif event.type == "gap":
                assert event.token == position + event.length
                gaps += event.length
            position = event.token

    following = asyncio.create_task(follow())
    result = await terminal.run(f"head -c {size} /dev/zero | tr '\\0' x", 60, max_bytes=1000)
    assert (result.exit_code, result.output_bytes, result.truncated) == (0, b"x" * 1000, True)
    late = await terminal.read(before)
    total = gap = 0
    position = before
    while late.token > position:
        for event in late.events:
            total += len(event.payload) if event.type == "output" else 0
            gap += event.length
        position = late.token
        late = await terminal.read(position)
    assert gap > 0
    assert total + gap >= size
    await terminal.close()
    await following
    assert seen + gaps >= size
    assert b"exit" in tail
    assert total < seen + gaps
