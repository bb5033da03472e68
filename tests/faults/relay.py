"""A relay between clients and the server that cuts, delays and splits the traffic by its random numbers.

A cut comes after any number of bytes, counted in both directions together: in handshakes, requests and output, and
in the middle of messages. Bytes read and not passed on are lost, as on a real network. Touches sockets.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Final

Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]

#: Cuts come in three sizes: in the handshake, in the first messages, and far into the output.
CUT_RANGES: Final = ((1, 400), (400, 20_000), (100_000, 3_000_000))
CUT_WEIGHTS: Final = (1, 2, 8)
#: How much is passed at once; small ones split messages at any byte.
READ_BYTES: Final = (7, 1_000, 65_536, 65_536)
#: Messages of the first kilobytes are split at any byte; to do so for ever would only be slow.
SMALL_READS: Final = 200
#: Of the pieces that pass a slow connection, so many in a thousand wait, for up to so long.
DELAYED_PERMILLE: Final = 50
DELAY_SECONDS: Final = 0.3


class Relay(abc.ABC):
    """Counts its faults. A subclass decides the faults of each connection."""

    def __init__(self, upstream: Callable[[], Awaitable[Opened]]) -> None:
        self._upstream = upstream
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self.cuts = 0
        self.delays = 0
        self.passed = 0
        #: Once true, nothing is done to what passes.
        self.peaceful = False

    @abc.abstractmethod
    def new_way(self) -> Way:
        """For the next connection."""

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._open.add(writer)
        way = self.new_way()
        try:
            there, back = await self._upstream()
        except OSError:
            writer.transport.abort()
            self._open.discard(writer)
            return
        pumps = [asyncio.create_task(way.pump(reader, back)), asyncio.create_task(way.pump(there, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in (writer, back):
                end.transport.abort()
            self._open.discard(writer)
            for pump in pumps:
                pump.cancel()
            for result in await asyncio.gather(*pumps, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, ConnectionError):
                    raise result

    def cut_all(self) -> None:
        """Break every connection now."""
        for writer in self._open:
            writer.transport.abort()
        self.cuts += len(self._open)

    async def close(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        await asyncio.gather(*self._tasks)


class Way:
    """The faults of one connection: a cut after `left` bytes (-1: none), and delays, if it has numbers for them."""

    def __init__(
        self, relay: Relay, left: int, *, read_bytes: int = READ_BYTES[-1], delays: random.Random | None = None
    ) -> None:
        self._relay = relay
        self._left = left
        self._read_bytes = read_bytes
        self._delays = delays

    async def pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        relay = self._relay
        small = SMALL_READS
        while data := await source.read(self._read_bytes if small > 0 else READ_BYTES[-1]):
            small -= 1
            if not relay.peaceful:
                if self._delays is not None and self._delays.randrange(1_000) < DELAYED_PERMILLE:
                    relay.delays += 1
                    await asyncio.sleep(self._delays.uniform(0, DELAY_SECONDS))
                if 0 <= self._left <= len(data):
                    sink.write(data[: self._left])
                    relay.cuts += 1
                    return
                if self._left > 0:
                    self._left -= len(data)
            sink.write(data)
            relay.passed += len(data)
            await sink.drain()


class FaultyRelay(Relay):
    """Cuts and delays, as far as they are among `faults`."""

    def __init__(self, upstream: Callable[[], Awaitable[Opened]], seed: str, faults: Collection[str]) -> None:
        super().__init__(upstream)
        self._random = random.Random(seed)
        self._faults = faults

    def new_way(self) -> Way:
        rng = random.Random(self._random.random())
        faults = self._faults
        low, high = rng.choices(CUT_RANGES, CUT_WEIGHTS)[0]
        left = rng.randint(low, high) if "cut" in faults else -1
        slow = "delay" in faults and rng.random() < 0.5
        read_bytes = rng.choice(READ_BYTES) if "cut" in faults or "delay" in faults else READ_BYTES[-1]
        return Way(self, left, read_bytes=read_bytes, delays=rng if slow else None)


@contextlib.asynccontextmanager
async def relaying(path: str, upstream: str, seed: str, faults: Collection[str]) -> AsyncIterator[Relay]:
    """Listens at `path` for a server at the socket `upstream`."""
    relay = FaultyRelay(lambda: asyncio.open_unix_connection(upstream), seed, faults)
    server = await asyncio.start_unix_server(relay.connected, path)
    try:
        yield relay
    finally:
        server.close()
        await relay.close()
