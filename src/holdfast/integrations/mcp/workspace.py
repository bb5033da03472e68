"""The sandboxes of one connection: its own, and those that it made or forked, each with its commands.

A task for each sandbox opens and closes it, so that no cancelled call leaves one half-open. The end of a connection
ends its commands and removes the sandboxes that were made for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError

from holdfast.client.connection.clean_up import take_error
from holdfast.client.sandbox import Sandbox
from holdfast.client.terminal import Terminal
from holdfast.client.tools.unified_exec import (
    ExecCommandBegin,
    ExecCommandEnd,
    ExecCommandOutputDelta,
    UnifiedExec,
    UnifiedExecEvent,
)
from holdfast.errors import HoldfastError, InvalidParams, LimitReached
from holdfast.integrations.mcp.sources import SandboxSource

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Sandboxes of one connection. An agent that compares attempts needs a few; each may cost gigabytes.
MAX_SANDBOXES: Final = 8
#: A call answers within this time: many clients give up after 60 s.
CALL_SECONDS: Final = 50.0
#: A call waits this long for its sandbox to be made. The making continues, for the next call.
OPEN_SECONDS: Final = 45.0
#: The end of the output that a progress notification shows.
TAIL_CHARACTERS: Final = 200
#: The name of the sandbox that a connection has from the beginning.
MAIN: Final = "main"


class RunningCommand:
    """A command as its first call sees it: its ids, and the end of its output for progress notifications."""

    def __init__(self) -> None:
        self.process_id = ""
        self.tail = ""


#: Set by the call that starts a command. The watcher of a command inherits the context of that call.
starting: ContextVar[RunningCommand] = ContextVar("starting")


class OpenedSandbox:
    """One sandbox, which a task opens and holds until `close`."""

    def __init__(self, name: str, opening: AbstractAsyncContextManager[Sandbox], ids: Iterator[int]) -> None:
        self.name = name
        self.running: dict[int, RunningCommand] = {}
        self.terminals: dict[str, Terminal] = {}
        self._box: Sandbox | None = None
        self._commands: UnifiedExec | None = None
        self._ready = asyncio.Event()
        self._closing = asyncio.Event()
        self._task = asyncio.create_task(self._hold(opening, ids))
        self._task.add_done_callback(take_error)

    async def _hold(self, opening: AbstractAsyncContextManager[Sandbox], ids: Iterator[int]) -> None:
        try:
            async with (
                opening as box,
                UnifiedExec(box, self._note, lifetime="connection", kill_cancelled=True, ids=ids) as commands,
            ):
                self._box, self._commands = box, commands
                self._ready.set()
                await self._closing.wait()
                for terminal in self.terminals.values():
                    await terminal.close(mode="force")
        except HoldfastError as error:
            log.warning("sandbox %s: %s", self.name, error)
            raise
        finally:
            self._ready.set()

    def _note(self, event: UnifiedExecEvent) -> None:
        if isinstance(event, ExecCommandBegin):
            running = self.running[event.session_id] = starting.get()
            running.process_id = event.process_id
        elif isinstance(event, ExecCommandOutputDelta):
            running = self.running[event.session_id]
            running.tail = (running.tail + event.text)[-TAIL_CHARACTERS:]
        elif isinstance(event, ExecCommandEnd):
            del self.running[event.session_id]

    @property
    def state(self) -> str:
        """`ready`, `opening` or `failed`."""
        return "failed" if self._task.done() else "ready" if self._ready.is_set() else "opening"

    @property
    def box(self) -> Sandbox:
        assert self._box is not None
        return self._box

    @property
    def commands(self) -> UnifiedExec:
        assert self._commands is not None
        return self._commands

    async def wait(self, timeout: float = OPEN_SECONDS) -> bool:
        """Wait until the sandbox is open, and return whether it is; its error is raised."""
        try:
            async with asyncio.timeout(timeout):
                await self._ready.wait()
        except TimeoutError:
            return False
        if self._task.done():
            self._task.result()
        return True

    async def close(self) -> None:
        """Close the sandbox; one that is still being made is given up."""
        if not self._ready.is_set():
            self._task.cancel()
        self._closing.set()
        await asyncio.wait((self._task,))


class Workspace:
    """The sandboxes of one connection."""

    def __init__(self, source: SandboxSource) -> None:
        self._source = source
        self._ids = itertools.count(1)
        self._names = (f"s{number}" for number in itertools.count(2))
        self._sandboxes: dict[str, OpenedSandbox] = {}
        self.closed = False

    def sandboxes(self) -> Mapping[str, OpenedSandbox]:
        return self._sandboxes

    def begin(self) -> OpenedSandbox:
        """Begin to open the connection's own sandbox, if that has not begun or has failed."""
        found = self._sandboxes.get(MAIN)
        if found is None or found.state == "failed":
            found = self._open(MAIN, self._source.open())
        return found

    async def opened(self, name: str = "") -> OpenedSandbox:
        """The sandbox `name`, open; without a name the connection's own."""
        opened = self.begin() if name in ("", MAIN) else self._known(name)
        if not await opened.wait():
            raise LimitReached(f"sandbox {opened.name!r} is still being made after {OPEN_SECONDS:g} s; call again")
        return opened

    def with_session(self, session_id: int) -> OpenedSandbox:
        """The sandbox that runs a session of `exec_command`."""
        for opened in self._sandboxes.values():
            if opened.state == "ready" and session_id in opened.commands.sessions():
                return opened
        raise InvalidParams(f"no session {session_id}: it never began, or its end was already returned")

    async def create(self) -> OpenedSandbox:
        """Make another sandbox from the template of the connection's own."""
        self._check_room()
        return await self._opened(self._open(next(self._names), self._source.open()))

    async def fork(self, name: str) -> OpenedSandbox:
        """Make a sandbox with the files of another one."""
        origin = await self.opened(name)
        self._check_room()
        return await self._opened(self._open(next(self._names), self._source.fork(origin.box)))

    async def remove(self, name: str) -> None:
        """Remove a sandbox that `create` or `fork` made."""
        opened = self._known(name)
        if name == MAIN:
            raise InvalidParams(f"sandbox {MAIN!r} lives as long as the connection")
        del self._sandboxes[name]
        await opened.close()

    async def aclose(self) -> None:
        self.closed = True
        sandboxes, self._sandboxes = list(self._sandboxes.values()), {}
        await asyncio.gather(*(opened.close() for opened in sandboxes))

    def _known(self, name: str) -> OpenedSandbox:
        opened = self._sandboxes.get(name)
        if opened is None:
            known = ", ".join(self._sandboxes) or MAIN
            raise InvalidParams(f"no sandbox {name!r}; there are: {known}")
        return opened

    def _check_room(self) -> None:
        for name in [name for name, opened in self._sandboxes.items() if opened.state == "failed"]:
            del self._sandboxes[name]
        if len(self._sandboxes) >= MAX_SANDBOXES:
            raise LimitReached(f"{MAX_SANDBOXES} sandboxes exist already; remove one: {', '.join(self._sandboxes)}")

    def _open(self, name: str, opening: AbstractAsyncContextManager[Sandbox]) -> OpenedSandbox:
        if self.closed:
            raise InvalidParams("the connection has ended")
        opened = self._sandboxes[name] = OpenedSandbox(name, opening, self._ids)
        return opened

    async def _opened(self, opened: OpenedSandbox) -> OpenedSandbox:
        try:
            await opened.wait()
        except HoldfastError:
            self._sandboxes.pop(opened.name, None)
            raise
        return opened


class Workspaces:
    """One workspace for each connection that has a session; one in common for all others.

    Over stdio the process is the connection. Over HTTP, protocol versions until 2025-11-25 have sessions. Requests
    of later ones share the workspace of the server, which its token protects.
    """

    def __init__(self, source: SandboxSource) -> None:
        self.source = source
        self._common = Workspace(source)
        self._tasks: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Close every sandbox at the end of the block."""
        try:
            yield
        finally:
            await asyncio.shield(self._close())

    def begin(self) -> None:
        """Begin to open the sandbox of the common workspace, before its first call."""
        self._common.begin()

    def of(self, ctx: Context[Any, Any]) -> Workspace:
        """The workspace of a request's connection."""
        # The connection holds what is to be closed with it. The SDK has no public name for it (2.3).
        connection = ctx.request_context.session._connection
        if connection.session_id is None:
            return self._common
        found = connection.state.get("holdfast")
        if found is None:
            found = connection.state["holdfast"] = Workspace(self.source)
            # In the background: the SDK abandons a callback after a few seconds, and an engine may need more.
            connection.exit_stack.callback(lambda: self._spawn(found.aclose()))
        assert isinstance(found, Workspace)
        return found

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work of one call, within the time that clients wait.

        The work has a task of its own: the SDK cancels a call again at each of its awaits, and would so interrupt
        the clean-up of the first cancellation.
        """
        task = self._spawn(work)
        try:
            done, _ = await asyncio.wait((task,), timeout=CALL_SECONDS)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            raise ToolError(f"the sandbox did not answer within {CALL_SECONDS:g} s")
        try:
            return task.result()
        except HoldfastError as error:
            raise ToolError(error.message) from error

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(take_error)
        return task

    async def _close(self) -> None:
        try:
            await self._common.aclose()
            if self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            await self.source.aclose()
