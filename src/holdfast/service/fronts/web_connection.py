"""One HTTP/1.1 connection of uvicorn, parsed by llhttp: its bounds, the deadline of heads, refused requests.

llhttp finds where a request ends. This module refuses requests that another parser could read differently, and
holds the bytes after a request until its response. Touches the transport that it is given.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import httptools
import uvicorn
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from holdfast.service.fronts.connections import AcceptedConnection, ConnectionGate

T = TypeVar("T")

#: A request's target, headers and trailers together, and bytes without a complete header or a part of the body.
LARGEST_HEAD: Final = 65_536
#: Bytes that the parser gets at a time. It parses all requests in them, and each takes some KiB until its response.
_PIECE: Final = 4_096
#: The least that a header adds to a request: a colon, a space and the end of its line.
_HEADER_OVERHEAD: Final = 4
_NO_ROOM: Final = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_INVALID: Final = "Invalid HTTP request received."


class ArrivedRequest:
    """One request of a connection, for an application that can use more than ASGI has: `scope["extensions"]`.

    ASGI reports the body and the disconnect of the client to a coroutine, so a wait for the disconnect is a task
    for each request, and the body needs a deadline although most bodies arrive with their head.
    """

    #: The name of the extension.
    NAME: Final = "holdfast.request"

    def __init__(self, cycle: RequestResponseCycle, leaving: set[Callable[[], object]]) -> None:
        self._cycle = cycle
        self._leaving = leaving

    def body(self) -> bytes | None:
        """Return the whole body; None if it has not arrived, or the client has left."""
        return None if self._cycle.more_body or self._cycle.disconnected else bytes(self._cycle.body)

    async def unless_disconnected(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` in this task; a disconnect of the client cancels it and raises `ClientDisconnect`."""
        task = asyncio.current_task()
        assert task is not None
        left = False

        def leave() -> None:
            nonlocal left
            left = True
            task.cancel()

        # A connection that is not read does not notice its end.
        self._cycle.flow.resume_reading()
        self._leaving.add(leave)
        try:
            return await work
        except asyncio.CancelledError:
            if not left:
                raise
            task.uncancel()
            raise ClientDisconnect from None
        finally:
            self._leaving.discard(leave)


class WebConnection(HttpToolsProtocol):
    """A connection of `WebServer`."""

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        app_state: dict[str, Any],
        gate: ConnectionGate,
        accepted: AcceptedConnection,
    ) -> None:
        super().__init__(config, state, app_state)
        self.parser = _new_parser(self)
        self._gate = gate
        self._accepted = accepted
        self._head_timer: asyncio.TimerHandle | None = None
        #: Bytes that the parser does not have yet.
        self._received = bytearray()
        #: The parser is inside a head, or before the first one.
        self._in_head = True
        #: The parser is between two messages.
        self._between = True
        self._field_bytes = 0
        #: Bytes since the parser reported something.
        self._silent_bytes = 0
        #: The rest of the connection is not a request.
        self._broken = False
        #: Called at the end of the connection.
        self._leaving: set[Callable[[], object]] = set()

    # --- the transport -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._accepted.close = transport.abort
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        if self._broken or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._received += data
        self._parse()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.leave(self._accepted)
        self._stop_head_timer()
        self._received.clear()
        super().connection_lost(exc)
        for leave in tuple(self._leaving):
            leave()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._received:
            self._unset_keepalive_if_required()
            self._parse()
            self._watch_head()
        elif not self._between:
            self._watch_head()

    # --- parsing -------------------------------------------------------------------------------------------------

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _parse(self) -> None:
        """Parse the received bytes, up to a request that has to wait for the response to an earlier one."""
        while self._received and not self._broken:
            if self._between and self._is_answering:
                self.flow.pause_reading()
                return
            piece = bytes(self._received[:_PIECE])
            del self._received[:_PIECE]
            self._silent_bytes += len(piece)
            try:
                self.parser.feed_data(piece)
                if self._silent_bytes > LARGEST_HEAD:
                    raise httptools.HttpParserError("too many bytes without a header or a part of the body")
            except httptools.HttpParserError:
                self._refuse()
            except httptools.HttpParserUpgrade as upgrade:
                self._received[:0] = piece[upgrade.args[0] :]
                self._upgrade()

    def _refuse(self) -> None:
        """Close the connection; with a reply if the invalid request is the next one to be answered."""
        self._broken = True
        self._received.clear()
        if self._is_answering and (self._in_head or self._between):
            # Only a request after the one that is being answered is invalid.
            self.cycle.keep_alive = False
        elif self._is_answering and (self.cycle.response_started or self.pipeline):
            self.transport.close()
        else:
            self.send_400_response(_INVALID)

    def _upgrade(self) -> None:
        """Answer a request that llhttp takes for the end of HTTP on this connection; it has reported its head."""
        is_websocket = self._should_upgrade()
        if self.scope["method"] == "CONNECT" or (is_websocket and self._is_answering):
            self._refuse()
        elif is_websocket:
            self._received.clear()
            self._stop_head_timer()
            self.handle_websocket_upgrade()
        else:
            # Any other upgrade is ignored (RFC 9110, 7.8): some clients offer HTTP/2 with a POST. llhttp does not
            # read the body of such a request and would take it for the next request, so llhttp gets the head again
            # without the offer.
            line = f"{self.scope['method']} {self.url.decode()} HTTP/{self.parser.get_http_version()}\r\n".encode()
            kept = (each for each in self.headers if each[0] != b"upgrade")
            self._received[:0] = line + b"".join(b"%s: %s\r\n" % each for each in kept) + b"\r\n"
            self.parser = _new_parser(self)

    def handle_websocket_upgrade(self) -> None:
        self._broken = True
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            self.transport.write(_NO_ROOM)
            return self.transport.close()
        super().handle_websocket_upgrade()
        # The transport reports its end to the new protocol alone.
        protocol = self.transport.get_protocol()
        if isinstance(protocol, WebSocketConnection):
            protocol.leave = functools.partial(self._gate.leave, self._accepted)
        return None

    # --- reports of the parser -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_head, self._between = True, False
        self._field_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + _HEADER_OVERHEAD)
        # The application has the headers already when a trailer arrives.
        if self._in_head:
            super().on_header(name, value.rstrip(b" \t"))

    def _count(self, size: int) -> None:
        self._silent_bytes = 0
        self._field_bytes += size
        if self._field_bytes > LARGEST_HEAD:
            raise ValueError("the head is too long")

    def on_headers_complete(self) -> None:
        check_head(self.parser.get_http_version(), self.url, self.headers)
        self._in_head = False
        self._gate.complete(self._accepted)
        if self.parser.should_upgrade():
            # `_upgrade` follows.
            self.scope["method"] = self.parser.get_method().decode("ascii")
            return
        super().on_headers_complete()
        self.cycle.transport = _JoinedResponse(self.transport, self.loop)  # type: ignore[assignment]
        self.scope["extensions"] = {ArrivedRequest.NAME: ArrivedRequest(self.cycle, self._leaving)}  # type: ignore[dict-item]

    def on_body(self, body: bytes) -> None:
        self._silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._silent_bytes = 0
        self._between = True
        if not self.parser.should_upgrade():
            super().on_message_complete()

    # --- the deadline of a head ----------------------------------------------------------------------------------

    def _watch_head(self) -> None:
        """Start the deadline at the connection and at the first byte after a response; a complete head ends it."""
        if self._is_answering or self._broken:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._gate.limits.head_seconds, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _new_parser(connection: WebConnection) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(connection)
    # Bytes after a request with `Connection: close` are ignored; an error would come before its response.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def check_head(version: str, target: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Raise `ValueError` for a head that llhttp accepts and that is ambiguous; the names are in lower case.

    llhttp itself refuses bare line feeds, folded lines, spaces before a colon, a second `Content-Length`, and a
    `Content-Length` with a `Transfer-Encoding`.
    """
    if version not in ("1.0", "1.1"):
        raise ValueError("a version other than HTTP/1.0 and HTTP/1.1")
    # With a whole URL, `Host` could name another host.
    if (not target.startswith(b"/") and target != b"*") or b"#" in target:
        raise ValueError("the target is not a path")
    hosts = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            if value != b"0" and value.startswith(b"0"):
                raise ValueError("a number that some parsers read as octal")
        elif name == b"transfer-encoding" and (version == "1.0" or value.lower() != b"chunked"):
            raise ValueError("a coding that this server does not decode")
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        raise ValueError("not one host")


class _JoinedResponse:
    """The transport of one response: its head is sent with the first part of its body, or in the next step of the
    event loop. Each part would be a system call, and wake the client."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""
        self._is_begun = False

    def write(self, data: bytes) -> None:
        if not self._is_begun:
            self._is_begun = True
            self._head = data
            self._loop.call_soon(self._send_head)
        elif self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._send_head()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _send_head(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)


class WebSocketConnection(WebSocketsSansIOProtocol):
    """A connection that became a WebSocket; it still counts as a connection."""

    leave: Callable[[], None] | None = None

    def shutdown(self) -> None:
        # uvicorn would send a second close to a client that closed and has not read everything, which is an error.
        if self.conn.close_sent is not None:
            self.close_sent = True
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.leave is not None:
            self.leave()
        super().connection_lost(exc)
