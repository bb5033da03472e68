"""Commands that destroy the files the shell is told its commands by. Pure data."""

from __future__ import annotations

from gauntlet.case import ALIVE, BASH, Case, Step, case

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
        "its own directory removed, then a restart",
        Step('x=5; rm -rf "$(dirname "$BASH_SOURCE")"; set -e; false', code=1, restored="state"),
        Step("echo $x; set +e", b"5\n"),
        ALIVE,
        on=BASH,
    ),
)
