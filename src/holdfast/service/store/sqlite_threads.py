"""Transactions on a SQLite file, each whole in a thread: one trip there and back, however many statements it has.

A driver that takes every statement to its thread makes some twenty trips for one append, and they cost more than
the statements. What is done in a transaction is written for asyncio, as PostgreSQL needs it; here nothing of it
ever waits, so that a thread can run it to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar, cast

from sqlalchemy import URL, Connection, CursorResult, Dialect, create_engine
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.pool import QueuePool

T = TypeVar("T")

#: How long a thread that uses the file may wait for a connection: there are as many as threads.
_NO_WAIT: Final = 1.0


class SqliteThreads:
    """So many threads, each with a connection while it is in a transaction."""

    def __init__(
        self, url: URL, name: str, connections: int, set_up: Callable[[Any], None], **connect: Any
    ) -> None:
        self._engine = create_engine(
            url.set(drivername="sqlite"),
            poolclass=QueuePool,
            pool_size=connections,
            max_overflow=0,
            pool_timeout=_NO_WAIT,
            connect_args={**connect, "check_same_thread": False},
        )
        set_up(self._engine)
        self._threads = ThreadPoolExecutor(connections, thread_name_prefix=f"holdfast-{name}")

    async def transact(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """Do this in a transaction. A caller that is cancelled does not stop one that was begun."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._transact, work)

    def _transact(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        with self._engine.begin() as connection:
            done = _finished(work(cast(AsyncConnection, _Here(connection))))
            if isinstance(done, CursorResult) and done.returns_rows:
                return cast(T, done.freeze()())  # read here: its connection is somebody else's in a moment
            return done

    async def close(self) -> None:
        """Wait for what was begun, and close the file."""
        await asyncio.to_thread(self._threads.shutdown)
        self._engine.dispose()


class _Here:
    """What transactions use of an `AsyncConnection`, done at once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def dialect(self) -> Dialect:
        return self._connection.dialect

    async def execute(self, statement: Any, parameters: Any = None) -> CursorResult[Any]:
        return self._connection.execute(statement, parameters)

    async def exec_driver_sql(self, statement: str) -> CursorResult[Any]:
        return self._connection.exec_driver_sql(statement)

    async def run_sync(self, function: Callable[[Connection], T]) -> T:
        return function(self._connection)


def _finished(work: Awaitable[T]) -> T:
    """The result of something that awaits nothing but what is done at once."""
    steps = work.__await__()
    try:
        next(steps)
    except StopIteration as done:
        return cast(T, done.value)
    raise AssertionError("a transaction waits for something that is not its database")
