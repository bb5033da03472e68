"""Ports across the connection, both ways: echo, half-close, reset, back-pressure, many connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

import holdfast
from holdfast import Sandbox
from holdfast.errors import InvalidParams, PortUnavailable
from holdfast.wire import stream_messages as s
from holdfast.wire.stream_messages import StreamAddress, StreamDialParams
from tests.contract.cutting_proxy import cutting_unix
from tests.contract.ways import WAYS
from tests.support.servers import RunningServer

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

over_channels = pytest.mark.parametrize("way", [way for way in WAYS if way != "inprocess"], indirect=True)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def reply_after_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer only once the request has ended, which needs a half-close."""
    request = await reader.read(-1)
    writer.write(b"%d bytes" % len(request))
    writer.close()


@contextlib.asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[int]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1024)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def exchange(host: str, port: int, data: bytes) -> bytes:
    """Send everything, end the request, and read the answer to its end."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        sending = asyncio.create_task(_send(writer, data))
        answer = await reader.read(-1)
        await sending
        return answer
    finally:
        writer.close()


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()
    writer.write_eof()


@over_channels
async def test_a_port_of_the_sandbox_is_reachable_here(box: Sandbox) -> None:
    data = bytes(range(256)) * 12_000  # more than the window in each direction
    async with listening(echo) as inside, box.forward(inside) as (host, port):
        assert await exchange(host, port, data) == data
        assert await exchange(host, port, b"again") == b"again"


@over_channels
async def test_one_direction_ends_before_the_other(box: Sandbox) -> None:
    async with listening(reply_after_end) as inside, box.forward(inside) as (host, port):
        assert await exchange(host, port, b"x" * 100_000) == b"100000 bytes"


@over_channels
async def test_a_port_of_this_machine_is_reachable_inside(box: Sandbox) -> None:
    data = bytes(range(256)) * 12_000
    async with listening(echo) as here, box.offer_port(here, 0) as (host, port):
        assert port != here
        assert await exchange(host, port, data) == data
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, port)


@pytest.mark.parametrize("way", ["unix"], indirect=True)
async def test_unix_sockets(box: Sandbox, tmp_path: Path) -> None:
    inside, offered = str(tmp_path / "inside"), str(tmp_path / "offered")
    server = await asyncio.start_unix_server(reply_after_end, inside)
    async with server, box.forward(f"unix:{inside}") as (host, port):
        assert await exchange(host, port, b"four") == b"4 bytes"
        async with box.offer_port(f"unix:{inside}", f"unix:{offered}"):
            reader, writer = await asyncio.open_unix_connection(offered)
            await _send(writer, b"seven b")
            assert await reader.read(-1) == b"7 bytes"
            writer.close()
    assert not os.path.exists(offered)  # noqa: ASYNC240 - one call


@pytest.mark.parametrize("way", ["unix"], indirect=True)
async def test_a_port_without_a_listener_resets_the_connection(box: Sandbox) -> None:
    async with listening(echo) as free:
        pass
    async with box.forward(free) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        writer.close()
    async with listening(echo) as taken:
        with pytest.raises(PortUnavailable, match=f"127.0.0.1:{taken}: Address already in use"):
            async with box.offer_port(1, taken):
                pass


@pytest.mark.parametrize("way", ["unix"], indirect=True)
async def test_an_aborted_connection_ends_on_the_other_side(box: Sandbox) -> None:
    errors: asyncio.Queue[type[BaseException] | None] = asyncio.Queue()
    arrived = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(1):
                arrived.set()
            errors.put_nowait(None)
        except OSError as error:
            errors.put_nowait(type(error))
        writer.close()

    async with listening(serve) as inside:
        async with box.forward(inside) as (host, port):
            _, writer = await asyncio.open_connection(host, port)
            writer.write(b"x")
            await writer.drain()
            writer.transport.abort()
            await errors.get()  # a reset, or an end of file
            arrived.clear()
            _, writer = await asyncio.open_connection(host, port)
            writer.write(b"x")
            await arrived.wait()
        assert await errors.get() in (ConnectionResetError, None)  # the end of the block resets what is open
        writer.close()


@pytest.mark.parametrize("way", ["unix", "ws"], indirect=True)
async def test_a_slow_reader_blocks_only_its_own_writer(box: Sandbox) -> None:
    """A flood that is not read stops at the windows and the kernel's buffers; other streams and calls continue."""
    sent = 0
    stopped = asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        for _ in range(1_024):
            writer.write(bytes(65536))
            try:
                async with asyncio.timeout(2):
                    await writer.drain()
            except TimeoutError:
                break
            sent += 65536
        stopped.set()  # also if nothing stopped the flood: then the bound below fails
        writer.transport.abort()

    async with (
        listening(flood) as flooding,
        listening(echo) as echoing,
        box.forward(flooding) as unread,
        box.forward(echoing) as address,
    ):
        _, writer = await asyncio.open_connection(*unread, limit=1024)
        await stopped.wait()
        assert sent < 64 * 1024 * 1024
        assert await exchange(*address, b"still here") == b"still here"
        assert (await box.exec(["echo", "too"])).stdout == "too\n"
        writer.close()


@pytest.mark.parametrize("way", ["unix"], indirect=True)
async def test_a_thousand_connections_at_once(box: Sandbox) -> None:
    everyone = asyncio.Barrier(1_000)

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        await everyone.wait()  # no connection ends before all are open
        writer.write(line)
        writer.close()

    async with listening(meet) as inside, box.forward(inside) as (host, port):

        async def one(number: int) -> bytes:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"%d\n" % number)
            answer = await reader.read(-1)
            writer.close()
            return answer

        answers = await asyncio.gather(*(one(number) for number in range(1_000)))
    assert answers == [b"%d\n" % number for number in range(1_000)]


@pytest.mark.parametrize("way", ["unix"], indirect=True)
async def test_the_url_of_a_port(box: Sandbox) -> None:
    async with listening(echo) as inside:
        url = await box.url(inside)
        assert url == await box.url(inside)
        host, _, port = url.removeprefix("http://").partition(":")
        assert await exchange(host, int(port), b"hello") == b"hello"


@pytest.mark.parametrize("way", ["inprocess"], indirect=True)
async def test_ports_need_a_server(box: Sandbox) -> None:
    with pytest.raises(InvalidParams, match="'inprocess' has none"):
        box.forward(8000)


@pytest.mark.parametrize("wrong", [0, 65536, -1, "x", "host:", "unix:", True, "unix:" + "x" * 200])
@pytest.mark.parametrize("way", ["unix"], indirect=True)
async def test_a_wrong_port_is_refused(box: Sandbox, wrong: int | str) -> None:
    with pytest.raises(InvalidParams):
        box.forward(wrong)


async def test_an_offer_is_restored_with_its_connection(server: RunningServer) -> None:
    """Streams end when the channel breaks; the listener inside is there again after the reconnect."""
    path = os.path.join(server.directory, "ports.sock")
    async with listening(echo) as here, cutting_unix(path, server.socket, seed=1) as cutting:
        cutting.peaceful = True
        async with holdfast.connect(f"unix:{path}") as box, box.offer_port(here, 0) as (host, port):
            assert await exchange(host, port, b"before") == b"before"
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"open")
            assert await reader.readexactly(4) == b"open"
            cutting.cut_all()
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read(1) == b""
            writer.close()
            await box.status()  # waits for the reconnect, after which the listener is requested at once
            assert await exchange(host, port, b"after") == b"after"


@pytest.mark.parametrize("way", ["ws", "stdio"], indirect=True)
async def test_a_socket_is_not_passed_over_other_channels(box: Sandbox) -> None:
    connection = box.api.connection  # type: ignore[attr-defined]
    with pytest.raises(InvalidParams, match="stream/dial: a socket can be passed only over a Unix socket"):
        await connection.call(s.STREAM_DIAL, StreamDialParams(StreamAddress(port=1)))
    assert connection.unix_path is None


@pytest.mark.parametrize("way", ["unix"], indirect=True)
async def test_a_passed_socket_outlives_the_channel(box: Sandbox) -> None:
    async with listening(echo) as inside, box.forward(inside) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"before")
        assert await reader.readexactly(6) == b"before"
        await box.aclose()
        writer.write(b"after")
        assert await reader.readexactly(5) == b"after"
        writer.close()
