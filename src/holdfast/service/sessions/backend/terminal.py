"""The terminal kind of session: an interactive shell on a PTY in the sandbox."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import re
from collections.abc import Awaitable, Sequence
from typing import Final

import msgspec

from holdfast.errors import HoldfastError, InvalidParams, TerminalClosed, UnknownTerminal
from holdfast.exec_api import ExecApi
from holdfast.service.api import Chunk, Control, OutputRead, PromptInfo
from holdfast.service.positions import Position, read_token, write_token
from holdfast.service.problems import BadToken, NotNow, TooLate
from holdfast.service.sessions.backend.connections import problem_of
from holdfast.service.sessions.backend.enforcement import EnforcementPlan
from holdfast.service.sessions.backend.output import OutputSlice, terminal_chunks
from holdfast.service.sessions.backend.session_backend import (
    BackendStatus,
    CommandOutcome,
    SessionBackend,
    traced,
)
from holdfast.service.types import CloseMode, SessionRecord, State
from holdfast.types import (
    EnvPolicy,
    JobsAtClose,
    ReadOutcome,
    ReadUntil,
    TerminalSize,
    TerminalSpec,
    TerminalStatus,
)

_KEYS: Final = {"CTRL_C": b"\x03", "CTRL_D": b"\x04"}
#: Moves to the end of the line and deletes all before it, in the line editors of bash and zsh.
_CLEAR_LINE: Final = b"\x05\x15"
#: After an interrupt. bash defers an interrupt that arrives outside read(2) until it has read the first byte of the
#: next line, and drops that byte: an empty line has none to lose.
_NEW_LINE: Final = _CLEAR_LINE + b"\r"
_LINE_END: Final = re.compile(rb"[\r\n]")
#: Any other control character can have any effect: complete, search, leave the shell.
_KEY: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_PASTE: Final = (b"\x1b[200~", b"\x1b[201~")


class TerminalBackend(SessionBackend):
    """A session with a terminal."""

    @traced("open_terminal")
    async def open(self, environment: dict[str, str], plan: EnforcementPlan) -> tuple[BackendStatus, str]:
        record = self._record
        spec = TerminalSpec(
            terminal_id=self.session_id,
            argv=(record.shell,) if record.shell else None,
            size=TerminalSize(record.rows, record.cols),
            cwd=record.initial_cwd or None,
            env=environment,
            env_policy=EnvPolicy.minimal(*record.policy.inherited_variables),
            limits=plan.limits,
            user=plan.user,
            start_id=self.session_id,
        )
        if plan.confinement is not None:
            spec = msgspec.structs.replace(spec, confinement=plan.confinement)
        async with self._pool.use(record.sandbox) as api:
            status = await api.open_terminal(spec)
            if status.integration:
                _, status = await api.wait_terminal(self.session_id, "idle", timeout=self._settings.prompt_seconds)
            shown = terminal_chunks(self.session_id, Position(), await api.read_terminal(self.session_id))
        return _backend_status(status), write_token(self.session_id, shown.position)

    async def status(self, *, input_wait: bool = True) -> BackendStatus:
        async with self._pool.use(self._record.sandbox) as api:
            return _backend_status(await api.describe_terminal(self.session_id, look=input_wait))

    async def status_after_input(self) -> BackendStatus:
        async with self._pool.use(self._record.sandbox) as api:
            return _backend_status(await self._after_input(api))

    @traced("send")
    async def send(
        self, command_id: str, data: bytes, controls: Sequence[Control], *, new_line: bool = False
    ) -> None:
        if data and new_line:
            data = _NEW_LINE + data
        async with self._pool.use(self._record.sandbox) as api:
            await self._in_time(self._send(api, command_id, data, controls))

    async def _send(self, api: ExecApi, command_id: str, data: bytes, controls: Sequence[Control]) -> None:
        if data:
            await api.write(self.session_id, data, write_id=command_id)
        for number, control in enumerate(controls):
            action_id = f"{command_id}.{number}"
            if control.type in _KEYS:
                await api.write(self.session_id, _KEYS[control.type], write_id=action_id)
            elif control.type == "RESIZE":
                await api.resize(self.session_id, TerminalSize(control.rows, control.cols))
            else:
                await api.signal(self.session_id, control.type, signal_id=action_id)

    async def line_begun(self, timeout: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        async with self._pool.use(self._record.sandbox) as api:
            while True:
                idle, status = await api.wait_terminal(self.session_id, "idle", timeout=0.0)
                left = deadline - loop.time()
                if idle or status.state != "IDLE" or left <= 0:
                    return idle or status.state != "IDLE"
                # The mark at the start of a command is a change, and so is the next read of the shell.
                await api.wait_terminal(self.session_id, "change", timeout=left, changes=status.changes)

    async def input_awaited(self, timeout: float) -> BackendStatus:
        async with self._pool.use(self._record.sandbox) as api:
            _, status = await api.wait_terminal(self.session_id, "awaitingInput", timeout=timeout)
        return _backend_status(status)

    async def _in_time(self, work: Awaitable[None]) -> None:
        limit = self._settings.input_seconds
        try:
            async with asyncio.timeout(limit):
                await work
        except builtins.TimeoutError:
            raise TooLate(
                f"session {self.session_id!r}: the program did not read the input within {limit:g} s",
                reason="INPUT_NOT_TAKEN",
            ) from None

    @traced("send")
    async def type_command(self, command_id: str, command: str) -> None:
        text = command.rstrip("\r\n").encode()
        async with self._pool.use(self._record.sandbox) as api:
            if (await api.describe_terminal(self.session_id, look=False)).continuation:
                # The text would become part of the incomplete command.
                await self._in_time(api.write(self.session_id, _KEYS["CTRL_C"], write_id=f"{command_id}.line"))
            at_prompt, status = await api.wait_terminal(
                self.session_id, "idle", timeout=self._settings.input_seconds
            )
            if not at_prompt:
                raise NotNow(
                    f"session {self.session_id!r} shows no prompt: it is {status.state}", reason="SESSION_BUSY"
                )
            if not text.isascii() or any(byte < 0x20 or byte == 0x7F for byte in text):
                if _PASTE[1] in text or not status.bracketed_paste:
                    raise InvalidParams("the command has keys that cannot be typed as text here")
                text = text.join(_PASTE)
            begin = _NEW_LINE if status.interrupted else _CLEAR_LINE
            await self._in_time(api.write(self.session_id, begin + text + b"\r", write_id=command_id))

    async def names_runs(self) -> bool:
        try:
            return "run_ids" in (await self._pool.info(self._record.sandbox)).features
        except HoldfastError as error:
            raise problem_of(error, self._record.sandbox) from error

    @traced("run")
    async def run(self, command_id: str, command: str, timeout: float, max_bytes: int) -> CommandOutcome:
        async with self._pool.use(self._record.sandbox) as api:
            ended = await api.run_in_terminal(
                self.session_id, command, timeout=timeout, max_bytes=max_bytes, run_id=command_id
            )
            cwd = ended.cwd or (await api.describe_terminal(self.session_id, look=False)).cwd
        return CommandOutcome(
            exit_code=ended.exit_code,
            stdout=ended.output,
            stderr=b"",
            duration=ended.duration,
            state=ended.state,
            cwd=cwd,
            timed_out=ended.timed_out,
            truncated=ended.truncated,
        )

    @traced("read")
    async def read(self, since: str, max_bytes: int, wait: float) -> OutputRead:
        position = read_token(self.session_id, since)
        # A prompt of a program is reported once at a position.
        settle = round(1000 * self._settings.settle_seconds)
        # At the shell's prompt, the answer has no use for a scan of processes.
        until = ReadUntil(input=not position.part, size=1, settle_ms=settle, look=False)
        async with self._pool.use(self._record.sandbox) as api:
            found = await api.read_terminal(
                self.session_id, since=position.seq, max_bytes=max_bytes, wait=wait, until=until
            )
            if found.token < position.seq:
                raise BadToken("since: a position that this session has not reached", reason="BAD_TOKEN")
            outcome = found.outcome or await self._outcome(api)
        piece = terminal_chunks(self.session_id, position, found)
        more = sum(len(chunk.payload) for chunk in piece.chunks) >= max_bytes
        status, state = outcome.terminal, found.state
        # A continuation prompt of the shell has its own event.
        reads = status.awaiting_input and state in ("BUSY", "RUNNING") and not status.continuation
        # Output after the read belongs before the prompt: the next read reports the prompt.
        if reads and status.token == found.token and not (position.part and found.token == position.seq):
            prompt = PromptInfo(outcome.line, awaiting_input=True, password=bool(status.password_prompt))
            piece = _with_prompt(self.session_id, piece, prompt, state)
        if state == "IDLE" and not outcome.idle and not (piece.chunks and piece.chunks[-1].prompt):
            state = "BUSY"
        return OutputRead(tuple(piece.chunks), state, write_token(self.session_id, piece.position), more=more)

    async def _outcome(self, api: ExecApi) -> ReadOutcome:
        """Return the state after a read, for a server that predates `until`."""
        status = await self._after_input(api)
        return ReadOutcome(None, status.state == "IDLE", "", status)

    async def _after_input(self, api: ExecApi) -> TerminalStatus:
        """Return the status; BUSY if a line that was typed at the prompt has not begun."""
        try:
            idle, status = await api.wait_terminal(self.session_id, "idle", timeout=0.0)
        except TerminalClosed:
            return await api.describe_terminal(self.session_id)
        waiting = status.state == "IDLE" and not idle
        return msgspec.structs.replace(status, state="BUSY") if waiting else status

    @traced("close")
    async def close(self, mode: CloseMode) -> None:
        record = self._record
        jobs: JobsAtClose = "keep" if record.policy.allow_background else "kill"
        async with self._pool.use(record.sandbox) as api:
            with contextlib.suppress(UnknownTerminal):
                await api.close_terminal(
                    self.session_id,
                    mode=mode,
                    jobs=jobs,
                    grace=self._settings.close_grace if mode == "graceful" else 0.0,
                )


def begins_a_line(record: SessionRecord, now: BackendStatus, data: bytes, controls: Sequence[Control]) -> bool:
    """Return whether a whole line was typed at a terminal's prompt.

    The terminal is then BUSY, and no query of its status, which scans all processes, is needed.
    """
    at_prompt = record.kind == "terminal" and now.state == "IDLE" and not controls
    return at_prompt and _LINE_END.search(data) is not None and _KEY.search(data) is None


def _backend_status(status: TerminalStatus) -> BackendStatus:
    return BackendStatus(
        state=status.state,
        cwd=status.cwd,
        prompt=status.prompt or "",
        position=status.token,
        awaiting_input=bool(status.awaiting_input),
        continuation=status.continuation,
        hidden=status.canonical and not status.echo,
        interrupted=status.interrupted,
        shell_reads=bool(status.awaiting_input) and status.foreground == status.integration,
        queue_busy=status.input_queued > 0,
        last_exit_code=status.last_exit_code,
        exit_code=status.exit_code,
        reason=status.reason,
    )


def _with_prompt(session_id: str, piece: OutputSlice, asks: PromptInfo, state: State) -> OutputSlice:
    """Return the slice with the prompt of a program, and with a position that marks the prompt as reported."""
    reported = piece.position._replace(part=1)
    token = write_token(session_id, reported)
    if not piece.chunks:
        return OutputSlice([Chunk(session_id, token, 0.0, state, prompt=asks)], reported)
    *earlier, last = piece.chunks
    return OutputSlice([*earlier, msgspec.structs.replace(last, prompt=asks, token=token)], reported)
