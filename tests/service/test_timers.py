"""The effect of time on sessions, on a clock that the test moves: warnings, closing, lifetimes, leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from holdfast.errors import ConnectionLost
from holdfast.service.api import CreateRequest, PolicyRequest
from holdfast.service.problems import Unavailable
from holdfast.service.sessions.following.terminal import TerminalFollower
from holdfast.service.sessions.manager import SessionManager
from holdfast.service.sessions.timers import TimerHeap
from holdfast.testing import FakeClock, FakeExec, FakeTerminal, by_hand
from holdfast.testing.clock import settle
from tests.service.fakes import ANN, MemoryStore, connecting, make_manager, running

RULES = """
[profiles.default.idle]
timeout = "30m"
grace = "60s"
[profiles.default.lifetime]
limit = "8h"
warning = "5m"
"""


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
    made = make_manager(store, connecting(fake), clock=clock, text=RULES, prompt_seconds=0, close_grace=0)
    async with running(made) as manager:
        yield manager


async def opened(manager: SessionManager, fake: FakeExec, **policy: float) -> tuple[str, FakeTerminal]:
    request = CreateRequest(policy=PolicyRequest(**policy))  # type: ignore[arg-type]
    session_id = (await manager.create(ANN, request)).view.record.session_id
    fake.terminal(session_id).shows_prompt("$ ")
    await settle()
    return session_id, fake.terminal(session_id)


async def until_over(store: MemoryStore, session_id: str) -> None:
    """Closing goes over real event loop turns, however many."""
    await store.until(lambda: store.records[session_id].over)


async def test_idle_timeout_scheduling_warns_waits_and_closes_with_a_summary(
    manager: SessionManager, store: MemoryStore, fake: FakeExec, clock: FakeClock
) -> None:
    session_id, _ = await opened(manager, fake)
    await clock.advance(1799)
    assert store.events(session_id) == ["SESSION_CREATED"]
    await clock.advance(1)
    assert store.events(session_id) == ["SESSION_CREATED", "IDLE_WARNING"]
    assert store.bodies(session_id, "event")[-1]["detail"] == "idle for 1800 s; it is closed in 60 s"
    await clock.advance(59)
    assert not store.records[session_id].over
    await clock.advance(1)
    await until_over(store, session_id)
    record = store.records[session_id]
    assert (record.state, record.close_reason) == ("CLOSED", "idle timeout")
    assert "open for 1860" in record.summary
    assert store.events(session_id)[2:] == ["IDLE_TIMEOUT", "SESSION_CLOSED"]


async def test_input_and_output_after_the_warning_save_the_session(
    manager: SessionManager, store: MemoryStore, fake: FakeExec, clock: FakeClock
) -> None:
    session_id, stub = await opened(manager, fake)
    await clock.advance(1830)
    await manager.send_input(ANN, session_id, b"x")
    await clock.advance(1799)
    assert store.events(session_id) == ["SESSION_CREATED", "IDLE_WARNING"]
    await clock.advance(1)
    assert store.events(session_id)[2:] == ["IDLE_WARNING"]
    stub.prints("still here")
    await settle()
    await clock.advance(1799)
    assert not store.records[session_id].over


async def test_a_session_whose_command_runs_is_not_idle(
    manager: SessionManager, store: MemoryStore, fake: FakeExec, clock: FakeClock
) -> None:
    session_id, stub = await opened(manager, fake)
    stub.starts_command("make")
    await settle()
    await clock.advance(7200)
    assert store.events(session_id) == ["SESSION_CREATED"]
    stub.shows_prompt("$ ")
    await settle()
    await clock.advance(1800)
    assert store.events(session_id) == ["SESSION_CREATED", "IDLE_WARNING"]


async def test_the_end_of_a_lifetime_is_warned_of_and_comes_also_to_a_busy_session(
    manager: SessionManager, store: MemoryStore, fake: FakeExec, clock: FakeClock
) -> None:
    session_id, stub = await opened(manager, fake, max_lifetime=1200.0)
    stub.starts_command("make")
    await settle()
    await clock.advance(900)
    assert store.events(session_id) == ["SESSION_CREATED", "LIFETIME_WARNING"]
    await clock.advance(299)
    assert not store.records[session_id].over
    await clock.advance(1)
    await until_over(store, session_id)
    assert store.records[session_id].close_reason == "lifetime over"
    assert store.events(session_id).count("LIFETIME_WARNING") == 1


async def test_deadlines_go_on_where_they_were_after_a_restart(
    store: MemoryStore, fake: FakeExec, clock: FakeClock
) -> None:
    def make() -> SessionManager:
        return make_manager(store, connecting(fake), clock=clock, text=RULES, prompt_seconds=0, close_grace=0)

    async with running(make()) as first:
        session_id, _ = await opened(first, fake)
        await clock.advance(1800)
        await clock.advance(2)
        assert store.events(session_id)[-1] == "IDLE_WARNING"
    await clock.advance(30)
    async with running(make()):
        await settle()
        await clock.advance(27)
        assert not store.records[session_id].over
        await clock.advance(1)
        await until_over(store, session_id)
    assert store.events(session_id).count("IDLE_WARNING") == 1


async def test_a_database_that_is_away_when_a_warning_is_due_gets_it_later(
    manager: SessionManager, store: MemoryStore, fake: FakeExec, clock: FakeClock
) -> None:
    session_id, _ = await opened(manager, fake)
    await clock.advance(1799)
    store.failures += [Unavailable("away", reason="STORE_UNAVAILABLE")]
    await clock.advance(1)
    await clock.advance(1)
    assert store.events(session_id)[-1] == "IDLE_WARNING"


async def test_leases_are_renewed_and_those_of_a_dead_replica_claimed(
    store: MemoryStore, fake: FakeExec, clock: FakeClock
) -> None:
    def make(replica: str) -> SessionManager:
        return make_manager(
            store, connecting(fake), clock=clock, text=RULES, replica=replica, lease_seconds=15, prompt_seconds=0
        )

    first, second = make("one"), make("two")
    await first.start()
    await second.start()
    session_id, _ = await opened(first, fake)
    await clock.advance(100)
    assert (len(first.leases), len(second.leases)) == (1, 0)
    # As after kill -9: it neither renews nor gives up.
    assert first.leases._task is not None
    first.leases._task.cancel()
    await clock.advance(15)
    await settle()
    assert len(second.leases) == 1
    fake.terminal(session_id).starts_command("make")
    fake.terminal(session_id).shows_prompt("$ ", exit_code=3)
    await settle(200)
    # Both read the event; only the owner of the lease could write it down.
    assert [body["exit_code"] for body in store.bodies(session_id, "command_ended")] == [3]
    assert len(first.leases) == 0
    await first.stop()
    await second.stop()


async def test_a_sandbox_that_is_away_when_time_is_up_is_asked_again_and_the_log_does_not_grow(
    store: MemoryStore, fake: FakeExec, clock: FakeClock, manager: SessionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id, _ = await opened(manager, fake)
    close, tries = fake.close_terminal, 0

    async def away(*arguments: Any, **options: Any) -> Any:
        nonlocal tries
        tries += 1
        raise ConnectionLost("gone for a while")

    monkeypatch.setattr(fake, "close_terminal", away)
    for _ in range(60):
        await clock.advance(60)
        await settle()
    assert 3 < tries < 60
    types = [body["type"] for body in store.bodies(session_id, "event")]
    assert types.count("IDLE_TIMEOUT") == len(store.bodies(session_id, "close")) == 1
    monkeypatch.setattr(fake, "close_terminal", close)
    await clock.advance(61)
    await until_over(store, session_id)


async def test_a_session_whose_follower_ended_by_a_bug_is_followed_again(
    store: MemoryStore, fake: FakeExec, clock: FakeClock, manager: SessionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id, stub = await opened(manager, fake)
    follower = manager.leases.follower(session_id)
    assert follower is not None
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    with monkeypatch.context() as patched:
        patched.setattr(TerminalFollower, "_take", lambda *_: [].pop())
        stub.prints("hello")
        await settle()
    assert manager.leases.follower(session_id) is None
    for _ in range(4):
        await clock.advance(manager.settings.lease_seconds / 3)
        await settle()
    again = manager.leases.follower(session_id)
    assert again is not None
    assert again.lease.epoch > follower.lease.epoch


async def test_one_timer_for_all_and_the_latest_word_for_each_key_counts(clock: FakeClock) -> None:
    heap = TimerHeap(clock)
    rung: list[str] = []
    for number in range(1000):
        heap.set("often", clock.time() + 10 + number, lambda: rung.append("often"))
    heap.set("soon", clock.time() + 5, lambda: rung.append("soon"))
    heap.set("never", clock.time() + 6, lambda: rung.append("never"))
    heap.drop("never")
    assert len(clock.pending) == 1
    assert len(heap._heap) < 200
    await clock.advance(500)
    assert rung == ["soon"]
    await clock.advance(600)
    assert rung == ["soon", "often"]
    assert len(heap) == 0
