"""Connects the monitor with the sessions: samples sandboxes, records alerts, carries out escalation steps.

Implements `monitor.MonitorBackend` with the sessions' pool, store and manager. Touches sandboxes through the pool.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

from holdfast.service.clock import WallClock
from holdfast.service.monitor.monitor import ORPHANED, MonitorEvent
from holdfast.service.monitor.thresholds import Escalation
from holdfast.service.sessions.backend.connections import SandboxConnections
from holdfast.service.sessions.following.events import event_entry
from holdfast.service.sessions.ports import SessionStore
from holdfast.service.types import SERVICE_STREAM, AuditEntry, ResourceUsage, SessionRecord
from holdfast.types import UsageSample

#: `SessionManager.enforce_limit`.
EnforceLimit = Callable[[SessionRecord, Literal["terminate", "close"]], Awaitable[None]]


class MonitorGateway:
    """`MonitorBackend` for the sessions of one replica."""

    def __init__(
        self, pool: SandboxConnections, store: SessionStore, clock: WallClock, enforce: EnforceLimit
    ) -> None:
        self._pool = pool
        self._store = store
        self._clock = clock
        self._enforce = enforce

    async def usage(self, sandbox: str, ids: Sequence[str]) -> UsageSample:
        async with self._pool.use(sandbox) as api:
            return await api.usage(ids)

    async def store_usages(self, usages: Mapping[str, ResourceUsage]) -> None:
        await self._store.put_usages(usages)

    async def report(self, event: MonitorEvent) -> None:
        record = await self._store.session(event.session_id)
        if event.reason == ORPHANED:
            # The session's own stream has had its last row.
            body = {"session_id": event.session_id, "reason": event.reason, "detail": event.detail}
            orphans = AuditEntry(SERVICE_STREAM, event.at, record.agent_id, "orphans", body=body)
            await self._store.append([orphans])
        elif not record.over:
            detail = f"{event.reason}: {event.detail}"
            if event.step is not None:
                detail += f" ({event.step})"
            await self._store.append([event_entry(record, event.at, event.type, detail)])

    async def escalate(self, session_id: str, step: Escalation) -> None:
        record = await self._store.session(session_id)
        if not record.over and step != "warn":
            await self._enforce(record, step)
