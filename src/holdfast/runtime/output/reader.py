"""A cursor in the journal of one job: its next entry, and the output that is retained for it.

Readers are independent of each other, each with its own speed. Pure memory over the logs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.errors import InvalidParams
from holdfast.runtime.output.journal import CLOSE, EXIT, STREAMS, JournalEntry
from holdfast.types import Closed, Exited, OutputChunk, OutputGap, ProcessEvent

if TYPE_CHECKING:
    from holdfast.runtime.output.job import Job

#: The most bytes in one event of an in-process reader.
EVENT_BYTES: Final = 1024 * 1024


class Reader:
    """Reads the entries after `seq`; `on_ready` is called when there may be new ones.

    A reader without `stays` reads once, and the job does not wait for it.
    """

    __slots__ = ("_expected", "consumed", "on_ready", "process", "seq")

    def __init__(self, process: Job, after_seq: int, on_ready: Callable[[], None], *, stays: bool = True) -> None:
        if after_seq < 0:
            raise InvalidParams(f"afterSeq {after_seq}: must not be negative")
        self.process = process
        self.on_ready = on_ready
        self.seq = after_seq
        process.journal.seal(after_seq)
        #: The offset at which each stream continues for this reader.
        self._expected = [process.journal.offset_at(after_seq, kind) for kind in range(len(STREAMS))]
        #: The offset up to which the reader has taken each stream: later output is retained while it follows.
        self.consumed = list(self._expected)
        process.attach(self, stays=stays)

    def close(self) -> None:
        self.process.detach(self)

    @property
    def at_end(self) -> bool:
        """Whether the close was returned: no entry follows."""
        return self.process.closed and self.seq >= self.process.journal.last_seq

    @property
    def has_next(self) -> bool:
        """Whether an entry follows, perhaps one without readable bytes."""
        return self.seq < self.process.journal.last_seq

    @property
    def next_is_event(self) -> bool:
        """Whether the next entry is the exit or the close."""
        return self.process.journal.is_event(self.seq + 1)

    def next(self, max_bytes: int) -> JournalEntry | OutputGap | None:
        """Return the next entry with all its bytes readable, or the gap before it, or None for now.

        A gap does not move `seq`: the entry after it is checked again, since it may be lost meanwhile.
        """
        journal = self.process.journal
        while (record := journal.next(self.seq, max_bytes)) is not None:
            if record.kind >= EXIT:
                gap = self._gap_before(record)
                if gap is None:
                    self.seq = record.seq
                return gap or record
            log = self.process.logs[record.kind]
            expected = self._expected[record.kind]
            start, stop = max(record.offset, expected), record.offset + record.length
            end = stop
            if not log.is_kept(start, stop - start):
                if record.seq > record.first_seq:
                    max_bytes = 1  # several chunks over a lost range: return them one by one
                    continue
                if start < log.lost_start:
                    end = log.lost_start
                elif log.lost_end < stop:
                    start = log.lost_end
                else:
                    self.seq = record.seq  # lost as a whole: the next entry shows the gap
                    continue
            if start > expected:
                self._expected[record.kind] = start
                return OutputGap(STREAMS[record.kind], expected, start - expected)
            self._expected[record.kind] = end
            if end == stop:
                self.seq = record.seq
                if start == record.offset:
                    return record  # as it is, nearly always
            return record._replace(offset=start, length=end - start)
        return None

    def next_event(self) -> ProcessEvent | None:
        """Return the next entry as an event with its bytes, which count as consumed."""
        record = self.next(EVENT_BYTES)
        if record is None or isinstance(record, OutputGap):
            return record
        if record.kind == EXIT:
            assert self.process.status is not None
            return Exited(record.seq, self.process.status)
        if record.kind == CLOSE:
            return Closed(record.seq)
        chunk = self.chunk(record)
        self.consume(record.kind, record.offset + record.length)
        return chunk

    def chunk(self, record: JournalEntry) -> OutputChunk:
        """Return an entry of output with its bytes."""
        data = self.process.logs[record.kind].read(record.offset, record.length)
        return OutputChunk(STREAMS[record.kind], record.offset, data, record.seq)

    def consume(self, kind: int, offset: int) -> None:
        """Note that the reader has taken this stream up to `offset`."""
        if offset > self.consumed[kind]:
            self.consumed[kind] = offset
            self.process.reader_advanced(self)

    def _gap_before(self, event: JournalEntry) -> OutputGap | None:
        """Return the lost output before the exit or the close, which no later chunk shows as a gap."""
        for kind in self.process.logs:
            expected, stop = self._expected[kind], self.process.journal.offset_at(event.seq, kind)
            if expected < stop:
                self._expected[kind] = stop
                return OutputGap(STREAMS[kind], expected, stop - expected)
        return None
