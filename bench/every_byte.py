"""`python -m bench.every_byte`: 200 MB of output to one reader, each way; prints size and SHA-256 of what came.

The ways: `local`, a Docker container, a Unix socket behind a channel that is slower than the process, and commands
alone (`channel=False`), by `exec_remote` and by `Process.events`. Starts servers and an engine of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Final

import holdfast
from holdfast.client.sandbox import Sandbox
from holdfast.sandboxes.target import CommandSandbox
from holdfast.types import OutputChunk, OutputGap
from tests.support.engines import Missing, busybox_root, docker_engine
from tests.support.servers import running_server

IMAGE: Final = "hf-every-byte"
MEGABYTE: Final = 1_000_000
#: Numbers of one width: each offset has one right content, and the `seq` of busybox prints the same.
FIRST: Final = 10_000_000
LINE_BYTES: Final = 9
#: The size of a piece on the slow channel, and its time: 16 MB a second, far less than `seq` prints.
PIECE_BYTES: Final = 64 * 1024
PIECE_SECONDS: Final = 0.004

Way = Callable[[], contextlib.AbstractAsyncContextManager[Sandbox]]
Read = Callable[[Sandbox, int], Coroutine[None, None, "Came"]]


class Came:
    """One stream as it arrived: how many bytes, their hash, and how many are in gaps."""

    def __init__(self) -> None:
        self.size = 0
        self.lost = 0
        self._digest = hashlib.sha256()

    def take(self, data: bytes) -> None:
        self.size += len(data)
        self._digest.update(data)

    @property
    def hash(self) -> str:
        return self._digest.hexdigest()


def expected(lines: int) -> Came:
    came = Came()
    for first in range(FIRST, FIRST + lines, 100_000):
        came.take(b"".join(b"%d\n" % number for number in range(first, min(first + 100_000, FIRST + lines))))
    return came


def _command(lines: int) -> list[str]:
    return ["seq", str(FIRST), str(FIRST + lines - 1)]


async def by_exec_remote(box: Sandbox, lines: int) -> Came:
    came = Came()
    async for event in box.exec_remote(_command(lines)):
        if isinstance(event, holdfast.StdoutChunk):
            came.take(event.data.encode())
        elif isinstance(event, OutputGap):
            came.lost += event.length
    return came


async def by_events(box: Sandbox, lines: int) -> Came:
    came = Came()
    process = await box.start(_command(lines))
    async for event in process.events():
        if isinstance(event, OutputChunk):
            came.take(event.data)
        elif isinstance(event, OutputGap):
            came.lost += event.length
    return came


@contextlib.asynccontextmanager
async def local() -> AsyncIterator[Sandbox]:
    with running_server() as server:
        async with holdfast.connect(server.address("unix")) as box:
            yield box


@contextlib.asynccontextmanager
async def container() -> AsyncIterator[Sandbox]:
    with tempfile.TemporaryDirectory(prefix="hf-bench-") as directory, docker_engine() as engine:
        engine.image(busybox_root(Path(directory, "root")), IMAGE)
        name = engine.container(IMAGE)
        try:
            async with holdfast.connect(f"docker:{name}") as box:
                yield box
        finally:
            engine.remove(name)


@contextlib.asynccontextmanager
async def slow_channel() -> AsyncIterator[Sandbox]:
    """A Unix socket behind a relay with a bounded rate."""

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(PIECE_BYTES):
                await asyncio.sleep(PIECE_SECONDS)
                sink.write(data)
                await sink.drain()
        sink.close()

    with running_server() as server, tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as directory:

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            up_reader, up_writer = await asyncio.open_unix_connection(server.socket)
            await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

        path = os.path.join(directory, "slow.sock")
        listening = await asyncio.start_unix_server(connected, path)
        try:
            async with holdfast.connect(f"unix:{path}") as box:
                yield box
        finally:
            listening.close()


@contextlib.asynccontextmanager
async def commands_alone() -> AsyncIterator[Sandbox]:
    with running_server() as server, tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as directory:
        prefix = ["env", f"HOLDFAST_DIRECTORY={server.directory}"]
        location = CommandSandbox(prefix, channel=False, poll_interval=0.01, directory=directory)
        async with holdfast.connect(location) as box:
            yield box


#: Where each call is a command, too much is printed between a start and the first poll of another call's reader:
#: there, the start opens the reader.
WAYS: Final[dict[str, tuple[Way, tuple[Read, ...]]]] = {
    "local": (local, (by_exec_remote, by_events)),
    "docker": (container, (by_exec_remote, by_events)),
    "slow channel": (slow_channel, (by_exec_remote, by_events)),
    "commands alone": (commands_alone, (by_exec_remote,)),
}


async def run(lines: int) -> int:
    """Print a line for each way and reader; returns how many are not right."""
    wrong = 0
    wanted = expected(lines)
    _show("printed", "", wanted, "")
    for name, (way, reads) in WAYS.items():
        try:
            async with way() as box:
                for read in reads:
                    came = await read(box, lines)
                    right = (came.size, came.hash, came.lost) == (wanted.size, wanted.hash, 0)
                    wrong += not right
                    verdict = "every byte" if right else f"WRONG, {came.lost:,} in gaps"
                    label = read.__name__.removeprefix("by_")
                    _show(name, label, came, verdict)
        except Missing as missing:
            print(f"{name:<16} left out: {missing}", flush=True)
    return wrong


def _show(way: str, reader: str, came: Came, verdict: str) -> None:
    print(f"{way:<16} {reader:<12} {came.size:>11,} bytes  sha256 {came.hash}  {verdict}".rstrip(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Print much to one reader each way, and compare what came.")
    parser.add_argument("--megabytes", type=int, default=200, help="how much; 200 if not given")
    arguments = parser.parse_args()
    return 1 if asyncio.run(run(arguments.megabytes * MEGABYTE // LINE_BYTES)) else 0


if __name__ == "__main__":
    sys.exit(main())
