"""The benchmark runs to its end and has every row of its table. How fast anything is, no test asserts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import integrations, shells
from bench.__main__ import BENCHMARKS
from bench.integrations import AT_MOST_EQUAL, CONTESTS, MARK
from tests.sandbox.real_agents import ALL_CHECKS as ALL_AGENT_CHECKS, require_agents
from tests.support.engines import Missing, need
from tests.support.postgres import postgres_programs

ROOT = Path(__file__).parents[2]
#: Every row, and its target: a bound and a limit. None is shown for comparison alone.
ROWS = {
    "true": ("ratio at most", 1.1),
    "true-exec": None,
    "true-16": ("ratio at least", 0.9),
    "true-16-exec": None,
    "cat": ("ratio at most", 4.0),
    "unix": ("ratio at least", 0.9),
    "websocket": ("ratio at least", 0.1),
    "forward-echo": ("ratio at most", 3.0),
    "forward-rate": ("ratio at least", 0.3),
    "forward-many": None,
    "rss-idle": ("at most", 40.0),
    "rss-process": ("at most", 30.0),
    "rss-flood": ("at most", None),
    "rss-flood-read": ("at most", None),
    "list-flooded": ("at most", 5.0),
    "list-other": ("at most", 5.0),
    "start-1000": ("ratio at most", 1.2),
    "start-1000-exited": None,
    "exec": ("ratio at most", 3.0),
    "cli-run": ("ratio at most", 4.0),
    "cli-ps": ("ratio at most", 4.0),
    "cli-logs": ("ratio at most", 4.0),
    "cli-wait": ("ratio at most", 4.0),
    "cli-kill": ("ratio at most", 4.0),
    "cli-completion": ("at most", 100.0),
    "shell-true": ("ratio at most", 25.0),
    "shell-true-p99": ("ratio at most", 10.0),
    "shell-program": ("ratio at most", 1.3),
    "shell-lines": ("ratio at least", 0.95),
    "shell-32": ("at least", 10_000.0),
    "shell-rss": ("at most", 50.0),
    "terminal-true": ("ratio at most", 30.0),
    "terminal-true-tmux": None,
    "terminal-key": ("ratio at most", 4.0),
    "terminal-key-tmux": None,
    "terminal-flood": ("ratio at least", 0.7),
    "terminal-screen": ("at most", 100.0),
    "terminal-screen-full": None,
    "terminal-screen-tmux": None,
    "terminal-rss": ("at most", 80.0),
    "upload": ("ratio at least", 0.3),
    "download": ("ratio at least", 0.3),
    "read-file": ("at most", 1.0),
    "kept-start": ("at most", None),
    "kept-start-exited": None,
    "kept-1000": ("at most", 2000.0),
    "kept-stream": None,
    "box-true": ("ratio at most", 2.0),
    "box-true-docker": ("ratio at most", 0.05),
    "box-first": ("ratio at most", 5.0),
    "box-second": ("at most", 300.0),
    "box-stream": ("ratio at least", 0.8),
    "box-line": ("at most", 5.0),
    "fleet-jail": ("ratio at most", 6.0),
    "fleet-pool": ("ratio at most", 2.0),
    "fleet-fork": ("ratio at most", 1.5),
    "fleet-many": None,
    "fleet-rss": ("at most", 1024.0),
    "fleet-docker": ("ratio at most", 1.5),
    "mcp-true": ("ratio at most", 3.0),
    "mcp-plain": ("ratio at most", 3.0),
    "bridge-call": ("at most", None),
    "bridge-first": ("at most", None),
    "bridge-streams": ("ratio at least", 0.5),
    "bridge-streams-unpaced": None,
    "bridge-rss": ("ratio at most", 1.05),
    "service-true": ("ratio at most", 4.0),
    "service-true-disk": ("ratio at most", 5.0),
    "service-true-http": None,
    "service-true-postgres": ("ratio at most", 5.0),
    "service-run": None,
    "service-run-disk": None,
    "service-run-http": None,
    "service-run-postgres": None,
    "service-rss": None,
    "service-monitor": ("at most", None),
    "service-200": ("ratio at least", 0.6),
    "service-200-latency": None,
    "service-200-http": None,
    "service-200-http-latency": None,
    "service-200-postgres": None,
    "service-200-postgres-latency": None,
    "service-shells": ("ratio at least", 0.5),
    "service-shells-latency": None,
}
#: Milliseconds, or percents of a core, that a row may have more than its baseline.
ADDED = {"kept-start": 0.15, "bridge-call": 1.0, "bridge-first": 1.0, "service-monitor": 2.0}


#: `make test` runs one benchmark of each kind. The others start engines, or hundreds of processes, shells or
#: sessions, which takes minutes: `make engines` runs them all.
BRIEF = (
    "true",
    "cat",
    "exec",
    "shell-true",
    "terminal-key",
    "read-file",
    "kept-start",
    "mcp",
    "bridge-call",
    "service-true",
)
SELECTED = list(BENCHMARKS) if "HOLDFAST_ALL_ENGINE_CHECKS" in os.environ else list(BRIEF)
#: The benchmark of each row, as the page has it.
BENCHMARK_OF = dict(
    re.findall(
        r"^\| `([a-z0-9-]+)` \| `([a-z0-9-]+)` \|", (ROOT / "docs" / "benchmarks.md").read_text(), re.MULTILINE
    )
)


def is_here(name: str) -> bool:
    """The benchmark leaves out missing peers, and prints their names."""
    if BENCHMARK_OF.get(name) not in SELECTED:
        return False
    if name.startswith(("box-", "fleet-docker")):
        try:
            need("docker", "dockerd", "busybox")
        except Missing:
            return False
        return True
    if "-postgres" in name:
        return postgres_programs() is not None
    return shutil.which("tmux") is not None or not name.endswith("-tmux")


HERE = {name: row for name, row in ROWS.items() if is_here(name)}


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", "bench", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, str]:
    """One quick run: its JSON, what it printed, and the page that it filled in."""
    directory = tmp_path_factory.mktemp("bench")
    page = directory / "page.md"
    page.write_text("before\n\n<!-- bench -->\nold\n<!-- /bench -->\n\nafter\n")
    done = bench("--quick", "--only", *SELECTED, "--json", directory / "results.json", "--markdown", page)
    assert done.returncode == 0, done.stderr
    return json.loads((directory / "results.json").read_text()), done.stdout, page.read_text()


def test_every_row_is_there_with_a_positive_figure(run: tuple[dict[str, Any], str, str]) -> None:
    result, _, _ = run
    assert [row["name"] for row in result["rows"]] == list(HERE)
    for row in result["rows"]:
        for figure in (row["baseline"], row["measured"], row["ratio"]):
            assert figure > 0, row
        assert all(figure > 0 for figure in row["baselineRounds"] + row["measuredRounds"]), row


def test_every_row_has_its_target(run: tuple[dict[str, Any], str, str]) -> None:
    result, _, _ = run
    rows = {row["name"]: row for row in result["rows"]}
    for name, wanted in HERE.items():
        row = rows[name]
        if wanted is None:
            assert (row["target"], row["reached"]) == (None, None)
            continue
        bound, limit = wanted
        if limit is None:
            # The retained output is on tmpfs: the server itself may grow by 10 MB.
            limit = row["baseline"] + ADDED[name] if name in ADDED else rows["rss-idle"]["measured"] + 10
        assert row["target"] == {"bound": bound, "limit": pytest.approx(limit)}
        figure = row["ratio"] if bound.startswith("ratio") else row["measured"]
        assert row["reached"] is (figure >= limit if bound.endswith("at least") else figure <= limit)


def test_the_machine_is_named(run: tuple[dict[str, Any], str, str]) -> None:
    result, printed, _ = run
    machine = result["machine"]
    assert machine["cores"] >= 1
    assert machine["python"].split()[1] == ".".join(map(str, sys.version_info[:3]))
    assert os.uname().release in machine["kernel"]
    assert machine["kernel"] in printed.splitlines()[0]


def test_the_table_goes_between_the_marks(run: tuple[dict[str, Any], str, str]) -> None:
    result, _, page = run
    before, table, after = re.split(r"<!-- /?bench -->", page)
    assert (before, after) == ("before\n\n", "\n\nafter\n")
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(HERE)
    assert {line.count("|") for line in lines} == {7}
    for row, line in zip(result["rows"], lines[2:], strict=True):
        assert line.startswith(f"| {row['what']} |")


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks\n")
    done = bench("--quick", "--only", "exec", "--json", tmp_path / "results.json", "--markdown", page)
    assert done.returncode == 1
    assert f"{page}: wants <!-- bench -->" in done.stderr
    assert page.read_text() == "no marks\n"
    assert [row["name"] for row in json.loads((tmp_path / "results.json").read_text())["rows"]] == ["exec"]


def test_every_row_is_explained() -> None:
    assert list(BENCHMARK_OF) == list(ROWS)


def test_every_row_of_other_software_is_explained() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    _, _, after = text.partition("| rows of `bench.integrations` |")
    table, _, _ = after.partition("\n\n")
    explained = [
        name for line in table.splitlines()[2:] for name in re.findall(r"`([a-z0-9-]+)`", line.split("|")[1])
    ]
    rows = [f"{name}-{row.name}" for name, contest in CONTESTS.items() for row in contest.rows]
    assert sorted(explained) == sorted(rows)
    assert f"<!-- {MARK} -->\n" in text


def test_rows_are_made_of_the_samples_of_a_contest(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = {"exec": {"baseline": [[0.002, 0.004]], "holdfast": [[0.001, 0.003]]}}
    monkeypatch.setattr(integrations, "interpreter", lambda _: Path(sys.executable))
    monkeypatch.setattr(integrations, "_samples", lambda *_: samples)
    (row,) = integrations.measure("deepagents")
    assert (row.name, row.baseline, row.measured, row.reached) == ("deepagents-exec", 3.0, 2.0, True)
    assert row.target == AT_MOST_EQUAL


def test_a_contest_without_its_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(integrations, "interpreter", lambda _: None)
    assert integrations.measure("inspect-docker") == []
    assert capsys.readouterr().err == "inspect-docker: no environment: make integrations ONLY=inspect\n"


def test_a_peer_measures_in_a_program_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    """Requests and replies of one program; a peer without its environment is named and left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shells, "interpreter", lambda _: None)
        with shells.running(["bash", "openhands"]) as peers:
            assert list(peers) == ["bash"]
            peer = peers["bash"]
            assert len(peer.ask("true", count=3)) == 3
            assert len(peer.ask("echo", count=3)) == 3
            with pytest.raises(shells.PeerError, match="raises FileNotFoundError"):
                peer.ask("stream", path="/nowhere")
    assert "openhands: no environment: make integrations ONLY=openhands\n" in capfd.readouterr().err


@pytest.mark.skipif(not ALL_AGENT_CHECKS, reason="only in `make agents`")
def test_exec_servers_are_compared_over_stdio() -> None:
    """Both servers take the same messages, and every byte of the output arrives."""
    require_agents()
    run = [sys.executable, "-m", "bench.exec_servers", "--only", "stdio", "--quick"]
    printed = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout
    head, _, *rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in printed.splitlines()]
    assert [name.split()[0] for name in head] == ["Codex", "holdfast"]
    assert len(rows) == 8
    assert all(cell for row in rows for cell in row)
    assert [cell.endswith("all of the bytes") for cell in rows[4]] == [True, True]
    assert rows[5][1].endswith("none of its processes left")
