"""One program that a live shell runs in: its control socket, its streams, what it said last.

`shell` decides what runs in it and when it is replaced; here is how a command is handed over and an answer taken.
Writes the shell's files and lives on the event loop.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.errors import PermissionRefused, ResourceExhausted
from holdfast.runtime.durability.records import CommandEndRecord
from holdfast.runtime.durability.shell_recorder import (
    CommandRecorder,
    ControlLines,
    ShellRecorder,
    command_end_record,
)
from holdfast.runtime.durability.shell_replay import KNOWN_JOBS
from holdfast.runtime.output.job import Job, JobStream
from holdfast.runtime.process.process import ManagedProcess
from holdfast.runtime.shell.dialect import (
    MAY_EXPORT,
    WHOLE,
    Answer,
    Dialect,
    Step,
    Suspended,
    is_whole,
    parse_answer,
)
from holdfast.runtime.shell.files import ShellFiles
from holdfast.runtime.shell.foreground import command_line, copies, open_stat, reaped_faults, waits_for
from holdfast.types import CommandEnded, CommandSpec

if TYPE_CHECKING:
    from holdfast.runtime.output.poller import Poller
    from holdfast.runtime.shell.command import ShellCommand
    from holdfast.runtime.shell.saved_state import SavedState

#: Far more than a path of the longest kind and every trap. More than that is no answer.
MAX_ANSWER_BYTES: Final = 1024 * 1024


class Settling(NamedTuple):
    """What has to be undone after a command."""

    stopped: bool = False
    #: Whether our EXIT trap is to be taken off; None if nothing of the kind is to be undone.
    trapped: bool | None = None
    back: tuple[str, str] | None = None


_NOTHING_OWED: Final = Settling()


class _Beginning(NamedTuple):
    """What is written down before a command is told to its shell."""

    recorder: CommandRecorder
    spec: CommandSpec
    ticks: int
    armed: bool

    def note(self, at: float, said: tuple[int, int], pipes: int) -> None:
        self.recorder.began(self.spec, self.ticks, at, said, pipes, armed=self.armed)


class ShellProgram:
    """From just before its start until it has ended."""

    def __init__(
        self,
        dialect: Dialect,
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
        #: Where it is, by the name that it goes by; and by the kernel's.
        self.cwd = ""
        self._where = ""
        #: Whether it ended with a line of ours unread.
        self.left_unread = False
        #: Whether it has become another program.
        self.replaced = False
        #: Whether its exported variables are written down as they are now.
        self.exports_saved = False
        self._files = files
        self._saved = saved
        self._record = record
        self._poller = poller
        self._on_answer = on_answer
        self._process: ManagedProcess | None = None
        self._command_line = b""
        self._said = bytearray()
        self._answer = Answer(0, "", "", None, "", "", {})
        self._suspended = Suspended()
        self._owed_settling = _NOTHING_OWED
        self._armed = False
        #: Whether the last command may have changed what it exports.
        self._exported = False
        self._has_job = False
        #: Background jobs that it has told of.
        self.jobs: deque[int] = deque(maxlen=KNOWN_JOBS)
        self._stat = -1
        self._faults = 0
        self._began = 0.0
        self._must_move = False
        #: The pair of pipes that it prints on, and our ends of them; and of the pair before.
        self._pipes = 0
        self._outputs_before: list[JobStream] = []
        self._opened: dict[int, int] = {}
        self._outputs: list[JobStream] = []
        #: Our end of the next command's stdin, until the command takes it.
        self._command_stdin = -1
        self._connect()

    def _connect(self) -> None:
        """Its socket and its first pipes, before it is started."""
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
            self.hang_up()
            raise

    def _watch_opened(self, owner: Job) -> None:
        """Have our ends of new pipes read, for this owner."""
        self._outputs = []
        for kind in tuple(self._opened):
            self._outputs.append(owner.watch(kind, self._opened[kind]))
            del self._opened[kind]

    # --- its life --------------------------------------------------------------------------------------------

    @property
    def stdin(self) -> int:
        """The descriptor that it reads its own program from."""
        return self._theirs.fileno()

    @property
    def process(self) -> ManagedProcess:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        """Of the shell itself, which in a jail is not the process that we started."""
        return 0 if self._process is None else self._process.program_pid

    @property
    def leader(self) -> int:
        """Of the process that we started, or 0."""
        return 0 if self._process is None else self._process.pid

    def started(self, process: ManagedProcess, restore: str | None) -> None:
        """It runs: say the first lines. Its answer says that it takes commands."""
        self._theirs.close()
        self._process = process
        process.give_streams(self._record)
        self._poller.watch(self._control.fileno(), self._readable)
        self.boot(restore)

    def boot(self, restore: str | None) -> None:
        self.say(self.dialect.boot(self._files.quoted, self._files.quoted_pipes, restore))

    def ready(self, answer: Answer) -> None:
        """The answer to the first lines."""
        if answer.status != 0:
            raise PermissionRefused(f"{self._files.path}: the shell's user is not let through to its files there")
        self._command_line = command_line(self.pid)
        # A program of an earlier server has it open by now.
        self._open_stat()
        self._faults = reaped_faults(self._stat)
        self._take(answer)
        self.settle()

    def end_input(self) -> None:
        """The end of its program: it runs its EXIT trap and goes."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def hang_up(self) -> None:
        """Take the answer that is there, then close every descriptor but those of pipes that the record reads."""
        try:
            if self._control.fileno() >= 0 and self._process is not None:
                # What it said before it ended counts.
                self._readable()
        finally:
            self._close()
            self._theirs.close()
            if self._lines is not None:
                self._lines.close()
                self._lines = None
                self._recorder.drop_program(self.number)
            self._close_stat()
            self._close_stdin()
            self._close_opened()
            self._end_unopened()

    def _end_unopened(self) -> None:
        """Give an end of file to pipes that nothing has opened for writing: without a writer there is none."""
        for output in (*self._outputs, *self._outputs_before):
            if output.fd >= 0:
                with contextlib.suppress(OSError):
                    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
                    os.close(os.open(f"/proc/self/fd/{output.fd}", flags))

    def _close_opened(self) -> None:
        """Pipes that nothing came to read."""
        while self._opened:
            os.close(self._opened.popitem()[1])

    def _open_stat(self) -> None:
        self._close_stat()
        self._stat = open_stat(self.pid)

    def _close_stat(self) -> None:
        if self._stat >= 0:
            fd, self._stat = self._stat, -1
            os.close(fd)

    def _close(self) -> None:
        if self._control.fileno() >= 0:
            self._poller.unwatch(self._control.fileno())
            self._control.close()

    def has_saved_state(self) -> bool:
        """Whether its state was written down as a whole when an option ended it."""
        self._saved.take()
        state = self._files.read("state") if self._armed else None
        return state is not None and state.endswith(WHOLE.encode() + b"\n")

    def waits(self) -> bool:
        """Whether it waits for our next line, as far as the kernel tells."""
        return self._control.fileno() >= 0 and waits_for(self.pid, self.inode)

    # --- a command -------------------------------------------------------------------------------------------

    def begin(self, spec: CommandSpec, ticks: int, recorder: CommandRecorder) -> None:
        """Hand a command over: its files, its pipes, and the line that starts it, which is recorded first.

        The shell works from here on. `give_streams` is to follow before we return to the loop.
        """
        dialect, files, answer = self.dialect, self._files, self._answer
        pipes = 1 - self._pipes if self._must_move else None
        risky = dialect.may_abort(spec.command, answer.flags)
        saves_state = risky and dialect.saves_state and "EXIT" not in answer.traps
        step = Step(
            files.quoted,
            files.quoted_pipes,
            cwd=spec.cwd,
            env=spec.env,
            stdin=_stdin(spec, files),
            # With `set -e`, to bring a status back would end the shell.
            status=0 if "e" in answer.flags else answer.status,
            last=answer.last or "" if dialect.wants_last(spec.command) else None,
            pipes=pipes,
            looks_first=pipes is None or self._has_names(),
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
            # Open from now on: it can be stored later without a descriptor more.
            files.write("state", b"")
        if step != files.plain:
            files.write("status", dialect.status(step.status).encode())
        line = self._line(step)
        self._close_opened()
        self._opened = {} if pipes is None else self._open_pipes(pipes)
        if spec.pipe_stdin:
            self._open_stdin(recorder)
        self._began = time.monotonic()
        self.say(line, _Beginning(recorder, spec, ticks, saves_state))
        self._must_move = False
        self._armed = saves_state
        self._exported = MAY_EXPORT.search(spec.command) is not None
        self.exports_saved = False

    def _open_stdin(self, recorder: CommandRecorder) -> None:
        """Before the shell is told: it would wait for a pipe that nobody writes to."""
        self._close_stdin()
        self._command_stdin = self._files.open_stdin()
        recorder.keep_input(self._command_stdin)

    def give_input(self, command: ShellCommand) -> None:
        """What is written to this command goes to the pipe that was made for it."""
        if self._command_stdin >= 0 and command.input is not None:
            fd, self._command_stdin = self._command_stdin, -1
            command.input.open(fd)

    def _close_stdin(self) -> None:
        if self._command_stdin >= 0:
            fd, self._command_stdin = self._command_stdin, -1
            os.close(fd)

    def _line(self, step: Step) -> str:
        """What to say to have a step done."""
        if self.dialect.plain_line is None:
            return self.dialect.step(step)
        if step == self._files.plain:
            return self.dialect.plain_line
        self._files.write("step", encode(self.dialect.step(step)))
        return f"\\. {self._files.quoted}/step\n"

    def finish(self, answer: Answer, *, spec: CommandSpec, stopped_as: int | None) -> int:
        """Take the answer to a command; returns its exit code, which is `stopped_as` if we ended it.

        `settle` is to follow, before anything else is said to the shell.
        """
        if stopped_as is not None:
            # What it shows as its DEBUG trap is what stopped it.
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
        self._owed_settling = Settling(stopped_as is not None, trapped, back)
        return answer.status

    def settle(self) -> None:
        """Between two commands: take off what would show, and undo what was for the last command alone.

        And look at what nobody waits for: whether the shell has had children, and where it really is.
        """
        owed, self._owed_settling = self._owed_settling, _NOTHING_OWED
        self._must_move = self._has_had_children()
        if owed.back is None:
            self._look_where()
        else:
            self._where = ""  # it is on its way back
        self._suspended = Suspended.after(self._answer)
        flags = self._answer.flags if owed.stopped else None
        disarm = None if owed.trapped is None else self.dialect.disarm(trapped=owed.trapped)
        line = self.dialect.clean_up(suspend=self._suspended, stopped_with=flags, disarm=disarm, back=owed.back)
        if line:
            self.say(line)

    def end_record(self, ended: CommandEnded) -> CommandEndRecord:
        """The state at the end of a command, for the next server; before `settle`."""
        return command_end_record(ended, self._answer, **self._owed_settling._asdict())

    def go_back(self, cwd: str) -> None:
        """To where the shell was before a command with a directory of its own."""
        self._owed_settling = Settling(back=(cwd, cwd))
        self.settle()
        self.cwd = cwd

    def set_status(self, status: int) -> None:
        """What `$?` is to be in the next command."""
        self._answer = self._answer._replace(status=status)

    def save_exports(self) -> None:
        if not self.exports_saved:
            self.exports_saved = True
            self._saved.ensure()
            self.say(self.dialect.save_exports(self._files.quoted_pipes))

    def _has_had_children(self) -> bool:
        """Whether anybody but the shell may hold its pipes: it has waited for a child, or left one behind."""
        before, self._faults = self._faults, reaped_faults(self._stat)
        if not self._has_job and self._faults == before and self._faults >= 0:
            return False
        # A child of its child may be anywhere, but not outside of its cgroup.
        cgroup = self.process.tree.cgroup
        if cgroup is None or cgroup.joined_at is None or cgroup.joined_at >= self._began:
            return True
        jail = self.process.jail
        others = set(cgroup.pids()) - (frozenset() if jail is None else jail.wrappers)
        return others != {self.pid}

    def _has_names(self) -> bool:
        """Whether the pipes that it prints on are still where they were made."""
        return all(output.fd < 0 or os.fstat(output.fd).st_nlink for output in self._outputs)

    def _copies(self) -> tuple[tuple[int, int], ...]:
        """Where else the shell holds its pipes (`exec 3>&1`): those go with it."""
        path = self._files.pipes
        names = {f"{path}/{letter}{self._pipes}": number for letter, number in (("o", 1), ("e", 2))}
        return tuple(copies(self.pid, names))

    def _open_pipes(self, pipes: int) -> dict[int, int]:
        """Our ends of the other pair. Its names go to new pipes if somebody still holds those that had them."""
        held = any(output.fd >= 0 for output in self._outputs_before)
        opened = self._files.open_pipes(pipes, fresh=held)
        self._recorder.keep_pipes(pipes, list(opened.values()), self._outputs_before)
        self._outputs_before = self._outputs
        self._pipes = pipes
        return opened

    def give_streams(self, command: Job) -> None:
        """What is printed from now on is this command's."""
        if self._opened:
            self._watch_opened(command)
            return
        for output in self._outputs:
            if output.fd >= 0:
                command.adopt(output)

    def _take(self, answer: Answer) -> None:
        self._has_job = answer.job != self._answer.job
        if self._has_job and answer.job.isdecimal():
            self.jobs.append(int(answer.job))
        moved, self._answer = answer.cwd != self._answer.cwd, answer
        if moved:
            self._where = ""
            self._look_where()

    def _look_where(self) -> None:
        """It is where `PWD` says, if the kernel agrees: a user may set it to anything, or make it read-only."""
        claimed, link = self._answer.cwd, f"/proc/{self.pid}/cwd"
        try:
            where = os.readlink(link)
        except OSError:
            where = claimed  # it has just ended
        if where == self._where:
            return
        self._where = self.cwd = where
        with contextlib.suppress(OSError):
            if claimed.startswith("/") and os.path.samefile(claimed, link):
                self.cwd = claimed

    # --- the socket ------------------------------------------------------------------------------------------

    def say(self, text: str, beginning: _Beginning | None = None) -> None:
        """A line for the shell. It is short, and a socket holds hundreds of them: it goes at once or not at all."""
        try:
            if self._lines is None:
                self._control.send(encode(text))
                return
            said = self._lines.write(encode(text), begins=beginning is not None)
            if beginning is not None:
                beginning.note(self._began, said, self._pipes)
            self._lines.send(self._control, said[1])
        except OSError:
            self.left_unread = True  # it has ended: that is told in a moment

    def _readable(self) -> None:
        # Under a keeper an answer is looked at, written down, and only then taken: who dies in between leaves it to
        # the next server, which knows whether its command has ended.
        flags = 0 if self._lines is None else socket.MSG_PEEK
        try:
            data = self._control.recv(65536, flags)
        except BlockingIOError:
            return
        except ConnectionResetError:
            self.left_unread = True
            data = b""
        if not data:
            # It closed our socket: at its end, or because it became another program.
            self.replaced = command_line(self.pid) not in (b"", self._command_line)
            self._close()
            return
        self._said += data
        try:
            if is_whole(self._said):
                said = bytes(self._said)
                self._said.clear()
                with contextlib.suppress(ValueError):  # no answer of ours; the silence will be looked into
                    self._on_answer(parse_answer(said))
            elif len(self._said) > MAX_ANSWER_BYTES:
                self._said.clear()
            else:
                self._recorder.answer_part(data)
        finally:
            if flags and self._control.fileno() >= 0:
                self._control.recv(len(data))


def _stdin(spec: CommandSpec, files: ShellFiles) -> str:
    """The file that a command's stdin is, as the shell reads its name."""
    if spec.pipe_stdin:
        return f"{files.quoted_pipes}/stdin"
    return "/dev/null" if spec.input is None else f"{files.quoted}/input"


def encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _without(traps: dict[str, str], name: str) -> dict[str, str]:
    return {each: action for each, action in traps.items() if each != name}
