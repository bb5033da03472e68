"""A connection that breaks at any byte, again and again, loses nothing and does nothing twice."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import pytest

from holdfast import OutputChunk, Sandbox
from holdfast.client.connection.channel_connection import ChannelConnection
from holdfast.client.dial import Address, dialer
from holdfast.client.remote import RemoteExec
from holdfast.exec_api import EventStream
from holdfast.wire.messages import Encoding
from tests.contract.cutting_proxy import CuttingProxy, cutting_tcp, cutting_unix
from tests.support.servers import RunningServer, server_environment

#: `command` is the long-lived channel of a host that can only execute: `holdfast connect`, through the same proxy.
CUT_WAYS = ("unix", "unix-json", "ws", "ws-json", "command")
MEGABYTE = 1_000_003


@contextlib.asynccontextmanager
async def broken_connection(
    way: str, server: RunningServer, directory: str, seed: int
) -> AsyncIterator[tuple[Sandbox, CuttingProxy]]:
    """A sandbox at the other end of a connection that does not hold."""
    scheme, _, encoding = way.partition("-")
    async with contextlib.AsyncExitStack() as stack:
        environment = server_environment(HOLDFAST_DIRECTORY=directory)
        if scheme == "ws":
            port = urlsplit(server.address("ws")).port
            assert port is not None
            proxy, own_port = await stack.enter_async_context(cutting_tcp(port, seed))
            address: Address = f"ws://127.0.0.1:{own_port}"
        else:
            path = os.path.join(directory, "server.sock")
            proxy = await stack.enter_async_context(cutting_unix(path, server.socket, seed))
            connect = [sys.executable, "-m", "holdfast", "connect"]
            address = connect if scheme == "command" else f"unix:{path}"
        connection = ChannelConnection(
            dialer(address, env=environment),
            address=way,
            encoding=cast(Encoding, encoding or "msgpack"),
            rng=random.Random(seed),
        )
        await connection.open()
        box = Sandbox(RemoteExec(connection))
        try:
            yield box, proxy
        finally:
            proxy.peaceful = True
            await box.aclose()


PRINT = f"""
import random, sys
block = random.Random(3).randbytes({MEGABYTE})
for number in range(30):
    sys.stdout.buffer.write(number.to_bytes(8, "big") + block)
    if number % 10 == 0:
        sys.stderr.write(f"at {{number}}\\n")
        sys.stderr.flush()
"""


@pytest.mark.parametrize("way", CUT_WAYS)
async def test_a_stream_is_exact_however_often_the_connection_breaks(
    way: str, server: RunningServer, directory: str
) -> None:
    block = random.Random(3).randbytes(MEGABYTE)
    expected = hashlib.sha256(b"".join(n.to_bytes(8, "big") + block for n in range(30))).hexdigest()
    async with broken_connection(way, server, directory, seed=20_240) as (box, proxy):
        process = await box.start([sys.executable, "-I", "-S", "-c", PRINT], overflow="block")
        digest, position, errors, last_seq = hashlib.sha256(), 0, b"", 0
        async for chunk in process.output():
            assert isinstance(chunk, OutputChunk), chunk
            assert chunk.seq > last_seq
            last_seq = chunk.seq
            if chunk.stream == "stderr":
                errors += chunk.data
                continue
            assert chunk.offset == position
            digest.update(chunk.data)
            position += len(chunk.data)
        assert (position, digest.hexdigest()) == (30 * (MEGABYTE + 8), expected)
        assert errors == b"at 0\nat 10\nat 20\n"
        assert (await process.wait()).exit_code == 0
        assert proxy.cuts >= 20


@pytest.mark.parametrize("way", CUT_WAYS)
async def test_input_is_written_once_however_often_the_connection_breaks(
    way: str, server: RunningServer, directory: str
) -> None:
    data = random.Random(5).randbytes(8_000_017)
    async with broken_connection(way, server, directory, seed=777) as (box, proxy):
        process = await box.start(["cat"], stdin="open", overflow="block")
        stdout, stderr = await process.communicate(data)
        assert (len(stdout), stderr) == (len(data), b"")
        assert hashlib.sha256(stdout).hexdigest() == hashlib.sha256(data).hexdigest()
        assert proxy.cuts >= 8


async def test_starts_and_calls_happen_once_however_often_the_connection_breaks(
    remote_way: str, server: RunningServer, directory: str, tmp_path: Path
) -> None:
    # A neighbour's flood makes the connection break while these are under way.
    async with broken_connection(remote_way, server, directory, seed=99) as (box, proxy):
        flood = await box.start(["sh", "-c", "while :; do seq 20000; done"], overflow="block")
        reader = flood.events()
        reading = asyncio.create_task(_read_on(reader))
        log = tmp_path / "log"

        async def one(number: int) -> bytes:
            script = f"echo {number} >> {log}; read word; echo {number}:$word"
            process = await box.start(["sh", "-c", script], id=f"job-{number}", stdin="open")
            await process.write(f"word-{number}\n")
            assert (await process.wait()).exit_code == 0
            return (await process.snapshot()).stdout

        number = 0
        async with asyncio.timeout(120):
            while number < 15 or proxy.cuts < 3:
                assert await one(number) == b"%d:word-%d\n" % (number, number)
                number += 1
        assert log.read_text().split() == [str(n) for n in range(number)]
        # Repeated, whether it was running would have two answers.
        proxy.peaceful = True
        reading.cancel()
        await asyncio.wait([reading])
        assert await flood.terminate(force=True)


async def _read_on(reader: EventStream) -> None:
    async for _ in reader:
        pass
