"""What a ledger tells of anything that prints and ends: its journal, what was lost of it, its end. Pure memory.

Processes are these and more (`memory`), and so are shells and their commands (`shell_memory`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from holdfast.runtime.durability import records as r
from holdfast.runtime.output.journal import CLOSE, EXIT, Journal
from holdfast.runtime.process.input import REMEMBERED_WRITES

if TYPE_CHECKING:
    from holdfast.runtime.durability.input_log import KeptInput

#: More than a stream prints between two records; a damaged one must not have us count chunks for ever.
_MOST_PRINTED: Final = 1 << 40


class RememberedInput:
    """What was accepted as input of a process or a command."""

    def __init__(self) -> None:
        self.closed = False
        self.end = 0
        self.writes: deque[str] = deque(maxlen=REMEMBERED_WRITES)

    def replay(self, record: r.Written | r.InputClosed) -> None:
        if isinstance(record, r.InputClosed):
            self.closed = True
            return
        self.end = record.end
        if record.write_id is not None:
            self.writes.append(record.write_id)

    def records(self, key: int) -> Iterator[r.AnyRecord]:
        yield from (r.Written(key, write_id, self.end) for write_id in self.writes)
        if self.end:
            yield r.Written(key, None, self.end)
        if self.closed:
            yield r.InputClosed(key)

    def restore(self, input: KeptInput, file: int | None) -> None:
        """Give a new queue what an earlier server had accepted and not delivered, from its file."""
        input.recall(self.writes)
        if file is not None:
            input.resume(file, self.end)


class RememberedRecord:
    """Output and end of a process, a shell or a command, as the ledger tells them."""

    def __init__(self, key: int, max_chunks: int) -> None:
        self.key = key
        self.journal = Journal(max_chunks)
        self.lost: dict[int, r.Lost] = {}
        self.ended: r.Ended | None = None
        self.closed: r.Closed | None = None
        self.input = RememberedInput()

    def printed_end(self, kind: int) -> int:
        """How far a stream had come, as far as anybody was told."""
        return self.journal.offset_at(self.journal.last_seq, kind)

    def lost_range(self, kind: int) -> tuple[int, int]:
        lost = self.lost.get(kind)
        return (0, 0) if lost is None else (lost.start, lost.end)

    def replay_output(self, record: r.ProcessRecord) -> None:
        match record:
            case r.Printed():
                grown = record.end - self.printed_end(record.kind)
                if not (0 <= record.kind < EXIT and 0 <= grown <= _MOST_PRINTED):
                    raise ValueError(f"a stream {record.kind} that grew by {grown} bytes")
                self.journal.seal(record.sealed)
                self.journal.add_output(record.kind, grown)
            case r.Lost():
                self.lost[record.kind] = record
            case r.Ended():
                self.ended = record
                self.journal.add_event(EXIT)
            case r.Closed():
                self.closed = record
                self.journal.add_event(CLOSE)
            case r.Journalled():
                self.journal.restore(record.state)
            case r.Written() | r.InputClosed():
                self.input.replay(record)

    def output_records(self) -> Iterator[r.AnyRecord]:
        yield from self.lost.values()
        yield from (record for record in (self.ended, self.closed) if record is not None)
        yield r.Journalled(self.key, self.journal.state())
