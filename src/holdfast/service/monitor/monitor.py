"""Samples the resource usage of sessions: one sampler for all sessions of this replica, one call per sandbox.

The sandbox's server does the sampling (`process/usage`). This module computes CPU percentages from differences,
checks limits (`thresholds`), and finds processes that closed sessions left behind. Actions go through
`MonitorBackend`; this module uses no database and no connection.
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
from holdfast.service.clock import ClockTimer, WallClock
from holdfast.service.monitor.thresholds import Alert, Escalation, LimitState, Measured, ThresholdSettings, judge
from holdfast.service.observability.metrics import Metrics
from holdfast.service.types import EventType, ResourceUsage, ServiceStruct, SessionRecord
from holdfast.service.view_api import UsageTotal
from holdfast.types import ProcessUsage, UsageSample

log = structlog.stdlib.get_logger(__name__)

#: Lower CPU use counts as idle: a shell at its prompt wakes up now and then.
IDLE_PERCENT: Final = 1.0
ORPHANED: Final = "ORPHANED_PROCESSES"
_MINUTE: Final = 60.0


class MonitorSettings(ServiceStruct, frozen=True):
    """Settings of the monitor. `ServiceSettings` has those that an operator may want to change."""

    #: Seconds between two samples. 500 confined sessions cost 0.1 s of CPU per sample: 2 % of a core.
    interval: float = 5.0
    #: Samples held for each session: two minutes, some 6 KB.
    history: int = 24
    #: Beside them one sample a minute, for an hour, some 15 KB; and as many sums of all sessions as an hour has.
    minutes: int = 60
    #: Seconds after which an unchanged sample is stored again, so that its time stays current.
    store_unchanged_seconds: float = 30.0
    #: Seconds after which a command counts as long-running: most builds and test runs are shorter.
    long_running_seconds: float = 300.0
    #: Samples of a closed session to find processes that it left.
    orphan_samples: int = 3
    #: Closed sessions that are sampled; beyond them the oldest is dropped.
    orphan_sessions: int = 1000
    thresholds: ThresholdSettings = ThresholdSettings()


class MonitorEvent(ServiceStruct, frozen=True):
    """An event for the owner of a session.

    With the reason `ORPHANED_PROCESSES` the session is over: the row belongs to the service's own stream.
    """

    session_id: str
    type: EventType
    reason: str
    detail: str
    at: float
    step: Escalation | None = None


class MonitorBackend(Protocol):
    """The monitor's access to sandboxes and sessions. Failures are `HoldfastError`."""

    async def usage(self, sandbox: str, ids: Sequence[str]) -> UsageSample:
        """Return `process/usage` of the sandbox; a session's id is that of its terminal or shell."""
        ...

    async def store_usages(self, usages: Mapping[str, ResourceUsage]) -> None:
        """Store samples by session id, for the replicas that do not watch these sessions."""
        ...

    async def report(self, event: MonitorEvent) -> None:
        """Record the event and notify subscribers."""
        ...

    async def escalate(self, session_id: str, step: Escalation) -> None:
        """`terminate` sends TERM to the foreground, `close` closes the session by force; `warn` does nothing."""
        ...


class Watched:
    """One session and its recent samples."""

    __slots__ = ("history", "minutes", "output_bytes", "record", "sampled", "state", "stored")

    def __init__(self, record: SessionRecord, history: int, minutes: int) -> None:
        self.record = record
        self.history: deque[ResourceUsage] = deque(maxlen=history)
        self.minutes: deque[ResourceUsage] = deque(maxlen=minutes)
        self.state = LimitState()
        #: The last sample as received.
        self.sampled: ProcessUsage | None = None
        #: The last sample that is in the store.
        self.stored: ResourceUsage | None = None
        #: Total output.
        self.output_bytes = 0

    def take(self, usage: ProcessUsage, now: float, long_running_seconds: float) -> ResourceUsage:
        """Add a sample."""
        before, last = self.sampled, self.history[-1] if self.history else None
        percent = 0.0
        if before is not None and last is not None and now > last.sampled_at:
            used = usage.cpu_seconds - before.cpu_seconds
            percent = max(0.0, 100.0 * used / (now - last.sampled_at))
        quiet = before is not None and usage.printed_bytes == before.printed_bytes and percent < IDLE_PERCENT
        taken = ResourceUsage(
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
        # A restarted server counts a shell's output from zero.
        self.output_bytes += usage.printed_bytes - (known if usage.printed_bytes >= known else 0)
        taken = replace(taken, output_bytes=self.output_bytes)
        self.sampled = usage
        self.history.append(taken)
        if not self.minutes or now - self.minutes[-1].sampled_at >= _MINUTE:
            self.minutes.append(taken)
        return taken


def is_long_running(usage: ProcessUsage, seconds: float) -> bool:
    """True if a command has run for `long_running_seconds`.

    In the foreground: since the shell reported its start, or since the oldest process of its group started, but not
    a program that waits for input. In the background: the oldest process.
    """
    working = 0.0 if usage.awaiting_input else usage.foreground_seconds
    return max(working, usage.background_seconds) >= seconds


class ResourceMonitor:
    """Samples every watched session periodically."""

    def __init__(
        self, backend: MonitorBackend, clock: WallClock, metrics: Metrics, settings: MonitorSettings
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._metrics = metrics
        self._settings = settings
        self._watched: dict[str, Watched] = {}
        #: Closed sessions, and how often each will still be sampled.
        self._closed: OrderedDict[str, tuple[SessionRecord, int]] = OrderedDict()
        #: Orphaned processes of each sandbox in the last sample.
        self._orphans: dict[str, frozenset[int]] = {}
        self._sampling: dict[str, asyncio.Task[None]] = {}
        self._totals: deque[UsageTotal] = deque(maxlen=int(_MINUTE * settings.minutes / settings.interval) or 1)
        #: Stores samples: a transaction or two in each interval, for all sessions together.
        self._storing: asyncio.Task[None] | None = None
        #: Sandboxes with a failed last sample, which is logged once.
        self._failing: set[str] = set()
        self._timer: ClockTimer | None = None

    # --- watched sessions -----------------------------------------------------------------------------------

    def start(self) -> None:
        self._timer = self._clock.call_later(self._settings.interval, self._tick)

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tasks = [*self._sampling.values(), *([self._storing] if self._storing is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def watch(self, record: SessionRecord) -> None:
        """Start sampling a session that this replica runs; a repeated call updates the record only."""
        known = self._watched.get(record.session_id)
        if known is None:
            self._watched[record.session_id] = Watched(record, self._settings.history, self._settings.minutes)
        else:
            known.record = record

    def forget(self, session_id: str) -> None:
        """Stop sampling: another replica runs the session now."""
        self._watched.pop(session_id, None)

    def closed(self, session_id: str) -> None:
        """The session is over: none of its processes should be running."""
        watched = self._watched.pop(session_id, None)
        if watched is not None and not watched.record.policy.allow_background:
            self._closed[session_id] = (watched.record, self._settings.orphan_samples)
            if len(self._closed) > self._settings.orphan_sessions:
                self._closed.popitem(last=False)

    def latest(self, session_id: str) -> ResourceUsage | None:
        watched = self._watched.get(session_id)
        return watched.history[-1] if watched is not None and watched.history else None

    def history(self, session_id: str) -> tuple[ResourceUsage, ...]:
        """Return the samples of an hour, one a minute, and then the recent ones, oldest first."""
        watched = self._watched.get(session_id)
        if watched is None or not watched.history:
            return ()
        begin = watched.history[0].sampled_at
        return (*(each for each in watched.minutes if each.sampled_at < begin), *watched.history)

    @property
    def totals(self) -> tuple[UsageTotal, ...]:
        """The sums of all sessions of this replica in the last hour, oldest first."""
        return tuple(self._totals)

    # --- sampling -------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self._clock.call_later(self._settings.interval, self._tick)
        if self._sampling:
            # One sandbox hangs; the samples of the others are stored without it.
            self._begin_storing()
        self._begin_samples()

    async def sample(self) -> None:
        """Sample everything now, store the results, and wait until both are done."""
        self._begin_samples()
        await asyncio.gather(*self._sampling.values())
        await self._store_usages()

    def _begin_storing(self) -> None:
        if self._storing is None or self._storing.done():
            self._storing = asyncio.create_task(self._store_usages())

    async def _store_usages(self) -> None:
        due = {name: each.history[-1] for name, each in self._watched.items() if self._is_due(each)}
        if not due:
            return
        try:
            await self._backend.store_usages(due)
        except HoldfastError as error:
            log.warning("cannot store usage samples", sessions=len(due), error=str(error))
            return
        for name, usage in due.items():
            if name in self._watched:
                self._watched[name].stored = usage

    def _is_due(self, watched: Watched) -> bool:
        """True if the store's sample differs, or is old."""
        if not watched.history or watched.stored is None:
            return bool(watched.history)
        last, stored = watched.history[-1], watched.stored
        if last.sampled_at - stored.sampled_at >= self._settings.store_unchanged_seconds:
            return True
        return replace(last, sampled_at=stored.sampled_at) != stored

    def _begin_samples(self) -> None:
        """Sample all sandboxes concurrently, so that one without a response does not delay the others."""
        by_sandbox: dict[str, list[str]] = {sandbox: [] for sandbox in self._orphans}
        for watched in self._watched.values():
            by_sandbox.setdefault(watched.record.sandbox, []).append(watched.record.session_id)
        for session_id, (record, _) in self._closed.items():
            by_sandbox.setdefault(record.sandbox, []).append(session_id)
        for sandbox, ids in by_sandbox.items():
            if sandbox in self._sampling:
                self._metrics.monitor_skipped.inc()
                continue
            task = self._sampling[sandbox] = asyncio.create_task(self._sample(sandbox, ids))
            task.add_done_callback(partial(self._sampled, sandbox))
        self._update_totals()

    def _sampled(self, sandbox: str, task: asyncio.Task[None]) -> None:
        del self._sampling[sandbox]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._metrics.monitor_failures.inc()
            log.error("sampling sessions failed: this is a bug", sandbox=sandbox, exc_info=error)
        self._update_totals()
        if not self._sampling and self._timer is not None:
            self._begin_storing()

    async def _sample(self, sandbox: str, ids: Sequence[str]) -> None:
        began = time.perf_counter()
        try:
            sample = await self._backend.usage(sandbox, ids)
        except HoldfastError as error:
            self._metrics.monitor_failures.inc()
            if sandbox not in self._failing:
                self._failing.add(sandbox)
                log.warning("cannot sample sessions", sandbox=sandbox, sessions=len(ids), error=str(error))
            if not ids:
                # Only orphans were requested, and their sandbox is gone.
                self._orphans.pop(sandbox, None)
                self._failing.discard(sandbox)
            return
        self._failing.discard(sandbox)
        now = self._clock.time()
        usages = {usage.process_id: usage for usage in sample.usages}
        watched = [self._watched[id] for id in ids if id in self._watched and id in usages]
        judged = ((each, *self._take(each, usages[each.record.session_id], now)) for each in watched)
        # One task for each session with alerts: mostly there is none.
        await asyncio.gather(*(self._report(*each, now) for each in judged if each[2]))
        await self._find_orphans(sandbox, usages, sample.strays, [id for id in ids if id in self._closed], now)
        self._metrics.monitor_pass_seconds.observe(time.perf_counter() - began)

    def _take(self, watched: Watched, usage: ProcessUsage, now: float) -> tuple[LimitState, list[Alert]]:
        """Add a sample and return its alerts; without alerts the new state takes effect at once."""
        settings, record, before = self._settings, watched.record, watched.sampled
        taken = watched.take(usage, now, settings.long_running_seconds)
        if before is not None or now - record.created_at <= 2 * settings.interval:
            # The replica that ran the session before has counted its earlier usage.
            used = usage.cpu_seconds - (0.0 if before is None else before.cpu_seconds)
            self._metrics.session_cpu.inc(max(0.0, used))
        measured = Measured(taken.cpu_percent / 100.0, usage.memory_bytes, usage.thread_count, watched.output_bytes)
        state, alerts = judge(
            watched.state, measured, record.policy.resources, record.enforced, settings.thresholds, now
        )
        if not alerts:
            watched.state = state
        return state, alerts

    async def _report(self, watched: Watched, state: LimitState, alerts: list[Alert], now: float) -> None:
        record = watched.record
        try:
            for alert in alerts:
                await self._act(record, alert, now)
        except HoldfastError as error:
            # The state stays, so the next sample repeats the report and the action.
            log.warning("cannot report an exceeded limit", session_id=record.session_id, error=str(error))
        else:
            watched.state = state

    async def _act(self, record: SessionRecord, alert: Alert, now: float) -> None:
        event = MonitorEvent(record.session_id, alert.type, alert.reason, alert.detail, now, alert.step)
        await self._backend.report(event)
        if alert.step is None:
            self._metrics.resource_thresholds.labels(alert.resource).inc()
            return
        self._metrics.violated(alert.reason)
        self._metrics.escalations.labels(alert.step).inc()
        await self._backend.escalate(record.session_id, alert.step)

    # --- processes of closed sessions -----------------------------------------------------------------------

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
            record, samples = self._closed[session_id]
            usage = usages.get(session_id)
            if usage is None or (samples <= 1 and not usage.process_count):
                del self._closed[session_id]
            elif not usage.process_count:
                self._closed[session_id] = (record, samples - 1)
            else:
                found.update(usage.pids)
                await self._report_orphans(record, usage, now)
        new = sorted(found - self._orphans.get(sandbox, frozenset()))
        if new:
            log.warning("processes of a closed session are still running", sandbox=sandbox, pids=new)
        if found:
            self._orphans[sandbox] = frozenset(found)
        else:
            self._orphans.pop(sandbox, None)

    async def _report_orphans(self, record: SessionRecord, usage: ProcessUsage, now: float) -> None:
        if self._orphans.get(record.sandbox, frozenset()).issuperset(usage.pids):
            return  # all of them were reported
        pids = ", ".join(map(str, usage.pids[:20]))
        detail = f"{usage.process_count} processes of the closed session are still running: {pids}"
        try:
            await self._backend.report(MonitorEvent(record.session_id, "POLICY_VIOLATION", ORPHANED, detail, now))
        except HoldfastError as error:
            log.warning("cannot report orphaned processes", session_id=record.session_id, error=str(error))
        self._metrics.violated(ORPHANED)

    def _update_totals(self) -> None:
        """Update the totals of all sessions for the metrics."""
        last = [watched.history[-1] for watched in self._watched.values() if watched.history]
        total = UsageTotal(
            self._clock.time(),
            round(sum(usage.cpu_percent for usage in last), 1),
            sum(usage.memory_bytes for usage in last),
            sum(usage.process_count for usage in last),
            sum(usage.output_bytes for usage in last),
            len(last),
        )
        if self._totals and total.sampled_at - self._totals[-1].sampled_at < self._settings.interval / 2:
            self._totals.pop()
        self._totals.append(total)
        self._metrics.sessions_idle.set(sum(usage.session_idle for usage in last))
        self._metrics.sessions_long_running.set(sum(usage.long_running for usage in last))
        self._metrics.session_processes.set(sum(usage.process_count for usage in last))
        self._metrics.session_memory.set(sum(usage.memory_bytes for usage in last))
        self._metrics.orphaned_processes.set(sum(map(len, self._orphans.values())))
