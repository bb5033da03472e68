"""Removes old sessions from the database, oldest first, and records each removal with its last hash.

So `verify` distinguishes removals by retention from tampering. Rows of the service's own stream are removed once
they are old enough and refer to no remaining session.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec
from sqlalchemy import delete, func, select, update

from holdfast.service.audit.chain import REMOVED, TRIMMED, StreamMark
from holdfast.service.store.batch import ROW_OVERHEAD, append_to_own, lock_streams
from holdfast.service.store.database.connection import StoreConnection
from holdfast.service.store.database.database import Database
from holdfast.service.store.database.schema import APPROVALS, ROWS, SESSIONS, STREAMS
from holdfast.service.store.sessions import IS_OPEN
from holdfast.service.store.types import Removed, StreamHead
from holdfast.service.types import SERVICE_STREAM, AuditEntry

#: Sessions removed by one call, each in a transaction of its own, so that appends are not blocked.
MAX_REMOVED: Final = 1_000


class Retention:
    """The part of the store that removes old rows."""

    database: Database
    audit_key: bytes | None

    async def retain(
        self, *, max_age: float | None = None, max_bytes: int | None = None, most: int = MAX_REMOVED
    ) -> Removed:
        """Remove sessions closed for more than `max_age` seconds, and the oldest while over `max_bytes`.

        Open sessions are never removed.
        """
        total = Removed()
        cutoff = None if max_age is None else self.database.clock.time() - max_age
        # Computed once: the sum over many sessions is expensive.
        size = 0 if max_bytes is None else await self.audit_size()
        while total.sessions < most:
            too_big = max_bytes is not None and size - total.size > max_bytes
            why = await self._next(cutoff, too_big)
            if why is None:
                break
            removed = await self.database.write(partial(self._remove, session_id=why[0], reason=why[1]))
            total = Removed(total.sessions + 1, total.rows + removed.rows, total.size + removed.size)
        trimmed = await self._trim(cutoff, max_bytes)
        total = Removed(total.sessions, total.rows + trimmed.rows, total.size + trimmed.size)
        if total.rows:
            await self.database.reclaim_space()
        return total

    async def audit_size(self) -> int:
        """Return the approximate size of the audit log in bytes."""

        async def work(connection: StoreConnection) -> int:
            return int((await connection.execute(select(func.sum(STREAMS.c.size)))).scalar() or 0)

        return await self.database.read(work)

    async def _next(self, cutoff: float | None, too_big: bool) -> tuple[str, str] | None:
        """Return the session to remove next, and the reason."""
        oldest = (
            select(SESSIONS.c.session_id, SESSIONS.c.closed_at)
            .where(SESSIONS.c.closed_at.is_not(None), ~IS_OPEN)
            .order_by(SESSIONS.c.closed_at)
            .limit(1)
        )
        row = await self.database.read(lambda connection: _first(connection, oldest))
        if row is None:
            return None
        if cutoff is not None and row[1] < cutoff:
            return row[0], "age"
        return (row[0], "size") if too_big else None

    async def _remove(self, connection: StoreConnection, session_id: str, reason: str) -> Removed:
        which = SESSIONS.c.session_id == session_id
        await connection.execute(select(SESSIONS.c.session_id).where(which).with_for_update())
        head = (await lock_streams(connection, [session_id]))[session_id]
        counted = Removed(1, head.last_seq, head.size)
        if head.opened_seq and not head.removed_seq:
            own = (await lock_streams(connection, [SERVICE_STREAM]))[SERVICE_STREAM]
            mark = StreamMark(session_id, head.last_seq, head.last_hash, head.opened_seq, reason, head.last_seq)
            head.removed_seq = await self._append_own(connection, own, REMOVED, mark)
            head.size = 0
            await _put_head(connection, own)
            await _put_head(connection, head)
        elif not head.opened_seq:
            # The session never had a row.
            await connection.execute(delete(STREAMS).where(STREAMS.c.session_id == session_id))
        await connection.execute(delete(ROWS).where(ROWS.c.session_id == session_id))
        await connection.execute(delete(APPROVALS).where(APPROVALS.c.session_id == session_id))
        await connection.execute(delete(SESSIONS).where(which))
        return counted

    async def _trim(self, cutoff: float | None, max_bytes: int | None) -> Removed:
        if cutoff is None and max_bytes is None:
            return Removed()

        async def work(connection: StoreConnection) -> Removed:
            own = (await lock_streams(connection, [SERVICE_STREAM]))[SERVICE_STREAM]
            through = 0 if cutoff is None else await _last_removable(connection, own, cutoff)
            if (
                max_bytes is not None
                and (await connection.execute(select(func.sum(STREAMS.c.size)))).scalar_one() > max_bytes
            ):
                # The older half of the removable rows: the newer half records removals that may still be queried.
                free = await _last_removable(connection, own, None)
                through = max(through, own.base_seq + (free - own.base_seq) // 2)
            if through <= own.base_seq:
                return Removed()
            return await self._trim_own(connection, own, through)

        return await self.database.write(work)

    async def _trim_own(self, connection: StoreConnection, own: StreamHead, through: int) -> Removed:
        gone = (ROWS.c.session_id == SERVICE_STREAM) & (ROWS.c.seq <= through)
        last = select(ROWS.c.hash).where(ROWS.c.session_id == SERVICE_STREAM, ROWS.c.seq == through)
        last_hash = (await connection.execute(last)).scalar()
        if last_hash is None:
            # The stream is damaged: `verify` must still find that.
            return Removed()
        counted = select(func.count(), func.coalesce(func.sum(func.length(ROWS.c.body)), 0)).where(gone)
        rows, length = (await connection.execute(counted)).one()
        size = rows * ROW_OVERHEAD + length
        await connection.execute(delete(ROWS).where(gone))
        await connection.execute(delete(STREAMS).where(STREAMS.c.removed_seq > 0, STREAMS.c.opened_seq <= through))
        own.base_seq, own.base_hash = through, last_hash
        own.size = max(0, own.size - size)
        await self._append_own(connection, own, TRIMMED, StreamMark(SERVICE_STREAM, through, last_hash, rows=rows))
        await _put_head(connection, own)
        return Removed(0, rows, size)

    async def _append_own(self, connection: StoreConnection, own: StreamHead, kind: str, mark: StreamMark) -> int:
        entry = AuditEntry(SERVICE_STREAM, self.database.clock.time(), "", kind, body=msgspec.to_builtins(mark))
        return (await append_to_own(connection, own, entry, self.audit_key)).seq


async def _last_removable(connection: StoreConnection, own: StreamHead, cutoff: float | None) -> int:
    """Return the last old row of the service's own stream before any about a remaining session."""
    there = select(func.min(STREAMS.c.opened_seq)).where(STREAMS.c.removed_seq == 0, STREAMS.c.opened_seq > 0)
    first_needed = (await connection.execute(there)).scalar()
    through = own.last_seq if first_needed is None else int(first_needed) - 1
    if cutoff is not None:
        old = select(func.max(ROWS.c.seq)).where(ROWS.c.session_id == SERVICE_STREAM, ROWS.c.at < cutoff)
        through = min(through, int((await connection.execute(old)).scalar() or 0))
    return through


async def _put_head(connection: StoreConnection, head: StreamHead) -> None:
    values = msgspec.structs.asdict(head)
    await connection.execute(update(STREAMS).where(STREAMS.c.session_id == values.pop("session_id")).values(values))


async def _first(connection: StoreConnection, statement: object) -> tuple[str, float] | None:
    row = (await connection.execute(statement)).first()
    return None if row is None else (row[0], row[1])
