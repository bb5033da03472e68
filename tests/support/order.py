"""The order in which several workers run the tests, and which tests one worker runs together. Pure."""

from __future__ import annotations

from typing import Final

#: The longest first, so that no worker works alone in the end; what is not named comes last.
LONGEST_FIRST: Final = (
    "tests/sandbox/",
    "tests/faults/",
    "tests/service/",
    "tests/integrations/",
    "tests/process/",
    "tests/e2e/",
    "tests/contract/",
    "tests/unit/test_docs.py",
)
#: One worker runs the files of each: it starts Docker, Podman and sshd and imports the images once. The first that
#: a name begins with counts. They take about equally long; one worker with all of them would finish last.
TOGETHER: Final = ("tests/sandbox/test_fleet_", "tests/sandbox/test_sandbox_", "tests/sandbox/")


def rank(nodeid: str) -> int:
    """The place of a test in the order: that of the first name in `LONGEST_FIRST` that it begins with."""
    found = (location for location, start in enumerate(LONGEST_FIRST) if nodeid.startswith(start))
    return next(found, len(LONGEST_FIRST))


def unit_of_work(nodeid: str) -> str:
    """Tests of one unit run in one worker: those of a file, with fixtures made once, or of a row in `TOGETHER`."""
    return next((start for start in TOGETHER if nodeid.startswith(start)), nodeid.partition("::")[0])
