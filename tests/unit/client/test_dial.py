"""Addresses: which are understood, and the error for a wrong one."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from holdfast.client.connection.channel_connection import ChannelConnection
from holdfast.client.dial import describe, dialer, open_connection
from holdfast.errors import (
    CommandNotFound,
    ConnectionLost,
    HandshakeFailed,
    InvalidParams,
    MessageTooLarge,
    MethodNotFound,
)
from holdfast.wire import messages as m

SPEAKS = """
import sys
request = sys.stdin.readline()
print('{"id":1,"result":{"sessionId":"s","encoding":"json","serverVersion":"9","protocol":1,"resumed":false}}')
sys.stdout.flush()
assert "initialized" in sys.stdin.readline()
sys.stdin.read()
"""


@pytest.mark.parametrize("address", ["", "unix:", "ws:host", "docker", "ftp://x", "stdio:", "LOCAL"])
def test_what_is_no_address_is_named(address: str) -> None:
    with pytest.raises(InvalidParams, match="is no address"):
        dialer(address)


@pytest.mark.parametrize("address", ["local", "unix:/s", "ws://h:1", "wss://h", "stdio:cat -u", ("cat", "-u")])
def test_every_kind_of_address_is_understood(address: str | tuple[str, ...]) -> None:
    assert callable(dialer(address))


def test_a_command_is_described_as_one_would_type_it() -> None:
    assert describe(["docker", "exec", "a b"]) == "docker exec 'a b'"
    assert describe("unix:/s") == "unix:/s"


async def test_nobody_at_the_address(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost, match=r"none\.sock"):
        await open_connection(f"unix:{tmp_path}/none.sock")
    with pytest.raises(CommandNotFound, match="no-such"):
        await open_connection(["/no-such"])


async def test_a_command_that_speaks_is_a_server_and_ends_with_the_connection() -> None:
    connection = await open_connection([sys.executable, "-c", SPEAKS])
    assert connection.server is not None
    assert connection.server.server_version == "9"
    await connection.aclose()


async def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(ConnectionLost, match="exit code 3: no such container"):
        await open_connection(["sh", "-c", "echo no such container >&2; exit 3"])


# --- servers that answer with what no client takes ----------------------------------------------------------------

_SESSION = {"sessionId": "s", "encoding": "json", "serverVersion": "9", "protocol": 1, "resumed": False}


async def test_half_a_surrogate_pair_in_a_reply_fails_the_call_on_the_first_channel(tmp_path: Path) -> None:
    dials = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal dials
        dials += 1
        async for line in reader:
            request: dict[str, Any] = json.loads(line)
            if request["method"] == "initialize":
                writer.write(json.dumps({"id": request["id"], "result": _SESSION}).encode() + b"\n")
            elif "id" in request:
                writer.write(b'{"id":%d,"result":{"os":"\\ud800"}}\n' % request["id"])
        writer.close()

    path = tmp_path / "s"
    async with await asyncio.start_unix_server(answer, path):
        connection = await open_connection(f"unix:{path}")
        with pytest.raises(HandshakeFailed, match=rf"^unix:{path}: the reply to environment/info"):
            await connection.call(m.ENVIRONMENT_INFO, m.Empty())
        await connection.aclose()
    assert dials == 1


async def test_a_method_that_an_earlier_server_lacks_is_explained(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for line in reader:
            request: dict[str, Any] = json.loads(line)
            if request["method"] == "initialize":
                writer.write(json.dumps({"id": request["id"], "result": _SESSION}).encode() + b"\n")
            elif "id" in request:
                error = {"code": -32601, "message": f"no method {request['method']!r}"}
                writer.write(json.dumps({"id": request["id"], "error": error}).encode() + b"\n")
        writer.close()

    path = tmp_path / "s"
    async with await asyncio.start_unix_server(answer, path):
        connection = await open_connection(f"unix:{path}")
        expected = rf"^unix:{path}: no method 'environment/info' in its server, holdfast 9, which is older than"
        with pytest.raises(MethodNotFound, match=expected):
            await connection.call(m.ENVIRONMENT_INFO, m.Empty())
        await connection.aclose()


async def test_a_reply_over_the_limit_of_a_websocket_fails_the_call_and_is_not_requested_again() -> None:
    requests: list[str] = []

    async def answer(socket: ServerConnection) -> None:
        async for text in socket:
            request: dict[str, Any] = json.loads(text)
            requests.append(request["method"])
            if request["method"] == "initialize":
                await socket.send(json.dumps({"id": request["id"], "result": _SESSION}))
            elif request["method"] == "environment/info":
                await socket.send(json.dumps({"id": request["id"], "result": {"os": "x" * 2000}}))
            elif request["method"] == "ping":
                await socket.send(json.dumps({"id": request["id"], "result": {}}))

    async with serve(answer, "127.0.0.1", 0) as server:
        address = f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        connection = ChannelConnection(dialer(address, token="t", max_message_bytes=1000), address=address)
        await connection.open()
        with pytest.raises(MessageTooLarge, match=r"environment/info: ws://127\.0\.0\.1:.* over 1000 bytes"):
            await connection.call(m.ENVIRONMENT_INFO, m.Empty())
        assert await connection.call(m.PING, m.Empty()) == m.Empty()
        await connection.aclose()
    assert requests.count("environment/info") == 1
