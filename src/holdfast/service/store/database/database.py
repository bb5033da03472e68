"""A database by its URL: connections, retried transactions, the clock for leases, errors as problems.

`sqlite` and `postgres` have the connections.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar
from urllib.parse import urlsplit

from sqlalchemy import URL, ColumnElement, func, literal, make_url, text
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.types import Double

from holdfast.service.clock import SystemClock, WallClock
from holdfast.service.problems import Invalid, Problem, Unavailable
from holdfast.service.store.database.connection import DatabaseEngine, StoreConnection, Work
from holdfast.service.store.database.postgres import PostgresEngine
from holdfast.service.store.database.sqlite import SqliteEngine

T = TypeVar("T")

#: Attempts for a transaction that failed on a conflict or a broken connection, and the pause before the second in
#: seconds; it doubles. About 1.5 s in total: a fail-over takes longer, and callers retry.
TRIES: Final = 6
FIRST_PAUSE: Final = 0.05
#: PostgreSQL's codes for transactions that may succeed when retried: serialization, deadlock, shutdown.
_RETRYABLE_CODES: Final = ("40001", "40P01", "57P01", "57P02", "57P03", "53300")


_log = logging.getLogger("holdfast.service.store")


class Database:
    """An open database."""

    def __init__(self, url: URL, engine: DatabaseEngine, clock: WallClock) -> None:
        self.url = url
        self.clock = clock
        self._engine = engine
        self._closed = False
        #: True once errors can reach callers of the service. They then name an id under which the log has the
        #: database's address and its report; the program that opens a database gets all of it in the error.
        self.is_serving = False
        self.is_sqlite = url.get_backend_name() == "sqlite"

    @classmethod
    async def open(cls, url: str, *, clock: WallClock | None = None, create: bool = True) -> Database:
        parsed = parse_url(url)
        if parsed.get_backend_name() == "sqlite":
            engine: DatabaseEngine = SqliteEngine(parsed, create=create)
        else:
            engine = PostgresEngine(parsed)
        database = cls(parsed, engine, clock or SystemClock())
        try:
            await database.ping()
        except BaseException:
            await database.close()
            raise
        return database

    async def close(self) -> None:
        self._closed = True
        await self._engine.close()

    async def ping(self) -> None:
        await self.read(_answer, tries=1)

    @property
    def location(self) -> str:
        """Address of the database for messages, without a password."""
        return self.url.set(drivername=self.url.get_backend_name()).render_as_string(hide_password=True)

    def now(self) -> ColumnElement[float]:
        """Return the time for leases, as an SQL expression.

        PostgreSQL's own clock, since the clocks of replicas may differ, unless a test passed one. `clock_timestamp`
        instead of `now`, which is the start of the transaction: it may have waited for a lock since.
        """
        if not self.is_sqlite and isinstance(self.clock, SystemClock):
            return func.extract("epoch", func.clock_timestamp()).cast(Double)
        return literal(self.clock.time(), Double)

    async def write(self, work: Work[T], *, tries: int = TRIES) -> T:
        """Run `work` in one transaction, possibly several times: it must change nothing else."""
        return await self._tried(lambda: self._engine.write(work), tries)

    async def write_statement(self, statement: Work[bool], otherwise: Work[None]) -> None:
        """Run one statement, at most once. If it returns False, or its connection breaks, write `otherwise`."""
        tried = False

        async def once() -> None:
            nonlocal tried
            first, tried = not tried, True
            if not first or not await self._engine.run_statement(statement):
                await self._engine.write(otherwise)

        await self._tried(once, TRIES)

    async def read(self, work: Work[T], *, tries: int = TRIES) -> T:
        """Run `work` in one transaction that only reads."""
        return await self._tried(lambda: self._engine.read(work), tries)

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[StoreConnection]:
        """A connection that sees the database as it was at one moment, for as long as it is used."""
        try:
            async with self._engine.snapshot() as connection:
                yield connection
        except (SQLAlchemyError, OSError) as error:
            raise self._problem(error) from error

    async def reclaim_space(self) -> None:
        """Return the space of deleted rows to the file system, where the database does not do so itself."""
        await self._tried(self._engine.reclaim_space, 1)

    async def _tried(self, once: Callable[[], Awaitable[T]], tries: int) -> T:
        if self._closed:
            raise Unavailable(
                "this replica of the service is stopping: its database is closed", reason="STORE_CLOSED"
            )
        pause = FIRST_PAUSE
        for last in (number == tries for number in range(1, tries + 1)):
            try:
                return await once()
            except IntegrityError:
                # A duplicate name: only the caller can interpret it.
                raise
            except (SQLAlchemyError, OSError) as error:
                if last or not _is_retryable(error):
                    raise self._problem(error) from error
            # Real time even under a test clock: the other side needs it.
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable")

    def _problem(self, error: Exception) -> Problem:
        if isinstance(error, DataError) or _code(error).startswith("22"):
            return Invalid(f"the database rejects this value: {_first_line(error)}", reason="STORE_VALUE")
        detail = f"the database {self.location} cannot be used: {_first_line(error)}"
        if not self.is_serving:
            return Unavailable(detail, reason="STORE_UNAVAILABLE", retry_after=1.0)
        error_id = secrets.token_hex(8)
        _log.error("%s, error_id=%s", detail, error_id)
        state = "has no room left" if _is_full(error) else "cannot be used now"
        return Unavailable(
            f"the database of the service {state}; its log has more under error_id {error_id}",
            reason="STORE_UNAVAILABLE",
            retry_after=1.0,
            error_id=error_id,
        )


def parse_url(url: str) -> URL:
    """Parse the URL for SQLAlchemy; refuse unsupported databases."""
    scheme = urlsplit(url).scheme
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise _bad_url(url, "it is not a URL") from None
    if scheme == "sqlite":
        if parsed.host or not parsed.database or parsed.database == ":memory:":
            raise _bad_url(url, "a file is needed, as in sqlite:////var/lib/holdfast/service.db")
        return parsed.set(drivername="sqlite+pysqlite")
    if scheme in ("postgresql", "postgres"):
        query = dict(parsed.query)
        # libpq's name of the option; asyncpg accepts the same values under another name.
        if "sslmode" in query:
            query["ssl"] = query.pop("sslmode")
        return parsed.set(drivername="postgresql+asyncpg", query=query)
    raise _bad_url(url, "it must begin with sqlite:/// or postgresql://")


def _bad_url(url: str, why: str) -> Problem:
    shown = url if "@" not in url else f"{url.partition('://')[0]}://…@{url.rpartition('@')[2]}"
    return Invalid(f"store {shown!r}: {why}", reason="STORE_URL")


async def _answer(connection: StoreConnection) -> None:
    await connection.execute(text("SELECT 1"))


def _is_retryable(error: Exception) -> bool:
    """True if a retry may succeed: the transaction conflicted, or its connection broke."""
    if isinstance(error, DBAPIError):
        return (
            error.connection_invalidated
            or _code(error) in _RETRYABLE_CODES
            or "database is locked" in str(error.orig)
        )
    return isinstance(error, OSError)


def _is_full(error: Exception) -> bool:
    return _code(error) == "53100" or "disk is full" in str(error)


def _code(error: Exception) -> str:
    """Return PostgreSQL's five-character error code; empty for other errors."""
    return str(getattr(getattr(error, "orig", error), "sqlstate", None) or "")


def _first_line(error: Exception) -> str:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    lines = str(cause).strip().splitlines()
    return lines[0].removeprefix("<class 'asyncpg.exceptions.").strip() if lines else type(cause).__name__
