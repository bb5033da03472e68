"""What a transaction's work may do with its connection, whichever database it is; pure."""

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

    async def run_sync(self, look: Callable[..., T], /) -> T: ...


#: Done in one transaction. It awaits nothing but its connection.
Work = Callable[[StoreConnection], Awaitable[T]]


class Engine(Protocol):
    """Runs work, each in a transaction of its own."""

    async def write(self, work: Work[T]) -> T: ...

    async def read(self, work: Work[T]) -> T: ...

    def snapshot(self) -> AbstractAsyncContextManager[StoreConnection]:
        """A connection that sees the database as it was at one moment, for as long as it is used."""
        ...

    async def give_back(self) -> None:
        """Give room that deleted rows have left back to the file system."""
        ...

    async def close(self) -> None: ...
