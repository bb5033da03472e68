"""Commands that wait for approval: held, typed once when allowed, given up when refused or too late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from holdfast.service.api import CreateRequest, RunRequest, RunResult
from holdfast.service.problems import Denied, Exhausted, NotFound, NotNow, TooLate
from holdfast.service.sessions.approvals import LONGEST_COMMAND, MOST_WAITING
from holdfast.service.sessions.manager import SessionManager
from holdfast.service.types import Approval
from holdfast.testing import FakeClock, FakeExec, FakeTerminal, answers, by_hand
from holdfast.testing.clock import settle
from tests.service.fakes import ANN, BOB, OPERATOR, MemoryStore, connecting, make_manager, running

RULES = """
[[profiles.default.commands.rules]]
verdict = "ask"
program = ["deploy"]
reason = "somebody has to look"
[profiles.default.approvals]
timeout = "5m"
[profiles.own]
extends = "default"
[profiles.own.approvals]
owner = true
[agents.bob]
profile = "own"
"""


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> MemoryStore:
    return MemoryStore(clock)


@pytest.fixture
async def fake() -> FakeExec:
    return FakeExec(shell_commands={"deploy now": answers("deployed\n"), "true": answers()})


@pytest.fixture
async def manager(store: MemoryStore, fake: FakeExec, clock: FakeClock) -> AsyncIterator[SessionManager]:
    async with running(make_manager(store, connecting(fake), clock=clock, text=RULES)) as manager:
        yield manager


async def requested(manager: SessionManager, fake: FakeExec) -> tuple[str, FakeTerminal, str]:
    session_id = (await manager.create(ANN, CreateRequest())).view.record.session_id
    taken = await manager.send_input(ANN, session_id, b"deploy now\n")
    assert (taken.accepted, bool(taken.approval_id)) == (False, True)
    return session_id, fake.terminal(session_id), taken.approval_id


async def test_what_is_asked_is_held_and_typed_once_it_is_approved(
    manager: SessionManager, fake: FakeExec, store: MemoryStore
) -> None:
    session_id, stub, approval_id = await requested(manager, fake)
    assert stub.typed == []
    (waiting,) = await manager.approvals(OPERATOR)
    assert (waiting.approval_id, waiting.command, waiting.reason) == (
        approval_id,
        "deploy now",
        "somebody has to look",
    )
    assert await manager.answer_approval(OPERATOR, approval_id, True, "go") == "approved"
    await settle()
    assert stub.input.endswith(b"deploy now\r")
    assert store.events(session_id)[1:] == ["APPROVAL_REQUESTED", "APPROVAL_ANSWERED"]
    (ended,) = store.bodies(session_id, "command_ended")
    assert ended["output"].strip() == "deployed"
    ids = {row.command_id for row in store.log if row.kind in ("decision", "approval_answered", "command_ended")}
    assert ids == {waiting.command_id}
    assert await manager.approvals(OPERATOR) == []


async def test_what_is_approved_is_not_typed_into_a_command_that_is_not_complete(
    manager: SessionManager, fake: FakeExec, store: MemoryStore
) -> None:
    session_id, stub, approval_id = await requested(manager, fake)
    await manager.send_input(ANN, session_id, b"echo 'a\n")
    await settle()
    assert (await fake.describe_terminal(session_id)).continuation
    assert await manager.answer_approval(OPERATOR, approval_id, True) == "approved"
    await settle()
    assert [each[-11:] for each in stub.typed] == [b"echo 'a\n", b"\x03", b"deploy now\r"]
    assert [body["output"].strip() for body in store.bodies(session_id, "command_ended")] == ["deployed"]


async def test_two_operators_that_answer_at_once_type_it_once(manager: SessionManager, fake: FakeExec) -> None:
    _, stub, approval_id = await requested(manager, fake)
    answers_ = await asyncio.gather(
        *(manager.answer_approval(OPERATOR, approval_id, True) for _ in range(3)), return_exceptions=True
    )
    assert [answer for answer in answers_ if answer == "approved"] == ["approved"]
    assert all(isinstance(answer, NotNow) for answer in answers_ if answer != "approved")
    await settle()
    assert stub.input.count(b"deploy") == 1


async def test_what_is_refused_is_never_typed(manager: SessionManager, fake: FakeExec, store: MemoryStore) -> None:
    session_id, stub, approval_id = await requested(manager, fake)
    assert await manager.answer_approval(OPERATOR, approval_id, False, "not today") == "refused"
    await settle()
    assert stub.typed == []
    (body,) = store.bodies(session_id, "approval_answered")
    assert (body["outcome"], body["by"], body["comment"]) == ("refused", "root", "not today")


async def test_an_approval_that_nobody_answers_expires_by_the_clock(
    manager: SessionManager, fake: FakeExec, store: MemoryStore, clock: FakeClock
) -> None:
    session_id, stub, approval_id = await requested(manager, fake)
    await clock.advance(299)
    assert len(await manager.approvals(ANN, session_id)) == 1
    await clock.advance(1)
    assert [body["outcome"] for body in store.bodies(session_id, "approval_answered")] == ["expired"]
    with pytest.raises(NotNow):
        await manager.answer_approval(OPERATOR, approval_id, True)
    assert stub.typed == []


async def test_only_an_operator_answers_unless_the_policy_lets_the_owner(
    manager: SessionManager, fake: FakeExec
) -> None:
    _, _, approval_id = await requested(manager, fake)
    with pytest.raises(Denied) as refused:
        await manager.answer_approval(ANN, approval_id, True)
    assert refused.value.reason == "NOT_AN_OPERATOR"
    with pytest.raises(NotFound):
        await manager.answer_approval(BOB, approval_id, True)
    session_id = (await manager.create(BOB, CreateRequest())).view.record.session_id
    own = await manager.send_input(BOB, session_id, b"deploy now\n")
    assert await manager.answer_approval(BOB, own.approval_id, True) == "approved"


@pytest.mark.parametrize("kind", ["terminal", "shell"])
async def test_run_command_waits_for_the_answer(
    manager: SessionManager, store: MemoryStore, kind: str, clock: FakeClock
) -> None:
    session_id = (await manager.create(ANN, CreateRequest(kind=kind))).view.record.session_id  # type: ignore[arg-type]
    for approve in (True, False):
        run = asyncio.ensure_future(manager.run_command(ANN, RunRequest("deploy now", session_id)))
        await settle()
        (waiting,) = await manager.approvals(OPERATOR, session_id)
        await manager.answer_approval(OPERATOR, waiting.approval_id, approve)
        if approve:
            ran = await run
            assert (ran.stdout.strip(), ran.approval_id) == (b"deployed", waiting.approval_id)
        else:
            with pytest.raises(Denied) as refused:
                await run
            assert refused.value.reason == "APPROVAL_REFUSED"
    assert len(store.bodies(session_id, "command")) == 1


async def refused_answer(manager: SessionManager, approval_id: str) -> NotNow:
    with pytest.raises(NotNow) as refused:
        await manager.answer_approval(OPERATOR, approval_id, True)
    assert refused.value.reason == "APPROVAL_ABANDONED"
    assert approval_id in refused.value.message
    return refused.value


async def test_an_approval_ends_with_the_timeout_of_its_run_command(
    manager: SessionManager, fake: FakeExec, store: MemoryStore
) -> None:
    session_id = (await manager.create(ANN, CreateRequest())).view.record.session_id
    with pytest.raises(TooLate) as late:
        await manager.run_command(ANN, RunRequest("deploy now", session_id, timeout=0.01))
    assert late.value.reason == "APPROVAL_TIMEOUT"
    assert await manager.approvals(OPERATOR) == []
    refused = await refused_answer(manager, late.value.details["approval_id"])
    assert "RunCommand timed out after 0.01 s" in refused.message
    assert fake.terminal(session_id).typed == []
    (body,) = store.bodies(session_id, "approval_answered")
    assert (body["outcome"], body["by"]) == ("abandoned", "")
    assert store.events(session_id)[1:] == ["APPROVAL_REQUESTED", "APPROVAL_ANSWERED"]
    (ended,) = await manager.approvals(ANN, session_id, ended=True)
    assert (ended.outcome, ended.comment) == ("abandoned", body["comment"])


async def waiting_run(
    manager: SessionManager, session_id: str, request_id: str = ""
) -> tuple[asyncio.Task[RunResult], Approval]:
    request = RunRequest("deploy now", session_id, request_id=request_id)
    run = asyncio.create_task(manager.run_command(ANN, request))
    await settle()
    (approval,) = await manager.approvals(OPERATOR, session_id)
    return run, approval


async def test_an_approval_ends_with_a_caller_that_disconnects(manager: SessionManager, store: MemoryStore) -> None:
    session_id = (await manager.create(ANN, CreateRequest(kind="shell"))).view.record.session_id
    run, approval = await waiting_run(manager, session_id)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert await manager.approvals(OPERATOR) == []
    assert "disconnected" in (await refused_answer(manager, approval.approval_id)).message
    assert store.bodies(session_id, "command") == []


async def test_the_call_that_is_made_again_keeps_the_approval(manager: SessionManager, store: MemoryStore) -> None:
    session_id = (await manager.create(ANN, CreateRequest(kind="shell"))).view.record.session_id
    first, approval = await waiting_run(manager, session_id, "r1")
    second, same = await waiting_run(manager, session_id, "r1")
    assert same.approval_id == approval.approval_id
    first.cancel()
    await asyncio.wait([first])
    assert await manager.answer_approval(OPERATOR, approval.approval_id, True) == "approved"
    assert (await second).stdout.strip() == b"deployed"


async def test_held_input_waits_on_without_its_caller_and_ends_with_its_session(
    manager: SessionManager, fake: FakeExec, store: MemoryStore, clock: FakeClock
) -> None:
    session_id, _, approval_id = await requested(manager, fake)
    await clock.advance(60)
    assert len(await manager.approvals(OPERATOR)) == 1
    await manager.close(ANN, session_id, "force")
    assert await manager.approvals(OPERATOR) == []
    assert "session is closed" in (await refused_answer(manager, approval_id)).message
    assert [body["outcome"] for body in store.bodies(session_id, "approval_answered")] == ["abandoned"]


async def test_a_caller_that_waits_is_renewed_and_one_of_a_crashed_replica_is_not(
    store: MemoryStore, fake: FakeExec, clock: FakeClock
) -> None:
    first = make_manager(store, connecting(fake), clock=clock, text=RULES)
    second = make_manager(store, connecting(fake), clock=clock, text=RULES)
    async with running(second), running(first):
        session_id = (await first.create(ANN, CreateRequest(kind="shell"))).view.record.session_id
        run, approval = await waiting_run(first, session_id)
        await clock.advance(100)
        assert [each.approval_id for each in await second.approvals(OPERATOR)] == [approval.approval_id]
        # Its renewals stop, as in a crash.
        first._approvals._callers.clear()
        await clock.advance(20)
        assert await second.approvals(OPERATOR) == []
        assert [body["outcome"] for body in store.bodies(session_id, "approval_answered")] == ["abandoned"]
        assert "replica" in (await refused_answer(second, approval.approval_id)).message
        with pytest.raises(Denied) as denied:
            await run
        assert denied.value.reason == "APPROVAL_ABANDONED"


async def test_a_service_that_stops_ends_the_approvals_of_its_callers(
    store: MemoryStore, fake: FakeExec, clock: FakeClock
) -> None:
    async with running(make_manager(store, connecting(fake), clock=clock, text=RULES)) as manager:
        session_id = (await manager.create(ANN, CreateRequest(kind="shell"))).view.record.session_id
        run, approval = await waiting_run(manager, session_id)
    assert (await store.approval(approval.approval_id)).outcome == "abandoned"
    assert [body["outcome"] for body in store.bodies(session_id, "approval_answered")] == ["abandoned"]
    run.cancel()
    await asyncio.wait([run])


async def test_what_was_approved_and_not_run_is_recorded(
    manager: SessionManager, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller leaves after the answer and before the command's row."""
    session_id = (await manager.create(ANN, CreateRequest(kind="shell"))).view.record.session_id
    run, approval = await waiting_run(manager, session_id)
    answer = store.answer_approval

    async def leave_then_answer(*arguments: Any, **options: Any) -> Approval:
        found = await answer(*arguments, **options)
        run.cancel()
        return found

    monkeypatch.setattr(store, "answer_approval", leave_then_answer)
    await manager.answer_approval(OPERATOR, approval.approval_id, True)
    await asyncio.wait([run])
    assert store.bodies(session_id, "command") == []
    (error,) = store.bodies(session_id, "error")
    assert error["approval_id"] == approval.approval_id
    assert "was not run" in error["detail"]


async def test_what_is_typed_is_the_command_that_was_allowed_whatever_stands_on_the_line(
    manager: SessionManager, fake: FakeExec
) -> None:
    session_id, stub, approval_id = await requested(manager, fake)
    await manager.send_input(ANN, session_id, b"echo ")
    await manager.answer_approval(OPERATOR, approval_id, True)
    await settle()
    assert stub.typed == [b"echo ", b"\x05\x15deploy now\r"]


async def test_a_restarted_service_lets_old_approvals_expire(
    store: MemoryStore, fake: FakeExec, clock: FakeClock
) -> None:
    async with running(make_manager(store, connecting(fake), clock=clock, text=RULES)) as first:
        session_id, _, _ = await requested(first, fake)
    await clock.advance(400)
    async with running(make_manager(store, connecting(fake), clock=clock, text=RULES)):
        assert [body["outcome"] for body in store.bodies(session_id, "approval_answered")] == ["expired"]


async def test_what_was_approved_and_could_not_be_typed_may_be_approved_again(
    store: MemoryStore, clock: FakeClock
) -> None:
    fake = FakeExec(terminal_program=by_hand)
    made = make_manager(store, connecting(fake), clock=clock, text=RULES, prompt_seconds=0, input_seconds=0.05)
    async with running(made) as manager:
        session_id = (await manager.create(ANN, CreateRequest())).view.record.session_id
        stub = fake.terminal(session_id)
        stub.shows_prompt("$ ")
        taken = await manager.send_input(ANN, session_id, b"deploy now\n")
        stub.starts_command(b"sleep 10")
        with pytest.raises(NotNow, match="no prompt"):
            await manager.answer_approval(OPERATOR, taken.approval_id, True)
        assert "could not be typed" in store.bodies(session_id, "error")[-1]["detail"]
        stub.shows_prompt("$ ")
        assert await manager.answer_approval(OPERATOR, taken.approval_id, True) == "approved"
        assert stub.typed == [b"\x05\x15deploy now\r"]
        stub.starts_command(b"deploy now")
        await settle()
        await clock.advance(1)
        with pytest.raises(NotNow):
            await manager.answer_approval(OPERATOR, taken.approval_id, True)
        assert len(store.bodies(session_id, "command")) == len(store.bodies(session_id, "approval_answered")) == 1


async def test_a_caller_that_goes_away_has_answered(
    manager: SessionManager, fake: FakeExec, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stub, approval_id = await requested(manager, fake)
    answer, answered = store.answer_approval, asyncio.Event()

    async def answer_and_tell(*arguments: Any, **options: Any) -> Approval:
        found = await answer(*arguments, **options)
        answered.set()
        return found

    monkeypatch.setattr(store, "answer_approval", answer_and_tell)
    gone = asyncio.create_task(manager.answer_approval(OPERATOR, approval_id, True))
    await answered.wait()
    gone.cancel()
    await settle()
    assert stub.typed == [b"\x05\x15deploy now\r"]


async def test_the_same_request_is_asked_for_once_and_not_too_many_wait(
    manager: SessionManager, fake: FakeExec
) -> None:
    session_id = (await manager.create(ANN, CreateRequest())).view.record.session_id
    asked_for = {
        (await manager.send_input(ANN, session_id, b"deploy now\n", request_id="r1")).approval_id for _ in range(2)
    }
    assert len(asked_for) == 1
    for _ in range(MOST_WAITING - 1):
        await manager.send_input(ANN, session_id, b"deploy now\n")
    with pytest.raises(Exhausted, match="open approvals"):
        await manager.send_input(ANN, session_id, b"deploy now\n")
    assert len(await manager.approvals(OPERATOR)) == MOST_WAITING


async def test_what_cannot_be_shown_to_whoever_allows_it_is_not_asked_for(
    manager: SessionManager, fake: FakeExec
) -> None:
    session_id = (await manager.create(ANN, CreateRequest())).view.record.session_id
    with pytest.raises(Denied, match="could not be held"):
        await manager.send_input(ANN, session_id, b"deploy \xff\n")
    assert await manager.approvals(OPERATOR) == []


async def test_a_command_that_nobody_would_read_is_not_asked_for(manager: SessionManager) -> None:
    session_id = (await manager.create(ANN, CreateRequest())).view.record.session_id
    with pytest.raises(Denied, match="too long"):
        await manager.run_command(ANN, RunRequest(f"deploy {'x' * LONGEST_COMMAND}", session_id))
    assert await manager.approvals(OPERATOR) == []
