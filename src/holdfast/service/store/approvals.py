"""Approvals: asked for once, answered once, or expired once, whichever replica does it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError

from holdfast.service.model import Approval
from holdfast.service.problems import Exists, NotFound, NotNow
from holdfast.service.store.connection import Connection
from holdfast.service.store.database import Database
from holdfast.service.store.schema import APPROVALS

_ROW = APPROVALS.c


class ApprovalRows:
    """The part of the store that keeps approvals."""

    database: Database

    async def add_approval(self, approval: Approval) -> Approval:
        values = msgspec.structs.asdict(approval)
        try:
            await self.database.write(lambda connection: connection.execute(insert(APPROVALS).values(values)))
        except IntegrityError:
            raise Exists(f"there is an approval {approval.approval_id!r}", reason="APPROVAL_EXISTS") from None
        return approval

    async def approval(self, approval_id: str) -> Approval:
        found = await self._approvals(select(APPROVALS).where(_ROW.approval_id == approval_id))
        if not found:
            raise NotFound(f"no approval {approval_id!r}", reason="APPROVAL_NOT_FOUND")
        return found[0]

    async def answer_approval(
        self, approval_id: str, outcome: Literal["approved", "refused"], *, by: str = "", comment: str = ""
    ) -> Approval:
        """Answer it. It must be unanswered and not expired: of two answers at once, one gets through."""

        async def work(connection: Connection) -> Approval | None:
            answered = (
                update(APPROVALS)
                .where(_ROW.approval_id == approval_id, _ROW.outcome == "", _ROW.expires_at > self.database.now())
                .values(outcome=outcome, answered_by=by, comment=comment)
                .returning(*_ROW)
            )
            row = (await connection.execute(answered)).first()
            return None if row is None else Approval(*row)

        approval = await self.database.write(work)
        if approval is not None:
            return approval
        former = await self.approval(approval_id)
        if former.outcome in ("", "expired"):
            raise NotNow(f"approval {approval_id!r} has expired", reason="APPROVAL_EXPIRED")
        raise NotNow(
            f"approval {approval_id!r} was {former.outcome} before, by {former.answered_by or 'somebody'}",
            reason="APPROVAL_ANSWERED",
            outcome=former.outcome,
        )

    async def expire_approvals(self) -> list[Approval]:
        """Those whose time is up, and that no other call has told as expired."""

        async def work(connection: Connection) -> list[Approval]:
            over = (
                update(APPROVALS)
                .where(_ROW.outcome == "", _ROW.expires_at <= self.database.now())
                .values(outcome="expired")
                .returning(*_ROW)
            )
            return [Approval(*row) for row in await connection.execute(over)]

        return await self.database.write(work)

    async def open_approvals(self, *, session_id: str = "", agent_id: str = "") -> list[Approval]:
        """Those that wait for an answer, oldest first."""
        waiting = select(APPROVALS).where(_ROW.outcome == "", _ROW.expires_at > self.database.now())
        if session_id:
            waiting = waiting.where(_ROW.session_id == session_id)
        if agent_id:
            waiting = waiting.where(_ROW.agent_id == agent_id)
        return await self._approvals(waiting.order_by(_ROW.asked_at, _ROW.approval_id))

    async def _approvals(self, statement: Any) -> list[Approval]:
        async def work(connection: Connection) -> list[Approval]:
            return [Approval(*row) for row in await connection.execute(statement)]

        return await self.database.read(work)
