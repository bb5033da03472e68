"""`http/request` of the Codex CLI: an HTTP request that the server sends from the sandbox's network.

Requests run in threads, a few at a time, with `http.client`. A streamed body is read only as fast as the client
reads its messages. Touches the network that the server's own processes reach as well.
"""

from __future__ import annotations

import asyncio
import builtins
import concurrent.futures
import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import SplitResult, urljoin, urlsplit

from holdfast.errors import ConnectionLost, InvalidParams, LimitReached, PortUnavailable, TimeoutError
from holdfast.wire import codex_messages as c

if TYPE_CHECKING:
    import http.client

    from holdfast.server.connection import ServerConnection

T = TypeVar("T")

#: Requests at a time; further ones wait. A streamed one counts until the end of its body.
MAX_REQUESTS: Final = 16
MAX_REDIRECTS: Final = 10
#: A body that is returned as a whole.
MAX_BODY_BYTES: Final = 16 * 1024 * 1024
PIECE_BYTES: Final = 64 * 1024
#: Without a timeout of the caller, a server that sends nothing for this long ends the request.
SILENCE_SECONDS: Final = 600.0
_REDIRECTS: Final = (301, 302, 303, 307, 308)
#: Headers that belong to one connection, which `http.client` sets itself.
_OWN_HEADERS: Final = ("connection", "content-length", "transfer-encoding")


class HttpRequestMethods:
    """The handlers of `http/*`."""

    def __init__(self) -> None:
        self._threads = concurrent.futures.ThreadPoolExecutor(MAX_REQUESTS, "holdfast-http")

    async def request(self, connection: ServerConnection, params: c.HttpRequestParams) -> c.HttpRequestResult:
        exchange = _Exchange(params)
        timeout = None if params.timeout_ms is None else params.timeout_ms / 1000
        try:
            async with asyncio.timeout(timeout):
                head = await self._in_thread(exchange.open)
                if params.stream_response:
                    connection.run_in_background(self._stream(connection, params.request_id, exchange))
                    return head
                body = await self._in_thread(exchange.read_all)
        except builtins.TimeoutError:
            exchange.abort()
            raise TimeoutError(f"{params.url}: no answer within {timeout:g} s") from None
        except BaseException:
            exchange.abort()
            raise
        exchange.abort()
        return c.HttpRequestResult(head.status, head.headers, body)

    async def _stream(self, connection: ServerConnection, request_id: str, exchange: _Exchange) -> None:
        """Send the body as notifications; the last one is marked."""
        number = 0
        error: str | None = None
        try:
            while True:
                await connection.channel.drain()
                try:
                    piece = await self._in_thread(exchange.read_piece)
                except (PortUnavailable, TimeoutError) as failure:
                    error, piece = failure.message, b""
                number += 1
                if not piece:
                    break
                connection.notify(c.HTTP_REQUEST_BODY_DELTA, c.HttpBodyDelta(request_id, number, piece))
            last = c.HttpBodyDelta(request_id, number, b"", done=True, error=error)
            connection.notify(c.HTTP_REQUEST_BODY_DELTA, last)
        except ConnectionLost:
            return
        finally:
            exchange.abort()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class _Exchange:
    """One request and its response. Its methods block, except `abort`, which ends them."""

    def __init__(self, params: c.HttpRequestParams) -> None:
        self._params = params
        self._url = _checked(params.url)
        if not params.method.isascii() or not params.method.isalpha():
            raise InvalidParams(f"method {params.method!r}: not an HTTP method")
        for header in params.headers:
            if any(character in header.name + header.value for character in "\r\n\0") or ":" in header.name:
                raise InvalidParams(f"header {header.name!r}: it has a line end, a NUL or a colon")
        self._connection: http.client.HTTPConnection | None = None
        self._response: http.client.HTTPResponse | None = None
        self._aborted = False

    def open(self) -> c.HttpRequestResult:
        """Send the request, follow redirects, and return the head of the response."""
        method, body = self._params.method, self._params.body
        for _ in range(MAX_REDIRECTS + 1):
            response = self._send(method, body)
            target = response.getheader("location")
            if self._params.redirect_policy == "stop" or response.status not in _REDIRECTS or target is None:
                headers = tuple(c.HttpHeader(name.lower(), value) for name, value in response.getheaders())
                return c.HttpRequestResult(response.status, headers, b"")
            following = _checked(urljoin(self._url.geturl(), target))
            if following.netloc != self._url.netloc or following.scheme != self._url.scheme:
                self._same_origin = False
            self._url = following
            if response.status == 303 or (response.status in (301, 302) and method == "POST"):
                method, body = "GET", None
            self._close()
        raise LimitReached(f"{self._params.url}: more than {MAX_REDIRECTS} redirects")

    #: Whether all redirects stayed at the first origin. Another one gets no credentials.
    _same_origin = True

    def _send(self, method: str, body: bytes | None) -> http.client.HTTPResponse:
        # Imported by the first request: most servers get none, and the modules would double their start-up time.
        import http.client
        import ssl

        url = self._url
        timeout = SILENCE_SECONDS if self._params.timeout_ms is None else self._params.timeout_ms / 1000
        try:
            if url.scheme == "https":
                context = ssl.create_default_context()
                connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                    url.hostname or "", url.port, timeout=timeout, context=context
                )
            else:
                connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=timeout)
            self._connection = connection
            target = (url.path or "/") + (f"?{url.query}" if url.query else "")
            given = {header.name.lower() for header in self._params.headers}
            connection.putrequest(method, target, skip_host="host" in given, skip_accept_encoding=True)
            for header in self._params.headers:
                name = header.name.lower()
                if name in _OWN_HEADERS or (not self._same_origin and name in ("authorization", "cookie", "host")):
                    continue
                connection.putheader(header.name, header.value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._failure(error) from None
        self._response = response
        return response

    def read_piece(self) -> bytes:
        """Some bytes of the body; empty at its end."""
        import http.client

        assert self._response is not None
        try:
            piece = self._response.read1(PIECE_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._failure(error) from None
        if not piece and self._response.length:
            raise PortUnavailable(f"{self._params.url}: {self._response.length} bytes are missing at the end")
        return piece

    def read_all(self) -> bytes:
        body = bytearray()
        while piece := self.read_piece():
            body += piece
            if len(body) > MAX_BODY_BYTES:
                raise LimitReached(f"{self._params.url}: the body has more than {MAX_BODY_BYTES} bytes: stream it")
        return bytes(body)

    def abort(self) -> None:
        """Close the connection; a read of another thread ends."""
        self._aborted = True
        self._close()

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _failure(self, error: Exception) -> PortUnavailable | TimeoutError:
        if isinstance(error, builtins.TimeoutError):
            return TimeoutError(f"{self._params.url}: no answer in time")
        return PortUnavailable(f"{self._params.url}: {error or type(error).__name__}")


def _checked(text: str) -> SplitResult:
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError as error:
        raise InvalidParams(f"url {text!r}: {error}") from None
    if url.scheme not in ("http", "https") or not url.hostname or port == 0:
        raise InvalidParams(f"url {text!r}: an absolute http or https URL is needed")
    if any(character <= " " or character == "\x7f" for character in text):
        raise InvalidParams(f"url {text!r}: it has a space or a control character")
    return url
