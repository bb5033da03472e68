"""Streams that go from one record to another while a process prints on them: every byte has one owner."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from holdfast.config import ExecServerConfig
from holdfast.runtime.durability.durability import NullDurability
from holdfast.runtime.durability.recorder import JobRecorder
from holdfast.runtime.output.job import Job, JobHistory, JobStream
from holdfast.runtime.output.local_events import LocalEvents
from holdfast.runtime.output.output_log import Spool
from holdfast.runtime.output.poller import Poller
from holdfast.runtime.output.reader import Reader
from holdfast.types import Closed, Exited, ExitStatus, OutputChunk, OutputGap, Overflow

SAFETY_NET = 60
RETAINED = 64 * 1024


class Giving(Job):
    """Hands its streams on when it ends, as a command does to its shell."""

    heir: Job | None = None

    def _exited(self) -> None:
        if self.heir is not None:
            self.give_streams(self.heir)


Make = Callable[..., Giving]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    spool, poller = Spool(str(tmp_path)), Poller()
    made: list[Giving] = []

    def make(name: str, *, overflow: Overflow = "drop", stall: float = 3600.0) -> Giving:
        config = ExecServerConfig(retained_output_bytes_per_process=2 * RETAINED, reader_stall_seconds=stall)
        made.append(
            Giving(
                name,
                JobRecorder(NullDurability(spool, config), len(made)),
                overflow=overflow,
                poller=poller,
                config=config,
                on_growth=lambda: None,
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.discard()
    poller.close()
    spool.remove()


class Pipe:
    def __init__(self) -> None:
        self.read, self.write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read, False)

    def print(self, text: bytes) -> None:
        assert os.write(self.write, text) == len(text)

    def close(self) -> None:
        """The printing end; the other is its record's to close."""
        if self.write >= 0:
            os.close(self.write)
            self.write = -1


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


async def until(record: Job, kind: int, size: int) -> None:
    async with asyncio.timeout(SAFETY_NET):
        while record.logs[kind].end < size:
            await record.changed()


async def test_what_is_printed_after_the_end_is_the_heirs(make: Make, pipe: Pipe) -> None:
    command, shell = make("command"), make("shell")
    command.heir = shell
    command.watch(0, pipe.read)
    pipe.print(b"own")
    # No reader yet: it was printed before the end, and so is in the record before the end.
    command.end(ExitStatus(3))
    assert (command.running, command.closed) == (False, True)
    events = [event async for event in LocalEvents(command, 0)]
    assert events == [OutputChunk("stdout", 0, b"own", 1), Exited(2, ExitStatus(3)), Closed(3)]
    pipe.print(b"late")
    await until(shell, 0, 4)
    assert shell.snapshot().stdout == b"late"
    assert command.snapshot().stdout == b"own"


async def test_a_stream_that_is_adopted_again_has_offsets_of_its_new_owner(make: Make, pipe: Pipe) -> None:
    shell = make("shell")
    stream = shell.watch(1, pipe.read)
    kept = []
    for number in range(3):
        command = make(f"command {number}")
        command.heir = shell
        command.adopt([stream])
        pipe.print(b"error %d" % number)
        command.end(ExitStatus(0))
        kept.append(command.read(0, 1000).chunks)
        pipe.print(b"!")
        await until(shell, 1, number + 1)
    assert kept == [(OutputChunk("stderr", 0, b"error %d" % number, 1),) for number in range(3)]
    assert shell.snapshot().stderr == b"!!!"


async def test_only_a_pipe_that_was_full_grows_and_it_shrinks_with_the_end_of_its_command(
    make: Make, pipe: Pipe
) -> None:
    """All pipes of a user share one limit of the kernel; over it, new pipes have two pages."""
    other = Pipe()
    command, shell = make("command"), make("shell")
    command.heir = shell
    command.watch(0, pipe.read)
    command.watch(1, other.read)
    usual = fcntl.fcntl(pipe.read, fcntl.F_GETPIPE_SZ)
    pipe.print(bytes(usual))
    other.print(b"little")
    await until(command, 0, usual)
    await until(command, 1, 6)
    assert fcntl.fcntl(pipe.read, fcntl.F_GETPIPE_SZ) > usual
    assert fcntl.fcntl(other.read, fcntl.F_GETPIPE_SZ) == usual
    command.end(ExitStatus(0))
    assert fcntl.fcntl(pipe.read, fcntl.F_GETPIPE_SZ) == usual
    other.close()


async def test_the_end_of_a_stream_is_told_to_who_has_it(make: Make, pipe: Pipe) -> None:
    command, shell = make("command"), make("shell")
    command.heir = shell
    output = command.watch(0, pipe.read)
    command.end(ExitStatus(0))
    shell.end(ExitStatus(0))
    assert (command.closed, shell.closed) == (True, False)
    events = LocalEvents(shell, 0)
    assert await anext(events) == Exited(1, ExitStatus(0))
    pipe.close()
    async with asyncio.timeout(SAFETY_NET):
        assert [event async for event in events] == [Closed(2)]
    assert output.fd == -1


async def test_a_record_that_is_forgotten_leaves_the_streams_that_it_gave_away(make: Make, pipe: Pipe) -> None:
    command, shell = make("command"), make("shell")
    command.watch(0, pipe.read)
    command.give_streams(shell)
    command.end(ExitStatus(0))
    command.discard()
    pipe.print(b"still read")
    await until(shell, 0, 10)
    assert shell.snapshot().stdout == b"still read"


async def test_a_stream_that_waits_for_a_reader_goes_on_with_another_owner(make: Make, pipe: Pipe) -> None:
    command, shell = make("command", overflow="block"), make("shell")
    reader = Reader(command, 0, lambda: None)
    output = command.watch(0, pipe.read)
    os.set_blocking(pipe.write, False)
    printed = 0
    async with asyncio.timeout(SAFETY_NET):
        while not output.paused:
            printed += os.write(pipe.write, b"x" * 4096)
            await command.changed()
    pipe.print(b"left in the pipe")
    command.give_streams(shell)
    assert output.owner is shell
    await until(shell, 0, len(b"left in the pipe"))
    assert shell.snapshot().stdout == b"left in the pipe"
    assert command.logs[0].end == printed
    reader.close()


async def test_the_exit_of_one_that_blocks_waits_for_its_reader_and_then_gives(make: Make, pipe: Pipe) -> None:
    command, shell = make("command", overflow="block"), make("shell")
    command.heir = shell
    reader = Reader(command, 0, lambda: None)
    output = command.watch(0, pipe.read)
    async with asyncio.timeout(SAFETY_NET):
        while not output.paused:
            pipe.print(b"x" * 4096)
            await command.changed()
    full = command.logs[0].end
    pipe.print(b"y" * 4096)
    command.end(ExitStatus(0))
    # All of it is owed to the reader, which has taken nothing.
    assert command.running
    assert output.owner is command
    command.stop_blocking()
    async with asyncio.timeout(SAFETY_NET):
        await command.wait_exit()
    assert command.logs[0].end == full + 4096
    assert command.closed
    pipe.print(b"late")
    await until(shell, 0, 4)
    assert shell.snapshot().stdout == b"late"
    reader.close()


async def test_both_streams_go_and_what_is_there_is_taken_first(make: Make, pipe: Pipe) -> None:
    other = Pipe()
    command, shell = make("command"), make("shell")
    command.watch(0, pipe.read)
    command.watch(1, other.read)
    pipe.print(b"out")
    other.print(b"err")
    command.take_what_is_there()
    command.give_streams(shell)
    pipe.print(b"more out")
    other.print(b"more err")
    await until(shell, 0, 8)
    await until(shell, 1, 8)
    assert (command.snapshot().stdout, command.snapshot().stderr) == (b"out", b"err")
    assert (shell.snapshot().stdout, shell.snapshot().stderr) == (b"more out", b"more err")
    other.close()


# --- readers that are followed ---------------------------------------------------------------------------------


async def fill(record: Giving, output: JobStream, pipe: Pipe) -> int:
    """Print until the stream is held back; returns how much the log has."""
    async with asyncio.timeout(SAFETY_NET):
        while not output.paused:
            pipe.print(b"x" * 4096)
            await record.changed()
    return record.logs[0].end


async def test_a_stream_is_held_for_the_slowest_reader_and_read_when_it_leaves(make: Make, pipe: Pipe) -> None:
    process = make("process", overflow="follow")
    slow, eager = Reader(process, 0, lambda: None), Reader(process, 0, lambda: None)
    output = process.watch(0, pipe.read)
    held = await fill(process, output, pipe)
    eager.consume(0, held)
    assert output.paused
    assert not process.logs[0].truncated
    slow.close()
    assert not output.paused
    pipe.print(b"more")
    await until(process, 0, held + 4)
    eager.close()


async def test_a_reader_that_stalls_is_given_up_and_follows_again_once_it_takes(make: Make, pipe: Pipe) -> None:
    process = make("process", overflow="follow", stall=0.0)
    stalled, eager = Reader(process, 0, lambda: None), Reader(process, 0, lambda: None)
    output = process.watch(0, pipe.read)
    held = await fill(process, output, pipe)
    eager.consume(0, held)
    async with asyncio.timeout(SAFETY_NET):
        while output.paused:  # noqa: ASYNC110
            await asyncio.sleep(0)
    # Twice as much: its place is lost, the eager reader's is not.
    while process.logs[0].end < 3 * held:
        pipe.print(b"y" * 4096)
        await process.changed()
        eager.consume(0, process.logs[0].end)
    assert process.logs[0].truncated
    assert not output.paused
    record = stalled.next(1)
    while not isinstance(record, OutputGap):
        assert record is not None
        stalled.consume(0, record.offset + record.length)
        record = stalled.next(1)
    assert record.offset + record.length == process.logs[0].lost_end
    process._stall_seconds = 3600.0
    await fill(process, output, pipe)
    lost = process.logs[0].lost_end
    pipe.print(b"held")
    assert (output.paused, process.logs[0].lost_end) == (True, lost)
    for reader in (stalled, eager):
        reader.close()


async def test_a_reader_with_nothing_to_take_is_not_given_up_for_another(make: Make, pipe: Pipe) -> None:
    process = make("process", overflow="follow", stall=0.0)
    stalled, eager = Reader(process, 0, lambda: None), Reader(process, 0, lambda: None)
    output = process.watch(0, pipe.read)
    eager.consume(0, await fill(process, output, pipe))
    async with asyncio.timeout(SAFETY_NET):
        while output.paused:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert list(process._following) == [eager]
    for reader in (stalled, eager):
        reader.close()


async def test_without_a_reader_nothing_is_held(make: Make, pipe: Pipe) -> None:
    process = make("process", overflow="follow")
    output = process.watch(0, pipe.read)
    while process.logs[0].end < 4 * RETAINED:
        pipe.print(b"x" * 4096)
        await process.changed()
    assert process.logs[0].truncated
    assert not output.paused


async def test_after_a_recovery_all_is_kept_until_a_reader_is_back(make: Make, pipe: Pipe) -> None:
    process = make("process", overflow="follow")
    process.restore(JobHistory(0.0, None, None, None))
    output = process.watch(0, pipe.read)
    held = await fill(process, output, pipe)
    process.read(0, 1)  # one that reads once is none of those that are waited for
    assert output.paused
    back = Reader(process, 0, lambda: None)
    assert output.paused
    back.consume(0, held)
    assert not output.paused
    back.close()


async def test_after_a_recovery_a_process_waits_for_readers_for_a_limited_time(make: Make, pipe: Pipe) -> None:
    process = make("process", overflow="follow", stall=0.0)
    process.restore(JobHistory(0.0, None, None, None))
    output = process.watch(0, pipe.read)
    async with asyncio.timeout(SAFETY_NET):
        while process.logs[0].end < 4 * RETAINED:
            pipe.print(b"x" * 4096)
            await process.changed()
    assert process.logs[0].truncated
    assert not output.paused
