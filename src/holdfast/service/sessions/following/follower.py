"""Appends the events of one session to the audit log, in one task for each session with a lease of this replica.

The follower long-polls the sandbox's server. Its rows are written in one transaction with the position and under
the epoch of the lease, so another replica that takes over loses no row and repeats none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import msgspec

from holdfast.errors import HoldfastError, SandboxGone
from holdfast.service.clock import sleep
from holdfast.service.problems import NotNow, Problem
from holdfast.service.sessions.backend.connections import is_gone
from holdfast.service.sessions.backend.session_backend import CommandOutcome
from holdfast.service.sessions.context import SessionContext
from holdfast.service.sessions.following.events import audit_entry, event_entry
from holdfast.service.sessions.ports import MetricEvent, first_row
from holdfast.service.store.types import Fence, SessionLease
from holdfast.service.types import AuditEntry, AuditRow, ServiceStruct, SessionRecord, State

#: The position of a session's last rows, after all possible output.
END_POSITION: Final = 1 << 62
#: Between attempts while the sandbox or the database is unreachable; doubling up to the second value.
_RETRY_SECONDS: Final = (0.2, 10.0)

#: Called when a command ends in the session of a follower.
OnChange = Callable[["SessionFollower"], None]


class LeaseLost(Exception):
    """Another replica has the lease."""


class Ending(ServiceStruct, frozen=True):
    """The end of a session's terminal or shell."""

    state: Literal["CLOSED", "ERROR"]
    reason: str
    exit_code: int | None = None
    #: `sandbox lost: WHY` if the sandbox is lost, `session lost: WHY` if only the session is.
    lost: str = ""


class SessionFollower:
    """Follows one session. `TerminalFollower` and `ShellFollower` read the two kinds."""

    def __init__(
        self, record: SessionRecord, lease: SessionLease, context: SessionContext, on_change: OnChange
    ) -> None:
        #: The record, ahead of the database by up to `metadata_seconds`.
        self.record = record
        self.lease = lease
        self.context = context
        #: A command runs.
        self.busy = False
        self.last_exit_code: int | None = None
        self.output_bytes = 0
        #: The position up to which the session is read and its rows are written.
        self.read_to = 0
        #: Set after the last rows are written.
        self.over = asyncio.Event()
        self._on_change = on_change
        self._dirty = False
        self._flushing: asyncio.Task[None] | None = None

    # --- the task ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the session until it is over or another replica has the lease."""
        wait = _RETRY_SECONDS[0]
        try:
            while True:
                try:
                    await self._finish(await self.follow())
                    return
                except HoldfastError as error:
                    if is_gone(error):
                        what = "sandbox" if isinstance(error, SandboxGone) else "session"
                        reason = f"the session is no longer in its sandbox: {error.message}"
                        await self._finish(Ending("ERROR", reason, lost=f"{what} lost: {error.message}"))
                        return
                    # The connection, the sandbox's server or the database failed; the session may be fine.
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, _RETRY_SECONDS[1])
        except LeaseLost:
            return
        finally:
            if self._flushing is not None:
                self._flushing.cancel()

    async def follow(self) -> Ending:
        """Read the session from `record.audited_token` on and append its rows, until it ends."""
        raise NotImplementedError

    def typed(self, command_id: str, position: int, lines: int) -> None:
        """Note an input with line ends in it, which can start a command of a terminal."""

    def wrote(self, row: AuditRow, *, runs: bool) -> None:
        """Note a row of this replica that requests a command; with `runs`, `ran` follows."""

    def ran(self, command_id: str, outcome: CommandOutcome | None) -> None:
        """Note the end of a command that this replica ran; None if the call ended without the command's end."""

    def has_read(self, number: int) -> bool:
        """Return whether the end of this command of a shell was read."""
        return True

    async def caught_up(self, number: int, seconds: float) -> None:
        """Wait until the end of this command of a shell was read, at most so long."""

    # --- changes of the record -----------------------------------------------------------------------------------

    def touched(self, by: Literal["input", "output"]) -> None:
        """Record activity by input or output, if the policy counts it."""
        if by not in self.record.policy.activity:
            return
        self.record = msgspec.structs.replace(
            self.record, last_activity_at=self.context.clock.time(), warned_at=None
        )
        self._changed()

    def warned(self, at: float) -> None:
        """Record the time of the idle warning."""
        self.record = msgspec.structs.replace(self.record, warned_at=at)
        self._changed()

    def became(self, *, busy: bool) -> None:
        """Note the start or the end of a command. A start only delays the deadline of the session."""
        if self.busy != busy:
            self.busy = busy
            if not busy:
                self._on_change(self)

    def counted(self, number: int | None = None) -> None:
        """Count a command that ended: the next one, or the one with this number."""
        number = self.record.commands_run + 1 if number is None else number
        self.record = msgspec.structs.replace(self.record, commands_run=number)
        self._changed()

    def _changed(self) -> None:
        self._dirty = True
        if self._flushing is None:
            self._flushing = asyncio.ensure_future(self._flush())

    async def _flush(self) -> None:
        """Write many changes at once, after a delay."""
        try:
            await sleep(self.context.clock, self.context.settings.metadata_seconds)
            await self.flush()
        except (Problem, LeaseLost):
            self._dirty = True  # with the next change
        finally:
            self._flushing = None

    async def flush(self) -> None:
        """Write the changes of the record to the database."""
        while self._dirty and not self.over.is_set():
            # With the position, so that the next follower does not process the same events again.
            await self.write([], max(self.read_to, self.record.audited_token), patient=True)

    def entry(self, kind: str, command_id: str = "", at: float | None = None, **body: Any) -> AuditEntry:
        when = self.context.clock.time() if at is None else at
        return audit_entry(self.record, when, kind, command_id, **body)

    async def write(self, entries: Sequence[AuditEntry], position: int, *, patient: bool = False) -> None:
        """Append rows under the lease, move the position, and write the changes of the record with them.

        `patient` for rows that no caller waits for.
        """
        metadata = self._metadata() if self._dirty else {}
        fence = Fence(self.record.session_id, self.lease.replica, self.lease.epoch, position, metadata, patient)
        self._dirty = False
        rows: list[AuditRow] = []
        try:
            rows = await self.context.store.append(entries, fence=fence)
        except NotNow as problem:
            raise LeaseLost(self.record.session_id) from problem
        finally:
            # Rows that were appended before are not appended again, nor the changes with them.
            self._dirty = self._dirty or (bool(metadata) and len(rows) < len(entries))
        self.appended(rows)
        position = max(position, self.record.audited_token)
        self.record = msgspec.structs.replace(self.record, audited_token=position)

    def appended(self, rows: Sequence[AuditRow]) -> None:
        """Note rows that this follower has appended."""

    def _metadata(self) -> dict[str, Any]:
        record = self.record
        return {
            "last_activity_at": record.last_activity_at,
            "warned_at": record.warned_at,
            "commands_run": record.commands_run,
        }

    async def last_row(self, *kinds: str) -> AuditRow | None:
        session_id = self.record.session_id
        return await first_row(self.context.store, session_id=session_id, kinds=kinds, newest_first=True)

    # --- the end of the session ----------------------------------------------------------------------------------

    async def _finish(self, ending: Ending) -> None:
        context, session_id = self.context, self.record.session_id
        stored = await context.store.session(session_id)
        now = context.clock.time()
        # A requested close has its reason already.
        requested = stored.state == "CLOSING"
        state: State = "CLOSED" if requested else ending.state
        # An announced end of the sandbox is the reason only if the sandbox is lost.
        known = stored.close_reason if requested or ending.lost else ""
        why = known or ending.lost or ("crashed" if state == "ERROR" else "exited")
        # For metrics, where every text is a separate time series.
        category = why if requested else why.partition(":")[0]
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
        await context.store.update_session(
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
        context.emit(MetricEvent("session_over", record.kind, now - record.created_at, category))

    def summary(self, record: SessionRecord, ending: Ending, category: str) -> str:
        """Return the summary of a closed session."""
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
        """Return the beginning of the output without secrets, and its size."""
        text = self.context.redact(data.decode("utf-8", "replace"))
        limit = self.context.settings.audit_excerpt_bytes
        return {"output": text[:limit], "output_bytes": total, "cut": total > len(data) or len(text) > limit}
