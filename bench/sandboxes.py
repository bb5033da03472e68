"""The cost of a container: one connection into it, beside the same without one and beside one `docker exec` a call.

Starts a Docker engine of its own with a busybox image and removes it. Where there is none, a line names what is
missing, and the rows are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Final

import holdfast
from bench.measure import Row, Scale, Target, compare, figures, interleave, interleave_samples, latencies, one
from bench.servers import BLOCK, BenchmarkError, size_of
from bench.starts import run_exec
from holdfast.client.sandbox import Sandbox
from holdfast.sandboxes.install.bundle import bundle
from holdfast.types import OutputChunk
from tests.support.engines import ContainerEngine, Missing, busybox_root, docker_engine
from tests.support.servers import running_server

IMAGE: Final = "hf-bench"
#: Calls of the fast way in a turn with one of the slow way, so that neither takes all the time.
BATCH: Final = 10
#: One `docker exec` a call is slow, so a few calls suffice.
SLOW_TURNS: Final = 3
READ_BYTES: Final = 1024 * 1024
#: Prints the time of the clock that all of the machine shares, and lets the line arrive before the next.
_PRINTER: Final = """
import os, time
for _ in range(40):
    os.write(1, b"%.6f\\n" % time.perf_counter())
    time.sleep(0.01)
"""


@contextlib.contextmanager
def _docker() -> Iterator[ContainerEngine | None]:
    """An engine with the image; None where there is none, with the reason on stderr."""
    with contextlib.ExitStack() as stack:
        try:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="hf-bench-"))
            engine = stack.enter_context(docker_engine())
            engine.image(busybox_root(Path(directory, "root")), IMAGE)
        except Missing as missing:
            sys.stderr.write(f"no Docker here, its rows are left out: {missing}\n")
            yield None
        else:
            yield engine


@contextlib.contextmanager
def _container(engine: ContainerEngine) -> Iterator[str]:
    name = engine.container(IMAGE)
    try:
        yield name
    finally:
        engine.remove(name)


async def in_containers(scale: Scale) -> list[Row]:
    """Every figure of containers, with one engine."""
    with _docker() as engine:
        if engine is None:
            return []
        benchmarks = (_true, _connections, _stream, _line)
        return [row for benchmark in benchmarks for row in await benchmark(engine, scale)]


async def _true(engine: ContainerEngine, scale: Scale) -> list[Row]:
    """`true` over the channel, beside the same without a container, and beside one `docker exec` a call."""
    with running_server() as server, _container(engine) as name:
        async with (
            holdfast.connect(server.address("unix")) as bare,
            holdfast.connect(f"docker:{name}") as inside,
        ):
            fast = await interleave_samples(
                scale.rounds, scale.starts, {"bare": one(_exec(bare)), "inside": one(_exec(inside))}
            )
            slow = await interleave_samples(
                scale.stream_rounds,
                SLOW_TURNS,
                {"docker": one(_docker_exec(name)), "inside": _batch(_exec(inside))},
            )
    return [
        compare(
            "box-true",
            '`exec(["true"])` in a container, over the channel',
            "ms",
            baseline_what="the same without a container, Unix socket",
            baseline=latencies(fast["bare"]),
            measured=latencies(fast["inside"]),
            target=Target("ratio at most", 2.0),
        ),
        compare(
            "box-true-docker",
            '`exec(["true"])` in a container, over the channel',
            "ms",
            baseline_what="one `docker exec` a call",
            baseline=latencies(slow["docker"]),
            measured=latencies(slow["inside"]),
            target=Target("ratio at most", 0.05),
        ),
    ]


async def _connections(engine: ContainerEngine, scale: Scale) -> list[Row]:
    """The first connection puts the server in, the second finds it."""
    await bundle()  # made once a machine, and not part of a connection
    firsts: list[list[float]] = []
    seconds: list[list[float]] = []
    plains: list[list[float]] = []
    for _ in range(scale.server_rounds):
        with _container(engine) as name:
            firsts.append([await _connect(name)])
            seconds.append([await _connect(name) for _ in range(SLOW_TURNS)])
            plains.append([await _docker_exec(name)() for _ in range(SLOW_TURNS)])
    baseline, what = latencies(plains), "one `docker exec NAME true`"
    return [
        compare(
            "box-first",
            "first connection to a fresh container, the server is put in",
            "ms",
            baseline_what=what,
            baseline=baseline,
            measured=latencies(firsts),
            target=Target("ratio at most", 5.0),
        ),
        compare(
            "box-second",
            "second connection to it, until `exec` has an answer",
            "ms",
            baseline_what=what,
            baseline=baseline,
            measured=latencies(seconds),
            target=Target("at most", 300.0),
        ),
    ]


async def _stream(engine: ContainerEngine, scale: Scale) -> list[Row]:
    """200 MB that a command prints, lossless."""
    blocks = min(200, scale.unix_blocks)
    with _container(engine) as name:
        engine("exec", name, "dd", "if=/dev/zero", "of=/zeros", f"bs={BLOCK}", f"count={blocks}")
        async with holdfast.connect(f"docker:{name}") as box:
            taken = await interleave(
                scale.stream_rounds,
                {"docker": _docker_cat(name, blocks), "inside": _cat(box, blocks)},
            )
    return [
        compare(
            "box-stream",
            f"{size_of(blocks)} from a container",
            "MB/s",
            baseline_what="`docker exec NAME cat`, its pipe read",
            baseline=figures(taken["docker"]),
            measured=figures(taken["inside"]),
            target=Target("ratio at least", 0.8),
        )
    ]


async def _line(engine: ContainerEngine, scale: Scale) -> list[Row]:
    """From a line that is printed to its event. The line is the time: a container has the machine's own clock."""
    chosen = await bundle()
    with _container(engine) as name, running_server() as server:
        async with (
            holdfast.connect(server.address("unix")) as bare,
            holdfast.connect(f"docker:{name}") as inside,
        ):
            taken = await interleave_samples(
                scale.stream_rounds,
                2,
                {
                    "bare": _lines(bare, [sys.executable, "-I", "-S"]),
                    "inside": _lines(inside, chosen.interpreter(f"/root/.cache/{chosen.name}")),
                },
            )
    return [
        compare(
            "box-line",
            "a line printed in a container, until its event",
            "ms",
            baseline_what="the same without a container, Unix socket",
            baseline=latencies(taken["bare"]),
            measured=latencies(taken["inside"]),
            target=Target("at most", 5.0),
        )
    ]


def _exec(box: Sandbox) -> Callable[[], Awaitable[float]]:
    async def run() -> float:
        return await run_exec(box)

    return run


def _batch(run: Callable[[], Awaitable[float]]) -> Callable[[], Awaitable[list[float]]]:
    async def samples() -> list[float]:
        return [await run() for _ in range(BATCH)]

    return samples


def _docker_exec(name: str) -> Callable[[], Awaitable[float]]:
    async def run() -> float:
        began = perf_counter()
        await _run(["docker", "exec", name, "true"])
        return perf_counter() - began

    return run


async def _run(argv: Sequence[str]) -> None:
    process = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.DEVNULL)
    if await process.wait() != 0:
        raise BenchmarkError(f"{argv[:3]} ended with {process.returncode}")


async def _connect(name: str) -> float:
    began = perf_counter()
    async with holdfast.connect(f"docker:{name}") as box:
        await box.exec(["true"])
        return perf_counter() - began


def _docker_cat(name: str, blocks: int) -> Callable[[], Awaitable[float]]:
    async def rate() -> float:
        began = perf_counter()
        argv = ["docker", "exec", name, "cat", "/zeros"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220 - nothing else runs meanwhile
            assert process.stdout is not None
            received = 0
            while data := os.read(process.stdout.fileno(), READ_BYTES):
                received += len(data)
        return _rate(received, blocks, began)

    return rate


def _cat(box: Sandbox, blocks: int) -> Callable[[], Awaitable[float]]:
    async def rate() -> float:
        began = perf_counter()
        process = await box.start(["cat", "/zeros"], overflow="block")
        received = 0
        async for chunk in process.output():
            if isinstance(chunk, OutputChunk):
                received += len(chunk.data)
        taken = _rate(received, blocks, began)
        await process.forget()
        return taken

    return rate


def _rate(received: int, blocks: int, began: float) -> float:
    took = perf_counter() - began
    if received != blocks * BLOCK:
        raise BenchmarkError(f"{received} bytes came, of {blocks * BLOCK}")
    return received / took / 1e6


def _lines(box: Sandbox, python: Sequence[str]) -> Callable[[], Awaitable[list[float]]]:
    async def samples() -> list[float]:
        process = await box.start([*python, "-c", _PRINTER])
        taken = []
        async for chunk in process.output():
            arrived = perf_counter()
            if isinstance(chunk, OutputChunk):
                taken.append(arrived - float(chunk.data.split()[-1]))
        await process.forget()
        if not taken:
            raise BenchmarkError("the program that prints the time printed nothing")
        return taken

    return samples
