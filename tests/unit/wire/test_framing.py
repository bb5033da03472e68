"""Framing: messages survive any cutting of the stream, large ones are skipped, and the stream goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, strategies as st

from holdfast.wire.framing import BULK_MIN, FrameReader, Oversized, frame_length, frame_line

LIMIT = 64
#: A message, or how large one that is skipped was.
Seen = bytes | int

lines = st.binary(max_size=2 * LIMIT).map(lambda b: b.replace(b"\n", b" ").strip())
bodies = st.binary(max_size=2 * LIMIT)


def cut(data: bytes, locations: list[int]) -> Iterator[bytes]:
    """The stream in pieces, as a socket might give it."""
    at = 0
    for location in sorted({p % (len(data) + 1) for p in locations}):
        yield data[at:location]
        at = location
    yield data[at:]


def read_all(reader: FrameReader, pieces: Iterator[bytes]) -> list[Seen]:
    return [m.size if isinstance(m, Oversized) else m for piece in pieces for m in reader.feed(piece)]


def expected(messages: list[bytes]) -> list[Seen]:
    return [m if len(m) <= LIMIT else len(m) for m in messages]


@given(st.lists(lines), st.lists(st.integers(0, 10_000)))
def test_lines_survive_any_cutting(messages: list[bytes], locations: list[int]) -> None:
    reader = FrameReader(LIMIT)
    stream = b"".join(map(frame_line, messages))
    assert read_all(reader, cut(stream, locations)) == [m for m in expected(messages) if m != b""]
    assert reader.buffered == 0


@given(st.lists(bodies), st.lists(st.integers(0, 10_000)))
def test_length_framed_messages_survive_any_cutting(messages: list[bytes], locations: list[int]) -> None:
    reader = FrameReader(LIMIT)
    reader.use_lengths()
    stream = b"".join(map(frame_length, messages))
    assert read_all(reader, cut(stream, locations)) == expected(messages)
    assert reader.buffered == 0


@given(st.lists(lines, min_size=1), st.lists(bodies), st.lists(st.integers(0, 10_000)))
def test_the_framing_switches_between_two_messages_of_one_feed(
    before: list[bytes], after: list[bytes], locations: list[int]
) -> None:
    before[-1] = b"switch"
    reader = FrameReader(LIMIT)
    seen: list[Seen] = []
    for piece in cut(b"".join(map(frame_line, before)) + b"".join(map(frame_length, after)), locations):
        for message in reader.feed(piece):
            seen.append(message.size if isinstance(message, Oversized) else message)
            if message == b"switch" and len(seen) == len([m for m in before if m]):
                reader.use_lengths()
    assert seen == [m for m in expected(before) if m != b""] + expected(after)


@given(st.lists(st.binary(max_size=300)), st.booleans())
def test_random_bytes_never_fail_and_never_pile_up(pieces: list[bytes], by_length: bool) -> None:
    reader = FrameReader(LIMIT)
    if by_length:
        reader.use_lengths()
    for piece in pieces:
        for message in reader.feed(piece):
            assert isinstance(message, Oversized) or len(message) <= LIMIT
        assert reader.buffered <= LIMIT + 4


@pytest.mark.parametrize("frame", [frame_line, frame_length])
def test_an_oversized_message_is_skipped_as_it_comes(frame: Callable[[bytes], bytes]) -> None:
    reader = FrameReader(LIMIT)
    if frame is frame_length:
        reader.use_lengths()
    stream = frame(b"x" * 1_000_000)
    held = 0
    for at in range(0, len(stream) - 1, 1000):
        assert list(reader.feed(stream[at : min(at + 1000, len(stream) - 1)])) == []
        held = max(held, reader.buffered)
    messages = list(reader.feed(stream[-1:] + frame(b"next")))
    assert isinstance(messages[0], Oversized)
    assert (messages[0].size, messages[0].limit, messages[1:]) == (1_000_000, LIMIT, [b"next"])
    assert held <= LIMIT + 1000


def test_a_line_of_exactly_the_limit_is_taken_and_one_byte_more_is_not() -> None:
    reader = FrameReader(LIMIT)
    first, second = reader.feed(b"x" * LIMIT + b"\n" + b"y" * (LIMIT + 1) + b"\n")
    assert first == b"x" * LIMIT
    assert isinstance(second, Oversized)


def test_carriage_returns_and_empty_lines_are_not_messages() -> None:
    assert list(FrameReader(LIMIT).feed(b"\r\n\n{}\r\n  \n{}\n")) == [b"{}", b"{}"]


def test_the_announced_length_alone_costs_no_memory() -> None:
    reader = FrameReader(2**31)
    reader.use_lengths()
    assert list(reader.feed((2**30).to_bytes(4, "big"))) == []
    assert reader.buffered == 4
    assert reader.writable() is None
    assert reader.missing() == 2**30


@given(
    st.lists(st.sampled_from([0, 5, BULK_MIN - 1, BULK_MIN, BULK_MIN + 1, 3 * BULK_MIN]), max_size=6),
    st.lists(st.integers(1000, 2 * BULK_MIN), min_size=1, max_size=6),
)
def test_large_messages_written_in_place_equal_those_that_were_fed(sizes: list[int], reads: list[int]) -> None:
    """A caller that uses `writable()` before each read gets the same messages as one that never does."""
    bodies = [bytes([65 + index]) * size for index, size in enumerate(sizes)]
    stream = memoryview(b"".join(map(frame_length, bodies)))
    reader = FrameReader(2**24)
    reader.use_lengths()
    seen: list[bytes | Oversized] = []
    turn = 0
    while stream:
        room = reader.writable()
        count = min(reads[turn % len(reads)], len(stream), len(room) if room is not None else len(stream))
        turn += 1
        if room is None:
            seen.extend(reader.feed(stream[:count]))
        else:
            room[:count] = stream[:count]
            message = reader.wrote(count)
            if message is not None:
                seen.append(bytes(message))
        stream = stream[count:]
    assert seen == bodies


def test_feeding_the_rest_of_a_large_message_works_too() -> None:
    reader = FrameReader(2**24)
    reader.use_lengths()
    body = b"x" * BULK_MIN
    stream = frame_length(body) + frame_length(b"after")
    assert list(reader.feed(stream[:10])) == []
    assert reader.writable() is not None
    assert list(reader.feed(stream[10:])) == [body, b"after"]


def test_what_still_refers_to_a_lent_message_keeps_its_bytes() -> None:
    import msgspec

    reader = FrameReader(2**24)
    reader.use_lengths()
    held: list[msgspec.Raw] = []
    for letter in (b"a", b"b"):
        stream = frame_length(msgspec.msgpack.encode({"params": letter * BULK_MIN}))
        assert list(reader.feed(stream[:100])) == []
        room = reader.writable()
        assert room is not None
        room[:] = stream[100:]
        message = reader.wrote(len(room))
        room.release()
        assert message is not None
        held.append(msgspec.msgpack.decode(message, type=dict[str, msgspec.Raw])["params"])
    assert [msgspec.msgpack.decode(raw) for raw in held] == [b"a" * BULK_MIN, b"b" * BULK_MIN]


def test_more_bytes_than_there_was_room_for_is_an_error_of_the_caller() -> None:
    with pytest.raises(ValueError, match="room"):
        FrameReader(LIMIT).wrote(1)
