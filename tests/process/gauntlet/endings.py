"""Commands that are ended from outside, by a timeout or an interrupt: the shell goes on. Pure data."""

from __future__ import annotations

from tests.process.gauntlet.case import ALIVE, ALL, ANY, BASH, NOTICE, SH, Case, Step, case, like

#: A child that reports when there is something to interrupt.
WAITS = "sh -c 'echo before; exec sleep 1000'"

ENDINGS: tuple[Case, ...] = (
    case(
        "a timeout",
        Step("x=1; cd /"),
        Step("sleep 1000", b"", ANY, 124, timeout=0.3, timed_out=True),
        Step("echo $x; pwd", b"1\n/\n"),
        on=ALL,
    ),
    case(
        "a timeout of a builtin loop",
        Step("x=1"),
        Step("while :; do :; done", code=124, timeout=0.3, timed_out=True),
        Step("echo $x", b"1\n"),
        on=BASH,
    ),
    case(
        "an interrupt",
        # Zsh runs traps in its signal handler: in the middle of an `echo` of its own, that one may print twice.
        Step("x=1"),
        Step(f"{WAITS}; echo after", b"before\n", ANY, 130, interrupt_at=b"before\n"),
        Step("echo $x", b"1\n"),
        on=ALL,
    ),
    case(
        "an interrupt of a loop",
        Step("x=1"),
        Step("echo before; while :; do :; done; echo after", b"before\n", ANY, 130, interrupt_at=b"before\n"),
        Step("echo $x", b"1\n"),
        on=BASH,
    ),
    case(
        "an interrupt of a loop with children",
        Step("x=1"),
        Step(f"while :; do {WAITS}; done; echo after", b"before\n", ANY, 130, interrupt_at=b"before\n"),
        Step("echo $x", b"1\n"),
        on=SH,
    ),
    case(
        "an interrupt in functions",
        Step("x=1; f() { while :; do g; done; }; g() { for i in 1 2 3; do :; done; }"),
        Step("echo before; f; echo after", b"before\n", ANY, 130, interrupt_at=b"before\n"),
        Step("echo $x", b"1\n"),
        on=BASH,
    ),
    case(
        "an interrupt of a list",
        Step(
            f"{WAITS} || echo one; sleep 1000 && echo two; sleep 1000; echo three",
            b"before\n",
            ANY,
            130,
            interrupt_at=b"before\n",
        ),
        ALIVE,
        on=SH,
    ),
    case(
        "an interrupt of a pipe",
        Step(f"{WAITS} | cat; echo after", b"before\n", ANY, 130, interrupt_at=b"before\n"),
        ALIVE,
        on=SH,
    ),
    case(
        "an interrupt of a substitution",
        Step(f"{{ x=$({WAITS} >&3); }} 3>&1; echo after", b"before\n", ANY, 130, interrupt_at=b"before\n"),
        ALIVE,
        on=SH,
    ),
    case(
        "an interrupt of wait leaves the job",
        # Known limit: a job of this very command is known by ignoring interrupts. So it reports when it does.
        Step(
            "mkfifo f; (echo >f; sleep 1000; :) & echo $! >pids; read x <f; echo before; wait; echo no",
            b"before\n",
            ANY,
            130,
            interrupt_at=b"before\n",
            # No event reports that the shell itself waits: this may be too early, and then a new shell goes on.
            restored=("", "exports"),
        ),
        Step("kill -0 $(cat pids) && echo runs", b"runs\n"),
        on=BASH,
    ),
    case(
        "an interrupt of read",
        Step(
            "mkfifo p; echo before; read x <p; echo after",
            b"before\n",
            ANY,
            130,
            interrupt_at=b"before\n",
            restored=("", "exports"),
        ),
        ALIVE,
        on=SH,
    ),
    case(
        "an interrupt with set -m",
        Step("set -m"),
        Step(f"{WAITS}; echo after", b"before\n", ANY, 130, interrupt_at=b"before\n"),
        Step("echo alive", b"alive\n", NOTICE),
        on=BASH,
    ),
    case(
        "an interrupt with traps",
        Step("trap 'echo T' TERM; trap 'echo I' INT; trap 'echo U' USR1; trap 'echo V' USR2"),
        Step(f"{WAITS}; echo after", like("before\n[TIUV\n]*"), ANY, 130, interrupt_at=b"before\n"),
        ALIVE,
        Step("kill -USR1 $$; kill -INT $$", b"U\nI\n"),
        on=BASH,
    ),
    case(
        "an interrupt with cwd and env",
        Step(WAITS, b"before\n", ANY, 130, cwd="/", env={"A": "1"}, interrupt_at=b"before\n"),
        Step("pwd; echo ${A-none}", b"@DIR@\nnone\n"),
        on=SH,
    ),
    case(
        "a timeout of a child that stopped itself",
        Step("sh -c 'kill -STOP $$'; echo no", b"", ANY, 124, timeout=0.3, timed_out=True),
        ALIVE,
        on=SH,
    ),
    case(
        "an interrupt of a child that ignores it",
        Step(
            # By its path: a busybox may run a part of itself without executing it.
            "/bin/sh -c 'trap \"\" TERM INT; echo ready; while :; do sleep 1000; done'; echo no",
            b"ready\n",
            ANY,
            130,
            interrupt_at=b"ready\n",
        ),
        ALIVE,
        on=SH,
    ),
    case(
        "an interrupt of a flood of errors",
        Step("echo a; while :; do nosuch-program; done", b"a\n", ANY, 130, interrupt_at=b"a\n"),
        ALIVE,
        on=BASH,
    ),
    case(
        "an interrupt leaves the jobs of commands before",
        Step("sleep 1000 & p=$!; echo $! >pids"),
        Step(WAITS, b"before\n", ANY, 130, interrupt_at=b"before\n"),
        Step("kill -0 $p && echo runs", b"runs\n"),
    ),
    case(
        "an interrupt leaves a job that handles interrupts",
        Step("mkfifo p; (trap : INT; echo >p; while :; do sleep 1000; done) & p=$!; echo $! >pids; read x <p"),
        Step(WAITS, b"before\n", ANY, 130, interrupt_at=b"before\n"),
        Step("kill -0 $p && echo runs", b"runs\n"),
        on=BASH,
    ),
    case(
        "an interrupt leaves a job of set -m",
        Step("set -m; sleep 1000 & p=$!; echo $! >pids"),
        Step(WAITS, b"before\n", ANY, 130, interrupt_at=b"before\n"),
        Step("kill -0 $p && echo runs", b"runs\n", NOTICE),
        on=BASH,
    ),
    case(
        "an interrupt with set -e",
        Step("set -e; x=1"),
        Step(
            f"{WAITS}; echo after",
            b"before\n",
            ANY,
            130,
            interrupt_at=b"before\n",
            restored=("", "state"),
        ),
        Step("echo $x; set +e", b"1\n"),
        Step("false", code=1),
        ALIVE,
        on=BASH,
    ),
)
