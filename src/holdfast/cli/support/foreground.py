"""One process in the foreground of our terminal: copies its output, and forwards our input and signals.

`run` starts the process, `attach` finds it; `terminal_view` has the differences for a terminal. The copy of the
output ends first; the tasks for input, signals, size and time limit then end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

from holdfast.cli.support.byte_streams import ByteSink, ByteSource
from holdfast.cli.support.command_request import STDERR, STDIN, STDOUT, WINDOW_BYTES
from holdfast.cli.support.exit_codes import BROKEN_PIPE, KILLED, TIMED_OUT
from holdfast.cli.support.own_terminal import INTERRUPT, DetachKey, raw_mode, terminal_size
from holdfast.cli.support.text import complain
from holdfast.errors import CallerError, StdinClosed
from holdfast.exec_api import ExecApi
from holdfast.types import Closed, Exited, OutputChunk, OutputGap, ProcessEvent, TerminalSize

#: Between TERM and KILL after the reader of our stdout closed it: PIPE would have ended the process at once.
_BROKEN_PIPE_GRACE: Final = 1.0
#: For writing the rest of the output once the command was killed. A reader that stalls, for example a pager that
#: waits for a key, must not keep Ctrl-C and the time limit from ending this program.
_OUTPUT_SECONDS: Final = 2.0


class _OutputStalled(Exception):
    """The command has ended, and the reader of our stdout does not read the rest of its output."""


class ClientDetached(Exception):
    """The detach key was pressed, or the terminal was hung up: this program ends, and the process continues."""


class OutputCopy:
    """Writes each stream to its own descriptor: stdout and a terminal's output to 1, stderr to 2.

    The first `written` bytes of each stream were written before, and are skipped.
    """

    def __init__(
        self,
        streams: tuple[str, ...] = ("stdout", "stderr", "pty"),
        written: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._streams = streams
        self._written = written
        out = ByteSink(STDOUT)
        self._sinks = {"stdout": out, "pty": out, "stderr": ByteSink(STDERR)}

    async def write(self, event: ProcessEvent) -> None:
        if isinstance(event, OutputChunk):
            if event.stream in self._streams:
                new = max(0, self._written.get(event.stream, 0) - event.offset)
                await self._sinks[event.stream].write(event.data[new:] if new else event.data)
        elif isinstance(event, OutputGap) and event.stream in self._streams:
            complain(f"{event.length} bytes of {event.stream} at offset {event.offset} are no longer kept")

    def close(self) -> None:
        for sink in self._sinks.values():
            sink.close()


class ForegroundTarget(Protocol):
    """The receiver of our input and signals: a sandbox, or a session of the service."""

    async def write(self, process_id: str, data: bytes, /) -> object: ...

    async def close_stdin(self, process_id: str, /) -> object: ...

    async def signal(self, process_id: str, name: str, /) -> object: ...

    async def terminate(self, process_id: str, /, *, grace: float = 5.0, force: bool = False) -> object: ...

    async def resize(self, process_id: str, size: TerminalSize, /) -> object: ...


class ForegroundBase(ABC):
    """Copies the output of one process or session while our input and signals are forwarded.

    With `read_only` neither keys nor the size of our terminal are sent.
    """

    def __init__(
        self, target: ForegroundTarget, id: str, *, tty: bool, signals: SignalQueue, read_only: bool = False
    ) -> None:
        self._target = target
        self._id = id
        self._tty = tty
        self._signals = signals
        self._read_only = read_only
        self._timed_out = False

    async def follow(
        self,
        *,
        after_seq: int = 0,
        forward_input: bool,
        close_at_end: bool = True,
        timeout: float | None = None,
        grace: float = 5.0,
    ) -> int:
        """Follow the process to its end and return its exit code, 124 on timeout. Raises `ClientDetached`."""
        tasks: list[Coroutine[Any, Any, None]] = [self._forward_signals()]
        watches = self._tty and self._read_only and os.isatty(STDIN)
        if forward_input:
            tasks.append(self._forward_input(close_at_end))
        elif watches:
            tasks.append(self._watch_keys())
        if timeout is not None:
            tasks.append(self._limit_time(timeout, grace))
        with raw_mode(STDIN) if self._tty and (forward_input or watches) else contextlib.nullcontext():
            try:
                code = await _run_beside(self._copy_output(after_seq), tasks)
            except _OutputStalled:
                complain(f"the rest of its output is kept: `holdfast logs {self._id}`")
                code = KILLED
        if self._timed_out:
            complain(f"{self._id}: timed out after {timeout:g} s")
            return TIMED_OUT
        return code

    @abstractmethod
    async def _copy_output(self, after_seq: int) -> int:
        """Copy the output to its end and return the exit code."""

    async def _forward_input(self, close_at_end: bool) -> None:
        source = ByteSource(STDIN)
        detach_key = DetachKey() if self._tty and os.isatty(STDIN) else None
        # A process may end, or close its stdin, before it has read everything.
        with contextlib.suppress(StdinClosed):
            while data := await source.read():
                detach = False
                if detach_key is not None:
                    data, detach = detach_key.feed(data)
                if data:
                    await self._target.write(self._id, data)
                if detach:
                    raise ClientDetached
            if close_at_end:
                await self._end_input()

    async def _watch_keys(self) -> None:
        """Read and drop keys, which would otherwise be echoed into the picture; the detach key and Ctrl-C leave."""
        source, detach_key = ByteSource(STDIN), DetachKey()
        while data := await source.read():
            typed, detach = detach_key.feed(data)
            if detach or INTERRUPT in typed:
                raise ClientDetached

    async def _end_input(self) -> None:
        if self._tty:
            # A terminal has no end of file; a program that reads lines takes this character for it.
            await self._target.write(self._id, b"\x04")
        else:
            await self._target.close_stdin(self._id)

    async def _forward_signals(self) -> None:
        forwarded = 0
        while True:
            name = await self._signals.next()
            if name == "HUP":
                raise ClientDetached
            # The process may have ended already, with its exit event on the way.
            with contextlib.suppress(CallerError):
                if name == "WINCH":
                    await self._follow_size()
                    continue
                forwarded += 1
                if forwarded == 1:
                    await self._target.signal(self._id, name)
                else:
                    await self._target.terminate(self._id, force=True)
                    await self._abandon_output()

    async def _follow_size(self) -> None:
        size = terminal_size(STDIN, STDOUT, STDERR)
        if self._tty and size is not None and not self._read_only:
            await self._target.resize(self._id, size)

    async def _limit_time(self, timeout: float, grace: float) -> None:
        await asyncio.sleep(timeout)
        self._timed_out = True
        await self._target.terminate(self._id, grace=grace)
        await self._abandon_output()

    async def _abandon_output(self) -> None:
        await asyncio.sleep(_OUTPUT_SECONDS)
        raise _OutputStalled


class Foreground(ForegroundBase):
    """Follows one started process until its leader ends; `written` is that of `OutputCopy`."""

    def __init__(
        self,
        api: ExecApi,
        process_id: str,
        *,
        tty: bool,
        signals: SignalQueue,
        read_only: bool = False,
        written: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(api, process_id, tty=tty, signals=signals, read_only=read_only)
        self._api = api
        self._written = written

    async def _copy_output(self, after_seq: int) -> int:
        copy = OutputCopy(written=self._written)
        events = self._api.events(self._id, after_seq=after_seq, window=WINDOW_BYTES)
        try:
            async for event in events:
                if isinstance(event, Exited):
                    return event.status.exit_code
                if isinstance(event, Closed):
                    break
                await copy.write(event)
        except BrokenPipeError:
            # The reader of our stdout has closed it. On a plain pipe PIPE would end the process at its next write.
            await self._api.terminate(self._id, grace=_BROKEN_PIPE_GRACE)
            return BROKEN_PIPE
        finally:
            copy.close()
            await events.aclose()
        status = await self._api.wait(self._id)
        return status.exit_code if status is not None else 0


class SignalQueue:
    """The signals of this program, in order. Before the first call of `next`, INT and TERM cancel its task.

    With `detach_on_interrupt`, INT and TERM are not for the process: they detach from it, as HUP does.
    """

    def __init__(self, *, detach_on_interrupt: bool = False) -> None:
        self._detach_on_interrupt = detach_on_interrupt
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._owner = asyncio.current_task()
        self._taken = False

    async def next(self) -> str:
        self._taken = True
        return await self._queue.get()

    def put(self, name: str) -> None:
        if not self._taken and name in ("INT", "TERM") and self._owner is not None:
            self._owner.cancel()
        else:
            leave = self._detach_on_interrupt and name in ("INT", "TERM")
            self._queue.put_nowait("HUP" if leave else name)

    @contextlib.contextmanager
    def listening(self, caught: int | None = None) -> Iterator[None]:
        """Queue INT, TERM, HUP and WINCH while the block runs, after the signals in the pipe `caught`."""
        loop = asyncio.get_running_loop()
        names = ("INT", "TERM", "HUP", "WINCH")
        for name in names:
            loop.add_signal_handler(getattr(signal, f"SIG{name}"), self.put, name)
        if caught is not None:
            # These signals are for the command, which runs already.
            self._taken = True
            with contextlib.suppress(BlockingIOError):
                for number in os.read(caught, 4096):
                    self.put(signal.Signals(number).name.removeprefix("SIG"))
        try:
            yield
        finally:
            for name in names:
                loop.remove_signal_handler(getattr(signal, f"SIG{name}"))


async def _run_beside(main: Coroutine[Any, Any, int], others: list[Coroutine[Any, Any, None]]) -> int:
    """Run `main` to its end while the others run beside it; an error of one of them ends all."""
    leader = asyncio.create_task(main)
    helpers = {asyncio.create_task(work) for work in others}
    running = {leader, *helpers}
    try:
        while not leader.done():
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {leader}:
                task.result()
        return leader.result()
    finally:
        for task in (leader, *helpers):
            task.cancel()
        await asyncio.gather(leader, *helpers, return_exceptions=True)
