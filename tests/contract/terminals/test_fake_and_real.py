"""The fake terminal beside a real one: the same calls give the same events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast import Sandbox
from holdfast.client.terminal import Terminal
from holdfast.errors import InvalidParams, InvalidRequest, TerminalClosed, TimeoutError
from holdfast.testing import FakeCommand, FakeExec, answers, cat, hangs, prints
from tests.contract.terminals.ways import PATIENCE, Opener, make_home, until_event, until_shown, until_status
from tests.contract.ways import open_box
from tests.support.servers import RunningServer


async def asks(command: FakeCommand) -> int:
    command.stdout("go on? ")
    command.stdout(b"so:" + await command.read_line())
    return 0


def fake_exec() -> FakeExec:
    """The commands below as bash runs them."""
    return FakeExec(
        {"cat": cat, "sleep": hangs()},
        shell_commands={
            "echo hi": prints("hi\n"),
            "(exit 3)": answers(exit_code=3),
            "echo one\necho two": prints("one\ntwo\n"),
            "read -p 'go on? ' word; echo so:$word": asks,
            "echo on": prints("on\n"),
            "echo bye; exit 4": answers("bye\n", exit_code=4, exits=True),
        },
    )


@pytest.fixture(params=["inprocess", "fake"])
async def terminal(
    request: pytest.FixtureRequest, server: RunningServer, tmp_path: Path
) -> AsyncIterator[Terminal]:
    if request.param == "fake":
        box = Sandbox(fake_exec())
        yield await box.terminal()
        await box.aclose()
        return
    async with open_box("inprocess", server, {"interrupt_grace_seconds": 0.2}) as box:
        yield await Opener(box, make_home(tmp_path))()
        for each in await box.terminals():
            await each.close("force")


async def test_commands(terminal: Terminal) -> None:
    assert (terminal.state, terminal.prompt) == ("IDLE", "$ ")
    for command, output, code in (
        ("echo hi", "hi\n", 0),
        ("(exit 3)", "", 3),
        ("echo one\necho two", "one\ntwo\n", 0),
    ):
        result = await terminal.run(command, PATIENCE)
        assert (result.output, result.exit_code, result.state, result.timed_out) == (output, code, "IDLE", False)
    results = await asyncio.gather(*(terminal.run("echo hi", PATIENCE) for _ in range(5)))
    assert [result.output for result in results] == ["hi\n"] * 5


async def test_the_events_of_a_command(terminal: Terminal) -> None:
    start = (await terminal.read()).token
    result = await terminal.run("(exit 3)", PATIENCE)
    events = [event for event in (await terminal.read(start)).events if event.type != "output"]
    assert [(event.type, event.state, event.exit_code) for event in events] == [
        ("command", "IDLE", None),
        ("state", "BUSY", None),
        ("ended", "BUSY", 3),
        ("promptStart", "BUSY", None),
        ("state", "IDLE", None),
        ("prompt", "IDLE", None),
    ]
    assert events[0].token <= result.start_token + 2
    assert (events[-1].prompt, events[-1].prompt_detected) == ("$ ", True)


async def test_input(terminal: Terminal) -> None:
    await terminal.send("read -p 'go on? ' word; echo so:$word\n")
    await until_event(terminal, lambda event: event.type == "command")
    status = await terminal.wait_until_awaiting_input(PATIENCE)
    assert (status.state, status.awaiting_input) == ("BUSY", True)
    await terminal.send("yes\n")
    assert (await terminal.wait_until_idle(PATIENCE)).last_exit_code == 0
    await until_shown(terminal, b"so:yes\r\n")
    await terminal.send("cat\n")
    await terminal.wait_until_awaiting_input(PATIENCE)
    await terminal.send_keys("C-d")
    assert (await terminal.wait_until_idle(PATIENCE)).last_exit_code == 0
    for _ in range(20):
        await terminal.send("(exit 3)\n")
        assert (await terminal.wait_until_idle(PATIENCE)).last_exit_code == 3


async def test_what_does_not_end(terminal: Terminal) -> None:
    result = await terminal.run("sleep 1000", 0.1)
    assert (result.exit_code, result.timed_out, result.state) == (124, True, "IDLE")
    token = (await terminal.describe()).token
    running = asyncio.create_task(terminal.run("sleep 1000"))
    await until_event(terminal, lambda event: event.type == "command", token)
    with pytest.raises(TimeoutError, match="busy"):
        await terminal.run("echo late", 0.02)
    running.cancel()
    await asyncio.wait([running])
    assert (await terminal.run("echo on", PATIENCE)).output == "on\n"
    await terminal.send("sleep 1000\n")
    # Before that a signal would go to the shell, which ignores it.
    await until_status(terminal, lambda status: status.state == "BUSY" and status.foreground == "sleep")
    await terminal.control("SIGTERM")
    assert (await terminal.wait_until_idle(PATIENCE)).last_exit_code == 143


async def test_refusals(terminal: Terminal) -> None:
    with pytest.raises(InvalidRequest, match="not complete"):
        await terminal.run("echo 'oops", PATIENCE)
    with pytest.raises(InvalidParams):
        await terminal.run("echo \0")
    with pytest.raises(InvalidParams):
        await terminal.send_keys("Entr")
    await terminal.send("half a line")
    assert (await terminal.run("echo on", PATIENCE)).output == "on\n"


async def test_an_empty_command(terminal: Terminal) -> None:
    await terminal.run("(exit 3)", PATIENCE)
    for empty in ("", " "):
        result = await terminal.run(empty, PATIENCE)
        assert (result.output, result.exit_code, result.state) == ("", 3, "IDLE")


async def test_a_continuation_prompt(terminal: Terminal) -> None:
    since = (await terminal.describe()).token
    await terminal.send("'ec\n")
    status = await until_status(terminal, lambda status: status.continuation)
    assert (status.state, (await terminal.wait_until_awaiting_input(PATIENCE)).continuation) == ("BUSY", True)
    with pytest.raises(TimeoutError, match="continuation prompt"):
        await terminal.wait_until_idle(0.02)
    events = [event for event in (await terminal.read(since)).events if event.type != "output"]
    assert [(event.type, event.state) for event in events] == [("state", "BUSY"), ("continuation", "BUSY")]
    assert (await terminal.run("echo on", PATIENCE)).output == "on\n"
    assert (await terminal.describe()).state == "IDLE"
    assert not terminal.continuation


async def test_the_directory_at_a_prompt(terminal: Terminal) -> None:
    await terminal.run("echo hi", PATIENCE)
    prompts = [event for event in (await terminal.read()).events if event.type == "prompt"]
    assert [event.cwd for event in prompts] == [(await terminal.describe()).cwd] * 2


@pytest.mark.parametrize("mode", ["graceful", "force"])
@pytest.mark.parametrize("busy", [False, True])
async def test_closing(terminal: Terminal, mode: str, busy: bool) -> None:
    if busy:
        await terminal.send("sleep 1000\n")
        await until_event(terminal, lambda event: event.type == "command")
    status = await terminal.close(mode)  # type: ignore[arg-type]
    assert status.state == "CLOSED"
    states = [event.state async for event in terminal.events() if event.type == "state"]
    assert states == ["IDLE", *(["BUSY"] if busy else []), "CLOSING", "CLOSED"]
    with pytest.raises(TerminalClosed):
        await terminal.run("echo on")


async def test_a_command_that_ends_it(terminal: Terminal) -> None:
    result = await terminal.run("echo bye; exit 4", PATIENCE)
    assert (result.exit_code, result.state, result.output.startswith("bye\n")) == (4, "CLOSED", True)
    assert (await terminal.describe()).reason == "/bin/bash ended with exit code 4"
