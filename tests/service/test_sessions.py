"""The SessionManager over a fake sandbox: limits, metadata, refusals, what is left when opening fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from holdfast.errors import ConnectionLost, LimitReached, SandboxGone
from holdfast.service.api import AuditFilter, Control, CreateRequest, RunRequest
from holdfast.service.problems import Denied, Exhausted, Invalid, NotFound, NotNow, Unavailable
from holdfast.service.sessions.manager import SessionManager
from holdfast.service.sessions.ports import MetricEvent
from holdfast.service.store.audit_log import MAX_BODY_BYTES
from holdfast.service.types import SERVICE_STREAM
from holdfast.testing import FakeClock, FakeExec, answers, by_hand
from holdfast.testing.clock import settle
from tests.service.fakes import ANN, BOB, OPERATOR, MemoryStore, connecting, make_manager, read_until, running


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> MemoryStore:
    return MemoryStore(clock)


@pytest.fixture
async def fake() -> FakeExec:
    commands = {"make": answers("built\n"), "cd /src": answers(cwd="/src"), "false": answers(exit_code=1)}
    return FakeExec(shell_commands=commands)


@pytest.fixture
async def manager(store: MemoryStore, fake: FakeExec, clock: FakeClock) -> AsyncIterator[SessionManager]:
    rules = "[agents.ann]\nsessions = 2\n"
    async with running(make_manager(store, connecting(fake), clock=clock, text=rules, max_sessions=3)) as manager:
        yield manager


async def test_creation_limits_hold_for_an_agent_and_for_all(manager: SessionManager, store: MemoryStore) -> None:
    first = await manager.create(ANN, CreateRequest())
    await manager.create(ANN, CreateRequest(kind="shell"))
    with pytest.raises(Exhausted) as refused:
        await manager.create(ANN, CreateRequest())
    assert refused.value.reason == "SESSION_LIMIT"
    await manager.create(BOB, CreateRequest())
    with pytest.raises(Exhausted):
        await manager.create(BOB, CreateRequest())
    assert [body["reason"] for body in store.bodies(SERVICE_STREAM, "session_refused")] == ["SESSION_LIMIT"] * 2
    await manager.close(ANN, first.view.record.session_id)
    await manager.create(BOB, CreateRequest())


async def test_the_same_request_is_the_same_session(manager: SessionManager, fake: FakeExec) -> None:
    request = CreateRequest(request_id="r1")
    one, two = await asyncio.gather(manager.create(ANN, request), manager.create(ANN, request))
    again = await manager.create(ANN, request)
    ids = {each.view.record.session_id for each in (one, two, again)}
    assert len(ids) == len(await fake.list_terminals()) == 1
    assert {each.view.state for each in (one, two, again)} == {"IDLE"}
    other = await manager.create(BOB, request)
    assert other.view.record.session_id not in ids


async def test_metadata_is_updated_as_the_session_is_used(
    manager: SessionManager, store: MemoryStore, clock: FakeClock
) -> None:
    request = CreateRequest(labels={"job": "7"}, environment={"MODE": "x"}, cols=100, rows=30)
    created = await manager.create(ANN, request)
    record = created.view.record
    assert (record.created_at, record.last_activity_at) == (clock.time(), clock.time())
    assert (record.environment, record.labels, record.cols, record.rows) == ({"MODE": "x"}, {"job": "7"}, 100, 30)
    assert record.unenforced == ("filesystem",)
    await clock.advance(50)
    await manager.send_input(ANN, record.session_id, b"cd /src\n")
    await read_until(manager, record.session_id, lambda _, chunk: chunk.exit_code is not None, created.token)
    await settle()
    view = await manager.get(ANN, record.session_id)
    assert (view.cwd, view.state) == ("/src", "IDLE")
    assert (view.record.last_activity_at, view.record.commands_run) == (clock.time(), 1)
    await clock.advance(2)
    stored = await store.session(record.session_id)
    assert (stored.last_activity_at, stored.commands_run) == (clock.time() - 2, 1)
    await manager.send_input(ANN, record.session_id, b"", [Control("RESIZE", cols=120, rows=50)])
    view = await manager.get(ANN, record.session_id)
    assert (view.record.cols, view.record.rows) == (120, 50)


async def test_values_that_look_like_secrets_are_not_shown(store: MemoryStore, fake: FakeExec) -> None:
    rules = '[profiles.default.environment]\ndeny = []\nset = { DB_PASSWORD = "hunter2" }\n'
    async with running(make_manager(store, connecting(fake), text=rules)) as manager:
        record = (await manager.create(ANN, CreateRequest())).view.record
        assert record.environment == {"DB_PASSWORD": "[hidden]"}
        assert fake.terminal(record.session_id).requested.env == {"DB_PASSWORD": "hunter2"}
        assert not any("hunter2" in row.body for row in store.log)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (CreateRequest(sandbox="docker:other"), "SANDBOX_NOT_ALLOWED"),
        (CreateRequest(agent_id="bob"), "NOT_AN_OPERATOR"),
        (CreateRequest(environment={"MY_TOKEN": "x"}), "POLICY_DENIED"),
    ],
)
async def test_what_may_not_be_had_is_refused_and_written_down(
    manager: SessionManager, store: MemoryStore, fake: FakeExec, request_: CreateRequest, reason: str
) -> None:
    with pytest.raises((Denied, Invalid)) as refused:
        await manager.create(ANN, request_)
    assert refused.value.reason == reason
    assert [body["reason"] for body in store.bodies(SERVICE_STREAM, "session_refused")] == [reason]
    assert (store.records, await fake.list_terminals()) == ({}, ())


async def test_a_large_environment_fits_into_its_row(manager: SessionManager, store: MemoryStore) -> None:
    environment = {f"NAME_{number}": "x" * 20_000 for number in range(40)}
    created = await manager.create(ANN, CreateRequest(environment=environment))
    (body,) = store.bodies(created.view.record.session_id, "session_created")
    assert body["environment"]["NAME_0"] == "x" * 256 + "…"
    many = {f"NAME_{'N' * 100}_{number}": "x" * 256 for number in range(900)}
    created = await manager.create(ANN, CreateRequest(environment=many))
    (body,) = store.bodies(created.view.record.session_id, "session_created")
    assert len(str(body)) < MAX_BODY_BYTES / 4
    assert body["environment"][""].endswith("more")


async def test_a_directory_outside_of_the_allowed_ones_is_refused(store: MemoryStore, fake: FakeExec) -> None:
    rules = '[profiles.narrow]\nextends = "default"\n[profiles.narrow.directories]\nreadable = ["/srv"]\n'
    rules += '[agents.ann]\nprofile = "narrow"\n'
    async with running(make_manager(store, connecting(fake), text=rules)) as manager:
        with pytest.raises(Denied, match="outside"):
            await manager.create(ANN, CreateRequest(initial_cwd="/srv/../etc"))
        created = await manager.create(ANN, CreateRequest())
        assert created.view.record.initial_cwd == "/srv"


async def test_a_shell_of_the_agents_own_is_refused_where_commands_have_rules(
    store: MemoryStore, fake: FakeExec
) -> None:
    rules = '[profiles.default.commands]\ndefault = "deny"\n'
    async with running(make_manager(store, connecting(fake), text=rules)) as manager:
        with pytest.raises(Denied, match="shell"):
            await manager.create(ANN, CreateRequest(shell="/work/ann/bash"))
        assert (await manager.create(ANN, CreateRequest(shell="/bin/bash"))).view.state == "IDLE"


async def test_an_operator_makes_sessions_for_others_and_sees_them_all(manager: SessionManager) -> None:
    created = await manager.create(OPERATOR, CreateRequest(agent_id="bob"))
    assert created.view.record.agent_id == "bob"
    session_id = created.view.record.session_id
    assert (await manager.get(BOB, session_id)).state == "IDLE"
    assert [view.record.agent_id for view in (await manager.find(OPERATOR))[0]] == ["bob"]


async def test_a_sandbox_that_answers_nonsense_does_not_hide_the_other_sessions(
    manager: SessionManager, fake: FakeExec, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [(await manager.create(ANN, CreateRequest())).view.record.session_id for _ in range(2)]
    describe = fake.describe_terminal

    async def sometimes(terminal_id: str, **options: Any) -> Any:
        if terminal_id == ids[0]:
            raise LimitReached("too much to do")
        return await describe(terminal_id, **options)

    monkeypatch.setattr(fake, "describe_terminal", sometimes)
    found, _ = await manager.find(ANN)
    assert {view.record.session_id: view.state for view in found} == {ids[0]: "UNKNOWN", ids[1]: "IDLE"}


async def test_sessions_of_others_read_as_if_there_were_none(manager: SessionManager) -> None:
    session_id = (await manager.create(ANN, CreateRequest())).view.record.session_id
    calls: list[Any] = [
        manager.get(BOB, session_id),
        manager.send_input(BOB, session_id, b"x"),
        manager.read_output(BOB, session_id),
        manager.close(BOB, session_id),
        manager.run_command(BOB, RunRequest("make", session_id)),
        manager.audit(BOB, AuditFilter(session_id=session_id)),
        manager.approvals(BOB, session_id),
        anext(manager.stream_output(BOB, session_id)),
        anext(manager.events(BOB, session_id)),
    ]
    for call in calls:
        with pytest.raises(NotFound) as refused:
            await call
        assert refused.value.message == f"no session {session_id!r}"
    assert (await manager.find(BOB), await manager.find(BOB, agent_id="ann")) == (([], ""), ([], ""))
    rows, _ = await manager.audit(BOB, AuditFilter())
    assert rows == []


async def test_sessions_are_found_by_page_state_and_label(manager: SessionManager) -> None:
    one = (await manager.create(ANN, CreateRequest(labels={"job": "1"}))).view.record.session_id
    two = (await manager.create(ANN, CreateRequest(labels={"job": "2"}))).view.record.session_id
    await manager.close(ANN, one)
    page, token = await manager.find(ANN, page_size=1)
    rest, end = await manager.find(ANN, page_size=1, page_token=token)
    assert ([view.record.session_id for view in page + rest], end) == ([one, two], "")
    assert [view.record.session_id for view in (await manager.find(ANN, states=["IDLE"]))[0]] == [two]
    assert [view.record.session_id for view in (await manager.find(ANN, states=["BUSY"]))[0]] == []
    assert [view.record.session_id for view in (await manager.find(ANN, states=["CLOSED"]))[0]] == [one]
    assert [view.record.session_id for view in (await manager.find(ANN, labels={"job": "1"}))[0]] == [one]


async def test_closing_says_how_long_how_much_and_why(
    manager: SessionManager, store: MemoryStore, clock: FakeClock
) -> None:
    created = await manager.create(ANN, CreateRequest())
    session_id = created.view.record.session_id
    await manager.run_command(ANN, RunRequest("make", session_id))
    await manager.run_command(ANN, RunRequest("false", session_id))
    await clock.advance(90)
    closed = await manager.close(ANN, session_id)
    assert closed.state == "CLOSED"
    for part in ("closed by ann", "open for 90", "2 commands", "bytes of output", "last exit code 1"):
        assert part in closed.summary
    assert await manager.close(ANN, session_id, "force") == closed
    record = await store.session(session_id)
    assert (record.state, record.closed_at, record.summary) == ("CLOSED", clock.time(), closed.summary)
    assert store.events(session_id) == ["SESSION_CREATED", "SESSION_CLOSED"]
    await settle()
    assert len(manager.leases) == 0
    with pytest.raises(NotNow) as refused:
        await manager.send_input(ANN, session_id, b"x")
    assert refused.value.reason == "SESSION_CLOSED"


async def test_what_fails_while_it_is_opened_is_closed_and_written_down(
    store: MemoryStore, clock: FakeClock
) -> None:
    class Broken(FakeExec):
        async def wait_terminal(self, *args: Any, **more: Any) -> Any:
            raise ConnectionLost("the line broke")

    fake = Broken()
    async with running(make_manager(store, connecting(fake), clock=clock)) as manager:
        with pytest.raises(Unavailable) as refused:
            await manager.create(ANN, CreateRequest(request_id="r"))
        assert refused.value.reason == "SANDBOX_UNREACHABLE"
        (session_id,) = store.records
        assert fake.terminal(session_id).status is not None
        assert store.kinds(session_id) == ["session_created", "error", "event"]
        record = await store.session(session_id)
        assert (record.state, record.close_reason) == ("ERROR", "creation failed")
        with pytest.raises(NotNow, match="failed before"):
            await manager.create(ANN, CreateRequest(request_id="r"))


async def _opened(fake: FakeExec) -> None:
    await settle(50)
    assert len(await fake.list_terminals()) == 1


async def test_a_caller_that_gives_up_while_its_session_is_opened_leaves_none(
    store: MemoryStore, clock: FakeClock
) -> None:
    fake = FakeExec(terminal_program=by_hand)
    async with running(make_manager(store, connecting(fake), clock=clock)) as manager:
        creating = asyncio.ensure_future(manager.create(ANN, CreateRequest()))
        await _opened(fake)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        (record,) = store.records.values()
        assert (record.state, fake.terminal(record.session_id).status is None) == ("ERROR", False)


async def test_a_session_that_a_dead_service_was_making_is_given_up(store: MemoryStore, clock: FakeClock) -> None:
    fake = FakeExec(terminal_program=by_hand)
    first = make_manager(store, connecting(fake), clock=clock, lease_seconds=15)
    await first.start()
    creating = asyncio.ensure_future(first.create(ANN, CreateRequest()))
    await _opened(fake)
    (session_id,) = store.records
    await clock.advance(1)
    # As after kill -9: no renewal, no clean-up.
    await first.leases.stop()
    store._leases[session_id] = store._leases.get(session_id) or next(iter(await store.claim("dead", 1, 1)))
    await clock.advance(20)
    async with running(make_manager(store, connecting(fake), clock=clock)) as second:
        assert (await second.get(ANN, session_id)).state == "ERROR"
        assert fake.terminal(session_id).status is not None
    creating.cancel()
    await asyncio.wait([creating])
    await first.stop()


async def test_a_sandbox_that_cannot_be_reached_makes_the_state_unknown_not_an_error(
    store: MemoryStore, fake: FakeExec, clock: FakeClock
) -> None:
    reachable = True

    class Sometimes:
        closed = False

        def __getattr__(self, name: str) -> Any:
            if not reachable:
                raise ConnectionLost("no route")
            return getattr(fake, name)

        async def aclose(self) -> None:
            self.closed = True

    async def connect(address: str) -> Any:
        return Sometimes()

    async with running(make_manager(store, connect, clock=clock)) as manager:
        session_id = (await manager.create(ANN, CreateRequest())).view.record.session_id
        reachable = False
        assert (await manager.get(ANN, session_id)).state == "UNKNOWN"
        with pytest.raises(Unavailable):
            await manager.send_input(ANN, session_id, b"x")
        reachable = True
        assert (await manager.get(ANN, session_id)).state == "IDLE"
        assert (await store.session(session_id)).state == "RUNNING"


async def test_a_sandbox_that_is_known_to_be_gone_ends_its_sessions(
    store: MemoryStore, fake: FakeExec, clock: FakeClock
) -> None:
    reported: list[MetricEvent] = []
    async with running(make_manager(store, connecting(fake), clock=clock)) as first:
        session_id = (await first.create(ANN, CreateRequest())).view.record.session_id

    async def gone(address: str) -> Any:
        raise SandboxGone("no such container")

    async with running(make_manager(store, gone, clock=clock, reported=reported)) as second:
        follower = second.leases.follower(session_id)
        if follower is not None:
            await follower.over.wait()
        view = await second.get(ANN, session_id)
        assert (view.state, "no such container" in view.record.summary) == ("ERROR", True)
        assert store.kinds(session_id)[-3:] == ["error", "session_closed", "event"]
        assert [each.what for each in reported] == ["lease_taken", "session_over"]
