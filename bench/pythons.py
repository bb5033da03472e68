"""Some rows by every Python of this machine: `python -m bench.pythons` prints a table with a column for each.

Each interpreter gets a virtual environment with the dependencies of Holdfast, in
`$XDG_CACHE_HOME/holdfast-pythons/VERSION`; made once, and again when the dependencies change. The program runs
itself with `--here` by each of them, in turns. Interpreters are found in PATH and below `~/.pyenv/versions`.
Touches those environments, the processes that it starts, and with `--markdown` a page.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from bench import live_shells, memory, report, starts, streams, terminals
from bench.measure import FULL, QUICK, Row, Scale

ROOT: Final = Path(__file__).parents[1]
#: A subset that takes some seconds a run, and needs no extra.
BENCHMARKS: Final[dict[str, Callable[[Scale], Awaitable[list[Row]]]]] = {
    "true": starts.start_to_exit,
    "cat": streams.echo,
    "shell-true": live_shells.true_in_a_shell,
    "terminal-key": terminals.key_echo,
    "rss-idle": memory.idle,
}
#: What tmux does by itself does not depend on Python.
LEFT_OUT: Final = "-tmux"
VERSIONS: Final = range(11, 16)
#: A copy of the requirements, written last.
STAMP: Final = "requirements.txt"
#: Turns of every interpreter; a row has the median over them.
TURNS: Final = 3
MARK: Final = "pythons"
#: The name of an interpreter in the table: a free-threaded build has a `t` after its version.
DESCRIBE: Final = """
import sys, sysconfig, venv, ensurepip
free = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
print("%d.%d.%d" % sys.version_info[:3] + free, int(sys.version_info >= (3, 11)))
"""


def described(candidate: str) -> str | None:
    """The version of an interpreter, or None if it cannot be run or is too old."""
    # A name in PATH may be a stub of a version manager, so each is run rather than looked up.
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run([candidate, "-c", DESCRIBE], capture_output=True, text=True, timeout=30, check=True)
        version, is_new = done.stdout.split()
        return version if is_new == "1" else None
    return None


def order(version: str) -> tuple[int, int, int, bool]:
    """The key by which versions are sorted: numbers, and a free-threaded build after the other."""
    major, minor, micro = (int(part) for part in version.removesuffix("t").split("."))
    return major, minor, micro, version.endswith("t")


def interpreters(candidates: Sequence[str]) -> dict[str, str]:
    """Each minor version and build once, the latest of each, in their order."""
    found: dict[tuple[int, int, bool], tuple[str, str]] = {}
    for candidate in candidates:
        if version := described(candidate):
            major, minor, _, free = order(version)
            known = found.get((major, minor, free))
            if known is None or order(known[0]) < order(version):
                found[major, minor, free] = (version, candidate)
    return dict(sorted(found.values(), key=lambda each: order(each[0])))


def candidates() -> list[str]:
    named = [f"python3.{minor}{build}" for minor in VERSIONS for build in ("", "t")]
    managed = sorted(Path.home().glob(".pyenv/versions/3.*/bin/python"))
    return [*filter(shutil.which, named), *map(str, managed)]


def environment(version: str, python: str) -> Path | None:
    """The Python of a virtual environment with the dependencies; None, with a message, if they do not install."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    location = Path(cache, "holdfast-pythons", version)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = "\n".join(project["dependencies"])
    made = location / "bin" / "python"
    with contextlib.suppress(FileNotFoundError):
        if (location / STAMP).read_text() == wanted:
            return made
    pip = [str(made), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *project["dependencies"]]
    for command in ([python, "-m", "venv", "--clear", str(location)], pip):
        if subprocess.run(command).returncode != 0:
            sys.stderr.write(f"{version}: failed: {' '.join(command)}\n")
            return None
    (location / STAMP).write_text(wanted)
    return made


def measured(python: Path, only: Sequence[str], *, quick: bool) -> list[Row]:
    """The rows of one run by an interpreter."""
    arguments = ["--here", "--only", *only, *(["--quick"] if quick else [])]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [python, "-m", "bench.pythons", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    )
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Row])


async def here(only: Sequence[str], scale: Scale) -> list[Row]:
    rows = [row for name in only for row in await BENCHMARKS[name](scale)]
    return [row for row in rows if not row.name.endswith(LEFT_OUT)]


def table(runs: dict[str, list[list[Row]]]) -> str:
    """The rows of several runs by each interpreter: the medians, with the ratio to the baseline of the same run."""
    lines = [["", *(f"Python {version}" for version in runs)]]
    rows = [row.name for row in next(iter(runs.values()))[0]]
    for number, _ in enumerate(rows):
        taken = [[run[number] for run in each] for each in runs.values()]
        lines.append([taken[0][0].what, *map(_cell, taken)])
    return report.pipes(lines)


def _cell(rows: Sequence[Row]) -> str:
    median = statistics.median(row.measured for row in rows)
    p99s = [row.measured_p99 for row in rows if row.measured_p99 is not None]
    worst = f" / {report.digits(statistics.median(p99s))}" if p99s else ""
    ratio = statistics.median(row.ratio for row in rows)
    return f"{report.digits(median)}{worst} {rows[0].unit}, {ratio:.2f} x"


def main() -> int:
    options = _options()
    if options.here:
        rows = asyncio.run(here(options.only, QUICK if options.quick else FULL))
        print(json.dumps(msgspec.to_builtins(rows)))
        return 0
    machine = report.this_machine()
    environments: dict[str, Path] = {}
    for version, python in interpreters(options.python or candidates()).items():
        if (made := environment(version, python)) is not None:
            environments[version] = made
    runs: dict[str, list[list[Row]]] = {version: [] for version in environments}
    for _ in range(1 if options.quick else TURNS):
        for version, made in environments.items():
            sys.stderr.write(f"{version} ...\n")
            try:
                runs[version].append(measured(made, options.only, quick=options.quick))
            except subprocess.CalledProcessError as error:
                sys.stderr.write(f"{version}: exit code {error.returncode}\n")
    complete = {version: each for version, each in runs.items() if each}
    if not complete:
        return 1
    head = report.facts(report.Report(machine, options.quick, 0.0, (), {}))
    text = f"{head}. The ratio is that to the row's baseline.\n\n{table(complete)}"
    print(text)
    if options.markdown is not None:
        report.write_into(options.markdown, text, MARK)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.pythons", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few samples: shows that it runs, not how fast")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=BENCHMARKS,
        default=list(BENCHMARKS),
        metavar="NAME",
        help=", ".join(BENCHMARKS),
    )
    parser.add_argument(
        "--python", nargs="+", metavar="PATH", help="these interpreters instead of all that are found"
    )
    parser.add_argument("--markdown", metavar="FILE", help="a page that gets the table between its marks")
    parser.add_argument("--here", action="store_true", help="print the rows of the running interpreter as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
