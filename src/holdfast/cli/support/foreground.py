"""One process in the foreground of our terminal: its output on ours, our input to it, our signals to it.

`run` and `attach` differ only in who started the process; `terminal_view` has what differs with a terminal. The
output decides when it is over; input, signals, size and time limit run beside it and end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from holdfast.cli.support.byte_streams import ByteSink, ByteSource
from holdfast.cli.support.command_request import STDERR, STDIN, STDOUT, WINDOW_BYTES
from holdfast.cli.support.exit_codes import BROKEN_PIPE, KILLED, TIMED_OUT
from holdfast.cli.support.own_terminal import INTERRUPT, DetachKey, raw_mode, terminal_size
from holdfast.cli.support.text import complain
from holdfast.errors import CallerError, StdinClosed
from holdfast.exec_api import ExecApi
from holdfast.types import Closed, Exited, OutputChunk, OutputGap, ProcessEvent

#: What a process gets between TERM and KILL when its reader went away: it would have died of PIPE at once.
_BROKEN_PIPE_GRACE: Final = 1.0


#: How long the rest of the output may take once the command was killed. Whoever does not read it by then, a pager
#: that waits for a key for instance, must not keep Ctrl-C and the time limit from ending us.
_REST_SECONDS: Final = 2.0


class _RestLeft(Exception):
    """The command is gone, and what it printed is not taken from us."""


class Detached(Exception):
    """The detach key was pressed, or the terminal went away: leave, the process goes on."""


class OutputCopy:
    """Writes each stream to its own descriptor: stdout and a terminal's output to 1, stderr to 2.

    `written` bytes of each stream are there already and are not written again.
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


class Foreground:
    """Follows one process until its leader ends. `process_id` must have been started.

    With `read_only` it gets no keys and no size of ours; `written` is that of `OutputCopy`.
    """

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
        self._api = api
        self._id = process_id
        self._tty = tty
        self._signals = signals
        self._read_only = read_only
        self._written = written
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
        """Until the process ends; returns its exit code, 124 after `timeout` seconds. Raises `Detached`."""
        beside: list[Coroutine[Any, Any, None]] = [self._pass_on_signals()]
        watches = self._tty and self._read_only and os.isatty(STDIN)
        if forward_input:
            beside.append(self._pass_on_input(close_at_end))
        elif watches:
            beside.append(self._watch_keys())
        if timeout is not None:
            beside.append(self._limit_time(timeout, grace))
        with raw_mode(STDIN) if self._tty and (forward_input or watches) else contextlib.nullcontext():
            try:
                code = await _with_company(self._copy_output(after_seq), beside)
            except _RestLeft:
                complain(f"the rest of its output is kept: `holdfast logs {self._id}`")
                code = KILLED
        if self._timed_out:
            complain(f"{self._id}: timed out after {timeout:g} s")
            return TIMED_OUT
        return code

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
            # Nobody reads what it prints. On a plain pipe PIPE would end it at its next write.
            await self._api.terminate(self._id, grace=_BROKEN_PIPE_GRACE)
            return BROKEN_PIPE
        finally:
            copy.close()
            await events.aclose()
        status = await self._api.wait(self._id)
        return status.exit_code if status is not None else 0

    async def _pass_on_input(self, close_at_end: bool) -> None:
        source = ByteSource(STDIN)
        detach_key = DetachKey() if self._tty and os.isatty(STDIN) else None
        # A process may end, or close its stdin, without having read everything; that is its right.
        with contextlib.suppress(StdinClosed):
            while data := await source.read():
                detach = False
                if detach_key is not None:
                    data, detach = detach_key.feed(data)
                if data:
                    await self._api.write(self._id, data)
                if detach:
                    raise Detached
            if close_at_end:
                await self._end_input()

    async def _watch_keys(self) -> None:
        """Only look: keys go nowhere, and would be echoed into the picture if nobody took them."""
        source, detach_key = ByteSource(STDIN), DetachKey()
        while data := await source.read():
            typed, detach = detach_key.feed(data)
            if detach or INTERRUPT in typed:
                raise Detached

    async def _end_input(self) -> None:
        if self._tty:
            # A terminal has no end; the end-of-file character says it to whoever reads lines.
            await self._api.write(self._id, b"\x04")
        else:
            await self._api.close_stdin(self._id)

    async def _pass_on_signals(self) -> None:
        passed = 0
        while True:
            name = await self._signals.next()
            if name == "HUP":
                raise Detached
            # It may have ended a moment ago, and its end is on its way to us.
            with contextlib.suppress(CallerError):
                if name == "WINCH":
                    await self._follow_size()
                    continue
                passed += 1
                if passed == 1:
                    await self._api.signal(self._id, name)
                else:
                    await self._api.terminate(self._id, force=True)
                    await self._leave_the_rest()

    async def _follow_size(self) -> None:
        size = terminal_size(STDIN, STDOUT, STDERR)
        if self._tty and size is not None and not self._read_only:
            await self._api.resize(self._id, size)

    async def _limit_time(self, timeout: float, grace: float) -> None:
        await asyncio.sleep(timeout)
        self._timed_out = True
        await self._api.terminate(self._id, grace=grace)
        await self._leave_the_rest()

    async def _leave_the_rest(self) -> None:
        await asyncio.sleep(_REST_SECONDS)
        raise _RestLeft


class SignalQueue:
    """Our signals, in the order in which they came. Before anybody takes them, INT and TERM end us.

    With `detach_on_interrupt` they are not the process's but ours: they make us leave it alone, like HUP.
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
        """Take INT, TERM, HUP and WINCH while the block runs, after the signals in the pipe `caught`."""
        loop = asyncio.get_running_loop()
        names = ("INT", "TERM", "HUP", "WINCH")
        for name in names:
            loop.add_signal_handler(getattr(signal, f"SIG{name}"), self.put, name)
        if caught is not None:
            # They are the command's, which runs already.
            self._taken = True
            with contextlib.suppress(BlockingIOError):
                for number in os.read(caught, 4096):
                    self.put(signal.Signals(number).name.removeprefix("SIG"))
        try:
            yield
        finally:
            for name in names:
                loop.remove_signal_handler(getattr(signal, f"SIG{name}"))


async def _with_company(main: Coroutine[Any, Any, int], beside: list[Coroutine[Any, Any, None]]) -> int:
    """Run `main` to its end with the others beside it; an error of one of them ends all."""
    leader = asyncio.create_task(main)
    company = {asyncio.create_task(work) for work in beside}
    running = {leader, *company}
    try:
        while not leader.done():
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {leader}:
                task.result()
        return leader.result()
    finally:
        for task in (leader, *company):
            task.cancel()
        await asyncio.gather(leader, *company, return_exceptions=True)
