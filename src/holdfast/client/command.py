"""What `exec` and `exec_remote` share: a command's start, its input, its kill, its result, and the run to its end.

A command has ended when its leader has. What it printed before that is complete; what children that it left behind
print later is not waited for, and the children stay. Everything goes through `ExecApi`.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import shlex
from collections.abc import Sequence
from typing import Final, Literal, Protocol, runtime_checkable

from holdfast.client.clean_up import clean_up_cancelled, shielded
from holdfast.client.collect import MIB, StreamTails, leading_continuation, shown
from holdfast.client.defaults import StrPath
from holdfast.client.process import write_pieces
from holdfast.errors import (
    CommandNotFound,
    DuplicateProcess,
    HoldfastError,
    InternalError,
    InvalidParams,
    NotExecutable,
    StdinClosed,
    TimeoutError,
    UnknownProcess,
)
from holdfast.exec_api import EventStream, ExecApi
from holdfast.types import Exited, OutputChunk, OutputGap, ProcessInfo, ProcessSpec, Struct

#: What becomes of a command that is not there or cannot be executed: an error, or a result as from a shell.
StartErrors = Literal["raise", "result"]
#: Kept of each stream of a command; of more, the most recent.
OUTPUT_LIMIT_BYTES: Final = 10 * MIB
#: How long a killed command has for its end to be told. The kill itself waits until nothing is left, so this is
#: only ever used up where the sandbox does not answer.
_END_AFTER_KILL_SECONDS: Final = 5.0


class ExecResult(Struct, frozen=True):
    """What a command came to. Of each stream the most recent 10 MiB are here; `truncated`: something is missing."""

    returncode: int
    stdout_bytes: bytes
    stderr_bytes: bytes
    truncated: bool = False
    #: How much each stream printed before what is here.
    omitted_stdout_bytes: int = 0
    omitted_stderr_bytes: int = 0

    def __repr__(self) -> str:
        return (
            f"ExecResult(returncode={self.returncode}, stdout_bytes={shown(self.stdout_bytes)}, "
            f"stderr_bytes={shown(self.stderr_bytes)}, truncated={self.truncated})"
        )

    @property
    def exit_code(self) -> int:
        """The same as `returncode`, by the name that all other results have."""
        return self.returncode

    @property
    def success(self) -> bool:
        return self.returncode == 0

    @property
    def stdout(self) -> str:
        """stdout as text; bytes that are not UTF-8 become U+FFFD."""
        return _text(self.stdout_bytes, bool(self.omitted_stdout_bytes))

    @property
    def stderr(self) -> str:
        """stderr as text; bytes that are not UTF-8 become U+FFFD."""
        return _text(self.stderr_bytes, bool(self.omitted_stderr_bytes))


def check_command(cmd: Sequence[StrPath]) -> tuple[str, ...]:
    """The argument vector. A plain string would fall apart into its characters."""
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
    """The time of each attempt: the whole, then half of it and at most 60 s, then a quarter and at most 30 s."""
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
    """Start a process and read it from its first byte, in one round trip where the implementation can."""
    if isinstance(api, StartsStreaming):
        return await api.start_streaming(spec)
    info = await api.start(spec)
    return info, api.events(spec.process_id)


async def start_or_attach(api: ExecApi, spec: ProcessSpec) -> tuple[ProcessInfo, EventStream, bool]:
    """As `start_streaming`; where the same command has this id already, read that one. Whether it was started now.

    `DuplicateProcess` if the id is another command's.
    """
    try:
        return *await start_streaming(api, spec), True
    except DuplicateProcess:
        info = await api.describe(spec.process_id)
        if info.argv != spec.argv or info.tty:
            raise
        return info, api.events(spec.process_id), False


def result_of(printed: StreamTails, exit_code: int) -> ExecResult:
    stdout, stderr = printed.stdout, printed.stderr
    return ExecResult(exit_code, stdout.value(), stderr.value(), printed.truncated, stdout.dropped, stderr.dropped)


def timeout_error(printed: StreamTails, argv: Sequence[str], timeout: float, *retries: float) -> TimeoutError:
    """The error that names the time which the caller gave, and that of each further attempt."""
    so_far = result_of(printed, -1)
    command = shlex.join(argv)
    shown = command if len(command) <= 200 else command[:200] + "..."
    again = f", nor when it was run again for {' and '.join(f'{each:g} s' for each in retries)}" if retries else ""
    return TimeoutError(
        f"not ended within {timeout:g} s{again}, so it was killed with all that it had started: {shown}",
        stdout=so_far.stdout,
        stderr=so_far.stderr,
    )


async def kill_now(api: ExecApi, process_id: str) -> None:
    """KILL the whole tree. An unknown process has nothing to kill: its start did not get that far."""
    with contextlib.suppress(UnknownProcess):
        await api.terminate(process_id, force=True)


async def feed(api: ExecApi, process_id: str, input: str | bytes | None, close: bool, turn: asyncio.Lock) -> None:
    """Write the input of a command. That it ends, or closes stdin, without reading all of it is its right."""
    try:
        if input:
            await write_pieces(api, process_id, input, turn)
        if close:
            await api.close_stdin(process_id)
    except StdinClosed:
        return
    except HoldfastError:
        # With half of its input a command may wait for ever, or do half of its work.
        await kill_now(api, process_id)
        raise


def not_started(error: CommandNotFound | NotExecutable) -> tuple[int, str]:
    """The exit code and the line on stderr by which a shell reports a command that cannot be started."""
    return (127 if isinstance(error, CommandNotFound) else 126), f"{error.message}\n"


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

    `attach`: the same command under the same id is read, and not started a second time. `earlier` are the times of
    attempts that timed out before this one.
    """
    run = _CommandRun(api, spec, attach=attach)
    try:
        async with asyncio.timeout(timeout) as deadline:
            return await run.to_end(input)
    except builtins.TimeoutError as error:
        if timeout is None or not deadline.expired():
            # Not ours: the sandbox told of a timeout, and the command may run on.
            await kill_now(api, spec.process_id)
            raise
        # Ending by itself while the time ran out is as good as in time.
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
        said = line.encode(errors="surrogateescape")
        return ExecResult(exit_code, said, b"") if spec.merge_stderr else ExecResult(exit_code, b"", said)
    finally:
        await run.aclose()


class _CommandRun:
    """The reading of one command that nobody else sees."""

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
        return result_of(self.printed, await self._exit_code(self._stream))

    async def _exit_code(self, stream: EventStream) -> int:
        async for event in stream:
            if isinstance(event, OutputChunk):
                self.printed.take(event)
                self._last_seq = event.seq
            elif isinstance(event, OutputGap):
                self.printed.take(event)
            elif isinstance(event, Exited):
                return event.status.exit_code
        raise InternalError(f"the events of process {self._spec.process_id!r} ended without its exit")

    async def kill_and_end(self) -> ExecResult | None:
        """Kill, and take what was still printed. The result, if the command had ended before the kill."""
        process_id = self._spec.process_id
        try:
            # Shielded: a cancellation that comes now must not leave the tree half killed.
            running = await shielded(self._api.terminate(process_id, force=True))
            # The timeout cancelled the old reader in the middle of a step; a new one goes on behind its last chunk.
            await self.aclose()
            self._stream = self._api.events(process_id, after_seq=self._last_seq)
            async with asyncio.timeout(_END_AFTER_KILL_SECONDS):
                exit_code = await self._exit_code(self._stream)
        except (UnknownProcess, builtins.TimeoutError):
            # The time ran out before it had started, or the sandbox does not tell its end.
            return None
        return None if running else result_of(self.printed, exit_code)

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
    # A cut may fall into a character; its rest is left out rather than shown as garbage.
    return (data[leading_continuation(data) :] if truncated else data).decode("utf-8", "replace")
