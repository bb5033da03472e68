"""Output of real processes: nothing missing without a gap event, in order, at every reader's own speed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from holdfast.errors import InvalidParams
from holdfast.exec_api import EventStream
from holdfast.runtime.local import LocalExec
from holdfast.runtime.output.reader import Reader
from holdfast.runtime.process.process import ManagedProcess
from holdfast.types import Closed, Exited, ExitStatus, OutputChunk, OutputGap, Overflow, ProcessEvent, ProcessSpec
from tests.support.signalling import send_signal

MakeExec = Callable[..., LocalExec]
SAFETY_NET = 60
KIB = 1024


def sh(script: str, process_id: str = "p", **fields: Any) -> ProcessSpec:
    return ProcessSpec(process_id, ("sh", "-c", script), **fields)


def py(script: str, process_id: str = "p", **fields: Any) -> ProcessSpec:
    return ProcessSpec(process_id, (sys.executable, "-S", "-c", script), **fields)


async def rest(events: EventStream) -> list[ProcessEvent]:
    async with asyncio.timeout(SAFETY_NET):
        return [event async for event in events]


def joined(events: list[ProcessEvent], stream: str = "stdout") -> bytes:
    return b"".join(e.data for e in events if isinstance(e, OutputChunk) and e.stream == stream)


def assert_exact(events: Sequence[ProcessEvent], printed: dict[str, bytes]) -> None:
    """Chunks and gaps of each stream lie end to end, from its first byte to its last, and the chunks are right."""
    at = dict.fromkeys(printed, 0)
    for event in events:
        if isinstance(event, OutputGap):
            assert event.length > 0
            assert event.offset == at[event.stream]
            at[event.stream] += event.length
        elif isinstance(event, OutputChunk):
            assert event.data
            assert event.offset == at[event.stream]
            at[event.stream] += len(event.data)
            assert event.data == printed[event.stream][event.offset : at[event.stream]]
    assert at == {stream: len(data) for stream, data in printed.items()}


def counted(lines: int) -> bytes:
    return b"".join(b"%07d\n" % number for number in range(lines))


#: Prints like `counted`, then a line on stderr that it is done, then waits for its end.
COUNT = """
import sys
out = sys.stdout.buffer
for start in range(0, {lines}, 1000):
    out.write(b"".join(b"%07d\\n" % n for n in range(start, min(start + 1000, {lines}))))
out.flush()
sys.stderr.write("done")
sys.stderr.flush()
{then}
"""


async def test_a_silent_process_exits_and_closes(box: LocalExec) -> None:
    await box.start(sh("exit 3"))
    assert await rest(box.events("p")) == [Exited(1, ExitStatus(3)), Closed(2)]


async def test_bytes_are_bytes(box: LocalExec) -> None:
    data = bytes(range(256)) * 100 + b"no newline at the end"
    await box.start(py(f"import sys; sys.stdout.buffer.write({data!r})"))
    events = await rest(box.events("p"))
    assert_exact(events, {"stdout": data})


async def test_stdout_and_stderr_are_apart_and_in_one_sequence(box: LocalExec) -> None:
    await box.start(sh("for i in 1 2 3 4 5; do echo out $i; echo err $i >&2; done"))
    events = await rest(box.events("p"))
    assert joined(events) == b"".join(b"out %d\n" % i for i in range(1, 6))
    assert joined(events, "stderr") == b"".join(b"err %d\n" % i for i in range(1, 6))
    seqs = [event.seq for event in events if not isinstance(event, OutputGap)]
    assert seqs == sorted(set(seqs))


@pytest.mark.parametrize("tty", [False, True])
async def test_the_exit_is_told_after_all_output(box: LocalExec, tty: bool) -> None:
    """Many times over: the last output and the exit reach us by different ways."""
    count = 60
    wanted = counted(300) if not tty else counted(300).replace(b"\n", b"\r\n")
    for first in range(0, count, 10):
        ids = [f"{tty}{first + n}" for n in range(10)]
        await asyncio.gather(*(box.start(sh("seq -f %07.0f 0 299; exit 7", id, tty=tty)) for id in ids))
        for id in ids:
            events = await rest(box.events(id))
            exit_at = next(at for at, event in enumerate(events) if isinstance(event, Exited))
            assert joined(events[:exit_at], "pty" if tty else "stdout") == wanted
            assert [type(event) for event in events[exit_at:]] == [Exited, Closed]
            assert events[exit_at].status == ExitStatus(7)  # type: ignore[union-attr]


async def test_the_exit_is_told_while_a_child_holds_the_streams(box: LocalExec) -> None:
    await box.start(py(HOLDER, pipe_stdin=True))
    events = box.events("p")
    seen = [await anext(events), await anext(events)]
    assert isinstance(seen[0], OutputChunk)
    assert seen[0].data == b"leader\n"
    assert isinstance(seen[1], Exited)
    assert not (await box.describe("p")).closed
    send_signal(await child_of(box), 10)
    later = await rest(events)
    assert joined(later) == b"child\n"
    assert isinstance(later[-1], Closed)


#: Leaves a child that holds the streams and prints once it gets SIGUSR1; the leader prints its pid on stderr.
HOLDER = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {10})
child = os.fork()
if child == 0:
    signal.sigwait({10})
    os.write(1, b"child\\n")
    os._exit(0)
os.write(1, b"leader\\n")
os._exit(0)
"""


async def child_of(box: LocalExec) -> int:
    """The only living member of a tree with an ended leader."""
    (member,) = await box.processes.process("p").tree.members(frozenset())
    return member


async def test_gaps_are_exact_for_readers_of_any_speed(make_exec: MakeExec) -> None:
    box = make_exec(retained_output_bytes_per_process=128 * KIB)
    printed = counted(100_000)
    process = await box.processes.start(py(COUNT.format(lines=100_000, then=""), overflow="drop"))
    fast, slow, late = box.events("p"), box.events("p"), box.events("p")
    first = [await anext(slow)]
    fast_events = await rest(fast)
    slow_events = first + await rest(slow)
    late_events = await rest(late)
    for events in (fast_events, slow_events, late_events):
        assert_exact(events, {"stdout": printed, "stderr": b"done"})
    assert any(isinstance(event, OutputGap) for event in late_events)
    assert process.logs[0].kept_bytes <= 64 * KIB * 9 // 8 + KIB


async def test_what_is_lost_after_a_gap_was_told_is_told_too(make_exec: MakeExec) -> None:
    """The reader got one gap and then paused; meanwhile the output after the gap is lost as well."""
    box = make_exec(retained_output_bytes_per_process=128 * KIB)
    await box.start(
        py(
            "import sys\nfor line in sys.stdin.buffer:\n sys.stdout.buffer.write(b'x' * int(line))\n"
            " sys.stdout.buffer.flush()\n sys.stderr.write('.')\n sys.stderr.flush()",
            pipe_stdin=True,
            overflow="drop",
        )
    )
    process = box.processes.process("p")
    reader = box.events("p")
    events: list[ProcessEvent] = []
    await box.write("p", b"300000\n")
    await wait_for_stdout(process, 300_000)
    while not (events and isinstance(events[-1], OutputGap)):
        events.append(await anext(reader))
    await box.write("p", b"300000\n")
    await wait_for_stdout(process, 600_000)
    await box.close_stdin("p")
    events += await rest(reader)
    assert_exact(events, {"stdout": b"x" * 600_000, "stderr": b".."})


async def wait_for_stdout(process: ManagedProcess, size: int) -> None:
    async with asyncio.timeout(SAFETY_NET):
        while process.logs[0].end < size:
            await process.changed()


@pytest.mark.parametrize("overflow", ["follow", "drop"])
async def test_output_lost_at_the_very_end_is_told_before_the_exit(
    make_exec: MakeExec, monkeypatch: pytest.MonkeyPatch, overflow: Overflow
) -> None:
    """A full spool loses the newest bytes: no later chunk shows by its offset that they are missing.

    A process with a reader waits for room first, no longer than for the reader.
    """
    box = make_exec(reader_stall_seconds=0.05)
    await box.start(sh("echo kept; read x; echo lost; echo lost >&2", pipe_stdin=True, overflow=overflow))
    events = box.events("p")
    first = await anext(events)

    def full(*args: object, **kwargs: object) -> int:
        raise OSError(28, "no room")

    monkeypatch.setattr(os, "splice", full)
    monkeypatch.setattr(os, "pwrite", full)
    await box.write("p", b"\n")
    later = await rest(events)
    assert isinstance(first, OutputChunk)
    assert first.data == b"kept\n"
    assert [type(event) for event in later] == [OutputGap, OutputGap, Exited, Closed]
    assert sorted(event.stream for event in later if isinstance(event, OutputGap)) == ["stderr", "stdout"]
    result = await box.read("p", after_seq=first.seq)
    assert {(gap.stream, gap.length) for gap in result.gap} == {("stdout", 5), ("stderr", 5)}


async def test_a_reader_of_a_forgotten_process_gets_a_gap_and_its_end(box: LocalExec) -> None:
    await box.start(sh("echo one; echo two >&2"))
    await box.wait("p")
    events = box.events("p")
    await box.forget("p")
    reported = await rest(events)
    assert {(e.stream, e.offset, e.length) for e in reported if isinstance(e, OutputGap)} == {
        ("stdout", 0, 4),
        ("stderr", 0, 4),
    }
    assert [type(event) for event in reported[-2:]] == [Exited, Closed]


async def test_a_reader_waiting_for_a_held_stream_ends_when_the_process_is_forgotten(box: LocalExec) -> None:
    await box.start(py(HOLDER))
    events = box.events("p")
    async with asyncio.timeout(SAFETY_NET):
        while not isinstance(await anext(events), Exited):
            pass
    child = await child_of(box)
    waiting = asyncio.ensure_future(rest(events))
    await asyncio.sleep(0)
    await box.forget("p")
    assert [type(event) for event in await waiting] == [Closed]
    send_signal(child, 9)


async def test_blocking_loses_nothing_to_a_slow_reader(make_exec: MakeExec) -> None:
    box = make_exec(retained_output_bytes_per_process=256 * KIB)
    size = 20_000_000
    await box.start(sh(f"yes 0123456789abcdef | head -c {size}", overflow="block"))
    process = box.processes.process("p")
    digest = hashlib.sha256()
    taken = 0
    async with asyncio.timeout(SAFETY_NET):
        async for event in box.events("p"):
            assert not isinstance(event, OutputGap)
            if isinstance(event, OutputChunk):
                assert event.offset == taken
                digest.update(event.data)
                taken += len(event.data)
                # Room for what is kept, the page in which it is cut, and one move of a pipe beyond it.
                assert process.logs[0].kept_bytes <= 128 * KIB + 4 * KIB + 1024 * KIB
                for _ in range(3):
                    await asyncio.sleep(0)
    line = b"0123456789abcdef\n"
    assert digest.hexdigest() == hashlib.sha256((line * (size // len(line) + 1))[:size]).hexdigest()


async def test_blocking_loses_nothing_to_a_reader_that_polls(make_exec: MakeExec) -> None:
    box = make_exec(retained_output_bytes_per_process=128 * KIB)
    printed = counted(60_000)
    await box.start(py(COUNT.format(lines=60_000, then=""), overflow="block"))
    data, seq = b"", 0
    async with asyncio.timeout(SAFETY_NET):
        while True:
            result = await box.read("p", after_seq=seq, max_bytes=10_000, wait=10)
            assert not result.gap
            data += b"".join(chunk.data for chunk in result.chunks if chunk.stream == "stdout")
            seq = result.next_seq - 1
            if result.closed and not result.chunks:
                break
    assert data == printed


@pytest.mark.parametrize("overflow", ["follow", "block"])
async def test_waiting_loses_nothing_when_chunks_are_many_and_small(
    make_exec: MakeExec, overflow: Overflow
) -> None:
    """Two streams in turn make a record a byte: it is the journal that is full, not the log."""
    box = make_exec(retained_chunks_per_process=64)
    script = "import os\nfor n in range(2000):\n os.write(1, b'o')\n os.write(2, b'e')"
    process = await box.processes.start(py(script, overflow=overflow))
    reader = box.events("p")
    events = [await anext(reader)]
    for _ in range(200):
        await asyncio.sleep(0)
    events += await rest(reader)
    assert not [event for event in events if isinstance(event, OutputGap)]
    assert_exact(events, {"stdout": b"o" * 2000, "stderr": b"e" * 2000})
    assert process.closed


@pytest.mark.parametrize("overflow", ["follow", "block"])
async def test_the_total_bound_takes_nothing_from_a_process_that_waits(
    make_exec: MakeExec, overflow: Overflow
) -> None:
    box = make_exec(retained_output_bytes_per_process=2048 * KIB, retained_output_bytes_total=300 * KIB)
    printed = counted(100_000)
    await box.start(py(COUNT.format(lines=100_000, then=""), overflow=overflow))
    assert_exact(await rest(box.events("p")), {"stdout": printed, "stderr": b"done"})


async def test_a_blocking_process_that_nobody_reads_waits_and_can_be_ended(make_exec: MakeExec) -> None:
    box = make_exec(retained_output_bytes_per_process=128 * KIB)
    await box.start(sh("echo ready >&2; yes", overflow="block"))
    process = box.processes.process("p")
    await paused(process)
    assert process.logs[0].lost_end == process.logs[0].lost_start
    async with asyncio.timeout(SAFETY_NET):
        assert await box.terminate("p", grace=5)
    assert (await box.wait("p")) is not None


async def paused(process: ManagedProcess) -> None:
    """Until a stream is no longer read: a full log."""
    async with asyncio.timeout(SAFETY_NET):
        while not any(output.paused for output in process._outputs):
            await process.changed()


async def ended(pid: int) -> None:
    """Until the process is a zombie, or was reaped already."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(fd, over.set)
    try:
        async with asyncio.timeout(SAFETY_NET):
            await over.wait()
    finally:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)


@pytest.mark.parametrize("tty", [False, True])
async def test_a_blocking_process_that_ended_while_it_was_held_back_tells_its_exit(
    make_exec: MakeExec, tty: bool
) -> None:
    box = make_exec(retained_output_bytes_per_process=16 * KIB if tty else 32 * KIB)
    size = 16 * KIB + 1000
    process = await box.processes.start(
        py(f"import sys, os\nfor _ in range({size} // 8): os.write(1, b'abcdefgh')", overflow="block", tty=tty)
    )
    await paused(process)
    await ended(process.pid)
    events = await rest(box.events("p"))
    assert joined(events, "pty" if tty else "stdout") == b"abcdefgh" * (size // 8)
    assert [type(event) for event in events[-2:]] == [Exited, Closed]


async def test_read_gives_at_least_one_chunk_and_at_most_so_many_bytes(box: LocalExec) -> None:
    await box.start(sh("printf %0100d 0; printf %0100d 0 >&2; printf %0100d 0"))
    await box.wait("p")
    await rest(box.events("p"))
    sizes: list[int] = []
    seq = 0
    while True:
        result = await box.read("p", after_seq=seq, max_bytes=1)
        assert len(result.chunks) <= 1
        if not result.chunks:
            break
        sizes.append(len(result.chunks[0].data))
        seq = result.next_seq - 1
    assert sum(sizes) == 300
    whole = await box.read("p")
    assert (whole.exited, whole.exit_code, whole.closed) == (True, 0, True)
    assert sum(len(chunk.data) for chunk in whole.chunks) == 300
    assert whole.next_seq == box.processes.process("p").journal.last_seq + 1
    none = await box.read("p", max_bytes=0)
    assert len(none.chunks) == 1


async def test_going_on_after_any_number_tells_exactly_the_rest(make_exec: MakeExec) -> None:
    box = make_exec(retained_output_bytes_per_process=128 * KIB)
    printed = counted(50_000)
    await box.start(py(COUNT.format(lines=50_000, then="")))
    whole = await rest(box.events("p"))
    late = await rest(box.events("p"))
    assert_exact(late, {"stdout": printed, "stderr": b"done"})
    for at, event in enumerate(late):
        if not isinstance(event, OutputGap):
            assert await rest(box.events("p", after_seq=event.seq)) == late[at + 1 :]
    assert isinstance(whole[-1], Closed)


async def test_reads_in_small_steps_tell_each_gap_once_and_every_byte(make_exec: MakeExec) -> None:
    box = make_exec(retained_output_bytes_per_process=128 * KIB)
    printed = counted(50_000)
    await box.start(py(COUNT.format(lines=50_000, then="")))
    await rest(box.events("p"))
    for max_bytes in (1, 5_000, 70_000, 10**9):
        reported: list[OutputChunk | OutputGap] = []
        seq = 0
        while True:
            result = await box.read("p", after_seq=seq, max_bytes=max_bytes)
            reported += sorted((*result.gap, *result.chunks), key=lambda each: each.offset)
            seq = result.next_seq - 1
            if not result.chunks:
                break
        assert_exact(reported, {"stdout": printed, "stderr": b"done"})


async def test_a_read_that_waits_is_woken_by_output_and_by_the_end(box: LocalExec) -> None:
    await box.start(sh("read x; echo $x", pipe_stdin=True))
    waiting = asyncio.ensure_future(box.read("p", wait=SAFETY_NET))
    await asyncio.sleep(0)
    await box.write("p", b"hello\n")
    result = await waiting
    assert [chunk.data for chunk in result.chunks] == [b"hello\n"]
    events = await rest(box.events("p", after_seq=result.chunks[-1].seq))
    assert [type(event) for event in events] == [Exited, Closed]
    assert (await box.read("p", after_seq=10, wait=SAFETY_NET)).closed


async def test_a_read_after_the_last_number_is_woken_by_the_next_byte(box: LocalExec) -> None:
    """The last chunk may not grow once a reader waits for what comes after it."""
    process = await box.processes.start(sh("echo one; read x; echo two; read x", pipe_stdin=True))
    await wait_for_stdout(process, 4)
    waiting = asyncio.ensure_future(box.read("p", after_seq=process.journal.last_seq, wait=SAFETY_NET))
    await asyncio.sleep(0)
    await box.write("p", b"\n")
    result = await waiting
    assert [chunk.data for chunk in result.chunks] == [b"two\n"]
    assert not result.gap


async def test_a_read_that_waits_in_vain_returns(box: LocalExec) -> None:
    await box.start(sh("read x", pipe_stdin=True))
    result = await box.read("p", wait=0.01)
    assert (result.chunks, result.next_seq, result.exited) == ((), 1, False)


async def test_a_negative_position_is_refused(box: LocalExec) -> None:
    await box.start(sh("echo x"))
    with pytest.raises(InvalidParams, match="afterSeq"):
        await box.read("p", after_seq=-1)
    with pytest.raises(InvalidParams, match="afterSeq"):
        box.events("p", after_seq=-1)


async def test_a_reader_goes_on_where_another_stopped(box: LocalExec) -> None:
    await box.start(sh("for i in 1 2 3 4 5 6 7 8; do echo $i; echo $i >&2; done"))
    await box.wait("p")
    whole = await rest(box.events("p"))
    for event in whole:
        assert not isinstance(event, OutputGap)
        assert await rest(box.events("p", after_seq=event.seq)) == [e for e in whole if e.seq > event.seq]  # type: ignore[union-attr]


async def test_readers_do_not_steal_and_may_leave(box: LocalExec) -> None:
    await box.start(sh("read x; seq 1 1000", pipe_stdin=True))
    one, two, gone = box.events("p"), box.events("p"), box.events("p")
    await gone.aclose()
    await box.write("p", b"\n")
    first, second = await asyncio.gather(rest(one), rest(two))
    assert joined(first) == joined(second) == b"".join(b"%d\n" % n for n in range(1, 1001))
    assert await rest(gone) == []
    assert not box.processes.process("p")._readers


async def test_a_cancelled_reader_loses_nothing(box: LocalExec) -> None:
    await box.start(sh("read x; seq 1 100", pipe_stdin=True))
    events = box.events("p")
    waiting = asyncio.ensure_future(events.__anext__())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await box.write("p", b"\n")
    assert joined(await rest(events)) == b"".join(b"%d\n" % n for n in range(1, 101))


async def test_the_snapshot_has_head_and_tail(make_exec: MakeExec) -> None:
    box = make_exec(retained_output_bytes_per_process=128 * KIB)
    printed = counted(50_000)
    await box.start(py(COUNT.format(lines=50_000, then="")))
    await rest(box.events("p"))
    snapshot = await box.snapshot("p")
    assert (snapshot.truncated, snapshot.exit_code, snapshot.running, snapshot.stderr) == (True, 0, False, b"done")
    assert snapshot.stdout.startswith(printed[: 4 * KIB])
    assert snapshot.stdout.endswith(printed[-60 * KIB :])


async def test_without_descriptors_output_is_lost_and_the_process_goes_on(make_exec: MakeExec) -> None:
    box = make_exec()
    await box.start(sh("read x; echo lost; read x; echo kept", pipe_stdin=True))
    process = box.processes.process("p")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        await box.write("p", b"\n")
        await wait_for_stdout(process, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await box.write("p", b"\n")
    assert_exact(await rest(box.events("p")), {"stdout": b"lost\nkept\n"})


def test_a_reader_has_no_state_beyond_its_own() -> None:
    assert "__dict__" not in dir(Reader)


async def test_a_look_at_the_beginning_takes_nothing_back_from_a_blocking_process(make_exec: MakeExec) -> None:
    """Output that a reader has taken for good stays taken, though another reads from the start and leaves."""
    box = make_exec(retained_output_bytes_per_process=512 * 1024)
    await box.start(ProcessSpec("p", ("head", "-c", "3000000", "/dev/zero"), overflow="block"))
    events = box.events("p")
    size = 0
    async for event in events:
        if isinstance(event, OutputChunk):
            size += len(event.data)
            if size > 1_000_000:
                break
    await events.aclose()
    await box.read("p", after_seq=0, max_bytes=1)
    process = box.processes.process("p")
    assert (process._floor(0) or 0) >= 1_000_000
    await box.terminate("p", force=True)
