"""Tool calls for models: `exec_command` and `write_stdin`, each of which returns a bounded window of output.

A call returns when the command ends or its yield time is over, whichever comes first; a command that still runs is
kept as a session. One watcher for each session reads its output and emits the four kinds of events, so that the end
of a command is reported even if no call waits for it. All calls go through `Sandbox`.
"""

from __future__ import annotations

import asyncio
import codecs
import inspect
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from holdfast.client.collect import MIB, Collected, HeadTailBuffer
from holdfast.client.command import kill_now
from holdfast.client.connection.clean_up import clean_up_cancelled
from holdfast.client.defaults import StrPath
from holdfast.client.exec_remote import ExecRemoteOptions
from holdfast.client.process import Process
from holdfast.client.sandbox import Sandbox
from holdfast.client.tools.tool_formats import (
    ExecCommandArguments,
    ToolFormat as ToolFormat,
    definitions,
    parse_arguments,
    parse_call,
    result,
)
from holdfast.errors import (
    HoldfastError,
    InternalError,
    InvalidParams,
    LimitReached,
    SandboxGone,
    ShuttingDown,
    StdinClosed,
    TransportError,
    UnknownProcess,
)
from holdfast.exec_api import EventStream
from holdfast.types import Exited, ExitStatus, Lifetime, OutputChunk, OutputGap, Stream, Struct, TerminalSize

#: Bounds of the yield time: below a quarter of a second a model only polls, above half a minute it seems hung.
MIN_YIELD_MS: Final = 250
MAX_YIELD_MS: Final = 30_000
#: The default window: some 10,000 tokens of four bytes.
DEFAULT_OUTPUT_BYTES: Final = 40_000
#: The held output of a session between two calls, and of its whole transcript for `ExecCommandEnd`.
TRANSCRIPT_BYTES: Final = 1 * MIB
#: Sessions at a time, far more than a model keeps track of.
MAX_SESSIONS: Final = 64


class ExecCommandBegin(Struct, frozen=True):
    """A command started."""

    session_id: int
    process_id: str
    command: tuple[str, ...]
    cwd: str
    tty: bool


class ExecCommandOutputDelta(Struct, frozen=True):
    """Output of a command. `text` has only whole characters."""

    session_id: int
    stream: Stream
    chunk: bytes
    text: str


class TerminalInteraction(Struct, frozen=True):
    """The model typed something to a command."""

    session_id: int
    process_id: str
    stdin: str


class ExecCommandEnd(Struct, frozen=True):
    """A command ended; emitted once. `transcript` is the head and the tail of its output."""

    session_id: int
    process_id: str
    exit_code: int
    signal: str | None
    transcript: Collected
    duration: float
    #: The kernel killed it for memory.
    oom: bool = False


UnifiedExecEvent = ExecCommandBegin | ExecCommandOutputDelta | TerminalInteraction | ExecCommandEnd
OnEvent = Callable[[UnifiedExecEvent], Awaitable[None] | None]


class ToolOutput(Struct, frozen=True):
    """The result of a call: the output since the previous call, bounded."""

    #: Names the session for `write_stdin` while the command runs; None once it ended.
    session_id: int | None
    #: None while the command runs.
    exit_code: int | None
    #: The output as text, with a line in place of omitted bytes.
    output: str
    #: The output as bytes, head and tail joined with nothing between them.
    output_bytes: bytes
    omitted_bytes: int
    #: Seconds that the call took.
    wall_time: float
    #: The kernel killed the command for memory.
    oom: bool = False

    @property
    def truncated(self) -> bool:
        return self.omitted_bytes > 0

    @property
    def running(self) -> bool:
        return self.session_id is not None


class _Session:
    """One command: its process, its watcher, and its output since the last call."""

    def __init__(self, session_id: int, process: Process, began: float) -> None:
        self.session_id = session_id
        self.process = process
        self.began = began
        self.pending = HeadTailBuffer(TRANSCRIPT_BYTES)
        self.transcript = HeadTailBuffer(TRANSCRIPT_BYTES)
        self.status: ExitStatus | None = None
        self.failure: HoldfastError | None = None
        #: Set when the command has ended, or the sandbox is lost.
        self.over = asyncio.Event()
        #: Held here because the event loop holds tasks only weakly.
        self.watcher: asyncio.Task[None] | None = None
        #: One call at a time: two would split the output between them.
        self.turn = asyncio.Lock()


class UnifiedExec:
    """Commands for a model. Leaving its `with` block, or `aclose`, ends the running sessions."""

    def __init__(
        self,
        box: Sandbox,
        on_event: OnEvent | None = None,
        *,
        env: Mapping[str, str] | None = None,
        max_sessions: int = MAX_SESSIONS,
        lifetime: Lifetime = "server",
        kill_cancelled: bool = False,
        ids: Iterator[int] | None = None,
    ) -> None:
        """`lifetime="connection"` ends commands when this client does not reconnect. With `kill_cancelled` a
        cancelled `exec_command` kills its command. Objects that share `ids` have no session id in common.
        """
        self._box = box
        self._on_event = on_event
        self._env = env
        self._max_sessions = max_sessions
        self._lifetime: Lifetime = lifetime
        self._kill_cancelled = kill_cancelled
        self._ids = itertools.count(1) if ids is None else ids
        #: In the order of their last use; the first ended one is dropped first.
        self._sessions: dict[int, _Session] = {}
        self._starting = 0
        self._shell: str | None = None

    async def exec_command(
        self,
        cmd: str | Sequence[StrPath],
        *,
        workdir: StrPath | None = None,
        tty: bool = False,
        login: bool = True,
        yield_time_ms: int = 10_000,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
        user: str | None = None,
    ) -> ToolOutput:
        """Run a command: a string by the sandbox's shell, which is a login shell with `login`; a list as argv.

        With `tty` it runs on a terminal and can be written to. Otherwise its stdin is empty: programs such as
        ripgrep would read an open pipe, and wait for ever.
        """
        began = asyncio.get_running_loop().time()
        self._make_room()
        self._starting += 1
        try:
            argv = await self._argv(cmd, login)
            env = None if self._env is None else dict(self._env)
            options = ExecRemoteOptions(env=env, lifetime=self._lifetime, user=user)
            process, events = await self._box._start_streaming(
                argv, cwd=workdir, options=options, tty=TerminalSize() if tty else None
            )
        finally:
            self._starting -= 1
        session = _Session(next(self._ids), process, began)
        self._sessions[session.session_id] = session
        # No await since the start: a call that is cancelled from here on leaves a watched session.
        session.watcher = asyncio.create_task(self._watch(session, events))
        try:
            async with session.turn:
                return await self._window(session, began, yield_time_ms, max_output_bytes)
        except asyncio.CancelledError as cancelled:
            if self._kill_cancelled:
                await clean_up_cancelled(self._box.api, kill_now(self._box.api, process.id), cancelled)
            raise

    async def write_stdin(
        self,
        session_id: int,
        chars: str = "",
        *,
        yield_time_ms: int = 250,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
    ) -> ToolOutput:
        """Type to a running command and return its output; empty `chars` only read.

        If the command has ended meanwhile, nothing is written, and the result has its exit code.
        """
        began = asyncio.get_running_loop().time()
        session = self._session(session_id)
        async with session.turn:
            if chars and not session.over.is_set():
                await self._type(session, chars)
            return await self._window(session, began, yield_time_ms, max_output_bytes)

    def tools(self, format: ToolFormat = "json-schema") -> list[dict[str, Any]]:
        """The definitions of both tools for a request to a model, in the format of its provider."""
        return definitions(format)

    async def call(self, call: object, format: ToolFormat = "json-schema") -> dict[str, Any]:
        """Execute a tool call of a model, a dict or an SDK's object, and return its result in the same format.

        An error that the model can correct is a result: a wrong argument, an unknown session, a missing directory.
        A lost connection or sandbox is raised.
        """
        parsed = parse_call(call, format)
        try:
            arguments = parse_arguments(parsed)
            window: dict[str, Any] = {
                "yield_time_ms": arguments.yield_time_ms,
                "max_output_bytes": arguments.max_output_bytes,
            }
            if isinstance(arguments, ExecCommandArguments):
                workdir = arguments.workdir or None
                how: dict[str, Any] = {"tty": arguments.tty, "login": arguments.login}
                output = await self.exec_command(arguments.cmd, workdir=workdir, **how, **window)
            else:
                output = await self.write_stdin(arguments.session_id, arguments.chars, **window)
        except (TransportError, SandboxGone, ShuttingDown):
            raise
        except HoldfastError as error:
            return result(parsed, format, {"error": error.message}, failed=True)
        return result(parsed, format, _shown(output), failed=False)

    async def terminate(self, session_id: int) -> None:
        """End a session's command and everything that it started; the end is reported as usual."""
        await _end(self._session(session_id))

    def sessions(self) -> dict[int, Process]:
        """The processes whose end no call has returned yet, by session id."""
        return {session_id: session.process for session_id, session in self._sessions.items()}

    async def aclose(self) -> None:
        """End every session, then raise the first error."""
        sessions, self._sessions = list(self._sessions.values()), {}
        outcomes = await asyncio.gather(*map(_end, sessions), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def __aenter__(self) -> UnifiedExec:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- private --------------------------------------------------------------------------------------------------

    async def _argv(self, cmd: str | Sequence[StrPath], login: bool) -> Sequence[StrPath]:
        if not isinstance(cmd, str):
            return cmd
        if self._shell is None:
            self._shell = (await self._box.info()).shell.path
        return [self._shell, "-lc" if login else "-c", cmd]

    def _session(self, session_id: int) -> _Session:
        session = self._sessions.pop(session_id, None)
        if session is None:
            raise UnknownProcess(f"no session {session_id}: it never began, or its end was already returned")
        # Put back at the end, as the last used.
        self._sessions[session_id] = session
        return session

    def _make_room(self) -> None:
        while len(self._sessions) + self._starting >= self._max_sessions:
            ended = next((s for s in self._sessions.values() if s.over.is_set()), None)
            if ended is None:
                raise LimitReached(
                    f"{self._max_sessions} commands run already (max_sessions); end one of them: "
                    f"sessions {', '.join(map(str, self._sessions))}"
                )
            del self._sessions[ended.session_id]

    async def _type(self, session: _Session, chars: str) -> None:
        if not session.process.info.tty:
            raise StdinClosed(f"session {session.session_id} takes no input; run the command with tty=true")
        try:
            await session.process.write(chars)
        except StdinClosed:
            # It ended before the write; the result of this call has its exit code.
            await session.over.wait()
            return
        await self._emit(TerminalInteraction(session.session_id, session.process.id, chars))

    async def _window(
        self, session: _Session, began: float, yield_time_ms: int, max_output_bytes: int
    ) -> ToolOutput:
        if max_output_bytes < 2:
            raise InvalidParams(f"max_output_bytes: at least 2, not {max_output_bytes}")
        loop = asyncio.get_running_loop()
        seconds = min(max(yield_time_ms, MIN_YIELD_MS), MAX_YIELD_MS) / 1000
        # Not `asyncio.timeout`: the end of the yield time is the ordinary case, not an error.
        waiting = asyncio.ensure_future(session.over.wait())
        try:
            await asyncio.wait((waiting,), timeout=max(0.0, began + seconds - loop.time()))
        finally:
            waiting.cancel()
        over = session.over.is_set()
        carried = b"" if over else session.pending.cut_unfinished()
        gathered = session.pending.collected()
        session.pending = HeadTailBuffer(TRANSCRIPT_BYTES)
        session.pending.append(carried)
        if over:
            self._sessions.pop(session.session_id, None)
            if session.failure is not None:
                raise session.failure
        shown = _shortened(gathered, max_output_bytes)
        return ToolOutput(
            session_id=None if over else session.session_id,
            exit_code=None if session.status is None else session.status.exit_code,
            output=shown.text,
            output_bytes=shown.output,
            omitted_bytes=shown.omitted_bytes,
            wall_time=loop.time() - began,
            oom=session.status is not None and session.status.oom,
        )

    async def _watch(self, session: _Session, stream: EventStream) -> None:
        """Read to the end of the command and emit its events."""
        decoders: dict[Stream, codecs.IncrementalDecoder] = {}
        info = session.process.info
        try:
            await self._emit(ExecCommandBegin(session.session_id, info.process_id, info.argv, info.cwd, info.tty))
            async for event in stream:
                if isinstance(event, OutputChunk):
                    session.pending.append(event.data)
                    session.transcript.append(event.data)
                    decoder = decoders.setdefault(event.stream, codecs.getincrementaldecoder("utf-8")("replace"))
                    text = decoder.decode(event.data)
                    await self._emit(ExecCommandOutputDelta(session.session_id, event.stream, event.data, text))
                elif isinstance(event, OutputGap):
                    session.pending.skip(event.length)
                    session.transcript.skip(event.length)
                    decoders.pop(event.stream, None)
                elif isinstance(event, Exited):
                    session.status = event.status
                    return
            session.failure = InternalError(f"the events of process {info.process_id!r} ended without its exit")
        except HoldfastError as error:
            # The sandbox is lost. The next call raises this.
            session.failure = error
        finally:
            # The event precedes the result of a call.
            await self._emit_end(session)
            session.over.set()
            await stream.aclose()

    async def _emit_end(self, session: _Session) -> None:
        if session.status is None:
            return
        duration = asyncio.get_running_loop().time() - session.began
        await self._emit(
            ExecCommandEnd(
                session.session_id,
                session.process.id,
                session.status.exit_code,
                session.status.signal,
                session.transcript.collected(exit=session.status, elapsed=duration),
                duration,
                oom=session.status.oom,
            )
        )

    async def _emit(self, event: UnifiedExecEvent) -> None:
        if self._on_event is None:
            return
        try:
            outcome = self._on_event(event)
            if inspect.isawaitable(outcome):
                await outcome
        except Exception as error:  # noqa: BLE001 - a failing listener must not end the command
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"on_event failed for {type(event).__name__}", "exception": error}
            )


def _shown(output: ToolOutput) -> dict[str, Any]:
    """The parts of a result that a model needs."""
    end = {"exit_code": output.exit_code} if output.session_id is None else {"session_id": output.session_id}
    if output.oom:
        end["out_of_memory"] = True
    return {**end, "output": output.output, "wall_time": round(output.wall_time, 2)}


async def _end(session: _Session) -> None:
    if not session.over.is_set():
        await session.process.terminate()
        await session.over.wait()


def _shortened(gathered: Collected, max_bytes: int) -> Collected:
    """The window cut to `max_bytes`; bytes that were omitted before stay counted."""
    if len(gathered.head) + len(gathered.tail) <= max_bytes:
        return gathered
    buffer = HeadTailBuffer(max_bytes)
    buffer.append(gathered.head)
    if gathered.omitted_bytes:
        buffer.skip(gathered.omitted_bytes)
    buffer.append(gathered.tail)
    return buffer.collected()
