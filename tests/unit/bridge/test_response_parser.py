"""Responses of providers: the same however the connection cuts them, and errors for all that is not a response."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from holdfast.bridge.response_parser import MAX_SILENT_BYTES, MalformedResponse, ResponseParser

SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n"


def chunked(*parts: bytes, trailers: bytes = b"") -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return CHUNKED + body + b"0\r\n" + trailers + b"\r\n"


def fed(data: bytes, cuts: list[int] | None = None, *, method: str = "POST") -> tuple[ResponseParser, bytes]:
    response = ResponseParser(method)
    ends = sorted({*(cut for cut in cuts or [] if cut < len(data)), len(data)})
    body = b""
    for start, end in zip([0, *ends], ends, strict=False):
        response.feed(data[start:end])
        body += response.take()
    return response, body


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    st.lists(st.integers(0, 300), max_size=8),
    st.sampled_from([b"", b"a: b\r\n", b"a: b\r\nc: d\r\n"]),
    st.sampled_from([b"", b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"]),
)
def test_chunks_are_joined_wherever_they_are_cut(
    parts: list[bytes], cuts: list[int], trailers: bytes, interim: bytes
) -> None:
    response, body = fed(interim + chunked(*parts, trailers=trailers), cuts)
    assert body == b"".join(parts)
    assert response.is_complete
    assert response.stays_open
    assert response.head == (200, [(b"Transfer-Encoding", b"Chunked")])


def test_all_chunks_of_one_read_are_one_piece() -> None:
    assert fed(CHUNKED + b"3\r\none\r\n3;a=b\r\ntwo\r\n5\r\nth")[1] == b"onetwoth"


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense",
        b"HTTP/1.1 200 OK\na: b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        CHUNKED + b"x\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"0x3\r\none\r\n",
        CHUNKED + b"3\none\r\n",
        CHUNKED + b"3\r\nones\r\n",
        CHUNKED + b"11111111111111111\r\n",
        CHUNKED + b"3;" + b"x" * MAX_SILENT_BYTES,
        CHUNKED + b"0\r\n" + b"a: b\r\n" * MAX_SILENT_BYTES,
        b"HTTP/1.1 200 OK\r\na: " + b"x" * MAX_SILENT_BYTES,
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * (MAX_SILENT_BYTES // 20),
    ],
)
def test_a_malformed_response_is_an_error(data: bytes) -> None:
    with pytest.raises(MalformedResponse):
        fed(data, list(range(0, len(data), 1 + len(data) // 50)))


def test_the_error_names_an_unsupported_transfer_coding() -> None:
    with pytest.raises(MalformedResponse, match="'gzip' is not supported"):
        fed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nabc")


@pytest.mark.parametrize("rest", [b"more", SIZED, b"\x00"])
@pytest.mark.parametrize("cuts", [[], [len(SIZED)]], ids=["with-it", "after-it"])
def test_bytes_after_a_response_end_its_connection_and_change_nothing(rest: bytes, cuts: list[int]) -> None:
    response, body = fed(SIZED + rest, cuts)
    assert (body, response.is_complete, response.stays_open) == (b"hello", True, False)
    assert response.head == (200, [(b"Content-Length", b"5")])


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    response, body = fed(b"HTTP/1.1 200 OK\r\n\r\nall of it")
    assert (body, response.is_complete) == (b"all of it", False)
    response.end()
    assert (response.is_complete, response.stays_open) == (True, False)


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_some_responses_have_no_body(status: bytes) -> None:
    response, body = fed(b"HTTP/1.1 %s\r\n\r\n" % status)
    assert (body, response.is_complete, response.stays_open) == (b"", True, True)


def test_the_response_to_a_head_request_has_no_body() -> None:
    response, body = fed(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", method="HEAD")
    assert (body, response.is_complete) == (b"", True)


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 O", SIZED[:-1], CHUNKED, CHUNKED + b"3\r\none\r\n"])
def test_a_connection_that_ends_in_the_middle_is_an_error(data: bytes) -> None:
    response, _ = fed(data)
    with pytest.raises(MalformedResponse, match="in the middle"):
        response.end()
