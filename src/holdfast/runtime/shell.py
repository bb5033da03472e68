"""A live shell whose state persists, and the queue of commands for it. Lives on the event loop.

    idle --run--> running --answer--> idle
      |              |
      |              +-- timeout, interrupt: its foreground ends, then the command, then idle;
      |              |   if the shell does not come back: a new shell (`shell_restarted`)
      +-- close      +-- the shell ends: closed, or a new shell if an option ended it (`set -e`)

A command's output, its exit and its late output are recorded like a process's (`recorded`); what comes after the end
of its command belongs to the shell. What is said to the shell is `shell_dialect`.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import signal
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Literal

from holdfast.errors import (
    HoldfastError,
    LimitReached,
    SandboxError,
    ShellClosed,
)
from holdfast.model import CommandEnded, CommandSpec, ExitStatus, ProcessSpec, ShellSpec, ShellState, ShellStatus
from holdfast.runtime.foreground import command_line, foreground, holds, is_stopped, reaped_faults, waits_for_input
from holdfast.runtime.process import ManagedProcess
from holdfast.runtime.process_table import Entry, TableReader
from holdfast.runtime.process_tree import end_all
from holdfast.runtime.recorded import Output, Recorded
from holdfast.runtime.shell_command import ShellCommand
from holdfast.runtime.shell_dialect import (
    INTERRUPT_SIGNAL,
    WHOLE,
    Answer,
    Dialect,
    Step,
    Suspended,
    is_whole,
    parse_answer,
)
from holdfast.runtime.shell_files import ShellFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from holdfast.config import ExecServerConfig
    from holdfast.runtime.output_log import Spool
    from holdfast.runtime.poller import Poller

#: A shell that reads long profile files may take this long until it takes commands.
START_SECONDS: Final = 30.0
#: How long a shell whose foreground is gone may take to come back before it is replaced.
COME_BACK_SECONDS: Final = 1.0
#: An answer: far more than a path of the longest kind and every trap. More than that is no answer.
MAX_ANSWER_BYTES: Final = 1024 * 1024
#: Ended commands that a client whose connection broke can ask for again.
KEPT_COMMANDS: Final = 4
#: Their ids are known for longer, so that none runs twice.
KNOWN_COMMANDS: Final = 256
#: Without an answer for this long, and then twice as long each time, look whether the shell can still answer.
SILENCE_SECONDS: Final = (0.2, 3.0)
#: With nothing to do for this long, a shell writes its exported variables down: a new one would need them.
IDLE_SECONDS: Final = 0.02
TIMED_OUT: Final = 124
INTERRUPTED: Final = 130
#: The shell did not say how the command ended.
UNKNOWN_STATUS: Final = 125
Restored = Literal["state", "exports"]
#: Where a shell reads its own program.
_CONTROL: Final = range(1)


class LiveShell:
    """One shell by its id, through as many programs as it takes."""

    def __init__(
        self,
        spec: ShellSpec,
        path: str,
        dialect: Dialect,
        files: ShellFiles,
        *,
        start_process: Callable[
            [ProcessSpec, int, Callable[[ManagedProcess], None]], Coroutine[None, None, ManagedProcess]
        ],
        end_process: Callable[[ManagedProcess, float], Coroutine[None, None, None]],
        spool: Spool,
        poller: Poller,
        config: ExecServerConfig,
        tables: TableReader,
        on_growth: Callable[[], None],
        on_closed: Callable[[LiveShell], None],
        on_forget: Callable[[ShellCommand], None],
    ) -> None:
        self.spec = spec
        self.path = path
        self.started_at = time.time()
        self.cwd = ""
        self.state: ShellState = "idle"
        self.reason = ""
        self.restarts = 0
        self.commands_run = 0
        #: What background jobs print after their command has ended, and what a profile prints.
        self.record = Recorded(
            spec.shell_id, (0, 1), blocking=False, spool=spool, poller=poller, config=config, on_growth=on_growth
        )
        self.dialect = dialect
        self._files = files
        self._start_process = start_process
        self._end_process = end_process
        self._spool = spool
        self._poller = poller
        self._config = config
        self._tables = tables
        self._on_growth = on_growth
        self._on_closed = on_closed
        self._on_forget = on_forget
        self._loop = asyncio.get_running_loop()
        self._process: ManagedProcess | None = None
        self._control: socket.socket | None = None
        self._received = bytearray()
        self._queue: deque[ShellCommand] = deque()
        self._current: ShellCommand | None = None
        self._ended: deque[ShellCommand] = deque()
        self._known: deque[str] = deque(maxlen=KNOWN_COMMANDS)
        self._ready: asyncio.Future[Answer] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        """What is known of a shell that has just started."""
        self._received.clear()
        self._answer = Answer(0, "", "", None, "", "", {})
        self._suspended = Suspended()
        self._armed = False
        self._exports_saved = False
        self._pipes = 0
        #: Whether somebody may still hold the pipes that have the names of each pair.
        self._held = [False, False]
        self._outputs: list[Output] = []
        self._late: list[tuple[Output, str]] = []
        self._step = 0
        self._faults = 0
        self._command_line = b""
        self._replaced = False

    # --- what it is ------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.spec.shell_id

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def info(self) -> ShellStatus:
        current, status = self._current, self.record.status
        return ShellStatus(
            shell_id=self.id,
            path=self.path,
            pid=self.pid,
            state=self.state,
            cwd=self.cwd,
            started_at=self.started_at,
            reason=self.reason,
            exit_code=status.exit_code if status else None,
            command=current.spec.command if current else None,
            command_id=current.process_id if current else None,
            queued=len(self._queue),
            commands_run=self.commands_run,
            restarts=self.restarts,
            stdout_bytes=self.record.logs[0].end,
            stderr_bytes=self.record.logs[1].end,
            user=self.spec.user,
            login=self.spec.login,
        )

    # --- starting --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the program; on return it takes commands."""
        self._begin_anew()
        self._files.prepare(self.dialect)
        await self._launch(self.spec.cwd, restore=None)

    async def _launch(self, cwd: str | None, *, restore: str | None) -> None:
        pipes = self._files.open_pipes(0, fresh=True)
        ours, theirs = socket.socketpair()
        spec = ProcessSpec(
            process_id=f"{self.id}:{self.restarts}",
            argv=(self.path, *self.dialect.arguments(login=self.spec.login and restore is None)),
            cwd=cwd,
            env=self.spec.env,
            env_policy=self.spec.env_policy,
            user=self.spec.user,
            limits=self.spec.limits,
            overflow="drop",
        )
        try:
            with theirs:
                process = await self._start_process(spec, theirs.fileno(), self._program_ended)
        except BaseException:
            ours.close()
            for fd in pipes.values():
                os.close(fd)
            raise
        self._process = process
        self._control = ours
        ours.setblocking(False)
        self._poller.watch(ours.fileno(), self._answer_ready)
        self._outputs = [self.record.watch(kind, fd) for kind, fd in pipes.items()]
        process.give_streams(self.record)
        self._ready = self._loop.create_future()
        self._say(self.dialect.boot(self._files.quoted, restore))
        try:
            async with asyncio.timeout(START_SECONDS):
                answer = await self._ready
        except builtins.TimeoutError:
            await self._end_process(process, 0.0)
            raise SandboxError(f"{self.path}: took no command within {START_SECONDS:g} s after its start") from None
        except BaseException:
            await asyncio.shield(self._end_process(process, 0.0))
            raise
        finally:
            self._ready = None
        self._command_line = command_line(process.pid)
        self._take_answer(answer)
        self._settle()

    # --- commands --------------------------------------------------------------------------------------------

    def run(self, spec: CommandSpec) -> ShellCommand:
        """Queue a command; the same id again is the same command."""
        if (command := self.find(spec.command_id)) is not None:
            return command
        self._check_open()
        if spec.command_id in self._known:
            raise ShellClosed(f"command {spec.command_id!r} ran in shell {self.id!r}; its result is no longer kept")
        if len(self._queue) >= self._config.max_queued_commands:
            raise LimitReached(
                f"{len(self._queue)} commands wait in shell {self.id!r}: that is max_queued_commands"
            )
        command = ShellCommand(
            spec,
            spool=self._spool,
            poller=self._poller,
            config=self._config,
            on_growth=self._on_growth,
            on_end=self._command_over,
        )
        self._known.append(spec.command_id)
        if self._current is None and not self._queue and self._restarting is None:
            self._begin(command)
        else:
            self._queue.append(command)
        return command

    def find(self, command_id: str) -> ShellCommand | None:
        """A command that waits, runs, or has just ended."""
        for command in (self._current, *self._queue, *self._ended):
            if command is not None and command.process_id == command_id:
                return command
        return None

    def withdraw(self, command: ShellCommand) -> None:
        """Its caller gave up: one that waits is taken out, one that runs is interrupted."""
        if command in self._queue:
            self._queue.remove(command)
            command.refuse(ShellClosed("taken out of the queue"))
            self._on_forget(command)
        elif command is self._current:
            self._stop(command)

    def _begin(self, command: ShellCommand) -> None:
        try:
            line = self._prepare(command)
        except HoldfastError as error:
            command.refuse(error)
            self._on_forget(command)
            self._loop.call_soon(self._next)
            return
        self._current = command
        self.state = "running"
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        command.begin(self._timed_out)
        self._say(line)
        self._listen(SILENCE_SECONDS[0])

    def _prepare(self, command: ShellCommand) -> str:
        """Write the command's files and arrange its streams; returns the line that starts it."""
        spec, dialect, files, answer = command.spec, self.dialect, self._files, self._answer
        status = 0 if "e" in answer.flags else answer.status
        saves_state = dialect.may_abort(spec.command, answer.flags) and "EXIT" not in answer.traps
        step = Step(
            files.quoted,
            cwd=spec.cwd,
            env=spec.env,
            stdin="/dev/null" if spec.input is None else f"{files.quoted}/input",
            status=status,
            last=answer.last if dialect.wants_last(spec.command) else None,
            pipes=1 - self._pipes if self._has_had_children() else None,
            saves_state=saves_state,
            saves_exports=spec.timeout is not None and not self._exports_saved,
        )
        files.write("command", _encode(dialect.command(spec.command, self._suspended)))
        plain = Step(files.quoted)
        if saves_state:
            files.forget("state")
        if step != plain:
            files.write("status", b"return %d\n" % status)
            # Not the file of the step before: some shells read on in that one after they have answered.
            self._step = 1 - self._step
            files.write(f"step{self._step}", _encode(dialect.step(step)))
        if spec.input is not None:
            files.write("input", spec.input)
        files.write("keep", _encode(dialect.step(plain)))
        self._give_streams(command, step.pipes)
        self._armed = saves_state
        self._exports_saved = False
        return f"\\. {files.quoted}/{'keep' if step == plain else f'step{self._step}'}\n"

    def _has_had_children(self) -> bool:
        """Whether anybody but the shell may hold the pipes: it has waited for a child, or left one behind."""
        assert self._process is not None
        before = self._faults
        self._faults = reaped_faults(self._process.pid)
        return self._faults != before or self._faults < 0 or self._job_changed

    _job_changed = False

    def _give_streams(self, command: ShellCommand, pipes: int | None) -> None:
        if pipes is not None:
            fds = self._files.open_pipes(pipes, fresh=self._held[pipes])
            letters = "oe"
            self._late += [(output, f"{self._files.path}/{letters[output.kind]}{self._pipes}") for output in self._outputs]
            self._outputs = [command.watch(kind, fd) for kind, fd in fds.items()]
            self._held[self._pipes] = True
            self._pipes = pipes
        else:
            for output in self._outputs:
                if output.fd >= 0:
                    command.adopt(output)
        if self._late:
            self._late = [(output, path) for output, path in self._late if output.fd >= 0]
        for output, path in self._late:
            # `exec 3>&1` in an earlier command: what comes through it belongs to the command that prints it.
            if holds(self.pid, path) and output.owner is self.record:
                command.adopt(output)

    def _timed_out(self, command: ShellCommand) -> None:
        command.timed_out = True
        self._stop(command)

    def background(self, process_id: str) -> ProcessSpec:
        """A program of the same kind, to be given its state and its command on stdin."""
        return ProcessSpec(
            process_id=process_id,
            argv=(self.path, *self.dialect.arguments(login=False)),
            cwd=self.cwd,
            env=self.spec.env,
            env_policy=self.spec.env_policy,
            user=self.spec.user,
            limits=self.spec.limits,
        )

    # --- answers ---------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        """Lines for the shell. They are short: it takes them, or it is gone."""
        assert self._control is not None
        data = _encode(text)
        try:
            sent = self._control.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # it has ended: that is told in a moment
        if sent < len(data):
            self._loop.create_task(self._say_rest(self._control, data[sent:]))

    async def _say_rest(self, control: socket.socket, data: bytes) -> None:
        with contextlib.suppress(OSError):
            await self._loop.sock_sendall(control, data)

    def _answer_ready(self) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up()
            # It closed our socket: at its end, or because it became another program.
            self._replaced = command_line(self.pid) not in (b"", self._command_line)
            return
        self._received += data
        if not is_whole(self._received):
            if len(self._received) > MAX_ANSWER_BYTES:
                self._received.clear()
            return
        received = bytes(self._received)
        self._received.clear()
        try:
            answer = parse_answer(received)
        except ValueError:
            return  # no answer of ours; the silence will be looked into
        if self._ready is not None:
            if not self._ready.done():
                self._ready.set_result(answer)
        elif self._current is not None:
            self._command_answered(self._current, answer)

    def _command_answered(self, command: ShellCommand, answer: Answer) -> None:
        stopped = command.stop is not None
        exit_code = answer.status
        if stopped:
            exit_code = TIMED_OUT if command.timed_out else INTERRUPTED
            # What the shell shows as its DEBUG trap is what stopped it.
            answer = answer._replace(status=exit_code, traps=_without(answer.traps, "DEBUG"))
        back: tuple[str, str] | None = None
        if command.spec.cwd is not None:
            back = self._answer.cwd, self._answer.old_cwd
        disarm = self._armed and "/at_exit" in answer.traps.get("EXIT", "")
        if disarm:
            answer = answer._replace(traps=_without(answer.traps, "EXIT"))
        self._take_answer(answer)
        if back is not None:
            self.cwd = back[0]
            self._answer = answer._replace(cwd=back[0], old_cwd=back[1])
        self._settle(interrupted=stopped, disarm=disarm, back=back)
        self._finish(command, exit_code)

    def _take_answer(self, answer: Answer) -> None:
        self._job_changed = answer.job != self._answer.job
        if answer.cwd != self._answer.cwd:
            self.cwd = self._true_cwd(answer.cwd)
        self._answer = answer

    def _settle(
        self, *, interrupted: bool = False, disarm: bool = False, back: tuple[str, str] | None = None
    ) -> None:
        """Between two commands: take off what would show, and undo what was for the last command alone."""
        self._suspended = Suspended.after(self._answer)
        line = self.dialect.clean_up(
            suspend=self._suspended, interrupted=interrupted, disarm=disarm, back=back
        )
        if line:
            self._say(line)

    def _true_cwd(self, claimed: str) -> str:
        """`PWD`, if that is where the shell is: a user may set it to anything."""
        link = f"/proc/{self.pid}/cwd"
        try:
            if claimed.startswith("/") and os.path.samefile(claimed, link):
                return claimed
        except OSError:
            pass
        try:
            return os.readlink(link)
        except OSError:
            return claimed

    def _finish(
        self, command: ShellCommand, exit_code: int, *, restored: Restored | None = None, closed: bool = False
    ) -> None:
        assert command.began is not None
        command.finish(
            CommandEnded(
                exit_code=exit_code,
                cwd=self.cwd,
                duration=self._loop.time() - command.began,
                timed_out=command.timed_out,
                shell_restarted=restored is not None,
                restored=restored or "",
                state="closed" if closed else "idle",
                reason=self.reason if closed else "",
            )
        )

    def _command_over(self, command: ShellCommand) -> None:
        """Its end is in its journal: what its streams print from now on is ours."""
        command.give_streams(self.record)
        self.commands_run += 1
        self._ended.append(command)
        if len(self._ended) > KEPT_COMMANDS:
            self._on_forget(self._ended.popleft())
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
        self._current = None
        if self.state == "running":
            self.state = "idle"
            self._idle = self._loop.call_later(IDLE_SECONDS, self._save_exports)
        # In a turn of its own, so that whoever waits for this end hears of it first.
        if self._queue:
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        if self._current is None and self._queue and self._restarting is None and self.state != "closed":
            self._begin(self._queue.popleft())

    def _save_exports(self) -> None:
        self._idle = None
        if self.state == "idle" and not self._exports_saved and self._restarting is None:
            self._exports_saved = True
            self._say(self.dialect.save_exports(self._files.quoted))

    # --- a shell that does not answer ------------------------------------------------------------------------

    def _listen(self, seconds: float) -> None:
        self._silence = self._loop.call_later(seconds, self._look, self._current, seconds, False)

    def _look(self, command: ShellCommand | None, seconds: float, waited: bool) -> None:
        """No event tells that a shell cannot answer: it was stopped, or a command took our words from it."""
        self._silence = None
        if command is None or command is not self._current or self._process is None:
            return
        pid = self._process.pid
        if is_stopped(pid):
            self._process.signal_leader(signal.SIGCONT)
        waits = self._control is not None and waits_for_input(pid, _CONTROL)
        if waits and waited:
            self._replace(command, UNKNOWN_STATUS)
            return
        seconds = SILENCE_SECONDS[0] if waits else min(2 * seconds, SILENCE_SECONDS[1])
        self._silence = self._loop.call_later(seconds, self._look, command, seconds, waits)

    # --- ending a command ------------------------------------------------------------------------------------

    async def interrupt(self) -> bool:
        """End the command that runs, and all it started in the foreground; False if none runs."""
        command = self._current
        if command is None:
            return False
        await asyncio.shield(self._stop(command))
        return True

    def _stop(self, command: ShellCommand) -> asyncio.Task[None]:
        if command.stop is None:
            command.stop = self._loop.create_task(self._end_command(command))
        return command.stop

    async def _end_command(self, command: ShellCommand) -> None:
        process = self._process
        assert process is not None
        # A reader that does not read must not keep it from ending.
        command.stop_blocking()
        process.signal_leader(signal.SIGCONT)
        # First: once its foreground is gone the shell would go on with the rest of the command.
        process.signal_leader(INTERRUPT_SIGNAL)
        ending = asyncio.ensure_future(end_all(self._foreground, self._config.interrupt_grace_seconds))
        over = asyncio.ensure_future(command.wait_ended())
        try:
            await asyncio.wait((ending, over), return_when=asyncio.FIRST_COMPLETED)
            if not over.done():
                process.signal_leader(INTERRUPT_SIGNAL)
                await asyncio.wait((over,), timeout=COME_BACK_SECONDS)
            if not over.done():
                self._replace(command, TIMED_OUT if command.timed_out else INTERRUPTED)
            await asyncio.wait((over,))
            await ending
        finally:
            over.cancel()

    async def _foreground(self) -> dict[int, Entry]:
        if self._current is None or self._current.stop is None:
            return {}
        return foreground(await self._tables.read(), self.pid)

    # --- the program ends ------------------------------------------------------------------------------------

    def _program_ended(self, process: ManagedProcess) -> None:
        """However it came about. What it had told us before is read first."""
        if process is not self._process or self._restarting is not None:
            return
        if self._control is not None:
            self._answer_ready()
        self._hang_up()
        assert process.status is not None
        status = process.status
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(
                SandboxError(f"{self.path} ended with exit code {status.exit_code} before it took a command")
            )
            return
        command = self._current
        if command is not None and self._closing is None:
            saved = self._saved_state()
            if command.stop is not None or saved:
                code = status.exit_code
                if command.stop is not None:
                    code = TIMED_OUT if command.timed_out else INTERRUPTED
                self._replace(command, code)
                return
        self._close_for(status)

    def _saved_state(self) -> bool:
        if not self._armed or self._process is None:
            return False
        state = self._files.read("state")
        return state is not None and state.endswith(WHOLE.encode() + b"\n")

    def _close_for(self, status: ExitStatus) -> None:
        if self._closing is not None:
            reason = "closed"
        elif self._replaced:
            reason = f"replaced by another program (exec), which ended with exit code {status.exit_code}"
        elif status.signal is not None:
            reason = f"killed by {status.signal}"
        else:
            reason = f"exited with code {status.exit_code}"
        self._closed(reason, status)

    def _closed(self, reason: str, status: ExitStatus) -> None:
        if self.state == "closed":
            return
        self.state = "closed"
        self.reason = reason
        for timer in (self._silence, self._idle):
            if timer is not None:
                timer.cancel()
        command, self._current = self._current, None
        if command is not None:
            self._finish(command, status.exit_code, closed=True)
        while self._queue:
            waiting = self._queue.popleft()
            waiting.refuse(self._closed_error())
            self._on_forget(waiting)
        self._files.remove()
        self.record.end(status)
        self._on_closed(self)

    def _closed_error(self) -> ShellClosed:
        return ShellClosed(f"shell {self.id!r} is closed: {self.reason}", reason=self.reason)

    def _check_open(self) -> None:
        if self.state == "closed":
            raise self._closed_error()
        if self._closing is not None:
            raise ShellClosed(f"shell {self.id!r} is being closed", reason="closed")

    def _hang_up(self) -> None:
        if self._control is not None:
            self._poller.unwatch(self._control.fileno())
            self._control.close()
            self._control = None

    # --- a new program ---------------------------------------------------------------------------------------

    def _replace(self, command: ShellCommand, exit_code: int) -> None:
        """End the program and go on with another, in the same directory, with what is known of the old one."""
        if self._restarting is None:
            self._restarting = self._loop.create_task(self._restart(command, exit_code))

    async def _restart(self, command: ShellCommand, exit_code: int) -> None:
        process = self._process
        assert process is not None
        try:
            restored: Restored = "state" if self._saved_state() and not process.running else "exports"
            process.signal_leader(signal.SIGKILL)
            status = await process.wait_exit()
            self._hang_up()
            cwd = self.cwd if os.path.isdir(self.cwd) else "/"
            command.take_what_is_there()
            command.give_streams(self.record)
            self.restarts += 1
            self._begin_anew()
            there = self._files.read(restored) is not None
            self._files.prepare(self.dialect)
            try:
                await self._launch(cwd, restore=f"{self._files.path}/{restored}" if there else None)
            except (HoldfastError, OSError) as error:
                self._restarting = None
                self._closed(f"it did not start again: {error}", status)
                return
            self._files.forget("state")
            self._answer = self._answer._replace(status=exit_code)
            self._restarting = None
            self._finish(command, exit_code, restored=restored)
        finally:
            self._restarting = None
        self._next()

    # --- closing ---------------------------------------------------------------------------------------------

    async def close(self, *, keep: bool, grace: float) -> None:
        """End the shell and, unless they are to be kept, all that it started."""
        if self.state == "closed" and keep:
            return
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(keep, grace))
        await asyncio.shield(self._closing)

    async def _close(self, keep: bool, grace: float) -> None:
        if self._restarting is not None:
            await asyncio.wait((self._restarting,))
        process = self._process
        if process is None:
            return
        if self._control is not None:
            # The end of its input: it runs its EXIT trap and goes.
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)
        if self._current is None or keep:
            with contextlib.suppress(builtins.TimeoutError):
                async with asyncio.timeout(grace):
                    await process.wait_exit()
        if keep:
            process.signal_leader(signal.SIGKILL)
            await process.wait_exit()
        else:
            await self._end_process(process, grace)
        self._close_for(process.status or ExitStatus(0))

    def discard(self) -> None:
        """Forget everything."""
        self._hang_up()
        for command in (*self._ended, *self._queue, self._current):
            if command is not None:
                command.discard()
        self.record.discard()
        self._files.remove()


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _without(traps: dict[str, str], name: str) -> dict[str, str]:
    return {each: action for each, action in traps.items() if each != name}

