"""Passes HTTP and WebSocket requests to a server that listens on a port of a sandbox.

Each request has a connection of its own, which the caller dials through the sandbox's channel, so the sandbox needs
no network and nothing listens on this machine. The caller decides which headers pass. Touches only that connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Final

import h11
import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.typing import Subprotocol

from holdfast.errors import PortUnavailable

HeaderList = list[tuple[bytes, bytes]]

#: Headers of one connection, which a proxy does not pass on (RFC 9110, 7.6.1).
_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_WEBSOCKET: Final = frozenset(
    {
        b"host",
        b"sec-websocket-key",
        b"sec-websocket-version",
        b"sec-websocket-extensions",
        b"sec-websocket-protocol",
    }
)
_READ_BYTES: Final = 64 * 1024
_OPEN_SECONDS: Final = 30.0
#: The head of a response: as much as uvicorn accepts of a request.
_HEAD_BYTES: Final = 64 * 1024


class PortFailed(Exception):
    """The server in the sandbox is not an HTTP server, broke the connection, or did not answer."""


def _same(headers: HeaderList) -> HeaderList:
    return headers


class PortUpstream(msgspec.Struct, frozen=True):
    """The way to a port of a sandbox, and the headers that change on it."""

    dial: Callable[[], Awaitable[socket.socket]]
    #: Names of request headers that the sandbox does not get, and headers that it gets instead.
    dropped: frozenset[bytes] = frozenset()
    added: tuple[tuple[bytes, bytes], ...] = ()
    change_response: Callable[[HeaderList], HeaderList] = _same
    #: How long the server in the sandbox may be silent. It may compute for long: longer than common proxies wait.
    answer_seconds: float = 600.0


def passed_headers(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes] = frozenset()) -> HeaderList:
    """Headers without those of the connection, those that `Connection` names, and `dropped`."""
    pairs = [(name.lower(), value) for name, value in headers]
    named = {word.strip().lower() for name, value in pairs if name == b"connection" for word in value.split(b",")}
    return [(name, value) for name, value in pairs if name not in _HOP_BY_HOP | dropped | named]


def _path(scope: Scope) -> bytes:
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return path + (b"?" + query if query else b"")


async def proxy_http(
    upstream: PortUpstream, scope: Scope, receive: Receive, send: Send, body: AsyncIterator[bytes]
) -> None:
    """Answer a request by the server in the sandbox; `body` yields the request's body from `receive`."""
    reader, writer = await asyncio.open_connection(sock=await upstream.dial())
    try:
        http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        headers = passed_headers(scope["headers"], upstream.dropped)
        length = any(name == b"content-length" for name, _ in headers)
        chunked = not length and any(name == b"transfer-encoding" for name, _ in scope["headers"])
        if chunked:
            headers.append((b"transfer-encoding", b"chunked"))
        request = h11.Request(
            method=scope["method"].encode(),
            target=_path(scope),
            headers=[*headers, *upstream.added, (b"connection", b"close")],
        )
        writer.write(http.send(request) or b"")
        sending = asyncio.ensure_future(_send_body(http, writer, body))
        try:
            await _Response(upstream, http, reader, receive, send, sending).copy()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
    except h11.ProtocolError as error:
        raise PortFailed(f"not an HTTP server: {error}") from None
    except OSError as error:
        raise PortFailed(f"the connection broke: {error}") from None
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _send_body(http: h11.Connection, writer: asyncio.StreamWriter, body: AsyncIterator[bytes]) -> None:
    async for piece in body:
        writer.write(http.send(h11.Data(data=piece)) or b"")
        await writer.drain()
    writer.write(http.send(h11.EndOfMessage()) or b"")
    await writer.drain()


class _Response:
    """The response to one request, from the sandbox to the client."""

    def __init__(
        self,
        upstream: PortUpstream,
        http: h11.Connection,
        reader: asyncio.StreamReader,
        receive: Receive,
        send: Send,
        sending: asyncio.Future[None],
    ) -> None:
        self._upstream = upstream
        self._http = http
        self._reader = reader
        self._receive = receive
        self._send = send
        self._sending = sending
        self._gone: asyncio.Future[Any] | None = None
        self._started = False

    async def copy(self) -> None:
        """Pass the response on. A client that leaves ends it, also while the server in the sandbox is silent."""
        try:
            while True:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    data = await self._read()
                    if data is None:
                        return
                    self._http.receive_data(data)
                elif isinstance(event, h11.Response):
                    headers = self._upstream.change_response(passed_headers(event.headers))
                    self._started = True
                    await self._send(
                        {"type": "http.response.start", "status": event.status_code, "headers": headers}
                    )
                elif isinstance(event, h11.Data):
                    await self._send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
                elif isinstance(event, h11.EndOfMessage):
                    await self._send({"type": "http.response.body", "body": b""})
                    return
                elif isinstance(event, h11.ConnectionClosed):
                    raise h11.RemoteProtocolError("closed without a response")
        finally:
            if self._gone is not None:
                self._gone.cancel()
                await asyncio.gather(self._gone, return_exceptions=True)

    async def _read(self) -> bytes | None:
        """Bytes of the server; None if the client has left, or after a silence in the middle of the response."""
        reading = asyncio.ensure_future(self._reader.read(_READ_BYTES))
        try:
            while not reading.done():
                if self._sending.done():
                    self._check_sent()
                    self._gone = self._gone or asyncio.ensure_future(self._receive())
                other = self._gone or self._sending
                done, _ = await asyncio.wait(
                    (reading, other), timeout=self._upstream.answer_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    if self._started:
                        return None
                    raise PortFailed(f"no answer for {self._upstream.answer_seconds:g} s")
                if self._gone is not None and self._gone.done() and not reading.done():
                    return None
            return reading.result()
        finally:
            if not reading.done():
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    def _check_sent(self) -> None:
        """Raise if the request's body was refused; a server may answer and close before it has read the body."""
        error = self._sending.exception()
        if error is not None and not isinstance(error, OSError | h11.ProtocolError):
            raise error


async def proxy_websocket(upstream: PortUpstream, scope: Scope, receive: Receive, send: Send, limit: int) -> None:
    """Connect a WebSocket of a client with the server in the sandbox; `limit` bounds a message."""
    await receive()  # websocket.connect
    headers = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in [*passed_headers(scope["headers"], upstream.dropped | _WEBSOCKET), *upstream.added]
    ]
    host = Headers(scope=scope).get("host", "sandbox")
    try:
        there = await connect(
            f"ws://{host}{_path(scope).decode('latin-1')}",
            sock=await upstream.dial(),
            additional_headers=headers,
            subprotocols=[Subprotocol(name) for name in scope.get("subprotocols", ())] or None,
            user_agent_header=None,
            compression=None,
            proxy=None,
            max_size=limit,
            open_timeout=_OPEN_SECONDS,
            ping_interval=None,
        )
    except (PortUnavailable, InvalidHandshake, InvalidURI, OSError, TimeoutError, ValueError):
        await send({"type": "websocket.close", "code": 1011, "reason": "the port has no WebSocket here"})
        return
    await send({"type": "websocket.accept", "subprotocol": there.subprotocol})
    up = asyncio.ensure_future(_to_sandbox(there, receive))
    down = asyncio.ensure_future(_to_client(there, send))
    try:
        await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        # The server in the sandbox may not answer a close frame.
        there.transport.abort()
        raise
    finally:
        for task in (up, down):
            task.cancel()
        await asyncio.gather(up, down, return_exceptions=True)
        await there.close()


async def _to_sandbox(upstream: ClientConnection, receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            await upstream.close(_close_code(message.get("code")))
            return
        data = message.get("bytes")
        await upstream.send(data if data is not None else message.get("text", ""))


async def _to_client(upstream: ClientConnection, send: Send) -> None:
    try:
        async for data in upstream:
            key = "text" if isinstance(data, str) else "bytes"
            await send({"type": "websocket.send", key: data})
    except ConnectionClosed:
        pass  # the code is below
    reason = upstream.close_reason or ""
    await send({"type": "websocket.close", "code": _close_code(upstream.close_code), "reason": reason})


def _close_code(code: int | None) -> int:
    """A code that may be sent: those of 1004 to 1006 and 1015 only describe a connection."""
    return code if code is not None and 1000 <= code < 5000 and code not in (1004, 1005, 1006, 1015) else 1000
