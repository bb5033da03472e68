"""A relay between clients and the server that cuts, delays and splits what passes, as its random numbers say.

A cut comes after any number of bytes, counted in both directions together: in handshakes, requests and output, and
in the middle of messages. What was read and not passed on is lost, as on a real network. Touches sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Collection
from typing import Final

#: Cuts come in three sizes: in the handshake, in the first messages, and far into the output.
CUT_RANGES: Final = ((1, 400), (400, 20_000), (100_000, 3_000_000))
CUT_WEIGHTS: Final = (1, 2, 8)
#: How much is passed at once; small ones split messages at any byte.
READ_BYTES: Final = (7, 1_000, 65_536, 65_536)
#: Of the pieces that pass a slow connection, so many in a thousand wait, for up to so long.
DELAYED_PERMILLE: Final = 50
DELAY_SECONDS: Final = 0.3


class Relay:
    """Counts what it does. Connections that are open at a time have cuts, delays and sizes of their own."""

    def __init__(self, upstream: str, seed: str, faults: Collection[str]) -> None:
        self._upstream = upstream
        self._random = random.Random(seed)
        self._faults = faults
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self.cuts = 0
        self.delays = 0
        self.passed = 0
        #: Once true, nothing is done to what passes.
        self.peaceful = False

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._open.add(writer)
        try:
            there, back = await asyncio.open_unix_connection(self._upstream)
        except OSError:
            writer.transport.abort()
            self._open.discard(writer)
            return
        way = _Way(self, random.Random(self._random.random()), self._faults)
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


class _Way:
    """What one connection suffers."""

    def __init__(self, relay: Relay, rng: random.Random, faults: Collection[str]) -> None:
        self._relay = relay
        self._random = rng
        low, high = rng.choices(CUT_RANGES, CUT_WEIGHTS)[0]
        #: Bytes until it is cut.
        self._left = rng.randint(low, high) if "cut" in faults else -1
        self._slow = "delay" in faults and rng.random() < 0.5
        self._read_bytes = rng.choice(READ_BYTES) if "cut" in faults or "delay" in faults else READ_BYTES[-1]

    async def pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        relay = self._relay
        # Messages of the first kilobytes are split at any byte; to do so for ever would only be slow.
        small = 200
        while data := await source.read(self._read_bytes if small > 0 else READ_BYTES[-1]):
            small -= 1
            if not relay.peaceful:
                if self._slow and self._random.randrange(1_000) < DELAYED_PERMILLE:
                    relay.delays += 1
                    await asyncio.sleep(self._random.uniform(0, DELAY_SECONDS))
                if 0 <= self._left <= len(data):
                    sink.write(data[: self._left])
                    relay.cuts += 1
                    return
                if self._left > 0:
                    self._left -= len(data)
            sink.write(data)
            relay.passed += len(data)
            await sink.drain()


@contextlib.asynccontextmanager
async def relaying(path: str, upstream: str, seed: str, faults: Collection[str]) -> AsyncIterator[Relay]:
    """Listens at `path` for a server at the socket `upstream`."""
    relay = Relay(upstream, seed, faults)
    server = await asyncio.start_unix_server(relay.connected, path)
    try:
        yield relay
    finally:
        server.close()
        await relay.close()
