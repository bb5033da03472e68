"""The soak runs to its end, kills its server on the way, and writes its files. No test asserts its growth."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUICK = ["--seconds", "4.5", "--kill-seconds", "2", "--warm-up-seconds", "0", "--sample-seconds", "0.2"]


def test_a_short_soak(tmp_path: Path) -> None:
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "bench.soak", *QUICK, "--output", str(tmp_path / "soak")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    # Whatever fills up in the first seconds may be called growth.
    assert done.returncode in (0, 1), done.stderr
    assert "1 kills of the server" in done.stdout, done.stderr
    rows = [line.split(" | ")[:2] for line in done.stdout.splitlines() if line.startswith("| ")]
    for who in ("server", "keeper", "client"):
        for quantity in ("RSS", "descriptors", "threads"):
            assert [f"| {who}", quantity] in rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["soak.csv", "soak.svg"]
