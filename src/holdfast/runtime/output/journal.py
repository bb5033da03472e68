"""The journal of one job: chunks of output, the exit and the close, in order. Pure memory.

Entries are numbered in one contiguous sequence, so a reader can resume after the last `seq` that it has.

Rules:
- The newest chunk grows until a reader has its number; from then on it is sealed, and output starts a new one.
  So a process without readers does not fill the journal, and no reader sees a chunk change.
- A chunk belongs to one stream and is at most `CHUNK_BYTES` long.
- A long journal retains its first and its latest entries. A dropped entry cannot be addressed by number; its bytes
  may still be readable by offset.
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
#: The head of every journal that has dropped nothing. These are replaced and never changed.
_NO_KINDS: Final = array("B")
_NO_ENDS: Final = array("Q")


#: The number of the first of the latest entries, the latest kinds and ends, the first kinds and ends, the seal.
JournalState = tuple[int, bytes, bytes, bytes, bytes, int]


class JournalEntry(NamedTuple):
    """One entry, or several consecutive chunks of one stream (`first_seq` to `seq`)."""

    first_seq: int
    seq: int
    kind: int
    offset: int
    length: int


class Journal:
    """Entries by sequence number, starting at 1.

    An entry is stored as its kind and the end offsets of both streams after it. The length of a chunk is the growth
    of its stream since the entry before.
    """

    __slots__ = ("_ends", "_head_ends", "_head_kinds", "_kinds", "_limit", "_sealed", "_tail_seq")

    def __init__(self, max_entries: int) -> None:
        self._limit = max_entries
        #: The records from `_tail_seq` on. `_ends` starts with the pair that stood before the first of them.
        self._tail_seq = 1
        self._kinds = array("B")
        self._ends = array("Q", bytes(16))
        #: The first records, once the middle was dropped.
        self._head_kinds, self._head_ends = _NO_KINDS, _NO_ENDS
        self._sealed = 0

    def state(self) -> JournalState:
        """Return the whole state, for `restore`."""
        arrays = (self._kinds, self._ends, self._head_kinds, self._head_ends)
        kinds, ends, head_kinds, head_ends = (each.tobytes() for each in arrays)
        return self._tail_seq, kinds, ends, head_kinds, head_ends, self._sealed

    def restore(self, state: JournalState) -> None:
        """Take the state of another journal; raises `ValueError` if its parts do not match."""
        self._tail_seq, kinds, ends, head_kinds, head_ends, self._sealed = state
        if (
            self._tail_seq < 1
            or len(ends) != 16 * (len(kinds) + 1)
            or len(head_ends) != (16 * (len(head_kinds) + 1) if head_kinds else 0)
            or len(head_kinds) >= self._tail_seq
            or max(kinds + head_kinds, default=0) > CLOSE
        ):
            raise ValueError("a journal with parts that do not match")
        self._kinds, self._head_kinds = array("B", kinds), array("B", head_kinds)
        self._ends, self._head_ends = array("Q", ends), array("Q", head_ends)

    @property
    def last_seq(self) -> int:
        return self._tail_seq + len(self._kinds) - 1

    @property
    def ends(self) -> tuple[int, int]:
        """The ends of both streams after the last entry; of a terminal, the first."""
        return self._ends[-2], self._ends[-1]

    def add_output(self, kind: int, length: int) -> None:
        """Add `length` bytes of output of one stream."""
        kinds, ends, slot = self._kinds, self._ends, kind == 1
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
        """Add the exit or the close."""
        self._ends.extend(self._ends[-2:])
        self._kinds.append(kind)

    def next(self, after_seq: int, max_bytes: int) -> JournalEntry | None:
        """Return the entry after `after_seq`: one event, or chunks of one stream up to `max_bytes` (at least one).

        Skips dropped entries, and seals the returned ones.
        """
        seq, first = after_seq + 1, self._tail_seq
        if first > seq > len(self._head_kinds):
            seq = first
        kinds, ends = self._kinds, self._ends
        if seq >= first + len(kinds):
            return None
        if seq < first:
            kinds, ends, first = self._head_kinds, self._head_ends, 1
        index = last = seq - first
        kind = kinds[index]
        slot = kind == 1
        start = ends[2 * index + slot]
        if kind < EXIT:
            while (
                last + 1 < len(kinds) and kinds[last + 1] == kind and ends[2 * last + 4 + slot] - start <= max_bytes
            ):
                last += 1
        self._sealed = max(self._sealed, first + last)
        return JournalEntry(seq, first + last, kind, start, ends[2 * last + 2 + slot] - start)

    def seal(self, seq: int) -> None:
        """Seal the entries up to `seq`, after which a reader continues: later output gets a new number."""
        self._sealed = max(self._sealed, min(seq, self.last_seq))

    def is_event(self, seq: int) -> bool:
        """Whether `seq` is the exit or the close. Both are among the latest entries."""
        return self._tail_seq <= seq <= self.last_seq and self._kinds[seq - self._tail_seq] >= EXIT

    def offset_at(self, seq: int, kind: int) -> int:
        """Return the end of a stream after entry `seq`; for a dropped entry, before the next retained one."""
        if self._tail_seq > seq > len(self._head_kinds):
            seq = self._tail_seq - 1
        if seq >= self._tail_seq - 1:
            index = min(seq, self.last_seq) - self._tail_seq + 1
            return self._ends[2 * index + (kind == 1)]
        return self._head_ends[2 * seq + (kind == 1)]

    @property
    def is_crowded(self) -> bool:
        """Whether the journal has enough entries that `is_full` may hold."""
        return len(self._kinds) > self._limit // 2

    def is_full(self, taken: Sequence[int]) -> bool:
        """Whether more entries could push out one that lies after these offsets (one a stream)."""
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
    """Return the kinds of the streams on which a process prints."""
    if tty:
        return (2,)
    return (0,) if merge_stderr else (0, 1)
