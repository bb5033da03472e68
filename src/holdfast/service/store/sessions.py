"""The rows of sessions: created within limits that hold across replicas, searched, and listed by pages."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, exists, func, insert, literal, or_, select, tuple_
from sqlalchemy.engine import RowMapping

from holdfast.service.problems import Exhausted, Exists, NotFound
from holdfast.service.store.database.connection import StoreConnection
from holdfast.service.store.database.database import Database
from holdfast.service.store.database.schema import SESSION_LABELS, SESSIONS
from holdfast.service.store.types import FIRST_PAGE, Page, SessionFilter, decode_token, encode_token, page_size
from holdfast.service.types import OVER, SessionPolicy, SessionRecord

FIELDS: Final = tuple(SessionRecord.__struct_fields__)
#: JSON columns and their types.
_JSON: Final[dict[str, Any]] = {
    "policy": SessionPolicy,
    "environment": dict[str, str],
    "labels": dict[str, str],
    "enforced": tuple[str, ...],
    "unenforced": tuple[str, ...],
}
#: Fields that identify a session; updates must not change them. `audited_token` changes only in `append`, with the
#: rows that were audited.
UNCHANGING: Final = ("session_id", "agent_id", "kind", "created_at", "labels", "request_id", "audited_token")
#: Advisory lock while open sessions are counted and one is added (PostgreSQL; SQLite has one writer anyway).
_COUNT_LOCK: Final = 0x686F6C64_636F756E

IS_OPEN: Final[ColumnElement[bool]] = SESSIONS.c.state.not_in(OVER)
_ALL: Final = SessionFilter()


class SessionRows:
    """The part of the store that creates and finds sessions."""

    database: Database

    async def add_session(
        self, record: SessionRecord, *, per_agent: int, total: int, replica: str = "", seconds: float = 0.0
    ) -> SessionRecord:
        """Add a session unless its agent, or the service, has reached its limit of open sessions.

        Returns the session that the agent's `request_id` created before, if any. With `replica` the new session's
        lease belongs to that replica from the beginning, for so many seconds, at epoch 1.
        """

        async def work(connection: StoreConnection) -> SessionRecord:
            if not self.database.is_sqlite:
                await connection.execute(select(func.pg_advisory_xact_lock(_COUNT_LOCK)))
            if record.request_id:
                same = (SESSIONS.c.agent_id == record.agent_id) & (SESSIONS.c.request_id == record.request_id)
                if (found := await _one(connection, same)) is not None:
                    return found
            if await _one(connection, SESSIONS.c.session_id == record.session_id) is not None:
                raise Exists(f"session {record.session_id!r} exists already", reason="SESSION_EXISTS")
            await _within_limits(connection, record.agent_id, per_agent, total)
            values = columns_of(msgspec.structs.asdict(record))
            if replica:
                values |= {"lease_owner": replica, "lease_epoch": 1, "lease_expires": self.database.now() + seconds}
            await connection.execute(insert(SESSIONS).values(values))
            if record.labels:
                labels = [
                    {"session_id": record.session_id, "name": name, "value": value}
                    for name, value in record.labels.items()
                ]
                await connection.execute(insert(SESSION_LABELS), labels)
            return record

        return await self.database.write(work)

    async def session(self, session_id: str) -> SessionRecord:
        found = await self.database.read(lambda connection: _one(connection, SESSIONS.c.session_id == session_id))
        if found is None:
            raise no_session(session_id)
        return found

    async def sessions(
        self, which: SessionFilter = _ALL, page: Page = FIRST_PAGE
    ) -> tuple[list[SessionRecord], str]:
        """Return a page of sessions, by default oldest first, and the next page's token if there is one."""
        order = [SESSIONS.c.created_at, SESSIONS.c.session_id]
        backwards = which.newest_first
        ordered = [column.desc() for column in order] if backwards else order
        statement = select(SESSIONS).order_by(*ordered).limit(page_size(page) + 1)
        if which.agent_id:
            statement = statement.where(SESSIONS.c.agent_id == which.agent_id)
        if which.states:
            statement = statement.where(SESSIONS.c.state.in_(which.states))
        for name, value in which.labels.items():
            label = SESSION_LABELS.c
            has_it = (label.session_id == SESSIONS.c.session_id) & (label.name == name) & (label.value == value)
            statement = statement.where(exists().where(has_it))
        if which.sandbox:
            statement = statement.where(SESSIONS.c.sandbox == which.sandbox)
        if which.search:
            statement = statement.where(_contains(which.search))
        if page.token:
            position = decode_token(page.token, float, str)
            statement = statement.where(after(list(order), position, backwards=backwards))
        found = await self._records(statement)
        if len(found) <= page_size(page):
            return found, ""
        last = found[page_size(page) - 1]
        return found[: page_size(page)], encode_token(last.created_at, last.session_id)

    async def count_sessions(self, agent_id: str = "") -> dict[str, int]:
        """Return the number of sessions in each stored state, of one agent or of all."""
        statement = select(SESSIONS.c.state, func.count()).group_by(SESSIONS.c.state)
        if agent_id:
            statement = statement.where(SESSIONS.c.agent_id == agent_id)

        async def work(connection: StoreConnection) -> dict[str, int]:
            return {row[0]: row[1] for row in await connection.execute(statement)}

        return await self.database.read(work)

    async def open_sessions(self) -> list[SessionRecord]:
        """Return all sessions that are not over, oldest first. Their number is bounded by the service's limit."""
        return await self._records(select(SESSIONS).where(IS_OPEN).order_by(SESSIONS.c.created_at))

    async def _records(self, statement: Any) -> list[SessionRecord]:
        async def work(connection: StoreConnection) -> list[SessionRecord]:
            return [record_of(row) for row in (await connection.execute(statement)).mappings()]

        return await self.database.read(work)


def _contains(text: str) -> ColumnElement[bool]:
    """Condition for sessions with a text in their id, agent, sandbox or a label (`NAME=VALUE`)."""
    label = SESSION_LABELS.c
    named = func.lower(label.name + "=" + label.value).contains(text.lower(), autoescape=True)
    columns = (SESSIONS.c.session_id, SESSIONS.c.agent_id, SESSIONS.c.sandbox)
    found = [func.lower(column).contains(text.lower(), autoescape=True) for column in columns]
    return or_(*found, exists().where((label.session_id == SESSIONS.c.session_id) & named))


async def _one(connection: StoreConnection, condition: ColumnElement[bool]) -> SessionRecord | None:
    row = (await connection.execute(select(SESSIONS).where(condition))).mappings().first()
    return None if row is None else record_of(row)


async def _within_limits(connection: StoreConnection, agent_id: str, per_agent: int, total: int) -> None:
    count = select(func.count()).select_from(SESSIONS).where(IS_OPEN)
    if (await connection.execute(count.where(SESSIONS.c.agent_id == agent_id))).scalar_one() >= per_agent:
        raise Exhausted(
            f"agent {agent_id!r} has {per_agent} open sessions, its maximum: close one first",
            reason="SESSION_LIMIT",
            scope="agent",
            limit=per_agent,
        )
    if (await connection.execute(count)).scalar_one() >= total:
        raise Exhausted(
            f"{total} sessions are open, the maximum of this service: try again later",
            reason="SESSION_LIMIT",
            retry_after=10.0,
            scope="service",
            limit=total,
        )


def no_session(session_id: str) -> NotFound:
    return NotFound(f"no session {session_id!r}", reason="SESSION_NOT_FOUND")


def columns_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert fields of a record to column values."""
    return {
        name: msgspec.json.encode(value, order="deterministic").decode() if name in _JSON else value
        for name, value in fields.items()
    }


def record_of(row: RowMapping) -> SessionRecord:
    fields: dict[str, Any] = {name: row[name] for name in FIELDS}
    for name, kind in _JSON.items():
        fields[name] = msgspec.json.decode(fields[name], type=kind)
    return SessionRecord(**fields)


def after(
    columns: list[ColumnElement[Any]], position: tuple[Any, ...], *, backwards: bool = False
) -> ColumnElement[bool]:
    """Condition for rows after this position in the order of the columns."""
    here = tuple_(*(literal(value, column.type) for column, value in zip(columns, position, strict=True)))
    return tuple_(*columns) < here if backwards else tuple_(*columns) > here
