"""Decisions of the filtering proxy, as the audit has them."""

from __future__ import annotations

import json

from holdfast.service.sessions.backend.egress import MOST_DECISIONS, decisions


def line(host: str, at: float) -> bytes:
    return json.dumps({"at": at, "event": "decision", "allowed": False, "host": host, "port": 443}).encode()


def test_the_same_decision_is_one_row_with_how_often_it_was_taken() -> None:
    first, second = decisions(
        [line("a", 1.0), line("b", 1.5), line("a", 2.0), b'{"event": "ready"}', line("a", 3.0)]
    )
    assert (first["host"], first["at"], first["times"]) == ("a", 1.0, 3)
    assert (second["host"], "times" in second) == ("b", False)


def test_whoever_asks_for_ever_more_hosts_does_not_fill_the_log() -> None:
    found = decisions([line(f"host-{number}", 1.0) for number in range(1_000)])
    assert len(found) == MOST_DECISIONS + 1
    assert found[-1] == {"event": "left_out", "times": 1_000 - MOST_DECISIONS}


def test_what_cannot_be_read_is_kept_as_it_was_said() -> None:
    assert decisions([b"oh\xff", b"7"]) == [{"said": "oh�"}, {"said": "7"}]
