"""Statements that go straight to SQLite's driver write and find the same as SQLAlchemy."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import bindparam, insert, select
from sqlalchemy.exc import IntegrityError

from holdfast.service.problems import Unavailable
from holdfast.service.store import Store
from holdfast.service.store.database.connection import StoreConnection
from holdfast.service.store.database.schema import STREAMS
from holdfast.service.store.database.sqlite_statements import FREQUENT

PLAIN = select(STREAMS).where(STREAMS.c.session_id.in_(bindparam("names", expanding=True)))
STREAM = {
    **dict.fromkeys(("last_seq", "size", "base_seq", "opened_seq", "marked_seq", "removed_seq"), 1),
    "last_hash": "h",
    "base_hash": "",
}


@pytest.fixture
async def sqlite_store(sqlite_url: str) -> AsyncIterator[Store]:
    async with await Store.open(sqlite_url) as store:
        yield store


@pytest.mark.parametrize("names", [["a"], ["a", "b", "nobody"], []])
async def test_they_find_the_same_in_the_same_types(sqlite_store: Store, names: list[str]) -> None:
    async def work(connection: StoreConnection) -> None:
        values = [
            {**STREAM, "session_id": "a", "closed": True},
            {**STREAM, "session_id": "b", "closed": False},
        ]
        await connection.execute(insert(STREAMS).execution_options(**FREQUENT), values)
        plain = (await connection.execute(PLAIN, {"names": names})).mappings()
        often = (await connection.execute(PLAIN.execution_options(**FREQUENT), {"names": names})).mappings()
        assert [dict(row) for row in often] == [dict(row) for row in plain]
        assert all(row["closed"] is (row["session_id"] == "a") for row in often)

    await sqlite_store.database.write(work)


async def test_their_errors_are_those_of_sqlalchemy(sqlite_store: Store, caplog: pytest.LogCaptureFixture) -> None:
    statement = insert(STREAMS).execution_options(**FREQUENT)

    async def twice(connection: StoreConnection) -> None:
        await connection.execute(statement, [{**STREAM, "session_id": "a", "closed": True}] * 2)

    with pytest.raises(IntegrityError):
        await sqlite_store.database.write(twice)

    async def read_only(connection: StoreConnection) -> None:
        await connection.execute(statement, {**STREAM, "session_id": "a", "closed": True})

    async def forbid(connection: StoreConnection) -> None:
        await connection.run_sync(lambda sync: sync.exec_driver_sql("PRAGMA query_only = ON"))

    await sqlite_store.database.write(forbid)
    with pytest.raises(Unavailable, match="error_id"):
        await sqlite_store.database.write(read_only)
    assert "readonly" in caplog.text
