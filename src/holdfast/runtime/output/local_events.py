"""The events of a process, or of a command in a shell, for a reader in this program. Pure memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast.runtime.output.job import Job
from holdfast.runtime.output.reader import Reader
from holdfast.types import Closed, CommandEvent, OutputChunk, OutputGap, ProcessEvent

if TYPE_CHECKING:
    from holdfast.runtime.shell.command import ShellCommand
    from holdfast.runtime.shell.registry import Shells


class LocalEvents:
    """An in-process reader: waits on the process, reads from its log, ends after `Closed`."""

    def __init__(self, process: Job, after_seq: int) -> None:
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._reader: Reader | None = None
        self._reader = Reader(process, after_seq, self._news.set)

    def __aiter__(self) -> LocalEvents:
        return self

    async def __anext__(self) -> ProcessEvent:
        while self._reader is not None:
            self._news.clear()
            event = self._reader.next_event()
            if event is None:
                if self._reader.at_end:
                    break
                await self._news.wait()
                continue
            if isinstance(event, Closed):
                await self.aclose()
            return event
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
            self._news.set()

    def __del__(self) -> None:
        # Abandoned in the middle of an `async for`: a blocking process must not wait for it. The garbage collector
        # may run in any thread.
        if self._reader is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._reader.close)


class LocalCommand:
    """The events of a command in a shell, read in process."""

    def __init__(self, shells: Shells, command: ShellCommand) -> None:
        self._shells = shells
        self._command = command
        self._events = LocalEvents(command, 0)
        self._over = False

    def __aiter__(self) -> LocalCommand:
        return self

    async def __anext__(self) -> CommandEvent:
        if self._over:
            raise StopAsyncIteration
        # A command that is removed from the queue has no exit event.
        event = None if self._command.error is not None else await self._next_event()
        if isinstance(event, OutputChunk | OutputGap):
            return event
        self._over = True
        await self._events.aclose()
        return await self._command.wait_ended()

    async def _next_event(self) -> ProcessEvent | None:
        return await anext(self._events, None)

    async def aclose(self) -> None:
        if not self._over:
            self._over = True
            self._shells.withdraw(self._command.process_id)
        await self._events.aclose()
