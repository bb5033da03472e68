"""Floods of connections that never become requests: each is bounded, and agents that are connected are served.

All of it on loopback; another address is another 127.x one. Floods are bounded by count.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from holdfast.service.fronts.connections import AcceptedConnection, ConnectionGate, ConnectionLimits
from holdfast.service.fronts.grpc import GrpcSettings
from holdfast.service.fronts.http import HttpSettings
from holdfast.service.fronts.listening import TlsFiles
from holdfast.session.v1 import session_pb2 as pb
from tests.service.certificates import make_certificates
from tests.service.fake_sessions import ANNA, Fronts, OverGrpc, OverHttp, bearer

HALF_A_HEAD = b"POST /holdfast.session.v1.SessionService/GetSession HTTP/1.1\r\nHost: x\r\nX-Half: "
#: Short, and still longer than a client on this machine takes for a whole head under load.
LIMITS = ConnectionLimits(most=64, by_address=48, half_open=8, head_seconds=1.0)
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def over_http(**changes: Any) -> Fronts:
    return OverHttp(http_settings=HttpSettings(listen="127.0.0.1:0", connections=LIMITS, **changes))


async def connect(fronts: Fronts, source: str = "127.0.0.1", **options: Any) -> Pair:
    port = int(fronts.http.url.rpartition(":")[2])
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0), **options)


async def ask(pair: Pair) -> bytes:
    """One request on a connection that stays open: the status line."""
    reader, writer = pair
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(len(b"ok\n"))
    return head.partition(b"\r\n")[0]


async def until_closed(pair: Pair) -> bytes:
    """All that comes until the other side closes the connection."""
    reader, writer = pair
    try:
        async with asyncio.timeout(60):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_half_heads_are_closed_and_clients_are_served_throughout() -> None:
    async with over_http() as fronts:
        agent = await connect(fronts)
        assert await ask(agent) == b"HTTP/1.1 200 OK"
        half = []
        for number in range(200):
            half.append(await connect(fronts))
            half[-1][1].write(HALF_A_HEAD)
            if number % 20 == 19:
                assert await ask(agent) == b"HTTP/1.1 200 OK"
                new = await connect(fronts)
                assert await ask(new) == b"HTTP/1.1 200 OK"
                new[1].close()
        assert set(await asyncio.gather(*map(until_closed, half))) == {b""}
        assert await ask(agent) == b"HTTP/1.1 200 OK"
        agent[1].close()


async def test_a_later_head_has_its_time_too_and_bytes_add_none() -> None:
    async with over_http() as fronts:
        reader, writer = await connect(fronts)
        assert await ask((reader, writer)) == b"HTTP/1.1 200 OK"
        writer.write(HALF_A_HEAD)
        for _ in range(1_000):
            writer.write(b"x")
            try:
                async with asyncio.timeout(0.02):
                    assert await reader.read(1) == b""
                    break
            except TimeoutError:
                continue
            except ConnectionResetError:
                break
        else:
            pytest.fail("a head that comes byte by byte is never given up")
        writer.close()


async def test_one_address_does_not_take_every_connection() -> None:
    async with over_http() as fronts:
        held = []
        for _ in range(LIMITS.by_address):
            held.append(await connect(fronts, "127.0.0.2"))
            assert await ask(held[-1]) == b"HTTP/1.1 200 OK"
        assert await until_closed(await connect(fronts, "127.0.0.2")) == b""
        other = await connect(fronts, "127.0.0.3")
        assert await ask(other) == b"HTTP/1.1 200 OK"
        for _, writer in (*held, other):
            writer.close()


async def test_handshakes_that_never_end_are_closed(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "tls")
    tls = TlsFiles(str(made.certificate), str(made.key))
    async with over_http(tls=tls) as fronts:
        # The first of these make room for the others, and those are closed by the time.
        half = [await connect(fronts) for _ in range(3 * LIMITS.half_open)]
        assert set(await asyncio.gather(*map(until_closed, half))) == {b""}


async def test_half_prefaces_are_closed_and_a_connected_agent_is_served() -> None:
    settings = GrpcSettings(listen="127.0.0.1:0", connections=LIMITS)
    async with OverGrpc(grpc_settings=settings) as fronts, fronts.stub() as stub:
        host, _, port = fronts.grpc.address.rpartition(":")
        await stub.ListSessions(pb.ListSessionsRequest(), metadata=bearer(ANNA))
        half = []
        for _ in range(100):
            half.append(await asyncio.open_connection(host, int(port)))
            half[-1][1].write(b"PRI * HTTP/2.0\r\n")
        await stub.ListSessions(pb.ListSessionsRequest(), metadata=bearer(ANNA))
        # gRPC may send its own settings first; what matters is that the connection ends.
        await asyncio.gather(*map(until_closed, half))
        async with grpc.aio.insecure_channel(fronts.grpc.address) as channel:
            await channel.channel_ready()


def test_the_gate_counts_each_connection_once() -> None:
    gate = ConnectionGate(ConnectionLimits(most=4, by_address=3, half_open=2))
    guests = [AcceptedConnection("a") for _ in range(2)]
    for connection in guests:
        assert gate.admits("a")
        gate.enter(connection)
    closed: list[AcceptedConnection] = []
    guests[0].close = lambda: closed.append(guests[0])
    assert gate.admits("b")  # the oldest half-open one makes room
    assert closed == [guests[0]]
    gate.leave(guests[0])
    assert (gate.open, gate.half_open) == (1, 1)
    gate.complete(guests[1])
    for _ in range(2):
        assert gate.admits("a")
        gate.enter(connection := AcceptedConnection("a"))
        gate.complete(connection)
    assert not gate.admits("a")  # three whole ones of this address, and none that could make room
    assert gate.admits("")


def test_connections_leave_descriptors_for_the_rest_of_the_service() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2000));"
        "from holdfast.service.fronts.connections import ConnectionLimits, descriptors_for_ports as left;"
        "print(left(500, 1000), left(8192, 1000), resource.getrlimit(resource.RLIMIT_NOFILE)[0]);"
        "print(ConnectionLimits().within(500).most, ConnectionLimits().within(500).by_address)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["500", "1000", "2000", "500", "250"]
    assert "1000 of 8192 connections" in done.stderr
