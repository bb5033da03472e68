"""The last sample of each session's resource usage, so that every replica can return it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from holdfast.service.store.database.connection import StoreConnection
from holdfast.service.store.database.database import Database
from holdfast.service.store.database.schema import SESSION_USAGE, SESSIONS
from holdfast.service.types import ResourceUsage

_ROW = SESSION_USAGE.c
#: Names in one statement: SQLite limits its parameters.
_NAMES = 500


class UsageRows:
    """The part of the store with usage samples, one for each session."""

    database: Database

    async def put_usages(self, usages: Mapping[str, ResourceUsage]) -> None:
        """Store these samples in one transaction, except where another replica stored a later one."""
        dialect = sqlite if self.database.is_sqlite else postgresql

        async def work(connection: StoreConnection) -> None:
            for names in _parts(sorted(usages)):
                there = select(SESSIONS.c.session_id).where(SESSIONS.c.session_id.in_(names))
                rows = [
                    {
                        "session_id": name,
                        "sampled_at": usages[name].sampled_at,
                        "usage": msgspec.json.encode(usages[name]).decode(),
                    }
                    for name in sorted((await connection.execute(there)).scalars())
                ]
                if rows:
                    insert = dialect.insert(SESSION_USAGE)
                    new = insert.excluded
                    keep = insert.on_conflict_do_update(
                        index_elements=[_ROW.session_id],
                        set_={"sampled_at": new.sampled_at, "usage": new.usage},
                        where=new.sampled_at > _ROW.sampled_at,
                    )
                    await connection.execute(keep, rows)

        try:
            await self.database.write(work)
        except IntegrityError:
            # Retention removed one of the sessions just now; the next samples do not include it.
            return

    async def usages(self, session_ids: Collection[str]) -> dict[str, ResourceUsage]:
        """Return the last sample of each of these sessions that has one."""

        async def work(connection: StoreConnection) -> dict[str, ResourceUsage]:
            found: dict[str, ResourceUsage] = {}
            for names in _parts(sorted(session_ids)):
                rows = await connection.execute(
                    select(_ROW.session_id, _ROW.usage).where(_ROW.session_id.in_(names))
                )
                found |= {name: msgspec.json.decode(usage, type=ResourceUsage) for name, usage in rows}
            return found

        return await self.database.read(work) if session_ids else {}


def _parts(names: list[str]) -> list[list[str]]:
    return [names[begin : begin + _NAMES] for begin in range(0, len(names), _NAMES)]
