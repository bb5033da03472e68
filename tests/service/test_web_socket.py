"""The streams of the HTTP port as WebSockets, with a real client: tokens, origins, positions, acknowledgements."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from holdfast.service.api import Chunk
from holdfast.service.fronts.connections import ConnectionLimits
from holdfast.service.fronts.http import HttpSettings
from holdfast.service.settings import ServiceSettings

from .fake_sessions import ANNA, BEN, Fronts, OverHttp, Seen, chunk, no_end

PATH = "/holdfast.session.v1.SessionService/"


@asynccontextmanager
async def opened(fronts: Fronts, method: str = "StreamOutput", **headers: str) -> AsyncIterator[ClientConnection]:
    address = fronts.http.url.replace("http", "ws") + PATH + method
    async with asyncio.timeout(30), connect(address, additional_headers=headers) as socket:
        yield socket


async def ask(socket: ClientConnection, token: str = ANNA, session_id: str = "s1", **fields: Any) -> None:
    first = {"authorization": f"Bearer {token}", "request": {"sessionId": session_id}, **fields}
    await socket.send(json.dumps(first))


async def read(socket: ClientConnection) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(await socket.recv())
    return message


async def test_a_stream_resumes_after_its_token_and_ends() -> None:
    seen = Seen()
    async with OverHttp(observer=seen) as fronts, opened(fronts) as socket:
        await ask(socket, request={"sessionId": "s1", "since": {"value": "00000001"}})
        replies = [(await read(socket))["reply"] for _ in range(2)]
        assert [base64.b64decode(each["payload"]) for each in replies] == [b"line 1\n", b"line 2\n"]
        assert replies[-1]["token"] == {"value": "00000003"}
        assert await read(socket) == {"end": {}}
        with pytest.raises(ConnectionClosed):
            await socket.recv()
    assert seen.calls == [("http", "StreamOutput", "anna", "OK")]


async def test_a_binary_message_has_the_output_beside_the_json() -> None:
    async with OverHttp() as fronts, opened(fronts) as socket:
        await ask(socket, binary=True)
        message = await socket.recv()
        assert isinstance(message, bytes)
        length = int.from_bytes(message[:4], "big")
        reply = json.loads(message[4 : 4 + length])["reply"]
        assert (reply["payload"], message[4 + length :]) == ("", b"line 0\n")
        assert reply["token"] == {"value": "00000001"}


@pytest.mark.parametrize(
    ("first", "code"),
    [
        ("no JSON", "invalid_argument"),
        ("[]", "invalid_argument"),
        ('{"request": {"sessionId": "s1"}}', "invalid_argument"),
        ('{"authorization": "Bearer x", "request": {"sessionID": "s1", "other": 1}}', "invalid_argument"),
        ('{"authorization": "Bearer wrong", "request": {"sessionId": "s1"}}', "unauthenticated"),
        ('{"authorization": "", "request": {"sessionId": "s1"}}', "unauthenticated"),
        (json.dumps({"authorization": f"Bearer {BEN}", "request": {"sessionId": "s1"}}), "not_found"),
        (json.dumps({"authorization": f"Bearer {ANNA}", "request": {}}), "invalid_argument"),
    ],
)
async def test_a_wrong_first_message_is_refused_by_its_code(first: str, code: str) -> None:
    async with OverHttp() as fronts, opened(fronts) as socket:
        await socket.send(first)
        assert (await read(socket))["error"]["code"] == code
        assert fronts.sessions.open == 0


async def test_a_first_message_that_is_late_or_too_large_is_refused() -> None:
    limits = ConnectionLimits(head_seconds=0.2)
    async with OverHttp(http_settings=HttpSettings(listen="127.0.0.1:0", connections=limits)) as fronts:
        async with opened(fronts) as socket:
            assert (await read(socket))["error"]["code"] == "deadline_exceeded"
        async with opened(fronts) as socket:
            await socket.send("x" * 200_000)
            with pytest.raises(ConnectionClosed):
                await socket.recv()


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("GetSession", {}),
        ("Nothing", {}),
        ("StreamOutput", {"Origin": "http://attacker.example"}),
        ("StreamOutput", {"Origin": "null"}),
        ("StreamOutput", {"Host": "rebound.example"}),
    ],
)
async def test_other_methods_and_pages_of_other_sites_get_no_socket(method: str, headers: dict[str, str]) -> None:
    async with OverHttp() as fronts:
        with pytest.raises(InvalidStatus):
            async with opened(fronts, method, **headers):
                pass
        assert fronts.sessions.calls == []


async def test_a_page_of_the_service_itself_gets_one() -> None:
    async with OverHttp() as fronts, opened(fronts, Origin=fronts.http.url) as socket:
        await ask(socket)
        assert "reply" in await read(socket)


async def test_a_client_that_disconnects_ends_its_stream_and_its_connection() -> None:
    async with OverHttp(rates=ServiceSettings(concurrent_streams=1)) as fronts:
        fronts.sessions.chunks = no_end
        for _ in range(3):
            async with opened(fronts) as socket:
                await ask(socket)
                assert "reply" in await read(socket)
                assert fronts.sessions.open == 1
                async with opened(fronts) as second:
                    await ask(second)
                    assert (await read(second))["error"]["code"] == "resource_exhausted"
            await fronts.sessions.until_open(0)


async def test_a_service_that_stops_says_so() -> None:
    async with OverHttp() as fronts, opened(fronts) as socket:
        fronts.sessions.chunks = no_end
        await ask(socket)
        await read(socket)
        fronts.admission.stop()
        assert (await read(socket))["error"]["code"] == "unavailable"


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - the state of a transport, which notifies no one
        await asyncio.sleep(0)


async def test_a_service_stops_while_a_client_that_closed_has_not_read_everything() -> None:
    async def large(since: str) -> AsyncIterator[Chunk]:
        yield chunk(bytes(16 * 1024 * 1024))
        await asyncio.Event().wait()

    async with asyncio.timeout(30), OverHttp() as fronts:
        fronts.sessions.chunks = large
        socket = await connect(fronts.http.url.replace("http", "ws") + PATH + "StreamOutput")
        socket.transport.pause_reading()
        await ask(socket)
        assert fronts.http._server is not None
        (held,) = fronts.http._server.server_state.connections
        await until(lambda: held.transport.get_write_buffer_size() > 0)
        socket.protocol.send_close(1000)
        socket.transport.write(b"".join(socket.protocol.data_to_send()))
        await until(held.transport.is_closing)
        await fronts.http.stop(0)
        socket.transport.abort()


async def test_at_most_a_window_is_sent_before_it_is_acknowledged() -> None:
    made = 0

    async def many(since: str) -> AsyncIterator[Chunk]:
        nonlocal made
        while True:
            made += 1
            yield chunk(b"x", f"{made:08d}")

    async with OverHttp() as fronts, opened(fronts) as socket:
        fronts.sessions.chunks = many
        await ask(socket, window=4)
        for _ in range(4):
            await read(socket)
        # A ping is answered in order: nothing more is on its way.
        await (await socket.ping())
        assert made == 4
        await socket.send(json.dumps({"ack": 3}))
        for _ in range(3):
            await read(socket)
        await (await socket.ping())
        assert made == 7
        await socket.send("not an acknowledgement")
        await socket.send(json.dumps({"ack": 7}))
        await read(socket)
