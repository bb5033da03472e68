"""Looks at what sessions use: one sampler for all sessions of this replica, one call a sandbox and look.

The looking itself happens in the sandbox's server (`process/usage`). Here CPU percentages are made of differences,
limits are watched (`thresholds`), and what closed sessions left behind is found. What is to be done goes out
through `Outside`; nothing here knows of databases or connections.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import structlog
from msgspec.structs import replace

from holdfast.errors import HoldfastError
from holdfast.service.clock import Clock, Timer
from holdfast.service.monitor.thresholds import (
    EscalationStep,
    Measured,
    Standing,
    ThresholdFinding,
    ThresholdSettings,
    judge,
)
from holdfast.service.observability.metrics import Metrics
from holdfast.service.types import EventType, SessionRecord, Struct, Usage
from holdfast.types import ProcessUsage, UsageSample

log = structlog.stdlib.get_logger(__name__)

#: Less CPU use is not worth a word: a shell at its prompt wakes up now and then.
IDLE_PERCENT: Final = 1.0
ORPHANED: Final = "ORPHANED_PROCESSES"


class MonitorSettings(Struct, frozen=True):
    """Settings of the monitor. `ServiceSettings` has those that an operator may want to change."""

    #: Seconds between two looks. 500 confined sessions cost 0.1 s of CPU a look: 2 % of a core.
    interval: float = 5.0
    #: Looks that are remembered of each session: two minutes of them, some 6 KB.
    history: int = 24
    #: A sample that equals the one before is stored again after so many seconds, so that its time stays current.
    store_unchanged_seconds: float = 30.0
    #: A command that runs for so long is long-running: most builds and test runs are shorter.
    long_running_seconds: float = 300.0
    #: How often a closed session is looked at for processes that it left. Each look asks for it once more.
    orphan_looks: int = 3
    #: Closed sessions that are looked at; beyond them the oldest is let go.
    orphan_sessions: int = 1000
    thresholds: ThresholdSettings = ThresholdSettings()


class MonitorEvent(Struct, frozen=True):
    """Something that the owner of a session should know.

    With the reason `ORPHANED_PROCESSES` the session is over: the row belongs to the service's own stream.
    """

    session_id: str
    type: EventType
    reason: str
    detail: str
    at: float
    step: EscalationStep | None = None


class Outside(Protocol):
    """Who has the sandboxes and the sessions. Whatever goes wrong is a `HoldfastError`."""

    async def usage(self, sandbox: str, ids: Sequence[str]) -> UsageSample:
        """`process/usage` there; a session's id is that of its terminal or shell."""
        ...

    async def store_usages(self, usages: Mapping[str, Usage]) -> None:
        """Store samples by session id, for the replicas that do not watch these sessions."""
        ...

    async def report(self, event: MonitorEvent) -> None:
        """Write it down and tell who listens."""
        ...

    async def escalate(self, session_id: str, step: EscalationStep) -> None:
        """`terminate`: TERM to what is in the session's foreground. `close`: close it by force. `warn` was told."""
        ...


class Watched:
    """One session and what is remembered of it."""

    __slots__ = ("history", "output_bytes", "record", "sampled", "standing", "stored")

    def __init__(self, record: SessionRecord, history: int) -> None:
        self.record = record
        self.history: deque[Usage] = deque(maxlen=history)
        self.standing = Standing()
        #: The last look as it came.
        self.sampled: ProcessUsage | None = None
        #: The last sample that is in the store.
        self.stored: Usage | None = None
        #: All that it printed.
        self.output_bytes = 0

    def take(self, usage: ProcessUsage, now: float, long_running_seconds: float) -> Usage:
        """Remember a look."""
        before, last = self.sampled, self.history[-1] if self.history else None
        percent = 0.0
        if before is not None and last is not None and now > last.sampled_at:
            used = usage.cpu_seconds - before.cpu_seconds
            percent = max(0.0, 100.0 * used / (now - last.sampled_at))
        quiet = before is not None and usage.printed_bytes == before.printed_bytes and percent < IDLE_PERCENT
        taken = Usage(
            sampled_at=now,
            process_count=usage.process_count,
            cpu_percent=round(percent, 1),
            cpu_seconds=usage.cpu_seconds,
            memory_bytes=usage.memory_bytes,
            read_bytes=usage.read_bytes,
            written_bytes=usage.written_bytes,
            session_idle=usage.foreground is None and quiet,
            long_running=is_long_running(usage, long_running_seconds),
        )
        known = 0 if before is None else before.printed_bytes
        # A server that was started anew counts what a shell printed from zero.
        self.output_bytes += usage.printed_bytes - (known if usage.printed_bytes >= known else 0)
        self.sampled = usage
        self.history.append(taken)
        return taken


def is_long_running(usage: ProcessUsage, seconds: float) -> bool:
    """Whether a command has run for so long.

    In the foreground: since the shell said that it began, or since the oldest process of its group started; but not
    a program that waits for input, which waits for its user. In the background: the oldest process.
    """
    working = 0.0 if usage.awaiting_input else usage.foreground_seconds
    return max(working, usage.background_seconds) >= seconds


class ResourceMonitor:
    """Looks at every session that it is told to watch, every so many seconds."""

    def __init__(self, outside: Outside, clock: Clock, metrics: Metrics, settings: MonitorSettings) -> None:
        self._outside = outside
        self._clock = clock
        self._metrics = metrics
        self._settings = settings
        self._watched: dict[str, Watched] = {}
        #: Closed sessions, and how often each is still looked at.
        self._closed: OrderedDict[str, tuple[SessionRecord, int]] = OrderedDict()
        #: Orphans of each sandbox in the last look.
        self._orphans: dict[str, frozenset[int]] = {}
        self._looks: dict[str, asyncio.Task[None]] = {}
        #: Writes samples into the store: a transaction or two an interval, for all sessions together.
        self._storing: asyncio.Task[None] | None = None
        #: Sandboxes whose last look failed: it is logged once.
        self._failing: set[str] = set()
        self._timer: Timer | None = None

    # --- what is watched -------------------------------------------------------------------------------------

    def start(self) -> None:
        self._timer = self._clock.call_later(self._settings.interval, self._tick)

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tasks = [*self._looks.values(), *([self._storing] if self._storing is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def watch(self, record: SessionRecord) -> None:
        """This replica runs it; called again with a newer record it keeps what is remembered."""
        known = self._watched.get(record.session_id)
        if known is None:
            self._watched[record.session_id] = Watched(record, self._settings.history)
        else:
            known.record = record

    def forget(self, session_id: str) -> None:
        """Another replica runs it now."""
        self._watched.pop(session_id, None)

    def closed(self, session_id: str) -> None:
        """It is over: nothing of it should run any more."""
        watched = self._watched.pop(session_id, None)
        if watched is not None and not watched.record.policy.allow_background:
            self._closed[session_id] = (watched.record, self._settings.orphan_looks)
            if len(self._closed) > self._settings.orphan_sessions:
                self._closed.popitem(last=False)

    def latest(self, session_id: str) -> Usage | None:
        watched = self._watched.get(session_id)
        return watched.history[-1] if watched is not None and watched.history else None

    def history(self, session_id: str) -> tuple[Usage, ...]:
        """What is remembered, oldest first."""
        watched = self._watched.get(session_id)
        return () if watched is None else tuple(watched.history)

    # --- looking ---------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self._clock.call_later(self._settings.interval, self._tick)
        if self._looks:
            # One hangs: the samples of the other sandboxes are not held up by it.
            self._begin_storing()
        self._begin_looks()

    async def look(self) -> None:
        """Look at everything now, store what was found, and wait until that is done."""
        self._begin_looks()
        await asyncio.gather(*self._looks.values())
        await self._store_usages()

    def _begin_storing(self) -> None:
        if self._storing is None or self._storing.done():
            self._storing = asyncio.create_task(self._store_usages())

    async def _store_usages(self) -> None:
        due = {name: each.history[-1] for name, each in self._watched.items() if self._is_due(each)}
        if not due:
            return
        try:
            await self._outside.store_usages(due)
        except HoldfastError as error:
            log.warning("samples of usage could not be stored", sessions=len(due), error=str(error))
            return
        for name, usage in due.items():
            if name in self._watched:
                self._watched[name].stored = usage

    def _is_due(self, watched: Watched) -> bool:
        """Whether the store has another sample, or the same one for long."""
        if not watched.history or watched.stored is None:
            return bool(watched.history)
        last, stored = watched.history[-1], watched.stored
        if last.sampled_at - stored.sampled_at >= self._settings.store_unchanged_seconds:
            return True
        return replace(last, sampled_at=stored.sampled_at) != stored

    def _begin_looks(self) -> None:
        """One look a sandbox, side by side: one that does not answer keeps nobody else waiting."""
        by_sandbox: dict[str, list[str]] = {sandbox: [] for sandbox in self._orphans}
        for watched in self._watched.values():
            by_sandbox.setdefault(watched.record.sandbox, []).append(watched.record.session_id)
        for session_id, (record, _) in self._closed.items():
            by_sandbox.setdefault(record.sandbox, []).append(session_id)
        for sandbox, ids in by_sandbox.items():
            if sandbox in self._looks:
                self._metrics.monitor_skipped.inc()
                continue
            look = self._looks[sandbox] = asyncio.create_task(self._look_at(sandbox, ids))
            look.add_done_callback(partial(self._looked, sandbox))
        self._sum_up()

    def _looked(self, sandbox: str, look: asyncio.Task[None]) -> None:
        del self._looks[sandbox]
        if not look.cancelled() and (error := look.exception()) is not None:
            self._metrics.monitor_failures.inc()
            log.error("a look at sessions failed: this is a bug", sandbox=sandbox, exc_info=error)
        self._sum_up()
        if not self._looks and self._timer is not None:
            self._begin_storing()

    async def _look_at(self, sandbox: str, ids: Sequence[str]) -> None:
        began = time.perf_counter()
        try:
            sample = await self._outside.usage(sandbox, ids)
        except HoldfastError as error:
            self._metrics.monitor_failures.inc()
            if sandbox not in self._failing:
                self._failing.add(sandbox)
                log.warning("what sessions use is not known", sandbox=sandbox, sessions=len(ids), error=str(error))
            if not ids:
                # We asked for orphans alone, and their sandbox is gone.
                self._orphans.pop(sandbox, None)
                self._failing.discard(sandbox)
            return
        self._failing.discard(sandbox)
        now = self._clock.time()
        usages = {usage.process_id: usage for usage in sample.usages}
        watched = [self._watched[id] for id in ids if id in self._watched and id in usages]
        judged = ((each, *self._take(each, usages[each.record.session_id], now)) for each in watched)
        # A task for each that has something to be told alone: mostly there is none.
        await asyncio.gather(*(self._tell(*each, now) for each in judged if each[2]))
        await self._find_orphans(sandbox, usages, sample.strays, [id for id in ids if id in self._closed], now)
        self._metrics.monitor_pass_seconds.observe(time.perf_counter() - began)

    def _take(self, watched: Watched, usage: ProcessUsage, now: float) -> tuple[Standing, list[ThresholdFinding]]:
        """Remember a look, and what is to be said of it: where that is nothing, the standing counts at once."""
        settings, record, before = self._settings, watched.record, watched.sampled
        taken = watched.take(usage, now, settings.long_running_seconds)
        if before is not None or now - record.created_at <= 2 * settings.interval:
            # What a session used before we took it over was counted by the replica that had it.
            used = usage.cpu_seconds - (0.0 if before is None else before.cpu_seconds)
            self._metrics.session_cpu.inc(max(0.0, used))
        measured = Measured(taken.cpu_percent / 100.0, usage.memory_bytes, usage.thread_count, watched.output_bytes)
        standing, findings = judge(
            watched.standing, measured, record.policy.resources, record.enforced, settings.thresholds, now
        )
        if not findings:
            watched.standing = standing
        return standing, findings

    async def _tell(
        self, watched: Watched, standing: Standing, findings: list[ThresholdFinding], now: float
    ) -> None:
        record = watched.record
        try:
            for finding in findings:
                await self._act(record, finding, now)
        except HoldfastError as error:
            # The standing stays: the next look says and does it again.
            log.warning(
                "a limit was passed and nobody could be told", session_id=record.session_id, error=str(error)
            )
        else:
            watched.standing = standing

    async def _act(self, record: SessionRecord, finding: ThresholdFinding, now: float) -> None:
        event = MonitorEvent(record.session_id, finding.type, finding.reason, finding.detail, now, finding.step)
        await self._outside.report(event)
        if finding.step is None:
            self._metrics.resource_thresholds.labels(finding.resource).inc()
            return
        self._metrics.violated(finding.reason)
        self._metrics.escalations.labels(finding.step).inc()
        await self._outside.escalate(record.session_id, finding.step)

    # --- what closed sessions left ---------------------------------------------------------------------------

    async def _find_orphans(
        self,
        sandbox: str,
        usages: dict[str, ProcessUsage],
        strays: tuple[int, ...],
        closed: Sequence[str],
        now: float,
    ) -> None:
        found = set(strays)
        for session_id in closed:
            record, looks = self._closed[session_id]
            usage = usages.get(session_id)
            if usage is None or (looks <= 1 and not usage.process_count):
                del self._closed[session_id]
            elif not usage.process_count:
                self._closed[session_id] = (record, looks - 1)
            else:
                found.update(usage.pids)
                await self._report_orphans(record, usage, now)
        new = sorted(found - self._orphans.get(sandbox, frozenset()))
        if new:
            log.warning("processes run on though their session is closed", sandbox=sandbox, pids=new)
        if found:
            self._orphans[sandbox] = frozenset(found)
        else:
            self._orphans.pop(sandbox, None)

    async def _report_orphans(self, record: SessionRecord, usage: ProcessUsage, now: float) -> None:
        if self._orphans.get(record.sandbox, frozenset()).issuperset(usage.pids):
            return  # it was told of all of them
        pids = ", ".join(map(str, usage.pids[:20]))
        detail = f"{usage.process_count} processes of the closed session run on: {pids}"
        try:
            await self._outside.report(MonitorEvent(record.session_id, "POLICY_VIOLATION", ORPHANED, detail, now))
        except HoldfastError as error:
            log.warning("orphans could not be told", session_id=record.session_id, error=str(error))
        self._metrics.violated(ORPHANED)

    def _sum_up(self) -> None:
        """Of all sessions, for the metrics."""
        last = [watched.history[-1] for watched in self._watched.values() if watched.history]
        self._metrics.sessions_idle.set(sum(usage.session_idle for usage in last))
        self._metrics.sessions_long_running.set(sum(usage.long_running for usage in last))
        self._metrics.session_processes.set(sum(usage.process_count for usage in last))
        self._metrics.session_memory.set(sum(usage.memory_bytes for usage in last))
        self._metrics.orphaned_processes.set(sum(map(len, self._orphans.values())))
