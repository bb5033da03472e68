"""An `ExecApi` in memory: programs, and the commands of shells, are Python coroutines.

For tests of code that uses a sandbox: no process is started, nothing of the operating system is touched, and the
same test does the same every time. Programs are found by the first word of the command, as in a tiny PATH.

    async def greet(process: FakeProcess) -> int:
        process.stdout(b"name? ")
        name = await process.read_line()
        process.stdout(b"hello " + name)
        return 0

    box = Sandbox(FakeExec({"greet": greet, "true": prints(), "forever": hangs()}))

A shell runs the coroutine given for a command's whole text, else the program named by the first word, else
`default_command`, which reports that it was not found. Commands set its directory and variables; nothing is
parsed.

    async def build(command: FakeCommand) -> int:
        command.stdout(f"building in {command.cwd}\\n")
        await command.sleep(600)
        command.variables["built"] = "yes"
        return 0

    fake = FakeExec({"true": prints()}, shell_commands={
        "make": build,
        "cd /src": answers(cwd="/src"),
        "git status": answers("clean\\n"),
        "exit 3": answers(exit_code=3, exits=True),
    })

On a `VirtualTimeLoop` the ten minutes take no time, and `shell.run("make", timeout=60)` ends after exactly sixty
seconds.

A terminal has a prompt that takes the same commands, unless it is given another program; and a test may drive the
terminal by hand in place of a program (`fake_terminal`).

    async def asks(terminal: FakeTerminal) -> int:
        terminal.prints("Password: ")
        terminal.reads(echo=False)
        await terminal.read_line()
        return 0

    fake = FakeExec(terminal_program=by_hand)
    terminal = await Sandbox(fake).terminal(id="t", ready_timeout=0)
    stub = fake.terminal("t")
    stub.shows_prompt("$ ")
    stub.starts_command()
    stub.crashes("KILL")
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import itertools
import os
import secrets
import signal as signals
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from holdfast.errors import (
    CommandNotFound,
    DuplicateProcess,
    InvalidParams,
    NotATerminal,
    StdinClosed,
    TimeoutError,
    UnknownProcess,
    UnknownShell,
    UnknownSignal,
    UnknownTerminal,
)
from holdfast.runtime.process.checks import check_run
from holdfast.runtime.process.ended import EndedLog
from holdfast.runtime.terminal.read_until import read_terminal
from holdfast.testing.fake_files import FakeFiles
from holdfast.testing.fake_process import FakeEventStream, FakeProcess, Program
from holdfast.testing.fake_prompt import prompting
from holdfast.testing.fake_pty import marking_shell
from holdfast.testing.fake_shell import (
    CommandProgram,
    FakeCommand,
    FakeCommandStream,
    FakeShell,
    answers,
    not_found,
    words,
)
from holdfast.testing.fake_terminal import FakeTerminal, TerminalProgram
from holdfast.types import (
    AWAITED_PREFIX,
    TERMINAL_OUTPUT_BYTES,
    CloseMode,
    CommandSpec,
    EndedProcesses,
    EnvironmentInfo,
    ExitStatus,
    JobsAtClose,
    OutputChunk,
    OutputGap,
    ProcessInfo,
    ProcessSpec,
    ProcessUsage,
    ReadResult,
    ReadUntil,
    ServerStatus,
    ShellInfo,
    ShellSpec,
    ShellStatus,
    Snapshot,
    Stream,
    TerminalCommandEnded,
    TerminalRead,
    TerminalSize,
    TerminalSpec,
    TerminalStatus,
    TerminalWait,
    UsageSample,
)

_ENDING_SIGNALS: Final = ("HUP", "INT", "QUIT", "KILL", "TERM")
_EVERYTHING: Final = 1 << 62
_DEFAULT_READ_BYTES: Final = 1024 * 1024


class FakeExec:
    """An `ExecApi` with programs by name. `retained_bytes` bounds each process's log."""

    def __init__(
        self,
        programs: Mapping[str, Program] | None = None,
        *,
        shell_commands: Mapping[str, CommandProgram] | None = None,
        default_command: CommandProgram = not_found,
        terminal_program: TerminalProgram | None = None,
        retained_bytes: int = _EVERYTHING,
        retained_events: int = 16_384,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.programs: dict[str, Program] = dict(programs or {})
        #: Coroutines of shell commands, by the whole text of the command.
        self.shell_commands: dict[str, CommandProgram] = dict(shell_commands or {})
        self.default_command = default_command
        #: The program of a shell in a terminal; None is a prompt with the commands of shells.
        self.terminal_program = terminal_program
        #: The spec of every started process, in order.
        self.started: list[ProcessSpec] = []
        #: Ports that accept connections.
        self.ports: set[int] = set()
        #: The files of this fake, for tests to inspect.
        self.files = FakeFiles()
        #: Resource usage by id, returned by `usage`, of processes, terminals and shells; and the pids of strays.
        self.usages: dict[str, ProcessUsage] = {}
        self._ended = EndedLog()
        self.strays: tuple[int, ...] = ()
        self.closed = False
        self._retained_bytes = retained_bytes
        self._retained_events = retained_events
        self._clock = clock
        self._news = asyncio.Event()
        self._processes: dict[str, FakeProcess] = {}
        self._shells: dict[str, FakeShell] = {}
        self._runs: dict[tuple[str, str], asyncio.Task[TerminalCommandEnded]] = {}
        self._pids = itertools.count(1000)

    def process(self, process_id: str) -> FakeProcess:
        """Return the fake process with this id, for tests to inspect."""
        try:
            return self._processes[process_id]
        except KeyError:
            raise UnknownProcess(f"no process {process_id!r}") from None

    def shell(self, shell_id: str) -> FakeShell:
        """Return the fake shell with this id, for tests to inspect."""
        try:
            return self._shells[shell_id]
        except KeyError:
            raise UnknownShell(f"no shell {shell_id!r}") from None

    def terminal(self, terminal_id: str) -> FakeTerminal:
        """Return the fake terminal with this id, for tests to inspect and to drive."""
        found = self._processes.get(terminal_id)
        if not isinstance(found, FakeTerminal):
            raise UnknownTerminal(f"no terminal {terminal_id!r}")
        return found

    def _recorded(self, id: str) -> FakeProcess:
        """Return the readable object with this id: a process, a command of a shell, or a shell's own output."""
        if id in self._shells:
            return self._shells[id].record
        commands = (shell.find(id) for shell in self._shells.values())
        return next((command for command in commands if command is not None), None) or self.process(id)

    async def wait_started(self, count: int = 1) -> FakeProcess:
        """Wait until `count` processes were started; return the last of them."""
        while len(self.started) < count:
            self._news.clear()
            await self._news.wait()
        return self.process(self.started[count - 1].process_id)

    async def start(self, spec: ProcessSpec) -> ProcessInfo:
        if not spec.argv:
            raise InvalidParams("argv: empty")
        if (known := self._existing(spec.process_id, spec.start_id)) is not None:
            return self._info(known)
        program = self.programs.get(spec.argv[0])
        if program is None:
            raise CommandNotFound(f"command not found: {spec.argv[0]!r}")
        return self._run(FakeProcess(spec, next(self._pids), self._retained_bytes), program)

    def _existing(self, process_id: str, start_id: str | None) -> FakeProcess | None:
        known = self._processes.get(process_id)
        if known is not None and (start_id is None or start_id != known.spec.start_id):
            raise DuplicateProcess(f"process {process_id!r} exists")
        return known

    def _run(self, process: FakeProcess, program: Program) -> ProcessInfo:
        self.started.append(process.spec)
        self._processes[process.spec.process_id] = process
        self._note_end(process)
        process.run(program)
        self._news.set()
        return self._info(process)

    def _note_end(self, process: FakeProcess) -> None:
        if not process.spec.process_id.startswith(AWAITED_PREFIX):
            process.on_end = lambda: self._ended.add(self._info(process))

    async def read(
        self,
        process_id: str,
        *,
        after_seq: int = 0,
        max_bytes: int | None = None,
        wait: float = 0.0,
        timing: bool = False,
    ) -> ReadResult:
        process = self._recorded(process_id)
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
        return FakeEventStream(self._recorded(process_id), after_seq)

    async def write(self, process_id: str, data: bytes, *, write_id: str | None = None) -> None:
        process = self._recorded(process_id)
        if not process.stdin_open:
            raise StdinClosed(f"stdin of process {process_id!r} is closed")
        if isinstance(process, FakeTerminal):
            process.type(data, write_id)
            return
        process.input += data
        process.notify()

    async def close_stdin(self, process_id: str) -> None:
        process = self._recorded(process_id)
        process.stdin_open = False
        process.notify()

    async def resize(self, process_id: str, size: TerminalSize) -> None:
        process = self.process(process_id)
        if not process.spec.tty:
            raise NotATerminal(f"process {process_id!r} runs on pipes")
        if isinstance(process, FakeTerminal):
            process.resized(size)
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
        if isinstance(process, FakeTerminal):
            process.signalled(name)
            return
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

    async def ended(self, *, after: int | None = None, wait: float = 0.0) -> EndedProcesses:
        return await self._ended.read(after, wait)

    async def snapshot(self, process_id: str) -> Snapshot:
        process = self._recorded(process_id)
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

    async def usage(self, process_ids: Sequence[str], *, members: bool = False) -> UsageSample:
        """Return the entries of `usages`; for other ids, whether they run and the bytes that they printed."""
        found = (self._usage(process_id) for process_id in dict.fromkeys(process_ids))
        return UsageSample(tuple(usage for usage in found if usage is not None), self.strays)

    def _usage(self, process_id: str) -> ProcessUsage | None:
        if process_id in self.usages:
            return self.usages[process_id]
        if process_id in self._shells:
            shell = self._shells[process_id]
            running, printed = shell.state != "closed", shell.record.printed
            command = shell.status().command
        elif process_id in self._processes:
            process = self._processes[process_id]
            running, printed, command = process.status is None, process.printed, None
        else:
            return None
        return ProcessUsage(
            process_id,
            running,
            process_count=int(running),
            thread_count=int(running),
            printed_bytes=sum(printed.values()),
            foreground=None if command is None else "".join(words(command)[:1]),
        )

    async def forget(self, process_id: str) -> None:
        if self.process(process_id).status is None:
            raise InvalidParams(f"process {process_id!r} still runs")
        del self._processes[process_id]

    # --- shells --------------------------------------------------------------------------------------------------

    async def open_shell(self, spec: ShellSpec) -> ShellStatus:
        known = self._shells.get(spec.shell_id)
        if known is not None:
            if spec.start_id is not None and spec.start_id == known.spec.start_id:
                return known.status()
            if known.state != "closed":
                raise DuplicateProcess(f"shell {spec.shell_id!r} exists")
        shell = FakeShell(spec, next(self._pids), self._retained_bytes, self._find)
        self._shells[spec.shell_id] = shell
        return shell.status()

    def _find(self, text: str) -> CommandProgram:
        given = self.shell_commands.get(text)
        return given or self.programs.get("".join(words(text)[:1])) or self.default_command

    def run_in_shell(
        self, shell_id: str, command: CommandSpec, *, live: bool = False, window: int | None = None
    ) -> FakeCommandStream:
        shell = self.shell(shell_id)
        return FakeCommandStream(shell, shell.run(command))

    async def start_in_shell(
        self,
        shell_id: str,
        command: str,
        process_id: str,
        *,
        start_id: str | None = None,
        pipe_stdin: bool = False,
    ) -> ProcessInfo:
        shell = self.shell(shell_id)
        # In the queue of commands, as the real shell reports its state between two commands.
        turn = FakeCommandStream(shell, shell.run(CommandSpec(secrets.token_hex(8), command), answers()))
        try:
            await anext(turn)
        finally:
            await turn.aclose()
        if (known := self._existing(process_id, start_id)) is not None:
            return self._info(known)
        spec = ProcessSpec(process_id, words(command), cwd=shell.cwd, start_id=start_id, pipe_stdin=pipe_stdin)
        process = FakeCommand(CommandSpec(process_id, command), spec, next(self._pids), self._retained_bytes)
        process.variables = dict(shell.variables)
        program = self._find(command)
        return self._run(process, lambda _: program(process))

    async def interrupt_shell(self, shell_id: str, *, interrupt_id: str | None = None) -> bool:
        return await self.shell(shell_id).interrupt(interrupt_id)

    async def close_shell(self, shell_id: str, *, keep: bool = False, grace: float = 5.0) -> None:
        await self.shell(shell_id).close(keep=keep, grace=grace)

    async def describe_shell(self, shell_id: str) -> ShellStatus:
        return self.shell(shell_id).status()

    async def list_shells(self) -> tuple[ShellStatus, ...]:
        return tuple(shell.status() for shell in self._shells.values())

    # --- terminals -----------------------------------------------------------------------------------------------

    async def open_terminal(self, spec: TerminalSpec) -> TerminalStatus:
        known = self._existing(spec.terminal_id, spec.start_id)
        if known is not None:
            return self.terminal(spec.terminal_id).describe()
        argv = spec.argv or ("/bin/bash",)
        if marking_shell(argv[0]):
            program = self.terminal_program or prompting(self._find)
        elif (found := self.programs.get(argv[0])) is not None:
            program = found
        else:
            raise CommandNotFound(f"command not found: {argv[0]!r}")
        terminal = FakeTerminal(
            spec,
            next(self._pids),
            retained_bytes=self._retained_bytes,
            retained_events=self._retained_events,
            clock=self._clock,
        )
        self._processes[spec.terminal_id] = terminal
        self._note_end(terminal)
        terminal.open(program)
        return terminal.describe()

    async def read_terminal(
        self,
        terminal_id: str,
        *,
        since: int = 0,
        max_bytes: int | None = None,
        wait: float = 0.0,
        timing: bool = False,
        marks: bool = False,
        until: ReadUntil | None = None,
        gather: float = 0.0,
    ) -> TerminalRead:
        live = self.terminal(terminal_id).live
        limit = _DEFAULT_READ_BYTES if max_bytes is None else max_bytes
        return await read_terminal(live, since, limit, wait, timing=timing, marks=marks, until=until, gather=gather)

    async def run_in_terminal(
        self,
        terminal_id: str,
        command: str,
        *,
        timeout: float | None = None,
        max_bytes: int = TERMINAL_OUTPUT_BYTES,
        run_id: str | None = None,
    ) -> TerminalCommandEnded:
        terminal = self.terminal(terminal_id)
        key = (terminal_id, run_id or secrets.token_hex(8))
        if key not in self._runs:
            check_run(timeout, max_bytes)
            self._runs[key] = asyncio.create_task(terminal.run_command(command, timeout, max_bytes, run_id or ""))
        try:
            return await asyncio.shield(self._runs[key])
        except asyncio.CancelledError:
            self._runs[key].cancel()
            raise

    async def press_keys(self, terminal_id: str, keys: Sequence[str], *, write_id: str | None = None) -> None:
        self.terminal(terminal_id).press(tuple(keys), write_id)

    async def wait_terminal(
        self, terminal_id: str, until: TerminalWait, *, timeout: float | None = None, changes: int = 0
    ) -> tuple[bool, TerminalStatus]:
        terminal = self.terminal(terminal_id)
        return await terminal.wait_until(until, timeout, changes), terminal.describe()

    async def close_terminal(
        self, terminal_id: str, *, mode: CloseMode = "graceful", jobs: JobsAtClose = "kill", grace: float = 5.0
    ) -> TerminalStatus:
        terminal = self.terminal(terminal_id)
        await terminal.close(mode, jobs, grace)
        return terminal.describe()

    async def describe_terminal(self, terminal_id: str, *, look: bool = True) -> TerminalStatus:
        status = self.terminal(terminal_id).describe()
        return status if look else msgspec.structs.replace(status, awaiting_input=None)

    async def list_terminals(self) -> tuple[TerminalStatus, ...]:
        found = (process for process in self._processes.values() if isinstance(process, FakeTerminal))
        return tuple(terminal.describe() for terminal in found)

    # --- environment ---------------------------------------------------------------------------------------------

    async def wait_for_port(self, port: int, *, host: str = "127.0.0.1", timeout: float = 30.0) -> None:
        if port not in self.ports:
            raise TimeoutError(f"nothing accepts connections on {host}:{port}")

    async def info(self) -> EnvironmentInfo:
        shell = ShellInfo("sh", "/bin/sh")
        features = ("run_ids",)
        return EnvironmentInfo(shell, "/fake", "fake", "/home/fake", "fake", "linux", "x86_64", "0", features)

    async def status(self) -> ServerStatus:
        running = sum(process.status is None for process in self._processes.values())
        kept = len(self._processes) - running
        return ServerStatus("0", os.getpid(), 0.0, running, kept, sessions=1, spool="memory", spool_bytes=0)

    async def aclose(self) -> None:
        """End everything that still runs."""
        self.closed = True
        for shell in self._shells.values():
            await shell.close(grace=0.0)
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
            oom=status is not None and status.oom,
            silent=status is not None and status.silent,
            stdout_bytes=process.printed["stdout"],
            stderr_bytes=process.printed["stderr"],
            pty_bytes=process.printed["pty"],
            size=process.size if process.spec.tty else None,
            user=process.spec.user,
        )
