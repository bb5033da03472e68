"""The ledger's file: what is written is read, a torn end is cut off, compaction changes nothing that is true."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from holdfast.errors import ResourceExhausted
from holdfast.runtime.durability import records as r
from holdfast.runtime.durability.ledger import Ledger, read_ledger
from holdfast.runtime.output.journal import CLOSE, EXIT, Journal
from holdfast.server.client_session_records import ClientSessionReplay, SessionEnded, SessionOpened, SessionStarted
from holdfast.types import ProcessSpec

BEGUN = r.ProcessBegun(1, ProcessSpec("p", ("echo", "ä")), 1 << 62 | 7, b"/tmp/\xe4", False)
RECORDS: list[r.LedgerRecord] = [
    BEGUN,
    r.ProcessStarted(1, 4711, 12.5),
    r.OutputPrinted(1, 0, 0, 1 << 40),
    r.OutputLost(1, 0, 4096, 1 << 39),
    r.SignalSent(1, "s"),
    r.TerminalResized(1, 24, 80),
    r.InputClosed(1),
    r.JobEnded(1, 137, "SIGKILL", 13.5),
    r.JobClosed(1, 14.5),
    r.JobForgotten(1),
    SessionOpened("s", "client"),
    SessionStarted("s", "p", True),
    SessionEnded("s"),
]


def read(path: str) -> list[r.LedgerRecord]:
    return read_ledger(path, ClientSessionReplay.KINDS)[1]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger")
    for record in RECORDS:
        # A server each: every record is there as soon as it is written.
        ledger = Ledger(path)
        ledger.write(record)
        ledger.close()
    assert read(path) == RECORDS


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_record_that_was_written_halfway_is_cut_off(tmp_path: Path, cut: int) -> None:
    path = str(tmp_path / "ledger")
    ledger = Ledger(path)
    for record in RECORDS:
        ledger.write(record)
    whole = os.path.getsize(path)
    ledger.write(r.JobClosed(2, 1.0))
    os.truncate(path, whole + cut)
    ledger.close()
    assert read(path) == RECORDS
    assert os.path.getsize(path) == whole, "the next record begins where a whole one ended"


def test_compaction_writes_what_is_true_now_and_goes_on_in_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.runtime.durability.ledger.COMPACT_BYTES", 2_000)
    path = str(tmp_path / "ledger")
    ledger = Ledger(path, lambda records: [BEGUN, list(records)[-1]])
    for end in range(1, 1_000):
        ledger.write(r.OutputPrinted(1, 0, 0, end))
        if end % 100 == 0:
            ledger.settle()
    ledger.close()
    records = read(path)
    assert os.listdir(tmp_path) == ["ledger"]
    assert os.path.getsize(path) < 4_000
    assert records[0] == BEGUN
    assert records[-1] == r.OutputPrinted(1, 0, 0, 999)


def test_what_finds_no_room_is_told_once_and_written_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "ledger")
    ledger = Ledger(path)
    ledger.write(BEGUN)
    write = os.write
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
        ledger.write(r.JobClosed(1, 1.0))
        ledger.write(r.JobClosed(1, 2.0))
        assert read(path) == [BEGUN]
        with pytest.raises(ResourceExhausted, match=r"ledger cannot be written on \(no room\).* make room there"):
            ledger.require_room()
    ledger.require_room()
    ledger.write(r.JobClosed(1, 3.0))
    ledger.close()
    assert read(path) == [BEGUN, r.JobClosed(1, 1.0), r.JobClosed(1, 2.0), r.JobClosed(1, 3.0)]
    assert [record.message for record in caplog.records if "no room" in record.message] == [
        f"{path} cannot be written (no room): new facts would not survive a restart"
    ]


def test_a_journal_becomes_what_another_was() -> None:
    journal, copy = Journal(100), Journal(100)
    for length in range(1, 300):
        journal.add_output(length % 2, length)
        journal.seal(journal.last_seq - length % 3)
    journal.add_event(EXIT)
    journal.add_event(CLOSE)
    copy.restore(journal.state())
    assert copy.state() == journal.state()
    assert [copy.next(seq, 1) for seq in range(300)] == [journal.next(seq, 1) for seq in range(300)]
