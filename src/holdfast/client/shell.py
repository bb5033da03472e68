"""A handle on a live shell in a sandbox, wherever that is: everything goes through `ExecApi`.

A handle holds no resources. Dropping it leaves the shell; another handle on the same id, in another program or
after a reconnect, goes on with the same state.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import Final

from holdfast.client.clean_up import clean_up_cancelled
from holdfast.client.collect import MIB, StreamTails
from holdfast.client.defaults import StrPath, check_env, optional_path
from holdfast.client.process import Process, write_pieces
from holdfast.errors import (
    InternalError,
    InvalidParams,
    ShellClosed,
    StdinClosed,
    UnknownProcess,
    UnknownShell,
)
from holdfast.exec_api import CommandStream, ExecApi
from holdfast.types import (
    CommandEnded,
    CommandEvent,
    CommandSpec,
    OutputChunk,
    OutputGap,
    ShellState,
    ShellStatus,
    Snapshot,
    StdinMode,
    Struct,
)

#: What `run` holds in memory of each stream at most; of more, the most recent is kept and `truncated` is set.
RUN_LIMIT_BYTES: Final = 256 * MIB

OnOutput = Callable[[OutputChunk | OutputGap], object]


class CommandResult(Struct, frozen=True):
    """What a command in a shell printed, and how it ended."""

    stdout_bytes: bytes
    stderr_bytes: bytes
    #: 124 after a timeout, 130 after an interrupt.
    exit_code: int
    #: The shell's working directory after it.
    cwd: str
    #: Seconds, from when the shell began it.
    duration: float
    timed_out: bool = False
    #: More was printed than is here: the most recent part is.
    truncated: bool = False
    #: The shell is a new one in the same directory: `restored` says with what of the old one.
    shell_restarted: bool = False
    #: `exports` (the exported variables), or `state` (variables, functions, aliases, options and traps).
    restored: str = ""
    #: `closed` if the command ended the shell; `reason` says how.
    state: ShellState = "idle"
    reason: str = ""

    @property
    def stdout(self) -> str:
        """As text; bytes that are no UTF-8 are shown as U+FFFD. `stdout_bytes` has them as they were."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """The same of stderr."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def success(self) -> bool:
        return self.exit_code == 0


class Shell:
    """One shell by its id. `cwd` and `state` are what was last heard of it; `describe` asks again."""

    def __init__(self, api: ExecApi, status: ShellStatus) -> None:
        self._api = api
        self._status = status
        self._cwd = status.cwd
        self._state: ShellState = status.state
        #: The command that was begun last with an open stdin.
        self._reads: str | None = None
        self._writing = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Shell {self.id!r} {self.state} in {self.cwd!r}>"

    @property
    def id(self) -> str:
        """The key that the caller chose."""
        return self._status.shell_id

    @property
    def pid(self) -> int:
        """The OS pid of the shell when it was last described."""
        return self._status.pid

    @property
    def cwd(self) -> str:
        """The working directory after the last command that was run here."""
        return self._cwd

    @property
    def state(self) -> ShellState:
        """`idle`, `running` or `closed`, as last heard."""
        return self._state

    async def describe(self) -> ShellStatus:
        """How the shell is now: what runs in it, how many commands wait, why it is closed."""
        self._status = status = await self._api.describe_shell(self.id)
        self._cwd, self._state = status.cwd, status.state
        return status

    # --- commands ------------------------------------------------------------------------------------------------

    async def run(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
        input: str | bytes | None = None,
        stdin: StdinMode = "closed",
        on_output: Callable[[OutputChunk | OutputGap], Awaitable[object] | object] | None = None,
        max_bytes: int = RUN_LIMIT_BYTES,
    ) -> CommandResult:
        """Run a command in the live shell and return what it printed and its exit code.

        Callers that come at once are served in their order. After `timeout` seconds the command and what it started
        in the foreground are ended, `timed_out` is set, and the shell goes on; so also when this call is cancelled.
        `cwd` and `env` are for this command alone. `on_output` is called with each piece as it is printed; if it
        returns an awaitable, that is awaited, and the command waits for it. With `stdin="open"` the command reads
        what `write` writes, up to `close_stdin` or its own end.
        """
        stream = self._begin(command, timeout, cwd, env, input, stdin, live=on_output is not None)
        printed = StreamTails(max_bytes)
        ended: CommandEnded | None = None
        try:
            async for event in stream:
                if isinstance(event, CommandEnded):
                    ended = event
                    break
                printed.take(event)
                if on_output is not None:
                    waiting = on_output(event)
                    if isinstance(waiting, Awaitable):
                        await waiting
        except ShellClosed:
            self._state = "closed"
            raise
        finally:
            await stream.aclose()
        if ended is None:
            raise InternalError(f"the events of a command in shell {self.id!r} ended without its end")
        self._heard(ended)
        return CommandResult(
            stdout_bytes=printed.stdout.value(),
            stderr_bytes=printed.stderr.value(),
            exit_code=ended.exit_code,
            cwd=ended.cwd,
            duration=ended.duration,
            timed_out=ended.timed_out,
            truncated=printed.truncated,
            shell_restarted=ended.shell_restarted,
            restored=ended.restored,
            state=ended.state,
            reason=ended.reason,
        )

    async def stream(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
        input: str | bytes | None = None,
        stdin: StdinMode = "closed",
    ) -> AsyncGenerator[CommandEvent, None]:
        """The same, event by event as it happens: output, and at last `CommandEnded`.

        Nothing is lost to a slow consumer: the command waits. Leaving the iteration early interrupts the command.
        """
        stream = self._begin(command, timeout, cwd, env, input, stdin, live=True)
        try:
            async for event in stream:
                if isinstance(event, CommandEnded):
                    self._heard(event)
                yield event
        except ShellClosed:
            self._state = "closed"
            raise
        finally:
            await stream.aclose()

    def _begin(
        self,
        command: str,
        timeout: float | None,
        cwd: StrPath | None,
        env: Mapping[str, str] | None,
        input: str | bytes | None,
        stdin: StdinMode,
        *,
        live: bool,
    ) -> CommandStream:
        if not isinstance(command, str):
            raise InvalidParams(f"command: a str, not {type(command).__name__}")
        if not command.isascii():
            try:
                command.encode()
            except UnicodeEncodeError:
                raise InvalidParams("command: holds half of a surrogate pair, which is no character") from None
        spec = CommandSpec(
            command_id=secrets.token_hex(8),
            command=command,
            cwd=optional_path(cwd),
            env=check_env(env),
            input=input.encode() if isinstance(input, str) else input,
            timeout=timeout,
            pipe_stdin=stdin == "open",
        )
        if spec.pipe_stdin and input is not None:
            raise InvalidParams("input: goes without stdin='open'; write it, and close stdin")
        try:
            stream = self._api.run_in_shell(self.id, spec, live=live)
        except ShellClosed:
            self._state = "closed"
            raise
        self._state = "running"
        if spec.pipe_stdin:
            self._reads = spec.command_id
        return stream

    async def write(self, data: str | bytes) -> None:
        """Write to the stdin of the command that this handle has begun last with `stdin="open"`.

        Returns when all was accepted, and waits while the command does not read. `StdinClosed` if the command has
        ended, or there was none.
        """
        try:
            await write_pieces(self._api, self._reading(), data, self._writing)
        except UnknownProcess:
            raise self._not_reading() from None

    async def close_stdin(self) -> None:
        """End of input for that command. Of a command that has ended, stdin is closed already."""
        with contextlib.suppress(UnknownProcess):
            await self._api.close_stdin(self._reading())

    def _reading(self) -> str:
        if self._reads is None:
            raise self._not_reading()
        return self._reads

    def _not_reading(self) -> StdinClosed:
        return StdinClosed(f"no command in shell {self.id!r} reads: run one with stdin='open'")

    def _heard(self, ended: CommandEnded) -> None:
        self._cwd, self._state = ended.cwd, ended.state

    async def start(self, command: str, *, id: str | None = None, stdin: StdinMode = "closed") -> Process:
        """Start a command in the background, as a process of its own that begins with the shell's state.

        It has the shell's directory, variables and functions as they are when its turn comes, runs beside the
        shell, outlives this handle, and is killed as a tree. What it changes does not come back to the shell. Its
        stdin is empty, or with `stdin="open"` what `Process.write` writes.
        """
        process_id = id if id is not None else secrets.token_hex(6)
        pipe_stdin = stdin == "open"
        return Process(
            self._api, await self._api.start_in_shell(self.id, command, process_id, pipe_stdin=pipe_stdin)
        )

    async def interrupt(self) -> bool:
        """End the command that runs, and all it started in the foreground. Returns whether one ran."""
        return await self._api.interrupt_shell(self.id)

    # --- what comes late -----------------------------------------------------------------------------------------

    async def output(self, since: int = 0) -> AsyncGenerator[OutputChunk | OutputGap, None]:
        """What background jobs print after their command has ended, as it comes, until the shell is closed."""
        stream = self._api.events(self.id, after_seq=since)
        try:
            async for event in stream:
                if isinstance(event, OutputChunk | OutputGap):
                    yield event
        finally:
            await stream.aclose()

    async def snapshot(self) -> Snapshot:
        """The same, as far as it is kept now."""
        return await self._api.snapshot(self.id)

    # --- its end -------------------------------------------------------------------------------------------------

    async def close(self, *, keep: bool = False, grace: float = 5.0) -> None:
        """End the shell and everything it started: TERM, up to `grace` seconds, KILL.

        Its EXIT trap runs. `keep` lets background jobs run on. A shell that is closed already may be closed again.
        """
        await self._api.close_shell(self.id, keep=keep, grace=grace)
        self._state = "closed"

    async def __aenter__(self) -> Shell:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError):
            await clean_up_cancelled(self._api, close_unknown(self._api, self.id), error)
            self._state = "closed"
            return
        # One that was closed long ago may be forgotten.
        with contextlib.suppress(UnknownShell):
            await self.close()


async def close_unknown(api: ExecApi, shell_id: str) -> None:
    """Close a shell that may have been opened or not."""
    with contextlib.suppress(UnknownShell):
        await api.close_shell(shell_id, grace=0.0)
