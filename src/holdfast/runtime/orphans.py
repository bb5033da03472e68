"""Reaps processes that became our children because their parent died: as subreaper we must, or they stay zombies.

Touches waitpid of children that are no leaders of ours; leaders are reaped where their exit is told.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

from holdfast.runtime.process_tree import read_table

#: A zombie costs nothing for so long; a burst of them is reaped together, since finding them reads /proc.
GATHER_SECONDS: Final = 1.0


class OrphanReaper:
    """Call `child_ended` on SIGCHLD."""

    def __init__(self, leaders: Callable[[], frozenset[int]]) -> None:
        self._leaders = leaders
        self._timer: asyncio.TimerHandle | None = None

    def child_ended(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_SECONDS, self.reap)

    def reap(self) -> None:
        """Take every ended child that is not a leader."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        us = os.getpid()
        leaders = self._leaders()
        for entry in read_table().values():
            if entry.dead and entry.parent == us and entry.pid not in leaders:
                try:
                    os.waitpid(entry.pid, os.WNOHANG)
                except ChildProcessError:
                    continue
