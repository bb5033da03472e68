"""Wake-up: the processes of a sandbox as they end, whichever client started them.

`Endings` reads the server's list of ends by long polls, so that it costs a call for each end and none in between,
and continues after a reconnect where it was. All calls go through `ExecApi`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from holdfast.client.process import Process
from holdfast.exec_api import ExecApi
from holdfast.types import EndedProcesses

#: How long one call waits; the next follows at once. Below the time after which proxies cut silent connections.
WAIT_SECONDS: Final = 30.0

Spawn = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]


class Endings:
    """The processes that end from now on, in order, as an async iterator that does not end by itself."""

    def __init__(self, api: ExecApi, spawn: Spawn) -> None:
        self._api = api
        self._ready: deque[Process] = deque()
        self._last_exit = 0.0
        # At once: a process that ends before the first step counts as well.
        self._beginning: asyncio.Task[EndedProcesses] = spawn(api.ended())
        self._next: int | None = None

    def __aiter__(self) -> Endings:
        return self

    async def __anext__(self) -> Process:
        while not self._ready:
            await self._read()
        return self._ready.popleft()

    async def _read(self) -> None:
        if self._next is None:
            self._next = (await asyncio.shield(self._beginning)).next
        found = await self._api.ended(after=self._next, wait=WAIT_SECONDS)
        self._next = found.next
        infos = [each.info for each in found.ended]
        if found.missed:
            # More ended than the server remembers, or it was started again: its list has those that it retains.
            known = {info.process_id for info in infos}
            for info in await self._api.list():
                if (info.exited_at or 0.0) > self._last_exit and info.process_id not in known:
                    infos.append(info)
            infos.sort(key=lambda info: info.exited_at or 0.0)
        for info in infos:
            self._last_exit = max(self._last_exit, info.exited_at or 0.0)
            self._ready.append(Process(self._api, info))

    async def aclose(self) -> None:
        """Stop reading."""
        self._beginning.cancel()
