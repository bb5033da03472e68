"""Traps on signals, EXIT, DEBUG, ERR and RETURN. Pure data.

A listing of traps has one trap of ours in it, on signal 57 (USR2 in zsh): cases that list them filter it."""

from __future__ import annotations

from tests.process.gauntlet.case import (
    ALIVE,
    ALL,
    ANY,
    BASH,
    OUR_TRAP,
    SH,
    SOMETHING,
    Case,
    Closed,
    Step,
    case,
    like,
)

TRAPS: tuple[Case, ...] = (
    case(
        "a trap for a signal",
        Step("trap 'echo got' USR1; kill -USR1 $$; echo after", b"got\nafter\n"),
        Step("kill -USR1 $$", b"got\n"),
        Step("trap - USR1; trap", like(OUR_TRAP)),
        on=ALL,
    ),
    case(
        "traps for many signals",
        Step('for s in HUP INT QUIT USR1 USR2 ALRM TERM URG WINCH; do trap "echo $s" $s; done'),
        Step(
            "for s in HUP INT QUIT USR1 USR2 ALRM TERM URG WINCH; do kill -$s $$; done",
            b"HUP\nINT\nQUIT\nUSR1\nUSR2\nALRM\nTERM\nURG\nWINCH\n",
        ),
        ALIVE,
    ),
    case(
        "traps are listed",
        Step("trap 'echo a' USR1; trap '' USR2"),
        Step("trap -p USR1 USR2", b"trap -- 'echo a' SIGUSR1\ntrap -- '' SIGUSR2\n"),
        Step("trap", like("trap -- 'echo a' SIGUSR1\ntrap -- '' SIGUSR2\n" + OUR_TRAP)),
        # The code that saves the shell's state exists too while a command that may end the shell runs.
        Step(
            "set +x; trap",
            like("trap -- '[^\n]*/at_exit' EXIT\ntrap -- 'echo a' SIGUSR1\ntrap -- '' SIGUSR2\n" + OUR_TRAP),
        ),
        Step("trap", like("trap -- 'echo a' SIGUSR1\ntrap -- '' SIGUSR2\n" + OUR_TRAP)),
        on=BASH,
    ),
    case(
        "every signal ignored",
        Step("trap '' HUP INT QUIT USR1 USR2 PIPE ALRM TERM CHLD URG WINCH"),
        Step("(exit 3)", code=3),
        ALIVE,
    ),
    case(
        "all traps taken away",
        Step("trap - EXIT HUP INT QUIT USR1 USR2 PIPE ALRM TERM CHLD URG WINCH"),
        Step("(exit 3)", code=3),
        ALIVE,
    ),
    case(
        "a trap on EXIT is not run by the end of a command",
        Step("trap 'echo bye' EXIT"),
        ALIVE,
        Step("(echo sub)", b"sub\n"),
        Step("trap - EXIT"),
        on=SH,
    ),
    case(
        "a trap on EXIT is run by exit",
        Step("trap 'echo bye' EXIT; echo a", b"a\n"),
        Step("exit 3", b"bye\n", code=3),
        Closed("exited with code 3"),
        on=ALL,
    ),
    case(
        "a trap on EXIT sees the code",
        Step("trap 'echo bye $?' EXIT; exit 3", b"bye 3\n", code=3),
        Closed("exited with code 3"),
        on=ALL,
    ),
    case(
        "a trap on EXIT that exits", Step("trap 'exit 5' EXIT; exit 3", code=5), Closed("exited with code 5"), on=SH
    ),
    case(
        "a trap on EXIT in a subshell",
        Step("(trap 'echo bye' EXIT; echo in)", b"in\nbye\n"),
        ALIVE,
        on=("bash", "dash", "zsh"),
    ),
    case(
        "known limit: a trap on EXIT runs when set -e ends the command, and the shell is closed",
        Step("trap 'echo bye' EXIT; x=5"),
        Step("set -e; false", b"bye\n", code=1),
        Closed("exited with code 1"),
        on=BASH,
    ),
    case(
        "a trap on DEBUG",
        Step("trap 'echo D' DEBUG; echo a", b"D\na\n"),
        Step("echo b", b"D\nb\n"),
        Step("trap - DEBUG", b"D\n"),
        ALIVE,
        on=BASH,
    ),
    case(
        "a trap on DEBUG with functrace",
        Step("set -T; trap 'echo D' DEBUG"),
        Step("echo b", b"D\nb\n"),
        Step("trap - DEBUG", b"D\n"),
        ALIVE,
        on=BASH,
    ),
    case(
        "a trap on ERR",
        Step("trap 'echo E' ERR"),
        Step("false", b"E\n", code=1),
        Step("true; false; true", b"E\n"),
        Step("trap - ERR; false", code=1),
        ALIVE,
        on=BASH,
    ),
    case(
        "a trap on ERR with errtrace",
        Step("set -E; trap 'echo E $?' ERR; f() { (exit 4); return 0; }"),
        Step("f", b"E 4\n"),
        ALIVE,
        on=BASH,
    ),
    case(
        "a trap on RETURN",
        # A command is a sourced file to bash, so the trap may run at its end; nothing of ours may run it.
        Step("trap 'echo R' RETURN", like("(R\n)?")),
        Step("echo a", like("a\n(R\n)?")),
        Step("trap - RETURN"),
        ALIVE,
        on=BASH,
    ),
    case("a trap on CHLD", Step("trap 'echo C' CHLD"), Step("/bin/true", ANY), Step("trap - CHLD"), ALIVE, on=BASH),
    case(
        "a trap that exits",
        Step("trap 'exit 5' USR1"),
        Step("kill -USR1 $$; echo no", b"", code=5),
        Closed("exited with code 5"),
    ),
    case(
        "a trap that fails",
        Step("trap 'nosuch-program' USR1"),
        Step("kill -USR1 $$; echo on", b"on\n", SOMETHING),
        ALIVE,
    ),
    case(
        "a trap that returns",
        Step("trap 'return 7' USR1"),
        Step("kill -USR1 $$; echo no", b"", code=7),
        ALIVE,
        on=BASH,
    ),
    case(
        "extdebug",
        Step("shopt -s extdebug; trap 'true' DEBUG"),
        Step("echo a", b"a\n"),
        Step("shopt -u extdebug; trap - DEBUG"),
        ALIVE,
        on=BASH,
    ),
)
