"""Verdicts and tables of the comparisons with others, and when a target is reached. Nothing here is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import exec_servers, pythons, shell_sessions, shells
from bench.live_shells import Answer, file_of_lines
from bench.measure import Bound, Target, compare, figures, is_reached
from bench.shell_edges import TIMES_OUT, Edge, Outcome, difference, raised, verdict
from bench.shells import Cell
from tests.support.integrations import names

ECHO = Edge("a line", "echo a", output=b"a\n")
TIMED = Edge("a timeout", "sleep 30", times_out=True)


@pytest.mark.parametrize(
    ("came", "expected"),
    [
        (b"a\nb\n", ""),
        (b"a\r\nb\r\n", "line ends changed"),
        (b"a\nb", "gives `b'a\\nb'`"),
        (b"", "gives `b''`"),
        (b"x" * 2000, "2,000 bytes for 4"),
    ],
)
def test_an_output_is_told_by_what_is_wrong_with_it(came: bytes, expected: str) -> None:
    assert difference(b"a\nb\n", came) == expected


@pytest.mark.parametrize(
    ("edge", "outcome", "expected"),
    [
        (ECHO, Outcome(Answer(b"a\n", 0), "", ""), "right"),
        (ECHO, Outcome(Answer(b"a\r\n", 0), "", ""), "line ends changed"),
        (ECHO, Outcome(Answer(b"", 0), "", ""), "gives `b''`"),
        (ECHO, Outcome(Answer(b"a\n", None), "", ""), "exit code None"),
        (ECHO, Outcome(None, "raises EOF", "next command raises EOF"), "raises EOF, next command raises EOF"),
        (ECHO, Outcome(None, TIMES_OUT, ""), TIMES_OUT),
        (TIMED, Outcome(None, TIMES_OUT, ""), "right"),
        (TIMED, Outcome(None, TIMES_OUT, "next command times out"), "next command times out"),
        (TIMED, Outcome(None, "raises EOF", ""), "raises EOF"),
        (TIMED, Outcome(Answer(b"", 0), "", ""), "does not time out"),
    ],
)
def test_a_verdict_names_all_that_was_wrong(edge: Edge, outcome: Outcome, expected: str) -> None:
    assert verdict(edge, outcome) == expected


@pytest.mark.parametrize(("code", "expected"), [(2, "right"), (0, "exit code 0"), (None, "exit code None")])
def test_any_exit_code_but_0_may_be_wanted(code: int | None, expected: str) -> None:
    edge = Edge("an open quote", "echo 'oops", exit_code=None)
    assert verdict(edge, Outcome(Answer(b"", code), "", "")) == expected


def test_what_comes_after_a_shell_that_is_to_end_does_not_count() -> None:
    edge = Edge("exit", "exit 3", exit_code=3, stays=False)
    assert verdict(edge, Outcome(Answer(b"", 3), "", "next command raises EOF")) == "right"


def test_every_timeout_is_told_as_one() -> None:
    class OfAPeer(RuntimeError, TimeoutError):
        pass

    assert [raised(TimeoutError()), raised(OfAPeer()), raised(EOFError())] == [
        TIMES_OUT,
        TIMES_OUT,
        "raises EOFError",
    ]


def test_the_lines_have_the_size_and_are_all_different() -> None:
    with file_of_lines(1000) as (path, lines), open(path, "rb") as file:
        assert file.read() == lines
    assert len(lines) == 1000
    assert len(set(lines.splitlines())) == 100


@pytest.mark.parametrize(
    ("bound", "reached"),
    [
        ("ratio at most", [True, False, True, False]),
        ("ratio at least", [False, True, False, True]),
        ("at most", [True, True, False, False]),
        ("at least", [False, False, True, True]),
    ],
)
def test_a_bound_is_on_the_ratio_or_on_the_figure(bound: Bound, reached: list[bool]) -> None:
    figures = [(1.0, 1.0), (3.0, 1.0), (1.0, 3.0), (3.0, 3.0)]
    assert [is_reached(Target(bound, 2.0), ratio, measured) for ratio, measured in figures] == reached


# --- tables ------------------------------------------------------------------------------------------------------


NAMES = {"bash": "bash 5", "pexpect": "pexpect 4", "tmux": "tmux 3", "holdfast": "ours"}


def test_every_make_has_an_adapter_and_an_environment_that_can_be_made() -> None:
    assert list(shells.MAKES) == list(shell_sessions.MAKES)
    assert {each for each in shells.MAKES.values() if each is not None} <= set(names())


@pytest.mark.parametrize("mark", [shells.MARK, shells.EDGES_MARK, exec_servers.MARK, pythons.MARK])
def test_the_page_has_the_marks_of_each_table_once(mark: str) -> None:
    lines = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text().splitlines()
    assert [lines.count(f"<!-- {mark} -->"), lines.count(f"<!-- /{mark} -->")] == [1, 1]


def test_a_table_has_a_line_for_each_make_or_for_each_edge() -> None:
    column = {name: Cell(f"{name} cell") for name in NAMES}
    assert shells.by_make(NAMES, {"start": column}).splitlines()[::2] == [
        "|  | start |",
        "| bash 5 | bash cell |",
        "| tmux 3 | tmux cell |",
    ]
    assert shells.by_edge(NAMES, {"`exit 3`": column}).splitlines()[::2] == [
        "|  | bash 5 | pexpect 4 | ours |",
        "| `exit 3` | bash cell | pexpect cell | holdfast cell |",
    ]


def test_a_peer_is_ahead_only_with_a_complete_figure() -> None:
    column = {"bash": Cell("", 0.1), "pexpect": Cell("", 1.0), "tmux": Cell("1 left"), "holdfast": Cell("", 2.0)}
    assert shells.ahead(NAMES, {"start": column}) == ["- start: pexpect 4 (2 x)"]
    rates = {"pexpect": Cell("", -100.0), "holdfast": Cell("", -50.0)}
    assert shells.ahead(NAMES, {"rate": rates}) == ["- rate: pexpect 4 (2 x)"]
    assert shells.ahead(NAMES, {"start": {**column, "holdfast": Cell("", 0.5)}}) == []
    assert shells.ahead(NAMES, {"start": {**column, "holdfast": Cell(TIMES_OUT)}}) == []


def test_the_latest_of_each_version_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"a": "3.13.0t", "b": "3.11.7", "c": "3.13.0", "d": "3.11.12", "e": None}
    monkeypatch.setattr(pythons, "described", found.get)
    assert pythons.interpreters("abcde") == {"3.11.12": "d", "3.13.0": "c", "3.13.0t": "a"}


def test_the_table_of_versions_has_the_medians_of_the_turns() -> None:
    runs = [
        [compare("row", "what", "MB", baseline_what="", baseline=figures([10.0]), measured=figures([each]))]
        for each in (20.0, 90.0, 30.0)
    ]
    assert pythons.table({"3.11.7": runs, "3.13.0": runs[:1]}).splitlines()[::2] == [
        "|  | Python 3.11.7 | Python 3.13.0 |",
        "| what | 30.0 MB, 3.00 x | 20.0 MB, 2.00 x |",
    ]
