"""A terminal over several ways: what it shows, what happened when, who reads it, and how it is to be typed at."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from contract.terminal_ways import (
    PATIENCE,
    TERMINAL_SETTINGS,
    TERMINAL_WAYS,
    Opener,
    is_root,
    make_home,
    shown,
    terminal_box,
    until_event,
    until_shown,
    until_status,
)
from contract.ways import WAYS
from holdfast import OutputChunk, Sandbox, TerminalSize
from holdfast.client.terminal import Terminal
from holdfast.errors import (
    CommandNotFound,
    CwdNotFound,
    DuplicateProcess,
    InvalidParams,
    InvalidRequest,
    LimitReached,
    TerminalClosed,
    TimeoutError,
    UnknownSignal,
    UnknownTerminal,
    UnknownUser,
)
from holdfast.model import TerminalEvent, TerminalSpec
from holdfast.testing.servers import RunningServer, running_server


@pytest.fixture(scope="module")
def terminal_server() -> Iterator[RunningServer]:
    with running_server(["unix", "ws"], settings=TERMINAL_SETTINGS) as server:
        yield server


@pytest.fixture(params=TERMINAL_WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def box(way: str, terminal_server: RunningServer) -> AsyncIterator[Sandbox]:
    async with terminal_box(way, terminal_server) as box:
        yield box


@pytest.fixture
def opened(box: Sandbox, tmp_path: Path) -> Opener:
    return Opener(box, make_home(tmp_path))


@pytest.fixture
async def terminal(opened: Opener) -> Terminal:
    return await opened()


# --- what it is ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_the_whole_of_it_over_every_way(way: str, terminal_server: RunningServer, tmp_path: Path) -> None:
    async with terminal_box(way, terminal_server) as box:
        terminal = await Opener(box, make_home(tmp_path))(id="whole", rows=30, cols=100)
        assert (terminal.id, terminal.state, terminal.prompt, terminal.size) == (
            "whole",
            "IDLE",
            "$ ",
            TerminalSize(30, 100),
        )
        result = await terminal.run("printf 'a\\377b\\n'; stty size; (exit 7)")
        assert (result.output_bytes, result.exit_code, result.state) == (b"a\xffb\r\n30 100\r\n", 7, "IDLE")
        await terminal.send("read word; echo got:$word\n")
        await terminal.wait_until_awaiting_input(PATIENCE)
        await terminal.send("it\n")
        await until_shown(terminal, b"got:it\r\n")
        assert (await terminal.wait_until_idle(PATIENCE)).last_exit_code == 0
        assert "got:it" in (await terminal.screen()).lines
        assert (await terminal.close()).state == "CLOSED"


async def test_it_is_described(opened: Opener) -> None:
    terminal = await opened(id="described", rows=20, cols=70)
    status = await terminal.describe()
    assert (status.terminal_id, status.argv, status.integration) == ("described", ("/bin/bash",), "bash")
    assert (status.state, status.prompt, status.size, status.cwd) == (
        "IDLE",
        "$ ",
        TerminalSize(20, 70),
        str(opened.home),
    )
    assert (status.exit_code, status.signal, status.reason, status.last_exit_code) == (None, None, "", None)
    assert (status.input_queued, status.queue) == (0, "empty")
    assert (status.bracketed_paste, status.alternate_screen, status.application_cursor) == (True, False, False)
    status = await terminal.wait_until_awaiting_input(PATIENCE)
    assert (status.foreground, status.foreground_pid, status.awaiting_input) == ("bash", terminal.pid, True)
    assert not status.password_prompt
    again = await opened.box.open_terminal("described")
    assert (again.pid, again.state) == (terminal.pid, "IDLE")
    assert [each.id for each in await opened.box.terminals()] == ["described"]
    assert (await opened.box.status()).terminals == 1
    assert "terminal" in (await opened.box.info()).features
    (info,) = [process for process in await opened.box.processes() if process.id == "described"]
    assert (await info.describe()).tty


async def test_what_it_is_given_to_start_with(opened: Opener, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    terminal = await opened(cwd=str(place), env={"WORD": "given"}, term="vt220", locale="C", rows=11, cols=66)
    result = await terminal.run('echo "$WORD $TERM $LANG $PWD ${LINES-} $(stty size) $-"; shopt login_shell')
    words = result.output.split()
    assert words[:4] == ["given", "vt220", "C", str(place)]
    assert words[-5:-3] == ["11", "66"] or "11 66" in result.output
    assert "i" in words[-3]
    assert words[-2:] == ["login_shell", "on"]
    plain = await opened(login=False)
    result = await plain.run("echo $TERM ${LANG:-none}; shopt login_shell")
    assert result.output.split()[0] == "xterm-256color"
    assert result.output.split()[-1] == "off"
    assert plain.prompt == "$ "


async def test_a_locale_is_named_if_the_environment_names_none(opened: Opener) -> None:
    terminal = await opened(env={"LANG": "", "LC_ALL": "", "LC_CTYPE": ""})
    assert (await terminal.run("echo $LANG; printf '\\u00e9\\n'")).output == "C.UTF-8\né\n"


async def test_any_program_can_run_in_it(opened: Opener) -> None:
    terminal = await opened(["sh", "-c", "echo hello; read x; exit 4"])
    assert (terminal.status.integration, terminal.prompt) == ("", None)
    await until_shown(terminal, b"hello\r\n")
    status = await terminal.wait_until_awaiting_input(PATIENCE)
    assert (status.state, status.foreground) == ("RUNNING", "sh")
    with pytest.raises(InvalidRequest, match="does not mark its prompt"):
        await terminal.run("true")
    await terminal.send("\n")
    assert (await terminal.wait(PATIENCE)).exit_code == 4
    status = await terminal.describe()
    assert (status.state, status.exit_code) == ("CLOSED", 4)


async def test_a_shell_without_marks_takes_what_is_typed(opened: Opener) -> None:
    terminal = await opened(integration=False)
    assert terminal.status.integration == ""
    await terminal.send("echo sum:$((20 + 3))\n")
    await until_shown(terminal, b"sum:23\r\n")
    assert (await terminal.describe()).state == "RUNNING"
    with pytest.raises(TimeoutError, match="shows no prompt"):
        await terminal.wait_until_idle(0.01)


@pytest.mark.skipif(not is_root(), reason="only root may become another user")
async def test_another_user(opened: Opener, tmp_path: Path) -> None:
    for place in (tmp_path, *list(tmp_path.parents)[:2]):
        place.chmod(0o755)
    terminal = await opened(user="nobody")
    assert (await terminal.run("id -un; tty | xargs stat -c %U")).output == "nobody\nnobody\n"
    assert terminal.state == "IDLE"
    assert (await terminal.describe()).user == "nobody"
    assert (await terminal.wait_until_awaiting_input(PATIENCE)).foreground == "bash"
    await terminal.close()


async def test_what_cannot_be_opened(opened: Opener) -> None:
    with pytest.raises(CommandNotFound, match="nosuchprogram"):
        await opened("nosuchprogram")
    with pytest.raises(CwdNotFound, match="/nowhere"):
        await opened(cwd="/nowhere")
    with pytest.raises(UnknownUser, match="nosuchuser"):
        await opened(user="nosuchuser")
    for rows, cols in ((0, 80), (24, 0), (-1, 80), (24, 70_000)):
        with pytest.raises(InvalidParams):
            await opened(rows=rows, cols=cols)
    with pytest.raises(InvalidParams):
        await opened([])
    with pytest.raises(InvalidParams, match="empty"):
        await opened.box.api.open_terminal(TerminalSpec("empty", ()))
    assert await opened.box.terminals() == []
    assert await opened.box.processes() == []


async def test_ids(opened: Opener) -> None:
    terminal = await opened(id="one")
    with pytest.raises(DuplicateProcess, match="'one'"):
        await opened(id="one")
    await opened.box.start(["sleep", "1000"], id="process")
    with pytest.raises(DuplicateProcess, match="'process'"):
        await opened(id="process")
    with pytest.raises(DuplicateProcess, match="'one'"):
        await opened.box.start(["true"], id="one")
    with pytest.raises(UnknownTerminal, match="is a process and no terminal"):
        await opened.box.open_terminal("process")
    with pytest.raises(UnknownTerminal, match="'two'"):
        await opened.box.open_terminal("two")
    spec = TerminalSpec("again", argv=("sh",), start_id="attempt")
    first, second = await asyncio.gather(*(opened.box.api.open_terminal(spec) for _ in range(2)))
    third = await opened.box.api.open_terminal(spec)
    assert first.pid == second.pid == third.pid
    await (await opened.box.process("process")).terminate(force=True)
    await terminal.close()


async def test_every_call_knows_that_there_is_no_such_terminal(box: Sandbox) -> None:
    api = box.api
    for call in (
        api.read_terminal("no"),
        api.run_in_terminal("no", "true"),
        api.press_keys("no", ["Enter"]),
        api.wait_terminal("no", "idle"),
        api.close_terminal("no"),
        api.describe_terminal("no"),
    ):
        with pytest.raises(UnknownTerminal, match="'no'"):
            await call


async def test_so_many_may_be_open(opened: Opener) -> None:
    limit = int(TERMINAL_SETTINGS["max_terminals"])
    several = [await opened(["cat"]) for _ in range(limit)]
    with pytest.raises(LimitReached, match="max_terminals"):
        await opened(["cat"])
    await several[0].close()
    assert (await opened(["cat"])).state == "RUNNING"


async def test_so_many_may_be_opened_at_once(opened: Opener) -> None:
    limit = int(TERMINAL_SETTINGS["max_terminals"])
    several = await asyncio.gather(*(opened(["cat"]) for _ in range(limit)))
    assert [terminal.state for terminal in several] == ["RUNNING"] * limit


# --- reading ------------------------------------------------------------------------------------------------------


async def test_events_come_in_their_order_and_say_what_happened(terminal: Terminal) -> None:
    first = await terminal.read()
    assert first.events[0].type == "resize"
    assert first.events[0].size == TerminalSize(24, 80)
    result = await terminal.run("echo out; (exit 5)")
    found = await terminal.read(first.token)
    types = [event.type for event in found.events]
    # Between them are only the echo, the output and what draws the prompt.
    assert [type for type in types if type != "output"] == [
        "command",
        "state",
        "ended",
        "promptStart",
        "state",
        "prompt",
    ]
    by_type = {event.type: event for event in found.events}
    assert by_type["ended"].exit_code == 5
    assert (by_type["prompt"].prompt, by_type["prompt"].prompt_detected) == ("$ ", True)
    states = [event.state for event in found.events if event.type == "state"]
    assert states == ["BUSY", "IDLE"]
    inside = await terminal.read(result.start_token, max_bytes=None)
    output = next(event for event in inside.events if event.type == "output")
    assert (output.payload, output.state) == (b"out\r\n", "BUSY")
    assert (found.state, found.truncated, found.closed) == ("IDLE", False, False)


async def test_times_do_not_go_back(terminal: Terminal) -> None:
    for _ in range(20):
        await terminal.run("echo out")
    times = [event.timestamp for event in (await terminal.read()).events]
    assert times == sorted(times)


async def test_positions_only_grow_and_any_of_them_is_a_place_to_read_on_from(terminal: Terminal) -> None:
    await terminal.run("echo one; echo two")
    await terminal.resize(30, 90)
    await terminal.run("false")
    whole = await terminal.read()
    tokens = [event.token for event in whole.events]
    assert tokens == sorted(set(tokens))
    assert tokens[-1] == whole.token == (await terminal.describe()).token
    flat = flattened(whole.events)
    assert len(flat) == whole.token
    for since in range(whole.token + 1):
        assert flattened((await terminal.read(since)).events) == flat[since:]
    for step in (1, 7):
        since, pieces = 0, []
        while (found := await terminal.read(since, max_bytes=step)).token > since:
            pieces += flattened(found.events)
            assert sum(len(event.payload) for event in found.events if event.type == "output") <= step
            since = found.token
        assert pieces == flat
    far = await terminal.read(whole.token + 1000)
    assert (far.events, far.token) == ((), whole.token)
    with pytest.raises(InvalidParams):
        await terminal.read(-1)


def flattened(events: tuple[TerminalEvent, ...]) -> list[object]:
    """One item for each position."""
    flat: list[object] = []
    for event in events:
        assert event.type != "gap"
        flat += list(event.payload) if event.type == "output" else [(event.type, event.token)]
    return flat


async def test_a_long_poll_ends_with_output_with_an_event_and_with_its_time(terminal: Terminal) -> None:
    start = (await terminal.read()).token
    empty = await terminal.read(start, wait=0.01)
    assert (empty.events, empty.token) == ((), start)
    waiting = asyncio.create_task(terminal.read(start, wait=PATIENCE))
    await terminal.send("x")
    found = await waiting
    assert found.events[0].payload == b"x"
    waiting = asyncio.create_task(terminal.read(found.token, wait=PATIENCE))
    await terminal.resize(40, 100)
    found = await waiting
    assert [(event.type, event.size) for event in found.events[:1]] == [("resize", TerminalSize(40, 100))]


async def test_several_readers_take_nothing_from_each_other(opened: Opener) -> None:
    terminal = await opened(id="shared")
    other = await opened.box.open_terminal("shared")

    async def all_of(handle: Terminal, since: int) -> list[object]:
        return [item async for event in handle.events(since) for item in flattened((event,))]

    readers = [asyncio.create_task(all_of(handle, since)) for handle in (terminal, other) for since in (0, 3)]
    process = asyncio.create_task(process_output(opened.box, "shared"))
    for number in range(3):
        await terminal.run(f"seq {number}00 {number}99")
    await other.close()
    first, second, third, fourth = await asyncio.gather(*readers)
    assert first == third
    assert second == fourth == first[3:]
    # The same bytes as a process, and none of our marks among them.
    data = await process
    assert data == bytes(item for item in first if isinstance(item, int))
    assert b"133;" not in data


async def process_output(box: Sandbox, id: str) -> bytes:
    parts = []
    async for chunk in (await box.process(id)).output():
        assert isinstance(chunk, OutputChunk), chunk
        parts.append(chunk.data)
    return b"".join(parts)


async def test_marks_are_there_for_those_who_ask(terminal: Terminal) -> None:
    start = (await terminal.read()).token
    await terminal.run("(exit 3)")
    plain, marked = await terminal.read(start), await terminal.read(start, marks=True)
    assert plain.token == marked.token
    assert b"133;" not in b"".join(event.payload for event in plain.events)
    payloads = [event.payload for event in marked.events if event.type not in ("output", "state")]
    assert payloads == [b"\x1b]133;C\x07", b"\x1b]133;D;3\x07", b"\x1b]133;A\x07", b"\x1b]133;B\x07"]


async def test_output_that_was_lost_is_a_gap_of_exactly_its_length(terminal: Terminal) -> None:
    kept = int(TERMINAL_SETTINGS["retained_output_bytes_per_process"])
    result = await terminal.run(f"yes 0123456789 | head -c {2 * kept}", max_bytes=1000)
    assert result.truncated
    assert len(result.output_bytes) == 1000
    position, truncated, gaps = 0, False, 0
    while (found := await terminal.read(position)).token > position:
        truncated = truncated or found.truncated
        for event in found.events:
            assert event.token > position
            if event.type == "gap":
                gaps += event.length
                assert event.token == position + event.length
            elif event.type == "output":
                assert event.token == position + len(event.payload)
            position = event.token
    assert truncated
    assert gaps > kept // 4
    assert position == (await terminal.describe()).token
    # From inside the gap one is led to its end.
    inside = await terminal.read(kept, max_bytes=10)
    assert inside.events[0].type == "gap"
    recording = await terminal.recording()
    assert "no longer kept" in recording
    assert (await terminal.screen()).lines[-1].startswith("$") or "$" in (await terminal.screen()).text


async def test_where_the_cursor_is(terminal: Terminal) -> None:
    start = (await terminal.read()).token
    await terminal.run("clear; printf 'abc\\ndefg'")
    positions = []
    async for event in terminal.events(start, cursor=True):
        if event.type == "output":
            assert event.cursor_position is not None
            positions.append(event.cursor_position)
        if event.type == "prompt":
            break
    assert (1, 4) in positions


# --- state --------------------------------------------------------------------------------------------------------


async def test_what_was_looked_at_is_kept_up_to_date(opened: Opener) -> None:
    terminal = await opened()
    assert terminal.status.state == "IDLE"
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
    """The shell's own mark of the command may be on its way: nothing else tells that it was taken."""
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
    # What runs has the line to itself.
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


# --- typing -------------------------------------------------------------------------------------------------------


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


# --- recordings and screens ---------------------------------------------------------------------------------------


async def test_a_recording_has_the_output_with_its_times_and_what_was_typed_if_it_was_kept(opened: Opener) -> None:
    terminal = await opened(record_input=True, rows=20, cols=60)
    await terminal.send("echo one\n")
    await terminal.wait_until_idle(PATIENCE)
    await terminal.resize(21, 61)
    await terminal.run("read -rsp 'Password: ' word < <(echo quiet); echo")
    await terminal.send("read -rs word\n")
    await until_status(terminal, lambda status: status.password_prompt)
    await terminal.send("hunter2\n")
    await terminal.wait_until_idle(PATIENCE)
    cast = await terminal.recording(input=True, title="a test")
    lines = [json.loads(line) for line in cast.splitlines()]
    header, events = lines[0], lines[1:]
    assert (header["version"], header["width"], header["height"], header["title"]) == (2, 60, 20, "a test")
    times = [event[0] for event in events]
    assert times == sorted(times)
    assert {event[1] for event in events} == {"o", "i", "r"}
    typed = "".join(event[2] for event in events if event[1] == "i")
    assert "echo one" in typed
    assert "hunter2" not in cast
    assert [event[2] for event in events if event[1] == "r"] == ["61x21"]
    output = "".join(event[2] for event in events if event[1] == "o")
    assert output == (await shown(terminal)).decode()
    assert not [line for line in (await terminal.recording()).splitlines() if '"i"' in line]


async def test_a_recording_tells_real_times(terminal: Terminal, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    running = asyncio.create_task(terminal.run(f"echo be''fore; read x < {tmp_path}/go; echo af''ter"))
    before = await until_event(terminal, lambda event: b"before" in event.payload)
    # The output before and after differ by at least what the clock says here.
    await asyncio.sleep(0.05)
    await asyncio.to_thread((tmp_path / "go").write_text, "\n")
    await running
    events = [json.loads(line) for line in (await terminal.recording()).splitlines()[1:]]
    at = {word: next(event[0] for event in events if word in event[2]) for word in ("before\r\n", "after")}
    assert at["after"] - at["before\r\n"] >= 0.045
    assert before.timestamp > 1e9


async def test_the_screen_is_what_a_person_would_see(opened: Opener) -> None:
    terminal = await opened(rows=10, cols=40)
    await terminal.run("clear; printf 'a\\rb\\n\\033]0;a title\\007'; echo wide: 漢字")
    screen = await terminal.screen()
    assert (screen.rows, screen.cols, screen.title, screen.alternate) == (10, 40, "a title", False)
    assert screen.lines[:3] == ("b", "wide: 漢字", "$")
    assert screen.cursor == (2, 2)
    await terminal.run("seq 20")
    screen = await terminal.screen()
    assert screen.lines[-2:] == ("20", "$")
    await terminal.resize(5, 20)
    screen = await terminal.screen()
    assert (screen.rows, screen.cols) == (5, 20)
    again = await (await opened.box.open_terminal(terminal.id)).screen()
    assert again.lines == screen.lines
