"""Announcements of sandboxes that end soon, over a store in memory; those of a cluster: `tests/kubernetes/`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from holdfast.fleet.engine import SandboxEnding
from holdfast.fleet.kubernetes.endings import ending_of
from holdfast.fleet.kubernetes.readiness import Condition, Metadata, PodObject, PodStatus
from holdfast.fleet.local import LocalEngine
from holdfast.fleet.record import new_id
from holdfast.service.sandboxes.sandbox_endings import SandboxEndings
from holdfast.testing import FakeClock
from holdfast.testing.clock import settle
from tests.service.fakes import MemoryStore
from tests.service.session_records import record as make_record

EVICTED = Condition("DisruptionTarget", "True", "EvictionByEvictionAPI", "Eviction API: evicting")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(FakeClock())


async def rows(store: MemoryStore) -> list[tuple[str, str]]:
    return [(row.kind, json.loads(row.body).get("detail", "")) for row in store.log]


@pytest.mark.parametrize("before", [False, True], ids=["followed", "announced-before-it-is-followed"])
async def test_the_end_is_announced_once_and_is_the_reason(store: MemoryStore, before: bool) -> None:
    id = new_id()
    record = make_record(sandbox=f"kubernetes:{id}", state="RUNNING")
    other = make_record("s2", sandbox=f"kubernetes:{new_id()}", state="RUNNING")
    for each in (record, other):
        await store.add_session(each, per_agent=10, total=10)
    announced: asyncio.Queue[SandboxEnding] = asyncio.Queue()

    async def endings(engine: str) -> AsyncIterator[SandboxEnding]:
        assert engine == "kubernetes"
        while True:
            yield await announced.get()

    watching = SandboxEndings(store, FakeClock(), endings)
    watching.watch(other)
    if not before:
        watching.watch(record)
    announced.put_nowait(SandboxEnding(id, "EvictionByEvictionAPI", 30.0))
    await settle()
    if before:
        watching.watch(record)
    # The watch of the cluster broke and began again.
    announced.put_nowait(SandboxEnding(id, "EvictionByEvictionAPI", 20.0))
    await settle()
    await watching.stop()
    assert await rows(store) == [
        ("sandbox_ending", ""),
        ("event", "the sandbox ends in 30 s: EvictionByEvictionAPI"),
    ]
    assert (await store.session("s1")).close_reason == "sandbox ended: EvictionByEvictionAPI"
    assert (await store.session("s2")).close_reason == ""


async def test_the_removal_of_a_closing_session_is_not_announced(store: MemoryStore) -> None:
    id = new_id()
    record = make_record(sandbox=f"kubernetes:{id}", state="CLOSING")
    await store.add_session(record, per_agent=10, total=10)

    async def endings(engine: str) -> AsyncIterator[SandboxEnding]:
        yield SandboxEnding(id, "the pod was deleted", 1.0)

    watching = SandboxEndings(store, FakeClock(), endings)
    watching.watch(record)
    await settle()
    await watching.stop()
    assert await rows(store) == []


async def test_an_engine_without_announcements_ends_the_loop() -> None:
    assert [each async for each in LocalEngine().endings()] == []


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (PodObject(Metadata("p")), None),
        (PodObject(Metadata("p"), status=PodStatus("Running", conditions=(EVICTED,))), (30.0, EVICTED.reason)),
        (
            PodObject(
                Metadata("p", deletion_timestamp="2026-01-01T00:00:30Z", deletion_grace_period_seconds=20),
                status=PodStatus("Running", conditions=(EVICTED,)),
            ),
            (20.0, EVICTED.reason),
        ),
        (
            PodObject(Metadata("p", deletion_timestamp="2026-01-01T00:00:30Z", deletion_grace_period_seconds=60)),
            (30.0, "the pod was deleted"),
        ),
        (PodObject(Metadata("p"), status=PodStatus("Failed", conditions=(EVICTED,))), (0.0, EVICTED.reason)),
    ],
    ids=["none", "condition", "grace", "timestamp", "ended"],
)
def test_the_end_of_a_pod(pod: PodObject, expected: tuple[float, str] | None) -> None:
    ending = ending_of(pod, now=1767225600.0)
    if expected is None:
        assert ending is None
    else:
        assert ending is not None
        assert ending.seconds == expected[0]
        assert ending.reason.startswith(expected[1])
