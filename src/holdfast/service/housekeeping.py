"""Periodic work of a replica: removes expired rows and sandboxes, and checks that the database answers.

Uses the store and the injected clock. An error is logged, and the work is repeated; no session stops.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from holdfast.service.clock import SystemClock, WallClock, sleep
from holdfast.service.fronts.readiness import Readiness
from holdfast.service.problems import Problem
from holdfast.service.sandboxes.session_sandboxes import SessionSandboxes
from holdfast.service.settings import ServiceSettings
from holdfast.service.store import Removed, Store

#: The interval of the database check, about that of the probes of a load balancer.
PING_SECONDS: Final = 5.0
#: Smaller steps of the wall clock are ignored: the clocks of replicas differ by as much.
STEP_SECONDS: Final = 5.0
DAY_SECONDS: Final = 86_400.0

_log = logging.getLogger("holdfast.service")


class Housekeeping:
    """Three loops. Call `start`, then `stop`."""

    def __init__(
        self,
        store: Store,
        readiness: Readiness,
        clock: WallClock,
        settings: ServiceSettings,
        sandboxes: SessionSandboxes | None = None,
    ) -> None:
        self._store = store
        self._readiness = readiness
        self._clock = clock
        self._settings = settings
        self._sandboxes = sandboxes
        self._tasks: list[asyncio.Task[None]] = []
        #: The step of the wall clock that was logged last.
        self._reported_step = 0.0

    def start(self) -> None:
        loops = (self._watch_store(), self._retain(), self._prune())
        self._tasks = [asyncio.create_task(each) for each in loops]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def retain_once(self) -> Removed:
        """Remove the rows that are older or larger than the settings allow."""
        days, size = self._settings.audit_retention_days, self._settings.audit_retention_bytes
        removed = await self._store.retain(max_age=days * DAY_SECONDS if days else None, max_bytes=size or None)
        if removed.sessions:
            _log.info("retention removed %d sessions with %d rows", removed.sessions, removed.rows)
        return removed

    async def _retain(self) -> None:
        if not self._settings.audit_retention_interval:
            return
        while True:
            try:
                await self.retain_once()
            except Problem as problem:
                _log.warning("retention: %s", problem.message)
            await sleep(self._clock, self._settings.audit_retention_interval)

    async def prune_once(self, sandboxes: SessionSandboxes) -> None:
        """Remove the sandboxes of ended sessions, and expired sandboxes."""
        try:
            await sandboxes.remove_ended()
            await sandboxes.prune()
        except Problem as problem:
            _log.warning("removal of sandboxes: %s", problem.message)

    async def _prune(self) -> None:
        if self._sandboxes is None or not self._settings.sandbox_prune_interval:
            return
        while True:
            await self.prune_once(self._sandboxes)
            await sleep(self._clock, self._settings.sandbox_prune_interval)

    def _check_clock(self) -> None:
        if not isinstance(self._clock, SystemClock):
            return
        stepped = self._clock.stepped()
        if abs(stepped - self._reported_step) > STEP_SECONDS:
            self._reported_step = stepped
            _log.warning(
                "the wall clock was set by %+.0f s: this replica keeps its old time, restart it to follow", stepped
            )

    async def _watch_store(self) -> None:
        while True:
            self._check_clock()
            try:
                await self._store.ping()
            except Problem as problem:
                _log.warning("the database does not answer: %s", problem.message)
                # Probes need no token, so the reason does not name the database.
                self._readiness.set("store", why_not="the database does not answer")
            else:
                self._readiness.set("store")
            await sleep(self._clock, PING_SECONDS)
