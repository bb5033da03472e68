"""Observes calls and sessions: metrics, and a span and a log line for each call.

Connects the reporting parts (`admission.CallObserver`, `sessions.ports.Tell`) with `metrics`, `tracing` and `logs`,
so that neither side imports the other. Decides nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import structlog

from holdfast.service import problems
from holdfast.service.access.admission import FrontName
from holdfast.service.observability.logs import call_ids
from holdfast.service.observability.metrics import Metrics
from holdfast.service.observability.tracing import Tracer
from holdfast.service.sessions.ports import MetricEvent
from holdfast.service.types import Caller, Kind, State

#: Header of callers that number their own calls.
_REQUEST_ID: Final = "x-request-id"
_LONGEST_ID: Final = 128
_FINE: Final = ("OK", "CANCELLED")

_log = structlog.stdlib.get_logger("holdfast.service.calls")
#: The same logger in the standard library: structlog needs 20 µs to find a level disabled.
_log_level = logging.getLogger("holdfast.service.calls")


class ServiceCallObserver:
    """`admission.CallObserver`."""

    def __init__(self, metrics: Metrics, tracer: Tracer) -> None:
        self._metrics = metrics
        self._tracer = tracer

    def begin(self, front: FrontName, method: str, headers: Mapping[str, str]) -> ObservedCall:
        return ObservedCall(self._metrics, self._tracer, front, method, headers)


class ObservedCall:
    """One call, from its beginning to its end, in one task."""

    def __init__(
        self, metrics: Metrics, tracer: Tracer, front: FrontName, method: str, headers: Mapping[str, str]
    ) -> None:
        self._metrics = metrics
        self._method = method
        self._front = front
        self._timer = metrics.begin_call(front, method)
        #: In the log lines of this call, until its end.
        self._ids: dict[str, str] = {}
        self._before = call_ids.set(self._ids)
        request_id = headers.get(_REQUEST_ID, "")[:_LONGEST_ID]
        if request_id:
            self._ids["request_id"] = request_id
        self._work = tracer.call(method, front, headers)
        self._span = self._work.__enter__()

    def identified(self, caller: Caller) -> None:
        self._ids["agent_id"] = caller.agent_id
        self._span.set("holdfast.agent_id", caller.agent_id)

    def concerns(self, session_id: str = "", command_id: str = "") -> None:
        if session_id:
            self._ids["session_id"] = session_id
            self._span.set("holdfast.session_id", session_id)
        if command_id:
            self._ids["command_id"] = command_id
            self._span.set("holdfast.command_id", command_id)

    def end(self, status: str) -> None:
        seconds = self._metrics.end_call(self._timer, status)
        level = logging.DEBUG if status in _FINE else logging.INFO
        if _log_level.isEnabledFor(level):
            fields = {"method": self._method, "front": self._front, "status": status, "seconds": round(seconds, 4)}
            _log.log(level, "call", **fields)
        if status in ("UNAUTHENTICATED", "RESOURCE_EXHAUSTED"):
            self._metrics.refused(status)
        self._span.set("rpc.code", status)
        failed = _failure(status)
        # The span records the failure as if the exception had left the block.
        self._work.__exit__(type(failed) if failed else None, failed, None)
        call_ids.reset(self._before)


def _failure(status: str) -> problems.Problem | None:
    if status in _FINE:
        return None
    kinds = problems.Problem.__subclasses__()
    kind = next((each for each in kinds if each.status == status), problems.Problem)
    return kind(status, reason=status)


def count_metrics(metrics: Metrics) -> Callable[[MetricEvent], None]:
    """Return a listener that counts the events of sessions."""

    def count(event: MetricEvent) -> None:
        kind: Kind = "shell" if event.kind == "shell" else "terminal"
        match event.what:
            case "session_over":
                metrics.session_ended(kind, event.detail, event.amount)
            case "command_ended":
                metrics.command_ended(kind, event.amount)
            case "violation":
                metrics.violated(event.detail)
            case "lease_taken":
                metrics.leases_taken_over.inc()
            case "lease_lost":
                metrics.leases_lost.inc()
            case "subscribers":
                metrics.event_subscribers.inc(event.amount)
            case "session_opened" | "output":
                pass  # counted by `count_sessions`, and by the monitor

    return count


def count_sessions(metrics: Metrics, sessions: Iterable[tuple[Kind, State]]) -> None:
    """Set the numbers of current sessions, for a scrape."""
    metrics.set_sessions(Counter(sessions))
