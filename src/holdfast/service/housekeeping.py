"""What a replica does by itself every so often: remove what is too old, and see whether the database still answers.

Works on the store, by the injected clock. What goes wrong here is logged and tried again; it stops no session.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from holdfast.service.clock import Clock, SystemClock, sleep
from holdfast.service.fronts.readiness import Readiness
from holdfast.service.problems import Problem
from holdfast.service.settings import ServiceSettings
from holdfast.service.store import Removed, Store

#: How often the database is asked. A load balancer's own probes come about as often.
PING_SECONDS: Final = 5.0
#: Steps of the wall clock below this are no reason to restart: clocks of replicas differ by as much.
STEP_SECONDS: Final = 5.0
DAY_SECONDS: Final = 86_400.0

_log = logging.getLogger("holdfast.service")


class Housekeeping:
    """Two loops; `start`, then `stop`."""

    def __init__(self, store: Store, readiness: Readiness, clock: Clock, settings: ServiceSettings) -> None:
        self._store = store
        self._readiness = readiness
        self._clock = clock
        self._settings = settings
        self._tasks: list[asyncio.Task[None]] = []
        #: The step of the wall clock that was logged last.
        self._reported_step = 0.0

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._watch_store()), asyncio.create_task(self._retain())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def retain_once(self) -> Removed:
        """Remove what the settings no longer keep."""
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

    def _look_at_clock(self) -> None:
        if not isinstance(self._clock, SystemClock):
            return
        stepped = self._clock.stepped()
        if abs(stepped - self._reported_step) > STEP_SECONDS:
            self._reported_step = stepped
            _log.warning(
                "the wall clock was set by %+.0f s: this replica goes on by its own, restart it to follow", stepped
            )

    async def _watch_store(self) -> None:
        while True:
            self._look_at_clock()
            try:
                await self._store.ping()
            except Problem as problem:
                _log.warning("the database does not answer: %s", problem.message)
                # Probes come from outsiders, who need not know where the database is.
                self._readiness.set("store", why_not="the database does not answer")
            else:
                self._readiness.set("store")
            await sleep(self._clock, PING_SECONDS)
