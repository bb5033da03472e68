"""Bodies of responses: the same bytes however the connection cuts them, and errors for all that is not a body."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from holdfast.bridge.response_body import (
    MAX_LINE_BYTES,
    ChunkedBody,
    MalformedBody,
    ResponseBody,
    SizedBody,
    UnsizedBody,
)


def chunked(*parts: bytes, trailers: bytes = b"") -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n" + trailers + b"\r\n"


def fed(body: ResponseBody, data: bytes, cuts: list[int]) -> bytes:
    ends = sorted({*(cut for cut in cuts if cut < len(data)), len(data)})
    read = b""
    for start, end in zip([0, *ends], ends, strict=False):
        piece = data[start:end]
        if body.ended:
            body.rest += piece
        else:
            read += body.feed(piece)
    return read


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    st.lists(st.integers(0, 300), max_size=8),
    st.sampled_from([b"", b"a: b\r\n", b"a: b\r\nc: d\r\n"]),
    st.sampled_from([b"", b"HTTP/1.1 200"]),
)
def test_chunks_are_joined_wherever_they_are_cut(
    parts: list[bytes], cuts: list[int], trailers: bytes, rest: bytes
) -> None:
    body = ChunkedBody()
    assert fed(body, chunked(*parts, trailers=trailers) + rest, cuts) == b"".join(parts)
    assert (body.ended, body.rest) == (True, rest)


def test_chunks_that_arrive_byte_by_byte_are_read() -> None:
    body = ChunkedBody()
    whole = b"3;name=value\r\none\r\n00A \r\n0123456789\r\n0\r\n\r\n"
    assert fed(body, whole, list(range(len(whole)))) == b"one0123456789"
    assert body.ended


def test_all_chunks_of_one_read_are_one_piece() -> None:
    assert ChunkedBody().feed(b"3\r\none\r\n3\r\ntwo\r\n5\r\nth") == b"onetwoth"


@pytest.mark.parametrize(
    "data",
    [
        b"x\r\n",
        b"-1\r\n",
        b"0x3\r\none\r\n",
        b"1_0\r\n",
        b"\r\n",
        b" 3\r\none\r\n",
        b"3\none\r\n",
        b"3\r\nones\r\n",
        b"3\r\none\n0\r\n\r\n",
        b"11111111111111111\r\n",
        b"1" * (MAX_LINE_BYTES + 1),
        b"3;" + b"x" * MAX_LINE_BYTES,
        b"0\r\n" + b"a: b\r\n" * MAX_LINE_BYTES,
    ],
)
def test_a_malformed_chunk_is_an_error(data: bytes) -> None:
    with pytest.raises(MalformedBody):
        fed(ChunkedBody(), data, list(range(0, len(data), 1 + len(data) // 50)))


@given(st.binary(max_size=50), st.integers(0, 50), st.lists(st.integers(0, 50), max_size=5))
def test_a_body_with_a_length_ends_there(data: bytes, size: int, cuts: list[int]) -> None:
    body = SizedBody(size)
    assert fed(body, data, cuts) == data[:size]
    assert body.ended == (len(data) >= size)
    assert body.rest == data[size:]


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    body = UnsizedBody()
    assert body.feed(b"all of it") == b"all of it"
    assert not body.ended
    body.connection_ended()
    assert body.ended


@pytest.mark.parametrize("body", [SizedBody(1), ChunkedBody()])
def test_a_connection_that_ends_in_the_middle_is_an_error(body: ResponseBody) -> None:
    with pytest.raises(MalformedBody):
        body.connection_ended()
