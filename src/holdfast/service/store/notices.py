"""Notices of appended rows, for listeners in this process and from other replicas.

Listeners in the writing process are called directly. PostgreSQL's NOTIFY reaches other replicas on a dedicated
connection that is reopened when it breaks. Followers of a SQLite file in other processes use `sqlite_file`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Final

from sqlalchemy import URL

from holdfast.service.problems import Unavailable
from holdfast.service.store.batch import CHANNEL
from holdfast.service.store.database.postgres import tls_of
from holdfast.service.store.types import MISSED, RowNotice

#: Notices that one listener may lag behind. A further one replaces them all by `MISSED`, and the listener reads the
#: table.
MAX_BEHIND: Final = 4_096
#: Pauses before the listening connection is reopened, in seconds: doubled up to the longest.
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
#: Interval and timeout of pings on the listening connection, in seconds. After a silent network failure, rows of
#: other replicas are noticed at most this much later.
PING_SECONDS: Final = 30.0
PING_TIMEOUT_SECONDS: Final = 10.0


class NoticeListener(AsyncIterator[RowNotice]):
    """Notices since its creation. Use `async with`, or `close` it."""

    def __init__(self, session_id: str | None, on_close: Callable[[NoticeListener], None]) -> None:
        self._session_id = session_id
        self._on_close = on_close
        self._notices: deque[RowNotice] = deque()
        self._more = asyncio.Event()
        self._closed = False

    def publish(self, session_id: str, first: int, last: int) -> None:
        if self._session_id is not None and session_id != self._session_id:
            return
        if len(self._notices) + last - first >= MAX_BEHIND:
            self.publish_missed()
            return
        self._notices.extend(RowNotice(session_id, seq) for seq in range(first, last + 1))
        self._more.set()

    def publish_missed(self) -> None:
        self._notices.clear()
        self._notices.append(MISSED)
        self._more.set()

    def close(self) -> None:
        """End the iteration."""
        self._closed = True
        self._more.set()
        self._on_close(self)

    async def __anext__(self) -> RowNotice:
        while not self._notices:
            if self._closed:
                raise StopAsyncIteration
            self._more.clear()
            await self._more.wait()
        return self._notices.popleft()

    async def __aenter__(self) -> NoticeListener:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Notices:
    """All listeners of this process."""

    def __init__(self) -> None:
        self._listeners: set[NoticeListener] = set()

    def listen(self, session_id: str | None = None) -> NoticeListener:
        listening = NoticeListener(session_id, self._listeners.discard)
        self._listeners.add(listening)
        return listening

    def publish(self, written: dict[str, tuple[int, int]]) -> None:
        for listening in self._listeners:
            for session_id, (first, last) in written.items():
                listening.publish(session_id, first, last)

    def publish_missed(self) -> None:
        for listening in self._listeners:
            listening.publish_missed()

    def close(self) -> None:
        for listening in list(self._listeners):
            listening.close()


class PostgresNotices:
    """The connection that receives notices of other replicas."""

    def __init__(self, url: URL, origin: str, notices: Notices) -> None:
        # Built once: a TLS file that disappears later must not end the listening.
        self._arguments = postgres_arguments(url)
        self._origin = origin
        self._notices = notices
        self._task: asyncio.Task[None] | None = None
        self._connection: Any = None
        #: Number of connections made; more than one after a failure.
        self.connections = 0

    async def start(self) -> None:
        """Return once it listens."""
        import asyncpg  # type: ignore[import-untyped]

        try:
            await self._connect()
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise Unavailable(f"no connection for notices: {error}", reason="STORE_UNAVAILABLE") from error
        self._task = asyncio.create_task(self._keep(), name="holdfast-notices")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._connection is not None:
            self._connection.terminate()

    async def _keep(self) -> None:
        while True:
            broken = asyncio.Event()
            self._connection.add_termination_listener(lambda _, broken=broken: broken.set())
            while not self._connection.is_closed():
                await self._wait_broken(broken)
            await self._reconnect()
            # Notices sent while no connection listened are lost.
            self._notices.publish_missed()

    async def _wait_broken(self, broken: asyncio.Event) -> None:
        """Wait until the connection breaks, with pings: a listening connection alone does not notice a cut line."""
        import asyncpg

        try:
            await asyncio.wait_for(broken.wait(), PING_SECONDS)
        except TimeoutError:
            try:
                await self._connection.execute("SELECT 1", timeout=PING_TIMEOUT_SECONDS)
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                self._connection.terminate()

    async def _reconnect(self) -> None:
        import asyncpg

        pause = FIRST_PAUSE
        while True:
            try:
                return await self._connect()
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                # The store's own calls report a database that is down; this task only retries.
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _connect(self) -> None:
        import asyncpg

        arguments, options = self._arguments
        connection = await asyncpg.connect(*arguments, **options)
        try:
            await connection.add_listener(CHANNEL, self._received)
        except BaseException:
            connection.terminate()
            raise
        self._connection = connection
        self.connections += 1

    def _received(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        origin, *lines = str(payload).split("\n")
        if origin == self._origin:
            return
        written = {}
        for line in lines:
            first, last, session_id = line.split(" ", 2)
            written[session_id] = (int(first), int(last))
        self._notices.publish(written)


def postgres_arguments(url: URL) -> tuple[list[Any], dict[str, Any]]:
    """Return asyncpg's arguments as SQLAlchemy's dialect derives them from the URL, so both connect alike."""
    from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg

    tls, url = tls_of(url)
    arguments, options = PGDialect_asyncpg().create_connect_args(url)  # type: ignore[no-untyped-call]
    own = ("prepared_statement_cache_size", "prepared_statement_name_func", "async_fallback", "async_creator_fn")
    options = {name: value for name, value in options.items() if name not in own}
    return list(arguments), {
        **options,
        **tls,
        "timeout": 10.0,
        "server_settings": {"application_name": "holdfast-notices"},
    }
