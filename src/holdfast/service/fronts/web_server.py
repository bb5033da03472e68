"""uvicorn behind a `ConnectionGate`: connections count from `accept(2)` on, and request heads have a deadline.

Touches the listening socket that it is given, on the running event loop; handles no signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from typing import Any, Final

import h11
import uvicorn
from msgspec.structs import replace
from uvicorn.protocols.http.h11_impl import H11Protocol

from holdfast.service.fronts.connections import AcceptedConnection, Acceptor, ConnectionGate, ConnectionLimits

#: Connections above the limit that get a 503, at a time.
_REFUSABLE: Final = 16


class WebServer(uvicorn.Server):
    """uvicorn without its signal handlers, its accept loop and its timer, which runs ten times a second."""

    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()
        self._asked_to_stop = asyncio.Event()
        # Room for connections that get a 503.
        self.gate = ConnectionGate(replace(limits, most=limits.most + _REFUSABLE))
        self._tls = tls
        self._acceptor: Acceptor | None = None
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
        self._acceptor = Acceptor(sockets[0], self.gate, self._protocol, self._tls)
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
        await self._asked_to_stop.wait()

    def stop_within(self, grace: float) -> None:
        # The type is int, None would wait for ever, and the loop's timer accepts a float.
        self.config.timeout_graceful_shutdown = grace  # type: ignore[assignment]
        self._asked_to_stop.set()


class _Connection(H11Protocol):
    """A connection with a deadline for request heads; uvicorn limits only the time between requests."""

    def __init__(self, server: WebServer, connection: AcceptedConnection) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self._gate = server.gate
        self._accepted = connection
        self._head_timer: asyncio.TimerHandle | None = None
        if self.ws_protocol_class is not None:
            # At an upgrade the transport gets a protocol of this class, and reports the connection's end to it.
            kind: Any = functools.partial(_counted, self.ws_protocol_class, server.gate, connection)
            self.ws_protocol_class = kind

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._accepted.close = transport.abort
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

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


def _counted(kind: Any, gate: ConnectionGate, connection: AcceptedConnection, **arguments: Any) -> asyncio.Protocol:
    """A WebSocket protocol of the class `kind` that leaves the gate with its connection."""

    class Counted(kind):  # type: ignore[misc]
        def connection_lost(self, exc: Exception | None) -> None:
            gate.leave(connection)
            super().connection_lost(exc)

    protocol: asyncio.Protocol = Counted(**arguments)
    return protocol
