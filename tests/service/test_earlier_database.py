"""A database of the first version, written by the service of that time, is migrated without a loss.

`data/version-1.*.sql` are dumps (`sqlite3 service.db .dump`, `pg_dump --inserts --no-owner` without its settings)
of the databases of `holdfast service` at the commit 6339628d: two agents, four open sessions and a closed one, an
approval that was granted, one that was refused, and one that waits.
"""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Final

import asyncpg  # type: ignore[import-untyped]
import pytest
from sqlalchemy import select

from holdfast.service.problems import NotNow
from holdfast.service.store import Store
from holdfast.service.store.database.migrations import MIGRATIONS
from holdfast.service.store.database.schema import VERSIONS
from holdfast.testing import FakeClock
from tests.service.session_records import entry

DATA: Final = Path(__file__).parent / "data"
#: While the approval waits.
RECORDED_AT: Final = 1_794_983_800.0


@pytest.fixture
async def earlier_url(store_url: str) -> str:
    """A database with the tables and rows of the first version."""
    if store_url.startswith("sqlite"):
        with sqlite3.connect(store_url.removeprefix("sqlite:///")) as database:
            database.executescript((DATA / "version-1.sqlite.sql").read_text())
    else:
        connection = await asyncpg.connect(store_url)
        await connection.execute((DATA / "version-1.postgresql.sql").read_text())
        await connection.close()
    return store_url


async def test_a_database_of_the_first_version_is_migrated(earlier_url: str) -> None:
    with pytest.raises(NotNow, match=r"has schema version 1, and holdfast .* needs \d+: start `holdfast service`"):
        await Store.open(earlier_url, read_only=True)
    async with await Store.open(earlier_url, clock=FakeClock(RECORDED_AT)) as store:
        versions = await store.database.read(lambda each: each.execute(select(VERSIONS.c.version)))
        assert sorted(row.version for row in versions) == [step.version for step in MIGRATIONS]
        verified = await store.verify()
        assert (verified.holds, verified.rows, verified.sessions) == (True, 39, 5)
        assert {(each.agent_id, each.role) for each in await store.agents()} == {
            ("operator", "operator"),
            ("builder", "agent"),
        }
        sessions, _ = await store.sessions()
        states = {each.labels["t"]: each.state for each in sessions}
        still_open = dict.fromkeys(("loop", "shell", "pending", "ask"), "RUNNING")
        assert states == {**still_open, "closed": "CLOSED"}
        (waiting,) = await store.open_approvals()
        assert (waiting.command, waiting.data) == ("touch later; echo T=$?", b"touch later; echo T=$?")
        assert (await store.answer_approval(waiting.approval_id, "approved", by="operator")).outcome == "approved"

        await store.append([entry(waiting.session_id)])
        after = await store.verify(head=(verified.head_seq, verified.head_hash))
        assert (after.holds, after.rows > verified.rows) == (True, True)


def test_a_released_migration_is_not_changed() -> None:
    """A database of the first version has the tables that the first migration makes today."""
    recorded = (DATA / "version-1.sqlite.sql").read_text()
    for statement in MIGRATIONS[0].statements:
        assert _words(statement) in _words(recorded)


def _words(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
