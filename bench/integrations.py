"""`python -m bench.integrations [NAME ...]`: a framework's own provider beside ours, in one run.

Each framework has a program (`bench/integration_NAME.py`) that runs in the environment of `make integrations` and
prints its samples as JSON: for each measurement the rounds of both contenders, taken in turns. To add a framework:
its program, and its rows in `FRAMEWORKS`. An environment that is missing is named, and its rows are left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from bench import report
from bench.measure import Row, Target, Unit, compare, figures, latencies
from tests.support.integrations import interpreter, suite_variables

#: For one framework: Inspect's own `exec_remote` alone takes seconds for each sample.
PROGRAM_SECONDS: Final = 900


class Measurement(msgspec.Struct, frozen=True):
    """One row of a framework. `name` is the key of its samples; a rate is one figure a round."""

    name: str
    what: str
    baseline_what: str
    unit: Unit = "ms"
    target: Target | None = None
    note: str = ""


FRAMEWORKS: Final[dict[str, tuple[Measurement, ...]]] = {
    "inspect": (
        Measurement(
            "exec",
            '`sandbox().exec(["true"])`',
            "Inspect's `local`: a child process, without isolation",
            target=Target("ratio at most", 3.0),
        ),
        Measurement(
            "exec_remote",
            '`exec_remote(["true"], stream=False)`',
            "Inspect's `local`",
            target=Target("ratio at most", 0.1),
        ),
        Measurement(
            "line", "from a printed line to its event", "Inspect's `local`", target=Target("ratio at most", 0.1)
        ),
        Measurement(
            "output", "`exec` with 10 MB of output", "Inspect's `local`", target=Target("ratio at most", 3.0)
        ),
        Measurement(
            "start",
            "`sample_init` until a command has ended",
            "Inspect's `local`: a directory, without isolation",
            note="a jail",
        ),
    ),
}


def measure(name: str) -> list[Row]:
    """The rows of one framework; none if its environment is missing."""
    python = interpreter(name)
    if python is None:
        sys.stderr.write(f"{name}: no environment: make integrations ONLY={name}\n")
        return []
    program = Path(__file__).with_name(f"integration_{name.replace('-', '_')}.py")
    with suite_variables() as variables:
        done = subprocess.run(
            [python, program], env=variables, stdout=subprocess.PIPE, timeout=PROGRAM_SECONDS, check=True
        )
    samples: dict[str, dict[str, list[list[float]]]] = json.loads(done.stdout.splitlines()[-1])
    rows: list[Row] = []
    for each in FRAMEWORKS[name]:
        theirs, ours = samples[each.name]["baseline"], samples[each.name]["holdfast"]
        if each.unit == "ms":
            taken = latencies(theirs), latencies(ours)
        else:
            taken = figures([one for (one,) in theirs]), figures([one for (one,) in ours])
        rows.append(
            compare(
                f"{name}-{each.name}",
                each.what,
                each.unit,
                baseline_what=each.baseline_what,
                baseline=taken[0],
                measured=taken[1],
                target=each.target,
                note=each.note,
            )
        )
    return rows


def main() -> int:
    rows = [row for name in sys.argv[1:] or FRAMEWORKS for row in measure(name)]
    print(report.table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
