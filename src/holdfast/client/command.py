"""The parts that `exec` and `exec_remote` share: starting a command, its input, kill, result, and run to the end.

A command has ended when its leader process has. Output up to then is complete; later output of child processes is
not awaited, and they continue. All calls go through `ExecApi`.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import shlex
from collections.abc import Sequence
from typing import Final, Literal, Protocol, runtime_checkable

from holdfast.client.collect import MIB, StreamTails, leading_continuation, shown
from holdfast.client.connection.clean_up import clean_up_cancelled, shielded
from holdfast.client.defaults import StrPath
from holdfast.client.process import write_pieces
from holdfast.errors import (
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    CommandFailed,
    CommandNotFound,
    DuplicateProcess,
    HoldfastError,
    InternalError,
    InvalidParams,
    NotExecutable,
    SilenceTimeout,
    StdinClosed,
    TimeoutError,
    UnknownProcess,
)
from holdfast.exec_api import EventStream, ExecApi
from holdfast.types import Exited, ExitStatus, OutputChunk, OutputGap, ProcessInfo, ProcessSpec, Struct

#: How a missing or non-executable command is reported: an error, or a result as from a shell.
StartErrors = Literal["raise", "result"]
#: The retained output of each stream of a command: the most recent part.
OUTPUT_LIMIT_BYTES: Final = 10 * MIB
#: The length of a command or a line of stderr in the message of an error: a screen's two or three lines.
SHOWN_CHARACTERS: Final = 200
#: How long to wait for the exit event of a killed command. The kill returns when no process is left, so this time
#: passes only if the sandbox does not answer.
_END_AFTER_KILL_SECONDS: Final = 5.0


def oom_note(oom: bool) -> str:
    """The end of the output of a command that the kernel killed for memory, for results that have only text."""
    return "\nKilled: out of memory\n" if oom else ""


class ExecResult(Struct, frozen=True):
    """The result of a command: its exit code and the most recent 10 MiB of each stream."""

    exit_code: int
    stdout_bytes: bytes
    stderr_bytes: bytes
    #: Output is missing.
    truncated: bool = False
    #: How much each stream printed before the part that is here.
    omitted_stdout_bytes: int = 0
    omitted_stderr_bytes: int = 0
    #: The kernel killed the command for memory, or a child whose exit code 137 it passed on.
    oom: bool = False

    def __repr__(self) -> str:
        return (
            f"ExecResult(exit_code={self.exit_code}, stdout_bytes={shown(self.stdout_bytes)}, "
            f"stderr_bytes={shown(self.stderr_bytes)}, truncated={self.truncated})"
        )

    @property
    def returncode(self) -> int:
        """The exit code, by the name that `subprocess` uses."""
        return self.exit_code

    @property
    def success(self) -> bool:
        return self.exit_code == 0

    @property
    def stdout(self) -> str:
        """stdout as text; bytes that are not UTF-8 become U+FFFD."""
        return _text(self.stdout_bytes, bool(self.omitted_stdout_bytes))

    @property
    def stderr(self) -> str:
        """stderr as text; bytes that are not UTF-8 become U+FFFD."""
        return _text(self.stderr_bytes, bool(self.omitted_stderr_bytes))


def check_command(cmd: Sequence[StrPath]) -> tuple[str, ...]:
    """Check and return the argument vector. A plain string, which is a sequence of characters, is refused."""
    if isinstance(cmd, str | bytes):
        raise InvalidParams(f"cmd: a list of arguments, not a string; for a shell use ['sh', '-c', {cmd!r}]")
    if not cmd:
        raise InvalidParams("cmd: an empty list has no program to run")
    argv: list[str] = []
    for index, argument in enumerate(cmd):
        text = os.fspath(argument) if isinstance(argument, os.PathLike) else argument
        if not isinstance(text, str):
            raise InvalidParams(f"cmd[{index}]: a string or a path, not {argument!r}")
        argv.append(text)
    return tuple(argv)


def retry_timeouts(timeout: float | None, retry: bool) -> tuple[float | None, ...]:
    """The timeout of each attempt: all of it, then half but at most 60 s, then a quarter but at most 30 s."""
    if timeout is None or not retry:
        return (timeout,)
    return (timeout, min(timeout / 2, 60.0), min(timeout / 4, 30.0))


@runtime_checkable
class StartsStreaming(Protocol):
    """An `ExecApi` that starts a process and opens its reader in one round trip."""

    async def start_streaming(
        self, spec: ProcessSpec, *, window: int | None = None
    ) -> tuple[ProcessInfo, EventStream]: ...


async def start_streaming(api: ExecApi, spec: ProcessSpec) -> tuple[ProcessInfo, EventStream]:
    """Start a process and read it from its first byte, in one round trip if the implementation can."""
    if isinstance(api, StartsStreaming):
        return await api.start_streaming(spec)
    info = await api.start(spec)
    return info, api.events(spec.process_id)


async def start_or_attach(api: ExecApi, spec: ProcessSpec) -> tuple[ProcessInfo, EventStream, bool]:
    """As `start_streaming`, but attach if the same command already has this id; also whether it was started now.

    `DuplicateProcess` if another command has the id.
    """
    try:
        return *await start_streaming(api, spec), True
    except DuplicateProcess:
        info = await api.describe(spec.process_id)
        if info.argv != spec.argv or info.tty:
            raise
        return info, api.events(spec.process_id), False


def result_of(printed: StreamTails, exit_code: int, *, oom: bool = False) -> ExecResult:
    stdout, stderr = printed.stdout, printed.stderr
    dropped = (stdout.dropped, stderr.dropped)
    return ExecResult(exit_code, stdout.value(), stderr.value(), printed.truncated, *dropped, oom=oom)


def silence_error(printed: StreamTails, argv: Sequence[str], silence: float | None) -> SilenceTimeout:
    """The error of a command that the sandbox killed because it printed nothing for so long."""
    so_far = result_of(printed, -1)
    return SilenceTimeout(
        f"printed nothing for {silence or 0.0:g} s, so it was killed with all that it had started: "
        + _shown_command(argv),
        stdout=so_far.stdout,
        stderr=so_far.stderr,
    )


def timeout_error(printed: StreamTails, argv: Sequence[str], timeout: float, *retries: float) -> TimeoutError:
    """The error with the timeout that the caller gave and that of each further attempt."""
    so_far = result_of(printed, -1)
    again = f", nor when repeated for {' and '.join(f'{each:g} s' for each in retries)}" if retries else ""
    return TimeoutError(
        f"not ended within {timeout:g} s{again}, so it was killed with all that it had started: "
        + _shown_command(argv),
        stdout=so_far.stdout,
        stderr=so_far.stderr,
    )


def check_result(argv: Sequence[str], result: ExecResult) -> None:
    """Raise `CommandFailed` for a non-zero exit code. The message has the last line of stderr, the usual reason."""
    if result.success:
        return
    lines = result.stderr.rstrip().splitlines()
    reason = f": {lines[-1][:SHOWN_CHARACTERS]}" if lines else ""
    raise CommandFailed(
        f"exit code {result.exit_code} from {_shown_command(argv)}{reason}",
        exit_code=result.exit_code,
        stdout=result.stdout,
        stderr=result.stderr,
        result=result,
    )


def _shown_command(argv: Sequence[str]) -> str:
    command = shlex.join(argv)
    return command if len(command) <= SHOWN_CHARACTERS else command[:SHOWN_CHARACTERS] + "..."


async def kill_now(api: ExecApi, process_id: str) -> None:
    """KILL the whole tree. An unknown process was not started, so there is nothing to kill."""
    with contextlib.suppress(UnknownProcess):
        await api.terminate(process_id, force=True)


async def feed(api: ExecApi, process_id: str, input: str | bytes | None, close: bool, turn: asyncio.Lock) -> None:
    """Write the input of a command, which may end or close its stdin before it has read everything."""
    try:
        if input:
            await write_pieces(api, process_id, input, turn)
        if close:
            await api.close_stdin(process_id)
    except StdinClosed:
        return
    except HoldfastError:
        # With half of its input a command might wait for ever, or do half of its work.
        await kill_now(api, process_id)
        raise


def not_started(error: CommandNotFound | NotExecutable) -> tuple[int, str]:
    """The exit code and the line on stderr by which a shell reports a command that cannot be started."""
    exit_code = EXIT_NOT_FOUND if isinstance(error, CommandNotFound) else EXIT_NOT_EXECUTABLE
    return exit_code, f"{error.message}\n"


async def run_command(
    api: ExecApi,
    spec: ProcessSpec,
    *,
    input: str | bytes | None,
    timeout: float | None,
    start_errors: StartErrors = "raise",
    attach: bool = False,
    earlier: Sequence[float] = (),
) -> ExecResult:
    """Run a command to its end. A timeout or a cancellation kills its tree before it is raised.

    With `attach`, the same command under the same id is read and not started again. `earlier` are the timeouts of
    the attempts before this one.
    """
    run = _CommandRun(api, spec, attach=attach)
    try:
        async with asyncio.timeout(timeout) as deadline:
            return await run.to_end(input)
    except builtins.TimeoutError as error:
        if timeout is None or not deadline.expired():
            # The sandbox reported a timeout of its own, and the command may still run.
            await kill_now(api, spec.process_id)
            raise
        # A command that ended by itself at the timeout counts as in time.
        result = await run.kill_and_end()
        if result is not None:
            return result
        raise timeout_error(run.printed, spec.argv, *earlier, timeout) from error
    except asyncio.CancelledError as cancelled:
        await clean_up_cancelled(api, kill_now(api, spec.process_id), cancelled)
        raise
    except (CommandNotFound, NotExecutable) as error:
        if start_errors != "result":
            raise
        exit_code, line = not_started(error)
        reason = line.encode(errors="surrogateescape")
        return ExecResult(exit_code, reason, b"") if spec.merge_stderr else ExecResult(exit_code, b"", reason)
    finally:
        await run.aclose()


class _CommandRun:
    """One command of `run_command`: its reader, its input and its output so far."""

    def __init__(self, api: ExecApi, spec: ProcessSpec, *, attach: bool) -> None:
        self._api = api
        self._spec = spec
        self._attach = attach
        self._stream: EventStream | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._last_seq = 0
        self.printed = StreamTails(OUTPUT_LIMIT_BYTES)

    async def to_end(self, input: str | bytes | None) -> ExecResult:
        started = True
        if self._attach:
            _, self._stream, started = await start_or_attach(self._api, self._spec)
        else:
            _, self._stream = await start_streaming(self._api, self._spec)
        if input is not None and started:
            self._feeding = asyncio.create_task(feed(self._api, self._spec.process_id, input, True, asyncio.Lock()))
        return self._result(await self._exit_status(self._stream))

    def _result(self, status: ExitStatus) -> ExecResult:
        if status.silent:
            raise silence_error(self.printed, self._spec.argv, self._spec.silence)
        return result_of(self.printed, status.exit_code, oom=status.oom)

    async def _exit_status(self, stream: EventStream) -> ExitStatus:
        async for event in stream:
            if isinstance(event, OutputChunk):
                self.printed.take(event)
                self._last_seq = event.seq
            elif isinstance(event, OutputGap):
                self.printed.take(event)
            elif isinstance(event, Exited):
                return event.status
        raise InternalError(f"the events of process {self._spec.process_id!r} ended without its exit")

    async def kill_and_end(self) -> ExecResult | None:
        """Kill the command and read its last output; returns the result if it had ended before the kill."""
        process_id = self._spec.process_id
        try:
            # Shielded: a cancellation that comes now must not leave the tree half killed.
            running = await shielded(self._api.terminate(process_id, force=True))
            # The timeout cancelled the old reader in the middle of a step; a new one continues after its last
            # chunk.
            await self.aclose()
            self._stream = self._api.events(process_id, after_seq=self._last_seq)
            async with asyncio.timeout(_END_AFTER_KILL_SECONDS):
                status = await self._exit_status(self._stream)
        except (UnknownProcess, builtins.TimeoutError):
            # The command had not started yet, or the sandbox does not answer.
            return None
        return None if running else self._result(status)

    async def aclose(self) -> None:
        if self._feeding is not None:
            self._feeding.cancel()
            await asyncio.wait((self._feeding,))
            if not self._feeding.cancelled() and (error := self._feeding.exception()) is not None:
                self._feeding = None
                raise error
            self._feeding = None
        if self._stream is not None:
            stream, self._stream = self._stream, None
            await stream.aclose()


def _text(data: bytes, truncated: bool) -> str:
    # A cut may fall into a character; the rest of that character is left out.
    return (data[leading_continuation(data) :] if truncated else data).decode("utf-8", "replace")
