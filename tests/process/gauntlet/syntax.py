"""Unparsable texts, and here-documents, whole and open: an error at once, and the shell unchanged. Pure data."""

from __future__ import annotations

from tests.process.gauntlet.case import ALIVE, ALL, BASH, BASH_ZSH, SOMETHING, Case, Step, case, like, says

#: Text that no shell can parse: an error at once, nothing of it run, the shell unchanged.
UNPARSABLE = (
    "echo 'oops",
    'echo "oops',
    "echo `oops",
    "echo $(oops",
    "{ echo a",
    "(echo a",
    "echo a; }; echo b",
    "echo a )",
    "if true; fi",
    "if true; then echo a",
    "for i in 1 2; do echo a",
    "while true; do",
    "case x in",
    "case x in y) echo a",
    "echo a &&",
    "echo a ||",
    "echo a |",
    "done",
    "fi",
    "then",
    "; echo a",
    "echo a ;; echo b",
    "&& echo a",
    "| cat",
    "f() {",
    "echo a >",
    "cat <",
    "echo ${x",
    "echo $((1",
)
SYNTAX: tuple[Case, ...] = (
    *(
        case(
            f"cannot be parsed: {text}",
            Step("kept=7; f() { echo f; }"),
            Step(text, b"", SOMETHING, 2),
            Step("echo $kept; f; pwd", b"7\nf\n@DIR@\n"),
        )
        for text in UNPARSABLE
    ),
    *(
        case(
            f"bash cannot parse: {text}",
            Step("kept=7"),
            Step(text, b"", SOMETHING, 2),
            Step("echo $kept", b"7\n"),
            on=BASH,
        )
        for text in ("[[ a", "echo <(oops", "((1 +", "function", "select x in a; do", "coproc {")
    ),
    *(
        case(
            f"zsh cannot parse: {text}",
            Step("kept=7"),
            Step(text, b"", SOMETHING, {"zsh": 126}),
            Step("echo $kept", b"7\n"),
            on=("zsh",),
        )
        for text in ("echo 'oops", "(echo a", "if true; fi", "done")
    ),
    case(
        "bash cannot parse: a=(1 2",
        Step("kept=7"),
        Step("a=(1 2", b"", SOMETHING, 1),
        Step("echo $kept", b"7\n"),
        on=BASH,
    ),
    case("what comes before the error is run", Step("echo a\necho 'oops", b"a\n", SOMETHING, 2), ALIVE),
    case("an error in the middle", Step("echo a\nif true; fi\necho b", b"a\n", SOMETHING, 2), ALIVE),
    case(
        "the message names the line",
        Step(
            "true\ntrue\nfi",
            b"",
            like("[^\n]+: line 3: syntax error near unexpected token `fi'\n[^\n]+: line 3: `fi'\n"),
            2,
        ),
        on=BASH,
    ),
    case("a megabyte inside an open quote", Step("echo '" + "x" * 1_000_000, b"", SOMETHING, 2), ALIVE),
)

HERE_DOCUMENTS: tuple[Case, ...] = (
    case("a here-document", Step("x=1\ncat <<E\na $x $(echo b) \\$c\n\nd\nE", b"a 1 b $c\n\nd\n"), on=ALL),
    case("a quoted here-document", Step("cat <<'E'\n$x `y` \\ \"\nE\n", b'$x `y` \\ "\n'), on=ALL),
    case("an indented here-document", Step("cat <<-E\n\t\ta\n\tE\necho b", b"a\nb\n"), on=ALL),
    case("a here-document, then a command", Step("cat <<E\na\nE\necho after", b"a\nafter\n"), ALIVE, on=ALL),
    case("two here-documents", Step("cat <<A; cat <<B\na\nA\nb\nB\necho c", b"a\nb\nc\n"), on=ALL),
    case("a here-document in a pipe", Step("cat <<E | tr a-z A-Z\nshout\nE", b"SHOUT\n"), on=ALL),
    case(
        "a here-document in a function", Step("f() {\ncat <<E\nfrom $1\nE\n}"), Step("f me", b"from me\n"), on=ALL
    ),
    case(
        "a here-document into a file", Step("cat >f <<'E'\n#!/bin/sh\necho \"$1\"\nE\nsh f 'a b'", b"a b\n"), on=ALL
    ),
    case("a large here-document", Step("cat <<'E' | wc -c\n" + "0123456789\n" * 50_000 + "E", b"550000\n")),
    case(
        "an open here-document",
        Step(
            "cat <<E\nhi",
            b"hi\n",
            says("warning: here-document at line 1 delimited by end-of-file (wanted `E')", 2),
        ),
        ALIVE,
        on=BASH,
    ),
    case(
        "an open here-document elsewhere",
        Step("cat <<E\nhi", b"hi\n"),
        Step("cat <<E\nhi\n", b"hi\n"),
        ALIVE,
        on=("dash", "ash", "zsh"),
    ),
    case("an open here-document and a code", Step("(cat; exit 6) <<E\nhi", b"hi\n", SOMETHING, 6), ALIVE, on=BASH),
    case("a here-string", Step('x="a  b"; cat <<< "$x"; cat <<< c', b"a  b\nc\n"), on=BASH_ZSH),
    case("a here-string of many lines", Step("wc -l <<< $'a\\nb'", b"2\n"), on=BASH),
    case("a document that ends as commands do", Step("cat <<E\nexit 3\nE\n(exit 4)", b"exit 3\n", code=4), ALIVE),
)
