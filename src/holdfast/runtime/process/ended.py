"""The latest processes that ended, in order, for clients that are notified when a background process ends.

Numbers grow from server to server, so that a client that reads after a number of an earlier one misses nothing
unnoticed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final

from holdfast.types import EndedProcess, EndedProcesses, ProcessInfo

#: Ends that are remembered. A client that reads as they come is behind by a few; `missed` reports the others.
KEPT_ENDS: Final = 1_024
#: For one reply: 256 descriptions with long command lines fit in a message.
MAX_REPORTED: Final = 256


class EndedLog:
    """The ends of processes, numbered."""

    def __init__(self) -> None:
        # Larger than every number of an earlier server, which adds less than one for each microsecond.
        self._next = int(time.time() * 1_000_000)
        self._ended: deque[EndedProcess] = deque(maxlen=KEPT_ENDS)
        self._waiters: set[asyncio.Event] = set()

    def add(self, info: ProcessInfo) -> None:
        self._ended.append(EndedProcess(self._next, info))
        self._next += 1
        for event in self._waiters:
            event.set()

    async def read(self, after: int | None, wait: float) -> EndedProcesses:
        """The ends with a number from `after` on, waiting up to `wait` seconds for the first; None: from now on."""
        if after is None:
            return EndedProcesses((), self._next)
        if wait > 0 and after >= self._next:
            await self._wait(wait)
        first = self._ended[0].number if self._ended else self._next
        found = [each for each in self._ended if each.number >= after][:MAX_REPORTED]
        reached = found[-1].number + 1 if found else max(after, self._next)
        return EndedProcesses(tuple(found), reached, missed=after < first)

    async def _wait(self, seconds: float) -> None:
        event = asyncio.Event()
        self._waiters.add(event)
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            pass
        finally:
            self._waiters.discard(event)
