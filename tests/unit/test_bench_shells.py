"""Verdicts of the comparison of shells, and when a target is reached. Nothing here is measured."""

from __future__ import annotations

import pytest

from bench.live_shells import Answer, file_of_lines
from bench.measure import Bound, Target, is_reached
from bench.shells import TIMES_OUT, Edge, Outcome, difference, raised, verdict

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
