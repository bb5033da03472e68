"""Agents and operators, found by the hash of their token, and the uid that each agent's sessions run as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from sqlalchemy import bindparam, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from holdfast.service.access.session_users import UidRange
from holdfast.service.problems import Exists, NotFound, NotNow
from holdfast.service.store.database.connection import StoreConnection
from holdfast.service.store.database.database import Database
from holdfast.service.store.database.schema import AGENTS, SESSION_USERS
from holdfast.service.store.database.sqlite_statements import FREQUENT
from holdfast.service.store.types import AgentRecord
from holdfast.service.types import Role

_ROW = AGENTS.c
_USER = SESSION_USERS.c
#: Built once: every agent's token is queried every few seconds.
_FIND: Final = (
    select(AGENTS).where(_ROW.token_hash.in_(bindparam("names", expanding=True))).execution_options(**FREQUENT)
)
#: Replicas that take the same uid at once retry; each round at least one of them succeeds.
_TRIES: Final = 100


class AgentRows:
    """The part of the store with agents. A uid is never reused: files of its first agent may be left."""

    database: Database

    async def add_agent(
        self, agent_id: str, token_hash: str, *, role: Role = "agent", limits: dict[str, Any] | None = None
    ) -> AgentRecord:
        now = self.database.clock.time()
        agent = AgentRecord(agent_id, role, token_hash, now, limits or {}, token_at=now)
        values = _columns(msgspec.structs.asdict(agent))
        try:
            await self.database.write(lambda connection: connection.execute(insert(AGENTS).values(values)))
        except IntegrityError:
            raise Exists(f"agent {agent_id!r} exists already", reason="AGENT_EXISTS") from None
        return agent

    async def rotate_agent(self, agent_id: str, token_hash: str) -> AgentRecord:
        """Replace the token; the former one is invalid from now on."""
        return await self._set(agent_id, token_hash=token_hash, token_at=self.database.clock.time())

    async def set_agent(
        self, agent_id: str, *, disabled: bool | None = None, limits: dict[str, Any] | None = None
    ) -> AgentRecord:
        fields: dict[str, Any] = {"disabled": disabled, "limits": limits}
        return await self._set(agent_id, **{name: value for name, value in fields.items() if value is not None})

    async def remove_agent(self, agent_id: str) -> None:
        gone = delete(AGENTS).where(_ROW.agent_id == agent_id).returning(_ROW.agent_id)

        async def work(connection: StoreConnection) -> bool:
            return (await connection.execute(gone)).first() is not None

        if not await self.database.write(work):
            raise _no_agent(agent_id)

    async def agent(self, agent_id: str) -> AgentRecord:
        found = await self._agents(select(AGENTS).where(_ROW.agent_id == agent_id))
        if not found:
            raise _no_agent(agent_id)
        return found[0]

    async def find_agent(self, token_hash: str) -> AgentRecord | None:
        """Return the agent with this token hash, also a disabled one, which the caller must check."""

        async def work(connection: StoreConnection) -> AgentRecord | None:
            rows = (await connection.execute(_FIND, {"names": [token_hash]})).mappings()
            return next((_agent(row) for row in rows), None)

        return await self.database.read(work)

    async def agents(self) -> list[AgentRecord]:
        """Return all agents, by name."""
        return await self._agents(select(AGENTS).order_by(_ROW.agent_id))

    async def has_operator(self) -> bool:
        """True if an enabled operator exists; the first start creates one otherwise."""
        count = select(func.count()).select_from(AGENTS).where(_ROW.role == "operator", _ROW.disabled.is_(False))

        async def work(connection: StoreConnection) -> bool:
            return bool((await connection.execute(count)).scalar_one())

        return await self.database.read(work)

    async def session_uid(self, agent_id: str, uids: UidRange) -> int:
        """Return the agent's uid; take a free one of this range if the agent has none."""

        async def work(connection: StoreConnection) -> int | None:
            # The agent's own row is read after the highest uid: otherwise a replica that takes the last uid for
            # this agent in between would make the range seem exhausted.
            last = select(func.max(_USER.uid)).where(_USER.uid.between(uids.first, uids.last))
            taken = (await connection.execute(last)).scalar()
            had = (await connection.execute(select(_USER.uid).where(_USER.agent_id == agent_id))).scalar()
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
            f"agent {agent_id!r} has no uid, and no uid of {uids.first}-{uids.last} is free: widen session_uids",
            reason="NO_UID_LEFT",
        )

    async def _set(self, agent_id: str, **fields: Any) -> AgentRecord:
        if not fields:
            return await self.agent(agent_id)
        changed = update(AGENTS).where(_ROW.agent_id == agent_id).values(_columns(fields)).returning(*_ROW)

        async def work(connection: StoreConnection) -> AgentRecord | None:
            row = (await connection.execute(changed)).mappings().first()
            return None if row is None else _agent(row)

        try:
            agent = await self.database.write(work)
        except IntegrityError:
            raise Exists("another agent has this token", reason="AGENT_EXISTS") from None
        if agent is None:
            raise _no_agent(agent_id)
        return agent

    async def _agents(self, statement: Any) -> list[AgentRecord]:
        async def work(connection: StoreConnection) -> list[AgentRecord]:
            return [_agent(row) for row in (await connection.execute(statement)).mappings()]

        return await self.database.read(work)


def _columns(fields: dict[str, Any]) -> dict[str, Any]:
    limits = {"limits": msgspec.json.encode(fields["limits"]).decode()} if "limits" in fields else {}
    return fields | limits


def _agent(row: Mapping[Any, Any]) -> AgentRecord:
    return AgentRecord(**{**row, "limits": msgspec.json.decode(row["limits"], type=dict[str, Any])})


def _no_agent(agent_id: str) -> NotFound:
    return NotFound(f"no agent {agent_id!r}", reason="AGENT_NOT_FOUND")
