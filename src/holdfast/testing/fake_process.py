"""A fake process: output and input of a program that is a coroutine. In memory; touches nothing.

A program is a coroutine function: it is given its `FakeProcess` and returns its exit code.
"""

from __future__ import annotations

import asyncio
import signal as signals
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from holdfast.runtime.output.silence import SilenceTimer
from holdfast.types import (
    Closed,
    Exited,
    ExitStatus,
    OutputChunk,
    OutputGap,
    ProcessEvent,
    ProcessSpec,
    Stream,
    TerminalSize,
)

#: A fake program: it is given its process and returns its exit code.
Program = Callable[["FakeProcess"], Awaitable[int]]


def prints(stdout: bytes | str = b"", stderr: bytes | str = b"", exit_code: int = 0) -> Program:
    """Return a program that prints and ends."""

    async def program(process: FakeProcess) -> int:
        if stdout:
            process.stdout(stdout)
        if stderr:
            process.stderr(stderr)
        return exit_code

    return program


def hangs(stdout: bytes | str = b"", ignores: Iterable[str] = ()) -> Program:
    """Return a program that prints and then runs until it is killed; `ignores` names signals that do not end it."""

    async def program(process: FakeProcess) -> int:
        process.ignores.update(ignores)
        if stdout:
            process.stdout(stdout)
        await asyncio.get_running_loop().create_future()
        return 0

    return program


async def cat(process: FakeProcess) -> int:
    """A program that prints its input."""
    while data := await process.read():
        process.stdout(data)
    return 0


class FakeProcess:
    """A fake process: the output and input of its program, and the state that a test may inspect."""

    def __init__(self, spec: ProcessSpec, pid: int, retained_bytes: int) -> None:
        self.spec = spec
        self.pid = pid
        #: All input so far.
        self.input = b""
        self.stdin_open = spec.pipe_stdin or spec.tty
        #: Names of the signals sent, in order.
        self.signals: list[str] = []
        self.signal_ids: set[str] = set()
        #: Names of signals that do not end the program.
        self.ignores: set[str] = set()
        self.size = spec.size or TerminalSize()
        self.status: ExitStatus | None = None
        self.log: list[ProcessEvent] = []
        self.printed: dict[Stream, int] = {"stdout": 0, "stderr": 0, "pty": 0}
        self._retained_bytes = retained_bytes
        self._kept_bytes = 0
        #: Output events before this index were dropped.
        self._first_kept = 0
        self._taken = 0
        self._children: set[asyncio.Task[None]] = set()
        self._main: asyncio.Task[None] | None = None
        #: Called at its end.
        self.on_end: Callable[[], None] | None = None
        self.printed_at = 0.0
        self._silence: SilenceTimer | None = None
        self._changed = asyncio.Event()

    # --- for programs ------------------------------------------------------------------------------------------

    def stdout(self, data: bytes | str) -> None:
        """Print bytes to stdout; one call is one chunk."""
        self._print("pty" if self.spec.tty else "stdout", data)

    def stderr(self, data: bytes | str) -> None:
        self._print("pty" if self.spec.tty else "stdout" if self.spec.merge_stderr else "stderr", data)

    async def read(self) -> bytes:
        """Wait for unread input and return it; empty at its end."""
        await self.until(lambda: len(self.input) > self._taken or not self.stdin_open)
        data, self._taken = self.input[self._taken :], len(self.input)
        return data

    async def read_line(self) -> bytes:
        """Wait for one line of input, or the rest at its end."""
        await self.until(lambda: b"\n" in self.input[self._taken :] or not self.stdin_open)
        rest = self.input[self._taken :]
        end = rest.find(b"\n") + 1 or len(rest)
        self._taken += end
        return rest[:end]

    async def sleep(self, seconds: float) -> None:
        """Let time pass, on the clock of the event loop."""
        await asyncio.sleep(seconds)

    def leave_behind(self, child: Coroutine[Any, Any, None]) -> None:
        """Add a child that holds the streams: they are closed when it has ended too."""
        task = asyncio.get_running_loop().create_task(child)
        self._children.add(task)
        task.add_done_callback(self._child_ended)

    # --- for FakeExec ------------------------------------------------------------------------------------------

    def run(self, program: Program) -> None:
        async def main() -> None:
            self.end(ExitStatus(await program(self)))

        self._main = asyncio.get_running_loop().create_task(main())
        if self.spec.silence is not None:
            self._silence = SilenceTimer(self.spec.silence, lambda: self.printed_at, self._was_silent)

    def _was_silent(self) -> None:
        self.kill("KILL", silent=True)

    def end(self, status: ExitStatus) -> None:
        if self.status is None:
            self.status = status
            self.stdin_open = False
            if self._silence is not None:
                self._silence.cancel()
            self.log.append(Exited(len(self.log) + 1, status))
            self._close_if_free()
            if self.on_end is not None:
                self.on_end()
            self.notify()

    def kill(self, signal: str, *, oom: bool = False, silent: bool = False) -> None:
        """End the program by a signal; with `oom` as the kernel does when memory is exhausted."""
        if self._main is not None:
            self._main.cancel()
        self.end(ExitStatus(128 + signals.Signals[f"SIG{signal}"], f"SIG{signal}", oom=oom, silent=silent))

    def kill_children(self) -> None:
        for child in self._children:
            child.cancel()

    @property
    def closed(self) -> bool:
        return bool(self.log) and isinstance(self.log[-1], Closed)

    @property
    def has_children(self) -> bool:
        return bool(self._children)

    def notify(self) -> None:
        """Wake every waiter for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    def after(self, seq: int) -> tuple[list[OutputGap], list[ProcessEvent]]:
        """Return the events after a position: first a gap for the dropped part of each stream, then the rest."""
        lost: dict[Stream, OutputGap] = {}
        for event in self.log[seq : self._first_kept]:
            if isinstance(event, OutputChunk):
                offset = lost[event.stream].offset if event.stream in lost else event.offset
                end = event.offset + len(event.data)
                lost[event.stream] = OutputGap(event.stream, offset, end - offset)
        kept = [event for event in self.log[seq : self._first_kept] if not isinstance(event, OutputChunk)]
        return list(lost.values()), kept + self.log[max(seq, self._first_kept) :]

    def _print(self, stream: Stream, data: bytes | str) -> None:
        raw = data.encode() if isinstance(data, str) else data
        self.log.append(OutputChunk(stream, self.printed[stream], raw, len(self.log) + 1))
        self.printed[stream] += len(raw)
        self.printed_at = asyncio.get_running_loop().time()
        self._kept_bytes += len(raw)
        while self._kept_bytes > self._retained_bytes:
            oldest = self.log[self._first_kept]
            self._first_kept += 1
            if isinstance(oldest, OutputChunk):
                self._kept_bytes -= len(oldest.data)
        self.notify()

    def _child_ended(self, task: asyncio.Task[None]) -> None:
        self._children.discard(task)
        if not task.cancelled():
            task.result()
        self._close_if_free()
        self.notify()

    def _close_if_free(self) -> None:
        if self.status is not None and not self._children and not self.closed:
            self.log.append(Closed(len(self.log) + 1))


class FakeEventStream:
    """A reader of one fake process's events."""

    def __init__(self, process: FakeProcess, after_seq: int) -> None:
        self._process = process
        self._seq = after_seq
        self._next: deque[ProcessEvent] = deque()
        self._ended = False

    @property
    def has_more(self) -> bool:
        """Whether the next event is available."""
        return bool(self._next) or len(self._process.log) > self._seq

    def __aiter__(self) -> FakeEventStream:
        return self

    async def __anext__(self) -> ProcessEvent:
        await self._process.until(lambda: self._ended or self.has_more)
        if self._ended:
            raise StopAsyncIteration
        if not self._next:
            gaps, events = self._process.after(self._seq)
            self._next.extend((*gaps, events[0]))
        event = self._next.popleft()
        if not isinstance(event, OutputGap):
            self._seq = event.seq
            self._ended = isinstance(event, Closed)
        return event

    async def aclose(self) -> None:
        self._ended = True
        self._process.notify()
