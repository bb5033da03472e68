"""Background jobs: what they hold, what they print late, and what is known of them later. Pure data."""

from __future__ import annotations

from tests.process.gauntlet.case import ALIVE, ALL, ANY, BASH, NOTICE, SH, Case, Late, Step, case, like, says

#: The last job is the program. Between fork and exec it is a shell that catches TERM, and would lose it.
EXECUTED = "until grep -q sleep /proc/$!/comm; do :; done"

JOBS: tuple[Case, ...] = (
    case(
        "a background job and the next command",
        Step("sleep 1000 & echo $! >pids; echo started", b"started\n"),
        ALIVE,
        on=ALL,
    ),
    case(
        "$! lasts",
        Step(f"sleep 1000 & p=$!; {EXECUTED}"),
        Step('[ "$p" = "$!" ] && echo same; kill $!; wait $!; echo $?', b"same\n143\n", ANY),
        ALIVE,
    ),
    case("wait for a job of a command before", Step("(exit 5) & true"), Step("wait $!; echo $?", b"5\n"), on=ALL),
    case(
        "jobs",
        Step(f"sleep 1000 & echo $! >pids; {EXECUTED}; jobs", like(r"\[1\]\+  Running +sleep 1000 &[^\n]*\n")),
        Step("jobs", like(r"\[1\]\+  Running +sleep 1000 &[^\n]*\n")),
        Step("kill %1; wait %1; echo $?", b"143\n", ANY),
        Step("jobs"),
        on=BASH,
    ),
    case("fg without job control", Step("fg", b"", says("fg: no job control"), 1), ALIVE, on=BASH),
    case(
        "set -m",
        Step("set -m"),
        Step(f"sleep 1000 & {EXECUTED}; kill %1; wait %1; echo $?", b"143\n", ANY),
        Step("echo a | cat", b"a\n", NOTICE),
        Step("set +m", b"", NOTICE),
        ALIVE,
        on=BASH,
    ),
    case("fg with job control", Step("set -m; (exit 4) & fg", ANY, ANY, 4), Step("set +m"), ALIVE, on=BASH),
    case(
        "disown and nohup",
        Step("nohup sleep 1000 >/dev/null 2>&1 & echo $! >pids; disown", b""),
        Step("jobs"),
        ALIVE,
        on=BASH,
    ),
    case("wait with nothing to wait for", Step("wait"), Step("wait 1", b"", ANY, 127), ALIVE, on=ALL),
    case(
        "output that comes late",
        Step("mkfifo p; { read x <p; echo late; echo late-err >&2; } & echo $! >j"),
        Step("echo one", b"one\n"),
        Step("echo >p; wait; echo next", b"next\n"),
        Late(b"late\n", b"late-err\n"),
        Step("echo last", b"last\n"),
        on=ALL,
    ),
    case(
        "a job that ends between two commands",
        Step("mkfifo p; { read x <p; } & :"),
        Step("echo >p; wait"),
        ALIVE,
        ALIVE,
        on=ALL,
    ),
    case(
        "a job that is killed between two commands",
        Step("sleep 1000 & p=$!"),
        Step("kill $p", b"", NOTICE),
        Step("wait $p; echo $?", b"143\n", ANY),
        ALIVE,
        on=SH,
    ),
    case(
        "many jobs", Step("for i in 1 2 3 4 5 6 7 8 9 10; do (exit $i) & done; wait; echo $?", b"0\n"), ALIVE, on=SH
    ),
    case("wait -n", Step("(exit 3) & wait -n; echo $?", b"3\n"), ALIVE, on=BASH),
    case("a job in a function", Step("f() { sleep 1000 & echo $! >pids; }; f; echo on", b"on\n"), ALIVE, on=ALL),
    case(
        "a child that holds the streams",
        Step("sh -c 'sleep 1000 & echo $! >pids'; echo on", b"on\n"),
        ALIVE,
        on=ALL,
    ),
    case(
        "a job in a session of its own",
        Step("mkfifo p; (setsid sh -c 'echo $$ >pids; echo >p; exec sleep 1000' &); read x <p; echo ok", b"ok\n"),
        ALIVE,
        on=ALL,
        needs=("setsid",),
    ),
    case(
        "a job after each of many commands",
        *(Step("sleep 1000 & echo $! >>pids; echo on", b"on\n") for _ in range(20)),
        ALIVE,
    ),
)
