"""Output and events of a terminal: events, positions, several readers, recordings, screens."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
from pathlib import Path

import pytest

from holdfast import OutputChunk, Sandbox, TerminalSize
from holdfast.client.terminal import Terminal
from holdfast.errors import InvalidParams, TerminalClosed, TimeoutError
from holdfast.types import ReadUntil, TerminalEvent
from tests.contract.terminals.ways import (
    PATIENCE,
    TERMINAL_SETTINGS,
    Opener,
    shown,
    until_event,
    until_shown,
    until_status,
)


async def test_reads_in_a_loop_reach_later_output(terminal: Terminal) -> None:
    """A read that never suspends would keep the event loop of `inprocess` from the terminal that it reads."""
    await terminal.send("echo on''e\n")
    for _ in range(50_000):
        read = await terminal.read(wait=1)
        if b"one\r\n" in b"".join(event.payload for event in read.events):
            break
    else:
        pytest.fail("the output did not arrive")


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


async def test_a_read_that_gathers_ends_with_its_size_or_with_the_terminal(
    opened: Opener, terminal: Terminal
) -> None:
    api, start = opened.box.api, (await terminal.read()).token
    read = functools.partial(api.read_terminal, terminal.id, wait=PATIENCE, gather=PATIENCE)
    waiting = asyncio.create_task(read(since=start, max_bytes=3))
    for key in "xyz":
        await terminal.send(key)
        await until_shown(terminal, key.encode(), start)
    found = await waiting
    assert b"".join(event.payload for event in found.events) == b"xyz"
    waiting = asyncio.create_task(read(since=found.token))
    await terminal.close("force")
    assert (await waiting).closed
    assert (await read(since=start, max_bytes=1)).events[0].payload == b"x"


async def test_what_is_expected_is_found_one_behind_the_other(terminal: Terminal) -> None:
    await terminal.send("read -p 'name? ' name; printf 'one two one'; read\n")
    asked = await terminal.expect("name? ", PATIENCE)  # the echo of the line that was typed
    assert asked.text == "name? "
    asked = await terminal.expect(re.compile(r"name\? $"), PATIENCE)
    await terminal.send("you\n")
    first, last = await terminal.expect("one", PATIENCE), await terminal.expect(b"one", PATIENCE)
    assert (last.offset - first.offset, last.token - first.token) == (8, 8)
    with pytest.raises(TimeoutError, match=r"within 0\.01 s print 'one'; its output ends with .*one two one\W$"):
        await terminal.expect("one", 0.01)
    again = await terminal.expect(re.compile("o(n)e"), since=asked.token)
    assert (again.groups, again.offset, again.token) == ((b"n",), first.offset, first.token)
    # Each position is a place to read on from.
    rest = await terminal.read(again.token)
    assert rest.events[0].payload.startswith(b" two one")


async def test_what_was_expected_in_vain_shows_what_was_printed(terminal: Terminal) -> None:
    await terminal.send("echo last words\n")
    await terminal.wait_until_idle(PATIENCE)
    with pytest.raises(TimeoutError, match=r"print 'never'; its output ends with '.*last words"):
        await terminal.expect("never", 0)
    # Nothing was taken: what was searched in vain for one thing is searched for another.
    assert (await terminal.expect("last words", 0)).data == b"last words"
    with pytest.raises(InvalidParams):
        await terminal.expect("last", since=-1)


async def test_what_a_command_printed_that_was_run_is_not_expected_again(terminal: Terminal) -> None:
    await terminal.run("echo ready", PATIENCE)
    with pytest.raises(TimeoutError):
        await terminal.expect("ready", 0.01)
    assert (await terminal.expect("ready", since=0)).data == b"ready"


async def test_what_is_expected_may_stand_on_both_sides_of_an_event(terminal: Terminal) -> None:
    await terminal.send("printf done\n")
    match = await terminal.expect(re.compile(rb"done.*?\$ $", re.DOTALL), PATIENCE, since=0)
    for _ in range(2):  # once the shell waits, nothing comes any more
        await terminal.wait_until_idle(PATIENCE)
    flat = flattened((await terminal.read()).events)
    text = [item for item in flat[: match.token] if isinstance(item, int)]
    assert bytes(text).endswith(match.data)
    assert len(text) == match.offset + len(match.data)


async def test_what_does_not_come_before_the_end(opened: Opener) -> None:
    terminal = await opened(["sh", "-c", "echo over"])
    with pytest.raises(TerminalClosed, match="before it printed 'never'; its output ends with 'over"):
        await terminal.expect("never", PATIENCE)


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


async def test_a_recording_has_the_output_with_its_times_and_what_was_typed_if_it_was_kept(opened: Opener) -> None:
    terminal = await opened(record_input=True, rows=20, cols=60)
    await terminal.send("echo one\n")
    await terminal.wait_until_idle(PATIENCE)
    await terminal.resize(21, 61)
    await terminal.run("read -rsp 'Password: ' word < <(echo quiet); echo")
    await terminal.send("read -rs word\n")
    await until_status(terminal, lambda status: status.password_prompt is True)
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
    # The output before and after differ by at least the time of the clock here.
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


async def test_a_read_ends_when_a_program_reads_input(opened: Opener, terminal: Terminal) -> None:
    api, since = opened.box.api, (await terminal.describe()).token
    await terminal.send("read -rsp 'Password: ' secret; echo; echo got $secret\n")
    found = await api.read_terminal(terminal.id, since=since, wait=PATIENCE, until=ReadUntil(input=True))
    assert found.outcome is not None
    assert (found.outcome.reached, found.outcome.idle, found.outcome.line) == ("input", False, "Password: ")
    assert (found.outcome.terminal.awaiting_input, found.outcome.terminal.password_prompt) == (True, True)
    assert found.token == found.outcome.terminal.token
    await terminal.send("x\n")
    text = ReadUntil(input=True, text="got x")
    found = await api.read_terminal(terminal.id, since=found.token, wait=PATIENCE, until=text)
    assert found.outcome is not None
    assert found.outcome.reached == "text"
    found = await api.read_terminal(terminal.id, since=since, wait=PATIENCE, until=ReadUntil(prompt=True))
    assert found.outcome is not None
    assert (found.outcome.reached, found.outcome.idle, found.outcome.line) == ("prompt", True, "")
    assert found.events[-1].prompt == "$ "


async def test_a_read_until_a_size_waits_for_the_question_behind_it(opened: Opener, terminal: Terminal) -> None:
    api, since = opened.box.api, (await terminal.describe()).token
    any_news = ReadUntil(size=1, settle_ms=int(PATIENCE * 1000))
    nothing = await api.read_terminal(terminal.id, since=since, until=any_news)
    assert nothing.outcome is not None
    assert (nothing.outcome.reached, nothing.outcome.idle, nothing.events) == (None, True, ())
    await terminal.send("clear; printf 'name? '; read -r name\n")
    await terminal.wait_until_awaiting_input(PATIENCE)
    found = await api.read_terminal(terminal.id, since=since, wait=PATIENCE, until=any_news)
    assert found.outcome is not None
    assert (found.outcome.reached, found.outcome.terminal.awaiting_input) == ("size", True)
    assert found.outcome.line.endswith("name? ")


async def test_a_read_without_a_look_queries_the_kernel_only_for_a_program(
    opened: Opener, terminal: Terminal
) -> None:
    api, since = opened.box.api, (await terminal.wait_until_awaiting_input(PATIENCE)).token
    at_prompt = await api.read_terminal(terminal.id, since=since, until=ReadUntil(size=1))
    assert at_prompt.outcome is not None
    assert (at_prompt.outcome.idle, at_prompt.outcome.terminal.awaiting_input) == (True, True)
    at_prompt = await api.read_terminal(terminal.id, since=since, until=ReadUntil(size=1, look=False))
    assert at_prompt.outcome is not None
    assert (at_prompt.outcome.idle, at_prompt.outcome.terminal.awaiting_input) == (True, None)
    await terminal.send("clear; read -r name\n")
    reads = ReadUntil(input=True, look=False)
    found = await api.read_terminal(terminal.id, since=since, wait=PATIENCE, until=reads)
    assert found.outcome is not None
    assert (found.outcome.reached, found.outcome.terminal.awaiting_input) == ("input", True)


async def test_a_read_until_a_condition_ends_with_the_output(opened: Opener) -> None:
    short = await opened(["/bin/sh", "-c", "echo over"])
    never = ReadUntil(text="never", input=True, prompt=True)
    found = await opened.box.api.read_terminal(short.id, wait=PATIENCE, until=never)
    assert found.outcome is not None
    assert (found.closed, found.outcome.reached, found.outcome.terminal.exit_code) == (True, None, 0)
