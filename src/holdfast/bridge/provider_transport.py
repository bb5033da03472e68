"""HTTP/1.1 connections to a provider on asyncio, as an httpx transport.

h11 writes requests, `response_parser` reads responses, and this module moves bytes.

httpx's own transport passes each piece of a stream through a dozen layers. Measured beside it in one run (`python
-m bench --only bridge-call bridge-streams`, two busy cores): a call through the bridge adds 2.2 ms instead of 2.9,
the first token 2.6 ms instead of 3.2 (the target is 3), and 100 paced streams pass 4,300 to 5,700 events a second
instead of 1,500. Under the highest load both miss the target of the first token: 3.48 ms instead of 4.96, and of
three runs one met the target of the streams. Touches only the provider's sockets; unused where the environment
names a proxy.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
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

    async def send(self, request: httpx.Request, timeout: float | None) -> ResponseHead:
        """Send a request and return the head of the response; `ReadTimeout` after `timeout` silent seconds."""
        self._timeout = timeout
        self._response = response = ResponseParser(request.method)
        # One write: a separate head costs a system call, and wakes the provider for nothing. The response may begin
        # before the provider has read the request, for example to reject its size.
        self._transport.write(_request_bytes(request))
        while response.head is None:
            await self._more()
        return response.head

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives. Data of one event loop iteration is one piece."""
        response = self._response
        assert response is not None
        while True:
            if piece := response.take():
                yield piece
            elif response.is_complete:
                return
            else:
                await self._more()

    def release(self) -> bool:
        """Return True if the connection can take another request."""
        self._stop_timer()
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
        if self._timer is None and self._timeout is not None:
            self._timer = self._loop.call_later(self._timeout, self._check_silence)
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
        """Fail a wait that exceeds the timeout. One timer serves all pieces of a response."""
        assert self._timeout is not None
        self._timer = None
        if self._waiter is None or self._waiter.done():
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


def _request_bytes(request: httpx.Request) -> bytes:
    http = h11.Connection(h11.CLIENT)
    events: list[h11.Event] = [
        h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw),
        h11.EndOfMessage(),
    ]
    if content := request.read():
        events.insert(1, h11.Data(data=content))
    try:
        return b"".join(http.send(event) or b"" for event in events)
    except h11.LocalProtocolError as error:
        raise httpx.LocalProtocolError(str(error)) from None


class ProviderTransport(httpx.AsyncBaseTransport):
    """Connections to one provider, one for each running call, kept for a while afterwards."""

    def __init__(self, trusted: ssl.SSLContext) -> None:
        self._trusted = trusted
        trusted.set_alpn_protocols(["http/1.1"])
        #: The most recently used connection is taken first, so that the others expire.
        self._idle: dict[ProviderConnection, asyncio.TimerHandle] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        timeouts = request.extensions.get("timeout", {})
        connection = self._take() or await self._connect(request.url, timeouts.get("connect"))
        try:
            head = await connection.send(request, timeouts.get("read"))
        except BaseException:
            connection.abort()
            raise
        return httpx.Response(head.status, headers=head.headers, stream=_Body(self, connection))

    async def aclose(self) -> None:
        while self._idle:
            connection, timer = self._idle.popitem()
            timer.cancel()
            connection.abort()

    def _take(self) -> ProviderConnection | None:
        while self._idle:
            connection, timer = self._idle.popitem()
            timer.cancel()
            if connection.is_usable:
                return connection
            connection.abort()
        return None

    def give_back(self, connection: ProviderConnection) -> None:
        if connection.release():
            self._idle[connection] = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._expire, connection)
        else:
            connection.abort()

    def _expire(self, connection: ProviderConnection) -> None:
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


class _Body(httpx.AsyncByteStream):
    """Body of one response. Closing it before its end aborts the connection."""

    def __init__(self, transport: ProviderTransport, connection: ProviderConnection) -> None:
        self._transport = transport
        self._connection: ProviderConnection | None = connection

    def __aiter__(self) -> AsyncIterator[bytes]:
        if self._connection is None:
            raise httpx.StreamClosed
        return self._connection.pieces()

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._transport.give_back(connection)
