"""The shell kind of session: each input is one command, with separate stdout and stderr.

The server in the sandbox records each command separately and drops old ones. The audit log gives commands one order
in all replicas and across restarts: the row of a command is written before it runs, and its number is the position.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from holdfast.client.collect import StreamTails
from holdfast.errors import HoldfastError, UnknownProcess, UnknownShell
from holdfast.exec_api import CommandStream, ExecApi
from holdfast.service.api import Chunk, Control, OutputRead
from holdfast.service.observability.tracing import Tracer
from holdfast.service.positions import FINISHED, Position, read_token, write_token
from holdfast.service.problems import BadToken, Bug, Invalid, NotNow
from holdfast.service.sessions.backend.connections import SandboxConnections
from holdfast.service.sessions.backend.enforcement import EnforcementPlan
from holdfast.service.sessions.backend.output import OutputSlice, command_chunks, lost_chunk
from holdfast.service.sessions.backend.session_backend import (
    BackendStatus,
    CommandOutcome,
    LoggedOutput,
    SessionBackend,
    traced,
)
from holdfast.service.sessions.following.command_log import CommandLog
from holdfast.service.settings import ServiceSettings
from holdfast.service.types import CloseMode, SessionRecord, State
from holdfast.types import (
    CommandEnded,
    CommandSpec,
    EnvPolicy,
    OutputChunk,
    OutputGap,
    ShellSpec,
    ShellStatus,
    Stream,
)

_STATES: Final[dict[str, State]] = {"idle": "IDLE", "running": "BUSY", "closed": "CLOSED"}


class ShellBackend(SessionBackend):
    """A session with a live shell."""

    def __init__(
        self,
        record: SessionRecord,
        pool: SandboxConnections,
        settings: ServiceSettings,
        tracer: Tracer,
        commands: CommandLog,
        time: Callable[[], float],
    ) -> None:
        super().__init__(record, pool, settings, tracer)
        self._commands = commands
        self._time = time
        #: Commands without a waiting call. Their output is drained, so that they do not block on a slow reader.
        self._sent: set[asyncio.Task[None]] = set()

    @traced("open_shell")
    async def open(self, environment: dict[str, str], plan: EnforcementPlan) -> tuple[BackendStatus, str]:
        record = self._record
        spec = ShellSpec(
            shell_id=self.session_id,
            shell=record.shell or None,
            cwd=record.initial_cwd or None,
            env=environment,
            env_policy=EnvPolicy.minimal(*record.policy.inherited_variables),
            limits=plan.limits,
            user=plan.user,
            login=True,
            start_id=self.session_id,
        )
        if plan.confinement is not None:
            spec = msgspec.structs.replace(spec, confinement=plan.confinement)
        async with self._pool.use(record.sandbox) as api:
            status = await api.open_shell(spec)
        return _backend_status(status), write_token(self.session_id, Position())

    async def status(self, *, input_wait: bool = True) -> BackendStatus:
        async with self._pool.use(self._record.sandbox) as api:
            return _backend_status(await api.describe_shell(self.session_id))

    async def status_after_input(self) -> BackendStatus:
        return await self.status()

    # --- commands ------------------------------------------------------------------------------------------------

    @traced("send")
    async def send(
        self, command_id: str, data: bytes, controls: Sequence[Control], *, new_line: bool = False
    ) -> None:
        if data:
            await self.type_command(command_id, command_text(data))
        async with self._pool.use(self._record.sandbox) as api:
            for number, _ in enumerate(controls):
                await api.interrupt_shell(self.session_id, interrupt_id=f"{command_id}.{number}")

    def check_controls(self, controls: Sequence[Control]) -> None:
        # A command of a shell has no keys and no size; every signal ends it with its children.
        for control in controls:
            if control.type in ("RESIZE", "CTRL_D"):
                raise Invalid(
                    f"actions: {control.type} is for a terminal, and session {self.session_id!r} has a shell",
                    reason="NOT_A_TERMINAL",
                    field="actions",
                )

    @traced("send")
    async def type_command(self, command_id: str, command: str) -> None:
        begun = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self._take(command_id, command, begun))
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)
        await asyncio.wait([begun, task], return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            await task

    async def _take(self, command_id: str, command: str, begun: asyncio.Future[None]) -> None:
        """Run a command and drain its output. The follower reads its exit from its record."""
        async with self._pool.use(self._record.sandbox) as api:
            await self._check_open(api)
            stream = api.run_in_shell(self.session_id, CommandSpec(command_id, command))
            begun.set_result(None)
            # A permanent failure of the connection ends this task, and the command continues.
            with contextlib.suppress(HoldfastError):
                async for _ in stream:
                    pass

    @traced("run")
    async def run(self, command_id: str, command: str, timeout: float, max_bytes: int) -> CommandOutcome:
        logged = _LoggedOutput(self._settings.audit_excerpt_bytes)
        async with self._pool.use(self._record.sandbox) as api:
            stream = api.run_in_shell(self.session_id, CommandSpec(command_id, command, timeout=timeout))
            try:
                printed, ended = await _collect(stream, max_bytes, logged)
            finally:
                # The disconnect of the caller interrupts the command.
                await stream.aclose()
        return CommandOutcome(
            exit_code=ended.exit_code,
            stdout=printed.stdout.value(),
            stderr=printed.stderr.value(),
            duration=ended.duration,
            state=_STATES[ended.state],
            cwd=ended.cwd,
            timed_out=ended.timed_out,
            truncated=printed.truncated,
            logged=logged.value(),
        )

    async def _check_open(self, api: ExecApi) -> None:
        status = await api.describe_shell(self.session_id)
        if status.state == "closed":
            raise NotNow(f"session {self.session_id!r} is closed: {status.reason}", reason="SESSION_CLOSED")

    # --- output --------------------------------------------------------------------------------------------------

    @traced("read")
    async def read(self, since: str, max_bytes: int, wait: float) -> OutputRead:
        position = read_token(self.session_id, since)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        chunks: list[Chunk] = []
        room, more = max_bytes, False
        with self._commands.watch() as news:
            async with self._pool.use(self._record.sandbox) as api:
                while True:
                    left = 0.0 if chunks else max(0.0, deadline - loop.time())
                    news.clear()
                    step = await self._step(api, position, room, left)
                    if step is not None:
                        chunks += step.chunks
                        room -= sum(len(chunk.payload) for chunk in step.chunks)
                        moved, position = position != step.position, step.position
                        more = step.more or room <= 0
                        if more or (not moved and not left):
                            break
                    elif left:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(left):
                                await news.wait()
                    else:
                        break
                state = await self._state(api)
        return OutputRead(tuple(chunks), state, write_token(self.session_id, position), more)

    async def _step(self, api: ExecApi, position: Position, room: int, wait: float) -> OutputSlice | None:
        """Return the next output of one command; None if there is no command after the position yet."""
        number = position.command
        over = position.seq == FINISHED or number == 0
        following = await self._commands.after(number if over else number - 1)
        if not following and over:
            return None
        if over:
            position = Position(following[0].number)
        elif not following or following[0].number != number:
            raise BadToken("since: a position that this session never had", reason="BAD_TOKEN")
        command_id = following[0].command_id
        try:
            found = await api.read(command_id, after_seq=position.seq, max_bytes=room + position.part, wait=wait)
        except UnknownProcess:
            return await self._lost(position, command_id)
        return command_chunks(
            self.session_id,
            command_id,
            position,
            found,
            room,
            at=self._time(),
            state="IDLE" if found.exited else "BUSY",
        )

    async def _lost(self, position: Position, command_id: str) -> OutputSlice | None:
        end = await self._commands.end_of(command_id)
        if end is None:
            return None  # the command has not reached the shell, or its end has not reached the log
        chunk, after = lost_chunk(self.session_id, command_id, position, *end, self._time(), "IDLE")
        return OutputSlice([chunk] if chunk.truncated or chunk.exit_code is not None else [], after)

    async def _state(self, api: ExecApi) -> State:
        return _backend_status(await api.describe_shell(self.session_id)).state

    @traced("close")
    async def close(self, mode: CloseMode) -> None:
        record = self._record
        async with self._pool.use(record.sandbox) as api:
            with contextlib.suppress(UnknownShell):
                await api.close_shell(
                    self.session_id,
                    keep=record.policy.allow_background,
                    grace=self._settings.close_grace if mode == "graceful" else 0.0,
                )


def command_text(data: bytes) -> str:
    """Return the input of one call as a command."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise Invalid("data: a command for a shell must be UTF-8", reason="NOT_UTF8", field="data") from None
    text = text.rstrip("\r\n")
    if not text.strip():
        raise Invalid("data: has no command", reason="EMPTY_COMMAND", field="data")
    return text


def _backend_status(status: ShellStatus) -> BackendStatus:
    return BackendStatus(
        state=_STATES[status.state],
        cwd=status.cwd,
        position=status.commands_run,
        queue_busy=status.queued > 0,
        exit_code=status.exit_code,
        reason=status.reason,
    )


class _LoggedOutput:
    """Collects the beginning and the size of a command's output."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._excerpt = bytearray()
        self._size = 0
        self._streams: set[Stream] = set()

    def take(self, event: OutputChunk | OutputGap) -> None:
        if isinstance(event, OutputGap):
            self._size += event.length
        else:
            self._streams.add(event.stream)
            self._size += len(event.data)
            self._excerpt += event.data[: max(0, self._limit - len(self._excerpt))]

    def value(self) -> LoggedOutput | None:
        """Return the output; None for output of both streams, whose order a reply with the output does not have."""
        return LoggedOutput(bytes(self._excerpt), self._size) if len(self._streams) < 2 else None


async def _collect(
    stream: CommandStream, max_bytes: int, logged: _LoggedOutput
) -> tuple[StreamTails, CommandEnded]:
    printed = StreamTails(max_bytes)
    async for event in stream:
        if isinstance(event, CommandEnded):
            return printed, event
        printed.take(event)
        logged.take(event)
    raise Bug("the events of a command ended without its exit", reason="INTERNAL")
