"""The journal against a plain model: contiguous numbers, reported records stay, dropped ones are skipped."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from holdfast.runtime.output.journal import CHUNK_BYTES, CLOSE, EXIT, HEAD_FRACTION, Journal, JournalEntry

sizes = st.one_of(
    st.integers(1, 50), st.sampled_from([CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES])
)
steps = st.one_of(
    st.tuples(st.just("out"), st.sampled_from([0, 1]), sizes),
    st.tuples(st.just("read"), st.integers(0, 60), st.sampled_from([1, 100, CHUNK_BYTES, 10**9])),
)


class Model:
    """Every record ever written, as (kind, offset, length), and the last number that was read."""

    def __init__(self) -> None:
        self.records: list[tuple[int, int, int]] = []
        self.ends = [0, 0]
        self.sealed = 0

    def add(self, kind: int, length: int) -> None:
        if self.records and self.records[-1][0] == kind and len(self.records) > self.sealed:
            _, offset, had = self.records.pop()
            grown = min(length, CHUNK_BYTES - had)
            self.records.append((kind, offset, had + grown))
            self.ends[kind] += grown
            length -= grown
        while length:
            size = min(length, CHUNK_BYTES)
            self.records.append((kind, self.ends[kind], size))
            self.ends[kind] += size
            length -= size

    def offset_after(self, seq: int, kind: int) -> int:
        return sum(length for each, _, length in self.records[:seq] if each == kind)


def kept(journal: Journal, model: Model, limit: int) -> set[int]:
    """The numbers that must still be there: the first and the latest."""
    last = journal.last_seq
    if last <= limit:
        return set(range(1, last + 1))
    return set(range(last - limit + 1, last + 1))


@settings(max_examples=300)
@given(st.lists(steps, max_size=60), st.sampled_from([1, 4, 16, 64]))
def test_any_use_tells_what_happened(actions: list[tuple[str, int, int]], limit: int) -> None:
    journal, model = Journal(limit), Model()
    for action, first, second in actions:
        if action == "out":
            journal.add_output(first, second)
            model.add(first, second)
            assert journal.last_seq == len(model.records)
            continue
        after = min(first, journal.last_seq)
        record = journal.next(after, second)
        if after == journal.last_seq:
            assert record is None
            continue
        assert record is not None
        assert record.first_seq == after + 1 or after + 1 not in kept(journal, model, limit)
        joined = model.records[record.first_seq - 1 : record.seq]
        assert {kind for kind, _, _ in joined} == {record.kind}
        assert record.offset == joined[0][1]
        assert record.length == sum(length for _, _, length in joined)
        assert record.length <= max(second, joined[0][2])
        model.sealed = max(model.sealed, record.seq)
        for seq in kept(journal, model, limit):
            assert [journal.offset_at(seq, kind) for kind in (0, 1)] == [
                model.offset_after(seq, kind) for kind in (0, 1)
            ]


@given(st.lists(st.tuples(st.sampled_from([0, 1]), sizes), min_size=1, max_size=40), st.sampled_from([1, 8, 32]))
def test_walking_from_the_start_meets_the_head_then_the_tail(printed: list[tuple[int, int]], limit: int) -> None:
    journal, model = Journal(limit), Model()
    for kind, length in printed:
        journal.add_output(kind, length)
        model.add(kind, length)
    journal.add_event(EXIT)
    journal.add_event(CLOSE)
    seqs: list[int] = []
    after = 0
    while (record := journal.next(after, 1)) is not None:
        assert record.seq == record.first_seq > after
        seqs.append(record.seq)
        after = record.seq
    assert seqs[-2:] == [journal.last_seq - 1, journal.last_seq]
    head = 1
    while head < len(seqs) and seqs[head] == seqs[head - 1] + 1:
        head += 1
    assert seqs[0] == 1
    # One jump at most, over the middle; the first records are the head, and all after the jump is contiguous.
    assert seqs[head:] == list(range(seqs[head], journal.last_seq + 1)) if head < len(seqs) else True
    if head < len(seqs):
        assert head == max(1, limit // HEAD_FRACTION)
        assert limit <= len(seqs) - head <= limit + limit // 8 + 10


def test_output_that_nobody_was_told_of_grows_one_chunk() -> None:
    journal = Journal(10)
    for _ in range(100):
        journal.add_output(0, 7)
    assert journal.next(0, 1) == JournalEntry(1, 1, 0, 0, 700)
    journal.add_output(0, 7)
    assert journal.next(1, 1) == JournalEntry(2, 2, 0, 700, 7)
    assert journal.next(0, 1) == JournalEntry(1, 1, 0, 0, 700)


def test_a_chunk_belongs_to_one_stream_and_has_a_bound() -> None:
    journal = Journal(10)
    journal.add_output(0, 2 * CHUNK_BYTES + 1)
    journal.add_output(1, 5)
    assert journal.last_seq == 4
    assert journal.next(0, 2 * CHUNK_BYTES) == JournalEntry(1, 2, 0, 0, 2 * CHUNK_BYTES)
    assert journal.next(2, 10**9) == JournalEntry(3, 3, 0, 2 * CHUNK_BYTES, 1)
    assert journal.next(3, 10**9) == JournalEntry(4, 4, 1, 0, 5)
    assert journal.next(4, 10**9) is None


def test_events_stand_in_the_same_sequence_and_are_not_joined() -> None:
    journal = Journal(10)
    journal.add_output(2, 3)
    journal.add_event(EXIT)
    journal.add_output(2, 4)
    journal.add_event(CLOSE)
    records = [journal.next(seq, 10**9) for seq in range(4)]
    assert [record and (record.seq, record.kind, record.offset, record.length) for record in records] == [
        (1, 2, 0, 3),
        (2, EXIT, 3, 0),
        (3, 2, 3, 4),
        (4, CLOSE, 7, 0),
    ]


def test_a_number_that_somebody_names_is_sealed() -> None:
    """A waiter for the record after the last number gets a new one; the record that it has passed does not grow."""
    journal = Journal(10)
    journal.add_output(0, 5)
    journal.seal(journal.last_seq)
    journal.add_output(0, 5)
    assert journal.last_seq == 2
    assert journal.next(1, 1) == JournalEntry(2, 2, 0, 5, 5)


@pytest.mark.parametrize("seq", [3, 10**9])
def test_a_number_that_is_not_there_yet_is_sealed_no_further_than_the_last(seq: int) -> None:
    journal = Journal(10)
    journal.add_output(0, 5)
    journal.seal(seq)
    journal.add_output(0, 5)
    journal.add_output(0, 5)
    assert journal.last_seq == 2
