"""From what a dead server left (its ledger, its spool, descriptors in the keeper) to one that goes on.

First the ledger is replayed, in memory alone; then each process is taken over: its logs are opened, bytes that
nobody was told of are noted, its streams are watched again. Afterwards nothing tells it from one of our own, except
that the keeper is its parent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from holdfast.model import ExitStatus, TerminalSize
from holdfast.runtime import ledger as l
from holdfast.runtime.input_queue import REMEMBERED_WRITES
from holdfast.runtime.journal import CLOSE, EXIT
from holdfast.runtime.keeper_link import Held, KeeperLink
from holdfast.runtime.kept import LEDGER_NAME, READS_NAME, Keeping, KeptLog, NotedJournal, Notes
from holdfast.runtime.kept_input import KeptInput
from holdfast.runtime.output_log import Spool
from holdfast.runtime.process_table import ProcessTable, read_entry, read_mark
from holdfast.runtime.recorded import Past
from holdfast.runtime.starting import Started
from holdfast.runtime.terminal_reads import Unused

if TYPE_CHECKING:
    from holdfast.config import ExecServerConfig
    from holdfast.runtime.local import LocalExec
    from holdfast.runtime.process import ManagedProcess

log = logging.getLogger(__name__)

SPOOL_KEY: Final = "spool"


class RememberedProcess:
    """A process as the ledger tells it."""

    def __init__(self, keeping: Keeping, begun: l.Begun) -> None:
        self.notes = Notes(keeping, begun, adopted=True)
        self.begun = begun
        self.pid = 0
        self.started_at = time.time()
        self.lost: dict[int, tuple[int, int]] = {}
        self.status: ExitStatus | None = None
        self.exited_at: float | None = None
        self.closed_at: float | None = None
        self.input_closed = False
        self.input_end = 0
        self.writes: deque[str] = deque(maxlen=REMEMBERED_WRITES)
        self.signals: list[str] = []
        self.size: TerminalSize | None = None
        #: Of one on a terminal: the last gathering whose bytes are in the log, and where the log ended with it.
        self.taken = 0
        self.taken_end = 0
        #: Of a terminal that somebody drives.
        self.opening: l.TerminalOpening | None = None
        self.events: list[l.Happened] = []
        self.times: list[tuple[int, float]] = []
        self.terminal: l.TerminalMemory | None = None

    @property
    def past(self) -> Past:
        return Past(self.started_at, self.status, self.exited_at, self.closed_at)


class RememberedSession:
    """A client's session as the ledger tells it: its processes, and whether each ends with it."""

    def __init__(self, id: str, client_name: str) -> None:
        self.id = id
        self.client_name = client_name
        self.processes: dict[str, bool] = {}


class Memory:
    """All that a ledger tells."""

    def __init__(self, keeping: Keeping) -> None:
        self._keeping = keeping
        self.processes: dict[int, RememberedProcess] = {}
        self.sessions: dict[str, RememberedSession] = {}
        #: Commands that were typed in terminals.
        self.runs: list[str] = []
        self._openings: dict[str, l.TerminalOpening] = {}

    def replay(self, records: Iterable[l.AnyRecord]) -> None:
        for record in records:
            if isinstance(record, l.Begun):
                self._keeping.last_key = max(self._keeping.last_key, record.key)
                process = self.processes[record.key] = RememberedProcess(self._keeping, record)
                process.opening = self._openings.pop(record.spec.process_id, None)
            elif isinstance(record, l.TerminalOpening):
                self._openings[record.spec.terminal_id] = record
            elif isinstance(record, l.RunTyped):
                self.runs.append(record.run_id)
            elif isinstance(record, l.SessionOpened):
                self.sessions[record.id] = RememberedSession(record.id, record.client_name)
            elif isinstance(record, l.SessionStarted | l.SessionEnded):
                self._replay_session(record)
            elif record.key in self.processes:
                self._replay_process(self.processes[record.key], record)

    def _replay_session(self, record: l.SessionStarted | l.SessionEnded) -> None:
        if isinstance(record, l.SessionEnded):
            self.sessions.pop(record.id, None)
        elif (session := self.sessions.get(record.id)) is not None:
            session.processes[record.process_id] = record.bound

    def _replay_process(self, process: RememberedProcess, record: l.ProcessRecord) -> None:
        journal = process.notes.journal
        match record:
            case l.Started():
                process.pid, process.started_at = record.pid, record.started_at
            case l.Printed() if isinstance(journal, NotedJournal):
                journal.replay_output(record.kind, record.end, record.sealed)
            case l.Lost():
                process.lost[record.kind] = (record.start, record.end)
            case l.Ended():
                process.status, process.exited_at = ExitStatus(record.exit_code, record.signal), record.at
                if isinstance(journal, NotedJournal):
                    journal.replay_event(EXIT)
            case l.Closed():
                process.closed_at = record.at
                if isinstance(journal, NotedJournal):
                    journal.replay_event(CLOSE)
            case l.Forgotten():
                del self.processes[record.key]
            case l.InputClosed():
                process.input_closed = True
            case l.Written():
                process.input_end = record.end
                if record.write_id is not None:
                    process.writes.append(record.write_id)
            case l.Signalled():
                process.signals.append(record.signal_id)
            case l.Resized():
                process.size = TerminalSize(record.rows, record.cols)
            case l.Taken():
                process.taken, process.taken_end = record.number, record.end
                if record.end > record.offset:
                    process.times.append((record.offset, record.at))
            case l.Happened():
                process.events.append(record)
            case l.TerminalMemory():
                process.terminal = record
            case l.Journalled():
                journal.restore(record.state)


class Recovery:
    """What the keeper held for us: nothing, if we are the first server."""

    def __init__(self, keeper_fd: int, config: ExecServerConfig) -> None:
        link = KeeperLink(keeper_fd)
        self._held = link.take()
        found = self._held.pop(SPOOL_KEY, None)
        self.is_first = found is None
        spool = Spool(config.spool_directory, taken=None if found is None else (found.path, found.fds[0]))
        if self.is_first:
            link.keep(SPOOL_KEY, [spool.lock], spool.path)
        path = f"{spool.path}/{LEDGER_NAME}"
        records = [] if self.is_first else l.read_ledger(path)
        self.keeping = Keeping(link, l.Ledger(path), spool, config)
        self.memory = Memory(self.keeping)
        self.memory.replay(records)

    def held(self, key: str) -> Held | None:
        """What the keeper holds under a key; from now on it is the caller's."""
        return self._held.pop(key, None)

    def release(self) -> None:
        """The keeper need not hold what nobody has asked for."""
        for key, held in self._held.items():
            for fd in held.fds:
                os.close(fd)
            self.keeping.link.drop(key)
        self._held.clear()

    def take_over(self, exec_: LocalExec) -> None:
        """Go on with every process."""
        processes = self.memory.processes
        self._find_unnamed([each for each in processes.values() if not each.pid])
        self._remove_stale_files()
        exec_.terminals.remember_runs(self.memory.runs)
        closed: list[ManagedProcess] = []
        for remembered in processes.values():
            if remembered.begun.internal:
                exec_.end_remains(remembered.pid, remembered.begun.mark, remembered.notes.forgotten)
                continue
            process = self._take_over(exec_, remembered)
            if process.closed_at is not None:
                closed.append(process)
        for process in sorted(closed, key=lambda each: each.closed_at or 0.0):
            exec_.keep_ended(process)
        link = self.keeping.link
        link.lead(each.pid for each in processes.values() if each.status is None)

    def _take_over(self, exec_: LocalExec, remembered: RememberedProcess) -> ManagedProcess:
        notes, begun = remembered.notes, remembered.begun
        kept = self.held(notes.output_key)
        stdin = self.held(notes.input_key)
        unused = self._unused(remembered)
        outputs = {} if kept is None else dict(zip(notes.logs, kept.fds, strict=False))
        for kind, each in notes.logs.items():
            assert isinstance(each, KeptLog)
            noted = notes.journal.offset_at(notes.journal.last_seq, kind)
            end = None
            if kind == 2:
                # What is behind this was read and is printed again, or was held back and still is.
                end = max(noted, remembered.taken_end) if unused is None else unused.offset
            each.reopen(noted, remembered.lost.get(kind, (0, 0)), end)
        if remembered.status is None and not self._is_ours(remembered.pid):
            log.error("process %r: how it ended is lost", begun.spec.process_id)
            remembered.status, remembered.exited_at = ExitStatus(255), time.time()
            notes.journal.add_event(EXIT)
            notes.write(l.Ended(notes.key, 255, None, remembered.exited_at))
        if kept is None and remembered.closed_at is None:
            log.error("process %r: its streams are lost", begun.spec.process_id)
        stdin_fd = outputs.get(2, -1) if begun.spec.tty else (-1 if stdin is None else stdin.fds[0])
        started = Started(remembered.pid, begun.mark, os.fsdecode(begun.cwd), outputs, stdin_fd, notes)
        process = self._go_on(exec_, remembered, started)
        for signal_id in remembered.signals:
            process.remember_signal(signal_id)
        if remembered.size is not None:
            process.size = remembered.size
        file = self.held(notes.input_file_key)
        if file is not None and isinstance(process.input, KeptInput):
            process.input.resume(file.fds[0], remembered.input_end, list(remembered.writes))
        if remembered.status is not None:
            process.input.abandon()
        elif remembered.input_closed:
            process.input.close()
        if unused is not None:
            process.print_again(unused)
        return process

    def _go_on(self, exec_: LocalExec, remembered: RememberedProcess, started: Started) -> ManagedProcess:
        spec = remembered.begun.spec
        if remembered.opening is None:
            return exec_.take_over(spec, started, remembered.past)
        terminal = exec_.terminals.recover(remembered.opening)
        for offset, at in remembered.times:
            terminal.timeline.note_output(offset, at)
        for event in remembered.events:
            terminal.timeline.replay(event)
        process = exec_.take_over(spec, started, remembered.past, terminal.ended)
        terminal.attach_again(process, remembered.terminal)
        return process

    def _unused(self, remembered: RememberedProcess) -> Unused | None:
        """What was read from its terminal and may be in the log already, but was not noted: it is printed again."""
        unused = self.keeping.reads.unused
        if unused is None or unused.key != remembered.begun.key or unused.number <= remembered.taken:
            return None
        return unused

    def _is_ours(self, pid: int) -> bool:
        """Whether this is still the process that was started: its pid is free for others only once it was reaped,
        and until then the keeper is its parent."""
        entry = read_entry(pid) if pid else None
        return entry is not None and entry.parent == self.keeping.link.pid

    def _find_unnamed(self, unnamed: Sequence[RememberedProcess]) -> None:
        """Pids of processes whose start was under way when the server died: their mark tells who they are."""
        if not unnamed:
            return
        by_mark = {each.begun.mark: each for each in unnamed}
        keeper = self.keeping.link.pid
        for entry in ProcessTable.read().entries.values():
            # The first of its kind leads its session; what it started does not.
            if entry.parent == keeper and entry.session == entry.pid:
                found = by_mark.pop(read_mark(entry.pid) or 0, None)
                if found is not None:
                    found.pid = entry.pid
                    found.notes.started(entry.pid, found.started_at)
        for missing in by_mark.values():
            # It came to no start, and nobody was told of one.
            missing.notes.forgotten()
            del self.memory.processes[missing.begun.key]

    def _remove_stale_files(self) -> None:
        """Files of what is not recovered: output of shells, logs of processes that were being forgotten."""
        spool = self.keeping.spool.path
        known = {LEDGER_NAME, READS_NAME}
        for each in self.memory.processes.values():
            known |= {f"{each.begun.key}.{kind}" for kind in each.notes.logs} | {each.notes.input_file_name}
            if each.opening is not None and (each.terminal is None or not each.terminal.prompts):
                known.add(os.path.basename(each.opening.directory))  # its shell may still read them
        for name in os.listdir(spool):
            if name not in known:
                _remove(f"{spool}/{name}")


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
