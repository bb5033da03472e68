"""Subscriptions: of one session or of all that one may see, in order, resumed by token, at the reader's speed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from holdfast.service.api import CreateRequest, SessionEvent
from holdfast.service.problems import BadToken, Unavailable
from holdfast.service.sessions.following.events import Watch, audit_entry, event_entry
from holdfast.service.sessions.manager import SessionManager
from holdfast.service.store.types import MISSED, RowNotice
from holdfast.service.types import EventType
from holdfast.testing import FakeClock, FakeExec
from holdfast.testing.clock import settle
from tests.service.fakes import ANN, BOB, OPERATOR, MemoryStore, connecting, make_manager, running


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> MemoryStore:
    return MemoryStore(clock)


@pytest.fixture
async def manager(store: MemoryStore, clock: FakeClock) -> AsyncIterator[SessionManager]:
    async with running(make_manager(store, connecting(FakeExec()), clock=clock)) as manager:
        yield manager


class Subscriber:
    """Takes events as they come, for as long as the test wants."""

    def __init__(self, events: AsyncIterator[SessionEvent]) -> None:
        self.heard: list[SessionEvent] = []
        self._task = asyncio.ensure_future(self._take(events))

    async def _take(self, events: AsyncIterator[SessionEvent]) -> None:
        async for event in events:
            self.heard.append(event)

    @property
    def types(self) -> list[str]:
        return [event.type for event in self.heard]

    @property
    def ended(self) -> bool:
        return self._task.done()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def make(manager: SessionManager, who: object = ANN) -> str:
    return (await manager.create(who, CreateRequest())).view.record.session_id  # type: ignore[arg-type]


async def test_events_of_one_session_come_in_order_and_end_with_it(manager: SessionManager) -> None:
    session_id = await make(manager)
    subscriber = Subscriber(manager.events(ANN, session_id))
    await settle()
    await make(manager)
    record = await manager.store.session(session_id)
    for number in range(5):
        await manager.store.append([event_entry(record, 1000.0, "RESOURCE_THRESHOLD", str(number))])
    await manager.close(ANN, session_id)
    await settle()
    assert subscriber.types == ["RESOURCE_THRESHOLD"] * 5 + ["SESSION_CLOSED"]
    assert [event.detail for event in subscriber.heard[:5]] == list("01234")
    assert subscriber.ended


async def test_a_subscription_resumes_after_its_token_without_loss_or_doubles(manager: SessionManager) -> None:
    session_id = await make(manager)
    subscriber = Subscriber(manager.events(ANN, session_id))
    await settle()
    record = await manager.store.session(session_id)
    for number in range(3):
        await manager.store.append([event_entry(record, 1000.0, "RESOURCE_THRESHOLD", str(number))])
    await settle()
    await subscriber.stop()
    for number in range(3, 250):
        await manager.store.append([event_entry(record, 1000.0, "RESOURCE_THRESHOLD", str(number))])
    for session, first in ((session_id, 2), ("", 2)):
        again = Subscriber(manager.events(ANN, session, since=subscriber.heard[1].token))
        await settle(400)
        assert [event.detail for event in again.heard] == [str(number) for number in range(first, 250)]
        await again.stop()


async def test_all_sessions_of_the_caller_and_no_others(manager: SessionManager) -> None:
    ann, everybody = Subscriber(manager.events(ANN)), Subscriber(manager.events(OPERATOR))
    await settle()
    one = await make(manager)
    two = await make(manager, BOB)
    await manager.close(BOB, two)
    await manager.close(ANN, one)
    await settle()
    assert [(event.session_id, event.type) for event in ann.heard] == [
        (one, "SESSION_CREATED"),
        (one, "SESSION_CLOSED"),
    ]
    assert {event.session_id for event in everybody.heard} == {one, two}
    assert len(everybody.heard) == 4
    await ann.stop()
    await everybody.stop()


async def test_only_the_types_that_were_asked_for(manager: SessionManager) -> None:
    subscriber = Subscriber(manager.events(ANN, types=["SESSION_CLOSED"]))
    await settle()
    await manager.close(ANN, await make(manager))
    await settle()
    assert subscriber.types == ["SESSION_CLOSED"]
    await subscriber.stop()


@pytest.mark.parametrize(
    ("type_", "body", "detail"),
    [
        ("COMMAND_ENDED", {"exit_code": 3}, "cmd-1: exit code 3"),
        ("MODEL_CALL", {"model": "small", "status": 401}, "small: status 401"),
    ],
)
async def test_rows_of_which_there_are_many_are_events_for_those_that_name_them(
    manager: SessionManager, type_: EventType, body: dict[str, object], detail: str
) -> None:
    session_id = await make(manager)
    named = Subscriber(manager.events(ANN, session_id, types=(type_, "SESSION_CLOSED")))
    others = Subscriber(manager.events(ANN, session_id))
    await settle()
    record = await manager.store.session(session_id)
    await manager.store.append([audit_entry(record, 1000.0, type_.lower(), "cmd-1", **body)])
    await manager.close(ANN, session_id)
    await settle()
    assert [(event.type, event.detail) for event in named.heard[:1]] == [(type_, detail)]
    assert named.types[1:] == ["SESSION_CLOSED"]
    assert others.types == ["SESSION_CLOSED"]


async def test_a_subscriber_that_does_not_read_holds_back_nobody_and_has_no_queue(
    manager: SessionManager, store: MemoryStore
) -> None:
    slow = manager.events(ANN)
    first = asyncio.ensure_future(anext(slow))
    await settle()
    session_id = await make(manager)
    assert (await first).type == "SESSION_CREATED"
    quick = Subscriber(manager.events(ANN))
    await settle()
    record = await manager.store.session(session_id)
    for number in range(500):
        await manager.store.append([event_entry(record, 1000.0, "RESOURCE_THRESHOLD", str(number))])
        await settle(3)
    await settle()
    assert len(quick.heard) == 500
    # Nothing waits for the slow one but a mark that there is something; it reads all the same.
    reported = [(await anext(slow)).detail for _ in range(500)]
    assert reported == [str(number) for number in range(500)]
    await quick.stop()
    await slow.aclose()  # type: ignore[attr-defined]


async def test_notices_that_were_missed_are_made_up_for_from_the_log(
    manager: SessionManager, store: MemoryStore
) -> None:
    session_id = await make(manager)
    one, every = Subscriber(manager.events(ANN, session_id)), Subscriber(manager.events(ANN))
    await settle()
    listeners, store._listeners = store._listeners, set()
    record = await store.session(session_id)
    await store.append([event_entry(record, 1000.0, "RESOURCE_THRESHOLD", "unheard")])
    await settle()
    assert one.heard == []
    store._listeners = listeners
    for listener in listeners:
        listener.put_nowait(MISSED)
    await settle()
    assert [event.detail for event in one.heard] == ["unheard"]
    assert "unheard" in [event.detail for event in every.heard]
    await one.stop()
    await every.stop()


async def test_the_bell_rings_again_after_the_store_failed(store: MemoryStore, clock: FakeClock) -> None:
    class Failing(MemoryStore):
        def __init__(self) -> None:
            super().__init__(clock)
            self.tries = 0

        async def listen(self) -> AsyncIterator[RowNotice]:
            self.tries += 1
            if self.tries == 1:
                raise Unavailable("away", reason="STORE_UNAVAILABLE")
            async for notice in super().listen():
                yield notice

    failing = Failing()
    async with running(make_manager(failing, connecting(FakeExec()), clock=clock)) as manager:
        subscriber = Subscriber(manager.events(ANN))
        await settle()
        await clock.advance(1)
        await make(manager)
        await settle()
        assert subscriber.types == ["SESSION_CREATED"]
        await subscriber.stop()


def test_a_watch_is_not_woken_by_rows_that_are_no_news_to_it() -> None:
    watch = Watch(lambda notice: notice.seq % 2 == 0)
    for seq in (1, 2, 3, 4, 5):
        watch.notify(RowNotice("s1", seq))
    assert (watch.first, watch.last) == ({"s1": 2}, {"s1": 4})
    watch.notify(MISSED)
    assert watch.missed


async def test_a_token_that_is_none_is_refused(manager: SessionManager) -> None:
    for token in ("nonsense", "W10", "äöü"):
        with pytest.raises(BadToken):
            await anext(manager.events(ANN, since=token))
