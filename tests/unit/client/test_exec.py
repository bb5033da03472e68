"""`exec` and `exec_remote`: results, timeouts, retries, cancellation and streaming, in virtual time."""

from __future__ import annotations

import asyncio
import builtins
import gc
import logging

import pytest

from holdfast.client import command
from holdfast.client.exec_remote import (
    Completed,
    ExecRemoteEvent,
    ExecRemoteOptions,
    ExecRemoteProcess,
    ExecResult,
    StderrChunk,
    StdoutChunk,
)
from holdfast.client.sandbox import Sandbox
from holdfast.errors import (
    CommandNotFound,
    ConnectionLost,
    InvalidParams,
    InvalidRequest,
    NotExecutable,
    ProcessError,
    StdinClosed,
    TimeoutError,
)
from holdfast.testing import FakeExec, FakeProcess, cat, hangs, prints, run_in_virtual_time
from holdfast.testing.fake_process import Program
from holdfast.types import ProcessInfo, ProcessSpec


def box_with(**programs: Program) -> tuple[Sandbox, FakeExec]:
    fake = FakeExec(programs)
    return Sandbox(fake), fake


async def drain(process: ExecRemoteProcess) -> list[ExecRemoteEvent]:
    return [event async for event in process]


# --- a command that cannot be started ---------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "exit_code"), [(CommandNotFound, 127), (NotExecutable, 126)])
async def test_a_command_that_cannot_be_started_can_be_a_result(error: type[ProcessError], exit_code: int) -> None:
    class Refusing(FakeExec):
        async def start(self, spec: ProcessSpec) -> ProcessInfo:
            raise error("nope: no")

    box = Sandbox(Refusing({}))
    result = await box.exec(["nope"], start_errors="result")
    assert result == ExecResult(exit_code, b"", b"nope: no\n")
    merged = await box.exec(["nope"], start_errors="result", merge_stderr=True)
    assert merged == ExecResult(exit_code, b"nope: no\n", b"")
    options = ExecRemoteOptions(start_errors="result")
    assert await box.exec_remote(["nope"], options, stream=False) == result
    process = box.exec_remote(["nope"], options)
    assert await drain(process) == [StderrChunk("nope: no\n"), Completed(exit_code, "", "nope: no\n")]
    options = ExecRemoteOptions(start_errors="result", merge_stderr=True)
    process = box.exec_remote(["nope"], options)
    assert await drain(process) == [StdoutChunk("nope: no\n"), Completed(exit_code, "nope: no\n", "")]
    with pytest.raises(error):
        await box.exec(["nope"])


# --- exec ------------------------------------------------------------------------------------------------------


async def test_exec_returns_output_and_code() -> None:
    box, _ = box_with(program=prints(b"out \xff", "err", 3))
    result = await box.exec(["program", "arg"])
    assert result == ExecResult(3, b"out \xff", b"err")
    assert (result.stdout, result.stderr, result.success, result.truncated) == ("out \ufffd", "err", False, False)
    assert result.exit_code == result.returncode


async def test_exec_passes_on_its_options() -> None:
    box, fake = box_with(cat=cat)
    result = await box.exec(["cat"], input="größe", cwd="/there", env={"A": "1"}, user="nobody")
    assert (result.stdout, result.success) == ("größe", True)
    (spec,) = fake.started
    assert (spec.cwd, spec.env, spec.user, spec.pipe_stdin) == ("/there", {"A": "1"}, "nobody", True)
    assert spec.env_policy is not None
    assert (spec.env_policy.inherit, spec.env_policy.ignore_default_excludes) == ("all", True)


async def test_exec_without_input_has_an_empty_stdin_and_the_plain_environment() -> None:
    box, fake = box_with(cat=cat)
    assert (await box.exec(["cat"])).stdout == ""
    assert (fake.started[0].pipe_stdin, fake.started[0].env, fake.started[0].env_policy) == (False, None, None)


async def test_exec_keeps_the_latest_of_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "OUTPUT_LIMIT_BYTES", 10)
    box, _ = box_with(program=prints("é" * 8 + "x", "short"))
    result = await box.exec(["program"])
    assert result.stdout_bytes == ("é" * 8 + "x").encode()[-10:]
    assert (result.stdout, result.stderr, result.truncated) == ("éééé" + "x", "short", True)


async def test_exec_returns_at_the_exit_while_a_child_holds_the_streams() -> None:
    async def daemon(process: FakeProcess) -> int:
        process.leave_behind(asyncio.sleep(1_000_000))
        process.stdout("parent")
        return 0

    box, fake = box_with(daemon=daemon)
    assert (await box.exec(["daemon"])).stdout == "parent"
    assert not fake.process(fake.started[0].process_id).closed
    await box.aclose()


async def test_exec_of_what_does_not_read_its_input() -> None:
    box, _ = box_with(true=prints())
    assert (await box.exec(["true"], input=b"x" * 1_000_000)).success


async def test_exec_raises_what_the_start_raised() -> None:
    box, _ = box_with()
    with pytest.raises(CommandNotFound, match="nope"):
        await box.exec(["nope"], timeout=1)


@pytest.mark.parametrize("words", ["ls -l", b"ls", [], ()])
async def test_a_command_is_a_list(words: list[str]) -> None:
    box, fake = box_with(ls=prints())
    with pytest.raises(InvalidParams, match="cmd"):
        await box.exec(words)
    with pytest.raises(InvalidParams, match="cmd"):
        box.exec_remote(words)
    assert fake.started == []


def test_a_timeout_kills_and_tells_what_was_printed() -> None:
    async def scenario() -> None:
        box, fake = box_with(hang=hangs("so far\n"))
        with pytest.raises(builtins.TimeoutError, match=r"not ended within 90 s.*hang now") as caught:
            await box.exec(["hang", "now"], timeout=90, timeout_retry=False)
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.stdout == "so far\n"
        assert asyncio.get_running_loop().time() == pytest.approx(90)
        (spec,) = fake.started
        assert fake.process(spec.process_id).signals == ["KILL"]

    run_in_virtual_time(scenario())


def test_a_start_that_takes_too_long_is_a_timeout() -> None:
    class Slow(FakeExec):
        async def start(self, spec: ProcessSpec) -> ProcessInfo:
            await asyncio.sleep(1000)
            return await super().start(spec)

    async def scenario() -> None:
        with pytest.raises(TimeoutError, match="within 3 s"):
            await Sandbox(Slow({"true": prints()})).exec(["true"], timeout=3, timeout_retry=False)

    run_in_virtual_time(scenario())


def test_a_timeout_is_retried_twice_with_less_time() -> None:
    async def scenario() -> None:
        box, fake = box_with(hang=hangs())
        with pytest.raises(
            TimeoutError, match="within 100 s, nor when repeated for 50 s and 25 s, so it was killed"
        ):
            await box.exec(["hang"], timeout=100, timeout_retry=True)
        assert asyncio.get_running_loop().time() == pytest.approx(100 + 50 + 25)
        assert [fake.process(spec.process_id).signals for spec in fake.started] == [["KILL"]] * 3
        assert len({spec.process_id for spec in fake.started}) == 3

    run_in_virtual_time(scenario())


def test_a_command_that_timed_out_is_not_run_again_unless_the_caller_says_so() -> None:
    async def scenario() -> None:
        box, fake = box_with(hang=hangs())
        with pytest.raises(TimeoutError, match="within 100 s"):
            await box.exec(["hang"], timeout=100)
        assert len(fake.started) == 1

    run_in_virtual_time(scenario())


def test_a_retry_may_succeed() -> None:
    async def scenario() -> None:
        async def second_time(process: FakeProcess) -> int:
            await process.sleep(1000 if len(fake.started) == 1 else 1)
            process.stdout("done")
            return 0

        box, fake = box_with(flaky=second_time)
        assert (await box.exec(["flaky"], timeout=10, timeout_retry=True)).stdout == "done"
        assert asyncio.get_running_loop().time() == pytest.approx(11)

    run_in_virtual_time(scenario())


def test_retry_timeouts_shrink() -> None:
    assert command.retry_timeouts(600, True) == (600, 60, 30)
    assert command.retry_timeouts(1, True) == (1, 0.5, 0.25)
    assert command.retry_timeouts(600, False) == (600,)
    assert command.retry_timeouts(None, True) == (None,)


async def test_a_cancelled_exec_kills() -> None:
    box, fake = box_with(hang=hangs("up"))
    running = asyncio.create_task(box.exec(["hang"], input="x"))
    process = await fake.wait_started()
    await process.until(lambda: process.printed["stdout"] > 0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert process.signals == ["KILL"]


async def test_a_kill_that_fails_does_not_hide_the_cancellation() -> None:
    class Unreachable(FakeExec):
        async def terminate(self, process_id: str, *, grace: float = 5.0, force: bool = False) -> bool:
            raise ConnectionLost("gone")

    fake = Unreachable({"hang": hangs()})
    running = asyncio.create_task(Sandbox(fake).exec(["hang"]))
    await fake.wait_started()
    running.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await running
    assert caught.value.__notes__ == ["the command could not be killed: gone"]


async def test_input_that_cannot_be_written_kills_and_is_raised() -> None:
    class Broken(FakeExec):
        async def write(self, process_id: str, data: bytes, *, write_id: str | None = None) -> None:
            raise ConnectionLost("no way in")

    fake = Broken({"cat": cat})
    box = Sandbox(fake)
    with pytest.raises(ConnectionLost, match="no way in"):
        await box.exec(["cat"], input="x")
    with pytest.raises(ConnectionLost, match="no way in"):
        await drain(box.exec_remote(["cat"], ExecRemoteOptions(input="x")))
    assert [fake.process(spec.process_id).signals for spec in fake.started] == [["KILL"], ["KILL"]]


def test_commands_wait_for_a_place_and_their_time_counts_from_then() -> None:
    async def scenario() -> None:
        async def minute(process: FakeProcess) -> int:
            await process.sleep(60)
            return 0

        fake = FakeExec({"minute": minute, "true": prints()})
        box = Sandbox(fake, max_concurrent_execs=2)
        jobs = [asyncio.create_task(box.exec(["minute"], timeout=61)) for _ in range(5)]
        await asyncio.sleep(1)
        assert len(fake.started) == 2
        assert (await box.exec(["true"], concurrency=False)).success
        assert all(result.success for result in await asyncio.gather(*jobs))
        assert asyncio.get_running_loop().time() == pytest.approx(180)

    run_in_virtual_time(scenario())


# --- exec_remote, awaited --------------------------------------------------------------------------------------


async def test_awaited_exec_remote_is_an_exec() -> None:
    box, _ = box_with(cat=cat)
    result = await box.exec_remote(["cat"], ExecRemoteOptions(input=b"\x00in", stdin_open=True), stream=False)
    assert result == ExecResult(0, b"\x00in", b"")
    assert (await box.exec_remote(["cat"], ExecRemoteOptions(stdin_open=True), stream=False)).success


def test_awaited_exec_remote_retries() -> None:
    async def scenario() -> None:
        box, fake = box_with(hang=hangs())
        with pytest.raises(TimeoutError):
            await box.exec_remote(["hang"], ExecRemoteOptions(timeout=4, timeout_retry=True), stream=False)
        assert len(fake.started) == 3
        with pytest.raises(TimeoutError):
            await box.exec_remote(["hang"], ExecRemoteOptions(timeout=4), stream=False)
        assert len(fake.started) == 4

    run_in_virtual_time(scenario())


# --- exec_remote, streamed -------------------------------------------------------------------------------------


async def test_a_stream_has_chunks_and_then_completed() -> None:
    box, _ = box_with(program=prints("out", "err", 2))
    events = await drain(box.exec_remote(["program"]))
    assert events == [StdoutChunk("out"), StderrChunk("err"), Completed(2, "out", "err")]
    assert isinstance(events[-1], Completed)
    assert not events[-1].success


async def test_events_is_the_same_stream_and_it_runs_once() -> None:
    box, _ = box_with(program=prints("out"))
    process = box.exec_remote(["program"])
    assert [event async for event in process.events] == [StdoutChunk("out"), Completed(0, "out", "")]
    assert await drain(process) == []


async def test_it_is_hot_from_creation() -> None:
    box, fake = box_with(hang=hangs("up"))
    process = box.exec_remote(["hang"])
    assert process.pid is None
    inside = await fake.wait_started()
    assert await anext(process) == StdoutChunk("up")
    assert process.pid == inside.pid
    await process.kill()


def test_it_needs_a_running_loop() -> None:
    with pytest.raises(InvalidRequest, match="running event loop"):
        Sandbox(FakeExec({})).exec_remote(["x"])


async def test_characters_split_over_chunks_stay_whole() -> None:
    async def bytewise(process: FakeProcess) -> int:
        for byte in "aé😀".encode():
            process.stdout(bytes([byte]))
        process.stdout(b"\xc3")
        return 0

    box, _ = box_with(bytewise=bytewise)
    events = await drain(box.exec_remote(["bytewise"]))
    assert [event.data for event in events if isinstance(event, StdoutChunk)] == ["a", "é", "😀", "\ufffd"]
    assert events[-1] == Completed(0, "aé😀\ufffd", "")


async def test_a_failed_start_is_raised_by_the_iteration() -> None:
    box, _ = box_with()
    process = box.exec_remote(["nope"])
    with pytest.raises(CommandNotFound, match="nope"):
        await drain(process)
    assert process.pid is None
    assert await drain(process) == []


async def test_killing_what_never_started_is_no_error() -> None:
    box, _ = box_with()
    process = box.exec_remote(["nope"])
    await process.kill()
    assert await drain(process) == []


async def test_a_failed_start_that_nobody_looks_at_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    box, fake = box_with()
    box.exec_remote(["nope"])
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        for _ in range(5):
            await asyncio.sleep(0)
        gc.collect()
    assert fake.started == []
    assert any(record.exc_info and record.exc_info[0] is CommandNotFound for record in caplog.records)


async def test_input_then_stdin() -> None:
    box, _ = box_with(cat=cat)
    process = box.exec_remote(["cat"], ExecRemoteOptions(input="one ", stdin_open=True))
    await process.write_stdin("two ")
    await process.write_stdin(b"three")
    await process.close_stdin()
    assert (await drain(process))[-1] == Completed(0, "one two three", "")


async def test_stdin_is_closed_unless_asked_for() -> None:
    box, _ = box_with(cat=cat)
    process = box.exec_remote(["cat"], ExecRemoteOptions(input="all"))
    with pytest.raises(StdinClosed, match="stdin_open"):
        await process.write_stdin("more")
    assert (await drain(process))[-1] == Completed(0, "all", "")


async def test_kill_discards_what_nobody_took() -> None:
    box, fake = box_with(hang=hangs("never seen"))
    process = box.exec_remote(["hang"])
    inside = await fake.wait_started()
    await inside.until(lambda: inside.printed["stdout"] > 0)
    await process.kill()
    assert await drain(process) == []
    assert inside.signals == ["TERM"]
    await process.kill()


async def test_kill_ends_an_iteration_that_waits() -> None:
    box, _ = box_with(hang=hangs("up"))
    process = box.exec_remote(["hang"])
    assert await anext(process) == StdoutChunk("up")
    waiting = asyncio.create_task(drain(process))
    await asyncio.sleep(0)
    await process.kill()
    assert await waiting == []


async def test_a_cancelled_iteration_kills_and_re_raises() -> None:
    box, fake = box_with(hang=hangs("up", ignores=["TERM"]))
    process = box.exec_remote(["hang"])
    assert await anext(process) == StdoutChunk("up")
    waiting = asyncio.create_task(drain(process))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert fake.process(process.id).signals == ["KILL"]


async def test_leaving_the_block_kills() -> None:
    box, fake = box_with(hang=hangs("up"))
    async with box.exec_remote(["hang"]) as process:
        assert await anext(process) == StdoutChunk("up")
    assert fake.process(process.id).signals == ["TERM"]


def test_a_streamed_command_times_out_also_when_nobody_iterates() -> None:
    async def scenario() -> None:
        box, fake = box_with(hang=hangs("so far"))
        process = box.exec_remote(["hang"], ExecRemoteOptions(timeout=5))
        await asyncio.sleep(100)
        assert fake.process(process.id).signals == ["KILL"]
        assert await anext(process) == StdoutChunk("so far")
        with pytest.raises(TimeoutError, match="within 5 s") as caught:
            await anext(process)
        assert caught.value.stdout == "so far"
        assert len(fake.started) == 1

    run_in_virtual_time(scenario())


def test_a_streamed_command_that_ends_in_time_is_left_alone() -> None:
    async def scenario() -> None:
        async def slow(process: FakeProcess) -> int:
            await process.sleep(4)
            return 0

        box, fake = box_with(slow=slow)
        process = box.exec_remote(["slow"], ExecRemoteOptions(timeout=5, poll_interval=0.1))
        assert await drain(process) == [Completed(0, "", "")]
        assert fake.process(process.id).signals == []

    run_in_virtual_time(scenario())


async def test_closing_the_sandbox_lets_go_of_streams() -> None:
    box, fake = box_with(hang=hangs("up"))
    process = box.exec_remote(["hang"], ExecRemoteOptions(timeout=1000))
    assert await anext(process) == StdoutChunk("up")
    await box.aclose()
    assert fake.closed
