"""Ports across the connection: `PortForward` makes a port of the sandbox reachable here, `PortOffer` the reverse.

Every connection is a stream of the sandbox's channel (`transport.multiplexer`), so the sandbox needs no network.
Streams end when the channel breaks; listeners are restored with it. A server behind a Unix socket passes its
connected sockets instead, between which a thread copies. Touches sockets of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Final

from holdfast.client.connection.connection import ClientConnection
from holdfast.client.ports.descriptor_link import DescriptorLink
from holdfast.errors import HoldfastError, InvalidParams, PortUnavailable
from holdfast.transport import sockets
from holdfast.transport.multiplexer import SocketStream, StreamLimits, StreamMultiplexer
from holdfast.transport.relay import SocketRelay
from holdfast.wire import stream_messages as s

log = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
UNIX_PREFIX: Final = "unix:"
#: How often a forward whose connections are in use shows that to the server, which does not see their bytes.
USE_SECONDS: Final = 10.0

#: Receives the error of a connection that the sandbox did not accept.
OnRefused = Callable[[HoldfastError], None]
#: Opens the connection on this machine for a stream that was accepted in the sandbox.
Connect = Callable[[], Awaitable[socket.socket]]


def parse_address(where: int | str, *, listens: bool = False) -> s.StreamAddress:
    """The address that `8000`, `"8000"`, `"HOST:8000"`, `"[::1]:8000"` or `"unix:/PATH"` means."""
    if isinstance(where, str) and where.startswith(UNIX_PREFIX):
        address = s.StreamAddress(path=where.removeprefix(UNIX_PREFIX))
        return sockets.check_address(address, listens=listens)
    text = str(where)
    host, _, port = text.rpartition(":")
    is_bare = ":" not in host or (host.startswith("[") and host.endswith("]"))
    if isinstance(where, bool) or not (port.isascii() and port.isdecimal()) or len(port) > 5 or not is_bare:
        raise InvalidParams(f"{where!r}: not a port, HOST:PORT, [IPV6]:PORT or unix:PATH")
    return sockets.check_address(s.StreamAddress(host.strip("[]") or LOOPBACK, int(port)), listens=listens)


class PortForward:
    """A port or Unix socket of the sandbox, reachable at a port of this machine for an `async with` block.

    A connection that the sandbox does not accept is reset here; `on_refused` receives the reason.
    """

    def __init__(
        self,
        connection: ClientConnection,
        target: s.StreamAddress,
        local: int | str = 0,
        on_refused: OnRefused | None = None,
    ) -> None:
        self._connection = connection
        self._on_refused = on_refused
        self._target = target
        self._local = parse_address(local, listens=True)
        self._acceptor: sockets.Acceptor | None = None
        self._streams: StreamMultiplexer | None = None
        #: Over which the server passes sockets; None if it does not.
        self._link: DescriptorLink | None = None
        self._relay: SocketRelay | None = None
        self._dialling: set[asyncio.Task[None]] = set()
        self._use: asyncio.TimerHandle | None = None

    @property
    def address(self) -> s.StreamAddress:
        """The address on this machine."""
        assert self._acceptor is not None
        return self._acceptor.address

    async def start(self) -> None:
        """Listen. Raises if the sandbox has no channel that carries streams."""
        _ = self._connection.streams
        self._acceptor = sockets.Acceptor(sockets.listen(self._local), self._accepted)
        await self._open_link()

    async def _open_link(self) -> None:
        """Open the connection over which the server passes sockets, if both are on this machine."""
        path = self._connection.unix_path
        # epoll and the order of passed descriptors are those of Linux.
        if path is None or sys.platform != "linux":
            return
        link = DescriptorLink(path)
        try:
            await link.connect()
        except (HoldfastError, OSError) as error:
            log.info("%s: connections go through the channel: %s", self.address, error)
        else:
            self._link = link

    def _accepted(self, sock: socket.socket) -> None:
        if self._link is None or not self._link.open:
            self._open_stream(sock)
            return
        task = self._connection.loop.create_task(self._dial(self._link, sock))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)

    async def _dial(self, link: DescriptorLink, sock: socket.socket) -> None:
        if self._relay is None:
            self._relay = SocketRelay()
            self._show_use(0)
        try:
            if len(self._relay) + len(self._dialling) > StreamLimits().streams:
                raise PortUnavailable(f"{StreamLimits().streams} connections are open")
            far = await link.dial(self._target)
        except PortUnavailable as error:
            self._refused(error)
            sockets.reset(sock)
        except HoldfastError as error:
            # An earlier server, a relay that drops descriptors, or a broken link.
            log.info("%s: connections go through the channel: %s", self.address, error)
            link.close()
            self._link = None
            self._open_stream(sock)
        except BaseException:
            sockets.reset(sock)
            raise
        else:
            self._relay.add(sock, far)

    def _show_use(self, moved: int) -> None:
        """Show the server from time to time that a sandbox with busy connections is not idle."""
        assert self._relay is not None
        if self._relay.moved != moved:
            self._connection.notify(s.STREAM_CREDIT, s.StreamCreditParams(0, 0))
        self._use = self._connection.loop.call_later(USE_SECONDS, self._show_use, self._relay.moved)

    def _open_stream(self, sock: socket.socket) -> None:
        try:
            streams = self._streams = self._connection.streams
            number = streams.new_number()
            streams.reserve(number)
        except HoldfastError as error:
            self._refused(error, logging.WARNING)
            sockets.reset(sock)
            return
        stream = streams.attach(number, sock, owner=self)
        assert stream is not None

        def opened(result: s.StreamOpenResult | None, error: HoldfastError | None) -> None:
            if result is not None:
                stream.give_credit(result.window)
            else:
                assert error is not None
                self._refused(error)
                streams.drop(stream)

        params = s.StreamOpenParams(number, self._target, stream.window)
        self._connection.call_once(s.STREAM_OPEN, params, opened)

    def _refused(self, error: HoldfastError, level: int = logging.INFO) -> None:
        if self._on_refused is not None:
            self._on_refused(error)
        else:
            log.log(level, "%s: no connection to %s: %s", self.address, self._target, error)

    async def aclose(self) -> None:
        """Stop listening and reset the connections that are still open."""
        if self._acceptor is not None:
            self._acceptor.close()
        for task in self._dialling:
            task.cancel()
        if self._dialling:
            await asyncio.wait(set(self._dialling))
        if self._use is not None:
            self._use.cancel()
        if self._link is not None:
            self._link.close()
        if self._relay is not None:
            self._relay.close()
        if self._streams is not None:
            self._streams.fail_owned(self, "the forward has ended")

    async def __aenter__(self) -> tuple[str, int]:
        await self.start()
        address = self.address
        return (address.host, address.port) if address.port is not None else (str(address), 0)

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class PortOffer:
    """A port of the sandbox that leads to this machine, for an `async with` block.

    The server listens inside, also after a reconnect; `connect` opens the connection here for each one inside.
    """

    def __init__(self, connection: ClientConnection, inside: s.StreamAddress, connect: Connect) -> None:
        self._connection = connection
        self._inside = sockets.check_address(inside, listens=True)
        self._connect = connect
        self._name = secrets.token_hex(8)
        self._dialling: set[asyncio.Task[None]] = set()
        self._streams: StreamMultiplexer | None = None

    @property
    def address(self) -> s.StreamAddress:
        """The address in the sandbox."""
        return self._inside

    async def start(self) -> None:
        _ = self._connection.streams
        params = s.StreamListenParams(self._name, self._inside)
        call = self._connection.begin(s.STREAM_LISTEN, params)
        call.on_reply = self._listening
        await self._connection.reply(call)
        self._connection.on_connected.add(self._listen_again)

    def _listening(self, result: s.StreamListenResult | None, _error: HoldfastError | None) -> None:
        if result is not None:
            self._inside = result.address
            self._streams = self._connection.streams
            self._streams.on_accepted(self._name, self._accepted)

    def _listen_again(self) -> None:
        def replied(result: s.StreamListenResult | None, error: HoldfastError | None) -> None:
            if error is not None:
                log.warning("%s: cannot listen on %s inside: %s", self._connection.address, self._inside, error)
            self._listening(result, error)

        params = s.StreamListenParams(self._name, self._inside)
        self._connection.call_once(s.STREAM_LISTEN, params, replied)

    def _accepted(self, id: int, credit: int) -> None:
        assert self._streams is not None
        task = asyncio.get_running_loop().create_task(self._dial(self._streams, id, credit))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)

    async def _dial(self, streams: StreamMultiplexer, id: int, credit: int) -> None:
        try:
            stream = streams.attach(id, await self._connect(), owner=self)
        except HoldfastError as error:
            log.info("%s: a connection from inside is refused: %s", self._inside, error)
            streams.release(id, str(error))
            return
        except BaseException:
            streams.release(id, "the offer has ended")
            raise
        if stream is not None:
            _begin(streams, stream, credit)

    async def aclose(self) -> None:
        """Stop listening inside and reset the connections that are still open."""
        self._connection.on_connected.discard(self._listen_again)
        for task in self._dialling:
            task.cancel()
        if self._dialling:
            await asyncio.wait(set(self._dialling))
        if self._streams is not None:
            self._streams.on_accepted(self._name, None)
            self._streams.fail_owned(self, "the offer has ended")
        # A lost connection has no listener left.
        with contextlib.suppress(HoldfastError):
            params = s.StreamUnlistenParams(self._name)
            await self._connection.clean_up(self._connection.call(s.STREAM_UNLISTEN, params))

    async def __aenter__(self) -> tuple[str, int]:
        await self.start()
        return (self._inside.host, self._inside.port) if self._inside.port is not None else (str(self._inside), 0)

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _begin(streams: StreamMultiplexer, stream: SocketStream, credit: int) -> None:
    """Let both sides of an accepted stream send."""
    streams.notify(s.STREAM_CREDIT, s.StreamCreditParams(stream.id, stream.window))
    stream.give_credit(credit)
