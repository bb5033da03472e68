"""Recordings: written, read back, refused with the number of the line, and laid out in time."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from holdfast.client.screen import asciicast
from holdfast.client.screen.asciicast import (
    Cast,
    CastEvent,
    CastHeader,
    cast_lines,
    read_cast,
    resize_event,
    write_cast,
)
from holdfast.errors import InvalidParams
from holdfast.types import TerminalSize
from tests.support.parts import needs

HEADER = '{"version": 2, "width": 80, "height": 24}\n'


def written(*events: CastEvent) -> list[list[object]]:
    return [json.loads(line) for line in write_cast(events, width=80, height=24)][1:]


def out(time: float, data: bytes) -> CastEvent:
    return CastEvent(time, "o", data)


def test_the_lines_of_a_recording() -> None:
    events = [out(0.25, b"hi\r\n"), CastEvent(1, "i", b"\x03"), resize_event(2, TerminalSize(rows=50, cols=132))]
    lines = list(
        write_cast(
            [*events, CastEvent(3.5, "m", b"chapter")],
            width=80,
            height=24,
            timestamp=1_700_000_000.9,
            title="a \u2028 title",
            env={"TERM": "xterm-256color", "SHELL": "/bin/bash"},
            command="bash",
        )
    )
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in lines)
    assert json.loads(lines[0]) == {
        "version": 2,
        "width": 80,
        "height": 24,
        "timestamp": 1_700_000_000,
        "title": "a \u2028 title",
        "env": {"TERM": "xterm-256color", "SHELL": "/bin/bash"},
        "command": "bash",
    }
    assert lines[1:] == [
        '[0.25,"o","hi\\r\\n"]\n',
        '[1.0,"i","\\u0003"]\n',
        '[2.0,"r","132x50"]\n',
        '[3.5,"m","chapter"]\n',
    ]


def test_a_header_has_no_empty_fields() -> None:
    assert json.loads(Cast().header(width=80, height=24)) == {"version": 2, "width": 80, "height": 24}


def test_a_character_cut_between_events_is_joined() -> None:
    you = "你".encode()
    assert written(out(1, b"a" + you[:1]), out(2, you[1:2]), out(3, you[2:] + b"b")) == [
        [1.0, "o", "a"],
        [3.0, "o", "你b"],
    ]


def test_input_between_does_not_break_a_character() -> None:
    assert written(out(1, b"\xc3"), CastEvent(2, "i", b"\xc3"), out(3, b"\xa9"), CastEvent(4, "i", b"\xa4")) == [
        [3.0, "o", "é"],
        [4.0, "i", "ä"],
    ]


def test_invalid_bytes_are_replaced() -> None:
    assert written(out(1, b"a\xffb"), out(2, b"\xe4\xbd"), out(3, b"x")) == [
        [1.0, "o", "a\ufffdb"],
        [3.0, "o", "\ufffdx"],
    ]


def test_a_character_that_never_ends_is_replaced_at_the_end() -> None:
    assert written(out(1, b"a"), out(2, b"\xe4\xbd")) == [[1.0, "o", "a"], [2.0, "o", "\ufffd"]]


def test_times_never_go_back() -> None:
    assert [line[0] for line in written(out(1, b"a"), out(0.5, b"b"), out(1.23456789, b"c"))] == [
        1.0,
        1.0,
        1.234568,
    ]


@pytest.mark.parametrize("time", [-1.0, float("nan"), float("inf")])
def test_impossible_times(time: float) -> None:
    with pytest.raises(InvalidParams, match="time must be a number from 0"):
        Cast().event(time, "o", b"x")


def test_impossible_sizes_and_titles() -> None:
    with pytest.raises(InvalidParams, match="0x24"):
        Cast().header(width=0, height=24)
    with pytest.raises(InvalidParams, match="UTF-8"):
        Cast().header(width=80, height=24, title="\ud800")


def test_events_are_written_and_read_as_they_come() -> None:
    requested: list[float] = []

    def source() -> Iterator[CastEvent]:
        for time in range(1000):
            requested.append(time)
            yield out(time, b"x")

    recording = read_cast(write_cast(source(), width=80, height=24))
    assert requested == []
    assert next(recording.events).time == 0
    assert next(recording.events).time == 1
    assert requested == [0, 1]


events_of_text = st.lists(
    st.tuples(
        st.floats(0, 1e6, allow_nan=False).map(lambda time: round(time, 6)),
        st.sampled_from("oirmz"),
        st.text(st.characters(codec="utf-8"), min_size=1),
    )
).map(lambda rows: [CastEvent(time, code, text.encode()) for time, code, text in sorted(rows)])


@given(events_of_text, st.text(st.characters(codec="utf-8"), min_size=1), st.integers(1, 999), st.integers(1, 999))
def test_what_is_written_is_read_back(events: list[CastEvent], title: str, width: int, height: int) -> None:
    text = "".join(write_cast(events, width=width, height=height, timestamp=5, title=title, env={"A": title}))
    recording = read_cast(io.StringIO(text, newline="\n"))
    assert recording.header == CastHeader(width, height, 2, timestamp=5, title=title, env={"A": title})
    assert list(recording.events) == events


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_output_cut_anywhere_reads_as_the_whole(data: bytes, cuts: list[int]) -> None:
    edges = sorted(min(cut, len(data)) for cut in cuts)
    pieces = [data[start:end] for start, end in zip([0, *edges], [*edges, len(data)], strict=True)]
    recording = read_cast(write_cast((out(n, piece) for n, piece in enumerate(pieces)), width=1, height=1))
    assert b"".join(event.data for event in recording.events) == data.decode(errors="replace").encode()


def test_blank_lines_unknown_codes_and_unknown_fields() -> None:
    header = '{"version":2,"width":80,"height":24,"theme":{"fg":"#fff"},"idle_time_limit":2.5,"duration":3}\n'
    recording = read_cast(["\n", header, "\n", '[1, "x", "?"]\n', "  \n", '[2, "o", "hi"]'])
    assert recording.header == CastHeader(80, 24, 2, idle_time_limit=2.5, duration=3.0)
    assert list(recording.events) == [CastEvent(1.0, "x", b"?"), CastEvent(2.0, "o", b"hi")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "line 1: the recording is empty"),
        (["\n", "\n"], "line 1: the recording is empty"),
        (["{\n", '"version": 1}'], "line 1: not a header"),
        (
            ['{"version": 1, "width": 80, "height": 24, "duration": 1, "stdout": []}'],
            "line 1: asciicast version 1 is",
        ),
        (
            ['{"version": 3, "term": {"cols": 80, "rows": 24}}'],
            "line 1: asciicast version 3 is not supported, only 2",
        ),
        (['{"width": 80, "height": 24}'], "line 1: not a header of asciicast v2: .*version"),
        (['{"version": 2, "width": 80}'], "line 1: not a header of asciicast v2: .*height"),
        (['{"version": 2, "width": "80", "height": 24}'], "line 1: not a header of asciicast v2: .*width"),
        (['{"version": 2, "width": 0, "height": 24}'], "line 1: a size of 0x24"),
        (["\n", "nonsense"], "line 2: not a header"),
        (["[]"], "line 1: not a header"),
        ([HEADER, '[1.0, "o"'], "line 2: not an event"),
        ([HEADER, "\n", '[1.0, "o"]\n'], "line 3: not an event"),
        ([HEADER, '[1.0, "o", 5]\n'], "line 2: not an event"),
        ([HEADER, '["1", "o", "x"]\n'], "line 2: not an event"),
        ([HEADER, '{"time": 1}\n'], "line 2: not an event"),
        ([HEADER, '[1, "o", "x"]\n', '[-1, "o", "x"]\n'], "line 3: time must be a number from 0, got -1"),
        ([HEADER, '[1, "o", "\ud800"]\n'], "line 2: not an event"),
    ],
)
def test_bad_input_is_named_with_its_line(lines: list[str], message: str) -> None:
    with pytest.raises(InvalidParams, match=message):
        list(read_cast(lines).events)


@given(st.lists(st.text(max_size=30), max_size=4))
def test_any_lines_are_read_or_refused(lines: list[str]) -> None:
    refused: InvalidParams | None = None
    events: list[CastEvent] = []
    try:
        events = list(read_cast([HEADER, *lines]).events)
    except InvalidParams as error:
        refused = error
    assert (refused is not None and refused.message.startswith("line ")) or len(events) <= len(lines)


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asciicast, "LONGEST_LINE", 100)
    file = io.StringIO(HEADER + '[1.0, "o", "' + "x" * 1_000_000)
    with pytest.raises(InvalidParams, match="line 2: longer than 100 characters"):
        list(read_cast(cast_lines(file)).events)
    assert file.tell() < 1000


def test_sizes_of_resize_events() -> None:
    assert resize_event(1, TerminalSize(rows=50, cols=132)).size == TerminalSize(rows=50, cols=132)
    for data in (b"", b"80", b"x", b"80x", b"-1x5", b"80x24x", b"axb"):
        assert CastEvent(1, "r", data).size is None
    assert CastEvent(1, "o", b"80x24").size is None


@needs("asciinema")
def test_asciinema_prints_the_same_output(tmp_path: Path) -> None:
    chunks = [
        b"$ ls\r\n",
        b"\x1b[31mr\xc3\xa9d\x1b[0m \xe4\xbd",
        b"\xa0 \xe2\x80\xa8|\r\n",
        b"\xff\x00\x7f end",
        b"\xf0\x9f",
    ]
    events: list[CastEvent] = []
    for number, chunk in enumerate(chunks):
        events += [
            CastEvent(number * 100, "i", b"typed"),
            CastEvent(number * 100, "m", b""),
            out(number * 100, chunk),
        ]
    events.insert(3, resize_event(50, TerminalSize(rows=30, cols=100)))
    file = tmp_path / "session.cast"
    lines = write_cast(events, width=80, height=24, timestamp=1_700_000_000, title="a title", env={"TERM": "xterm"})
    file.write_text("".join(lines), encoding="utf-8")
    # It opens /dev/tty, so it needs a terminal of its own; its output goes to a pipe.
    controlling = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY); os.execvp(sys.argv[1], sys.argv[1:])"
    )
    master, terminal = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", controlling, "asciinema", "cat", str(file)],
            stdin=terminal,
            capture_output=True,
            start_new_session=True,
            check=False,
        )
    finally:
        os.close(master)
        os.close(terminal)
    assert done.stderr == b""
    assert done.stdout == b"".join(chunks).decode(errors="replace").encode()
