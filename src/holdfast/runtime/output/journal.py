"""The order of everything that happened to one process: chunks of output, its exit, its close; pure memory.

Each record has the next number of one contiguous sequence: a reader that knows its last `seq` can go on anywhere.

Rules:
- The newest chunk grows until somebody was told its number; from then on it is sealed, and output makes a new one.
  So a process that nobody watches does not fill the journal, and no reader sees a chunk change.
- A chunk belongs to one stream and is at most `CHUNK_BYTES` long.
- Of a long journal the first and the latest records are kept. What is gone can no longer be addressed by number;
  its bytes may still be there by offset.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from holdfast.types import Stream

#: Small enough to be one JSON message, large enough that a flood is not made of messages.
CHUNK_BYTES: Final = 64 * 1024
HEAD_FRACTION: Final = 16

STREAMS: Final[tuple[Stream, ...]] = ("stdout", "stderr", "pty")
EXIT: Final = 3
CLOSE: Final = 4


#: The number of the first latest record, the latest kinds and ends, the first kinds and ends, what is sealed.
JournalState = tuple[int, bytes, bytes, bytes, bytes, int]


class JournalEntry(NamedTuple):
    """One record, or several chunks of one stream in a row (`first_seq` to `seq`)."""

    first_seq: int
    seq: int
    kind: int
    offset: int
    length: int


class Journal:
    """Records by sequence number, starting at 1.

    Kept of each record: its kind, and how far both streams had come after it. Its own bytes are what its stream
    grew by since the record before.
    """

    __slots__ = ("_ends", "_head_ends", "_head_kinds", "_kinds", "_limit", "_sealed", "_tail_seq")

    def __init__(self, max_records: int) -> None:
        self._limit = max_records
        #: The records from `_tail_seq` on. `_ends` starts with the pair that stood before the first of them.
        self._tail_seq = 1
        self._kinds = array("B")
        self._ends = array("Q", (0, 0))
        #: The first records, once the middle was dropped.
        self._head_kinds = array("B")
        self._head_ends = array("Q")
        self._sealed = 0

    def state(self) -> JournalState:
        """All of it, for `restore`."""
        arrays = (self._kinds, self._ends, self._head_kinds, self._head_ends)
        kinds, ends, head_kinds, head_ends = (each.tobytes() for each in arrays)
        return self._tail_seq, kinds, ends, head_kinds, head_ends, self._sealed

    def restore(self, state: JournalState) -> None:
        """Become what another journal was."""
        self._tail_seq, kinds, ends, head_kinds, head_ends, self._sealed = state
        if (
            self._tail_seq < 1
            or len(ends) != 16 * (len(kinds) + 1)
            or len(head_ends) != (16 * (len(head_kinds) + 1) if head_kinds else 0)
            or len(head_kinds) >= self._tail_seq
            or max(kinds + head_kinds, default=0) > CLOSE
        ):
            raise ValueError("a journal whose parts do not fit")
        self._kinds, self._head_kinds = array("B", kinds), array("B", head_kinds)
        self._ends, self._head_ends = array("Q", ends), array("Q", head_ends)

    @property
    def last_seq(self) -> int:
        return self._tail_seq + len(self._kinds) - 1

    def add_output(self, kind: int, length: int) -> None:
        """Note that a stream grew by `length` bytes."""
        kinds, ends, slot = self._kinds, self._ends, _slot(kind)
        if kinds and kinds[-1] == kind and self.last_seq > self._sealed:
            last = len(ends) - 2 + slot
            grown = min(length, CHUNK_BYTES - (ends[last] - ends[last - 2]))
            ends[last] += grown
            length -= grown
        while length > 0:
            size = min(length, CHUNK_BYTES)
            ends.extend(ends[-2:])
            ends[len(ends) - 2 + slot] += size
            kinds.append(kind)
            length -= size
        if len(kinds) > self._limit + self._limit // 8:
            self._trim()

    def add_event(self, kind: int) -> None:
        """Note the exit or the close."""
        self._ends.extend(self._ends[-2:])
        self._kinds.append(kind)

    def next(self, after_seq: int, max_bytes: int) -> JournalEntry | None:
        """What comes after `after_seq`: one event, or chunks of one stream up to `max_bytes` (at least one).

        Jumps over records that are gone. What is returned is sealed.
        """
        seq = after_seq + 1
        if self._tail_seq > seq > len(self._head_kinds):
            seq = self._tail_seq
        if seq > self.last_seq:
            return None
        kinds, ends, first = self._part(seq)
        index = last = seq - first
        kind = kinds[index]
        slot = _slot(kind)
        start = ends[2 * index + slot]
        if kind < EXIT:
            while (
                last + 1 < len(kinds) and kinds[last + 1] == kind and ends[2 * last + 4 + slot] - start <= max_bytes
            ):
                last += 1
        self._sealed = max(self._sealed, first + last)
        return JournalEntry(seq, first + last, kind, start, ends[2 * last + 2 + slot] - start)

    def seal(self, seq: int) -> None:
        """Somebody goes on after `seq`: what comes now gets a number of its own."""
        self._sealed = max(self._sealed, min(seq, self.last_seq))

    def is_event(self, seq: int) -> bool:
        """Whether `seq` is the exit or the close. Both are among the latest records."""
        return self._tail_seq <= seq <= self.last_seq and self._kinds[seq - self._tail_seq] >= EXIT

    def offset_at(self, seq: int, kind: int) -> int:
        """How far a stream had come when `seq` was the last record; for one that is gone, the next that is kept."""
        if self._tail_seq > seq > len(self._head_kinds):
            seq = self._tail_seq - 1
        if seq >= self._tail_seq - 1:
            index = min(seq, self.last_seq) - self._tail_seq + 1
            return self._ends[2 * index + _slot(kind)]
        return self._head_ends[2 * seq + _slot(kind)]

    @property
    def is_crowded(self) -> bool:
        """Whether it has so many records that `is_full` may hold."""
        return len(self._kinds) > self._limit // 2

    def is_full(self, taken: Sequence[int]) -> bool:
        """Whether so many records lie beyond these offsets (one a stream) that more might push them out."""
        if not self.is_crowded:
            return False
        ends, low, high = self._ends, 0, len(self._kinds)
        while low < high:
            middle = (low + high) // 2
            if ends[2 * middle + 2] <= taken[0] and ends[2 * middle + 3] <= taken[1]:
                low = middle + 1
            else:
                high = middle
        return len(self._kinds) - low > self._limit // 2

    def _part(self, seq: int) -> tuple[array[int], array[int], int]:
        if seq < self._tail_seq:
            return self._head_kinds, self._head_ends, 1
        return self._kinds, self._ends, self._tail_seq

    def _trim(self) -> None:
        if not self._head_kinds:
            head = max(1, self._limit // HEAD_FRACTION)
            self._head_kinds = self._kinds[:head]
            self._head_ends = self._ends[: 2 * head + 2]
        surplus = len(self._kinds) - self._limit
        del self._kinds[:surplus]
        del self._ends[: 2 * surplus]
        self._tail_seq += surplus


def output_kinds(*, tty: bool, merge_stderr: bool) -> tuple[int, ...]:
    """The kinds of the streams that a process prints on."""
    if tty:
        return (2,)
    return (0,) if merge_stderr else (0, 1)


def _slot(kind: int) -> int:
    """A process has stdout and stderr, or a terminal alone."""
    return 1 if kind == 1 else 0
