"""A proxy between client and server that breaks every connection after a number of bytes drawn from a seed.

The relay of the fault harness, with cuts alone and sizes of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from tests.faults.relay import Opened, Relay, Way

#: Cuts come in three sizes: in the handshake, in the first messages, and far into the output.
RANGES: Final = ((1, 400), (400, 20_000), (100_000, 2_500_000))
WEIGHTS: Final = (1, 1, 8)


class CuttingProxy(Relay):
    """The first connection lives long enough for its handshake: only that is tried once."""

    def __init__(self, seed: int, upstream: Callable[[], Awaitable[Opened]]) -> None:
        super().__init__(upstream)
        self._random = random.Random(seed)
        self._connections = 0

    def new_way(self) -> Way:
        self._connections += 1
        low, high = self._random.choices(RANGES, WEIGHTS)[0] if self._connections > 1 else RANGES[2]
        return Way(self, self._random.randint(low, high))


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
