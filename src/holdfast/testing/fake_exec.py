"""An `ExecApi` in memory whose programs are Python coroutines.

For tests of code that uses a sandbox: no process is started, nothing of the operating system is touched, and the
same test does the same every time. Programs are found by the first word of the command, as in a tiny PATH.

    async def greet(process: FakeProcess) -> int:
        process.stdout(b"name? ")
        name = await process.read_line()
        process.stdout(b"hello " + name)
        return 0

    box = Sandbox(FakeExec({"greet": greet, "true": prints(), "forever": hangs()}))
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import signal as signals
from collections.abc import Mapping
from typing import Final

from holdfast.errors import (
    CommandNotFound,
    DuplicateProcess,
    InvalidParams,
    NotATerminal,
    StdinClosed,
    TimeoutError,
    UnknownProcess,
    UnknownSignal,
)
from holdfast.model import (
    EnvironmentInfo,
    ExitStatus,
    OutputChunk,
    OutputGap,
    ProcessInfo,
    ProcessSpec,
    ReadResult,
    ServerStatus,
    ShellInfo,
    Snapshot,
    Stream,
    TerminalSize,
)
from holdfast.testing.fake_process import FakeEventStream, FakeProcess, Program

_ENDING_SIGNALS: Final = ("HUP", "INT", "QUIT", "KILL", "TERM")
_EVERYTHING: Final = 1 << 62


class FakeExec:
    """Programs by name, behind the interface that every sandbox has. `retained_bytes` bounds each process's log."""

    def __init__(self, programs: Mapping[str, Program] | None = None, *, retained_bytes: int = _EVERYTHING) -> None:
        self.programs: dict[str, Program] = dict(programs or {})
        #: Every spec that was started, in order.
        self.started: list[ProcessSpec] = []
        #: Ports on which something accepts connections.
        self.ports: set[int] = set()
        self.closed = False
        self._retained_bytes = retained_bytes
        self._news = asyncio.Event()
        self._processes: dict[str, FakeProcess] = {}

    def process(self, process_id: str) -> FakeProcess:
        """The inside of a process, for tests to look at."""
        try:
            return self._processes[process_id]
        except KeyError:
            raise UnknownProcess(f"no process {process_id!r}") from None

    async def wait_started(self, count: int = 1) -> FakeProcess:
        """Wait until so many processes were started; the last of them."""
        while len(self.started) < count:
            self._news.clear()
            await self._news.wait()
        return self.process(self.started[count - 1].process_id)

    async def start(self, spec: ProcessSpec) -> ProcessInfo:
        if not spec.argv:
            raise InvalidParams("argv: empty")
        known = self._processes.get(spec.process_id)
        if known is not None:
            if spec.start_id is None or spec.start_id != known.spec.start_id:
                raise DuplicateProcess(f"process {spec.process_id!r} exists")
            return self._info(known)
        program = self.programs.get(spec.argv[0])
        if program is None:
            raise CommandNotFound(f"command not found: {spec.argv[0]!r}")
        process = FakeProcess(spec, 1000 + len(self.started), self._retained_bytes)
        self.started.append(spec)
        self._processes[spec.process_id] = process
        process.run(program)
        self._news.set()
        return self._info(process)

    async def read(
        self, process_id: str, *, after_seq: int = 0, max_bytes: int | None = None, wait: float = 0.0
    ) -> ReadResult:
        process = self.process(process_id)
        if wait > 0:
            with contextlib.suppress(builtins.TimeoutError):
                async with asyncio.timeout(wait):
                    await process.until(lambda: len(process.log) > after_seq or process.closed)
        gaps, events = process.after(after_seq)
        chunks: list[OutputChunk] = []
        last, size = after_seq, 0
        for event in events:
            if isinstance(event, OutputChunk):
                size += len(event.data)
                if chunks and max_bytes is not None and size > max_bytes:
                    break
                chunks.append(event)
            assert not isinstance(event, OutputGap)
            last = event.seq
        return ReadResult(
            chunks=tuple(chunks),
            next_seq=last + 1,
            exited=process.status is not None,
            exit_code=None if process.status is None else process.status.exit_code,
            closed=process.closed,
            gap=tuple(gaps),
        )

    def events(self, process_id: str, *, after_seq: int = 0, window: int | None = None) -> FakeEventStream:
        return FakeEventStream(self.process(process_id), after_seq)

    async def write(self, process_id: str, data: bytes, *, write_id: str | None = None) -> None:
        process = self.process(process_id)
        if not process.stdin_open:
            raise StdinClosed(f"stdin of process {process_id!r} is closed")
        process.input += data
        process.notify()

    async def close_stdin(self, process_id: str) -> None:
        process = self.process(process_id)
        process.stdin_open = False
        process.notify()

    async def resize(self, process_id: str, size: TerminalSize) -> None:
        process = self.process(process_id)
        if not process.spec.tty:
            raise NotATerminal(f"process {process_id!r} runs on pipes")
        process.size = size
        process.notify()

    async def signal(self, process_id: str, signal: str, *, signal_id: str | None = None) -> None:
        process = self.process(process_id)
        if signal_id is not None:
            if signal_id in process.signal_ids:
                return
            process.signal_ids.add(signal_id)
        name = signal.upper().removeprefix("SIG")
        if f"SIG{name}" not in signals.Signals.__members__:
            raise UnknownSignal(f"no signal {signal!r}")
        process.signals.append(name)
        if name in _ENDING_SIGNALS and (name == "KILL" or name not in process.ignores):
            process.kill(name)
        process.notify()

    async def terminate(self, process_id: str, *, grace: float = 5.0, force: bool = False) -> bool:
        process = self.process(process_id)
        running = process.status is None
        if running and not force:
            await self.signal(process_id, "TERM")
            await self.wait(process_id, timeout=grace)
        if process.status is None:
            await self.signal(process_id, "KILL")
        process.kill_children()
        await process.until(lambda: not process.has_children)
        return running

    async def wait(self, process_id: str, *, timeout: float | None = None) -> ExitStatus | None:
        process = self.process(process_id)
        with contextlib.suppress(builtins.TimeoutError):
            async with asyncio.timeout(timeout):
                await process.until(lambda: process.status is not None)
        return process.status

    async def snapshot(self, process_id: str) -> Snapshot:
        process = self.process(process_id)
        gaps, events = process.after(0)
        kept: dict[Stream, bytes] = {"stdout": b"", "stderr": b"", "pty": b""}
        for event in events:
            if isinstance(event, OutputChunk):
                kept[event.stream] += event.data
        code = None if process.status is None else process.status.exit_code
        return Snapshot(kept["stdout"], kept["stderr"], kept["pty"], bool(gaps), code, process.status is None)

    async def describe(self, process_id: str) -> ProcessInfo:
        return self._info(self.process(process_id))

    async def list(self) -> tuple[ProcessInfo, ...]:
        return tuple(self._info(process) for process in self._processes.values())

    async def forget(self, process_id: str) -> None:
        if self.process(process_id).status is None:
            raise InvalidParams(f"process {process_id!r} still runs")
        del self._processes[process_id]

    async def wait_for_port(self, port: int, *, host: str = "127.0.0.1", timeout: float = 30.0) -> None:
        if port not in self.ports:
            raise TimeoutError(f"nothing accepts connections on {host}:{port}")

    async def info(self) -> EnvironmentInfo:
        shell = ShellInfo("sh", "/bin/sh")
        return EnvironmentInfo(shell, "/fake", "fake", "/home/fake", "fake", "linux", "x86_64", "0")

    async def status(self) -> ServerStatus:
        running = sum(process.status is None for process in self._processes.values())
        kept = len(self._processes) - running
        return ServerStatus("0", os.getpid(), 0.0, running, kept, sessions=1, spool="memory", spool_bytes=0)

    async def aclose(self) -> None:
        """End everything that still runs."""
        self.closed = True
        for process_id in [*self._processes]:
            await self.terminate(process_id, force=True)

    def _info(self, process: FakeProcess) -> ProcessInfo:
        status = process.status
        return ProcessInfo(
            process_id=process.spec.process_id,
            pid=process.pid,
            argv=process.spec.argv,
            cwd=process.spec.cwd or "/fake",
            tty=process.spec.tty,
            running=status is None,
            closed=process.closed,
            started_at=0.0,
            exit_code=None if status is None else status.exit_code,
            signal=None if status is None else status.signal,
            stdout_bytes=process.printed["stdout"],
            stderr_bytes=process.printed["stderr"],
            pty_bytes=process.printed["pty"],
            size=process.size if process.spec.tty else None,
            user=process.spec.user,
        )
