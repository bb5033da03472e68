"""The PTY stub that users test with, through the public `Terminal`: prompts, positions, gaps, in virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from holdfast.client.sandbox import Sandbox
from holdfast.client.terminal import Terminal
from holdfast.errors import (
    CommandNotFound,
    DuplicateProcess,
    InvalidParams,
    InvalidRequest,
    TerminalClosed,
    TimeoutError,
    UnknownTerminal,
)
from holdfast.runtime.durability.records import TerminalCheckpoint
from holdfast.runtime.terminal.read_until import read_terminal
from holdfast.testing import (
    FakeClock,
    FakeCommand,
    FakeExec,
    FakeTerminal,
    PtyStub,
    answers,
    by_hand,
    cat,
    hangs,
    prints,
    run_in_virtual_time,
)
from holdfast.testing.fake_pty import NONCE, MemoryLog
from holdfast.types import ReadUntil, TerminalSize, TerminalSpec

Test = Callable[[FakeTerminal, Terminal], Coroutine[Any, Any, None]]


def driven(test: Test, *, spec: dict[str, Any] | None = None, **options: Any) -> None:
    """A test that does by hand what the program would."""

    async def main() -> None:
        fake = FakeExec(terminal_program=by_hand, **options)
        box = Sandbox(fake)
        try:
            terminal = await box.terminal(id="t", ready_timeout=0, **(spec or {}))
            await test(fake.terminal("t"), terminal)
        finally:
            await box.aclose()

    run_in_virtual_time(main())


def at_a_prompt(test: Callable[[FakeExec, Terminal], Coroutine[Any, Any, None]]) -> None:
    """A test with a terminal that has a shell with scripted commands."""

    async def ask(command: FakeCommand) -> int:
        command.stdout("name? ")
        name = await command.read_line()
        command.stdout(b"hello " + name)
        return 4

    async def slow(command: FakeCommand) -> int:
        await command.sleep(600)
        command.stdout("built\n")
        return 0

    async def main() -> None:
        fake = FakeExec(
            {"echo": prints("echoed\n"), "cat": cat},
            shell_commands={
                "make": slow,
                "ask": ask,
                "fail": answers("no\n", exit_code=3),
                "cd /src": answers(cwd="/src"),
                "leave": answers(exit_code=5, exits=True),
                "hang": hangs("up\n"),
                "stubborn": hangs("up\n", ignores=["INT", "TERM"]),
                "a\nb": answers("both\n"),
            },
        )
        box = Sandbox(fake)
        try:
            await test(fake, await box.terminal(id="t"))
        finally:
            await box.aclose()

    run_in_virtual_time(main())


# --- by hand ------------------------------------------------------------------------------------------------------


def test_prompts_are_detected_by_their_marks() -> None:
    async def test(stub: FakeTerminal, terminal: Terminal) -> None:
        assert (await terminal.describe()).state == "RUNNING"
        stub.shows_prompt("\x1b[32muser\x1b[m:~$ ")
        status = await terminal.wait_until_idle(1)
        assert (status.prompt, status.last_exit_code, status.awaiting_input) == ("user:~$ ", None, True)
        assert not status.canonical
        await terminal.send("make\r")
        stub.starts_command("make")
        assert (await terminal.describe()).state == "BUSY"
        stub.prints("built\r\n")
        stub.shows_prompt("$ ", exit_code=2)
        status = await terminal.wait_until_idle(1)
        assert (status.state, status.prompt, status.last_exit_code) == ("IDLE", "$ ", 2)
        assert stub.typed == [b"make\r"]
        types = [event.type for event in (await terminal.read()).events if event.type != "output"]
        shown = ["promptStart", "state", "prompt"]
        assert types == ["resize", *shown, "command", "state", "ended", *shown]

    driven(test)


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_prompt_that_comes_in_pieces_is_the_same(cut: int) -> None:
    async def test(stub: FakeTerminal, terminal: Terminal) -> None:
        data = b"hello\r\n" + stub.mark("D", 0) + stub.mark("A") + b"$ " + stub.mark("B")
        for piece in (data[:cut], data[cut : 2 * cut], data[2 * cut :]):
            if piece:
                stub.prints(piece)
        found = await terminal.read()
        assert b"".join(event.payload for event in found.events) == b"hello\r\n$ "
        assert (found.state, (await terminal.describe()).prompt) == ("IDLE", "$ ")

    driven(test)


def test_marks_of_others_are_output() -> None:
    async def test(stub: FakeTerminal, terminal: Terminal) -> None:
        forged = stub.mark("A").replace(NONCE.encode(), b"0" * 32) + b"\x1b]133;B\x07"
        stub.prints(forged)
        found = await terminal.read()
        assert (found.events[-1].payload, found.state) == (forged, "RUNNING")

    driven(test)


def test_what_may_become_a_mark_is_held_for_a_moment() -> None:
    async def test(stub: FakeTerminal, terminal: Terminal) -> None:
        stub.prints(b"text\x1b]13")
        assert (await terminal.read()).events[-1].payload == b"text"
        found = await terminal.read((await terminal.read()).token, wait=60)
        assert found.events[0].payload == b"\x1b]13"
        assert asyncio.get_running_loop().time() < 0.1

    driven(test)


def test_positions_grow_and_replay_is_exact_from_each() -> None:
    async def test(stub: FakeTerminal, terminal: Terminal) -> None:
        for number in range(5):
            stub.shows_prompt("$ ", exit_code=number)
            stub.starts_command(f"command {number}")
            stub.prints(f"line {number}\r\n")
            await terminal.resize(20 + number, 80)
        whole = await terminal.read()
        flat = [
            item for event in whole.events for item in (event.payload if event.type == "output" else [event.type])
        ]
        assert len(flat) == whole.token
        tokens = [event.token for event in whole.events]
        assert tokens == sorted(set(tokens))
        for since in range(whole.token + 1):
            rest = (await terminal.read(since)).events
            assert [i for e in rest for i in (e.payload if e.type == "output" else [e.type])] == flat[since:]

    driven(test)


def test_of_more_than_is_kept_the_middle_is_a_gap() -> None:
    async def test(stub: FakeTerminal, terminal: Terminal) -> None:
        stub.prints(b"0123456789" * 10)
        found = await terminal.read()
        kinds = [(event.type, event.payload, event.length) for event in found.events[1:]]
        assert kinds == [("output", b"0123456789", 0), ("gap", b"", 80), ("output", b"0123456789", 0)]
        assert (found.truncated, found.token) == (True, 101)
        inside = await terminal.read(50)
        assert [(event.type, event.length) for event in inside.events] == [("gap", 41), ("output", 0)]
        assert "no longer kept" in await terminal.recording()

    driven(test, retained_bytes=20)


def test_of_more_events_than_are_kept_the_first_are_a_gap() -> None:
    async def test(stub: FakeTerminal, terminal: Terminal) -> None:
        for _ in range(20):
            stub.shows_prompt()
            stub.starts_command()
        found = await terminal.read()
        assert (found.events[0].type, found.truncated) == ("gap", True)
        assert found.events[0].token == found.events[0].length
        assert found.token == (await terminal.describe()).token
        assert (await terminal.read(found.token - 1)).truncated is False

    driven(test, retained_events=16)


def test_times_are_those_of_the_clock() -> None:
    clock = FakeClock(5000.0)

    async def test(stub: FakeTerminal, terminal: Terminal) -> None:
        stub.prints("one")
        await clock.advance(60)
        stub.prints("two")
        stub.shows_prompt()
        events = (await terminal._api.read_terminal("t", timing=True)).events
        assert [(event.timestamp, event.payload) for event in events if event.type == "output"] == [
            (5000.0, b"one"),
            (5060.0, b"two"),
            (5060.0, b"$ "),
        ]
        assert {event.timestamp for event in events} == {5000.0, 5060.0}
        lines = (await terminal.recording()).splitlines()
        assert [json.loads(line)[0] for line in lines[1:]] == [0.0, 60.0, 60.0]

    driven(test, clock=clock.time)


def test_who_waits_for_input() -> None:
    async def test(stub: FakeTerminal, terminal: Terminal) -> None:
        assert (await terminal.describe()).awaiting_input is False
        waiting = asyncio.create_task(terminal.wait_until_awaiting_input(60))
        await asyncio.sleep(1)
        stub.prints("Password: ")
        stub.reads(echo=False, canonical=True)
        status = await waiting
        assert (status.awaiting_input, status.password_prompt) == (True, True)
        await terminal.send("secret\n")
        assert (await terminal.describe()).awaiting_input is False
        with pytest.raises(TimeoutError):
            await terminal.wait_until_awaiting_input(60)
        stub.reads()
        stub.input_queued = 100
        status = await terminal.describe()
        assert (status.awaiting_input, status.queue, status.input_queued) == (False, "busy", 100)

    driven(test)


def test_reading_the_status_starts_nothing() -> None:
    async def test(stub: FakeTerminal, terminal: Terminal) -> None:
        before = asyncio.all_tasks()
        assert (terminal.state, terminal.prompt, terminal.status.state) == ("RUNNING", None, "RUNNING")
        assert asyncio.all_tasks() == before

    driven(test)


def test_watched_properties_follow() -> None:
    async def test(stub: FakeTerminal, terminal: Terminal) -> None:
        assert terminal.status.state == "RUNNING"
        await terminal.watch()
        stub.shows_prompt("here> ")
        await asyncio.sleep(0.2)
        assert (terminal.state, terminal.prompt, terminal.awaiting_input) == ("IDLE", "here> ", True)
        stub.crashes("SEGV")
        await asyncio.sleep(0.2)
        assert terminal.status.reason == "/bin/bash was killed by SIGSEGV"

    driven(test)


def test_ends() -> None:
    async def exits(stub: FakeTerminal, terminal: Terminal) -> None:
        stub.prints("bye")
        stub.exits(3)
        status = await terminal.describe()
        assert (status.state, status.exit_code, status.reason) == ("CLOSED", 3, "/bin/bash ended with exit code 3")
        assert (await terminal.wait()).exit_code == 3
        assert (await terminal.read()).closed
        with pytest.raises(TerminalClosed):
            await terminal.wait_until_idle(1)
        assert [event.type async for event in terminal.events()][-1] == "state"

    async def crashes(stub: FakeTerminal, terminal: Terminal) -> None:
        waiting = asyncio.create_task(terminal.wait_until_idle(1))
        await asyncio.sleep(0)
        stub.crashes("SIGSEGV")
        with pytest.raises(TerminalClosed, match="SIGSEGV"):
            await waiting
        status = await terminal.describe()
        assert (status.state, status.signal, status.exit_code) == ("ERROR", "SIGSEGV", 139)

    driven(exits)
    driven(crashes)


def test_run_is_the_real_one() -> None:
    async def test(stub: FakeTerminal, terminal: Terminal) -> None:
        def answer(line: bytes) -> None:
            stub.starts_command(line)
            stub.prints(b"ran " + line + b"\r\n")
            stub.shows_prompt(exit_code=len(line))

        stub.shows_prompt()
        stub.on_line = answer
        result = await terminal.run("make it")
        assert (result.output, result.exit_code, result.state) == ("ran make it\n", 7, "IDLE")
        stub.on_line = lambda line: stub.shows_continuation()
        with pytest.raises(InvalidRequest, match="not complete"):
            await terminal.run("echo '")
        assert stub.typed[-1] == b"\x03"
        stub.shows_prompt(exit_code=130)
        stub.on_line = lambda line: stub.exits(9)
        result = await terminal.run("exit 9")
        assert (result.exit_code, result.state) == (9, "CLOSED")

    driven(test)


def earlier_memory(stub: FakeTerminal, **known: Any) -> TerminalCheckpoint:
    """A record of an earlier version."""
    return msgspec.structs.replace(stub.live._saved_state(1), **known)


def test_a_continuation_prompt_that_an_earlier_version_took_for_a_prompt() -> None:
    async def test(stub: FakeTerminal, terminal: Terminal) -> None:
        stub.shows_prompt()
        stub.live.attach_again(stub.live.process, earlier_memory(stub, continued=True))
        stub.reads()
        status = await terminal.describe()
        assert (status.state, status.continuation) == ("BUSY", True)
        stub.starts_command(b"'")
        assert not (await terminal.describe()).continuation
        stub.shows_prompt()
        assert (await terminal.wait_until_idle(1)).state == "IDLE"

    driven(test)


def test_a_command_after_a_continuation_prompt_of_an_earlier_version_runs() -> None:
    async def test(stub: FakeTerminal, terminal: Terminal) -> None:
        stub.shows_prompt()
        stub.starts_command(b"sleep 10")
        stub.live.attach_again(stub.live.process, earlier_memory(stub, continued=True, command_runs=True))
        status = await terminal.describe()
        assert (status.state, status.continuation) == ("BUSY", False)

    driven(test)


def test_every_change_of_the_continuation_flag_is_told() -> None:
    async def test(stub: FakeTerminal, terminal: Terminal) -> None:
        stub.shows_prompt()
        seen = [await terminal.describe()]
        for step in (stub.shows_continuation, stub.starts_command, stub.shows_prompt):
            step()
            seen.append(await terminal.describe())
        assert [status.continuation for status in seen] == [False, True, False, False]
        assert [status.state for status in seen] == ["IDLE", "BUSY", "BUSY", "IDLE"]
        changes = [status.changes for status in seen]
        assert changes == sorted(set(changes))

    driven(test)


def test_the_directory_of_a_prompt_that_was_gone_on_from_is_not_told() -> None:
    async def test(stub: FakeTerminal, terminal: Terminal) -> None:
        prompt = stub.mark("D", 0) + stub.mark("A") + b"$ " + stub.mark("B")
        stub.prints(prompt + b"cd there\r\n" + stub.mark("C") + prompt)
        prompts = [event.cwd for event in (await terminal.read()).events if event.type == "prompt"]
        assert prompts == [None, stub.cwd]

    driven(test)


def test_what_is_typed_is_recorded_and_told_if_wanted() -> None:
    async def test(stub: FakeTerminal, terminal: Terminal) -> None:
        await terminal.send("one")
        stub.reads(echo=False, canonical=True)
        await terminal.send("secret\n")
        stub.reads(echo=True)
        await terminal.send_keys("Up", "Enter")
        typed = [event.payload for event in (await terminal.read()).events if event.type == "input"]
        assert typed == [b"one", b"\x1b[A\r"]
        assert stub.input == b"onesecret\n\x1b[A\r"

    driven(test, spec={"record_input": True})


def test_sizes_and_signals() -> None:
    async def test(stub: FakeTerminal, terminal: Terminal) -> None:
        await terminal.resize(50, 132)
        assert stub.size == TerminalSize(50, 132)
        assert (await terminal.read()).events[-1].size == TerminalSize(50, 132)
        stub.ignores.add("TERM")
        await terminal.control("SIGTERM")
        assert (stub.signals, (await terminal.describe()).state) == (["TERM"], "RUNNING")
        await terminal.signal("KILL")
        assert (await terminal.describe()).state == "ERROR"

    driven(test)


def test_a_screen_is_drawn_from_it() -> None:
    async def test(stub: FakeTerminal, terminal: Terminal) -> None:
        stub.prints("a\r\n\x1b[1mbold\x1b[m")
        screen = await terminal.screen()
        assert (screen.lines[:2], screen.cursor) == (("a", "bold"), (1, 4))
        stub.prints("\x1b[?1049h\x1b[H\x1b[2Jfull")
        screen = await terminal.screen()
        assert (screen.alternate, screen.lines[0]) == (True, "full")
        assert (await terminal.describe()).alternate_screen

    driven(test)


def test_it_can_be_used_by_itself() -> None:
    async def main() -> None:
        stub = PtyStub()
        stub.shows_prompt("> ")
        found = stub.read_after(0, 1000)
        assert (found.state, stub.describe().prompt) == ("IDLE", "> ")
        stub.exits()
        assert stub.describe().state == "CLOSED"

    run_in_virtual_time(main())


# --- at a prompt --------------------------------------------------------------------------------------------------


def test_commands_run_at_the_prompt() -> None:
    async def test(fake: FakeExec, terminal: Terminal) -> None:
        assert (terminal.state, terminal.prompt) == ("IDLE", "$ ")
        for command, output, code in (
            ("echo anything", "echoed\n", 0),
            ("fail", "no\n", 3),
            ("nosuch", "nosuch: command not found\n", 127),
            ("a\nb", "both\n", 0),
        ):
            result = await terminal.run(command)
            assert (result.output, result.exit_code, result.state) == (output, code, "IDLE")
        await terminal.run("cd /src")
        assert (await terminal.describe()).cwd == "/src"
        started = asyncio.get_running_loop().time()
        result = await terminal.run("make")
        assert (result.output, result.exit_code) == ("built\n", 0)
        assert asyncio.get_running_loop().time() - started == pytest.approx(600, abs=1)
        result = await terminal.run("leave")
        assert (result.exit_code, result.state) == (5, "CLOSED")

    at_a_prompt(test)


def test_a_command_asks_and_is_answered() -> None:
    async def test(fake: FakeExec, terminal: Terminal) -> None:
        await terminal.send("ask\r")
        await terminal.wait_until_awaiting_input(1)
        assert (await terminal.describe()).state == "BUSY"
        await terminal.send("you\r")
        assert (await terminal.wait_until_idle(1)).last_exit_code == 4
        assert "hello you" in (await terminal.screen()).lines

    at_a_prompt(test)


def test_a_command_that_does_not_end() -> None:
    async def test(fake: FakeExec, terminal: Terminal) -> None:
        for command in ("hang", "stubborn"):
            result = await terminal.run(command, timeout=60)
            assert (result.exit_code, result.timed_out, result.state) == (124, True, "IDLE"), command
            assert result.output.startswith("up\n")
        running = asyncio.create_task(terminal.run("hang"))
        await asyncio.sleep(1)
        await terminal.send_keys("C-c")
        assert (await running).exit_code == 130
        running = asyncio.create_task(terminal.run("hang"))
        await asyncio.sleep(1)
        running.cancel()
        await asyncio.wait([running])
        assert (await terminal.wait_until_idle(1)).last_exit_code == 130

    at_a_prompt(test)


def test_an_open_quote_is_refused() -> None:
    async def test(fake: FakeExec, terminal: Terminal) -> None:
        with pytest.raises(InvalidRequest, match="not complete"):
            await terminal.run("echo 'open")
        assert (await terminal.run("echo on")).output == "echoed\n"
        await terminal.send("half a line")
        assert (await terminal.run("echo on")).output == "echoed\n"

    at_a_prompt(test)


@pytest.mark.parametrize("mode", ["graceful", "force"])
@pytest.mark.parametrize("busy", [False, True])
def test_closing(mode: str, busy: bool) -> None:
    async def test(fake: FakeExec, terminal: Terminal) -> None:
        if busy:
            await terminal.send("hang\r")
            await asyncio.sleep(1)
        status = await terminal.close(mode)  # type: ignore[arg-type]
        assert status.state == "CLOSED"
        assert (await terminal.close()).state == "CLOSED"
        with pytest.raises(TerminalClosed):
            await terminal.run("echo on")

    at_a_prompt(test)


def test_ids_and_programs() -> None:
    async def test(fake: FakeExec, terminal: Terminal) -> None:
        box = Sandbox(fake)
        with pytest.raises(DuplicateProcess):
            await box.terminal(id="t")
        with pytest.raises(UnknownTerminal):
            await box.open_terminal("u")
        with pytest.raises(CommandNotFound):
            await box.terminal(["nosuch"])
        with pytest.raises(InvalidParams):
            await terminal.read(-1)
        program = await box.terminal(["cat"], id="c")
        await program.send("word\n")
        await program.wait_until_awaiting_input(1)
        assert "word" in (await program.screen()).text
        with pytest.raises(InvalidRequest, match="does not mark"):
            await program.run("true")
        assert [each.id for each in await box.terminals()] == ["t", "c"]
        spec = TerminalSpec("again", start_id="s")
        assert (await fake.open_terminal(spec)).pid == (await fake.open_terminal(spec)).pid

    at_a_prompt(test)


def test_the_log_keeps_its_head_and_its_tail() -> None:
    log = MemoryLog(10)
    for piece in (b"abc", b"defg", b"hij"):
        log.append(piece)
    assert (log.read(0, 10), log.read(3, 4), log.lost_start, log.lost_end) == (b"abcdefghij", b"defg", 0, 0)
    log.append(b"klm")
    assert (log.end, log.lost_start, log.lost_end) == (13, 5, 8)
    assert (log.read(0, 13), log.read(5, 8), log.read(8, 5), log.read(9, 2)) == (b"abcde", b"", b"ijklm", b"jk")
    assert log.tail(0, 13, 100) == (b"abcdeijklm", True)
    assert log.tail(9, 13, 2) == (b"lm", True)
    assert log.tail(9, 13, 4) == (b"jklm", False)


async def test_a_text_is_found_on_both_sides_of_a_gap() -> None:
    stub = FakeTerminal(retained_bytes=40)
    stub.prints("first" + "." * 100 + "last")
    for text, reached in (("first", "text"), ("last", "text"), ("t...l", None), ("....last", "text")):
        found = await read_terminal(stub.live, 0, 1000, 0.0, until=ReadUntil(text=text))
        assert found.outcome is not None
        assert (text, found.outcome.reached) == (text, reached)
