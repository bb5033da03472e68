"""How fast files go: a gigabyte to the sandbox and back over the Unix socket, and a small file in a round trip.

The baseline for the gigabyte is `cat` into one end of a socket pair and `cat` out of the other, into a file of the
same file system; for the small file it is reading it here.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Final

from bench.measure import Row, Scale, Target, compare, figures, interleave, interleave_samples, latencies
from bench.servers import BLOCK, BenchmarkError, size_of
from holdfast.client.opening import connect
from holdfast.client.sandbox import Sandbox
from tests.support.servers import running_server

#: Memory, so that no disk is measured; both contenders read and write there.
DIRECTORY: Final = "/dev/shm"
SMALL_BYTES: Final = 1024
BATCH: Final = 20


async def there_and_back(scale: Scale) -> list[Row]:
    """A large file up and down."""
    blocks = scale.unix_blocks
    with running_server() as server, tempfile.TemporaryDirectory(dir=_place()) as directory:
        source, copy = os.path.join(directory, "source"), os.path.join(directory, "copy")
        await asyncio.to_thread(_fill, source, blocks)
        async with connect(server.address("unix")) as box:
            taken = await interleave(
                scale.stream_rounds,
                {
                    "cat": _rate(blocks, copy, lambda: asyncio.to_thread(_cat, source, copy)),
                    "upload": _rate(blocks, copy, lambda: box.upload(source, copy)),
                    "download": _rate(blocks, copy, lambda: box.download(source, copy)),
                },
            )
    return [_row(name, f"{name} of {size_of(blocks)}, Unix socket", taken) for name in ("upload", "download")]


async def small_file(scale: Scale) -> list[Row]:
    """`read_file` of a kilobyte."""
    with running_server() as server, tempfile.TemporaryDirectory(dir=_place()) as directory:
        path = os.path.join(directory, "small")
        await asyncio.to_thread(_write, path, os.urandom(SMALL_BYTES))
        async with connect(server.address("unix")) as box:

            async def here() -> list[float]:
                return [_read_here(path) for _ in range(BATCH)]

            async def ping() -> list[float]:
                return [await _timed(box.exists(path)) for _ in range(BATCH)]

            async def there() -> list[float]:
                return [await _timed(_read_there(box, path)) for _ in range(BATCH)]

            taken = await interleave_samples(
                scale.rounds, scale.echoes // BATCH, {"here": here, "stat": ping, "there": there}
            )
    return [
        compare(
            "read-file",
            "`read_file` of 1 KB, Unix socket",
            "ms",
            baseline_what="open, read and close it here",
            baseline=latencies(taken["here"]),
            measured=latencies(taken["there"]),
            target=Target("at most", 1.0),
            note=f"`stat` {latencies(taken['stat']).median:.3f} ms",
        )
    ]


def _row(name: str, what: str, taken: dict[str, list[float]]) -> Row:
    return compare(
        name,
        what,
        "MB/s",
        baseline_what="`cat` to `cat` over a socket pair",
        baseline=figures(taken["cat"]),
        measured=figures(taken[name]),
        target=Target("ratio at least", 0.3),
    )


def _rate(blocks: int, copy: str, work: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[float]]:
    async def rate() -> float:
        began = perf_counter()
        await work()
        took = perf_counter() - began
        size = os.stat(copy).st_size
        os.unlink(copy)
        if size != blocks * BLOCK:
            raise BenchmarkError(f"{size} bytes came of {blocks * BLOCK}")
        return size / took / 1e6

    return rate


def _cat(source: str, copy: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open(source, "rb") as reader, open(copy, "wb") as writer:
        sending = subprocess.Popen(["cat"], stdin=reader, stdout=ours.fileno())
        taking = subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=writer)
        ours.close()
        theirs.close()
        if (sending.wait(), taking.wait()) != (0, 0):
            raise BenchmarkError("cat failed")


async def _timed(work: Awaitable[object]) -> float:
    began = perf_counter()
    await work
    return perf_counter() - began


async def _read_there(box: Sandbox, path: str) -> None:
    if len(await box.read_file(path)) != SMALL_BYTES:
        raise BenchmarkError(f"{path}: not all of it came")


def _read_here(path: str) -> float:
    began = perf_counter()
    with open(path, "rb", buffering=0) as file:
        file.read()
    return perf_counter() - began


def _fill(path: str, blocks: int) -> None:
    block = os.urandom(BLOCK)
    with open(path, "wb") as file:
        for _ in range(blocks):
            file.write(block)


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _place() -> str | None:
    return DIRECTORY if os.access(DIRECTORY, os.W_OK) else None
