"""Properties of the bridge's parsers: requests of every dialect, streams of events, HTTP from inside a sandbox.

Targets as in `targets`. The proxy's connection runs on an event loop, with a transport that is only memory.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import h11
import msgspec

from fuzz.target import Target, cut_at, places_of, target
from holdfast.bridge.dialects import (
    DIALECTS,
    canonical_request,
    embeddings,
    model_and_stream,
    requested_tokens,
    route_of,
)
from holdfast.bridge.dialects.fields import checked_body
from holdfast.bridge.response_parser import MalformedResponse, ResponseHead, ResponseParser
from holdfast.bridge.sse import ServerSentEvent, SseReader, sse
from holdfast.bridge.types import ModelReply
from holdfast.errors import InvalidParams
from holdfast.proxies.model.http_connection import HttpConnection, ProxyState
from holdfast.wire.http_messages import HttpRequest

PATHS: Final = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1beta/models/m:generateContent",
    "/v1beta/models/m:streamGenerateContent",
    "/v1beta/models/m:countTokens",
)
_EVENT_LIMIT: Final = 256
_BODY_LIMIT: Final = 512


def targets() -> dict[str, Target]:
    """Every target of this module by its name."""
    return {each.name: each for each in globals().values() if isinstance(each, Target)}


# --- dialects -----------------------------------------------------------------------------------------------------


def fuzz_requests(data: bytes) -> int:
    """How many paths could read `data`. A request is read or InvalidParams: whatever else is raised is a bug."""
    return sum(_read(HttpRequest("POST", path, "", (), data)) for path in PATHS)


def _read(request: HttpRequest) -> bool:
    route = route_of(request)
    if route is None:
        raise AssertionError(f"no route for {request.path}")
    dialect = DIALECTS[route.dialect]
    try:
        body = checked_body(request)
        model_and_stream(body, request, route)
        sent = canonical_request(request, body)
        if canonical_request(sent, checked_body(sent)) != sent:
            raise AssertionError("a body that was checked and written again reads differently")
        requested_tokens(sent, body, route)
        if route.operation == "embeddings":
            embeddings.parse(request)
            return True
        parsed = dialect.parse(request)
    except InvalidParams:
        return False
    # A request that was read can be answered, with the settings that the answer repeats.
    dialect.render(ModelReply(), parsed)
    stream = dialect.stream(parsed)
    stream.begin()
    stream.end()
    return True


_TOOL: Final = {
    "name": "t",
    "description": "d",
    "parameters": {"type": "object"},
    "input_schema": {"type": "object"},
}


@target(
    msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
    msgspec.json.encode(
        {
            "model": "m",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "tools": [{"type": "function", "function": _TOOL}, _TOOL],
            "max_tokens": 5,
            "stream": True,
        }
    ),
    msgspec.json.encode({"model": "m", "input": [{"role": "user", "content": "hi"}], "tools": [{"type": "x"}]}),
    msgspec.json.encode({"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}),
)
def dialect_requests(data: bytes) -> None:
    """Each dialect reads a request whole, or refuses it by InvalidParams; what is read can be answered."""
    fuzz_requests(data)


@target(
    b"\x03\x01\x02\x05" + sse({"a": 1}, "delta") + sse(b"[DONE]") + b": a comment\n\n" + sse(b"x" * 300),
    b"\x02\x01\x01data: a\r\ndata: b\r\rdata: c\n\n",
)
def server_sent_events(data: bytes) -> None:
    """Any cut of the stream gives the same events, and none is larger than the limit."""
    locations, stream = places_of(data)
    whole = _events([stream])
    assert _events(cut_at(stream, locations)) == whole
    assert all(len(event.data) <= _EVENT_LIMIT for event in whole)


def _events(pieces: list[bytes]) -> list[ServerSentEvent]:
    reader = SseReader(_EVENT_LIMIT)
    return [event for piece in pieces for event in reader.feed(piece)]


# --- HTTP ---------------------------------------------------------------------------------------------------------


class _Transport(asyncio.Transport):
    """As much of a transport as a connection uses, with a client that reads everything."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.written += data

    def write_eof(self) -> None:
        """The client reads what is there."""

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def pause_reading(self) -> None:
        """The client was asked to stop sending, and may have sent the rest already."""

    def resume_reading(self) -> None:
        """The same."""


@target(
    b"\x02\x05\x20POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x00POST /v1/responses HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"\x00POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 600\r\n\r\n" + b"x" * 600,
    b"\x00HEAD http://x/v1/models?a=b HTTP/1.1\r\nHost: x\r\nConnection: close, x-hop\r\nX-Hop: 1\r\n\r\n",
)
def proxy_http(data: bytes) -> None:
    """Any cut of what a client sends is the same requests; each is answered or refused in HTTP; nothing is held."""
    locations, stream = places_of(data)
    whole = asyncio.run(_talk([stream]))
    assert asyncio.run(_talk(cut_at(stream, locations))) == whole


async def _talk(pieces: list[bytes]) -> list[HttpRequest]:
    requested: list[HttpRequest] = []

    def answer(request: HttpRequest, connection: HttpConnection) -> None:
        requested.append(request)
        connection.respond(200, b"{}")

    transport = _Transport()
    shared = ProxyState(answer, max_connections=1, max_body_bytes=_BODY_LIMIT)
    connection = HttpConnection(shared)
    connection.connection_made(transport)
    for piece in pieces:
        if piece and not transport.closing:
            connection.data_received(piece)
            await _settle()
    connection.connection_lost(None)
    await _settle()
    assert (shared.held_bytes, shared.lingering, shared.connections) == (0, 0, set())
    assert all(len(request.body) <= _BODY_LIMIT for request in requested)
    _read_answers(transport.written, requested)
    return requested


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def _read_answers(written: bytes, requested: list[HttpRequest]) -> None:
    """One for each request, as a client reads them, and at most one refusal after them."""
    for request in requested:
        method = "HEAD" if request.method == "HEAD" else "GET"
        status, written = _one_answer(written, method)
        assert status == 200
    if written:
        status, written = _one_answer(written, "GET")
        assert status >= 400
        assert not written


def _one_answer(written: bytes, method: str) -> tuple[int, bytes]:
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(written)
    status = 0
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        assert event is not h11.NEED_DATA, written
        if isinstance(event, h11.Response):
            status = event.status_code
    return status, client.trailing_data[0]


_CHUNKED: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@target(
    b"\x03\x01\x02\x05" + _CHUNKED + b"3\r\none\r\n5;a=b\r\nthree\r\n0\r\na: b\r\n\r\nHTTP/1.1 200 OK\r\n",
    b"\x02\x02\x03" + _CHUNKED + b"ffffffffffffffff\r\nx",
    b"\x01\x04" + b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nonetwo",
)
def provider_response(data: bytes) -> None:
    """A response is the same however the connection cuts it, or is refused however the connection cuts it."""
    locations, stream = places_of(data)
    assert _response_of([stream]) == _response_of(cut_at(stream, locations))


def _response_of(pieces: list[bytes]) -> tuple[ResponseHead | None, bytes, bool] | None:
    response = ResponseParser("POST")
    body = b""
    try:
        for piece in pieces:
            response.feed(piece)
            body += response.take()
    except MalformedResponse:
        return None
    return response.head, body, response.is_complete
