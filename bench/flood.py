"""How long a `process/list` takes while a process prints without end and a client reads it.

On the flooded connection the reply must overtake the output; on another it must not wait for the server's hands.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator
from time import perf_counter
from typing import Final

from bench.measure import Row, Scale, Target, compare, interleave_samples, latencies
from bench.servers import producer, spec_of, talking_to
from holdfast.client.connection.subscription import Subscription
from holdfast.client.remote import RemoteExec
from holdfast.types import OutputChunk
from tests.support.servers import running_server

#: A flood counts as one once so much of it has come.
UNDER_WAY_BYTES: Final = 16 * 1024 * 1024
#: Between two questions. Back to back they would all fall into one moment of the flood.
PAUSE_SECONDS: Final = 0.01
#: A flood begins at once; this only turns a hang into an error.
PATIENCE_SECONDS: Final = 60.0
TARGET: Final = Target("at most", 5.0)


async def list_during_a_flood(scale: Scale) -> list[Row]:
    with running_server() as server:
        address = server.address("unix")
        async with talking_to(address) as flooded, talking_to(address) as other:
            calm = _Asking(other, scale.lists)
            same = _Asking(flooded, scale.lists, flood_on=flooded)
            beside = _Asking(other, scale.lists, flood_on=flooded)
            taken = await interleave_samples(
                scale.server_rounds, 1, {"calm": calm.run, "flooded": same.run, "other": beside.run}
            )
    return [
        compare(
            f"list-{name}",
            f"`process/list` during a flood, {where}",
            "ms",
            baseline_what="without the flood",
            baseline=latencies(taken["calm"]),
            measured=latencies(taken[name]),
            target=TARGET,
            note=f"flood of {statistics.median(asking.flood_rates):,.0f} MB/s",
        )
        for name, where, asking in (
            ("flooded", "on the flooded connection", same),
            ("other", "on another connection", beside),
        )
    ]


class _Asking:
    """Measure calls over one connection during a flood over `flood_on`, which may be the same connection."""

    def __init__(self, api: RemoteExec, count: int, *, flood_on: RemoteExec | None = None) -> None:
        self._api = api
        self._count = count
        self._flood_on = flood_on
        #: MB a second that were read meanwhile.
        self.flood_rates: list[float] = []

    async def run(self) -> list[float]:
        if self._flood_on is None:
            return await self._ask()
        async with _flood(self._flood_on) as flood:
            before, began = flood.received, perf_counter()
            taken = await self._ask()
            self.flood_rates.append((flood.received - before) / (perf_counter() - began) / 1e6)
        return taken

    async def _ask(self) -> list[float]:
        taken = []
        for _ in range(self._count):
            began = perf_counter()
            await self._api.list()
            taken.append(perf_counter() - began)
            await asyncio.sleep(PAUSE_SECONDS)
        return taken


class _Flood:
    """A process that prints without end, read as fast as it comes."""

    def __init__(self) -> None:
        self.received = 0
        self.under_way = asyncio.Event()

    async def read(self, events: Subscription) -> None:
        async for event in events:
            if isinstance(event, OutputChunk):
                self.received += len(event.data)
                if self.received >= UNDER_WAY_BYTES:
                    self.under_way.set()


@contextlib.asynccontextmanager
async def _flood(api: RemoteExec) -> AsyncIterator[_Flood]:
    info, events = await api.start_streaming(spec_of(producer(None)))
    flood = _Flood()
    reading = asyncio.create_task(flood.read(events))
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await flood.under_way.wait()
        yield flood
    finally:
        await api.terminate(info.process_id, force=True)
        await reading
        await api.forget(info.process_id)
