"""What a kept server writes down and hands over for each live shell, so that the next server can go on with it.

The keeper holds our end of the control socket, the pipes that the shell prints on, and the file that our lines to
it are sent from. Touches the ledger, the spool and the keeper's line; `shell_recovery` is the way back.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.runtime.durability import records as r, shell_records as s
from holdfast.runtime.durability.process_log import RecordNotes
from holdfast.types import CommandSpec, ExitStatus, ShellSpec

if TYPE_CHECKING:
    from holdfast.runtime.durability.process_log import Keeping
    from holdfast.runtime.output.job import Output
    from holdfast.runtime.shell.dialect import Answer

#: The file of lines begins anew from here on.
_LAP_BYTES: Final = 64 * 1024


class SpokenLines:
    """What we say to a shell, in a file that it is sent from.

    The position up to which it was sent belongs to the open file, which the keeper holds too: so the next server
    knows whether a command was told. The kernel moves bytes and position in one call, which no death divides.
    """

    def __init__(self, fd: int = -1) -> None:
        self.fd = os.memfd_create("holdfast-lines", os.MFD_CLOEXEC) if fd < 0 else fd
        self._end = self.sent

    @property
    def sent(self) -> int:
        return os.lseek(self.fd, 0, os.SEEK_CUR)

    def write(self, data: bytes, *, begins: bool) -> tuple[int, int]:
        """To be sent next; between which positions it is. `begins` if it is a command's."""
        if begins and self._end > _LAP_BYTES:
            # The shell has answered to what is at the beginning of the file: no page of that is needed any more.
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
    """The pipes that have the names of a pair: the keeper's key of them, and which they are."""

    key: str
    inodes: list[int]
    #: Our ends, if they are of an earlier server.
    outputs: tuple[Output, ...] = ()


class CommandNotes(RecordNotes):
    """What is written down of one command. Its exit and its close are told by one record."""

    __slots__ = ("_forgotten", "_shell", "_waited")

    def __init__(self, keeping: Keeping, key: int, shell: int, *, waited: bool = False) -> None:
        super().__init__(keeping, key)
        self._shell = shell
        self._waited = waited
        self._forgotten = False

    def queued(self, spec: CommandSpec) -> None:
        self._waited = True
        self.write(s.CommandQueued(self.key, self._shell, spec))

    def began(
        self, spec: CommandSpec, ticks: int, at: float, said: tuple[int, int], pipes: int, *, armed: bool
    ) -> None:
        """Before the line that starts it is sent."""
        told: CommandSpec | None = spec
        if self._waited:
            told = None
        elif spec.input is not None:
            told = msgspec.structs.replace(spec, input=None)
        self.write(s.CommandBegan(self.key, self._shell, told, ticks, at, *said, pipes, armed))

    def stopping(self, *, timed_out: bool) -> None:
        self.write(s.CommandStopping(self.key, timed_out))

    def answered(self, ended: s.NotedEnd) -> None:
        self.write(s.CommandAnswered(self.key, ended))

    def over(self, ended: s.NotedEnd, kept: int) -> None:
        self.write(s.CommandOver(self.key, ended, kept))

    def refused(self) -> None:
        self.write(s.CommandRefused(self.key))

    def forgotten(self) -> None:
        """By what another command's end tells: what is lost of its output need not be told."""
        self._forgotten = True

    def losing(self, kind: int, start: int, end: int) -> None:
        if not self._forgotten:
            super().losing(kind, start, end)

    def closed(self) -> None:
        """With its exit."""

    def keep_input(self, fd: int) -> None:
        # The pipe, and the file that its input is kept in.
        self._keeping.link.require_room(2)
        super().keep_input(fd)


class ShellNotes(RecordNotes):
    """What is written down of one shell, through all its programs."""

    __slots__ = ("_lingering", "_pairs", "_serial", "directory")

    def __init__(self, keeping: Keeping, key: int) -> None:
        super().__init__(keeping, key)
        #: Where its files are.
        self.directory = f"{keeping.spool.path}/s{key}"
        self._serial = 0
        self._pairs: dict[int, _Pair] = {}
        #: Those that have lost their names, for as long as somebody prints on them.
        self._lingering: dict[str, tuple[Output, ...]] = {}

    def opening(self, spec: ShellSpec, path: str, real: str, started_at: float) -> None:
        self.write(s.ShellOpening(self.key, spec, path, real, self.directory, started_at))

    def command(self) -> CommandNotes:
        return CommandNotes(self._keeping, self._keeping.new_key(), self.key)

    def remembered_command(self, key: int) -> CommandNotes:
        return CommandNotes(self._keeping, key, self.key, waited=True)

    # --- descriptors -----------------------------------------------------------------------------------------

    def program_key(self, number: int) -> str:
        """The keeper's key of a program's control socket and lines."""
        return f"{self.key}.c{number}"

    def keep_program(self, number: int, control: int, lines: int) -> None:
        self._keeping.link.keep(self.program_key(number), [control, lines])

    def drop_program(self, number: int) -> None:
        self._keeping.link.drop(self.program_key(number))

    @property
    def _saved_key(self) -> str:
        return f"{self.key}.saved"

    def keep_saved(self, fd: int) -> None:
        """The pipe that it saves to: what is in it outlives us."""
        self._keeping.link.keep(self._saved_key, [fd])

    def keep_pipes(self, pair: int, fds: Sequence[int], still_open: Iterable[Output]) -> None:
        """Our ends of a pair, unless they are of pipes that the keeper has.

        Those of the former pipes by the same names are let go once nothing that is `still_open` is.
        """
        for each in [each for each, held in self._lingering.items() if all(output.fd < 0 for output in held)]:
            del self._lingering[each]
            self._keeping.link.drop(each)
        inodes = [os.fstat(fd).st_ino for fd in fds]
        former = self._pairs.get(pair)
        if former is not None and former.inodes == inodes:
            return
        if former is not None:
            self._lingering[former.key] = (*former.outputs, *still_open)
        self._serial += 1
        key = f"{self.key}.p{self._serial}.{pair}"
        self._keeping.link.keep(key, fds)
        self._pairs[pair] = _Pair(key, inodes)

    def found_pipes(self, key: str, outputs: Sequence[Output]) -> int:
        """The keeper had these, in the order in which they were made; returns the pair whose names they got."""
        serial, pair = (int(each) for each in key.rpartition(".p")[2].split("."))
        self._serial = max(self._serial, serial)
        former = self._pairs.get(pair)
        if former is not None:
            self._lingering[former.key] = former.outputs
        inodes = [os.fstat(output.fd).st_ino for output in outputs]
        self._pairs[pair] = _Pair(key, inodes, tuple(outputs))
        return pair

    def gone(self) -> None:
        """Nobody can ask for it any more."""
        self.write(s.ShellGone(self.key))
        self._keeping.link.drop(self._saved_key)
        for key in (*self._lingering, *(each.key for each in self._pairs.values())):
            self._keeping.link.drop(key)
        self._lingering.clear()
        self._pairs.clear()

    def release(self, number: int, pipes: Iterable[str]) -> None:
        """Have the keeper close what an earlier server handed over: a program's control socket, and pipes."""
        self.drop_program(number)
        for key in pipes:
            self._keeping.link.drop(key)

    # --- what happens ----------------------------------------------------------------------------------------

    def program_begins(
        self, number: int, inode: int, cwd: str | None, *, restored: str = "", command: int = 0, exit_code: int = 0
    ) -> None:
        where = None if cwd is None else os.fsencode(cwd)
        self.write(s.ProgramBegins(self.key, number, inode, where, restored, command, exit_code))

    def ready(self, answer: Answer, command_line: bytes) -> None:
        self.write(s.ProgramReady(self.key, noted_answer(answer), command_line))

    def answer_part(self, data: bytes) -> None:
        self.write(s.AnswerPart(self.key, data))

    def interrupted(self, interrupt_id: str, command: CommandNotes | None) -> None:
        self.write(s.Interrupted(self.key, interrupt_id, 0 if command is None else command.key))

    def given_up(self, command: int, exit_code: int) -> None:
        self.write(s.ProgramGivenUp(self.key, command, exit_code))

    def closing(self, *, keep: bool, grace: float) -> None:
        self.write(s.ShellClosing(self.key, keep, grace))

    def closes(self, reason: str, status: ExitStatus, *, refuses: bool) -> None:
        self.write(s.ShellEnded(self.key, _printable(reason), status.exit_code, status.signal, refuses))

    def ended(self, status: ExitStatus) -> None:
        """This is in the journal of its own output."""
        self.write(r.Ended(self.key, status.exit_code, status.signal, time.time()))


def noted_answer(answer: Answer) -> s.NotedAnswer:
    return s.NotedAnswer(
        answer.status,
        answer.flags,
        answer.job,
        None if answer.last is None else os.fsencode(answer.last),
        os.fsencode(answer.cwd),
        os.fsencode(answer.old_cwd),
        {name: os.fsencode(action) for name, action in answer.traps.items()},
    )


def noted_end(
    *,
    exit_code: int,
    cwd: str,
    duration: float,
    timed_out: bool,
    restored: str,
    reason: str | None,
    answer: Answer,
    stopped: bool,
    trapped: bool | None,
    back: tuple[str, str] | None,
) -> s.NotedEnd:
    return s.NotedEnd(
        exit_code,
        os.fsencode(cwd),
        duration,
        timed_out,
        restored,
        None if reason is None else _printable(reason),
        noted_answer(answer),
        stopped,
        trapped,
        None if back is None else (os.fsencode(back[0]), os.fsencode(back[1])),
    )


def _printable(text: str) -> str:
    """A directory's name need not be UTF-8."""
    return text.encode(errors="replace").decode()
