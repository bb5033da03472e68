"""SQLite in threads: one connection that writes and a few that read, each transaction as a whole in one thread.

A transaction is half a dozen statements. Handing each of them to a thread and back costs more than SQLite itself,
most of all on a busy machine, where every hand-over waits for its turn. So the work, a coroutine that awaits
nothing but its connection, runs to its end in the thread, on a connection whose calls return at once.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import sqlalchemy
from sqlalchemy import URL, Dialect, create_engine, event
from sqlalchemy.pool import QueuePool

from holdfast.service.problems import Bug, Invalid, Unavailable
from holdfast.service.store.connection import Connection, Rows, Work

T = TypeVar("T")

#: Connections that read at once: each is a thread, and more than cores help nobody.
READERS: Final = 4
#: How long to wait for the write lock, which only another process can hold: longer than a slow disk's worst flush.
BUSY_SECONDS: Final = 10.0
#: Pages of 4 KiB that are given back at a time, while nobody can write: 0.16 s, measured on a busy machine.
VACUUM_PAGES: Final = 10_000
#: `?synchronous=` of the URL. `full`: a row that was told as written is there after the machine lost its power,
#: too, and each group of rows waits for the disk. `normal`: after a crash of the service alone, and nobody waits.
SYNCHRONOUS: Final = ("full", "normal")


class SqliteEngine:
    """An `Engine`."""

    def __init__(self, url: URL, *, create: bool) -> None:
        if str(url.query.get("synchronous", "full")) not in SYNCHRONOUS:
            raise Invalid(f"store: synchronous is one of {', '.join(SYNCHRONOUS)}", reason="STORE_URL")
        _prepare_file(str(url.database), create)
        self._url = url
        self._writing = _engine(url, "BEGIN IMMEDIATE", 1)
        self._reading = _engine(url, "BEGIN", READERS)
        # One thread: those that write queue before it, in the order in which they came.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="holdfast-store-write")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="holdfast-store-read")

    async def write(self, work: Work[T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, _run, self._writing, work)

    async def read(self, work: Work[T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, _run, self._reading, work)

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Connection]:
        # A connection of its own: it may be used for long.
        engine = _engine(self._url, "BEGIN", 1)
        run = _in(self._readers)
        try:
            connection = await run(engine.connect)
            try:
                await run(connection.begin)
                yield _Distant(connection, run)
            finally:
                await run(connection.close)
        finally:
            await run(engine.dispose)

    async def give_back(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, _vacuum, self._writing)

    async def close(self) -> None:
        for executor, engine in ((self._writer, self._writing), (self._readers, self._reading)):
            await asyncio.to_thread(executor.shutdown)
            engine.dispose()


class _Near:
    """The connection in its own thread."""

    def __init__(self, connection: sqlalchemy.Connection) -> None:
        self._connection = connection

    @property
    def dialect(self) -> Dialect:
        return self._connection.dialect

    async def execute(self, statement: Any, parameters: Any = None, /) -> Rows:
        return _whole(self._connection.execute(statement, parameters))

    async def run_sync(self, look: Callable[..., T], /) -> T:
        return look(self._connection)


class _Distant(_Near):
    """The connection from outside of its thread."""

    def __init__(self, connection: sqlalchemy.Connection, run: Callable[..., Any]) -> None:
        super().__init__(connection)
        self._run = run

    async def execute(self, statement: Any, parameters: Any = None, /) -> Rows:
        result: Rows = await self._run(lambda: _whole(self._connection.execute(statement, parameters)))
        return result


def _run(engine: sqlalchemy.Engine, work: Work[T]) -> T:
    """The work in a transaction, in this thread."""
    with engine.begin() as connection:
        steps = work(_Near(connection)).__await__()
        try:
            next(steps)
        except StopIteration as end:
            value: T = end.value
            return value
        raise Bug("a transaction waited for something else than its database", reason="STORE_BUG")


def _vacuum(engine: sqlalchemy.Engine) -> None:
    connection = engine.raw_connection()
    try:
        # A script, since each step of this statement frees one page, and only scripts are stepped to their end.
        driver: sqlite3.Connection = connection.driver_connection  # type: ignore[assignment]
        driver.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")
    finally:
        connection.close()


def _whole(result: Rows) -> Rows:
    """All of its rows, so that it can be read when the connection has something else to do."""
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
        # The first needs to come before the first table.
        cursor.execute("PRAGMA auto_vacuum=INCREMENTAL")
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute(f"PRAGMA synchronous={synchronous}")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        # The driver would begin at the first change only: two that read before they write would both go on, and
        # one of them fail.
        connection.exec_driver_sql(begin)

    return engine


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
