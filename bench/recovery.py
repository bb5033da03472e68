"""The cost and the speed of recovery: a start with and without a keeper, and kill -9 of the server.

A thousand processes across a kill, and a stream with a kill in its middle; its bytes and exit code must be right.
Touches the servers that it starts, and kills them.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Final

from bench.measure import Row, Scale, Target, compare, figures, interleave, interleave_samples, latencies
from bench.servers import BLOCK, BenchmarkError, kill_server, size_of, spec_of, start_crowd, talking_to
from bench.starts import run_streamed
from holdfast.client.remote import RemoteExec
from holdfast.types import Closed, Exited, OutputChunk
from tests.support.servers import RunningServer, running_server

ADDED_MS: Final = 0.15
BACK_MS: Final = 2_000.0
STREAM_EXIT_CODE: Final = 3


async def start_under_a_keeper(scale: Scale) -> list[Row]:
    """`/bin/true` on a server with a keeper and on one without, in turns."""
    ended: dict[str, list[float]] = {"bare": [], "kept": []}
    with running_server(settings={"keeper": False}) as alone, running_server() as kept:
        async with talking_to(alone.address("unix")) as bare_api, talking_to(kept.address("unix")) as kept_api:

            def starts(name: str, api: RemoteExec) -> Callable[[], Awaitable[list[float]]]:
                async def start() -> list[float]:
                    answered, exited = await run_streamed(api)
                    ended[name].append(exited)
                    return [answered]

                return start

            taken = await interleave_samples(
                scale.rounds, scale.starts, {"bare": starts("bare", bare_api), "kept": starts("kept", kept_api)}
            )
    # The same rounds, with the turn that warms up, which weighs little in a median.
    size = len(ended["bare"]) // scale.rounds
    exits = {
        name: latencies([times[at : at + size] for at in range(0, size * scale.rounds, size)])
        for name, times in ended.items()
    }
    baseline, measured = latencies(taken["bare"]), latencies(taken["kept"])
    return [
        compare(
            "kept-start",
            "start to answer under a keeper",
            "ms",
            baseline_what="without a keeper",
            baseline=baseline,
            measured=measured,
            target=Target("at most", baseline.median + ADDED_MS),
            note=f"{measured.median - baseline.median:+.3f} ms",
        ),
        compare(
            "kept-start-exited",
            "start to exited under a keeper",
            "ms",
            baseline_what="without a keeper",
            baseline=exits["bare"],
            measured=exits["kept"],
            note=f"{exits['kept'].median - exits['bare'].median:+.3f} ms",
        ),
    ]


async def crowd_across_a_kill(scale: Scale) -> list[Row]:
    """From kill -9 of the server until its client has the reply that all its processes run."""
    one, many = [], []
    for _ in range(scale.server_rounds):
        one.append(await _back_after_a_kill(1))
        many.append(await _back_after_a_kill(scale.crowd))
    return [
        compare(
            "kept-1000",
            f"kill -9 of the server to all of {scale.crowd:,} processes listed running",
            "ms",
            baseline_what="with one process",
            baseline=figures(one),
            measured=figures(many),
            target=Target("at most", BACK_MS),
        )
    ]


async def stream_across_a_kill(scale: Scale) -> list[Row]:
    """A stream that is read without loss, with a kill -9 of the server when half of it has arrived."""
    size = scale.unix_blocks * BLOCK
    expected = _digest_of(_numbers(size))
    with running_server() as server:
        async with talking_to(server.address("unix")) as api:

            def rate(*, kill: bool) -> Callable[[], Awaitable[float]]:
                async def run() -> float:
                    return await _stream(server, api, size, expected, kill=kill)

                return run

            taken = await interleave(scale.stream_rounds, {"whole": rate(kill=False), "killed": rate(kill=True)})
    return [
        compare(
            "kept-stream",
            f"{size_of(scale.unix_blocks)} to a client, kill -9 of the server in its middle",
            "MB/s",
            baseline_what="the same without a kill",
            baseline=figures(taken["whole"]),
            measured=figures(taken["killed"]),
            note="every byte hashed",
        )
    ]


async def _back_after_a_kill(count: int) -> float:
    """Milliseconds."""
    with running_server() as server:
        async with talking_to(server.address("unix")) as api:
            await start_crowd(server, api, count)
            began = perf_counter()
            await kill_server(server)
            listed = await api.list()
            took = perf_counter() - began
            running = sum(info.running for info in listed)
            if running != count:
                raise BenchmarkError(f"{running} of {count} processes run after a kill of the server")
            await _restarted(server, api)
    return took * 1000


async def _stream(server: RunningServer, api: RemoteExec, size: int, expected: bytes, *, kill: bool) -> float:
    """Megabytes a second."""
    began = perf_counter()
    _, events = await api.start_streaming(spec_of(_numbers(size), overflow="block"))
    digest, received, code = hashlib.sha256(), 0, None
    killing = kill
    async for event in events:
        if isinstance(event, OutputChunk):
            if event.offset != received:
                raise BenchmarkError(f"offset {event.offset} came after {received} bytes")
            received += len(event.data)
            digest.update(event.data)
            if killing and received >= size // 2:
                killing = False
                await kill_server(server)
        elif isinstance(event, Exited):
            code = event.status.exit_code
        elif isinstance(event, Closed):
            break
    took = perf_counter() - began
    if (received, digest.digest(), code) != (size, expected, STREAM_EXIT_CODE):
        raise BenchmarkError(f"{received} bytes came of {size}, exit code {code}; or they were others")
    if kill:
        await _restarted(server, api)
    return received / took / 1e6


async def _restarted(server: RunningServer, api: RemoteExec) -> None:
    """Another server answers now, and has registered with its keeper."""
    status = await api.status()
    if status.pid == server.pid or status.restarts == 0:
        raise BenchmarkError(f"the server, pid {server.pid}, was killed and answers")
    server.pid = status.pid


def _numbers(size: int) -> tuple[str, ...]:
    """Prints so many bytes, no two parts of which are alike."""
    return ("sh", "-c", f"seq 1000000000 | head -c {size}; exit {STREAM_EXIT_CODE}")


def _digest_of(argv: tuple[str, ...]) -> bytes:
    digest = hashlib.sha256()
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while data := os.read(process.stdout.fileno(), BLOCK):
            digest.update(data)
    return digest.digest()
