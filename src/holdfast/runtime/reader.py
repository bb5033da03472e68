"""A cursor in one process's journal: what it gives next, and what it keeps a blocking process from dropping.

Readers do not steal from each other, and each goes at its own speed. Pure memory over the logs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.model import Closed, Exited, OutputChunk, OutputGap, ProcessEvent
from holdfast.runtime.journal import CLOSE, EXIT, STREAMS, Record

if TYPE_CHECKING:
    from holdfast.runtime.process import ManagedProcess

#: What one event of an in-process reader carries at most.
EVENT_BYTES: Final = 1024 * 1024


class Reader:
    """Reads on after `seq`. `on_ready` is called whenever there may be something new."""

    __slots__ = ("_expected", "_held", "consumed", "on_ready", "process", "seq")

    def __init__(self, process: ManagedProcess, after_seq: int, on_ready: Callable[[], None]) -> None:
        self.process = process
        self.on_ready = on_ready
        self.seq = after_seq
        #: Where each stream goes on for this reader.
        self._expected = [process.journal.offset_at(after_seq, kind) for kind in range(len(STREAMS))]
        #: How far the reader has taken each stream for good: a blocking process keeps what comes after.
        self.consumed = list(self._expected)
        #: The second part of a record whose middle is lost.
        self._held: Record | None = None
        process.attach(self)

    def close(self) -> None:
        self.process.detach(self)

    @property
    def at_end(self) -> bool:
        """Whether the close was given: nothing comes any more."""
        return self.process.closed and self.seq >= self.process.journal.last_seq

    def next(self, max_bytes: int) -> Record | OutputGap | None:
        """The next record with all its bytes there, or the gap before it, or None for now."""
        record, self._held = self._held, None
        if record is None:
            record = self._next_kept(max_bytes)
        if record is None or record.kind >= EXIT:
            return record
        expected = self._expected[record.kind]
        if record.offset > expected:
            self._held = record
            self._expected[record.kind] = record.offset
            return OutputGap(STREAMS[record.kind], expected, record.offset - expected)
        self._expected[record.kind] = record.offset + record.length
        return record

    def next_event(self) -> ProcessEvent | None:
        """The same as an event with its bytes; what it carries counts as consumed."""
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

    def chunk(self, record: Record) -> OutputChunk:
        """A record of output with its bytes."""
        data = self.process.logs[record.kind].read(record.offset, record.length)
        return OutputChunk(STREAMS[record.kind], record.offset, data, record.seq)

    def consume(self, kind: int, offset: int) -> None:
        """Everything of this stream before `offset` has been taken."""
        if offset > self.consumed[kind]:
            self.consumed[kind] = offset
            self.process.reader_advanced()

    def _next_kept(self, max_bytes: int) -> Record | None:
        """The next record, without what is lost of it."""
        journal = self.process.journal
        while (record := journal.next(self.seq, max_bytes)) is not None:
            if record.kind >= EXIT:
                self.seq = record.seq
                return record
            log = self.process.logs[record.kind]
            if log.is_kept(record.offset, record.length):
                self.seq = record.seq
                return record
            if record.seq > record.first_seq:
                max_bytes = 1  # several chunks joined over a lost range: take them one by one
                continue
            self.seq = record.seq
            stop = record.offset + record.length
            tail = record._replace(offset=log.lost_end, length=stop - log.lost_end) if stop > log.lost_end else None
            if record.offset < log.lost_start:
                self._held = tail
                return record._replace(length=log.lost_start - record.offset)
            if tail is not None:
                return tail
        return None
