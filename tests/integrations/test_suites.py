"""The suites of other software pass against the adapters: each runs in its environment, with its own pytest."""

from __future__ import annotations

import pytest

from tests.support.integrations import SUITES, interpreter, names, run_suite, suites
from tests.support.parts import require


@pytest.mark.parametrize(
    ("name", "file", "expected"), [(name, file, count) for name in names() for file, count in suites(name).items()]
)
def test_suite(name: str, file: str, expected: str) -> None:
    python = interpreter(name)
    if python is None:
        pytest.skip(f"no environment for {name}: make integrations ONLY={name}")
    require("bwrap")

    summary, output = run_suite(python, SUITES / name / file)

    assert summary == expected, output


@pytest.mark.parametrize("name", names())
def test_every_suite_has_its_count(name: str) -> None:
    files = {path.name for pattern in ("suite_*.py", "slow_*.py") for path in (SUITES / name).glob(pattern)}
    lines = (SUITES / name / "counts.txt").read_text().splitlines()

    assert {line.partition(":")[0] for line in lines if line and not line.startswith("#")} == files
