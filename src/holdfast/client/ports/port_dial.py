"""`dial_port`: one connection to a port of the sandbox as a socket, for a proxy that has connections of its own.

It is a stream of the sandbox's channel, as in `client.ports`, and nothing listens on this machine.
"""

from __future__ import annotations

import asyncio
import builtins
import socket
from typing import Final

from holdfast.client.connection.connection import ClientConnection
from holdfast.errors import HoldfastError, PortUnavailable
from holdfast.transport import sockets
from holdfast.wire import stream_messages as s

#: Longer than the sandbox takes to report that it could not connect.
_REPLY_SECONDS: Final = 5.0


async def dial_port(connection: ClientConnection, target: s.StreamAddress) -> socket.socket:
    """A socket that is connected to a port of the sandbox, without a port on this machine.

    `PortUnavailable` if nothing accepts connections there. The caller closes the socket.
    """
    streams = connection.streams
    number = streams.new_number()
    streams.reserve(number)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    stream = streams.attach(number, theirs)
    assert stream is not None
    reply: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def opened(result: s.StreamOpenResult | None, error: HoldfastError | None) -> None:
        if result is not None:
            stream.give_credit(result.window)
        if reply.done():
            return
        if result is not None:
            reply.set_result(None)
        else:
            reply.set_exception(error or PortUnavailable(f"{target}: no connection"))

    try:
        # A channel that breaks gives no reply.
        async with asyncio.timeout(sockets.CONNECT_SECONDS + _REPLY_SECONDS):
            connection.call_once(s.STREAM_OPEN, s.StreamOpenParams(number, target, stream.window), opened)
            await reply
    except BaseException as error:
        streams.drop(stream)
        ours.close()
        if isinstance(error, builtins.TimeoutError) and not isinstance(error, HoldfastError):
            raise PortUnavailable(f"{target}: no answer") from None
        raise
    return ours
