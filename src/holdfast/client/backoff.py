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
#: Channels that made progress and broke reset the waits this often at once, then once in as many seconds: a network
#: that flaps costs no waiting, and a server that answers a little and closes costs a few dials a second.
RESETS: Final = 100
SECONDS_A_RESET: Final = 0.5
#: Without a reset the next wait is that of this attempt, 0.8 s to 1.6 s.
ATTEMPT_WITHOUT_RESET: Final = 6


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """Time, as much of it as a connection needs. An event loop is one; `holdfast.testing.FakeClock` is another."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> Timer: ...


class Backoff:
    """Attempts since the last channel that was of use.

    A channel that made no progress beyond the handshake counts as a failed attempt: without that, a server that
    accepts and closes, or sends what cannot be decoded, would be dialled in a loop that never waits and never ends.
    """

    def __init__(self, clock: Clock, rng: random.Random, deadline: float) -> None:
        self._clock = clock
        self._random = rng
        self.deadline = deadline
        self._attempts = 0
        self._down_since: float | None = None
        self._resets = float(RESETS)
        self._reset_at = clock.time()

    def broke(self, *, opened_at: float, progressed: bool) -> None:
        """A channel that was open since `opened_at` is gone. Progress: an answered call, an event for a reader."""
        now = self._clock.time()
        if not (progressed or now - opened_at >= STEADY_SECONDS or self._down_since is None):
            return
        self._down_since = now
        self._resets = min(RESETS, self._resets + (now - self._reset_at) / SECONDS_A_RESET)
        self._reset_at = now
        if self._resets >= 1:
            self._resets -= 1
            self._attempts = 0
        else:
            self._attempts = max(self._attempts, ATTEMPT_WITHOUT_RESET)

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
