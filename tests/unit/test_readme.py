"""The README's tables: each edge case has a case of the gauntlet, each figure is that of the benchmarks page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.process.gauntlet.readme import README

ROOT = Path(__file__).parents[2]
#: A number and its unit. p50 is the first of two numbers.
_FIGURE = re.compile(r"([\d,.]+)(?: / [\d,.]+)? (ms|MB/s)")
#: The row of the README, and that of the benchmarks page: its name, and a part of its baseline.
FIGURES = {
    "`/bin/true` from start to exit, Unix socket, p50": ("`/bin/true`, start to exited, Unix socket", "asyncio"),
    "1 GB of output to a client, Unix socket": ("1 GB to a client, Unix socket", "os.read"),
    "`exec` in a running container, p50": ('`exec(["true"])` in a container, over the channel', "`docker exec`"),
    "`true` in a live shell, p50": ("`true` in a live shell, Unix socket", "bare bash"),
    "1,000 running processes listed again after a `kill -9` of the server": (
        "kill -9 of the server to all of 1,000 processes listed running",
        "one process",
    ),
}


def rows(path: str, header: str) -> list[list[str]]:
    """The rows of the table that begins with this header, as cells."""
    lines = (ROOT / path).read_text().splitlines()
    table = lines[lines.index(header) + 2 :]
    end = next((at for at, line in enumerate(table) if not line.startswith("|")), len(table))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[:end]]


def test_each_edge_case_is_a_case_of_the_gauntlet() -> None:
    found = rows("README.md", "| input | other systems | Holdfast |")
    assert [row[0] for row in found] == list(README)
    assert all(README.values())


def figure(cell: str) -> tuple[str, str]:
    match = _FIGURE.search(cell)
    assert match is not None, cell
    return match[1].replace(",", ""), match[2]


def test_all_five_figures_are_compared() -> None:
    assert [row[0] for row in rows("README.md", "| measurement | baseline | Holdfast |")] == list(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_that_of_the_benchmarks_page(name: str) -> None:
    row = next(row for row in rows("README.md", "| measurement | baseline | Holdfast |") if row[0] == name)
    measured, baseline = FIGURES[name]
    header = "| what | baseline | measured | ratio | target | reached |"
    (source,) = (each for each in rows("docs/benchmarks.md", header) if each[0] == measured and baseline in each[1])
    for cell, original in zip(row[1:], source[1:3], strict=True):
        (shown, unit), (exact, exact_unit) = figure(cell), figure(original)
        digits = len(shown.partition(".")[2])
        assert (shown, unit) == (f"{float(exact):.{digits}f}", exact_unit)


def test_the_date_is_that_of_the_benchmarks_page() -> None:
    match = re.search(r"run of (\d{4}-\d\d-\d\d)", (ROOT / "README.md").read_text())
    assert match is not None
    assert f", {match[1]}, load " in (ROOT / "docs/benchmarks.md").read_text()
