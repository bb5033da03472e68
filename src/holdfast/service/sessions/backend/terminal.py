"""One session in its sandbox: opened, typed into, read, stopped and closed; and the terminal kind of it.

The shell kind (`live_shell`) has the same face. Nothing of a session is kept here: what it is and what it printed,
its sandbox knows, so another replica's object on the same session sees the same.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import re
from collections.abc import Awaitable, Sequence
from typing import Final, Protocol

import msgspec

from holdfast.errors import InvalidParams, TerminalClosed, UnknownTerminal
from holdfast.exec_api import ExecApi
from holdfast.service.api import Chunk, Control, OutputRead, Prompt
from holdfast.service.positions import Position, read_token, write_token
from holdfast.service.problems import BadToken, NotNow, TooLate
from holdfast.service.sessions.backend.connections import SandboxPool
from holdfast.service.sessions.backend.output import PROMPT_BYTES, Piece, terminal_chunks, unfinished_line
from holdfast.service.sessions.ports import Enforcement
from holdfast.service.settings import ServiceSettings
from holdfast.service.types import CloseMode, SessionRecord, State, Struct
from holdfast.types import EnvPolicy, JobsAtClose, TerminalRead, TerminalSize, TerminalSpec, TerminalStatus

#: How long a reader waits for output alone, before it is also looked whether a program asks for input.
_MOMENT_SECONDS: Final = 0.02
_KEYS: Final = {"CTRL_C": b"\x03", "CTRL_D": b"\x04"}
#: To the end of the line, and delete all before it, in the line editors of bash and zsh.
_CLEAR_LINE: Final = b"\x05\x15"
#: After an interrupt. bash notes one that comes while it does not block in read(2), and acts on it when it has
#: taken the first byte of the next line: an empty line has none to lose.
_NEW_LINE: Final = _CLEAR_LINE + b"\r"
_LINE_END: Final = re.compile(rb"[\r\n]")
#: Any other control character may do anything: complete, search, leave the shell.
_KEY: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_PASTE: Final = (b"\x1b[200~", b"\x1b[201~")


class Now(Struct, frozen=True):
    """How a session is now, as its sandbox says."""

    state: State
    cwd: str = ""
    prompt: str = ""
    #: The terminal's position; of a shell how many commands it ran.
    position: int = 0
    awaiting_input: bool = False
    #: It shows a continuation prompt: what is typed is more of a command.
    continuation: bool = False
    #: What is typed is not shown: a password.
    hidden: bool = False
    #: An interrupt was typed or sent, and no line was entered since: the shell can drop the next line's first byte.
    interrupted: bool = False
    #: The program that waits for input is the session's shell, or another shell of that name: `read`.
    shell_reads: bool = False
    queue_busy: bool = False
    last_exit_code: int | None = None
    exit_code: int | None = None
    reason: str = ""

    @property
    def drops_a_byte(self) -> bool:
        """Whether the shell, at its prompt, can drop the first byte of its next line: input needs a new line."""
        return self.interrupted and self.state == "IDLE"


class Ran(Struct, frozen=True):
    """How a command ended that was run to its end."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    duration: float
    state: State
    cwd: str = ""
    timed_out: bool = False
    truncated: bool = False


class Live(Protocol):
    """What a session of either kind can do. Errors are `Problem`s."""

    async def open(self, environment: dict[str, str], plan: Enforcement) -> tuple[Now, str]:
        """Start it and wait for its first prompt: how it is, and the token after what is shown."""
        ...

    async def now(self, *, look: bool = True) -> Now:
        """Without a look, which is quicker, it is not known whether a program waits for input."""
        ...

    async def settled(self) -> Now:
        """The same after something was typed: what waits to be run makes it BUSY."""
        ...

    async def send(
        self, command_id: str, data: bytes, controls: Sequence[Control], *, new_line: bool = False
    ) -> None:
        """Type and signal; with `new_line`, `data` begins on a new, empty line of the shell."""
        ...

    async def type_command(self, command_id: str, command: str) -> None:
        """Have it run, whatever stands on the line; nobody waits for its end."""
        ...

    async def run(self, command_id: str, command: str, timeout: float, max_bytes: int) -> Ran: ...

    async def read(self, since: str, max_bytes: int, wait: float) -> OutputRead: ...

    async def close(self, mode: CloseMode) -> None:
        """End it; one that is closed or gone already is closed."""
        ...


class TerminalLive:
    """A session with a terminal."""

    def __init__(self, record: SessionRecord, pool: SandboxPool, settings: ServiceSettings) -> None:
        self._record = record
        self._id = record.session_id
        self._pool = pool
        self._settings = settings

    async def open(self, environment: dict[str, str], plan: Enforcement) -> tuple[Now, str]:
        record = self._record
        spec = TerminalSpec(
            terminal_id=self._id,
            argv=(record.shell,) if record.shell else None,
            size=TerminalSize(record.rows, record.cols),
            cwd=record.initial_cwd or None,
            env=environment,
            env_policy=EnvPolicy.minimal(*record.policy.inherited_variables),
            limits=plan.limits,
            user=plan.user,
            start_id=self._id,
        )
        if plan.confinement is not None:
            spec = msgspec.structs.replace(spec, confinement=plan.confinement)
        async with self._pool.use(record.sandbox) as api:
            status = await api.open_terminal(spec)
            if status.integration:
                _, status = await api.wait_terminal(self._id, "idle", timeout=self._settings.prompt_seconds)
            shown = terminal_chunks(self._id, Position(), await api.read_terminal(self._id))
        return _terminal_now(status), write_token(self._id, shown.position)

    async def now(self, *, look: bool = True) -> Now:
        async with self._pool.use(self._record.sandbox) as api:
            return _terminal_now(await api.describe_terminal(self._id, look=look))

    async def settled(self) -> Now:
        async with self._pool.use(self._record.sandbox) as api:
            return _terminal_now(await self._settled(api))

    async def send(
        self, command_id: str, data: bytes, controls: Sequence[Control], *, new_line: bool = False
    ) -> None:
        if data and new_line:
            data = _NEW_LINE + data
        async with self._pool.use(self._record.sandbox) as api:
            await self._in_time(self._send(api, command_id, data, controls))

    async def _send(self, api: ExecApi, command_id: str, data: bytes, controls: Sequence[Control]) -> None:
        if data:
            await api.write(self._id, data, write_id=command_id)
        for number, control in enumerate(controls):
            action_id = f"{command_id}.{number}"
            if control.type in _KEYS:
                await api.write(self._id, _KEYS[control.type], write_id=action_id)
            elif control.type == "RESIZE":
                await api.resize(self._id, TerminalSize(control.rows, control.cols))
            else:
                await api.signal(self._id, control.type, signal_id=action_id)

    async def line_begun(self, timeout: float) -> bool:
        """Wait until the shell has begun or dropped each line typed at its prompt; False after the timeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        async with self._pool.use(self._record.sandbox) as api:
            while True:
                idle, status = await api.wait_terminal(self._id, "idle", timeout=0.0)
                left = deadline - loop.time()
                if idle or status.state != "IDLE" or left <= 0:
                    return idle or status.state != "IDLE"
                # The mark of the beginning of a command is a change; so is that the shell waits for input again.
                await api.wait_terminal(self._id, "change", timeout=left, changes=status.changes)

    async def input_awaited(self, timeout: float) -> Now:
        """Wait until the shell or a program waits for input; how the session is then, or after the timeout."""
        async with self._pool.use(self._record.sandbox) as api:
            _, status = await api.wait_terminal(self._id, "awaitingInput", timeout=timeout)
        return _terminal_now(status)

    async def _in_time(self, work: Awaitable[None]) -> None:
        limit = self._settings.input_seconds
        try:
            async with asyncio.timeout(limit):
                await work
        except builtins.TimeoutError:
            raise TooLate(
                f"session {self._id!r}: what runs there did not take the input within {limit:g} s",
                reason="INPUT_NOT_TAKEN",
            ) from None

    async def type_command(self, command_id: str, command: str) -> None:
        text = command.rstrip("\r\n").encode()
        async with self._pool.use(self._record.sandbox) as api:
            if (await api.describe_terminal(self._id, look=False)).continuation:
                # It would be typed into the command that is not complete, and run as something else.
                await self._in_time(api.write(self._id, _KEYS["CTRL_C"], write_id=f"{command_id}.line"))
            at_prompt, status = await api.wait_terminal(self._id, "idle", timeout=self._settings.input_seconds)
            if not at_prompt:
                raise NotNow(f"session {self._id!r} shows no prompt: it is {status.state}", reason="SESSION_BUSY")
            if not text.isascii() or any(byte < 0x20 or byte == 0x7F for byte in text):
                if _PASTE[1] in text or not status.bracketed_paste:
                    raise InvalidParams("the command holds keys that cannot be typed as text here")
                text = text.join(_PASTE)
            begin = _NEW_LINE if status.interrupted else _CLEAR_LINE
            await self._in_time(api.write(self._id, begin + text + b"\r", write_id=command_id))

    async def run(self, command_id: str, command: str, timeout: float, max_bytes: int) -> Ran:
        async with self._pool.use(self._record.sandbox) as api:
            ended = await api.run_in_terminal(
                self._id, command, timeout=timeout, max_bytes=max_bytes, run_id=command_id
            )
            cwd = (await api.describe_terminal(self._id, look=False)).cwd
        return Ran(
            exit_code=ended.exit_code,
            stdout=ended.output,
            stderr=b"",
            duration=ended.duration,
            state=ended.state,
            cwd=cwd,
            timed_out=ended.timed_out,
            truncated=ended.truncated,
        )

    async def read(self, since: str, max_bytes: int, wait: float) -> OutputRead:
        position = read_token(self._id, since)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        async with self._pool.use(self._record.sandbox) as api:
            found = await api.read_terminal(self._id, since=position.seq, max_bytes=max_bytes)
            if found.token < position.seq:
                raise BadToken("since: a position that this session has not reached", reason="BAD_TOKEN")
            if found.token == position.seq and not found.closed and wait > 0:
                # Who was told that a program waits for input, and types nothing, is not told again.
                asked = found.state in ("BUSY", "RUNNING") and not position.part
                reading = api.read_terminal(self._id, since=position.seq, max_bytes=max_bytes, wait=wait)
                found = await (self._first(api, reading, wait) if asked else reading) or found
            piece = terminal_chunks(self._id, position, found)
            asked_with: Prompt | None = None
            if found.state in ("BUSY", "RUNNING"):
                asks = await self._asked(api, position, piece, deadline - loop.time())
                piece, asked_with = asks or (piece, None)
            state: State = found.state
            if state == "IDLE" and not (piece.chunks and piece.chunks[-1].prompt):
                state = (await self._settled(api)).state
        printed = sum(len(chunk.payload) for chunk in piece.chunks)
        if asked_with is not None:
            piece = _with_prompt(self._id, piece, asked_with, found.state)
        token = write_token(self._id, piece.position)
        return OutputRead(tuple(piece.chunks), state, token, more=printed >= max_bytes)

    async def _settled(self, api: ExecApi) -> TerminalStatus:
        """The status; of a terminal that shows a prompt BUSY, if a line that was typed there has not begun yet."""
        try:
            idle, status = await api.wait_terminal(self._id, "idle", timeout=0.0)
        except TerminalClosed:
            return await api.describe_terminal(self._id)
        waiting = status.state == "IDLE" and not idle
        return msgspec.structs.replace(status, state="BUSY") if waiting else status

    async def _first(self, api: ExecApi, reading: Awaitable[TerminalRead], wait: float) -> TerminalRead | None:
        """What is read; None if a program waits for input before there is anything."""
        news = asyncio.ensure_future(reading)
        asking: asyncio.Future[tuple[bool, TerminalStatus]] | None = None
        try:
            # Most programs print or end before they would ask, and to see who waits is a look at all processes.
            await asyncio.wait([news], timeout=min(wait, _MOMENT_SECONDS))
            if news.done():
                return await news
            asking = asyncio.ensure_future(api.wait_terminal(self._id, "awaitingInput", timeout=wait))
            await asyncio.wait([news, asking], return_when=asyncio.FIRST_COMPLETED)
            if not news.done() and asking.exception() is None:
                reached, status = asking.result()
                if reached and _runs(status):
                    return None
            return await news
        finally:
            news.cancel()
            if asking is not None:
                asking.cancel()
            await asyncio.gather(news, *filter(None, [asking]), return_exceptions=True)

    async def _asked(self, api: ExecApi, since: Position, piece: Piece, left: float) -> tuple[Piece, Prompt] | None:
        """If a program asks for input, and that is news to a reader who was at `since`: with what, and all that was
        printed before it asked."""
        line = unfinished_line(piece.chunks)
        if piece.chunks and not line:
            return None  # it printed whole lines, or more happened: it does not ask, or the next read tells
        if not piece.chunks and (since.part or piece.position.seq != since.seq):
            return None
        settle = min(left, self._settings.settle_seconds)
        if line and settle > 0:
            # It printed a prompt, and is about to read: the kernel tells a moment later.
            _, status = await api.wait_terminal(self._id, "awaitingInput", timeout=settle)
        else:
            status = await api.describe_terminal(self._id)
        if not status.awaiting_input or not _runs(status):
            return None
        # What came meanwhile belongs before it; and the line that it asks with may have begun in an earlier read.
        rest = terminal_chunks(
            self._id, piece.position, await api.read_terminal(self._id, since=piece.position.seq)
        )
        whole = Piece([*piece.chunks, *rest.chunks], rest.position)
        before = max(0, whole.position.seq - PROMPT_BYTES)
        shown = await api.read_terminal(self._id, since=before, max_bytes=whole.position.seq - before)
        if shown.state not in ("BUSY", "RUNNING"):
            return None
        line = unfinished_line(terminal_chunks(self._id, Position(), shown).chunks)
        return whole, Prompt(line, awaiting_input=True, password=bool(status.password_prompt))

    async def close(self, mode: CloseMode) -> None:
        record = self._record
        jobs: JobsAtClose = "keep" if record.policy.allow_background else "kill"
        async with self._pool.use(record.sandbox) as api:
            with contextlib.suppress(UnknownTerminal):
                await api.close_terminal(
                    self._id, mode=mode, jobs=jobs, grace=self._settings.close_grace if mode == "graceful" else 0.0
                )


def begins_a_line(record: SessionRecord, now: Now, data: bytes, controls: Sequence[Control]) -> bool:
    """Whether a whole line was typed at a terminal's prompt.

    Then it is BUSY with that and need not be asked, for which its server looks at all processes.
    """
    at_prompt = record.kind == "terminal" and now.state == "IDLE" and not controls
    return at_prompt and _LINE_END.search(data) is not None and _KEY.search(data) is None


def _runs(status: TerminalStatus) -> bool:
    """Whether a program may ask for input. A continuation prompt is told as such, with its event."""
    return status.state in ("BUSY", "RUNNING") and not status.continuation


def _terminal_now(status: TerminalStatus) -> Now:
    return Now(
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


def _with_prompt(session_id: str, piece: Piece, asks: Prompt, state: State) -> Piece:
    """The same, and the reader has been told that a program waits."""
    told = piece.position._replace(part=1)
    token = write_token(session_id, told)
    if not piece.chunks:
        return Piece([Chunk(session_id, token, 0.0, state, prompt=asks)], told)
    *earlier, last = piece.chunks
    return Piece([*earlier, msgspec.structs.replace(last, prompt=asks, token=token)], told)
