"""Appends as one statement: used after a known row, with all checks of the transaction."""

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
async def stores(store_url: str) -> AsyncIterator[tuple[Store, Store]]:
    """Two replicas; with SQLite, two programs that have the file open."""
    async with await Store.open(store_url) as first, await Store.open(store_url) as second:
        yield first, second


@pytest.fixture
async def on_postgres(postgres_url: str) -> AsyncIterator[tuple[Store, Store]]:
    """Two replicas on PostgreSQL."""
    async with await Store.open(postgres_url) as first, await Store.open(postgres_url) as second:
        yield first, second


@pytest.fixture
async def on_sqlite(sqlite_url: str) -> AsyncIterator[Store]:
    async with await Store.open(sqlite_url) as store:
        yield store


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
    # SQLite has no notices for another program.
    async with (store if store.database.is_sqlite else other).listen("s1") as listening:
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
async def test_the_fence_is_checked_after_a_wait_for_the_lock(
    on_postgres: tuple[Store, Store], changed: str
) -> None:
    store, other = on_postgres
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
    on_postgres: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = on_postgres
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


async def test_rows_of_many_sessions_are_one_statement_of_sqlite(
    on_sqlite: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, names = on_sqlite, [f"s{number}" for number in range(40)]
    for name in names:
        await store.add_session(record(name), **MANY)
    leases = {lease.session_id: lease for lease in await store.claim("r1", 30.0)}
    await store.append([entry(name) for name in names])
    transactions = Transactions(store, monkeypatch)
    metadata = {"commands_run": 3, "last_activity_at": 0.1 + 0.2, "warned_at": 1760000000.1234567}
    fences = [Fence(name, "r1", leases[name].epoch, 7, metadata) for name in names[:20]]
    at = [1760000000.1234567 + number / 3 for number in range(40)]
    written = await asyncio.gather(
        *(store.append([entry(name, at=when, n=1)]) for name, when in zip(names, at, strict=True)),
        *(store.append([entry(fence.session_id, "command_ended")] * 2, fence=fence) for fence in fences),
    )
    assert transactions.count == 0
    assert [[row.seq for row in rows] for rows in written] == [[2]] * 40 + [[3, 4]] * 20
    assert [(await store.rows_after(name, 1, 1))[0].at for name in names] == at
    for name in names[:20]:
        session = await store.session(name)
        assert (session.audited_token, session.commands_run) == (7, 3)
        assert (session.last_activity_at, session.warned_at) == (0.1 + 0.2, 1760000000.1234567)
    assert (await store.session("s20")).audited_token == 0
    assert (await store.verify()).holds


async def test_one_lost_lease_refuses_only_its_own_rows(on_sqlite: Store) -> None:
    store, names = on_sqlite, ("s1", "s2", "s3")
    for name in names:
        await store.add_session(record(name), **MANY)
    epochs = {lease.session_id: lease.epoch for lease in await store.claim("r1", 30.0)}
    await store.append([entry(name) for name in names])
    epochs["s2"] += 1
    appends = (store.append([entry(name)], fence=Fence(name, "r1", epochs[name], 5)) for name in names)
    first, second, third = await asyncio.gather(*appends, return_exceptions=True)
    assert isinstance(second, NotNow)
    assert second.reason == "LEASE_LOST"
    assert [len(rows) for rows in (first, third) if isinstance(rows, list)] == [1, 1]
    assert [await store.last_seq(name) for name in names] == [2, 1, 2]
    assert (await store.verify()).holds


@pytest.mark.parametrize("at", [5e-324, 2.0**60, 1e300])
async def test_a_time_that_sqlite_could_not_read_exactly_is_written_by_a_transaction(
    on_sqlite: Store, monkeypatch: pytest.MonkeyPatch, at: float
) -> None:
    await on_sqlite.append([entry()])
    transactions = Transactions(on_sqlite, monkeypatch)
    await on_sqlite.append([entry(at=at)])
    assert transactions.count == 1
    assert (await on_sqlite.rows_after("s1", 1))[0].at == at
    assert (await on_sqlite.verify()).holds


async def test_a_fence_without_rows_sets_the_metadata(stores: tuple[Store, Store]) -> None:
    """The position of the session stays where it is."""
    store, _ = stores
    await store.add_session(record(), **MANY)
    (lease,) = await store.claim("r1", 30.0)
    await store.append([entry()], fence=Fence("s1", "r1", lease.epoch, 100))
    metadata = {"commands_run": 4, "last_activity_at": 2000.5, "warned_at": None}
    assert await store.append([], fence=Fence("s1", "r1", lease.epoch, 90, metadata)) == []
    session = await store.session("s1")
    assert (session.audited_token, session.commands_run, session.last_activity_at) == (100, 4, 2000.5)
    with pytest.raises(NotNow):
        await store.append([], fence=Fence("s1", "r2", lease.epoch, 200, {**metadata, "commands_run": 5}))
    assert (await store.session("s1")).commands_run == 4
