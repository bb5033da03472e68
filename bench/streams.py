"""How fast bytes come: a line through `cat` and back, a gigabyte over the Unix socket, and over WebSocket as JSON.

The baseline is a Python program that holds the pipes itself.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from time import perf_counter
from typing import Final

from bench.measure import Row, Scale, Target, Unit, compare, figures, interleave, interleave_samples, latencies
from bench.servers import BLOCK, BenchmarkError, producer, read_all, size_of, spec_of, talking_to
from holdfast.client.connection.subscription import Subscription
from holdfast.client.remote import RemoteExec
from holdfast.types import OutputChunk
from tests.support.servers import running_server

CAT: Final = ("cat",)
LINE: Final = b"a line as somebody would type it\n"
#: Lines in a turn: a round trip that follows another at once finds both programs awake.
BATCH: Final = 20
READ_BYTES: Final = 1024 * 1024
RATE: Final[Unit] = "MB/s"


async def echo(scale: Scale) -> list[Row]:
    """A line written to `cat`, until its output event."""
    with running_server() as server, _bare_cat() as cat, _bare_cat() as far_cat:
        async with talking_to(server.address("unix")) as api:
            info, events = await api.start_streaming(spec_of(CAT, pipe_stdin=True))

            async def bare() -> list[float]:
                return [_echo_bare(cat) for _ in range(BATCH)]

            async def apart() -> list[float]:
                # One of its own: after the turn it stays where it was put, and would spoil the other's figure.
                with _on_different_cores(far_cat):
                    return [_echo_bare(far_cat) for _ in range(BATCH)]

            async def remote() -> list[float]:
                return [await _echo_remote(api, info.process_id, events) for _ in range(BATCH)]

            taken = await interleave_samples(
                scale.rounds, scale.echoes // BATCH, {"bare": bare, "apart": apart, "remote": remote}
            )
            await api.close_stdin(info.process_id)
            async for _ in events:
                pass
        _end_cat(cat)
        _end_cat(far_cat)
    return [
        compare(
            "cat",
            "`cat`, write to output event, Unix socket",
            "ms",
            baseline_what="a pipe round trip with Popen",
            baseline=latencies(taken["bare"]),
            measured=latencies(taken["remote"]),
            target=Target("ratio at most", 4.0),
            note=f"bare pipe across cores {latencies(taken['apart']).median:.3f} ms",
        )
    ]


async def over_unix(scale: Scale) -> list[Row]:
    """A gigabyte to a client over the Unix socket."""
    blocks = scale.unix_blocks
    with running_server() as server:
        async with talking_to(server.address("unix")) as api:
            taken = await interleave(scale.stream_rounds, {"bare": _bare(blocks), "remote": _remote(api, blocks)})
    return [_rates("unix", f"{size_of(blocks)} to a client, Unix socket", taken, Target("ratio at least", 0.9))]


async def over_websocket(scale: Scale) -> list[Row]:
    """The same over WebSocket as JSON, where bytes are base64; less of it, since the rate is what counts."""
    blocks = scale.websocket_blocks
    with running_server(("ws",)) as server:
        async with talking_to(server.address("ws"), "json") as api:
            taken = await interleave(scale.stream_rounds, {"bare": _bare(blocks), "remote": _remote(api, blocks)})
    return [_rates("websocket", f"{size_of(blocks)} over WebSocket as JSON", taken, Target("ratio at least", 0.1))]


def _rates(name: str, what: str, taken: dict[str, list[float]], target: Target) -> Row:
    return compare(
        name,
        what,
        RATE,
        baseline_what="os.read of the same pipe, 1 MiB reads",
        baseline=figures(taken["bare"]),
        measured=figures(taken["remote"]),
        target=target,
    )


def _bare(blocks: int) -> Callable[[], Awaitable[float]]:
    async def rate() -> float:
        return _read_pipe(blocks)

    return rate


def _remote(api: RemoteExec, blocks: int) -> Callable[[], Awaitable[float]]:
    async def rate() -> float:
        began = perf_counter()
        received = await read_all(api, producer(blocks), overflow="follow")
        took = perf_counter() - began
        if received != blocks * BLOCK:
            raise BenchmarkError(f"{received} bytes came of {blocks * BLOCK}")
        return received / took / 1e6

    return rate


def _read_pipe(blocks: int) -> float:
    began = perf_counter()
    with subprocess.Popen(producer(blocks), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        received = 0
        while data := os.read(pipe, READ_BYTES):
            received += len(data)
    took = perf_counter() - began
    if process.returncode != 0 or received != blocks * BLOCK:
        raise BenchmarkError(f"the bare pipe gave {received} bytes of {blocks * BLOCK}")
    return received / took / 1e6


async def _echo_remote(api: RemoteExec, process_id: str, events: Subscription) -> float:
    began = perf_counter()
    await api.write(process_id, LINE)
    event = await anext(events)
    took = perf_counter() - began
    if not isinstance(event, OutputChunk) or event.data != LINE:
        raise BenchmarkError(f"cat answered {event!r}")
    return took


def _bare_cat() -> subprocess.Popen[bytes]:
    return subprocess.Popen(CAT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)


@contextlib.contextmanager
def _on_different_cores(cat: subprocess.Popen[bytes]) -> Iterator[None]:
    """The cost of the round trip when it must wake another core, as one through a server always does."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    os.sched_setaffinity(cat.pid, cores[-1:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        os.sched_setaffinity(cat.pid, cores)


def _echo_bare(cat: subprocess.Popen[bytes]) -> float:
    assert cat.stdin is not None
    assert cat.stdout is not None
    began = perf_counter()
    cat.stdin.write(LINE)
    answer = cat.stdout.read(len(LINE))
    took = perf_counter() - began
    if answer != LINE:
        raise BenchmarkError(f"cat answered {answer!r}")
    return took


def _end_cat(cat: subprocess.Popen[bytes]) -> None:
    assert cat.stdin is not None
    cat.stdin.close()
    cat.wait()
