"""How long a start takes: one at a time, sixteen at once, and beside a thousand that run.

The baseline is what a Python program does without us: `asyncio.create_subprocess_exec` and `communicate`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Final

import holdfast
from bench.measure import Row, Scale, Target, compare, figures, interleave, interleave_samples, latencies, one
from bench.servers import BenchmarkError, spec_of, start_crowd, talking_to
from holdfast.client.remote import RemoteExec
from holdfast.client.sandbox import Sandbox
from holdfast.types import Exited
from tests.support.servers import running_server

TRUE: Final = ("/bin/true",)
AT_ONCE: Final = 16
BARE: Final = "asyncio.create_subprocess_exec + communicate"

Run = Callable[[], Awaitable[float]]


async def run_bare() -> float:
    began = perf_counter()
    process = await asyncio.create_subprocess_exec(
        *TRUE,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    await process.communicate()
    took = perf_counter() - began
    if process.returncode != 0:
        raise BenchmarkError(f"{TRUE[0]} ended with {process.returncode}")
    return took


async def run_streamed(api: RemoteExec) -> tuple[float, float]:
    """Seconds until the start was answered, and until the exit event came."""
    began = perf_counter()
    _, events = await api.start_streaming(spec_of(TRUE))
    answered = perf_counter()
    async for event in events:
        if isinstance(event, Exited):
            if not event.status.success:
                raise BenchmarkError(f"{TRUE[0]} ended with {event.status.exit_code}")
            break
    ended = perf_counter()
    async for _ in events:
        pass
    return answered - began, ended - began


async def run_exec(box: Sandbox) -> float:
    began = perf_counter()
    result = await box.exec(TRUE)
    took = perf_counter() - began
    if not result.success:
        raise BenchmarkError(f"{TRUE[0]} ended with {result.returncode}")
    return took


async def start_to_exit(scale: Scale) -> list[Row]:
    """`/bin/true`, one after the other."""
    with running_server() as server:
        async with (
            holdfast.connect(server.address("unix")) as box,
            talking_to(server.address("unix")) as api,
        ):

            async def streamed() -> float:
                return (await run_streamed(api))[1]

            async def through_exec() -> float:
                return await run_exec(box)

            taken = await interleave_samples(
                scale.rounds,
                scale.starts,
                {"bare": one(run_bare), "streamed": one(streamed), "exec": one(through_exec)},
            )
    bare = latencies(taken["bare"])
    return [
        compare(
            "true",
            "`/bin/true`, start to exited, Unix socket",
            "ms",
            baseline_what=BARE,
            baseline=bare,
            measured=latencies(taken["streamed"]),
            target=Target("ratio at most", 1.1),
        ),
        compare(
            "true-exec",
            "the same through `box.exec`",
            "ms",
            baseline_what=BARE,
            baseline=bare,
            measured=latencies(taken["exec"]),
        ),
    ]


async def sixteen_at_once(scale: Scale) -> list[Row]:
    """`/bin/true` by sixteen workers."""
    with running_server() as server:
        async with (
            holdfast.connect(server.address("unix")) as box,
            talking_to(server.address("unix")) as api,
        ):

            async def streamed() -> float:
                return (await run_streamed(api))[1]

            async def through_exec() -> float:
                return await run_exec(box)

            taken = await interleave(
                scale.rounds,
                {
                    name: _rate(run, scale.burst)
                    for name, run in {"bare": run_bare, "streamed": streamed, "exec": through_exec}.items()
                },
            )
    bare = figures(taken["bare"])
    return [
        compare(
            "true-16",
            f"the same, {AT_ONCE} at once",
            "/s",
            baseline_what=f"{BARE}, {AT_ONCE} at once",
            baseline=bare,
            measured=figures(taken["streamed"]),
            target=Target("ratio at least", 0.9),
        ),
        compare(
            "true-16-exec",
            f"`box.exec`, {AT_ONCE} at once",
            "/s",
            baseline_what=f"{BARE}, {AT_ONCE} at once",
            baseline=bare,
            measured=figures(taken["exec"]),
        ),
    ]


async def beside_a_crowd(scale: Scale) -> list[Row]:
    """A start on a server that runs a thousand processes, and on one that runs none, at the same time."""
    with running_server() as empty, running_server() as full:
        async with talking_to(empty.address("unix")) as alone, talking_to(full.address("unix")) as crowded:
            await start_crowd(full, crowded, scale.crowd)
            none, crowd = await _start_on_each(scale, alone, crowded)
    return [
        compare(
            "start-1000",
            f"start to answer with {scale.crowd:,} running",
            "ms",
            baseline_what="with none running",
            baseline=latencies(none.answered),
            measured=latencies(crowd.answered),
            target=Target("ratio at most", 1.2),
        ),
        compare(
            "start-1000-exited",
            f"start to exited with {scale.crowd:,} running",
            "ms",
            baseline_what="with none running",
            baseline=latencies(none.ended),
            measured=latencies(crowd.ended),
        ),
    ]


class _Starts:
    """The times of the starts on one server, by round."""

    def __init__(self, api: RemoteExec) -> None:
        self._api = api
        self.answered: list[list[float]] = []
        self.ended: list[list[float]] = []

    async def run(self) -> None:
        answered, ended = await run_streamed(self._api)
        self.answered[-1].append(answered)
        self.ended[-1].append(ended)


async def _start_on_each(scale: Scale, *apis: RemoteExec) -> tuple[_Starts, ...]:
    contenders = tuple(_Starts(api) for api in apis)
    for _ in range(scale.rounds):
        for contender in contenders:
            contender.answered.append([])
            contender.ended.append([])
        for _ in range(scale.starts):
            for contender in contenders:
                await contender.run()
    return contenders


def _rate(run: Run, count: int) -> Callable[[], Awaitable[float]]:
    """How many a second, by `AT_ONCE` workers that share `count` runs."""

    async def rate() -> float:
        left = iter(range(count))

        async def work() -> None:
            for _ in left:
                await run()

        began = perf_counter()
        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        return count / (perf_counter() - began)

    return rate
