"""A fake shell: a queue of commands that are coroutines. In memory; touches nothing.

A command is a program like any other (`fake_process`), and is given a `FakeCommand`: a process that also has the
shell's directory and variables. Changes to them last for the next command; `exit` closes the shell.
"""

from __future__ import annotations

import asyncio
import posixpath
import shlex
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

from holdfast.errors import EXIT_INTERRUPTED, EXIT_TIMED_OUT, HoldfastError, ShellClosed
from holdfast.runtime.output.silence import SilenceTimer
from holdfast.testing.fake_process import FakeEventStream, FakeProcess
from holdfast.types import (
    CommandEnded,
    CommandEvent,
    CommandSpec,
    Exited,
    ExitStatus,
    OutputChunk,
    OutputGap,
    ProcessSpec,
    ShellSpec,
    ShellState,
    ShellStatus,
    Stream,
)

#: Seconds that an interrupted command may ignore TERM before KILL; as the server's setting.
INTERRUPT_GRACE_SECONDS: Final = 2.0

#: A command in a fake shell. Every `Program` is one.
CommandProgram = Callable[["FakeCommand"], Awaitable[int]]


def answers(
    stdout: bytes | str = b"",
    stderr: bytes | str = b"",
    exit_code: int = 0,
    *,
    cwd: str | None = None,
    variables: Mapping[str, str] | None = None,
    exits: bool = False,
) -> CommandProgram:
    """Return a command that prints and ends; it may change the shell's directory, set variables, or exit."""

    async def program(command: FakeCommand) -> int:
        if stdout:
            command.stdout(stdout)
        if stderr:
            command.stderr(stderr)
        if cwd is not None:
            command.change_directory(cwd)
        command.variables.update(variables or {})
        return command.exit(exit_code) if exits else exit_code

    return program


async def not_found(command: FakeCommand) -> int:
    """The answer of a shell to an unknown command."""
    words = command.spec.argv
    command.stderr(f"{words[0]}: command not found\n" if words else "")
    return 127 if words else 0


class FakeCommand(FakeProcess):
    """A command in a fake shell, or a process that was started with a shell's state."""

    def __init__(
        self,
        requested: CommandSpec,
        spec: ProcessSpec,
        pid: int,
        retained_bytes: int,
        shell: FakeShell | None = None,
    ) -> None:
        super().__init__(spec, pid, retained_bytes)
        #: The text as it was given; `spec.argv` has its words.
        self.requested = requested
        self.input = requested.input or b""
        #: Directory and variables of the shell, once the command began: it may change both.
        self.cwd = spec.cwd or ""
        self.variables: dict[str, str] = {}
        #: Whether the shell ends with this command.
        self.exits = False
        #: The shell of this command; None for a process of its own.
        self.shell = shell
        #: Runs in place of the coroutine that the shell would find.
        self.program: CommandProgram | None = None
        self.ended: CommandEnded | None = None
        #: The reason why it did not run.
        self.error: HoldfastError | None = None
        self.began = 0.0
        self.timed_out = False
        self.silent = False
        self.stopped = False

    # --- for programs ------------------------------------------------------------------------------------------

    @property
    def env(self) -> dict[str, str]:
        """The shell's variables, overridden by those given for this command alone."""
        return {**self.variables, **(self.requested.env or {})}

    def change_directory(self, path: str) -> None:
        self.cwd = posixpath.normpath(posixpath.join(self.cwd, path))

    def exit(self, code: int = 0) -> int:
        """End the shell when the command returns: `return command.exit(3)`."""
        self.exits = True
        return code

    def leave_behind(self, child: Coroutine[Any, Any, None]) -> None:
        """Add a background job: its output after the command's end is the shell's, and it ends with the shell."""
        if self.shell is None:
            super().leave_behind(child)
        else:
            self.shell.record.leave_behind(child)

    # --- for the shell -----------------------------------------------------------------------------------------

    def end(self, status: ExitStatus) -> None:
        if self.status is None:
            super().end(status)
            if self.shell is not None:
                self.shell.command_over(self, status)

    def refuse(self, error: HoldfastError) -> None:
        """Mark the command as one that will not run."""
        self.error = error
        self.notify()

    def _print(self, stream: Stream, data: bytes | str) -> None:
        if self.status is not None and self.shell is not None:
            (self.shell.record.stderr if stream == "stderr" else self.shell.record.stdout)(data)
        else:
            super()._print(stream, data)


class FakeShell:
    """A fake shell, and the state that a test may inspect. Commands run one after the other, in their order."""

    def __init__(
        self, spec: ShellSpec, pid: int, retained_bytes: int, find: Callable[[str], CommandProgram]
    ) -> None:
        self.spec = spec
        self.pid = pid
        self.path = spec.shell if spec.shell and "/" in spec.shell else f"/bin/{spec.shell or 'sh'}"
        self.state: ShellState = "idle"
        #: The reason why the shell is closed.
        self.reason = ""
        self.cwd = spec.cwd or "/fake"
        self.variables: dict[str, str] = dict(spec.env or {})
        self.current: FakeCommand | None = None
        self.queue: deque[FakeCommand] = deque()
        #: Every command that ran, in order.
        self.ran: list[CommandSpec] = []
        #: Output of background jobs after their command has ended, under the shell's id.
        self.record = FakeProcess(ProcessSpec(spec.shell_id, (self.path,)), pid, retained_bytes)
        self._retained_bytes = retained_bytes
        self._find = find
        self._commands: dict[str, FakeCommand] = {}
        self._commands_run = 0
        self._interrupts: dict[str, FakeCommand | None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._silence: SilenceTimer | None = None
        self._closing = False

    def status(self) -> ShellStatus:
        current, exit = self.current, self.record.status
        return ShellStatus(
            shell_id=self.spec.shell_id,
            path=self.path,
            pid=self.pid,
            state=self.state,
            cwd=self.cwd,
            started_at=0.0,
            reason=self.reason,
            exit_code=None if exit is None else exit.exit_code,
            command=None if current is None else current.requested.command,
            command_id=None if current is None else current.spec.process_id,
            queued=len(self.queue),
            commands_run=self._commands_run,
            stdout_bytes=self.record.printed["stdout"],
            stderr_bytes=self.record.printed["stderr"],
            user=self.spec.user,
            login=self.spec.login,
        )

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds: `await shell.until(lambda: len(shell.queue) == 2)`."""
        await self.record.until(holds)

    # --- commands ----------------------------------------------------------------------------------------------

    def run(self, spec: CommandSpec, program: CommandProgram | None = None) -> FakeCommand:
        """Queue a command; a repeated id returns the same command."""
        known = self._commands.get(spec.command_id)
        if known is not None:
            return known
        self._check_open()
        process = ProcessSpec(
            spec.command_id, words(spec.command), cwd=spec.cwd, env=spec.env, pipe_stdin=spec.pipe_stdin
        )
        command = FakeCommand(spec, process, self.pid, self._retained_bytes, self)
        command.program = program
        self._commands[spec.command_id] = command
        self.queue.append(command)
        self._next()
        self.record.notify()
        return command

    def find(self, command_id: str) -> FakeCommand | None:
        return self._commands.get(command_id)

    def withdraw(self, command: FakeCommand) -> None:
        """Withdraw a command for its caller: one that waits leaves the queue, one that runs is interrupted."""
        if command in self.queue:
            self.queue.remove(command)
            command.refuse(ShellClosed("taken out of the queue: its caller gave up"))
            self.record.notify()
        elif command is self.current:
            self._stop(command)

    def _next(self) -> None:
        if self.current is not None or not self.queue:
            return
        command = self.current = self.queue.popleft()
        spec, program = command.requested, command.program
        loop = asyncio.get_running_loop()
        self.state = "running"
        if program is None:
            self.ran.append(spec)
            program = self._find(spec.command)
        command.began = loop.time()
        command.cwd, command.variables = self.cwd, dict(self.variables)
        if spec.cwd is not None:
            command.change_directory(spec.cwd)
        if spec.timeout is not None:
            self._timer = loop.call_later(spec.timeout, self._time_is_up, command)
        if spec.silence is not None:
            self._silence = SilenceTimer(
                spec.silence, lambda: command.printed_at, lambda: self._time_is_up(command, silent=True)
            )
        command.run(lambda _: program(command))

    def command_over(self, command: FakeCommand, status: ExitStatus) -> None:
        """Report that a command has returned; called by the command."""
        for timer in (self._timer, self._silence):
            if timer is not None:
                timer.cancel()
        self._timer = self._silence = None
        if command.requested.cwd is None:
            self.cwd = command.cwd
        self.variables = command.variables
        self.current = None
        self._commands_run += 1
        code = status.exit_code
        self.state = "idle"
        if self._closing:
            self.state, self.reason = "closed", "closed"
        elif command.stopped:
            code = EXIT_TIMED_OUT if command.timed_out else EXIT_INTERRUPTED
        elif command.exits:
            self.state, self.reason = "closed", f"exited with code {code}"
        command.ended = CommandEnded(
            exit_code=code,
            cwd=self.cwd,
            duration=asyncio.get_running_loop().time() - command.began,
            timed_out=command.timed_out,
            state=self.state,
            reason=self.reason,
            oom=status.oom,
            silent=command.silent,
        )
        if self.state == "closed":
            self._over(ExitStatus(code))
        else:
            self._next()
        self.record.notify()

    # --- ending one --------------------------------------------------------------------------------------------

    async def interrupt(self, interrupt_id: str | None = None) -> bool:
        """Interrupt the running command; False if none runs. A repeated `interrupt_id` means the same command."""
        command = self.current
        if interrupt_id is not None:
            command = self._interrupts.setdefault(interrupt_id, command)
        if command is None:
            return False
        ending = command
        if ending is self.current:
            self._stop(ending)
        await ending.until(lambda: ending.status is not None)
        return True

    def _time_is_up(self, command: FakeCommand, *, silent: bool = False) -> None:
        command.silent = silent
        command.timed_out = not command.stopped
        self._stop(command)

    def _stop(self, command: FakeCommand) -> None:
        if not command.stopped:
            command.stopped = True
            _end(command, INTERRUPT_GRACE_SECONDS)

    # --- its end -----------------------------------------------------------------------------------------------

    async def close(self, *, keep: bool = False, grace: float = 5.0) -> None:
        if not self._closing and self.state != "closed":
            self._closing = True
            while self.queue:
                self.queue.popleft().refuse(ShellClosed(self._closed_text("closed"), reason="closed"))
            if (command := self.current) is not None:
                _end(command, grace)
                await command.until(lambda: command.status is not None)
            if self.record.status is None:
                self.state, self.reason = "closed", "closed"
                self._over(ExitStatus(0))
        await self.until(lambda: self.record.status is not None)
        if not keep:
            self.record.kill_children()
            await self.until(lambda: not self.record.has_children)

    def _over(self, status: ExitStatus) -> None:
        while self.queue:
            self.queue.popleft().refuse(ShellClosed(self._closed_text(self.reason), reason=self.reason))
        self.record.end(status)

    def _check_open(self) -> None:
        if self.state == "closed" or self._closing:
            reason = self.reason or "closed"
            raise ShellClosed(self._closed_text(reason), reason=reason)

    def _closed_text(self, reason: str) -> str:
        return f"shell {self.spec.shell_id!r} is closed: {reason}"


class FakeCommandStream:
    """`CommandStream` over a fake shell."""

    def __init__(self, shell: FakeShell, command: FakeCommand) -> None:
        self._shell = shell
        self._command = command
        self._events = FakeEventStream(command, 0)
        self._over = False

    def __aiter__(self) -> FakeCommandStream:
        return self

    async def __anext__(self) -> CommandEvent:
        command = self._command
        await command.until(lambda: self._over or command.error is not None or self._events.has_more)
        if self._over:
            raise StopAsyncIteration
        if command.error is not None:
            self._over = True
            raise command.error
        event = await anext(self._events)
        if isinstance(event, OutputChunk | OutputGap):
            return event
        assert isinstance(event, Exited)
        assert command.ended is not None
        self._over = True
        return command.ended

    async def aclose(self) -> None:
        """Withdraw the command, if it has not ended."""
        if not self._over:
            self._over = True
            self._shell.withdraw(self._command)
        self._command.notify()


def words(command: str) -> tuple[str, ...]:
    """Split a plain command as a shell would; one with an open quote is one word."""
    try:
        return tuple(shlex.split(command))
    except ValueError:
        return (command,)


def _end(command: FakeCommand, grace: float) -> None:
    """Send TERM, and KILL after the grace period if the command ignores it."""
    command.signals.append("TERM")
    if "TERM" not in command.ignores:
        command.kill("TERM")
    else:
        asyncio.get_running_loop().call_later(grace, command.kill, "KILL")
    command.notify()
