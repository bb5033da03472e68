"""One HTTP/1.1 connection of the model proxy: h11 implements the protocol, this module moves bytes and has timers.

A request is read whole, within limits, and passed to the handler, which answers by callbacks: a task for each
request would cost more than the relaying. Meanwhile the socket is read, so that a disconnect cancels the answer at
once. Touches only the client's socket.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from typing import Final, Protocol

import h11

from holdfast.wire.http_messages import HOP_BY_HOP_HEADERS, Headers, HttpRequest

log = logging.getLogger(__name__)

#: The request line and headers. Agents send tokens and beta flags, a few hundred bytes each.
MAX_HEAD_BYTES: Final = 64 * 1024
#: Bodies of all connections in memory: room for two of the largest; up to three copies of each may exist.
MAX_HELD_BYTES: Final = 128 * 1024 * 1024
#: Bytes that a client may pipeline while its request is answered, before reading pauses.
AHEAD_BYTES: Final = 256 * 1024
#: Limits for the time between requests, for the arrival of a head, and of a body.
IDLE_SECONDS: Final = 300.0
HEAD_SECONDS: Final = 20.0
BODY_SECONDS: Final = 300.0
#: Between the refusal of an unfinished request and the close of the socket: closing a socket with unread bytes
#: resets it, and the client would lose the answer.
LINGER_SECONDS: Final = 2.0
#: Connections beyond the limit that get an error answer; further ones are dropped, to save descriptors.
REFUSED_CONNECTIONS: Final = 32

#: Headers that are not forwarded. The proxy sends `100 Continue` itself, so `expect` ends here.
_DROPPED_HEADERS: Final = HOP_BY_HOP_HEADERS | {"expect"}


class BadAnswer(Exception):
    """The host's answer cannot be sent as HTTP."""


class Answering(Protocol):
    """An answer under way, such as a task."""

    def cancel(self) -> object: ...


class ProxyState:
    """The handler, the limits and the counters that the connections of one proxy share."""

    def __init__(self, answer: Answer, *, max_connections: int, max_body_bytes: int) -> None:
        self.answer = answer
        self.max_connections = max_connections
        self.max_body_bytes = max_body_bytes
        self.connections: set[HttpConnection] = set()
        #: Refused connections that wait for their client to read the answer.
        self.lingering = 0
        self.held_bytes = 0


class HttpConnection(asyncio.Protocol):
    """Reads requests, one at a time and in order; answers by `begin`, `send`, `flush` and `end`, or `fail`."""

    _transport: asyncio.Transport

    def __init__(self, state: ProxyState) -> None:
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._timer: asyncio.TimerHandle | None = None
        #: When the client must have sent more; None while its request is answered.
        self._deadline: float | None = None
        self._request: h11.Request | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        #: The method and the path of the request, for the log.
        self.what = ""
        self._is_answering = False
        self._answering: Answering | None = None
        self._is_parsing = False
        self._ahead: list[bytes] = []
        self._ahead_bytes = 0
        self._lingering = False
        self._has_no_body = False
        self._out: list[bytes] = []
        self._is_writable = True
        self._on_writable: Callable[[], None] | None = None

    # --- the socket ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # asyncio sets TCP_NODELAY on every TCP socket: a token is sent before the last one is acknowledged.
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._state.connections.add(self)
        state = self._state
        if len(state.connections) > state.max_connections + REFUSED_CONNECTIONS:
            transport.abort()
            return
        if len(state.connections) - state.lingering > state.max_connections:
            self._refuse(503, f"the limit of {self._state.max_connections} connections is reached; close some")
            return
        self._expire_in(IDLE_SECONDS)

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        if self._is_answering:
            self._ahead.append(data)
            self._ahead_bytes += len(data)
            if self._ahead_bytes > AHEAD_BYTES:
                self._transport.pause_reading()
            return
        begins = self._request is None and not self._http.trailing_data[0]
        self._http.receive_data(data)
        self._advance()
        if begins and self._request is None and not self._lingering:
            self._expire_in(HEAD_SECONDS)

    def eof_received(self) -> bool:
        if self._is_answering:
            # No client of a model half-closes its connection: this one has disconnected.
            self._transport.abort()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        self._state.connections.discard(self)
        self._state.lingering -= self._lingering
        self._release_body()
        self._ahead.clear()
        self._out.clear()
        self._on_writable = None
        if self._answering is not None:
            self._answering.cancel()
            self._answering = None

    def pause_writing(self) -> None:
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        resumed, self._on_writable = self._on_writable, None
        if resumed is not None:
            resumed()

    def abort(self) -> None:
        """Abort the connection, so that the client does not take a partial answer for a complete one."""
        self.flush()
        self._transport.abort()

    # --- requests --------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        self._is_parsing = True
        try:
            while not self._is_answering and not self._lingering and not self._transport.is_closing():
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    if self._http.they_are_waiting_for_100_continue:
                        self._write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])))
                        self.flush()
                    return
                if isinstance(event, h11.Request):
                    self._begin_request(event)
                elif isinstance(event, h11.Data):
                    self._add_to_body(bytes(event.data))
                elif isinstance(event, h11.EndOfMessage):
                    self._complete_request()
                else:
                    self._close()
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint, f"not an HTTP/1.1 request: {error}")
        finally:
            self._is_parsing = False

    def _begin_request(self, request: h11.Request) -> None:
        self._request = request
        self._expire_in(BODY_SECONDS)
        length = next((int(value) for name, value in request.headers if name == b"content-length"), 0)
        if length > self._state.max_body_bytes:
            self._refuse(413, f"a body of {length} bytes: the limit is {self._state.max_body_bytes}")

    def _add_to_body(self, data: bytes) -> None:
        self._body.append(data)
        self._body_bytes += len(data)
        self._state.held_bytes += len(data)
        if self._body_bytes > self._state.max_body_bytes:
            self._refuse(413, f"the body exceeds the limit of {self._state.max_body_bytes} bytes")
        elif self._state.held_bytes > MAX_HELD_BYTES:
            self._refuse(503, f"{MAX_HELD_BYTES} bytes of requests are in progress; try again")

    def _complete_request(self) -> None:
        self._deadline = None
        assert self._request is not None
        request = _http_request(self._request, b"".join(self._body))
        self._body.clear()
        self.what = f"{request.method} {request.path}"
        self._is_answering = True
        try:
            answering = self._state.answer(request, self)
        except Exception as error:  # noqa: BLE001 - a bug fails this request and not the connection
            self.fail_unexpectedly(error)
        else:
            if answering is not None:
                self.continue_with(answering)

    def run(self, answer: Coroutine[object, object, None]) -> Answering:
        """Answer by a task, for an answer that has to wait for something else than the host's reply."""
        return self._loop.create_task(self._run(answer))

    def continue_with(self, answering: Answering) -> None:
        """Replace what a disconnect cancels, unless the answer is complete."""
        if self._transport.is_closing():
            answering.cancel()
        elif self._is_answering:
            self._answering = answering

    async def _run(self, answer: Coroutine[object, object, None]) -> None:
        try:
            await answer
        except Exception as error:  # noqa: BLE001 - as above
            self.fail_unexpectedly(error)

    def fail_unexpectedly(self, error: Exception) -> None:
        """Answer with an error that is not the client's, and log the reason."""
        if isinstance(error, BadAnswer):
            log.warning("%s: %s", self.what, error)
            self.fail(502, str(error))
        else:
            log.error("%s failed", self.what, exc_info=error)
            self.fail(500, f"the proxy failed: {type(error).__name__}")

    def _answered(self) -> None:
        self._on_writable = None
        self._release_body()
        if self._is_parsing:
            # Answered without a wait. Other connections get their turn before a pipelined request is read.
            self._loop.call_soon(self._next_request)
        else:
            self._next_request()

    def _next_request(self) -> None:
        self._is_answering, self._answering = False, None
        if self._transport.is_closing() or self._lingering:
            return
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            self._close()
            return
        self._request = None
        self._http.start_next_cycle()
        if self._ahead_bytes > AHEAD_BYTES:
            self._transport.resume_reading()
        for data in self._ahead:
            self._http.receive_data(data)
        self._ahead.clear()
        self._ahead_bytes = 0
        has_more = bool(self._http.trailing_data[0])
        self._expire_in(HEAD_SECONDS if has_more else IDLE_SECONDS)
        if has_more:
            self._advance()

    def _release_body(self) -> None:
        self._state.held_bytes -= self._body_bytes
        self._body.clear()
        self._body_bytes = 0

    # --- answers ---------------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether the status was sent."""
        return self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE)

    def begin(self, status: int, headers: Headers) -> None:
        """Send the status and the headers; without a content-length the body is chunked."""
        try:
            passed = [
                (name.encode("ascii"), value.encode("latin-1"))
                for name, value in headers
                if name.lower() not in _DROPPED_HEADERS
            ]
            response = h11.Response(status_code=status, headers=passed)
        except (h11.LocalProtocolError, UnicodeEncodeError) as error:
            raise BadAnswer(f"the host's answer begins with a head that HTTP does not allow: {error}") from None
        self._has_no_body = status in (204, 304) or (self._request is not None and self._request.method == b"HEAD")
        self._write(self._http.send(response))

    def send(self, data: bytes) -> None:
        """Send a piece of the body, together with other pieces before the next `flush`."""
        if not self._has_no_body:
            self._send_event(h11.Data(data=data))

    def when_writable(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the client has read enough for more: now, or later."""
        if self._is_writable:
            callback()
        else:
            self._on_writable = callback

    def end(self) -> None:
        """End the answer."""
        self._send_event(h11.EndOfMessage())
        self.flush()
        self._answered()

    def _send_event(self, event: h11.Data | h11.EndOfMessage) -> None:
        try:
            self._write(self._http.send(event))
        except h11.LocalProtocolError as error:
            self.abort()
            raise BadAnswer(f"the length of the host's answer is wrong: {error}") from None

    def fail(self, status: int, message: str) -> None:
        """Send an error as the answer, or abort an answer that has begun."""
        if self._transport.is_closing():
            return
        if self.has_begun:
            self.abort()
            return
        retry = (("retry-after", "1"),) if status == 503 else ()
        self.respond(status, error_body(status, message), headers=retry)

    def respond(self, status: int, body: bytes, *, headers: Headers = ()) -> None:
        """Send a complete answer of the proxy itself, as JSON."""
        self.begin(
            status,
            (("content-type", "application/json"), ("content-length", str(len(body))), *headers),
        )
        if not self._has_no_body:
            self._send_event(h11.Data(data=body))
        self.end()

    def _refuse(self, status: int, message: str) -> None:
        """Send an error for a request that is not read further, and close."""
        self._release_body()
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._close()
            return
        body = error_body(status, message)
        length = ("content-length", str(len(body)))
        head = [("content-type", "application/json"), length, ("connection", "close")]
        self._write(self._http.send(h11.Response(status_code=status, headers=head)))
        if self._request is None or self._request.method != b"HEAD":
            self._write(self._http.send(h11.Data(data=body)))
        self.flush()
        self._lingering = True
        self._state.lingering += 1
        self._transport.write_eof()
        self._expire_in(LINGER_SECONDS)

    # --- writing and time ------------------------------------------------------------------------------------

    def _write(self, data: bytes | None) -> None:
        if data:
            self._out.append(data)

    def flush(self) -> None:
        """Send what was written since the last call, in one write."""
        if self._out:
            data = b"".join(self._out)
            self._out.clear()
            self._transport.write(data)

    def _close(self) -> None:
        self.flush()
        self._transport.close()

    def _expire_in(self, seconds: float) -> None:
        """Set the deadline. A timer that is due before it stays: three deadlines pass in an ordinary request."""
        self._deadline = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > self._deadline:
            self._stop_timer()
            self._timer = self._loop.call_at(self._deadline, self._check_deadline)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_deadline(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._check_deadline)
        elif self._lingering:
            self._transport.abort()
        elif self._request is None and not self._http.trailing_data[0]:
            self._close()
        else:
            self._refuse(408, "the request did not arrive in time")


#: Begins the answer to one request on its connection; `end`, `respond` or `fail` completes it. A disconnect of the
#: client cancels the returned object.
Answer = Callable[[HttpRequest, HttpConnection], Answering | None]


def error_body(status: int, message: str) -> bytes:
    """Return an error that clients of OpenAI, Anthropic and Google all read: the proxy has no dialect."""
    kind = "api_error" if status >= 500 else "invalid_request_error"
    error = {"type": kind, "code": status, "status": kind.upper(), "message": message, "param": None}
    return json.dumps({"type": "error", "error": error}).encode()


def _http_request(request: h11.Request, body: bytes) -> HttpRequest:
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers]
    named = [value for name, value in headers if name == "connection"]
    left_out = {word.strip().lower() for value in named for word in value.split(",")} | _DROPPED_HEADERS
    target = request.target.decode("latin-1")
    if target.lower().startswith(
        ("http://", "https://")
    ):  # the absolute form, of a client that is configured to use a proxy
        target = "/" + target.partition("://")[2].partition("/")[2]
    path, _, query = target.partition("?")
    passed = tuple(pair for pair in headers if pair[0] not in left_out and pair[0] != "content-length")
    return HttpRequest(request.method.decode("latin-1"), path, query, passed, body)
