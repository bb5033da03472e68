"""uvicorn behind a `ConnectionGate`: connections count from `accept(2)` on; each is a `WebConnection`.

Touches the listening socket that it is given, on the running event loop; handles no signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Any, Final

import uvicorn
from msgspec.structs import replace
from starlette.types import ASGIApp

from holdfast.service.fronts.connections import AcceptedConnection, ConnectionGate, ConnectionLimits, GateAcceptor
from holdfast.service.fronts.web_connection import WebConnection, WebSocketConnection

#: Connections above the limit that get a 503, at a time.
_REFUSABLE: Final = 16


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
            http=WebConnection,
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
        return WebConnection(self.config, self.server_state, self.lifespan.state, self.gate, connection)

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
