"""A clock that a test moves by hand, for code that takes a `Clock`. Touches nothing."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Any


class FakeTimer:
    """The handle that `FakeClock.call_later` returns."""

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.callback = callback
        self.args = args
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeClock:
    """A clock that stands still until `advance`."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._order = itertools.count()
        self._timers: list[tuple[float, int, FakeTimer]] = []

    def time(self) -> float:
        return self._now

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> FakeTimer:
        timer = FakeTimer(callback, args)
        heapq.heappush(self._timers, (self._now + delay, next(self._order), timer))
        return timer

    @property
    def pending(self) -> tuple[float, ...]:
        """Seconds until each pending timer is due, soonest first."""
        return tuple(sorted(due - self._now for due, _, timer in self._timers if not timer.cancelled))

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back; the remaining time of every timer stays the same."""
        self._now += seconds
        self._timers = [(due + seconds, order, timer) for due, order, timer in self._timers]

    async def advance(self, seconds: float) -> None:
        """Let time pass: each due timer runs at its own time, and its consequences run to their end."""
        end = self._now + seconds
        await settle()
        while self._timers and self._timers[0][0] <= end:
            due, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                self._now = max(self._now, due)
                timer.callback(*timer.args)
                await settle()
        self._now = end


async def settle(turns: int = 20) -> None:
    """Let the event loop run all ready callbacks. In-memory conversations need no more than a few turns a step."""
    for _ in range(turns):
        await asyncio.sleep(0)
