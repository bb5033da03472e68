"""The wall clock of the machine is set while the service runs: nothing ends early, and nothing is prolonged."""

from __future__ import annotations

import logging
import time

import pytest

from holdfast.service.clock import SystemClock
from holdfast.service.fronts.readiness import Readiness
from holdfast.service.housekeeping import Housekeeping
from holdfast.service.settings import ServiceSettings
from holdfast.service.store import Store

DAY = 86_400.0


class Wall:
    """The wall clock that an operator, or an NTP server, sets."""

    def __init__(self) -> None:
        self._time = time.time
        self.set_by = 0.0

    def __call__(self) -> float:
        return self._time() + self.set_by


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    wall = Wall()
    monkeypatch.setattr("holdfast.service.clock.time.time", wall)
    return wall


@pytest.mark.parametrize("step", [DAY, -DAY])
def test_a_step_of_the_wall_clock_moves_no_deadline(wall: Wall, step: float) -> None:
    clock = SystemClock()
    before = clock.time()
    wall.set_by = step
    after = clock.time()
    assert 0 <= after - before < DAY / 2
    assert clock.stepped() == pytest.approx(step, abs=DAY / 2)
    # A new start follows.
    assert SystemClock().time() == pytest.approx(before + step, abs=DAY / 2)


async def test_a_step_is_logged_once(wall: Wall, sqlite_url: str, caplog: pytest.LogCaptureFixture) -> None:
    clock = SystemClock()
    store = await Store.open(sqlite_url, clock=clock)
    kept = Housekeeping(store, Readiness(), clock, ServiceSettings())
    with caplog.at_level(logging.WARNING, "holdfast.service"):
        for wall.set_by in (0.0, 3_600.0, 3_600.0):
            kept._check_clock()
    assert [record.getMessage() for record in caplog.records] == [
        "the wall clock was set by +3600 s: this replica keeps its old time, restart it to follow"
    ]
    await store.close()
