"""Verifies the audit log: every chain, every head, and the marks in the service's own stream.

Reads one snapshot of the database, a page of rows at a time, so that neither appends nor the log's size matter.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import exists, select, tuple_
from sqlalchemy.engine import RowMapping

from holdfast.service.audit.chain import (
    ABOUT_STREAMS,
    GENESIS,
    MARKED,
    OPENED,
    REMOVED,
    TRIMMED,
    Break,
    Fault,
    StreamCheck,
    StreamMark,
)
from holdfast.service.store.database.connection import StoreConnection
from holdfast.service.store.database.schema import ROWS, STREAMS
from holdfast.service.types import SERVICE_STREAM, AuditRow, ServiceStruct

#: Rows and streams in one query.
PAGE: Final = 500
#: Findings that are kept; a log that was rewritten from its beginning has one for each row.
MAX_BREAKS: Final = 100


class Verification(ServiceStruct, frozen=True):
    """Result of a verification."""

    rows: int
    sessions: int
    #: Sessions of which only the removal by retention is left.
    removed: int
    breaks: tuple[Break, ...]
    #: Number of findings beyond those that are kept.
    further: int = 0
    #: The last row of the service's own stream. Stored elsewhere, it later proves that nothing was cut off.
    head_seq: int = 0
    head_hash: str = GENESIS

    @property
    def holds(self) -> bool:
        return not self.breaks


class Verifier:
    """One verification."""

    def __init__(self, connection: StoreConnection, key: bytes | None) -> None:
        self._connection = connection
        self._key = key
        self._breaks: list[Break] = []
        self._further = 0
        self._rows = 0
        self._sessions = 0
        self._removed = 0
        self._trimmed = (0, GENESIS)
        self._own_base = 0

    async def everything(self, head: tuple[int, str] | None = None) -> Verification:
        own = await self._stream(SERVICE_STREAM)
        await self._service_stream(own)
        async for page in self._stream_pages():
            await self._page_of_streams(page)
        await self._rows_without_stream()
        if head is not None:
            await self._known_head(*head)
        return self._result(own)

    async def one(self, session_id: str) -> Verification | None:
        """Verify one session; return None if there is no trace of it."""
        own = await self._stream(SERVICE_STREAM)
        self._own_base = 0 if own is None else own["base_seq"]
        stream = await self._stream(session_id)
        if session_id == SERVICE_STREAM:
            await self._service_stream(own)
        elif stream is not None:
            await self._page_of_streams([stream])
            if stream["marked_seq"]:
                await self._about(await self._own_rows([stream["marked_seq"]]))
        elif not await self._was_opened(session_id):
            return None
        return self._result(own)

    def _result(self, own: RowMapping | None) -> Verification:
        return Verification(
            rows=self._rows,
            sessions=self._sessions,
            removed=self._removed,
            breaks=tuple(self._breaks),
            further=self._further,
            head_seq=0 if own is None else own["last_seq"],
            head_hash=GENESIS if own is None else own["last_hash"],
        )

    def _found(self, *breaks: Break) -> None:
        room = MAX_BREAKS - len(self._breaks)
        self._breaks += breaks[:room]
        self._further += max(0, len(breaks) - room)

    def _report(self, session_id: str, seq: int, fault: Fault, detail: str) -> None:
        self._found(Break(session_id, seq, fault, detail))

    # --- the service's own stream -----------------------------------------------------------------------------

    async def _service_stream(self, own: RowMapping | None) -> None:
        if own is None:
            if await self._first_of(select(ROWS.c.seq).limit(1)) is not None:
                self._report(SERVICE_STREAM, 0, "missing", "its head is gone")
            return
        self._own_base = own["base_seq"]
        check = StreamCheck(SERVICE_STREAM, self._key, base_seq=own["base_seq"], base_hash=own["base_hash"])
        async for rows in self._row_pages(SERVICE_STREAM, own["base_seq"]):
            self._found(*check.feed(rows))
            await self._about(rows)
        self._found(*check.end(own["last_seq"], own["last_hash"]))
        self._rows += check.rows
        if self._trimmed != (own["base_seq"], own["base_hash"]):
            first = own["base_seq"] or self._trimmed[0]
            self._report(SERVICE_STREAM, first, "missing", f"the rows to {first} are gone, and not by retention")

    async def _about(self, rows: Sequence[AuditRow]) -> None:
        """Compare the marks in these rows with the streams that they refer to."""
        marks: list[tuple[AuditRow, StreamMark]] = []
        for row in rows:
            if row.kind in ABOUT_STREAMS:
                try:
                    marks.append((row, msgspec.json.decode(row.body, type=StreamMark)))
                except msgspec.MsgspecError:
                    self._report(SERVICE_STREAM, row.seq, "changed", "its body is not valid for its kind")
        streams = await self._streams_by_name({mark.session_id for _, mark in marks})
        hashes = await self._hashes([mark for row, mark in marks if row.kind == MARKED])
        for row, mark in marks:
            name = mark.session_id
            if row.kind == TRIMMED:
                self._trimmed = (mark.seq, mark.hash)
                continue
            stream = streams.get(name)
            opened = row.seq if row.kind == OPENED else mark.opened
            if stream is None:
                # Reported once, at the opening row, unless retention has removed that row with the session.
                if row.kind == OPENED:
                    self._report(
                        name,
                        0,
                        "removed",
                        f"it was opened by row {row.seq} of the service's own stream, and is gone",
                    )
            elif stream["opened_seq"] != opened or (row.kind == REMOVED and stream["removed_seq"] != row.seq):
                self._report(name, 0, "changed", f"its head does not fit row {row.seq} of the service's own stream")
            elif (
                row.kind == MARKED
                and not stream["removed_seq"]
                and mark.seq
                and hashes.get((name, mark.seq)) != mark.hash
            ):
                fault: Fault = "changed" if (name, mark.seq) in hashes else "cut"
                mark_text = f"row {row.seq} of the service's own stream names another"
                self._report(
                    name,
                    mark.seq,
                    fault,
                    mark_text if fault == "changed" else f"it is gone; {mark_text.replace('another', 'it')}",
                )

    # --- the streams of sessions ------------------------------------------------------------------------------

    async def _page_of_streams(self, page: Sequence[RowMapping]) -> None:
        numbers = [number for each in page for number in (each["opened_seq"], each["removed_seq"]) if number]
        own = {row.seq: row for row in await self._own_rows(numbers)}
        for each in page:
            name = each["session_id"]
            # A session that closed before its first row has a head and no mark.
            if each["opened_seq"] > self._own_base or (not each["opened_seq"] and each["last_seq"]):
                self._mark_of(own.get(each["opened_seq"]), OPENED, each, "opened_seq")
            if each["removed_seq"]:
                self._removed += 1
                await self._removed_stream(each, own.get(each["removed_seq"]))
                continue
            self._sessions += 1
            if each["base_seq"]:
                self._report(name, 1, "missing", f"the rows to {each['base_seq']} are gone, and not by retention")
            check = StreamCheck(name, self._key)
            async for rows in self._row_pages(name, 0):
                self._found(*check.feed(rows))
            self._found(*check.end(each["last_seq"], each["last_hash"]))
            self._rows += check.rows

    async def _removed_stream(self, stream: RowMapping, row: AuditRow | None) -> None:
        name = stream["session_id"]
        mark = self._mark_of(row, REMOVED, stream, "removed_seq")
        if mark is not None and (mark.seq, mark.hash) != (stream["last_seq"], stream["last_hash"]):
            self._report(name, 0, "changed", "its removal by retention names another last row")
        left = select(ROWS.c.seq).where(ROWS.c.session_id == name).limit(1)
        if (seq := await self._first_of(left)) is not None:
            self._report(name, seq, "added", "the row exists although retention removed the session")

    def _mark_of(self, row: AuditRow | None, kind: str, stream: RowMapping, column: str) -> StreamMark | None:
        """Return the mark in the row of the service's own stream that this stream's head refers to."""
        name, number = stream["session_id"], stream[column]
        if row is not None and row.kind == kind:
            try:
                mark = msgspec.json.decode(row.body, type=StreamMark)
            except msgspec.MsgspecError:
                return None  # reported when that row was read
            if mark.session_id == name:
                return mark
        what = f"row {number} of the service's own stream" if number else "any row of the service's own stream"
        self._report(
            name,
            0,
            "unknown",
            f"{what} does not mention it" if number else "no row of the service's own stream mentions it",
        )
        return None

    async def _rows_without_stream(self) -> None:
        has_head = exists().where(STREAMS.c.session_id == ROWS.c.session_id)
        lost = select(ROWS.c.session_id).where(~has_head, ROWS.c.session_id != SERVICE_STREAM)
        for name in (await self._connection.execute(lost.distinct().limit(MAX_BREAKS))).scalars():
            self._report(name, 0, "unknown", "it has rows but no head")

    async def _known_head(self, seq: int, hash: str) -> None:
        """Check that a head stored elsewhere is still there."""
        if seq > self._own_base:
            rows = await self._own_rows([seq])
            if not rows:
                self._report(SERVICE_STREAM, seq, "cut", "it was the last row once, and is gone")
            elif rows[0].hash != hash:
                self._report(SERVICE_STREAM, seq, "changed", "it had another hash once")

    async def _was_opened(self, session_id: str) -> bool:
        """Report a session without a head if the service's own stream opened it; return True if so."""
        async for rows in self._row_pages(SERVICE_STREAM, self._own_base, OPENED):
            for row in rows:
                if session_id in row.body and msgspec.json.decode(row.body).get("session_id") == session_id:
                    await self._about([row])
                    return True
        return False

    # --- reading ----------------------------------------------------------------------------------------------

    async def _stream(self, session_id: str) -> RowMapping | None:
        chosen = select(STREAMS).where(STREAMS.c.session_id == session_id)
        return (await self._connection.execute(chosen)).mappings().first()

    async def _streams_by_name(self, names: set[str]) -> dict[str, RowMapping]:
        chosen = select(STREAMS).where(STREAMS.c.session_id.in_(names))
        return {row["session_id"]: row for row in (await self._connection.execute(chosen)).mappings()}

    async def _stream_pages(self) -> AsyncIterator[Sequence[RowMapping]]:
        name = SERVICE_STREAM
        while True:
            chosen = select(STREAMS).where(STREAMS.c.session_id > name).order_by(STREAMS.c.session_id).limit(PAGE)
            page = (await self._connection.execute(chosen)).mappings().all()
            if not page:
                return
            yield page
            name = page[-1]["session_id"]

    async def _row_pages(self, session_id: str, seq: int, kind: str | None = None) -> AsyncIterator[list[AuditRow]]:
        while True:
            chosen = select(ROWS).where(ROWS.c.session_id == session_id, ROWS.c.seq > seq)
            if kind is not None:
                chosen = chosen.where(ROWS.c.kind == kind)
            rows = await self._audit_rows(chosen.order_by(ROWS.c.seq).limit(PAGE))
            if not rows:
                return
            yield rows
            seq = rows[-1].seq

    async def _own_rows(self, numbers: Sequence[int]) -> list[AuditRow]:
        if not numbers:
            return []
        return await self._audit_rows(
            select(ROWS).where(ROWS.c.session_id == SERVICE_STREAM, ROWS.c.seq.in_(numbers))
        )

    async def _audit_rows(self, statement: Any) -> list[AuditRow]:
        return [AuditRow(*row) for row in await self._connection.execute(statement)]

    async def _hashes(self, marks: Sequence[StreamMark]) -> dict[tuple[str, int], str]:
        if not marks:
            return {}
        wanted = tuple_(ROWS.c.session_id, ROWS.c.seq).in_([(mark.session_id, mark.seq) for mark in marks])
        found = await self._connection.execute(select(ROWS.c.session_id, ROWS.c.seq, ROWS.c.hash).where(wanted))
        return {(row.session_id, row.seq): row.hash for row in found}

    async def _first_of(self, statement: Any) -> int | None:
        found: int | None = (await self._connection.execute(statement)).scalar()
        return found
