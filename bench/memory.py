"""The memory of the server: idle, with a thousand processes, and after a flood with and without a reader.

Each round has fresh servers, since memory that was used once stays. The figure is VmRSS of /proc/PID/status, which
does not count output on tmpfs.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Final

from bench import bare_asyncio
from bench.measure import Rounds, Row, Scale, Target, compare, figures
from bench.servers import memory_bytes, producer, read_all, size_of, spec_of, start_crowd, talking_to
from tests.support.servers import running_server, server_environment

MB: Final = 1e6
KB: Final = 1e3
#: The producer prints no faster than it can; this only turns a hang into an error.
PATIENCE_SECONDS: Final = 120.0


async def resident(scale: Scale) -> list[Row]:
    bare = [await _bare_asyncio(scale.crowd) for _ in range(scale.server_rounds)]
    floods = [await _floods(scale.flood_blocks) for _ in range(scale.server_rounds)]
    crowds = [await _crowd(scale.crowd) for _ in range(scale.server_rounds)]
    quiet = figures([flood[0] / MB for flood in floods])
    flooded = Target("at most", quiet.median + 10.0)
    size = size_of(scale.flood_blocks)
    return [
        _idle_row(figures([alone / MB for alone, _ in bare]), quiet),
        compare(
            "rss-process",
            f"server RSS, each of {scale.crowd:,} running processes",
            "KB",
            baseline_what="the same with asyncio.create_subprocess_exec",
            baseline=figures([(crowded - alone) / scale.crowd / KB for alone, crowded in bare]),
            measured=figures([(crowded - alone) / scale.crowd / KB for alone, crowded in crowds]),
            target=Target("at most", 30.0),
        ),
        compare(
            "rss-flood",
            f"server RSS after {size}, no reader",
            "MB",
            baseline_what="idle",
            baseline=quiet,
            measured=figures([unread / MB for _, unread, _, _ in floods]),
            target=flooded,
        ),
        compare(
            "rss-flood-read",
            f"server RSS after {size} more, one reader",
            "MB",
            baseline_what="idle",
            baseline=quiet,
            measured=figures([read / MB for _, _, read, _ in floods]),
            target=flooded,
            note=f"at its peak {max(peak for _, _, _, peak in floods) / MB:.1f} MB",
        ),
    ]


async def idle(scale: Scale) -> list[Row]:
    """The idle server alone, without crowds and floods."""
    bare = [await _bare_asyncio(1) for _ in range(scale.server_rounds)]
    servers = [await _idle() for _ in range(scale.server_rounds)]
    return [_idle_row(figures([alone / MB for alone, _ in bare]), figures([each / MB for each in servers]))]


def _idle_row(bare: Rounds, measured: Rounds) -> Row:
    return compare(
        "rss-idle",
        "server RSS, idle",
        "MB",
        baseline_what="a Python program that imports asyncio",
        baseline=bare,
        measured=measured,
        target=Target("at most", 40.0),
    )


async def _idle() -> int:
    with running_server() as server:
        async with talking_to(server.address("unix")) as api:
            await api.status()
            return memory_bytes(server.pid)


async def _floods(blocks: int) -> tuple[int, int, int, int]:
    """A fresh server: idle, after a flood without a reader, after one with a reader, and its peak."""
    with running_server() as server:
        async with talking_to(server.address("unix")) as api:
            await api.status()
            idle = memory_bytes(server.pid)
            info = await api.start(spec_of(producer(blocks)))
            async with asyncio.timeout(PATIENCE_SECONDS):
                await api.wait(info.process_id)
            unread = memory_bytes(server.pid)
            async with asyncio.timeout(PATIENCE_SECONDS):
                await read_all(api, producer(blocks), overflow="drop")
            return idle, unread, memory_bytes(server.pid), memory_bytes(server.pid, "VmHWM")


async def _crowd(count: int) -> tuple[int, int]:
    """A fresh server: idle, and with so many processes."""
    with running_server() as server:
        async with talking_to(server.address("unix")) as api:
            await api.status()
            idle = memory_bytes(server.pid)
            await start_crowd(server, api, count)
            return idle, memory_bytes(server.pid)


async def _bare_asyncio(count: int) -> tuple[int, int]:
    """A Python program that does the same without us, in a process of its own."""
    environment = server_environment()
    environment["PYTHONPATH"] = f"{Path(__file__).parents[1]}:{environment['PYTHONPATH']}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", bare_asyncio.__name__, str(count)),
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    printed, _ = await process.communicate()
    alone, crowded = map(int, printed.split())
    return alone, crowded
