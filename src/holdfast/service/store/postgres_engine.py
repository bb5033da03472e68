"""PostgreSQL through asyncpg: a pool of connections, for reading and for writing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from sqlalchemy import URL
from sqlalchemy.ext.asyncio import create_async_engine

from holdfast.service.store.connection import Connection, Work

T = TypeVar("T")

#: Connections of one replica, PostgreSQL's default limit being 100 for everybody; one more listens.
CONNECTIONS: Final = 10
#: How long to wait for a connection, from the pool or from PostgreSQL: shorter than a caller's patience.
CONNECT_SECONDS: Final = 10.0


class PostgresEngine:
    """An `Engine`."""

    def __init__(self, url: URL) -> None:
        self._engine = create_async_engine(
            url,
            pool_size=CONNECTIONS,
            max_overflow=0,
            pool_timeout=CONNECT_SECONDS,
            connect_args={"timeout": CONNECT_SECONDS, "server_settings": {"application_name": "holdfast"}},
        )

    async def write(self, work: Work[T]) -> T:
        async with self._engine.begin() as connection:
            return await work(connection)

    async def read(self, work: Work[T]) -> T:
        return await self.write(work)

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Connection]:
        async with self._engine.connect() as connection:
            await connection.execution_options(isolation_level="REPEATABLE READ")
            async with connection.begin():
                yield connection

    async def give_back(self) -> None:
        """PostgreSQL sees to that by itself."""

    async def close(self) -> None:
        await self._engine.dispose()
