"""The interface of a connection inside a transaction, for either database; pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeAlias, TypeVar

from sqlalchemy import Dialect, Result

T = TypeVar("T")
Rows: TypeAlias = Result[*tuple[Any, ...]]


class StoreConnection(Protocol):
    """A connection in a transaction. SQLAlchemy's `AsyncConnection` is one."""

    @property
    def dialect(self) -> Dialect: ...

    async def execute(self, statement: Any, parameters: Any = None, /) -> Rows: ...

    async def run_sync(self, work: Callable[..., T], /) -> T: ...


#: Runs in one transaction and awaits only its connection.
Work = Callable[[StoreConnection], Awaitable[T]]


class DatabaseEngine(Protocol):
    """Runs work, each in a transaction of its own."""

    async def write(self, work: Work[T]) -> T: ...

    async def read(self, work: Work[T]) -> T: ...

    async def run_statement(self, work: Work[T]) -> T:
        """Run work of one statement, which is a transaction by itself."""
        ...

    def snapshot(self) -> AbstractAsyncContextManager[StoreConnection]:
        """A connection that sees the database as of one moment, for as long as it is used."""
        ...

    async def reclaim_space(self) -> None:
        """Return the space of deleted rows to the file system."""
        ...

    async def close(self) -> None: ...
