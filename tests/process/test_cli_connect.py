"""`holdfast connect` between real pipes, files and sockets and a server that is a script."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
SOURCE = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../src"))
BLOB = os.urandom(3_000_017)


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="hf-", dir="/tmp")
    monkeypatch.setenv("HOLDFAST_DIRECTORY", path)
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    yield path
    shutil.rmtree(path)


async def listen(directory: str, handler: Handler) -> asyncio.Server:
    return await asyncio.start_unix_server(handler, f"{directory}/server.sock")


async def bridge(stdin: Any = asyncio.subprocess.PIPE, stdout: Any = asyncio.subprocess.PIPE) -> Any:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "holdfast", "connect", stdin=stdin, stdout=stdout, stderr=asyncio.subprocess.PIPE
    )


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.close()
    await writer.wait_closed()


async def answer_at_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Print nothing until the input has ended: only a half-closed connection can carry the answer."""
    digest = hashlib.sha256(await reader.read()).hexdigest()
    writer.write(digest.encode())
    writer.close()
    await writer.wait_closed()


async def test_bytes_pass_unchanged_both_ways_through_pipes(directory: str) -> None:
    async with await listen(directory, echo):
        process = await bridge()
        out, err = await process.communicate(BLOB)
    assert (out == BLOB, err, process.returncode) == (True, b"", 0)


async def test_bytes_pass_unchanged_through_files(directory: str) -> None:
    given = os.open(f"{directory}/in", os.O_RDWR | os.O_CREAT)
    taken = os.open(f"{directory}/out", os.O_RDWR | os.O_CREAT)
    assert os.pwrite(given, BLOB, 0) == len(BLOB)
    async with await listen(directory, echo):
        process = await bridge(given, taken)
        assert await process.wait() == 0
    assert os.pread(taken, len(BLOB) + 1, 0) == BLOB
    os.close(given)
    os.close(taken)


async def test_bytes_pass_unchanged_through_a_socket(directory: str) -> None:
    ours, theirs = socket.socketpair()
    async with await listen(directory, echo):
        process = await bridge(theirs, theirs)
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(BLOB)
        assert await reader.readexactly(len(BLOB)) == BLOB
        writer.close()
        await writer.wait_closed()
        assert await process.wait() == 0


async def test_the_end_of_input_closes_that_direction_alone(directory: str) -> None:
    async with await listen(directory, answer_at_the_end):
        process = await bridge()
        out, _ = await process.communicate(BLOB)
    assert out.decode() == hashlib.sha256(BLOB).hexdigest()


async def test_it_ends_when_the_server_closes_though_stdin_is_open(directory: str) -> None:
    async def goodbye(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"goodbye")
        writer.close()
        await writer.wait_closed()

    async with await listen(directory, goodbye):
        process = await bridge()
        assert await process.stdout.read() == b"goodbye"
        assert await process.wait() == 0
        process.stdin.close()


async def test_it_ends_when_nobody_reads_its_stdout(directory: str) -> None:
    connected = asyncio.Event()
    gone = asyncio.Event()

    async def wait_for_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()
        gone.set()
        writer.close()

    async with await listen(directory, wait_for_the_end):
        read, write = os.pipe()
        process = await bridge(stdout=write)
        os.close(write)
        await connected.wait()
        os.close(read)
        assert await process.wait() == 0
        await gone.wait()
        process.stdin.close()


async def test_a_stalled_reader_does_not_stop_the_other_direction(directory: str) -> None:
    taken = asyncio.get_running_loop().create_future()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(BLOB)
        taken.set_result(await reader.readexactly(len(BLOB)))
        writer.close()
        await writer.wait_closed()

    async with await listen(directory, flood):
        process = await bridge()
        # Its stdout is not read until the server has taken all of this.
        process.stdin.write(BLOB)
        assert await taken == BLOB
        assert await process.stdout.read() == BLOB
        process.stdin.close()
        assert await process.wait() == 0


async def test_it_ends_after_its_input_when_its_stdout_is_open_and_takes_nothing(directory: str) -> None:
    """An engine with a client that died in mid-flood closes stdin, and holds an unread stdout open."""

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(BLOB)
        await reader.read()
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    soon = (
        "import sys; from holdfast.cli.verbs.inside import connect\n"
        "connect._STALLED_SECONDS = 0.1; sys.exit(connect.main([]))"
    )
    async with await listen(directory, flood):
        read, write = os.pipe()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", soon, stdin=asyncio.subprocess.DEVNULL, stdout=write
        )
        os.close(write)
        try:
            assert await asyncio.wait_for(process.wait(), 60) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            os.close(read)
