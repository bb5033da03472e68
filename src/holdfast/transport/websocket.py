"""WebSocket, for remote and foreign clients. Touches TCP through the `websockets` library.

The only module of the transports that imports that library, and only for addresses that need it. A message over
the limit ends the connection with close code 1009 and a reason with the size: the library cannot skip it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import http
import ipaddress
import logging
import os
import socket
import ssl
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from websockets.asyncio.client import connect
from websockets.asyncio.connection import Connection as Socket
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.http11 import Request, Response

from holdfast.errors import (
    ConnectionLost,
    Forbidden,
    HandshakeFailed,
    HoldfastError,
    InvalidParams,
    MessageTooLarge,
    Unauthorized,
)
from holdfast.transport.channel import Receiver
from holdfast.transport.queued import QueuedChannel
from holdfast.types import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

#: Bytes that the library buffers before `send` waits. One frame of output fits, so that the next one is prepared
#: while it is sent; a control message waits behind no more than that.
WRITE_LIMIT: Final = 1024 * 1024
#: Messages that the library reads ahead.
READ_AHEAD: Final = 16
PING_INTERVAL_SECONDS: Final = 20.0
#: Generous, because a foreign client that is busy with output answers pings late.
PING_TIMEOUT_SECONDS: Final = 60.0
OPEN_TIMEOUT_SECONDS: Final = 10.0
#: How long a close waits for the peer's close frame.
CLOSE_TIMEOUT_SECONDS: Final = 2.0

TOO_BIG: Final = 1009


class WebSocketChannel(QueuedChannel):
    """`Channel` on a WebSocket: a text frame is JSON, a binary frame MessagePack.

    Two tasks: one reads, the other sends control messages first and then frames of the source, waiting whenever the
    library's buffer is full.
    """

    def __init__(self, socket: Socket, description: str, limit: int) -> None:
        super().__init__(description)
        self._socket = socket
        self._limit = limit
        self._receiver: Receiver | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, receiver: Receiver) -> None:
        """Start to read and to send. `receiver` gets every message."""
        self._receiver = receiver
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    async def _read(self) -> None:
        assert self._receiver is not None
        error: Exception | None = None
        try:
            while True:
                # Not decoded: the codec takes bytes, and the first byte determines the encoding.
                message = await self._socket.recv(decode=False)
                if self._closing:
                    continue
                self._receiver.message_received(message)
                if not self._may_read.is_set():
                    await self._may_read.wait()
        except ConnectionClosedOK:
            pass
        except ConnectionClosed as closed:
            error = self._why(closed)
        except OSError as broken:
            error = broken
        finally:
            self._tasks[1].cancel()
            self._receiver.connection_lost(None if self._lost() else error)

    async def _write(self) -> None:
        # The reader gets the same error, with its reason.
        with contextlib.suppress(ConnectionClosed):
            await super()._write()

    async def _transmit(self, data: bytes) -> None:
        await self._socket.send(data, text=data[:1] == b"{")

    async def _end(self) -> None:
        await self._socket.close()

    def _why(self, closed: ConnectionClosed) -> HoldfastError:
        received = closed.rcvd
        sent = closed.sent
        if received is not None and received.code == TOO_BIG and closed.rcvd_then_sent:
            return MessageTooLarge(
                f"{self.description}: {received.reason or 'a message was too large for the peer'}"
            )
        if sent is not None and sent.code == TOO_BIG:
            text = f"{self.description}: closed for a message over {self._limit} bytes"
            # Marked, because a repeated call of a client would cause the same message on every channel.
            return ConnectionLost(text, oversized=True)
        return ConnectionLost(f"{self.description}: {closed}")


class WebSocketListener:
    """A listening server. `address` has the actual port."""

    def __init__(self, server: Server, host: str) -> None:
        self._server = server
        self.port: int = next(iter(server.sockets)).getsockname()[1]
        self.address = f"ws://[{host}]:{self.port}" if ":" in host else f"ws://{host}:{self.port}"

    def fileno(self) -> int:
        return next(iter(self._server.sockets)).fileno()

    def close(self) -> None:
        """Accept no more connections. Open ones are closed by their owners."""
        self._server.close(close_connections=False)


async def listen(
    host: str,
    port: int,
    accept: Callable[[WebSocketChannel], Receiver],
    *,
    token: str | None = None,
    no_auth: bool = False,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    tls: ssl.SSLContext | None = None,
    taken: int | None = None,
) -> WebSocketListener:
    """Listen, and pass each authorized connection to `accept`, which returns its receiver.

    A bearer token is required, except with `no_auth` on loopback. A request with an `Origin` is always refused: a
    page in a browser must not be able to reach a server on the user's machine. `taken` is the descriptor of a
    socket on which an earlier server listened.
    """
    require_safe(host, token, no_auth)

    async def handle(connection: ServerConnection) -> None:
        _set_nodelay(connection)
        channel = WebSocketChannel(connection, _peer_name(connection), max_message_bytes)
        channel.start(accept(channel))
        await connection.wait_closed()

    def check(connection: ServerConnection, request: Request) -> Response | None:
        return _check_request(connection, request, None if no_auth else token)

    try:
        server = await serve(
            handle,
            None if taken is not None else host,
            None if taken is not None else port,
            sock=None if taken is None else socket.socket(fileno=taken),
            process_request=check,
            compression=None,
            max_size=max_message_bytes,
            max_queue=READ_AHEAD,
            write_limit=WRITE_LIMIT,
            ping_interval=PING_INTERVAL_SECONDS,
            ping_timeout=PING_TIMEOUT_SECONDS,
            close_timeout=CLOSE_TIMEOUT_SECONDS,
            server_header=None,
            ssl=tls,
        )
    except OSError as error:
        raise InvalidParams(f"ws://{host}:{port}: {error.strerror or error}") from error
    return WebSocketListener(server, host)


def require_safe(host: str, token: str | None, no_auth: bool) -> None:
    """Raise `Forbidden` if listening like this would be open to others."""
    beyond = not is_loopback(host)
    if no_auth and beyond:
        raise Forbidden(f"{host}: --no-auth is for loopback only")
    if not token and beyond:
        raise Forbidden(f"{host}: listening beyond loopback without a token is refused")
    if not token and not no_auth:
        raise Forbidden(f"{host}: a token is needed (--token-file), or --no-auth on loopback")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_request(connection: ServerConnection, request: Request, token: str | None) -> Response | None:
    # get_all: a request with the header twice must neither raise in the library nor be accepted.
    if request.headers.get_all("Origin"):
        log.warning("%s: refused a request with an Origin", _peer_name(connection))
        return connection.respond(http.HTTPStatus.FORBIDDEN, "requests from browsers are refused\n")
    if token is None:
        return None
    given = request.headers.get_all("Authorization")
    wanted = f"Bearer {token}".encode()
    if len(given) == 1 and hmac.compare_digest(given[0].encode(errors="surrogateescape"), wanted):
        return None
    log.warning(
        "%s: refused a request %s", _peer_name(connection), "with a wrong token" if given else "without a token"
    )
    response = connection.respond(http.HTTPStatus.UNAUTHORIZED, "a bearer token is needed\n")
    response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def dial(
    url: str, receiver: Receiver, *, token: str | None = None, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> WebSocketChannel:
    """Connect to `url`; `Unauthorized` if the server refuses the token."""
    host = urlsplit(url).hostname or ""
    try:
        connection = await connect(
            url,
            additional_headers={"Authorization": f"Bearer {token}"} if token else None,
            user_agent_header=None,
            compression=None,
            # An HTTP proxy cannot reach the loopback of this machine.
            proxy=None if is_loopback(host) else True,
            max_size=max_message_bytes,
            max_queue=READ_AHEAD,
            write_limit=WRITE_LIMIT,
            open_timeout=OPEN_TIMEOUT_SECONDS,
            ping_interval=PING_INTERVAL_SECONDS,
            ping_timeout=PING_TIMEOUT_SECONDS,
            close_timeout=CLOSE_TIMEOUT_SECONDS,
        )
    except InvalidStatus as error:
        status = error.response.status_code
        reason = bytes(error.response.body or b"").decode(errors="replace").strip()
        text = f"{url}: HTTP {status}" + (f": {reason}" if reason else "")
        if status == http.HTTPStatus.UNAUTHORIZED:
            found = "and the given one is not accepted" if token else "and none is given"
            text = (
                f"{url}: HTTP {status}: a bearer token is needed, {found}: set HOLDFAST_TOKEN, or token= in Python"
            )
        raise (Unauthorized(text) if status in (401, 403) else HandshakeFailed(text)) from error
    except InvalidURI as error:
        raise InvalidParams(f"{url}: {error}") from error
    except InvalidHandshake as error:
        raise HandshakeFailed(f"{url}: {error}") from error
    except (OSError, TimeoutError) as error:
        # asyncio puts the address into the text of errno; errors of name resolution are negative.
        number = error.errno or 0
        raise ConnectionLost(f"{url}: {os.strerror(number) if number > 0 else error.strerror or error}") from error
    _set_nodelay(connection)
    channel = WebSocketChannel(connection, url, max_message_bytes)
    channel.start(receiver)
    return channel


def _set_nodelay(connection: Socket) -> None:
    """Set TCP_NODELAY, which asyncio also does for its sockets: without it a message may wait 40 ms."""
    sock = connection.transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _peer_name(connection: ServerConnection) -> str:
    address = connection.remote_address
    return f"ws client {address[0]}:{address[1]}" if address else "ws client"
