"""A bounded number of concurrent tasks, and groups of them that end together; pure asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


class InFlight:
    """A number of slots for tasks, which several groups may share."""

    def __init__(self, slots: int) -> None:
        self.slots = asyncio.Semaphore(slots)

    @asynccontextmanager
    async def group(self) -> AsyncIterator[TransferGroup]:
        """A group for the length of a block; at its end all tasks have ended, and the first error is raised."""
        group = TransferGroup(self)
        try:
            yield group
            await group.finish()
        finally:
            await group.cancel()


class TransferGroup:
    """Tasks that end together. The first error cancels the others."""

    def __init__(self, flight: InFlight) -> None:
        self._flight = flight
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    async def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for a slot and start a task; raises the error of an earlier one."""
        try:
            await self._flight.slots.acquire()
        except BaseException:
            work.close()
            raise
        if self._error is not None:
            self._flight.slots.release()
            work.close()
            raise self._error
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._flight.slots.release()
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
