"""HTTP/1.1 connections to a provider on asyncio, with the errors of httpx.

h11 writes requests, `response_parser` reads responses, and this module moves bytes.

httpx's own transport passes each piece of a stream through a dozen layers. Measured beside it in one run (`python
-m bench --only bridge-call bridge-streams`, two busy cores): a call through the bridge adds 2.2 ms instead of 2.9,
the first token 2.6 ms instead of 3.2 (the target was 3), and 100 paced streams pass 4,300 to 5,700 events a second
instead of 1,500. Under the highest load both miss the target of the first token: 3.48 ms instead of 4.96, and of
three runs one met the target of the streams. Touches only the provider's sockets; unused where the environment
names a proxy.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import Final

import h11
import httpx

from holdfast.bridge.response_parser import MalformedResponse, ResponseHead, ResponseParser

#: Buffered bytes of a response at which reading from the provider pauses.
HELD_BYTES: Final = 256 * 1024
#: Seconds that an idle connection is kept: shorter than any provider keeps it.
IDLE_SECONDS: Final = 5.0
#: Delay before the next address is tried in parallel (RFC 8305).
NEXT_ADDRESS_SECONDS: Final = 0.25


class ProviderConnection(asyncio.Protocol):
    """One connection: a request, its response piece by piece, the next request."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        #: Of the current request; None while the connection is idle.
        self._response: ResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waiting_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timeout: float | None = None
        self._paused = False
        #: Bytes that no request asked for have arrived.
        self._has_surplus = False
        #: Why the current response cannot continue, or no other can begin.
        self._lost: Exception | None = None

    # --- the socket ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:
            self._has_surplus = True
            return
        try:
            response.feed(data)
        except MalformedResponse as error:
            self._lose(httpx.RemoteProtocolError(str(error)))
        if response.held_bytes > HELD_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        try:
            if self._response is not None:
                self._response.end()
        except MalformedResponse as error:
            self._lose(httpx.RemoteProtocolError(str(error)))
        self._lose(httpx.ReadError("the connection ended"))
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(httpx.ReadError(f"the connection broke: {error}" if error else "the connection ended"))

    def _lose(self, reason: Exception) -> None:
        if self._lost is None:
            self._lost = reason
            self._wake()

    def resume_writing(self) -> None:
        self._wake()

    def abort(self) -> None:
        self._stop_timer()
        self._transport.abort()

    # --- one request -----------------------------------------------------------------------------------------

    async def send(self, method: str, request: bytes, timeout: float | None) -> ResponseHead:
        """Send a request and return the head of the response; `ReadTimeout` after `timeout` silent seconds."""
        self._timeout = timeout
        self._response = response = ResponseParser(method)
        # One write: a separate head costs a system call, and wakes the provider for nothing. The response may begin
        # before the provider has read the request, for example to reject its size.
        self._transport.write(request)
        while response.head is None:
            await self._more()
        return response.head

    async def next_piece(self) -> bytes:
        """Return the next part of the body as it arrives; empty at its end. Data of one read is one piece."""
        response = self._response
        assert response is not None
        while True:
            if piece := response.take():
                return piece
            if response.is_complete:
                return b""
            await self._more()

    def release(self) -> bool:
        """Return True if the connection can take another request."""
        response, self._response = self._response, None
        if response is None or not response.stays_open or response.held_bytes or not self.is_usable:
            return False
        if self._transport.get_write_buffer_size():
            return False
        self._resume()
        return True

    @property
    def is_usable(self) -> bool:
        """True if an idle connection is open and has received nothing."""
        return self._lost is None and not self._has_surplus and not self._transport.is_closing()

    # --- waiting ---------------------------------------------------------------------------------------------

    async def _more(self) -> None:
        """Wait until data arrives or the write buffer drains; raises the reason if the connection has ended."""
        if self._lost is not None:
            raise self._lost
        self._resume()
        self._waiter = waiter = self._loop.create_future()
        self._waiting_since = self._loop.time()
        if self._timeout is not None:
            deadline = self._waiting_since + self._timeout
            # A timer of an earlier wait, or of an earlier request, is due before and sets itself again.
            if self._timer is None or self._timer.when() > deadline:
                self._stop_timer()
                self._timer = self._loop.call_at(deadline, self._check_silence)
        try:
            await waiter
        finally:
            self._waiter = None

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_silence(self) -> None:
        """Fail a wait that exceeds the timeout. One timer serves all pieces of a response, and further requests."""
        self._timer = None
        if self._timeout is None or self._waiter is None or self._waiter.done():
            return  # the next wait sets it again
        left = self._waiting_since + self._timeout - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_silence)
        else:
            self._waiter.set_exception(httpx.ReadTimeout(f"no data for {self._timeout:g} s"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def request_head(method: str, target: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the head of a request, without the length of its body: see `with_body`."""
    if any(name.lower() == b"transfer-encoding" for name, _ in headers):
        raise httpx.LocalProtocolError("a request with a transfer coding is not supported")
    try:
        head = h11.Connection(h11.CLIENT).send(h11.Request(method=method, target=target, headers=headers))
    except h11.LocalProtocolError as error:
        raise httpx.LocalProtocolError(str(error)) from None
    assert head is not None
    return head


def with_body(head: bytes, body: bytes) -> bytes:
    """Return a request whose head h11 has checked and written; only the length of the body is added."""
    return b"%scontent-length: %d\r\n\r\n%s" % (head[:-2], len(body), body)


class ProviderTransport:
    """Connections to one provider, one for each running call, kept for a while afterwards."""

    def __init__(self, trusted: ssl.SSLContext) -> None:
        self._trusted = trusted
        trusted.set_alpn_protocols(["http/1.1"])
        #: When each idle connection expires, the earliest first. The most recently used is taken first.
        self._idle: dict[ProviderConnection, float] = {}
        #: One timer for all: it stays when a connection is taken.
        self._expiry: asyncio.TimerHandle | None = None

    async def exchange(
        self, url: httpx.URL, method: str, request: bytes, *, connect: float | None, silence: float | None
    ) -> tuple[ResponseHead, ResponseBody]:
        """Send a request and return the head of its response, and the body, which the caller closes.

        `connect` and `silence` are the most seconds until a connection is open, and without data.
        """
        connection = self._take() or await self._connect(url, connect)
        try:
            head = await connection.send(method, request, silence)
        except BaseException:
            connection.abort()
            raise
        return head, ResponseBody(self, connection)

    async def aclose(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        while self._idle:
            self._idle.popitem()[0].abort()

    def _take(self) -> ProviderConnection | None:
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.is_usable:
                return connection
            connection.abort()
        return None

    def give_back(self, connection: ProviderConnection) -> None:
        if not connection.release():
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        self._idle[connection] = expires = loop.time() + IDLE_SECONDS
        if self._expiry is None:
            self._expiry = loop.call_at(expires, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        loop = asyncio.get_running_loop()
        for connection, expires in tuple(self._idle.items()):
            if expires > loop.time():
                self._expiry = loop.call_at(expires, self._expire)
                return
            del self._idle[connection]
            connection.abort()

    async def _connect(self, url: httpx.URL, timeout: float | None) -> ProviderConnection:
        is_secure = url.scheme == "https"
        try:
            async with asyncio.timeout(timeout):
                _, connection = await asyncio.get_running_loop().create_connection(
                    ProviderConnection,
                    url.raw_host.decode("ascii"),
                    url.port or (443 if is_secure else 80),
                    ssl=self._trusted if is_secure else None,
                    happy_eyeballs_delay=NEXT_ADDRESS_SECONDS,
                )
        except TimeoutError:
            raise httpx.ConnectTimeout(f"no connection in {timeout} s") from None
        except OSError as error:  # includes TLS errors
            raise httpx.ConnectError(str(error)) from None
        return connection


class ResponseBody(httpx.AsyncByteStream):
    """Body of one response. Closing it before its end aborts the connection."""

    def __init__(self, transport: ProviderTransport, connection: ProviderConnection) -> None:
        self._transport = transport
        self._connection: ProviderConnection | None = connection

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    # Not a generator: asyncio registers each generator, and its end, in a set of weak references.
    async def __anext__(self) -> bytes:
        if self._connection is None:
            raise httpx.StreamClosed
        if piece := await self._connection.next_piece():
            return piece
        raise StopAsyncIteration

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._transport.give_back(connection)
