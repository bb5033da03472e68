"""The Connect protocol with JSON messages over HTTP/1.1, as the E2B SDKs use it: unary calls and streams.

`Envelopes` and the functions beside it are pure; `unary` and `stream` answer one ASGI request.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Final, TypeVar

import msgspec
from starlette.types import Receive, Send

from holdfast.errors import HoldfastError
from holdfast.integrations.e2b.problems import CONNECT_STATUS, Problem, invalid, problem_of, timed_out

#: The header of an envelope: flags and the length of the message.
_HEADER: Final = struct.Struct(">BI")
_END_STREAM: Final = 0x02
_COMPRESSED: Final = 0x01
UNARY_TYPES: Final = frozenset({"application/json"})
STREAM_TYPES: Final = frozenset({"application/connect+json"})
#: The longest `Connect-Timeout-Ms`, by the protocol: ten digits.
_TIMEOUT_DIGITS: Final = 10
#: The bounds of `Keepalive-Ping-Interval` in seconds: proxies cut silent streams, and pings are no load.
_KEEPALIVE: Final = (1, 3600)

M = TypeVar("M")


def decode(data: bytes, kind: type[M]) -> M:
    """A message of this kind. Unknown fields are ignored, as in Protocol Buffers."""
    try:
        return msgspec.json.decode(data or b"{}", type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"message: {error}") from None


def envelope(message: Any, flags: int = 0) -> bytes:
    data = msgspec.json.encode(message)
    return _HEADER.pack(flags, len(data)) + data


class Last(msgspec.Struct, frozen=True):
    """The last message of a stream, which is sent together with the end of the stream."""

    message: Any


def end_of_stream(problem: Problem | None) -> bytes:
    error = {} if problem is None else {"error": {"code": problem.code, "message": problem.message}}
    return envelope(error, _END_STREAM)


class Envelopes:
    """The messages in a byte stream of envelopes; a message of more than `limit` bytes is refused."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._ended = False

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are complete with these bytes."""
        self._buffer += data
        found = []
        while len(self._buffer) >= _HEADER.size:
            flags, length = _HEADER.unpack_from(self._buffer)
            if flags & _COMPRESSED:
                raise Problem(501, "unimplemented", "compressed messages: this server does not have them")
            if length > self._limit:
                raise Problem(413, "resource_exhausted", f"a message of more than {self._limit} bytes")
            if len(self._buffer) < _HEADER.size + length:
                break
            message = bytes(self._buffer[_HEADER.size : _HEADER.size + length])
            del self._buffer[: _HEADER.size + length]
            if flags & _END_STREAM or self._ended:
                self._ended = True
                continue
            found.append(message)
        return found

    def close(self) -> None:
        """The stream has ended."""
        if self._buffer:
            raise invalid("the request ends within a message")


def timeout_of(headers: Mapping[str, str]) -> float | None:
    """The seconds of `Connect-Timeout-Ms`; None without the header."""
    text = headers.get("connect-timeout-ms")
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > _TIMEOUT_DIGITS:
        raise invalid(f"Connect-Timeout-Ms: {text[:20]!r} is not a number of milliseconds")
    return int(text) / 1000


def keepalive_of(headers: Mapping[str, str]) -> float | None:
    """The seconds between two keepalive messages of a stream; None for none."""
    text = headers.get("keepalive-ping-interval", "")
    if not text.isascii() or not text.isdecimal() or len(text) > 6:
        return None
    return float(min(max(int(text), _KEEPALIVE[0]), _KEEPALIVE[1]))


async def body_pieces(receive: Receive, idle_seconds: float) -> AsyncIterator[bytes]:
    """The body of a request; a client that sends nothing for `idle_seconds` is refused."""
    while True:
        try:
            async with asyncio.timeout(idle_seconds):
                message = await receive()
        except TimeoutError:
            raise Problem(408, "deadline_exceeded", f"no data of the request for {idle_seconds:g} s") from None
        if message["type"] == "http.disconnect":
            raise Problem(499, "canceled", "the client closed the connection")
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body"):
            return


async def whole_body(receive: Receive, limit: int, idle_seconds: float) -> bytes:
    body = bytearray()
    async for piece in body_pieces(receive, idle_seconds):
        body += piece
        if len(body) > limit:
            raise Problem(413, "resource_exhausted", f"a request of more than {limit} bytes")
    return bytes(body)


async def reply(send: Send, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def reply_problem(send: Send, problem: Problem) -> None:
    """An error of a unary call."""
    status = CONNECT_STATUS.get(problem.code, 500) if problem.status != 502 else 502
    await reply(send, status, msgspec.json.encode({"code": problem.code, "message": problem.message}))


async def stream(
    receive: Receive,
    send: Send,
    messages: AsyncGenerator[Any, None],
    *,
    sandbox_id: str,
    timeout: float | None = None,
    keepalive: float | None = None,
    keepalive_message: Any = None,
) -> None:
    """Send the messages of a generator as a stream, until it ends, the client leaves or the time is over.

    The generator is closed in each case. An error of it is the end of the stream.
    """
    headers = [(b"content-type", b"application/connect+json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    pump = asyncio.ensure_future(_pump(send, messages))
    gone = asyncio.ensure_future(_disconnected(receive))
    pinging = None if keepalive is None else asyncio.ensure_future(_ping(send, keepalive, keepalive_message))
    problem: Problem | None = None
    try:
        await asyncio.wait((pump, gone), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if pump.done():
            if await pump:
                return
        elif gone.done():
            return
        else:
            problem = timed_out()
    except Problem as raised:
        problem = raised
    except HoldfastError as error:
        problem = problem_of(error, sandbox_id)
    finally:
        tasks = [task for task in (pump, gone, pinging) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await messages.aclose()
    with contextlib.suppress(OSError):
        await send({"type": "http.response.body", "body": end_of_stream(problem)})


async def _pump(send: Send, messages: AsyncGenerator[Any, None]) -> bool:
    """Send the messages; returns whether the end of the stream was sent with the last one."""
    async for message in messages:
        if isinstance(message, Last):
            body = envelope(message.message) + end_of_stream(None)
            await send({"type": "http.response.body", "body": body})
            return True
        await send({"type": "http.response.body", "body": envelope(message), "more_body": True})
    return False


async def _ping(send: Send, seconds: float, message: Any) -> None:
    ping = envelope(message)
    while True:
        await asyncio.sleep(seconds)
        await send({"type": "http.response.body", "body": ping, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
