"""The cost of the model bridge: each request beside the same one, by the same client, straight to the provider.

The provider and the client are processes of their own, so are the server and the proxy; the host is this program.
Touches the processes that it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import msgspec

import holdfast
from bench.measure import Row, Scale, Target, compare, figures, interleave, interleave_samples, latencies
from bench.model_client import Order, Took
from bench.servers import BenchmarkError, memory_bytes
from holdfast.bridge import Limits, Upstream, sandbox_agent_bridge
from tests.support.servers import running_server, server_environment

ADDED_MS: Final = 1.0
#: Of a model that is fast: a hundred tokens a second.
EVERY_MS: Final = 10.0
PACED_EVENTS: Final = 50
UNPACED_EVENTS: Final = 100
#: Calls between two samples of memory, and the part of them after which it should not grow.
AT_ONCE: Final = 16
SETTLED: Final = 5
MAX_LINE_BYTES: Final = 16 * 1024 * 1024
#: More than run at once.
CONCURRENCY: Final = 256
#: The real ones are as long.
_KEY: Final = "sk-bench-" + "0123456789abcdef" * 3


class _Ways:
    """The two ways to the provider, and the pids to sample memory of."""

    def __init__(self, client: asyncio.subprocess.Process, direct: int, bridged: int, pids: dict[str, int]) -> None:
        self._client = client
        self.direct = direct
        self.bridged = bridged
        self.pids = pids

    async def ask(self, order: Order) -> Took:
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(msgspec.json.encode(order) + b"\n")
        line = await self._client.stdout.readline()
        if not line:
            raise BenchmarkError("the client of the model ended; its stderr says why")
        return msgspec.json.decode(line, type=Took)

    def asking(
        self, take: Callable[[Took], list[float]], **order: int | float
    ) -> dict[str, Callable[[], Awaitable[list[float]]]]:
        def asks(port: int) -> Callable[[], Awaitable[list[float]]]:
            async def ask() -> list[float]:
                return take(await self.ask(msgspec.convert({"port": port, **order}, Order)))

            return ask

        return {"direct": asks(self.direct), "bridged": asks(self.bridged)}

    def resident(self) -> dict[str, int]:
        return {name: memory_bytes(pid) for name, pid in self.pids.items()}


@contextlib.asynccontextmanager
async def _ways() -> AsyncIterator[_Ways]:
    async with contextlib.AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(_module("bench.model_upstream"))
        client = await stack.enter_async_context(_module("bench.model_client"))
        assert upstream.stdout is not None
        direct = int(await upstream.stdout.readline())
        server = stack.enter_context(running_server())
        box = await stack.enter_async_context(holdfast.connect(server.address("unix")))
        model = Upstream(f"http://127.0.0.1:{direct}/v1", _KEY)
        bridge = await stack.enter_async_context(
            sandbox_agent_bridge(box, model, 0, limits=Limits(concurrency=CONCURRENCY))
        )
        proxy = next(each.pid for each in await box.api.list() if "model_proxy" in each.argv)
        yield _Ways(client, direct, bridge.port, {"host": os.getpid(), "server": server.pid, "proxy": proxy})


@contextlib.asynccontextmanager
async def _module(name: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", name),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=server_environment(),
        limit=MAX_LINE_BYTES,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def one_call(scale: Scale) -> list[Row]:
    """A whole answer, and the first token of a stream."""
    async with _ways() as ways:
        whole = await interleave_samples(
            scale.rounds, scale.starts, ways.asking(lambda took: took.ends[1:], requests=2)
        )
        first = await interleave_samples(
            scale.rounds, scale.starts, ways.asking(lambda took: took.firsts[1:], requests=2, events=5)
        )
    return [
        _added("bridge-call", "a call of a model through the bridge", whole),
        _added("bridge-first", "the first token of a stream through the bridge", first),
    ]


def _added(name: str, what: str, taken: dict[str, list[list[float]]]) -> Row:
    baseline, measured = latencies(taken["direct"]), latencies(taken["bridged"])
    return compare(
        name,
        what,
        "ms",
        baseline_what="straight to the same provider",
        baseline=baseline,
        measured=measured,
        target=Target("at most", baseline.median + ADDED_MS),
        note=f"{measured.median - baseline.median:+.2f} ms",
    )


async def streams_at_once(scale: Scale) -> list[Row]:
    """Many streams of a fast model, and the same without a pace, which shows what it costs alone."""
    count = scale.crowd // 10
    async with _ways() as ways:

        def rates(
            events: int, every_ms: float, lags: dict[str, list[float]]
        ) -> dict[str, Callable[[], Awaitable[float]]]:
            def rate(name: str, port: int) -> Callable[[], Awaitable[float]]:
                async def run() -> float:
                    took = await ways.ask(Order(port, at_once=count, events=events, every_ms=every_ms))
                    lags.setdefault(name, []).extend(took.lags)
                    return len(took.lags) / took.seconds

                return run

            return {"direct": rate("direct", ways.direct), "bridged": rate("bridged", ways.bridged)}

        lags: dict[str, list[float]] = {}
        paced = await interleave(scale.stream_rounds, rates(PACED_EVENTS, EVERY_MS, lags))
        unpaced = await interleave(scale.stream_rounds, rates(UNPACED_EVENTS, 0.0, {}))
    late = ", ".join(f"{name} {statistics.median(each) * 1000:.1f} ms" for name, each in lags.items())
    return [
        compare(
            "bridge-streams",
            f"{count} streams at once, an event every {EVERY_MS:g} ms, events a second",
            "/s",
            baseline_what="straight to the same provider",
            baseline=figures(paced["direct"]),
            measured=figures(paced["bridged"]),
            target=Target("ratio at least", 0.5),
            note=f"an event is late by: {late}",
        ),
        compare(
            "bridge-streams-unpaced",
            f"{count} streams at once, as fast as they come, events a second",
            "/s",
            baseline_what="straight to the same provider",
            baseline=figures(unpaced["direct"]),
            measured=figures(unpaced["bridged"]),
        ),
    ]


async def memory_of_calls(scale: Scale) -> list[Row]:
    """Resident memory of host, server and proxy, early in a long run of calls and at its end."""
    calls = scale.model_calls
    async with _ways() as ways:

        async def run(count: int) -> dict[str, int]:
            await ways.ask(Order(ways.bridged, requests=count // AT_ONCE // 2, at_once=AT_ONCE))
            await ways.ask(Order(ways.bridged, requests=count // AT_ONCE // 2, at_once=AT_ONCE, events=10))
            return ways.resident()

        early = await run(calls // SETTLED)
        late = await run(calls - calls // SETTLED)
    shown = ", ".join(f"{name} {early[name] / 1e6:.1f} to {late[name] / 1e6:.1f}" for name in early)
    return [
        compare(
            "bridge-rss",
            f"memory of host, server and proxy after {calls:,} calls",
            "MB",
            baseline_what=f"after {calls // SETTLED:,}",
            baseline=figures([sum(early.values()) / 1e6]),
            measured=figures([sum(late.values()) / 1e6]),
            target=Target("ratio at most", 1.05),
            note=shown,
        )
    ]
