"""Reaps processes that became our children because their parent died: as subreaper we must, or they stay zombies.

Touches waitid of children that are no leaders of ours; leaders are reaped where their exit is told.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Container
from typing import Final

from holdfast.runtime.libc import become_subreaper, child_signals
from holdfast.runtime.output.poller import Poller

#: A zombie costs nothing for so long, and by then the leaders among the ended are out of the way.
GATHER_SECONDS: Final = 0.5
#: One signal as signalfd(2) tells it. Signals of one kind that wait are one.
SIGNALFD_SIGINFO_BYTES: Final = 128


class OrphanReaper:
    """Makes us the parent of orphans among our descendants, and reaps them as they end."""

    def __init__(self, leaders: Callable[[], Container[int]], poller: Poller) -> None:
        become_subreaper()
        self._leaders = leaders
        self._poller = poller
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._signals = child_signals()
        try:
            poller.watch(self._signals, self._child_ended)
        except OSError:
            os.close(self._signals)
            raise

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._poller.unwatch(self._signals)
        os.close(self._signals)

    def _child_ended(self) -> None:
        os.read(self._signals, SIGNALFD_SIGINFO_BYTES)
        self._reap_soon()

    def _reap_soon(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(GATHER_SECONDS, self.reap)

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
                self._reap_soon()
                return
            os.waitpid(ended.si_pid, 0)
