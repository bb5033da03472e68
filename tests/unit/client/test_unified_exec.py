"""The tool surface for models: yield windows, sessions, and the four events."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.client.sandbox import Sandbox
from holdfast.client.tools.unified_exec import (
    ExecCommandBegin,
    ExecCommandEnd,
    ExecCommandOutputDelta,
    TerminalInteraction,
    UnifiedExec,
    UnifiedExecEvent,
)
from holdfast.errors import (
    CommandNotFound,
    ConnectionLost,
    InvalidParams,
    LimitReached,
    StdinClosed,
    UnknownProcess,
)
from holdfast.testing import FakeExec, FakeProcess, hangs, prints, run_in_virtual_time
from holdfast.types import TerminalSize


async def shell(process: FakeProcess) -> int:
    """Stands for `/bin/sh -lc COMMAND`: the command selects the action."""
    word, _, rest = process.spec.argv[2].partition(" ")
    if word == "say":
        process.stdout(rest)
        return 0
    if word == "after":
        await process.sleep(float(rest))
        process.stdout(f"{rest} s\n")
        return 7
    assert word == "echo-lines"
    while line := await process.read_line():
        process.stdout(b"got " + line)
        if line == b"bye\n":
            break
    return 0


def tools(**options: Any) -> tuple[UnifiedExec, FakeExec, list[UnifiedExecEvent]]:
    events: list[UnifiedExecEvent] = []
    fake = FakeExec({"/bin/sh": shell, "direct": prints("direct"), "hang": hangs("up")})
    return UnifiedExec(Sandbox(fake), on_event=events.append, **options), fake, events


async def test_a_short_command_ends_within_its_window() -> None:
    unified, fake, events = tools()
    output = await unified.exec_command("say hello", workdir="/w")
    assert (output.output, output.output_bytes, output.exit_code, output.session_id) == ("hello", b"hello", 0, None)
    assert not output.running
    assert not output.truncated
    (spec,) = fake.started
    assert (spec.argv, spec.cwd, spec.pipe_stdin, spec.tty) == (("/bin/sh", "-lc", "say hello"), "/w", False, False)
    begin, delta, end = events
    assert begin == ExecCommandBegin(1, spec.process_id, spec.argv, "/w", False)
    assert delta == ExecCommandOutputDelta(1, "stdout", b"hello", "hello")
    assert isinstance(end, ExecCommandEnd)
    assert (end.exit_code, end.transcript.output, end.process_id) == (0, b"hello", spec.process_id)
    assert unified.sessions() == {}


async def test_a_shell_without_login_skips_the_profile() -> None:
    unified, fake, _ = tools()
    assert (await unified.exec_command("say x", login=False)).output == "x"
    await unified.call({"name": "exec_command", "arguments": {"cmd": "say y", "login": False}})
    assert [spec.argv for spec in fake.started] == [("/bin/sh", "-c", "say x"), ("/bin/sh", "-c", "say y")]


async def test_a_list_runs_as_it_stands() -> None:
    unified, fake, _ = tools(env={"A": "1"})
    assert (await unified.exec_command(["direct", "x"])).output == "direct"
    assert (fake.started[0].argv, fake.started[0].env) == (("direct", "x"), {"A": "1"})


def test_a_long_command_yields_and_is_looked_at_later() -> None:
    async def scenario() -> None:
        now = asyncio.get_running_loop().time
        unified, _, events = tools()
        first = await unified.exec_command("after 25")
        assert (first.session_id, first.exit_code, first.output, first.wall_time) == (1, None, "", 10.0)
        second = await unified.write_stdin(1)
        assert (second.session_id, second.wall_time) == (1, 0.25)
        third = await unified.write_stdin(1, yield_time_ms=1_000_000)
        assert (third.session_id, third.exit_code, third.output) == (None, 7, "25 s\n")
        assert now() == pytest.approx(25)
        with pytest.raises(UnknownProcess, match="session 1"):
            await unified.write_stdin(1)
        assert [type(event) for event in events] == [ExecCommandBegin, ExecCommandOutputDelta, ExecCommandEnd]

    run_in_virtual_time(scenario())


@pytest.mark.parametrize(("requested", "given"), [(0, 0.25), (250, 0.25), (5_000, 5.0), (99_000, 30.0)])
def test_the_window_is_clamped(requested: int, given: float) -> None:
    async def scenario() -> None:
        unified, _, _ = tools()
        output = await unified.exec_command(["hang"], yield_time_ms=requested)
        assert output.wall_time == pytest.approx(given)
        assert output.session_id == 1
        await unified.aclose()

    run_in_virtual_time(scenario())


def test_the_end_between_calls_is_told_once_and_returned_by_the_next() -> None:
    async def scenario() -> None:
        unified, _, events = tools()
        await unified.exec_command("after 20")
        await asyncio.sleep(100)
        assert [event.exit_code for event in events if isinstance(event, ExecCommandEnd)] == [7]
        assert list(unified.sessions()) == [1]
        last = await unified.write_stdin(1, "too late\n")
        assert (last.exit_code, last.session_id, last.output, last.wall_time) == (7, None, "20 s\n", 0.0)
        assert sum(isinstance(event, ExecCommandEnd) for event in events) == 1
        assert not any(isinstance(event, TerminalInteraction) for event in events)
        (end,) = (event for event in events if isinstance(event, ExecCommandEnd))
        assert end.duration == pytest.approx(20)

    run_in_virtual_time(scenario())


def test_a_conversation_on_a_terminal() -> None:
    async def scenario() -> None:
        unified, fake, events = tools()
        first = await unified.exec_command("echo-lines", tty=True, yield_time_ms=250)
        assert first.session_id == 1
        assert (fake.started[0].tty, fake.started[0].size) == (True, TerminalSize())
        second = await unified.write_stdin(1, "hello\n")
        assert (second.output, second.session_id) == ("got hello\n", 1)
        last = await unified.write_stdin(1, "bye\n")
        assert (last.output, last.exit_code, last.wall_time) == ("got bye\n", 0, 0.0)
        typed = [event.stdin for event in events if isinstance(event, TerminalInteraction)]
        assert typed == ["hello\n", "bye\n"]

    run_in_virtual_time(scenario())


def test_a_command_on_pipes_takes_no_input() -> None:
    async def scenario() -> None:
        unified, _, _ = tools()
        await unified.exec_command(["hang"])
        with pytest.raises(StdinClosed, match="tty=true"):
            await unified.write_stdin(1, "x")
        assert list(unified.sessions()) == [1]
        await unified.terminate(1)
        assert (await unified.write_stdin(1)).exit_code == 143

    run_in_virtual_time(scenario())


async def test_output_is_bounded_with_an_exact_count() -> None:
    unified, _, events = tools()
    output = await unified.exec_command("say " + "a" * 700 + "b" * 700, max_output_bytes=100)
    assert output.output_bytes == b"a" * 50 + b"b" * 50
    assert (output.omitted_bytes, output.truncated) == (1300, True)
    assert "[... 1300 bytes omitted ...]" in output.output
    (end,) = (event for event in events if isinstance(event, ExecCommandEnd))
    assert len(end.transcript.output) == 1400
    with pytest.raises(InvalidParams, match="max_output_bytes"):
        await unified.exec_command("say x", max_output_bytes=1)


def test_half_a_character_waits_for_its_rest() -> None:
    async def halves(process: FakeProcess) -> int:
        process.stdout("é".encode()[:1])
        await process.sleep(1)
        process.stdout("é".encode()[1:])
        return 0

    async def scenario() -> None:
        events: list[UnifiedExecEvent] = []
        unified = UnifiedExec(Sandbox(FakeExec({"halves": halves})), on_event=events.append)
        assert (await unified.exec_command(["halves"], yield_time_ms=250)).output == ""
        assert (await unified.write_stdin(1, yield_time_ms=5_000)).output == "é"
        assert [event.text for event in events if isinstance(event, ExecCommandOutputDelta)] == ["", "é"]

    run_in_virtual_time(scenario())


def test_sessions_are_bounded_and_running_ones_are_never_dropped() -> None:
    async def scenario() -> None:
        unified, fake, _ = tools(max_sessions=2)
        await unified.exec_command(["hang"])
        await unified.exec_command(["hang"])
        with pytest.raises(LimitReached, match=r"max_sessions.*1, 2"):
            await unified.exec_command("say x")
        assert len(fake.started) == 2
        await unified.terminate(2)
        # Ended and never read: the room of the first ended one is taken.
        assert (await unified.exec_command("say x")).exit_code == 0
        assert list(unified.sessions()) == [1]
        await unified.aclose()

    run_in_virtual_time(scenario())


def test_leaving_the_block_ends_the_sessions() -> None:
    async def scenario() -> None:
        unified, fake, events = tools()
        async with unified:
            await unified.exec_command(["hang"])
            await unified.exec_command(["hang"])
        assert [fake.process(spec.process_id).signals for spec in fake.started] == [["TERM"], ["TERM"]]
        assert [event.signal for event in events if isinstance(event, ExecCommandEnd)] == ["SIGTERM", "SIGTERM"]

    run_in_virtual_time(scenario())


async def test_a_cancelled_call_leaves_a_session_that_is_watched() -> None:
    unified, fake, events = tools()
    calling = asyncio.create_task(unified.exec_command(["hang"]))
    process = await fake.wait_started()
    await process.until(lambda: process.printed["stdout"] > 0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert list(unified.sessions()) == [1]
    await unified.terminate(1)
    output = await unified.write_stdin(1)
    assert (output.output, output.exit_code) == ("up", 143)
    assert [type(event) for event in events] == [ExecCommandBegin, ExecCommandOutputDelta, ExecCommandEnd]


async def test_a_failed_start_is_no_session() -> None:
    unified, _, events = tools()
    with pytest.raises(CommandNotFound):
        await unified.exec_command(["nope"])
    assert events == []
    assert unified.sessions() == {}


async def test_listeners_may_be_coroutines_and_may_fail() -> None:
    heard: list[str] = []
    failures: list[dict[str, Any]] = []

    async def listener(event: UnifiedExecEvent) -> None:
        await asyncio.sleep(0)
        heard.append(type(event).__name__)
        if isinstance(event, ExecCommandOutputDelta):
            raise ValueError("broken listener")

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    unified = UnifiedExec(Sandbox(FakeExec({"direct": prints("text")})), on_event=listener)
    assert (await unified.exec_command(["direct"])).output == "text"
    assert heard == ["ExecCommandBegin", "ExecCommandOutputDelta", "ExecCommandEnd"]
    assert [str(context["exception"]) for context in failures] == ["broken listener"]


async def test_a_lost_sandbox_is_an_error_not_an_end() -> None:
    class Lost:
        def __aiter__(self) -> Lost:
            return self

        async def __anext__(self) -> Any:
            raise ConnectionLost("the connection is gone")

        async def aclose(self) -> None:
            pass

    class Losing(FakeExec):
        def events(self, process_id: str, *, after_seq: int = 0, window: int | None = None) -> Any:
            return Lost()

    events: list[UnifiedExecEvent] = []
    unified = UnifiedExec(Sandbox(Losing({"hang": hangs()})), on_event=events.append)
    with pytest.raises(ConnectionLost):
        await unified.exec_command(["hang"])
    assert [type(event) for event in events] == [ExecCommandBegin]
