"""Sessions and their leases in the database: limits that hold over replicas, pages, fences, take-over."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from holdfast.service.problems import Exhausted, Exists, Invalid, NotFound, NotNow, Problem
from holdfast.service.store import Fence, Page, SessionFilter, SessionLease, Store
from holdfast.service.types import Resources, ResourceUsage, SessionRecord
from holdfast.testing import FakeClock
from tests.service.conftest import OpenStore
from tests.service.session_records import entry, record

MANY: dict[str, Any] = {"per_agent": 1000, "total": 1000}


async def test_a_session_comes_back_as_it_was_written(store: Store) -> None:
    whole = record(
        labels={"job": "1", 'a "quoted"': "ünïcode"},
        environment={"PATH": "/bin"},
        enforced=("memory", "network"),
        unenforced=("cpu",),
        closed_at=None,
        request_id="r",
        cols=132,
        audited_token=7,
        warned_at=3.25,
        created_at=1763280000.123456,
    )
    assert await store.add_session(whole, **MANY) == whole
    assert await store.session("s1") == whole
    assert await store.open_sessions() == [whole]


async def test_no_such_session(store: Store) -> None:
    with pytest.raises(NotFound) as missing:
        await store.session("nobody")
    assert missing.value.reason == "SESSION_NOT_FOUND"
    with pytest.raises(NotFound):
        await store.update_session("nobody", state="BUSY")


async def test_creation_limits_hold_for_each_agent_and_for_all(store: Store) -> None:
    for number in range(2):
        await store.add_session(record(f"a{number}"), per_agent=2, total=3)
    with pytest.raises(Exhausted, match="agent 'a' has 2 open sessions") as refused:
        await store.add_session(record("a2"), per_agent=2, total=3)
    assert refused.value.reason == "SESSION_LIMIT"
    await store.add_session(record("b0", "b"), per_agent=2, total=3)
    with pytest.raises(Exhausted, match="3 sessions are open"):
        await store.add_session(record("c0", "c"), per_agent=2, total=3)
    await store.update_session("a0", state="CLOSED")
    await store.add_session(record("c0", "c"), per_agent=2, total=3)


async def test_creation_limits_hold_when_two_replicas_create_at_once(open_store: OpenStore) -> None:
    replicas = [await open_store(), await open_store()]
    results = await asyncio.gather(
        *(
            replicas[number % 2].add_session(record(f"s{number}", f"agent{number % 3}"), per_agent=4, total=10)
            for number in range(24)
        ),
        return_exceptions=True,
    )
    made = [each for each in results if isinstance(each, SessionRecord)]
    assert all(isinstance(each, SessionRecord | Exhausted) for each in results)
    assert len(made) == 10
    assert max(sum(each.agent_id == agent for each in made) for agent in ("agent0", "agent1", "agent2")) == 4


async def test_the_same_request_is_the_same_session_also_at_once(open_store: OpenStore) -> None:
    replicas = [await open_store(), await open_store()]
    results = await asyncio.gather(
        *(
            replicas[number % 2].add_session(record(f"s{number}", request_id="r1"), per_agent=1, total=1)
            for number in range(6)
        )
    )
    assert len({each.session_id for each in results}) == 1
    others = await replicas[0].add_session(record("t", "b", request_id="r1"), **MANY)
    assert others.session_id == "t"
    with pytest.raises(Exists):
        await replicas[0].add_session(record("t", "b", request_id="r2"), **MANY)


async def test_pages_of_sessions_by_agent_state_and_label(store: Store) -> None:
    for number in range(7):
        labels = {"parity": "odd" if number % 2 else "even", "job": "x"}
        # Two by two at the same time: the id decides.
        created = 1000.0 + number // 2
        await store.add_session(record(f"s{number}", f"a{number % 2}", created_at=created, labels=labels), **MANY)
    await store.update_session("s3", state="BUSY")
    seen: list[str] = []
    token = ""
    for size in (3, 3, 3):
        found, token = await store.sessions(page=Page(size, token))
        seen += [each.session_id for each in found]
    assert seen == [f"s{number}" for number in range(7)]
    assert token == ""

    async def ids(**which: object) -> list[str]:
        found, _ = await store.sessions(SessionFilter(**which))  # type: ignore[arg-type]
        return [each.session_id for each in found]

    assert await ids(agent_id="a1") == ["s1", "s3", "s5"]
    assert await ids(states=("BUSY",)) == ["s3"]
    assert await ids(labels={"parity": "even", "job": "x"}) == ["s0", "s2", "s4", "s6"]
    assert await ids(labels={"parity": "even", "job": "y"}) == []


async def test_a_page_token_that_nobody_gave_is_refused(store: Store) -> None:
    for token in ("nonsense", "W10", "!!", "WyJhIiwxXQ", "[]" * 50):
        with pytest.raises(Invalid) as refused:
            await store.sessions(page=Page(10, token))
        assert refused.value.reason == "BAD_PAGE_TOKEN"


async def test_metadata_updates(store: Store) -> None:
    await store.add_session(record(), **MANY)
    changed = await store.update_session("s1", state="BUSY", commands_run=3, enforced=("cpu",), warned_at=5.0)
    assert (changed.state, changed.commands_run, changed.enforced, changed.warned_at) == ("BUSY", 3, ("cpu",), 5.0)
    assert await store.session("s1") == changed
    policy = record().policy
    slower = type(policy)("other", 1.0, 2.0, 3.0, resources=Resources(memory_bytes=5))
    assert (await store.update_session("s1", policy=slower, warned_at=None)).policy == slower
    assert (await store.session("s1")).warned_at is None
    for name in ("agent_id", "created_at", "audited_token", "nonsense"):
        with pytest.raises(Invalid, match=f"{name} of a session cannot be set"):
            await store.update_session("s1", **{name: "x"})


async def test_of_two_that_tell_how_a_session_ended_the_first_is_believed(open_store: OpenStore) -> None:
    clock = FakeClock(5000.0)
    one, other = await open_store(clock=clock), await open_store(clock=clock)
    await one.add_session(record(), **MANY)
    results = await asyncio.gather(
        one.update_session("s1", state="CLOSED", close_reason="asked"),
        other.update_session("s1", state="ERROR", close_reason="crashed"),
    )
    kept = await one.session("s1")
    assert list(results) == [kept, kept]
    assert (kept.state, kept.close_reason) in (("CLOSED", "asked"), ("ERROR", "crashed"))
    assert kept.closed_at == 5000.0
    # Fields that are not about its end may still change.
    assert (await one.update_session("s1", commands_run=9)).commands_run == 9


# --- leases ---------------------------------------------------------------------------------------------------


async def test_a_lease_is_claimed_once_renewed_and_released(open_store: OpenStore) -> None:
    clock = FakeClock()
    one, other = await open_store(clock=clock), await open_store(clock=clock)
    for number in range(5):
        await one.add_session(record(f"s{number}", created_at=1000.0 + number), **MANY)
    await one.update_session("s4", state="CLOSED")
    assert [each.session_id for each in await one.claim("r1", 30.0, 3)] == ["s0", "s1", "s2"]
    assert await other.claim("r2", 30.0, 10) == [SessionLease("s3", "r2", 1, 1030.0)]
    await clock.advance(20)
    assert await one.renew("r1", 30.0) == ["s0", "s1", "s2"]
    assert {each.expires_at for each in await one.leases("r1")} == {1050.0}
    assert await one.release("r1", "s1") == 1
    assert await other.claim("r2", 30.0) == [SessionLease("s1", "r2", 2, 1050.0)]
    assert await one.release("r1") == 2
    assert sorted(each.session_id for each in await other.claim("r2", 30.0)) == ["s0", "s2"]


async def test_an_expired_lease_is_taken_over_and_its_former_owner_hears_of_it(open_store: OpenStore) -> None:
    clock = FakeClock()
    one, other = await open_store(clock=clock), await open_store(clock=clock)
    await one.add_session(record(), **MANY, replica="r1", seconds=30.0)
    assert await one.leases("r1") == [SessionLease("s1", "r1", 1, 1030.0)]
    await clock.advance(29)
    assert await other.claim("r2", 30.0) == []
    await clock.advance(1)
    assert await other.claim("r2", 30.0) == [SessionLease("s1", "r2", 2, 1060.0)]
    assert await one.renew("r1", 30.0) == []


async def test_a_replica_knows_when_the_first_lease_of_another_ends(open_store: OpenStore) -> None:
    clock = FakeClock()
    store = await open_store(clock=clock)
    assert await store.next_end("r1") == math.inf
    await store.add_session(record("s0"), **MANY, replica="r1", seconds=10.0)
    assert await store.next_end("r1") == math.inf
    for name, seconds in (("s1", 30.0), ("s2", 20.0)):
        await store.add_session(record(name), **MANY, replica="r2", seconds=seconds)
    await clock.advance(5)
    assert await store.next_end("r1") == 15.0
    await store.update_session("s2", state="CLOSED")
    assert await store.next_end("r1") == 25.0


async def test_all_leases_can_be_given_up_by_who_is_alone(open_store: OpenStore) -> None:
    store = await open_store(clock=FakeClock())
    await store.add_session(record("s1"), **MANY, replica="dead", seconds=3600.0)
    await store.release_all()
    assert [lease.replica for lease in await store.claim("r1", 30.0)] == ["r1"]


async def test_replicas_that_claim_at_once_get_different_sessions(open_store: OpenStore) -> None:
    replicas = {name: await open_store() for name in ("r1", "r2", "r3")}
    for number in range(30):
        await replicas["r1"].add_session(record(f"s{number}"), **MANY)
    rounds = [
        await asyncio.gather(*(each.claim(name, 60.0, 4) for name, each in replicas.items())) for _ in range(4)
    ]
    claimed = [lease.session_id for leases in rounds for each in leases for lease in each]
    assert len(claimed) == len(set(claimed)) == 30


# --- fences ---------------------------------------------------------------------------------------------------


async def test_a_fenced_append_moves_the_token_with_its_rows_and_once(store: Store) -> None:
    await store.add_session(record(), **MANY)
    (lease,) = await store.claim("r1", 30.0)
    fence = Fence("s1", "r1", lease.epoch, 100)
    rows = await store.append([entry(n=1), entry(n=2)], fence=fence)
    assert [row.seq for row in rows] == [1, 2]
    assert (await store.session("s1")).audited_token == 100
    assert await store.append([entry(n=1), entry(n=2)], fence=fence) == []
    assert await store.last_seq("s1") == 2


async def test_a_fenced_append_sets_fields_of_its_session_and_once(store: Store) -> None:
    await store.add_session(record(), **MANY)
    (lease,) = await store.claim("r1", 30.0)
    fence = Fence("s1", "r1", lease.epoch, 100, {"commands_run": 3, "last_activity_at": 1760000000.1234567})
    await store.append([entry(n=1)], fence=fence)
    await store.update_session("s1", commands_run=4)
    await store.append([entry(n=1)], fence=fence)
    late = Fence("s1", "r1", lease.epoch + 1, 200, {"commands_run": 9})
    with pytest.raises(NotNow):
        await store.append([entry(n=2)], fence=late)
    kept = await store.session("s1")
    assert (kept.commands_run, kept.last_activity_at) == (4, 1760000000.1234567)


async def test_a_replica_that_lost_its_lease_writes_nothing(store: Store) -> None:
    await store.add_session(record(), **MANY)
    (lease,) = await store.claim("r1", 30.0)
    await store.release("r1")
    (later,) = await store.claim("r2", 30.0)
    assert later.epoch == lease.epoch + 1
    late = store.append([entry(n=1)], fence=Fence("s1", "r1", lease.epoch, 10))
    # In the same transaction as others, which must not suffer for it.
    fine = store.append([entry(n=2)], fence=Fence("s1", "r2", later.epoch, 10))
    unfenced = store.append([entry("s1", "input")])
    results = await asyncio.gather(late, fine, unfenced, return_exceptions=True)
    assert isinstance(results[0], NotNow)
    assert results[0].reason == "LEASE_LOST"
    assert not any(isinstance(each, BaseException) for each in results[1:])
    rows, _ = await store.rows()
    assert [row.body for row in rows if row.session_id == "s1"] == ['{"n":2}', "{}"]


async def test_a_follower_that_is_taken_over_loses_and_doubles_nothing(open_store: OpenStore) -> None:
    """Two replicas take the same session from each other at random points; each writes from the token on."""
    stores = [await open_store(), await open_store()]
    await stores[0].add_session(record(), **MANY)
    last = 60

    async def follow(number: int) -> int:
        """Until everything is written; how often it was taken over."""
        store, name, lost = stores[number], f"r{number}", 0
        while True:
            token = (await store.session("s1")).audited_token
            if token == last:
                return lost
            leases = await store.claim(name, -1.0)  # expired as soon as it is given: the other may take it
            if not leases:
                continue
            try:
                for step in range(token + 1, last + 1):
                    await store.append([entry(n=step)], fence=Fence("s1", name, leases[0].epoch, step))
            except NotNow:
                lost += 1

    await asyncio.gather(follow(0), follow(1))
    rows = await stores[0].rows_after("s1", 0)
    assert [row.body for row in rows] == [f'{{"n":{number}}}' for number in range(1, last + 1)]
    assert (await stores[0].verify()).holds


async def test_what_is_not_text_is_refused_and_harms_nobody(store: Store) -> None:
    results = await asyncio.gather(
        store.append([entry(kind="fine")]),
        store.append([entry(kind="bad\0")]),
        store.append([entry(text="nul \0 and lone \udc80 surrogate")]),
        store.append([entry(text="x" * 300_000)]),
        return_exceptions=True,
    )
    assert [isinstance(each, Problem) for each in results] == [False, True, False, True]
    await store.add_session(record(), **MANY)
    both = await asyncio.gather(
        store.append([entry(kind="fine")]), store.update_session("s1", summary="nul \0"), return_exceptions=True
    )
    assert isinstance(both[0], list)
    # SQLite takes it, PostgreSQL does not.
    assert isinstance(both[1], SessionRecord | Invalid)
    assert (await store.verify()).holds


async def test_the_last_sample_of_usage_is_kept_for_all_replicas(open_store: OpenStore) -> None:
    first, second = await open_store(), await open_store()
    for name in ("s1", "s2"):
        await first.add_session(record(name), **MANY)
    sample = ResourceUsage(1005.0, process_count=2, cpu_percent=12.5, memory_bytes=2**40, session_idle=True)
    await first.put_usages({"s1": sample, "removed": sample})
    assert await second.usages(["s1", "s2", "removed"]) == {"s1": sample}
    later = ResourceUsage(1010.0, process_count=3)
    await second.put_usages({"s1": later, "s2": later})
    # The replica that had the lease before is late: the newer sample stays.
    await first.put_usages({"s1": sample})
    assert await first.usages(["s1", "s2"]) == {"s1": later, "s2": later}
    assert await first.usages([]) == {}
    await first.update_session("s1", state="CLOSED")
    await first.retain(max_age=0.0, max_bytes=None)
    assert await first.usages(["s1", "s2"]) == {"s2": later}
