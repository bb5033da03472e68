"""SQLite in threads: one connection that writes and a few that read, each transaction wholly in one thread.

A transaction is half a dozen statements. Passing each of them to a thread and back costs more than SQLite itself,
most of all on a busy machine. So the work, a coroutine that awaits only its connection, runs to its end in the
thread, on a connection that never suspends.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import sqlalchemy
from sqlalchemy import URL, Dialect, create_engine, event
from sqlalchemy.pool import QueuePool

from holdfast.service.problems import Bug, Invalid, Unavailable
from holdfast.service.store.database.connection import Rows, StoreConnection, Work
from holdfast.service.store.database.sqlite_file import signal_change
from holdfast.service.store.database.sqlite_statements import FREQUENT, FrequentStatements, as_sqlalchemy, driver_of

T = TypeVar("T")

#: Connections that read concurrently: each is a thread, and more threads than cores do not help.
READERS: Final = 4
#: Seconds to wait for the write lock, which only another process can hold: longer than a slow disk's worst flush.
BUSY_SECONDS: Final = 10.0
#: Pages of 4 KiB that are freed at a time while writes wait: 0.16 s, measured on a busy machine.
VACUUM_PAGES: Final = 10_000
#: `?synchronous=` of the URL. With `full`, acknowledged rows survive a power failure, and each group of rows waits
#: for the disk. With `normal`, they survive a crash of the service only, and nothing waits.
SYNCHRONOUS: Final = ("full", "normal")


class SqliteEngine:
    """An `Engine`."""

    def __init__(self, url: URL, *, create: bool) -> None:
        if str(url.query.get("synchronous", "full")) not in SYNCHRONOUS:
            raise Invalid(f"store: synchronous must be one of {', '.join(SYNCHRONOUS)}", reason="STORE_URL")
        _prepare_file(str(url.database), create)
        self._url = url
        self._path = str(url.database)
        self._writing = _engine(url, "BEGIN IMMEDIATE", 1)
        #: The writing connection, opened on first use; it belongs to the writer's thread.
        self._connection: sqlalchemy.Connection | None = None
        self._frequent = FrequentStatements(self._writing.dialect)
        self._reading = _engine(url, "BEGIN", READERS)
        #: The reading connection of each thread, opened on first use, and all of them.
        self._own = threading.local()
        self._opened: list[sqlalchemy.Connection] = []
        # One thread: writes queue for it in order.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="holdfast-store-write")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="holdfast-store-read")

    async def write(self, work: Work[T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._write, work)

    def _write(self, work: Work[T]) -> T:
        """Run in the writer's thread, on a persistent connection: taking one from a pool costs a statement."""
        connection = self._writing_connection()
        with connection.begin():
            value = _finished(work(_ThreadConnection(connection, self._frequent)))
        signal_change(self._path)
        return value

    def _writing_connection(self) -> sqlalchemy.Connection:
        if self._connection is None or self._connection.invalidated:
            self._close_writing()
            self._connection = self._writing.connect()
        return self._connection

    def _close_writing(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def read(self, work: Work[T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, work)

    def _read(self, work: Work[T]) -> T:
        connection = self._reading_connection()
        with connection.begin():
            return _finished(work(_ThreadConnection(connection, self._frequent)))

    async def run_statement(self, work: Work[T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._run_statement, work)

    def _run_statement(self, work: Work[T]) -> T:
        value = _finished(work(_ThreadConnection(self._writing_connection(), self._frequent)))
        signal_change(self._path)
        return value

    def _reading_connection(self) -> sqlalchemy.Connection:
        """Return the connection of this thread: taking one from the pool for each read costs a few statements."""
        connection: sqlalchemy.Connection | None = getattr(self._own, "connection", None)
        if connection is not None and connection.invalidated:
            connection.close()
            self._opened.remove(connection)
            connection = None
        if connection is None:
            connection = self._own.connection = self._reading.connect()
            self._opened.append(connection)
        return connection

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[StoreConnection]:
        # A connection of its own, since the snapshot may be used for long.
        engine = _engine(self._url, "BEGIN", 1)
        run = _in(self._readers)
        try:
            connection = await run(engine.connect)
            try:
                await run(connection.begin)
                yield _LoopConnection(connection, self._frequent, run)
            finally:
                await run(connection.close)
        finally:
            await run(engine.dispose)

    async def reclaim_space(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, self._vacuum)

    def _vacuum(self) -> None:
        # A script, since each step of this statement frees one page, and only scripts run all steps.
        script = f"PRAGMA incremental_vacuum({VACUUM_PAGES})"
        try:
            driver_of(self._writing_connection()).executescript(script)
        except sqlite3.Error as error:
            raise as_sqlalchemy(error, script) from error

    async def close(self) -> None:
        for executor, engine in ((self._writer, self._writing), (self._readers, self._reading)):
            await asyncio.to_thread(executor.shutdown)
            self._close_writing()
            for connection in self._opened:
                connection.close()
            engine.dispose()


class _ThreadConnection:
    """The connection as used in its own thread."""

    def __init__(self, connection: sqlalchemy.Connection, frequent: FrequentStatements) -> None:
        self._connection = connection
        self._frequent = frequent

    @property
    def dialect(self) -> Dialect:
        return self._connection.dialect

    async def execute(self, statement: Any, parameters: Any = None, /) -> Rows:
        return self._execute(statement, parameters)

    def _execute(self, statement: Any, parameters: Any) -> Rows:
        if statement.get_execution_options().keys() >= FREQUENT.keys():
            return self._frequent.run(driver_of(self._connection), statement, parameters)  # type: ignore[return-value]
        return _whole(self._connection.execute(statement, parameters))

    async def run_sync(self, work: Callable[..., T], /) -> T:
        return work(self._connection)


class _LoopConnection(_ThreadConnection):
    """The connection as used from the event loop."""

    def __init__(
        self, connection: sqlalchemy.Connection, frequent: FrequentStatements, run: Callable[..., Any]
    ) -> None:
        super().__init__(connection, frequent)
        self._run = run

    async def execute(self, statement: Any, parameters: Any = None, /) -> Rows:
        result: Rows = await self._run(lambda: self._execute(statement, parameters))
        return result


def _finished(work: Awaitable[T]) -> T:
    """Return the result of a coroutine that never suspends."""
    steps = work.__await__()
    try:
        next(steps)
    except StopIteration as end:
        value: T = end.value
        return value
    raise Bug("a transaction awaited something other than its database", reason="STORE_BUG")


def _whole(result: Rows) -> Rows:
    """Return all rows, so that they can be read after the connection runs other statements."""
    return result.freeze()() if getattr(result, "returns_rows", False) else result


def _in(executor: ThreadPoolExecutor) -> Callable[..., Any]:
    loop = asyncio.get_running_loop()
    return lambda call: loop.run_in_executor(executor, call)


def _engine(url: URL, begin: str, connections: int) -> sqlalchemy.Engine:
    synchronous = url.query.get("synchronous", "full")
    engine = create_engine(
        url.difference_update_query(["synchronous"]),
        poolclass=QueuePool,
        pool_size=connections,
        max_overflow=0,
        pool_timeout=BUSY_SECONDS,
        connect_args={"timeout": BUSY_SECONDS, "isolation_level": None, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def _set_up(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        # The first pragma must precede the first table.
        cursor.execute("PRAGMA auto_vacuum=INCREMENTAL")
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute(f"PRAGMA synchronous={synchronous}")
        cursor.execute("PRAGMA foreign_keys=ON")
        # The pages that a statement changes are saved until its end, by default in a file, which an insert of many
        # rows would make each time. A statement of this package changes some dozens of pages.
        cursor.execute("PRAGMA temp_store=MEMORY")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        # The driver would begin at the first change only: two transactions that read before they write would both
        # continue, and one would fail.
        try:
            driver_of(connection).execute(begin)
        except sqlite3.Error as error:
            raise as_sqlalchemy(error, begin) from error

    return engine


def _prepare_file(path: str, create: bool) -> None:
    """Create the file, readable by its owner only: it holds input of agents. SQLite gives its log the same mode."""
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
