"""Statements that go straight to SQLite's driver write and find the same as SQLAlchemy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import bindparam, insert, select, update
from sqlalchemy.exc import IntegrityError

from holdfast.service.problems import Unavailable
from holdfast.service.store import Store
from holdfast.service.store.database.connection import StoreConnection
from holdfast.service.store.database.schema import AGENTS, STREAMS
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


@pytest.mark.parametrize("count", [1, 7, 8, 33, 75])
async def test_they_write_any_number_of_rows(sqlite_store: Store, count: int) -> None:
    names = [f"s{number:03}" for number in range(count)]
    added: list[dict[str, Any]] = [
        {**STREAM, "session_id": name, "closed": False, "size": number} for number, name in enumerate(names)
    ]
    changes = [{"which": name, "new_size": -number, "new_closed": True} for number, name in enumerate(names)]
    change = update(STREAMS).where(STREAMS.c.session_id == bindparam("which"))
    change = change.values(size=bindparam("new_size"), closed=bindparam("new_closed"))

    async def work(connection: StoreConnection) -> None:
        await connection.execute(insert(STREAMS).execution_options(**FREQUENT), added)
        assert [dict(row) for row in (await connection.execute(PLAIN, {"names": names})).mappings()] == added
        await connection.execute(change.execution_options(**FREQUENT), changes)
        changed = [{**row, "size": -number, "closed": True} for number, row in enumerate(added)]
        assert [dict(row) for row in (await connection.execute(PLAIN, {"names": names})).mappings()] == changed

    await sqlite_store.database.write(work)


async def test_they_return_floats_exactly(sqlite_store: Store) -> None:
    times = [1 / 3, 1760000000.1234567, 5e-324, 1.7976931348623157e308]
    names = [str(number) for number in range(len(times))]
    plain = select(AGENTS.c.agent_id, AGENTS.c.created_at).where(
        AGENTS.c.agent_id.in_(bindparam("names", expanding=True))
    )
    row = {"role": "agent", "limits": "{}", "disabled": False, "token_at": 0.0}
    values = [
        {**row, "agent_id": name, "token_hash": name, "created_at": at}
        for name, at in zip(names, times, strict=True)
    ]

    async def work(connection: StoreConnection) -> None:
        await connection.execute(insert(AGENTS).execution_options(**FREQUENT), values)
        found = (await connection.execute(plain.execution_options(**FREQUENT), {"names": names})).mappings()
        assert [each["created_at"] for each in found] == times

    await sqlite_store.database.write(work)
