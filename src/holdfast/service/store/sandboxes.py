"""The sandboxes that were made for sessions and are not removed yet, so that every replica can remove them.

A row is written before its sandbox is made, and deleted after the sandbox is removed: a replica that ends in
between leaves a row, and the next replica removes the sandbox. A claim makes one replica the remover.
"""

from __future__ import annotations

from sqlalchemy import delete, exists, insert, select, update

from holdfast.service.store.database.connection import StoreConnection
from holdfast.service.store.database.database import Database
from holdfast.service.store.database.schema import SESSION_SANDBOXES, SESSIONS
from holdfast.service.store.sessions import IS_OPEN
from holdfast.service.store.types import OwnedSandbox

_ROW = SESSION_SANDBOXES.c
_COLUMNS = (_ROW.session_id, _ROW.agent_id, _ROW.sandbox)


class SandboxRows:
    """The part of the store with sandboxes of sessions."""

    database: Database

    async def add_sandbox(self, owned: OwnedSandbox) -> None:
        """Record a sandbox that is about to be made for a session."""
        values = {name: getattr(owned, name) for name in owned.__struct_fields__}
        statement = insert(SESSION_SANDBOXES).values(**values, made_at=self.database.now(), removing_until=0.0)

        async def work(connection: StoreConnection) -> None:
            await connection.execute(statement)

        await self.database.write(work)

    async def keeps_sandbox(self, session_id: str) -> bool:
        """Return whether a session still owns its sandbox: no replica removes the sandbox or has removed it."""

        async def work(connection: StoreConnection) -> bool:
            ours = select(_ROW.session_id).where(_ROW.session_id == session_id, _ROW.removing_until == 0.0)
            return (await connection.execute(ours)).first() is not None

        return await self.database.read(work)

    async def owned_sandboxes(self, sandbox: str = "") -> list[OwnedSandbox]:
        """Return the sandboxes of sessions, or that with this address."""

        async def work(connection: StoreConnection) -> list[OwnedSandbox]:
            statement = select(*_COLUMNS).order_by(_ROW.session_id)
            if sandbox:
                statement = statement.where(_ROW.sandbox == sandbox)
            return [OwnedSandbox(*row) for row in await connection.execute(statement)]

        return await self.database.read(work)

    async def claim_removals(
        self, seconds: float, limit: int = 100, session_id: str | None = None
    ) -> list[OwnedSandbox]:
        """Claim the removal of sandboxes of sessions that are over, for so many seconds.

        With `session_id`, only that session's. A claim that ends without `sandbox_removed` can be claimed again.
        """

        async def work(connection: StoreConnection) -> list[OwnedSandbox]:
            now = self.database.now()
            is_open = exists().where(SESSIONS.c.session_id == _ROW.session_id, IS_OPEN)
            due = (
                select(_ROW.session_id)
                .where(~is_open, _ROW.removing_until <= now)
                .order_by(_ROW.made_at)
                .limit(limit)
                # A replica that claims at the same time gets other rows.
                .with_for_update(skip_locked=True)
            )
            if session_id is not None:
                due = due.where(_ROW.session_id == session_id)
            ids = list((await connection.execute(due)).scalars())
            claimed = (
                update(SESSION_SANDBOXES)
                .where(_ROW.session_id.in_(ids))
                .values(removing_until=now + seconds)
                .returning(*_COLUMNS)
            )
            return [OwnedSandbox(*row) for row in await connection.execute(claimed)]

        return await self.database.write(work)

    async def sandbox_removed(self, session_id: str) -> bool:
        """Delete the row of a removed sandbox; False if another replica has deleted it."""

        async def work(connection: StoreConnection) -> bool:
            gone = delete(SESSION_SANDBOXES).where(_ROW.session_id == session_id).returning(_ROW.session_id)
            return (await connection.execute(gone)).first() is not None

        return await self.database.write(work)
