"""`python -m bench.e2b_sdk [NAME ...]`: the rows of the E2B server, from the samples of `bench.integration_e2b`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

from bench import report
from bench.measure import Row, Target, Unit, compare, figures, latencies
from tests.support.integrations import interpreter, suite_variables

PROGRAM_SECONDS: Final = 900
#: Name of the samples: what is measured, its baseline, unit and target.
ROWS: Final[dict[str, tuple[str, str, Unit, Target | None]]] = {
    # The SDK runs every command in a login shell, which alone takes three times as long as `true`.
    "exec": (
        'E2B `commands.run("true")`',
        '`box.exec(["/bin/bash", "-l", "-c", "true"])`, the same process',
        "ms",
        Target("ratio at most", 3.0),
    ),
    "true": ('E2B `commands.run("true")`', '`box.exec(["true"])`, without a shell', "ms", None),
    "write": ("E2B `files.write` of 100 MB", "`box.write_file`", "MB/s", None),
    "read": ("E2B `files.read` of 100 MB", "`box.read_file`", "MB/s", None),
    "sandboxes": ("100 sandboxes of one E2B server, each with a command", "the same by `Fleet`", "ms", None),
}


def measure(names: list[str]) -> list[Row]:
    """The rows; none if the environment of the SDK is missing."""
    python = interpreter("e2b")
    if python is None:
        sys.stderr.write("no environment for e2b: make integrations ONLY=e2b\n")
        return []
    with suite_variables() as variables:
        done = subprocess.run(
            [python, Path(__file__).with_name("integration_e2b.py"), *names],
            env=variables,
            stdout=subprocess.PIPE,
            timeout=PROGRAM_SECONDS,
            check=True,
        )
    samples: dict[str, dict[str, list[list[float]]]] = json.loads(done.stdout.splitlines()[-1])
    rows = []
    for name, taken in samples.items():
        what, baseline_what, unit, target = ROWS[name]
        both = [
            latencies(taken[each]) if unit == "ms" else figures([one for (one,) in taken[each]])
            for each in ("baseline", "holdfast")
        ]
        rows.append(
            compare(
                f"e2b-{name}",
                what,
                unit,
                baseline_what=baseline_what,
                baseline=both[0],
                measured=both[1],
                target=target,
            )
        )
    return rows


def main() -> int:
    print(report.table(measure(sys.argv[1:])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
