"""The store with metrics: durations and failures of appends and queries that callers wait for.

Decides nothing and changes nothing else of the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from holdfast.service.observability.metrics import Metrics
from holdfast.service.store import AgentRecord, Fence, SessionLease, Store
from holdfast.service.store.database.database import Database
from holdfast.service.types import Approval, AuditEntry, AuditRow, SessionRecord


class MeteredStore(Store):
    """A store that measures its calls."""

    def __init__(self, database: Database, audit_key: bytes | None, *, metrics: Metrics) -> None:
        super().__init__(database, audit_key)
        self.metrics = metrics

    async def append(self, entries: Sequence[AuditEntry], *, fence: Fence | None = None) -> list[AuditRow]:
        with self.metrics.audit_append():
            return await super().append(entries, fence=fence)

    async def session(self, session_id: str) -> SessionRecord:
        with self.metrics.store("session"):
            return await super().session(session_id)

    async def update_session(self, session_id: str, /, **fields: Any) -> SessionRecord:
        with self.metrics.store("update_session"):
            return await super().update_session(session_id, **fields)

    async def find_agent(self, token_hash: str) -> AgentRecord | None:
        with self.metrics.store("find_agent"):
            return await super().find_agent(token_hash)

    async def claim(self, replica: str, seconds: float, limit: int = 100) -> list[SessionLease]:
        with self.metrics.store("claim"):
            return await super().claim(replica, seconds, limit)

    async def renew(self, replica: str, seconds: float) -> list[str]:
        with self.metrics.store("renew"):
            return await super().renew(replica, seconds)

    async def answer_approval(
        self, approval_id: str, outcome: Literal["approved", "refused"], *, by: str = "", comment: str = ""
    ) -> Approval:
        answered = await super().answer_approval(approval_id, outcome, by=by, comment=comment)
        self.metrics.approvals.labels(outcome).inc()
        return answered

    async def end_approvals(self) -> list[Approval]:
        ended = await super().end_approvals()
        for approval in ended:
            self.metrics.approvals.labels(approval.outcome).inc()
        return ended

    async def abandon_approvals(self, caller: str, why: str) -> list[Approval]:
        abandoned = await super().abandon_approvals(caller, why)
        self.metrics.approvals.labels("abandoned").inc(len(abandoned))
        return abandoned

    async def ping(self) -> None:
        """Ping, and count open approvals: only the database has their number for all replicas."""
        with self.metrics.store("ping"):
            await super().ping()
            self.metrics.approvals_waiting.set(len(await self.open_approvals()))
