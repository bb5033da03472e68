"""Leases on sessions: one replica at a time runs a session's follower and timers, until the lease expires.

A claim raises the lease's epoch. Writes of a former owner carry the old epoch and are refused, so a replica that
does not notice the loss of its lease does no harm.
"""

from __future__ import annotations

import math

from sqlalchemy import func, select, update

from holdfast.service.store.database.connection import StoreConnection
from holdfast.service.store.database.database import Database
from holdfast.service.store.database.schema import SESSIONS
from holdfast.service.store.sessions import IS_OPEN
from holdfast.service.store.types import SessionLease

_ROW = SESSIONS.c


class LeaseRows:
    """The part of the store with leases."""

    database: Database

    async def claim(self, replica: str, seconds: float, limit: int = 100) -> list[SessionLease]:
        """Claim up to `limit` open sessions with a free or expired lease, oldest first."""

        async def work(connection: StoreConnection) -> list[SessionLease]:
            now = self.database.now()
            free = (
                select(_ROW.session_id)
                .where(IS_OPEN, (_ROW.lease_owner == "") | (_ROW.lease_expires <= now))
                .order_by(SESSIONS.c.created_at)
                .limit(limit)
                # A replica that claims at the same time gets other sessions.
                .with_for_update(skip_locked=True)
            )
            ids = list((await connection.execute(free)).scalars())
            if not ids:
                return []
            taken = (
                update(SESSIONS)
                .where(_ROW.session_id.in_(ids))
                .values(lease_owner=replica, lease_expires=now + seconds, lease_epoch=_ROW.lease_epoch + 1)
                .returning(_ROW.session_id, _ROW.lease_owner, _ROW.lease_epoch, _ROW.lease_expires)
            )
            return [SessionLease(*row) for row in await connection.execute(taken)]

        return await self.database.write(work)

    async def renew(self, replica: str, seconds: float) -> list[str]:
        """Extend all leases of this replica; return the sessions that it still owns.

        An expired lease that no other replica has claimed is extended as well: nothing happened to it.
        """

        async def work(connection: StoreConnection) -> list[str]:
            ours = (
                select(_ROW.session_id)
                .where(_ROW.lease_owner == replica, IS_OPEN)
                .order_by(_ROW.session_id)
                .with_for_update()
            )
            ids = list((await connection.execute(ours)).scalars())
            expires = self.database.now() + seconds
            await connection.execute(
                update(SESSIONS).where(_ROW.lease_owner == replica, IS_OPEN).values(lease_expires=expires)
            )
            return ids

        return await self.database.write(work)

    async def next_end(self, replica: str) -> float:
        """Return in how many seconds the first lease of another replica expires unless renewed."""

        async def work(connection: StoreConnection) -> float:
            first = select(func.min(_ROW.lease_expires) - self.database.now()).where(
                _ROW.lease_owner != replica, IS_OPEN
            )
            found = (await connection.execute(first)).scalar()
            return math.inf if found is None else float(found)

        return await self.database.read(work)

    async def release(self, replica: str, session_id: str | None = None) -> int:
        """Release all leases of this replica, or that on one session; return their number."""

        async def work(connection: StoreConnection) -> int:
            ours = (
                select(_ROW.session_id)
                .where(_ROW.lease_owner == replica)
                .order_by(_ROW.session_id)
                .with_for_update()
            )
            if session_id is not None:
                ours = ours.where(_ROW.session_id == session_id)
            ids = list((await connection.execute(ours)).scalars())
            for begin in range(0, len(ids), 500):
                freed = update(SESSIONS).where(_ROW.session_id.in_(ids[begin : begin + 500]))
                await connection.execute(freed.values(lease_owner="", lease_expires=0.0))
            return len(ids)

        return await self.database.write(work)

    async def release_all(self) -> None:
        """Release all leases of all replicas: for a service that is known to be the only one."""

        async def work(connection: StoreConnection) -> None:
            await connection.execute(
                update(SESSIONS).where(_ROW.lease_owner != "").values(lease_owner="", lease_expires=0.0)
            )

        await self.database.write(work)

    async def leases(self, replica: str) -> list[SessionLease]:
        """Return the leases that this replica holds."""

        async def work(connection: StoreConnection) -> list[SessionLease]:
            ours = (
                select(_ROW.session_id, _ROW.lease_owner, _ROW.lease_epoch, _ROW.lease_expires)
                .where(_ROW.lease_owner == replica, IS_OPEN)
                .order_by(_ROW.session_id)
            )
            return [SessionLease(*row) for row in await connection.execute(ours)]

        return await self.database.read(work)
