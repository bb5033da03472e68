"""Reaps orphans that became children of the server, the child subreaper: without it they would stay zombies.

Calls waitid for children that are not leaders; the process object reaps its leader when it records the exit.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Container
from typing import Final

from holdfast.runtime.libc import become_subreaper, child_signals
from holdfast.runtime.output.poller import Poller

#: A delay in which a zombie costs little, and after which ended leaders are mostly reaped.
GATHER_SECONDS: Final = 0.5
#: The size of one signal from signalfd(2). Pending signals of one kind are merged.
SIGNALFD_SIGINFO_BYTES: Final = 128


class OrphanReaper:
    """Makes the server the subreaper of its descendants, and reaps the orphans as they end."""

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
        """Reap every ended child that is not a leader."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        leaders = self._leaders()
        while True:
            try:
                # WNOWAIT first: the status of a leader must not be consumed here.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in leaders:
                # waitid returns the first zombie only, and this leader waits until its last output is stored.
                self._reap_soon()
                return
            os.waitpid(ended.si_pid, 0)
