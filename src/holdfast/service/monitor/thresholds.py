"""Decides when a session near or over a limit is reported, and the escalation steps; pure.

At 80 % of a limit a session is reported once, and again only after it fell below 70 %. Over a limit that the
operating system does not enforce, the session is warned, then its foreground gets TERM, then it is closed by force,
with some seconds between two steps. The escalation resets only once everything is below 80 % again, so that a
session around its limit does not start anew each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final, Literal, NamedTuple

from holdfast.service.types import EventType, Guard, Resources, ServiceStruct

Resource = Literal["cpu", "memory", "processes", "output"]
Escalation = Literal["warn", "terminate", "close"]

STEPS: Final[tuple[Escalation, ...]] = ("warn", "terminate", "close")
#: The `reason` of a violation; `policy_violations` counts by it.
REASONS: Final[dict[Resource, str]] = {
    "cpu": "CPU_LIMIT",
    "memory": "MEMORY_LIMIT",
    "processes": "PROCESS_LIMIT",
    "output": "OUTPUT_LIMIT",
}


class ThresholdSettings(ServiceStruct, frozen=True):
    """Levels and delays of reports and escalation."""

    #: Fraction of a limit at which a session is reported.
    near: float = 0.8
    #: Fraction below which it can be reported again: apart from `near`, so that noise is not reported repeatedly.
    far: float = 0.7
    #: Consecutive samples with high CPU use: every compiler has a short peak.
    cpu_samples: int = 3
    #: Seconds between two steps: a program that gets TERM may need to save its state.
    step_seconds: float = 10.0


class Measured(NamedTuple):
    """Current usage of a session, in the units of its limits."""

    cpu_cores: float
    memory_bytes: int
    #: Threads: the kernel's own limits count these as well.
    processes: int
    output_bytes: int


class LimitState(NamedTuple):
    """Reports and steps of a session so far."""

    reported: frozenset[Resource] = frozenset()
    #: Consecutive samples with high CPU use.
    cpu_high: int = 0
    #: Number of `STEPS` done, and the time of the last.
    steps: int = 0
    stepped_at: float = 0.0


class Alert(NamedTuple):
    """A alert to report; with a step, an action as well."""

    type: EventType
    resource: Resource
    reason: str
    detail: str
    step: Escalation | None = None


def judge(
    before: LimitState,
    measured: Measured,
    limits: Resources,
    enforced: Collection[Guard],
    settings: ThresholdSettings,
    now: float,
) -> tuple[LimitState, list[Alert]]:
    """Return the state after this sample, and the alerts."""
    alerts: list[Alert] = []
    reported, cpu_high, steps, stepped_at = set(before.reported), before.cpu_high, before.steps, before.stepped_at
    over: list[tuple[Resource, str]] = []
    all_calm = True
    for resource, value, limit, text in _limited(measured, limits):
        high = value >= settings.near * limit
        if resource == "cpu":
            cpu_high = cpu_high + 1 if high else 0
            high = cpu_high >= settings.cpu_samples
        all_calm &= value < settings.near * limit
        if high and resource not in reported:
            reported.add(resource)
            alerts.append(Alert("RESOURCE_THRESHOLD", resource, f"{resource.upper()}_HIGH", text))
        elif value < settings.far * limit:
            reported.discard(resource)
        # CPU use needs several high samples, as above.
        if value > limit and high and resource not in enforced:
            over.append((resource, text))
    if all_calm:
        steps = 0
    elif over and steps < len(STEPS) and (steps == 0 or now - stepped_at >= settings.step_seconds):
        resource = over[0][0]
        step = STEPS[steps]
        detail = f"{'; '.join(text for _, text in over)}; {_STEP_TEXTS[step]}"
        alerts.append(Alert("POLICY_VIOLATION", resource, REASONS[resource], detail, step))
        steps, stepped_at = steps + 1, now
    return LimitState(frozenset(reported), cpu_high, steps, stepped_at), alerts


#: Text of each step for operators.
_STEP_TEXTS: Final[dict[Escalation, str]] = {
    "warn": "the foreground process is ended next",
    "terminate": "the foreground process gets TERM; the session is closed next",
    "close": "the session is closed by force",
}


def _limited(measured: Measured, limits: Resources) -> Iterator[tuple[Resource, float, float, str]]:
    if limits.cpu_cores is not None:
        text = f"CPU use of {measured.cpu_cores:.2f} of {limits.cpu_cores:g} cores"
        yield "cpu", measured.cpu_cores, limits.cpu_cores, text
    if limits.memory_bytes is not None:
        text = f"{measured.memory_bytes} of {limits.memory_bytes} bytes of memory"
        yield "memory", measured.memory_bytes, limits.memory_bytes, text
    if limits.processes is not None:
        text = f"{measured.processes} of {limits.processes} processes, threads counted"
        yield "processes", measured.processes, limits.processes, text
    if limits.output_bytes is not None:
        text = f"{measured.output_bytes} of {limits.output_bytes} bytes of output"
        yield "output", measured.output_bytes, limits.output_bytes, text
