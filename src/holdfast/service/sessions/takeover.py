"""Input of callers that do not own a session: allowed by the rules, and recorded before the first byte.

An operator that types in the session of an agent takes it over. The audit log has a row and an event at the first
input of each such caller, or at its `TakeOver`, and another at its release. Several callers may type at once: input
of one call stays together.
"""

from __future__ import annotations

from holdfast.service.policy.engine import refusal
from holdfast.service.sessions.context import SessionContext
from holdfast.service.sessions.following.events import audit_entry, event_entry
from holdfast.service.sessions.handles import SessionHandle
from holdfast.service.sessions.rulebook import Rulebook
from holdfast.service.types import Caller, SessionRecord


class Takeovers:
    """Checks and records takeovers."""

    def __init__(self, context: SessionContext, rules: Rulebook) -> None:
        self._store = context.store
        self._clock = context.clock
        self._rules = rules

    async def begin(self, caller: Caller, record: SessionRecord, handle: SessionHandle) -> None:
        """Record the takeover, unless the caller owns the session or has it already; `Denied` by the rules."""
        by = caller.agent_id
        if by == record.agent_id:
            return
        now = self._clock.time()
        decision = self._rules.takeover(record)
        if not decision.allowed:
            why = {"rule": decision.rule, "reason": decision.reason}
            denied = audit_entry(record, now, "decision", verdict="deny", command="take over", by=by, **why)
            await self._store.append(
                [denied, event_entry(record, now, "POLICY_VIOLATION", f"refused: {by} may not take over")]
            )
            raise refusal(decision)
        if by not in handle.taken_by:
            handle.taken_by.add(by)
            event = event_entry(record, now, "TAKEN_OVER", f"{by} types in this session")
            await self._store.append([audit_entry(record, now, "takeover", by=by, rule=decision.rule), event])

    async def end(self, caller: Caller, record: SessionRecord, handle: SessionHandle) -> None:
        """Record the release; no effect if this replica has no takeover of the caller."""
        by = caller.agent_id
        if by in handle.taken_by:
            handle.taken_by.discard(by)
            now = self._clock.time()
            event = event_entry(record, now, "RELEASED", f"{by} no longer types in this session")
            await self._store.append([audit_entry(record, now, "release", by=by), event])
