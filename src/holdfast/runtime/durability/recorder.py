"""Records one job in the ledger, and hands its descriptors to the keeper, so that the next server can resume it.

`JobRecorder` is what all jobs have; `ProcessRecorder` is for a process. The durable journal and the durable output
log record themselves. Touches the ledger, the spool and the keeper's socket, through `Durability`.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import TYPE_CHECKING

from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.input_log import DurableInput
from holdfast.runtime.output.journal import CLOSE, Journal, output_kinds
from holdfast.runtime.output.output_log import MOVE_BYTES, NO_ROOM, OutputLog, Spool
from holdfast.runtime.process.input import InputQueue
from holdfast.runtime.process.signals import exit_status
from holdfast.types import ExitStatus, ProcessSpec, TerminalSize

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.runtime.durability.durability import Durability
    from holdfast.runtime.durability.job_replay import JobState
    from holdfast.runtime.durability.terminal_reads import UnstoredRead
    from holdfast.runtime.output.job import Job
    from holdfast.runtime.terminal.timeline import TimelineEvent


class JobRecorder:
    """Records the output and the input of one job; makes its journal and its output logs."""

    __slots__ = ("_durability", "_ledger", "journal", "key", "logs")

    def __init__(
        self, durability: Durability, key: int, kinds: tuple[int, ...] = (0, 1), *, records_output: bool = True
    ) -> None:
        self._durability = durability
        self.key = key
        self._ledger = durability.ledger
        config, spool = durability.config, durability.spool
        chunks = config.retained_chunks_per_process
        retained = config.retained_output_bytes_per_process // len(kinds)
        durable = durability.survives and records_output
        self.journal = DurableJournal(chunks, self) if durable else Journal(chunks)
        self.logs = {
            kind: DurableOutputLog(spool, retained, self, kind) if durable else OutputLog(spool, retained)
            for kind in kinds
        }

    def hand_over(self) -> tuple[Journal, dict[int, OutputLog]]:
        """Return the journal and the logs, once, to the job.

        Both refer to this recorder. If it kept them, each of the many ended jobs would be a cycle, which stays
        until a full run of the garbage collector.
        """
        journal, logs = self.journal, self.logs
        del self.journal, self.logs
        return journal, logs

    def printed(self, kind: int, sealed: int, end: int) -> None:
        self._ledger.record(r.OutputPrinted, self.key, kind, sealed, end)

    def losing(self, kind: int, start: int, end: int) -> None:
        self._ledger.record(r.OutputLost, self.key, kind, start, end)

    def closed(self) -> None:
        self._ledger.record(r.JobClosed, self.key, time.monotonic())

    # --- input -----------------------------------------------------------------------------------------------

    @property
    def input_key(self) -> str:
        """The keeper's key of stdin."""
        return f"{self.key}.stdin"

    @property
    def input_file(self) -> str:
        """The name of the file from which input is delivered, which is its key, too."""
        return f"{self.key}.input"

    def new_input(self, fd: int, *, name: str, owns_fd: bool, awaits_reader: bool = False) -> InputQueue:
        limit = self._durability.config.stdin_buffer_bytes
        if self._durability.survives:
            return DurableInput(self, fd, name=name, limit=limit, owns_fd=owns_fd, awaits_reader=awaits_reader)
        return InputQueue(fd, name=name, limit=limit, owns_fd=owns_fd, awaits_reader=awaits_reader)

    def keep_input(self, fd: int) -> None:
        """Hand the writing end of stdin to the keeper."""
        self._durability.link.keep(self.input_key, [fd])

    def input_accepted(self, write_id: str | None, end: int) -> None:
        self._ledger.record(r.InputAccepted, self.key, write_id, end)

    def close_input(self) -> None:
        self._ledger.record(r.InputClosed, self.key)

    def open_input(self) -> int:
        """Open the file of input; the keeper holds the same open file, with the same position."""
        path = f"{self._durability.spool.path}/{self.input_file}"
        # A server that died before the keeper held its file left the file, with no accepted input.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._durability.link.keep(self.input_file, [fd])
        return fd

    def let_go_of_input(self, pipe: bool, file: int) -> None:
        """Drop the keeper's copies before the server closes its own: an open copy withholds the end of file."""
        if pipe:
            self._durability.link.drop(self.input_key, at_once=True)
        if file >= 0:
            self._durability.link.drop(self.input_file)
            os.close(file)
            with contextlib.suppress(OSError):  # removed with the spool
                os.unlink(f"{self._durability.spool.path}/{self.input_file}")

    @property
    def lends_pages(self) -> bool:
        return self._durability.spool.lends_pages


class ProcessRecorder(JobRecorder):
    """Records one process."""

    __slots__ = ("_adopted", "_read_number", "_unwritten", "checkpoint", "printed_at")

    def __init__(
        self, durability: Durability, key: int, spec: ProcessSpec, *, internal: bool, adopted: bool = False
    ) -> None:
        """`adopted` if an earlier server started the process: then the keeper is its parent."""
        kinds = output_kinds(tty=spec.tty, merge_stderr=spec.merge_stderr)
        # The shell's own recorder has the output of its program.
        super().__init__(durability, key, kinds, records_output=not internal)
        self._adopted = adopted
        #: Records of events found in the terminal output that is being stored; written together with the output.
        self._unwritten: list[r.LedgerRecord] = []
        #: The last recorded state of the terminal.
        self.checkpoint: r.TerminalCheckpoint | None = None
        self._read_number = 0
        self.printed_at = 0.0

    @property
    def output_key(self) -> str:
        return str(self.key)

    def started(self, pid: int, started_at: float) -> None:
        self._ledger.record(r.ProcessStarted, self.key, pid, started_at)

    def reap(self, pid: int, at: float, translate: Callable[[ExitStatus], ExitStatus]) -> ExitStatus:
        """Record the exit status, as `translate` reads it, and only then reap the leader."""
        # Without a ledger nothing is recorded in between, and one system call peeks and reaps.
        survives = self._durability.survives
        code = self._durability.link.status(pid) if self._adopted else _wait(pid, reap=not survives)
        # None: other code in this process waits for any child and took the status, or the keeper is gone.
        status = translate(ExitStatus(255) if code is None else exit_status(*code))
        self._ledger.record(r.JobEnded.of, self.key, status, at)
        if self._adopted:
            self._durability.link.free(pid)
        elif code is not None and survives:
            os.waitpid(pid, 0)
        return status

    def let_go(self) -> None:
        """Drop the keeper's copies of the streams, which are closed."""
        self._durability.link.drop(self.output_key)

    def forgotten(self) -> None:
        self._ledger.record(r.JobForgotten, self.key)

    def undo(self) -> None:
        """Record that the start failed."""
        self.forgotten()
        self._durability.link.drop(self.output_key)
        self._durability.link.drop(self.input_key, at_once=True)

    def signalled(self, signal_id: str) -> None:
        self._ledger.record(r.SignalSent, self.key, signal_id)

    def resized(self, size: TerminalSize) -> None:
        self._ledger.record(r.TerminalResized, self.key, size.rows, size.cols)

    def read_terminal(self, fd: int, limit: int, offset: int) -> bytes:
        """Read the terminal; `output_stored` records the events in the output together with it."""
        data, self._read_number = self._durability.read_terminal(fd, limit, self.key, offset)
        return data

    def repeat_read(self, unstored: UnstoredRead) -> bytes:
        """Return the bytes that an earlier server had read and not stored."""
        self._read_number = unstored.number
        return unstored.data

    def output_stored(self, offset: int, end: int) -> None:
        """Record that the bytes of the last read are in the log between these offsets.

        If there are such bytes, the journal adds them next, and `printed` writes both records at once.
        """
        if self._read_number:
            stored = r.TerminalOutputStored(self.key, self._read_number, offset, end, self.printed_at)
            self._unwritten.append(stored)
            self._read_number = 0
            if offset == end:
                self._ledger.write(*self._unwritten)
                self._unwritten.clear()

    def terminal_event(self, event: TimelineEvent) -> None:
        """Record an event of the terminal, together with the output that contains it if there is some."""
        if self._read_number:
            self._unwritten.append(r.TerminalEventRecord(self.key, *event[1:]))
        else:
            self._ledger.record(r.TerminalEventRecord, self.key, *event[1:])

    def terminal_checkpoint(self, make: Callable[[int], r.TerminalCheckpoint], *, delay: bool = False) -> None:
        """Record the state that `make` returns for the key of this process, if it has changed.

        `delay` records it together with the output that is recorded next.
        """
        if not self._durability.survives:
            return
        checkpoint = make(self.key)
        if delay:
            self._unwritten.append(checkpoint)
        elif checkpoint != self.checkpoint:
            self.checkpoint = checkpoint
            if self._read_number:
                self._unwritten.append(checkpoint)
            else:
                self._ledger.write(checkpoint)

    def printed(self, kind: int, sealed: int, end: int) -> None:
        self._ledger.write(*self._unwritten, r.OutputPrinted(self.key, kind, sealed, end))
        self._unwritten.clear()


class DurableJournal(Journal):
    """A journal that records output and close before a reader sees them; `reap` records the exit."""

    __slots__ = ("_recorder",)

    def __init__(self, max_entries: int, recorder: JobRecorder) -> None:
        super().__init__(max_entries)
        self._recorder = recorder

    def add_output(self, kind: int, length: int) -> None:
        sealed = self._sealed
        super().add_output(kind, length)
        self._recorder.printed(kind, sealed, self.ends[kind == 1])

    def add_event(self, kind: int) -> None:
        if kind == CLOSE:
            self._recorder.closed()
        super().add_event(kind)


class DurableOutputLog(OutputLog):
    """A log with a named file for the next server; its bytes are never in memory alone."""

    __slots__ = ("_kind", "_recorder")

    def __init__(self, spool: Spool, retained_bytes: int, recorder: JobRecorder, kind: int) -> None:
        super().__init__(spool, retained_bytes)
        self._recorder = recorder
        self._kind = kind

    def move_from(self, pipe: int, limit: int = MOVE_BYTES) -> int:
        if self.fd < 0:
            # Bytes that were read and not yet written would be lost with the server: poll, then splice.
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            found = poll.poll(0)
            if not found:
                raise BlockingIOError
            if found[0][1] & select.POLLIN:
                # Else the pipe has no writer left, and no file is needed.
                self._open_if_possible()
        return super().move_from(pipe, limit)

    def reopen(self, printed: int, lost: tuple[int, int], end: int | None = None) -> None:
        """Continue the file of an earlier server; no reader has seen its bytes after `printed`.

        The bytes after `end` are cut off: they will be written again. That server may have died after it recorded
        some of them as lost, and before it recorded that their read is done.
        """
        start, stop = lost if end is None else (min(lost[0], end), min(lost[1], end))
        self._path = self._named_path()
        try:
            self.fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            if end is not None:
                os.ftruncate(self.fd, end)
            size = os.fstat(self.fd).st_size
        except FileNotFoundError:
            size = 0
            start, stop = 0, max(printed, stop, end or 0)
        self.lost_start, self.lost_end = start, stop
        self.end = max(printed, stop, size)
        self._spool.used += self.kept_bytes
        if (start, stop) != lost:
            self._losing(start, stop)
        if self.fd >= 0 and self.truncated:
            # The server may have died between recording the loss and freeing the pages.
            self._punch(start, stop)

    def _named_path(self) -> str:
        return f"{self._spool.path}/{self._recorder.key}.{self._kind}"

    def _open(self) -> None:
        self._path = self._named_path()
        self.fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def _open_if_possible(self) -> None:
        """Open the file. On failure the pipe's bytes are read and counted as lost, unless this log waits."""
        try:
            self._open()
        except OSError as error:
            if error.errno in NO_ROOM and self._spool.make_room():
                self._open_if_possible()
            elif error.errno in self.waits_for:
                raise

    def _losing(self, start: int, end: int) -> None:
        self._recorder.losing(self._kind, start, end)

    def _replace(self, fd: int, path: str) -> None:
        os.rename(path, self._path)
        former, self.fd = self.fd, fd
        os.close(former)


def restore_output(owner: JobRecorder | Job, state: JobState, terminal_end: int | None = None) -> None:
    """Continue the journal and the logs of an earlier server; that of a terminal is cut at `terminal_end`."""
    owner.journal.restore(state.journal.state())
    for kind, each in owner.logs.items():
        assert isinstance(each, DurableOutputLog)
        each.reopen(state.printed_end(kind), state.lost_range(kind), terminal_end if kind == 2 else None)


def _wait(pid: int, *, reap: bool) -> tuple[int, int] | None:
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | (0 if reap else os.WNOWAIT))
    except ChildProcessError:
        return None
    return None if ended is None else (ended.si_code, ended.si_status)
