"""Retention of ended processes and of output: by number and age of processes, and by the room on the spool.

Touches the spool through the logs of processes and shells.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from holdfast.config import ExecServerConfig
from holdfast.runtime.output.job import Job
from holdfast.runtime.output.output_log import Spool
from holdfast.runtime.process.process import ManagedProcess


class ProcessRetention:
    """The ended processes in the order of their end. `jobs` returns all jobs with output."""

    def __init__(
        self,
        config: ExecServerConfig,
        spool: Spool,
        *,
        jobs: Callable[[], Iterable[Job]],
        forget: Callable[[ManagedProcess], None],
    ) -> None:
        self._config = config
        self._spool = spool
        self._jobs = jobs
        self._forget = forget
        self._ended: dict[str, ManagedProcess] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        spool.make_room = self.discard_oldest
        self.spool_limit = self._measure_room()

    def keep(self, process: ManagedProcess) -> None:
        """Keep an ended process for a while, for callers that read its result later."""
        self._ended[process.spec.process_id] = process
        while len(self._ended) > self._config.max_exited_processes:
            self._drop(next(iter(self._ended.values())))
        if self._timer is None and not self._closed:
            self._schedule(self._config.exited_retention_seconds)

    def _schedule(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._drop_old)

    def _drop_old(self) -> None:
        self._timer = None
        now = time.monotonic()
        for process in list(self._ended.values()):
            assert process.closed_at is not None
            left = process.closed_at + self._config.exited_retention_seconds - now
            if left > 0:
                self._schedule(left)
                return
            self._drop(process)

    def _drop(self, process: ManagedProcess) -> None:
        self.discard(process)
        self._forget(process)

    def discard(self, process: ManagedProcess) -> None:
        """Stop keeping a process."""
        self._ended.pop(process.spec.process_id, None)

    def spool_grew(self) -> None:
        """Keep the spool in its limit: discard output of ended processes, oldest first, or cut the largest log."""
        if self._spool.used <= self.spool_limit:
            return
        # Other files may have filled the file system at the last measurement.
        limit = self.spool_limit = self._measure_room()
        for process in self._ended.values():
            if self._spool.used <= limit:
                return
            process.give_up_output()
        if self._spool.used > limit:
            logs = ((job, kind) for job in self._jobs() for kind in job.logs)
            job, kind = max(logs, key=lambda each: each[0].logs[each[1]].kept_bytes)
            job.keep_less(kind)

    def discard_oldest(self) -> bool:
        """Discard the output of the oldest ended process that has some: room or descriptors are exhausted."""
        for process in self._ended.values():
            if any(log.fd >= 0 for log in process.logs.values()):
                process.give_up_output()
                return True
        return False

    def _measure_room(self) -> int:
        """The limit of the spool: half of the room on its file system, at most the configured total."""
        return min(self._config.retained_output_bytes_total, (self._spool.used + self._spool.free) // 2)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._ended.clear()
