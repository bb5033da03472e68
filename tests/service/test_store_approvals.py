"""Approvals are answered once or expire once; agents are found by the hash of their token."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.service.problems import Exists, NotFound, NotNow
from holdfast.service.store import Store
from holdfast.service.store.approvals import SESSION_OVER
from holdfast.service.types import Approval, Caller
from holdfast.testing import FakeClock
from tests.service.conftest import OpenStore
from tests.service.session_records import record


def requested(approval_id: str = "p1", **fields: object) -> Approval:
    values = {"session_id": "s1", "agent_id": "a", "command": "rm -r x", "reason": "rules.toml:3"}
    times = {"asked_at": 1000.0, "expires_at": 1300.0, "data": b"rm -r x\n\xff"}
    return Approval(**{"approval_id": approval_id, **values, **times, **fields})  # type: ignore[arg-type]


async def test_an_approval_comes_back_as_it_was_asked_for(open_store: OpenStore) -> None:
    store = await open_store(clock=FakeClock(1000.0))
    await store.add_approval(requested("p2", asked_at=1001.0, session_id="s2", agent_id="b"))
    await store.add_approval(requested())
    assert await store.approval("p1") == requested()
    assert [each.approval_id for each in await store.open_approvals()] == ["p1", "p2"]
    assert [each.approval_id for each in await store.open_approvals(session_id="s2")] == ["p2"]
    assert [each.approval_id for each in await store.open_approvals(agent_id="a")] == ["p1"]
    with pytest.raises(Exists):
        await store.add_approval(requested())
    with pytest.raises(NotFound):
        await store.approval("nobody")
    with pytest.raises(NotFound):
        await store.answer_approval("nobody", "approved")


async def test_of_two_answers_at_once_one_gets_through(open_store: OpenStore) -> None:
    clock = FakeClock(1000.0)
    replicas = [await open_store(clock=clock), await open_store(clock=clock)]
    await replicas[0].add_approval(requested())
    results = await asyncio.gather(
        *(
            replicas[number % 2].answer_approval("p1", "approved" if number % 2 else "refused", by=f"op{number}")
            for number in range(6)
        ),
        return_exceptions=True,
    )
    (won,) = [each for each in results if isinstance(each, Approval)]
    lost = [each for each in results if isinstance(each, NotNow)]
    assert len(lost) == 5
    assert {each.reason for each in lost} == {"APPROVAL_ANSWERED"}
    assert await replicas[0].approval("p1") == won
    assert await replicas[0].open_approvals() == []


async def test_an_approval_expires_once_and_takes_no_answer_then(open_store: OpenStore) -> None:
    clock = FakeClock(1000.0)
    replicas = [await open_store(clock=clock), await open_store(clock=clock)]
    await replicas[0].add_approval(requested())
    assert await replicas[0].end_approvals() == []
    await clock.advance(300)
    with pytest.raises(NotNow) as late:
        await replicas[0].answer_approval("p1", "approved")
    assert late.value.reason == "APPROVAL_EXPIRED"
    assert await replicas[0].open_approvals() == []
    expired = await asyncio.gather(*(each.end_approvals() for each in replicas))
    assert [approval.outcome for each in expired for approval in each] == ["expired"]
    with pytest.raises(NotNow) as late:
        await replicas[0].answer_approval("p1", "approved")
    assert late.value.reason == "APPROVAL_EXPIRED"


async def test_an_approval_ends_with_its_caller(open_store: OpenStore) -> None:
    clock = FakeClock(1000.0)
    replicas = [await open_store(clock=clock), await open_store(clock=clock)]
    for name in ("left", "kept", "crashed", "held"):
        caller = "" if name == "held" else f"r1/{name}"
        await replicas[0].add_approval(requested(name, caller=caller), caller_seconds=15.0)
    (ended,) = await replicas[0].abandon_approvals("r1/left", "its caller left")
    assert (ended.approval_id, ended.outcome, ended.comment) == ("left", "abandoned", "its caller left")
    assert await replicas[1].abandon_approvals("r1/left", "again") == []
    await clock.advance(10)
    await replicas[0].renew_callers({"r1/kept", "r1/left"}, 15.0)
    await clock.advance(10)
    assert {each.approval_id for each in await replicas[1].open_approvals()} == {"kept", "held"}
    assert not await replicas[1].attach_caller("crashed", "r2/again", 15.0)
    for name in ("crashed", "left"):
        with pytest.raises(NotNow):
            await replicas[1].answer_approval(name, "approved")
    ended_by = await asyncio.gather(*(each.end_approvals() for each in replicas))
    assert [(each.approval_id, each.outcome) for found in ended_by for each in found] == [("crashed", "abandoned")]
    with pytest.raises(NotNow) as late:
        await replicas[1].answer_approval("crashed", "approved")
    assert late.value.reason == "APPROVAL_ABANDONED"
    assert await replicas[1].attach_caller("kept", "r2/again", 15.0)
    assert await replicas[0].abandon_approvals("r1/kept", "the call before") == []
    assert (await replicas[1].answer_approval("kept", "approved")).outcome == "approved"
    assert {each.outcome for each in await replicas[0].latest_approvals()} == {"", "approved", "abandoned"}


async def test_an_approval_ends_with_its_session(open_store: OpenStore) -> None:
    store = await open_store(clock=FakeClock(1000.0))
    await store.add_session(record("s1"), per_agent=10, total=10)
    await store.add_approval(requested())
    assert await store.end_approvals() == []
    await store.update_session("s1", state="CLOSED")
    assert await store.open_approvals() == []
    assert [(each.outcome, each.comment) for each in await store.end_approvals()] == [("abandoned", SESSION_OVER)]


async def test_agents_are_made_found_changed_and_removed(store: Store) -> None:
    assert not await store.has_operator()
    agent = await store.add_agent("a", "h1", limits={"sessions": 3})
    assert await store.find_agent("h1") == agent
    assert agent.caller == Caller("a", "agent")
    assert await store.find_agent("h2") is None
    for agent_id, token in (("a", "h2"), ("b", "h1")):
        with pytest.raises(Exists):
            await store.add_agent(agent_id, token)
    await store.add_agent("b", "h2", role="operator")
    assert await store.has_operator()
    assert [each.agent_id for each in await store.agents()] == ["a", "b"]
    with pytest.raises(Exists):
        await store.rotate_agent("a", "h2")
    await store.rotate_agent("a", "h3")
    assert await store.find_agent("h1") is None
    assert (await store.find_agent("h3")) == await store.agent("a")
    changed = await store.set_agent("b", disabled=True)
    assert changed.disabled
    assert (await store.set_agent("a", limits={"sessions": 4})).limits == {"sessions": 4}
    assert not await store.has_operator()
    await store.remove_agent("a")
    for call in (store.remove_agent("a"), store.agent("a"), store.rotate_agent("a", "h9"), store.set_agent("a")):
        with pytest.raises(NotFound):
            await call
