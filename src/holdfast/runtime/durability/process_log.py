"""What a kept server writes down and hands over for each process, so that the next server can go on with it.

`Keeping` is the server's; `Notes` are one process's, with the journal and the logs that write themselves down. A
server without a keeper has none of this, and none of its cost. Touches the ledger, the spool and the keeper's line.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.input_log import KeptInput
from holdfast.runtime.durability.ledger import Ledger
from holdfast.runtime.durability.terminal_reads import ReadBuffer, Unused
from holdfast.runtime.output.journal import CLOSE, Journal, output_kinds
from holdfast.runtime.output.output_log import MOVE_BYTES, NO_ROOM, OutputLog, Spool
from holdfast.runtime.process.signals import exit_status
from holdfast.types import ExitStatus, ProcessSpec, TerminalSize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from holdfast.config import ExecServerConfig
    from holdfast.runtime.durability.keeper_link import KeeperLink
    from holdfast.runtime.terminal.timeline import TimelineEvent

#: Files of the spool that are no output.
LEDGER_NAME: Final = "ledger"
READS_NAME: Final = "terminal-reads"


class Keeping:
    """The ledger, the line to the keeper, and the spool that outlives us."""

    def __init__(self, link: KeeperLink, ledger: Ledger, spool: Spool, config: ExecServerConfig) -> None:
        self.link = link
        self.ledger = ledger
        self.spool = spool
        self.config = config
        #: The last key that was given.
        self.last_key = 0
        #: What a keeper that was killed took with it, for people.
        self.lost = ""
        self.reads = ReadBuffer(f"{spool.path}/{READS_NAME}")

    def begin(
        self, spec: ProcessSpec, mark: int, cwd: str, outputs: Mapping[int, int], stdin: int, *, internal: bool
    ) -> Notes:
        """Before the start: from here on, whatever happens to us, the process is found by its mark.

        Refused if that cannot be promised.
        """
        self.ledger.require_room()
        # Its streams, and the file that its input is kept in.
        self.link.require_room(len(outputs) + 2)
        self.last_key += 1
        needed = msgspec.structs.replace(spec, env=None, env_policy=None, cwd=None)
        begun = r.Begun(self.last_key, needed, mark, os.fsencode(cwd), internal)
        notes = Notes(self, begun)
        self.ledger.write(begun)
        self.link.keep(notes.output_key, list(outputs.values()))
        if stdin >= 0 and not spec.tty:
            notes.keep_input(stdin)
        return notes

    def new_key(self) -> int:
        """For whatever has records, and files, of its own."""
        self.last_key += 1
        return self.last_key


class RecordNotes:
    """What is written down of something that prints: its journal, its logs, and what it is given to read."""

    __slots__ = ("_keeping", "journal", "key", "logs")

    def __init__(self, keeping: Keeping, key: int, kinds: tuple[int, ...] = (0, 1)) -> None:
        self._keeping = keeping
        self.key = key
        config = keeping.config
        retained = config.retained_output_bytes_per_process // len(kinds)
        self.journal: Journal = NotedJournal(config.retained_chunks_per_process, self)
        self.logs: dict[int, OutputLog] = {kind: KeptLog(keeping.spool, retained, self, kind) for kind in kinds}

    def write(self, *records: r.AnyRecord) -> None:
        self._keeping.ledger.write(*records)

    def printed(self, kind: int, sealed: int, end: int) -> None:
        self.write(r.Printed(self.key, kind, sealed, end))

    def losing(self, kind: int, start: int, end: int) -> None:
        self.write(r.Lost(self.key, kind, start, end))

    def closed(self) -> None:
        self.write(r.Closed(self.key, time.monotonic()))

    def reopen(
        self, journal: Journal, printed: Callable[[int], int], lost: Callable[[int], tuple[int, int]]
    ) -> None:
        """Have the journal and the logs of an earlier server."""
        self.journal.restore(journal.state())
        for kind, each in self.logs.items():
            assert isinstance(each, KeptLog)
            each.reopen(printed(kind), lost(kind))

    # --- its input -------------------------------------------------------------------------------------------

    @property
    def input_key(self) -> str:
        return f"{self.key}.stdin"

    @property
    def input_file(self) -> str:
        """The name of the file that input is delivered from, and the key under which the keeper has it."""
        return f"{self.key}.input"

    def input(self, fd: int, *, name: str, limit: int, owns_fd: bool, awaits_reader: bool = False) -> KeptInput:
        return KeptInput(fd, name=name, limit=limit, owns_fd=owns_fd, notes=self, awaits_reader=awaits_reader)

    def keep_input(self, fd: int) -> None:
        """Have the keeper hold the writing end of stdin."""
        self._keeping.link.keep(self.input_key, [fd])

    def close_input(self) -> None:
        self.write(r.InputClosed(self.key))

    def open_input(self) -> int:
        """Open that file; its position is the keeper's, too."""
        path = f"{self._keeping.spool.path}/{self.input_file}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._keeping.link.keep(self.input_file, [fd])
        return fd

    def let_go_of_input(self, pipe: bool, file: int) -> None:
        """Before we close our end: the keeper's copy of the pipe would keep the end of input from the process."""
        if pipe:
            self._keeping.link.drop(self.input_key, at_once=True)
        if file >= 0:
            self._keeping.link.drop(self.input_file)
            os.close(file)
            with contextlib.suppress(OSError):  # it goes with the spool
                os.unlink(f"{self._keeping.spool.path}/{self.input_file}")

    @property
    def lends_pages(self) -> bool:
        return self._keeping.spool.lends_pages


class Notes(RecordNotes):
    """What is written down of one process."""

    __slots__ = ("_events", "_gathering", "adopted", "begun", "printed_at")

    def __init__(self, keeping: Keeping, begun: r.Begun, *, adopted: bool = False) -> None:
        kinds = output_kinds(tty=begun.spec.tty, merge_stderr=begun.spec.merge_stderr)
        super().__init__(keeping, begun.key, kinds)
        self.begun = begun
        #: Started by an earlier server: the keeper is its parent.
        self.adopted = adopted
        #: Of a terminal that is being read: what was found in the output, noted with the output.
        self._events: list[r.AnyRecord] = []
        self._gathering = 0
        self.printed_at = 0.0
        if begun.internal:
            # The program of a live shell: what it prints is in the shell's record.
            config = keeping.config
            self.journal = Journal(config.retained_chunks_per_process)
            self.logs = {kind: OutputLog(keeping.spool, config.retained_output_bytes_per_process) for kind in kinds}

    @property
    def output_key(self) -> str:
        return str(self.key)

    def started(self, pid: int, started_at: float) -> None:
        self.write(r.Started(self.key, pid, started_at))

    def reap(self, pid: int, at: float, read_as: Callable[[ExitStatus], ExitStatus]) -> ExitStatus:
        """Look how the leader ended, write it down as it is to be read, and only then let the kernel forget it."""
        code = self._keeping.link.status(pid) if self.adopted else _peek(pid)
        # None: somebody else in this process waits for any child, or the keeper is gone. The status went there.
        status = read_as(ExitStatus(255) if code is None else exit_status(*code))
        self.write(r.Ended(self.key, status.exit_code, status.signal, at))
        if self.adopted:
            self._keeping.link.free(pid)
        elif code is not None:
            os.waitpid(pid, 0)
        return status

    def let_go(self) -> None:
        """Nothing of its streams is needed any more."""
        self._keeping.link.drop(self.output_key)

    def forgotten(self) -> None:
        self.write(r.Forgotten(self.key))

    def undo(self) -> None:
        """It was not started in the end."""
        self.forgotten()
        self._keeping.link.drop(self.output_key)
        self._keeping.link.drop(self.input_key, at_once=True)

    def signalled(self, signal_id: str) -> None:
        self.write(r.Signalled(self.key, signal_id))

    def resized(self, size: TerminalSize) -> None:
        self.write(r.Resized(self.key, size.rows, size.cols))

    def gather(self, fd: int, limit: int, offset: int) -> bytes:
        """Read a terminal; what is found in the output is noted with it, by `taken`."""
        data, self._gathering = self._keeping.reads.gather(fd, limit, self.key, offset)
        return data

    def gather_again(self, unused: Unused) -> bytes:
        """The same for what an earlier server had read."""
        self._gathering = unused.number
        return unused.data

    def taken(self, offset: int, end: int) -> None:
        """What was gathered is in the log, between these offsets."""
        if self._gathering:
            self.write(*self._events, r.Taken(self.key, self._gathering, offset, end, self.printed_at))
            self._events.clear()
            self._gathering = 0

    def happened(self, event: TimelineEvent) -> None:
        """In a terminal; together with the output that tells it, if there is some."""
        self._note_terminal(
            r.Happened(
                self.key,
                event.offset,
                event.timestamp,
                event.type,
                event.state,
                event.payload,
                event.exit_code,
                event.prompt,
                event.size,
                event.reason,
                event.cwd,
            )
        )

    def remember_terminal(self, memory: r.TerminalMemory) -> None:
        self._note_terminal(memory)

    def hold_back(self, memory: r.TerminalMemory) -> None:
        """The same, together with output that is about to be noted."""
        self._events.append(memory)

    def _note_terminal(self, record: r.AnyRecord) -> None:
        if self._gathering:
            self._events.append(record)
        else:
            self.write(record)

    def printed(self, kind: int, sealed: int, end: int) -> None:
        self.write(*self._events, r.Printed(self.key, kind, sealed, end))
        self._events.clear()


class NotedJournal(Journal):
    """A journal whose output and close are written down before anybody hears of them; the exit is by `reap`."""

    __slots__ = ("_notes",)

    def __init__(self, max_records: int, notes: RecordNotes) -> None:
        super().__init__(max_records)
        self._notes = notes

    def add_output(self, kind: int, length: int) -> None:
        sealed = self._sealed
        super().add_output(kind, length)
        self._notes.printed(kind, sealed, self.offset_at(self.last_seq, kind))

    def add_event(self, kind: int) -> None:
        if kind == CLOSE:
            self._notes.closed()
        super().add_event(kind)


class KeptLog(OutputLog):
    """A log whose file is found by its name, and whose bytes are never in our memory alone."""

    __slots__ = ("_kind", "_notes")

    def __init__(self, spool: Spool, retained_bytes: int, notes: RecordNotes, kind: int) -> None:
        super().__init__(spool, retained_bytes)
        self._notes = notes
        self._kind = kind
        self._path = f"{spool.path}/{notes.key}.{kind}"

    def move_from(self, pipe: int, limit: int = MOVE_BYTES) -> int:
        if self.fd < 0:
            # Bytes that were read and not written yet would die with us: look, and splice from the first one on.
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            found = poll.poll(0)
            if not found:
                raise BlockingIOError
            if found[0][1] & select.POLLIN:
                # Else nobody can write any more: there is nothing to open a file for.
                self._open_if_possible()
        return super().move_from(pipe, limit)

    def reopen(self, printed: int, lost: tuple[int, int], end: int | None = None) -> None:
        """Take up the file of an earlier server. Bytes behind `printed` are there, and nobody was told of them.

        Those behind `end` will be written again.
        """
        try:
            self.fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            if end is not None:
                os.ftruncate(self.fd, end)
            size = os.fstat(self.fd).st_size
        except FileNotFoundError:
            size = 0
            lost = (0, printed)
        self.lost_start, self.lost_end = lost
        self.end = max(printed, self.lost_end, size)
        self._spool.used += self.kept_bytes
        if self.fd >= 0 and self.truncated:
            # The server may have died between noting the loss and giving the pages back.
            self._punch(self.lost_start, self.lost_end)

    def _open(self) -> None:
        self.fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def _open_if_possible(self) -> None:
        """Else what is there is read, and counted as lost; unless this log waits."""
        try:
            self._open()
        except OSError as error:
            if error.errno in NO_ROOM and self._spool.make_room():
                self._open_if_possible()
            elif error.errno in self.waits_for:
                raise

    def _losing(self, start: int, end: int) -> None:
        self._notes.losing(self._kind, start, end)

    def _replace(self, fd: int, path: str) -> None:
        os.rename(path, self._path)
        former, self.fd = self.fd, fd
        os.close(former)


def _peek(pid: int) -> tuple[int, int] | None:
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else (ended.si_code, ended.si_status)
