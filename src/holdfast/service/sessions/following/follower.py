"""Writes down what happens in one session, from the position up to which that was done: one task for each session
whose lease is ours.

It waits in the sandbox's server and reads when something happened. Its rows go to the log in one transaction with
the position and under the lease's epoch: another replica that goes on after us loses nothing and doubles nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import msgspec

from holdfast.errors import HoldfastError, SandboxGone
from holdfast.service.api import AuditFilter
from holdfast.service.clock import Clock, sleep
from holdfast.service.problems import NotNow, Problem
from holdfast.service.sessions.backend.connections import SandboxPool, is_gone
from holdfast.service.sessions.following.events import NoticeBell, event_entry
from holdfast.service.sessions.ports import Redact, SessionStore, Tell, Told
from holdfast.service.settings import ServiceSettings
from holdfast.service.store.types import Fence, Page, SessionLease
from holdfast.service.types import AuditEntry, AuditRow, SessionRecord, State, Struct

#: The position of a session's last rows: behind everything that a terminal could print.
END_POSITION: Final = 1 << 62
#: Between attempts to reach a sandbox or the database that did not answer; doubling up to the second.
_AGAIN_SECONDS: Final = (0.2, 10.0)


class Surroundings(Struct, frozen=True):
    """What every follower works with."""

    store: SessionStore
    pool: SandboxPool
    bell: NoticeBell
    clock: Clock
    settings: ServiceSettings
    redact: Redact
    tell: Tell
    replica: str


class LeaseLost(Exception):
    """Another replica has the session now."""


class Ending(Struct, frozen=True):
    """How a session's terminal or shell ended."""

    state: Literal["CLOSED", "ERROR"]
    reason: str
    exit_code: int | None = None
    #: `sandbox lost: WHY` if the sandbox is gone, `session lost: WHY` if it is there without the session.
    lost: str = ""


class Follower:
    """One session whose lease is ours. `TerminalFollower` and `ShellFollower` know what happens there."""

    def __init__(
        self,
        record: SessionRecord,
        lease: SessionLease,
        around: Surroundings,
        on_change: Callable[[Follower], None],
    ) -> None:
        #: As we know it: newer than the database by a moment.
        self.record = record
        self.lease = lease
        self.around = around
        #: A command runs.
        self.busy = False
        self.last_exit_code: int | None = None
        self.output_bytes = 0
        #: The position up to which everything is read and, if it is worth a row, written down.
        self.read_to = 0
        #: Set once it is over and written down.
        self.over = asyncio.Event()
        self._on_change = on_change
        self._dirty = False
        self._flushing: asyncio.Task[None] | None = None

    # --- the task ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the session is over or another's."""
        wait = _AGAIN_SECONDS[0]
        try:
            while True:
                try:
                    await self._finish(await self.follow())
                    return
                except HoldfastError as error:
                    if is_gone(error):
                        what = "sandbox" if isinstance(error, SandboxGone) else "session"
                        reason = f"it is no longer in its sandbox: {error.message}"
                        await self._finish(Ending("ERROR", reason, lost=f"{what} lost: {error.message}"))
                        return
                    # The line, the sandbox's server or the database: the session may well be there.
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, _AGAIN_SECONDS[1])
        except LeaseLost:
            return
        finally:
            if self._flushing is not None:
                self._flushing.cancel()

    async def follow(self) -> Ending:
        """Read and write down, from `record.audited_token` on, until it ended."""
        raise NotImplementedError

    # --- what happened -------------------------------------------------------------------------------------------

    def touched(self, by: Literal["input", "output"]) -> None:
        """Somebody typed, or something was printed: activity, if the policy counts it as such."""
        if by not in self.record.policy.activity:
            return
        self.record = msgspec.structs.replace(
            self.record, last_activity_at=self.around.clock.time(), warned_at=None
        )
        self._changed()

    def warned(self, at: float) -> None:
        """The idle warning was given."""
        self.record = msgspec.structs.replace(self.record, warned_at=at)
        self._changed()

    def became(self, *, busy: bool) -> None:
        if self.busy != busy:
            self.busy = busy
            self._on_change(self)

    def counted(self, number: int | None = None) -> None:
        """A command ended: the next one, or the one with this number."""
        number = self.record.commands_run + 1 if number is None else number
        self.record = msgspec.structs.replace(self.record, commands_run=number)
        self._changed()

    def _changed(self) -> None:
        self._dirty = True
        if self._flushing is None:
            self._flushing = asyncio.ensure_future(self._flush())

    async def _flush(self) -> None:
        """Many changes at once, a moment later."""
        try:
            await sleep(self.around.clock, self.around.settings.metadata_seconds)
            await self.flush()
        except (Problem, LeaseLost):
            self._dirty = True  # with the next change
        finally:
            self._flushing = None

    async def flush(self) -> None:
        """Put what is known of the session into the database, if that is not the same."""
        while self._dirty and not self.over.is_set():
            self._dirty = False
            if self.read_to > self.record.audited_token:
                # Whoever goes on after us takes nothing for news that we have seen.
                await self.write([], self.read_to)
            record = self.record
            await self.around.store.update_session(
                record.session_id,
                last_activity_at=record.last_activity_at,
                warned_at=record.warned_at,
                commands_run=record.commands_run,
            )

    def entry(self, kind: str, command_id: str = "", at: float | None = None, **body: Any) -> AuditEntry:
        when = self.around.clock.time() if at is None else at
        return AuditEntry(self.record.session_id, when, self.record.agent_id, kind, command_id, body)

    async def write(self, entries: Sequence[AuditEntry], position: int) -> None:
        """Append under our lease, and move the position."""
        fence = Fence(self.record.session_id, self.lease.replica, self.lease.epoch, position)
        try:
            await self.around.store.append(entries, fence=fence)
        except NotNow as problem:
            raise LeaseLost(self.record.session_id) from problem
        position = max(position, self.record.audited_token)
        self.record = msgspec.structs.replace(self.record, audited_token=position)

    async def last_row(self, *kinds: str) -> AuditRow | None:
        which = AuditFilter(session_id=self.record.session_id, kinds=kinds, newest_first=True)
        rows, _ = await self.around.store.rows(which, Page(1))
        return rows[0] if rows else None

    # --- its end -------------------------------------------------------------------------------------------------

    async def _finish(self, ending: Ending) -> None:
        around, session_id = self.around, self.record.session_id
        stored = await around.store.session(session_id)
        now = around.clock.time()
        # A close that was asked for has its reason already.
        state: State = "CLOSED" if stored.state == "CLOSING" else ending.state
        why = stored.close_reason or ending.lost or ("crashed" if state == "ERROR" else "exited")
        # For metrics, in which every text is a time series of its own.
        category = stored.close_reason or ending.lost.partition(":")[0] or why
        record = msgspec.structs.replace(self.record, state=state, closed_at=now, close_reason=why)
        summary = self.summary(record, ending, category)
        if stored.audited_token < END_POSITION:
            words = {"state": state, "reason": why, "detail": ending.reason, "summary": summary}
            entries = [self.entry("session_closed", "", now, **words)]
            if state == "ERROR":
                entries.insert(0, self.entry("error", "", now, detail=ending.reason, exit_code=ending.exit_code))
            event = event_entry(
                record, now, "SESSION_ERROR" if state == "ERROR" else "SESSION_CLOSED", summary, state=state
            )
            await self.write([*entries, event], END_POSITION)
        await around.store.update_session(
            session_id,
            state=state,
            closed_at=now,
            close_reason=why,
            summary=summary,
            commands_run=record.commands_run,
            last_activity_at=record.last_activity_at,
        )
        self.record = msgspec.structs.replace(record, summary=summary)
        self.over.set()
        around.tell(Told("session_over", record.kind, now - record.created_at, category))

    def summary(self, record: SessionRecord, ending: Ending, category: str) -> str:
        """The last words on a session."""
        duration = (record.closed_at or 0.0) - record.created_at
        code = self.last_exit_code
        parts = [
            f"{record.state} ({category}): {ending.reason}",
            f"open for {duration:.1f} s",
            f"{record.commands_run} command{'' if record.commands_run == 1 else 's'}",
            f"{self.output_bytes} bytes of output",
            f"last exit code {'none' if code is None else code}",
        ]
        return "; ".join(parts)

    def excerpt(self, data: bytes, total: int) -> dict[str, Any]:
        """The beginning of what was printed, without secrets, and how much it was."""
        text = self.around.redact(data.decode("utf-8", "replace"))
        limit = self.around.settings.audit_excerpt_bytes
        return {"output": text[:limit], "output_bytes": total, "cut": total > len(data) or len(text) > limit}
