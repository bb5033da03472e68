"""Rate and concurrency limits of agents: token buckets and counters in memory; pure.

Each replica counts separately: with N replicas an agent gets at most N times the limit, and no call has to write a
row. The limits of sessions are in the store and exact.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from holdfast.service.clock import WallClock
from holdfast.service.problems import Exhausted
from holdfast.service.settings import ServiceSettings

#: Agents (or peers) with a bucket. Full buckets are dropped first: they limit nothing.
MOST_KEPT: Final = 10_000


class TokenBucket:
    """`burst` at once, `per_second` in the long run."""

    def __init__(self, per_second: float, burst: int, now: float) -> None:
        self._per_second = per_second
        self._burst = float(max(1, burst))
        self._tokens = self._burst
        self._at = now

    def take(self, now: float) -> float:
        """Take a token and return 0, or return the seconds until there is one."""
        self._refill(now)
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / self._per_second

    def full(self, now: float) -> bool:
        self._refill(now)
        return self._tokens >= self._burst

    def _refill(self, now: float) -> None:
        # A clock that was set back refills nothing and takes nothing away.
        if now > self._at:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_second)
        self._at = now


class Buckets:
    """A bucket for each name, bounded in number."""

    def __init__(self, per_second: float, burst: int, clock: WallClock, *, most: int = MOST_KEPT) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._most = most
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, name: str) -> float:
        """Take a token of `name` and return 0, or return the seconds until there is one."""
        if self._per_second <= 0:
            return 0.0
        now = self._clock.time()
        bucket = self._buckets.get(name)
        if bucket is None:
            self._make_room(now)
            bucket = self._buckets[name] = TokenBucket(self._per_second, self._burst, now)
        self._buckets.move_to_end(name)
        return bucket.take(now)

    def _make_room(self, now: float) -> None:
        if len(self._buckets) < self._most:
            return
        for name in [name for name, bucket in self._buckets.items() if bucket.full(now)]:
            del self._buckets[name]
        while len(self._buckets) >= self._most:
            self._buckets.popitem(last=False)


class Rates:
    """The limits that every call of an agent passes first."""

    def __init__(self, settings: ServiceSettings, clock: WallClock) -> None:
        self._settings = settings
        self._calls = Buckets(settings.calls_per_second, settings.calls_burst, clock)
        self._creates = Buckets(settings.creates_per_second, settings.creates_burst, clock)
        self._running: dict[tuple[str, bool], int] = {}

    def begin(self, agent_id: str, *, stream: bool = False) -> None:
        """Count one more call, or raise `Exhausted` with the time until a retry."""
        settings = self._settings
        key = (agent_id, stream)
        most, name = (
            (settings.concurrent_streams, "concurrent_streams")
            if stream
            else (settings.concurrent_calls, "concurrent_calls")
        )
        if most and self._running.get(key, 0) >= most:
            raise Exhausted(
                f"{agent_id} has {most} {'streams' if stream else 'calls'} open, as many as {name} allows",
                reason="CONCURRENCY_LIMIT",
                retry_after=1.0,
                limit=name,
                value=most,
            )
        if wait := self._calls.take(agent_id):
            raise _too_often(agent_id, "calls", settings.calls_per_second, wait)
        self._running[key] = self._running.get(key, 0) + 1

    def end(self, agent_id: str, *, stream: bool = False) -> None:
        """Count one call less; called once for each `begin`."""
        key = (agent_id, stream)
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]

    def create(self, agent_id: str) -> None:
        """Count the creation of a session, or raise `Exhausted`."""
        if wait := self._creates.take(agent_id):
            raise _too_often(agent_id, "creates", self._settings.creates_per_second, wait)

    def running(self, agent_id: str, *, stream: bool = False) -> int:
        """Return the number of open calls, or streams, of an agent."""
        return self._running.get((agent_id, stream), 0)


def _too_often(agent_id: str, what: str, per_second: float, wait: float) -> Exhausted:
    return Exhausted(
        f"{agent_id} exceeds {what}_per_second = {per_second:g}",
        reason="RATE_LIMIT",
        retry_after=wait,
        limit=f"{what}_per_second",
        value=f"{per_second:g}",
    )
