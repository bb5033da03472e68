"""The records of a process, with a ledger that keeps each write."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from holdfast.config import ExecServerConfig
from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.recorder import DurableJournal, ProcessRecorder
from holdfast.types import ProcessSpec

if TYPE_CHECKING:
    from holdfast.runtime.durability.durability import Durability


class Writes:
    """A ledger in memory: each item is one write."""

    def __init__(self) -> None:
        self.taken: list[tuple[object, ...]] = []

    def write(self, *records: object) -> None:
        self.taken.append(records)


def recorder_of(ledger: Writes) -> ProcessRecorder:
    """The recorder of a process on a terminal that has printed `x`."""
    durability = SimpleNamespace(
        ledger=ledger,
        config=ExecServerConfig(),
        spool=SimpleNamespace(path="/nowhere"),
        survives=True,
        read_terminal=lambda fd, limit, key, offset: (b"x", 7),
    )
    spec = ProcessSpec(process_id="p", argv=("cat",), tty=True)
    return ProcessRecorder(cast("Durability", durability), 1, spec, internal=False)


def test_a_read_of_a_terminal_and_its_output_are_one_write() -> None:
    ledger = Writes()
    recorder = recorder_of(ledger)
    assert recorder.read_terminal(0, 100, 0) == b"x"
    recorder.output_stored(0, 1)
    assert ledger.taken == []
    recorder.journal.add_output(2, 1)
    assert ledger.taken == [(r.TerminalOutputStored(1, 7, 0, 1, 0.0), r.OutputPrinted(1, 2, 0, 1))]
    recorder.journal.add_output(2, 1)
    assert ledger.taken[1:] == [(r.OutputPrinted(1, 2, 0, 2),)]


def test_a_read_without_output_is_recorded_at_once() -> None:
    ledger = Writes()
    recorder = recorder_of(ledger)
    recorder.read_terminal(0, 100, 0)
    recorder.output_stored(0, 0)
    assert ledger.taken == [(r.TerminalOutputStored(1, 7, 0, 0, 0.0),)]


def test_a_job_with_its_recorder_is_freed_without_a_collection() -> None:
    """A server has thousands of ended jobs, and cycles would stay until the collector's next full run."""

    def journals() -> int:
        return sum(isinstance(each, DurableJournal) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = journals()
        recorder = recorder_of(Writes())
        owned = recorder.hand_over()
        assert journals() == before + 1
        del recorder, owned
        assert journals() == before
    finally:
        gc.enable()
