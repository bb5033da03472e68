"""Reaps processes that became our children because their parent died: as subreaper we must, or they stay zombies.

Touches waitid of children that are no leaders of ours; leaders are reaped where their exit is told.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Container
from typing import Final

#: A zombie costs nothing for so long, and by then the leaders among the ended are out of the way.
GATHER_SECONDS: Final = 0.5


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
        while True:
            try:
                # Look first and take then: the status of a leader is not ours to take.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in leaders:
                # The kernel shows the first one only, and this one waits for its last output to be read.
                self.child_ended()
                return
            os.waitpid(ended.si_pid, 0)
