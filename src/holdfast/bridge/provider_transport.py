"""HTTP/1.1 connections to a provider on asyncio, as an httpx transport.

h11 writes requests and parses the heads of responses, `response_body` their bodies; this module moves bytes.

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

from holdfast.bridge.response_body import ChunkedBody, MalformedBody, ResponseBody, SizedBody, UnsizedBody

#: Largest head of a response.
MAX_HEAD_BYTES: Final = 100 * 1024
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
        #: Parses the head of the current response.
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        #: The body of the current response, once its head has arrived, and its bytes that were not read.
        self._body: ResponseBody | None = None
        self._arrived: list[bytes] = []
        self._stays_open = False
        self._waiter: asyncio.Future[None] | None = None
        self._waiting_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timeout: float | None = None
        self._held_bytes = 0
        self._is_full = False
        self._paused = False
        self._has_eof = False
        self._lost: Exception | None = None

    # --- the socket ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._body is None:
            self._http.receive_data(data)
        else:
            self._arrived.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > HELD_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        self._has_eof = True
        self._end(None)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        if self._lost is None:
            self._lost = httpx.ReadError(f"the connection broke: {error}" if error else "the connection ended")
            self._is_full = False
            if error is None and self._body is None:
                self._http.receive_data(b"")
            self._wake()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._wake()

    def abort(self) -> None:
        self._stop_timer()
        self._transport.abort()

    # --- one request -----------------------------------------------------------------------------------------

    async def send(self, request: httpx.Request, timeout: float | None) -> h11.Response:
        """Send a request and return the head of the response; `ReadTimeout` after `timeout` silent seconds."""
        self._timeout = timeout
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._body = None
        try:
            head = h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw)
            parts = [self._http.send(head)]
            if request.content:
                parts.append(self._http.send(h11.Data(data=request.content)))
            parts.append(self._http.send(h11.EndOfMessage()))
            # One write: a separate head costs a system call, and wakes the provider for nothing.
            self._transport.write(b"".join(part for part in parts if part))
            # A provider may respond before it has read the request, for example to reject its size.
            while self._is_full and not self._held_bytes:
                await self._more()
            event = self._next()
            while not isinstance(event, h11.Response):
                if event is h11.NEED_DATA:
                    await self._more()
                elif not isinstance(event, h11.InformationalResponse):
                    raise httpx.RemoteProtocolError(f"{type(event).__name__} instead of a response")
                event = self._next()
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error)) from None
        self._body = _body_of(request.method, event)
        self._stays_open = _stays_open(event)
        rest = self._http.trailing_data[0]
        self._arrived = [rest] if rest else []
        return event

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives. Data of one event loop iteration is one piece."""
        body = self._body
        assert body is not None
        try:
            while not body.ended:
                if self._arrived:
                    data = b"".join(self._arrived)
                    self._arrived.clear()
                    self._held_bytes = 0
                    if piece := body.feed(data):
                        yield piece
                elif self._lost is None:
                    await self._more()
                elif self._has_eof:
                    body.connection_ended()
                else:
                    raise self._lost
        except MalformedBody as error:
            raise httpx.RemoteProtocolError(str(error)) from None

    def _next(self) -> object:
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error)) from None
        if event is h11.NEED_DATA and self._lost is not None:
            raise self._lost
        return event

    def release(self) -> bool:
        """Return True if the connection can take another request."""
        self._stop_timer()
        body = self._body
        if self._lost is not None or not self._stays_open or body is None or not body.ended:
            return False
        if body.rest or self._arrived or self._transport.is_closing() or self._transport.get_write_buffer_size():
            return False
        self._held_bytes = 0
        self._resume()
        return True

    @property
    def is_usable(self) -> bool:
        """True if an idle connection is open and has received nothing."""
        return self._lost is None and not self._held_bytes and not self._transport.is_closing()

    # --- waiting ---------------------------------------------------------------------------------------------

    async def _more(self) -> None:
        """Wait until data arrives, the connection ends, or the write buffer drains."""
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


def _body_of(method: str, head: h11.Response) -> ResponseBody:
    """Return the reader of a body by its head, whose framing headers h11 has checked (RFC 9112, section 6.3)."""
    if method == "HEAD" or head.status_code in (204, 304):
        return SizedBody(0)
    headers = dict(head.headers)
    if b"transfer-encoding" in headers:
        return ChunkedBody()
    length = headers.get(b"content-length")
    return UnsizedBody() if length is None else SizedBody(int(length))


def _stays_open(head: h11.Response) -> bool:
    options = b",".join(value for name, value in head.headers if name == b"connection").lower()
    return head.http_version == b"1.1" and b"close" not in [option.strip() for option in options.split(b",")]


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
        return httpx.Response(head.status_code, headers=head.headers.raw_items(), stream=_Body(self, connection))

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
