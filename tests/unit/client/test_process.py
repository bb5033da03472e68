"""The handle on one process, over programs that are coroutines, in virtual time."""

from __future__ import annotations

import asyncio
import re

import pytest

from holdfast.client.process import Process
from holdfast.client.sandbox import Sandbox
from holdfast.errors import (
    InvalidParams,
    LimitReached,
    NotATerminal,
    ProcessError,
    StdinClosed,
    TimeoutError,
    UnknownProcess,
    UnknownSignal,
)
from holdfast.testing import FakeExec, FakeProcess, cat, hangs, prints, run_in_virtual_time
from holdfast.types import Closed, Exited, ExitStatus, OutputChunk, OutputGap, TerminalSize


async def ticks(process: FakeProcess) -> int:
    """One line a second, ten of them."""
    for number in range(10):
        process.stdout(f"tick {number}\n")
        await process.sleep(1)
    return 0


async def start(program: str, *, retained_bytes: int = 1 << 40, **options: object) -> tuple[Process, FakeExec]:
    programs = {"ticks": ticks, "cat": cat, "hang": hangs("up\n"), "stubborn": hangs("up\n", ignores=["TERM"])}
    fake = FakeExec(programs, retained_bytes=retained_bytes)
    return await Sandbox(fake).start([program], **options), fake  # type: ignore[arg-type]


async def start_program(program: object, **options: object) -> Process:
    return await Sandbox(FakeExec({"program": program})).start(["program"], **options)  # type: ignore[arg-type, dict-item]


async def test_events_come_in_order_and_end_with_closed() -> None:
    process = await start_program(prints("out", "err", 3))
    events = [event async for event in process.events()]
    assert events == [
        OutputChunk("stdout", 0, b"out", 1),
        OutputChunk("stderr", 0, b"err", 2),
        Exited(3, ExitStatus(3)),
        Closed(4),
    ]
    assert [event async for event in process.output(since=1)] == [events[1]]


async def test_two_readers_do_not_take_from_each_other() -> None:
    process = await start_program(prints("same"))
    first = [event async for event in process.output()]
    assert [event async for event in process.output()] == first == [OutputChunk("stdout", 0, b"same", 1)]


async def test_gaps_are_told_with_their_place() -> None:
    async def flood(process: FakeProcess) -> int:
        for _ in range(10):
            process.stdout(b"0123456789")
        return 0

    process = await Sandbox(FakeExec({"flood": flood}, retained_bytes=25)).start(["flood"])
    await process.wait()
    output = [event async for event in process.output()]
    assert output[0] == OutputGap("stdout", 0, 80)
    assert [event.offset for event in output[1:]] == [80, 90]
    with pytest.raises(LimitReached, match="80 bytes of stdout at offset 0"):
        await process.communicate()


async def test_communicate_returns_everything() -> None:
    process, _ = await start("cat", stdin="open")
    assert await process.communicate(b"x" * 1_000_000) == (b"x" * 1_000_000, b"")


async def test_communicate_without_input_ends_the_input() -> None:
    process, _ = await start("cat", stdin="open")
    assert await process.communicate() == (b"", b"")


async def test_communicate_with_a_program_that_does_not_read() -> None:
    process = await start_program(prints("done"), stdin="open")
    assert await process.communicate("text") == (b"done", b"")


async def test_communicate_refuses_what_is_over_its_bound() -> None:
    process = await start_program(prints(b"x" * 100))
    with pytest.raises(LimitReached, match="max_bytes=99"):
        await process.communicate(max_bytes=99)


async def test_communicate_returns_at_the_exit_while_a_child_holds_the_streams() -> None:
    async def daemon(process: FakeProcess) -> int:
        process.leave_behind(asyncio.sleep(1_000_000))
        process.stdout("parent")
        return 0

    process = await start_program(daemon)
    assert await process.communicate() == (b"parent", b"")
    assert not (await process.describe()).closed
    await process.terminate()
    assert (await process.describe()).closed


def test_collect_yields_in_time_and_continues_where_it_was() -> None:
    async def scenario() -> None:
        process, _ = await start("ticks")
        first = await process.collect(yield_after=2.5)
        assert (first.output, first.running, first.elapsed) == (b"tick 0\ntick 1\ntick 2\n", True, 2.5)
        second = await process.collect(yield_after=1)
        assert (second.text, second.exit_code) == ("tick 3\n", None)
        last = await process.collect(yield_after=1000)
        assert last.output == b"".join(b"tick %d\n" % n for n in range(4, 10))
        assert (last.exit, last.running, last.truncated) == (ExitStatus(0), False, False)
        assert last.elapsed == pytest.approx(6.5)
        after = await process.collect(yield_after=1000)
        assert (after.output, after.exit_code, after.elapsed) == (b"", 0, 0.0)

    run_in_virtual_time(scenario())


async def test_collect_at_once_takes_what_is_there() -> None:
    process, _ = await start("hang")
    await process.wait_for_output("up")
    assert (await process.collect(yield_after=0)).output == b"up\n"
    assert (await process.collect(yield_after=0)).output == b""


async def test_collect_keeps_head_and_tail() -> None:
    process = await start_program(prints(b"a" * 500 + b"b" * 500))
    window = await process.collect(max_bytes=100)
    assert window.output == b"a" * 50 + b"b" * 50
    assert window.omitted_bytes == 900
    assert "[... 900 bytes omitted ...]" in window.text


async def test_collect_counts_what_the_sandbox_no_longer_has() -> None:
    process = await Sandbox(FakeExec({"p": prints("lost", "kept")}, retained_bytes=5)).start(["p"])
    await process.wait()
    window = await process.collect()
    assert (window.head, window.tail, window.omitted_bytes) == (b"", b"kept", 4)


def test_collect_leaves_half_a_character_for_the_next_window() -> None:
    async def slow(process: FakeProcess) -> int:
        process.stdout("é".encode()[:1])
        await process.sleep(10)
        process.stdout("é".encode()[1:])
        return 0

    async def scenario() -> None:
        process = await start_program(slow)
        assert (await process.collect(yield_after=1)).output == b""
        assert (await process.collect(yield_after=100)).text == "é"

    run_in_virtual_time(scenario())


def test_a_child_that_prints_on_does_not_hold_the_window_open() -> None:
    async def daemon(process: FakeProcess) -> int:
        async def chatter() -> None:
            while True:
                process.stdout("z")
                await process.sleep(0.001)

        process.stdout("parent\n")
        process.leave_behind(chatter())
        return 0

    async def scenario() -> None:
        process = await start_program(daemon)
        window = await process.collect(yield_after=60)
        assert window.exit_code == 0
        assert window.output.startswith(b"parent\n")
        assert window.elapsed < 1
        await process.terminate()

    run_in_virtual_time(scenario())


async def test_collect_refuses_a_window_without_room() -> None:
    process, _ = await start("hang")
    with pytest.raises(InvalidParams, match="max_bytes"):
        await process.collect(max_bytes=1)


async def test_wait_for_output_finds_what_was_printed_before_and_after() -> None:
    async def server(process: FakeProcess) -> int:
        process.stderr("listening on po")
        await asyncio.sleep(0)
        process.stderr("rt 8080\n")
        await process.read()
        return 0

    process = await start_program(server, stdin="open")
    match = await process.wait_for_output(re.compile(r"port (\d{4})"))
    assert (match.stream, match.offset, match.groups) == ("stderr", 13, (b"8080",))
    assert (await process.wait_for_output("listening")).offset == 0
    await process.close_stdin()
    assert await process.wait() == ExitStatus(0)


async def test_wait_for_output_goes_on_behind_an_earlier_match() -> None:
    async def server(process: FakeProcess) -> int:
        process.stdout("ready one ready two ")
        await process.read()
        process.stdout("ready three")
        return 0

    process = await start_program(server, stdin="open")
    match = await process.wait_for_output("ready ")
    offsets = [match.offset]
    for _ in range(2):
        if len(offsets) == 2:
            await process.write("go on")
        match = await process.wait_for_output("ready ", since=match)
        offsets.append(match.offset)
    assert offsets == [0, 10, 20]
    assert (await process.wait_for_output("three", since=match)).offset == 26
    with pytest.raises(ProcessError, match="before it printed 'ready'"):
        await process.wait_for_output("ready", since=match)


async def test_wait_for_output_says_why_it_will_not_come() -> None:
    process = await start_program(prints("starting\n", "port in use\n", 1))
    with pytest.raises(ProcessError, match=r"exit code 1 before it printed 'ready'.*port in use") as caught:
        await process.wait_for_output("ready")
    assert caught.value.details == {"exit_code": 1}


def test_wait_for_output_times_out_and_leaves_the_process() -> None:
    async def scenario() -> None:
        process, _ = await start("hang")
        with pytest.raises(TimeoutError, match=r"within 30 s print 'ready'; its output ends with 'up\\n'"):
            await process.wait_for_output("ready", timeout=30)
        assert asyncio.get_running_loop().time() == pytest.approx(30)
        assert (await process.describe()).running

    run_in_virtual_time(scenario())


def test_wait_times_out_and_leaves_the_process() -> None:
    async def scenario() -> None:
        process, _ = await start("ticks")
        with pytest.raises(TimeoutError, match=r"still runs after 1\.5 s"):
            await process.wait(1.5)
        assert await process.wait() == ExitStatus(0)

    run_in_virtual_time(scenario())


def test_terminate_gives_grace_then_kills() -> None:
    async def scenario() -> None:
        process, fake = await start("stubborn", id="s")
        await process.wait_for_output("up")
        assert await process.terminate(grace=5) is True
        assert asyncio.get_running_loop().time() == pytest.approx(5)
        assert fake.process("s").signals == ["TERM", "KILL"]
        assert await process.wait() == ExitStatus(137, "SIGKILL")
        assert await process.terminate() is False

    run_in_virtual_time(scenario())


async def test_force_kills_at_once() -> None:
    process, fake = await start("hang", id="h")
    await process.terminate(force=True)
    assert fake.process("h").signals == ["KILL"]


async def test_leaving_the_block_ends_the_process() -> None:
    process, _ = await start("hang")
    async with process as same:
        assert same is process
        await process.wait_for_output("up")
    assert await process.wait() == ExitStatus(143, "SIGTERM")
    await process.forget()
    async with process:
        pass
    with pytest.raises(UnknownProcess):
        await process.describe()


async def test_signals_by_name_and_by_number() -> None:
    process, fake = await start("stubborn", id="s")
    await process.wait_for_output("up")
    await process.signal("SIGUSR1")
    await process.signal(12)
    assert fake.process("s").signals == ["USR1", "USR2"]
    with pytest.raises(UnknownSignal, match="999"):
        await process.signal(999)
    await process.signal("INT")
    assert await process.wait() == ExitStatus(130, "SIGINT")


async def test_terminal_size() -> None:
    process, fake = await start("hang", id="t", tty=TerminalSize(24, 80))
    await process.resize(50, 132)
    assert fake.process("t").size == TerminalSize(50, 132)
    assert (await process.wait_for_output("up")).stream == "pty"
    pipe, _ = await start("hang")
    with pytest.raises(NotATerminal):
        await pipe.resize(1, 1)


async def test_write_needs_an_open_stdin() -> None:
    process, _ = await start("cat")
    with pytest.raises(StdinClosed):
        await process.write("x")


async def test_large_writes_do_not_mix() -> None:
    process, fake = await start("cat", id="c", stdin="open")
    first, second = b"a" * 600_000, b"b" * 600_000
    await asyncio.gather(process.write(first), process.write(second))
    assert fake.process("c").input in (first + second, second + first)


async def test_snapshot_and_read() -> None:
    process = await start_program(prints("out", "err"))
    await process.wait()
    snapshot = await process.snapshot()
    assert (snapshot.stdout, snapshot.stderr, snapshot.running, snapshot.exit_code) == (b"out", b"err", False, 0)
    result = await process.read(since=1, max_bytes=100)
    assert [chunk.data for chunk in result.chunks] == [b"err"]
    assert (result.next_seq, result.exited, result.closed) == (5, True, True)
