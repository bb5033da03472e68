"""uvicorn behind a `ConnectionGate`: connections count from `accept(2)` on, and request heads have a deadline.

Touches the listening socket that it is given, on the running event loop; handles no signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

import h11
import uvicorn
from msgspec.structs import replace
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from holdfast.service.fronts.connections import AcceptedConnection, ConnectionGate, ConnectionLimits, GateAcceptor

#: Connections above the limit that get a 503, at a time.
_REFUSABLE: Final = 16
_NO_ROOM: Final = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class WebServer(uvicorn.Server):
    """uvicorn without its signal handlers, its accept loop and its timer, which runs ten times a second."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits,
        tls: ssl.SSLContext | None,
        *,
        keep_alive_seconds: int = 75,
        largest_message: int | None = None,
    ) -> None:
        """`largest_message` is the largest message of a WebSocket, which is held in memory; None refuses them."""
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none" if largest_message is None else WebSocketConnection,
            ws_max_size=largest_message or 0,
            # A compressed message of some kilobytes could become one of megabytes.
            ws_per_message_deflate=False,
            lifespan="off",
            interface="asgi3",
            log_config=None,
            # The application logs errors of calls itself; the rest is noise of broken clients.
            log_level="critical",
            # Paths may have tickets.
            access_log=False,
            server_header=False,
            date_header=False,
            # A header could forge the address that wrong tokens are counted by.
            proxy_headers=False,
            limit_concurrency=limits.most,
            timeout_keep_alive=keep_alive_seconds,
        )
        super().__init__(config)
        self.is_up = asyncio.Event()
        self._stop_requested = asyncio.Event()
        # Room for connections that get a 503.
        self.gate = ConnectionGate(replace(limits, most=limits.most + _REFUSABLE))
        self._tls = tls
        self._acceptor: GateAcceptor | None = None
        self._serving: asyncio.Task[None] | None = None

    async def open(self, listener: socket.socket) -> None:
        """Serve on a bound socket until `aclose`; raises if the start fails."""
        self._serving = asyncio.create_task(self.serve(sockets=[listener]))
        up = asyncio.create_task(self.is_up.wait())
        await asyncio.wait((self._serving, up), return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._serving.done():
            listener.close()
            await self._serving

    async def aclose(self, grace: float) -> None:
        """Stop accepting; running requests have `grace` seconds."""
        self.stop_within(grace)
        if self._serving is not None:
            await self._serving

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield

    async def startup(self, sockets: Any = None) -> None:
        self.servers = []
        self._acceptor = GateAcceptor(sockets[0], self.gate, self._protocol, self._tls)
        self._acceptor.start(self.config.backlog)
        self.started = True
        self.is_up.set()

    def _protocol(self, connection: AcceptedConnection) -> asyncio.Protocol:
        return _Connection(self, connection)

    async def shutdown(self, sockets: Any = None) -> None:
        if self._acceptor is not None:
            self._acceptor.stop()
        await super().shutdown(sockets=sockets)

    async def main_loop(self) -> None:
        await self._stop_requested.wait()

    def stop_within(self, grace: float) -> None:
        # The type is int, None would wait for ever, and the loop's timer accepts a float.
        self.config.timeout_graceful_shutdown = grace  # type: ignore[assignment]
        self._stop_requested.set()


class _Connection(H11Protocol):
    """A connection with a deadline for request heads; uvicorn limits only the time between requests."""

    def __init__(self, server: WebServer, connection: AcceptedConnection) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self._gate = server.gate
        self._accepted = connection
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._accepted.close = transport.abort
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            self.transport.write(_NO_ROOM)
            return self.transport.close()
        super().handle_websocket_upgrade(event)
        # The transport reports its end to the new protocol alone.
        protocol = self.transport.get_protocol()
        if isinstance(protocol, WebSocketConnection):
            protocol.leave = functools.partial(self._gate.leave, self._accepted)
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.leave(self._accepted)
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        """Start the deadline at the connection or the first byte of a later head; cancel it at a complete head."""
        if self.conn.their_state is not h11.IDLE:
            self._gate.complete(self._accepted)
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._gate.limits.head_seconds, self.transport.abort)


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
