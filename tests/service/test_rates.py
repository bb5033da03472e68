"""Token buckets and counters by agent, on a clock that is moved by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.service.access.rates import Buckets, Rates
from holdfast.service.problems import Exhausted
from holdfast.service.settings import ServiceSettings
from holdfast.testing import FakeClock


@contextmanager
def a_call(rates: Rates, agent_id: str, *, stream: bool = False) -> Iterator[None]:
    rates.begin(agent_id, stream=stream)
    yield
    rates.end(agent_id, stream=stream)


async def test_a_burst_goes_through_and_then_the_rate_holds() -> None:
    clock = FakeClock()
    rates = Rates(ServiceSettings(calls_per_second=2, calls_burst=3), clock)

    def call() -> None:
        with a_call(rates, "anna"):
            pass

    for _ in range(3):
        call()
    with pytest.raises(Exhausted) as refused:
        call()
    assert refused.value.reason == "RATE_LIMIT"
    assert refused.value.retry_after == pytest.approx(0.5)
    assert refused.value.details["limit"] == "calls_per_second"
    with a_call(rates, "ben"):
        pass
    await clock.advance(0.5)
    call()
    with pytest.raises(Exhausted):
        call()


async def test_sessions_have_a_rate_of_their_own() -> None:
    clock = FakeClock()
    rates = Rates(ServiceSettings(creates_per_second=1, creates_burst=2), clock)
    rates.create("anna")
    rates.create("anna")
    with pytest.raises(Exhausted, match="creates_per_second"):
        rates.create("anna")
    with a_call(rates, "anna"):
        pass
    await clock.advance(1)
    rates.create("anna")


def test_calls_and_streams_at_a_time_are_counted_apart_and_given_back() -> None:
    rates = Rates(ServiceSettings(concurrent_calls=1, concurrent_streams=1), FakeClock())
    with a_call(rates, "anna"), a_call(rates, "anna", stream=True):
        assert (rates.running("anna"), rates.running("anna", stream=True)) == (1, 1)
        for stream in (False, True):
            with pytest.raises(Exhausted) as refused, a_call(rates, "anna", stream=stream):
                pass
            assert refused.value.reason == "CONCURRENCY_LIMIT"
        with a_call(rates, "ben"):
            pass
    assert (rates.running("anna"), rates.running("anna", stream=True)) == (0, 0)


def test_a_refused_call_takes_no_place() -> None:
    rates = Rates(ServiceSettings(calls_per_second=1, calls_burst=1), FakeClock())
    with a_call(rates, "anna"):
        pass
    with pytest.raises(Exhausted), a_call(rates, "anna"):
        pass
    assert rates.running("anna") == 0


def test_zero_switches_a_limit_off() -> None:
    off = ServiceSettings(calls_per_second=0, creates_per_second=0, concurrent_calls=0, concurrent_streams=0)
    rates = Rates(off, FakeClock())
    for _ in range(5_000):
        rates.create("anna")
        with a_call(rates, "anna"):
            pass
    assert rates.running("anna") == 0


async def test_memory_is_bounded_however_many_names_come() -> None:
    clock = FakeClock()
    buckets = Buckets(1.0, 2, clock, most=100)
    for index in range(1_000):
        assert buckets.take(f"peer {index}") == 0
    assert len(buckets) <= 100
    # The one that is over its limit is remembered, and those that have been quiet are forgotten for it.
    assert [buckets.take("loud") for _ in range(3)][:2] == [0, 0]
    await clock.advance(0.5)
    assert buckets.take("loud") == pytest.approx(0.5)


async def test_a_clock_that_is_set_back_gives_nothing_and_takes_nothing() -> None:
    clock = FakeClock()
    buckets = Buckets(1.0, 1, clock)
    assert buckets.take("anna") == 0
    await clock.advance(-100)
    assert buckets.take("anna") == pytest.approx(1.0)
    await clock.advance(1)
    assert buckets.take("anna") == 0
