"""What a ledger tells, record by record, and the fewest records that tell the same. Pure memory.

A new server replays the ledger of the one before it into this; compaction does, too, and writes it out again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from holdfast.errors import SandboxError
from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.job_replay import RememberedRecord
from holdfast.runtime.durability.shell_records import ShellRecord
from holdfast.runtime.durability.shell_replay import ShellMemory
from holdfast.runtime.output.job import Past
from holdfast.types import ExitStatus

#: A client repeats only what it had unanswered when its connection broke.
REMEMBERED_SIGNALS: Final = 16
REMEMBERED_RUNS: Final = 16
#: Times of a terminal's output that are kept.
_MAX_TIMES: Final = 4_096


class RememberedTerminal:
    """What is known of a terminal beside its process."""

    def __init__(self, opening: r.TerminalOpening) -> None:
        self.opening = opening
        self.dropped = r.EventsDropped(0, 0, 0)
        self.events: deque[r.Happened] = deque()
        self.memory: r.TerminalMemory | None = None

    def happened(self, event: r.Happened, limit: int) -> None:
        self.events.append(event)
        if len(self.events) > limit:
            oldest = self.events.popleft()
            # Its position is how many bytes and events came before it.
            position = oldest.offset + self.dropped.count
            self.dropped = r.EventsDropped(oldest.key, self.dropped.count + 1, position + 1)


class RememberedProcess(RememberedRecord):
    """A process as the ledger tells it."""

    def __init__(self, begun: r.Begun, max_chunks: int) -> None:
        super().__init__(begun.key, max_chunks)
        self.begun = begun
        self.started: r.Started | None = None
        self.signals: deque[str] = deque(maxlen=REMEMBERED_SIGNALS)
        self.resized: r.Resized | None = None
        #: Its streams went with a keeper that was killed.
        self.detached: r.Detached | None = None
        #: Of one on a terminal: the last gathering whose bytes are in the log, and the times of its output.
        self.taken: r.Taken | None = None
        self.times: deque[r.Taken] = deque(maxlen=_MAX_TIMES)
        self.terminal: RememberedTerminal | None = None

    @property
    def pid(self) -> int:
        return 0 if self.started is None else self.started.pid

    @property
    def past(self) -> Past:
        started_at = time.time() if self.started is None else self.started.started_at
        status = None if self.ended is None else ExitStatus(self.ended.exit_code, self.ended.signal)
        return Past(
            started_at,
            status,
            None if self.ended is None else self.ended.at,
            None if self.closed is None else self.closed.at,
        )

    def replay(self, record: r.ProcessRecord, max_events: int) -> None:
        match record:
            case r.Taken():
                self.taken = record
                if record.end > record.offset:
                    self.times.append(record)
            case r.Started():
                self.started = record
            case r.Signalled():
                self.signals.append(record.signal_id)
            case r.Resized():
                self.resized = record
            case r.Detached():
                self.detached = record
            case r.Happened() if self.terminal is not None:
                self.terminal.happened(record, max_events)
            case r.TerminalMemory() if self.terminal is not None:
                self.terminal.memory = record
            case r.EventsDropped() if self.terminal is not None:
                self.terminal.dropped = record
            case _:
                self.replay_output(record)

    def records(self) -> Iterator[r.AnyRecord]:
        """The fewest that tell the same. The journal comes after the exit and the close, which are in it."""
        key = self.key
        if self.terminal is not None:
            yield self.terminal.opening
        yield self.begun
        told = (
            self.started,
            *self.lost.values(),
            self.ended,
            self.closed,
            self.resized,
            self.detached,
            *self.times,
        )
        yield from (record for record in told if record is not None)
        if self.taken is not None and self.taken not in list(self.times)[-1:]:
            yield self.taken
        yield r.Journalled(key, self.journal.state())
        yield from self.input.records(key)
        yield from (r.Signalled(key, signal_id) for signal_id in self.signals)
        if self.terminal is not None:
            if self.terminal.dropped.count:
                yield self.terminal.dropped
            yield from self.terminal.events
            if self.terminal.memory is not None:
                yield self.terminal.memory


class RememberedSession:
    """A client's session as the ledger tells it: its processes, and whether each ends with it."""

    def __init__(self, opened: r.SessionOpened) -> None:
        self.opened = opened
        self.processes: dict[str, bool] = {}
        #: Those of them whose events it is told without having asked.
        self.pushed: set[str] = set()
        self.shells: dict[str, bool] = {}


class Memory:
    """All that a ledger tells."""

    def __init__(self, *, max_chunks: int, max_events: int) -> None:
        self._max_chunks = max_chunks
        self._max_events = max_events
        self.processes: dict[int, RememberedProcess] = {}
        self.sessions: dict[str, RememberedSession] = {}
        #: Commands that were typed in terminals.
        self.runs: deque[r.RunTyped] = deque(maxlen=REMEMBERED_RUNS)
        self.shells = ShellMemory(max_chunks)
        self.last_key = 0
        self._openings: dict[str, r.TerminalOpening] = {}

    def replay(self, records: Iterable[r.AnyRecord]) -> None:
        for record in records:
            match record:
                case r.Begun():
                    self._begin(record)
                case r.Forgotten():
                    self.last_key = max(self.last_key, record.key)
                    self.processes.pop(record.key, None)
                case r.TerminalOpening():
                    self._openings[record.spec.terminal_id] = record
                case r.RunTyped():
                    self.runs.append(record)
                case ShellRecord():
                    self.last_key = max(self.last_key, record.key)
                    self.shells.note(record)
                case r.SessionShell():
                    if record.id in self.sessions:
                        self.sessions[record.id].shells[record.shell_id] = record.bound
                case r.SessionOpened():
                    self.sessions[record.id] = RememberedSession(record)
                case r.SessionStarted():
                    if record.id in self.sessions:
                        self.sessions[record.id].processes[record.process_id] = record.bound
                        if record.pushed:
                            self.sessions[record.id].pushed.add(record.process_id)
                case r.SessionEnded():
                    self.sessions.pop(record.id, None)
                case _:
                    try:
                        if record.key in self.processes:
                            self.processes[record.key].replay(record, self._max_events)
                        elif (printer := self.shells.record(record.key)) is not None:
                            printer.replay_output(record)
                    except (ValueError, OverflowError) as error:
                        raise SandboxError(f"the ledger is wrong about {record.key}: {error}") from None

    def _begin(self, begun: r.Begun) -> None:
        self.last_key = max(self.last_key, begun.key)
        process = self.processes[begun.key] = RememberedProcess(begun, self._max_chunks)
        opening = self._openings.pop(begun.spec.process_id, None)
        if opening is not None:
            process.terminal = RememberedTerminal(opening)

    def last_told(self) -> dict[str, int]:
        """The last number that anybody may have been told of each process that was not closed."""
        return {
            each.begun.spec.process_id: each.journal.last_seq
            for each in self.processes.values()
            if each.closed is None
        }

    def records(self) -> Iterator[r.AnyRecord]:
        """The fewest that tell the same. The last key is told even if its process is forgotten."""
        yield r.Forgotten(self.last_key)
        for process in self.processes.values():
            yield from process.records()
        yield from self._openings.values()
        yield from self.runs
        yield from self.shells.records()
        running = {each.begun.spec.process_id for each in self.processes.values() if each.ended is None}
        open_shells = {each.opening.spec.shell_id for each in self.shells.shells.values() if each.end is None}
        told = self.last_told()
        for session in self.sessions.values():
            yield session.opened
            for process_id, bound in session.processes.items():
                pushed = process_id in session.pushed
                if process_id in running or (pushed and process_id in told):
                    yield r.SessionStarted(session.opened.id, process_id, bound, pushed)
            for shell_id, bound in session.shells.items():
                if shell_id in open_shells:
                    yield r.SessionShell(session.opened.id, shell_id, bound)
