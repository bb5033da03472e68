"""Appends to PostgreSQL as one statement: used after a known row, with all checks of the transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import text

from holdfast.service.audit.chain import MARKED, OPENED
from holdfast.service.problems import NotFound, NotNow
from holdfast.service.store import Fence, Store, one_statement as module
from holdfast.service.store.batch import MARK_EVERY
from holdfast.service.store.database.connection import StoreConnection
from tests.service.session_records import entry, record

MANY: dict[str, Any] = {"per_agent": 99, "total": 99}


@pytest.fixture
async def stores(postgres_url: str) -> AsyncIterator[tuple[Store, Store]]:
    """Two replicas."""
    async with await Store.open(postgres_url) as first, await Store.open(postgres_url) as second:
        yield first, second


class Transactions:
    """Counts the transactions of a store that are more than one statement."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        write = store.database._engine.write

        async def counted(work: Any) -> Any:
            self.count += 1
            return await write(work)

        monkeypatch.setattr(store.database._engine, "write", counted)


async def test_rows_after_a_known_row_are_one_statement(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = stores
    await store.add_session(record(), **MANY)
    (lease,) = await store.claim("r1", 30.0)
    metadata = {"commands_run": 3, "last_activity_at": 1760000000.1234567, "warned_at": None}
    async with other.listen("s1") as listening:
        await store.append([entry(n=0)])
        transactions = Transactions(store, monkeypatch)
        rows = await store.append([entry(n=1), entry(n=2, text="\N{SNOWMAN} 'quoted' \\ ")])
        rows += await store.append([entry(n=3)], fence=Fence("s1", "r1", lease.epoch, 100, metadata))
        together = await asyncio.gather(
            store.append([entry(n=4)]), store.append([entry(n=5)], fence=Fence("s1", "r1", lease.epoch, 200))
        )
        assert [(await listening.__anext__()).seq for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    assert transactions.count == 0
    assert [row.seq for row in rows] == [2, 3, 4]
    assert [[row.seq for row in each] for each in together] == [[5], [6]]
    assert (await other.rows_after("s1", 1))[:3] == rows
    session = await other.session("s1")
    assert (session.audited_token, session.commands_run, session.warned_at) == (200, 3, None)
    assert session.last_activity_at == 1760000000.1234567
    assert (await other.verify()).holds


async def test_a_row_of_another_replica_is_not_overwritten(stores: tuple[Store, Store]) -> None:
    first, second = stores
    for number in range(3):
        assert [row.seq for row in await first.append([entry(n=number)])] == [2 * number + 1]
        assert [row.seq for row in await second.append([entry(n=number)])] == [2 * number + 2]
    assert (await first.verify()).holds


async def test_a_fence_that_does_not_hold_writes_nothing(stores: tuple[Store, Store]) -> None:
    store, other = stores
    await store.add_session(record(), **MANY)
    (lease,) = await store.claim("r1", 30.0)
    fence = Fence("s1", "r1", lease.epoch, 100)
    await store.append([entry(n=1)], fence=fence)
    # The token has been reached: the rows were written before.
    assert await store.append([entry(n=1)], fence=fence) == []
    await store.append([entry(n=2)])
    await other.release("r1")
    await other.claim("r2", 30.0)
    late = Fence("s1", "r1", lease.epoch, 200, {"commands_run": 9})
    with pytest.raises(NotNow) as refused:
        await store.append([entry(n=3)], fence=late)
    assert refused.value.reason == "LEASE_LOST"
    session = await other.session("s1")
    assert (session.audited_token, session.commands_run) == (100, 0)
    assert await other.last_seq("s1") == 2
    assert [row.seq for row in await store.append([entry(n=3)])] == [3]
    assert (await store.verify()).holds


async def test_rows_of_a_session_that_closed_elsewhere_are_marked(stores: tuple[Store, Store]) -> None:
    store, other = stores
    await store.add_session(record(), **MANY)
    await store.append([entry(n=1)])
    await other.update_session("s1", state="CLOSED")
    await store.append([entry(n=2)])
    await store.append([entry(n=3)])
    assert [row.kind for row in await other.rows_after("", 0)] == [OPENED, MARKED, MARKED, MARKED]
    assert (await other.verify()).holds


async def test_rows_of_a_session_that_retention_removed_are_refused(stores: tuple[Store, Store]) -> None:
    store, other = stores
    await store.add_session(record(), **MANY)
    await store.append([entry(n=1)])
    await other.update_session("s1", state="CLOSED", closed_at=1.0)
    # Not the record of the removal in the service's own stream, which is new.
    assert (await other.retain(max_age=1e6)).sessions == 1
    with pytest.raises(NotFound):
        await store.append([entry(n=2)])
    assert (await store.verify()).holds


async def test_a_long_session_is_marked(stores: tuple[Store, Store]) -> None:
    store, _ = stores
    await store.append([entry(n=number) for number in range(MARK_EVERY - 2)])
    for number in range(3):
        await store.append([entry(n=number)])
    assert [row.kind for row in await store.rows_after("", 0)] == [OPENED, MARKED]
    assert (await store.verify()).holds


async def test_the_size_of_a_stream_is_that_of_its_rows(stores: tuple[Store, Store]) -> None:
    store, other = stores
    for number in range(3):
        await store.append([entry(n=number, text="x" * number)])
    one_by_one = await store.audit_size()
    await other.append([entry("s2", n=number, text="x" * number) for number in range(3)])
    # Both streams have an opening row in the service's own stream.
    assert await store.audit_size() == 2 * one_by_one


@pytest.mark.parametrize("changed", ["lease_expires = 7", "lease_epoch = lease_epoch + 1"])
async def test_the_fence_is_checked_after_a_wait_for_the_lock(stores: tuple[Store, Store], changed: str) -> None:
    store, other = stores
    await store.add_session(record(), **MANY)
    (lease,) = await store.claim("r1", 30.0)
    await store.append([entry(n=0)])
    fence = Fence("s1", "r1", lease.epoch, 100)
    appending: list[asyncio.Task[Any]] = []

    async def change(connection: StoreConnection) -> None:
        await connection.execute(text(f"UPDATE sessions SET {changed}"))
        appending.append(asyncio.create_task(store.append([entry(n=1)], fence=fence)))
        while not (await connection.execute(text("SELECT 1 FROM pg_locks WHERE NOT granted"))).first():
            pass

    await other.database.write(change)
    if "epoch" in changed:
        with pytest.raises(NotNow):
            await appending[0]
    else:
        assert [row.seq for row in await appending[0]] == [2]
    assert (await store.session("s1")).audited_token == (0 if "epoch" in changed else 100)
    assert await store.last_seq("s1") == (1 if "epoch" in changed else 2)
    assert (await store.verify()).holds


async def test_a_connection_that_was_cut_is_replaced(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = stores
    await store.append([entry(n=1)])
    await store.append([entry(n=2)])
    ours = text(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'holdfast' "
        "AND datname = current_database() AND pid <> pg_backend_pid()"
    )
    await other.database.write(lambda connection: connection.execute(ours))
    assert [row.seq for row in await store.append([entry(n=3)])] == [3]
    transactions = Transactions(store, monkeypatch)
    assert [row.seq for row in await store.append([entry(n=4)])] == [4]
    assert transactions.count == 0
    assert (await other.verify()).holds


async def test_heads_are_bounded(stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = stores
    monkeypatch.setattr(module, "KEPT_HEADS", 2)
    for name in ("s1", "s2", "s3"):
        await store.append([entry(name)])
    transactions = Transactions(store, monkeypatch)
    await store.append([entry("s3")])
    assert transactions.count == 0
    await store.append([entry("s1")])
    assert transactions.count == 1
