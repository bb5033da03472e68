"""Prometheus metrics of the service: one object with a registry of its own, made by `assembly`.

The first five have names without a prefix; all others begin with `holdfast_`. No label holds
an id: each has a bounded number of values, and further values count as `other`. docs/monitoring.md lists every
metric, and a test compares.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Final, NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from holdfast.fleet.pool import PoolStatus
from holdfast.service.types import Kind, State

#: Values of one label in one metric: methods, codes and reasons are some dozens, each a time series.
MAX_VALUES: Final = 100
OTHER: Final = "other"
#: Calls and statements: from an immediate reply to a long poll.
_CALL_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
#: Commands: from `true` to a build.
_COMMAND_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
#: Sessions: from one command to a day.
_SESSION_SECONDS: Final = (1.0, 10.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 24 * 3600.0)
_STATES: Final[tuple[str, ...]] = get_args(State)
_KINDS: Final[tuple[str, ...]] = get_args(Kind)


class _MethodMetrics(NamedTuple):
    """The metrics of one method, with their labels: finding a metric by its labels takes longer than counting."""

    front: str
    method: str
    in_flight: Gauge
    seconds: Histogram
    #: By the name of a status.
    calls: dict[str, Counter]


class CallTimer:
    """One running call of the API."""

    __slots__ = ("began", "metrics")

    def __init__(self, metrics: _MethodMetrics) -> None:
        self.metrics = metrics
        self.began = time.perf_counter()


class AppendTimer:
    """One append to the audit log; a class, because a generator costs more, and every call has several appends."""

    __slots__ = ("began", "metrics")

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.metrics.audit_append_seconds.observe(time.perf_counter() - self.began)
        else:
            self.metrics.audit_append_failures.inc()


class Metrics:
    """All metrics. Attributes are metrics of prometheus-client; methods bound their labels."""

    def __init__(self, *, own_process: bool = True) -> None:
        """`own_process` adds this process's CPU time, memory and descriptors, under the standard names."""
        self.registry = CollectorRegistry()
        self._seen: dict[str, set[str]] = {}
        self._methods: dict[tuple[str, str], _MethodMetrics] = {}
        if own_process:
            ProcessCollector(registry=self.registry)
        r = self.registry

        # Sessions and commands, without a prefix.
        self.sessions_active = Gauge(
            "sessions_active", "Sessions that this replica runs, by kind and state.", ("kind", "state"), registry=r
        )
        self.session_duration = Histogram(
            "session_duration_seconds",
            "Lifetime of closed sessions, by kind and reason of the close.",
            ("kind", "reason"),
            buckets=_SESSION_SECONDS,
            registry=r,
        )
        self.command_latency = Histogram(
            "command_latency_seconds",
            "From a command's start to its end, by the kind of its session.",
            ("kind",),
            buckets=_COMMAND_SECONDS,
            registry=r,
        )
        self.output_throughput = Counter(
            "output_throughput_bytes", "Bytes that sessions printed, by kind.", ("kind",), registry=r
        )
        self.policy_violations = Counter(
            "policy_violations", "Actions that the policy refused or ended, by reason.", ("reason",), registry=r
        )

        # Calls.
        self.rpc_calls = Counter(
            "holdfast_rpc_calls",
            "Finished calls, by front end, method and status code.",
            ("front", "method", "code"),
            registry=r,
        )
        self.rpc_seconds = Histogram(
            "holdfast_rpc_seconds",
            "Duration of calls; of a stream until its end.",
            ("front", "method"),
            buckets=_CALL_SECONDS,
            registry=r,
        )
        self.rpc_in_flight = Gauge("holdfast_rpc_in_flight", "Running calls.", ("front",), registry=r)
        self.requests_refused = Counter(
            "holdfast_requests_refused",
            "Calls refused at admission, by reason: no token, too many.",
            ("reason",),
            registry=r,
        )

        # Replicas.
        self.leases_held = Gauge("holdfast_leases_held", "Sessions with a lease of this replica.", registry=r)
        self.leases_lost = Counter("holdfast_leases_lost", "Leases lost to another replica.", registry=r)
        self.leases_taken_over = Counter(
            "holdfast_leases_taken_over", "Leases taken over from a replica that is gone.", registry=r
        )

        # Audit and database.
        self.audit_append_seconds = Histogram(
            "holdfast_audit_append_seconds",
            "Duration of appends to the audit log.",
            buckets=_CALL_SECONDS,
            registry=r,
        )
        self.audit_append_failures = Counter(
            "holdfast_audit_append_failures", "Appends to the audit log that failed.", registry=r
        )
        self.audit_queue = Gauge("holdfast_audit_queue", "Audit rows that wait to be written.", registry=r)
        self.store_seconds = Histogram(
            "holdfast_store_seconds",
            "Duration of database operations.",
            ("operation",),
            buckets=_CALL_SECONDS,
            registry=r,
        )

        # Sessions.
        self.approvals_waiting = Gauge(
            "holdfast_approvals_waiting", "Commands that wait for an approval.", registry=r
        )
        self.approvals = Counter(
            "holdfast_approvals", "Approval requests that ended, by outcome.", ("outcome",), registry=r
        )
        self.event_subscribers = Gauge("holdfast_event_subscribers", "Open subscriptions to events.", registry=r)
        self.previews = Gauge("holdfast_previews", "Open previews of ports.", registry=r)
        self.sandbox_connections = Gauge("holdfast_sandbox_connections", "Connected sandboxes.", registry=r)
        self.sandbox_failures = Counter(
            "holdfast_sandbox_failures", "Failed attempts to reach a sandbox.", registry=r
        )

        # Pools of the rules.
        self.pool_sandboxes = Gauge(
            "holdfast_pool_sandboxes",
            "Sandboxes of this replica's pools, by state: warm, in_use, creating.",
            ("pool", "state"),
            registry=r,
        )
        self.pool_waiting = Gauge(
            "holdfast_pool_waiting", "Sessions that wait for a sandbox of a pool.", ("pool",), registry=r
        )
        self.pool_made = Counter("holdfast_pool_made", "Sandboxes that a pool made.", ("pool",), registry=r)
        self.pool_failed = Counter(
            "holdfast_pool_failed", "Attempts of a pool to make a sandbox that failed.", ("pool",), registry=r
        )
        self.pool_replaced = Counter(
            "holdfast_pool_replaced", "Warm sandboxes that did not reply and were replaced.", ("pool",), registry=r
        )
        self.pool_take_seconds = Histogram(
            "holdfast_pool_take_seconds",
            "How long a session waited for a sandbox of a pool.",
            ("pool",),
            buckets=_CALL_SECONDS,
            registry=r,
        )
        #: The totals of each pool that were counted last; a pool that is opened again begins at 0.
        self._pools: dict[str, PoolStatus] = {}

        # The monitor.
        self.monitor_pass_seconds = Histogram(
            "holdfast_monitor_pass_seconds",
            "Duration of one sample of the sessions of a sandbox.",
            buckets=_CALL_SECONDS,
            registry=r,
        )
        self.monitor_failures = Counter(
            "holdfast_monitor_failures", "Failed samples: the sandbox did not respond.", registry=r
        )
        self.monitor_skipped = Counter(
            "holdfast_monitor_skipped",
            "Samples skipped because the previous one was still running.",
            registry=r,
        )
        self.sessions_idle = Gauge("holdfast_sessions_idle", "Idle sessions.", registry=r)
        self.sessions_long_running = Gauge(
            "holdfast_sessions_long_running", "Sessions with a long-running command.", registry=r
        )
        self.session_processes = Gauge("holdfast_session_processes", "Processes of all sessions.", registry=r)
        self.session_memory = Gauge(
            "holdfast_session_memory_bytes", "Memory of all sessions' processes.", registry=r
        )
        self.session_cpu = Counter(
            "holdfast_session_cpu_seconds", "CPU time that sessions' processes used.", registry=r
        )
        self.orphaned_processes = Gauge(
            "holdfast_orphaned_processes", "Processes of closed sessions that are still running.", registry=r
        )
        self.resource_thresholds = Counter(
            "holdfast_resource_thresholds",
            "Sessions that came near a limit, by resource.",
            ("resource",),
            registry=r,
        )
        self.escalations = Counter(
            "holdfast_escalations", "Escalation steps for sessions over a limit, by step.", ("step",), registry=r
        )
        for front in ("grpc", "http"):
            self.rpc_in_flight.labels(front)
        self.set_sessions({})

    def set_sessions(self, counts: Mapping[tuple[Kind, State], int]) -> None:
        """Set the number of sessions by kind and state; others are 0."""
        for kind in _KINDS:
            for state in _STATES:
                self.sessions_active.labels(kind, state).set(0)
        for (kind, state), count in counts.items():
            self.sessions_active.labels(kind, state).set(count)

    def set_pools(self, statuses: Mapping[str, PoolStatus]) -> None:
        """Set the numbers of the pools that are open; a pool that the rules no longer have is 0."""
        for name in {*statuses, *self._pools}:
            now = statuses.get(name, PoolStatus())
            before = self._pools.get(name, PoolStatus())
            pool = self._bounded("pool", name)
            for state, count in (("warm", now.warm), ("in_use", now.taken), ("creating", now.creating)):
                self.pool_sandboxes.labels(pool, state).set(count)
            self.pool_waiting.labels(pool).set(now.waiting)
            for metric, field in (
                (self.pool_made, "created_total"),
                (self.pool_failed, "failed_total"),
                (self.pool_replaced, "replaced_total"),
            ):
                total, counted = getattr(now, field), getattr(before, field)
                metric.labels(pool).inc(total - counted if total >= counted else total)
            self._pools[name] = now

    def pool_taken(self, name: str, seconds: float) -> None:
        self.pool_take_seconds.labels(self._bounded("pool", name)).observe(seconds)

    def session_ended(self, kind: Kind, reason: str, seconds: float) -> None:
        self.session_duration.labels(kind, self._bounded("end", reason)).observe(max(0.0, seconds))

    def command_ended(self, kind: Kind, seconds: float) -> None:
        self.command_latency.labels(kind).observe(max(0.0, seconds))

    def printed(self, kind: Kind, size: int) -> None:
        self.output_throughput.labels(kind).inc(size)

    def violated(self, reason: str) -> None:
        self.policy_violations.labels(self._bounded("violation", reason)).inc()

    def refused(self, reason: str) -> None:
        self.requests_refused.labels(self._bounded("refusal", reason)).inc()

    def begin_call(self, front: str, method: str) -> CallTimer:
        """Start a call; `end_call` must follow once."""
        metrics = self._methods.get((front, method)) or self._method_metrics(front, method)
        metrics.in_flight.inc()
        return CallTimer(metrics)

    def _method_metrics(self, front: str, method: str) -> _MethodMetrics:
        labels = self._bounded("front", front), self._bounded("method", method)
        metrics = _MethodMetrics(
            *labels, self.rpc_in_flight.labels(labels[0]), self.rpc_seconds.labels(*labels), {}
        )
        if labels == (front, method):
            self._methods[front, method] = metrics
        return metrics

    def end_call(self, timer: CallTimer, code: str) -> float:
        """End a call with the name of a status; return its seconds."""
        seconds = time.perf_counter() - timer.began
        metrics, code = timer.metrics, self._bounded("code", code)
        metrics.in_flight.dec()
        metrics.seconds.observe(seconds)
        calls = metrics.calls.get(code)
        if calls is None:
            calls = metrics.calls[code] = self.rpc_calls.labels(metrics.front, metrics.method, code)
        calls.inc()
        return seconds

    @contextlib.contextmanager
    def store(self, operation: str) -> Iterator[None]:
        """Time one database operation, also a failed one."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self.store_seconds.labels(self._bounded("operation", operation)).observe(seconds)

    def audit_append(self) -> AppendTimer:
        """Time one append to the audit log; count a failed one."""
        return AppendTimer(self)

    def _bounded(self, label: str, value: str) -> str:
        """Return the value for the first `MAX_VALUES` values of a label, then `other`."""
        seen = self._seen.setdefault(label, set())
        if value in seen:
            return value
        if len(seen) >= MAX_VALUES:
            return OTHER
        seen.add(value)
        return value

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics in the format of this Accept header, and the content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def names(self) -> dict[str, str]:
        """Return every metric name as queries use it, with its type."""
        families = self.registry.collect()
        return {f.name + ("_total" if f.type == "counter" else ""): f.documentation for f in families}
