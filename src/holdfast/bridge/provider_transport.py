"""HTTP/1.1 connections to a provider on asyncio, as an httpx transport: h11 parses, this module moves bytes.

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
from collections.abc import AsyncIterator
from typing import Final

import h11
import httpx

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
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._waiter: asyncio.Future[None] | None = None
        self._waiting_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timeout: float | None = None
        self._held_bytes = 0
        self._is_full = False
        self._paused = False
        self._lost: Exception | None = None

    # --- the socket ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._http.receive_data(data)
        self._held_bytes += len(data)
        if self._held_bytes > HELD_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        self._end(None)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        if self._lost is None:
            self._lost = httpx.ReadError(f"the connection broke: {error}" if error else "the connection ended")
            self._is_full = False
            if error is None:
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
        return event

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Data of one event loop iteration is one piece."""
        parts: list[bytes] = []
        while True:
            event = self._next()
            if isinstance(event, h11.Data):
                parts.append(bytes(event.data))
                continue
            if parts:
                yield parts[0] if len(parts) == 1 else b"".join(parts)
                parts.clear()
            if isinstance(event, h11.EndOfMessage):
                return
            if event is not h11.NEED_DATA:
                raise httpx.RemoteProtocolError(f"{type(event).__name__} in the middle of a response")
            # The buffer is drained, unless more arrived while the piece was forwarded.
            if not self._held_bytes:
                await self._more()
            self._held_bytes = 0

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
        if self._lost is not None or self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        if self._http.trailing_data[0] or self._transport.is_closing():
            return False
        self._http.start_next_cycle()
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

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._connection is not None:
            async for piece in self._connection.pieces():
                yield piece

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._transport.give_back(connection)
