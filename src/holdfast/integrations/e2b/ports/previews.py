"""Previews: HTTP and WebSocket requests to a port of a sandbox, passed to the server that listens there.

Each request has a connection of its own through the sandbox's channel, so the sandbox needs no network and nothing
listens on this machine. Tokens of this server are removed from what the sandbox sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

import h11
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.typing import Subprotocol

from holdfast.client.ports.port_dial import dial_port
from holdfast.client.ports.ports import parse_address
from holdfast.client.remote import RemoteExec
from holdfast.errors import InvalidParams, PortUnavailable
from holdfast.integrations.e2b.envd.connect_protocol import body_pieces
from holdfast.integrations.e2b.open_sandbox import OpenSandbox
from holdfast.integrations.e2b.problems import Problem

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
#: Headers for this server alone.
_OURS: Final = frozenset(
    {
        b"e2b-sandbox-id",
        b"e2b-sandbox-port",
        b"e2b-traffic-access-token",
        b"x-access-token",
        b"x-api-key",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
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
#: A server in a sandbox may compute for long before it answers; longer than common proxies wait.
_ANSWER_SECONDS: Final = 600.0
_OPEN_SECONDS: Final = 30.0


async def dial(opened: OpenSandbox, port: int) -> socket.socket:
    """A connection to a port of the sandbox; 502 if nothing listens there."""
    api = opened.box.api
    if not isinstance(api, RemoteExec):
        raise InvalidParams("previews need a server in the sandbox")
    try:
        return await dial_port(api.connection, parse_address(port))
    except PortUnavailable:
        # The SDKs recognize "port is not open".
        raise Problem(
            502, "unavailable", f"The sandbox {opened.ref.id} is running but port is not open: {port}"
        ) from None


def passed_headers(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """Headers without those of the connection, those that `Connection` names, and `dropped`."""
    pairs = [(name.lower(), value) for name, value in headers]
    named = {word.strip().lower() for name, value in pairs if name == b"connection" for word in value.split(b",")}
    return [(name, value) for name, value in pairs if name not in _HOP_BY_HOP | dropped | named]


def _forwarded(scope: Scope) -> list[tuple[bytes, bytes]]:
    headers = Headers(scope=scope)
    client = scope.get("client")
    return [
        (b"x-forwarded-for", (client[0] if client else "").encode()),
        (b"x-forwarded-host", headers.get("host", "").encode("latin-1")),
        (b"x-forwarded-proto", b"https" if scope["scheme"] in ("https", "wss") else b"http"),
    ]


def _path(scope: Scope) -> bytes:
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return path + (b"?" + query if query else b"")


async def proxy_http(
    opened: OpenSandbox, port: int, scope: Scope, receive: Receive, send: Send, idle_seconds: float
) -> None:
    """Answer a request by the server in the sandbox."""
    sock = await dial(opened, port)
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        upstream = h11.Connection(h11.CLIENT)
        headers = passed_headers(scope["headers"], _OURS)
        length = any(name == b"content-length" for name, _ in headers)
        chunked = not length and any(name == b"transfer-encoding" for name, _ in scope["headers"])
        if chunked:
            headers.append((b"transfer-encoding", b"chunked"))
        request = h11.Request(
            method=scope["method"].encode(),
            target=_path(scope),
            headers=[*headers, *_forwarded(scope), (b"connection", b"close")],
        )
        writer.write(upstream.send(request) or b"")
        sending = asyncio.ensure_future(_send_body(upstream, writer, body_pieces(receive, idle_seconds)))
        try:
            await _send_response(scope, upstream, reader, send, sending, receive)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
    except h11.ProtocolError as error:
        raise Problem(502, "unavailable", f"port {port}: not an HTTP server: {error}") from None
    except OSError as error:
        raise Problem(502, "unavailable", f"port {port}: the connection broke: {error}") from None
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _send_body(upstream: h11.Connection, writer: asyncio.StreamWriter, body: AsyncIterator[bytes]) -> None:
    async for piece in body:
        writer.write(upstream.send(h11.Data(data=piece)) or b"")
        await writer.drain()
    writer.write(upstream.send(h11.EndOfMessage()) or b"")
    await writer.drain()


async def _send_response(
    scope: Scope,
    upstream: h11.Connection,
    reader: asyncio.StreamReader,
    send: Send,
    sending: asyncio.Future[None],
    receive: Receive,
) -> None:
    """Pass the response on. A client that leaves ends it, also while the server in the sandbox is silent."""
    gone: asyncio.Future[Any] | None = None
    try:
        while True:
            event = upstream.next_event()
            if event is h11.NEED_DATA:
                if gone is None and sending.done() and not sending.cancelled() and sending.exception() is None:
                    gone = asyncio.ensure_future(receive())
                reading = asyncio.ensure_future(reader.read(_READ_BYTES))
                waited = {reading} if gone is None else {reading, gone}
                await asyncio.wait(waited, timeout=_ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
                    return
                upstream.receive_data(reading.result())
            elif isinstance(event, h11.Response):
                headers = passed_headers(event.headers, frozenset())
                await send({"type": "http.response.start", "status": event.status_code, "headers": headers})
            elif isinstance(event, h11.Data):
                await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
            elif isinstance(event, h11.EndOfMessage):
                await send({"type": "http.response.body", "body": b""})
                return
            elif isinstance(event, h11.ConnectionClosed):
                raise h11.RemoteProtocolError("closed without a response")
    finally:
        if gone is not None:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)


async def proxy_websocket(
    opened: OpenSandbox, port: int, scope: Scope, receive: Receive, send: Send, limit: int
) -> None:
    """Connect a WebSocket of a client with the server in the sandbox."""
    await receive()  # websocket.connect
    headers = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in [*passed_headers(scope["headers"], _OURS | _WEBSOCKET), *_forwarded(scope)]
    ]
    host = Headers(scope=scope).get("host", "sandbox")
    try:
        sock = await dial(opened, port)
        upstream = await connect(
            f"ws://{host}{_path(scope).decode('latin-1')}",
            sock=sock,
            additional_headers=headers,
            subprotocols=[Subprotocol(name) for name in scope.get("subprotocols", ())] or None,
            user_agent_header=None,
            compression=None,
            proxy=None,
            max_size=limit,
            open_timeout=_OPEN_SECONDS,
            ping_interval=None,
        )
    except (Problem, InvalidHandshake, OSError, TimeoutError, ValueError):
        await send({"type": "websocket.close", "code": 1011, "reason": f"port {port} has no WebSocket here"})
        return
    await send({"type": "websocket.accept", "subprotocol": upstream.subprotocol})
    up = asyncio.ensure_future(_to_sandbox(upstream, receive))
    down = asyncio.ensure_future(_to_client(upstream, send))
    try:
        await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (up, down):
            task.cancel()
        await asyncio.gather(up, down, return_exceptions=True)
        await upstream.close()


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
