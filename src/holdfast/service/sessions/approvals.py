"""Commands that need an approval: requested, then answered, expired or abandoned once, with an audit row each time.

The store decides which of two answers counts. Input that waits for an approval is in the store, so any replica can
type it. A `RunCommand` waits for its approval itself, so the approval ends when that call does: the
caller disconnects, its deadline passes, or its replica crashes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final, Literal

from holdfast.service.clock import WallClock
from holdfast.service.problems import Denied, Exhausted, NotFound, Problem, TooLate
from holdfast.service.sessions.following.events import NoticeHub, audit_entry, event_entry
from holdfast.service.sessions.ports import Redact, SessionStore, first_row
from holdfast.service.sessions.timers import TimerHeap
from holdfast.service.types import Approval, Caller, SessionRecord

#: Open approvals of one session: people read them one by one, and a page holds them all.
MOST_WAITING: Final = 50
#: The longest command for an approval: a person reads it, and an audit row holds it whole.
LONGEST_COMMAND: Final = 32 * 1024
#: After this time the replica no longer types an approved command: it waits less for a prompt.
_TYPING_SECONDS: Final = 60.0
_log = logging.getLogger("holdfast.service.approvals")
#: Types the command of an approval.
Deliver = Callable[[SessionRecord, Approval], Awaitable[None]]
Outcome = Literal["approved", "refused"]


class ApprovalBroker:
    """`ListApprovals`, `AnswerApproval`, and requests for approvals."""

    def __init__(
        self,
        store: SessionStore,
        notices: NoticeHub,
        heap: TimerHeap,
        clock: WallClock,
        redact: Redact,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        deliver: Deliver,
        *,
        replica: str,
        caller_seconds: float,
    ) -> None:
        self._store = store
        self._notices = notices
        self._heap = heap
        self._clock = clock
        self._redact = redact
        self._spawn = spawn
        self._deliver = deliver
        self._replica = replica
        #: A waiting call counts as alive for so long; `keep` renews it about every third of this time.
        self._caller_seconds = caller_seconds
        #: Calls of this replica that wait for an approval.
        self._callers: set[str] = set()

    async def hold(self, record: SessionRecord, command_id: str, command: str, rule: str, reason: str) -> Approval:
        """Request an approval for input. The replica that gets the answer types the input, so no call waits."""
        return await self._request(record, command_id, command, rule, reason, caller="")

    @contextlib.asynccontextmanager
    async def approved(
        self, record: SessionRecord, command_id: str, command: str, rule: str, reason: str, timeout: float
    ) -> AsyncIterator[Approval]:
        """Request an approval and enter the block once it is given. The block starts the command.

        Raises `Denied` if it is refused, expires or is abandoned, `TooLate` after the timeout. An exception or
        cancellation before the end of the block ends the approval too.
        """
        caller = f"{self._replica}/{secrets.token_hex(8)}"
        self._callers.add(caller)
        approval: Approval | None = None
        try:
            approval = await self._request(record, command_id, command, rule, reason, caller=caller)
            await self._wait(approval, timeout)
            yield approval
        except BaseException as error:
            # In a separate task: this one can be cancelled a second time.
            await asyncio.shield(self._spawn(self._call_ended(record, approval, caller, _why(error, timeout))))
            raise
        finally:
            self._callers.discard(caller)

    async def _call_ended(self, record: SessionRecord, approval: Approval | None, caller: str, why: str) -> None:
        """End the approval of a call that ended, or record that an approved command did not run."""
        try:
            for abandoned in await self._store.abandon_approvals(caller, why):
                await self._record_outcome(record, abandoned, "abandoned", "", why)
            if approval is not None and (await self._store.approval(approval.approval_id)).outcome == "approved":
                await self._not_run(record, approval, f"the approved command was not run: {why}", "NOT_RUN")
        except Problem as problem:
            # The approval ends once `caller_seconds` have passed without a renewal.
            _log.warning("approval of %s could not be ended with its caller: %s", caller, problem.message)

    async def keep(self) -> None:
        """Renew the waiting calls of this replica; end approvals of ended calls, replicas and sessions."""
        if self._callers:
            await self._store.renew_callers(self._callers, self._caller_seconds)
        await self._end()

    async def stop(self) -> None:
        """End the approvals of the waiting calls of this replica."""
        for caller in list(self._callers):
            with contextlib.suppress(Problem):
                for abandoned in await self._store.abandon_approvals(caller, "the service stopped"):
                    record = await self._store.session(abandoned.session_id)
                    await self._record_outcome(record, abandoned, "abandoned", "", abandoned.comment)

    async def _request(
        self, record: SessionRecord, command_id: str, command: str, rule: str, reason: str, *, caller: str
    ) -> Approval:
        """Record the request and its event. With `caller`, that call waits for the answer."""
        now = self._clock.time()
        waiting = await self._store.open_approvals(session_id=record.session_id)
        for each in waiting:
            if each.command_id == command_id and (
                not caller
                or not each.caller
                or await self._store.attach_caller(each.approval_id, caller, self._caller_seconds)
            ):
                return each  # a repeated request: this call waits in place of the first one
        if len(waiting) >= MOST_WAITING:
            raise Exhausted(
                f"session {record.session_id!r} has {MOST_WAITING} open approvals",
                reason="APPROVAL_LIMIT",
                retry_after=max(1.0, min(each.expires_at for each in waiting) - now),
            )
        if len(command.encode()) > LONGEST_COMMAND:
            message = f"a command of more than {LONGEST_COMMAND} bytes is too long for an approval"
            raise Denied(message, reason="POLICY_DENIED", rule=rule)
        shown = self._redact(command)
        if shown != command:
            # The approver must know that parts of the command are not shown.
            reason = f"{reason} (parts that look like secrets are not shown)"
        approval = Approval(
            approval_id=f"apr-{secrets.token_hex(8)}",
            session_id=record.session_id,
            agent_id=record.agent_id,
            command=shown,
            reason=reason,
            asked_at=now,
            expires_at=now + record.policy.approval_timeout,
            command_id=command_id,
            data=b"" if caller else command.encode(),
            caller=caller,
        )
        await self._store.add_approval(approval, caller_seconds=self._caller_seconds)
        body = {"verdict": "ask", "command": approval.command, "rule": rule, "reason": reason}
        ids: Any = {"approval_id": approval.approval_id, "command_id": command_id}
        decision = audit_entry(record, now, "decision", command_id, **body, approval_id=approval.approval_id)
        event = event_entry(record, now, "APPROVAL_REQUESTED", f"{approval.command}: {reason}", **ids)
        await self._store.append([decision, event])
        self.expire_at(approval.expires_at)
        return approval

    def expire_at(self, when: float) -> None:
        """Check for expired approvals at a time. Every replica checks, and one records the expiry."""
        self._heap.set(("approvals", when), when, lambda: self._spawn(self._expire()))

    async def _expire(self) -> None:
        try:
            await self._end()
        except Problem:
            self.expire_at(self._clock.time() + 1.0)

    async def _end(self) -> None:
        for approval in await self._store.end_approvals():
            with contextlib.suppress(NotFound):
                record = await self._store.session(approval.session_id)
                await self._record_outcome(record, approval, approval.outcome, "", approval.comment)

    async def resume(self) -> None:
        """Set the timers of open approvals after a start, and end those that expired meanwhile."""
        for approval in await self._store.open_approvals():
            self.expire_at(approval.expires_at)
        await self._expire()

    async def visible(self, caller: Caller, session_id: str = "", *, ended: bool = False) -> list[Approval]:
        """Return the open approvals, oldest first; with `ended` the latest of all, newest first."""
        agent_id = "" if caller.role == "operator" else caller.agent_id
        find = self._store.latest_approvals if ended else self._store.open_approvals
        return await find(session_id=session_id, agent_id=agent_id)

    async def answer(self, caller: Caller, approval_id: str, approve: bool, comment: str) -> Outcome:
        approval = await self._store.approval(approval_id)
        if not caller.may_see(approval.agent_id):
            raise NotFound(f"no approval {approval_id!r}", reason="APPROVAL_NOT_FOUND")
        record = await self._store.session(approval.session_id)
        if caller.role != "operator" and not record.policy.owner_approves:
            raise Denied("only an operator may answer this approval", reason="NOT_AN_OPERATOR")
        outcome: Outcome = "approved" if approve else "refused"
        # First, so that the refusal of a late answer has the outcome of the approval.
        await self._end()
        if approve and await self._is_untyped(approval):
            work = self._type(record, approval)
        else:
            answered = await self._store.answer_approval(approval_id, outcome, by=caller.agent_id, comment=comment)
            work = self._apply_answer(record, answered, outcome)
        # The answer counts even if the caller disconnects now.
        await asyncio.shield(self._spawn(work))
        return outcome

    async def _is_untyped(self, approval: Approval) -> bool:
        """Return whether an approved command was not typed, because of an error or a stopped replica."""
        if approval.outcome != "approved" or not approval.data or approval.expires_at <= self._clock.time():
            return False
        which = {"session_id": approval.session_id, "command_id": approval.command_id, "newest_first": True}
        kinds = ("approval_answered", "error", "command_started", "command_ended")
        last = await first_row(self._store, kinds=kinds, **which)
        if last is None:
            return False
        too_long = last.kind == "approval_answered" and last.at + _TYPING_SECONDS <= self._clock.time()
        return too_long or last.kind == "error"

    async def _apply_answer(self, record: SessionRecord, approval: Approval, outcome: Outcome) -> None:
        await self._record_outcome(record, approval, outcome, approval.answered_by, approval.comment)
        if outcome == "approved" and approval.data:
            await self._type(record, approval)

    async def _type(self, record: SessionRecord, approval: Approval) -> None:
        try:
            await self._deliver(record, approval)
        except Problem as problem:
            detail = f"the approved command could not be typed: {problem.message}"
            await self._not_run(record, approval, detail, problem.reason)
            raise

    async def _not_run(self, record: SessionRecord, approval: Approval, detail: str, reason: str) -> None:
        body = {"detail": detail, "reason": reason, "approval_id": approval.approval_id}
        await self._store.append([audit_entry(record, self._clock.time(), "error", approval.command_id, **body)])

    async def _record_outcome(
        self, record: SessionRecord, approval: Approval, outcome: str, by: str, comment: str
    ) -> None:
        now = self._clock.time()
        body = {
            "approval_id": approval.approval_id,
            "outcome": outcome,
            "by": by,
            "comment": self._redact(comment),
            "command": approval.command,
        }
        detail = f"{outcome}{f' by {by}' if by else ''}: {approval.command}"
        if outcome == "abandoned":
            detail = f"{detail} ({comment})"
        ids: Any = {"approval_id": approval.approval_id, "command_id": approval.command_id}
        answered = audit_entry(record, now, "approval_answered", approval.command_id, **body)
        await self._store.append([answered, event_entry(record, now, "APPROVAL_ANSWERED", detail, **ids)])

    async def _wait(self, approval: Approval, timeout: float) -> None:
        """Return once the approval is given, else raise `Denied` or `TooLate`."""
        approval_id = approval.approval_id

        async def ended() -> Approval | None:
            current = await self._store.approval(approval_id)
            return current if current.outcome else None

        answered = await self._notices.until(approval.session_id, ended, timeout)
        if answered is None:
            message = f"approval {approval_id!r} was not answered within {timeout:g} s and ended with this call"
            raise TooLate(f"{message}; the command was not run", reason="APPROVAL_TIMEOUT", approval_id=approval_id)
        if answered.outcome != "approved":
            comment = f" ({answered.comment})" if answered.outcome == "abandoned" else ""
            message = f"the command was not run: approval {approval_id!r} is {answered.outcome}{comment}"
            raise Denied(message, reason=f"APPROVAL_{answered.outcome.upper()}", approval_id=approval_id)


def _why(error: BaseException, timeout: float) -> str:
    """Return why a call that waited for an approval ended, for the approver."""
    if isinstance(error, TooLate):
        return f"its RunCommand timed out after {timeout:g} s"
    if isinstance(error, Problem):
        return f"its RunCommand failed: {error.message}"
    if isinstance(error, asyncio.CancelledError):
        return "its caller disconnected or reached its deadline"
    return "its RunCommand failed"
