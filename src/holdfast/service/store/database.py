"""A database by its URL: connections, transactions that are tried again, whose clock counts, errors as problems.

The only module that knows how SQLite and PostgreSQL differ in being reached. SQLite gets one connection that writes
and a few that read, so that a writer never waits for a lock that its own process holds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from sqlalchemy import URL, ColumnElement, Engine, event, func, literal, make_url, text
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool
from sqlalchemy.types import Double

from holdfast.service.clock import Clock, SystemClock
from holdfast.service.problems import Invalid, Problem, Unavailable
from holdfast.service.store.sqlite_threads import SqliteThreads

T = TypeVar("T")

#: Connections that read at once on SQLite: each is a thread, and more than cores help nobody.
SQLITE_READERS: Final = 4
#: Connections of one replica to PostgreSQL, its default limit being 100 for everybody; one more listens.
POSTGRES_CONNECTIONS: Final = 10
#: How long to wait for SQLite's write lock, which only another process can hold, or for PostgreSQL to answer a
#: connection: longer than a slow disk's worst flush, shorter than a caller's patience.
BUSY_SECONDS: Final = 10.0
#: How often a transaction is tried that met another one or a broken connection, and the pause before the second
#: try, in seconds; it doubles. All together about 1.5 s: a fail-over takes longer, and callers come back.
TRIES: Final = 6
FIRST_PAUSE: Final = 0.05
#: What PostgreSQL says when the same transaction may well go through now: serialization, deadlock, shutting down.
_AGAIN: Final = ("40001", "40P01", "57P01", "57P02", "57P03", "53300")


_SQLITE: Final[dict[str, Any]] = {"timeout": BUSY_SECONDS, "isolation_level": None}


class Database:
    """An open database."""

    def __init__(self, url: URL, engine: AsyncEngine, clock: Clock) -> None:
        self.url = url
        self.clock = clock
        self._engine = engine
        self.is_sqlite = url.get_backend_name() == "sqlite"
        self._writing: SqliteThreads | None = None
        self._reading: SqliteThreads | None = None
        if self.is_sqlite:
            # SQLite has one writer: those of this process queue for it in the order in which they came.
            self._writing = _sqlite_threads(url, "writer", "BEGIN IMMEDIATE", 1)
            self._reading = _sqlite_threads(url, "reader", "BEGIN", SQLITE_READERS)

    @classmethod
    async def open(cls, url: str, *, clock: Clock | None = None, create: bool = True) -> Database:
        clock = clock or SystemClock()
        parsed = parse_url(url)
        if parsed.get_backend_name() == "sqlite":
            _prepare_file(str(parsed.database), create)
            engine = _sqlite_engine(parsed)
        else:
            engine = create_async_engine(
                parsed,
                pool_size=POSTGRES_CONNECTIONS,
                max_overflow=0,
                pool_timeout=BUSY_SECONDS,
                connect_args={"timeout": BUSY_SECONDS, "server_settings": {"application_name": "holdfast"}},
            )
        database = cls(parsed, engine, clock)
        try:
            await database.ping()
        except BaseException:
            await database.close()
            raise
        return database

    async def close(self) -> None:
        for threads in (self._writing, self._reading):
            if threads is not None:
                await threads.close()
        await self._engine.dispose()

    async def ping(self) -> None:
        await self.read(_answer, tries=1)

    @property
    def place(self) -> str:
        """Where it is, for people: without a password."""
        return self.url.set(drivername=self.url.get_backend_name()).render_as_string(hide_password=True)

    def now(self) -> ColumnElement[float]:
        """The time as leases count it, in a statement.

        PostgreSQL's own clock, since those of replicas may differ, unless a test gave us one to go by.
        `clock_timestamp`, not `now`: that is when the transaction began, and it may have waited for a lock since.
        """
        if not self.is_sqlite and isinstance(self.clock, SystemClock):
            return func.extract("epoch", func.clock_timestamp()).cast(Double)
        return literal(self.clock.time(), Double)

    async def write(self, work: Callable[[AsyncConnection], Awaitable[T]], *, tries: int = TRIES) -> T:
        """Do this in one transaction. It may be done several times, and counts once: it changes nothing else."""
        return await self._tried(work, self._write_once, tries)

    async def read(self, work: Callable[[AsyncConnection], Awaitable[T]], *, tries: int = TRIES) -> T:
        """Look, in one transaction."""
        return await self._tried(work, self._read_once, tries)

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[AsyncConnection]:
        """A connection that sees the database as it was at one moment, for as long as it is used."""
        try:
            async with self._engine.connect() as connection:
                if not self.is_sqlite:
                    await connection.execution_options(isolation_level="REPEATABLE READ")
                async with connection.begin():
                    yield connection
        except (SQLAlchemyError, OSError) as error:
            raise self._problem(error) from error

    async def outside_transaction(self, statement: str) -> None:
        """For what no transaction may hold: SQLite's housekeeping."""

        async def work(connection: AsyncConnection) -> None:
            await connection.exec_driver_sql("COMMIT")
            await connection.exec_driver_sql(statement)
            await connection.exec_driver_sql("BEGIN")

        await self.write(work)

    async def _tried(
        self,
        work: Callable[[AsyncConnection], Awaitable[T]],
        once: Callable[[Callable[[AsyncConnection], Awaitable[T]]], Awaitable[T]],
        tries: int,
    ) -> T:
        pause = FIRST_PAUSE
        for last in (number == tries for number in range(1, tries + 1)):
            try:
                return await once(work)
            except IntegrityError:
                # Two wanted the same name: what that means, only the caller knows.
                raise
            except (SQLAlchemyError, OSError) as error:
                if last or not _may_work_later(error):
                    raise self._problem(error) from error
            # Real time, whatever the clock: it is the other side that we wait for.
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable")

    async def _write_once(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        if self._writing is not None:
            return await self._writing.transact(work)
        async with self._engine.begin() as connection:
            return await work(connection)

    async def _read_once(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        if self._reading is not None:
            return await self._reading.transact(work)
        async with self._engine.begin() as connection:
            return await work(connection)

    def _problem(self, error: Exception) -> Problem:
        if isinstance(error, DataError) or _code(error).startswith("22"):
            return Invalid(f"the database takes no such value: {_first_line(error)}", reason="STORE_VALUE")
        return Unavailable(
            f"the database {self.place} cannot be used: {_first_line(error)}",
            reason="STORE_UNAVAILABLE",
            retry_after=1.0,
        )


def parse_url(url: str) -> URL:
    """The URL as SQLAlchemy has it; what is no database of ours is refused."""
    scheme = urlsplit(url).scheme
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise _bad_url(url, "it is no URL") from None
    if scheme == "sqlite":
        if parsed.host or not parsed.database or parsed.database == ":memory:":
            raise _bad_url(url, "a file is needed, as in sqlite:////var/lib/holdfast/service.db")
        return parsed.set(drivername="sqlite+aiosqlite")
    if scheme in ("postgresql", "postgres"):
        query = dict(parsed.query)
        # As libpq and everybody's connection strings have it; asyncpg takes the same words under another name.
        if "sslmode" in query:
            query["ssl"] = query.pop("sslmode")
        return parsed.set(drivername="postgresql+asyncpg", query=query)
    raise _bad_url(url, "it must begin with sqlite:/// or postgresql://")


def _bad_url(url: str, why: str) -> Problem:
    shown = url if "@" not in url else f"{url.partition('://')[0]}://…@{url.rpartition('@')[2]}"
    return Invalid(f"store {shown!r}: {why}", reason="STORE_URL")


def _prepare_file(path: str, create: bool) -> None:
    """The file, readable by us alone: it holds what agents typed. SQLite gives its log beside it the same mode."""
    try:
        if create:
            os.makedirs(os.path.dirname(os.path.abspath(path)), mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        try:
            if create and os.fstat(fd).st_mode & 0o077:
                os.fchmod(fd, 0o600)
        finally:
            os.close(fd)
    except OSError as error:
        raise Unavailable(f"store {path}: {error.strerror}", reason="STORE_UNAVAILABLE") from None


def _sqlite_engine(url: URL) -> AsyncEngine:
    """For snapshots alone: who has one reads at its own speed, and other things meanwhile."""
    engine = create_async_engine(
        url, poolclass=AsyncAdaptedQueuePool, pool_size=SQLITE_READERS, max_overflow=0, connect_args=_SQLITE
    )
    _set_up_sqlite(engine.sync_engine, "BEGIN")
    return engine


def _sqlite_threads(url: URL, name: str, begin: str, connections: int) -> SqliteThreads:
    return SqliteThreads(url, name, connections, lambda engine: _set_up_sqlite(engine, begin), **_SQLITE)


def _set_up_sqlite(engine: Engine, begin: str) -> None:
    @event.listens_for(engine, "connect")
    def _set_up(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        # The first needs to come before the first table. FULL: a row that was told as written is there after the
        # machine lost its power, too.
        for pragma in ("auto_vacuum=INCREMENTAL", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        # The driver would begin at the first change only: two that read before they write would both go on, and
        # one of them fail.
        connection.exec_driver_sql(begin)


async def _answer(connection: AsyncConnection) -> None:
    await connection.execute(text("SELECT 1"))


def _may_work_later(error: Exception) -> bool:
    """Whether the same transaction may go through: it met another one, or its connection broke."""
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or _code(error) in _AGAIN or "database is locked" in str(error.orig)
    return isinstance(error, OSError)


def _code(error: Exception) -> str:
    """PostgreSQL's five letters for what happened; empty for anything else."""
    return str(getattr(getattr(error, "orig", error), "sqlstate", None) or "")


def _first_line(error: Exception) -> str:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    lines = str(cause).strip().splitlines()
    return lines[0].removeprefix("<class 'asyncpg.exceptions.").strip() if lines else type(cause).__name__
