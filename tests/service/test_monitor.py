"""The resource monitor: percentages from differences, idle and long-running, limits, orphans, and real sessions."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast import Sandbox
from holdfast.errors import SandboxError
from holdfast.service.monitor.monitor import MonitorEvent, MonitorSettings, ResourceMonitor, is_long_running
from holdfast.service.monitor.thresholds import Escalation
from holdfast.service.observability.metrics import Metrics
from holdfast.service.types import Guard, Kind, Resources, ResourceUsage, SessionPolicy, SessionRecord
from holdfast.testing import FakeClock
from holdfast.types import ProcessUsage, UsageSample

SAFETY_NET = 60.0


def record(
    session_id: str = "s",
    resources: Resources | None = None,
    *,
    kind: Kind = "terminal",
    enforced: tuple[Guard, ...] = (),
    sandbox: str = "local",
    created_at: float = 1000.0,
    allow_background: bool = False,
) -> SessionRecord:
    return SessionRecord(
        session_id,
        "agent",
        kind,
        sandbox,
        SessionPolicy(
            "default", 600.0, 3600.0, 60.0, allow_background=allow_background, resources=resources or Resources()
        ),
        created_at=created_at,
        last_activity_at=created_at,
        initial_cwd="/",
        enforced=enforced,
    )


class FakeBackend:
    """Sandboxes with sessions that use as much as a test sets."""

    def __init__(self) -> None:
        self.usages: dict[str, ProcessUsage] = {}
        self.strays: tuple[int, ...] = ()
        self.requested: list[tuple[str, tuple[str, ...]]] = []
        self.events: list[MonitorEvent] = []
        self.steps: list[tuple[str, Escalation]] = []
        self.broken: set[str] = set()
        self.hangs: dict[str, asyncio.Event] = {}
        self.report_fails = False
        self.stored: list[dict[str, ResourceUsage]] = []

    async def store_usages(self, usages: Mapping[str, ResourceUsage]) -> None:
        if self.report_fails:
            raise SandboxError("no database")
        self.stored.append(dict(usages))

    def uses(self, session_id: str = "s", **fields: object) -> None:
        before = self.usages.get(session_id, ProcessUsage(session_id, True, process_count=1, thread_count=1))
        self.usages[session_id] = msgspec.structs.replace(before, **fields)

    async def usage(self, sandbox: str, ids: Sequence[str]) -> UsageSample:
        self.requested.append((sandbox, tuple(ids)))
        if sandbox in self.hangs:
            await self.hangs[sandbox].wait()
        if sandbox in self.broken:
            raise SandboxError("gone")
        return UsageSample(tuple(self.usages[id] for id in ids if id in self.usages), self.strays)

    async def report(self, event: MonitorEvent) -> None:
        if self.report_fails:
            raise SandboxError("no database")
        self.events.append(event)

    async def escalate(self, session_id: str, step: Escalation) -> None:
        self.steps.append((session_id, step))


class Bench:
    """A monitor on a clock that a test moves."""

    def __init__(self, settings: MonitorSettings | None = None) -> None:
        self.outside = FakeBackend()
        self.clock = FakeClock()
        self.metrics = Metrics(own_process=False)
        self.settings = settings or MonitorSettings()
        self.monitor = ResourceMonitor(self.outside, self.clock, self.metrics, self.settings)
        self.monitor.start()

    async def looks(self, count: int = 1) -> None:
        await self.clock.advance(count * self.settings.interval)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.monitor.stop()


# --- what is seen ------------------------------------------------------------------------------------------------


async def test_all_sessions_of_a_sandbox_are_asked_for_in_one_call_a_look(bench: Bench) -> None:
    for number in range(100):
        bench.monitor.watch(record(f"s{number}", sandbox="local" if number % 2 else "docker:box"))
    await bench.looks(2)
    assert [sandbox for sandbox, _ in bench.outside.requested] == ["docker:box", "local"] * 2
    assert {len(ids) for _, ids in bench.outside.requested} == {50}


async def test_cpu_percent_is_the_difference_over_the_time(bench: Bench) -> None:
    bench.monitor.watch(record())
    bench.outside.uses(cpu_seconds=10.0, foreground="make")
    await bench.looks()
    first = bench.monitor.latest("s")
    assert first is not None
    assert (first.cpu_percent, first.cpu_seconds, first.sampled_at) == (0.0, 10.0, 1005.0)
    bench.outside.uses(cpu_seconds=17.5)
    await bench.looks()
    second = bench.monitor.latest("s")
    assert second is not None
    assert second.cpu_percent == 150.0
    # The usage of a child that was never waited for is gone from the sum: that is no negative use.
    bench.outside.uses(cpu_seconds=16.0)
    await bench.looks()
    assert [usage.cpu_percent for usage in bench.monitor.history("s")] == [0.0, 150.0, 0.0]
    assert bench.value("holdfast_session_cpu_seconds_total") == 17.5


async def test_the_history_is_bounded_and_goes_with_the_session(bench: Bench) -> None:
    bench.monitor.watch(record())
    bench.outside.uses()
    await bench.looks(bench.settings.history + 5)
    history = bench.monitor.history("s")
    # The first sample is also that of its minute.
    assert len(history) == 1 + bench.settings.history
    assert history[-1].sampled_at == bench.clock.time()
    assert bench.monitor.totals[-1].sessions == 1
    await bench.looks(13 * bench.settings.minutes)
    assert len(bench.monitor.history("s")) <= bench.settings.minutes + bench.settings.history
    history = bench.monitor.history("s")
    bench.monitor.watch(record())
    assert bench.monitor.history("s") == history
    bench.monitor.forget("s")
    assert (bench.monitor.history("s"), bench.monitor.latest("s")) == ((), None)


async def test_session_idle(bench: Bench) -> None:
    bench.monitor.watch(record())
    bench.outside.uses(printed_bytes=100)

    async def idle() -> bool:
        await bench.looks()
        usage = bench.monitor.latest("s")
        assert usage is not None
        return usage.session_idle

    assert not await idle()  # nothing to compare with
    assert await idle()
    bench.outside.uses(printed_bytes=101)
    assert not await idle()
    assert await idle()
    bench.outside.uses(cpu_seconds=1.0)
    assert not await idle()
    bench.outside.uses(foreground="sleep")
    assert not await idle()
    bench.outside.uses(foreground=None)
    assert await idle()
    assert bench.value("holdfast_sessions_idle") == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"foreground": "make", "foreground_seconds": 299.9}, False),
        ({"foreground": "make", "foreground_seconds": 300.0}, True),
        ({"foreground": "make", "foreground_seconds": 1e4, "awaiting_input": None}, True),
        ({"foreground": "python3", "foreground_seconds": 1e4, "awaiting_input": True}, False),
        ({"background_seconds": 300.0}, True),
        ({"foreground": "python3", "awaiting_input": True, "background_seconds": 300.0}, True),
    ],
    ids=["prompt", "shorter", "foreground", "kernel does not tell", "waits for its user", "background", "both"],
)
def test_long_running_detection(fields: dict[str, object], expected: bool) -> None:
    usage = msgspec.structs.replace(ProcessUsage("s", True), **fields)
    assert is_long_running(usage, MonitorSettings().long_running_seconds) is expected


async def test_long_running_detection_is_told_and_counted(bench: Bench) -> None:
    bench.monitor.watch(record())
    bench.outside.uses(foreground="make", foreground_seconds=301.0)
    await bench.looks()
    usage = bench.monitor.latest("s")
    assert usage is not None
    assert usage.long_running
    assert bench.value("holdfast_sessions_long_running") == 1
    bench.outside.uses(foreground=None, foreground_seconds=0.0)
    await bench.looks()
    assert bench.value("holdfast_sessions_long_running") == 0


async def test_a_sandbox_s_new_server_does_not_set_the_output_back(bench: Bench) -> None:
    bench.monitor.watch(record(resources=Resources(output_bytes=160)))
    for printed in (100, 125, 20, 36):  # the third sample is of a new server, which counts a shell's anew
        bench.outside.uses(printed_bytes=printed)
        await bench.looks()
    violations = [event.detail for event in bench.outside.events if event.type == "POLICY_VIOLATION"]
    assert violations == ["161 of 160 bytes of output; the foreground process is ended next"]


async def test_what_a_session_used_before_it_was_taken_over_is_not_counted_again(bench: Bench) -> None:
    bench.monitor.watch(record("old", created_at=0.0))
    bench.outside.uses("old", cpu_seconds=1000.0)
    await bench.looks()
    bench.outside.uses("old", cpu_seconds=1001.5)
    await bench.looks()
    assert bench.value("holdfast_session_cpu_seconds_total") == 1.5


# --- what goes wrong ---------------------------------------------------------------------------------------------


async def test_a_sandbox_that_does_not_answer_keeps_no_other_waiting(bench: Bench) -> None:
    bench.monitor.watch(record("a", sandbox="slow"))
    bench.monitor.watch(record("b", sandbox="local"))
    bench.outside.uses("a")
    bench.outside.uses("b")
    release = bench.outside.hangs["slow"] = asyncio.Event()
    await bench.looks(3)
    assert len(bench.monitor.history("b")) == 3
    assert bench.monitor.history("a") == ()
    assert [sandbox for sandbox, _ in bench.outside.requested].count("slow") == 1
    assert bench.value("holdfast_monitor_skipped_total") == 2
    release.set()
    await bench.looks()
    assert len(bench.monitor.history("a")) == 2


async def test_a_sandbox_that_fails_is_counted_and_asked_again(bench: Bench) -> None:
    bench.monitor.watch(record())
    bench.outside.uses()
    bench.outside.broken.add("local")
    await bench.looks(2)
    assert bench.value("holdfast_monitor_failures_total") == 2
    bench.outside.broken.clear()
    await bench.looks()
    assert len(bench.monitor.history("s")) == 1


# --- limits ------------------------------------------------------------------------------------------------------

LIMIT = Resources(memory_bytes=1000)


async def test_a_session_near_its_limit_is_told_once_until_it_has_fallen(bench: Bench) -> None:
    bench.monitor.watch(record(resources=LIMIT, enforced=("memory",)))
    for memory in (799, 800, 790, 900, 750, 810, 699, 800, 1001):
        bench.outside.uses(memory_bytes=memory)
        await bench.looks()
    assert [(event.type, event.reason, event.at) for event in bench.outside.events] == [
        ("RESOURCE_THRESHOLD", "MEMORY_HIGH", 1010.0),
        ("RESOURCE_THRESHOLD", "MEMORY_HIGH", 1040.0),
    ]
    assert bench.outside.events[0].detail == "800 of 1000 bytes of memory"
    # It is over its limit now, and the operating system holds that one: nothing more is done.
    assert bench.outside.steps == []
    assert bench.value("holdfast_resource_thresholds_total", resource="memory") == 2


async def test_over_a_limit_that_nobody_holds_it_is_warned_then_terminated_then_closed(bench: Bench) -> None:
    bench.monitor.watch(record(resources=LIMIT))
    bench.outside.uses(memory_bytes=1001)
    await bench.looks(10)
    violations = [event for event in bench.outside.events if event.type == "POLICY_VIOLATION"]
    assert [(event.step, event.reason, event.at) for event in violations] == [
        ("warn", "MEMORY_LIMIT", 1005.0),
        ("terminate", "MEMORY_LIMIT", 1015.0),
        ("close", "MEMORY_LIMIT", 1025.0),
    ]
    assert bench.outside.steps == [("s", "warn"), ("s", "terminate"), ("s", "close")]
    assert bench.value("policy_violations_total", reason="MEMORY_LIMIT") == 3
    assert bench.value("holdfast_escalations_total", step="close") == 1


async def test_one_that_mends_its_ways_begins_anew_and_one_that_swings_does_not(bench: Bench) -> None:
    bench.monitor.watch(record(resources=LIMIT))
    for memory in (1001, 900, 1001, 1001):  # swings: warned, then terminated
        bench.outside.uses(memory_bytes=memory)
        await bench.looks()
    assert [step for _, step in bench.outside.steps] == ["warn", "terminate"]
    for memory in (500, 1001):
        bench.outside.uses(memory_bytes=memory)
        await bench.looks()
    assert [step for _, step in bench.outside.steps] == ["warn", "terminate", "warn"]


@pytest.mark.parametrize(
    ("resources", "fields", "reason"),
    [
        (Resources(processes=10), {"thread_count": 11}, "PROCESS_LIMIT"),
        (Resources(output_bytes=10), {"printed_bytes": 11}, "OUTPUT_LIMIT"),
        (Resources(memory_bytes=10), {"memory_bytes": 11}, "MEMORY_LIMIT"),
    ],
    ids=["processes", "output", "memory"],
)
async def test_each_limit_has_its_reason(
    bench: Bench, resources: Resources, fields: dict[str, Any], reason: str
) -> None:
    bench.monitor.watch(record(resources=resources))
    bench.outside.uses(**fields)
    await bench.looks()
    assert [event.reason for event in bench.outside.events][-1] == reason


async def test_cpu_use_must_be_high_for_some_looks(bench: Bench) -> None:
    bench.monitor.watch(record(resources=Resources(cpu_cores=1.0)))
    spent = 0.0
    for cores in (0, 2, 2, 0, 2, 2, 2):
        spent += cores * bench.settings.interval
        bench.outside.uses(cpu_seconds=spent, foreground="make")
        await bench.looks()
    assert [(event.type, event.reason) for event in bench.outside.events] == [
        ("RESOURCE_THRESHOLD", "CPU_HIGH"),
        ("POLICY_VIOLATION", "CPU_LIMIT"),
    ]
    assert bench.outside.events[0].at == bench.clock.time()


async def test_what_could_not_be_told_is_told_at_the_next_look(bench: Bench) -> None:
    bench.monitor.watch(record(resources=LIMIT))
    bench.outside.uses(memory_bytes=1001)
    bench.outside.report_fails = True
    await bench.looks()
    assert (bench.outside.events, bench.outside.steps) == ([], [])
    bench.outside.report_fails = False
    await bench.looks()
    assert bench.outside.steps == [("s", "warn")]


# --- orphans -----------------------------------------------------------------------------------------------------


async def test_what_runs_on_after_its_session_was_closed_is_told_once(bench: Bench) -> None:
    bench.monitor.watch(record())
    bench.outside.uses(process_count=2, pids=(7, 8), running=False)
    bench.monitor.closed("s")
    await bench.looks(5)
    (event,) = bench.outside.events
    assert (event.session_id, event.type, event.reason) == ("s", "POLICY_VIOLATION", "ORPHANED_PROCESSES")
    assert event.detail == "2 processes of the closed session are still running: 7, 8"
    assert bench.value("holdfast_orphaned_processes") == 2
    bench.outside.uses(process_count=0, pids=())
    await bench.looks(bench.settings.orphan_samples)
    assert bench.value("holdfast_orphaned_processes") == 0
    requested = len(bench.outside.requested)
    await bench.looks(3)
    assert len(bench.outside.requested) == requested  # no session is left to query


async def test_strays_of_forgotten_sessions_are_counted(bench: Bench) -> None:
    bench.monitor.watch(record())
    bench.outside.uses()
    bench.outside.strays = (11, 12, 13)
    await bench.looks()
    assert bench.value("holdfast_orphaned_processes") == 3
    bench.monitor.forget("s")
    await bench.looks()  # still queried, to notice their end
    bench.outside.broken.add("local")
    await bench.looks()
    assert bench.value("holdfast_orphaned_processes") == 0


async def test_jobs_that_the_policy_lets_run_on_are_no_orphans(bench: Bench) -> None:
    bench.monitor.watch(record(allow_background=True))
    bench.outside.uses(process_count=1, pids=(7,), running=False)
    bench.monitor.closed("s")
    await bench.looks(3)
    assert bench.outside.events == []


# --- what other replicas can read --------------------------------------------------------------------------------


async def test_samples_are_stored_when_they_change_and_now_and_then(bench: Bench) -> None:
    stored = bench.outside.stored
    for name in ("s1", "s2"):
        bench.monitor.watch(record(name))
        bench.outside.uses(name, memory_bytes=100)
    await bench.looks()
    assert [sorted(each) for each in stored] == [["s1", "s2"]]
    await bench.looks()  # only the second sample can find a session idle
    stored.clear()
    await bench.looks(2)
    assert stored == []
    bench.outside.uses("s1", memory_bytes=200)
    await bench.looks()
    assert [{name: each.memory_bytes for name, each in found.items()} for found in stored] == [{"s1": 200}]
    stored.clear()
    await bench.looks(6)
    assert sorted(name for found in stored for name in found) == ["s1", "s2"]


async def test_samples_that_could_not_be_stored_are_stored_later(bench: Bench) -> None:
    bench.monitor.watch(record("s1"))
    bench.outside.uses("s1", memory_bytes=100)
    bench.outside.report_fails = True
    await bench.looks()
    assert bench.outside.stored == []
    bench.outside.report_fails = False
    await bench.looks()
    assert [sorted(each) for each in bench.outside.stored] == [["s1"]]


async def test_a_sandbox_that_hangs_does_not_hold_up_the_samples_of_others(bench: Bench) -> None:
    bench.monitor.watch(record("s1"))
    bench.monitor.watch(record("s2", sandbox="docker:slow"))
    bench.outside.uses("s1", memory_bytes=100)
    bench.outside.hangs["docker:slow"] = asyncio.Event()
    await bench.looks(2)
    assert [sorted(each) for each in bench.outside.stored] == [["s1"]]


# --- real sessions -----------------------------------------------------------------------------------------------


class RealBackend(FakeBackend):
    """One real sandbox."""

    def __init__(self, box: Sandbox) -> None:
        super().__init__()
        self.box = box

    async def usage(self, sandbox: str, ids: Sequence[str]) -> UsageSample:
        return await self.box.usage(ids)


async def test_pid_tree_and_use_of_a_real_terminal_and_shell(tmp_path: Path) -> None:
    async with holdfast.connect("inprocess") as box:
        outside, metrics = RealBackend(box), Metrics(own_process=False)
        monitor = ResourceMonitor(outside, FakeClock(), metrics, MonitorSettings(long_running_seconds=0.001))
        terminal = await box.terminal("bash", id="t", env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]})
        await box.shell(id="s")
        monitor.watch(record("t", Resources(processes=2)))
        monitor.watch(record("s", kind="shell"))

        async def seen(holds: Callable[[ResourceUsage], bool]) -> ResourceUsage:
            """The sample that shows it: a shell that starts, and one that starts others, take a moment."""
            async with asyncio.timeout(SAFETY_NET):
                while True:
                    await monitor.sample()
                    found = monitor.latest("t")
                    if found is not None and holds(found):
                        return found

        idle = await seen(lambda usage: (usage.process_count, usage.long_running) == (1, False))
        assert idle.memory_bytes > 0
        await terminal.send("setsid sleep 1000 & sleep 999 & sleep 998\n")
        # The last of them becomes the foreground a moment after it exists.
        await seen(lambda usage: usage.process_count == 4 and usage.long_running and not usage.session_idle)
        assert ("t", "warn") in outside.steps
        assert metrics.registry.get_sample_value("holdfast_session_processes") == 5
        await terminal.close("force")
        monitor.closed("t")
        await monitor.sample()
        assert metrics.registry.get_sample_value("holdfast_orphaned_processes") == 0
        await monitor.stop()
