"""A provider of models for the bridge's tests: HTTP on 127.0.0.1, scripted by the model's name, in this process.

It records the requests, holds a stream until a test lets it go on, and notices a client that leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec

USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


class Asked(msgspec.Struct, frozen=True):
    """One request as it arrived."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class FakeProvider:
    """A provider on a port of its own; `_answer` has the script."""

    def __init__(self) -> None:
        self.requested: list[Asked] = []
        self.go_on = asyncio.Event()
        self.left = asyncio.Event()
        self.waiting = asyncio.Event()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def serve(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)

    async def aclose(self) -> None:
        assert self._server is not None
        self.go_on.set()
        self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    request = await _read(reader)
                    self.requested.append(request)
                    await self._answer(request, reader, writer)
        finally:
            writer.close()

    async def _answer(self, request: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = request.json if request.body else {}
        model = body.get("model", "")
        if model == "echo":
            # A careless provider refuses a key with an echo of the whole request.
            body = {"error": {"message": f"not like this: {request.headers}", "type": "invalid_request_error"}}
            await _whole(writer, 400, body, {"x-request-id": "r-1", "set-cookie": "a=b", "x-echo": "no"})
        elif model == "unauthorized":
            await _whole(writer, 401, {"error": {"message": "Incorrect API key provided: sk-ab***yz"}})
        elif model == "moved":
            await _whole(writer, 307, {}, {"location": "http://127.0.0.1:9/"})
        elif model == "hang":
            self.waiting.set()
            await self._until_left(reader)
        elif body.get("stream"):
            await self._stream(body, reader, writer)
        elif not request.body:
            await _whole(writer, 200, {"object": "list", "data": [{"id": "theirs", "object": "model"}]})
        else:
            await _whole(writer, 200, {**_completion("hello"), "usage": USAGE})

    async def _stream(
        self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        _chunk(writer, _event(_delta("one")))
        await writer.drain()
        self.waiting.set()
        if body["model"] == "endless":
            await self._until_left(reader)
            return
        await self.go_on.wait()
        _chunk(writer, _event(_delta("two")))
        if (body.get("stream_options") or {}).get("include_usage"):
            _chunk(writer, _event({**_delta(""), "choices": [], "usage": USAGE}))
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _until_left(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
        self.left.set()
        raise ConnectionResetError


@contextlib.asynccontextmanager
async def fake_provider() -> AsyncIterator[FakeProvider]:
    provider = FakeProvider()
    await provider.serve()
    try:
        yield provider
    finally:
        await provider.aclose()


async def _read(reader: asyncio.StreamReader) -> Asked:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
    return Asked(method, target, headers, await reader.readexactly(int(headers.get("content-length", "0"))))


async def _whole(
    writer: asyncio.StreamWriter, status: int, body: dict[str, Any], headers: dict[str, str] | None = None
) -> None:
    data = json.dumps(body).encode()
    body = {"content-type": "application/json", "content-length": str(len(data)), **(headers or {})}
    lines = [f"HTTP/1.1 {status} Told", *(f"{name}: {value}" for name, value in body.items())]
    writer.write("\r\n".join([*lines, "", ""]).encode() + data)
    await writer.drain()


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _completion(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "c-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


def _delta(text: str) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
