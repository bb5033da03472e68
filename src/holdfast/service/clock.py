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
    """The machine's own."""

    def time(self) -> float:
        return time.time()

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
