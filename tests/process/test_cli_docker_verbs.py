"""The verbs and options that Docker has too, as real processes against one real server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

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
