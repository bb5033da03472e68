"""One program that a live shell runs in: its control socket, its streams, its last answer.

`LiveShell` decides what runs in it and when it is replaced; this module sends commands to it and reads its answers,
which it reports to `LiveShell`. Writes the shell's files and lives on the event loop.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.errors import PermissionRefused, ResourceExhausted
from holdfast.runtime.durability.shell_recorder import (
    CommandRecorder,
    ControlLines,
    MakeEndRecord,
    ShellRecorder,
    command_end_record,
)
from holdfast.runtime.durability.shell_replay import KNOWN_JOBS
from holdfast.runtime.output.job import Job, JobStream
from holdfast.runtime.process.process import ManagedProcess
from holdfast.runtime.shell.dialect import (
    STATE_END,
    Answer,
    ShellDialect,
    ShellStep,
    SuspendedTracing,
    is_complete,
    parse_answer,
)
from holdfast.runtime.shell.files import ShellFiles
from holdfast.runtime.shell.foreground import (
    command_line,
    copies,
    has_blocking_output,
    has_blocking_pipes,
    open_stat,
    reaped_faults,
    waits_for,
)
from holdfast.runtime.tree.cgroup import CgroupMembers
from holdfast.types import CommandEnded, CommandSpec

if TYPE_CHECKING:
    from holdfast.runtime.output.poller import Poller
    from holdfast.runtime.shell.command import ShellCommand
    from holdfast.runtime.shell.saved_state import SavedState

#: Far more than a path of the longest kind and every trap. More than this is not an answer.
MAX_ANSWER_BYTES: Final = 1024 * 1024


class PendingCleanup(NamedTuple):
    """Effects of a command that `clean_up` undoes."""

    stopped: bool = False
    #: Whether the EXIT trap is still the server's and is removed; None if the command did not save its state.
    trapped: bool | None = None
    #: The directories that PWD and OLDPWD had before a command with a directory of its own.
    back: tuple[str, str] | None = None


_NO_CLEANUP: Final = PendingCleanup()
_NOTHING_SUSPENDED: Final = SuspendedTracing()


class _CommandStart(NamedTuple):
    """The record of a command, written before its line is sent."""

    recorder: CommandRecorder
    spec: CommandSpec
    ticks: int
    armed: bool

    def note(self, at: float, span: tuple[int, int], pipes: int) -> None:
        self.recorder.began(self.spec, self.ticks, at, span, pipes, armed=self.armed)


class ShellProgram:
    """A program of a shell, from just before its start until it has exited."""

    def __init__(
        self,
        dialect: ShellDialect,
        files: ShellFiles,
        record: Job,
        poller: Poller,
        *,
        saved: SavedState,
        on_answer: Callable[[Answer], None],
        recorder: ShellRecorder,
        number: int = 0,
    ) -> None:
        """`number` counts the programs of a shell."""
        self.dialect = dialect
        self.number = number
        self._recorder = recorder
        self._lines: ControlLines | None = None
        #: Its working directory as `PWD` has it, if the kernel agrees; and as the kernel has it.
        self.cwd = ""
        self._kernel_cwd = ""
        #: Whether it exited with a line unread.
        self.left_unread = False
        #: Whether it has executed another program (`exec`).
        self.replaced = False
        #: Whether its exported variables are saved as they are now.
        self.exports_saved = False
        self._files = files
        self._saved = saved
        self._record = record
        self._poller = poller
        self._on_answer = on_answer
        self._process: ManagedProcess | None = None
        self._command_line = b""
        #: The first part of an answer, if it arrived in parts.
        self._received = b""
        self._answer = Answer(0, "", "", None, "", "", {})
        self._suspended = SuspendedTracing()
        self._pending = _NO_CLEANUP
        self._armed = False
        #: Whether the last command may have changed what it exports.
        self._exported = False
        self._has_job = False
        #: Pids of background jobs that it has reported.
        self.jobs: deque[int] = deque(maxlen=KNOWN_JOBS)
        self._stat = -1
        self._faults = 0
        #: Of its cgroup, once it has joined one.
        self._members: CgroupMembers | None = None
        self._began = 0.0
        #: Of the last command: another process may hold the pipes; a child may have made them non-blocking.
        self._must_move = False
        self._may_not_block = False
        #: The pair of pipes that it writes to, and the read ends of this pair and of the pair before.
        self._pipes = 0
        self._outputs_before: list[JobStream] = []
        self._opened: dict[int, int] = {}
        self._outputs: list[JobStream] = []
        #: The write end of the next command's stdin, until the command takes it.
        self._command_stdin = -1
        self._connect()

    def _connect(self) -> None:
        """Open the control socket and the first pipes, before the program is started."""
        try:
            self._control, self._theirs = socket.socketpair()
        except OSError as error:
            raise ResourceExhausted(f"no socket for a shell: {error.strerror}") from None
        self._control.setblocking(False)
        self.inode = os.fstat(self._theirs.fileno()).st_ino
        try:
            self._files.prepare(self.dialect)
            self._lines = self._recorder.new_control_lines()
            self._opened = self._files.open_pipes(0, fresh=True)
            self._recorder.keep_pipes(0, list(self._opened.values()), self._record.open_outputs)
            if self._lines is not None:
                self._recorder.keep_program(self.number, self._control.fileno(), self._lines.fd)
            self._watch_opened(self._record)
        except BaseException:
            self.disconnect()
            raise

    def _watch_opened(self, owner: Job) -> None:
        """Watch the read ends of new pipes for this owner."""
        self._outputs = []
        for kind in tuple(self._opened):
            self._outputs.append(owner.watch(kind, self._opened[kind]))
            del self._opened[kind]

    # --- start and end ---------------------------------------------------------------------------------------

    @property
    def stdin(self) -> int:
        """The descriptor that the program reads its lines from."""
        return self._theirs.fileno()

    @property
    def process(self) -> ManagedProcess:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        """The pid of the shell itself, which in a jail is not the process that was started."""
        return 0 if self._process is None else self._process.program_pid

    @property
    def leader(self) -> int:
        """The pid of the process that was started, or 0."""
        return 0 if self._process is None else self._process.pid

    def attach(self, process: ManagedProcess, restore: str | None) -> None:
        """Send the first lines to the process that was started; it takes commands once it has answered them."""
        self._theirs.close()
        self._process = process
        process.give_streams(self._record)
        self._poller.watch(self._control.fileno(), self._readable)
        self.boot(restore)

    def boot(self, restore: str | None) -> None:
        self.send(self.dialect.boot(self._files.quoted, self._files.quoted_pipes, restore))

    def take_first_answer(self, answer: Answer) -> None:
        """Take the answer to the first lines; `PermissionRefused` if the shell could not open its pipes."""
        if answer.status != 0:
            raise PermissionRefused(f"{self._files.path}: the shell's user has no access to its files there")
        self._command_line = command_line(self.pid)
        # Of a program of an earlier server it is open already.
        self._open_stat()
        self._faults = reaped_faults(self._stat)
        self._take(answer)
        self.clean_up()

    def end_input(self) -> None:
        """Send an end of file: the shell runs its EXIT trap and exits."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def disconnect(self) -> None:
        """Read an answer that was sent, then close every descriptor except those of pipes that the record reads."""
        try:
            if self._control.fileno() >= 0 and self._process is not None:
                self._readable()
        finally:
            self._close()
            self._theirs.close()
            if self._lines is not None:
                self._lines.close()
                self._lines = None
                self._recorder.drop_program(self.number)
            self._close_stat()
            self._close_members()
            self._close_stdin()
            self._close_opened()
            self._end_unopened()

    def _end_unopened(self) -> None:
        """Cause an end of file on pipes that were never opened for writing: without a writer there is none."""
        for output in (*self._outputs, *self._outputs_before):
            if output.fd >= 0:
                with contextlib.suppress(OSError):
                    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
                    os.close(os.open(f"/proc/self/fd/{output.fd}", flags))

    def _close_opened(self) -> None:
        """Close the read ends of pipes that no command took."""
        while self._opened:
            os.close(self._opened.popitem()[1])

    def _open_stat(self) -> None:
        self._close_stat()
        self._stat = open_stat(self.pid)

    def _close_stat(self) -> None:
        if self._stat >= 0:
            fd, self._stat = self._stat, -1
            os.close(fd)

    def _close_members(self) -> None:
        if self._members is not None:
            self._members.close()
            self._members = None

    def _close(self) -> None:
        if self._control.fileno() >= 0:
            self._poller.unwatch(self._control.fileno())
            self._control.close()

    def has_saved_state(self) -> bool:
        """Whether its whole state was saved when an option ended it."""
        self._saved.take()
        state = self._files.read("state") if self._armed else None
        return state is not None and state.endswith(STATE_END.encode() + b"\n")

    def reads_line(self) -> bool:
        """Whether it is blocked in a read of its next line; False where the kernel does not show it."""
        return self._control.fileno() >= 0 and waits_for(self.pid, self.inode)

    # --- a command -------------------------------------------------------------------------------------------

    def begin(self, spec: CommandSpec, ticks: int, recorder: CommandRecorder) -> None:
        """Send a command: its files, its pipes, and the line that starts it, which is recorded first.

        The shell runs it from here on. Call `give_streams` before the event loop runs again.
        """
        dialect, files, answer = self.dialect, self._files, self._answer
        pipes = 1 - self._pipes if self._needs_other_pipes() else None
        risky = dialect.may_abort(spec.command, answer.flags)
        saves_state = risky and dialect.saves_state and "EXIT" not in answer.traps
        step = ShellStep(
            files.quoted,
            files.quoted_pipes,
            cwd=spec.cwd,
            env=spec.env,
            stdin=_stdin(spec, files),
            # With `set -e`, restoring a status other than 0 would end the shell.
            status=0 if "e" in answer.flags else answer.status,
            last=answer.last or "" if dialect.wants_last(spec.command) else None,
            pipes=pipes,
            checks_target=pipes is None or self._has_names(),
            copies=() if pipes is None else self._copies(),
            saves_state=saves_state,
            saves_exports=not self.exports_saved and (self._exported or risky or spec.timeout is not None),
        )
        files.write("command", encode(dialect.command(spec.command, self._suspended, step)))
        if spec.input is not None:
            files.write("input", spec.input)
        if step.saves_exports or saves_state:
            self._saved.ensure()
        if saves_state:
            # Open from now on: storing it later takes no further descriptor.
            files.write("state", b"")
        if step != files.plain:
            files.write("status", dialect.status(step.status).encode())
        line = self._line(step)
        self._close_opened()
        self._opened = {} if pipes is None else self._open_pipes(pipes)
        if spec.pipe_stdin:
            self._open_stdin(recorder)
        self._began = time.monotonic()
        self.send(line, _CommandStart(recorder, spec, ticks, saves_state))
        self._must_move = False
        self._armed = saves_state
        self._exported = dialect.may_export(spec.command)
        self.exports_saved = False

    def _open_stdin(self, recorder: CommandRecorder) -> None:
        """Open the pipe of a command's stdin, before the shell opens it: an open without a writer blocks."""
        self._close_stdin()
        self._command_stdin = self._files.open_stdin()
        recorder.keep_input(self._command_stdin)

    def give_input(self, command: ShellCommand) -> None:
        """Connect the command's input to the pipe that was made for it."""
        if self._command_stdin >= 0 and command.input is not None:
            fd, self._command_stdin = self._command_stdin, -1
            command.input.open(fd)

    def _close_stdin(self) -> None:
        if self._command_stdin >= 0:
            fd, self._command_stdin = self._command_stdin, -1
            os.close(fd)

    def _line(self, step: ShellStep) -> str:
        """The line that runs a step."""
        if self.dialect.plain_line is None:
            return self.dialect.step(step)
        if step == self._files.plain:
            return self.dialect.plain_line
        self._files.write("step", encode(self.dialect.step(step)))
        return f"\\. {self._files.quoted}/step\n"

    def take_answer(self, answer: Answer, *, spec: CommandSpec, stopped_as: int | None) -> int:
        """Take the answer to a command; returns its exit code, which is `stopped_as` if the server stopped it.

        Call `clean_up` next, before another line is sent.
        """
        if stopped_as is not None:
            # The DEBUG trap that it reports is the one that stopped it.
            answer = answer._replace(status=stopped_as, traps=_without(answer.traps, "DEBUG"))
        trapped = None
        if self._armed:
            trapped = "/at_exit" in answer.traps.get("EXIT", "")
            if trapped:
                answer = answer._replace(traps=_without(answer.traps, "EXIT"))
        back = None
        if spec.cwd is not None:
            back = self._answer.cwd, self._answer.old_cwd
            answer = answer._replace(cwd=back[0], old_cwd=back[1])
        self._take(answer)
        self._pending = PendingCleanup(stopped_as is not None, trapped, back)
        return answer.status

    def clean_up(self) -> None:
        """Suspend tracing and undo the effects of the last command, between two commands.

        The checks that no caller waits for are made here as well: whether the shell has had children, and its real
        working directory.
        """
        pending, self._pending = self._pending, _NO_CLEANUP
        self._note_children()
        if pending.back is None:
            self._update_cwd()
        else:
            self._kernel_cwd = ""  # the line below changes it
        self._suspended = SuspendedTracing.after(self._answer)
        if pending == _NO_CLEANUP and self._suspended == _NOTHING_SUSPENDED:
            return
        flags = self._answer.flags if pending.stopped else None
        disarm = None if pending.trapped is None else self.dialect.disarm(trapped=pending.trapped)
        line = self.dialect.clean_up(suspend=self._suspended, stopped_with=flags, disarm=disarm, back=pending.back)
        if line:
            self.send(line)

    def end_record(self, ended: CommandEnded) -> MakeEndRecord:
        """The state at the end of a command, for the next server; before `clean_up`."""
        return partial(command_end_record, ended, self._answer, *self._pending)

    def return_to(self, cwd: str) -> None:
        """Change to the directory that the shell had before a command with a directory of its own."""
        self._pending = PendingCleanup(back=(cwd, cwd))
        self.clean_up()
        self.cwd = cwd

    def set_status(self, status: int) -> None:
        """Set `$?` of the next command."""
        self._answer = self._answer._replace(status=status)

    def save_exports(self) -> None:
        if not self.exports_saved:
            self.exports_saved = True
            self._saved.ensure()
            self.send(self.dialect.save_exports(self._files.quoted_pipes))

    def _note_children(self) -> None:
        """Note whether the last command had a child that may still hold the pipes, or made them non-blocking.

        The flags are read here, where no caller waits, and again before the next command if the shell has not yet
        undone the redirections of its answer.
        """
        before, self._faults = self._faults, reaped_faults(self._stat)
        # Without a child, the shell has neither waited for one nor left one behind.
        had_child = self._has_job or self._faults != before or self._faults < 0
        self._must_move = had_child and not self._is_alone()
        self._may_not_block = had_child and not self._must_move and not self._has_blocking_pipes()

    def _needs_other_pipes(self) -> bool:
        """Whether a child may still hold the pipes, or may have made them non-blocking."""
        if self._must_move or not self._may_not_block:
            return self._must_move
        if self._has_blocking_pipes():
            return False
        # The user may have redirected a stream: other files count if the shell has undone its own redirections.
        return not (self.reads_line() and has_blocking_output(self.pid))

    def _has_blocking_pipes(self) -> bool:
        """Whether its stdout and stderr are the pipes, and block."""
        inodes = [os.fstat(output.fd).st_ino for output in self._outputs if output.fd >= 0]
        return len(inodes) == 2 and has_blocking_pipes(self.pid, inodes)

    def _is_alone(self) -> bool:
        """Whether it is the only process of its cgroup, which it had joined before its last command.

        A child of its child may be anywhere, but not outside of the cgroup.
        """
        process = self.process
        cgroup = process.tree.cgroup
        if cgroup is None or cgroup.joined_at is None or cgroup.joined_at >= self._began:
            return False
        try:
            if self._members is None:
                self._members = CgroupMembers(cgroup)
            members = self._members.pids()
        except OSError:
            return False  # no descriptor to read the members
        if process.jail is not None:
            members -= process.jail.wrappers
        return members == {self.pid}

    def _has_names(self) -> bool:
        """Whether the pipes that it writes to still have their names."""
        return all(output.fd < 0 or os.fstat(output.fd).st_nlink for output in self._outputs)

    def _copies(self) -> tuple[tuple[int, int], ...]:
        """Copies of the pipes that the shell holds (`exec 3>&1`): they move with the pipes."""
        path = self._files.pipes
        names = {f"{path}/{letter}{self._pipes}": number for letter, number in (("o", 1), ("e", 2))}
        return tuple(copies(self.pid, names))

    def _open_pipes(self, pipes: int) -> dict[int, int]:
        """The read ends of the other pair. The names go to new pipes if the earlier ones are still held open."""
        held = any(output.fd >= 0 for output in self._outputs_before)
        opened = self._files.open_pipes(pipes, fresh=held)
        self._recorder.keep_pipes(pipes, list(opened.values()), self._outputs_before)
        self._outputs_before = self._outputs
        self._pipes = pipes
        return opened

    def give_streams(self, command: Job) -> None:
        """Make the command the owner of the output from now on."""
        if self._opened:
            self._watch_opened(command)
        else:
            command.adopt(self._outputs)

    def _take(self, answer: Answer) -> None:
        self._has_job = answer.job != self._answer.job
        if self._has_job and answer.job.isdecimal():
            self.jobs.append(int(answer.job))
        moved, self._answer = answer.cwd != self._answer.cwd, answer
        if moved:
            self._kernel_cwd = ""
            self._update_cwd()

    def _update_cwd(self) -> None:
        """Set `cwd` to `PWD` if the kernel agrees: a user may set `PWD` to anything, or make it read-only."""
        claimed, link = self._answer.cwd, f"/proc/{self.pid}/cwd"
        try:
            actual = os.readlink(link)
        except OSError:
            actual = claimed  # it has just exited
        if actual == self._kernel_cwd:
            return
        self._kernel_cwd = self.cwd = actual
        with contextlib.suppress(OSError):
            if claimed.startswith("/") and os.path.samefile(claimed, link):
                self.cwd = claimed

    # --- the socket ------------------------------------------------------------------------------------------

    def send(self, text: str, start: _CommandStart | None = None) -> None:
        """Send a line to the shell, at once or not at all: it is short, and a socket holds hundreds of them."""
        try:
            if self._lines is None:
                self._control.send(encode(text))
                return
            span = self._lines.write(encode(text), begins=start is not None)
            if start is not None:
                start.note(self._began, span, self._pipes)
            self._lines.send(self._control, span[1])
        except OSError:
            self.left_unread = True  # it has exited, and the event of its exit follows

    def _readable(self) -> None:
        # Under a keeper an answer is peeked at, recorded, and only then taken. A server that dies in between leaves
        # it to the next server, which sees in the records whether the command has ended.
        flags = 0 if self._lines is None else socket.MSG_PEEK
        try:
            data = self._control.recv(65536, flags)
        except BlockingIOError:
            return
        except ConnectionResetError:
            self.left_unread = True
            data = b""
        if not data:
            # The other end is closed: the shell has exited, or has executed another program.
            self.replaced = command_line(self.pid) not in (b"", self._command_line)
            self._close()
            return
        received, self._received = self._received + data, b""
        try:
            if is_complete(received):
                with contextlib.suppress(ValueError):  # not an answer; the check of a silent shell follows
                    self._on_answer(parse_answer(received))
            elif len(received) <= MAX_ANSWER_BYTES:
                self._received = received
                self._recorder.answer_part(data)
        finally:
            if flags and self._control.fileno() >= 0:
                self._control.recv(len(data))


def _stdin(spec: CommandSpec, files: ShellFiles) -> str:
    """The quoted path of the file that is a command's stdin."""
    if spec.pipe_stdin:
        return f"{files.quoted_pipes}/stdin"
    return "/dev/null" if spec.input is None else f"{files.quoted}/input"


def encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _without(traps: dict[str, str], name: str) -> dict[str, str]:
    return {each: action for each, action in traps.items() if each != name}
