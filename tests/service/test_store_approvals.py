"""Approvals are answered once or expire once; agents are found by the hash of their token."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.service.model import Approval, Caller
from holdfast.service.problems import Exists, NotFound, NotNow
from holdfast.service.store import Store
from holdfast.testing import FakeClock
from service.conftest import OpenStore


def asked(approval_id: str = "p1", **fields: object) -> Approval:
    values = {"session_id": "s1", "agent_id": "a", "command": "rm -r x", "reason": "rules.toml:3"}
    times = {"asked_at": 1000.0, "expires_at": 1300.0, "data": b"rm -r x\n\xff"}
    return Approval(**{"approval_id": approval_id, **values, **times, **fields})  # type: ignore[arg-type]


async def test_an_approval_comes_back_as_it_was_asked_for(open_store: OpenStore) -> None:
    store = await open_store(clock=FakeClock(1000.0))
    await store.add_approval(asked("p2", asked_at=1001.0, session_id="s2", agent_id="b"))
    await store.add_approval(asked())
    assert await store.approval("p1") == asked()
    assert [each.approval_id for each in await store.open_approvals()] == ["p1", "p2"]
    assert [each.approval_id for each in await store.open_approvals(session_id="s2")] == ["p2"]
    assert [each.approval_id for each in await store.open_approvals(agent_id="a")] == ["p1"]
    with pytest.raises(Exists):
        await store.add_approval(asked())
    with pytest.raises(NotFound):
        await store.approval("nobody")
    with pytest.raises(NotFound):
        await store.answer_approval("nobody", "approved")


async def test_of_two_answers_at_once_one_gets_through(open_store: OpenStore) -> None:
    clock = FakeClock(1000.0)
    replicas = [await open_store(clock=clock), await open_store(clock=clock)]
    await replicas[0].add_approval(asked())
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
    await replicas[0].add_approval(asked())
    assert await replicas[0].expire_approvals() == []
    await clock.advance(300)
    with pytest.raises(NotNow) as late:
        await replicas[0].answer_approval("p1", "approved")
    assert late.value.reason == "APPROVAL_EXPIRED"
    assert await replicas[0].open_approvals() == []
    expired = await asyncio.gather(*(each.expire_approvals() for each in replicas))
    assert [approval.outcome for each in expired for approval in each] == ["expired"]
    with pytest.raises(NotNow) as late:
        await replicas[0].answer_approval("p1", "approved")
    assert late.value.reason == "APPROVAL_EXPIRED"


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
