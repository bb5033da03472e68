"""A live shell with persistent state, the queue of its commands, and the state machine of both. On the event loop.

    phase        event                                           next phase
    starting     the program's first answer                      idle
    idle         a command begins                                running
    running      the program answers: the command has ended      recording
                 the program is lost: killed to end a command,
                 ended by an option (`set -e`), unresponsive     restarting
    restarting   the next program's first answer                 recording
    recording    the journal of the command has its end          idle
    any          the program exits otherwise, or cannot start    closed

`LiveShell` alone changes the phase. The others report events: `ShellProgram` an answer, the process its exit,
`ShellCommand` that its end is recorded. A timeout and an interrupt kill the program's foreground; a program that
does not answer then is replaced (`shell_restarted`). Output after the end of a command belongs to the shell.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Final, Literal

from msgspec.structs import replace

from holdfast.errors import (
    EXIT_INTERRUPTED,
    EXIT_TIMED_OUT,
    HoldfastError,
    LimitReached,
    NotExecutable,
    ShellClosed,
    UnknownProcess,
)
from holdfast.runtime.confine.jail import inside_pid
from holdfast.runtime.confine.launch_plan import lasting_cwd
from holdfast.runtime.durability.shell_replay import KEPT_INTERRUPTS, KNOWN_COMMANDS
from holdfast.runtime.output.job import Job
from holdfast.runtime.process.oom import KILLED, OomCounter
from holdfast.runtime.process.process import ManagedProcess
from holdfast.runtime.shell.command import ShellCommand
from holdfast.runtime.shell.dialect import Answer, ShellDialect
from holdfast.runtime.shell.files import ShellFiles
from holdfast.runtime.shell.foreground import command_line, foreground, is_stopped, ticks_since_boot
from holdfast.runtime.shell.program import ShellProgram
from holdfast.runtime.shell.saved_state import SavedState
from holdfast.runtime.tree.process_table import Entry
from holdfast.runtime.tree.process_tree import end_all
from holdfast.runtime.tree.table_reader import TableReader
from holdfast.runtime.tree.usage import ForegroundActivity, UsageQuery
from holdfast.types import (
    KEPT_SHELL_COMMANDS,
    CommandEnded,
    CommandSpec,
    Confinement,
    ExitStatus,
    ProcessSpec,
    ShellSpec,
    ShellState,
    ShellStatus,
)

if TYPE_CHECKING:
    from holdfast.config import ExecServerConfig
    from holdfast.runtime.durability.shell_recorder import CommandRecorder, MakeEndRecord, ShellRecorder
    from holdfast.runtime.output.poller import Poller

Phase = Literal["starting", "idle", "running", "restarting", "recording", "closed"]
#: The phases that may follow each. A shell of an earlier server enters any of them first.
TRANSITIONS: Final[dict[Phase, tuple[Phase, ...]]] = {
    "starting": ("idle", "running", "closed"),
    "idle": ("running", "closed"),
    "running": ("recording", "restarting", "closed"),
    "restarting": ("recording", "closed"),
    "recording": ("idle", "closed"),
    "closed": (),
}
#: Starts a program on this stdin and calls back when it has exited.
StartProcess = Callable[
    [ProcessSpec, int | None, Callable[[ManagedProcess], None]], Coroutine[None, None, ManagedProcess]
]
#: Kills a program and all that it started.
EndProcess = Callable[[ManagedProcess, float], Coroutine[None, None, None]]
Restored = Literal["state", "exports"]

#: A shell that reads long profile files may take this long until it takes commands.
START_SECONDS: Final = 30.0
#: How long a shell may take to answer after its foreground was killed, before it is replaced.
COME_BACK_SECONDS: Final = 1.0
#: How often the foreground is searched meanwhile: the shell may have been about to fork.
LOOK_AGAIN_SECONDS: Final = 0.05
#: Without an answer for this long, and then twice as long each time, check that the shell can still answer.
SILENCE_SECONDS: Final = (0.2, 3.0)
#: After this time without a command, a shell saves its exported variables for the program that may replace it.
IDLE_SECONDS: Final = 0.02
#: Replaced programs whose background jobs end with the shell.
KEPT_FORMER: Final = 64
#: A program that was executed in place of the shell may have exited before its command line is read.
_EXEC: Final = re.compile(r"(?:^|[;&|\n])\s*exec\s+[^\s<>&|;\d]")
#: The shell did not report how the command ended.
UNKNOWN_STATUS: Final = 125


class LiveShell:
    """One shell by its id, through as many programs as it takes."""

    def __init__(
        self,
        spec: ShellSpec,
        path: str,
        dialect: ShellDialect,
        files: ShellFiles,
        *,
        start_process: StartProcess,
        end_process: EndProcess,
        poller: Poller,
        config: ExecServerConfig,
        tables: TableReader,
        on_growth: Callable[[], None],
        oom: OomCounter,
        on_closed: Callable[[LiveShell], None],
        on_forget: Callable[[ShellCommand], None],
        recorder: ShellRecorder,
    ) -> None:
        self.spec = spec
        self.path = path
        self.dialect = dialect
        self.started_at = time.time()
        self._phase: Phase = "starting"
        #: Why it is closed.
        self.reason = ""
        self.restarts = 0
        self.commands_run = 0
        #: Bytes of commands that have ended.
        self._printed_before = 0
        #: Output of background jobs after their command has ended, and of profile files.
        self.record = Job(
            spec.shell_id, recorder, overflow="follow", poller=poller, config=config, on_growth=on_growth
        )
        self._recorder = recorder
        self._files = files
        self._start_process = start_process
        self._end_process = end_process
        self._poller = poller
        self._config = config
        self._tables = tables
        self._on_growth = on_growth
        self._oom = oom
        self._on_closed = on_closed
        self._on_forget = on_forget
        self._loop = asyncio.get_running_loop()
        self._saved = self._open_saved()
        try:
            self._program = self._first_program()
        except BaseException:
            self._saved.close()
            raise
        self._ready: asyncio.Future[Answer] | None = None
        self._queue: deque[ShellCommand] = deque()
        self._current: ShellCommand | None = None
        self._ended: deque[ShellCommand] = deque()
        #: The most commands that were queued at once: their callers may request all the results together.
        self._sent_ahead = 0
        self._known: dict[str, None] = {}
        #: The latest replacement of a program.
        self._restarting: asyncio.Task[None] | None = None
        #: Replaced programs: their background jobs belong to this shell.
        self._former: deque[ManagedProcess] = deque(maxlen=KEPT_FORMER)
        self._closing: asyncio.Task[None] | None = None
        self._interrupts: dict[str, ShellCommand | None] = {}
        #: One timer each for all commands: to make and cancel one for each would cost more than the commands do.
        self._silence: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._idle_since = 0.0

    def _open_saved(self) -> SavedState:
        return SavedState(self._files, self._poller, self._recorder)

    def _first_program(self) -> ShellProgram:
        return self._new_program()

    def _new_program(self) -> ShellProgram:
        return ShellProgram(
            self.dialect,
            self._files,
            self.record,
            self._poller,
            saved=self._saved,
            on_answer=self._on_answer,
            recorder=self._recorder,
            number=self.restarts,
        )

    def _enter(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self._phase], f"{self._phase} to {phase}"
        self._phase = phase

    # --- status ----------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.spec.shell_id

    @property
    def state(self) -> ShellState:
        """The phase as callers see it."""
        if self._phase in ("starting", "idle"):
            return "idle"
        return "closed" if self._phase == "closed" else "running"

    @property
    def cwd(self) -> str:
        return self._program.cwd

    def info(self) -> ShellStatus:
        current, status = self._current, self.record.status
        return ShellStatus(
            shell_id=self.id,
            path=self.path,
            pid=self._program.leader,
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

    def usage_query(self) -> UsageQuery:
        """The process trees and the activity that a sample of its usage is made from."""
        programs = [*self._former, self._program.process] if self._program.pid else [*self._former]
        printed = self._printed_before + sum(log.end for log in self.record.logs.values())
        activity, current = ForegroundActivity(), self._current
        if current is not None and current.began is not None:
            printed += sum(log.end for log in current.logs.values())
            activity = ForegroundActivity(
                seconds=self._loop.time() - current.began, since_ticks=current.began_ticks
            )
        trees = tuple(program.tree for program in programs)
        own = tuple(pid for program in programs for pid in program.own_pids)
        return UsageQuery(self.id, trees, self.state != "closed", printed, activity, own)

    def process_spec(
        self, process_id: str, cwd: str | None, *, login: bool = False, start_id: str | None = None
    ) -> ProcessSpec:
        """The spec of a program of this kind that reads its commands from stdin."""
        return ProcessSpec(
            process_id=process_id,
            argv=(self.path, *self.dialect.arguments(login=login)),
            arg0=self.dialect.arg0(self.path),
            cwd=cwd,
            env=self.spec.env,
            env_policy=self.spec.env_policy,
            user=self.spec.user,
            limits=self.spec.limits,
            confinement=self._confinement(),
            start_id=start_id,
        )

    def _confinement(self) -> Confinement | None:
        """The confinement with the control files, read-only: they are on the spool, which a shell could fill."""
        given = self.spec.confinement
        return None if given is None else replace(given, readable=(*given.readable, self._files.path))

    # --- starting --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the program; on return it takes commands."""
        await self._launch(self.spec.cwd, login=self.spec.login, restore=None)
        self._enter("idle")

    async def _launch(
        self,
        cwd: str | None,
        *,
        login: bool,
        restore: str | None,
        restored: str = "",
        command: ShellCommand | None = None,
        exit_code: int = 0,
    ) -> None:
        """Start a program; a replacement is for the `command` that ended with `exit_code` and its program."""
        program = self._program
        spec = self.process_spec(f"{self.id}:{self.restarts}", cwd, login=login)
        key = 0 if command is None else command.recorder.key
        self._recorder.program_begins(
            program.number, program.inode, cwd, restored=restored, command=key, exit_code=exit_code
        )
        process = await self._start_process(spec, program.stdin, self._on_program_exit)
        self._ready = ready = self._loop.create_future()
        program.attach(process, restore)
        await self._become_ready(program, ready)

    async def _become_ready(self, program: ShellProgram, ready: asyncio.Future[Answer]) -> None:
        process = program.process
        try:
            async with asyncio.timeout(START_SECONDS):
                program.take_first_answer(await ready)
            if not process.running:
                # It exited right after its answer, while an exit still counted as a failed start.
                self._loop.call_soon(self._on_program_exit, process)
        except builtins.TimeoutError:
            await self._end_process(process, 0.0)
            raise NotExecutable(
                f"{self.path}: took no command within {START_SECONDS:g} s: is it a shell?"
            ) from None
        except BaseException:
            await asyncio.shield(self._end_process(process, 0.0))
            raise
        finally:
            self._ready = None

    # --- commands --------------------------------------------------------------------------------------------

    def run(self, spec: CommandSpec) -> ShellCommand:
        """Queue a command; the same id again is the same command."""
        if spec.command_id in self._known:
            return self._find(spec.command_id)
        self._check_open()
        if len(self._queue) >= self._config.max_queued_commands:
            raise LimitReached(
                f"{len(self._queue)} commands wait in shell {self.id!r}: that is max_queued_commands"
            )
        recorder = self._recorder.command()
        if self._phase == "idle" and not self._queue:
            self._sent_ahead = 0
            ticks = ticks_since_boot()
            self._program.begin(spec, ticks, recorder)
            # The shell works by now.
            command = self._new_command(spec, recorder)
            self._begun(command, ticks)
        else:
            recorder.queued(spec)
            command = self._new_command(spec, recorder)
            self._queue.append(command)
            self._sent_ahead = max(self._sent_ahead, len(self._queue))
        return command

    def _new_command(self, spec: CommandSpec, recorder: CommandRecorder) -> ShellCommand:
        self._known[spec.command_id] = None
        if len(self._known) > KNOWN_COMMANDS:
            del self._known[next(iter(self._known))]
        return self._make_command(spec, recorder)

    def _make_command(self, spec: CommandSpec, recorder: CommandRecorder) -> ShellCommand:
        return ShellCommand(
            spec,
            recorder,
            poller=self._poller,
            config=self._config,
            on_growth=self._on_growth,
            on_recorded=self._on_recorded,
        )

    def _find(self, command_id: str) -> ShellCommand:
        for command in self.commands():
            if command.process_id == command_id:
                return command
        raise UnknownProcess(f"command {command_id!r} ran in shell {self.id!r}; its result is no longer kept")

    def commands(self) -> list[ShellCommand]:
        """The current command, the queued commands, and the ended commands that are kept."""
        return [command for command in (self._current, *self._queue, *self._ended) if command is not None]

    def withdraw(self, command: ShellCommand) -> None:
        """Remove a command from the queue, or interrupt it: its caller gave up."""
        if command in self._queue:
            self._queue.remove(command)
            self._refuse(command, ShellClosed("taken out of the queue: its caller gave up"))
        elif command is self._current:
            self._stop(command)

    def _refuse(self, command: ShellCommand, error: HoldfastError) -> None:
        command.refuse(error)
        if self._phase == "closed":
            # It did not run: a request that is repeated after a broken connection gets the reason.
            self._known.pop(command.process_id, None)
        self._on_forget(command)

    def _begin(self, command: ShellCommand) -> None:
        """Begin the next command of the queue."""
        ticks = ticks_since_boot()
        try:
            self._program.begin(command.spec, ticks, command.recorder)
        except HoldfastError as error:
            self._refuse(command, error)
            self._loop.call_soon(self._next)
            return
        self._begun(command, ticks)

    def _begun(self, command: ShellCommand, ticks: int) -> None:
        """The shell has its line, not before `ticks`."""
        command.began_ticks = ticks
        command.oom_kills = self._oom.now()
        self._program.give_streams(command)
        self._program.give_input(command)
        self._current = command
        self._enter("running")
        command.begin(self._on_timeout)
        if self._silence is None:
            self._silence = self._loop.call_later(SILENCE_SECONDS[0], self._check_silence, SILENCE_SECONDS[0], None)

    def _next(self) -> None:
        if self._phase == "idle" and self._queue:
            self._begin(self._queue.popleft())

    def _on_answer(self, answer: Answer) -> None:
        """Event of the program: it has answered, to its first lines or at the end of a command."""
        if self._ready is not None:
            if not self._ready.done():
                self._recorder.ready(answer, command_line(self._program.pid))
                self._ready.set_result(answer)
        elif self._phase == "running":
            command = self._current
            assert command is not None
            stopped_as = None if command.stop is None else _stopped_as(command)
            self._record(command, self._program.take_answer(answer, spec=command.spec, stopped_as=stopped_as))
            self._program.clean_up()

    def _record(
        self, command: ShellCommand, exit_code: int, restored: Restored | None = None, *, oom: bool | None = None
    ) -> None:
        """Record the end of the current command; `oom` is known if the program itself ended."""
        assert command.began is not None
        if oom is None:
            oom = exit_code == KILLED and command.stop is None and self._was_out_of_memory(command, exit_code)
        closed = self._phase == "closed"
        ended = CommandEnded(
            exit_code=exit_code,
            cwd=self.cwd,
            duration=self._loop.time() - command.began,
            timed_out=command.timed_out,
            shell_restarted=restored is not None,
            restored=restored or "",
            state="closed" if closed else "idle",
            reason=self.reason,
            oom=oom,
            silent=command.silent,
        )
        self._record_end(command, ended, self._program.end_record(ended))

    def _was_out_of_memory(self, command: ShellCommand, exit_code: int) -> bool:
        cgroup = self._program.process.tree.cgroup
        groups = () if cgroup is None else cgroup.limiting
        return self._oom.judge(ExitStatus(exit_code), command.oom_kills, groups)

    def _record_end(self, command: ShellCommand, ended: CommandEnded, end: MakeEndRecord) -> None:
        if self._phase != "closed":
            self._enter("recording")
        recorder = command.recorder
        command.record_end(ended, lambda: recorder.over(end, KEPT_SHELL_COMMANDS + self._sent_ahead))
        if not command.is_done:
            recorder.answered(end)  # the reply left the socket; the end is recorded after the last output is read

    def _on_recorded(self, command: ShellCommand) -> None:
        """Event of a command: its journal has its end. Later output of its streams belongs to the shell."""
        command.give_streams(self.record)
        self.commands_run += 1
        self._printed_before += command.logs[0].end + command.logs[1].end
        self._ended.append(command)
        while len(self._ended) > KEPT_SHELL_COMMANDS + self._sent_ahead:
            self._on_forget(self._ended.popleft())
        self._current = None
        if self._phase == "closed":
            return
        self._enter("idle")
        self._idle_since = self._loop.time()
        if self._idle is None:
            self._idle = self._loop.call_later(IDLE_SECONDS, self._save_exports)
        if self._queue:
            # In a turn of its own, so that the waiters of this command run before the next one begins.
            self._loop.call_soon(self._next)

    def _save_exports(self) -> None:
        self._idle = None
        if self._phase != "idle":
            return
        left = self._idle_since + IDLE_SECONDS - self._loop.time()
        if left > 0:
            self._idle = self._loop.call_later(left, self._save_exports)
        else:
            self._program.save_exports()

    # --- a shell that does not answer ------------------------------------------------------------------------

    def _check_silence(self, seconds: float, reading: ShellCommand | None) -> None:
        """Continue a stopped shell, and replace one that reads its next line without having answered.

        Neither is an event: a signal stopped the shell, or a command read the line that was for the shell.
        `reading` is the command during which the shell was found reading at the last check.
        """
        self._silence = None
        command = self._current
        if command is None or self._phase != "running":
            return  # it has answered; a slow reader may still be owed output
        if is_stopped(self._program.pid):
            self._program.process.signal_leader(signal.SIGCONT)
        reads = self._program.reads_line()
        if reads and reading is command:
            self._replace(command, UNKNOWN_STATUS)
            return
        seconds = SILENCE_SECONDS[0] if reads else min(2 * seconds, SILENCE_SECONDS[1])
        self._silence = self._loop.call_later(seconds, self._check_silence, seconds, command if reads else None)

    # --- stopping a command ----------------------------------------------------------------------------------

    async def interrupt(self, interrupt_id: str | None = None) -> bool:
        """Stop the current command and all that it started in the foreground; False if there is none.

        The same `interrupt_id` again means the same command.
        """
        command = self._current
        if interrupt_id is not None:
            if interrupt_id not in self._interrupts:
                self._recorder.interrupted(interrupt_id, 0 if command is None else command.recorder.key)
            command = self._interrupts.setdefault(interrupt_id, command)
            if len(self._interrupts) > KEPT_INTERRUPTS:
                del self._interrupts[next(iter(self._interrupts))]
        if command is None:
            return False
        if command is self._current:
            await asyncio.shield(self._stop(command))
        return True

    def _on_timeout(self, command: ShellCommand) -> None:
        """End a command whose time is over, or that was `silent` for too long."""
        command.timed_out = True
        self._stop(command)

    def _stop(self, command: ShellCommand) -> asyncio.Task[None]:
        # A slow reader must not keep the command from ending.
        command.stop_blocking()
        if command.stop is None:
            command.recorder.stopping(timed_out=command.timed_out)
            command.stop = self._loop.create_task(self._stop_command(command))
        return command.stop

    async def _stop_command(self, command: ShellCommand) -> None:
        if command.ended is not None:
            return  # it had answered, and only its reader was behind
        process = self._program.process
        process.signal_leader(signal.SIGCONT)
        recorded = asyncio.ensure_future(command.wait_ended())
        give_up_at: float | None = None
        while not recorded.done():
            # First: once its foreground is killed, the shell would run the rest of the command.
            process.signal_leader(self.dialect.interrupt_signal)
            command.end_input()  # the shell itself may be reading it
            await end_all(self._foreground, self._config.interrupt_grace_seconds)
            await asyncio.wait((recorded,), timeout=LOOK_AGAIN_SECONDS)
            now = self._loop.time()
            give_up_at = give_up_at or now + COME_BACK_SECONDS
            if not recorded.done() and now >= give_up_at:
                self._replace(command, _stopped_as(command))
                await asyncio.wait((recorded,))

    async def _foreground(self) -> dict[int, Entry]:
        if self._current is None or self._current.stop is None:
            return {}
        since, program = self._current.began_ticks, self._program
        table, jobs = await self._tables.read(), frozenset(program.jobs)
        if program.process.jail is not None:
            # The shell reports the pids that its jobs have inside the jail.
            jobs = frozenset(pid for pid in table.children.get(program.pid, ()) if inside_pid(pid) in jobs)
        return foreground(table, program.pid, since, jobs)

    # --- the program exits -----------------------------------------------------------------------------------

    def _on_program_exit(self, process: ManagedProcess) -> None:
        """Event of a process: a program has exited. An answer that it sent before is read first."""
        if process is not self._program.process or (self._phase == "restarting" and self._ready is None):
            return
        try:
            self._program.disconnect()
        finally:
            self._program_lost(process)

    def _program_lost(self, process: ManagedProcess) -> None:
        """Fail the start that is under way, replace the program, or close the shell."""
        assert process.status is not None
        status = process.status
        if self._ready is not None:
            if not self._ready.done():
                text = f"{self.path} ended with exit code {status.exit_code} before it took a command"
                self._ready.set_exception(NotExecutable(text))
            return
        command = self._current
        if command is not None and self._phase == "running" and self._closing is None:
            if command.stop is not None:
                self._replace(command, _stopped_as(command))
                return
            if status.signal is None and self._program.has_saved_state():
                self._replace(command, status.exit_code)
                return
        self._close_down(self._why(status), status)

    def _why(self, status: ExitStatus) -> str:
        if self._closing is not None:
            return "closed"
        executes = self._current is not None and _EXEC.search(self._current.spec.command) is not None
        if self._program.replaced or (executes and status.exit_code not in (126, 127)):
            return f"replaced by another program (exec), which ended with exit code {status.exit_code}"
        if status.signal is not None:
            return f"killed by {status.signal}"
        return f"exited with code {status.exit_code}"

    def _close_down(self, reason: str, status: ExitStatus) -> None:
        if self._phase == "closed":
            return
        refuses = self._current is not None and self._phase != "recording" and self._program.left_unread
        self._recorder.closes(reason, status, refuses=refuses)
        self._become_closed(reason, status, refuses=refuses)

    def _become_closed(self, reason: str, status: ExitStatus, *, refuses: bool) -> None:
        """Close the shell: record or refuse the current command, refuse the queue, remove the files."""
        recording = self._phase == "recording"
        self._enter("closed")
        self.reason = reason
        for timer in (self._silence, self._idle):
            if timer is not None:
                timer.cancel()
        if (command := self._current) is not None and refuses:
            self._current = None
            self._refuse(command, self._closed_error())
        elif command is not None and not recording:
            self._record(command, status.exit_code, oom=status.oom)
        while self._queue:
            self._refuse(self._queue.popleft(), self._closed_error())
        self._saved.close()
        self._files.remove()
        if self.record.running:
            self.record.end(status, lambda: self._recorder.ended(status))
        self._on_closed(self)

    def _closed_error(self) -> ShellClosed:
        why = "" if self.reason == "closed" else f": {self.reason}"
        return ShellClosed(f"shell {self.id!r} is closed{why}", reason=self.reason)

    def _check_open(self) -> None:
        if self._phase == "closed":
            raise self._closed_error()
        if self._closing is not None:
            raise ShellClosed(f"shell {self.id!r} is being closed", reason="closed")

    # --- a new program ---------------------------------------------------------------------------------------

    def _replace(self, command: ShellCommand, exit_code: int) -> None:
        """Kill the program and start another in the same directory, with the saved variables or state."""
        if self._phase == "running":
            self._enter("restarting")
            self._recorder.given_up(command.recorder.key, exit_code)
            self._restarting = self._loop.create_task(self._restart(command, exit_code))

    async def _restart(self, command: ShellCommand, exit_code: int) -> None:
        old = self._program
        restored: Restored = "state" if not old.process.running and old.has_saved_state() else "exports"
        old.process.signal_leader(signal.SIGKILL)
        status = await old.process.wait_exit()
        old.disconnect()
        self._saved.take()
        command.take_what_is_there()
        command.give_streams(self.record)
        self.restarts += 1
        self._former.append(old.process)
        await self._start_replacement(old, command, exit_code, restored, status)

    async def _start_replacement(
        self, old: ShellProgram, command: ShellCommand, exit_code: int, restored: Restored, status: ExitStatus
    ) -> None:
        """Start the next program, after the `old` one has exited with `status`."""
        try:
            self._program = self._new_program()
            await self._launch(
                lasting_cwd(self.spec.confinement, old.cwd),
                login=False,
                restore=self._files.existing(restored),
                restored=restored,
                command=command,
                exit_code=exit_code,
            )
        except (HoldfastError, OSError) as error:
            if self._program is not old:
                self._program.disconnect()
                self._program = old
            self._restart_failed(error, status)
            return
        self._restarted(command, exit_code, restored, old.cwd)

    def _restart_failed(self, error: Exception, status: ExitStatus) -> None:
        self._close_down(f"it did not start again after a command had to be ended: {error}", status)

    def _restarted(self, command: ShellCommand, exit_code: int, restored: Restored, cwd: str) -> None:
        self._files.forget("state")
        self._program.set_status(exit_code)
        if command.spec.cwd is not None:
            self._program.return_to(lasting_cwd(self.spec.confinement, cwd))
        self._record(command, exit_code, restored)

    # --- closing ---------------------------------------------------------------------------------------------

    async def close(self, *, keep: bool, grace: float) -> None:
        """Close the shell and, unless `keep`, kill all that it started.

        A shell that is closed may still have background jobs.
        """
        kept = self._closing is not None and self._closing.done() and not keep
        if self._closing is None or kept:
            self._recorder.closing(keep=keep, grace=grace)
            self._closing = self._loop.create_task(self._close(keep, grace))
        await asyncio.shield(self._closing)

    async def _close(self, keep: bool, grace: float) -> None:
        if self._restarting is not None:
            await asyncio.wait((self._restarting,))
        process = self._program.process
        self._program.end_input()
        if self._current is None or keep:
            with contextlib.suppress(builtins.TimeoutError):
                async with asyncio.timeout(grace):
                    await process.wait_exit()
        if keep:
            process.signal_leader(signal.SIGKILL)
            await process.wait_exit()
        else:
            await asyncio.gather(*(self._end_process(each, grace) for each in (*self._former, process)))

    def discard(self) -> None:
        """Remove the files, the output and the records of the shell."""
        with contextlib.ExitStack() as stack:  # each step, whichever of them fails
            stack.callback(self._files.remove)
            stack.callback(self._saved.close)
            stack.callback(self.record.discard)
            for command in (*self._ended, *self._queue, self._current):
                if command is not None:
                    stack.callback(command.forget)
            stack.callback(self._program.disconnect)
            stack.callback(self._recorder.gone)


def _stopped_as(command: ShellCommand) -> int:
    return EXIT_TIMED_OUT if command.timed_out else EXIT_INTERRUPTED
