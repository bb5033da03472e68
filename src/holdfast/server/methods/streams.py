"""The `stream/*` methods: connections to ports in the sandbox, and listeners there on behalf of the client.

The streams themselves are those of the connection (`transport.multiplexer`); they end with it. Touches sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from holdfast.errors import InvalidParams, LimitReached
from holdfast.transport import sockets
from holdfast.wire import stream_messages as s

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from holdfast.server.connection import ServerConnection
    from holdfast.transport.multiplexer import StreamMultiplexer

#: Listeners of one connection; a client offers a few ports.
MAX_LISTENERS: Final = 128


class StreamMethods:
    """The handlers of `stream/*`."""

    def open(
        self, connection: ServerConnection, params: s.StreamOpenParams
    ) -> Coroutine[None, None, s.StreamOpenResult]:
        """Reserve the number before this returns, so that a reset in the next message finds it."""
        if params.stream <= 0:
            raise InvalidParams(f"stream {params.stream}: the number of a client's stream is positive")
        connection.streams.reserve(params.stream)
        return self._open(connection.streams, params)

    async def _open(self, streams: StreamMultiplexer, params: s.StreamOpenParams) -> s.StreamOpenResult:
        try:
            stream = streams.attach(params.stream, await sockets.dial(params.address))
        finally:
            streams.release(params.stream)
        if stream is None:
            raise InvalidParams(f"stream {params.stream}: the client has reset it")
        stream.give_credit(params.window)
        return s.StreamOpenResult(stream.window)

    async def dial(self, connection: ServerConnection, params: s.StreamDialParams) -> None:
        if not connection.channel.passes_descriptors:
            raise InvalidParams("stream/dial: a socket can be passed only over a Unix socket: use stream/open")
        sock = await sockets.dial(params.address)
        # In this turn of the loop the reply follows, and carries it.
        connection.channel.pass_descriptor(sock.detach())

    def listen(self, connection: ServerConnection, params: s.StreamListenParams) -> s.StreamListenResult:
        streams = connection.streams
        if streams.has_listener(params.listener):
            raise InvalidParams(f"listener {params.listener!r}: the name is taken")
        if streams.listeners >= MAX_LISTENERS:
            raise LimitReached(f"{MAX_LISTENERS} listeners are open on this connection; close one")
        return s.StreamListenResult(streams.listen(params.listener, sockets.listen(params.address)))

    def unlisten(self, connection: ServerConnection, params: s.StreamUnlistenParams) -> None:
        connection.streams.unlisten(params.listener)
