"""The pool of connections to sandboxes, one for each address, and the conversion of their errors to `Problem`s.

A connection is opened at its first use, closed after an idle time, and replaced after a permanent failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any

from holdfast import errors
from holdfast.exec_api import ExecApi
from holdfast.service.clock import ClockTimer, WallClock
from holdfast.service.problems import (
    Bug,
    Denied,
    Exhausted,
    Invalid,
    NotNow,
    Problem,
    TooLate,
    Unavailable,
)
from holdfast.types import EnvironmentInfo

#: Connects to a sandbox: `holdfast.client.opening.open_exec`.
Connect = Callable[[str], Awaitable[ExecApi]]


class _PooledConnection:
    """One connection and the number of its users."""

    def __init__(self, address: str, opening: asyncio.Task[ExecApi]) -> None:
        self.address = address
        self.opening = opening
        self.users = 0
        self.last_used = 0.0
        #: Gets no new users; closed after the last user leaves.
        self.retired = False
        self.info: asyncio.Task[EnvironmentInfo] | None = None


class SandboxConnections:
    """The connections of this replica."""

    def __init__(
        self, connect: Connect, clock: WallClock, *, limit: int = 256, idle_seconds: float = 300.0
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._limit = limit
        self._idle_seconds = idle_seconds
        self._connections: dict[str, _PooledConnection] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._sweep: ClockTimer | None = None
        self._closed = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses with a connection."""
        return tuple(self._connections)

    def use(self, address: str) -> AbstractAsyncContextManager[ExecApi]:
        """Return a context with the sandbox that converts its errors to `Problem`s."""
        return _Use(self, address)

    def hold(self, address: str) -> AbstractAsyncContextManager[ExecApi]:
        """Return a context with the sandbox that leaves its errors as they are."""
        return _Hold(self, address)

    async def enter(self, address: str) -> tuple[_PooledConnection, ExecApi]:
        """Add a user of the connection. `leave` must be called once."""
        connection = self._connection(address)
        connection.users += 1
        if _has_result(connection.opening):
            return connection, connection.opening.result()
        try:
            # The cancellation of one caller must not cancel the connection of the others.
            return connection, await asyncio.shield(connection.opening)
        except BaseException as error:
            if isinstance(error, errors.HoldfastError):
                self._retire(connection)
            self.leave(connection, error)
            raise

    def leave(self, connection: _PooledConnection, error: BaseException | None) -> None:
        if isinstance(error, errors.TransportError | errors.SandboxGone):
            # The connection has failed to reconnect: the next user gets a new one, perhaps to a new sandbox at the
            # same address.
            self._retire(connection)
        connection.users -= 1
        connection.last_used = self._clock.time()
        if connection.users == 0:
            self._unused(connection)

    async def info(self, address: str) -> EnvironmentInfo:
        """Return the features of the sandbox, queried once for each connection."""
        known = self._connections.get(address)
        if known is not None and (info := known.info) is not None and _has_result(info):
            return info.result()
        async with self.hold(address) as api:
            connection = self._connections.get(address)
            if connection is None or connection.retired:
                return await api.info()
            if connection.info is None or (connection.info.done() and not _has_result(connection.info)):
                connection.info = asyncio.ensure_future(_info(api))
            return await asyncio.shield(connection.info)

    def retire(self, address: str) -> None:
        """Close the connection to a sandbox that is removed, after its last user."""
        if (connection := self._connections.get(address)) is not None:
            self._retire(connection)

    async def aclose(self) -> None:
        """Close all connections. Processes in the sandboxes continue."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._connections.values()):
            self._retire(connection)
            self._close(connection)
        while self._closing:
            await asyncio.wait(self._closing)

    def _connection(self, address: str) -> _PooledConnection:
        if self._closed:
            raise errors.ShuttingDown("the service is stopping")
        connection = self._connections.get(address)
        if connection is None:
            self._make_room(address)
            connection = _PooledConnection(address, asyncio.ensure_future(self._connect(address)))
            # Callers get the failure; without callers it must not be reported as never retrieved.
            connection.opening.add_done_callback(lambda opening: opening.cancelled() or opening.exception())
            self._connections[address] = connection
        return connection

    def _make_room(self, address: str) -> None:
        if len(self._connections) < self._limit:
            return
        unused = [connection for connection in self._connections.values() if not connection.users]
        if not unused:
            raise Exhausted(
                f"sandbox {address!r}: the service has connections to {len(self._connections)} others, all in use "
                "(max_sandboxes)",
                reason="TOO_MANY_SANDBOXES",
            )
        oldest = min(unused, key=lambda connection: connection.last_used)
        self._retire(oldest)

    def _retire(self, connection: _PooledConnection) -> None:
        connection.retired = True
        if self._connections.get(connection.address) is connection:
            del self._connections[connection.address]
        if connection.users == 0:
            self._close(connection)

    def _unused(self, connection: _PooledConnection) -> None:
        if connection.retired:
            self._close(connection)
        elif self._sweep is None and not self._closed and self._idle_seconds > 0:
            self._sweep = self._clock.call_later(self._idle_seconds, self._close_idle)

    def _close_idle(self) -> None:
        self._sweep = None
        due = self._clock.time() - self._idle_seconds
        waiting = False
        for connection in list(self._connections.values()):
            # The sessions of `inprocess` would end with the connection.
            if connection.users or connection.address == "inprocess":
                continue
            if connection.last_used <= due:
                self._retire(connection)
            else:
                waiting = True
        if waiting and not self._closed:
            self._sweep = self._clock.call_later(self._idle_seconds, self._close_idle)

    def _close(self, connection: _PooledConnection) -> None:
        task = asyncio.ensure_future(_close(connection))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class _Hold:
    """The context of `hold`; a class, because a generator costs more, and every call has several of these."""

    def __init__(self, pool: SandboxConnections, address: str) -> None:
        self._pool = pool
        self._address = address

    async def __aenter__(self) -> ExecApi:
        self._connection, api = await self._pool.enter(self._address)
        return api

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.leave(self._connection, error)


class _Use(_Hold):
    async def __aenter__(self) -> ExecApi:
        try:
            return await super().__aenter__()
        except Problem:
            raise
        except errors.HoldfastError as error:
            raise problem_of(error, self._address) from error

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        if isinstance(error, errors.HoldfastError) and not isinstance(error, Problem):
            raise problem_of(error, self._address) from error


def _has_result(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def _info(api: ExecApi) -> EnvironmentInfo:
    return await api.info()


async def _close(connection: _PooledConnection) -> None:
    if not connection.opening.done():
        connection.opening.cancel()
    await asyncio.wait([connection.opening])
    if connection.info is not None and not connection.info.done():
        connection.info.cancel()
    if not connection.opening.cancelled() and connection.opening.exception() is None:
        await connection.opening.result().aclose()


def is_gone(error: BaseException) -> bool:
    """Return whether an error means that the session is lost, and not only unreachable."""
    return isinstance(error, errors.SandboxGone | errors.UnknownTerminal | errors.UnknownShell)


def problem_of(error: errors.HoldfastError, address: str = "") -> Problem:
    """Return the `Problem` for an error of a sandbox."""
    text = error.message
    match error:
        case Problem():
            return error
        case errors.UnknownTerminal() | errors.UnknownShell() | errors.UnknownProcess():
            return NotNow(f"the session is no longer in its sandbox: {text}", reason="SESSION_LOST")
        case errors.TerminalClosed() | errors.ShellClosed() | errors.StdinClosed():
            return NotNow(text, reason="SESSION_CLOSED")
        case errors.CwdNotFound():
            return Invalid(text, reason="CWD_NOT_FOUND", field="initial_cwd")
        case errors.CommandNotFound() | errors.NotExecutable():
            return Invalid(text, reason="SHELL_NOT_FOUND", field="shell")
        case errors.TimeoutError():
            return TooLate(text, reason="TIMED_OUT")
        case errors.LimitReached() | errors.ResourceExhausted():
            return Exhausted(f"sandbox {address!r}: {text}", reason="SANDBOX_EXHAUSTED", retry_after=1.0)
        case errors.PermissionRefused() | errors.Forbidden():
            return Denied(f"sandbox {address!r}: {text}", reason="SANDBOX_REFUSED")
        case errors.SandboxGone():
            return Unavailable(text, reason="SANDBOX_GONE")
        case errors.TransportError() | errors.ShuttingDown() | errors.Unauthorized():
            return Unavailable(
                f"sandbox {address!r} is unreachable: {text}", reason="SANDBOX_UNREACHABLE", retry_after=1.0
            )
        case errors.SandboxError() if not isinstance(error, errors.InternalError):
            # No space for the server, a read-only root, a missing user: a retry does not help.
            return NotNow(f"sandbox {address!r}: {text}", reason="SANDBOX_UNUSABLE")
        case errors.CallerError() if not isinstance(error, errors.MethodNotFound):
            return Invalid(text, reason="INVALID_REQUEST")
        case _:
            return Bug(f"sandbox {address!r}: {text}", reason="INTERNAL")
