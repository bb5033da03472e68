"""Lines and their times, from chunks of output; pure."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from holdfast.cli.support.moments import moment, stamp
from holdfast.cli.verbs.process.log_lines import MAX_LINE_BYTES, Line, LineFilter, LineSplitter
from holdfast.errors import InvalidParams
from holdfast.types import OutputChunk, OutputTime


def test_a_line_has_the_time_of_its_first_byte() -> None:
    splitter = LineSplitter()
    first = OutputChunk("stdout", 0, b"one\ntw", 1)
    times = [OutputTime("stdout", 0, 10.0), OutputTime("stdout", 4, 11.0)]
    assert list(splitter.split(first, times)) == [Line("stdout", 0, 1, b"one\n", 10.0)]
    other = OutputChunk("stderr", 0, b"err\n", 2)
    assert list(splitter.split(other, [])) == [Line("stderr", 0, 2, b"err\n", None)]
    second = OutputChunk("stdout", 6, b"o\nend", 3)
    assert list(splitter.split(second, [OutputTime("stdout", 6, 12.0)])) == [Line("stdout", 4, 3, b"two\n", 11.0)]
    assert list(splitter.rest()) == [Line("stdout", 8, 3, b"end", 12.0)]


def test_a_gap_ends_a_line_and_a_long_line_is_cut() -> None:
    splitter = LineSplitter()
    assert list(splitter.split(OutputChunk("pty", 0, b"a", 1), [])) == []
    assert [line.data for line in splitter.split(OutputChunk("pty", 9, b"b\n", 2), [])] == [b"a", b"b\n"]
    long = list(splitter.split(OutputChunk("pty", 11, b"x" * (2 * MAX_LINE_BYTES + 1), 3), []))
    assert [len(line.data) for line in long] == [MAX_LINE_BYTES] * 2


@given(st.lists(st.binary(max_size=20), max_size=10))
def test_lines_are_the_output(parts: list[bytes]) -> None:
    splitter, offset, found = LineSplitter(), 0, []
    for number, part in enumerate(parts, 1):
        found += list(splitter.split(OutputChunk("stdout", offset, part, number), []))
        offset += len(part)
    found += list(splitter.rest())
    assert [line.data for line in found] == [each for each in _lines(b"".join(parts)) if each]
    assert [line.offset for line in found] == [sum(len(x.data) for x in found[:i]) for i in range(len(found))]


def _lines(data: bytes) -> list[bytes]:
    *whole, rest = data.split(b"\n")
    return [*(each + b"\n" for each in whole), rest]


def test_the_filter() -> None:
    line = Line("stdout", 0, 1, b"x\n", 10.0)
    assert LineFilter(("stdout",), since=10.0, until=10.1).accept(line)
    assert not LineFilter(("stdout",), since=10.1).accept(line)
    assert not LineFilter(("stdout",), until=10.0).accept(line)
    assert not LineFilter(("stderr",)).accept(line)


def test_moments() -> None:
    assert moment("--since", "10m", 1_000.0) == 400.0
    assert moment("--since", "@12.5", 0.0) == 12.5
    assert moment("--since", "1970-01-02T00:00:00+00:00", 0.0) == 86_400.0
    assert stamp(86_400.25) == "1970-01-02T00:00:00.250Z"


@pytest.mark.parametrize("text", ["", "soon", "@", "@nan", "@inf", "@-1", "@1e300", "10y", "-5m"])
def test_a_text_that_is_no_time_is_named(text: str) -> None:
    with pytest.raises(InvalidParams, match="--until"):
        moment("--until", text, 0.0)
