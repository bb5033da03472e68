"""Records live shells and their commands, and hands their descriptors to the keeper.

The keeper holds the server's end of the control socket, the pipes on which the shell prints, and the file from
which control lines are sent. Touches the ledger, the spool and the keeper's socket; `shell_recovery` is the way
back.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.errors import ResourceExhausted
from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.recorder import JobRecorder
from holdfast.types import CommandEnded, CommandSpec, ExitStatus, ShellSpec

if TYPE_CHECKING:
    from holdfast.runtime.durability.durability import Durability
    from holdfast.runtime.output.job import JobStream
    from holdfast.runtime.shell.dialect import Answer

#: The file of control lines is rewritten from its start beyond this size.
_LAP_BYTES: Final = 64 * 1024

#: Builds the record of a command's end from the state at that time; called only if there is a ledger.
MakeEndRecord = Callable[[], r.CommandEndRecord]


class ControlLines:
    """The lines that the server sends to a shell, in a file.

    The position up to which the file was sent belongs to the open file, which the keeper holds too; so the next
    server can determine whether a command was sent. sendfile(2) moves bytes and position in one call, and a crash
    cannot separate the two.
    """

    def __init__(self, fd: int = -1) -> None:
        try:
            self.fd = os.memfd_create("holdfast-lines", os.MFD_CLOEXEC) if fd < 0 else fd
        except OSError as error:
            raise ResourceExhausted(f"no file for the control lines of a shell: {error.strerror}") from None
        self._end = self.sent

    @property
    def sent(self) -> int:
        return os.lseek(self.fd, 0, os.SEEK_CUR)

    def write(self, data: bytes, *, begins: bool) -> tuple[int, int]:
        """Append a line and return its range. `begins` if the line starts a command."""
        if begins and self._end > _LAP_BYTES:
            # The shell has answered the lines at the start of the file, which are no longer needed.
            self._end = os.lseek(self.fd, 0, os.SEEK_SET)
        os.pwrite(self.fd, data, self._end)
        return self._end, self._end + len(data)

    def send(self, control: socket.socket, upto: int) -> None:
        while self._end < upto:
            self._end += os.sendfile(control.fileno(), self.fd, None, upto - self._end)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _Pair(NamedTuple):
    """The pipes that have the names of a pair: the keeper's key for them, and their inodes."""

    key: str
    inodes: list[int]
    #: The server's ends, if an earlier server made the pipes.
    outputs: tuple[JobStream, ...] = ()


class CommandRecorder(JobRecorder):
    """Records one command. A single record holds its exit and its close."""

    __slots__ = ("_forgotten", "_queued", "_shell")

    def __init__(self, durability: Durability, key: int, shell: int, *, queued: bool = False) -> None:
        super().__init__(durability, key)
        self._shell = shell
        self._queued = queued
        self._forgotten = False

    def queued(self, spec: CommandSpec) -> None:
        self._queued = True
        self._ledger.record(r.CommandQueued, self.key, self._shell, spec)

    def began(
        self, spec: CommandSpec, ticks: int, at: float, line: tuple[int, int], pipes: int, *, armed: bool
    ) -> None:
        """Record the start of a command, before the line that starts it is sent."""

        def record() -> r.CommandBegan:
            recorded = None if self._queued else msgspec.structs.replace(spec, input=None)
            return r.CommandBegan(self.key, self._shell, recorded, ticks, at, *line, pipes, armed)

        self._ledger.record(record)

    def stopping(self, *, timed_out: bool) -> None:
        self._ledger.record(r.CommandStopping, self.key, timed_out)

    def answered(self, end: MakeEndRecord) -> None:
        self._ledger.record(lambda: r.CommandAnswered(self.key, end()))

    def over(self, end: MakeEndRecord, kept: int) -> None:
        self._ledger.record(lambda: r.CommandOver(self.key, end(), kept))

    def refused(self) -> None:
        self._ledger.record(r.CommandRefused, self.key)

    def forgotten(self) -> None:
        """The end of another command removed this one: lost output need not be recorded."""
        self._forgotten = True

    def losing(self, kind: int, start: int, end: int) -> None:
        if not self._forgotten:
            super().losing(kind, start, end)

    def closed(self) -> None:
        """The record of the exit includes the close."""

    def keep_input(self, fd: int) -> None:
        # The pipe, and the file that holds the input.
        self._durability.link.require_room(2)
        super().keep_input(fd)


class ShellRecorder(JobRecorder):
    """Records one shell, through all its programs."""

    __slots__ = ("_lingering", "_pairs", "_serial", "directory")

    def __init__(self, durability: Durability, key: int) -> None:
        super().__init__(durability, key)
        #: The directory of the shell's files.
        self.directory = f"{durability.spool.path}/s{key}"
        self._serial = 0
        self._pairs: dict[int, _Pair] = {}
        #: Pipes that lost their names, for as long as a program prints on them.
        self._lingering: dict[str, tuple[JobStream, ...]] = {}

    def opening(self, spec: ShellSpec, path: str, real: str, started_at: float) -> None:
        self._ledger.record(r.ShellOpening, self.key, spec, path, real, self.directory, started_at)

    def new_control_lines(self) -> ControlLines | None:
        """Return the file from which control lines are sent; None if they are sent from memory."""
        return ControlLines() if self._durability.survives else None

    def command(self, key: int | None = None) -> CommandRecorder:
        """The recorder of a new command, or of the command that had this key under an earlier server."""
        new_key = self._durability.new_key() if key is None else key
        return CommandRecorder(self._durability, new_key, self.key, queued=key is not None)

    # --- descriptors -----------------------------------------------------------------------------------------

    def keep_program(self, number: int, control: int, lines: int) -> None:
        self._durability.link.keep(f"{self.key}.c{number}", [control, lines])

    def drop_program(self, number: int) -> None:
        self._durability.link.drop(f"{self.key}.c{number}")

    def keep_saved(self, fd: int) -> None:
        """Hand the pipe of saved state to the keeper, with the bytes in it."""
        self._durability.link.keep(f"{self.key}.saved", [fd])

    def keep_pipes(self, pair: int, fds: Sequence[int], still_open: Iterable[JobStream]) -> None:
        """Hand the server's ends of a pair to the keeper, unless the keeper holds them.

        The keeper drops the former pipes of the same names once every stream in `still_open` is closed.
        """
        if not self._durability.survives:
            return
        for each in [each for each, held in self._lingering.items() if all(output.fd < 0 for output in held)]:
            del self._lingering[each]
            self._durability.link.drop(each)
        inodes = [os.fstat(fd).st_ino for fd in fds]
        former = self._pairs.get(pair)
        if former is not None and former.inodes == inodes:
            return
        if former is not None:
            self._lingering[former.key] = (*former.outputs, *still_open)
        self._serial += 1
        key = f"{self.key}.p{self._serial}.{pair}"
        self._durability.link.keep(key, fds)
        self._pairs[pair] = _Pair(key, inodes)

    def found_pipes(self, key: str, outputs: Sequence[JobStream]) -> int:
        """Register pipes that the keeper held, in the order of their creation; returns the number of their pair."""
        serial, pair = (int(each) for each in key.rpartition(".p")[2].split("."))
        self._serial = max(self._serial, serial)
        former = self._pairs.get(pair)
        if former is not None:
            self._lingering[former.key] = former.outputs
        inodes = [os.fstat(output.fd).st_ino for output in outputs]
        self._pairs[pair] = _Pair(key, inodes, tuple(outputs))
        return pair

    def gone(self) -> None:
        """Record that the shell is no longer retained, and drop the keeper's copies."""
        self._ledger.record(r.ShellGone, self.key)
        self._durability.link.drop(f"{self.key}.saved")
        for key in (*self._lingering, *(each.key for each in self._pairs.values())):
            self._durability.link.drop(key)
        self._lingering.clear()
        self._pairs.clear()

    def release(self, number: int, pipes: Iterable[str]) -> None:
        """Drop the keeper's copies of a program's control socket and of pipes, which an earlier server made."""
        self.drop_program(number)
        for key in pipes:
            self._durability.link.drop(key)

    # --- events ----------------------------------------------------------------------------------------------

    def program_begins(
        self, number: int, inode: int, cwd: str | None, *, restored: str = "", command: int = 0, exit_code: int = 0
    ) -> None:
        where = None if cwd is None else os.fsencode(cwd)
        self._ledger.record(r.ProgramBegins, self.key, number, inode, where, restored, command, exit_code)

    def ready(self, answer: Answer, command_line: bytes) -> None:
        self._ledger.record(lambda: r.ProgramReady(self.key, answer_record(answer), command_line))

    def answer_part(self, data: bytes) -> None:
        self._ledger.record(r.AnswerPart, self.key, data)

    def interrupted(self, interrupt_id: str, command: int) -> None:
        self._ledger.record(r.InterruptRequested, self.key, interrupt_id, command)

    def given_up(self, command: int, exit_code: int) -> None:
        self._ledger.record(r.ProgramGivenUp, self.key, command, exit_code)

    def closing(self, *, keep: bool, grace: float) -> None:
        self._ledger.record(r.ShellClosing, self.key, keep, grace)

    def closes(self, reason: str, status: ExitStatus, *, refuses: bool) -> None:
        code, signal = status.exit_code, status.signal
        self._ledger.record(r.ShellEnded, self.key, _printable(reason), code, signal, refuses, status)

    def ended(self, status: ExitStatus) -> None:
        """Record the exit in the journal of the shell's own output."""
        self._ledger.record(r.JobEnded.of, self.key, status, time.time())


def answer_record(answer: Answer) -> r.AnswerRecord:
    return r.AnswerRecord(
        answer.status,
        answer.flags,
        answer.job,
        None if answer.last is None else os.fsencode(answer.last),
        os.fsencode(answer.cwd),
        os.fsencode(answer.old_cwd),
        {name: os.fsencode(action) for name, action in answer.traps.items()},
    )


def command_end_record(
    ended: CommandEnded, answer: Answer, stopped: bool, trapped: bool | None, back: tuple[str, str] | None
) -> r.CommandEndRecord:
    reason = _printable(ended.reason)
    return r.CommandEndRecord(
        ended.exit_code,
        os.fsencode(ended.cwd),
        ended.duration,
        ended.timed_out,
        ended.restored,
        reason if ended.state == "closed" else None,
        answer_record(answer),
        stopped,
        trapped,
        None if back is None else (os.fsencode(back[0]), os.fsencode(back[1])),
        msgspec.structs.replace(ended, cwd="", reason=reason),
    )


def _printable(text: str) -> str:
    """Replace the bytes that are not UTF-8, which the name of a directory may have."""
    return text if text.isascii() else text.encode(errors="replace").decode()
