"""A bounded number of things on their way at a time, and groups of them that end together; pure asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


class InFlight:
    """So many places. Several groups may share them."""

    def __init__(self, places: int) -> None:
        self.places = asyncio.Semaphore(places)

    @asynccontextmanager
    async def group(self) -> AsyncIterator[Group]:
        """Everything that was started in it has ended when it is left; if something failed, by its error."""
        group = Group(self)
        try:
            yield group
            await group.finish()
        finally:
            await group.cancel()


class Group:
    """What was started together. The first error ends all of it."""

    def __init__(self, flight: InFlight) -> None:
        self._flight = flight
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    async def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for a place and start; raises what an earlier one failed with."""
        try:
            await self._flight.places.acquire()
        except BaseException:
            work.close()
            raise
        if self._error is not None:
            self._flight.places.release()
            work.close()
            raise self._error
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._flight.places.release()
        if not task.cancelled() and task.exception() is not None and self._error is None:
            self._error = task.exception()

    async def finish(self) -> None:
        while self._tasks and self._error is None:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        if self._error is not None:
            raise self._error

    async def cancel(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
