"""Output of a process arrives byte for byte, in order, with its exit and its close behind it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast import Closed, Exited, ExitStatus, OutputChunk, OutputGap, Sandbox, TerminalSize
from holdfast.errors import TimeoutError, UnknownProcess
from holdfast.exec_api import EventStream
from holdfast.types import ProcessEvent
from tests.contract.ways import Starter, fifo, printed

#: Blocks of an odd size, each with its number: a byte that is lost, doubled or moved changes the hash.
BLOCK = 1_048_583
PRINT_BLOCKS = f"""
import random, sys
block = random.Random(7).randbytes({BLOCK})
for number in range(int(sys.argv[1])):
    sys.stdout.buffer.write(number.to_bytes(8, "big") + block)
"""


def blocks_hash(count: int) -> str:
    block = random.Random(7).randbytes(BLOCK)
    digest = hashlib.sha256()
    for number in range(count):
        digest.update(number.to_bytes(8, "big") + block)
    return digest.hexdigest()


async def _numbered(events: EventStream) -> AsyncIterator[tuple[int, ProcessEvent]]:
    number = 0
    async for event in events:
        yield number, event
        number += 1


def print_blocks(count: int) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", PRINT_BLOCKS, str(count)]


@pytest.fixture(scope="module")
def hundred_megabytes() -> str:
    return blocks_hash(96)


async def test_a_silent_process_tells_its_exit_and_its_close(starter: Starter) -> None:
    process = await starter.sh("exit 0")
    events = [event async for event in process.events()]
    assert events == [Exited(1, ExitStatus(0)), Closed(2)]
    snapshot = await process.snapshot()
    assert (snapshot.stdout, snapshot.stderr, snapshot.terminal) == (b"", b"", b"")
    assert (snapshot.truncated, snapshot.exit_code, snapshot.running) == (False, 0, False)


async def test_a_process_that_says_nothing_runs_on(starter: Starter) -> None:
    process = await starter.sh("exec sleep 1000")
    result = await process.read()
    assert (result.chunks, result.next_seq, result.exited, result.closed) == ((), 1, False, False)
    with pytest.raises(TimeoutError, match="still runs"):
        await process.wait(timeout=0)
    assert (await process.snapshot()).running


async def test_output_without_a_newline_arrives_while_the_process_waits(starter: Starter) -> None:
    process = await starter.sh("printf 'Password: '; read answer; exit 0", stdin="open")
    match = await process.wait_for_output("Password: ")
    assert (match.stream, match.offset) == (starter.stream, 0)
    assert (await process.describe()).running
    await process.write("secret\n")
    assert (await process.wait()).exit_code == 0


async def test_every_byte_value_passes(box: Sandbox) -> None:
    data = bytes(range(256)) * 257 + b"\0\0\xff\xfe\r\n\n\x01\x01\x01%s\\n"
    process = await box.start(["cat"], stdin="open")
    stdout, stderr = await process.communicate(data)
    assert (stdout == data, stderr) == (True, b"")


async def test_every_byte_value_passes_through_a_raw_terminal(box: Sandbox, tmp_path: Path) -> None:
    data = bytes(range(256)) * 257
    (tmp_path / "data").write_bytes(data)
    script = f"stty raw -echo; cat {tmp_path}/data"
    process = await box.start(["sh", "-c", script], tty=TerminalSize())
    assert await printed(process) == data


async def test_a_hundred_megabytes_arrive_exactly(box: Sandbox, hundred_megabytes: str) -> None:
    process = await box.start(print_blocks(96), overflow="block")
    digest = hashlib.sha256()
    size = 0
    async for chunk in process.output():
        assert isinstance(chunk, OutputChunk), chunk
        assert chunk.offset == size
        digest.update(chunk.data)
        size += len(chunk.data)
    assert (size, digest.hexdigest()) == (96 * (BLOCK + 8), hundred_megabytes)
    assert (await process.wait()).exit_code == 0


async def test_stdout_and_stderr_stay_apart(box: Sandbox) -> None:
    script = "i=0; while [ $i -lt 500 ]; do echo out $i; echo err $i >&2; i=$((i+1)); done"
    process = await box.start(["sh", "-c", script])
    stdout, stderr = await process.communicate()
    assert stdout == b"".join(b"out %d\n" % i for i in range(500))
    assert stderr == b"".join(b"err %d\n" % i for i in range(500))


async def test_the_sequence_has_no_holes_and_the_offsets_add_up(box: Sandbox) -> None:
    script = "for i in 1 2 3 4 5 6 7 8 9; do echo $i; echo e$i >&2; done; seq 20000"
    process = await box.start(["sh", "-c", script], overflow="block")
    await process.wait()
    next_seq, offsets, data = 1, {"stdout": 0, "stderr": 0}, b""
    while True:
        result = await process.read(since=next_seq - 1, max_bytes=10_000, wait=60)
        for chunk in result.chunks:
            assert (chunk.seq, chunk.offset) == (next_seq, offsets[chunk.stream])
            offsets[chunk.stream] += len(chunk.data)
            next_seq += 1
            data += chunk.data if chunk.stream == "stdout" else b""
        if result.closed and not result.chunks:
            break
    # The exit and the close are numbered too.
    assert result.next_seq == next_seq + 2
    assert data == b"".join(b"%d\n" % i for i in [*range(1, 10), *range(1, 20_001)])


async def test_reads_in_a_loop_reach_the_end(box: Sandbox) -> None:
    """A read that never suspends would keep the event loop of `inprocess` from the process that it reads."""
    process = await box.start(["sh", "-c", "echo one"])
    for _ in range(50_000):
        result = await process.read()
        if result.closed:
            break
    assert (result.closed, [chunk.data for chunk in result.chunks]) == (True, [b"one\n"])


async def test_all_that_was_printed_comes_before_the_exit(starter: Starter) -> None:
    for _ in range(10):
        process = await starter.sh("seq 3000")
        seen = b""
        async for event in process.events():
            if isinstance(event, OutputChunk):
                seen += event.data
            elif isinstance(event, Exited):
                break
        assert seen == starter.lines(b"".join(b"%d\n" % i for i in range(1, 3001)))


async def test_exit_comes_before_close_while_a_child_holds_the_pipe(box: Sandbox, tmp_path: Path) -> None:
    with fifo(str(tmp_path), "go") as (path, fd):
        process = await box.start(["sh", "-c", f"(read x < {path}; echo late) & echo early; exit 3"])
        events = process.events()
        first = await anext(events)
        assert isinstance(first, OutputChunk)
        assert first.data == b"early\n"
        exited = await anext(events)
        assert isinstance(exited, Exited)
        assert exited.status == ExitStatus(3)
        info = await process.describe()
        assert (info.running, info.closed) == (False, False)
        assert (await process.wait()).exit_code == 3
        os.write(fd, b"\n")
        late = await anext(events)
        assert isinstance(late, OutputChunk)
        assert late.data == b"late\n"
        closed = await anext(events)
        assert [first.seq, exited.seq, late.seq, closed] == [1, 2, 3, Closed(4)]
        with pytest.raises(StopAsyncIteration):
            await anext(events)
    assert (await process.describe()).closed


async def test_a_read_waits_for_output_and_for_the_end(starter: Starter) -> None:
    process = await starter.sh("read x; echo $x; read y", stdin="open")
    waiting = asyncio.create_task(process.read(wait=60))
    await process.write("word\n")
    first = await waiting
    seen = b"".join(chunk.data for chunk in first.chunks)
    while not seen.endswith(starter.lines(b"word\n")):
        result = await process.read(since=first.after_seq, wait=60)
        seen += b"".join(chunk.data for chunk in result.chunks)
        first = result
    waiting = asyncio.create_task(process.read(since=first.after_seq, wait=60))
    await process.terminate(force=True)
    assert (await waiting).next_seq > first.next_seq


async def test_reading_again_from_any_position_gives_the_same(box: Sandbox) -> None:
    process = await box.start(["sh", "-c", "seq 30000"], overflow="block")
    await process.wait()
    whole = await process.read(max_bytes=1 << 20)
    assert len(whole.chunks) > 2
    for position, chunk in enumerate(whole.chunks):
        again = await process.read(since=position, max_bytes=1)
        assert again.chunks == (chunk,)


async def test_output_is_waited_for_behind_an_earlier_match(box: Sandbox) -> None:
    script = "printf 'a-b-'; printf 'e-' >&2; printf 'a-c-'; read x; printf 'a-d-'; exec sleep 1000"
    process = await box.start(["sh", "-c", script], stdin="open")
    first = await process.wait_for_output("b-", timeout=60)
    second = await process.wait_for_output("a-c", timeout=60, since=first)
    assert (first.offset, second.offset, second.stream) == (2, 4, "stdout")
    await process.write("\n")
    third = await process.wait_for_output("a-", timeout=60, since=second)
    assert third.end == 10
    await process.terminate(force=True)


async def test_two_readers_at_different_speeds_get_the_same(box: Sandbox) -> None:
    # Less than a log holds, so that the process need not wait for the slow one.
    process = await box.start(print_blocks(8), overflow="block")
    slow, slow_hash, fast_hash = process.events(), hashlib.sha256(), hashlib.sha256()
    async for number, event in _numbered(process.events()):
        if isinstance(event, OutputChunk):
            fast_hash.update(event.data)
        if number % 4 == 0 and isinstance(theirs := await anext(slow), OutputChunk):
            slow_hash.update(theirs.data)
    async for event in slow:
        if isinstance(event, OutputChunk):
            slow_hash.update(event.data)
    assert (fast_hash.hexdigest(), slow_hash.hexdigest()) == (blocks_hash(8), blocks_hash(8))


async def test_a_reader_that_never_reads_holds_up_nobody(box: Sandbox) -> None:
    flood = await box.start(["sh", "-c", "yes | head -c 60000000; echo done >&2"], overflow="drop")
    asleep = flood.events()
    await anext(asleep)
    quiet = await box.start(print_blocks(4), overflow="block")
    digest = hashlib.sha256(await printed(quiet)).hexdigest()
    assert digest == blocks_hash(4)
    assert (await flood.wait()).exit_code == 0
    assert (await flood.snapshot()).stderr == b"done\n"
    await asleep.aclose()


async def test_a_block_reader_that_never_reads_stops_its_own_process_alone(box: Sandbox) -> None:
    held = await box.start(["yes"], overflow="block")
    asleep = held.events()
    await anext(asleep)
    other = await box.start(["sh", "-c", "seq 100000"])
    assert len(await printed(other)) == 588_895
    assert (await held.describe()).running
    assert await held.terminate(force=True)
    assert not (await held.describe()).running
    await asleep.aclose()


async def test_a_reader_begins_where_another_stopped(box: Sandbox) -> None:
    process = await box.start(["sh", "-c", "seq 1000; read x; seq 1001 50000"], overflow="block", stdin="open")
    reader = process.events()
    first = await anext(reader)
    assert isinstance(first, OutputChunk)
    await reader.aclose()
    await process.write("\n")
    rest = await printed(process, since=first.seq)
    assert rest
    assert first.data + rest == b"".join(b"%d\n" % i for i in range(1, 50_001))


async def test_what_is_dropped_is_told_as_a_gap_with_exact_offsets(small_box: Sandbox) -> None:
    # Each line is eight bytes, so that every offset has one right content.
    process = await small_box.start(["sh", "-c", "seq -f %07.0f 0 999999"])
    await process.wait()
    position, gaps = 0, []
    async for event in process.output():
        if isinstance(event, OutputGap):
            assert (event.stream, event.offset) == ("stdout", position)
            gaps.append(event)
            position += event.length
            continue
        assert event.offset == position
        first = position // 8
        lines = b"".join(b"%07d\n" % i for i in range(first, first + len(event.data) // 8 + 2))
        assert lines[position % 8 :].startswith(event.data)
        position += len(event.data)
    assert position == 8_000_000
    # Of a stream's half of what is kept, the head is a sixteenth; a part of the tail may be over its bound.
    assert len(gaps) == 1
    assert gaps[0].offset == 65_536
    assert 6_700_000 < gaps[0].length < 7_000_000
    read = await process.read(max_bytes=100_000_000)
    assert read.gap == tuple(gaps)


async def test_a_snapshot_of_a_long_output_is_its_head_and_its_tail(small_box: Sandbox) -> None:
    process = await small_box.start(["sh", "-c", "seq -f %07.0f 0 999999; echo problem >&2"])
    await process.wait()
    snapshot = await process.snapshot()
    assert snapshot.truncated
    assert snapshot.stderr == b"problem\n"
    assert snapshot.stdout.startswith(b"0000000\n0000001\n")
    assert snapshot.stdout.endswith(b"0999998\n0999999\n")
    assert 1_000_000 < len(snapshot.stdout) < 1_300_000
    short = await small_box.start(["echo", "all of it"])
    await short.wait()
    assert not (await short.snapshot()).truncated


async def test_ended_processes_are_kept_by_count(small_box: Sandbox) -> None:
    ended = []
    for number in range(12):
        process = await small_box.start(["echo", str(number)])
        assert await printed(process) == b"%d\n" % number  # up to its close, which is what counts
        ended.append(process)
    assert (await ended[-1].snapshot()).stdout == b"11\n"
    with pytest.raises(UnknownProcess, match=ended[0].id):
        await ended[0].snapshot()
    assert {process.id for process in await small_box.processes()} == {process.id for process in ended[-8:]}


async def test_a_collected_window_goes_on_where_the_last_one_ended(starter: Starter) -> None:
    process = await starter.sh("printf 'caf\\303'; read x; printf '\\251!'", stdin="open")
    await process.wait_for_output("caf")
    first = await process.collect(yield_after=0)
    assert (first.output, first.running) == (b"caf", True)
    await process.write("\n")
    second = await process.collect(yield_after=60)
    echo = b"\r\n" if starter.tty else b""
    # A terminal echoes the newline between the two halves of the character.
    assert second.output.replace(echo, b"") == "é!".encode()
    assert second.exit_code == 0
