"""`exec` runs a command to its end; `exec_remote` starts one at once and streams its output as events.

The iteration ends at `Exited`; a cancelled iteration and a timeout kill the whole tree. All calls go through
`ExecApi`.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import secrets
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Protocol, TypeVar, overload

from holdfast.client.collect import StreamTails, shown
from holdfast.client.command import (
    OUTPUT_LIMIT_BYTES,
    ExecResult as ExecResult,
    StartErrors,
    check_command,
    check_result,
    feed,
    not_started,
    result_of,
    retry_timeouts,
    run_command,
    silence_error,
    start_or_attach,
    start_streaming,
    timeout_error,
)
from holdfast.client.connection.clean_up import clean_up_cancelled
from holdfast.client.defaults import Defaults, StrPath, check_env
from holdfast.client.process import OnExit, call_at_exit, write_pieces
from holdfast.errors import (
    CommandNotFound,
    HoldfastError,
    InvalidRequest,
    NotExecutable,
    SilenceTimeout,
    StdinClosed,
    TimeoutError,
    UnknownProcess,
)
from holdfast.exec_api import EventStream, ExecApi, PolledStream
from holdfast.types import (
    AWAITED_PREFIX,
    EnvPolicy,
    Exited,
    ExitStatus,
    Lifetime,
    OutputChunk,
    OutputGap,
    Overflow,
    ProcessInfo,
    ProcessSpec,
    Struct,
)

T = TypeVar("T")

#: `env` adds to the sandbox's whole environment.
_ADD_TO_ALL: Final = EnvPolicy(inherit="all", ignore_default_excludes=True)


class StdoutChunk(Struct, frozen=True):
    """Text printed on stdout."""

    data: str


class StderrChunk(Struct, frozen=True):
    """Text printed on stderr."""

    data: str


class Completed(Struct, frozen=True):
    """The command ended; `stdout` and `stderr` are all its output, or the most recent 10 MiB of each.

    `omitted_stdout_bytes` and `omitted_stderr_bytes` count the output before that. `truncated`: `lost_bytes` were
    in no event either, because the reader stalled; each gap is an `OutputGap` among the events.
    """

    exit_code: int
    stdout: str
    stderr: str
    truncated: bool = False
    lost_bytes: int = 0
    omitted_stdout_bytes: int = 0
    omitted_stderr_bytes: int = 0
    #: As in `ExecResult`.
    oom: bool = False

    def __repr__(self) -> str:
        return (
            f"Completed(exit_code={self.exit_code}, stdout={shown(self.stdout)}, stderr={shown(self.stderr)}, "
            f"truncated={self.truncated}, lost_bytes={self.lost_bytes})"
        )

    @property
    def success(self) -> bool:
        return self.exit_code == 0


#: An `OutputGap` is output of one stream that was dropped because the reader stalled.
ExecRemoteEvent = StdoutChunk | StderrChunk | OutputGap | Completed


class ExecRemoteOptions(Struct, frozen=True):
    """Options of `exec_remote`."""

    #: Written to stdin, which is then closed.
    input: str | bytes | None = None
    cwd: StrPath | None = None
    #: Additional variables, laid over the sandbox's environment.
    env: dict[str, str] | None = None
    #: How that environment is derived from the sandbox's; None: all of it.
    env_policy: EnvPolicy | None = None
    user: str | None = None
    #: Seconds until the command's whole tree is killed and `TimeoutError` is raised.
    timeout: float | None = None
    #: With `stream=False`: repeat a command that timed out, up to twice. A stream cannot begin again.
    timeout_retry: bool = False
    #: With `stream=False`: count towards `max_concurrent_execs`. A streamed command does not, because it may live
    #: as long as the sandbox.
    concurrency: bool = True
    #: Seconds between polls where output must be polled (`CommandSandbox(channel=False)`). Elsewhere output is
    #: pushed and this has no effect.
    poll_interval: float | None = None
    #: Keep stdin open, after `input`, for `write_stdin`.
    stdin_open: bool = False
    #: `connection`: the server ends the command when this client does not reconnect.
    lifetime: Lifetime = "server"
    #: The behaviour when output is not taken as fast as it is printed.
    overflow: Overflow = "follow"
    #: A name for the command. If the same command has it already, its output is read from the first retained byte,
    #: nothing is started, and `input` is not written again. So a restarted script finds its command.
    id: str | None = None
    #: stderr goes to stdout, in the order in which the two were printed.
    merge_stderr: bool = False
    #: Seconds without output after which its whole tree is killed and `SilenceTimeout` is raised.
    silence: float | None = None
    #: `result`: a command that cannot be started ends with exit code 127 or 126, as in a shell.
    start_errors: StartErrors = "raise"


class Spawn(Protocol):
    """Creates a task and holds a reference until it is done, which the event loop does not."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> asyncio.Task[T]: ...


class ExecRemoteProcess:
    """A command that streams its output; it starts when this object is created.

    Iterate over it, or over `events`, once: text as it is printed, then `Completed`. The iteration raises a failed
    start and a timeout. A cancelled iteration kills the command, then re-raises. The command waits for its reader,
    as on a pipe. If nothing is taken for `reader_stall_seconds`, the sandbox retains the beginning and the latest
    output, 16 MiB of each stream, and an `OutputGap` stands for the rest.
    """

    def __init__(self, api: ExecApi, spec: ProcessSpec, options: ExecRemoteOptions, spawn: Spawn) -> None:
        self._api = api
        self._spec = spec
        self._options = options
        self._spawn = spawn
        self._turn = asyncio.Lock()
        self._printed = StreamTails(OUTPUT_LIMIT_BYTES)
        self._decoders = {"stdout": _decoder(), "stderr": _decoder()}
        self._ready: deque[ExecRemoteEvent] = deque()
        self._finished = False
        self._is_new = True
        self._killed = False
        self._timed_out = False
        self._failure: HoldfastError | None = None
        self._fed = asyncio.Event()
        self._info: ProcessInfo | None = None
        # The iteration raises a failed start; without one, the event loop logs it.
        self._starting = spawn(self._start())
        self._tending = spawn(self._tend())

    async def _start(self) -> EventStream:
        if self._options.id is None:
            self._info, stream = await start_streaming(self._api, self._spec)
        else:
            self._info, stream, self._is_new = await start_or_attach(self._api, self._spec)
        if isinstance(stream, PolledStream):
            stream.poll_interval = self._options.poll_interval
        return stream

    async def _tend(self) -> None:
        """Write the input and enforce the timeout, independently of the iteration."""
        await asyncio.wait((self._starting,))
        if self._info is None:
            return
        timeout = self._options.timeout
        watching = None if timeout is None else asyncio.create_task(self._watch(timeout))
        try:
            if self._spec.pipe_stdin and self._is_new:
                close = not self._options.stdin_open
                await feed(self._api, self.id, self._options.input, close, self._turn)
            self._fed.set()
            if watching is not None:
                await watching
        except HoldfastError as error:
            self._failure = error
        finally:
            self._fed.set()
            if watching is not None:
                watching.cancel()

    async def _watch(self, timeout: float) -> None:
        if await self._api.wait(self.id, timeout=timeout) is None and not self._killed:
            self._timed_out = True
            # False: it ended by itself before the kill.
            self._timed_out = await self._api.terminate(self.id, force=True)

    async def started(self) -> int:
        """Wait until the command has started; its OS pid. Raises a failed start, also to a later iteration."""
        await asyncio.shield(self._starting)
        assert self._info is not None
        return self._info.pid

    @property
    def pid(self) -> int | None:
        """The OS pid inside the sandbox; None until the command has started."""
        return None if self._info is None else self._info.pid

    @property
    def id(self) -> str:
        """The process's logical id, under which `Sandbox.process` finds it."""
        return self._spec.process_id

    def on_exit(self, callback: OnExit) -> asyncio.Task[None]:
        """Call `callback` with the exit status when the command ends, independently of the iteration.

        As `Process.on_exit`; the task raises a failed start.
        """
        return self._spawn(call_at_exit(self._wait_exit(), callback))

    async def _wait_exit(self) -> ExitStatus:
        await asyncio.shield(self._starting)
        status = await self._api.wait(self.id)
        assert status is not None
        return status

    # --- iteration -----------------------------------------------------------------------------------------------

    @property
    def events(self) -> ExecRemoteProcess:
        """The events, as an async iterator."""
        return self

    def __aiter__(self) -> ExecRemoteProcess:
        return self

    async def __anext__(self) -> ExecRemoteEvent:
        if self._ready and not self._killed:
            return self._ready.popleft()
        if self._finished or self._killed:
            raise StopAsyncIteration
        try:
            return await self._next()
        except asyncio.CancelledError as cancelled:
            self._finished = True
            await clean_up_cancelled(self._api, self.terminate(force=True), cancelled)
            raise
        except HoldfastError as error:
            self._finished = True
            if isinstance(error, CommandNotFound | NotExecutable) and self._options.start_errors == "result":
                return self._not_started(error)
            raise

    def _not_started(self, error: CommandNotFound | NotExecutable) -> ExecRemoteEvent:
        exit_code, line = not_started(error)
        if self._options.merge_stderr:
            self._ready.append(Completed(exit_code, line, ""))
            return StdoutChunk(line)
        self._ready.append(Completed(exit_code, "", line))
        return StderrChunk(line)

    async def _next(self) -> ExecRemoteEvent:
        stream = await asyncio.shield(self._starting)
        async for event in stream:
            if self._killed:
                break
            if isinstance(event, OutputChunk):
                self._printed.take(event)
                text = self._decode(event)
                if text is not None:
                    return text
            elif isinstance(event, OutputGap):
                self._printed.take(event)
                # Output after a gap does not continue the character before it.
                self._decoders[event.stream].reset()
                return event
            elif isinstance(event, Exited):
                return await self._end(event.status, stream)
        await self._finish(stream)
        raise StopAsyncIteration

    def _decode(self, chunk: OutputChunk) -> StdoutChunk | StderrChunk | None:
        text = self._decoders[chunk.stream].decode(chunk.data)
        if not text:
            return None
        return StderrChunk(text) if chunk.stream == "stderr" else StdoutChunk(text)

    async def _end(self, status: ExitStatus, stream: EventStream) -> ExecRemoteEvent:
        if self._timed_out:
            # `_watch` knows whether the kill or the end came first once the kill has returned.
            await asyncio.wait((self._tending,))
        await self._finish(stream)
        if self._failure is not None:
            raise self._failure
        if self._timed_out and self._options.timeout is not None:
            raise timeout_error(self._printed, self._spec.argv, self._options.timeout)
        if status.silent:
            raise silence_error(self._printed, self._spec.argv, self._spec.silence)
        result = result_of(self._printed, status.exit_code)
        if rest := self._decoders["stdout"].decode(b"", True):
            self._ready.append(StdoutChunk(rest))
        if rest := self._decoders["stderr"].decode(b"", True):
            self._ready.append(StderrChunk(rest))
        lost = self._printed.lost
        omitted = (result.omitted_stdout_bytes, result.omitted_stderr_bytes)
        self._ready.append(
            Completed(status.exit_code, result.stdout, result.stderr, lost > 0, lost, *omitted, oom=status.oom)
        )
        return self._ready.popleft()

    async def _finish(self, stream: EventStream) -> None:
        self._finished = True
        self._tending.cancel()
        await stream.aclose()

    # --- input and end -------------------------------------------------------------------------------------------

    async def write_stdin(self, data: str | bytes) -> None:
        """Write to stdin, after `input`. `StdinClosed` unless the command was started with `stdin_open`."""
        await asyncio.shield(self._starting)
        if not self._options.stdin_open:
            raise StdinClosed(f"process {self.id!r} was started without stdin_open=True")
        await self._fed.wait()
        await write_pieces(self._api, self.id, data, self._turn)

    async def close_stdin(self) -> None:
        """Close stdin. Closing a closed stdin is no error."""
        await asyncio.shield(self._starting)
        await self._fed.wait()
        with contextlib.suppress(StdinClosed):
            await self._api.close_stdin(self.id)

    async def terminate(self, grace: float = 5.0, force: bool = False) -> None:
        """End the whole tree: TERM, up to `grace` seconds, KILL (`force`: at once). Untaken output is discarded.

        The iteration ends without `Completed`. Terminating an ended or failed command is no error.
        """
        self._killed = True
        self._ready.clear()
        await asyncio.wait((self._starting,))
        # Retrieving the error of a failed start keeps the event loop from logging it.
        if self._starting.cancelled() or self._starting.exception() is not None:
            return
        with contextlib.suppress(UnknownProcess):
            await self._api.terminate(self.id, grace=grace, force=force)
        await self._finish(self._starting.result())

    #: An older name of `terminate`.
    kill = terminate

    async def __aenter__(self) -> ExecRemoteProcess:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._finished:
            return
        if isinstance(error, asyncio.CancelledError):
            await clean_up_cancelled(self._api, self.terminate(force=True), error)
        else:
            await self.terminate()


def check_running_loop() -> None:
    """Refuse a call without a running event loop, which starting a command needs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise InvalidRequest("exec_remote needs a running event loop; without one, use holdfast.sync") from None


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


class SandboxCommands:
    """The commands of a sandbox. Each option of them is a field of `ExecRemoteOptions`."""

    _defaults: Defaults
    _exec_slots: asyncio.Semaphore

    @property
    def _api(self) -> ExecApi:
        raise NotImplementedError

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        raise NotImplementedError

    async def exec(
        self,
        cmd: Sequence[StrPath],
        *,
        input: str | bytes | None = None,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
        timeout_retry: bool = False,
        concurrency: bool = True,
        merge_stderr: bool = False,
        start_errors: StartErrors = "raise",
        check: bool = False,
        silence: float | None = None,
    ) -> ExecResult:
        """Run a command to its end and return its output and exit code.

        After `timeout` seconds, and when this call is cancelled, everything that the command started is killed.
        With `timeout_retry` a command that timed out is repeated up to twice, each time with less time. The
        `TimeoutError` has the output of the last attempt. With `concurrency` at most 64 commands run at a time, and
        the timeout counts from the start of this one. `merge_stderr` puts stderr into stdout, in the printed order.
        A command that cannot be started raises `CommandNotFound` or `NotExecutable`; with `start_errors="result"`
        it ends with exit code 127 or 126 and the reason on stderr, as in a shell. With `check` a non-zero exit code
        raises `CommandFailed`, which has the result. A command that prints nothing for `silence` seconds is killed
        like one that timed out, and raises `SilenceTimeout`.
        """
        argv = check_command(cmd)
        options = ExecRemoteOptions(
            input=input,
            cwd=cwd,
            env=check_env(env),
            user=user,
            timeout=timeout,
            timeout_retry=timeout_retry,
            concurrency=concurrency,
            merge_stderr=merge_stderr,
            start_errors=start_errors,
            silence=silence,
        )
        result = await self._run(argv, options)
        if check:
            check_result(argv, result)
        return result

    @overload
    def exec_remote(
        self, cmd: Sequence[StrPath], options: ExecRemoteOptions | None = None, stream: Literal[True] = True
    ) -> ExecRemoteProcess: ...

    @overload
    def exec_remote(
        self, cmd: Sequence[StrPath], options: ExecRemoteOptions | None = None, *, stream: Literal[False]
    ) -> Coroutine[Any, Any, ExecResult]: ...

    @overload
    def exec_remote(
        self, cmd: Sequence[StrPath], options: ExecRemoteOptions | None, stream: Literal[False]
    ) -> Coroutine[Any, Any, ExecResult]: ...

    def exec_remote(
        self, cmd: Sequence[StrPath], options: ExecRemoteOptions | None = None, stream: bool = True
    ) -> ExecRemoteProcess | Coroutine[Any, Any, ExecResult]:
        """Start a command at once and stream it, or, with `stream=False`, await its result.

        A plain method: the streamed command starts without an `await`, in the background of the running event loop.
        """
        argv = check_command(cmd)
        options = options or ExecRemoteOptions()
        check_env(options.env)
        if not stream:
            return self._run(argv, options)
        check_running_loop()
        spec = self._command_spec(argv, options, pipe_stdin=options.input is not None or options.stdin_open)
        return ExecRemoteProcess(self._api, spec, options, self._spawn)

    async def _run(self, argv: tuple[str, ...], options: ExecRemoteOptions) -> ExecResult:
        if not options.concurrency:
            return await self._attempts(argv, options)
        async with self._exec_slots:
            return await self._attempts(argv, options)

    async def _attempts(self, argv: tuple[str, ...], options: ExecRemoteOptions) -> ExecResult:
        # An id names one run of the command: another attempt would attach to the killed one.
        *earlier, last = retry_timeouts(options.timeout, options.timeout_retry and options.id is None)
        timed_out: list[float] = []
        for timeout in earlier:
            try:
                return await self._attempt(argv, options, timeout, timed_out)
            except SilenceTimeout:
                raise
            except TimeoutError:
                # Its whole tree was killed, so the attempts do not run side by side.
                assert timeout is not None
                timed_out.append(timeout)
        return await self._attempt(argv, options, last, timed_out)

    async def _attempt(
        self, argv: tuple[str, ...], options: ExecRemoteOptions, timeout: float | None, earlier: Sequence[float]
    ) -> ExecResult:
        # The caller has no handle to write to, so `stdin_open` would only make the command wait.
        spec = self._command_spec(argv, options, pipe_stdin=options.input is not None, awaited=True)
        return await run_command(
            self._api,
            spec,
            input=options.input,
            timeout=timeout,
            start_errors=options.start_errors,
            attach=options.id is not None,
            earlier=earlier,
        )

    def _command_spec(
        self, argv: tuple[str, ...], options: ExecRemoteOptions, *, pipe_stdin: bool, awaited: bool = False
    ) -> ProcessSpec:
        env = self._defaults.env(options.env)
        return ProcessSpec(
            process_id=f"{AWAITED_PREFIX if awaited else 'stream-'}{new_id()}"
            if options.id is None
            else options.id,
            argv=argv,
            cwd=self._defaults.cwd(options.cwd),
            env=env,
            env_policy=policy_for(env, options.env_policy),
            pipe_stdin=pipe_stdin,
            user=self._defaults.user(options.user),
            overflow=options.overflow,
            lifetime=options.lifetime,
            start_id=new_id(),
            merge_stderr=options.merge_stderr,
            silence=options.silence,
        )


def new_id() -> str:
    return secrets.token_hex(6)


def policy_for(env: Mapping[str, str] | None, policy: EnvPolicy | None) -> EnvPolicy | None:
    """The policy of a process: `env` without one adds to the sandbox's whole environment."""
    return _ADD_TO_ALL if policy is None and env is not None else policy
