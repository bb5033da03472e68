"""Connects the monitor with the sessions: samples sandboxes, records alerts, carries out escalation steps.

Implements `monitor.MonitorBackend` with the sessions' pool, store and manager. Touches sandboxes through the pool.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from holdfast.service.api import Control
from holdfast.service.clock import Clock
from holdfast.service.monitor.monitor import ORPHANED, MonitorEvent
from holdfast.service.monitor.thresholds import Escalation
from holdfast.service.sessions.backend.connections import SandboxPool
from holdfast.service.sessions.following.events import event_entry
from holdfast.service.sessions.manager import SessionManager
from holdfast.service.sessions.ports import SessionStore, Watcher
from holdfast.service.types import SERVICE_STREAM, AuditEntry, SessionRecord, Usage
from holdfast.types import UsageSample


class SessionMonitorBackend:
    """`monitor.MonitorBackend`. `manager` is set after its creation, which needs the monitor."""

    manager: SessionManager

    def __init__(self, pool: SandboxPool, store: SessionStore, clock: Clock) -> None:
        self._pool = pool
        self._store = store
        self._clock = clock

    async def usage(self, sandbox: str, ids: Sequence[str]) -> UsageSample:
        async with self._pool.use(sandbox) as api:
            return await api.usage(ids)

    async def store_usages(self, usages: Mapping[str, Usage]) -> None:
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
        if record.over or step == "warn":
            return
        if step == "terminate":
            await self.manager.desk(record).live.send(f"limit-{secrets.token_hex(8)}", b"", (Control("SIGTERM"),))
        else:
            await self.manager.close_over_limit(record)


class Watchers:
    """Passes watch events to several watchers."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def watch(self, record: SessionRecord) -> None:
        for watcher in self._watchers:
            watcher.watch(record)

    def forget(self, session_id: str) -> None:
        for watcher in self._watchers:
            watcher.forget(session_id)

    def closed(self, session_id: str) -> None:
        for watcher in self._watchers:
            watcher.closed(session_id)
