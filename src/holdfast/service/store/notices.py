"""Who wants to hear of appended rows, and how rows of other replicas and programs are heard of.

In one process they are told directly. PostgreSQL tells the others by NOTIFY, heard on a connection of its own that
is made again when it breaks. Whoever follows a SQLite file from another process is woken by the kernel.
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

#: Notices that one listener may be behind. A further one turns them all into `MISSED`: it reads the table then.
MAX_BEHIND: Final = 4_096
#: Pauses before the listening connection is made again, in seconds: doubled up to the longest.
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
#: How often the listening connection is asked whether it is still there, and how long it has to answer, in seconds.
#: Rows of other replicas that are appended after a line was cut without a word are told late by this much at most.
ASK_SECONDS: Final = 30.0
ANSWER_SECONDS: Final = 10.0


class Listening(AsyncIterator[RowNotice]):
    """Notices from the moment it was made. Leave it by `async with`, or `close` it."""

    def __init__(self, session_id: str | None, on_close: Callable[[Listening], None]) -> None:
        self._session_id = session_id
        self._on_close = on_close
        self._notices: deque[RowNotice] = deque()
        self._more = asyncio.Event()
        self._closed = False

    def tell(self, session_id: str, first: int, last: int) -> None:
        if self._session_id is not None and session_id != self._session_id:
            return
        if len(self._notices) + last - first >= MAX_BEHIND:
            self.tell_missed()
            return
        self._notices.extend(RowNotice(session_id, seq) for seq in range(first, last + 1))
        self._more.set()

    def tell_missed(self) -> None:
        self._notices.clear()
        self._notices.append(MISSED)
        self._more.set()

    def close(self) -> None:
        """End it: whoever waits for the next notice is told that there is none."""
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

    async def __aenter__(self) -> Listening:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Notices:
    """All listeners of this process."""

    def __init__(self) -> None:
        self._listeners: set[Listening] = set()

    def listen(self, session_id: str | None = None) -> Listening:
        listening = Listening(session_id, self._listeners.discard)
        self._listeners.add(listening)
        return listening

    def tell(self, written: dict[str, tuple[int, int]]) -> None:
        for listening in self._listeners:
            for session_id, (first, last) in written.items():
                listening.tell(session_id, first, last)

    def tell_missed(self) -> None:
        for listening in self._listeners:
            listening.tell_missed()

    def close(self) -> None:
        for listening in list(self._listeners):
            listening.close()


class PostgresNotices:
    """The connection that hears other replicas."""

    def __init__(self, url: URL, origin: str, notices: Notices) -> None:
        # Once: a file of TLS that is away at a later time must not end the listening.
        self._arguments = postgres_arguments(url)
        self._origin = origin
        self._notices = notices
        self._task: asyncio.Task[None] | None = None
        self._connection: Any = None
        #: How often it was made. More than once: it broke.
        self.connections = 0

    async def start(self) -> None:
        """Returns once it listens."""
        import asyncpg  # type: ignore[import-untyped]

        try:
            await self._connect()
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise Unavailable(f"no connection to listen on: {error}", reason="STORE_UNAVAILABLE") from error
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
                await self._look_after(broken)
            await self._reconnect()
            # What was told while nobody listened is not told again.
            self._notices.tell_missed()

    async def _look_after(self, broken: asyncio.Event) -> None:
        """Wait until it breaks. Ask now and then: who only listens does not notice a line that was cut."""
        import asyncpg

        try:
            await asyncio.wait_for(broken.wait(), ASK_SECONDS)
        except TimeoutError:
            try:
                await self._connection.execute("SELECT 1", timeout=ANSWER_SECONDS)
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                self._connection.terminate()

    async def _reconnect(self) -> None:
        import asyncpg

        pause = FIRST_PAUSE
        while True:
            try:
                return await self._connect()
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                # The store's own calls tell of a database that is down; here it is only waited for.
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _connect(self) -> None:
        import asyncpg

        arguments, options = self._arguments
        connection = await asyncpg.connect(*arguments, **options)
        try:
            await connection.add_listener(CHANNEL, self._heard)
        except BaseException:
            connection.terminate()
            raise
        self._connection = connection
        self.connections += 1

    def _heard(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        origin, *lines = str(payload).split("\n")
        if origin == self._origin:
            return
        written = {}
        for line in lines:
            first, last, session_id = line.split(" ", 2)
            written[session_id] = (int(first), int(last))
        self._notices.tell(written)


def postgres_arguments(url: URL) -> tuple[list[Any], dict[str, Any]]:
    """What asyncpg wants, from what SQLAlchemy's dialect makes of the URL: both connect to the same place."""
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
