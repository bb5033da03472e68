"""From an authorization header to a caller: what is remembered, for how long, and what wrong tokens cost."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.service.access.tokens import Access, AccessSettings, KnownAgent, hash_token, new_token
from holdfast.service.problems import Exhausted, Unauthenticated, Unavailable
from holdfast.testing import FakeClock
from holdfast.testing.clock import settle

from .fake_sessions import ANNA, OLGA, FakeAgents


async def test_a_token_names_its_agent_and_role() -> None:
    access = Access(FakeAgents(), FakeClock())
    anna = await access.authenticate(f"Bearer {ANNA}", "::1")
    assert (anna.agent_id, anna.role) == ("anna", "agent")
    olga = await access.authenticate(f"bearer  {OLGA} ", "::1")
    assert (olga.agent_id, olga.role) == ("olga", "operator")


def test_tokens_are_long_random_and_kept_as_their_sha256() -> None:
    made = {new_token() for _ in range(100)}
    assert len(made) == 100
    assert all(token.startswith("hf_") and len(token) == 46 for token in made)
    assert hash_token("hf_x") == "f5618cd8b98c85c7aa86b0a7296d3fc33aaa88faabc75c3ae724b17b59c96f38"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic YTpi", "hf_anna", "Bearer " + "x" * 2_000]
)
async def test_a_header_without_a_token_is_refused(header: str | None) -> None:
    agents = FakeAgents()
    with pytest.raises(Unauthenticated) as refused:
        await Access(agents, FakeClock()).authenticate(header, "::1")
    assert refused.value.reason == "TOKEN_MISSING"
    assert agents.requested == 0


async def test_a_wrong_token_and_a_disabled_agent_read_the_same_and_the_token_is_not_repeated() -> None:
    agents = FakeAgents()
    agents.add("hf_gone", "gone", disabled=True)
    access = Access(agents, FakeClock())
    messages = set()
    for token in ("hf_wrong", "hf_gone"):
        with pytest.raises(Unauthenticated) as refused:
            await access.authenticate(f"Bearer {token}", "::1")
        assert token not in str(refused.value)
        assert token not in str(refused.value.details)
        messages.add((str(refused.value), refused.value.reason))
    assert len(messages) == 1
    assert access.failed == 2


async def test_a_removed_token_stops_within_seconds_and_is_looked_up_once_until_then() -> None:
    agents, clock = FakeAgents(), FakeClock()
    access = Access(agents, clock, AccessSettings(remember_seconds=5))
    for _ in range(10):
        await access.authenticate(f"Bearer {ANNA}", "::1")
    assert agents.requested == 1
    del agents.by_hash[hash_token(ANNA)]
    await clock.advance(4)
    await access.authenticate(f"Bearer {ANNA}", "::1")
    await clock.advance(1)
    with pytest.raises(Unauthenticated):
        await access.authenticate(f"Bearer {ANNA}", "::1")


async def test_forgetting_makes_a_removal_in_this_process_take_hold_at_once() -> None:
    agents = FakeAgents()
    access = Access(agents, FakeClock())
    await access.authenticate(f"Bearer {ANNA}", "::1")
    del agents.by_hash[hash_token(ANNA)]
    access.forget()
    with pytest.raises(Unauthenticated):
        await access.authenticate(f"Bearer {ANNA}", "::1")


async def test_a_token_added_after_it_was_refused_works_within_a_second() -> None:
    agents, clock = FakeAgents(), FakeClock()
    access = Access(agents, clock)
    with pytest.raises(Unauthenticated):
        await access.authenticate("Bearer hf_new", "::1")
    agents.add("hf_new", "nina")
    await clock.advance(1)
    assert (await access.authenticate("Bearer hf_new", "::1")).agent_id == "nina"


async def test_calls_without_a_token_refuse_no_token_that_is_right() -> None:
    agents = FakeAgents()
    access = Access(agents, FakeClock(), AccessSettings(failures_per_second=1, failures_burst=3))
    for header in [None] * 20 + ["Bearer of no token"] * 20:
        with pytest.raises((Unauthenticated, Exhausted)):
            await access.authenticate(header, "10.0.0.1")
    assert agents.requested == 0
    assert (await access.authenticate(f"Bearer {ANNA}", "10.0.0.1")).agent_id == "anna"


async def test_one_wrong_token_again_and_again_is_looked_up_once_a_second() -> None:
    agents, clock = FakeAgents(), FakeClock()
    access = Access(agents, clock, AccessSettings(lookups_per_second=1, lookups_burst=5))
    for _ in range(3):
        for _ in range(50):
            with pytest.raises((Unauthenticated, Exhausted)):
                await access.authenticate("Bearer hf_old", "10.0.0.1")
        await clock.advance(1)
    assert agents.requested == 3
    assert (await access.authenticate(f"Bearer {ANNA}", "10.0.0.1")).agent_id == "anna"


async def test_random_tokens_from_one_address_are_looked_up_so_often_and_no_more() -> None:
    agents, clock = FakeAgents(), FakeClock()
    access = Access(agents, clock, AccessSettings(lookups_per_second=1, lookups_burst=4))
    await access.authenticate(f"Bearer {ANNA}", "10.0.0.1")
    for index in range(3):
        with pytest.raises(Unauthenticated):
            await access.authenticate(f"Bearer hf_{index}", "10.0.0.1")
    requested = agents.requested
    for index in range(100):
        with pytest.raises(Exhausted) as refused:
            await access.authenticate(f"Bearer hf_more_{index}", "10.0.0.1")
        assert refused.value.reason == "AUTHENTICATION_RATE_LIMIT"
        assert refused.value.retry_after == pytest.approx(1.0)
    assert agents.requested == requested
    # Others are not touched: another address, and an agent that was right before from this one.
    with pytest.raises(Unauthenticated):
        await access.authenticate("Bearer hf_wrong", "10.0.0.2")
    await clock.advance(0.5)
    access_again = await access.authenticate(f"Bearer {ANNA}", "10.0.0.1")
    assert access_again.agent_id == "anna"
    await clock.advance(1)
    with pytest.raises(Unauthenticated):
        await access.authenticate("Bearer hf_other", "10.0.0.1")


async def test_a_clock_that_is_set_back_keeps_no_removed_token_alive() -> None:
    agents, clock = FakeAgents(), FakeClock(1_000_000.0)
    access = Access(agents, clock)
    await access.authenticate(f"Bearer {ANNA}", "::1")
    agents.by_hash.clear()
    clock.jump(-3_600)
    with pytest.raises(Unauthenticated):
        await access.authenticate(f"Bearer {ANNA}", "::1")


async def test_what_is_remembered_is_bounded() -> None:
    agents = FakeAgents()
    for index in range(50):
        agents.add(f"hf_{index}", f"agent{index}")
    access = Access(agents, FakeClock(), AccessSettings(remember_tokens=10))
    for index in range(50):
        await access.authenticate(f"Bearer hf_{index}", "::1")
    assert agents.requested == 50
    await access.authenticate("Bearer hf_49", "::1")
    assert agents.requested == 50
    await access.authenticate("Bearer hf_0", "::1")
    assert agents.requested == 51


class SlowAgents(FakeAgents):
    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def find_agent(self, token_hash: str) -> KnownAgent | None:  # type: ignore[override]
        found = await super().find_agent(token_hash)
        await self.go.wait()
        return found


async def test_a_crowd_of_calls_makes_one_look_up_and_one_that_leaves_takes_nothing_from_the_others() -> None:
    agents = SlowAgents()
    access = Access(agents, FakeClock())
    calls = [asyncio.create_task(access.authenticate(f"Bearer {ANNA}", "::1")) for _ in range(20)]
    await settle()
    calls[0].cancel()
    agents.go.set()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(ended[0], asyncio.CancelledError)
    assert {getattr(each, "agent_id", None) for each in ended[1:]} == {"anna"}
    assert agents.requested == 1


async def test_a_store_that_is_down_refuses_rather_than_lets_in() -> None:
    class DownAgents(FakeAgents):
        async def find_agent(self, token_hash: str) -> None:
            raise Unavailable("the database is down", reason="STORE_DOWN")

    access = Access(DownAgents(), FakeClock())
    with pytest.raises(Unavailable):
        await access.authenticate(f"Bearer {ANNA}", "::1")
    assert access.failed == 0
