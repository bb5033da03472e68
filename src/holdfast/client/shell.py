"""A handle on a live shell in a sandbox; all its calls go through `ExecApi`.

A handle holds no resources. Dropping it leaves the shell open; another handle on the same id, in another program or
after a reconnect, continues with the same state.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import Final

from holdfast.client.collect import MIB, StreamTails
from holdfast.client.connection.clean_up import clean_up_cancelled
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
    JobsAtClose,
    OutputChunk,
    OutputGap,
    ShellState,
    ShellStatus,
    Snapshot,
    StdinMode,
    Struct,
)

#: The most that `run` holds in memory of each stream; of more output the latest part is kept.
RUN_LIMIT_BYTES: Final = 256 * MIB


class CommandResult(Struct, frozen=True):
    """The output of a command in a shell, and how it ended."""

    stdout_bytes: bytes
    stderr_bytes: bytes
    #: 124 after a timeout, 130 after an interrupt.
    exit_code: int
    #: The shell's working directory after it.
    cwd: str
    #: Seconds since the shell began it.
    duration: float
    timed_out: bool = False
    #: More was printed: this is the most recent part.
    truncated: bool = False
    #: The shell was replaced by a new one in the same directory, with the state that `restored` names.
    shell_restarted: bool = False
    #: `exports` (the exported variables), or `state` (variables, functions, aliases, options and traps).
    restored: str = ""
    #: `closed` if the command ended the shell, for the `reason`.
    state: ShellState = "idle"
    reason: str = ""
    #: The kernel killed one of its processes for memory, and its exit code is that process's.
    oom: bool = False
    #: With `timed_out`: it had printed nothing for its `silence`.
    silent: bool = False

    @property
    def stdout(self) -> str:
        """stdout as text; bytes that are not UTF-8 become U+FFFD. `stdout_bytes` has the raw bytes."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """stderr as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def success(self) -> bool:
        return self.exit_code == 0


class Shell:
    """One shell by its id. `cwd` and `state` are the last known values; `describe` updates them."""

    def __init__(self, api: ExecApi, status: ShellStatus) -> None:
        self._api = api
        self._status = status
        self._cwd = status.cwd
        self._state: ShellState = status.state
        #: The last command that was started with an open stdin.
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
        """The last known state, one of `ShellStates`."""
        return self._state

    async def describe(self) -> ShellStatus:
        """Fetch the current status: the running command, the queue, the reason of its end."""
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
        silence: float | None = None,
    ) -> CommandResult:
        """Run a command in the live shell and return its output and exit code.

        Concurrent calls run in order. After `timeout` seconds, and when this call is cancelled, the command and its
        foreground processes are ended and the shell continues; a timeout sets `timed_out`. `cwd` and `env` are for
        this command alone. `on_output` is called with each piece of output; if it returns an awaitable, the command
        waits for it. With `stdin="open"` the command reads the data of `write`, up to `close_stdin` or its end. A
        command that prints nothing for `silence` seconds is ended like one that timed out; its result is `silent`.
        """
        stream = self._begin(command, timeout, cwd, env, input, stdin, silence, live=on_output is not None)
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
        self._cwd, self._state = ended.cwd, ended.state
        return command_result(printed, ended)

    async def stream(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
        input: str | bytes | None = None,
        stdin: StdinMode = "closed",
        silence: float | None = None,
    ) -> AsyncGenerator[CommandEvent, None]:
        """Run a command and yield its events as they happen: output, and at last `CommandEnded`.

        A slow consumer loses nothing: the command waits. Leaving the iteration early interrupts the command.
        """
        stream = self._begin(command, timeout, cwd, env, input, stdin, silence, live=True)
        try:
            async for event in stream:
                if isinstance(event, CommandEnded):
                    self._cwd, self._state = event.cwd, event.state
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
        silence: float | None,
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
            command_id=os.urandom(8).hex(),
            command=command,
            cwd=optional_path(cwd),
            env=check_env(env),
            input=input.encode() if isinstance(input, str) else input,
            timeout=timeout,
            pipe_stdin=stdin == "open",
            silence=silence,
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
        """Write to the stdin of the last command of this handle with `stdin="open"`.

        Returns when all was accepted; waits while the command does not read. `StdinClosed` if the command has
        ended, or there was none.
        """
        try:
            await write_pieces(self._api, self._reading(), data, self._writing)
        except UnknownProcess:
            raise self._not_reading() from None

    async def close_stdin(self) -> None:
        """Close the stdin of that command; no effect if the command has ended."""
        with contextlib.suppress(UnknownProcess):
            await self._api.close_stdin(self._reading())

    def _reading(self) -> str:
        if self._reads is None:
            raise self._not_reading()
        return self._reads

    def _not_reading(self) -> StdinClosed:
        return StdinClosed(f"no command in shell {self.id!r} reads: run one with stdin='open'")

    async def start(self, command: str, *, id: str | None = None, stdin: StdinMode = "closed") -> Process:
        """Start a command in the background, as a separate process that begins with the shell's state.

        It gets the shell's directory, variables and functions at its turn in the queue, runs beside the shell,
        outlives this handle, and is killed as a tree. Its changes do not affect the shell. Its stdin is empty, or
        with `stdin="open"` writable by `Process.write`.
        """
        process_id = id if id is not None else secrets.token_hex(6)
        pipe_stdin = stdin == "open"
        return Process(
            self._api, await self._api.start_in_shell(self.id, command, process_id, pipe_stdin=pipe_stdin)
        )

    async def interrupt(self) -> bool:
        """End the running command and its foreground processes. Returns whether one was running."""
        return await self._api.interrupt_shell(self.id)

    # --- late output ---------------------------------------------------------------------------------------------

    async def output(self, since: int = 0) -> AsyncGenerator[OutputChunk | OutputGap, None]:
        """Output of background jobs after their command has ended, as it is printed, until the shell is closed."""
        stream = self._api.events(self.id, after_seq=since)
        try:
            async for event in stream:
                if isinstance(event, OutputChunk | OutputGap):
                    yield event
        finally:
            await stream.aclose()

    async def snapshot(self) -> Snapshot:
        """The late output that is retained now."""
        return await self._api.snapshot(self.id)

    # --- closing -------------------------------------------------------------------------------------------------

    async def close(self, *, jobs: JobsAtClose = "kill", grace: float = 5.0, keep: bool = False) -> None:
        """End the shell and everything it started: TERM, up to `grace` seconds, KILL.

        Its EXIT trap runs. Background jobs end with it, or continue with `jobs="keep"` (or the older `keep=True`).
        Closing a closed shell is no error.
        """
        await self._api.close_shell(self.id, keep=keep or jobs == "keep", grace=grace)
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
        # A shell that was closed long ago is no longer known.
        with contextlib.suppress(UnknownShell):
            await self.close()


def command_result(printed: StreamTails, ended: CommandEnded) -> CommandResult:
    """The result of a command with this output and end."""
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
        oom=ended.oom,
        silent=ended.silent,
    )


async def close_unknown(api: ExecApi, shell_id: str) -> None:
    """Close a shell that may not have been opened."""
    with contextlib.suppress(UnknownShell):
        await api.close_shell(shell_id, grace=0.0)
