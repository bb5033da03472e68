"""A handle on one process in a sandbox; all its calls go through `ExecApi`.

A handle holds no resources. Dropping it leaves the process running; another handle on the same id, in another
program or after a reconnect, reads the same output from the start.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import inspect
import io
import signal as signals
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType
from typing import Final

from holdfast.client.collect import (
    MIB,
    Collected,
    HeadTailBuffer,
    OutputMatch,
    OutputSearch,
    Pattern,
)
from holdfast.client.connection.clean_up import clean_up_cancelled
from holdfast.errors import (
    InvalidParams,
    LimitReached,
    ProcessError,
    StdinClosed,
    TimeoutError,
    UnknownProcess,
)
from holdfast.exec_api import EventStream, ExecApi
from holdfast.types import (
    WRITE_PIECE_BYTES,
    Closed,
    Exited,
    ExitStatus,
    OutputChunk,
    OutputGap,
    ProcessInfo,
    ReadResult,
    Snapshot,
    TerminalSize,
)

#: Bytes that one step of `collect` reads.
_COLLECT_STEP_BYTES: Final = 1 * MIB
#: Bytes that `collect` still reads after its time: as much as the sandbox retains by default. Without a bound, a
#: process that prints faster than it is read would hold the window open.
_COLLECT_BACKLOG_BYTES: Final = 32 * MIB
#: The most that `communicate` holds in memory.
COMMUNICATE_LIMIT_BYTES: Final = 256 * MIB


#: Called with the exit status; a returned awaitable is awaited.
OnExit = Callable[[ExitStatus], Awaitable[object] | object]


class Process:
    """One process by its logical id. `info` is the last known status; `describe` updates it."""

    def __init__(self, api: ExecApi, info: ProcessInfo) -> None:
        self._api = api
        self.info = info
        self._writing = asyncio.Lock()
        self._collecting = asyncio.Lock()
        self._collected_seq = 0
        #: The beginning of a character that was incomplete when `collect` returned.
        self._carried = b""
        #: Held here because the event loop holds tasks only weakly.
        self._exit_tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Process {self.id!r} pid={self.pid}>"

    @property
    def id(self) -> str:
        """The key that the caller chose. It is not an OS pid."""
        return self.info.process_id

    @property
    def pid(self) -> int:
        """The OS pid inside the sandbox."""
        return self.info.pid

    async def describe(self) -> ProcessInfo:
        """Fetch the current status."""
        self.info = await self._api.describe(self.id)
        return self.info

    # --- output ------------------------------------------------------------------------------------------------

    def events(self, since: int = 0) -> EventStream:
        """Output, gaps, exit and close after the position `since`, as they happen. Ends after `Closed`.

        Every call opens its own reader; readers do not take output from each other. Close it with `aclose()` when
        leaving before its end.
        """
        return self._api.events(self.id, after_seq=since)

    async def output(self, since: int = 0) -> AsyncGenerator[OutputChunk | OutputGap, None]:
        """Output after the position `since`, as it is printed, until all streams have ended."""
        stream = self.events(since)
        try:
            async for event in stream:
                if isinstance(event, OutputChunk | OutputGap):
                    yield event
        finally:
            await stream.aclose()

    async def read(self, since: int = 0, max_bytes: int | None = None, wait: float = 0.0) -> ReadResult:
        """Read after the position `since`, waiting up to `wait` seconds for the first event.

        Continue from the result's `after_seq`.
        """
        return await self._api.read(self.id, after_seq=since, max_bytes=max_bytes, wait=wait)

    async def snapshot(self) -> Snapshot:
        """The output that is retained now."""
        return await self._api.snapshot(self.id)

    async def collect(self, yield_after: float = 10.0, max_bytes: int = 64 * 1024) -> Collected:
        """A bounded window for model tool calls: output since the last `collect`, at most `max_bytes` of it.

        Returns when the process ends or after `yield_after` seconds; the process continues. The result has the head
        and the tail, and `omitted_bytes` is the exact size of the part between them. An incomplete character is
        kept for the next window.
        """
        if max_bytes < 2:
            raise InvalidParams(f"max_bytes: at least 2, not {max_bytes}")
        async with self._collecting:
            return await self._collect(yield_after, max_bytes)

    async def _collect(self, yield_after: float, max_bytes: int) -> Collected:
        now = asyncio.get_running_loop().time
        began = now()
        buffer = HeadTailBuffer(max_bytes)
        buffer.append(self._carried)
        backlog = _COLLECT_BACKLOG_BYTES
        exit: ExitStatus | None = None
        while True:
            remaining = max(0.0, began + yield_after - now())
            over = remaining == 0.0 or exit is not None
            result = await self._api.read(
                self.id,
                after_seq=self._collected_seq,
                max_bytes=_COLLECT_STEP_BYTES,
                wait=0.0 if over else remaining,
            )
            self._collected_seq = result.after_seq
            size = _take(result, buffer)
            if over:
                backlog -= size
            if result.exited and exit is None:
                exit = await self.wait()
            if size == 0 and (exit is not None or over):
                break
            if backlog <= 0:
                break
        self._carried = buffer.cut_unfinished() if exit is None else b""
        return buffer.collected(exit=exit, elapsed=now() - began)

    async def wait_for_output(
        self, pattern: Pattern, timeout: float | None = None, *, since: int | OutputMatch = 0
    ) -> OutputMatch:
        """Wait until `pattern` was printed after the position `since` (0: the start).

        An earlier match as `since` is the position directly after it, even within a chunk. A str or bytes pattern
        is literal; `re.compile(...)` makes it a regular expression. Raises `ProcessError` if the process ends
        first, and `TimeoutError` after `timeout` seconds; the process continues.
        """
        search = OutputSearch(pattern, since)
        stream = self.events(search.since)
        try:
            async with asyncio.timeout(timeout) as deadline:
                async for event in stream:
                    if isinstance(event, OutputChunk | OutputGap):
                        match = search.feed(event)
                        if match is not None:
                            return match
                    elif isinstance(event, Exited):
                        raise ProcessError(
                            f"process {self.id!r} ended with exit code {event.status.exit_code} "
                            f"before it printed {search.describe()}",
                            exit_code=event.status.exit_code,
                        )
        except builtins.TimeoutError:
            if not deadline.expired():
                raise
            raise TimeoutError(
                f"process {self.id!r} did not within {timeout:g} s print {search.describe()}"
            ) from None
        finally:
            await stream.aclose()
        raise ProcessError(f"the output of process {self.id!r} ended before it printed {search.describe()}")

    async def communicate(
        self, input: bytes | str | None = None, *, max_bytes: int = COMMUNICATE_LIMIT_BYTES
    ) -> tuple[bytes, bytes]:
        """Write `input`, close stdin, and return stdout and stderr once the process has ended.

        On a terminal the first is all its output and the second is empty. The output is complete: more than
        `max_bytes`, or output that the sandbox no longer retains, raises `LimitReached`, and the process continues.
        Output of child processes after the end of the process is not awaited.
        """
        feeding = asyncio.create_task(self._feed(b"" if input is None else input))
        stdout, stderr = io.BytesIO(), io.BytesIO()
        stream = self.events()
        try:
            async for event in stream:
                if isinstance(event, OutputChunk):
                    (stderr if event.stream == "stderr" else stdout).write(event.data)
                    if stdout.tell() + stderr.tell() > max_bytes:
                        raise LimitReached(
                            f"process {self.id!r} printed more than max_bytes={max_bytes}; read it with output()"
                        )
                elif isinstance(event, OutputGap):
                    raise LimitReached(
                        f"process {self.id!r}: {event.length} bytes of {event.stream} at offset {event.offset} "
                        "are no longer kept; attach before so much is printed, or start it with overflow='block'"
                    )
                elif isinstance(event, Exited | Closed):
                    break
        finally:
            # A process may end without reading all its input, and the rest would never be accepted.
            feeding.cancel()
            await asyncio.wait((feeding,))
            await stream.aclose()
        if not feeding.cancelled():
            feeding.result()
        return stdout.getvalue(), stderr.getvalue()

    async def _feed(self, input: bytes | str) -> None:
        # A process may end, or close its stdin, before it has read everything.
        with contextlib.suppress(StdinClosed):
            await self.write(input)
            if not self.info.tty:
                await self.close_stdin()

    # --- input and control ---------------------------------------------------------------------------------------

    async def write(self, data: bytes | str) -> None:
        """Write to stdin, or type on the terminal. Returns when all was accepted; waits while it is not read."""
        await write_pieces(self._api, self.id, data, self._writing)

    async def close_stdin(self) -> None:
        """End of input."""
        await self._api.close_stdin(self.id)

    async def resize(self, rows: int, cols: int) -> None:
        """Set the size of the terminal; the program gets SIGWINCH."""
        await self._api.resize(self.id, TerminalSize(rows, cols))

    async def signal(self, signal: str | int) -> None:
        """Send a signal, by name (`INT`, `SIGINT`) or number, to the process's group."""
        name = signal if isinstance(signal, str) else signal_name(signal)
        await self._api.signal(self.id, name)

    async def terminate(self, grace: float = 5.0, force: bool = False) -> bool:
        """End the process and everything it started: TERM, up to `grace` seconds, KILL (`force`: KILL at once).

        Returns whether it was running. On return no process of the tree is left.
        """
        return await self._api.terminate(self.id, grace=grace, force=force)

    async def wait(self, timeout: float | None = None) -> ExitStatus:
        """Wait for the exit status; `TimeoutError` after `timeout` seconds, and the process continues."""
        status = await self._api.wait(self.id, timeout=timeout)
        if status is None:
            raise TimeoutError(f"process {self.id!r} still runs after {timeout or 0.0:g} s")
        return status

    def on_exit(self, callback: OnExit) -> asyncio.Task[None]:
        """Call `callback` with the exit status when the process ends, at once if it has ended.

        A returned awaitable is awaited. The task, which ends with the callback, can be awaited or cancelled. It
        fails if the sandbox is lost; an error of the callback goes to the event loop's exception handler.
        """
        task = asyncio.get_running_loop().create_task(call_at_exit(self.wait(), callback))
        self._exit_tasks.add(task)
        task.add_done_callback(self._exit_tasks.discard)
        return task

    async def forget(self) -> None:
        """Drop an ended process and its output before its retention ends."""
        await self._api.forget(self.id)

    async def __aenter__(self) -> Process:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A process that is no longer known has ended.
        with contextlib.suppress(UnknownProcess):
            if isinstance(error, asyncio.CancelledError):
                await clean_up_cancelled(self._api, self.terminate(force=True), error)
            else:
                await self.terminate()


async def call_at_exit(wait: Awaitable[ExitStatus], callback: OnExit) -> None:
    """Wait for an exit status and pass it to `callback`; its error goes to the loop's exception handler."""
    status = await wait
    try:
        outcome = callback(status)
        if inspect.isawaitable(outcome):
            await outcome
    except Exception as error:  # noqa: BLE001 - a failing callback must not end anything else
        asyncio.get_running_loop().call_exception_handler({"message": "on_exit failed", "exception": error})


def _take(result: ReadResult, buffer: HeadTailBuffer) -> int:
    """Append a read to a window; returns its size in bytes, lost bytes included."""
    size = sum(gap.length for gap in result.gap)
    if size:
        buffer.skip(size)
    for chunk in result.chunks:
        buffer.append(chunk.data)
        size += len(chunk.data)
    return size


def signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return str(number)


async def write_pieces(api: ExecApi, process_id: str, data: bytes | str, turn: asyncio.Lock) -> None:
    """Write in pieces, one writer at a time, so that two large writes do not interleave."""
    raw = data.encode() if isinstance(data, str) else data
    async with turn:
        for start in range(0, len(raw), WRITE_PIECE_BYTES):
            await api.write(process_id, raw[start : start + WRITE_PIECE_BYTES])
