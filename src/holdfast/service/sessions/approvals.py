"""Commands that wait for somebody to allow them: asked for, answered once, or expired; written down each time.

The store decides which of two answers counts. What is to be typed waits in it, so any replica may answer.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal

from holdfast.service.clock import Clock
from holdfast.service.model import Approval, AuditEntry, Caller, SessionRecord
from holdfast.service.problems import Denied, NotFound, Problem, TooLate
from holdfast.service.sessions.events import NoticeBell, event_entry
from holdfast.service.sessions.ports import Redact, SessionStore
from holdfast.service.sessions.timers import TimerHeap

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
        spawn: Callable[[Coroutine[Any, Any, None]], object],
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
        approval = Approval(
            approval_id=f"apr-{secrets.token_hex(8)}",
            session_id=record.session_id,
            agent_id=record.agent_id,
            command=self._redact(command),
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
        answered = await self._store.answer_approval(approval_id, outcome, by=caller.agent_id, comment=comment)
        await self._written(record, answered, outcome, caller.agent_id, comment)
        if approve and answered.data:
            await self._deliver(record, answered)
        return outcome

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
