"""The runner of `make test`: all tests on every core, then those that failed once more, one at a time.

A test that passes only the second time has a race, or the code under test has. Its id is printed after the summary
and appended to `build/passed-second-time.txt`. The table of skipped tests is printed last.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECOND_TIME = ROOT / "build" / "passed-second-time.txt"
#: Names the file into which conftest.py writes the outcomes of one run of pytest.
OUTCOMES = "HOLDFAST_TEST_OUTCOMES"
#: pytest's exit code when tests failed; any other non-zero code is not cured by a second run.
TESTS_FAILED = 1


def pytest(outcomes: Path, *arguments: str) -> int:
    """Run pytest with files in a directory of its own.

    pytest's default is one directory for all runs of a user, which every new run closes to other users; tests start
    programs as other users.
    """
    directory = outcomes.with_suffix("")
    return subprocess.run(
        [sys.executable, "-m", "pytest", f"--basetemp={directory}", *arguments],
        cwd=ROOT,
        env={**os.environ, OUTCOMES: str(outcomes)},
    ).returncode


def workers(cores: int) -> int:
    """Twice as many as there are cores: tests wait for grace periods, leases and other processes.

    At most four more, because each takes half a gigabyte.
    """
    return cores + min(cores, 4)


def main(arguments: list[str]) -> int:
    # A short path: tests make sockets below it, whose paths have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="hf-") as directory:
        first, second = Path(directory, "1.json"), Path(directory, "2.json")
        code = pytest(first, "-n", str(workers(len(os.sched_getaffinity(0)))), "--dist", "loadscope", *arguments)
        if not first.exists():
            return code or TESTS_FAILED
        found = json.loads(first.read_text())
        if code == TESTS_FAILED and found["failed"]:
            print("\nonce more, one at a time: the tests that failed", flush=True)
            code = pytest(second, "--last-failed", "--last-failed-no-failures", "none", "-vv")
            still = json.loads(second.read_text())["failed"] if second.exists() else found["failed"]
            note_second_time(sorted(set(found["failed"]) - set(still)))
    for line in found["skipped"]:
        print(line)
    return code


def note_second_time(names: list[str]) -> None:
    if not names:
        return
    SECOND_TIME.parent.mkdir(exist_ok=True)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with SECOND_TIME.open("a") as file:
        file.writelines(f"{now} {name}\n" for name in names)
    print(f"\npassed only the second time ({len(names)}; kept in {SECOND_TIME.relative_to(ROOT)}):")
    print("".join(f"  {name}\n" for name in names), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
