"""The one sequence of a terminal's bytes and events: every position is a place to read on from."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from holdfast.errors import InvalidParams
from holdfast.runtime.terminal.timeline import MAX_TIMES, Timeline
from holdfast.testing.fake_pty import MemoryLog
from holdfast.types import TerminalEvent, TerminalEventType, TerminalSize

EVERYTHING = 1 << 62
KINDS: list[TerminalEventType] = ["state", "promptStart", "prompt", "command", "ended", "resize", "input"]
STEPS = st.lists(st.one_of(st.binary(min_size=1, max_size=9), st.sampled_from(KINDS)), max_size=40)


def filled(
    steps: list[bytes | TerminalEventType], *, retained_bytes: int = EVERYTHING, max_events: int = 10_000
) -> tuple[Timeline, MemoryLog, list[object]]:
    """A timeline, its log, and what stands at each position."""
    timeline, log = Timeline(max_events), MemoryLog(retained_bytes)
    flat: list[object] = []
    for number, step in enumerate(steps):
        if isinstance(step, bytes):
            timeline.note_output(log.end, float(number))
            log.append(step)
            flat += list(step)
        else:
            assert timeline.add(step, log.end, float(number)) == len(flat) + 1
            flat.append(step)
        assert timeline.token(log) == len(flat)
    return timeline, log, flat


def flattened(events: tuple[TerminalEvent, ...], since: int) -> list[object]:
    """One item for each position; those of gaps are None. Checks each token on the way."""
    flat: list[object] = []
    for event in events:
        if event.type == "output":
            flat += list(event.payload)
        else:
            flat += [None] * event.length if event.type == "gap" else [event.type]
        assert event.token == since + len(flat)
    return flat


@given(STEPS)
def test_from_every_position_the_rest_is_read(steps: list[bytes | TerminalEventType]) -> None:
    timeline, log, flat = filled(steps)
    for since in range(len(flat) + 1):
        found = timeline.read(log, since, EVERYTHING)
        assert flattened(found.events, since) == flat[since:]
        assert (found.token, found.truncated) == (len(flat), False)
    assert timeline.read(log, len(flat) + 7, EVERYTHING).token == len(flat)


@given(STEPS, st.integers(1, 12), st.booleans())
def test_in_steps_of_any_size_it_is_the_same(
    steps: list[bytes | TerminalEventType], max_bytes: int, timing: bool
) -> None:
    timeline, log, flat = filled(steps)
    since, pieces = 0, []
    while True:
        found = timeline.read(log, since, max_bytes, timing=timing)
        pieces += flattened(found.events, since)
        assert sum(len(event.payload) for event in found.events if event.type == "output") <= max_bytes
        if found.token == since:
            break
        assert found.token > since
        since = found.token
    assert pieces == flat


@given(STEPS, st.integers(2, 30), st.integers(1, 12))
def test_what_the_log_has_lost_is_a_gap_of_its_length(
    steps: list[bytes | TerminalEventType], retained: int, max_bytes: int
) -> None:
    timeline, log, flat = filled(steps, retained_bytes=retained)
    for size in (max_bytes, EVERYTHING):
        since, read, lost, truncated = 0, [], 0, False
        while (found := timeline.read(log, since, size)).token > since:
            read += flattened(found.events, since)
            lost += sum(event.length for event in found.events if event.type == "gap")
            truncated = truncated or found.truncated
            since = found.token
        assert len(read) == len(flat)
        assert all(a is None or a == b for a, b in zip(read, flat, strict=True))
        # Events that happened in what was lost are kept: nothing but bytes is missing.
        assert lost == log.lost_end - log.lost_start
        assert truncated is (lost > 0)


@given(STEPS, st.integers(1, 10))
def test_events_that_are_dropped_are_a_gap_at_the_beginning(
    steps: list[bytes | TerminalEventType], max_events: int
) -> None:
    timeline, log, flat = filled(steps, max_events=max_events)
    for since in range(len(flat) + 1):
        found = timeline.read(log, since, EVERYTHING)
        read = flattened(found.events, since)
        assert len(read) == len(flat) - since
        gaps = [index for index, event in enumerate(found.events) if event.type == "gap"]
        assert gaps in ([], [0])
        assert found.truncated is bool(gaps)
        assert all(a is None or a == b for a, b in zip(read, flat[since:], strict=True))
    kept = sum(event.type != "output" for event in timeline.read(log, 0, EVERYTHING).events)
    count = sum(not isinstance(step, bytes) for step in steps)
    assert kept >= min(count, max_events)


def test_a_read_has_a_bound_of_events_and_goes_on_behind_it() -> None:
    timeline, log, flat = filled(["input"] * 10_000, max_events=20_000)
    since, sizes = 0, []
    while (found := timeline.read(log, since, EVERYTHING)).token > since:
        sizes.append(len(found.events))
        since = found.token
    assert (since, sum(sizes), len(sizes)) == (len(flat), 10_000, 3)


def test_times() -> None:
    timeline, log = Timeline(100), MemoryLog()
    for at, data in ((1.0, b"ab"), (1.0005, b"cd"), (2.0, b"ef")):
        timeline.note_output(log.end, at)
        log.append(data)
    timeline.add("state", log.end, 3.0)
    timeline.note_output(log.end, 4.0)
    log.append(b"gh")
    found = timeline.read(log, 0, EVERYTHING, timing=True)
    assert [(event.timestamp, event.payload) for event in found.events] == [
        (1.0, b"abcd"),
        (2.0, b"ef"),
        (3.0, b""),
        (4.0, b"gh"),
    ]
    plain = timeline.read(log, 0, EVERYTHING)
    assert [(event.timestamp, event.payload) for event in plain.events] == [
        (1.0, b"abcdef"),
        (3.0, b""),
        (4.0, b"gh"),
    ]
    middle = timeline.read(log, 5, EVERYTHING, timing=True)
    assert (middle.events[0].timestamp, middle.events[0].payload) == (2.0, b"f")


def test_a_clock_that_is_set_back_does_not_turn_the_order_round() -> None:
    timeline, log = Timeline(100), MemoryLog()
    for number, at in enumerate((5.0, 4.0, 6.0, 1.0, 7.0)):
        if number % 2:
            timeline.add("state", log.end, at)
        else:
            timeline.note_output(log.end, at)
            log.append(b"x")
    times = [event.timestamp for event in timeline.read(log, 0, EVERYTHING, timing=True).events]
    assert times == sorted(times)


def test_times_of_a_flood_are_bounded_and_stay_in_order() -> None:
    timeline, log = Timeline(100), MemoryLog()
    count = 3 * MAX_TIMES
    for number in range(count):
        timeline.note_output(number, float(number))
    log.append(b"x" * count)
    since, times = 0, []
    while (found := timeline.read(log, since, EVERYTHING, timing=True)).token > since:
        times += [event.timestamp for event in found.events]
        for event in found.events:
            # The time of its first byte or of one shortly before: never of a later one.
            assert event.timestamp <= event.offset
        since = found.token
    assert len(times) <= MAX_TIMES + 1
    assert times == sorted(times)
    assert times[-1] == count - 1


def test_marks_have_a_payload_for_those_who_ask() -> None:
    timeline, log = Timeline(100), MemoryLog()
    timeline.add("ended", 0, 0.0, exit_code=3)
    timeline.add("promptStart", 0, 0.0)
    timeline.add("prompt", 0, 0.0, prompt="$ ")
    timeline.add("command", 0, 0.0)
    timeline.add("input", 0, 0.0, payload=b"typed")
    timeline.add("resize", 0, 0.0, size=TerminalSize(1, 2))
    marked = timeline.read(log, 0, EVERYTHING, marks=True)
    assert [event.payload for event in marked.events] == [
        b"\x1b]133;D;3\x07",
        b"\x1b]133;A\x07",
        b"\x1b]133;B\x07",
        b"\x1b]133;C\x07",
        b"typed",
        b"",
    ]
    plain = timeline.read(log, 0, EVERYTHING)
    assert [event.payload for event in plain.events] == [b"", b"", b"", b"", b"typed", b""]
    ended, _, prompt, *_, resize = plain.events
    assert (ended.exit_code, prompt.prompt, prompt.prompt_detected, resize.size) == (
        3,
        "$ ",
        True,
        TerminalSize(1, 2),
    )
    assert [event.prompt_detected for event in plain.events].count(True) == 1


def test_states_are_those_of_their_moment() -> None:
    timeline, log = Timeline(100), MemoryLog()
    log.append(b"a")
    timeline.state = "IDLE"
    timeline.add("state", log.end, 0.0)
    log.append(b"b")
    timeline.state = "BUSY"
    timeline.add("state", log.end, 0.0)
    log.append(b"c")
    found = timeline.read(log, 0, EVERYTHING)
    assert [(event.type, event.state) for event in found.events] == [
        ("output", "RUNNING"),
        ("state", "IDLE"),
        ("output", "IDLE"),
        ("state", "BUSY"),
        ("output", "BUSY"),
    ]
    assert found.state == "BUSY"


def test_where_an_offset_stands() -> None:
    timeline, log, _ = filled([b"ab", "state", "prompt", b"cd", "command"])
    assert [timeline.position_of(offset) for offset in range(5)] == [0, 1, 2, 5, 6]
    assert timeline.token(log) == 7


def test_a_negative_position_is_refused() -> None:
    with pytest.raises(InvalidParams, match="-1"):
        Timeline(10).read(MemoryLog(), -1, 10)


@pytest.mark.parametrize(
    ("steps", "line"),
    [
        ([b"hello\r\n>>> "], b">>> "),
        ([b"hello\r\nNa", b"me: "], b"Name: "),
        ([b"done\r\n"], b""),
        ([b"$ ", "prompt"], b""),
        ([b"$ ", "prompt", b"make\r\n", "command", b"Name: "], b"Name: "),
        ([b"no line end", "ended"], b""),
        ([b"x" * 300], b"x" * 256),
    ],
)
def test_the_question_of_a_program_is_its_unfinished_line(
    steps: list[bytes | TerminalEventType], line: bytes
) -> None:
    timeline, log, _ = filled(steps)
    assert timeline.unfinished_line(log, 256) == line
