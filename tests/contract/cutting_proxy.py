"""A proxy between client and server that breaks every connection after a number of bytes drawn from a seed.

Either direction counts, so a cut falls into requests as well as into output, into handshakes, and into the middle
of messages. What was read and not passed on is lost, as on a real network.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]

#: Cuts come in three sizes: in the handshake, in the first messages, and far into the output.
RANGES: Final = ((1, 400), (400, 20_000), (100_000, 2_500_000))
WEIGHTS: Final = (1, 1, 8)
READ_BYTES: Final = 65_536


class CuttingProxy:
    """Counts its cuts. The first connection lives long enough for its handshake: only that is tried once."""

    def __init__(self, seed: int, upstream: Callable[[], Awaitable[Opened]]) -> None:
        self._random = random.Random(seed)
        self._upstream = upstream
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self.cuts = 0
        self.connections = 0
        #: Once true, connections live on: for the end of a test.
        self.peaceful = False

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._open.add(writer)
        self.connections += 1
        low, high = self._random.choices(RANGES, WEIGHTS)[0] if self.connections > 1 else RANGES[2]
        left = self._random.randint(low, high)
        try:
            upstream_reader, upstream_writer = await self._upstream()
        except OSError:
            writer.transport.abort()
            self._open.discard(writer)
            return
        ends = (writer, upstream_writer)

        def spend(data: bytes) -> bytes:
            nonlocal left
            if self.peaceful:
                return data
            passed = data[:left]
            left -= len(passed)
            return passed

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(READ_BYTES):
                passed = spend(data)
                sink.write(passed)
                if len(passed) < len(data) or left == 0:
                    self.cuts += 1
                    return
                await sink.drain()

        pumps = [
            asyncio.create_task(pump(reader, upstream_writer)),
            asyncio.create_task(pump(upstream_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.transport.abort()
            self._open.discard(writer)
            for pump_task in pumps:
                pump_task.cancel()
            for result in await asyncio.gather(*pumps, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, ConnectionError):
                    raise result

    async def close(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        await asyncio.gather(*self._tasks)


@contextlib.asynccontextmanager
async def cutting_unix(path: str, upstream: str, seed: int) -> AsyncIterator[CuttingProxy]:
    """Listens at `path` for a server at the socket `upstream`."""
    proxy = CuttingProxy(seed, lambda: asyncio.open_unix_connection(upstream))
    server = await asyncio.start_unix_server(proxy.connected, path)
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()


@contextlib.asynccontextmanager
async def cutting_tcp(port: int, seed: int) -> AsyncIterator[tuple[CuttingProxy, int]]:
    """Listens on a port of its own, which it gives, for a server at `port`."""
    proxy = CuttingProxy(seed, lambda: asyncio.open_connection("127.0.0.1", port))
    server = await asyncio.start_server(proxy.connected, "127.0.0.1", 0)
    try:
        yield proxy, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await proxy.close()
