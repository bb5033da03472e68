"""Connections to sandboxes, one for each address, shared by all sessions there; and their errors as `Problem`s.

A connection is opened when it is first needed, closed when nobody has used it for long, and replaced when it failed
for good. This is the one place where what sandboxes say becomes what the service answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType

from holdfast import errors
from holdfast.exec_api import ExecApi
from holdfast.service.clock import Clock, Timer
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

#: Opens the way to a sandbox: `holdfast.client.sandbox.open_exec`.
Connect = Callable[[str], Awaitable[ExecApi]]


class _PooledConnection:
    """One connection and who uses it."""

    def __init__(self, address: str, opening: asyncio.Task[ExecApi]) -> None:
        self.address = address
        self.opening = opening
        self.users = 0
        self.last_used = 0.0
        #: Not given to anybody any more; closed when the last user is done.
        self.retired = False
        self.info: asyncio.Task[EnvironmentInfo] | None = None


class SandboxPool:
    """The sandboxes that this replica talks to."""

    def __init__(self, connect: Connect, clock: Clock, *, limit: int = 256, idle_seconds: float = 300.0) -> None:
        self._connect = connect
        self._clock = clock
        self._limit = limit
        self._idle_seconds = idle_seconds
        self._lines: dict[str, _PooledConnection] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._sweep: Timer | None = None
        self._closed = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where connections lead now."""
        return tuple(self._lines)

    def use(self, address: str) -> AbstractAsyncContextManager[ExecApi]:
        """The sandbox, for one call: what it raises comes out as a `Problem`."""
        return _Use(self, address)

    def hold(self, address: str) -> AbstractAsyncContextManager[ExecApi]:
        """The same with the sandbox's own errors, for whoever has to tell them apart."""
        return _Hold(self, address)

    async def enter(self, address: str) -> tuple[_PooledConnection, ExecApi]:
        """One user more of a line. `leave` must be called once."""
        line = self._line(address)
        line.users += 1
        try:
            # One caller that gives up does not take the connection from the others.
            return line, await asyncio.shield(line.opening)
        except BaseException as error:
            if isinstance(error, errors.HoldfastError):
                self._retire(line)
            self.leave(line, error)
            raise

    def leave(self, line: _PooledConnection, error: BaseException | None) -> None:
        if isinstance(error, errors.TransportError | errors.SandboxGone):
            # It has tried to come back, or cannot: the next user gets a new one, perhaps of a new sandbox at the
            # same address.
            self._retire(line)
        line.users -= 1
        line.last_used = self._clock.time()
        if line.users == 0:
            self._unused(line)

    async def info(self, address: str) -> EnvironmentInfo:
        """What the sandbox is and offers; asked once a connection."""
        async with self.hold(address) as api:
            line = self._lines.get(address)
            if line is None or line.retired:
                return await api.info()
            if line.info is None or (line.info.done() and (line.info.cancelled() or line.info.exception())):
                line.info = asyncio.ensure_future(_info(api))
            return await asyncio.shield(line.info)

    async def aclose(self) -> None:
        """Let go of all of them. What runs in the sandboxes runs on."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for line in list(self._lines.values()):
            self._retire(line)
            self._close(line)
        while self._closing:
            await asyncio.wait(self._closing)

    def _line(self, address: str) -> _PooledConnection:
        if self._closed:
            raise errors.ShuttingDown("the service is stopping")
        line = self._lines.get(address)
        if line is None:
            self._make_room(address)
            line = _PooledConnection(address, asyncio.ensure_future(self._connect(address)))
            # Whoever waits hears of a failure; if nobody does any more, nobody needs to.
            line.opening.add_done_callback(lambda opening: opening.cancelled() or opening.exception())
            self._lines[address] = line
        return line

    def _make_room(self, address: str) -> None:
        if len(self._lines) < self._limit:
            return
        unused = [line for line in self._lines.values() if not line.users]
        if not unused:
            raise Exhausted(
                f"sandbox {address!r}: the service is connected to {len(self._lines)} others, and all are in use: "
                "that is max_sandboxes",
                reason="TOO_MANY_SANDBOXES",
            )
        oldest = min(unused, key=lambda line: line.last_used)
        self._retire(oldest)

    def _retire(self, line: _PooledConnection) -> None:
        line.retired = True
        if self._lines.get(line.address) is line:
            del self._lines[line.address]
        if line.users == 0:
            self._close(line)

    def _unused(self, line: _PooledConnection) -> None:
        if line.retired:
            self._close(line)
        elif self._sweep is None and not self._closed and self._idle_seconds > 0:
            self._sweep = self._clock.call_later(self._idle_seconds, self._swept)

    def _swept(self) -> None:
        self._sweep = None
        due = self._clock.time() - self._idle_seconds
        waiting = False
        for line in list(self._lines.values()):
            # What runs in this process would end with its connection.
            if line.users or line.address == "inprocess":
                continue
            if line.last_used <= due:
                self._retire(line)
            else:
                waiting = True
        if waiting and not self._closed:
            self._sweep = self._clock.call_later(self._idle_seconds, self._swept)

    def _close(self, line: _PooledConnection) -> None:
        task = asyncio.ensure_future(_close(line))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class _Hold:
    """The time for which somebody uses a line; no generator, since every call has some of these."""

    def __init__(self, pool: SandboxPool, address: str) -> None:
        self._pool = pool
        self._address = address

    async def __aenter__(self) -> ExecApi:
        self._line, api = await self._pool.enter(self._address)
        return api

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.leave(self._line, error)


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


async def _info(api: ExecApi) -> EnvironmentInfo:
    return await api.info()


async def _close(line: _PooledConnection) -> None:
    if not line.opening.done():
        line.opening.cancel()
    await asyncio.wait([line.opening])
    if line.info is not None and not line.info.done():
        line.info.cancel()
    if not line.opening.cancelled() and line.opening.exception() is None:
        await line.opening.result().aclose()


def is_gone(error: BaseException) -> bool:
    """Whether what ran there is known to be gone, and not only out of reach."""
    return isinstance(error, errors.SandboxGone | errors.UnknownTerminal | errors.UnknownShell)


def problem_of(error: errors.HoldfastError, address: str = "") -> Problem:
    """What the service answers when a sandbox said this."""
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
                f"sandbox {address!r} cannot be reached: {text}", reason="SANDBOX_UNREACHABLE", retry_after=1.0
            )
        case errors.SandboxError() if not isinstance(error, errors.InternalError):
            # No place for the server, a read-only root, a user that is not there: the sandbox is as it is.
            return NotNow(f"sandbox {address!r}: {text}", reason="SANDBOX_UNUSABLE")
        case errors.CallerError() if not isinstance(error, errors.MethodNotFound):
            return Invalid(text, reason="INVALID_REQUEST")
        case _:
            return Bug(f"sandbox {address!r}: {text}", reason="INTERNAL")
