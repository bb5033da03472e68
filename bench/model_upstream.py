"""`python -m bench.model_upstream`: a provider of models that answers at once, or streams at a pace.

Prints the port on which it listens, on 127.0.0.1. The body of a request selects the answer: `stream`, how many
`events`, and `every_ms` how often one comes. Touches nothing but its sockets.
"""

from __future__ import annotations

import asyncio
import json
from time import perf_counter
from typing import Final

_WHOLE: Final = json.dumps(
    {
        "id": "c-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "word " * 200}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 2000, "completion_tokens": 200, "total_tokens": 2200},
    }
).encode()
_ANSWER: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
    len(_WHOLE),
    _WHOLE,
)
_STREAM: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
#: The time on the clock that all processes share, so that the client can compute the delay of an event.
_EVENT: Final = (
    b'data: {"id":"chatcmpl-0123456789abcdef01234567","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"model-of-the-bench","system_fingerprint":"fp_0123456789","choices":[{"index":0,"delta":{"content":'
    b'" word"},"logprobs":null,"finish_reason":null}],"sent":%.6f}\n\n'
)
_USAGE: Final = b'data: {"choices":[],"usage":{"prompt_tokens":2000,"completion_tokens":%d}}\n\n'


class Provider(asyncio.Protocol):
    """One connection: requests in order, each answered before the next is read."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._got = b""
        self._streaming: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._streaming is not None:
            self._streaming.cancel()

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, end, rest = self._got.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if not end or len(rest) < length:
            return
        self._got = rest[length:]
        requested = json.loads(rest[:length])
        if requested.get("stream"):
            self._streaming = asyncio.create_task(self._stream(requested["events"], requested["every_ms"] / 1000))
        else:
            self._transport.write(_ANSWER)

    async def _stream(self, events: int, every: float) -> None:
        began = perf_counter()
        self._transport.write(_STREAM)
        for number in range(events):
            # Without a pace every event is a write of its own all the same, as a model's is.
            await asyncio.sleep(max(0.0, began + number * every - perf_counter()))
            self._chunk(_EVENT % perf_counter())
        self._chunk(_USAGE % events)
        self._chunk(b"data: [DONE]\n\n")
        self._transport.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data))


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Provider, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
