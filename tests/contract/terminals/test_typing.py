"""How a terminal is typed at, and how it is known when it is idle and when it waits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast import TerminalSize, TerminalStates
from holdfast.client.terminal import Terminal
from holdfast.errors import (
    InvalidParams,
    TerminalClosed,
    TimeoutError,
    UnknownSignal,
)
from tests.contract.terminals.ways import (
    PATIENCE,
    Opener,
    shown,
    until_event,
    until_shown,
    until_status,
)


async def test_a_watched_status_is_kept_up_to_date(opened: Opener) -> None:
    terminal = await opened()
    assert terminal.status.state == TerminalStates.IDLE == "IDLE"
    await terminal.watch()
    person = await opened.box.open_terminal(terminal.id)
    await person.send("cat\n")
    await follow(lambda: terminal.state == "BUSY")
    await follow(lambda: terminal.awaiting_input is True)
    await person.send_keys("C-d")
    await follow(lambda: terminal.state == "IDLE")
    await person.send("PS1='new> '\n")
    await follow(lambda: terminal.prompt == "new> ")
    await person.send("sleep 1000\n")
    await follow(lambda: terminal.state == "BUSY" and terminal.awaiting_input is False)
    await person.resize(33, 99)
    await follow(lambda: terminal.status.size == TerminalSize(33, 99))
    assert terminal.size == TerminalSize(33, 99)
    await person.close("force")
    await follow(lambda: terminal.state == "CLOSED")


async def follow(holds: object) -> None:
    assert callable(holds)
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_idle_right_after_typing_means_that_the_command_has_run(terminal: Terminal) -> None:
    """The shell's own mark of the command may be on its way: nothing else reports that it was taken."""
    start = (await terminal.read()).token
    for number in range(200):
        await terminal.send("true\n" if number % 2 else "(exit 3)\n")
        status = await terminal.wait_until_idle(PATIENCE)
        assert (status.state, status.last_exit_code) == ("IDLE", 0 if number % 2 else 3), number
    found = await terminal.read(start, max_bytes=1 << 24)
    while (more := await terminal.read(found.token)).events:
        found = more
    assert found.state == "IDLE"
    text = await shown(terminal, start)
    assert (text.count(b"true"), text.count(b"exit 3")) == (100, 100)


async def test_idle_right_after_typing_means_that_the_output_is_there(terminal: Terminal) -> None:
    for number in range(50):
        before = (await terminal.describe()).token
        await terminal.send(f"echo n:$(({number} + 1000))\n")
        await terminal.wait_until_idle(PATIENCE)
        assert b"n:%d\r\n" % (number + 1000) in await shown(terminal, before)


async def test_several_lines_typed_at_once_are_all_run_before_it_is_idle(terminal: Terminal) -> None:
    for number in range(20):
        before = (await terminal.describe()).token
        await terminal.send("echo a:$((1+1))\n/bin/true\nsh -c 'exit 9'\n")
        status = await terminal.wait_until_idle(PATIENCE)
        assert status.last_exit_code == 9, number
        text = await shown(terminal, before)
        assert b"a:2\r\n" in text


async def test_half_a_line_is_no_command(terminal: Terminal) -> None:
    await terminal.send("echo typed")
    await until_shown(terminal, b"echo typed")
    assert (await terminal.wait_until_idle(PATIENCE)).state == "IDLE"
    # The running program has the line to itself.
    assert (await terminal.run("echo clean")).output == "clean\n"


async def test_waiting_has_its_time(terminal: Terminal) -> None:
    await terminal.send("sleep 1000\n")
    await until_event(terminal, lambda event: event.type == "command")
    with pytest.raises(TimeoutError, match=r"shows no prompt after 0\.02 s"):
        await terminal.wait_until_idle(0.02)
    with pytest.raises(TimeoutError, match="does not wait for input"):
        await terminal.wait_until_awaiting_input(0.02)
    with pytest.raises(TimeoutError, match="still open"):
        await terminal.wait(0.02)
    await terminal.close("force")
    with pytest.raises(TerminalClosed):
        await terminal.wait_until_idle(PATIENCE)
    with pytest.raises(TerminalClosed):
        await terminal.wait_until_awaiting_input(PATIENCE)


async def test_who_waits_for_what_cannot_come_any_more_is_told(terminal: Terminal) -> None:
    await terminal.send("sleep 1000\n")
    await until_event(terminal, lambda event: event.type == "command")
    waits = [
        asyncio.create_task(terminal.wait_until_idle(PATIENCE)),
        asyncio.create_task(terminal.wait_until_awaiting_input(PATIENCE)),
    ]
    ended = asyncio.create_task(terminal.wait(PATIENCE))
    await asyncio.sleep(0)
    await terminal.close("force")
    for each in waits:
        with pytest.raises(TerminalClosed):
            await each
    assert (await ended).signal == "SIGKILL"


async def test_keys(terminal: Terminal) -> None:
    await terminal.run("echo recalled")
    before = (await terminal.describe()).token
    await terminal.send_keys("Up", "Enter")
    await terminal.wait_until_idle(PATIENCE)
    assert b"recalled\r\n" in await shown(terminal, before)
    await terminal.send("sleep 1000\n")
    await until_event(terminal, lambda event: event.type == "command", before)
    await until_status(terminal, lambda status: status.foreground == "sleep")
    await terminal.send_keys("C-c")
    assert (await terminal.wait_until_idle(PATIENCE)).last_exit_code == 130
    with pytest.raises(InvalidParams, match="Entr"):
        await terminal.send_keys("Entr")
    await terminal.send("cat -v\n")
    await terminal.wait_until_awaiting_input(PATIENCE)
    await terminal.send_keys("M-x", "F5", "é", "Enter")
    await until_shown(terminal, b"^[x^[[15~M-CM-)\r\n", before)
    await terminal.send_keys("C-d")
    assert (await terminal.wait_until_idle(PATIENCE)).last_exit_code == 0


async def test_keys_of_the_cursor_follow_the_programs_mode(terminal: Terminal) -> None:
    await terminal.send("printf '\\033[?1h'; cat -v\n")
    status = await terminal.wait_until_awaiting_input(PATIENCE)
    assert status.application_cursor
    await terminal.send_keys("Up", "Enter")
    await until_shown(terminal, b"^[OA\r\n")
    await terminal.send_keys("C-d")
    await terminal.wait_until_idle(PATIENCE)


async def test_the_control_actions(opened: Opener) -> None:
    terminal = await opened()

    async def sleeping() -> None:
        await terminal.send("sleep 1000\n")
        await until_status(terminal, lambda status: status.foreground == "sleep" and status.state == "BUSY")

    for action, code in (("CTRL_C", 130), ("SIGINT", 130), ("SIGTERM", 143), ("SIGKILL", 137)):
        await sleeping()
        await terminal.control(action)  # type: ignore[arg-type]
        assert (await terminal.wait_until_idle(PATIENCE)).last_exit_code == code, action
    await terminal.send("cat\n")
    await terminal.wait_until_awaiting_input(PATIENCE)
    await terminal.control("CTRL_D")
    assert (await terminal.wait_until_idle(PATIENCE)).last_exit_code == 0
    await terminal.control("RESIZE", rows=44, cols=111)
    assert (await terminal.run("stty size")).output == "44 111\n"
    with pytest.raises(InvalidParams, match="rows and cols"):
        await terminal.control("RESIZE")
    with pytest.raises(InvalidParams, match="CTRL_X"):
        await terminal.control("CTRL_X")  # type: ignore[arg-type]
    with pytest.raises(UnknownSignal, match="NOPE"):
        await terminal.signal("NOPE")


async def test_a_new_size_is_an_event_and_the_program_is_told(terminal: Terminal) -> None:
    await terminal.send(
        "sh -c 'trap \"stty size; exit\" WINCH; echo ready:$((1+1)); while :; do sleep 0.01; done'\n"
    )
    await until_shown(terminal, b"ready:2")
    before = (await terminal.describe()).token
    await terminal.resize(50, 120)
    await until_shown(terminal, b"50 120\r\n", before)
    event = await until_event(terminal, lambda event: event.type == "resize", before)
    assert event.size == TerminalSize(50, 120)
    for rows, cols in ((0, 1), (1, 0), (70_000, 1)):
        with pytest.raises(InvalidParams):
            await terminal.resize(rows, cols)


async def test_a_paste_runs_nothing_by_itself(terminal: Terminal) -> None:
    await terminal.paste("echo first:$((1+1))\necho second:$((2+2))")
    await until_shown(terminal, b"second:")
    assert (await terminal.describe()).state == "IDLE"
    assert b"first:2" not in await shown(terminal)
    await terminal.send_keys("Enter")
    await terminal.wait_until_idle(PATIENCE)
    text = await shown(terminal)
    assert b"first:2\r\n" in text
    assert b"second:4\r\n" in text
    with pytest.raises(InvalidParams, match="ends a paste"):
        await terminal.paste("a\x1b[201~b")


async def test_a_paste_to_a_program_that_does_not_know_of_it_is_typed(terminal: Terminal) -> None:
    await terminal.send("cat\n")
    await terminal.wait_until_awaiting_input(PATIENCE)
    before = (await terminal.describe()).token
    await terminal.paste("word\n")
    await until_shown(terminal, b"word\r\nword\r\n", before)
    await terminal.send_keys("C-d")
    await terminal.wait_until_idle(PATIENCE)


async def test_the_queue_is_busy_while_nobody_reads(terminal: Terminal) -> None:
    await terminal.send("stty raw -echo; echo on:$((1+1)); sleep 1000; stty sane\n")
    await until_shown(terminal, b"on:2")
    sending = asyncio.create_task(terminal.send(b"x" * 200_000))
    status = await until_status(terminal, lambda status: status.input_queued > 0)
    assert status.queue == "busy"
    assert status.awaiting_input is False
    assert not sending.done()
    await terminal.signal("KILL")
    # The shell reads it all as a line.
    await sending
    status = await until_status(terminal, lambda status: status.queue == "empty")
    assert status.input_queued == 0


async def test_writes_of_several_do_not_mix(opened: Opener, tmp_path: Path) -> None:
    terminal = await opened()
    await terminal.send(f"stty raw -echo; head -c 600000 > {tmp_path}/got; stty sane\n")
    await terminal.wait_until_awaiting_input(PATIENCE)
    await asyncio.gather(*(terminal.send(letter * 200_000) for letter in (b"a", b"b", b"c")))
    await terminal.wait_until_idle(PATIENCE)
    data = (tmp_path / "got").read_bytes()
    assert len(data) == 600_000
    assert sorted(data[at : at + 200_000] for at in range(0, 600_000, 200_000)) == [
        letter * 200_000 for letter in (b"a", b"b", b"c")
    ]
