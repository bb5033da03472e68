"""When a session that nears or passes a limit is spoken of, and what is done about it; pure.

At 80 % of a limit a session is told once, and again only after it fell below 70 %. Over a limit that the operating
system does not hold, it is warned, then what is in its foreground gets TERM, then it is closed by force; between
two steps it has some seconds to mend its ways. It climbs down only once everything is below 80 % again, so that a
session that swings around its limit does not start anew each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final, Literal, NamedTuple

from holdfast.service.types import EventType, Guard, Resources, Struct

Resource = Literal["cpu", "memory", "processes", "output"]
EscalationStep = Literal["warn", "terminate", "close"]

STEPS: Final[tuple[EscalationStep, ...]] = ("warn", "terminate", "close")
#: The `reason` of a violation; `policy_violations` counts by it.
REASONS: Final[dict[Resource, str]] = {
    "cpu": "CPU_LIMIT",
    "memory": "MEMORY_LIMIT",
    "processes": "PROCESS_LIMIT",
    "output": "OUTPUT_LIMIT",
}


class ThresholdSettings(Struct, frozen=True):
    """How patient we are."""

    #: Of a limit, where a session is told.
    near: float = 0.8
    #: And below which it is told anew the next time: apart from `near`, so that noise does not tell it every time.
    far: float = 0.7
    #: Looks in a row for which CPU use must be high. Every compiler is, for a moment.
    cpu_looks: int = 3
    #: Seconds between two steps: a program that gets a TERM may write something down.
    step_seconds: float = 10.0


class Measured(NamedTuple):
    """What a session uses now, in the units of its limits."""

    cpu_cores: float
    memory_bytes: int
    #: Threads: the kernel's own limits count these, too.
    processes: int
    output_bytes: int


class Standing(NamedTuple):
    """What was said to a session, and what was done."""

    told: frozenset[Resource] = frozenset()
    #: Looks in a row in which its CPU use was high.
    cpu_high: int = 0
    #: How many of `STEPS` were done, and when the last was.
    steps: int = 0
    stepped_at: float = 0.0


class ThresholdFinding(NamedTuple):
    """Something to report; with a step, something to do."""

    type: EventType
    resource: Resource
    reason: str
    detail: str
    step: EscalationStep | None = None


def judge(
    before: Standing,
    measured: Measured,
    limits: Resources,
    enforced: Collection[Guard],
    settings: ThresholdSettings,
    now: float,
) -> tuple[Standing, list[ThresholdFinding]]:
    """What is to be said after this look, and the standing once that is done."""
    findings: list[ThresholdFinding] = []
    told, cpu_high, steps, stepped_at = set(before.told), before.cpu_high, before.steps, before.stepped_at
    over: list[tuple[Resource, str]] = []
    all_calm = True
    for resource, value, limit, text in _limited(measured, limits):
        high = value >= settings.near * limit
        if resource == "cpu":
            cpu_high = cpu_high + 1 if high else 0
            high = cpu_high >= settings.cpu_looks
        all_calm &= value < settings.near * limit
        if high and resource not in told:
            told.add(resource)
            findings.append(ThresholdFinding("RESOURCE_THRESHOLD", resource, f"{resource.upper()}_HIGH", text))
        elif value < settings.far * limit:
            told.discard(resource)
        # The look before a verdict on CPU use counts, as above.
        if value > limit and high and resource not in enforced:
            over.append((resource, text))
    if all_calm:
        steps = 0
    elif over and steps < len(STEPS) and (steps == 0 or now - stepped_at >= settings.step_seconds):
        resource = over[0][0]
        step = STEPS[steps]
        detail = f"{'; '.join(text for _, text in over)}; {_DONE[step]}"
        findings.append(ThresholdFinding("POLICY_VIOLATION", resource, REASONS[resource], detail, step))
        steps, stepped_at = steps + 1, now
    return Standing(frozenset(told), cpu_high, steps, stepped_at), findings


#: For people.
_DONE: Final[dict[EscalationStep, str]] = {
    "warn": "what runs in the foreground is ended next",
    "terminate": "what runs in the foreground gets TERM; the session is closed next",
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
