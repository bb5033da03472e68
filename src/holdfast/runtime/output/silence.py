"""One timer for a job that may print nothing for some time; it reads the time of the last output when it is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class SilenceTimer:
    """Calls back once a job has printed nothing for so many seconds."""

    def __init__(self, seconds: float, last_output: Callable[[], float], on_silent: Callable[[], None]) -> None:
        """`last_output` returns the time of the last output by the loop's clock; from now on at the latest."""
        self._seconds = seconds
        self._last_output = last_output
        self._on_silent = on_silent
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(seconds, self._due)

    def _due(self) -> None:
        self._timer = None
        due = max(self._began, self._last_output()) + self._seconds
        if self._loop.time() >= due:
            self._on_silent()
        else:
            self._timer = self._loop.call_at(due, self._due)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
