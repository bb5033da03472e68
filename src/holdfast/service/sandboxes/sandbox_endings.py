"""Announces to a session that its sandbox ends soon: drained, evicted or deleted on its engine.

The replica that follows a session announces the end, once: the audit row marks it for the next replica. The session
then closes with the engine's reason. Touches engines through `holdfast.fleet`, and the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from holdfast.errors import HoldfastError
from holdfast.fleet.engine import ENGINES, SandboxEnding
from holdfast.fleet.record import is_id
from holdfast.service.clock import WallClock
from holdfast.service.sessions.following.events import audit_entry, event_entry
from holdfast.service.sessions.ports import SessionStore, first_row
from holdfast.service.types import SessionRecord

#: Between attempts while the engine or the store does not answer.
RETRY_SECONDS: Final = 5.0
#: Ends that are remembered for sessions whose creation is not finished.
_MAX_ENDINGS: Final = 1_000
#: Characters of the engine's reason that are kept.
_REASON_CHARACTERS: Final = 300

_log = logging.getLogger("holdfast.service")

#: Returns the ends that an engine announces.
Endings = Callable[[str], AsyncIterator[SandboxEnding]]


class SandboxEndings:
    """A `ports.SessionWatcher` with one task for each engine that followed sessions use."""

    def __init__(self, store: SessionStore, clock: WallClock, endings: Endings) -> None:
        self._store = store
        self._clock = clock
        self._endings = endings
        #: The followed session of each sandbox.
        self._sessions: dict[str, SessionRecord] = {}
        #: The latest ends by address, oldest first.
        self._announced: dict[str, SandboxEnding] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def watch(self, record: SessionRecord) -> None:
        engine, _, id = record.sandbox.partition(":")
        if engine not in ENGINES or not is_id(id):
            return  # not made by the service
        self._sessions[record.sandbox] = record
        if (ending := self._announced.get(record.sandbox)) is not None:
            self._announce(record, ending)
        if engine not in self._watching:
            self._watching[engine] = asyncio.create_task(self._watch(engine))

    def forget(self, session_id: str) -> None:
        self._sessions = {
            address: record for address, record in self._sessions.items() if record.session_id != session_id
        }

    closed = forget

    async def _watch(self, engine: str) -> None:
        """Read the ends until the replica stops. An engine that announces none ends the loop."""
        while True:
            try:
                async for ending in self._endings(engine):
                    address = f"{engine}:{ending.id}"
                    self._announced[address] = ending
                    if len(self._announced) > _MAX_ENDINGS:
                        del self._announced[next(iter(self._announced))]
                    if (record := self._sessions.get(address)) is not None:
                        self._announce(record, ending)
                return
            except HoldfastError as error:
                _log.warning("engine %s: ends of sandboxes are not announced: %s", engine, error.message)
            await asyncio.sleep(RETRY_SECONDS)

    def _announce(self, record: SessionRecord, ending: SandboxEnding) -> None:
        task = asyncio.create_task(self._write(record, ending))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, record: SessionRecord, ending: SandboxEnding) -> None:
        session_id, reason = record.session_id, ending.reason[:_REASON_CHARACTERS]
        try:
            stored = await self._store.session(session_id)
            # A session that closes has a reason already, and its sandbox is removed by the service.
            if stored.over or stored.state == "CLOSING":
                return
            if await first_row(self._store, session_id=session_id, kinds=("sandbox_ending",)) is not None:
                return
            now = self._clock.time()
            row = audit_entry(
                record,
                now,
                "sandbox_ending",
                sandbox=record.sandbox,
                reason=reason,
                seconds=round(ending.seconds, 1),
            )
            detail = f"the sandbox ends in {ending.seconds:.0f} s: {reason}"
            await self._store.append([row, event_entry(record, now, "SANDBOX_ENDING", detail)])
            await self._store.update_session(session_id, close_reason=f"sandbox ended: {reason}")
        except HoldfastError as error:
            _log.warning("session %s: the end of its sandbox is not announced: %s", session_id, error.message)

    async def stop(self) -> None:
        for task in self._watching.values():
            task.cancel()
        await asyncio.gather(*self._watching.values(), *self._tasks, return_exceptions=True)
