"""Who runs a session's follower and timers: leases on the sessions' rows, one replica each, that end by themselves.

A claim raises the lease's epoch. Whatever a former owner still writes carries the old epoch and is refused, so it
does not matter whether that replica knows that it lost the lease.
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
    """The part of the store that gives leases."""

    database: Database

    async def claim(self, replica: str, seconds: float, limit: int = 100) -> list[SessionLease]:
        """Take up to `limit` open sessions whose lease is free or has expired, oldest first."""

        async def work(connection: StoreConnection) -> list[SessionLease]:
            now = self.database.now()
            free = (
                select(_ROW.session_id)
                .where(IS_OPEN, (_ROW.lease_owner == "") | (_ROW.lease_expires <= now))
                .order_by(SESSIONS.c.created_at)
                .limit(limit)
                # Another replica that claims at the same time gets others.
                .with_for_update(skip_locked=True)
            )
            ids = list((await connection.execute(free)).scalars())
            taken = (
                update(SESSIONS)
                .where(_ROW.session_id.in_(ids))
                .values(lease_owner=replica, lease_expires=now + seconds, lease_epoch=_ROW.lease_epoch + 1)
                .returning(_ROW.session_id, _ROW.lease_owner, _ROW.lease_epoch, _ROW.lease_expires)
            )
            return [SessionLease(*row) for row in await connection.execute(taken)]

        return await self.database.write(work)

    async def renew(self, replica: str, seconds: float) -> list[str]:
        """Prolong all leases of this replica; returns the sessions that are still its own.

        A lease that expired and that nobody took since is prolonged, too: nothing happened to it meanwhile.
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
        """In how many seconds the first lease of another replica ends, if that does not renew it."""

        async def work(connection: StoreConnection) -> float:
            first = select(func.min(_ROW.lease_expires) - self.database.now()).where(
                _ROW.lease_owner != replica, IS_OPEN
            )
            found = (await connection.execute(first)).scalar()
            return math.inf if found is None else float(found)

        return await self.database.read(work)

    async def release(self, replica: str, session_id: str | None = None) -> int:
        """Give up all leases of this replica, or that on one session; returns how many those were."""

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

    async def release_everybody(self) -> None:
        """Give up all leases, whoever has them: for who knows that nobody else is there."""

        async def work(connection: StoreConnection) -> None:
            await connection.execute(
                update(SESSIONS).where(_ROW.lease_owner != "").values(lease_owner="", lease_expires=0.0)
            )

        await self.database.write(work)

    async def leases(self, replica: str) -> list[SessionLease]:
        """Those that this replica has."""

        async def work(connection: StoreConnection) -> list[SessionLease]:
            ours = (
                select(_ROW.session_id, _ROW.lease_owner, _ROW.lease_epoch, _ROW.lease_expires)
                .where(_ROW.lease_owner == replica, IS_OPEN)
                .order_by(_ROW.session_id)
            )
            return [SessionLease(*row) for row in await connection.execute(ours)]

        return await self.database.read(work)
