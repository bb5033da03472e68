"""WebSocket, for remote and foreign clients. Touches TCP through the `websockets` library.

The only module of the transports that imports that library, and only for addresses that need it. A message over
the limit ends the connection with close code 1009 and a reason with the size: the library cannot skip it.
"""

from __future__ import annotations

import asyncio
import hmac
import http
import ipaddress
import logging
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.connection import Connection as Socket
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.frames import DATA_OPCODES, Frame
from websockets.http11 import Request, Response
from websockets.protocol import Event, State

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

#: Bytes that the library buffers before messages wait in the queue and in the source. One frame of output fits, so
#: that the next one is prepared while it is sent; a control message waits behind no more than that.
WRITE_LIMIT: Final = 1024 * 1024
#: Bytes sent in one turn of the event loop, if the operating system accepts that much.
TURN_BYTES: Final = 1024 * 1024
#: Frames that are held while the channel does not read: pings, which follow them, are still answered.
READ_AHEAD: Final = 16
PING_INTERVAL_SECONDS: Final = 20.0
#: Generous, because a foreign client that is busy with output answers pings late.
PING_TIMEOUT_SECONDS: Final = 60.0
OPEN_TIMEOUT_SECONDS: Final = 10.0
#: How long a close waits for the peer's close frame.
CLOSE_TIMEOUT_SECONDS: Final = 2.0

TOO_BIG: Final = 1009


class FrameSocket(Socket):
    """A connection of the library that passes data frames to its channel at once, without the library's queue.

    The library's `recv` and `send` need two tasks, and wake them through futures for each message.
    """

    channel: WebSocketChannel | None = None
    #: Frames that arrived before the channel was attached, or while it did not read.
    held: deque[Frame]
    #: Whether the operating system accepts more; False while more than `WRITE_LIMIT` bytes wait for it.
    writable = True
    ended = False

    def attach(self, channel: WebSocketChannel) -> None:
        """Pass frames to `channel` from now on."""
        self.channel = channel
        self.release()

    def release(self) -> None:
        """Pass the held frames on, because the channel reads (again)."""
        while self.held and self.channel is not None and self.channel.reading:
            self.channel.frame_received(self.held.popleft())
        if not self.held:
            self.transport.resume_reading()

    # --- callbacks of the library and of asyncio -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.held = deque()
        super().connection_made(transport)

    def process_event(self, event: Event) -> None:
        if not isinstance(event, Frame) or event.opcode not in DATA_OPCODES:
            super().process_event(event)
        elif self.channel is not None and self.channel.reading and not self.held:
            self.channel.frame_received(event)
        else:
            self.held.append(event)
            if len(self.held) >= READ_AHEAD:
                self.transport.pause_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.writable = False

    def resume_writing(self) -> None:
        super().resume_writing()
        self.writable = True
        if self.channel is not None:
            self.channel.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.ended = True
        if self.channel is not None:
            self.channel.connection_ended(self.protocol.close_exc)


class ServerSocket(FrameSocket, ServerConnection):
    """The server's end."""


class ClientSocket(FrameSocket, ClientConnection):
    """The client's end."""


class WebSocketChannel(QueuedChannel):
    """`Channel` on a WebSocket: a text frame is JSON, a binary frame MessagePack.

    A message is passed to the library's protocol and so to the operating system in the call of `send` or `wake`,
    unless the library's buffer is full.
    """

    def __init__(self, socket: FrameSocket, description: str, limit: int) -> None:
        super().__init__(description)
        self.reading = True
        self._socket = socket
        self._limit = limit
        self._receiver: Receiver | None = None
        #: The fragments of a message so far; the library bounds their sum.
        self._fragments = bytearray()
        self._sending = False
        #: The continuation in the next turn of the event loop.
        self._turn: asyncio.Handle | None = None
        self._ending: asyncio.Task[None] | None = None

    def start(self, receiver: Receiver) -> None:
        """Start to read. `receiver` gets every message."""
        self._receiver = receiver
        self._socket.attach(self)
        if self._socket.ended:
            self.connection_ended(self._socket.protocol.close_exc)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True
        self._socket.release()

    @property
    def held(self) -> int:
        """Frames that have arrived and are not delivered, because the channel does not read."""
        return len(self._socket.held)

    # --- from the socket -----------------------------------------------------------------------------------------

    def frame_received(self, frame: Frame) -> None:
        """Deliver the message that the frame is or completes."""
        data = frame.data
        if self._fragments or not frame.fin:
            self._fragments += data
            if not frame.fin:
                return
            data, self._fragments = self._fragments, bytearray()
        if not self._closing and self._receiver is not None:
            # Not decoded: the codec takes bytes, and the first byte determines the encoding.
            self._receiver.message_received(bytes(data))

    def connection_ended(self, closed: ConnectionClosed) -> None:
        """Report the end to the receiver."""
        assert self._receiver is not None
        error = None if isinstance(closed, ConnectionClosedOK) else self._why(closed)
        self._receiver.connection_lost(None if self._lost() else error)

    # --- sending -------------------------------------------------------------------------------------------------

    def _proceed(self) -> None:
        if not self._sending and self._turn is None and self._ending is None:
            self._sending = True
            try:
                self._send_waiting()
            finally:
                self._sending = False

    def _send_waiting(self) -> None:
        budget = TURN_BYTES
        # While the connection closes, nothing can be sent, and its end is reported soon.
        while self._socket.writable and self._socket.protocol.state is State.OPEN:
            if self._queue:
                data = self._next_control()
                self._transmit(data)
                self._sent(len(data))
            elif self._closing:
                break
            elif (frame := self._next_frame()) is not None:
                data = frame
                self._transmit(data)
            else:
                return
            budget -= len(data)
            if budget <= 0:
                self._turn = asyncio.get_running_loop().call_soon(self._next_turn)
                return
        if self._closing and (not self._queue or self._socket.protocol.state is not State.OPEN):
            self._ending = asyncio.create_task(self._socket.close())

    def _next_turn(self) -> None:
        self._turn = None
        self._proceed()

    def _transmit(self, data: bytes) -> None:
        if data[:1] == b"{":
            self._socket.protocol.send_text(data)
        else:
            self._socket.protocol.send_binary(data)
        self._socket.send_data()

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
        assert isinstance(connection, ServerSocket)
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
            create_connection=ServerSocket,
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
            create_connection=ClientSocket,
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
    assert isinstance(connection, ClientSocket)
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
