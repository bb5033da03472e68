"""Time as the service sees it: one interface, so that a test moves it by hand. Touches the system's clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol


class Timer(Protocol):
    """What can be called off."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Seconds since 1970, which replicas share and which survive a restart, and calls at a later time.

    `holdfast.testing.FakeClock` is one.
    """

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> Timer: ...


class SystemClock:
    """The machine's wall clock as it was when this object was made, and what has passed since.

    A step of the wall clock would end idle times, lifetimes, approvals and remembered tokens at once, or prolong
    them. Time passes by CLOCK_BOOTTIME: no step changes it, and it counts while the machine is suspended.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)

    def time(self) -> float:
        return self._offset + time.clock_gettime(time.CLOCK_BOOTTIME)

    def stepped(self) -> float:
        """How many seconds the wall clock was set forward (or, negative, back) since."""
        return time.time() - self.time()

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> Timer:
        return asyncio.get_running_loop().call_later(delay, callback, *args)


async def sleep(clock: Clock, seconds: float) -> None:
    """Wait by this clock."""
    over = asyncio.Event()
    timer = clock.call_later(max(0.0, seconds), over.set)
    try:
        await over.wait()
    finally:
        timer.cancel()
