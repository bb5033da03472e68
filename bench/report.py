"""The report of a run: a plain table, a Markdown table for docs/benchmarks.md, and JSON with every round.

The module writes only the files whose paths it is given.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Sequence
from typing import Final

import msgspec

import holdfast
from bench.measure import Row

#: The table of `python -m bench` is between `<!-- bench -->` and `<!-- /bench -->`.
MARK: Final = "bench"
COLUMNS: Final = ("what", "baseline", "measured", "ratio", "target", "reached")


class Machine(msgspec.Struct, frozen=True, rename="camel"):
    """Where the figures come from."""

    cores: int
    processor: str
    memory_bytes: int
    kernel: str
    python: str
    holdfast: str
    date: str
    load: float


class Report(msgspec.Struct, frozen=True, rename="camel"):
    """One run."""

    machine: Machine
    quick: bool
    seconds: float
    rows: tuple[Row, ...]
    #: Benchmarks that did not come to their end, and why.
    failures: dict[str, str]


def this_machine() -> Machine:
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        processor=_processor(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        kernel=f"{platform.system()} {platform.release()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        holdfast=holdfast.__version__,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        load=round(os.getloadavg()[0], 2),
    )


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
        return next(names, platform.machine())


def facts(report: Report) -> str:
    machine = report.machine
    return (
        f"{machine.cores} cores ({machine.processor}), {machine.memory_bytes / 2**30:.0f} GiB, {machine.kernel}, "
        f"{machine.python}, holdfast {machine.holdfast}, {machine.date}, load {machine.load} at the start"
        + (", quick run: the figures mean little" if report.quick else "")
    )


def cells(row: Row) -> tuple[str, str, str, str, str, str]:
    """One row as text, in the order of `COLUMNS`."""
    return (
        row.what,
        f"{_figure(row.baseline, row.baseline_p99, row)}, {row.baseline_what}",
        _figure(row.measured, row.measured_p99, row) + (f", {row.note}" if row.note else ""),
        f"{row.ratio:.2f} x",
        _target(row),
        {True: "yes", False: "no", None: ""}[row.reached],
    )


def table(rows: Sequence[Row]) -> str:
    lines = [COLUMNS, *(tuple(cell.replace("`", "") for cell in cells(row)) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def markdown(report: Report) -> str:
    return f"{facts(report)}. Latencies are p50 / p99.\n\n{pipes([COLUMNS, *map(cells, report.rows)])}"


def pipes(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table of lines of cells; the first line is the head."""
    head, *rows = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def write_markdown(path: str, report: Report, mark: str = MARK) -> None:
    """Replace the text of a page between the marks by the table."""
    write_into(path, markdown(report), mark)


def write_into(path: str, text: str, mark: str) -> None:
    """Replace the text between `<!-- MARK -->` and `<!-- /MARK -->` of a page."""
    with open(path, encoding="utf-8") as file:
        page = file.read()
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    marks = re.compile(f"(?<={begin}\n).*?(?={end})", re.DOTALL)
    if len(marks.findall(page)) != 1:
        raise ValueError(f"{path}: wants {begin} and {end} once, each on a line of its own")
    with open(path, "w", encoding="utf-8") as file:
        file.write(marks.sub(lambda _: text + "\n", page))


def write_json(path: str, report: Report) -> None:
    with open(path, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def _figure(figure: float, p99: float | None, row: Row) -> str:
    return f"{digits(figure)}{'' if p99 is None else f' / {digits(p99)}'} {row.unit}"


def digits(figure: float) -> str:
    """Three significant digits, and no more than the noise leaves."""
    if figure >= 100:
        return f"{figure:,.0f}"
    if figure >= 10:
        return f"{figure:.1f}"
    return f"{figure:.2f}" if figure >= 1 else f"{figure:.3f}"


def _target(row: Row) -> str:
    target = row.target
    if target is None:
        return ""
    if not target.bound.startswith("ratio"):
        return f"{target.bound} {digits(target.limit)} {row.unit}"
    return f"{target.bound.removeprefix('ratio ')} {target.limit:g} x"
