"""The uid of each agent, so that every replica runs the agent's sessions as the same user."""

from __future__ import annotations

from typing import Final

from sqlalchemy import func, insert, select
from sqlalchemy.exc import IntegrityError

from holdfast.service.access.session_users import UidRange
from holdfast.service.problems import NotNow
from holdfast.service.store.database.connection import Connection
from holdfast.service.store.database.database import Database
from holdfast.service.store.database.schema import SESSION_USERS

_ROW = SESSION_USERS.c
#: Replicas that take the same number at once try again, each time at least one of them with success.
_TRIES: Final = 100


class SessionUserRows:
    """The part of the store that knows uids. None is given to a second agent: files of the first may be left."""

    database: Database

    async def session_uid(self, agent_id: str, uids: UidRange) -> int:
        """The agent's uid; one of this range, if the agent has none yet."""

        async def work(connection: Connection) -> int | None:
            # The agent's own row after the last one of all: another replica that takes the last uid for this agent
            # in between would look like a range that is used up.
            last = select(func.max(_ROW.uid)).where(_ROW.uid.between(uids.first, uids.last))
            taken = (await connection.execute(last)).scalar()
            had = (await connection.execute(select(_ROW.uid).where(_ROW.agent_id == agent_id))).scalar()
            if had is not None:
                return int(had)
            uid = uids.first if taken is None else int(taken) + 1
            if uid > uids.last:
                return None
            made = {"agent_id": agent_id, "uid": uid, "made_at": self.database.clock.time()}
            await connection.execute(insert(SESSION_USERS).values(made))
            return uid

        for last_try in (number == _TRIES for number in range(1, _TRIES + 1)):
            try:
                uid = await self.database.write(work)
            except IntegrityError:
                if last_try:
                    raise
                continue
            if uid is not None:
                return uid
            break
        raise NotNow(
            f"agent {agent_id!r} has no uid, and none of {uids.first}-{uids.last} is left: widen session_uids",
            reason="NO_UID_LEFT",
        )
