"""Commands on which session shells differ, and the verdict on the result of each.

Pure: no process and no file.
"""

from __future__ import annotations

from typing import Final

import msgspec

from bench.live_shells import Answer

TIMES_OUT: Final = "times out"


class Edge(msgspec.Struct, frozen=True):
    """A command on which session shells differ, and what bash makes of it. `MARK` is put for the peer's mark."""

    what: str
    command: str
    output: bytes = b""
    #: None: any but 0.
    exit_code: int | None = 0
    times_out: bool = False
    #: Whether the shell is to be there afterwards, with its variables.
    stays: bool = True


class Outcome(msgspec.Struct, frozen=True):
    """The result of an edge case: an answer or an error's name, and the error of the command after it."""

    answer: Answer | None
    raised: str
    after: str


EDGES: Final = (
    Edge("`exit 3`", "exit 3", exit_code=3, stays=False),
    Edge(
        "prints the tool's own mark, then goes on",
        "echo 'MARK'; sleep 1.5; echo after; (exit 7)",
        output=b"MARK\nafter\n",
        exit_code=7,
    ),
    Edge("an unbalanced quote", "echo 'oops", exit_code=None),
    Edge("`cat`, with nothing to read", "cat"),
    Edge("stderr kept out of stdout", "echo out; echo err >&2", output=b"out\n"),
    Edge("no final newline", "printf 'a\\nb'", output=b"a\nb"),
    Edge("many final newlines", "printf 'a\\n\\n\\n'", output=b"a\n\n\n"),
    Edge("a NUL", "printf 'a\\0b\\n'", output=b"a\0b\n"),
    Edge("bytes that are not UTF-8", "printf '\\xff\\xfe\\n'", output=b"\xff\xfe\n"),
    Edge("`sleep 30` with a timeout, nothing else done", "sleep 30", times_out=True),
)


def difference(expected: bytes, came: bytes) -> str:
    """The fault of an output in a few words; empty when there is none."""
    if came == expected:
        return ""
    if came.replace(b"\r\n", b"\n") == expected:
        return "line ends changed"
    return f"gives `{came!r}`" if len(came) < 40 else f"{len(came):,} bytes for {len(expected):,}"


def verdict(edge: Edge, outcome: Outcome) -> str:
    """A cell of the table: "right", or all that was not."""
    answer = outcome.answer
    if answer is None:
        wrong = ["" if edge.times_out and outcome.raised == TIMES_OUT else outcome.raised]
    elif edge.times_out:
        wrong = ["does not time out"]
    else:
        code = answer.exit_code
        fits = code == edge.exit_code if edge.exit_code is not None else code not in (0, None)
        wrong = [difference(edge.output, answer.output), "" if fits else f"exit code {code}"]
    if edge.stays:
        wrong.append(outcome.after)
    return ", ".join(filter(None, wrong)) or "right"


def raised(error: Exception) -> str:
    return TIMES_OUT if isinstance(error, TimeoutError) else f"raises {type(error).__name__}"
