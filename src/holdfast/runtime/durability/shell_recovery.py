"""Resumes the live shells of a dead server, from the ledger and from the descriptors in the keeper.

The part of `recovery` for shells. The shell program itself is not affected: it waits for the next control line, or
runs a command and will answer. A start, a command, its end, a new program or a close that was under way continues.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

from holdfast.errors import HoldfastError, ResourceExhausted
from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.input_log import DurableInput
from holdfast.runtime.durability.recorder import restore_output
from holdfast.runtime.durability.shell_recorder import ControlLines, ShellRecorder
from holdfast.runtime.durability.shell_replay import KNOWN_JOBS
from holdfast.runtime.output.job import JobStream
from holdfast.runtime.shell.dialect import Answer, SuspendedTracing
from holdfast.runtime.shell.live import IDLE_SECONDS, SILENCE_SECONDS, LiveShell, Restored
from holdfast.runtime.shell.program import PendingCleanup, ShellProgram
from holdfast.runtime.shell.saved_state import SavedState
from holdfast.types import CommandEnded, CommandSpec, ExitStatus

if TYPE_CHECKING:
    from holdfast.runtime.durability.job_replay import ProcessState
    from holdfast.runtime.durability.keeper_link import HeldDescriptors
    from holdfast.runtime.durability.replay import Replay
    from holdfast.runtime.durability.shell_replay import CommandState, ShellState
    from holdfast.runtime.process.process import ManagedProcess
    from holdfast.runtime.shell.command import ShellCommand
    from holdfast.runtime.shell.registry import Shells

#: Why a shell without its descriptors is closed.
LOST: Final = "the server was restarted, and the shell's control socket was lost with it"

_OnExit = Callable[["ManagedProcess"], None]
_Adopted = tuple["ManagedProcess", dict[int, int]]
#: Resumes a program of a shell; returns its process and the server's ends of the streams on which it was started.
Adopt = Callable[[_OnExit], _Adopted]


class InheritedShell(NamedTuple):
    """A shell of a dead server: its replayed state and its descriptors."""

    shell: ShellState
    commands: Mapping[int, CommandState]
    #: The control socket of the latest program, and the file of control lines.
    control: HeldDescriptors | None
    #: The server's ends of pipes by the keeper's keys, in the order of their creation.
    pipes: Sequence[tuple[str, HeldDescriptors]]
    #: The programs by number.
    programs: Mapping[int, Adopt]
    #: The server's end of the running command's stdin; and files of undelivered input, by command.
    stdin: HeldDescriptors | None = None
    inputs: Mapping[int, HeldDescriptors] = {}
    #: The pipe to which the shell saves its variables and its state.
    saved: HeldDescriptors | None = None

    @property
    def current(self) -> CommandState | None:
        return self.commands.get(self.shell.current)

    def close(self) -> None:
        """Close the descriptors that were not taken."""
        named = (held for held in (self.control, self.stdin, self.saved) if held is not None)
        for held in (*named, *(held for _, held in self.pipes), *self.inputs.values()):
            while held.fds:
                os.close(held.fds.pop())


def resume_shells(
    replay: Replay,
    held: dict[str, HeldDescriptors],
    adopt_program: Callable[[ProcessState, _OnExit], _Adopted],
    registry: Shells,
) -> None:
    """Pass each shell of the ledger to the registry, with its programs and its descriptors of those `held`."""
    shells = replay.shells.shells
    programs: dict[int, dict[int, Adopt]] = {}
    for each in [each for each in replay.processes.values() if each.begun.internal]:
        shell_id, _, number = each.begun.spec.process_id.rpartition(":")
        # Keys are assigned in order: the later programs belong to the later shell of the same id.
        keys = (shell.key for shell in shells.values() if shell.opening.spec.shell_id == shell_id)
        key = max((key for key in keys if key < each.key), default=0)
        if key:
            programs.setdefault(key, {})[int(number)] = functools.partial(adopt_program, each)
        else:
            # Of a forgotten shell: its background jobs may be needed, but not their output.
            _, streams = adopt_program(each, lambda _: None)
            for fd in streams.values():
                os.close(fd)
    for shell in shells.values():
        latest = 0 if shell.program is None else shell.program.number
        pipes = sorted(
            (key for key in held if key.startswith(f"{shell.key}.p")), key=lambda key: int(key.split(".")[1][1:])
        )
        inputs = (shell.current, *shell.queue)
        registry.recover(
            InheritedShell(
                shell,
                replay.shells.commands,
                control=held.pop(f"{shell.key}.c{latest}", None),
                pipes=[(key, held.pop(key)) for key in pipes],
                programs=programs.get(shell.key, {}),
                stdin=held.pop(f"{shell.current}.stdin", None),
                saved=held.pop(f"{shell.key}.saved", None),
                inputs={key: held.pop(name) for key in inputs if (name := f"{key}.input") in held},
            )
        )


class ResumedProgram(ShellProgram):
    """A program that an earlier server started, or was about to start."""

    def __init__(self, *arguments: Any, inherited: InheritedShell, **named: Any) -> None:
        self._inherited = inherited
        self._held_open: list[int] = []
        super().__init__(*arguments, **named)

    def _connect(self) -> None:
        past, control = self._inherited.shell, self._inherited.control
        try:
            ours, self._theirs = socket.socketpair()
        except OSError as error:
            raise ResourceExhausted(f"no socket for a shell: {error.strerror}") from None
        self._theirs.close()
        ours.close()
        self._control = ours
        self.inode = 0 if past.program is None else past.program.inode
        self._files.resume(self.dialect)
        if control is not None:
            # Last: `InheritedShell.close` closes the descriptors of a shell that cannot be resumed.
            self._lines = ControlLines(control.fds.pop())
            self._control = socket.socket(fileno=control.fds.pop())
            self._control.setblocking(False)

    def resume(self, process: ManagedProcess | None, outputs: Mapping[int, list[JobStream]]) -> None:
        """Restore the state. `outputs` are the server's ends of the pipes that have the names of each pair."""
        past, current = self._inherited.shell, self._inherited.current
        self._process = process
        self._pipes = past.pipes
        self._outputs = outputs.get(past.pipes, [])
        self._outputs_before = outputs.get(1 - past.pipes, [])
        self.jobs = deque(past.jobs, maxlen=KNOWN_JOBS)
        # Unknown state is assumed to be the more expensive one.
        self._must_move = self._exported = True
        self._faults = -1
        self._began = time.monotonic()
        if current is not None and current.began is not None:
            self._armed = current.began.armed
            self._began = current.began.at
        if past.ready is not None:
            self._command_line = past.ready.command_line
            self._answer = _answer(past.ready.answer)
            self.cwd = self._answer.cwd
        if past.last is not None:
            self._answer = _answer(past.last.answer)
            self.cwd = os.fsdecode(past.last.cwd)
        elif past.ready is None and past.program is not None and past.program.cwd is not None:
            self.cwd = os.fsdecode(past.program.cwd)
        self._suspended = SuspendedTracing.after(self._answer)
        self._open_stat()

    @property
    def is_connected(self) -> bool:
        return self._control.fileno() >= 0

    @property
    def was_sent_lines(self) -> bool:
        return self._lines is not None and self._lines.sent > 0

    def listen(self) -> None:
        """Read answers from now on."""
        if self.is_connected:
            self._poller.watch(self._control.fileno(), self._readable)

    def forget_answer(self) -> None:
        """Discard an answer that is recorded: the server may have died before it read the socket."""
        try:
            while self.is_connected and self._control.recv(65536):
                pass
        except OSError:
            return  # the socket is empty

    def restore_answer_part(self, part: bytes) -> None:
        """Restore the recorded first part of an answer, and discard it if the socket still holds it.

        No other part of an answer begins with the same bytes.
        """
        self._received += part
        try:
            if part and self.is_connected and self._control.recv(len(part), socket.MSG_PEEK) == part:
                self._control.recv(len(part))
        except OSError:
            return  # the socket is empty

    def send_again(self, began: r.CommandBegan) -> None:
        """Send the rest of the line that starts a command; the position of the file shows how much was sent."""
        # The shell may not have opened its pipes yet: until it answers, a pipe without a writer is not at its end.
        self._held_open = self._files.hold_pipes(began.pipes)
        if self._lines is not None and began.line_start <= self._lines.sent < began.line_end:
            try:
                self._lines.send(self._control, began.line_end)
            except OSError:
                self.left_unread = True

    def take_answer(self, answer: Answer, *, spec: CommandSpec, stopped_as: int | None) -> int:
        self._let_pipes_go()
        return super().take_answer(answer, spec=spec, stopped_as=stopped_as)

    def disconnect(self) -> None:
        try:
            super().disconnect()
        finally:
            self._let_pipes_go()

    def _let_pipes_go(self) -> None:
        while self._held_open:
            os.close(self._held_open.pop())

    def clean_up_again(self) -> None:
        """Undo the settings of the last command, unless a later line was sent."""
        past = self._inherited.shell
        if past.last is not None and self._lines is not None and self._lines.sent == past.line_end:
            back = past.last.back
            owed = None if back is None else (os.fsdecode(back[0]), os.fsdecode(back[1]))
            self._pending = PendingCleanup(past.last.stopped, past.last.trapped, owed)
            self.clean_up()
            self._must_move = True
        else:
            self._update_cwd()


class ResumedShell(LiveShell):
    """A shell that an earlier server opened; call `resume` next."""

    def __init__(self, *arguments: Any, inherited: InheritedShell, recorder: ShellRecorder, **named: Any) -> None:
        self._inherited = inherited
        super().__init__(*arguments, recorder=recorder, **named)
        try:
            self._restore(inherited.shell)
        except BaseException:
            self._saved.close()
            self._program.disconnect()
            self.record.give_up_output()
            raise

    def _restore(self, past: ShellState) -> None:
        self.started_at = past.opening.started_at
        self.commands_run = past.commands_run
        self._known = dict.fromkeys(past.known)
        restore_output(self.record, past)
        self.record.restore(past.history(self.started_at))

    def _open_saved(self) -> SavedState:
        held = self._inherited.saved
        return SavedState(self._files, self._poller, self._recorder, None if held is None else held.fds.pop())

    def _first_program(self) -> ShellProgram:
        past = self._inherited.shell
        self.restarts = 0 if past.program is None else past.program.number
        return ResumedProgram(
            self.dialect,
            self._files,
            self.record,
            self._poller,
            saved=self._saved,
            on_answer=self._on_answer,
            recorder=self._recorder,
            number=self.restarts,
            inherited=self._inherited,
        )

    # --- state ------------------------------------------------------------------------------------------------

    def resume(self) -> Coroutine[None, None, None] | None:
        """Resume the programs and the commands. Returns the rest of the start, if the shell was not open yet."""
        program = self._program
        assert isinstance(program, ResumedProgram)
        process = self._adopt_programs()
        program.resume(process, self._take_pipes())
        self._take_commands()
        past, current = self._inherited.shell, self._inherited.current
        if past.end is not None:
            self._become_closed(past.end.reason, past.end.status, refuses=past.end.refuses)
            program.disconnect()
            self._resume_closing(process)
            return None
        if past.program is None or (process is None and not past.program.number):
            return self._start_again()
        program.listen()
        if past.program.number == 0 and (past.ready is None or past.ready.answer.status != 0):
            return self._finish_start(program)
        restarts = current is not None and past.program.command == current.key
        if not restarts and (process is None or (process.running and not program.is_connected)):
            self._close_down(LOST, ExitStatus(255))
            self._resume_closing(process)
            return None
        if restarts:
            self._enter("restarting")
            self._restarting = self._loop.create_task(self._finish_restart(program, past.program, process))
        elif self._current is not None and past.given_up is not None:
            self._enter("restarting")
            self._restarting = self._loop.create_task(self._restart(self._current, past.given_up.exit_code))
        else:
            self._take_up(program, current)
            if not program.process.running:
                self._loop.call_soon(self._on_program_exit, program.process)
        self._resume_closing(None)
        self._loop.call_soon(self._next)
        return None

    def _adopt_programs(self) -> ManagedProcess | None:
        """Return the process of the latest program; background jobs of the ended ones belong to this shell."""
        latest = None
        for number, adopt in sorted(self._inherited.programs.items()):
            process, streams = adopt(self._on_program_exit)
            if number == self.restarts:
                latest = process
            else:
                self._former.append(process)
            for kind, fd in streams.items():
                self.record.watch(kind, fd)
        return latest

    def _take_pipes(self) -> dict[int, list[JobStream]]:
        found: dict[int, list[JobStream]] = {}
        for key, held in self._inherited.pipes:
            outputs = [self.record.watch(kind, fd) for kind, fd in enumerate(held.fds)]
            held.fds.clear()
            found[self._recorder.found_pipes(key, outputs)] = outputs
        return found

    def _take_commands(self) -> None:
        past, commands = self._inherited.shell, self._inherited.commands
        made = {key: self._resumed_command(commands[key]) for key in past.finished}
        self._ended.extend(made.values())
        queue = {key: self._resumed_command(commands[key]) for key in past.queue}
        self._queue.extend(queue.values())
        self._sent_ahead = len(self._queue)
        if (current := self._inherited.current) is not None:
            made[current.key] = self._current = self._resumed_command(current)
            self._enter("running")
            if past.program is not None and past.program.command != current.key:
                self._program.give_streams(self._current)
            # The keeper holds the pipe of an open stdin, unless all of the input was delivered.
            if self._inherited.stdin is not None and self._current.input is not None:
                self._current.input.open(self._inherited.stdin.fds.pop())
        for interrupt_id, record in past.interrupts.items():
            # In place of a command that is no longer retained, any ended command gives the same result.
            command = made.get(record.command) or next(iter(self._ended), None)
            self._interrupts[interrupt_id] = command if record.command else None

    def _resumed_command(self, past: CommandState) -> ShellCommand:
        assert past.spec is not None
        recorder = self._recorder.command(past.key)
        command = self._make_command(past.spec, recorder)
        restore_output(command, past)
        command.restore(past.past)
        if past.stopping is not None or past.is_over:
            command.stop_blocking()
        command.timed_out = past.stopping is not None and past.stopping.timed_out
        if past.is_over and past.end is not None:
            command.ended = command_ended(past.end)
        if past.began is not None:
            command.began, command.began_ticks = past.began.at, past.began.ticks
        self._restore_input(command, past)
        return command

    def _restore_input(self, command: ShellCommand, past: CommandState) -> None:
        if not isinstance(command.input, DurableInput):
            return
        file = self._inherited.inputs.get(past.key)
        past.input.restore(command.input, None if file is None else file.fds.pop())
        if past.input.closed:
            command.input.close()
        if past.is_over:
            command.input.abandon()

    # --- work under way --------------------------------------------------------------------------------------

    def _take_up(self, program: ResumedProgram, past: CommandState | None) -> None:
        """Resume a shell that accepts commands: a command runs, has ended, or none was sent."""
        command = self._current
        if command is None or past is None or past.began is None:
            program.forget_answer()
            program.clean_up_again()
            self._enter("idle")
            self._idle_since = self._loop.time()
            self._idle = self._loop.call_later(IDLE_SECONDS, self._save_exports)
        elif past.end is not None:
            program.forget_answer()
            end = past.end
            self._record_end(command, command_ended(end), lambda: end)
            program.clean_up_again()
        else:
            program.restore_answer_part(self._inherited.shell.part)
            program.send_again(past.began)
            command.begin_again(past.began.at, self._on_timeout)
            self._silence = self._loop.call_later(SILENCE_SECONDS[0], self._check_silence, SILENCE_SECONDS[0], None)
            if past.stopping is not None:
                self._stop(command)

    async def _start_again(self) -> None:
        """Start the program, which the earlier server did not."""
        self.restarts = 0
        self._program.disconnect()
        self._program = self._new_program()
        await self.start()

    async def _finish_start(self, program: ResumedProgram) -> None:
        await self._come_up(program, restore=None)
        self._enter("idle")

    async def _come_up(self, program: ResumedProgram, restore: str | None) -> None:
        self._ready = ready = self._loop.create_future()
        past = self._inherited.shell
        if past.ready is not None:
            program.forget_answer()
            ready.set_result(_answer(past.ready.answer))
        elif program.was_sent_lines:
            program.restore_answer_part(past.part)
        else:
            program.boot(restore)
        if not program.process.running and not ready.done():
            self._on_program_exit(program.process)
        await self._become_ready(program, ready)

    async def _finish_restart(
        self, program: ResumedProgram, begins: r.ProgramBegins, process: ManagedProcess | None
    ) -> None:
        """Finish the replacement of a program that a command ended."""
        command = self._current
        assert command is not None
        restored = cast("Restored", begins.restored)
        status = next((each.status for each in reversed(self._former) if each.status is not None), ExitStatus(255))
        if process is None:
            program.disconnect()
            await self._start_replacement(program, command, begins.exit_code, restored, status)
            return
        try:
            await self._come_up(program, self._files.existing(restored))
        except (HoldfastError, OSError) as error:
            program.disconnect()
            program.left_unread = (
                False  # the unread lines are of the start: the command ended with the program before
            )
            self._restart_failed(error, status)
            return
        self._restarted(command, begins.exit_code, restored, os.fsdecode(begins.cwd or b"/"))

    def _resume_closing(self, left: ManagedProcess | None) -> None:
        """Continue a close that was requested, or end a program `left` without a control socket."""
        closing = self._inherited.shell.closing
        if closing is not None:
            self._closing = self._loop.create_task(self._close(closing.keep, closing.grace))
        elif left is not None and left.running:
            self._closing = self._loop.create_task(self._end_process(left, 0.0))


def _answer(noted: r.AnswerRecord) -> Answer:
    return Answer(
        noted.status,
        noted.flags,
        noted.job,
        None if noted.last is None else os.fsdecode(noted.last),
        os.fsdecode(noted.cwd),
        os.fsdecode(noted.old_cwd),
        {name: os.fsdecode(action) for name, action in noted.traps.items()},
    )


def command_ended(noted: r.CommandEndRecord) -> CommandEnded:
    cwd = os.fsdecode(noted.cwd)
    if noted.full_result is not None:
        return msgspec.structs.replace(noted.full_result, cwd=cwd)
    return CommandEnded(
        exit_code=noted.exit_code,
        cwd=cwd,
        duration=noted.duration,
        timed_out=noted.timed_out,
        shell_restarted=bool(noted.restored),
        restored=cast("Restored", noted.restored),
        state="idle" if noted.reason is None else "closed",
        reason=noted.reason or "",
    )
