"""When a session is warned and closed; no clock is needed."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.service.policy.deadlines import Deadline, next_deadline
from holdfast.service.types import SessionPolicy, SessionRecord

POLICY = SessionPolicy("default", idle_timeout=100, max_lifetime=1_000, idle_grace=10, lifetime_warning=50)
RECORD = SessionRecord("s", "a", "terminal", "local", POLICY, 0.0, 20.0, "/", state="IDLE")


def test_an_idle_session_is_warned_after_its_timeout() -> None:
    assert next_deadline(RECORD, 30) == Deadline(120, "idle_warning")


def test_activity_moves_the_warning() -> None:
    assert next_deadline(replace(RECORD, last_activity_at=80.0), 90) == Deadline(180, "idle_warning")


def test_a_warned_session_is_closed_after_the_grace() -> None:
    assert next_deadline(replace(RECORD, warned_at=120.0), 121) == Deadline(130, "idle_close")


def test_activity_after_the_warning_calls_the_close_off() -> None:
    record = replace(RECORD, warned_at=120.0, last_activity_at=125.0)
    assert next_deadline(record, 126) == Deadline(225, "idle_warning")


def test_a_session_whose_command_runs_is_not_idle() -> None:
    busy = replace(RECORD, state="BUSY")
    assert next_deadline(busy, 30) == Deadline(950, "lifetime_warning")
    anyway = replace(busy, policy=replace(POLICY, idle_while_running=True))
    assert next_deadline(anyway, 30) == Deadline(120, "idle_warning")


def test_the_end_of_a_life_is_told_and_then_comes() -> None:
    active = replace(RECORD, last_activity_at=940.0)
    assert next_deadline(active, 941) == Deadline(950, "lifetime_warning")
    assert next_deadline(active, 951, lifetime_warned=True) == Deadline(1_000, "lifetime_end")


def test_a_short_life_has_no_warning() -> None:
    short = replace(RECORD, policy=replace(POLICY, max_lifetime=40))
    assert next_deadline(short, 5) == Deadline(40, "lifetime_end")


def test_after_a_long_stop_a_session_ends_without_a_warning() -> None:
    assert next_deadline(RECORD, 5_000) == Deadline(1_000, "lifetime_end")
    assert next_deadline(replace(RECORD, warned_at=120.0), 300) == Deadline(130, "idle_close")


def test_a_session_that_is_over_has_no_deadline() -> None:
    for state in ("CLOSED", "ERROR", "CLOSING"):
        assert next_deadline(replace(RECORD, state=state), 30) is None
