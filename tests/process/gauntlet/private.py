"""Commands that destroy the files through which the shell gets its commands. Pure data."""

from __future__ import annotations

from tests.process.gauntlet.case import BASH, Case, Closed, Step, case, ends

PRIVATE: tuple[Case, ...] = (
    case(
        "its own directory removed",
        Step('rm -rf "$(dirname "$BASH_SOURCE")"; echo removed', b"removed\n"),
        Step("echo next", b"next\n"),
        Step("cat", b"in", input="in", cwd="/", env={"A": "1"}),
        Step("(exit 3)", code=3),
        on=BASH,
    ),
    case(
        "its own directory emptied",
        Step('rm -rf "$(dirname "$BASH_SOURCE")"/*; echo removed', b"removed\n"),
        Step("echo next", b"next\n"),
        Step("(exit 3)", code=3),
        on=BASH,
    ),
    case(
        "its own command file overwritten",
        Step(': >"$BASH_SOURCE"; chmod 000 "$BASH_SOURCE"\necho went on', b"went on\n"),
        Step("echo next", b"next\n"),
        on=BASH,
    ),
    case(
        "known limit: its own directory removed, and with it the way to save its state",
        Step(
            'rm -rf "$(dirname "$BASH_SOURCE")"; set -e; false', b"", ends("/at_exit: No such file or directory"), 1
        ),
        Closed("exited with code 1"),
        on=BASH,
    ),
)
