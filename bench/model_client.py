"""`python -m bench.model_client`: sends requests to a model over HTTP, straight or through a bridge.

Each line on stdin is an order as JSON: the port, how many requests one after the other, and by how many
connections at once. The line on stdout that answers it has the times. Touches nothing but its sockets.
"""

from __future__ import annotations

import asyncio
import json
import sys
from time import perf_counter
from typing import Any, Final

import msgspec

#: As long as an agent's first prompt.
_PROMPT: Final = "Look at the tests, and say which of them fail and why. " * 150


class Order(msgspec.Struct, frozen=True):
    """One order. `events` 0 requests a whole answer."""

    port: int
    requests: int = 1
    at_once: int = 1
    events: int = 0
    every_ms: float = 0.0


class Took(msgspec.Struct, frozen=True):
    """Seconds: all of it; each request to its first token, and to its end; each event from its making to here."""

    seconds: float
    firsts: list[float]
    ends: list[float]
    lags: list[float]


class Asking(asyncio.Protocol):
    """One connection, kept open: a request, its whole answer, the next request."""

    _transport: asyncio.Transport

    def __init__(self, order: Order) -> None:
        self._order = order
        body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": _PROMPT}]}
        if order.events:
            options = {"include_usage": True}
            body |= {"stream": True, "stream_options": options, "events": order.events, "every_ms": order.every_ms}
        request_body = json.dumps(body).encode()
        lines = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{order.port}\r\nauthorization: Bearer none\r\n"
            f"content-type: application/json\r\ncontent-length: {len(request_body)}\r\n\r\n"
        )
        self._request = lines.encode() + request_body
        self._got = b""
        #: The beginning of an event.
        self._rest = b""
        self._is_chunked: bool | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked_at = 0.0
        self._events = 0
        self.firsts: list[float] = []
        self.ends: list[float] = []
        self.lags: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_exception(ConnectionError(f"the connection ended in an answer: {error}"))

    async def run(self) -> None:
        for _ in range(self._order.requests):
            self._ended = asyncio.get_running_loop().create_future()
            self._is_chunked, self._events = None, 0
            self._asked_at = perf_counter()
            self._transport.write(self._request)
            await self._ended
            if self._events != self._order.events:
                raise ConnectionError(f"{self._events} events came, of {self._order.events}")
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        got = self._got + data
        if self._is_chunked is None:
            head, end, rest = got.partition(b"\r\n\r\n")
            if not end:
                self._got = got
                return
            if not head.startswith(b"HTTP/1.1 200"):
                raise ConnectionError(f"answered with {got!r}")
            self._is_chunked, got = b"chunked" in head.lower(), rest
            self._length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if self._is_chunked:
            self._got = self._chunks(got, now)
        elif len(got) >= self._length:
            self._got = b""
            self._end(now)
        else:
            self._got = got

    def _chunks(self, got: bytes, now: float) -> bytes:
        """The bytes after the last whole chunk."""
        at = 0
        while (line := got.find(b"\r\n", at)) >= 0:
            size = int(got[at:line], 16)
            if len(got) < line + 4 + size:
                break
            at = line + 4 + size
            if size == 0:
                self._end(now)
                break
            self._take(got[line + 2 : at - 2], now)
        return got[at:]

    def _take(self, data: bytes, now: float) -> None:
        """Count the events. A read of a full socket may end inside of one, here or on the way."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            _, sent, at = event.partition(b'"sent":')
            if not sent:
                continue
            if not self._events:
                self.firsts.append(now - self._asked_at)
            self._events += 1
            self.lags.append(now - float(at[: at.index(b"}")]))

    def _end(self, now: float) -> None:
        self.ends.append(now - self._asked_at)
        if not self._ended.done():
            self._ended.set_result(None)


async def carry_out(order: Order) -> Took:
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(lambda: Asking(order), "127.0.0.1", order.port) for _ in range(order.at_once)
    ]
    began = perf_counter()
    await asyncio.gather(*(asking.run() for _, asking in made))
    taken = perf_counter() - began
    requested = [asking for _, asking in made]
    return Took(
        taken,
        [each for asking in requested for each in asking.firsts],
        [each for asking in requested for each in asking.ends],
        [each for asking in requested for each in asking.lags],
    )


def main() -> None:
    # A line at a time, without reading ahead: there is nothing else to do.
    for line in sys.stdin.buffer:
        took = asyncio.run(carry_out(msgspec.json.decode(line, type=Order)))
        sys.stdout.buffer.write(msgspec.json.encode(took) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
