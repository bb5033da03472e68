"""Records are bounded, and a file of them can be read by its owner alone."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import msgspec

from holdfast.bridge.record import CallRecord, CallRecords, Excerpt, RecordFile


def record(number: int, text: str = "") -> CallRecord:
    return CallRecord(number, 1.0, "POST", "/v1/messages", request=text)


def test_the_latest_calls_are_kept_by_count_and_by_bytes() -> None:
    by_count, by_bytes = CallRecords(max_calls=2), CallRecords(max_bytes=250)
    for number in range(1, 5):
        by_count.add(record(number))
        by_bytes.add(record(number, "x" * 100))
    assert [call.number for call in by_count] == [3, 4]
    assert [call.number for call in by_bytes] == [3, 4]
    assert (by_count.total, by_count[0].number, [call.number for call in by_count[-1:]]) == (4, 3, [4])


def test_one_call_is_kept_however_large() -> None:
    calls = CallRecords(max_bytes=10)
    calls.add(record(1, "x" * 100))
    assert len(calls) == 1


def test_an_excerpt_keeps_both_ends() -> None:
    excerpt = Excerpt(10)
    for byte in b"abcdefghijklmnopqrstuvwxyz":
        excerpt.add(bytes([byte]))
    assert excerpt.bytes() == b"abcde\n[16 bytes are left out]\nvwxyz"
    assert excerpt.length == 26


def test_an_excerpt_of_little_is_all_of_it() -> None:
    excerpt = Excerpt(10)
    excerpt.add(b"abcdefg")
    excerpt.add(b"hij")
    assert excerpt.bytes() == b"abcdefghij"


def test_a_file_has_one_line_for_each_call(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    for number in (1, 2):  # a second bridge appends
        file = RecordFile(str(path))
        file.write(record(number, "two\nlines"))
        file.close()
    lines = path.read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [1, 2]
    assert msgspec.json.decode(lines[0], type=CallRecord) == record(1, "two\nlines")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
