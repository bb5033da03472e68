"""The seven inputs of the README, by the text of their row; `test_readme.py` compares the rows. Pure data."""

from __future__ import annotations

from collections.abc import Mapping

from tests.process.gauntlet.case import ALIVE, ANY, BASH, SOMETHING, Case, Closed, Late, Step, case, says

#: Ends of output of other tools, and of this one: a terminal's mark, a line with an exit code, a prompt.
_MARKERS = b"\x1b]133;D;0\x07\n__END__ 0\nEXITSTATUS0\n[PEXPECT_PROMPT>\n"

README: Mapping[str, tuple[Case, ...]] = {
    "a program that prints the tool's own end marker and continues": (
        case(
            "README: an end marker",
            Step(
                r"printf '\033]133;D;0\007\n__END__ 0\nEXITSTATUS0\n[PEXPECT_PROMPT>\n'; echo b; (exit 3)",
                _MARKERS + b"b\n",
                code=3,
            ),
            ALIVE,
            on=BASH,
        ),
    ),
    "output with NUL, invalid UTF-8 or no final newline": (
        case("README: exact output", Step(r"printf 'a\0b\377\376no end'", b"a\0b\xff\xfeno end"), ALIVE, on=BASH),
    ),
    "`sleep 3` with a timeout of 0.3 s": (
        case(
            "README: a timeout",
            Step("kept=7; cd /"),
            Step("sleep 3", b"", ANY, 124, timeout=0.3, timed_out=True),
            Step("echo $kept; pwd", b"7\n/\n"),
            on=BASH,
        ),
    ),
    "`exit 3`, `set -e; false`": (
        case("README: exit", Step("exit 3", code=3), Closed("exited with code 3"), on=BASH),
        case(
            "README: set -e",
            Step("kept=7"),
            Step("set -e; false", code=1, restored="state"),
            Step("echo $kept", b"7\n"),
            on=BASH,
        ),
    ),
    "`echo 'oops`, an open here-document": (
        case("README: an open quote", Step("echo 'oops", b"", SOMETHING, 2), ALIVE, on=BASH),
        case(
            "README: an open here-document",
            Step(
                "cat <<E\na",
                b"a\n",
                says("warning: here-document at line 1 delimited by end-of-file (wanted `E')", 2),
            ),
            ALIVE,
            on=BASH,
        ),
    ),
    "`(sleep 1; echo late) & true`, then `echo next`": (
        case(
            "README: late output",
            Step("mkfifo p; (read x <p; echo late) & true"),
            Step("echo >p; wait; echo next", b"next\n"),
            Late(b"late\n"),
            on=BASH,
        ),
    ),
    "`cat`, `read x` without input": (
        case("README: no input", Step("cat"), Step("read x", code=1), ALIVE, on=BASH),
    ),
}
