"""WebSocket channels over real sockets: admission, messages, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Origin

from holdfast.errors import ConnectionLost, Forbidden, MessageTooLarge, Unauthorized
from holdfast.transport import websocket
from holdfast.transport.channel import SpoolFrame
from holdfast.wire.framing import Oversized

LIMIT = 1024 * 1024
TOKEN = "correct horse"


class End:
    """Either end: records the messages and the loss of the connection."""

    def __init__(self, channel: websocket.WebSocketChannel | None = None) -> None:
        self.channel = channel
        self.messages: asyncio.Queue[bytes] = asyncio.Queue()
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def message_received(self, message: bytes | Oversized) -> None:
        assert not isinstance(message, Oversized)
        self.messages.put_nowait(message)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set_result(error)


class Server:
    def __init__(self) -> None:
        self.ends: list[End] = []
        self.listener: websocket.WebSocketListener
        self.connected = asyncio.Event()

    def accept(self, channel: websocket.WebSocketChannel) -> End:
        self.ends.append(End(channel))
        self.connected.set()
        return self.ends[-1]

    async def end(self) -> tuple[End, websocket.WebSocketChannel]:
        await self.connected.wait()
        channel = self.ends[-1].channel
        assert channel is not None
        return self.ends[-1], channel


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    server.listener = await websocket.listen("127.0.0.1", 0, server.accept, token=TOKEN, max_message_bytes=LIMIT)
    async with asyncio.timeout(30):
        yield server
        server.listener.close()
        for end in server.ends:
            assert end.channel is not None
            end.channel.close()
            await end.lost


async def dial(server: Server, token: str | None = TOKEN) -> tuple[End, websocket.WebSocketChannel]:
    end = End()
    return end, await websocket.dial(server.listener.address, end, token=token, max_message_bytes=LIMIT)


# --- admission ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x"])
async def test_without_the_token_nobody_gets_in(server: Server, token: str | None) -> None:
    with pytest.raises(Unauthorized, match="401"):
        await dial(server, token)
    assert server.ends == []


async def test_an_origin_is_refused_even_with_the_token(server: Server) -> None:
    with pytest.raises(InvalidStatus) as caught:
        await connect(
            server.listener.address,
            origin=Origin("https://evil.example"),
            additional_headers={"Authorization": f"Bearer {TOKEN}"},
            proxy=None,
        )
    assert caught.value.response.status_code == 403


async def test_two_authorizations_are_none(server: Server) -> None:
    headers = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer x")]
    with pytest.raises(InvalidStatus) as caught:
        await connect(server.listener.address, additional_headers=headers, proxy=None)
    assert caught.value.response.status_code == 401


async def test_a_token_beyond_ascii_is_refused_and_not_a_crash(server: Server) -> None:
    with pytest.raises(Unauthorized):
        await dial(server, "p\u00e4ss")


@pytest.mark.parametrize(("token", "found"), [(None, "none is given"), ("wrong", "the given one is not accepted")])
async def test_a_refused_token_is_reported_with_the_next_step(
    server: Server, token: str | None, found: str
) -> None:
    with pytest.raises(Unauthorized, match=rf"401: a bearer token is needed, and {found}: set HOLDFAST_TOKEN"):
        await dial(server, token)


async def test_no_auth_on_loopback_needs_no_token() -> None:
    server = Server()
    server.listener = await websocket.listen("localhost", 0, server.accept, no_auth=True)
    end, channel = await dial(server, None)
    channel.send(b"{}")
    _, there = await server.end()
    assert await server.ends[0].messages.get() == b"{}"
    with pytest.raises(InvalidStatus):
        await connect(server.listener.address, origin=Origin("http://localhost"), proxy=None)
    channel.close()
    assert await end.lost is None
    there.close()
    await server.ends[0].lost
    server.listener.close()


@pytest.mark.parametrize(
    ("host", "token", "no_auth", "why"),
    [
        ("0.0.0.0", None, False, "beyond loopback without a token is refused"),
        ("::", None, False, "beyond loopback without a token is refused"),
        ("", None, False, "beyond loopback without a token is refused"),
        ("0.0.0.0", None, True, "--no-auth is for loopback only"),
        ("192.168.1.4", TOKEN, True, "--no-auth is for loopback only"),
        ("localhost.evil.example", TOKEN, True, "--no-auth is for loopback only"),
        ("127.0.0.1", None, False, "a token is needed"),
        ("127.0.0.1", "", False, "a token is needed"),
    ],
)
async def test_unsafe_ways_to_listen_are_refused(host: str, token: str | None, no_auth: bool, why: str) -> None:
    with pytest.raises(Forbidden, match=why):
        await websocket.listen(host, 0, Server().accept, token=token, no_auth=no_auth)


# --- what arrives ------------------------------------------------------------------------------------------------


async def test_text_is_json_and_binary_is_the_rest(server: Server) -> None:
    async with connect(
        server.listener.address, additional_headers={"Authorization": f"Bearer {TOKEN}"}, proxy=None
    ) as foreign:
        await foreign.send('{"text":"é"}')
        await foreign.send(b"\x81\x01\x02")
        end, channel = await server.end()
        assert await end.messages.get() == '{"text":"é"}'.encode()
        assert await end.messages.get() == b"\x81\x01\x02"
        channel.send(b'{"a":1}')
        channel.use_lengths()
        channel.send(b"\x81\x01\x03")
        assert await foreign.recv() == '{"a":1}'
        assert await foreign.recv() == b"\x81\x01\x03"


async def test_a_fragmented_message_arrives_whole(server: Server) -> None:
    async with connect(
        server.listener.address, additional_headers={"Authorization": f"Bearer {TOKEN}"}, proxy=None
    ) as foreign:
        await foreign.send([b"", b"\x81", b"\x01", b"", b"\x02"])
        await foreign.send(b"\x80")
        end, _ = await server.end()
        assert await end.messages.get() == b"\x81\x01\x02"
        assert await end.messages.get() == b"\x80"


async def test_a_message_is_sent_in_the_call_of_send(server: Server) -> None:
    end, client = await dial(server)
    client.send(b"{}")
    assert client.queued_bytes == 0
    client.close()
    await end.lost


async def test_messages_during_a_pause_arrive_after_it_in_order(server: Server) -> None:
    _, client = await dial(server)
    end, channel = await server.end()
    channel.pause_reading()
    messages = [b"{%d}" % number for number in range(2 * websocket.READ_AHEAD)]
    for message in messages:
        client.send(message)
    while channel.held < websocket.READ_AHEAD:  # noqa: ASYNC110 - no event reports it
        await asyncio.sleep(0)
    assert end.messages.empty()
    channel.resume_reading()
    assert [await end.messages.get() for _ in messages] == messages


async def test_an_end_during_a_pause_is_reported(server: Server) -> None:
    _, client = await dial(server)
    end, channel = await server.end()
    channel.pause_reading()
    client.close()
    assert await end.lost is None


class Counting:
    """Output without end, until it is stopped."""

    def __init__(self) -> None:
        self.given = 0
        self.stopped = False

    def next_frame(self) -> bytes | SpoolFrame | None:
        if self.stopped:
            return None
        self.given += 1
        return b"\x81" + bytes(512 * 1024)


async def test_a_slow_reader_bounds_the_output_and_control_overtakes_it(server: Server) -> None:
    end, client = await dial(server)
    client.pause_reading()
    _, channel = await server.end()
    source = Counting()
    channel.set_source(source)
    quiet = 0
    while quiet < 500:
        before = source.given
        await asyncio.sleep(0)
        quiet = quiet + 1 if source.given == before else 0
    assert 0 < source.given < 100
    channel.send(b"{}")
    assert channel.queued_bytes == 2
    stalled = source.given
    client.resume_reading()
    async with asyncio.timeout(60):
        received = 0
        while await end.messages.get() != b"{}":
            received += 1
    assert received <= stalled + 1
    source.stopped = True
    client.close()
    await end.lost


async def test_drain_waits_for_the_queue(server: Server) -> None:
    end, client = await dial(server)
    for _ in range(10):
        client.send(b"{}")
    await client.drain()
    assert client.queued_bytes == 0
    client.close()
    assert await end.lost is None


# --- how it ends -------------------------------------------------------------------------------------------------


async def test_a_message_too_large_ends_with_1009(server: Server) -> None:
    async with connect(
        server.listener.address, additional_headers={"Authorization": f"Bearer {TOKEN}"}, proxy=None
    ) as foreign:
        await foreign.send(b"\x81" + bytes(LIMIT))
        with pytest.raises(ConnectionClosed) as caught:
            await foreign.recv()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1009
    assert "bytes" in caught.value.rcvd.reason
    end, _ = await server.end()
    assert isinstance(await end.lost, ConnectionLost)


async def test_our_own_client_is_told_that_its_message_was_too_large(server: Server) -> None:
    end, client = await dial(server)
    client.send(b"\x81" + bytes(LIMIT))
    assert isinstance(await end.lost, MessageTooLarge)


async def test_closing_sends_what_is_queued_and_tells_both(server: Server) -> None:
    end, client = await dial(server)
    client.send(b'{"last":1}')
    client.close()
    assert await end.lost is None
    there, _ = await server.end()
    assert await there.messages.get() == b'{"last":1}'
    assert await there.lost is None


async def test_nobody_there() -> None:
    with pytest.raises(ConnectionLost, match=r"ws://127\.0\.0\.1:9"):
        await websocket.dial("ws://127.0.0.1:9", End())
