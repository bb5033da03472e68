"""Approvals: requested once, and answered, expired or abandoned once, whichever replica does it.

A `RunCommand` that waits for its approval is recorded as the approval's caller, with an expiry that its replica
renews. An approval ends with its caller; a replica that crashed stops renewing, so its approvals end as well.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, Literal

import msgspec
from sqlalchemy import ColumnElement, exists, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from holdfast.service.problems import Exists, NotFound, NotNow
from holdfast.service.store.database.connection import StoreConnection
from holdfast.service.store.database.database import Database
from holdfast.service.store.database.schema import APPROVALS, SESSIONS
from holdfast.service.types import OVER, Approval

_ROW = APPROVALS.c

#: Reasons of abandoned approvals that no call is left to state.
REPLICA_GONE: Final = "the service replica that held its RunCommand stopped responding"
SESSION_OVER: Final = "its session is closed"
#: Approvals in a listing with ended ones: as many as an operator reads, not the whole history.
LATEST: Final = 100

_SESSION_IS_OVER: Final[ColumnElement[bool]] = exists().where(
    SESSIONS.c.session_id == _ROW.session_id, SESSIONS.c.state.in_(OVER)
)


class ApprovalRows:
    """The part of the store with approvals."""

    database: Database

    async def add_approval(self, approval: Approval, *, caller_seconds: float = 0.0) -> Approval:
        """Record a new approval; its caller, if any, counts as connected for `caller_seconds`."""
        values = msgspec.structs.asdict(approval)
        del values["rule"]  # the audit log has it
        if approval.caller:
            values["caller_expires"] = self.database.now() + caller_seconds
        try:
            await self.database.write(lambda connection: connection.execute(insert(APPROVALS).values(values)))
        except IntegrityError:
            raise Exists(f"approval {approval.approval_id!r} exists already", reason="APPROVAL_EXISTS") from None
        return approval

    async def approval(self, approval_id: str) -> Approval:
        found = await self._approvals(select(APPROVALS).where(_ROW.approval_id == approval_id))
        if not found:
            raise NotFound(f"no approval {approval_id!r}", reason="APPROVAL_NOT_FOUND")
        return found[0]

    async def answer_approval(
        self, approval_id: str, outcome: Literal["approved", "refused"], *, by: str = "", comment: str = ""
    ) -> Approval:
        """Record an answer. The approval must be open and its caller connected; of two answers one is recorded."""

        async def work(connection: StoreConnection) -> Approval | None:
            answered = (
                update(APPROVALS)
                .where(_ROW.approval_id == approval_id, self._waiting())
                .values(outcome=outcome, answered_by=by, comment=comment)
                .returning(*_ROW)
            )
            row = (await connection.execute(answered)).first()
            return None if row is None else Approval(*row)

        approval = await self.database.write(work)
        if approval is not None:
            return approval
        raise not_waiting(await self.approval(approval_id))

    async def end_approvals(self) -> list[Approval]:
        """End approvals that expired or lost their caller or session; return those that this call ended."""

        async def find(connection: StoreConnection) -> list[str]:
            due = select(_ROW.approval_id).where(_ROW.outcome == "", ~self._waiting())
            return list((await connection.execute(due)).scalars())

        async def work(connection: StoreConnection) -> list[Approval]:
            now = self.database.now()
            ended: list[Approval] = []
            for condition, values in (
                (_ROW.expires_at <= now, {"outcome": "expired"}),
                (_SESSION_IS_OVER, _abandoned(SESSION_OVER)),
                ((_ROW.caller != "") & (_ROW.caller_expires <= now), _abandoned(REPLICA_GONE)),
            ):
                over = update(APPROVALS).where(_ROW.outcome == "", condition).values(values).returning(*_ROW)
                ended += [Approval(*row) for row in await connection.execute(over)]
            return ended

        # A frequent query that mostly finds nothing: reading first avoids the database's write lock.
        return await self.database.write(work) if await self.database.read(find) else []

    # --- callers --------------------------------------------------------------------------------------------------

    async def attach_caller(self, approval_id: str, caller: str, seconds: float) -> bool:
        """Make this call the approval's caller in place of the former one; return False if the approval ended."""

        async def work(connection: StoreConnection) -> bool:
            attach = (
                update(APPROVALS)
                .where(_ROW.approval_id == approval_id, _ROW.caller != "", self._waiting())
                .values(caller=caller, caller_expires=self.database.now() + seconds)
                .returning(_ROW.approval_id)
            )
            return (await connection.execute(attach)).first() is not None

        return await self.database.write(work)

    async def renew_callers(self, callers: Collection[str], seconds: float) -> None:
        """Extend the approvals of calls that still wait by so many seconds."""

        async def work(connection: StoreConnection) -> None:
            expires = self.database.now() + seconds
            for names in _parts(sorted(callers)):
                ours = update(APPROVALS).where(_ROW.outcome == "", _ROW.caller.in_(names))
                await connection.execute(ours.values(caller_expires=expires))

        await self.database.write(work)

    async def abandon_approvals(self, caller: str, why: str) -> list[Approval]:
        """End the approvals of a finished call; return those that were open."""

        async def work(connection: StoreConnection) -> list[Approval]:
            left = (
                update(APPROVALS)
                .where(_ROW.outcome == "", _ROW.caller == caller)
                .values(_abandoned(why))
                .returning(*_ROW)
            )
            return [Approval(*row) for row in await connection.execute(left)]

        return await self.database.write(work)

    # --- finding --------------------------------------------------------------------------------------------------

    async def open_approvals(self, *, session_id: str = "", agent_id: str = "") -> list[Approval]:
        """Return the approvals that wait for an answer, oldest first."""
        waiting = _of(select(APPROVALS).where(self._waiting()), session_id, agent_id)
        return await self._approvals(waiting.order_by(_ROW.asked_at, _ROW.approval_id))

    async def latest_approvals(self, *, session_id: str = "", agent_id: str = "") -> list[Approval]:
        """Return the latest `LATEST` approvals, ended ones included, newest first."""
        latest = _of(select(APPROVALS), session_id, agent_id)
        return await self._approvals(latest.order_by(_ROW.asked_at.desc(), _ROW.approval_id).limit(LATEST))

    def _waiting(self) -> ColumnElement[bool]:
        """Condition: an answer would have an effect."""
        now = self.database.now()
        caller_there = or_(_ROW.caller == "", _ROW.caller_expires > now)
        return (_ROW.outcome == "") & (_ROW.expires_at > now) & caller_there & ~_SESSION_IS_OVER

    async def _approvals(self, statement: Any) -> list[Approval]:
        async def work(connection: StoreConnection) -> list[Approval]:
            return [Approval(*row) for row in await connection.execute(statement)]

        return await self.database.read(work)


def not_waiting(approval: Approval) -> NotNow:
    """Return why an answer to this approval has no effect."""
    name = f"approval {approval.approval_id!r}"
    if approval.outcome in ("", "expired"):
        return NotNow(f"{name} expired before this answer, and its command was not run", reason="APPROVAL_EXPIRED")
    if approval.outcome == "abandoned":
        return NotNow(
            f"{name} ended before this answer, and its command was not run: {approval.comment}. "
            "A new call of the agent makes a new approval",
            reason="APPROVAL_ABANDONED",
            approval_id=approval.approval_id,
            session_id=approval.session_id,
        )
    return NotNow(
        f"{name} was {approval.outcome} before, by {approval.answered_by or 'an unnamed caller'}",
        reason="APPROVAL_ANSWERED",
        outcome=approval.outcome,
    )


def _abandoned(why: str) -> dict[str, str]:
    return {"outcome": "abandoned", "comment": why}


def _of(statement: Any, session_id: str, agent_id: str) -> Any:
    if session_id:
        statement = statement.where(_ROW.session_id == session_id)
    return statement.where(_ROW.agent_id == agent_id) if agent_id else statement


def _parts(names: list[str], size: int = 500) -> list[list[str]]:
    # SQLite bounds the parameters of one statement.
    return [names[begin : begin + size] for begin in range(0, len(names), size)]
