"""The store: one database with the durable state of the service, opened by its URL."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite

from holdfast.service.api import AuditFilter
from holdfast.service.audit.chain import key_id
from holdfast.service.clock import WallClock
from holdfast.service.problems import Invalid, NotFound, NotNow
from holdfast.service.settings import ServiceSettings, store_url
from holdfast.service.store.agents import AgentRows
from holdfast.service.store.approvals import ApprovalRows
from holdfast.service.store.audit_log import AuditLog, follow_file, follow_notices, last_number
from holdfast.service.store.database.connection import StoreConnection
from holdfast.service.store.database.database import Database
from holdfast.service.store.database.migrations import check_version, migrate
from holdfast.service.store.database.schema import FACTS
from holdfast.service.store.database.sqlite_file import FileWatch
from holdfast.service.store.group_commit import GroupCommit
from holdfast.service.store.leases import LeaseRows
from holdfast.service.store.notices import NoticeListener, Notices, PostgresNotices
from holdfast.service.store.retention import Retention
from holdfast.service.store.sandboxes import SandboxRows
from holdfast.service.store.sessions import SessionRows
from holdfast.service.store.usage import UsageRows
from holdfast.service.store.verification import Verification, Verifier
from holdfast.service.types import AuditRow

#: A shorter key could be guessed.
MIN_KEY_BYTES: Final = 16
_ALL: Final = AuditFilter()


class Store(SessionRows, LeaseRows, SandboxRows, AuditLog, ApprovalRows, AgentRows, UsageRows, Retention):
    """Created by `Store.open`. Its base classes are one for each kind of row, on one database."""

    def __init__(self, database: Database, audit_key: bytes | None) -> None:
        self.database = database
        self.audit_key = audit_key
        # Distinguishes our own rows, which local listeners get at once, from those of other replicas.
        origin = secrets.token_hex(8)
        self._notices = Notices()
        self._replica_notices = None if database.is_sqlite else PostgresNotices(database.url, origin, self._notices)
        self.writer = GroupCommit(database, key=audit_key, origin=origin, on_written=self._notices.publish)

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        clock: WallClock | None = None,
        audit_key: bytes | None = None,
        read_only: bool = False,
        **parts: Any,
    ) -> Store:
        """Open the database at `sqlite:///PATH` or `postgresql://…` and migrate its tables.

        With `audit_key` the audit's hashes are HMACs; a database keeps the key that it began with. With `read_only`
        nothing is created or changed: the database must be of this version, and no key is needed to read.
        A subclass gets `parts` in its constructor.
        """
        if audit_key is not None and len(audit_key) < MIN_KEY_BYTES:
            raise Invalid(f"the audit's key is shorter than {MIN_KEY_BYTES} bytes", reason="AUDIT_KEY")
        database = await Database.open(url, clock=clock, create=not read_only)
        try:
            if read_only:
                await database.read(lambda connection: check_version(connection, location=database.location))
            else:
                now, location = database.clock.time(), database.location
                await database.write(lambda connection: migrate(connection, now, location=location))
            store = cls(database, audit_key, **parts)
            await store._check_key(read_only)
            if store._replica_notices is not None:
                await store._replica_notices.start()
        except BaseException:
            await database.close()
            raise
        database.is_serving = True
        return store

    async def close(self) -> None:
        """Finish pending writes and end all listeners."""
        await self.writer.finish()
        self._notices.close()
        if self._replica_notices is not None:
            await self._replica_notices.stop()
        await self.database.close()

    async def __aenter__(self) -> Store:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def listen(self, session_id: str | None = None) -> NoticeListener:
        """Return notices of rows appended from now on by any replica; of one session, or of all."""
        return self._notices.listen(session_id)

    @asynccontextmanager
    async def follow(self, which: AuditFilter = _ALL) -> AsyncIterator[AsyncIterator[AuditRow]]:
        """Yield the rows appended after the block is entered, also by other processes."""
        if self.database.is_sqlite:
            with FileWatch(str(self.database.url.database)) as watch:
                yield follow_file(self, which, watch, await last_number(self))
        else:
            async with self.listen() as notices:
                yield follow_notices(self, which, notices)

    async def verify(self, session_id: str | None = None, *, head: tuple[int, str] | None = None) -> Verification:
        """Verify that the audit of one session, or all of it, is as it was written.

        `head` is the last row of the service's own stream at an earlier verification.
        """
        if self.audit_key is None and await self._stored_key_id():
            raise NotNow("the audit was written with a key and cannot be verified without it", reason="AUDIT_KEY")
        async with self.database.snapshot() as connection:
            verifier = Verifier(connection, self.audit_key)
            if session_id is None:
                return await verifier.everything(head)
            found = await verifier.one(session_id)
        if found is None:
            raise NotFound(f"the audit has no rows of session {session_id!r}", reason="SESSION_NOT_FOUND")
        return found

    async def ping(self) -> None:
        """Raise `Unavailable` if the database does not respond now."""
        await self.database.ping()

    async def _check_key(self, read_only: bool) -> None:
        ours = key_id(self.audit_key)
        if not read_only:
            dialect = sqlite if self.database.is_sqlite else postgresql
            keep = dialect.insert(FACTS).values(name="audit_key", value=ours).on_conflict_do_nothing()
            await self.database.write(lambda connection: connection.execute(keep))
        kept = await self._stored_key_id()
        if read_only and self.audit_key is None:
            return
        if kept != ours:
            began = "with another key" if kept and ours else "with a key" if kept else "without a key"
            raise NotNow(
                f"the audit in this database was begun {began}: use the same, or a new database",
                reason="AUDIT_KEY",
            )

    async def _stored_key_id(self) -> str:
        async def work(connection: StoreConnection) -> str:
            kept = await connection.execute(select(FACTS.c.value).where(FACTS.c.name == "audit_key"))
            return str(kept.scalar() or "")

        return await self.database.read(work)


async def open_store(
    settings: ServiceSettings,
    *,
    clock: WallClock | None = None,
    read_only: bool = False,
    kind: type[Store] = Store,
    **parts: Any,
) -> Store:
    """Open the database of the settings, with the audit's key. Touches the key's file and the database."""
    key = _audit_key(settings.audit_key_file)
    return await kind.open(store_url(settings.store), clock=clock, audit_key=key, read_only=read_only, **parts)


def _audit_key(path: str) -> bytes | None:
    if not path:
        return None
    with open(path, "rb") as file:
        return file.read().strip()
