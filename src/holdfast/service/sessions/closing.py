"""Closes sessions: marks the row in the store, ends the session in its sandbox, waits for the follower's last rows.

The follower may be another replica's, so the close waits for the rows in the audit log.
"""

from __future__ import annotations

import msgspec

from holdfast.service.api import CloseResult
from holdfast.service.problems import NotNow, Problem
from holdfast.service.sessions.context import SessionContext
from holdfast.service.sessions.following.events import audit_entry
from holdfast.service.sessions.following.leases import Leases
from holdfast.service.sessions.handles import SessionHandles
from holdfast.service.sessions.ports import body_of, first_row
from holdfast.service.types import CloseMode, SessionRecord


class SessionCloser:
    """`CloseSession`, and closing by a timer or a limit."""

    def __init__(self, context: SessionContext, handles: SessionHandles, leases: Leases) -> None:
        self._context = context
        self._handles = handles
        self._leases = leases

    async def close(self, record: SessionRecord, mode: CloseMode, *, by: str, reason: str) -> CloseResult:
        context = self._context
        if not record.over and (await self._logged_record(record.session_id)).over:
            record = await self._closed_record(record.session_id)  # the session ended by itself just now
        if record.over:
            return CloseResult(record.state, record.summary)
        if record.state == "UNKNOWN":
            raise NotNow(f"session {record.session_id!r} is still being created", reason="SESSION_NOT_READY")
        session_id = record.session_id
        body = {"mode": mode, "reason": reason} | ({"by": by} if by else {})
        if by or record.state != "CLOSING":
            # A close by a timer is repeated until the sandbox answers, and has one row.
            await context.store.append([audit_entry(record, context.clock.time(), "close", **body)])
        if record.state != "CLOSING":
            record = await context.store.update_session(session_id, state="CLOSING", close_reason=reason)
            if record.over:  # the session ended by itself meanwhile
                return CloseResult(record.state, record.summary)
        try:
            await self._handles.backend(record).close(mode)
        except Problem as problem:
            # The session is lost: its follower finds the same and writes the last rows.
            if problem.reason not in ("SANDBOX_GONE", "SESSION_LOST", "SESSION_CLOSED"):
                raise
        record = await self._closed_record(session_id)
        self._handles.drop(session_id)
        return CloseResult(record.state, record.summary)

    async def _closed_record(self, session_id: str) -> SessionRecord:
        """Return the record once the last rows are in the audit log, or after `close_wait`."""

        async def closed() -> SessionRecord | None:
            if (follower := self._leases.follower(session_id)) is not None:
                await follower.over.wait()
            record = await self._logged_record(session_id)
            return record if record.over else None

        context = self._context
        # None: the lease is a dead replica's. The session is closed; the next replica writes its last rows.
        found = await context.notices.until(session_id, closed, context.settings.close_wait)
        return found or await context.store.session(session_id)

    async def _logged_record(self, session_id: str) -> SessionRecord:
        """Return the record, corrected from the audit log, which can be ahead of the session's own row."""
        record = await self._context.store.session(session_id)
        if record.over:
            return record
        row = await first_row(self._context.store, session_id=session_id, kinds=("session_closed",))
        if row is None:
            return record
        body = body_of(row)
        return msgspec.structs.replace(record, state=body["state"], summary=body["summary"])
