"""Writes a batch of appends and session changes in one transaction: numbers and chains rows, checks fences.

All replicas take locks in one order, so that they cannot deadlock: sessions, then their streams, each by id, and
the service's own stream last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache
from typing import Any, Final

import msgspec
from sqlalchemy import Update, bindparam, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from holdfast.service.audit.chain import MARKED, OPENED, StreamMark, chained
from holdfast.service.problems import NotNow, Problem
from holdfast.service.store.database.connection import StoreConnection
from holdfast.service.store.database.schema import ROWS, SESSIONS, STREAMS
from holdfast.service.store.database.sqlite_append import append
from holdfast.service.store.database.sqlite_statements import FREQUENT, driver_of
from holdfast.service.store.one_statement import KnownHeads, append_after
from holdfast.service.store.sessions import columns_of, no_session, record_of
from holdfast.service.store.types import Fence, StreamHead
from holdfast.service.types import OVER, SERVICE_STREAM, AuditEntry, AuditRow, SessionRecord

#: Rows of a session between two marks of its last row in the service's own stream: at most so many can be cut off
#: an open session without a trace. Each mark costs a row.
MARK_EVERY: Final = 1_000
#: Approximate size of a row beside its text: numbers, two hashes, its share of the indexes.
ROW_OVERHEAD: Final = 400
#: NOTIFY channel, and the largest payload (PostgreSQL allows less than 8,000 bytes).
CHANNEL: Final = "holdfast_audit"
_PAYLOAD_BYTES: Final = 7_000


class Append:
    """Rows to append, and their fence."""

    def __init__(self, entries: Sequence[AuditEntry], fence: Fence | None) -> None:
        self.entries = entries
        self.fence = fence
        #: Whether it may wait for other work, to share a transaction.
        self.patient = fence is not None and fence.patient


class Change:
    """Fields of a session to set."""

    patient: Final = False

    def __init__(self, session_id: str, fields: dict[str, Any]) -> None:
        self.session_id = session_id
        self.fields = fields


Work = Append | Change
#: Runs one statement; returns whether it changed anything.
StatementWork = Callable[[StoreConnection], Awaitable[bool]]
#: Result of one work: its rows, the session after the change, or the reason for a refusal.
Outcome = list[AuditRow] | SessionRecord | Problem


class Batch:
    """One batch. `write` may be repeated after a transaction that failed, or that may have succeeded."""

    def __init__(self, works: Sequence[Work], *, at: float, key: bytes | None, origin: str) -> None:
        self._works = works
        self._at = at
        self._key = key
        self._origin = origin
        self.outcomes: list[Outcome] = []
        #: First and last row number of each stream.
        self.written: dict[str, tuple[int, int]] = {}
        #: The heads of the written streams after this batch.
        self.heads: dict[str, StreamHead] = {}
        self._last_row: AuditRow | None = None

    async def write(self, connection: StoreConnection) -> None:
        before, self.outcomes = self.outcomes, []
        sessions = await self._lock_sessions(connection)
        entries, changed = self._admit(sessions)
        closing = {name for name, fields in changed.items() if fields.get("state") in OVER}
        heads = await lock_streams(connection, sorted({*entries, *closing} - {SERVICE_STREAM}))
        if self._last_row is not None and await _is_there(connection, self._last_row):
            # The previous attempt succeeded although its connection broke before the reply. If that transaction is
            # still running, the locks make this one wait for it.
            self.outcomes = before
            return
        self._refuse_removed(entries, heads)
        if _needs_own_stream(entries, heads, closing):
            heads |= await lock_streams(connection, [SERVICE_STREAM])
        rows = self._chain(entries, heads, closing)
        self.written = {name: (each[0].seq, each[-1].seq) for name, each in rows.items() if each}
        self._last_row = next((each[-1] for each in rows.values() if each), None)
        await self._store(connection, rows, heads)
        await _update_sessions(connection, changed)
        if connection.dialect.name == "postgresql" and self.written:
            for payload in payloads(self._origin, self.written):
                await connection.execute(select(func.pg_notify(CHANNEL, payload)))
        self.heads = heads

    def one_statement(self, known: KnownHeads, *, is_sqlite: bool) -> StatementWork | None:
        """Return the work that writes this batch as one statement, or nothing if it returns False.

        None unless the batch only appends, to streams with a known head, and to the service's own stream nothing.
        On PostgreSQL, also unless it appends to one stream.
        """
        appends = [work for work in self._works if isinstance(work, Append)]
        fences = [(work.fence, bool(work.entries)) for work in appends if work.fence is not None]
        fenced = {fence.session_id for fence, _ in fences}
        entries: dict[str, list[tuple[int, AuditEntry]]] = defaultdict(list)
        for number, work in enumerate(appends):
            for entry in work.entries:
                entries[entry.session_id].append((number, entry))
        if len(appends) < len(self._works) or len(fenced) < len(fences) or SERVICE_STREAM in entries:
            return None
        if not is_sqlite and (len(entries) != 1 or not fenced <= entries.keys()):
            return None
        heads = known.take(entries)
        if heads is None or _needs_own_stream(entries, heads, set()):
            return None

        async def write(connection: StoreConnection) -> bool:
            self.outcomes = [[] for _ in self._works]
            moved = {name: msgspec.structs.replace(heads[name]) for name in sorted(entries)}
            streams = [(heads[name], head) for name, head in moved.items()]
            rows = [row for name, head in moved.items() for row in self._extend(head, entries[name])]
            self.written = {before.session_id: (before.last_seq + 1, head.last_seq) for before, head in streams}
            self._last_row = rows[-1] if rows else None
            if is_sqlite:
                done = await connection.run_sync(lambda bound: append(driver_of(bound), streams, rows, fences))
            else:
                (payload,), ((before, head),) = payloads(self._origin, self.written), streams
                fence, size = next((fence for fence, _ in fences), None), head.size - before.size
                done = await append_after(
                    connection, before, rows, size=size, fence=fence, notice=(CHANNEL, payload)
                )
            if done:
                self.heads = moved
            else:
                self._last_row = None
            return done

        return write

    # --- admission --------------------------------------------------------------------------------------------

    async def _lock_sessions(self, connection: StoreConnection) -> dict[str, dict[str, Any]]:
        changing = {work.session_id for work in self._works if isinstance(work, Change)}
        fenced = {work.fence.session_id for work in self._works if isinstance(work, Append) and work.fence}
        if not (names := changing | fenced):
            return {}
        # A change returns the whole session; a fence needs the lease.
        lock = _LOCK_SESSIONS if changing else _LOCK_LEASES
        found = (await connection.execute(lock, {"names": list(names)})).mappings()
        return {row["session_id"]: dict(row) for row in found}

    def _admit(
        self, sessions: dict[str, dict[str, Any]]
    ) -> tuple[dict[str, list[tuple[int, AuditEntry]]], dict[str, dict[str, Any]]]:
        """Return the entries to write by stream, with their work's number, and the columns to change."""
        entries: dict[str, list[tuple[int, AuditEntry]]] = defaultdict(list)
        changed: dict[str, dict[str, Any]] = defaultdict(dict)
        self.outcomes = []
        for number, work in enumerate(self._works):
            if isinstance(work, Change):
                self.outcomes.append(self._change(work, sessions.get(work.session_id), changed))
                continue
            self.outcomes.append([])
            if work.fence is not None:
                session = sessions.get(work.fence.session_id)
                if session is None or not _holds(session, work.fence):
                    self.outcomes[-1] = lease_lost(work.fence)
                    continue
                audited = session["audited_token"]
                if work.entries and audited >= work.fence.token:
                    continue
                columns = {"audited_token": max(audited, work.fence.token), **columns_of(work.fence.metadata)}
                session.update(columns)
                changed[work.fence.session_id].update(columns)
            for entry in work.entries:
                entries[entry.session_id].append((number, entry))
        return entries, changed

    def _change(self, work: Change, session: Any, changed: dict[str, dict[str, Any]]) -> Outcome:
        if session is None:
            return no_session(work.session_id)
        if "state" in work.fields and session["state"] in OVER:
            # The first of two reports of the end counts.
            return record_of(session)
        columns = columns_of(work.fields)
        if work.fields.get("state") in OVER:
            columns.setdefault("closed_at", self._at)
        session.update(columns)
        changed[work.session_id].update(columns)
        return record_of(session)

    # --- streams ----------------------------------------------------------------------------------------------

    def _refuse_removed(
        self, entries: dict[str, list[tuple[int, AuditEntry]]], heads: dict[str, StreamHead]
    ) -> None:
        """Refuse entries of sessions that retention has removed in the meantime."""
        gone = {name for name in entries if name in heads and heads[name].removed_seq}
        refused = {number: name for name in gone for number, _ in entries[name]}
        for number, name in refused.items():
            self.outcomes[number] = no_session(name)
        for name, numbered in list(entries.items()) if refused else ():
            entries[name] = [each for each in numbered if each[0] not in refused]
            if not entries[name]:
                del entries[name]

    def _chain(
        self, entries: dict[str, list[tuple[int, AuditEntry]]], heads: dict[str, StreamHead], closing: set[str]
    ) -> dict[str, list[AuditRow]]:
        rows: dict[str, list[AuditRow]] = {}
        own = heads.get(SERVICE_STREAM, StreamHead(SERVICE_STREAM))
        about: list[AuditEntry] = []
        before = own.last_seq + len(entries.get(SERVICE_STREAM, ()))

        def mark_stream(kind: str, mark: StreamMark) -> int:
            about.append(AuditEntry(SERVICE_STREAM, self._at, "", kind, body=msgspec.to_builtins(mark)))
            return before + len(about)

        for name in sorted(entries.keys() | closing):
            if name == SERVICE_STREAM:
                continue
            head = heads[name]
            was = head.last_seq
            if head.opened_seq == 0 and name in entries:
                head.opened_seq = mark_stream(OPENED, StreamMark(name))
            rows[name] = self._extend(head, entries.get(name, []))
            head.closed = head.closed or name in closing
            if head.opened_seq and (_is_due(was, head.last_seq) or name in closing or (head.closed and rows[name])):
                mark = StreamMark(name, head.last_seq, head.last_hash, head.opened_seq)
                head.marked_seq = mark_stream(MARKED, mark)
        numbered = [*entries.get(SERVICE_STREAM, []), *((-1, entry) for entry in about)]
        if numbered:
            rows[SERVICE_STREAM] = self._extend(own, numbered)
        return rows

    def _extend(self, head: StreamHead, numbered: list[tuple[int, AuditEntry]]) -> list[AuditRow]:
        rows = chained((entry for _, entry in numbered), head.last_seq, head.last_hash, self._key)
        for (number, _), row in zip(numbered, rows, strict=True):
            outcome = self.outcomes[number] if number >= 0 else None
            if isinstance(outcome, list):
                outcome.append(row)
            head.size += ROW_OVERHEAD + len(row.body)
        if rows:
            head.last_seq, head.last_hash = rows[-1].seq, rows[-1].hash
        return rows

    async def _store(
        self, connection: StoreConnection, rows: dict[str, list[AuditRow]], heads: dict[str, StreamHead]
    ) -> None:
        values = [msgspec.structs.asdict(row) for each in rows.values() for row in each]
        if values:
            await connection.execute(_ADD_ROWS, values)
        if touched := [msgspec.structs.asdict(heads[name]) for name in rows]:
            await connection.execute(
                _MOVE_HEAD, [{f"new_{name}": value for name, value in each.items()} for each in touched]
            )


async def append_to_own(
    connection: StoreConnection, own: StreamHead, entry: AuditEntry, key: bytes | None
) -> AuditRow:
    """Append one row to the service's own stream, whose head is locked."""
    (row,) = chained([entry], own.last_seq, own.last_hash, key)
    own.last_seq, own.last_hash = row.seq, row.hash
    own.size += ROW_OVERHEAD + len(row.body)
    await connection.execute(_ADD_ROWS, msgspec.structs.asdict(row))
    return row


#: Built once: building one of these statements costs as much as running it.
_ADD_ROWS: Final = insert(ROWS).execution_options(**FREQUENT)
_LOCK_SESSIONS, _LOCK_LEASES, _LOCK_STREAMS = (
    select(*columns)
    .where(columns["session_id"].in_(bindparam("names", expanding=True)))
    .order_by(columns["session_id"])
    .with_for_update()
    .execution_options(**FREQUENT)
    for columns in (
        SESSIONS.c,
        SESSIONS.c["session_id", "lease_owner", "lease_epoch", "audited_token"],
        STREAMS.c,
    )
)
_MOVE_HEAD: Final = (
    update(STREAMS)
    .where(STREAMS.c.session_id == bindparam("new_session_id"))
    .values(
        {
            name: bindparam(f"new_{name}")
            for name in ("last_seq", "last_hash", "size", "opened_seq", "marked_seq", "closed")
        }
    )
    .execution_options(**FREQUENT)
)


def _needs_own_stream(
    entries: dict[str, list[tuple[int, AuditEntry]]], heads: dict[str, StreamHead], closing: set[str]
) -> bool:
    """True if the service's own stream gets rows. All replicas share it, so it is locked only then."""
    if SERVICE_STREAM in entries or closing:
        return True
    return any(
        heads[name].closed
        or not heads[name].opened_seq
        or _is_due(last := heads[name].last_seq, last + len(numbered))
        for name, numbered in entries.items()
    )


def _is_due(before: int, now: int) -> bool:
    return before // MARK_EVERY < now // MARK_EVERY


async def lock_streams(connection: StoreConnection, names: Sequence[str]) -> dict[str, StreamHead]:
    """Lock and return the heads of streams, creating missing ones."""
    heads = await _heads(connection, names)
    if missing := [name for name in names if name not in heads]:
        dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
        fresh = [msgspec.structs.asdict(StreamHead(name)) for name in missing]
        await connection.execute(dialect.insert(STREAMS).on_conflict_do_nothing(), fresh)
        heads |= await _heads(connection, missing)
    return heads


async def _is_there(connection: StoreConnection, row: AuditRow) -> bool:
    there = select(ROWS.c.hash).where(ROWS.c.session_id == row.session_id, ROWS.c.seq == row.seq)
    return bool((await connection.execute(there)).scalar() == row.hash)


async def _heads(connection: StoreConnection, names: Sequence[str]) -> dict[str, StreamHead]:
    if not names:
        return {}
    found = (await connection.execute(_LOCK_STREAMS, {"names": list(names)})).mappings()
    return {row["session_id"]: StreamHead(**row) for row in found}


async def _update_sessions(connection: StoreConnection, changed: dict[str, dict[str, Any]]) -> None:
    """Update sessions, with one statement for all that change the same columns: a few for hundreds of sessions."""
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for name, columns in sorted(changed.items()):
        if columns:
            values = {f"new_{column}": value for column, value in columns.items()}
            alike[tuple(sorted(columns))].append({"which": name, **values})
    for names, group in alike.items():
        await connection.execute(_change_columns(names), group)


@cache
def _change_columns(names: tuple[str, ...]) -> Update:
    statement = update(SESSIONS).where(SESSIONS.c.session_id == bindparam("which"))
    return statement.values({name: bindparam(f"new_{name}") for name in names}).execution_options(**FREQUENT)


def _holds(session: dict[str, Any], fence: Fence) -> bool:
    return bool(session["lease_owner"] == fence.replica and session["lease_epoch"] == fence.epoch)


def lease_lost(fence: Fence) -> NotNow:
    return NotNow(
        f"replica {fence.replica!r} no longer has the lease {fence.epoch} of session {fence.session_id!r}",
        reason="LEASE_LOST",
    )


def payloads(origin: str, written: dict[str, tuple[int, int]]) -> Iterable[str]:
    """Return NOTIFY payloads: the origin, then a line for each stream, split to fit the size limit."""
    lines: list[str] = []
    size = 0
    for name, (first, last) in written.items():
        line = f"{first} {last} {name}"
        if lines and size + len(line.encode()) > _PAYLOAD_BYTES:
            yield "\n".join([origin, *lines])
            lines, size = [], 0
        lines.append(line)
        size += len(line.encode()) + 1
    if lines:
        yield "\n".join([origin, *lines])
