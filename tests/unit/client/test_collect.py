"""Bounded gathering: what is kept, what is counted, and patterns over chunk boundaries."""

from __future__ import annotations

import itertools
import re
import tracemalloc

import pytest
from hypothesis import given, strategies as st

from holdfast.client.collect import (
    SEARCH_WINDOW_BYTES,
    HeadTailBuffer,
    OutputMatch,
    OutputSearch,
    Pattern,
    StreamTails,
    TailBuffer,
    unfinished_character,
)
from holdfast.types import OutputChunk, OutputGap

pieces = st.lists(st.binary(max_size=20), max_size=20)


@given(pieces, st.integers(min_value=1, max_value=40))
def test_tail_buffer_keeps_the_latest_bytes_and_counts_the_rest(parts: list[bytes], limit: int) -> None:
    buffer = TailBuffer(limit)
    for part in parts:
        buffer.append(part)
    whole = b"".join(parts)
    assert buffer.value() == whole[-limit:]
    assert buffer.dropped == max(0, len(whole) - limit)


def test_many_small_pieces_are_one_buffer() -> None:
    """An object of its own for each byte of output would take forty times its size."""
    buffer = TailBuffer(100_000)
    tracemalloc.start()
    try:
        for number in range(30_000):
            buffer.append(b"%02d" % (number % 100))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(buffer), buffer.dropped) == (60_000, 0)
    assert held < 100_000


def test_a_large_result_is_in_memory_once() -> None:
    buffer = TailBuffer(100_000_000)
    tracemalloc.start()
    try:
        for _ in range(64):
            buffer.append(bytes(100_000))
        value = buffer.value()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert value == bytes(6_400_000)
    assert peak < 1.5 * len(value)


@given(pieces, st.text(alphabet="aéあ😀", max_size=5), st.integers(min_value=1, max_value=40))
def test_a_cut_buffer_goes_on(parts: list[bytes], text: str, limit: int) -> None:
    buffer = TailBuffer(limit)
    end = text.encode()[:-1]
    buffer.append(end)
    whole = end[-limit:]
    cut = buffer.cut_unfinished()
    assert buffer.value() + cut == whole
    whole = buffer.value()
    for part in parts:
        buffer.append(part)
        whole += part
    assert buffer.value() == whole[-limit:]
    assert buffer.dropped == max(0, len(end) - limit) + max(0, len(whole) - limit)


@given(pieces, st.integers(min_value=2, max_value=40))
def test_head_and_tail_leave_out_exactly_what_they_say(parts: list[bytes], limit: int) -> None:
    buffer = HeadTailBuffer(limit)
    for part in parts:
        buffer.append(part)
    whole = b"".join(parts)
    window = buffer.collected()
    assert len(window.output) <= limit
    assert whole.startswith(window.head)
    assert whole.endswith(window.tail)
    assert len(window.head) + window.omitted_bytes + len(window.tail) == len(whole)
    if len(whole) <= limit:
        assert window.output == whole


@given(st.text(alphabet="aéあ😀", max_size=60), st.integers(min_value=8, max_value=40))
def test_a_cut_splits_no_character(text: str, limit: int) -> None:
    buffer = HeadTailBuffer(limit)
    buffer.append(text.encode())
    assert "\ufffd" not in buffer.collected().text


def test_a_gap_counts_as_omitted_and_lies_between_head_and_tail() -> None:
    buffer = HeadTailBuffer(20)
    buffer.append(b"first")
    buffer.skip(1000)
    buffer.append(b"last")
    window = buffer.collected()
    assert (window.head, window.tail, window.omitted_bytes) == (b"first", b"last", 1000)
    assert window.text == "first\n[... 1000 bytes omitted ...]\nlast"


@given(st.text(alphabet="aéあ😀", min_size=1, max_size=3), st.integers(min_value=0, max_value=12))
def test_unfinished_character_tells_how_much_of_it_is_there(text: str, length: int) -> None:
    data = text.encode()[:length]
    whole = data.decode("utf-8", "ignore").encode()
    assert unfinished_character(data) == len(data) - len(whole)


def test_stream_tails_do_not_join_what_a_gap_parts() -> None:
    tails = StreamTails(100)
    tails.take(OutputChunk("stdout", 0, b"old", 1))
    tails.take(OutputGap("stdout", 3, 50))
    tails.take(OutputChunk("stdout", 53, b"new", 9))
    tails.take(OutputChunk("stderr", 0, b"other", 10))
    assert (tails.stdout.value(), tails.stdout.dropped) == (b"new", 53)
    assert tails.stderr.value() == b"other"
    assert tails.truncated


def find(pattern: Pattern, *parts: bytes) -> OutputMatch | None:
    search = OutputSearch(pattern)
    offset = 0
    for seq, part in enumerate(parts, start=1):
        match = search.feed(OutputChunk("stdout", offset, part, seq))
        if match is not None:
            return match
        offset += len(part)
    return None


@given(st.lists(st.integers(min_value=0, max_value=40), max_size=6))
@pytest.mark.parametrize("pattern", ["größe: 12", "größe: 12".encode(), re.compile(r"gr\w+e: (\d\d)")])
def test_a_pattern_is_found_however_the_output_is_cut(pattern: Pattern, cuts: list[int]) -> None:
    whole = "x\xff".encode("latin-1") + "yyy größe: 12 zzz".encode()
    edges = [0, *sorted(cuts), len(whole)]
    match = find(pattern, *(whole[a:b] for a, b in itertools.pairwise(edges)))
    assert match is not None
    assert (match.offset, match.text) == (6, "größe: 12")
    assert match.groups == ((b"12",) if isinstance(pattern, re.Pattern) else ())


def test_a_plain_string_is_not_a_regular_expression() -> None:
    assert find("a.c", b"abc") is None
    assert find(re.compile(b"a.c"), b"abc") == OutputMatch("stdout", 0, b"abc", 1)


def test_streams_are_searched_apart_and_gaps_part_them() -> None:
    search = OutputSearch("ab")
    assert search.feed(OutputChunk("stdout", 0, b"a", 1)) is None
    assert search.feed(OutputChunk("stderr", 0, b"b", 2)) is None
    assert search.feed(OutputGap("stdout", 1, 5)) is None
    assert search.feed(OutputChunk("stdout", 6, b"b", 3)) is None
    assert search.feed(OutputChunk("stdout", 7, b"ab", 4)) == OutputMatch("stdout", 7, b"ab", 4, before=3)


def feed_all(search: OutputSearch, chunks: list[OutputChunk]) -> OutputMatch | None:
    """Matches in the chunks of a reader that begins at the search's position."""
    later = (chunk for chunk in chunks if chunk.seq > search.since)
    return next((match for chunk in later if (match := search.feed(chunk)) is not None), None)


@given(st.lists(st.integers(min_value=0, max_value=14), max_size=6))
@pytest.mark.parametrize("first", ["b-", re.compile("b-(?=c-)"), re.compile(b"b-")])
def test_a_search_goes_on_right_behind_a_match_however_the_output_is_cut(first: Pattern, cuts: list[int]) -> None:
    whole = b"a-b-c-d-a-b-c-"
    edges = [0, *sorted(set(cuts) - {0, len(whole)}), len(whole)]
    chunks = [
        OutputChunk("stdout", start, whole[start:stop], seq)
        for seq, (start, stop) in enumerate(itertools.pairwise(edges), start=1)
    ]
    match = feed_all(OutputSearch(first), chunks)
    assert match is not None
    assert (match.offset, match.end) == (2, 4)
    for pattern, offset in (("c-", 4), ("a-", 8), (re.compile("[a-z]"), 4), ("b-", 10)):
        behind = feed_all(OutputSearch(pattern, match), chunks)
        assert behind is not None
        assert behind.offset == offset


def test_a_search_behind_a_match_leaves_out_what_other_streams_printed_before() -> None:
    chunks = [
        OutputChunk("stdout", 0, b"rea", 1),
        OutputChunk("stderr", 0, b"early", 2),
        OutputChunk("stdout", 3, b"dy more", 3),
        OutputChunk("stderr", 5, b" late", 4),
    ]
    match = feed_all(OutputSearch("ready"), chunks)
    assert match is not None
    assert feed_all(OutputSearch("early", match), chunks) is None
    for text in ("more", "late"):
        assert feed_all(OutputSearch(text, match), chunks) is not None
    assert feed_all(OutputSearch("ready", match), chunks) is None


def test_the_search_holds_a_bounded_window() -> None:
    search = OutputSearch(re.compile("never"))
    for seq in range(1, 50):
        search.feed(OutputChunk("stdout", (seq - 1) * 10_000, b"x" * 10_000, seq))
    (window,) = search._windows.values()
    assert len(window) == SEARCH_WINDOW_BYTES
    (chunks,) = search._chunks.values()
    assert len(chunks) == 7
