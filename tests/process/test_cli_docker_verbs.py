"""The verbs and options that Docker has too, as real processes against one real server."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime

import msgspec
import pytest

from holdfast.cli.verbs.process.events import LifeCycle
from holdfast.cli.verbs.process.top import CpuRates
from holdfast.types import MemberUsage, ProcessInfo, ProcessUsage, ShellStatus
from tests.process.test_cli_verbs import Holdfast, own_holdfast


@pytest.fixture(scope="module")
def holdfast() -> Iterator[Holdfast]:
    with own_holdfast() as command:
        assert command("run", "--id", "good", "--", "true").returncode == 0
        assert command("run", "--id", "bad", "--", "sh", "-c", "exit 3").returncode == 3
        assert command("run", "--detach", "--id", "web-1", "--", "sleep", "1000").returncode == 0
        assert command("shell", "open", "--id", "live", "--shell", "sh").returncode == 0
        yield command


def lines(holdfast: Holdfast, *arguments: str) -> list[str]:
    done = holdfast(*arguments)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode().splitlines()


# --- ps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [(), ("--watch",)], ids=["quick", "full"])
def test_ps_prints_ids_that_match_the_filters(holdfast: Holdfast, full: tuple[str, ...]) -> None:
    if full:
        watch = holdfast.start("ps", "--quiet", "--filter", "exit=3", "--watch")
        assert watch.stdout is not None
        assert watch.stdout.readline() == b"bad\n"
        watch.kill()
        watch.communicate()
        return
    assert lines(holdfast, "ps", "-q") == ["web-1"]
    assert lines(holdfast, "ps", "-q", "--filter", "state=ended", "--filter", "id=*oo*") == ["good"]
    assert lines(holdfast, "ps", "-q", "--all", "--filter", "id=good", "--filter", "id=web*") == ["good", "web-1"]
    assert lines(holdfast, "ps", "-q", "--filter", "exit=3") == ["bad"]
    docker_keys = ("--filter", "status=exited", "--filter", "name=*oo*", "--filter", "exited=0")
    assert lines(holdfast, "ps", "-q", *docker_keys) == ["good"]
    assert lines(holdfast, "ps", "-q", "--filter", "kind=terminal", "--all") == []
    assert holdfast.json("ps", "-q", "--filter", "command=sleep 1000") == ["web-1"]
    assert [info["processId"] for info in holdfast.json("ps", "--filter", "exit=0")] == ["good"]
    assert "sleep 1000" in lines(holdfast, "ps", "--no-trunc")[1]


@pytest.mark.parametrize("filter", ["colour=red", "state=happy", "exit=x", "id"])
def test_a_filter_that_is_not_known_is_refused(holdfast: Holdfast, filter: str) -> None:
    done = holdfast("ps", "--filter", filter)
    assert (done.returncode, done.stdout) == (2, b"")
    assert f"--filter {filter}".encode() in done.stderr


# --- did you mean ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("logs", "wbe-1"), "web-1"),
        (("logs", "--follow", "web"), "web-1"),
        (("kill", "wbe-1"), "web-1"),
        (("kill", "wbe-1", "gode"), "web-1"),
        (("inspect", "liev"), "live"),
        (("rm", "gode"), "good"),
        (("shell", "run", "liv", "true"), "live"),
    ],
)
def test_an_unknown_id_gets_a_suggestion(holdfast: Holdfast, arguments: tuple[str, ...], meant: str) -> None:
    done = holdfast(*arguments)
    assert done.returncode in (1, 125)
    assert f"did you mean '{meant}'?".encode() in done.stderr


@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        (("logs", "unheard-of"), "`holdfast ps --all` lists the ids"),
        (("logs", "--tail", "1", "unheard-of"), "`holdfast ps --all` lists the ids"),
        (("wait", "unheard-of"), "`holdfast ps --all` lists the ids"),
        (("kill", "unheard-of"), "`holdfast ps --all` lists the ids"),
        (("inspect", "unheard-of"), "`holdfast ps --all` lists the ids"),
        (("shell", "run", "unheard-of", "true"), "`holdfast shell list` lists the ids"),
        (("run", "--detach", "--id", "web-1", "--", "true"), "choose another id"),
    ],
)
def test_an_id_that_resembles_none_gets_the_next_step(
    holdfast: Holdfast, arguments: tuple[str, ...], step: str
) -> None:
    done = holdfast(*arguments)
    assert done.returncode in (1, 125)
    assert step.encode() in done.stderr
    assert done.stderr.count(b"\n") == 1


# --- inspect and rm -------------------------------------------------------------------------------------------


def test_inspect_has_everything_about_each_kind(holdfast: Holdfast) -> None:
    web, bad, live = holdfast.json("inspect", "web-1", "bad", "live")
    assert (web["id"], web["kind"], web["process"]["argv"]) == ("web-1", "process", ["sleep", "1000"])
    assert web["usage"]["pids"] == [web["process"]["pid"]]
    assert (bad["process"]["exitCode"], bad["usage"]["running"]) == (3, False)
    assert (live["kind"], live["shell"]["state"]) == ("shell", "idle")
    assert len(lines(holdfast, "inspect", "bad")) > 10


def test_inspect_of_a_terminal_has_the_process_too(holdfast: Holdfast) -> None:
    done = holdfast("shell", "--shell", "sh", "--id", "t", input=b"exit 0\n")
    assert done.returncode == 0, done.stderr
    (found,) = holdfast.json("inspect", "t")
    assert (found["kind"], found["process"]["tty"], found["terminal"]["state"]) == ("terminal", True, "CLOSED")
    assert lines(holdfast, "rm", "t") == ["t"]


def test_rm_drops_ended_processes_and_ends_running_ones_with_force(holdfast: Holdfast) -> None:
    assert holdfast("run", "--id", "done", "--", "true").returncode == 0
    assert holdfast("run", "--detach", "--id", "busy", "--", "sleep", "1000").returncode == 0
    assert holdfast("shell", "open", "--id", "other", "--shell", "sh").returncode == 0
    refused = holdfast("rm", "busy", "done", "other")
    assert (refused.returncode, refused.stdout) == (1, b"done\n")
    assert b"'busy' still runs" in refused.stderr
    assert b"shell 'other' is open" in refused.stderr
    forced = holdfast("rm", "--force", "--grace", "0", "--json", "busy", "other")
    assert [json.loads(line) for line in forced.stdout.splitlines()] == [
        {"id": "busy", "wasRunning": True},
        {"id": "other", "wasRunning": True},
    ]
    assert lines(holdfast, "ps", "-q", "--all", "--filter", "id=busy", "--filter", "id=done") == []


def test_rm_without_ids_or_with_contradicting_options_is_refused(holdfast: Holdfast) -> None:
    assert holdfast("rm").returncode == 2
    assert holdfast("rm", "--all", "--force").returncode == 2


# --- top ------------------------------------------------------------------------------------------------------


def test_top_lists_the_tree_of_a_process(holdfast: Holdfast) -> None:
    started = holdfast.start("run", "--id", "tree", "--", "sh", "-c", "sleep 1000 & echo $!; wait")
    assert started.stdout is not None
    child = int(started.stdout.readline())
    leader = holdfast.json("inspect", "tree")[0]["process"]["pid"]
    header, first, second = lines(holdfast, "top", "--once", "tree")
    assert header.split() == ["ID", "PID", "CPU", "TIME", "MEMORY", "THREADS", "AGE", "COMMAND"]
    assert first.split()[:2] == ["tree", str(leader)]
    assert second.split()[:2] == ["tree", str(child)]
    assert second.endswith("    sleep 1000")
    (usage,) = holdfast.json("top", "--once", "tree")
    assert [(each["pid"], each["argv"][0]) for each in usage["members"]] == [(leader, "sh"), (child, "sleep")]
    assert {usage["processId"] for usage in holdfast.json("top", "--once")} >= {"tree", "web-1", "live"}
    assert holdfast("rm", "--force", "--grace", "0", "tree").returncode == 0
    started.communicate(timeout=60)


def test_top_repeats_until_it_is_interrupted(holdfast: Holdfast) -> None:
    top = holdfast.start("top", "--interval", "0.2", "--json", "web-1")
    assert top.stdout is not None
    assert [json.loads(top.stdout.readline())[0]["processId"] for _ in range(3)] == ["web-1"] * 3
    top.kill()
    top.communicate()
    done = holdfast("top", "--once", "web-2")
    assert (done.returncode, b"did you mean 'web-1'?" in done.stderr) == (1, True)


def test_cpu_is_counted_between_two_samples() -> None:
    def usage(cpu: float, seconds: float) -> tuple[ProcessUsage, ...]:
        member = MemberUsage(pid=7, parent=1, name="x", cpu_seconds=cpu, seconds=seconds)
        return (ProcessUsage("p", running=True, members=(member,)),)

    rates = CpuRates()
    assert rates.update(usage(1.0, 10.0), now=100.0) == {7: 10.0}
    assert rates.update(usage(2.0, 12.0), now=102.0) == {7: 50.0}
    assert rates.update(usage(0.5, 1.0), now=104.0) == {7: 50.0}  # the pid was reused


# --- events ---------------------------------------------------------------------------------------------------


def test_events_as_they_happen(holdfast: Holdfast) -> None:
    events = holdfast.start("events", "--json", "--since", "1h", "--kind", "process")
    assert events.stdout is not None
    seen = [json.loads(events.stdout.readline())]
    while seen[-1]["id"] != "web-1":  # the last of the retained processes that is certain to be there
        seen.append(json.loads(events.stdout.readline()))
    assert holdfast("run", "--id", "short", "--", "sh", "-c", "exit 4").returncode == 4
    while (seen[-1]["id"], seen[-1]["event"]) != ("short", "end"):
        seen.append(json.loads(events.stdout.readline()))
    events.kill()
    events.communicate()
    assert [each["event"] for each in seen if each["id"] == "short"] == ["start", "end"]
    assert (seen[-1]["exitCode"], seen[-1]["kind"]) == (4, "process")
    assert [(each["id"], each["event"]) for each in seen[:2]] == [("good", "start"), ("good", "end")]


def test_events_of_the_past_as_text(holdfast: Holdfast) -> None:
    found = lines(holdfast, "events", "--since", "1h", "--until", "0s", "--kind", "shell", "--kind", "process")
    assert any("  end  process  bad  pid " in line and line.endswith("  exit 3") for line in found)
    assert any("  start  shell  live  pid " in line for line in found)
    assert lines(holdfast, "events", "--until", "0s") == []
    refused = holdfast("events", "--since", "yesterday")
    assert (refused.returncode, b"'yesterday' is not a time" in refused.stderr) == (1, True)


def test_each_start_and_end_is_one_event() -> None:
    running = ProcessInfo("p", 7, ("a", "b"), "/", False, True, False, 10.0)
    ended = msgspec.structs.replace(running, running=False, closed=True, exited_at=12.0, exit_code=0)
    again = msgspec.structs.replace(running, started_at=20.0)
    shell = ShellStatus("s", "/bin/sh", 8, "idle", "/", 11.0)
    closed = msgspec.structs.replace(shell, state="closed", exit_code=1)
    life = LifeCycle()
    assert [each.event for each in life.update([running], [], [shell], 11.5)] == ["start", "start"]
    assert [(each.kind, each.time) for each in life.update([ended], [], [closed], 13.0)] == [
        ("process", 12.0),
        ("shell", 13.0),
    ]
    assert life.update([ended], [], [closed], 14.0) == []
    assert [each.event for each in life.update([again], [], [], 21.0)] == ["start"]


# --- logs -----------------------------------------------------------------------------------------------------


def test_logs_of_the_last_lines_and_of_a_time(holdfast: Holdfast) -> None:
    script = "echo one; read x; echo two; echo err >&2; printf three"
    started = holdfast.start("run", "--id", "said", "--", "sh", "-c", script, stdin=subprocess.PIPE)
    assert started.stdin is not None
    assert started.stdout is not None
    assert started.stdout.readline() == b"one\n"
    (first,) = lines(holdfast, "logs", "--json", "--timestamps", "said")
    middle = json.loads(first)["time"] + 0.2  # more than the resolution of the times
    while time.time() <= middle:
        holdfast("ps", "--quiet")
    started.communicate(b"\n", timeout=60)
    assert holdfast("logs", "--tail", "2", "--stdout", "said").stdout == b"two\nthree"
    assert holdfast("logs", "-n", "0", "said").stdout == b""
    assert holdfast("logs", "--tail", "all", "said").stdout == b"one\ntwo\nthree"
    late = holdfast("logs", "--since", f"@{middle}", "said")
    assert (late.stdout, late.stderr) == (b"two\nthree", b"err\n")
    early = holdfast("logs", "--until", f"@{middle}", "--timestamps", "--follow", "said")
    assert (early.stderr, early.stdout[24:]) == (b"", b" one\n")
    assert datetime.fromisoformat(early.stdout[:24].decode()).timestamp() < middle
    (event,) = lines(holdfast, "logs", "--json", "--since", f"@{middle}", "--tail", "1", "--stdout", "said")
    assert json.loads(event)["time"] > middle
    assert holdfast("logs", "--tail", "many", "said").returncode == 2


def test_logs_follow_after_the_tail(holdfast: Holdfast) -> None:
    script = "echo one; echo two; read x; echo three"
    started = holdfast.start("run", "--id", "more", "--", "sh", "-c", script, stdin=subprocess.PIPE)
    assert started.stdin is not None
    assert started.stdout is not None
    assert started.stdout.readline() + started.stdout.readline() == b"one\ntwo\n"
    logs = holdfast.start("logs", "--follow", "--tail", "1", "--timestamps", "more")
    assert logs.stdout is not None
    assert logs.stdout.readline().endswith(b"Z two\n")
    started.communicate(b"\n", timeout=60)
    assert logs.communicate(timeout=60)[0].endswith(b"Z three\n")
    assert logs.returncode == 0
