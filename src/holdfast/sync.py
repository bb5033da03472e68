"""Holdfast for code without an event loop: the same `Sandbox`, `Process`, `Shell`, `Fleet` and `Pool`, blocking.

One thread runs one event loop for each sandbox, fleet or pool; every call runs there while the calling thread
waits. The methods wrap the asynchronous ones: they have the same parameters and raise the same errors.

    with holdfast.sync.connect("local") as box:
        print(box.exec(["uname", "-a"]).stdout)
        for event in box.exec_remote(["make"]):
            ...

In a notebook, where no block spans two cells, use `box = holdfast.sync.connect("local")` and `box.close()`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import itertools
import threading
import weakref
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, contextmanager
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    overload,
)

from holdfast.client import exec_remote, host_call, process, sandbox, shell, terminal
from holdfast.client.collect import StreamTails
from holdfast.client.defaults import Path, StrPath
from holdfast.client.endings import Endings
from holdfast.client.files.watch import DirectoryEvents
from holdfast.client.loops import run_in
from holdfast.client.tools import unified_exec
from holdfast.config import ExecServerConfig
from holdfast.errors import HoldfastError, InternalError, InvalidParams, InvalidRequest
from holdfast.fleet import fleet, pool
from holdfast.fleet.engine import Engine, Progress
from holdfast.fleet.record import SandboxRef
from holdfast.fleet.template import Template
from holdfast.types import (
    CommandEnded,
    ExitStatus,
    OutputChunk,
    OutputGap,
    ProcessInfo,
    ShellState,
    StdinMode,
    TerminalSize,
    TerminalState,
    TerminalStatus,
    WatchEvent,
)

if TYPE_CHECKING:
    from holdfast.bridge import agent_bridge
    from holdfast.bridge.function_model import ModelFunction
    from holdfast.bridge.limits import Spent
    from holdfast.bridge.record import CallRecord
    from holdfast.bridge.types import Delta, ModelReply, ModelRequest
    from holdfast.bridge.upstream import Upstream
    from holdfast.sandboxes.target import SandboxTarget
    from holdfast.service.client.blocking import ServiceClient as ServiceClient

    #: A blocking model: it runs in a thread for each request, and so does the iterator that it may return.
    BlockingModelFunction = Callable[[ModelRequest], ModelReply | str | Iterable[Delta | str]]
    BlockingModel = Upstream | ModelFunction | BlockingModelFunction

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
F = TypeVar("F")
R_co = TypeVar("R_co", covariant=True)


class LoopThread:
    """An event loop in its own thread, and calls into it from other threads."""

    def __init__(self) -> None:
        ready: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._stopped = threading.Event()
        # A daemon, so that a program can exit without closing its sandbox.
        self._thread = threading.Thread(target=self._main, args=(ready,), name="holdfast-sync", daemon=True)
        self._thread.start()
        self._loop = ready.result()

    def _main(self, ready: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
        async def main() -> None:
            self._stop = asyncio.Event()
            ready.set_result(asyncio.get_running_loop())
            await self._stop.wait()

        asyncio.run(main())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop and wait for its result; see `run_in`."""
        if self._stopped.is_set():
            work.close()
            raise InvalidRequest("the sandbox is closed")
        return run_in(self._loop, work)

    @property
    def closed(self) -> bool:
        return self._stopped.is_set()

    def close(self) -> None:
        """Stop the loop and its thread."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()


class ClosableIterator(Protocol[R_co]):
    """An async iterator that can be closed before its end."""

    def __aiter__(self) -> AsyncIterator[R_co]: ...

    def __anext__(self) -> Awaitable[R_co]: ...

    def aclose(self) -> Coroutine[Any, Any, None]: ...


class _Facade(Generic[T]):
    """An asynchronous object and its event loop."""

    def __init__(self, loop: LoopThread, inner: T) -> None:
        self._loop = loop
        self._inner = inner


class _Attribute(Generic[R]):
    """An attribute of the asynchronous object, read in the calling thread."""

    def __init__(self, original: object = None) -> None:
        self.__doc__ = original.__doc__ if isinstance(original, property) else None

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, facade: _Facade[Any], owner: type | None = None) -> R:
        value: R = getattr(facade._inner, self._name)
        return value


class _Handle(_Facade[T]):
    """A facade with a `with` block, which ends as that of the asynchronous handle."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        inner: Any = self._inner
        self._loop.run(inner.__aexit__(kind, error, trace))


class _Closing(_Facade[T]):
    """A facade with a `with` block, at the end of which `close` is called."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        facade: Any = self
        facade.close()


class _Blocking(Generic[P, R]):
    """A coroutine method as a blocking method with the same parameters."""

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, facade: _Facade[Any], owner: type | None = None) -> Callable[P, R]:
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return facade._loop.run(self._method(facade._inner, *args, **kwargs))

        call.__doc__ = self.__doc__
        return call


class _ReturningHandle(Generic[P, T, F]):
    """A coroutine method that returns a handle, as a blocking method that returns the blocking handle."""

    def __init__(
        self,
        method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
        facade: Callable[[LoopThread, T], F],
    ) -> None:
        self._method = method
        self._facade = facade
        self.__doc__ = method.__doc__

    def __get__(self, facade: _Facade[Any], owner: type | None = None) -> Callable[P, F]:
        def call(*args: P.args, **kwargs: P.kwargs) -> F:
            return self._facade(facade._loop, facade._loop.run(self._method(facade._inner, *args, **kwargs)))

        call.__doc__ = self.__doc__
        return call


class _Streaming(Generic[P, R]):
    """A method that returns an async iterator, as one that returns an iterator."""

    def __init__(self, method: Callable[Concatenate[Any, P], ClosableIterator[R]]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, facade: _Facade[Any], owner: type | None = None) -> Callable[P, Stream[R]]:
        def call(*args: P.args, **kwargs: P.kwargs) -> Stream[R]:
            async def begin() -> ClosableIterator[R]:
                return self._method(facade._inner, *args, **kwargs)

            return Stream(facade._loop, facade._loop.run(begin()))

        call.__doc__ = self.__doc__
        return call


def _next(loop: LoopThread, iterator: AsyncIterator[R]) -> R:
    async def step() -> tuple[R, ...]:
        # A future cannot carry StopAsyncIteration, so the end is an empty tuple.
        try:
            return (await anext(iterator),)
        except StopAsyncIteration:
            return ()

    for item in loop.run(step()):
        return item
    raise StopIteration


class Stream(_Closing[ClosableIterator[R]], Iterator[R]):
    """A blocking iterator. Close it, or leave its `with` block, if it is not read to its end."""

    def __next__(self) -> R:
        return _next(self._loop, self._inner)

    def close(self) -> None:
        self._loop.run(self._inner.aclose())


class Process(_Handle[process.Process]):
    """`holdfast.Process`, blocking. Leaving its `with` block ends the process."""

    id = _Attribute[str](process.Process.id)
    pid = _Attribute[int](process.Process.pid)
    info = _Attribute[ProcessInfo]()
    describe = _Blocking(process.Process.describe)
    events = _Streaming(process.Process.events)
    output = _Streaming(process.Process.output)
    read = _Blocking(process.Process.read)
    snapshot = _Blocking(process.Process.snapshot)
    collect = _Blocking(process.Process.collect)
    wait_for_output = _Blocking(process.Process.wait_for_output)
    communicate = _Blocking(process.Process.communicate)
    write = _Blocking(process.Process.write)
    close_stdin = _Blocking(process.Process.close_stdin)
    resize = _Blocking(process.Process.resize)
    signal = _Blocking(process.Process.signal)
    terminate = _Blocking(process.Process.terminate)
    wait = _Blocking(process.Process.wait)
    forget = _Blocking(process.Process.forget)

    def on_exit(self, callback: Callable[[ExitStatus], object]) -> None:
        """Call `callback` with the exit status, in a thread of its own, when the process ends."""
        _at_exit(self._loop, self._inner, callback)


class Shell(_Handle[shell.Shell]):
    """`holdfast.Shell`, blocking. Leaving its `with` block closes the shell."""

    id = _Attribute[str](shell.Shell.id)
    pid = _Attribute[int](shell.Shell.pid)
    cwd = _Attribute[str](shell.Shell.cwd)
    state = _Attribute[ShellState](shell.Shell.state)

    def run(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
        input: str | bytes | None = None,
        stdin: StdinMode = "closed",
        on_output: Callable[[OutputChunk | OutputGap], object] | None = None,
        max_bytes: int = shell.RUN_LIMIT_BYTES,
        silence: float | None = None,
    ) -> shell.CommandResult:
        """Run a command in the live shell; see `holdfast.Shell.run`.

        `on_output` is called in the thread that called this, and the command waits for it.
        """
        if on_output is None:
            return self._loop.run(
                self._inner.run(
                    command,
                    timeout=timeout,
                    cwd=cwd,
                    env=env,
                    input=input,
                    stdin=stdin,
                    max_bytes=max_bytes,
                    silence=silence,
                )
            )
        # In the loop's thread, `on_output` could not use this sandbox, and would block all other calls.
        printed = StreamTails(max_bytes)
        with self.stream(
            command, timeout=timeout, cwd=cwd, env=env, input=input, stdin=stdin, silence=silence
        ) as events:
            for event in events:
                if isinstance(event, CommandEnded):
                    return shell.command_result(printed, event)
                printed.take(event)
                on_output(event)
        raise InternalError(f"the events of a command in shell {self.id!r} ended without its end")

    stream = _Streaming(shell.Shell.stream)
    write = _Blocking(shell.Shell.write)
    close_stdin = _Blocking(shell.Shell.close_stdin)
    start = _ReturningHandle(shell.Shell.start, Process)
    interrupt = _Blocking(shell.Shell.interrupt)
    output = _Streaming(shell.Shell.output)
    snapshot = _Blocking(shell.Shell.snapshot)
    describe = _Blocking(shell.Shell.describe)
    close = _Blocking(shell.Shell.close)


class Terminal(_Handle[terminal.Terminal]):
    """`holdfast.Terminal`, blocking. Leaving its `with` block closes the terminal."""

    id = _Attribute[str](terminal.Terminal.id)
    pid = _Attribute[int](terminal.Terminal.pid)
    size = _Attribute[TerminalSize](terminal.Terminal.size)
    status = _Attribute[TerminalStatus](terminal.Terminal.status)
    state = _Attribute[TerminalState](terminal.Terminal.state)
    prompt = _Attribute[str | None](terminal.Terminal.prompt)
    continuation = _Attribute[bool](terminal.Terminal.continuation)
    awaiting_input = _Attribute[bool | None](terminal.Terminal.awaiting_input)
    describe = _Blocking(terminal.Terminal.describe)
    watch = _Blocking(terminal.Terminal.watch)
    send = _Blocking(terminal.Terminal.send)
    send_keys = _Blocking(terminal.Terminal.send_keys)
    paste = _Blocking(terminal.Terminal.paste)
    control = _Blocking(terminal.Terminal.control)
    signal = _Blocking(terminal.Terminal.signal)
    resize = _Blocking(terminal.Terminal.resize)
    run = _Blocking(terminal.Terminal.run)
    wait_until_idle = _Blocking(terminal.Terminal.wait_until_idle)
    wait_until_awaiting_input = _Blocking(terminal.Terminal.wait_until_awaiting_input)
    expect = _Blocking(terminal.Terminal.expect)
    wait = _Blocking(terminal.Terminal.wait)
    read = _Blocking(terminal.Terminal.read)
    events = _Streaming(terminal.Terminal.events)
    output = _Streaming(terminal.Terminal.output)
    screen = _Blocking(terminal.Terminal.screen)
    redraw = _Blocking(terminal.Terminal.redraw)
    recording = _Blocking(terminal.Terminal.recording)
    close = _Blocking(terminal.Terminal.close)
    release = _Blocking(terminal.Terminal.release)


class ExecRemoteProcess(_Facade[exec_remote.ExecRemoteProcess], Iterator[exec_remote.ExecRemoteEvent]):
    """`holdfast.ExecRemoteProcess`, blocking: iterate over it once."""

    pid = _Attribute[int | None](exec_remote.ExecRemoteProcess.pid)
    id = _Attribute[str](exec_remote.ExecRemoteProcess.id)

    @property
    def events(self) -> ExecRemoteProcess:
        """The events, as an iterator."""
        return self

    def __next__(self) -> exec_remote.ExecRemoteEvent:
        return _next(self._loop, self._inner)

    started = _Blocking(exec_remote.ExecRemoteProcess.started)
    write_stdin = _Blocking(exec_remote.ExecRemoteProcess.write_stdin)
    close_stdin = _Blocking(exec_remote.ExecRemoteProcess.close_stdin)
    terminate = _Blocking(exec_remote.ExecRemoteProcess.terminate)
    kill = terminate

    def on_exit(self, callback: Callable[[ExitStatus], object]) -> None:
        """Call `callback` with the exit status, in a thread of its own, when the command ends."""
        _at_exit(self._loop, self._inner, callback)


def _at_exit(
    loop: LoopThread,
    ended: process.Process | exec_remote.ExecRemoteProcess,
    callback: Callable[[ExitStatus], object],
) -> None:
    async def begin() -> None:
        ended.on_exit(lambda status: asyncio.to_thread(callback, status))

    loop.run(begin())


#: A blocking handler: it runs in a thread, and so does an iterator that it returns.
BlockingHandler = Callable[[str, bytes], bytes | Iterable[bytes]]


class HostService(_Facade[host_call.HostService]):
    """`holdfast.client.host_call.HostService`, blocking."""

    name = _Attribute[str]()
    instance = _Attribute[str]()
    failed = _Attribute[HoldfastError | None](host_call.HostService.failed)
    wait = _Blocking(host_call.HostService.wait)


async def _read_in_threads(pieces: Iterable[T]) -> AsyncIterator[T]:
    iterator = iter(pieces)
    while (piece := await asyncio.to_thread(next, iterator, None)) is not None:
        yield piece


class Sandbox(_Closing[sandbox.Sandbox]):
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

    start = _ReturningHandle(sandbox.Sandbox.start, Process)
    process = _ReturningHandle(sandbox.Sandbox.process, Process)
    shell = _ReturningHandle(sandbox.Sandbox.shell, Shell)
    attach_shell = _ReturningHandle(sandbox.Sandbox.attach_shell, Shell)
    open_shell = attach_shell
    terminal = _ReturningHandle(sandbox.Sandbox.terminal, Terminal)
    attach_terminal = _ReturningHandle(sandbox.Sandbox.attach_terminal, Terminal)
    open_terminal = attach_terminal
    exec = _Blocking(sandbox.Sandbox.exec)
    read_file = _Blocking(sandbox.Sandbox.read_file)
    read_text = _Blocking(sandbox.Sandbox.read_text)
    open_read = _Streaming(sandbox.Sandbox.open_read)
    write_file = _Blocking(sandbox.Sandbox.write_file)
    edit = _Blocking(sandbox.Sandbox.edit)
    apply_patch = _Blocking(sandbox.Sandbox.apply_patch)
    list_dir = _Blocking(sandbox.Sandbox.list_dir)
    stat = _Blocking(sandbox.Sandbox.stat)
    real_path = _Blocking(sandbox.Sandbox.real_path)
    exists = _Blocking(sandbox.Sandbox.exists)
    remove = _Blocking(sandbox.Sandbox.remove)
    make_dir = _Blocking(sandbox.Sandbox.make_dir)
    move = _Blocking(sandbox.Sandbox.move)
    copy = _Blocking(sandbox.Sandbox.copy)
    upload = _Blocking(sandbox.Sandbox.upload)
    download = _Blocking(sandbox.Sandbox.download)
    wait_for_port = _Blocking(sandbox.Sandbox.wait_for_port)
    info = _Blocking(sandbox.Sandbox.info)
    status = _Blocking(sandbox.Sandbox.status)
    usage = _Blocking(sandbox.Sandbox.usage)

    def processes(self) -> list[Process]:
        """Handles on all processes: running ones, and ended ones that are still retained."""
        return [Process(self._loop, one) for one in self._loop.run(self._inner.processes())]

    def ended(self) -> Iterator[Process]:
        """The processes that end from this call on; each step waits for the next. See `holdfast.Sandbox.ended`."""

        async def begin() -> Endings:
            return self._inner.ended()

        endings = self._loop.run(begin())
        return (Process(self._loop, _next(self._loop, endings)) for _ in itertools.count())

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
            return answered if isinstance(answered, bytes) else _read_in_threads(answered)

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

    url = _Blocking(sandbox.Sandbox.url)

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


class UnifiedExec(_Closing[unified_exec.UnifiedExec]):
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

    exec_command = _Blocking(unified_exec.UnifiedExec.exec_command)
    write_stdin = _Blocking(unified_exec.UnifiedExec.write_stdin)
    call = _Blocking(unified_exec.UnifiedExec.call)
    terminate = _Blocking(unified_exec.UnifiedExec.terminate)
    close = _Blocking(unified_exec.UnifiedExec.aclose)

    def tools(self, format: unified_exec.ToolFormat = "json-schema") -> list[dict[str, Any]]:
        """The definitions of both tools for a request to a model, in the format of its provider."""
        return self._inner.tools(format)

    def sessions(self) -> dict[int, Process]:
        """The processes whose end no call has returned yet, by session id."""

        async def sessions() -> dict[int, process.Process]:
            return self._inner.sessions()

        return {id: Process(self._loop, each) for id, each in self._loop.run(sessions()).items()}


# --- the model bridge ------------------------------------------------------------------------------------------


class Bridge(_Facade["agent_bridge.Bridge"]):
    """`holdfast.bridge.Bridge`, for code without an event loop."""

    def __init__(self, loop: LoopThread, inner: agent_bridge.Bridge, held: asyncio.Task[None]) -> None:
        super().__init__(loop, inner)
        self._held = held

    port = _Attribute[int]()
    url = _Attribute[str]()
    env = _Attribute[dict[str, str]]()

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        """The latest ended calls, oldest first."""

        async def calls() -> tuple[CallRecord, ...]:
            return tuple(self._inner.calls)

        return self._loop.run(calls())

    @property
    def spent(self) -> Spent:
        """The total usage of all calls so far."""

        async def spent() -> Spent:
            return self._inner.spent

        return self._loop.run(spent())

    @property
    def failed(self) -> HoldfastError | None:
        """Why the bridge ended before its block: the proxy exited, or the sandbox is lost."""
        error = self._held.exception() if self._held.done() and not self._held.cancelled() else None
        return error if isinstance(error, HoldfastError) else None


@contextmanager
def sandbox_agent_bridge(
    box: Sandbox, model: BlockingModel | Mapping[str, BlockingModel], port: int | None = None, **options: Any
) -> Iterator[Bridge]:
    """Give the programs in `box` a model, for the length of a `with` block; see `holdfast.bridge`.

    A model may be a plain function: it runs in a thread for each request and returns a reply, text or an iterable
    of deltas. `on_call` is called in the thread of the event loop. A thread cannot be interrupted: the error of a
    failed bridge is raised at the end of the block, and until then is in `failed`.
    """
    from holdfast.bridge import agent_bridge

    models = {name: _blocking_model(each) for name, each in model.items()} if isinstance(model, Mapping) else None
    chosen = _blocking_model(model) if models is None else models
    where = agent_bridge.DEFAULT_PORT if port is None else port
    leave = asyncio.Event()

    async def hold(ready: asyncio.Future[agent_bridge.Bridge]) -> None:
        async with agent_bridge.sandbox_agent_bridge(box._inner, chosen, where, **options) as opened:
            ready.set_result(opened)
            await leave.wait()

    async def begin() -> Bridge:
        ready: asyncio.Future[agent_bridge.Bridge] = asyncio.get_running_loop().create_future()
        held = asyncio.create_task(hold(ready))
        try:
            await asyncio.wait((held, ready), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            held.cancel()
            await asyncio.wait((held,))
            raise
        if not ready.done():
            held.result()
        return Bridge(box._loop, ready.result(), held)

    async def end(held: asyncio.Task[None]) -> None:
        leave.set()
        await asyncio.wait((held,))
        held.result()

    bridge = box._loop.run(begin())
    try:
        yield bridge
    finally:
        box._loop.run(end(bridge._held))


def _blocking_model(model: Any) -> Any:
    """The model for the asynchronous bridge: a plain function runs in a thread, anything else is unchanged."""
    from holdfast.bridge.types import ModelReply

    if not callable(model):
        return model

    async def answer(request: Any) -> Any:
        given = await asyncio.to_thread(model, request)
        if inspect.isawaitable(given):
            given = await given
        if isinstance(given, str | ModelReply | AsyncIterable) or not isinstance(given, Iterable):
            return given
        return _read_in_threads(given)

    return answer


# --- opening a sandbox -----------------------------------------------------------------------------------------


def connect(
    address: str | Sequence[str] | SandboxTarget,
    *,
    token: str | None = None,
    config: ExecServerConfig | None = None,
    reconnect_deadline: float = sandbox.RECONNECT_DEADLINE,
    max_concurrent_execs: int = sandbox.MAX_CONCURRENT_EXECS,
    user: str | None = None,
    cwd: StrPath | None = None,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> Sandbox:
    """The sandbox at `address`, until `close` or for the length of a `with` block; see `holdfast.connect`."""
    return _opened(
        sandbox.connect(
            address,
            token=token,
            config=config,
            reconnect_deadline=reconnect_deadline,
            max_concurrent_execs=max_concurrent_execs,
            user=user,
            cwd=cwd,
            env=env,
            **options,
        )
    )


def _opened(context: AbstractAsyncContextManager[sandbox.Sandbox]) -> Sandbox:
    loop = LoopThread()
    try:
        return Sandbox(loop, loop.run(context.__aenter__()), context)
    except BaseException:
        loop.close()
        raise


# --- the fleet -------------------------------------------------------------------------------------------------


class FleetSandbox(Sandbox):
    """A `Sandbox` that a fleet made. `ref` is its reference."""

    _inner: fleet.FleetSandbox
    ref = _Attribute[SandboxRef]()


class Fleet(_Closing[fleet.Fleet]):
    """`holdfast.Fleet`, blocking, for use from any number of threads.

    `close`, or the end of its `with` block, closes the connections that `connect` returned. Sandboxes stay.
    `progress` callbacks run in the thread of the event loop.
    """

    def __init__(self, engine: str | Engine, *, max_creates: int = fleet.MAX_CREATES, **options: Any) -> None:
        inner = fleet.Fleet(engine, max_creates=max_creates, **options)
        super().__init__(LoopThread(), inner)
        self._connected: weakref.WeakSet[FleetSandbox] = weakref.WeakSet()
        self._closed = False

    engine = _Attribute[Engine]()
    creating = _Attribute[int]()
    list = _Blocking(fleet.Fleet.list)
    get = _Blocking(fleet.Fleet.get)
    activity = _Blocking(fleet.Fleet.activity)
    extend = _Blocking(fleet.Fleet.extend)
    pause = _Blocking(fleet.Fleet.pause)
    resume = _Blocking(fleet.Fleet.resume)
    remove = _Blocking(fleet.Fleet.remove)
    prune = _Blocking(fleet.Fleet.prune)

    def create(
        self, template: Template | None = None, *, progress: Progress | None = None, **fields: Any
    ) -> SandboxRef:
        """Make a sandbox and return its reference; see `holdfast.Fleet.create`."""
        return self._loop.run(self._inner.create(template, progress=progress, **fields))

    def fork(self, id: str, **fields: Any) -> SandboxRef:
        """Make a sandbox with the files of another one; see `holdfast.Fleet.fork`."""
        return self._loop.run(self._inner.fork(id, **fields))

    def connect(self, id: str, *, reconnect_deadline: float = sandbox.RECONNECT_DEADLINE) -> FleetSandbox:
        """Connect to a sandbox of this fleet, until `close` or for the length of a `with` block."""
        inner = self._loop.run(self._inner.connect(id, reconnect_deadline=reconnect_deadline))
        box = FleetSandbox(self._loop, inner, inner, owns_loop=False)
        self._connected.add(box)
        return box

    @contextmanager
    def block(
        self, template: Template | None = None, *, progress: Progress | None = None, **fields: Any
    ) -> Iterator[FleetSandbox]:
        """A sandbox for the length of a `with` block; see `holdfast.Fleet.block`."""
        with _entered(self._loop, self._inner.block(template, progress=progress, **fields)) as box:
            yield box

    @contextmanager
    def forked(self, id: str, **fields: Any) -> Iterator[FleetSandbox]:
        """A fork for the length of a `with` block; see `holdfast.Fleet.forked`."""
        with _entered(self._loop, self._inner.forked(id, **fields)) as box:
            yield box

    def close(self) -> None:
        """Close the connections to sandboxes and the event loop. Sandboxes stay. Closing twice is no error."""
        if self._closed:
            return
        self._closed = True
        try:
            for box in tuple(self._connected):
                box.close()
            self._loop.run(self._inner.aclose())
        finally:
            self._loop.close()


class Pool(_Closing[pool.Pool]):
    """`holdfast.Pool`, blocking, for use from any number of threads. Open from its construction until `close`."""

    def __init__(
        self,
        engine: str | Engine,
        template: Template | None = None,
        *,
        warm: int = 1,
        max: int = 10,
        name: str | None = None,
        reuse: pool.Reuse = "never",
        shrink_after: float = pool.SHRINK_SECONDS,
        health_interval: float = pool.HEALTH_SECONDS,
        **fields: Any,
    ) -> None:
        inner = pool.Pool(
            engine,
            template,
            warm=warm,
            max=max,
            name=name,
            reuse=reuse,
            shrink_after=shrink_after,
            health_interval=health_interval,
            **fields,
        )
        super().__init__(LoopThread(), inner)
        self._closed = False
        try:
            self._loop.run(inner.__aenter__())
        except BaseException:
            self._loop.close()
            raise

    name = _Attribute[str]()
    template = _Attribute[Template]()
    status = _Attribute[pool.PoolStatus](pool.Pool.status)
    ready = _Blocking(pool.Pool.ready)

    @contextmanager
    def take(self, *, timeout: float = pool.TAKE_SECONDS) -> Iterator[FleetSandbox]:
        """A sandbox for a `with` block; `ResourceExhausted` if none is free within `timeout` seconds."""
        with _entered(self._loop, self._inner.take(timeout=timeout)) as box:
            yield box

    def close(self) -> None:
        """Remove every sandbox of the pool, those in use included. Closing twice is no error."""
        if self._closed:
            return
        self._closed = True
        try:
            self._loop.run(self._inner.aclose())
        finally:
            self._loop.close()


@contextmanager
def _entered(loop: LoopThread, context: AbstractAsyncContextManager[fleet.FleetSandbox]) -> Iterator[FleetSandbox]:
    """The sandbox of an asynchronous block, for the length of a blocking one."""
    inner = loop.run(context.__aenter__())
    try:
        yield FleetSandbox(loop, inner, owns_loop=False)
    finally:
        loop.run(context.__aexit__(None, None, None))


#: Keywords of `holdfast.sandboxes.docker.create` that are not fields of a template.
_CONTAINER_KEYWORDS: Final = frozenset({"name", "pids", "volumes", "read_only", "arguments", "reconnect_deadline"})


@overload
def create(engine: str, template: str, **options: Any) -> Sandbox: ...


@overload
def create(
    engine: str | Engine, template: Template | None = None, *, progress: Progress | None = None, **fields: Any
) -> FleetSandbox: ...


def create(
    engine: str | Engine,
    template: Template | str | None = None,
    *,
    progress: Progress | None = None,
    **fields: Any,
) -> Sandbox:
    """A new sandbox, until `close` or for the length of a `with` block; see `holdfast.create`.

    Deprecated: the image as second argument, and the keywords of `holdfast.sandboxes.docker.create` that are not
    fields of `Template`. They make a container without a record.
    """
    network = fields.get("network")
    named_network = isinstance(network, str) and network not in ("none", "host")
    if engine in ("docker", "podman") and (
        isinstance(template, str) or named_network or _CONTAINER_KEYWORDS & fields.keys()
    ):
        from holdfast.sandboxes import containers

        image = template if isinstance(template, str) else fields.pop("image", "")
        return _opened(containers.create(image, engine="podman" if engine == "podman" else "docker", **fields))
    if isinstance(template, str):
        raise InvalidParams(f"create: {template!r} is not a Template; give an image as image={template!r}")
    loop = LoopThread()
    try:
        context = fleet.create(engine, template, progress=progress, **fields)
        return FleetSandbox(loop, loop.run(context.__aenter__()), context)
    except BaseException:
        loop.close()
        raise


def __getattr__(name: str) -> Any:
    # Imported on first use: the client of the service is made of parts of this module.
    if name == "ServiceClient":
        from holdfast.service.client.blocking import ServiceClient

        return ServiceClient
    raise AttributeError(f"module 'holdfast.sync' has no attribute {name!r}")
