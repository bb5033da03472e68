"""Options of the shell, and the restarts that `set -e` and `set -u` lead to. Pure data."""

from __future__ import annotations

from gauntlet.case import ALIVE, ALL, ANY, BASH, POSIX, SH, SOMETHING, Case, Closed, Step, case, ends, like, says

OPTIONS: tuple[Case, ...] = (
    case(
        "set -x",
        Step("set -x"),
        # Our own file sources the command's: two levels.
        Step("echo hi", b"hi\n", b"+++ echo hi\n"),
        Step("set +x", b"", b"+++ set +x\n"),
        ALIVE,
        on=BASH,
    ),
    case(
        "set -x elsewhere",
        Step("set -x"),
        Step("echo hi", b"hi\n", b"+ echo hi\n"),
        Step("set +x", b"", b"+ set +x\n"),
        ALIVE,
        on=POSIX,
    ),
    case(
        "set -x with cwd, env and input",
        Step("set -x"),
        Step("echo hi", b"hi\n", b"+++ echo hi\n", cwd="/", env={"y": "1"}, input="x"),
        Step("set +x", b"", ANY),
        ALIVE,
        on=BASH,
    ),
    case(
        "PS4",
        Step("PS4='T '; set -x"),
        Step("echo hi", b"hi\n", b"TTT echo hi\n"),
        Step("PS4='$(echo X) '; set +x", b"", ANY),
        ALIVE,
        on=BASH,
    ),
    case(
        "BASH_XTRACEFD",
        Step("exec 9>t; BASH_XTRACEFD=9; set -x"),
        Step("echo hi", b"hi\n"),
        # Known limit: some lines of ours land in the file.
        Step(
            "set +x; cat t",
            like(r"(?:\+\+ [^\n]*\n)*\+\+\+ echo hi\n(?:\+\+ [^\n]*\n)*\+\+\+ set \+x\n"),
        ),
        on=BASH,
    ),
    case("set -v", Step("set -v"), Step("echo hi", b"hi\n", b"echo hi\n"), Step("set +v", b"", b"set +v\n"), ALIVE),
    case("set -f", Step("set -f; touch a"), Step("echo *", b"*\n"), Step("set +f; echo *", b"a\n")),
    case(
        "set -C",
        Step("set -C; echo a >f"),
        Step("echo b >f", b"", SOMETHING, {"": 1, "dash": 2}),
        Step("cat f; echo c >|f; cat f", b"a\nc\n", cwd="@DIR@", env={"y": "1"}, input="x"),
        ALIVE,
    ),
    case(
        "set -o posix",
        Step("set -o posix"),
        Step("(exit 3)", code=3),
        Step("echo $y", b"1\n", cwd="/", env={"y": "1"}, at="@DIR@"),
        Step("set +o posix"),
        ALIVE,
        on=BASH,
    ),
    case(
        "set -o posix and a syntax error",
        Step("set -o posix; kept=1"),
        Step("fi", b"", SOMETHING, 2, restored=("", "state")),
        Step("echo $kept", b"1\n"),
        on=BASH,
    ),
    case(
        "set -k, +B, +h, -b, -P",
        Step("set -k; set +B; set +h; set -b; set -P"),
        Step("echo a=1 {a,b}", b"{a,b}\n"),
        ALIVE,
        on=BASH,
    ),
    case("set -o vi", Step("set -o vi; set -o ignoreeof; set -o emacs"), ALIVE, on=BASH),
    case(
        "nullglob and failglob",
        Step("shopt -s nullglob"),
        Step("echo z* x", b"x\n", cwd="@DIR@", env={"y": "z*"}),
        Step("shopt -s failglob"),
        Step("echo z*; echo no", b"", says("no match: z*"), 1),
        ALIVE,
        on=BASH,
    ),
    case(
        "set -e where nothing fails",
        Step("set -e"),
        Step("false || true; if false; then :; fi; ! true; echo fine", b"fine\n"),
        Step("set +e; false", code=1),
        ALIVE,
        on=SH,
    ),
    case(
        "set -e and a failure",
        Step("set -e; x=5; cd /"),
        Step("echo a; false; echo b", b"a\n", code=1, restored="state"),
        Step("echo $x; pwd; case $- in *e*) echo still;; esac", b"5\n/\nstill\n", at="/"),
        on=BASH,
    ),
    case(
        "set -e in one command",
        Step("x=5; set -e; (exit 9); echo no", b"", code=9, restored="state"),
        Step("echo $x", b"5\n"),
        Step("false", code=1, restored="state"),
        Step("set +e; false", code=1),
        ALIVE,
        on=BASH,
    ),
    case(
        "set -e in a function",
        Step("f() { false; echo no; }; set -e"),
        Step("f; echo no", code=1, restored="state"),
        Step("f || true; set +e", b"no\n"),
        ALIVE,
        on=BASH,
    ),
    case(
        "set -e with a command that is not found",
        Step(
            "set -e; nosuch-program; echo no", b"", says("nosuch-program: command not found"), 127, restored="state"
        ),
        ALIVE,
        on=BASH,
    ),
    case(
        "set -e closes where it cannot be caught",
        Step("set -e; echo a; false; echo b", b"a\n", code=1),
        Closed("exited with code 1"),
        on=POSIX,
    ),
    case(
        "set -u where all is set",
        Step("set -u; x=1; echo $x ${y-}", b"1\n"),
        Step("echo $x", b"1\n", env={"y": "1"}, cwd="/"),
        Step("set +u; echo [$nn]", b"[]\n"),
        on=SH,
    ),
    case(
        "set -u with an unset variable",
        Step("set -u; x=5"),
        Step("echo a; echo $nn; echo b", b"a\n", says("nn: unbound variable"), 1, restored="state"),
        Step("echo $x", b"5\n"),
        Step("set +u; echo [$nn]", b"[]\n"),
        on=BASH,
    ),
    case(
        "set -u with an unset variable, elsewhere",
        Step("set -u; x=5"),
        Step("echo a; echo $nn; echo b", b"a\n", ends("nn: parameter not set"), 2),
        Step("echo $x; set +u; echo [$nn]", b"5\n[]\n"),
        on=POSIX,
    ),
    case(
        "${x:?}",
        Step("x=5"),
        Step("echo ${nn:?is gone}; echo no", b"", says("nn: is gone"), 1, restored="state"),
        Step("echo $x", b"5\n"),
        on=BASH,
    ),
    case(
        "${x:?}, elsewhere",
        Step("x=5"),
        Step("echo ${nn:?is gone}; echo no", b"", ends("nn: is gone"), 2),
        Step("echo $x", b"5\n"),
        on=POSIX,
    ),
    case(
        "all of them",
        Step("set -euxo pipefail"),
        Step("echo hi | cat", b"hi\n", like(r"(\+\+\+ echo hi\n\+\+\+ cat\n|\+\+\+ cat\n\+\+\+ echo hi\n)")),
        Step("set +eux", b"", b"+++ set +eux\n"),
        Step("false | true", code=1),
        on=BASH,
    ),
    case(
        "all of them and a failure",
        Step("set -euo pipefail; x=1"),
        Step("echo a; false | true; echo b", b"a\n", code=1, restored="state"),
        Step("echo $x $-", like("1 [a-zA-Z]*eu?[a-zA-Z]*u?[a-zA-Z]*\n")),
        Step("set +e; false | true", code=1),
        on=BASH,
    ),
    case(
        "a restart keeps everything",
        Step(
            "x=$'a\\n\\'b'; arr=(1 'b c'); declare -A m=(['k 1']=v); declare -i n=4; export E=ex; readonly R=ro\n"
            "f() { cat <<EOT\nf $1\nEOT\n}\nalias g='echo \"G'\\''s\"'\n"
            "shopt -s extglob; set -o pipefail -f; trap 'echo \"usr '\\''1'\\''\"' USR1\n"
            "set -- p 'q r'; umask 027; mkdir 'd d'; cd 'd d'; unset HOME"
        ),
        Step("set -e; false", code=1, restored="state", at="@DIR@/d d"),
        Step(
            'set +e; printf "%s\\n" "$x" "${arr[1]}" "${m[k 1]}"; n+=3; echo $n; sh -c \'echo $E\';'
            " echo $R ${HOME-unset}",
            b"a\n'b\nb c\nv\n7\nex\nro unset\n",
        ),
        Step("f me; g", b"f me\nG's\n"),
        Step("echo @(*); false | true", b"@(*)\n", code=1),
        Step("kill -USR1 $$; pwd", b"usr '1'\n@DIR@/d d\n"),
        Step("R=2; echo no", b"", says("R: readonly variable"), 1),
        on=BASH,
    ),
    case(
        "a restart keeps the umask",
        Step("umask 027"),
        Step("set -e; false", code=1, restored="state"),
        Step("umask", b"0027\n"),
        on=BASH,
    ),
    case(
        "a restart keeps the parameters",
        Step("set -- p 'q r'"),
        Step("set -e; false", code=1, restored="state"),
        Step('echo $# "$2"', b"2 q r\n"),
        on=BASH,
    ),
    case(
        "a restart keeps a background job",
        Step("sleep 1000 & echo $! >pids; echo $! >pid"),
        Step("set -e; false", code=1, restored="state"),
        Step("kill -0 $(cat pid) && echo runs", b"runs\n"),
        on=BASH,
    ),
    case(
        "a restart and what the command set",
        Step("a=1"),
        Step("a=2; b=3; cd /; set -e; false", code=1, restored="state"),
        Step("echo $a$b; pwd", b"23\n/\n"),
        on=BASH,
    ),
    case(
        "set -n",
        # The shell reads on and runs nothing more, so that only another shell can answer.
        Step("export x=5; echo a", b"a\n"),
        Step("set -n; echo no", b"", b"", 125, restored="exports"),
        Step("echo $x; pwd", b"5\n@DIR@\n", at="@DIR@"),
    ),
    case(
        "limits on descriptors",
        Step("ulimit -n 24"),
        ALIVE,
        Step("cat", b"in", input="in", cwd="/", env={"y": "1"}),
        on=ALL,
    ),
    case(
        "limits on file sizes",
        Step("ulimit -f 0"),
        ALIVE,
        Step("cat", b"in", input="in", cwd="/", env={"y": "1"}),
        on=ALL,
    ),
    *(
        case(
            f"exit beside what may end the shell: {text}",
            Step(text, b"", code=3),
            Closed("exited with code 3"),
            on=BASH,
        )
        for text in (
            "set +x; exit 3",
            "set -e; exit 3",
            "exit 3 # ?",
            'eval "exit 3"',
            "set -e; f() { exit 3; }; f",
            "set -u; false || exit 3",
            "set -e; (exit 3) || exit",
            "echo 'exit 3' >f; . ./f",
            "set +x; { exit 3; } 2>&1",
            "trap 'exit 3' USR1; set +x; kill -USR1 $$",
        )
    ),
    case(
        "exit in a function with set -e on",
        Step("f() { exit 3; }; set -e"),
        Step("f", code=3),
        Closed("exited with code 3"),
        on=BASH,
    ),
    case(
        "a signal beside what may end the shell",
        Step("set +x; kill -TERM $$", code=143),
        Closed("killed by SIGTERM"),
        on=BASH,
    ),
    case("$? with set -x", Step("set -x"), Step("(exit 3)", b"", ANY, 3), Step("echo $?", b"3\n", ANY), on=SH),
    case(
        "known limit: exit by other means than the word, beside what may end the shell",
        Step("x=5; set +x; builtin exit 3", code=3, restored="state"),
        Step("echo $x", b"5\n"),
        on=BASH,
    ),
    case(
        "known limit: $? is 0 with a trap on ERR",
        Step("trap 'echo E' ERR"),
        Step("(exit 3)", b"E\n", code=3),
        Step("echo $?", b"0\n"),
        on=BASH,
    ),
)
