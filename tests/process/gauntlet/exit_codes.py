"""How commands end: the exit code of each kind, and what `$?` and `$_` are in the next one. Pure data."""

from __future__ import annotations

from tests.process.gauntlet.case import (
    ALIVE,
    ALL,
    ANY,
    BASH,
    BASH_ZSH,
    SOMETHING,
    Case,
    Step,
    case,
    ends,
    like,
    says,
)

EXIT_CODES: tuple[Case, ...] = (
    case("true and false", Step("true"), Step("false", code=1), Step("true"), on=ALL),
    case("a subshell's code", Step("(exit 42)", code=42), Step("(exit 255)", code=255), Step("(exit 256)"), on=ALL),
    case("a child's code", Step("sh -c 'exit 255'", code=255), on=ALL),
    case("the last command counts", Step("false; true"), Step("true; false", code=1), on=ALL),
    case("negation", Step("! true", code=1), Step("! false"), on=ALL),
    case("lists", Step("false && echo no || echo yes", b"yes\n"), Step("true && (exit 4)", code=4), on=ALL),
    case(
        "command not found",
        Step(
            "no-such-program-here",
            err={
                "bash": says("no-such-program-here: command not found"),
                "zsh": ends("command not found: no-such-program-here"),
                "": ends("no-such-program-here: not found"),
            },
            code=127,
        ),
        ALIVE,
        on=ALL,
    ),
    case("a directory as a command", Step("/", err=ends("s a directory"), code=126), ALIVE, on=BASH),
    case(
        "not executable",
        Step("echo hi >f; ./f", err=like("[^\n]+ermission denied[^\n]*\n"), code=126),
        ALIVE,
        on=ALL,
    ),
    case("an empty script", Step(": >f; chmod +x f; ./f"), ALIVE),
    case("pipelines", Step("false | true"), Step("true | false", code=1), on=ALL),
    case(
        "pipefail lasts",
        Step("set -o pipefail"),
        Step("false | true", code=1),
        Step("(exit 3) | (exit 4) | true", code=4),
        on=BASH_ZSH,
    ),
    case("PIPESTATUS in one command", Step("false | true | (exit 3); echo ${PIPESTATUS[@]}", b"1 0 3\n"), on=BASH),
    case(
        "$? of the command before",
        Step("(exit 7)", code=7),
        Step("echo $?", b"7\n"),
        Step("echo $?", b"0\n"),
        on=ALL,
    ),
    case(
        "$? after a command that was not found",
        Step("no-such-program", err=ANY, code=127),
        Step("echo $?", b"127\n"),
    ),
    case("$? after a syntax error", Step("if true; fi", err=SOMETHING, code=2), Step("echo $?", b"2\n")),
    case("$_ of the command before", Step("echo a b last", b"a b last\n"), Step("echo $_", b"last\n"), on=BASH),
    case("$_ after an assignment", Step("true one two"), Step('x="$_"; echo "$x"', b"two\n"), on=BASH),
    case(
        "a child that is killed",
        Step(
            "sh -c 'kill -9 $$'",
            err={"bash": like("[^\n]+: line 1: +[0-9]+ Killed +sh -c 'kill -9 \\$\\$'\n"), "": ends("Killed")},
            code=137,
        ),
        ALIVE,
    ),
    case(
        "a child that terminates itself",
        Step("sh -c 'kill -TERM $$'", err=like("[^\n]*Terminated[^\n]*\n"), code=143),
        ALIVE,
    ),
    case("a child that interrupts itself", Step("sh -c 'kill -INT $$'; echo on", ANY, ANY), ALIVE, on=BASH),
    case(
        "arithmetic as a test", Step("(( 0 ))", code=1), Step("(( 5 ))"), Step("let 'x = 0'", code=1), on=BASH_ZSH
    ),
    case("test with too little", Step("[ 1 -eq x ]", err=SOMETHING, code=2), ALIVE),
    case(
        "printf of what is no number",
        Step("printf '%d\\n' abc", b"0\n", err=like("[^\n]+abc[^\n]+\n"), code=1),
        ALIVE,
    ),
    case("time", Step("time true", b"", like("\nreal\t0m0[^\n]*\nuser\t[^\n]*\nsys\t[^\n]*\n")), on=BASH),
    case("the code of a substitution", Step("x=$(exit 4)", code=4), Step("echo a$(exit 5)", b"a\n"), on=ALL),
    case(
        "cd that fails",
        Step(
            "cd /no/such/place", b"", like("[^\n]*/no/such/place[^\n]*\n"), {"": 2, "bash": 1, "zsh": 1}, at="@DIR@"
        ),
        ALIVE,
        on=ALL,
    ),
    case("silence is not the end", Step("sleep 0.7; echo end; sleep 0.7; (exit 3)", b"end\n", code=3), on=BASH),
)
