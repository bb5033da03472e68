"""The audit log, and the changes of sessions that are written with it: appended in groups, read by pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import BigInteger, ColumnElement, Select, func, literal_column, select

from holdfast.service.api import AuditFilter
from holdfast.service.audit.chain import encode_body
from holdfast.service.problems import Bug, Invalid
from holdfast.service.store.batch import Append, Change
from holdfast.service.store.database.connection import StoreConnection
from holdfast.service.store.database.database import Database
from holdfast.service.store.database.schema import ROWS, STREAMS
from holdfast.service.store.database.sqlite_file import FileWatch
from holdfast.service.store.group_commit import GroupCommit
from holdfast.service.store.notices import NoticeListener
from holdfast.service.store.sessions import FIELDS, UNCHANGING, after
from holdfast.service.store.types import FIRST_PAGE, MISSED, Fence, Page, decode_token, encode_token, page_size
from holdfast.service.types import AuditEntry, AuditRow, SessionRecord

#: Limit of a row's body, since rows are read whole; longer texts are cut before (`audit.redaction`).
MAX_BODY_BYTES: Final = 256 * 1024
#: Rows of one query, and recent rows that are remembered so that none is returned twice.
PAGE: Final = 1_000
REMEMBERED: Final = 10_000
#: SQLite's row number: with one writer at a time, a later row has a higher number.
_number: ColumnElement[int] = literal_column("audit_rows.rowid", BigInteger)
_ALL: Final = AuditFilter()


class AuditLog:
    """The part of the store that appends and reads audit rows."""

    database: Database
    writer: GroupCommit

    async def append(self, entries: Sequence[AuditEntry], *, fence: Fence | None = None) -> list[AuditRow]:
        """Append these entries, all or none, each as the next row of its session; return the rows once on disk.

        Rows of several sessions are returned session by session. With a fence, the append succeeds only while its
        lease holds (otherwise `NotNow`, LEASE_LOST), and moves the session's `audited_token` to the fence's. If the
        token has been reached already, the entries were written before, and nothing is done; without entries, the
        fence's metadata is set in any case.
        """
        for entry in entries:
            _check(entry)
        outcome = await self.writer.do(Append(tuple(entries), fence))
        if not isinstance(outcome, list):
            raise Bug("an append has an unexpected outcome", reason="STORE_BUG")
        return outcome

    async def update_session(self, session_id: str, /, **fields: Any) -> SessionRecord:
        """Set fields of a session; return the updated session.

        A session that is over does not change: of two calls that set its state, the first wins, and the second gets
        the state that the first has set.
        """
        for name in fields:
            if name not in FIELDS or name in UNCHANGING:
                raise Invalid(f"{name} of a session cannot be set", reason="STORE_VALUE")
        outcome = await self.writer.do(Change(session_id, fields))
        if not isinstance(outcome, SessionRecord):
            raise Bug("an update has an unexpected outcome", reason="STORE_BUG")
        return outcome

    async def rows(self, which: AuditFilter = _ALL, page: Page = FIRST_PAGE) -> tuple[list[AuditRow], str]:
        """Return a page of rows, and the next page's token if there is one.

        Rows of one session are ordered by number, those of several by time.
        """
        row = ROWS.c
        if which.session_id is not None:
            order: list[ColumnElement[Any]] = [row.seq]
            position: tuple[type, ...] = (int,)
        else:
            order, position = [row.at, row.session_id, row.seq], (float, str, int)
        statement = self.filtered(which).limit(page_size(page) + 1)
        statement = statement.order_by(*(each.desc() if which.newest_first else each for each in order))
        if page.token:
            at = decode_token(page.token, *position)
            statement = statement.where(after(order, at, backwards=which.newest_first))
        found = await self.read_rows(statement)
        if len(found) <= page_size(page):
            return found, ""
        last = found[page_size(page) - 1]
        names = [each.key for each in order]
        return found[: page_size(page)], encode_token(*(getattr(last, str(name)) for name in names))

    async def rows_after(self, session_id: str, seq: int, limit: int = 1_000) -> list[AuditRow]:
        """Return the rows of a session after `seq`, for a subscription."""
        return await self.read_rows(
            select(ROWS).where(ROWS.c.session_id == session_id, ROWS.c.seq > seq).order_by(ROWS.c.seq).limit(limit)
        )

    async def last_seq(self, session_id: str) -> int:
        """Return the number of a session's last row; 0 if it has none."""
        statement = select(STREAMS.c.last_seq).where(STREAMS.c.session_id == session_id)

        async def work(connection: StoreConnection) -> int:
            return int((await connection.execute(statement)).scalar() or 0)

        return await self.database.read(work)

    def filtered(self, which: AuditFilter) -> Select[Any]:
        """Return the statement that selects the rows, unordered."""
        row = ROWS.c
        statement = select(ROWS)
        if which.session_id is not None:
            statement = statement.where(row.session_id == which.session_id)
        if which.agent_id:
            statement = statement.where(row.agent_id == which.agent_id)
        if which.kinds:
            statement = statement.where(row.kind.in_(which.kinds))
        if which.command_id:
            statement = statement.where(row.command_id == which.command_id)
        if which.since is not None:
            statement = statement.where(row.at >= which.since)
        if which.until is not None:
            statement = statement.where(row.at < which.until)
        if which.contains:
            # The text in its JSON form; not LIKE, which ignores case on one of the databases only.
            needle = msgspec.json.encode(which.contains.encode(errors="replace").decode()).decode()[1:-1]
            find = func.instr if self.database.is_sqlite else func.strpos
            statement = statement.where(find(row.body, needle) > 0)
        return statement

    async def read_rows(self, statement: Select[Any]) -> list[AuditRow]:
        async def work(connection: StoreConnection) -> list[AuditRow]:
            return [row_of(row) for row in await connection.execute(statement)]

        return await self.database.read(work)


def row_of(row: Any) -> AuditRow:
    return AuditRow(*row)


def _check(entry: AuditEntry) -> None:
    """Refuse an entry that would fail the whole group, or that cannot be sent to clients."""
    for name in ("session_id", "agent_id", "kind", "command_id"):
        value = getattr(entry, name)
        if not value.isprintable():
            raise Invalid(
                f"{name} {value[:40]!r} of an audit row has characters that are not text", reason="STORE_VALUE"
            )
    if len(encode_body(entry.body)) > MAX_BODY_BYTES:
        raise Invalid(
            f"the body of an audit row of kind {entry.kind!r} is longer than {MAX_BODY_BYTES} bytes",
            reason="STORE_VALUE",
        )


async def last_number(log: AuditLog) -> int:
    """Return SQLite's number of the last row."""

    async def work(connection: StoreConnection) -> int:
        return int((await connection.execute(select(func.max(_number)).select_from(ROWS))).scalar() or 0)

    return await log.database.read(work)


async def follow_file(log: AuditLog, which: AuditFilter, watch: FileWatch, seen: int) -> AsyncIterator[AuditRow]:
    """Yield the rows of a SQLite file after the one with number `seen`."""
    while True:
        await watch.changed()
        top = await last_number(log)
        for begin in range(seen, top, PAGE):
            # By ranges of numbers, not by pages of matches, so that non-matching rows are read once.
            piece = log.filtered(which).where(_number > begin, _number <= min(begin + PAGE, top))
            for row in await log.read_rows(piece.order_by(_number)):
                yield row
        seen = top


async def follow_notices(log: AuditLog, which: AuditFilter, notices: NoticeListener) -> AsyncIterator[AuditRow]:
    """Yield the rows that are appended to a PostgreSQL database from now on."""
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
    """Return rows that were appended while notices were missed: by time, up to one page."""
    statement = log.filtered(which).where(ROWS.c.at >= at).order_by(ROWS.c.at, ROWS.c.session_id, ROWS.c.seq)
    return await log.read_rows(statement.limit(REMEMBERED))
