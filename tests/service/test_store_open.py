"""Opening a database: by URL, with its tables made once, and clear errors for what cannot be opened."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest
from sqlalchemy import inspect, make_url, select, text

from holdfast.service.problems import Invalid, NotNow, Unavailable
from holdfast.service.store import Store
from holdfast.service.store.database.connection import StoreConnection
from holdfast.service.store.database.database import Database
from holdfast.service.store.database.migrations import MIGRATIONS, Migration, migrate
from holdfast.service.store.database.schema import METADATA, VERSIONS
from holdfast.testing import FakeClock
from tests.service.conftest import OpenStore
from tests.service.session_records import entry
from tests.support.postgres import Cluster


async def columns(connection: StoreConnection) -> dict[str, dict[str, bool]]:
    """Every column of every table, and whether it may be empty."""

    def look(sync: object) -> dict[str, dict[str, bool]]:
        inspector = inspect(sync)
        return {
            table: {column["name"]: column["nullable"] for column in inspector.get_columns(table)}
            for table in inspector.get_table_names()
        }

    return await connection.run_sync(look)


async def test_the_migrations_make_the_tables_that_the_statements_name(store: Store) -> None:
    there = await store.database.read(columns)
    named = {
        name: {column.name: column.nullable for column in table.columns} for name, table in METADATA.tables.items()
    }
    for table in there.values():
        # SQLite reports of a primary key that it may be empty; it may not.
        table.update(
            {name: False for name in table if name in ("session_id", "agent_id", "approval_id", "name", "version")}
        )
    assert there == named


async def test_opening_again_migrates_nothing(open_store: OpenStore) -> None:
    first, second = await open_store(), await open_store()
    assert first.database.location == second.database.location
    applied = await second.database.read(versions)
    assert applied == [step.version for step in MIGRATIONS]


async def test_replicas_that_start_at_once_migrate_once(store_url: str) -> None:
    stores = await asyncio.gather(*(Store.open(store_url) for _ in range(5)))
    try:
        assert await stores[0].database.read(versions) == [step.version for step in MIGRATIONS]
    finally:
        await asyncio.gather(*(store.close() for store in stores))


async def test_a_further_step_is_made_and_a_failed_one_leaves_nothing(store: Store) -> None:
    database = store.database
    number = MIGRATIONS[-1].version + 1
    broken = (*MIGRATIONS, Migration(number, ["CREATE TABLE extra (a BIGINT)", "CREATE TABLE extra (a BIGINT)"]))
    with pytest.raises(Unavailable):
        await database.write(lambda connection: migrate(connection, 1.0, broken), tries=1)
    assert "extra" not in await database.read(columns)
    further = (*MIGRATIONS, Migration(number, ["CREATE TABLE extra (a BIGINT)"]))
    assert await database.write(lambda connection: migrate(connection, 1.0, further)) == [number]
    assert "extra" in await database.read(columns)


async def test_an_approval_of_the_first_version_waits_on_without_a_caller(open_store: OpenStore) -> None:
    """Rows that a replica of the version before writes, before the second step or beside it."""
    clock = FakeClock(1000.0)
    store = await open_store(clock=clock)
    values = "'p1', 's1', 'ann', 'rm x', 'rules.toml:3', 1000, 1300, 'cmd-1', '', '', '', ''"
    names = "approval_id, session_id, agent_id, command, reason, asked_at, expires_at, command_id, data, outcome"
    insert = text(f"INSERT INTO approvals ({names}, answered_by, comment) VALUES ({values})")
    await store.database.write(lambda connection: connection.execute(insert))
    assert await store.end_approvals() == []
    assert (await store.answer_approval("p1", "approved", by="root")).caller == ""


async def test_a_database_that_is_newer_than_the_program_is_refused(open_store: OpenStore) -> None:
    store = await open_store()
    await store.database.write(lambda each: each.execute(text("INSERT INTO holdfast_versions VALUES (99, 0)")))
    expected = r"has schema version 99, and holdfast .* supports versions up to"
    for read_only in (False, True):
        with pytest.raises(NotNow, match=expected) as refused:
            await open_store(read_only=read_only)
        assert refused.value.reason == "STORE_NEWER"
        assert refused.value.message.startswith(store.database.location)


async def test_looking_only_makes_nothing(store_url: str) -> None:
    with pytest.raises((NotNow, Unavailable)) as refused:
        await Store.open(store_url, read_only=True)
    assert refused.value.reason in ("STORE_EMPTY", "STORE_UNAVAILABLE")
    await (await Store.open(store_url)).close()
    await (await Store.open(store_url, read_only=True)).close()


async def test_the_file_of_a_new_database_is_ours_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "service.db"
    async with await Store.open(f"sqlite:///{path}") as store:
        await store.add_agent("a", "hash")
        modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()}
        assert modes == {"service.db": 0o600, "service.db-wal": 0o600, "service.db-shm": 0o600}
        assert await pragma(store, "journal_mode") == "wal"
        assert await pragma(store, "synchronous") == 2
    os.chmod(path, 0o644)
    async with await Store.open(f"sqlite:///{path}"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "url", ["", "nonsense", "mysql://x/y", "sqlite://", "sqlite:///:memory:", "sqlite://host/x"]
)
async def test_a_wrong_url_is_told(url: str) -> None:
    with pytest.raises(Invalid) as refused:
        await Store.open(url)
    assert refused.value.reason == "STORE_URL"


async def test_whoever_does_not_want_to_wait_for_the_disk_says_so(sqlite_url: str) -> None:
    async with await Store.open(f"{sqlite_url}?synchronous=normal") as store:
        assert await pragma(store, "synchronous") == 1
        assert (await store.verify()).holds
    with pytest.raises(Invalid, match="synchronous must be one of full, normal"):
        await Store.open(f"{sqlite_url}?synchronous=off")


async def pragma(store: Store, name: str) -> object:
    return (await store.database.read(lambda each: each.execute(text(f"PRAGMA {name}")))).scalar()


async def test_a_wrong_url_does_not_show_its_password() -> None:
    with pytest.raises(Invalid) as refused:
        await Store.open("mysql://user:geheim@host/x")
    assert "geheim" not in refused.value.message


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:////proc/no/such/place.db",
        "postgresql://somebody:geheim@127.0.0.1:1/nothing",
        "postgresql://somebody@/nothing?host=/nowhere",
    ],
)
async def test_a_database_that_is_down_is_unavailable(url: str) -> None:
    with pytest.raises(Unavailable) as refused:
        await Store.open(url)
    assert refused.value.reason == "STORE_UNAVAILABLE"
    assert "geheim" not in refused.value.message


async def test_callers_read_an_id_and_the_log_has_the_address(
    postgres: Cluster, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = make_url(postgres_url)
    secrets = [Path(str(url.query["host"])).name, str(url.database), str(url.username)]
    async with await Store.open(postgres_url) as store:
        await asyncio.to_thread(postgres.stop, "fast")
        try:
            calls = (lambda: store.session("s1"), lambda: store.append([entry()]), store.ping, store.open_approvals)
            for call in calls:
                with pytest.raises(Unavailable) as refused:
                    await call()
                error_id = refused.value.details["error_id"]
                assert error_id in refused.value.message
                assert not [each for each in secrets if each in f"{refused.value.message} {refused.value.details}"]
                (logged,) = [each.getMessage() for each in caplog.records if error_id in each.getMessage()]
                assert all(each in logged for each in secrets)
        finally:
            await asyncio.to_thread(postgres.resume)


async def test_a_file_that_is_no_database_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "not.db"
    path.write_bytes(b"this is text, and long enough to be taken for a header of something" * 20)
    with pytest.raises(Unavailable, match="not a database"):
        await Store.open(f"sqlite:///{path}")


async def test_a_database_that_does_not_exist_is_unavailable(postgres_url: str) -> None:
    with pytest.raises(Unavailable, match="does not exist"):
        await Store.open(postgres_url.replace("/test_", "/no_"))


async def test_a_store_that_is_closed_says_so(open_store: OpenStore) -> None:
    store = await open_store()
    await store.close()
    for call in (store.agents(), store.append([entry()]), store.ping()):
        with pytest.raises(Unavailable) as refused:
            await call
        assert refused.value.reason == "STORE_CLOSED"


async def test_an_audit_keeps_to_the_key_that_it_began_with(open_store: OpenStore) -> None:
    await open_store(audit_key=b"k" * 32)
    await open_store(audit_key=b"k" * 32)
    for key, message in ((None, "with a key"), (b"l" * 32, "with another key")):
        with pytest.raises(NotNow, match=message) as refused:
            await open_store(audit_key=key)
        assert refused.value.reason == "AUDIT_KEY"
    with pytest.raises(Invalid, match="shorter than 16 bytes"):
        await open_store(audit_key=b"short")


async def versions(connection: StoreConnection) -> list[int]:
    return list((await connection.execute(select(VERSIONS.c.version).order_by(VERSIONS.c.version))).scalars())


async def test_replicas_with_skewed_clocks_go_by_the_clock_of_the_database(postgres_url: str) -> None:
    database = await Database.open(postgres_url)
    try:
        reported = await database.read(lambda each: each.execute(select(database.now())))
        requested = await database.read(lambda each: each.execute(text("SELECT extract(epoch FROM now())::float8")))
        assert abs(reported.scalar_one() - requested.scalar_one()) < 60
        assert "clock_timestamp" in str(select(database.now()))
    finally:
        await database.close()
