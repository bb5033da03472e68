"""Commands that wait for somebody to allow them: asked for, answered once, or expired; written down each time.

The store decides which of two answers counts. What is to be typed waits in it, so any replica may answer.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Literal

from holdfast.service.api import AuditFilter
from holdfast.service.clock import Clock
from holdfast.service.model import Approval, AuditEntry, Caller, SessionRecord
from holdfast.service.problems import Denied, Exhausted, NotFound, Problem, TooLate
from holdfast.service.sessions.events import NoticeBell, event_entry
from holdfast.service.sessions.ports import Redact, SessionStore
from holdfast.service.sessions.timers import TimerHeap
from holdfast.service.store.model import Page

#: Commands of one session that wait at a time: people read them one by one, and a page holds them all.
MOST_WAITING: Final = 50
#: The longest command that anybody reads before allowing it; a row of the audit holds it whole.
LONGEST_COMMAND: Final = 32 * 1024
#: Nobody is still at typing what was allowed so long ago: longer than a prompt is waited for.
_TYPING_SECONDS: Final = 60.0
#: Types what was held, once it is allowed.
Deliver = Callable[[SessionRecord, Approval], Awaitable[None]]
Outcome = Literal["approved", "refused"]


class Approvals:
    """`ListApprovals`, `AnswerApproval`, and what asks for them."""

    def __init__(
        self,
        store: SessionStore,
        bell: NoticeBell,
        heap: TimerHeap,
        clock: Clock,
        redact: Redact,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        deliver: Deliver,
    ) -> None:
        self._store = store
        self._bell = bell
        self._heap = heap
        self._clock = clock
        self._redact = redact
        self._spawn = spawn
        self._deliver = deliver

    async def ask(
        self, record: SessionRecord, command_id: str, command: str, rule: str, reason: str, *, held: bool
    ) -> Approval:
        """Write the request down and tell of it. `held`: the command is typed by whoever approves it; otherwise its
        caller waits and runs it."""
        now = self._clock.time()
        waiting = await self._store.open_approvals(session_id=record.session_id)
        for each in waiting:
            if each.command_id == command_id:
                return each  # the same request again
        if len(waiting) >= MOST_WAITING:
            raise Exhausted(
                f"session {record.session_id!r} has {MOST_WAITING} commands that wait for an approval",
                reason="APPROVAL_LIMIT",
                retry_after=max(1.0, min(each.expires_at for each in waiting) - now),
            )
        if len(command.encode()) > LONGEST_COMMAND:
            raise Denied(
                f"a command of more than {LONGEST_COMMAND} bytes is too long to be shown to whoever would allow it",
                reason="POLICY_DENIED",
                rule=rule,
            )
        shown = self._redact(command)
        if shown != command:
            # Whoever allows it must know that it is not all there: what runs may be behind the mark.
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
            data=command.encode() if held else b"",
        )
        await self._store.add_approval(approval)
        body = {"verdict": "ask", "command": approval.command, "rule": rule, "reason": reason}
        await self._store.append(
            [
                AuditEntry(
                    record.session_id,
                    now,
                    record.agent_id,
                    "decision",
                    command_id,
                    {**body, "approval_id": approval.approval_id},
                ),
                event_entry(
                    record,
                    now,
                    "APPROVAL_REQUESTED",
                    f"{approval.command}: {reason}",
                    approval_id=approval.approval_id,
                    command_id=command_id,
                ),
            ]
        )
        self.expire_at(approval.expires_at)
        return approval

    def expire_at(self, when: float) -> None:
        """Some approval expires then; looked at by every replica that knows of it, told by one."""
        self._heap.set(("approvals", when), when, lambda: self._spawn(self._expire()))

    async def _expire(self) -> None:
        try:
            expired = await self._store.expire_approvals()
        except Problem:
            self.expire_at(self._clock.time() + 1.0)
            return
        for approval in expired:
            with contextlib.suppress(NotFound):
                record = await self._store.session(approval.session_id)
                await self._written(record, approval, "expired", "", "")

    async def resume(self) -> None:
        """After a start: those that wait have their time again."""
        for approval in await self._store.open_approvals():
            self.expire_at(approval.expires_at)
        await self._expire()

    async def open(self, caller: Caller, session_id: str = "") -> list[Approval]:
        agent_id = "" if caller.role == "operator" else caller.agent_id
        return await self._store.open_approvals(session_id=session_id, agent_id=agent_id)

    async def answer(self, caller: Caller, approval_id: str, approve: bool, comment: str) -> Outcome:
        approval = await self._store.approval(approval_id)
        if not caller.may_see(approval.agent_id):
            raise NotFound(f"no approval {approval_id!r}", reason="APPROVAL_NOT_FOUND")
        record = await self._store.session(approval.session_id)
        if caller.role != "operator" and not record.policy.owner_approves:
            raise Denied("only an operator may answer this approval", reason="NOT_AN_OPERATOR")
        outcome: Outcome = "approved" if approve else "refused"
        if approve and await self._is_left(approval):
            work = self._typed(record, approval)
        else:
            answered = await self._store.answer_approval(approval_id, outcome, by=caller.agent_id, comment=comment)
            work = self._answered(record, answered, outcome)
        # A caller that goes away now has answered all the same.
        await asyncio.shield(self._spawn(work))
        return outcome

    async def _is_left(self, approval: Approval) -> bool:
        """Whether it was approved, and whoever was to type it could not, or is gone: then it may be said again."""
        if approval.outcome != "approved" or not approval.data or approval.expires_at <= self._clock.time():
            return False
        which = AuditFilter(
            session_id=approval.session_id,
            command_id=approval.command_id,
            kinds=("approval_answered", "error", "command_started", "command_ended"),
            newest_first=True,
        )
        rows, _ = await self._store.rows(which, Page(1))
        if not rows:
            return False
        too_long = rows[0].kind == "approval_answered" and rows[0].at + _TYPING_SECONDS <= self._clock.time()
        return too_long or rows[0].kind == "error"

    async def _answered(self, record: SessionRecord, approval: Approval, outcome: Outcome) -> None:
        await self._written(record, approval, outcome, approval.answered_by, approval.comment)
        if outcome == "approved" and approval.data:
            await self._typed(record, approval)

    async def _typed(self, record: SessionRecord, approval: Approval) -> None:
        try:
            await self._deliver(record, approval)
        except Problem as problem:
            body = {
                "detail": f"what was approved could not be typed: {problem.message}",
                "reason": problem.reason,
                "approval_id": approval.approval_id,
            }
            now, session_id = self._clock.time(), record.session_id
            failed = AuditEntry(session_id, now, record.agent_id, "error", approval.command_id, body)
            await self._store.append([failed])
            raise

    async def _written(
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
        await self._store.append(
            [
                AuditEntry(record.session_id, now, record.agent_id, "approval_answered", approval.command_id, body),
                event_entry(
                    record,
                    now,
                    "APPROVAL_ANSWERED",
                    detail,
                    approval_id=approval.approval_id,
                    command_id=approval.command_id,
                ),
            ]
        )

    async def wait(self, approval: Approval, timeout: float) -> None:
        """Until it is approved; `Denied` if it is refused or expires, `TooLate` after the timeout."""
        with self._bell.watch(approval.session_id) as watch:
            try:
                async with asyncio.timeout(timeout):
                    while True:
                        watch.clear()
                        now = await self._store.approval(approval.approval_id)
                        if now.outcome == "approved":
                            return
                        if now.outcome:
                            raise Denied(
                                f"the command was not allowed: its approval is {now.outcome}",
                                reason=f"APPROVAL_{now.outcome.upper()}",
                                approval_id=approval.approval_id,
                            )
                        await watch.wait()
            except builtins.TimeoutError:
                raise TooLate(
                    f"nobody answered approval {approval.approval_id!r} within {timeout:g} s",
                    reason="APPROVAL_TIMEOUT",
                    approval_id=approval.approval_id,
                ) from None
