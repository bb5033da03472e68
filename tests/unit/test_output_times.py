"""The times of output: by offset, bounded, and never further off than twice the resolution."""

from __future__ import annotations

from holdfast.runtime.output.output_times import FIRST_RESOLUTION, MAX_TIMES, OutputTimes


def test_output_has_the_time_of_its_first_byte() -> None:
    times = OutputTimes()
    assert times.between(0, 0, 10) == []
    times.add(100.0, 0, 0)
    times.add(100.0 + FIRST_RESOLUTION / 2, 5, 0)  # too soon for a time of its own
    times.add(101.0, 10, 0)
    times.add(102.0, 10, 4)
    times.add(90.0, 20, 4)  # the clock was set back
    times.add(103.0, 20, 4)
    assert times.between(0, 0, 30) == [(0, 100.0), (10, 102.0), (20, 103.0)]
    assert times.between(0, 7, 10) == [(7, 100.0)]
    assert times.between(0, 25, 30) == [(25, 103.0)]
    assert times.between(1, 0, 9) == [(0, 101.0), (4, 103.0)]


def test_long_output_has_coarser_times() -> None:
    times = OutputTimes()
    count = 3 * MAX_TIMES
    for number in range(count):
        times.add(number * 0.2, number, 0)
    found = times.between(0, 0, count)
    assert len(found) <= MAX_TIMES
    assert times.resolution <= 2 * 0.2 * count / (MAX_TIMES / 2)
    for (offset, at), (after, _) in zip(found, [*found[1:], (count, 0.0)], strict=True):
        assert 0 <= (after - 1) * 0.2 - at < 2 * times.resolution
        assert at == offset * 0.2


def test_a_pause_is_not_lost_when_times_are_dropped() -> None:
    times = OutputTimes()
    for number in range(MAX_TIMES):
        times.add(number * 0.2, number, 0)
    times.add(1_000_000.0, MAX_TIMES, 0)
    assert times.between(0, MAX_TIMES, MAX_TIMES + 1) == [(MAX_TIMES, 1_000_000.0)]
