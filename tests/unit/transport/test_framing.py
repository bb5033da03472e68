"""`FrameReader.writable`/`wrote` against `feed`: the same messages, however the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from holdfast.wire.framing import BULK_MAX, BULK_MIN, FrameReader, Oversized, frame_length

LIMIT = 5 * BULK_MIN


def read_in_place(reader: FrameReader, stream: bytes, cuts: list[int]) -> list[bytes | int]:
    """Push `stream` through the way a channel does; an oversized message shows as its size."""
    got: list[bytes | int] = []
    position = 0
    turn = 0
    while position < len(stream):
        step = cuts[turn % len(cuts)]
        turn += 1
        room = reader.writable()
        if room is not None:
            count = min(len(room), step, len(stream) - position)
            room[:count] = stream[position : position + count]
            message = reader.wrote(count)
            if message is not None:
                got.append(bytes(message))
        else:
            count = min(step, len(stream) - position)
            data = stream[position : position + count]
            whole = reader.whole(data)
            messages = reader.feed(data) if whole is None else (whole,)
            got += [m.size if isinstance(m, Oversized) else m for m in messages]
        position += count
    return got


sizes = st.lists(
    st.one_of(
        st.integers(0, 40),
        st.integers(BULK_MIN - 3, BULK_MIN + 3),
        st.integers(LIMIT - 2, LIMIT + 2),
        st.integers(0, LIMIT * 2),
    ),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(sizes=sizes, cuts=st.lists(st.integers(1, 2 * LIMIT), min_size=1, max_size=6), in_place=st.booleans())
def test_messages_survive_any_cut(sizes: list[int], cuts: list[int], in_place: bool) -> None:
    messages = [bytes([index % 251]) * size for index, size in enumerate(sizes)]
    stream = b"".join(map(frame_length, messages))
    cuts = [*cuts, len(stream) // 64 + 1]  # a large stream has small pieces too, and no million of them
    reader = FrameReader(LIMIT)
    reader.use_lengths()
    if in_place:
        got = read_in_place(reader, stream, [max(1, cut) for cut in cuts])
    else:
        got = []
        position = turn = 0
        while position < len(stream):
            piece = stream[position : position + cuts[turn % len(cuts)]]
            got += [m.size if isinstance(m, Oversized) else m for m in reader.feed(piece)]
            position += len(piece)
            turn += 1
    assert got == [m if len(m) <= LIMIT else len(m) for m in messages]
    assert reader.buffered == 0


def begin(reader: FrameReader, message: bytes) -> None:
    assert list(reader.feed(frame_length(message)[:100])) == []


def finish(reader: FrameReader, message: bytes) -> memoryview:
    room = reader.writable()
    assert room is not None
    room[:] = frame_length(message)[100:]
    whole = reader.wrote(len(room))
    assert whole is not None
    return whole


def test_the_room_is_used_again() -> None:
    reader = FrameReader(LIMIT)
    reader.use_lengths()
    one, two = b"1" * BULK_MIN, b"2" * BULK_MIN
    begin(reader, one)
    first = finish(reader, one)
    assert first == one
    begin(reader, two)
    assert finish(reader, two) == two
    with pytest.raises(ValueError, match="released"):
        bytes(first)


def test_bytes_that_somebody_still_refers_to_are_left_alone() -> None:
    reader = FrameReader(LIMIT)
    reader.use_lengths()
    one, two = b"1" * BULK_MIN, b"2" * BULK_MIN
    begin(reader, one)
    kept = memoryview(finish(reader, one))
    begin(reader, two)
    assert finish(reader, two) == two
    assert kept == one


def test_a_huge_length_reserves_nothing() -> None:
    reader = FrameReader(10 * BULK_MAX)
    reader.use_lengths()
    assert list(reader.feed((BULK_MAX + 1).to_bytes(4, "big"))) == []
    assert reader.writable() is None
    assert reader.missing() == BULK_MAX + 1


def test_wrote_takes_no_more_than_there_was_room_for() -> None:
    reader = FrameReader(LIMIT)
    reader.use_lengths()
    begin(reader, b"x" * BULK_MIN)
    room = reader.writable()
    assert room is not None
    with pytest.raises(ValueError, match="room"):
        reader.wrote(len(room) + 1)


@pytest.mark.parametrize("rest", [b"", b"\0", frame_length(b"second")])
def test_whole_takes_exactly_one_message(rest: bytes) -> None:
    reader = FrameReader(LIMIT)
    assert reader.whole(b"first\n") is None  # lines are not whole messages before `use_lengths`
    reader.use_lengths()
    framed = frame_length(b"first")
    assert reader.whole(framed + rest) == (None if rest else b"first")
    assert reader.whole(framed[:-1]) is None
    assert list(reader.feed(framed[:-1])) == []
    # The next bytes belong to the message that is held.
    assert reader.whole(frame_length(b"")) is None
    assert reader.whole((LIMIT + 1).to_bytes(4, "big") + b"x" * (LIMIT + 1)) is None
