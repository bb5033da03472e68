"""The blocking `Sandbox` and `UnifiedExec`, and `connect`."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Literal, ParamSpec, overload

from holdfast.client import exec_remote, host_call, opening, process, sandbox
from holdfast.client.defaults import Path, StrPath
from holdfast.client.endings import Endings
from holdfast.client.files.watch import DirectoryEvents
from holdfast.client.tools import unified_exec
from holdfast.sync.facade import (
    Blocking,
    Closing,
    LoopThread,
    ReturningHandle,
    Stream,
    Streaming,
    next_item,
    read_in_threads,
)
from holdfast.sync.handles import BlockingHandler, ExecRemoteProcess, HostService, Process, Shell, Terminal
from holdfast.types import WatchEvent


class Sandbox(Closing[sandbox.Sandbox]):
    """`holdfast.Sandbox`, blocking, for use from any number of threads.

    `connect` and `create` return one. Leaving its `with` block, or `close`, closes it.
    """

    def __init__(
        self,
        loop: LoopThread,
        inner: sandbox.Sandbox,
        context: AbstractAsyncContextManager[sandbox.Sandbox] | None = None,
        *,
        owns_loop: bool = True,
    ) -> None:
        super().__init__(loop, inner)
        self._context = context
        self._owns_loop = owns_loop

    @property
    def asynchronous(self) -> sandbox.Sandbox:
        """The same sandbox for coroutines; they run in its `loop`, a thread of this object."""
        return self._inner

    def close(self) -> None:
        """Close the connection, and remove a sandbox that `create` made. Closing twice is no error."""
        context, self._context = self._context, None
        try:
            if context is not None:
                self._loop.run(context.__aexit__(None, None, None))
        finally:
            if self._owns_loop:
                self._loop.close()

    start = ReturningHandle(sandbox.Sandbox.start, Process)
    process = ReturningHandle(sandbox.Sandbox.process, Process)
    shell = ReturningHandle(sandbox.Sandbox.shell, Shell)
    attach_shell = ReturningHandle(sandbox.Sandbox.attach_shell, Shell)
    open_shell = attach_shell
    terminal = ReturningHandle(sandbox.Sandbox.terminal, Terminal)
    attach_terminal = ReturningHandle(sandbox.Sandbox.attach_terminal, Terminal)
    open_terminal = attach_terminal
    exec = Blocking(sandbox.Sandbox.exec)
    read_file = Blocking(sandbox.Sandbox.read_file)
    read_text = Blocking(sandbox.Sandbox.read_text)
    open_read = Streaming(sandbox.Sandbox.open_read)
    write_file = Blocking(sandbox.Sandbox.write_file)
    edit = Blocking(sandbox.Sandbox.edit)
    apply_patch = Blocking(sandbox.Sandbox.apply_patch)
    list_dir = Blocking(sandbox.Sandbox.list_dir)
    stat = Blocking(sandbox.Sandbox.stat)
    real_path = Blocking(sandbox.Sandbox.real_path)
    exists = Blocking(sandbox.Sandbox.exists)
    remove = Blocking(sandbox.Sandbox.remove)
    make_dir = Blocking(sandbox.Sandbox.make_dir)
    move = Blocking(sandbox.Sandbox.move)
    copy = Blocking(sandbox.Sandbox.copy)
    upload = Blocking(sandbox.Sandbox.upload)
    download = Blocking(sandbox.Sandbox.download)
    wait_for_port = Blocking(sandbox.Sandbox.wait_for_port)
    info = Blocking(sandbox.Sandbox.info)
    status = Blocking(sandbox.Sandbox.status)
    usage = Blocking(sandbox.Sandbox.usage)

    def processes(self) -> list[Process]:
        """Handles on all processes: running ones, and ended ones that are still retained."""
        return [Process(self._loop, one) for one in self._loop.run(self._inner.processes())]

    def ended(self) -> Iterator[Process]:
        """The processes that end from this call on; each step waits for the next. See `holdfast.Sandbox.ended`."""

        async def begin() -> Endings:
            return self._inner.ended()

        endings = self._loop.run(begin())
        return (Process(self._loop, next_item(self._loop, endings)) for _ in itertools.count())

    def shells(self) -> list[Shell]:
        """Handles on all shells: open ones, and the last ones that closed."""
        return [Shell(self._loop, one) for one in self._loop.run(self._inner.shells())]

    def terminals(self) -> list[Terminal]:
        """Handles on all terminals: open ones, and closed ones that are still retained."""
        return [Terminal(self._loop, one) for one in self._loop.run(self._inner.terminals())]

    @contextmanager
    def offer(self, name: str, handler: BlockingHandler) -> Iterator[HostService]:
        """Offer a service to programs in the sandbox, for the length of a `with` block.

        `handler` runs in a thread for each call. The thread of a cancelled call is not interrupted.
        """

        async def answer(method: str, body: bytes) -> host_call.Answer:
            answered = await asyncio.to_thread(handler, method, body)
            return answered if isinstance(answered, bytes) else read_in_threads(answered)

        async def begin() -> host_call.HostService:
            offered = self._inner.offer(name, answer)
            await offered.start()
            return offered

        offered = self._loop.run(begin())
        try:
            yield HostService(self._loop, offered)
        finally:
            self._loop.run(offered.aclose())

    @contextmanager
    def watch(
        self, path: Path = ".", *, recursive: bool = False, user: str | None = None
    ) -> Iterator[Stream[WatchEvent]]:
        """The changes in a directory, for a `with` block; see `holdfast.Sandbox.watch`."""

        async def begin() -> DirectoryEvents:
            events = self._inner.watch(path, recursive=recursive, user=user)
            await events.start()
            return events

        with Stream(self._loop, self._loop.run(begin())) as events:
            yield events

    url = Blocking(sandbox.Sandbox.url)

    @contextmanager
    def forward(self, port: int | str, *, local: int = 0) -> Iterator[tuple[str, int]]:
        """Make a port of the sandbox reachable on this machine, for a `with` block."""
        yield from self._opened_port(lambda: self._inner.forward(port, local=local))

    @contextmanager
    def offer_port(self, port: int | str, inside: int | str | None = None) -> Iterator[tuple[str, int]]:
        """Make a port of this machine reachable in the sandbox; see `holdfast.Sandbox.offer_port`."""
        yield from self._opened_port(lambda: self._inner.offer_port(port, inside))

    def _opened_port(
        self, make: Callable[[], AbstractAsyncContextManager[tuple[str, int]]]
    ) -> Iterator[tuple[str, int]]:
        async def begin() -> tuple[AbstractAsyncContextManager[tuple[str, int]], tuple[str, int]]:
            port = make()
            return port, await port.__aenter__()

        port, address = self._loop.run(begin())
        try:
            yield address
        finally:
            self._loop.run(port.__aexit__(None, None, None))

    @overload
    def exec_remote(
        self,
        cmd: Sequence[StrPath],
        options: exec_remote.ExecRemoteOptions | None = None,
        stream: Literal[True] = True,
    ) -> ExecRemoteProcess: ...

    @overload
    def exec_remote(
        self,
        cmd: Sequence[StrPath],
        options: exec_remote.ExecRemoteOptions | None = None,
        *,
        stream: Literal[False],
    ) -> exec_remote.ExecResult: ...

    def exec_remote(
        self, cmd: Sequence[StrPath], options: exec_remote.ExecRemoteOptions | None = None, stream: bool = True
    ) -> ExecRemoteProcess | exec_remote.ExecResult:
        """Start a command at once and iterate over its events, or, with `stream=False`, wait for its result."""
        if not stream:
            return self._loop.run(self._inner.exec_remote(cmd, options, stream=False))

        async def begin() -> exec_remote.ExecRemoteProcess:
            return self._inner.exec_remote(cmd, options)

        return ExecRemoteProcess(self._loop, self._loop.run(begin()))


class UnifiedExec(Closing[unified_exec.UnifiedExec]):
    """`holdfast.UnifiedExec`, blocking. Leaving its `with` block, or `close`, ends the sessions that still run.

    `on_event` is called in the thread of the event loop: it must be short, and cannot use the sandbox.
    """

    def __init__(
        self,
        box: Sandbox,
        on_event: Callable[[unified_exec.UnifiedExecEvent], None] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        max_sessions: int = unified_exec.MAX_SESSIONS,
    ) -> None:
        inner = unified_exec.UnifiedExec(box._inner, on_event, env=env, max_sessions=max_sessions)
        super().__init__(box._loop, inner)

    exec_command = Blocking(unified_exec.UnifiedExec.exec_command)
    write_stdin = Blocking(unified_exec.UnifiedExec.write_stdin)
    call = Blocking(unified_exec.UnifiedExec.call)
    terminate = Blocking(unified_exec.UnifiedExec.terminate)
    close = Blocking(unified_exec.UnifiedExec.aclose)

    def tools(self, format: unified_exec.ToolFormat = "json-schema") -> list[dict[str, Any]]:
        """The definitions of both tools for a request to a model, in the format of its provider."""
        return self._inner.tools(format)

    def sessions(self) -> dict[int, Process]:
        """The processes whose end no call has returned yet, by session id."""

        async def sessions() -> dict[int, process.Process]:
            return self._inner.sessions()

        return {id: Process(self._loop, each) for id, each in self._loop.run(sessions()).items()}


P = ParamSpec("P")


def _blocking(connect: Callable[P, AbstractAsyncContextManager[sandbox.Sandbox]]) -> Callable[P, Sandbox]:
    @functools.wraps(connect)
    def call(*args: P.args, **kwargs: P.kwargs) -> Sandbox:
        return opened(connect(*args, **kwargs))

    return call


#: The sandbox at an address, until `close` or for the length of a `with` block; see `holdfast.connect`.
connect = _blocking(opening.connect)


def opened(context: AbstractAsyncContextManager[sandbox.Sandbox]) -> Sandbox:
    loop = LoopThread()
    try:
        return Sandbox(loop, loop.run(context.__aenter__()), context)
    except BaseException:
        loop.close()
        raise
