"""Holdfast for code without an event loop: the same `Sandbox`, `Process`, `Shell` and `exec_remote`, blocking.

One thread runs one event loop for each `connect`; every call is handed to it and waited for. The methods here are
the asynchronous ones, wrapped: they take the same parameters and raise the same errors.

    with holdfast.sync.connect("local") as box:
        print(box.exec(["uname", "-a"]).stdout)
        for event in box.exec_remote(["make"]):
            ...
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, overload

import msgspec

from holdfast.client import exec_remote, process, sandbox, service, shell, terminal
from holdfast.client.collect import StreamTails
from holdfast.config import ExecServerConfig
from holdfast.errors import InternalError, InvalidRequest
from holdfast.model import (
    CommandEnded,
    OutputChunk,
    OutputGap,
    ProcessInfo,
    ShellState,
    TerminalSize,
    TerminalState,
    TerminalStatus,
)

if TYPE_CHECKING:
    from holdfast.sandboxes.place import Place

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
F = TypeVar("F")
R_co = TypeVar("R_co", covariant=True)


class LoopThread:
    """An event loop in a thread of its own, and how other threads wait for what it does."""

    def __init__(self) -> None:
        ready: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._stopped = threading.Event()
        # A daemon, so that a program which leaves without closing its sandbox can end.
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
        """Run `work` in the loop and wait for it.

        Ctrl-C cancels the work and waits for it to end, so that a command is killed before `KeyboardInterrupt` is
        raised; a second Ctrl-C does not wait.
        """
        if threading.current_thread() is self._thread or self._stopped.is_set():
            work.close()
            raise InvalidRequest(
                "the sandbox is closed" if self._stopped.is_set() else "called from inside its own event loop"
            )
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = self._loop.create_task(work)
            tasks.append(task)
            task.add_done_callback(finish)

        def finish(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                cancelled()
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        def cancelled() -> None:
            done.cancel()
            # `concurrent.futures.wait` does not see a cancelled future before this.
            done.set_running_or_notify_cancel()

        def interrupt() -> None:
            if tasks:
                tasks[0].cancel()
            else:
                # The interrupt came before the work was handed over.
                work.close()
                cancelled()

        try:
            self._loop.call_soon_threadsafe(begin)
            return done.result()
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(interrupt)
            concurrent.futures.wait((done,))
            raise

    def close(self) -> None:
        """End the loop and its thread."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()


class ClosableIterator(Protocol[R_co]):
    """An async iterator that can be left before its end."""

    def __aiter__(self) -> AsyncIterator[R_co]: ...

    def __anext__(self) -> Awaitable[R_co]: ...

    def aclose(self) -> Coroutine[Any, Any, None]: ...


class _Facade(Generic[T]):
    """An asynchronous object, and the loop that it lives in."""

    def __init__(self, loop: LoopThread, inner: T) -> None:
        self._loop = loop
        self._inner = inner


class _Blocking(Generic[P, R]):
    """A coroutine method as a blocking one, with the same parameters."""

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, facade: _Facade[Any], owner: type | None = None) -> Callable[P, R]:
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return facade._loop.run(self._method(facade._inner, *args, **kwargs))

        call.__doc__ = self.__doc__
        return call


class _Giving(Generic[P, T, F]):
    """A coroutine method that returns a handle, as a blocking one that returns the blocking handle."""

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
    """A method that returns an async iterator as one that returns an iterator."""

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


class Stream(_Facade[ClosableIterator[R]], Iterator[R]):
    """An async iterator, blocking. Close it, or leave its `with` block, when not reading to its end."""

    def __next__(self) -> R:
        return _next(self._loop, self._inner)

    def close(self) -> None:
        self._loop.run(self._inner.aclose())

    def __enter__(self) -> Stream[R]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Process(_Facade[process.Process]):
    """`holdfast.Process`, blocking. Leaving its `with` block ends the process."""

    @property
    def id(self) -> str:
        """The key that the caller chose."""
        return self._inner.id

    @property
    def pid(self) -> int:
        """The OS pid inside the sandbox."""
        return self._inner.pid

    @property
    def info(self) -> ProcessInfo:
        """What was known when this handle was made, or last described."""
        return self._inner.info

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

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run(self._inner.__aexit__(kind, error, trace))


class Shell(_Facade[shell.Shell]):
    """`holdfast.Shell`, blocking. Leaving its `with` block closes the shell."""

    @property
    def id(self) -> str:
        """The key that the caller chose."""
        return self._inner.id

    @property
    def pid(self) -> int:
        """The OS pid of the shell when it was last described."""
        return self._inner.pid

    @property
    def cwd(self) -> str:
        """The working directory after the last command that was run here."""
        return self._inner.cwd

    @property
    def state(self) -> ShellState:
        """`idle`, `running` or `closed`, as last heard."""
        return self._inner.state

    def run(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        input: str | bytes | None = None,
        on_output: Callable[[OutputChunk | OutputGap], object] | None = None,
        max_bytes: int = shell.RUN_LIMIT_BYTES,
    ) -> shell.CommandResult:
        """Run a command in the live shell; see `holdfast.Shell.run`.

        `on_output` is called in the thread that called this, and the command waits for it.
        """
        if on_output is None:
            return self._loop.run(
                self._inner.run(command, timeout=timeout, cwd=cwd, env=env, input=input, max_bytes=max_bytes)
            )
        # Called in the loop's thread it could use nothing of this sandbox, and whatever it waits for would hold up
        # everybody else.
        printed = StreamTails(max_bytes)
        with self.stream(command, timeout=timeout, cwd=cwd, env=env, input=input) as events:
            for event in events:
                if isinstance(event, CommandEnded):
                    return shell.CommandResult(
                        stdout_bytes=printed.stdout.value(),
                        stderr_bytes=printed.stderr.value(),
                        truncated=printed.truncated,
                        **msgspec.structs.asdict(event),
                    )
                printed.take(event)
                on_output(event)
        raise InternalError(f"the events of a command in shell {self.id!r} ended without its end")

    stream = _Streaming(shell.Shell.stream)
    start = _Giving(shell.Shell.start, Process)
    interrupt = _Blocking(shell.Shell.interrupt)
    output = _Streaming(shell.Shell.output)
    snapshot = _Blocking(shell.Shell.snapshot)
    describe = _Blocking(shell.Shell.describe)
    close = _Blocking(shell.Shell.close)

    def __enter__(self) -> Shell:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run(self._inner.__aexit__(kind, error, trace))


class Terminal(_Facade[terminal.Terminal]):
    """`holdfast.Terminal`, blocking. Leaving its `with` block closes the terminal."""

    @property
    def id(self) -> str:
        """The key that the caller chose."""
        return self._inner.id

    @property
    def pid(self) -> int:
        """The OS pid of its shell or program."""
        return self._inner.pid

    @property
    def size(self) -> TerminalSize:
        return self._inner.size

    @property
    def status(self) -> TerminalStatus:
        """Everything that was last heard; from the first look on it follows what happens, a moment behind."""

        async def look() -> TerminalStatus:
            return self._inner.status

        return self._loop.run(look())

    @property
    def state(self) -> TerminalState:
        """`RUNNING`, `BUSY`, `IDLE`, `CLOSING`, `CLOSED` or `ERROR`."""
        return self.status.state

    @property
    def prompt(self) -> str | None:
        """The prompt that is shown or was shown last, as text."""
        return self.status.prompt

    @property
    def continuation(self) -> bool:
        """Whether the shell shows a continuation prompt: it asks for the rest of a command."""
        return self.status.continuation

    @property
    def awaiting_input(self) -> bool | None:
        """Whether a program in the foreground, the shell included, is blocked on reading the terminal."""
        return self.status.awaiting_input

    describe = _Blocking(terminal.Terminal.describe)
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

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run(self._inner.__aexit__(kind, error, trace))


class ExecRemoteProcess(_Facade[exec_remote.ExecRemoteProcess], Iterator[exec_remote.ExecRemoteEvent]):
    """`holdfast.ExecRemoteProcess`, blocking: iterate over it once."""

    @property
    def pid(self) -> int | None:
        """The OS pid inside the sandbox; None until the command has started."""
        return self._inner.pid

    @property
    def events(self) -> ExecRemoteProcess:
        """The events, as an iterator."""
        return self

    def __next__(self) -> exec_remote.ExecRemoteEvent:
        return _next(self._loop, self._inner)

    write_stdin = _Blocking(exec_remote.ExecRemoteProcess.write_stdin)
    close_stdin = _Blocking(exec_remote.ExecRemoteProcess.close_stdin)
    kill = _Blocking(exec_remote.ExecRemoteProcess.kill)


#: A handler that blocks: it runs in a thread, and its iterator, if it returns one, is read there too.
BlockingHandler = Callable[[str, bytes], bytes | Iterable[bytes]]


class HostService(_Facade[service.HostService]):
    """`holdfast.client.service.HostService`, blocking."""

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def instance(self) -> str:
        """What programs inside must know in order to call it."""
        return self._inner.instance

    wait = _Blocking(service.HostService.wait)


async def _read_in_threads(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    iterator = iter(pieces)
    while (piece := await asyncio.to_thread(next, iterator, None)) is not None:
        yield piece


class Sandbox(_Facade[sandbox.Sandbox]):
    """`holdfast.Sandbox`, blocking. It may be used from several threads."""

    start = _Giving(sandbox.Sandbox.start, Process)
    process = _Giving(sandbox.Sandbox.process, Process)
    shell = _Giving(sandbox.Sandbox.shell, Shell)
    open_shell = _Giving(sandbox.Sandbox.open_shell, Shell)
    terminal = _Giving(sandbox.Sandbox.terminal, Terminal)
    open_terminal = _Giving(sandbox.Sandbox.open_terminal, Terminal)
    exec = _Blocking(sandbox.Sandbox.exec)
    read_file = _Blocking(sandbox.Sandbox.read_file)
    read_text = _Blocking(sandbox.Sandbox.read_text)
    open_read = _Streaming(sandbox.Sandbox.open_read)
    write_file = _Blocking(sandbox.Sandbox.write_file)
    list_dir = _Blocking(sandbox.Sandbox.list_dir)
    stat = _Blocking(sandbox.Sandbox.stat)
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
        """Handles on all processes: those that run, and those that ended and are still kept."""
        return [Process(self._loop, one) for one in self._loop.run(self._inner.processes())]

    def shells(self) -> list[Shell]:
        """Handles on all shells: those that are open, and the last ones that closed."""
        return [Shell(self._loop, one) for one in self._loop.run(self._inner.shells())]

    def terminals(self) -> list[Terminal]:
        """Handles on all terminals: those that are open, and those that closed and are still kept."""
        return [Terminal(self._loop, one) for one in self._loop.run(self._inner.terminals())]

    @contextmanager
    def offer(self, name: str, handler: BlockingHandler) -> Iterator[HostService]:
        """Offer a service to programs in the sandbox, for the length of a `with` block.

        `handler` runs in a thread for each call. One that is called off is not interrupted: it goes on to its end.
        """

        async def answer(method: str, body: bytes) -> service.Answer:
            answered = await asyncio.to_thread(handler, method, body)
            return answered if isinstance(answered, bytes) else _read_in_threads(answered)

        async def begin() -> service.HostService:
            offered = self._inner.offer(name, answer)
            await offered.start()
            return offered

        offered = self._loop.run(begin())
        try:
            yield HostService(self._loop, offered)
        finally:
            self._loop.run(offered.aclose())

    @overload
    def exec_remote(
        self,
        cmd: Sequence[str],
        options: exec_remote.ExecRemoteOptions | None = None,
        stream: Literal[True] = True,
    ) -> ExecRemoteProcess: ...

    @overload
    def exec_remote(
        self,
        cmd: Sequence[str],
        options: exec_remote.ExecRemoteOptions | None = None,
        *,
        stream: Literal[False],
    ) -> exec_remote.ExecResult: ...

    def exec_remote(
        self, cmd: Sequence[str], options: exec_remote.ExecRemoteOptions | None = None, stream: bool = True
    ) -> ExecRemoteProcess | exec_remote.ExecResult:
        """Start a command at once and iterate over its events, or, with `stream=False`, wait for its result."""
        if not stream:
            return self._loop.run(self._inner.exec_remote(cmd, options, stream=False))

        async def begin() -> exec_remote.ExecRemoteProcess:
            return self._inner.exec_remote(cmd, options)

        return ExecRemoteProcess(self._loop, self._loop.run(begin()))


@contextmanager
def connect(
    address: str | Sequence[str] | Place,
    *,
    token: str | None = None,
    config: ExecServerConfig | None = None,
    reconnect_deadline: float = sandbox.RECONNECT_DEADLINE,
    max_concurrent_execs: int = sandbox.MAX_CONCURRENT_EXECS,
    **options: Any,
) -> Iterator[Sandbox]:
    """The sandbox at `address`, for the length of a `with` block; see `holdfast.connect`."""
    loop = LoopThread()
    try:
        way = sandbox.connect(
            address,
            token=token,
            config=config,
            reconnect_deadline=reconnect_deadline,
            max_concurrent_execs=max_concurrent_execs,
            **options,
        )
        box = loop.run(way.__aenter__())
        try:
            yield Sandbox(loop, box)
        finally:
            loop.run(way.__aexit__(None, None, None))
    finally:
        loop.close()
