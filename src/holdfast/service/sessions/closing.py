"""How a session is ended: said in the database, done in its sandbox, written down by its follower.

The follower is another replica's, perhaps: whoever closes waits until the last words are in the log.
"""

from __future__ import annotations

import asyncio
import builtins
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.service.api import AuditFilter, Closed
from holdfast.service.problems import NotNow, Problem
from holdfast.service.store.types import Page
from holdfast.service.types import AuditEntry, CloseMode, SessionRecord

if TYPE_CHECKING:
    from holdfast.service.sessions.manager import SessionManager


class Closing:
    """`CloseSession`, and closing because time is over."""

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager

    async def close(self, record: SessionRecord, mode: CloseMode, *, by: str, reason: str) -> Closed:
        manager = self._manager
        if not record.over and (await self._as_written(record.session_id)).over:
            record = await self._written_down(record.session_id)  # it ended by itself, a moment ago
        if record.over:
            return Closed(record.state, record.summary)
        if record.state == "UNKNOWN":
            raise NotNow(f"session {record.session_id!r} is still being made", reason="SESSION_NOT_READY")
        session_id = record.session_id
        body: dict[str, Any] = {"mode": mode, "reason": reason}
        if by:
            body["by"] = by
        if by or record.state != "CLOSING":
            # What time has decided is tried again until its sandbox answers, and said once.
            await manager.store.append(
                [AuditEntry(session_id, manager.clock.time(), record.agent_id, "close", "", body)]
            )
        if record.state != "CLOSING":
            record = await manager.store.update_session(session_id, state="CLOSING", close_reason=reason)
            if record.over:  # it ended by itself meanwhile
                return Closed(record.state, record.summary)
        try:
            await manager.live(record).close(mode)
        except Problem as problem:
            # Known to be gone: the follower finds the same, and writes it down.
            if problem.reason not in ("SANDBOX_GONE", "SESSION_LOST", "SESSION_CLOSED"):
                raise
        record = await self._written_down(session_id)
        manager.forget(session_id)
        return Closed(record.state, record.summary)

    async def _written_down(self, session_id: str) -> SessionRecord:
        manager = self._manager
        limit = manager.settings.close_wait
        with manager.bell.watch(session_id) as watch:
            try:
                async with asyncio.timeout(limit):
                    follower = manager.leases.follower(session_id)
                    if follower is not None:
                        await follower.over.wait()
                    while True:
                        watch.clear()
                        record = await self._as_written(session_id)
                        if record.over:
                            return record
                        await watch.wait()
            except builtins.TimeoutError:
                # Its lease is a dead replica's: it is closed, and the next one writes that down.
                return await manager.store.session(session_id)

    async def _as_written(self, session_id: str) -> SessionRecord:
        """The session; by the log, if that is a moment ahead of the session's own row."""
        record = await self._manager.store.session(session_id)
        if record.over:
            return record
        which = AuditFilter(session_id=session_id, kinds=("session_closed",))
        rows, _ = await self._manager.store.rows(which, Page(1))
        if not rows:
            return record
        body = msgspec.json.decode(rows[0].body, type=dict[str, Any])
        return msgspec.structs.replace(record, state=body["state"], summary=body["summary"])
