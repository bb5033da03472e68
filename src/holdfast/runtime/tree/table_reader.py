"""Reads of the process table that concurrent callers share: a thousand kills read it once. Reads /proc."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Container
from typing import Final

from holdfast.errors import ResourceExhausted
from holdfast.runtime.tree.pid_handles import PidHandles
from holdfast.runtime.tree.process_table import Entry, ProcessTable, newest_pids, read_entry, read_mark

#: The attempts, and the newest pids in each, to stop a process that forks faster than the table is read: 20 ms.
HUNTS: Final = 40
HUNTED: Final = 16


class TableReader:
    """Reads the table, or hunts, once for all callers in the same turn of the loop."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[ProcessTable[Entry]]] = []
        self._seen: Container[int] = ()
        self._hunting: list[tuple[int, asyncio.Future[dict[int, Entry]]]] = []

    async def read(self) -> ProcessTable[Entry]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ProcessTable[Entry]] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._read)
        self._waiting.append(future)
        return await future

    def _read(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            table = ProcessTable.read(self._seen)
            self._seen = table.entries.keys()
        except Exception as error:  # noqa: BLE001 - a caller without an answer would wait for ever
            for future in waiting:
                if not future.done():
                    future.set_exception(_reason(error))
            return
        for future in waiting:
            if not future.done():
                future.set_result(table)

    async def hunt(self, mark: int) -> dict[int, Entry]:
        """Stop a process with `mark` that forks its successor and exits before the table is read; return it.

        The whole table takes longer to read than such a process lives, so this reads the newest few pids,
        repeatedly.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[dict[int, Entry]] = loop.create_future()
        if not self._hunting:
            loop.call_soon(self._hunt)
        self._hunting.append((mark, future))
        return await future

    def _hunt(self) -> None:
        hunting, self._hunting = self._hunting, []
        try:
            found = _stop_newest({mark for mark, _ in hunting})
        except Exception as error:  # noqa: BLE001 - a caller without an answer would wait for ever
            for _, future in hunting:
                if not future.done():
                    future.set_exception(_reason(error))
            return
        for mark, future in hunting:
            if not future.done():
                future.set_result(found.get(mark, {}))


def _stop_newest(marks: set[int]) -> dict[int, dict[int, Entry]]:
    """Stop one process of each of these marks, if it is among the newest; return it by its mark."""
    found: dict[int, dict[int, Entry]] = {}
    for _ in range(HUNTS):
        for pid in newest_pids()[:HUNTED]:
            mark = read_mark(pid)
            if mark is None or mark not in marks or mark in found:
                continue
            if (entry := read_entry(pid)) is None or entry.dead:
                continue
            with PidHandles((entry,)) as handles:
                handles.send(signal.SIGSTOP)
            found[mark] = {pid: entry}
        if len(found) == len(marks):
            break
    return found


def _reason(error: Exception) -> Exception:
    return ResourceExhausted(f"/proc cannot be read: {error.strerror}") if isinstance(error, OSError) else error
