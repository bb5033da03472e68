"""`python -m fuzz [NAME ...] --seconds 60`: run targets under atheris, print a table, keep the input of a crash.

Ends with 0 if every promise held, with 1 if one was broken, and with 2 if atheris is not to be had here.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from fuzz.target import Target
from fuzz.targets import targets

#: Parsers of messages meet their limits long before this; longer inputs only take longer.
MAX_INPUT_BYTES: Final = 8_192
#: One input that takes so long is a finding by itself.
SLOW_SECONDS: Final = 10
MEMORY_MB: Final = 2_048


class Outcome(NamedTuple):
    name: str
    executions: int
    coverage: int
    #: Where the input is that broke a promise.
    crash: Path | None
    message: str


def main() -> int:
    known = targets()
    options = _options(list(known))
    if options.repeat is not None:
        return _repeat([known[name] for name in options.names], options.repeat)
    if importlib.util.find_spec("atheris") is None:
        version = ".".join(map(str, sys.version_info[:2]))
        sys.stderr.write(
            f"atheris is not installed: pip install -e '.[fuzz]'. It has wheels for CPython 3.11 to 3.13 on Linux "
            f"x86_64; this is {version} on {sys.platform} {os.uname().machine}.\n"
        )
        return 2
    outcomes = []
    for name in options.names or known:
        sys.stderr.write(f"{name} ...\n")
        outcomes.append(_fuzz(name, options.seconds, options.crashes))
    print(_table(outcomes))
    for outcome in outcomes:
        if outcome.message:
            sys.stderr.write(f"\n{outcome.name}:\n{outcome.message}\n")
        if outcome.crash is not None:
            command = f"python -m fuzz {outcome.name} --repeat {outcome.crash}"
            sys.stderr.write(f"{outcome.name}: the input is kept; repeat it with: {command}\n")
    return 1 if any(outcome.message for outcome in outcomes) else 0


def _fuzz(name: str, seconds: int, crashes: Path) -> Outcome:
    crashes.mkdir(parents=True, exist_ok=True)
    prefix = f"{crashes}/{name}-"
    before = set(crashes.glob(f"{name}-*"))
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "fuzz.instrumented", name, directory),
                f"-max_total_time={seconds}",
                f"-artifact_prefix={prefix}",
                f"-max_len={MAX_INPUT_BYTES}",
                f"-timeout={SLOW_SECONDS}",
                f"-rss_limit_mb={MEMORY_MB}",
                "-print_final_stats=1",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    executions = re.findall(r"stat::number_of_executed_units: (\d+)", done.stdout)
    coverage = re.findall(r"\bcov: (\d+)", done.stdout)
    new = sorted(set(crashes.glob(f"{name}-*")) - before)
    return Outcome(
        name,
        int(executions[-1]) if executions else 0,
        int(coverage[-1]) if coverage else 0,
        new[0] if new else None,
        _failure(done.stdout) if done.returncode else "",
    )


def _failure(printed: str) -> str:
    """The traceback, if there is one; else the last lines of libFuzzer's output."""
    _, found, rest = printed.partition("=== Uncaught Python exception: ===")
    return rest.partition("\n==")[0].strip() if found else printed[-2_000:]


def _repeat(chosen: list[Target], path: Path) -> int:
    """Without atheris, so that a debugger can be used."""
    if len(chosen) != 1:
        raise SystemExit("--repeat wants one target")
    chosen[0].run(path.read_bytes())
    print(f"{chosen[0].name}: every promise holds for {path}")
    return 0


def _table(outcomes: list[Outcome]) -> str:
    lines = ["| target | executions | branches seen | |", "|---|---|---|---|"]
    lines += [
        f"| {each.name} | {each.executions:,} | {each.coverage:,} | {'broken' if each.message else 'holds'} |"
        for each in outcomes
    ]
    return "\n".join(lines)


def _options(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Throw bytes at every parser.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(names)}")
    parser.add_argument("--seconds", type=int, default=30, help="for each target (%(default)s)")
    parser.add_argument("--crashes", type=Path, default=Path("fuzz/crashes"), help="where inputs go (%(default)s)")
    parser.add_argument("--repeat", type=Path, metavar="FILE", help="give one input to one target")
    options = parser.parse_args()
    for name in options.names:
        if name not in names:
            parser.error(f"no target is called {name!r}: {', '.join(names)}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
