"""From what the ledger tells of a live shell, and what the keeper holds of it, to a shell that goes on.

The shell itself has noticed nothing: it waits for our next line, or runs a command and will answer. What was under
way is taken up where the dead server left it: a start, a command, its end, a new program, a close.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from holdfast.errors import HoldfastError, ResourceExhausted
from holdfast.runtime.durability import shell_records as s
from holdfast.runtime.durability.input_log import KeptInput
from holdfast.runtime.durability.shell_log import ShellNotes, SpokenLines
from holdfast.runtime.durability.shell_replay import KNOWN_JOBS
from holdfast.runtime.output.job import Output, Past
from holdfast.runtime.shell.dialect import Answer, SuspendedTracing
from holdfast.runtime.shell.live import IDLE_SECONDS, SILENCE_SECONDS, LiveShell, Restored
from holdfast.runtime.shell.program import PendingCleanup, ShellProgram
from holdfast.runtime.shell.saved_state import SavedState
from holdfast.types import CommandEnded, CommandSpec, ExitStatus

if TYPE_CHECKING:
    from holdfast.runtime.durability.keeper_link import Held
    from holdfast.runtime.durability.shell_replay import RememberedCommand, RememberedShell
    from holdfast.runtime.process.process import ManagedProcess
    from holdfast.runtime.shell.command import ShellCommand

#: Why a shell is closed whose descriptors were not kept.
LOST: Final = "the server was restarted, and the shell's control socket was lost with it"

#: Goes on with a program of a shell, by its number; with our ends of the streams that it was started on.
Adopt = Callable[[Callable[["ManagedProcess"], None]], tuple["ManagedProcess", dict[int, int]]]


class ShellRemains(NamedTuple):
    """What is left of a shell whose server is dead."""

    shell: RememberedShell
    commands: Mapping[int, RememberedCommand]
    #: The control socket of its latest program, and the file of our lines.
    control: Held | None
    #: Our ends of pipes by the keeper's keys, in the order in which they were made.
    pipes: Sequence[tuple[str, Held]]
    #: Its programs by number.
    programs: Mapping[int, Adopt]
    #: Our end of the stdin of the command that runs; and files of input that was not delivered, by commands.
    stdin: Held | None = None
    inputs: Mapping[int, Held] = {}
    #: The pipe that it saves its variables and its state to.
    saved: Held | None = None

    @property
    def current(self) -> RememberedCommand | None:
        return self.commands.get(self.shell.current)

    def close(self) -> None:
        """Close the control socket, the file of our lines and the pipes: nothing has taken them."""
        named = (held for held in (self.control, self.stdin, self.saved) if held is not None)
        for held in (*named, *(held for _, held in self.pipes), *self.inputs.values()):
            while held.fds:
                os.close(held.fds.pop())


class ResumedProgram(ShellProgram):
    """A program that an earlier server has started, or was about to start."""

    def __init__(self, *arguments: Any, remains: ShellRemains, **named: Any) -> None:
        self._remains = remains
        self._held_open: list[int] = []
        super().__init__(*arguments, **named)

    def _connect(self) -> None:
        past, control = self._remains.shell, self._remains.control
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
            # Last: a shell that cannot be resumed leaves them to `ShellRemains.close`.
            self._lines = SpokenLines(control.fds.pop())
            self._control = socket.socket(fileno=control.fds.pop())
            self._control.setblocking(False)

    def resume(self, process: ManagedProcess | None, outputs: Mapping[int, list[Output]]) -> None:
        """Be as it was. `outputs` are our ends of the pipes that have the names of each pair."""
        past, current = self._remains.shell, self._remains.current
        self._process = process
        self._pipes = past.pipes
        self._outputs = outputs.get(past.pipes, [])
        self._outputs_before = outputs.get(1 - past.pipes, [])
        self.jobs = deque(past.jobs, maxlen=KNOWN_JOBS)
        # What is not known is taken to be as it costs more and not less.
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
    def was_spoken_to(self) -> bool:
        return self._lines is not None and self._lines.sent > 0

    def listen(self) -> None:
        """Take what it says from now on."""
        if self.is_connected:
            self._poller.watch(self._control.fileno(), self._readable)

    def forget_answer(self) -> None:
        """What it said is known: the server may have died before it took it."""
        try:
            while self.is_connected and self._control.recv(65536):
                pass
        except OSError:
            return  # nothing is there

    def hear_again(self, part: bytes) -> None:
        """The first part of an answer is known, and may be there all the same: no other part begins like it."""
        self._received += part
        try:
            if part and self.is_connected and self._control.recv(len(part), socket.MSG_PEEK) == part:
                self._control.recv(len(part))
        except OSError:
            return  # nothing is there

    def tell(self, began: s.CommandBegan) -> None:
        """The line that starts a command, if it was not sent: the position in the file of lines says so."""
        # The shell may not have come to open its pipes: until it has answered, nobody there is no end of file.
        self._held_open = self._files.hold_pipes(began.pipes)
        if self._lines is not None and began.said_from <= self._lines.sent < began.said_to:
            try:
                self._lines.send(self._control, began.said_to)
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
        """What was owed after the last command, unless something was said after it."""
        past = self._remains.shell
        if past.last is not None and self._lines is not None and self._lines.sent == past.said_to:
            back = past.last.back
            owed = None if back is None else (os.fsdecode(back[0]), os.fsdecode(back[1]))
            self._pending = PendingCleanup(past.last.stopped, past.last.trapped, owed)
            self.clean_up()
            self._must_move = True
        else:
            self._update_cwd()


class ResumedShell(LiveShell):
    """A shell that an earlier server has opened; `go_on` next."""

    def __init__(self, *arguments: Any, remains: ShellRemains, notes: ShellNotes, **named: Any) -> None:
        self._remains = remains
        super().__init__(*arguments, notes=notes, **named)
        try:
            self._restore(remains, notes)
        except BaseException:
            self._saved.close()
            self._program.disconnect()
            self.record.give_up_output()
            raise

    def _restore(self, remains: ShellRemains, notes: ShellNotes) -> None:
        past = remains.shell
        self.started_at = past.opening.started_at
        self.commands_run = past.commands_run
        self._known = dict.fromkeys(past.known)
        notes.reopen(past.journal, past.printed_end, past.lost_range)
        ended = past.ended
        self.record.restore(
            Past(
                self.started_at,
                None if ended is None else ExitStatus(ended.exit_code, ended.signal),
                None if ended is None else ended.at,
                None if past.closed is None else past.closed.at,
            )
        )

    def _open_saved(self) -> SavedState:
        held = self._remains.saved
        return SavedState(self._files, self._poller, self._notes, None if held is None else held.fds.pop())

    def _first_program(self) -> ShellProgram:
        past = self._remains.shell
        self.restarts = 0 if past.program is None else past.program.number
        return ResumedProgram(
            self.dialect,
            self._files,
            self.record,
            self._poller,
            saved=self._saved,
            on_answer=self._on_answer,
            notes=self._notes,
            number=self.restarts,
            remains=self._remains,
        )

    # --- what it had -----------------------------------------------------------------------------------------

    def go_on(self) -> Coroutine[None, None, None] | None:
        """Take everything up. Returns what is left of its start, if it was not open yet."""
        program = self._program
        assert isinstance(program, ResumedProgram)
        process = self._adopt_programs()
        program.resume(process, self._take_pipes())
        self._take_commands()
        past, current = self._remains.shell, self._remains.current
        if past.end is not None:
            status = ExitStatus(past.end.exit_code, past.end.signal)
            self._become_closed(past.end.reason, status, refuses=past.end.refuses)
            program.disconnect()
            self._go_on_closing(process)
            return None
        if past.program is None or (process is None and not past.program.number):
            return self._start_again()
        program.listen()
        if past.program.number == 0 and (past.ready is None or past.ready.answer.status != 0):
            return self._finish_start(program)
        restarts = current is not None and past.program.command == current.key
        if not restarts and (process is None or (process.running and not program.is_connected)):
            self._close_down(LOST, ExitStatus(255))
            self._go_on_closing(process)
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
        self._go_on_closing(None)
        self._loop.call_soon(self._next)
        return None

    def _adopt_programs(self) -> ManagedProcess | None:
        """The process that it runs in. Those before it are ended, and their jobs are this shell's."""
        latest = None
        for number, adopt in sorted(self._remains.programs.items()):
            process, streams = adopt(self._on_program_exit)
            if number == self.restarts:
                latest = process
            else:
                self._former.append(process)
            for kind, fd in streams.items():
                self.record.watch(kind, fd)
        return latest

    def _take_pipes(self) -> dict[int, list[Output]]:
        assert self._notes is not None
        found: dict[int, list[Output]] = {}
        for key, held in self._remains.pipes:
            outputs = [self.record.watch(kind, fd) for kind, fd in enumerate(held.fds)]
            held.fds.clear()
            found[self._notes.found_pipes(key, outputs)] = outputs
        return found

    def _take_commands(self) -> None:
        past, commands = self._remains.shell, self._remains.commands
        made = {key: self._remembered(commands[key]) for key in past.finished}
        self._ended.extend(made.values())
        queue = {key: self._remembered(commands[key]) for key in past.queue}
        self._queue.extend(queue.values())
        self._sent_ahead = len(self._queue)
        if (current := self._remains.current) is not None:
            made[current.key] = self._current = self._remembered(current)
            self._enter("running")
            if past.program is not None and past.program.command != current.key:
                self._program.give_streams(self._current)
            self._take_stdin(self._current)
        for interrupt_id, record in past.interrupts.items():
            # Of one that is no longer kept, any that has ended tells the same.
            command = made.get(record.command) or next(iter(self._ended), None)
            self._interrupts[interrupt_id] = command if record.command else None

    def _remembered(self, past: RememberedCommand) -> ShellCommand:
        assert self._notes is not None
        assert past.spec is not None
        notes = self._notes.remembered_command(past.key)
        command = self._make_command(past.spec, notes)
        notes.reopen(past.journal, past.printed_end, past.lost_range)
        command.restore(past.past)
        if past.stopping is not None or past.is_over:
            command.stop_blocking()
        command.timed_out = past.stopping is not None and past.stopping.timed_out
        if past.is_over and past.end is not None:
            command.ended = _ended(past.end)
        if past.began is not None:
            command.began, command.began_ticks = past.began.at, past.began.ticks
        self._restore_input(command, past)
        return command

    def _take_stdin(self, command: ShellCommand) -> None:
        """The pipe of its open stdin. The keeper has it, unless all of the input was delivered."""
        if self._remains.stdin is not None and command.input is not None:
            command.input.open(self._remains.stdin.fds.pop())

    def _restore_input(self, command: ShellCommand, past: RememberedCommand) -> None:
        if not isinstance(command.input, KeptInput):
            return
        file = self._remains.inputs.get(past.key)
        past.input.restore(command.input, None if file is None else file.fds.pop())
        if past.input.closed:
            command.input.close()
        if past.is_over:
            command.input.abandon()

    # --- what was under way ----------------------------------------------------------------------------------

    def _take_up(self, program: ResumedProgram, past: RememberedCommand | None) -> None:
        """A shell that takes commands: it runs one, or has run one, or waits."""
        command = self._current
        if command is None or past is None or past.began is None:
            program.forget_answer()
            program.clean_up_again()
            self._enter("idle")
            self._idle_since = self._loop.time()
            self._idle = self._loop.call_later(IDLE_SECONDS, self._save_exports)
        elif past.end is not None:
            program.forget_answer()
            self._record_end(command, _ended(past.end), past.end)
            program.clean_up_again()
        else:
            program.hear_again(self._remains.shell.part)
            program.tell(past.began)
            command.begin_again(past.began.at, self._on_timeout)
            self._silence = self._loop.call_later(SILENCE_SECONDS[0], self._check_silence, SILENCE_SECONDS[0], None)
            if past.stopping is not None:
                self._stop(command)

    async def _start_again(self) -> None:
        """Its program was not started: nothing was lost but time."""
        self.restarts = 0
        self._program.disconnect()
        self._program = self._new_program()
        await self.start()

    async def _finish_start(self, program: ResumedProgram) -> None:
        await self._come_up(program, restore=None)
        self._enter("idle")

    async def _come_up(self, program: ResumedProgram, restore: str | None) -> None:
        self._ready = ready = self._loop.create_future()
        past = self._remains.shell
        if past.ready is not None:
            program.forget_answer()
            ready.set_result(_answer(past.ready.answer))
        elif not program.was_spoken_to:
            program.boot(restore)
        if not program.process.running and not ready.done():
            self._on_program_exit(program.process)
        await self._become_ready(program, ready)

    async def _finish_restart(
        self, program: ResumedProgram, begins: s.ProgramBegins, process: ManagedProcess | None
    ) -> None:
        """The program that takes the place of one that a command has cost."""
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
            program.left_unread = False  # lines of a start: the command had ended with the program before
            self._restart_failed(error, status)
            return
        self._restarted(command, begins.exit_code, restored, os.fsdecode(begins.cwd or b"/"))

    def _go_on_closing(self, left: ManagedProcess | None) -> None:
        """If that was wanted; or if there is a program `left` that nobody can speak to."""
        closing = self._remains.shell.closing
        if closing is not None:
            self._closing = self._loop.create_task(self._close(closing.keep, closing.grace))
        elif left is not None and left.running:
            self._closing = self._loop.create_task(self._end_process(left, 0.0))


def _answer(noted: s.NotedAnswer) -> Answer:
    return Answer(
        noted.status,
        noted.flags,
        noted.job,
        None if noted.last is None else os.fsdecode(noted.last),
        os.fsdecode(noted.cwd),
        os.fsdecode(noted.old_cwd),
        {name: os.fsdecode(action) for name, action in noted.traps.items()},
    )


def _ended(noted: s.NotedEnd) -> CommandEnded:
    return CommandEnded(
        exit_code=noted.exit_code,
        cwd=os.fsdecode(noted.cwd),
        duration=noted.duration,
        timed_out=noted.timed_out,
        shell_restarted=bool(noted.restored),
        restored=cast("Restored", noted.restored),
        state="idle" if noted.reason is None else "closed",
        reason=noted.reason or "",
    )
