"""When to dial again, and when to give up. Pure apart from the clock and the random numbers it is given."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final, Protocol

#: Waits between attempts double from the first to the last of these.
FIRST_SECONDS: Final = 0.05
LAST_SECONDS: Final = 5.0
#: A channel that held this long was a good one, even if nothing came over it.
STEADY_SECONDS: Final = 5.0


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """Time, as much of it as a connection needs. An event loop is one; `holdfast.testing.FakeClock` is another."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> Timer: ...


class Backoff:
    """Attempts since the last channel that was of use.

    A channel over which nothing came counts as a failed attempt: a server that takes connections and drops them, or
    a request that kills it, must not be met with a loop that never waits and never ends.
    """

    def __init__(self, clock: Clock, rng: random.Random, deadline: float) -> None:
        self._clock = clock
        self._random = rng
        self.deadline = deadline
        self._attempts = 0
        self._down_since: float | None = None

    def broke(self, *, opened_at: float, received: int) -> None:
        """A channel that was open since `opened_at`, and brought `received` messages, is gone."""
        now = self._clock.time()
        if received or now - opened_at >= STEADY_SECONDS or self._down_since is None:
            self._attempts = 0
            self._down_since = now

    def next_wait(self) -> float | None:
        """How long to wait before the next attempt; None when it would come after the deadline.

        Nothing before the first, then doubling; in part by chance, so that many clients of one server spread out.
        """
        wait = 0.0
        if self._attempts:
            longest = min(LAST_SECONDS, FIRST_SECONDS * 2.0 ** min(self._attempts - 1, 16))
            wait = longest * (0.5 + self._random.random() / 2)
        self._attempts += 1
        if self._down_since is None or self.deadline <= 0:
            return None
        return wait if self._clock.time() + wait <= self._down_since + self.deadline else None
