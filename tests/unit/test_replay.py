"""The replay of a ledger: the same, however often it is compacted, and forgotten records leave nothing behind."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterable

import msgspec

from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.replay import Replay
from holdfast.runtime.output.journal import Journal
from holdfast.server.client_session_records import ClientSessionReplay, SessionEnded, SessionOpened, SessionStarted
from holdfast.types import ProcessSpec, TerminalSpec

CHUNKS, EVENTS = 100, 10


def replayed(records: Iterable[r.LedgerRecord]) -> Replay:
    memory = Replay(max_chunks=CHUNKS, max_events=EVENTS, extension=ClientSessionReplay)
    memory.apply(records)
    return memory


def begun(key: int, id: str = "p") -> r.ProcessBegun:
    return r.ProcessBegun(key, ProcessSpec(id, ("true",)), key, b"/", False)


def reported(memory: Replay) -> list[object]:
    """All that it knows, so that two can be compared."""
    return [
        (
            *(process.begun, process.started, process.lost, process.ended, process.closed, process.resized),
            *(process.journal.state(), process.input.closed, process.input.end, list(process.input.writes)),
            *(list(process.signals), process.stored, list(process.times)),
            process.terminal
            and (
                process.terminal.opening,
                process.terminal.dropped.count,
                process.terminal.dropped.horizon,
                list(process.terminal.events),
                process.terminal.checkpoint,
            ),
        )
        for process in memory.processes.values()
    ]


def happened(number: int) -> r.TerminalEventRecord:
    return r.TerminalEventRecord(1, 3 * number, float(number), "prompt", "IDLE", b"", None, "$ ", None, "")


def history() -> list[r.LedgerRecord]:
    """Everything that can happen to a process in a terminal."""
    return [
        r.TerminalOpening(TerminalSpec("p"), ("bash",), "bash", "nonce", "/spool/t"),
        begun(1),
        r.ProcessStarted(1, 42, 1.5),
        r.TerminalOutputStored(1, 1, 0, 5, 2.5),
        r.OutputPrinted(1, 2, 0, 5),
        *(happened(number) for number in range(3 * EVENTS)),
        r.InputAccepted(1, "w1", 3),
        r.InputAccepted(1, None, 9),
        r.OutputLost(1, 2, 1, 3),
        r.SignalSent(1, "s"),
        r.TerminalResized(1, 5, 6),
        r.TerminalOutputStored(1, 2, 5, 5, 3.5),
        r.InputClosed(1),
        r.JobEnded(1, 1, None, 4.5),
        r.OutputPrinted(1, 2, 2, 70_000),
        r.JobClosed(1, 5.5),
    ]


def test_a_replay_is_freed_without_a_collection() -> None:
    """Each compaction makes one; megabytes of several would wait for the collector."""
    gc.disable()
    try:
        memory = replayed([*history(), SessionOpened("a", "client"), SessionStarted("a", "p", True)])
        assert len(list(memory.records())) > 1
        freed = weakref.ref(memory)
        del memory
        assert freed() is None
    finally:
        gc.enable()


def test_a_compacted_ledger_tells_the_same_at_every_moment() -> None:
    records = history()
    for end in range(len(records) + 1):
        before = replayed(records[:end])
        compacted = list(before.records())
        again = replayed(compacted)
        assert reported(again) == reported(before)
        # And what comes after it is understood in the same way.
        again.apply(records[end:])
        assert reported(again) == reported(replayed(records))


def test_replayed_numbers_are_those_that_readers_were_told() -> None:
    """A journal with readers that come and go, and one that is made from what it wrote."""
    chance = random.Random(7)
    journal, records, ends = Journal(CHUNKS), [begun(1)], [0, 0]
    log: list[r.LedgerRecord] = list(records)
    seq = 0
    for _ in range(2_000):
        kind, length = chance.randrange(2), chance.choice((1, 100, 70_000, 200_000))
        sealed = journal.state()[-1]
        journal.add_output(kind, length)
        ends[kind] += length
        log.append(r.OutputPrinted(1, kind, sealed, ends[kind]))
        if chance.random() < 0.3 and (record := journal.next(seq, chance.choice((1, 1_000_000)))) is not None:
            seq = record.seq
    copy = replayed(log).processes[1].journal
    assert copy.last_seq == journal.last_seq
    assert copy.state()[:-1] == journal.state()[:-1]


def test_what_is_forgotten_leaves_only_its_key() -> None:
    memory = replayed([*history(), r.JobForgotten(1)])
    assert list(memory.records()) == [r.JobForgotten(1)]
    assert replayed(memory.records()).last_key == 1


def test_sessions_with_what_runs_in_them() -> None:
    memory = replayed(
        [
            SessionOpened("a", "one"),
            SessionOpened("b", "two"),
            *(begun(key, f"p{key}") for key in (1, 2)),
            SessionStarted("a", "p1", True),
            SessionStarted("a", "p2", False),
            r.JobEnded(2, 0, None, 1.0),
            SessionEnded("b"),
            r.RunTyped("t", "r", "ls", 7, 3, 1.0, None, 100),
        ]
    )
    again = replayed(memory.records())
    assert isinstance(again.extension, ClientSessionReplay)
    assert {id: session.processes for id, session in again.extension.sessions.items()} == {"a": {"p1": True}}
    assert list(again.runs) == [r.RunTyped("t", "r", "ls", 7, 3, 1.0, None, 100)]


def test_an_event_of_an_earlier_version_has_no_directory() -> None:
    written = msgspec.msgpack.decode(msgspec.msgpack.encode(happened(1)))
    earlier = msgspec.msgpack.encode(written[:-1])
    assert msgspec.msgpack.decode(earlier, type=r.TerminalEventRecord) == happened(1)
    assert happened(1).cwd is None
