"""PostgreSQL through asyncpg: a pool of connections, for reading and for writing."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from sqlalchemy import URL
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from holdfast.service.problems import Invalid
from holdfast.service.store.database.connection import StoreConnection, Work

T = TypeVar("T")

#: Connections of one replica, of the 100 that PostgreSQL allows by default; one more listens. One of them is for
#: statements of `run_statement`.
CONNECTIONS: Final = 10
#: Seconds to wait for a connection, from the pool or from PostgreSQL: shorter than the timeouts of callers.
CONNECT_SECONDS: Final = 10.0


def tls_of(url: URL) -> tuple[dict[str, Any], URL]:
    """Return asyncpg's TLS options, and the URL without them: of libpq's options asyncpg accepts only the mode."""
    query = dict(url.query)
    mode = str(query.pop("ssl", ""))
    authority, certificate, key = (str(query.pop(name, "")) for name in ("sslrootcert", "sslcert", "sslkey"))
    if not (authority or certificate or key):
        return ({"ssl": mode} if mode else {}), url.set(query=query)
    if mode not in ("verify-full", "verify-ca") or not authority:
        raise Invalid(
            "store: sslrootcert, sslcert and sslkey need sslmode=verify-full (or verify-ca) and sslrootcert",
            reason="STORE_URL",
        )
    try:
        context = ssl.create_default_context(cafile=authority)
        if certificate:
            context.load_cert_chain(certificate, key or None)
    except (OSError, ssl.SSLError) as error:
        raise Invalid(f"store: the TLS files cannot be used: {error}", reason="STORE_URL") from error
    context.check_hostname = mode == "verify-full"
    return {"ssl": context}, url.set(query=query)


class PostgresEngine:
    """An `Engine`."""

    def __init__(self, url: URL) -> None:
        tls, url = tls_of(url)
        self._engine = create_async_engine(
            url,
            pool_size=CONNECTIONS,
            max_overflow=0,
            pool_timeout=CONNECT_SECONDS,
            # The connection that was used last has its statements prepared.
            pool_use_lifo=True,
            connect_args={**tls, "timeout": CONNECT_SECONDS, "server_settings": {"application_name": "holdfast"}},
        )
        #: The same connections without BEGIN and COMMIT, a round trip each.
        self._statements = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self._persistent: AsyncConnection | None = None
        self._turn = asyncio.Lock()

    async def write(self, work: Work[T]) -> T:
        async with self._engine.begin() as connection:
            return await work(connection)

    async def read(self, work: Work[T]) -> T:
        # Each statement of a transaction would see the rows that are committed by then, too.
        async with self._statements.connect() as connection:
            return await work(connection)

    async def run_statement(self, work: Work[T]) -> T:
        """Run on a persistent connection: taking one from the pool and returning it costs half of a statement."""
        async with self._turn:
            if self._persistent is None:
                self._persistent = await self._statements.connect()
            try:
                return await work(self._persistent)
            except BaseException:
                await self._close_persistent()
                raise

    async def _close_persistent(self) -> None:
        connection, self._persistent = self._persistent, None
        if connection is not None:
            # A cancelled caller must not leave it in use.
            await asyncio.shield(asyncio.ensure_future(connection.close()))

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[StoreConnection]:
        async with self._engine.connect() as connection:
            await connection.execution_options(isolation_level="REPEATABLE READ")
            async with connection.begin():
                yield connection

    async def reclaim_space(self) -> None:
        """Do nothing: PostgreSQL reclaims space itself."""

    async def close(self) -> None:
        await self._close_persistent()
        await self._engine.dispose()
