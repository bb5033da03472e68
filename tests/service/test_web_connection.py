"""One HTTP connection: requests that are refused because parsers differ on them, and the bounds of the others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from holdfast.service.fronts.connections import ConnectionLimits
from holdfast.service.fronts.web_connection import LARGEST_HEAD, _JoinedResponse
from holdfast.service.fronts.web_server import WebServer

HEAD = b"POST /x HTTP/1.1\r\nHost: a\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
#: Short, and still longer than a client on this machine takes for a whole head under load.
LIMITS = ConnectionLimits(most=64, by_address=48, half_open=8, head_seconds=1.0)


class Echo:
    """An application that returns the body of each request; `/early` gets its response before the body."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.arrived: asyncio.Queue[str] = asyncio.Queue()
        self.bodies: list[bytes] = []
        #: A request for `/wait` is answered after this.
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        self.arrived.put_nowait(scope["path"])
        if scope["path"] == "/wait":
            await self.go_on.wait()
        body, more = b"", scope["path"] != "/early"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
        self.bodies.append(body)
        reply = scope["path"].encode() + b" " + body
        fields = [(b"content-length", str(len(reply)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        await send({"type": "http.response.body", "body": reply})


@asynccontextmanager
async def served(echo: Echo, **options: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = WebServer(echo, LIMITS, None, **options)
    await server.open(listener)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await server.aclose(1.0)


async def answer(reader: asyncio.StreamReader) -> bytes:
    """One response with a length: its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200 "), head
    return await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))


async def rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


REFUSED = {
    "length and coding": HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "coding and length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "two equal lengths": HEAD + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "two lengths": HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "a list of lengths": HEAD + b"Content-Length: 3, 3\r\n\r\nabc",
    "a length with zeros": HEAD + b"Content-Length: 010\r\n\r\nabcdefghij",
    "a length with a sign": HEAD + b"Content-Length: +3\r\n\r\nabc",
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\nabc",
    "a length in two words": HEAD + b"Content-Length: 3 3\r\n\r\nabc",
    "an empty length": HEAD + b"Content-Length: \r\n\r\nabc",
    "a hexadecimal length": HEAD + b"Content-Length: 0x3\r\n\r\nabc",
    "a length with an underscore": HEAD + b"Content-Length: 1_0\r\n\r\nabcdefghij",
    "a length of 80 bits": HEAD + b"Content-Length: 99999999999999999999999\r\n\r\nabc",
    "line feeds": b"POST /x HTTP/1.1\nHost: a\nContent-Length: 0\n\n",
    "a line feed after a header": b"POST /x HTTP/1.1\r\nHost: a\nContent-Length: 0\r\n\r\n",
    "a line feed as the last line": HEAD + b"Content-Length: 0\r\n\n",
    "a carriage return": b"POST /x HTTP/1.1\r\nHost: a\rContent-Length: 0\r\n\r\n",
    "a folded header": HEAD + b"X: a\r\n b\r\nContent-Length: 0\r\n\r\n",
    "a folded length": HEAD + b"Content-Length:\r\n 3\r\n\r\nabc",
    "a folded coding": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "a first line that is folded": b"POST /x HTTP/1.1\r\n Host: a\r\n\r\n",
    "a space before the colon": HEAD + b"Content-Length : 3\r\n\r\nabc",
    "a space in a name": HEAD + b"Content Length: 3\r\n\r\nabc",
    "a header without a name": HEAD + b": 3\r\n\r\nabc",
    "a header without a colon": HEAD + b"Content-Length\r\n\r\n",
    "NUL in a value": HEAD + b"X: a\0b\r\n\r\n",
    "NUL in a name": HEAD + b"X\0Y: a\r\n\r\n",
    "a coding twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a coding after chunked": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "a coding before chunked": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "another coding": HEAD + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "almost chunked": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked after a control character": HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "chunked in HTTP/1.0": b"POST /x HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "HTTP/0.9": b"GET /x\r\n\r\n",
    "HTTP/0.9 with a version": b"GET /x HTTP/0.9\r\nHost: a\r\n\r\n",
    "HTTP/1.2": b"GET /x HTTP/1.2\r\nHost: a\r\n\r\n",
    "HTTP/2.0": b"GET /x HTTP/2.0\r\nHost: a\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a space after the version": b"GET /x HTTP/1.1 \r\nHost: a\r\n\r\n",
    "a space in the target": b"GET /x y HTTP/1.1\r\nHost: a\r\n\r\n",
    "a whole URL": b"GET http://b/x HTTP/1.1\r\nHost: a\r\n\r\n",
    "a fragment": b"GET /x#y HTTP/1.1\r\nHost: a\r\n\r\n",
    "a tunnel": b"CONNECT b:80 HTTP/1.1\r\nHost: a\r\n\r\n",
    "no host": b"GET /x HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /x HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "a method in lower case": b"get /x HTTP/1.1\r\nHost: a\r\n\r\n",
    "a head that is too long": HEAD + b"X: " + LARGEST_HEAD * b"a" + b"\r\n\r\n",
    "a head with too many headers": HEAD + (LARGEST_HEAD // 5) * b"a: \r\n" + b"\r\n",
    "a target that is too long": b"GET /" + LARGEST_HEAD * b"a",
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("pieces", [1, 20])
async def test_a_head_that_parsers_read_differently_is_refused(name: str, pieces: int) -> None:
    echo = Echo()
    data = REFUSED[name] + b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
    async with served(echo) as (reader, writer):
        size = -(-len(data) // pieces)
        for begin in range(0, len(data), size):
            writer.write(data[begin : begin + size])
            await asyncio.sleep(0)
        reply = await rest(reader)
    # A connection that is closed with unread bytes may lose the reply.
    assert reply.startswith(b"HTTP/1.1 400 ") or not reply, reply
    assert reply.count(b"HTTP/1.1") <= 1
    assert not echo.scopes


BAD_CHUNKS = {
    "a space after the size": b"3 \r\nabc\r\n0\r\n\r\n",
    "a space before the size": b" 3\r\nabc\r\n0\r\n\r\n",
    "a prefix": b"0x3\r\nabc\r\n0\r\n\r\n",
    "a sign": b"+3\r\nabc\r\n0\r\n\r\n",
    "65 bits": b"10000000000000003\r\nabc\r\n0\r\n\r\n",
    "line feeds": b"3\nabc\n0\n\n",
    "a line feed after an extension": b"3;a\nabc\r\n0\r\n\r\n",
    "an open quote": b'3;a="b\r\nabc\r\n0\r\n\r\n',
    "more data than its size": b"3\r\nabcd\r\n0\r\n\r\n",
    "no line end after the data": b"3\r\nabc0\r\n\r\n",
    "a length as a trailer": b"3\r\nabc\r\n0\r\nContent-Length: 50\r\n\r\n",
    "a coding as a trailer": b"3\r\nabc\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a trailer with a line feed": b"3\r\nabc\r\n0\r\nX: y\n\r\n",
    "a long trailer": b"3\r\nabc\r\n0\r\nX: " + 4 * LARGEST_HEAD * b"y",
    "a long extension": b"3;" + 4 * LARGEST_HEAD * b"y",
    "a size of many zeros": 4 * LARGEST_HEAD * b"0",
}


@pytest.mark.parametrize("name", BAD_CHUNKS)
async def test_a_body_that_parsers_read_differently_ends_the_connection(name: str) -> None:
    echo = Echo()
    async with served(echo) as (reader, writer):
        writer.write(CHUNKED + BAD_CHUNKS[name] + b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n")
        reply = await rest(reader)
    assert reply.startswith(b"HTTP/1.1 400 ") or not reply, reply
    assert not echo.bodies
    assert [scope["path"] for scope in echo.scopes] == ["/x"]


async def test_bodies_and_headers_of_whole_requests() -> None:
    echo = Echo()
    async with served(echo) as (reader, writer):
        writer.write(HEAD + b"X-Padded: \t a b \t\r\nContent-Length: 3 \r\n\r\nabc")
        assert await answer(reader) == b"/x abc"
        writer.write(CHUNKED + b'3;a=b;c="d"\r\nabc\r\n0002\r\nde\r\n0\r\nX-Padded: trailer\r\n\r\n')
        assert await answer(reader) == b"/x abcde"
        writer.write(b"\r\nGET /%41?b=%43 HTTP/1.1\r\nHost: a\r\n\r\n")
        assert await answer(reader) == b"/A "
        for byte in HEAD + b"Content-Length: 3\r\n\r\nabc":
            writer.write(bytes([byte]))
            await writer.drain()
        assert await answer(reader) == b"/x abc"
    padded = [value for scope in echo.scopes for name, value in scope["headers"] if name == b"x-padded"]
    assert padded == [b"a b"]
    assert [scope["query_string"] for scope in echo.scopes] == [b"", b"", b"b=%43", b""]


async def test_a_body_is_not_a_request_after_an_offer_of_another_protocol() -> None:
    """llhttp ends a message with an `Upgrade` after its head, whatever its length says."""
    echo = Echo()
    inner = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    head = HEAD + offer + b"Content-Length: %d\r\n\r\n" % len(inner)
    async with served(echo) as (reader, writer):
        writer.write(head + inner)
        assert await answer(reader) == b"/x " + inner
        writer.write(head)
        assert [await echo.arrived.get() for _ in range(2)] == ["/x", "/x"]
        writer.write(inner)
        assert await answer(reader) == b"/x " + inner
        writer.write(CHUNKED.replace(b"Host", offer + b"Host") + b"3\r\nabc\r\n0\r\n\r\n" + head + inner)
        assert await answer(reader) == b"/x abc"
        assert await answer(reader) == b"/x " + inner
    assert [scope["path"] for scope in echo.scopes] == 4 * ["/x"]
    assert not any(name == b"upgrade" for scope in echo.scopes for name, _ in scope["headers"])


async def test_requests_wait_for_the_responses_to_earlier_ones() -> None:
    echo = Echo()
    requests = 2_000
    async with served(echo) as (reader, writer):
        writer.write(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n")
        for number in range(requests):
            writer.write(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % number)
        assert await echo.arrived.get() == "/wait"
        assert echo.arrived.empty()
        echo.go_on.set()
        assert await answer(reader) == b"/wait "
        assert [await answer(reader) for _ in range(requests)] == [b"/%d " % number for number in range(requests)]


async def test_an_invalid_request_does_not_replace_the_response_to_the_one_before() -> None:
    echo = Echo()
    async with served(echo) as (reader, writer):
        writer.write(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\nGET /smuggled\r\n\r\n")
        assert await echo.arrived.get() == "/wait"
        echo.go_on.set()
        assert await answer(reader) == b"/wait "
        assert await rest(reader) == b""
    assert [scope["path"] for scope in echo.scopes] == ["/wait"]


async def test_a_websocket_does_not_begin_before_the_response_to_an_earlier_request() -> None:
    echo = Echo()
    key = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    offer = b"Connection: Upgrade\r\nUpgrade: websocket\r\n" + key
    async with served(echo, largest_message=1_000) as (reader, writer):
        writer.write(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n")
        writer.write(
            b"GET /x HTTP/1.1\r\nHost: a\r\n" + offer + b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        assert await echo.arrived.get() == "/wait"
        echo.go_on.set()
        assert await answer(reader) == b"/wait "
        assert await rest(reader) == b""
    assert len(echo.scopes) == 1


async def test_bytes_after_the_last_request_are_ignored() -> None:
    echo = Echo()
    async with served(echo) as (reader, writer):
        writer.write(
            HEAD + b"Connection: close\r\nContent-Length: 0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
        )
        assert await answer(reader) == b"/x "
        assert await rest(reader) == b""
    assert [scope["path"] for scope in echo.scopes] == ["/x"]


@pytest.mark.parametrize("more", [b"\r\n", b"POST /x HTTP/1.1\r\n"])
async def test_bytes_between_requests_begin_the_deadline_of_the_next_head(more: bytes) -> None:
    async with served(Echo()) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 0\r\n\r\n")
        assert await answer(reader) == b"/x "
        writer.write(more)
        assert await rest(reader) == b""


async def test_an_empty_line_during_a_response_begins_a_deadline_at_its_end() -> None:
    echo = Echo()
    async with served(echo) as (reader, writer):
        writer.write(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n")
        assert await echo.arrived.get() == "/wait"
        writer.write(b"\r\n")
        # The server has read the empty line when it has accepted another connection and answered there.
        await writer.drain()
        address = writer.get_extra_info("peername")
        other, others = await asyncio.open_connection(*address)
        others.write(HEAD + b"Content-Length: 0\r\n\r\n")
        assert await answer(other) == b"/x "
        others.close()
        echo.go_on.set()
        assert await answer(reader) == b"/wait "
        assert await rest(reader) == b""


async def test_a_body_that_is_late_for_its_response_has_a_deadline() -> None:
    async with served(Echo()) as (reader, writer):
        writer.write(HEAD.replace(b"/x", b"/early") + b"Content-Length: 3\r\n\r\na")
        assert await answer(reader) == b"/early "
        assert await rest(reader) == b""


class RecordedTransport:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


async def test_a_head_is_sent_with_the_body_or_soon_after() -> None:
    transport: Any = RecordedTransport()
    loop = asyncio.get_running_loop()
    whole = _JoinedResponse(transport, loop)
    for part in (b"head ", b"body ", b"more"):
        whole.write(part)
    assert transport.written == [b"head body ", b"more"]
    stream = _JoinedResponse(transport, loop)
    stream.write(b"head")
    await asyncio.sleep(0)
    assert transport.written[2:] == [b"head"]
    last = _JoinedResponse(transport, loop)
    last.write(b"head")
    last.close()
    await asyncio.sleep(0)
    assert transport.written[3:] == [b"head"]
    assert transport.closed
