"""The clock of the service as an interface, so that tests can advance it. Touches the system's clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol


class ClockTimer(Protocol):
    """A call that can be cancelled."""

    def cancel(self) -> None: ...


class WallClock(Protocol):
    """Seconds since 1970, which are valid in all replicas and after a restart, and delayed calls.

    `holdfast.testing.FakeClock` implements it.
    """

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> ClockTimer: ...


class SystemClock:
    """The wall clock at construction, and the time that has passed since.

    A step of the wall clock would end idle times, lifetimes, approvals and cached tokens at once, or prolong them.
    CLOCK_BOOTTIME measures the time: a step does not change it, and it counts while the machine is suspended.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)

    def time(self) -> float:
        return self._offset + time.clock_gettime(time.CLOCK_BOOTTIME)

    def stepped(self) -> float:
        """Return by how many seconds the wall clock was set forward (or, negative, back) since construction."""
        return time.time() - self.time()

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> ClockTimer:
        return asyncio.get_running_loop().call_later(delay, callback, *args)


async def sleep(clock: WallClock, seconds: float) -> None:
    """Wait by this clock."""
    over = asyncio.Event()
    timer = clock.call_later(max(0.0, seconds), over.set)
    try:
        await over.wait()
    finally:
        timer.cancel()
