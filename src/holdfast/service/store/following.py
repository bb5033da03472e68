"""Rows as they are appended, by whichever process: what `holdfast audit --follow` shows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from sqlalchemy import BigInteger, ColumnElement, func, literal_column, select

from holdfast.service.api import AuditFilter
from holdfast.service.store.audit_log import AuditLog
from holdfast.service.store.database.connection import Connection
from holdfast.service.store.database.file_watch import FileWatch
from holdfast.service.store.database.schema import ROWS
from holdfast.service.store.notices import Listening
from holdfast.service.store.types import MISSED
from holdfast.service.types import AuditRow

#: Rows that are read at a time, and remembered so that none is given twice.
PAGE: Final = 1_000
REMEMBERED: Final = 10_000
#: SQLite's own number of a row: one writer at a time, so a later row has a higher one.
_number: ColumnElement[int] = literal_column("audit_rows.rowid", BigInteger)


async def last_number(log: AuditLog) -> int:
    """SQLite's number of the last row."""

    async def work(connection: Connection) -> int:
        return int((await connection.execute(select(func.max(_number)).select_from(ROWS))).scalar() or 0)

    return await log.database.read(work)


async def follow_file(log: AuditLog, which: AuditFilter, watch: FileWatch, seen: int) -> AsyncIterator[AuditRow]:
    """Rows of a SQLite file that came after the one with the number `seen`."""
    while True:
        await watch.changed()
        top = await last_number(log)
        for begin in range(seen, top, PAGE):
            # A piece of the numbers, not a page of what fits: rows that do not fit are looked at once.
            piece = log.filtered(which).where(_number > begin, _number <= min(begin + PAGE, top))
            for row in await log.read_rows(piece.order_by(_number)):
                yield row
        seen = top


async def follow_notices(log: AuditLog, which: AuditFilter, notices: Listening) -> AsyncIterator[AuditRow]:
    """Rows of a PostgreSQL database that are appended from now on."""
    recent: dict[tuple[str, int], None] = {}
    latest = log.database.clock.time()
    async for notice in notices:
        if notice == MISSED:
            rows = await _since(log, which, latest)
        else:
            exactly = log.filtered(which).where(ROWS.c.session_id == notice.session_id, ROWS.c.seq == notice.seq)
            rows = await log.read_rows(exactly)
        for row in rows:
            if (row.session_id, row.seq) not in recent:
                recent[row.session_id, row.seq] = None
                if len(recent) > REMEMBERED:
                    del recent[next(iter(recent))]
                latest = max(latest, row.at)
                yield row


async def _since(log: AuditLog, which: AuditFilter, at: float) -> list[AuditRow]:
    """What came while nobody was told: by time, as far as one page goes."""
    statement = log.filtered(which).where(ROWS.c.at >= at).order_by(ROWS.c.at, ROWS.c.session_id, ROWS.c.seq)
    return await log.read_rows(statement.limit(REMEMBERED))
