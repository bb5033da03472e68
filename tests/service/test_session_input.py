"""Input of callers: in their order, together, judged by the rules, and written down before it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from holdfast.service.api import Control, CreateRequest, RunRequest
from holdfast.service.problems import Denied, Invalid, NotNow, TooLate
from holdfast.service.sessions.manager import SessionManager
from holdfast.service.types import Kind
from holdfast.testing import FakeClock, FakeExec, FakeTerminal, answers, by_hand
from holdfast.testing.clock import settle
from tests.service.fakes import ANN, MemoryStore, connecting, make_manager, running

GUARDED = """
[[profiles.default.commands.rules]]
verdict = "deny"
program = ["rm"]
reason = "nothing is removed here"
"""
#: Typed before the first input after an interrupt: the line is deleted, and an empty one entered.
NEW_LINE = b"\x05\x15\r"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> MemoryStore:
    return MemoryStore(clock)


@pytest.fixture
async def fake() -> FakeExec:
    return FakeExec(terminal_program=by_hand)


@pytest.fixture
async def manager(store: MemoryStore, fake: FakeExec, clock: FakeClock) -> AsyncIterator[SessionManager]:
    made = make_manager(store, connecting(fake), clock=clock, text=GUARDED, prompt_seconds=0, input_seconds=0.2)
    async with running(made) as manager:
        yield manager


async def at_a_prompt(manager: SessionManager, fake: FakeExec) -> tuple[str, FakeTerminal]:
    session_id = (await manager.create(ANN, CreateRequest())).view.record.session_id
    stub = fake.terminal(session_id)
    stub.shows_prompt("$ ")
    return session_id, stub


async def test_ordering_what_one_call_sends_stays_together_and_calls_keep_their_order(
    manager: SessionManager, fake: FakeExec
) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    pieces = [b"echo %d " % number * 20 + b"\n" for number in range(20)]
    await asyncio.gather(*(manager.send_input(ANN, session_id, piece) for piece in pieces))
    assert stub.typed == pieces


async def test_concurrent_callers_are_written_down_in_the_order_in_which_they_typed(
    manager: SessionManager, fake: FakeExec, store: MemoryStore
) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    taken = await asyncio.gather(*(manager.send_input(ANN, session_id, b"echo %d\n" % n) for n in range(9)))
    assert [body["text"].encode() for body in store.bodies(session_id, "input")] == stub.typed
    rows = [row.command_id for row in store.log if row.kind == "input"]
    assert sorted(rows) == sorted(each.command_id for each in taken)


async def test_partial_writes_one_line_may_come_in_pieces(manager: SessionManager, fake: FakeExec) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    for piece in (b"ec", b"ho ", b"one\n"):
        await manager.send_input(ANN, session_id, piece)
    assert stub.typed == [b"ec", b"ho ", b"one\n"]


async def test_a_command_that_the_rules_deny_is_not_typed_whatever_pieces_it_comes_in(
    manager: SessionManager, fake: FakeExec, store: MemoryStore
) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    await manager.send_input(ANN, session_id, b"r")
    await manager.send_input(ANN, session_id, b"m -rf x")
    with pytest.raises(Denied, match="nothing is removed here") as refused:
        await manager.send_input(ANN, session_id, b"\n")
    assert (refused.value.reason, refused.value.details["rule"].startswith("rules.toml:")) == (
        "POLICY_DENIED",
        True,
    )
    assert stub.typed == [b"r", b"m -rf x"]
    assert [body["verdict"] for body in store.bodies(session_id, "decision")] == ["deny"]
    assert store.events(session_id)[-1] == "POLICY_VIOLATION"
    # The line is as it was: Ctrl-C gives it up.
    await manager.send_input(ANN, session_id, b"", [Control("CTRL_C")])
    await manager.send_input(ANN, session_id, b"true\n")
    assert stub.typed[-2:] == [b"\x03", NEW_LINE + b"true\n"]


async def test_a_denied_line_that_is_no_utf_8_is_refused_and_written_down(
    manager: SessionManager, fake: FakeExec, store: MemoryStore
) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    with pytest.raises(Denied, match="nothing is removed"):
        await manager.send_input(ANN, session_id, b"rm \xff\n")
    assert (store.bodies(session_id, "decision")[0]["command"], stub.typed) == (r"rm \xff", [])


async def test_keys_whose_effect_only_the_shell_knows_are_refused(manager: SessionManager, fake: FakeExec) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    with pytest.raises(Denied, match="content of the line is unknown"):
        await manager.send_input(ANN, session_id, b"\x1b[A\n")
    assert stub.typed == []


async def test_input_for_a_program_is_no_command_but_what_follows_it_may_be(
    manager: SessionManager, fake: FakeExec
) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    await manager.send_input(ANN, session_id, b"python3 -i\n")
    stub.starts_command(b"python3 -i")
    stub.prints(">>> ")
    stub.reads()
    await manager.send_input(ANN, session_id, b"rm = 1\n")
    stub.reads()
    for escape in (b"exit()\nrm -rf x\n", b"\x04rm -rf x\n"):
        with pytest.raises(Denied):
            await manager.send_input(ANN, session_id, escape)
        stub.reads()
    assert stub.typed[1:] == [b"rm = 1\n"]


async def test_what_is_typed_ahead_is_judged_as_the_command_that_it_becomes(
    manager: SessionManager, fake: FakeExec
) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    await manager.send_input(ANN, session_id, b"sleep 10\n")
    stub.starts_command(b"sleep 10")
    with pytest.raises(Denied):
        await manager.send_input(ANN, session_id, b"rm -rf x\n")
    await manager.send_input(ANN, session_id, b"true\n")
    assert stub.typed == [b"sleep 10\n", b"true\n"]


async def test_a_line_that_another_replica_began_is_not_guessed(
    store: MemoryStore, fake: FakeExec, clock: FakeClock, manager: SessionManager
) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    other = make_manager(store, connecting(fake), clock=clock, text=GUARDED, replica="other")
    async with running(other):
        await other.send_input(ANN, session_id, b"r")
        with pytest.raises(Denied, match="another replica") as refused:
            await manager.send_input(ANN, session_id, b"m x\n")
        assert refused.value.reason == "LINE_UNKNOWN"
        await manager.send_input(ANN, session_id, b"", [Control("CTRL_C")])
        await manager.send_input(ANN, session_id, b"true\n")
    assert stub.typed == [b"r", b"\x03", NEW_LINE + b"true\n"]


async def test_a_command_that_waits_to_be_typed_does_not_hide_what_stands_on_the_line(
    manager: SessionManager, fake: FakeExec
) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    await manager.send_input(ANN, session_id, b"sleep 10\n")
    stub.starts_command(b"sleep 10")
    await manager.send_input(ANN, session_id, b"rm -rf x")
    run = asyncio.create_task(manager.run_command(ANN, RunRequest("true", session_id, timeout=1)))
    await settle()
    with pytest.raises(NotNow, match="a command runs"):
        await manager.send_input(ANN, session_id, b"\n")
    await manager.send_input(ANN, session_id, b"", [Control("CTRL_C")])
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    assert stub.typed == [b"sleep 10\n", b"rm -rf x", b"\x03"]


async def test_a_command_that_was_not_typed_leaves_the_line_as_it_was(
    manager: SessionManager, fake: FakeExec
) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    await manager.send_input(ANN, session_id, b"sleep 10\n")
    stub.starts_command(b"sleep 10")
    await manager.send_input(ANN, session_id, b"rm -rf x")
    run = asyncio.create_task(manager.run_command(ANN, RunRequest("true", session_id, timeout=1)))
    await settle()
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    with pytest.raises(Denied, match="content of the line is unknown"):
        await manager.send_input(ANN, session_id, b"\n")
    assert stub.typed == [b"sleep 10\n", b"rm -rf x"]


async def test_the_name_of_an_earlier_request_lets_nothing_through(manager: SessionManager, fake: FakeExec) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    await manager.send_input(ANN, session_id, b"echo rm -rf x\n", request_id="r1")
    with pytest.raises(Denied, match="nothing is removed"):
        await manager.send_input(ANN, session_id, b"rm -rf x\n", request_id="r1")
    # Its terminal may have forgotten the first, and type it.
    await manager.send_input(ANN, session_id, b"rm -rf x", request_id="r1")
    with pytest.raises(Denied, match="content of the line is unknown"):
        await manager.send_input(ANN, session_id, b"\n")
    assert stub.typed == [b"echo rm -rf x\n"]


async def test_a_password_is_not_written_down(manager: SessionManager, fake: FakeExec, store: MemoryStore) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    stub.starts_command(b"sudo x")
    stub.prints("Password: ")
    stub.reads(echo=False, canonical=True)
    found = await manager.read_output(ANN, session_id, wait=1)
    prompt = found.chunks[-1].prompt
    assert prompt is not None
    assert (prompt.text, prompt.password) == ("Password: ", True)
    await manager.send_input(ANN, session_id, b"hunter2\n")
    (body,) = store.bodies(session_id, "input")
    assert (body["hidden"], body["bytes"]) == (True, 8)
    assert not any("hunter2" in row.body for row in store.log)


async def test_the_same_request_is_typed_once(manager: SessionManager, fake: FakeExec, store: MemoryStore) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    one = await manager.send_input(ANN, session_id, b"make\n", request_id="r1")
    two = await manager.send_input(ANN, session_id, b"make\n", request_id="r1")
    assert one.command_id == two.command_id
    assert (stub.typed, len(store.bodies(session_id, "input"))) == ([b"make\n"], 1)


async def test_the_queue_is_busy_while_the_terminal_has_not_taken_input(
    manager: SessionManager, fake: FakeExec
) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    assert not (await manager.send_input(ANN, session_id, b"a")).queue_busy
    stub.input_queued = 10
    assert (await manager.send_input(ANN, session_id, b"b")).queue_busy


async def test_a_program_that_takes_no_input_does_not_hold_its_caller_for_ever_and_signals_overtake(
    store: MemoryStore, clock: FakeClock
) -> None:
    class Full(FakeExec):
        async def write(self, *args: object, **more: object) -> None:
            await asyncio.get_running_loop().create_future()

    fake = Full(terminal_program=by_hand)
    made = make_manager(store, connecting(fake), clock=clock, prompt_seconds=0, input_seconds=0.2)
    async with running(made) as manager:
        session_id, stub = await at_a_prompt(manager, fake)
        stuck = asyncio.ensure_future(manager.send_input(ANN, session_id, b"x" * 100))
        await settle()
        taken = await manager.send_input(ANN, session_id, b"", [Control("SIGTERM")])
        assert (taken.accepted, stub.signals) == (True, ["TERM"])
        with pytest.raises(TooLate) as refused:
            await stuck
        assert refused.value.reason == "INPUT_NOT_TAKEN"


async def test_input_above_the_setting_is_refused(manager: SessionManager, fake: FakeExec) -> None:
    session_id, _ = await at_a_prompt(manager, fake)
    with pytest.raises(Invalid) as refused:
        await manager.send_input(ANN, session_id, b"x" * (1024 * 1024 + 1))
    assert refused.value.reason == "INPUT_TOO_LARGE"


async def test_a_signal_that_the_profile_does_not_allow_is_refused(store: MemoryStore, fake: FakeExec) -> None:
    rules = '[profiles.default.signals]\nallow = ["CTRL_C"]\n'
    async with running(make_manager(store, connecting(fake), text=rules, prompt_seconds=0)) as manager:
        session_id, stub = await at_a_prompt(manager, fake)
        with pytest.raises(Denied):
            await manager.send_input(ANN, session_id, b"", [Control("SIGKILL")])
        assert stub.signals == []


async def test_run_command_is_judged_and_written_down(store: MemoryStore, clock: FakeClock) -> None:
    fake = FakeExec(shell_commands={"make": answers("built\n", exit_code=2)})
    async with running(make_manager(store, connecting(fake), clock=clock, text=GUARDED)) as manager:
        kinds: list[tuple[Kind, bytes]] = [("terminal", b"built\r\n"), ("shell", b"built\n")]
        for kind, printed in kinds:
            session_id = (await manager.create(ANN, CreateRequest(kind=kind))).view.record.session_id
            ran = await manager.run_command(ANN, RunRequest("make", session_id))
            assert (ran.stdout, ran.exit_code) == (printed, 2)
            with pytest.raises(Denied):
                await manager.run_command(ANN, RunRequest("cd /; env X=1 rm -rf x", session_id))
            await settle()
            (body,) = store.bodies(session_id, "command")
            assert body["text"] == "make"
            (ended,) = store.bodies(session_id, "command_ended")
            assert (ended["exit_code"], ended["output"].strip()) == (2, "built")
            ids = {row.command_id for row in store.log if row.session_id == session_id and "command" in row.kind}
            assert ids == {ran.command_id}


async def test_run_command_by_the_name_of_an_earlier_request_is_judged_as_well(
    store: MemoryStore, clock: FakeClock
) -> None:
    fake = FakeExec(shell_commands={"make": answers("built\n"), "deploy now": answers("deployed\n")})
    rules = GUARDED + '[[profiles.default.commands.rules]]\nverdict = "ask"\nprogram = ["deploy"]\n'
    async with running(make_manager(store, connecting(fake), clock=clock, text=rules)) as manager:
        session_id = (await manager.create(ANN, CreateRequest(kind="shell"))).view.record.session_id
        for _ in range(2):
            ran = await manager.run_command(ANN, RunRequest("make", session_id, request_id="r1"))
            assert ran.stdout == b"built\n"
        with pytest.raises(Denied, match="nothing is removed"):
            await manager.run_command(ANN, RunRequest("rm -rf x", session_id, request_id="r1"))
        with pytest.raises(Invalid, match="another command"):
            await manager.run_command(ANN, RunRequest("deploy now", session_id, request_id="r1"))


async def test_a_shell_has_no_keys_and_no_size(store: MemoryStore, fake: FakeExec) -> None:
    async with running(make_manager(store, connecting(fake))) as manager:
        session_id = (await manager.create(ANN, CreateRequest(kind="shell"))).view.record.session_id
        for control in (Control("RESIZE", 80, 24), Control("CTRL_D")):
            with pytest.raises(Invalid, match="for a terminal"):
                await manager.send_input(ANN, session_id, b"", [control])
        with pytest.raises(Invalid, match="UTF-8"):
            await manager.send_input(ANN, session_id, b"\xff\n")
        assert "command" not in store.kinds(session_id)


async def test_a_line_at_a_continuation_prompt_is_judged_with_those_before_it(
    manager: SessionManager, fake: FakeExec, store: MemoryStore
) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    await manager.send_input(ANN, session_id, b"echo 'a\n")
    stub.prints("echo 'a\r\n")
    stub.shows_continuation("> ")
    with pytest.raises(Denied, match="nothing is removed here"):
        await manager.send_input(ANN, session_id, b"b'; rm -rf x\n")
    assert stub.typed == [b"echo 'a\n"]
    assert store.bodies(session_id, "decision")[0]["command"] == "echo 'a\nb'; rm -rf x"
    taken = await manager.send_input(ANN, session_id, b"rm -rf x'\n")  # text in quotes
    assert (taken.accepted, stub.typed[1:]) == (True, [b"rm -rf x'\n"])


async def test_a_continuation_prompt_is_told_once_and_the_session_is_not_idle(
    manager: SessionManager, fake: FakeExec
) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    await manager.send_input(ANN, session_id, b"echo 'a\n")
    stub.prints("echo 'a\r\n")
    stub.shows_continuation("> ")
    reported = await manager.read_output(ANN, session_id)
    assert reported.state == "BUSY"
    last = reported.chunks[-1]
    assert last.prompt is not None
    assert (last.prompt.awaiting_input, last.state) == (True, "BUSY")
    again = await manager.read_output(ANN, session_id, since=reported.token, wait=0.05)
    assert (again.chunks, again.state) == ((), "BUSY")


async def test_the_rest_of_a_command_that_is_not_known_is_refused(manager: SessionManager, fake: FakeExec) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    await manager.send_input(ANN, session_id, b"true\n")
    stub.shows_continuation("> ")  # the shell reads it differently
    with pytest.raises(Denied, match="CTRL_C first") as refused:
        await manager.send_input(ANN, session_id, b"ls\n")
    assert refused.value.reason == "LINE_UNKNOWN"
    await manager.send_input(ANN, session_id, b"", [Control("CTRL_C")])
    stub.shows_prompt(exit_code=130)
    await manager.send_input(ANN, session_id, b"ls\n")
    assert stub.typed == [b"true\n", b"\x03", NEW_LINE + b"ls\n"]


async def test_a_command_that_is_run_at_a_continuation_prompt_gives_up_what_stands_there(
    manager: SessionManager, fake: FakeExec
) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    await manager.send_input(ANN, session_id, b"echo 'a\n")
    stub.shows_continuation("> ")
    with pytest.raises(Denied, match="nothing is removed here"):
        await manager.run_command(ANN, RunRequest("rm -rf x", session_id))
    run = asyncio.create_task(manager.run_command(ANN, RunRequest("true", session_id, timeout=10)))
    async with asyncio.timeout(10):
        await stub.until(lambda: stub.typed[-1] == b"\x03")
        stub.shows_prompt(exit_code=130)
        await stub.until(lambda: stub.typed[-1] == b"true\r")
        stub.starts_command(b"true")
        stub.shows_prompt(exit_code=0)
        result = await run
    assert (result.exit_code, result.state) == (0, "IDLE")
    await manager.send_input(ANN, session_id, b"b'\n")  # a command of its own again, and not the end of the first
    assert [each for each in stub.typed[1:] if each != b"\x03"] == [b"true\r", b"b'\n"]
