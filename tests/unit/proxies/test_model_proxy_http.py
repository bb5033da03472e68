"""The model proxy's side of HTTP, fed with raw bytes: what it understands, what it refuses, and how it answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, strategies as st

pytest.importorskip("h11", reason="h11 is not installed (extra `bridge`)")

from holdfast.proxies.model import http_connection
from holdfast.proxies.model.http_connection import Answering, HttpConnection, ProxyState
from holdfast.wire.http_messages import HttpRequest

Answer = Callable[[HttpRequest, HttpConnection], Coroutine[object, object, None] | None]

LIMIT = 1000


async def until(condition: Callable[[], bool]) -> None:
    """The proxy runs in this loop: each turn lets it go on."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def send(client: HttpConnection, data: bytes) -> None:
    """Send a piece of an answer, and wait until the client has read enough for more."""
    client.send(data)
    client.flush()
    writable = asyncio.Event()
    client.when_writable(writable.set)
    await writable.wait()


class Seen:
    """Records the requests of the other side, and can hold answers back."""

    def __init__(self) -> None:
        self.requests: list[HttpRequest] = []
        self.arrived = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.go_on = asyncio.Event()

    async def echo(self, request: HttpRequest, client: HttpConnection) -> None:
        self.requests.append(request)
        client.respond(200, request.path.encode())

    async def wait(self, request: HttpRequest, client: HttpConnection) -> None:
        self.requests.append(request)
        self.arrived.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        client.respond(200, b"{}")


@asynccontextmanager
async def listening(answer: Answer, *, max_connections: int = 10) -> AsyncIterator[tuple[ProxyState, int]]:
    def begin(request: HttpRequest, client: HttpConnection) -> Answering | None:
        begun = answer(request, client)
        return None if begun is None else client.run(begun)

    shared = ProxyState(begin, max_connections=max_connections, max_body_bytes=LIMIT)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: HttpConnection(shared), "127.0.0.1", 0)
    try:
        yield shared, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in tuple(shared.connections):
            connection.abort()
        await until(lambda: not shared.connections)


async def exchange(port: int, sent: bytes) -> bytes:
    """Everything that comes back until the proxy closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        return await reader.read()
    finally:
        writer.close()


async def head_of(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The next answer, which has a content-length."""
    head = await head_of(reader)
    length = next(int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: "))
    return int(head[9:12]), await reader.readexactly(length)


def error_in(answer: bytes) -> str:
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert body["type"] == "error"
    assert isinstance(body["error"]["message"], str)
    return str(body["error"]["message"])


CLOSE = b"Connection: close\r\n\r\n"


async def test_a_request_arrives_whole_without_what_is_about_the_connection() -> None:
    seen = Seen()
    async with listening(seen.echo) as (_, port):
        await exchange(
            port,
            b"POST /v1/chat%20x?beta=true&x HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\nX-Own: 1\r\n"
            b"Keep-Alive: 5\r\nContent-Length: 7\r\nConnection: close, X-Own\r\n\r\n" + b'{"a":1}',
        )
    assert seen.requests == [
        HttpRequest("POST", "/v1/chat%20x", "beta=true&x", (("authorization", "Bearer k"),), b'{"a":1}')
    ]


@pytest.mark.parametrize("size", [1, 7, 40])
async def test_a_chunked_body_is_put_together_however_it_arrives(size: int) -> None:
    seen = Seen()
    message = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    message += b"5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\nTrailer: 1\r\n\r\n"
    async with listening(seen.echo) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(message), size):
            writer.write(message[at : at + size])
            await asyncio.sleep(0)
        await reader.read()
        writer.close()
    assert [request.body for request in seen.requests] == [b"hello world"]


async def test_a_target_with_a_host_is_taken_as_its_path() -> None:
    seen = Seen()
    async with listening(seen.echo) as (_, port):
        await exchange(port, b"GET http://api.example/v1/models?x HTTP/1.1\r\nHost: api.example\r\n" + CLOSE)
    assert (seen.requests[0].path, seen.requests[0].query) == ("/v1/models", "x")


async def test_requests_share_a_connection_and_are_answered_in_order() -> None:
    seen = Seen()
    pipelined = b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number for number in range(20))
    async with listening(seen.echo) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(pipelined)
        assert [(await answer_of(reader))[1] for _ in range(20)] == [b"/%d" % number for number in range(20)]
        writer.write(b"GET /last HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await answer_of(reader) == (200, b"/last")
        writer.close()


async def test_what_is_sent_ahead_waits_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "AHEAD_BYTES", 100)
    seen = Seen()
    request = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
    async with listening(seen.wait) as (shared, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        await seen.arrived.wait()
        writer.write(request * 50)
        (connection,) = shared.connections
        await until(lambda: connection._ahead_bytes > 100)
        assert not connection._transport.is_reading()
        seen.go_on.set()
        for _ in range(51):
            assert await answer_of(reader) == (200, b"{}")
        writer.close()


async def test_a_client_that_asks_first_is_told_to_go_on() -> None:
    seen = Seen()
    async with listening(seen.echo) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert (await head_of(reader)).startswith(b"HTTP/1.1 100 ")
        writer.write(b"{}")
        assert await answer_of(reader) == (200, b"/x")
        writer.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnot a size\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000, 431),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 1001\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001, 413),
    ],
)
async def test_a_request_that_is_refused_is_told_why_and_others_go_on(sent: bytes, status: int) -> None:
    seen = Seen()
    async with listening(seen.echo) as (shared, port):
        answer = await exchange(port, sent)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"\r\nconnection: close\r\n" in answer.lower()
        assert error_in(answer)
        assert seen.requests == []
        assert (await exchange(port, b"GET /on HTTP/1.1\r\nHost: x\r\n" + CLOSE)).endswith(b"/on")
        assert shared.held_bytes == 0


async def test_a_body_of_just_the_limit_is_taken() -> None:
    seen = Seen()
    async with listening(seen.echo) as (_, port):
        await exchange(
            port, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%s" % (LIMIT, CLOSE) + b"x" * LIMIT
        )
    assert [len(request.body) for request in seen.requests] == [LIMIT]


async def test_bodies_of_all_connections_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "MAX_HELD_BYTES", 1500)
    seen = Seen()
    async with listening(seen.echo) as (shared, port):
        _, first = await asyncio.open_connection("127.0.0.1", port)
        first.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" + b"x" * 999)
        await until(lambda: shared.held_bytes >= 999)
        answer = await exchange(port, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" + b"x" * 999)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert shared.held_bytes == 999
        first.close()
        await until(lambda: not shared.held_bytes)


async def test_one_connection_too_many_is_refused() -> None:
    seen = Seen()
    async with listening(seen.echo, max_connections=1) as (shared, port):
        _, first = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: bool(shared.connections))
        answer = await exchange(port, b"")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert "1 connections" in error_in(answer)
        # A refused connection that is still open takes no place; only so many get an answer.
        refused = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        answers = [await reader.read() for reader, _ in refused]
        assert sum(answer.startswith(b"HTTP/1.1 503 ") for answer in answers) == 32
        assert answers.count(b"") == 8
        for _, writer in refused:
            writer.close()
        first.close()
        await until(lambda: not shared.connections)
        assert (await exchange(port, b"GET /on HTTP/1.1\r\nHost: x\r\n" + CLOSE)).endswith(b"/on")


@pytest.mark.parametrize(
    ("name", "sent", "answered"),
    [
        ("HEAD_SECONDS", b"GET / HT", b"HTTP/1.1 408 "),
        ("BODY_SECONDS", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nabc", b"HTTP/1.1 408 "),
        ("IDLE_SECONDS", b"", b""),
    ],
)
async def test_a_request_that_takes_too_long_ends(
    name: str, sent: bytes, answered: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, name, 0.01)
    monkeypatch.setattr(http_connection, "LINGER_SECONDS", 0.01)
    seen = Seen()
    async with listening(seen.echo) as (shared, port):
        answer = await exchange(port, sent)
        assert answer[: len(answered)] == answered
        assert bool(answer) == bool(answered)
        await until(lambda: not shared.connections)
    assert seen.requests == []


async def test_answers_without_a_wait_to_many_requests_of_one_write_take_turns() -> None:
    def answer(request: HttpRequest, client: HttpConnection) -> None:
        client.fail(405, request.path)

    async with listening(answer) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", port)
        count = 3_000
        writer.write(b"".join(b"X /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number for number in range(count)))
        other_writer.write(b"X /other HTTP/1.1\r\nHost: x\r\n\r\n")
        for number in range(count):
            status, body = await answer_of(reader)
            assert (status, json.loads(body)["error"]["message"]) == (405, f"/{number}")
        assert (await answer_of(other_reader))[0] == 405
        writer.close()
        other_writer.close()


async def test_a_client_that_goes_cancels_its_request() -> None:
    seen = Seen()
    async with listening(seen.wait) as (shared, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await seen.arrived.wait()
        writer.close()
        await seen.cancelled.wait()
        assert shared.connections == set()


async def test_pieces_leave_as_they_come_in_chunks() -> None:
    more = asyncio.Event()

    async def stream(request: HttpRequest, client: HttpConnection) -> None:
        client.begin(200, (("content-type", "text/event-stream"), ("transfer-encoding", "gzip")))
        await send(client, b"data: 1\n\n")
        await more.wait()
        await send(client, b"")
        await send(client, b"data: 2\n\n")
        client.end()

    async with listening(stream) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await head_of(reader)
        assert b"\r\ntransfer-encoding: chunked\r\n" in head.lower()
        assert b"gzip" not in head
        assert await reader.readexactly(14) == b"9\r\ndata: 1\n\n\r\n"
        more.set()
        assert await reader.readexactly(19) == b"9\r\ndata: 2\n\n\r\n0\r\n\r\n"
        writer.close()


async def test_an_old_client_gets_the_body_until_the_end() -> None:
    async def stream(request: HttpRequest, client: HttpConnection) -> None:
        client.begin(200, ())
        await send(client, b"one")
        await send(client, b"two")
        client.end()

    async with listening(stream) as (_, port):
        answer = await exchange(port, b"GET / HTTP/1.0\r\n\r\n")
        assert answer.partition(b"\r\n\r\n")[2] == b"onetwo"


@pytest.mark.parametrize(("method", "status"), [(b"HEAD", 200), (b"GET", 204), (b"GET", 304)])
async def test_an_answer_that_has_no_body_gets_none(method: bytes, status: int) -> None:
    async def answer(request: HttpRequest, client: HttpConnection) -> None:
        client.begin(status, () if status == 204 else (("content-length", "4"),))
        await send(client, b"body")
        client.end()

    async with listening(answer) as (_, port):
        reported = await exchange(port, method + b" / HTTP/1.1\r\nHost: x\r\n" + CLOSE)
        assert reported.startswith(b"HTTP/1.1 %d " % status)
        assert reported.partition(b"\r\n\r\n")[2] == b""


async def test_a_client_that_does_not_read_stops_the_answer() -> None:
    sent = 0

    async def stream(request: HttpRequest, client: HttpConnection) -> None:
        nonlocal sent
        client.begin(200, (("content-length", str(1000 * 65_536)),))
        for _ in range(1000):
            await send(client, b"x" * 65_536)
            sent += 65_536
            await asyncio.sleep(0)
        client.end()

    async with listening(stream) as (shared, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: bool(shared.connections))
        (connection,) = shared.connections
        await until(lambda: not connection._is_writable)
        stopped_at = sent
        assert stopped_at < 1000 * 65_536
        await head_of(reader)
        await reader.readexactly(1000 * 65_536)
        assert sent == 1000 * 65_536
        writer.close()


@pytest.mark.parametrize(("length", "arrives"), [(3, b""), (5, b"four")])
async def test_an_answer_of_another_length_than_it_said_is_broken_off(length: int, arrives: bytes) -> None:
    async def answer(request: HttpRequest, client: HttpConnection) -> None:
        client.begin(200, (("content-length", str(length)),))
        await send(client, b"four")
        client.end()

    async with listening(answer) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"content-length: %d" % length in head
        assert body == arrives
        writer.close()


@pytest.mark.parametrize("bad", [(99, ()), (200, (("na me", "x"),)), (200, (("name", "x\r\ny: 1"),))])
async def test_a_head_that_http_does_not_allow_is_a_bad_gateway(
    bad: tuple[int, tuple[tuple[str, str], ...]],
) -> None:
    async def answer(request: HttpRequest, client: HttpConnection) -> None:
        client.begin(*bad)

    async with listening(answer) as (_, port):
        reported = await exchange(port, b"GET / HTTP/1.1\r\nHost: x\r\n" + CLOSE)
        assert reported.startswith(b"HTTP/1.1 502 ")
        assert error_in(reported)


PARTS = st.sampled_from(
    [
        *(b"GET / HTTP/1.1\r\n", b"POST /x HTTP/1.1\r\n", b"HEAD / HTTP/1.0\r\n", b"CONNECT a:1 HTTP/1.1\r\n"),
        *(
            b"Host: x\r\n",
            b"Content-Length: 5\r\n",
            b"Content-Length: 99999\r\n",
            b"Transfer-Encoding: chunked\r\n",
        ),
        *(b"Connection: close\r\n", b"Connection: upgrade\r\nUpgrade: websocket\r\n", b"Expect: 100-continue\r\n"),
        *(b"\r\n", b"\r\n\r\n", b"hello", b"5\r\nhello\r\n", b"0\r\n\r\n", b"\x00\xff", b" ", b":"),
    ]
)


@given(st.lists(st.lists(PARTS | st.binary(max_size=20), max_size=8), max_size=6))
def test_whatever_is_sent_the_proxy_goes_on(sent: list[list[bytes]]) -> None:
    async def run() -> None:
        seen = Seen()
        async with listening(seen.echo) as (shared, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for parts in sent:
                writer.write(b"".join(parts))
                await asyncio.sleep(0)
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                answer = await reader.read()
                assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
            writer.close()
            assert (await exchange(port, b"GET /on HTTP/1.1\r\nHost: x\r\n" + CLOSE)).endswith(b"/on")
            await until(lambda: not shared.connections)
            assert (shared.held_bytes, shared.lingering) == (0, 0)

    asyncio.run(run())


async def test_a_bug_fails_one_request(caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen()

    async def answer(request: HttpRequest, client: HttpConnection) -> None:
        if request.path == "/bug":
            raise ValueError("secret")
        await seen.echo(request, client)

    async with listening(answer) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /bug HTTP/1.1\r\nHost: x\r\n\r\nGET /on HTTP/1.1\r\nHost: x\r\n\r\n")
        status, body = await answer_of(reader)
        assert status == 500
        assert b"secret" not in body
        assert await answer_of(reader) == (200, b"/on")
        writer.close()
    assert "GET /bug failed" in caplog.text
