"""Variables that are given with one command and are that command's alone. Pure data."""

from __future__ import annotations

from tests.process.gauntlet.case import ALIVE, ALL, ANY, BASH, SH, SOMETHING, Case, Closed, Step, case, like

ENVIRONMENT: tuple[Case, ...] = (
    case(
        "a variable for one command",
        Step("echo $A; sh -c 'echo $A'", b"1\n1\n", env={"A": "1"}),
        Step("echo ${A-none}", b"none\n"),
        on=ALL,
    ),
    case(
        "a value with everything in it",
        Step(
            "printf '%s' \"$A\"; sh -c 'printf %s \"$A\"'",
            b"a\n'b\" $x `y` \\ %s $(z)\n\n" * 2,
            env={"A": "a\n'b\" $x `y` \\ %s $(z)\n\n"},
        ),
        ALIVE,
        on=ALL,
    ),
    case(
        "an empty value",
        Step('echo "[$A]" ${A+set}', b"[] set\n", env={"A": ""}),
        Step("echo ${A+set}", b"\n"),
        on=ALL,
    ),
    case("letters of every kind in a value", Step("echo $A", "é語🎈\n".encode(), env={"A": "é語🎈"}), on=ALL),
    case("a large value", Step("echo ${#A}", b"100000\n", env={"A": "x" * 100_000}), ALIVE, on=ALL),
    case(
        "many variables",
        Step("env | grep -c ^M_", b"500\n", env={f"M_{n}": str(n) for n in range(500)}),
        Step("env | grep -c ^M_", b"0\n", code=1),
        on=ALL,
    ),
    case(
        "the value before comes back",
        Step("A=old"),
        Step("echo $A", b"new\n", env={"A": "new"}),
        Step("echo $A; sh -c 'echo ${A-not exported}'", b"old\nnot exported\n"),
        on=ALL,
    ),
    case(
        "the exported value before comes back",
        Step("export A='o l\nd'"),
        Step("echo $A", b"new\n", env={"A": "new"}),
        Step("sh -c 'echo \"$A\"'", b"o l\nd\n"),
        on=ALL,
    ),
    case(
        "what the command does to it does not stick",
        Step("A=changed; echo $A", b"changed\n", env={"A": "1"}),
        Step("echo ${A-none}", b"none\n"),
        Step("unset A", env={"A": "1"}),
        Step("echo ${A-none}", b"none\n"),
        on=SH,
    ),
    case("other variables of the command stick", Step("B=$A", env={"A": "1"}), Step("echo $B", b"1\n"), on=ALL),
    case(
        "functions and children see it",
        Step("f() { echo $A; }; g() { sh -c 'echo $A'; }"),
        Step("f; g", b"1\n1\n", env={"A": "1"}),
        on=ALL,
    ),
    case(
        "PATH for one command",
        Step("mkdir b; printf '#!/bin/sh\\necho mine\\n' >b/mine; chmod +x b/mine"),
        Step("mine", b"mine\n", env={"PATH": "@DIR@/b:/usr/bin:/bin"}),
        Step("mine", b"", SOMETHING, 127),
        on=ALL,
    ),
    case(
        "IFS for one command",
        Step("x=a:b; printf '[%s]' $x", b"[a][b]", env={"IFS": ":"}),
        Step("printf '[%s]' $x", b"[a:b]"),
        on=SH,
    ),
    case(
        "HOME for one command",
        Step("cd; pwd", b"/\n", env={"HOME": "/"}, cwd="@DIR@"),
        Step("pwd", b"@DIR@\n"),
        on=ALL,
    ),
    case(
        "PWD for one command",
        Step("echo $PWD", ANY, env={"PWD": "/nowhere"}),
        Step("pwd", b"@DIR@\n", at="@DIR@"),
        on=SH,
    ),
    case(
        "after a failure too",
        Step("nosuch-program", err=ANY, code=127, env={"A": "1"}),
        Step("echo ${A-none}", b"none\n"),
        on=ALL,
    ),
    case(
        "after a syntax error too",
        Step("fi", err=ANY, code=2, env={"A": "1"}, cwd="/"),
        Step("echo ${A-none}; pwd", b"none\n@DIR@\n"),
        on=SH,
    ),
    case(
        "after return too",
        Step("return 3", code=3, env={"A": "1"}, cwd="/"),
        Step("echo ${A-none}; pwd", b"none\n@DIR@\n"),
        on=ALL,
    ),
    case(
        "after an error that ends the command too",
        Step("echo $((1/0))", err=ANY, code=1, env={"A": "1"}, cwd="/"),
        Step("echo ${A-none}; pwd", b"none\n@DIR@\n"),
        on=BASH,
    ),
    case(
        "after a restart too",
        Step("set -e; false", code=1, env={"A": "1"}, cwd="/", restored="state"),
        Step("echo ${A-none}; pwd", b"none\n@DIR@\n"),
        on=BASH,
    ),
    case(
        "with a trap on EXIT and exit",
        # Bash has put the variables back by the time that it runs the trap.
        Step("trap 'echo $A' EXIT; exit 3", {"bash": b"\n", "": b"1\n"}, code=3, env={"A": "1"}),
        Closed("exited with code 3"),
        on=SH,
    ),
    case(
        "with a trap on EXIT and exit, in zsh",
        Step("trap 'echo $A' EXIT; exit 3", b"1\n", code=3, env={"A": "1"}),
        Closed("exited with code 3"),
        on=("zsh",),
    ),
    case(
        "all at once",
        Step("pwd; echo $A; cat; (exit 3)", b"/\n1\nin", code=3, cwd="/", env={"A": "1"}, input="in"),
        Step("pwd; echo ${A-none}; cat", b"@DIR@\nnone\n"),
        on=ALL,
    ),
    case(
        "a variable that is read-only",
        Step("readonly A=1"),
        # Bash prints an error and goes on with the old value; the others do not run the command.
        Step(
            "echo $A",
            {"bash": b"1\n", "": b""},
            like("[^\n]+: A: [^\n]*read-? ?only[^\n]*\n"),
            {"bash": 0, "": 1},
            env={"A": "2"},
        ),
        Step("echo $A", b"1\n"),
    ),
)
