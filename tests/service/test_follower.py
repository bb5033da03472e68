"""Records of followers: commands with their ids, ends and excerpts, once, whichever replica follows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from holdfast.service.api import CreateRequest
from holdfast.service.positions import read_token
from holdfast.service.problems import Unavailable
from holdfast.service.sessions.following.terminal import TypeAhead, TypedInput
from holdfast.service.sessions.manager import SessionManager
from holdfast.testing import FakeClock, FakeExec, FakeTerminal, by_hand
from holdfast.testing.clock import settle
from tests.service.fakes import ANN, MemoryStore, connecting, make_manager, running


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
    made = make_manager(store, connecting(fake), clock=clock, prompt_seconds=0, audit_excerpt_bytes=10)
    async with running(made) as manager:
        yield manager


async def at_a_prompt(manager: SessionManager, fake: FakeExec) -> tuple[str, FakeTerminal]:
    session_id = (await manager.create(ANN, CreateRequest())).view.record.session_id
    stub = fake.terminal(session_id)
    stub.shows_prompt("$ ")
    await settle()
    return session_id, stub


async def test_a_command_has_rows_with_its_id_its_tokens_its_exit_code_and_an_excerpt(
    manager: SessionManager, fake: FakeExec, store: MemoryStore
) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    taken = await manager.send_input(ANN, session_id, b"make\n")
    stub.starts_command("make")
    stub.prints("0123456789 and more")
    stub.shows_prompt("$ ", exit_code=2)
    await settle()
    assert store.kinds(session_id)[2:] == ["input", "command_started", "command_ended"]
    assert {row.command_id for row in store.log[-3:]} == {taken.command_id}
    (ended,) = store.bodies(session_id, "command_ended")
    assert (ended["exit_code"], ended["output"], ended["output_bytes"], ended["cut"]) == (2, "0123456789", 19, True)
    start, end = (read_token(session_id, ended[name]) for name in ("start", "end"))
    assert end.printed - start.printed == 19
    again = await manager.read_output(ANN, session_id, since=ended["start"], max_bytes=19)
    assert again.chunks[0].payload == b"0123456789 and more"


async def test_a_session_at_a_continuation_prompt_is_not_busy_for_who_follows_it_anew(
    store: MemoryStore, fake: FakeExec, clock: FakeClock
) -> None:
    first = make_manager(store, connecting(fake), clock=clock, prompt_seconds=0)
    async with running(first) as manager:
        session_id, stub = await at_a_prompt(manager, fake)
        stub.shows_continuation("> ")
        await settle()
    second = make_manager(store, connecting(fake), clock=clock, prompt_seconds=0, replica="second")
    async with running(second) as manager:
        await manager.send_input(ANN, session_id, b"x")
        await settle()
        (follower,) = manager.leases.followers()
        # Otherwise it would never be closed for want of use.
        assert not follower.busy


async def test_what_the_excerpt_shows_is_redacted(store: MemoryStore, fake: FakeExec, clock: FakeClock) -> None:
    made = make_manager(store, connecting(fake), clock=clock, prompt_seconds=0)
    made.leases._context = msgspec.structs.replace(
        made.leases._context, redact=lambda text: text.replace("hunter2", "[redacted]")
    )
    async with running(made) as manager:
        session_id, stub = await at_a_prompt(manager, fake)
        stub.starts_command("env")
        stub.prints("password=hunter2\r\n")
        stub.shows_prompt("$ ")
        await settle()
        (ended,) = store.bodies(session_id, "command_ended")
        assert ended["output"] == "password=[redacted]\r\n"


async def test_a_crash_is_an_error_row_and_a_state(
    manager: SessionManager, fake: FakeExec, store: MemoryStore
) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    stub.starts_command("make")
    stub.crashes("SEGV")
    await settle()
    assert store.kinds(session_id)[-5:] == ["command_started", "command_ended", "error", "session_closed", "event"]
    record = store.records[session_id]
    assert (record.state, record.close_reason) == ("ERROR", "crashed")
    assert store.events(session_id)[-1] == "SESSION_ERROR"


async def test_an_exit_that_was_typed_is_the_end_and_no_error(
    manager: SessionManager, fake: FakeExec, store: MemoryStore
) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    stub.exits(3)
    await settle()
    record = store.records[session_id]
    assert (record.state, record.close_reason) == ("CLOSED", "exited")
    assert store.kinds(session_id)[-2:] == ["session_closed", "event"]


async def test_another_replica_goes_on_from_the_last_token_and_nothing_is_lost_or_doubled(
    store: MemoryStore, fake: FakeExec, clock: FakeClock
) -> None:
    def make(replica: str) -> SessionManager:
        return make_manager(store, connecting(fake), clock=clock, prompt_seconds=0, replica=replica)

    async with running(make("one")) as first:
        session_id, stub = await at_a_prompt(first, fake)
        one = await first.send_input(ANN, session_id, b"one\n")
        stub.starts_command("one")
        stub.prints("early ")
        await settle()
    # No replica follows now.
    stub.prints("late")
    stub.shows_prompt("$ ", exit_code=1)
    stub.starts_command("somebody else's")
    stub.shows_prompt("$ ", exit_code=5)
    async with running(make("two")) as second:
        await settle()
        two = await second.send_input(ANN, session_id, b"two\n")
        stub.starts_command("two")
        stub.shows_prompt("$ ", exit_code=2)
        await settle()
    rows = [row for row in store.log if row.kind in ("command_started", "command_ended")]
    assert [row.kind for row in rows] == ["command_started", "command_ended"] * 3
    bodies = store.bodies(session_id, "command_ended")
    assert [(body["number"], body["exit_code"], body["output"]) for body in bodies] == [
        (1, 1, "early late"),
        (2, 5, ""),
        (3, 2, ""),
    ]
    assert [row.command_id for row in rows[::2]] == [one.command_id, "", two.command_id]


async def test_a_follower_whose_lease_is_anothers_writes_nothing(
    manager: SessionManager, fake: FakeExec, store: MemoryStore, clock: FakeClock
) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    await store.release(manager.replica)
    await store.claim("other", 60, 10)
    stub.starts_command("make")
    await settle()
    assert "command_started" not in store.kinds(session_id)
    assert len(manager.leases) == 0


async def test_a_database_that_comes_back_gets_the_rows_it_missed(
    manager: SessionManager, fake: FakeExec, store: MemoryStore
) -> None:
    session_id, stub = await at_a_prompt(manager, fake)
    store.failures += [Unavailable("away", reason="STORE_UNAVAILABLE")] * 2
    stub.starts_command("make")
    stub.shows_prompt("$ ", exit_code=4)
    await store.until(lambda: "command_ended" in store.kinds(session_id))
    assert [kind for kind in store.kinds(session_id) if "command" in kind] == ["command_started", "command_ended"]


async def test_an_idle_session_costs_one_waiting_read(
    manager: SessionManager, fake: FakeExec, clock: FakeClock
) -> None:
    before = len(asyncio.all_tasks())
    reads = 0
    real = fake.read_terminal

    async def counted(*args: object, **more: object) -> object:
        nonlocal reads
        reads += 1
        return await real(*args, **more)  # type: ignore[arg-type]

    fake.read_terminal = counted  # type: ignore[method-assign, assignment]
    for _ in range(20):
        await at_a_prompt(manager, fake)
    await settle(100)
    await clock.advance(2)
    during = reads
    await clock.advance(1000)
    assert reads == during
    # Its follower, and its fake program.
    assert len(asyncio.all_tasks()) - before <= 2 * 20


def test_which_input_a_command_came_from() -> None:
    ahead = TypeAhead()
    ahead.add(TypedInput("a", 10, 1))
    assert ahead.take(15, 9) == "a"
    # Typed ahead while `a` ran, so before the prompt at 30.
    ahead.add(TypedInput("b", 20, 1))
    assert ahead.take(35, 30) == "b"
    # Two went to a program, the third was typed at the prompt.
    for number, position in enumerate((40, 45, 60)):
        ahead.add(TypedInput(f"c{number}", position, 1))
    assert ahead.take(65, 58) == "c2"
    assert ahead.take(70, 68) == ""
    # One call, two lines.
    ahead.add(TypedInput("d", 80, 2))
    assert (ahead.take(85, 79), ahead.take(95, 90), ahead.take(99, 98)) == ("d", "d", "")
