"""`verify` finds changes of the log behind the service's back, and distinguishes them from retention."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace
from sqlalchemy import text

from holdfast.service.audit.chain import Break, StreamCheck, chained
from holdfast.service.problems import NotFound, NotNow
from holdfast.service.store import Store, Verification
from holdfast.service.store.verification import MAX_BREAKS
from holdfast.service.types import AuditEntry
from holdfast.testing import FakeClock
from tests.service.conftest import OpenStore
from tests.service.session_records import entry, record
from tests.support.postgres import memory

KEY = b"0123456789abcdef0123456789abcdef"


@pytest.fixture(params=["sqlite", "sqlite with a key", "postgresql with a key"])
async def written(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """Three sessions of five rows, the second one closed."""
    url = request.getfixturevalue(f"{'sqlite' if 'sqlite' in request.param else 'postgres'}_url")
    key = KEY if "key" in request.param else None
    async with await Store.open(url, clock=FakeClock(9000.0), audit_key=key) as store:
        await write(store)
        yield store


async def write(store: Store) -> None:
    for name in ("s1", "s2", "s3"):
        await store.add_session(record(name), per_agent=9, total=9)
        for number in range(5):
            await store.append([entry(name, n=number, text="echo hello")])
    await store.update_session("s2", state="CLOSED")


async def do(store: Store, statement: str, **values: Any) -> None:
    await store.database.write(lambda connection: connection.execute(text(statement), values))


def reported(found: Verification) -> list[tuple[str, int, str]]:
    return [(each.session_id, each.seq, each.fault) for each in found.breaks]


async def test_a_log_that_nobody_touched_holds(written: Store) -> None:
    found = await written.verify()
    assert found.holds
    assert (found.sessions, found.rows, found.removed) == (3, 15 + 4, 0)
    assert (await written.verify("s2")).rows == 5
    with pytest.raises(NotFound):
        await written.verify("nobody")


async def test_a_changed_row_is_found(written: Store) -> None:
    changes = ["at = at + 1", "agent_id = 'b'", "kind = 'x'", "command_id = 'x'", "body = '{}'"]
    for seq, change in enumerate(changes, 1):
        await do(written, f"UPDATE audit_rows SET {change} WHERE session_id = 's1' AND seq = {seq}")
    for found in (await written.verify(), await written.verify("s1")):
        assert reported(found) == [("s1", seq, "changed") for seq in range(1, 6)]
    await do(written, "UPDATE audit_rows SET previous = 'x' WHERE session_id = 's3' AND seq = 3")
    assert ("s3", 3, "changed") in reported(await written.verify("s3"))
    assert (await written.verify("s2")).holds


async def test_a_missing_row_is_found(written: Store) -> None:
    await do(written, "DELETE FROM audit_rows WHERE session_id = 's1' AND seq IN (2, 3)")
    found = await written.verify()
    assert reported(found) == [("s1", 2, "missing")]
    assert str(found.breaks[0]) == "session s1, row 2: rows 2 to 3 are missing"


async def test_a_cut_tail_is_found(written: Store) -> None:
    await do(written, "DELETE FROM audit_rows WHERE session_id = 's1' AND seq > 3")
    assert reported(await written.verify()) == [("s1", 4, "cut")]


async def test_a_cut_tail_of_a_closed_session_is_found_although_its_head_was_cut_too(written: Store) -> None:
    await do(written, "DELETE FROM audit_rows WHERE session_id = 's2' AND seq > 3")
    hash_of = "(SELECT hash FROM audit_rows WHERE session_id = 's2' AND seq = 3)"
    await do(written, f"UPDATE audit_streams SET last_seq = 3, last_hash = {hash_of} WHERE session_id = 's2'")
    assert reported(await written.verify()) == [("s2", 5, "cut")]
    assert reported(await written.verify("s2")) == [("s2", 5, "cut")]


async def test_a_removed_session_is_found(written: Store) -> None:
    steps = {
        "audit_rows": ("s1", 1, "cut"),
        "audit_streams": ("s1", 0, "removed"),
        "sessions": ("s1", 0, "removed"),
    }
    for table, expected in steps.items():
        await do(written, f"DELETE FROM {table} WHERE session_id = 's1'")
        assert reported(await written.verify()) == [expected]
        assert reported(await written.verify("s1")) == [expected]


async def test_a_session_that_was_put_in_is_found(written: Store) -> None:
    columns = "seq, at, agent_id, kind, command_id, body, previous, hash"
    await do(written, f"INSERT INTO audit_rows SELECT 's9', {columns} FROM audit_rows WHERE session_id = 's1'")
    assert ("s9", 0, "unknown") in reported(await written.verify())
    columns = "last_seq, last_hash, size, base_seq, base_hash, opened_seq, marked_seq, removed_seq, closed"
    await do(
        written, f"INSERT INTO audit_streams SELECT 's9', {columns} FROM audit_streams WHERE session_id = 's1'"
    )
    found = reported(await written.verify())
    assert ("s9", 0, "unknown") in found
    assert ("s9", 1, "changed") in found


async def test_a_cut_tail_of_the_service_s_own_stream_is_found(written: Store) -> None:
    await do(written, "DELETE FROM audit_rows WHERE session_id = '' AND seq >= 3")
    hash_of = "(SELECT hash FROM audit_rows WHERE session_id = '' AND seq = 2)"
    await do(written, f"UPDATE audit_streams SET last_seq = 2, last_hash = {hash_of} WHERE session_id = ''")
    assert reported(await written.verify()) == [("s3", 0, "unknown")]
    await do(written, "DELETE FROM audit_streams WHERE session_id = ''")
    assert ("", 0, "missing") in reported(await written.verify())


async def test_a_head_that_was_kept_elsewhere_shows_what_was_cut_since(written: Store) -> None:
    await written.append([entry("", "call")])
    before = await written.verify()
    head = (before.head_seq, before.head_hash)
    assert (await written.verify(head=head)).holds
    await do(written, "DELETE FROM audit_rows WHERE session_id = '' AND seq = 5")
    hash_of = "(SELECT hash FROM audit_rows WHERE session_id = '' AND seq = 4)"
    await do(written, f"UPDATE audit_streams SET last_seq = 4, last_hash = {hash_of} WHERE session_id = ''")
    assert (await written.verify()).holds
    assert reported(await written.verify(head=head)) == [("", 5, "cut")]


async def test_a_rewritten_log_is_found_with_a_key_alone(open_store: OpenStore) -> None:
    """A writer of the database can make plain hashes again. Without the key, no HMACs."""
    store = await open_store(audit_key=KEY)
    await store.append([entry(n=1), entry(n=2)])
    (forged,) = chained([AuditEntry("s1", 1000.5, "a", "command", body={"n": 9})], 0, "0" * 64)
    change = "UPDATE audit_rows SET body = :body, hash = :hash WHERE session_id = 's1' AND seq = 1"
    await do(store, change, body=forged.body, hash=forged.hash)
    assert ("s1", 1, "changed") in reported(await store.verify())


async def test_without_its_key_a_log_is_read_and_not_verified(open_store: OpenStore) -> None:
    await (await open_store(audit_key=KEY)).append([entry()])
    looking = await open_store(read_only=True)
    assert len((await looking.rows())[0]) == 2
    with pytest.raises(NotNow, match="written with a key"):
        await looking.verify()
    assert (await (await open_store(read_only=True, audit_key=KEY)).verify()).holds


async def test_a_session_that_closed_before_its_first_row_is_no_finding(store: Store) -> None:
    await store.add_session(record(), per_agent=1, total=1)
    await store.update_session("s1", state="ERROR")
    assert (await store.verify()).holds
    await store.append([entry()])
    found = await store.verify()
    assert found.holds
    assert found.rows == 1 + 2
    await do(store, "UPDATE audit_streams SET opened_seq = 0 WHERE session_id = 's1'")
    assert not (await store.verify()).holds


async def test_findings_are_bounded(store: Store) -> None:
    await store.append([entry(n=number) for number in range(MAX_BREAKS + 20)])
    await do(store, "UPDATE audit_rows SET body = '{}' WHERE session_id = 's1'")
    found = await store.verify()
    assert len(found.breaks) == MAX_BREAKS
    assert found.further == 20


# --- retention ------------------------------------------------------------------------------------------------


async def closed_sessions(store: Store, clock: FakeClock, count: int) -> None:
    """Sessions s0, s1, … of three rows each, closed 100 s apart."""
    for number in range(count):
        name = f"s{number}"
        await store.add_session(record(name, labels={"n": "1"}), per_agent=99, total=99)
        await store.append([entry(name, at=clock.time(), text="x" * 1000) for _ in range(3)])
        await clock.advance(100)
        await store.update_session(name, state="CLOSED")


@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "key"])
async def test_retention_by_age_removes_closed_sessions_and_verify_knows_it(
    open_store: OpenStore, key: bytes | None
) -> None:
    clock = FakeClock(10_000.0)
    store = await open_store(clock=clock, audit_key=key)
    await closed_sessions(store, clock, 4)
    await store.add_session(record("open"), per_agent=99, total=99)
    await store.append([entry("open")])
    removed = await store.retain(max_age=250.0)
    assert (removed.sessions, removed.rows) == (1, 3 + 2)  # and those of its beginning and its end
    found = await store.verify()
    assert found.holds
    with pytest.raises(NotFound):
        await store.session("s0")
    await clock.advance(10_000)
    assert (await store.retain(max_age=250.0)).sessions == 3
    found = await store.verify()
    assert found.holds
    assert (await store.verify("open")).holds
    assert [each.session_id for each in await store.open_sessions()] == ["open"]


async def test_retention_by_size_removes_the_oldest_first(open_store: OpenStore) -> None:
    clock = FakeClock(10_000.0)
    store = await open_store(clock=clock)
    await closed_sessions(store, clock, 6)
    size = await store.audit_size()
    removed = await store.retain(max_bytes=size // 2)
    assert await store.audit_size() <= size // 2
    assert removed.size >= size - size // 2
    left, _ = await store.sessions()
    assert [each.session_id for each in left] == [f"s{number}" for number in range(6)][-len(left) :]
    assert 0 < len(left) < 6
    found = await store.verify()
    assert found.holds
    assert await store.retain(max_bytes=size // 2, max_age=10_000.0) == type(removed)()


async def test_what_retention_frees_is_given_back_to_the_file_system(sqlite_url: str) -> None:
    clock = FakeClock(10_000.0)
    async with await Store.open(sqlite_url, clock=clock) as store:
        await store.add_session(record(), per_agent=1, total=1)
        await store.append([entry(text="x" * 50_000) for _ in range(40)])
        await store.update_session("s1", state="CLOSED")

        async def pages() -> int:
            found = await store.database.read(lambda connection: connection.execute(text("PRAGMA page_count")))
            return int(found.scalar_one())

        before = await pages()
        await clock.advance(100)
        await store.retain(max_age=10.0)
        assert await pages() < before // 4


async def test_the_service_s_own_stream_does_not_grow_for_ever(open_store: OpenStore) -> None:
    clock = FakeClock(10_000.0)
    store = await open_store(clock=clock)
    rows = []
    for _ in range(3):
        await closed_sessions(store, clock, 5)
        await clock.advance(10_000)
        await store.retain(max_age=1000.0)
        assert (await store.verify()).holds
        rows.append((await store.verify()).rows)
    # The remaining rows record the last removal.
    assert rows[0] == rows[1] == rows[2]


async def test_what_retention_removed_and_what_somebody_else_did_are_told_apart(
    open_store: OpenStore,
) -> None:
    clock = FakeClock(10_000.0)
    store = await open_store(clock=clock)
    await store.add_session(record("open"), per_agent=99, total=99)
    await store.append([entry("open")])
    await closed_sessions(store, clock, 3)
    await store.retain(max_age=50.0)
    found = await store.verify()
    assert found.holds
    assert found.removed == 2
    await do(store, "DELETE FROM audit_rows WHERE session_id = 's2'")
    await do(store, "DELETE FROM audit_streams WHERE session_id = 's2'")
    assert reported(await store.verify()) == [("s2", 0, "removed")]
    # Neither can a removal be made up.
    await do(store, "UPDATE audit_streams SET removed_seq = 1 WHERE session_id = 'open'")
    assert ("open", 0, "unknown") in reported(await store.verify())


async def test_nothing_is_written_about_a_session_that_retention_removed(open_store: OpenStore) -> None:
    clock = FakeClock(10_000.0)
    store = await open_store(clock=clock)
    await store.add_session(record("open"), per_agent=99, total=99)
    await store.append([entry("open")])
    await closed_sessions(store, clock, 1)
    await clock.advance(100)
    await store.retain(max_age=10.0)
    with pytest.raises(NotFound):
        await store.append([entry("s0")])
    assert (await store.verify()).holds


# --- properties -----------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
ENTRIES = st.lists(
    st.builds(
        AuditEntry,
        session_id=st.just("s"),
        at=st.floats(0, 4e9),
        agent_id=TEXTS,
        kind=TEXTS,
        command_id=TEXTS,
        body=st.dictionaries(TEXTS, st.one_of(TEXTS, st.integers(-(2**53), 2**53), st.booleans(), st.none())),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=50)
@given(ENTRIES, st.data(), st.sampled_from([None, KEY]))
def test_whatever_is_done_to_a_chain_shows(
    entries: list[AuditEntry], data: st.DataObject, key: bytes | None
) -> None:
    rows = chained(entries, 0, "0" * 64, key)

    def breaks(changed: list[Any]) -> list[Break]:
        check = StreamCheck("s", key)
        middle = data.draw(st.integers(0, len(changed)))
        found = [*check.feed(changed[:middle]), *check.feed(changed[middle:])]
        return found + check.end(rows[-1].seq, rows[-1].hash)

    assert breaks(rows) == []
    at = data.draw(st.integers(0, len(rows) - 1))
    row = rows[at]
    fields = ["at", "agent_id", "kind", "command_id", "body", "previous", "hash"]
    name = data.draw(st.sampled_from(fields))
    value = row.at + 1 if name == "at" else getattr(row, name) + "x"
    if value != getattr(row, name):
        found = breaks([*rows[:at], replace(row, **{name: value}), *rows[at + 1 :]])
        assert found
        assert found[0].seq in (row.seq, row.seq + 1)
    assert breaks([*rows[:at], *rows[at + 1 :]])
    if at + 1 < len(rows) and rows[at].body != rows[at + 1].body:
        swapped = [replace(row, body=rows[at + 1].body), replace(rows[at + 1], body=row.body)]
        assert breaks([*rows[:at], *swapped, *rows[at + 2 :]])


TAMPERING = [
    "UPDATE audit_rows SET body = body || ' ' WHERE session_id = '{s}' AND seq = {n}",
    "UPDATE audit_rows SET at = at + 0.001 WHERE session_id = '{s}' AND seq = {n}",
    "DELETE FROM audit_rows WHERE session_id = '{s}' AND seq = {n}",
    "DELETE FROM audit_rows WHERE session_id = '{s}' AND seq >= {n}",
    "DELETE FROM audit_rows WHERE session_id = '{s}'",
    "UPDATE audit_rows SET seq = seq + 100 WHERE session_id = '{s}' AND seq = {n}",
    "UPDATE audit_rows SET session_id = 'x' WHERE session_id = '{s}' AND seq = {n}",
    "DELETE FROM audit_streams WHERE session_id = '{s}'",
    "UPDATE audit_streams SET last_seq = last_seq - 1 WHERE session_id = '{s}'",
    "UPDATE audit_streams SET opened_seq = opened_seq + 1 WHERE session_id = '{s}'",
    "UPDATE audit_streams SET base_seq = 1 WHERE session_id = '{s}'",
    "UPDATE audit_streams SET removed_seq = 1 WHERE session_id = '{s}'",
]


@settings(max_examples=20)
@given(
    appends=st.lists(st.lists(st.tuples(st.integers(0, 3), TEXTS), min_size=1, max_size=4), min_size=2, max_size=8),
    tampering=st.sampled_from(TAMPERING),
    data=st.data(),
)
async def test_random_appends_and_random_tampering_are_found(
    appends: list[list[tuple[int, str]]], tampering: str, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory(dir=memory()) as directory:
        async with await Store.open(f"sqlite:///{directory}/x.db") as store:
            for each in appends:
                await store.append([entry(f"s{number}", text=some) for number, some in each])
            assert (await store.verify()).holds
            session = data.draw(st.sampled_from(sorted({f"s{number}" for each in appends for number, _ in each})))
            seq = data.draw(st.integers(1, await store.last_seq(session)))
            await do(store, tampering.replace("{s}", session).replace("{n}", str(seq)))
            assert not (await store.verify()).holds
