"""`ExecApi` over a connection: each call is one method of the wire. Touches only the connection."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, Final

import msgspec

from holdfast.client.connection.clean_up import take_error
from holdfast.client.connection.connection import DEFAULT_WINDOW, ClientConnection, PendingCall
from holdfast.client.connection.subscription import Subscription
from holdfast.client.files.remote import remote_files
from holdfast.errors import HoldfastError, InternalError, InvalidRequest, StdinClosed, UnknownProcess
from holdfast.types import (
    TERMINAL_OUTPUT_BYTES,
    WRITE_PIECE_BYTES,
    CloseMode,
    CommandEvent,
    CommandSpec,
    EndedProcesses,
    EnvironmentInfo,
    Exited,
    ExitStatus,
    JobsAtClose,
    OutputChunk,
    OutputGap,
    ProcessInfo,
    ProcessSpec,
    ReadResult,
    ReadUntil,
    ServerStatus,
    ShellSpec,
    ShellStatus,
    Snapshot,
    Stream,
    TerminalCommandEnded,
    TerminalRead,
    TerminalSize,
    TerminalSpec,
    TerminalStatus,
    TerminalWait,
    UsageSample,
)
from holdfast.wire import messages as m

_EMPTY: Final = m.Empty()


class RemoteExec:
    """The processes of the server behind `connection`, which `aclose` closes."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.files = remote_files(connection)
        #: The prefix of idempotency keys, unique among all clients.
        self._prefix = uuid.uuid4().hex
        self._count = 0

    def _new_id(self) -> str:
        self._count += 1
        return f"{self._prefix}-{self._count}"

    async def start(self, spec: ProcessSpec) -> ProcessInfo:
        result = await self.connection.call(m.PROCESS_START, _start_params(spec, False))
        return result.process

    async def start_streaming(
        self, spec: ProcessSpec, *, window: int | None = None
    ) -> tuple[ProcessInfo, Subscription]:
        """Start a process and read it from its first byte on, in one round trip."""
        reader = self.connection.reader(spec.process_id, window=window)
        call = self.connection.begin(m.PROCESS_START, _start_params(spec, reader.spec()))
        self.connection.attach(reader, call)
        try:
            result = await self.connection.reply(call)
        except BaseException:
            await reader.aclose()
            raise
        return result.process, reader

    async def read(
        self,
        process_id: str,
        *,
        after_seq: int = 0,
        max_bytes: int | None = None,
        wait: float = 0.0,
        timing: bool = False,
    ) -> ReadResult:
        params = m.ReadParams(process_id, after_seq, max_bytes, _milliseconds(wait), timing=timing)
        return await self.connection.call(m.PROCESS_READ, params)

    def events(self, process_id: str, *, after_seq: int = 0, window: int | None = None) -> Subscription:
        return self.connection.reader(process_id, after_seq, window)

    async def write(self, process_id: str, data: bytes, *, write_id: str | None = None) -> None:
        write_id = write_id or self._new_id()
        if len(data) <= WRITE_PIECE_BYTES:
            await self._write_piece(process_id, data, write_id)
            return
        for number, start in enumerate(range(0, len(data), WRITE_PIECE_BYTES)):
            piece = data[start : start + WRITE_PIECE_BYTES]
            await self._write_piece(process_id, piece, f"{write_id}.{number}")

    async def _write_piece(self, process_id: str, data: bytes, write_id: str) -> None:
        result = await self.connection.call(m.PROCESS_WRITE, m.WriteParams(process_id, data, write_id))
        if result.status == "unknownProcess":
            raise UnknownProcess(f"no process {process_id!r}")
        if result.status == "stdinClosed":
            raise StdinClosed(f"process {process_id!r}: its stdin is closed")

    async def close_stdin(self, process_id: str) -> None:
        await self.connection.call(m.PROCESS_CLOSE_STDIN, m.ProcessParams(process_id))

    async def resize(self, process_id: str, size: TerminalSize) -> None:
        await self.connection.call(m.PROCESS_RESIZE, m.ResizeParams(process_id, size.rows, size.cols))

    async def signal(self, process_id: str, signal: str, *, signal_id: str | None = None) -> None:
        signal_id = signal_id or self._new_id()
        await self.connection.call(m.PROCESS_SIGNAL, m.SignalParams(process_id, signal, signal_id))

    async def terminate(self, process_id: str, *, grace: float = 5.0, force: bool = False) -> bool:
        params = m.TerminateParams(process_id, _milliseconds(grace), force)
        call = self.connection.begin(m.PROCESS_TERMINATE, params)
        running = (await self.connection.reply(call)).running
        if not running and call.sent > 1:
            # The reply to a first attempt may be lost; if that attempt ended the process, a signal did.
            status = await self.wait(process_id, timeout=0.0)
            running = status is not None and status.signal is not None
        return running

    async def wait(self, process_id: str, *, timeout: float | None = None) -> ExitStatus | None:
        params = m.WaitParams(process_id, None if timeout is None else _milliseconds(timeout))
        result = await self.connection.call(m.PROCESS_WAIT, params)
        if result.exit_code is None:
            return None
        return ExitStatus(result.exit_code, result.signal, result.oom, result.silent)

    async def ended(self, *, after: int | None = None, wait: float = 0.0) -> EndedProcesses:
        return await self.connection.call(m.PROCESS_ENDED, m.EndedParams(after, _milliseconds(wait)))

    async def snapshot(self, process_id: str) -> Snapshot:
        return await self.connection.call(m.PROCESS_SNAPSHOT, m.ProcessParams(process_id))

    async def describe(self, process_id: str) -> ProcessInfo:
        return await self.connection.call(m.PROCESS_DESCRIBE, m.ProcessParams(process_id))

    async def list(self) -> tuple[ProcessInfo, ...]:
        return (await self.connection.call(m.PROCESS_LIST, _EMPTY)).processes

    async def usage(self, process_ids: Sequence[str], *, members: bool = False) -> UsageSample:
        return await self.connection.call(m.PROCESS_USAGE, m.UsageParams(tuple(process_ids), members))

    async def forget(self, process_id: str) -> None:
        call = self.connection.begin(m.PROCESS_FORGET, m.ProcessParams(process_id))
        try:
            await self.connection.reply(call)
        except UnknownProcess:
            if call.sent < 2:
                raise
            # The reply to the first attempt was lost.

    async def open_shell(self, spec: ShellSpec) -> ShellStatus:
        if spec.start_id is None:
            spec = msgspec.structs.replace(spec, start_id=uuid.uuid4().hex)
        return await self.connection.call(m.SHELL_OPEN, spec)

    def run_in_shell(
        self, shell_id: str, command: CommandSpec, *, live: bool = False, window: int | None = None
    ) -> RemoteCommand:
        return RemoteCommand(self.connection, shell_id, command, live=live, window=window)

    async def start_in_shell(
        self,
        shell_id: str,
        command: str,
        process_id: str,
        *,
        start_id: str | None = None,
        pipe_stdin: bool = False,
    ) -> ProcessInfo:
        params = m.ShellStartParams(shell_id, process_id, command, start_id or self._new_id(), pipe_stdin)
        return await self.connection.call(m.SHELL_START, params)

    async def interrupt_shell(self, shell_id: str, *, interrupt_id: str | None = None) -> bool:
        params = m.ShellInterruptParams(shell_id, interrupt_id=interrupt_id or self._new_id())
        return (await self.connection.call(m.SHELL_INTERRUPT, params)).running

    async def close_shell(self, shell_id: str, *, keep: bool = False, grace: float = 5.0) -> None:
        await self.connection.call(m.SHELL_CLOSE, m.ShellCloseParams(shell_id, keep, _milliseconds(grace)))

    async def describe_shell(self, shell_id: str) -> ShellStatus:
        return await self.connection.call(m.SHELL_DESCRIBE, m.ShellParams(shell_id))

    async def list_shells(self) -> tuple[ShellStatus, ...]:
        return (await self.connection.call(m.SHELL_LIST, _EMPTY)).shells

    async def open_terminal(self, spec: TerminalSpec) -> TerminalStatus:
        if spec.start_id is None:
            spec = msgspec.structs.replace(spec, start_id=self._new_id())
        return await self.connection.call(m.TERMINAL_OPEN, spec)

    async def read_terminal(
        self,
        terminal_id: str,
        *,
        since: int = 0,
        max_bytes: int | None = None,
        wait: float = 0.0,
        timing: bool = False,
        marks: bool = False,
        until: ReadUntil | None = None,
        gather: float = 0.0,
    ) -> TerminalRead:
        params = m.TerminalReadParams(
            terminal_id, since, max_bytes, _milliseconds(wait), timing, marks, until, _milliseconds(gather)
        )
        return await self.connection.call(m.TERMINAL_READ, params)

    async def run_in_terminal(
        self,
        terminal_id: str,
        command: str,
        *,
        timeout: float | None = None,
        max_bytes: int = TERMINAL_OUTPUT_BYTES,
        run_id: str | None = None,
    ) -> TerminalCommandEnded:
        limit = None if timeout is None else _milliseconds(timeout)
        params = m.TerminalRunParams(terminal_id, command, limit, max_bytes, run_id or self._new_id())
        try:
            return await self.connection.call(m.TERMINAL_RUN, params)
        except asyncio.CancelledError:
            if not self.connection.connected and params.run_id is not None:
                # The server does not see the cancellation on a broken channel, so the run is withdrawn by a call.
                withdrawn = m.TerminalWithdrawParams(terminal_id, params.run_id)
                with contextlib.suppress(HoldfastError):
                    await self.connection.clean_up(self.connection.call(m.TERMINAL_WITHDRAW, withdrawn))
            raise

    async def press_keys(self, terminal_id: str, keys: Sequence[str], *, write_id: str | None = None) -> None:
        params = m.TerminalKeysParams(terminal_id, tuple(keys), write_id or self._new_id())
        await self.connection.call(m.TERMINAL_KEYS, params)

    async def wait_terminal(
        self, terminal_id: str, until: TerminalWait, *, timeout: float | None = None, changes: int = 0
    ) -> tuple[bool, TerminalStatus]:
        limit = None if timeout is None else _milliseconds(timeout)
        params = m.TerminalWaitParams(terminal_id, until, limit, changes)
        result = await self.connection.call(m.TERMINAL_WAIT, params)
        return result.reached, result.terminal

    async def close_terminal(
        self, terminal_id: str, *, mode: CloseMode = "graceful", jobs: JobsAtClose = "kill", grace: float = 5.0
    ) -> TerminalStatus:
        params = m.TerminalCloseParams(terminal_id, mode, jobs, _milliseconds(grace))
        return await self.connection.call(m.TERMINAL_CLOSE, params)

    async def describe_terminal(self, terminal_id: str, *, look: bool = True) -> TerminalStatus:
        return await self.connection.call(m.TERMINAL_DESCRIBE, m.TerminalParams(terminal_id, look))

    async def list_terminals(self) -> tuple[TerminalStatus, ...]:
        return (await self.connection.call(m.TERMINAL_LIST, _EMPTY)).terminals

    async def wait_for_port(self, port: int, *, host: str = "127.0.0.1", timeout: float = 30.0) -> None:
        await self.connection.call(m.PORT_WAIT, m.WaitForPortParams(port, host, _milliseconds(timeout)))

    async def info(self) -> EnvironmentInfo:
        return await self.connection.call(m.ENVIRONMENT_INFO, _EMPTY)

    async def status(self) -> ServerStatus:
        return await self.connection.call(m.ENVIRONMENT_STATUS, _EMPTY)

    async def clean_up(self, work: Coroutine[Any, Any, Any]) -> bool:
        return await self.connection.clean_up(work)

    async def aclose(self) -> None:
        await self.connection.aclose()


class RemoteCommand:
    """`CommandStream` over a connection: one call, and a reader for more output than fits in its reply.

    The command is sent at once. The call is repeated after a reconnect, and the command runs once all the same. The
    reader is made when the server pushes output: most commands need none.
    """

    def __init__(
        self, connection: ClientConnection, shell_id: str, spec: CommandSpec, *, live: bool, window: int | None
    ) -> None:
        self._connection = connection
        self._reader_id = connection.new_reader_id()
        self._window = window or DEFAULT_WINDOW
        self._reader: Subscription | None = None
        #: For a task that waits for the reply or for the reader.
        self._news: asyncio.Future[None] | None = None
        self._over = False
        #: The events that came with the reply.
        self._last: deque[CommandEvent] = deque()
        self._shell_id = shell_id
        self._params = m.ShellRunParams(
            shell_id,
            spec.command_id,
            spec.command,
            cwd=spec.cwd,
            env=spec.env,
            input=spec.input,
            # A negative timeout is sent, so that the server refuses it.
            timeout_ms=None if spec.timeout is None else _milliseconds(spec.timeout, least=-1.0),
            subscribe=m.SubscribeSpec(self._reader_id, 0, self._window, connection.polls),
            live=live,
            pipe_stdin=spec.pipe_stdin,
            silence_ms=None if spec.silence is None else _milliseconds(spec.silence, least=-1.0),
        )
        self._call: PendingCall[m.ShellRunResult] = connection.begin(m.SHELL_RUN, self._params)
        self._call.on_reply = self._replied
        self._call.renew = self._renewed
        connection.expected[self._reader_id] = self._open_reader
        if live or connection.polls:
            self._open_reader()

    def _open_reader(self) -> Subscription:
        """Make the reader, for the first output or the first poll."""
        self._connection.expected.pop(self._reader_id, None)
        self._reader = Subscription(self._connection, self._reader_id, self._params.command_id, 0, self._window)
        self._connection.attach(self._reader, self._call)
        self._wake()
        return self._reader

    def _renewed(self) -> m.ShellRunParams:
        """The parameters for another channel, without the output that has arrived."""
        if self._reader is None:
            return self._params
        return msgspec.structs.replace(self._params, subscribe=self._reader.spec())

    def _replied(self, result: m.ShellRunResult | None, error: HoldfastError | None) -> None:
        """End the reader if the reply has all the output, or is an error."""
        if self._reader is None and result is not None and result.pushed:
            self._open_reader()  # the reply has overtaken the output
        elif self._reader is None:
            self._connection.expected.pop(self._reader_id, None)
            self._wake()
        elif error is not None:
            self._reader.fail(error)
        elif result is not None and not result.pushed:
            self._reader.finish()

    async def _wait(self) -> None:
        """Wait for the reply, for the reader, or for `aclose`."""
        if self._news is not None and not self._news.done():
            raise InvalidRequest(f"two readers wait on the command {self._params.command_id!r}")
        self._news = self._connection.loop.create_future()
        await self._news

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def __aiter__(self) -> RemoteCommand:
        return self

    async def __anext__(self) -> CommandEvent:
        while not self._last:
            if self._over:
                raise StopAsyncIteration
            if self._reader is None and not self._call.future.done():
                await self._wait()
                continue
            event = None if self._reader is None else await anext(self._reader, None)
            if isinstance(event, OutputChunk | OutputGap):
                return event
            result = await self._connection.reply(self._call)
            self._over = True
            if result.pushed and not isinstance(event, Exited):
                raise InternalError("the output of a command ended without its end")
            if self._reader is not None:
                await self._reader.aclose()
            if result.pushed:
                return result.ended
            self._last.extend(_inline(result, self._reader))
        return self._last.popleft()

    async def aclose(self) -> None:
        """Withdraw the command if it has not ended."""
        if self._call.future.done():
            take_error(self._call.future)  # the reader has raised it
        if not self._over:
            self._over = True
            cancelled = self._connection.connected
            self._connection.give_up(self._call)
            if self._reader is None:
                # The server may have opened the reader, and its first output may be on its way.
                self._connection.expected.pop(self._reader_id, None)
                self._connection.detach(self._reader_id)
                self._wake()
            if not cancelled and not self._call.future.done():
                # The server does not see the cancellation on a broken channel, so the command is interrupted by a
                # call.
                params = m.ShellInterruptParams(self._shell_id, command_id=self._params.command_id)
                with contextlib.suppress(HoldfastError):
                    await self._connection.clean_up(self._connection.call(m.SHELL_INTERRUPT, params))
        if self._reader is not None:
            await self._reader.aclose()


def _inline(result: m.ShellRunResult, reader: Subscription | None) -> list[CommandEvent]:
    """The events in the reply, without the output that a polling reader already has."""
    events: list[CommandEvent] = []
    streams: tuple[tuple[Stream, bytes], ...] = (("stdout", result.stdout), ("stderr", result.stderr))
    for seq, (stream, data) in enumerate(streams):
        start = 0 if reader is None else reader.arrived(stream)
        if len(data) > start:
            events.append(OutputChunk(stream, start, data[start:], seq + 1))
    return [*events, result.ended]


def _milliseconds(seconds: float, *, least: float = 0.0) -> int:
    """Milliseconds, rounded up so that a short time does not become 0; a time below `least` becomes `least`."""
    return -int(-max(least, seconds) * 1000 // 1)


def _start_params(spec: ProcessSpec, subscribe: bool | m.SubscribeSpec) -> m.StartParams:
    fields = {name: getattr(spec, name) for name in ProcessSpec.__struct_fields__}
    # Without it, a repeated start after a reconnect would be refused as a duplicate.
    fields["start_id"] = spec.start_id or uuid.uuid4().hex
    return m.StartParams(**fields, subscribe=subscribe)
