"""Reaps processes that became our children because their parent died: as subreaper we must, or they stay zombies.

Touches waitpid of children that are no leaders of ours; leaders are reaped where their exit is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Container
from typing import Final

from holdfast.runtime.process_table import ProcessTable

#: A zombie costs nothing for so long; a burst of them is reaped together, since finding them reads /proc.
GATHER_SECONDS: Final = 1.0


class OrphanReaper:
    """Call `child_ended` on SIGCHLD."""

    def __init__(self, leaders: Callable[[], Container[int]]) -> None:
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
        leaders = self._leaders()
        table = ProcessTable.read()
        for pid in table.children.get(os.getpid(), ()):
            if table.entries[pid].dead and pid not in leaders:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
