"""A reader that follows gets every byte, however little is kept; one that stalls delays others only for a time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from holdfast import (
    Completed,
    ExecRemoteOptions,
    Exited,
    OutputChunk,
    OutputGap,
    Process,
    Sandbox,
    StdoutChunk,
)
from holdfast.client.connection.channel_connection import ChannelConnection
from holdfast.client.dial import dialer
from holdfast.client.remote import RemoteExec
from holdfast.exec_api import EventStream
from tests.contract.cutting_proxy import cutting_unix
from tests.contract.test_output import BLOCK, blocks_hash, print_blocks
from tests.contract.ways import end_everything, open_box
from tests.faults.relay import Relay, Way
from tests.support.servers import RunningServer, running_server

MIB = 1024 * 1024
#: Of each stream a twelfth of what the tests print is kept, or less. No reader is ever given up.
PATIENT: dict[str, Any] = {"retained_output_bytes_per_process": 2 * MIB, "reader_stall_seconds": 3600.0}
#: A reader that takes nothing is given up soon, and one that reads all the time is not, on a busy machine either.
HASTY: dict[str, Any] = {**PATIENT, "reader_stall_seconds": 3.0}
#: The ways that differ in where a reader's progress is seen; each of these tests waits for the time to pass.
STALLING_WAYS = ("inprocess", "unix", "ws-json")
#: Eight bytes a line, so that every offset has one right content. More than the 10 MiB that results hold.
FIRST, LINES = 1_000_000, 1_500_000
#: The line before the gate of a process that waits until its reader is attached.
READY = b"ready\n"
COUNT = ["seq", str(FIRST), str(FIRST + LINES - 1)]


@functools.cache
def all_counted() -> bytes:
    return b"".join(b"%d\n" % number for number in range(FIRST, FIRST + LINES))


def counted(offset: int, length: int) -> bytes:
    """The output of `COUNT` there."""
    return all_counted()[offset : offset + length]


@pytest.fixture(scope="module")
def shared_patient_server() -> Iterator[RunningServer]:
    with running_server(["unix", "ws"], settings=PATIENT) as server:
        yield server


@pytest.fixture(scope="module")
def shared_hasty_server() -> Iterator[RunningServer]:
    with running_server(["unix", "ws"], settings=HASTY) as server:
        yield server


@pytest.fixture
async def patient_server(shared_patient_server: RunningServer) -> AsyncIterator[RunningServer]:
    yield shared_patient_server
    await end_everything(shared_patient_server)


@pytest.fixture
async def patient(way: str, patient_server: RunningServer) -> AsyncIterator[Sandbox]:
    async with open_box(way, patient_server, PATIENT) as box:
        yield box


@pytest.fixture
async def hasty(way: str, shared_hasty_server: RunningServer) -> AsyncIterator[Sandbox]:
    async with open_box(way, shared_hasty_server, HASTY) as box:
        yield box
    await end_everything(shared_hasty_server)


async def start_at_a_gate(box: Sandbox, command: list[str]) -> tuple[Process, EventStream]:
    """A process that has printed `READY`, and a reader that has taken that: `command` runs when the gate is opened.

    Without the gate a process may print more than is kept before its first reader is attached.
    """
    process = await box.start(["sh", "-c", 'echo ready; read -r go; exec "$@"', "sh", *command], stdin="open")
    events = process.events()
    first = await anext(events)
    assert isinstance(first, OutputChunk)
    assert first.data == READY
    return process, events


async def open_gate(process: Process) -> None:
    await process.write(b"\n")


async def follow(box: Sandbox, command: list[str]) -> tuple[int, str]:
    """The size and the hash of all that `command` prints, for a reader that was there before."""
    process, events = await start_at_a_gate(box, command)
    await open_gate(process)
    return await output_hash(events, len(READY))


async def output_hash(events: EventStream, start: int) -> tuple[int, str]:
    """Of stdout behind `start`, which must come without a gap and be followed by the exit."""
    digest, size = hashlib.sha256(), 0
    async for event in events:
        assert not isinstance(event, OutputGap), event
        if isinstance(event, OutputChunk):
            assert event.offset == start + size
            digest.update(event.data)
            size += len(event.data)
        if isinstance(event, Exited):
            assert event.status.exit_code == 0
            return size, digest.hexdigest()
    raise AssertionError("no exit")


async def test_a_reader_that_follows_gets_every_byte(patient: Sandbox) -> None:
    assert await follow(patient, print_blocks(16)) == (16 * (BLOCK + 8), blocks_hash(16))


@pytest.mark.parametrize("way", ["inprocess", "unix"])
async def test_two_hundred_megabytes_with_the_settings_as_they_come(box: Sandbox) -> None:
    assert await follow(box, print_blocks(191)) == (191 * (BLOCK + 8), blocks_hash(191))


async def test_exec_remote_delivers_every_byte(patient: Sandbox) -> None:
    digest = hashlib.sha256()
    completed = None
    async for event in patient.exec_remote(COUNT):
        if isinstance(event, Completed):
            completed = event
        else:
            assert isinstance(event, StdoutChunk), event
            digest.update(event.data.encode())
    whole = counted(0, 8 * LINES)
    assert digest.digest() == hashlib.sha256(whole).digest()
    assert completed is not None
    assert (completed.exit_code, completed.lost_bytes) == (0, 0)
    assert completed.stdout.encode() == whole[-10 * MIB :]
    assert (completed.truncated, completed.omitted_stdout_bytes) == (False, len(whole) - 10 * MIB)


async def test_exec_returns_the_latest_and_how_much_came_before(patient: Sandbox) -> None:
    result = await patient.exec(COUNT)
    assert (result.returncode, result.truncated, len(result.stdout_bytes)) == (0, True, 10 * MIB)
    assert result.omitted_stdout_bytes == 8 * LINES - 10 * MIB
    assert result.omitted_stderr_bytes == 0
    assert result.stdout_bytes == counted(8 * LINES - 10 * MIB, 10 * MIB)


async def test_a_command_in_a_shell_delivers_every_byte(patient: Sandbox) -> None:
    digest = hashlib.sha256()
    async with await patient.shell() as shell:
        async for event in shell.stream(" ".join(COUNT)):
            assert not isinstance(event, OutputGap), event
            if isinstance(event, OutputChunk):
                digest.update(event.data)
    assert digest.digest() == hashlib.sha256(counted(0, 8 * LINES)).digest()


@pytest.mark.parametrize("way", STALLING_WAYS)
async def test_a_stalled_reader_delays_an_eager_one_and_gets_a_gap(hasty: Sandbox) -> None:
    whole = hashlib.sha256(counted(0, 8 * LINES)).hexdigest()
    process, stalled = await start_at_a_gate(hasty, COUNT)
    eager = process.events()
    first = await anext(eager)
    assert isinstance(first, OutputChunk)
    assert first.data == READY
    await open_gate(process)
    assert await output_hash(eager, len(READY)) == (8 * LINES, whole)
    position, gaps = 0, 0
    async for event in stalled:
        if isinstance(event, OutputGap):
            assert (event.stream, event.offset) == ("stdout", len(READY) + position)
            position += event.length
            gaps += 1
        elif isinstance(event, OutputChunk):
            assert event.offset == len(READY) + position
            assert event.data == counted(position, len(event.data))
            position += len(event.data)
    assert (position, gaps > 0) == (8 * LINES, True)


@pytest.mark.parametrize("way", STALLING_WAYS)
async def test_exec_remote_shows_what_was_not_taken_in_time(hasty: Sandbox) -> None:
    command = hasty.exec_remote(COUNT)
    first = await anext(command)
    assert isinstance(first, StdoutChunk)
    assert (await hasty.api.wait(command.id)) is not None
    printed, position, lost, completed = [first.data], 0, 0, None
    async for event in command:
        if isinstance(event, StdoutChunk):
            printed.append(event.data)
        if isinstance(event, OutputGap | Completed):
            text = "".join(printed).encode()
            assert text == counted(position, len(text))
            printed, position = [], position + len(text)
        if isinstance(event, OutputGap):
            assert event.offset == position
            position += event.length
            lost += event.length
        if isinstance(event, Completed):
            completed = event
    assert completed is not None
    assert (position, lost > 0) == (8 * LINES, True)
    assert (completed.lost_bytes, completed.truncated) == (lost, True)
    assert completed.stdout.encode() == counted(8 * LINES - len(completed.stdout), len(completed.stdout))


async def test_a_process_that_is_held_back_can_be_killed(patient: Sandbox) -> None:
    process = await patient.start(["sh", "-c", "trap '' TERM; while :; do seq 100000; done"])
    stalled = process.events()
    await anext(stalled)
    assert await process.terminate(force=True)
    events = [event async for event in stalled]
    exits = [event for event in events if isinstance(event, Exited)]
    assert [event.status.signal for event in exits] == ["SIGKILL"]


async def test_a_reader_that_leaves_holds_nothing_back(patient: Sandbox) -> None:
    process = await patient.start(COUNT)
    reader = process.events()
    await anext(reader)
    await reader.aclose()
    assert (await process.wait()).exit_code == 0
    assert (await process.snapshot()).truncated


async def test_drop_still_never_waits(patient: Sandbox) -> None:
    process = await patient.start(COUNT, overflow="drop")
    stalled = process.events()
    await anext(stalled)
    assert (await process.wait()).exit_code == 0
    command = patient.exec_remote(COUNT, ExecRemoteOptions(overflow="drop"))
    await anext(command)
    assert (await patient.api.wait(command.id)) is not None
    assert any(isinstance(event, OutputGap) for event in [event async for event in command])
    await stalled.aclose()


# --- connections that are slow, or break -----------------------------------------------------------------------


class SlowRelay(Relay):
    """Passes at most 64 KiB in 2 ms: a channel that is slower than the process by far."""

    def new_way(self) -> Way:
        return SlowWay(self, -1)


class SlowWay(Way):
    async def pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(64 * 1024):
            await asyncio.sleep(0.002)
            sink.write(data)
            await sink.drain()


@contextlib.asynccontextmanager
async def connected(path: str) -> AsyncIterator[Sandbox]:
    connection = ChannelConnection(dialer(f"unix:{path}"), address=path, encoding="msgpack")
    await connection.open()
    box = Sandbox(RemoteExec(connection))
    try:
        yield box
    finally:
        await box.aclose()


async def test_every_byte_comes_through_a_slow_channel(patient_server: RunningServer, directory: str) -> None:
    path = os.path.join(directory, "slow.sock")
    relay = SlowRelay(lambda: asyncio.open_unix_connection(patient_server.socket))
    listening = await asyncio.start_unix_server(relay.connected, path)
    try:
        async with connected(path) as box:
            assert await follow(box, print_blocks(12)) == (12 * (BLOCK + 8), blocks_hash(12))
    finally:
        listening.close()
        await relay.close()


async def test_a_process_waits_for_a_reader_whose_connection_breaks(
    patient_server: RunningServer, directory: str
) -> None:
    path = os.path.join(directory, "cut.sock")
    async with cutting_unix(path, patient_server.socket, seed=26) as proxy, connected(path) as box:
        assert await follow(box, print_blocks(16)) == (16 * (BLOCK + 8), blocks_hash(16))
        assert proxy.cuts >= 5
        async with await box.shell() as shell:
            size = 0
            async for event in shell.stream(" ".join(COUNT)):
                if isinstance(event, OutputChunk):
                    assert event.offset == size
                    size += len(event.data)
            assert size == 8 * LINES
        proxy.peaceful = True
