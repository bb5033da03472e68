"""The replayed state of one process, and of everything that jobs have in common. Pure memory; see `replay`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from holdfast.runtime.durability import records as r
from holdfast.runtime.output.job import JobHistory
from holdfast.runtime.output.journal import CLOSE, EXIT, Journal
from holdfast.runtime.process.input import RETAINED_WRITE_IDS
from holdfast.runtime.process.process import RETAINED_SIGNAL_IDS

if TYPE_CHECKING:
    from holdfast.runtime.durability.input_log import DurableInput

#: Times of a terminal's output that are retained.
_MAX_TIMES: Final = 4_096
#: More than a stream prints between two records; a damaged record must not make the journal add chunks for ever.
_MOST_PRINTED: Final = 1 << 40


class RecordedInput:
    """The accepted input of a process or a command."""

    def __init__(self) -> None:
        self.closed = False
        self.end = 0
        self.writes: deque[str] = deque(maxlen=RETAINED_WRITE_IDS)

    def records(self, key: int) -> Iterator[r.LedgerRecord]:
        yield from (r.InputAccepted(key, write_id, self.end) for write_id in self.writes)
        if self.end:
            yield r.InputAccepted(key, None, self.end)
        if self.closed:
            yield r.InputClosed(key)

    def restore(self, input: DurableInput, file: int | None) -> None:
        """Pass the input that an earlier server accepted and did not deliver to a new queue, from its file."""
        input.recall(self.writes)
        if file is not None:
            input.resume(file, self.end)


class JobState:
    """Output, input and end of one job."""

    def __init__(self, key: int, max_chunks: int) -> None:
        self.key = key
        self.journal = Journal(max_chunks)
        self.lost: dict[int, r.OutputLost] = {}
        self.ended: r.JobEnded | None = None
        self.closed: r.JobClosed | None = None
        self.input = RecordedInput()

    def printed_end(self, kind: int) -> int:
        """The end of a stream as far as the journal has numbered it."""
        return self.journal.offset_at(self.journal.last_seq, kind)

    def lost_range(self, kind: int) -> tuple[int, int]:
        lost = self.lost.get(kind)
        return (0, 0) if lost is None else (lost.start, lost.end)

    def history(self, started_at: float) -> JobHistory:
        ended, closed = self.ended, self.closed
        return JobHistory(
            started_at,
            None if ended is None else ended.status,
            None if ended is None else ended.at,
            None if closed is None else closed.at,
        )

    def apply(self, record: r.JobRecord) -> None:
        match record:
            case r.OutputPrinted():
                grown = record.end - self.printed_end(record.kind)
                if not (0 <= record.kind < EXIT and 0 <= grown <= _MOST_PRINTED):
                    raise ValueError(f"a stream {record.kind} that grew by {grown} bytes")
                self.journal.seal(record.sealed)
                self.journal.add_output(record.kind, grown)
            case r.OutputLost():
                self.lost[record.kind] = record
            case r.JobEnded():
                self.ended = record
                self.journal.add_event(EXIT)
            case r.JobClosed():
                self.closed = record
                self.journal.add_event(CLOSE)
            case r.JournalCheckpoint():
                self.journal.restore(record.state)
            case r.InputClosed():
                self.input.closed = True
            case r.InputAccepted():
                self.input.end = record.end
                if record.write_id is not None:
                    self.input.writes.append(record.write_id)

    def output_records(self) -> Iterator[r.LedgerRecord]:
        """The records of output and end. The journal comes last: it includes the exit and the close."""
        yield from self.lost.values()
        yield from (record for record in (self.ended, self.closed) if record is not None)
        yield r.JournalCheckpoint(self.key, self.journal.state())


class TerminalHistory:
    """The events and the checkpoint of the terminal in which a process runs."""

    def __init__(self, opening: r.TerminalOpening, max_events: int) -> None:
        self.opening = opening
        self._max_events = max_events
        self.dropped = r.EventsDropped(0, 0, 0)
        self.events: deque[r.TerminalEventRecord] = deque()
        self.checkpoint: r.TerminalCheckpoint | None = None

    def add(self, event: r.TerminalEventRecord) -> None:
        self.events.append(event)
        if len(self.events) > self._max_events:
            oldest = self.events.popleft()
            # The position of an event is the number of bytes and events before it.
            position = oldest.offset + self.dropped.count
            self.dropped = r.EventsDropped(oldest.key, self.dropped.count + 1, position + 1)

    def records(self) -> Iterator[r.LedgerRecord]:
        if self.dropped.count:
            yield self.dropped
        yield from self.events
        if self.checkpoint is not None:
            yield self.checkpoint


class ProcessState(JobState):
    """One process."""

    def __init__(self, begun: r.ProcessBegun, max_chunks: int, terminal: TerminalHistory | None) -> None:
        super().__init__(begun.key, max_chunks)
        self.begun = begun
        self.terminal = terminal
        self.started: r.ProcessStarted | None = None
        self.signals: deque[str] = deque(maxlen=RETAINED_SIGNAL_IDS)
        self.resized: r.TerminalResized | None = None
        #: Set if the streams were lost with a keeper that was killed.
        self.detached: r.ProcessDetached | None = None
        #: On a terminal: the last read with its bytes in the log, and the times of the output.
        self.stored: r.TerminalOutputStored | None = None
        self.times: deque[r.TerminalOutputStored] = deque(maxlen=_MAX_TIMES)

    @property
    def pid(self) -> int:
        return 0 if self.started is None else self.started.pid

    @property
    def past(self) -> JobHistory:
        return self.history(time.time() if self.started is None else self.started.started_at)

    def apply(self, record: r.JobRecord) -> None:
        match record:
            case r.TerminalOutputStored():
                self.stored = record
                if record.end > record.offset:
                    self.times.append(record)
            case r.ProcessStarted():
                self.started = record
            case r.SignalSent():
                self.signals.append(record.signal_id)
            case r.TerminalResized():
                self.resized = record
            case r.ProcessDetached():
                self.detached = record
            case r.TerminalEventRecord() if self.terminal is not None:
                self.terminal.add(record)
            case r.TerminalCheckpoint() if self.terminal is not None:
                self.terminal.checkpoint = record
            case r.EventsDropped() if self.terminal is not None:
                self.terminal.dropped = record
            case _:
                super().apply(record)

    def records(self) -> Iterator[r.LedgerRecord]:
        if self.terminal is not None:
            yield self.terminal.opening
        yield self.begun
        facts = (self.started, self.resized, self.detached, *self.times)
        yield from (record for record in facts if record is not None)
        if self.stored is not None and self.stored not in list(self.times)[-1:]:
            yield self.stored
        yield from self.output_records()
        yield from self.input.records(self.key)
        yield from (r.SignalSent(self.key, signal_id) for signal_id in self.signals)
        if self.terminal is not None:
            yield from self.terminal.records()
