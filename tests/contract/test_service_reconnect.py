"""Services of the host while its connection breaks again and again: every call is answered once, in its order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing

import holdfast
from holdfast.client.connection.connection import ClientConnection
from holdfast.client.dial import open_connection
from holdfast.client.host_call import call_service
from tests.contract.cutting_proxy import cutting_unix
from tests.support.servers import running_server


class Host:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, method: str, body: bytes) -> bytes | AsyncIterator[bytes]:
        self.calls += 1
        return self._stream(int(body)) if method == "stream" else method.encode() + b":" + body

    async def _stream(self, count: int) -> AsyncIterator[bytes]:
        for number in range(count):
            yield b"%d\n" % number


async def ask(connection: ClientConnection, instance: str, method: str, body: bytes) -> list[bytes]:
    async with aclosing(call_service(connection, "model", instance, method, body)) as pieces:
        return [piece async for piece in pieces]


async def test_services_outlive_every_break_of_the_hosts_connection() -> None:
    host = Host()
    with running_server() as server:
        path = os.path.join(server.directory, "cut.sock")
        caller = await open_connection(server.address("unix"), reconnect_deadline=0)
        async with (
            cutting_unix(path, server.socket, seed=7) as cutting,
            holdfast.connect(f"unix:{path}") as box,
            box.offer("model", host) as service,
        ):
            for _ in range(4):
                streamed, *echoed = await asyncio.gather(
                    ask(caller, service.instance, "stream", b"3000"),
                    *(ask(caller, service.instance, "echo", b"x" * 300_000) for _ in range(4)),
                )
                assert streamed == [b"%d\n" % number for number in range(3000)]
                assert [b"".join(pieces) for pieces in echoed] == [b"echo:" + b"x" * 300_000] * 4
            assert cutting.cuts > 0
            assert host.calls == 4 * 5
            cutting.peaceful = True
        await caller.aclose()
