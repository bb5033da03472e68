"""Names that users may define or unset although the shell's own lines depend on them: builtins, PATH, IFS, PWD."""

from __future__ import annotations

from tests.process.gauntlet.case import ALIVE, ALL, ANY, BASH, POSIX, SH, Case, Closed, Step, case, fakes, like

NAMES: tuple[Case, ...] = (
    case(
        "variables with the names that tools use",
        Step("log=1 dir=2 out=3 err=4 cmd=5 fd=6 rc=7 ret=8 code=9 id=10 tmp=11 line=12 name=13"),
        ALIVE,
        Step(
            "echo $log $dir $out $err $cmd $fd $rc $ret $code $id $tmp $line $name",
            b"1 2 3 4 5 6 7 8 9 10 11 12 13\n",
        ),
        on=ALL,
    ),
    case(
        "the same, read-only",
        Step(
            "readonly EXIT_CODE=5 log=1 dir=2 out=3 err=4 cmd=5 fd=6 rc=7 ret=8 code=9 status=1 id=10 tmp=11"
            " line=12 x=1 i=1 s=1"
        ),
        Step("(exit 3)", code=3),
        Step("echo $EXIT_CODE", b"5\n", cwd="/", env={"y": "1"}),
        ALIVE,
    ),
    case(
        "functions with the names of programs",
        Step(fakes("mv", "rm", "cat", "ls", "mkdir", "sleep", "cp", "tee", "dd", "env", "sh", "bash")),
        Step("(exit 3)", code=3),
        Step("echo next", b"next\n", cwd="/", env={"y": "1"}, input="x"),
        Step("mv; unset -f mv cat; cat", b"fake mv\nin", input="in"),
        on=ALL,
    ),
    case(
        "functions with the names of builtins",
        Step(
            fakes(
                *(
                    "cd",
                    "printf",
                    "read",
                    "pwd",
                    "test",
                    "[",
                    "true",
                    "false",
                    "kill",
                    "wait",
                    "umask",
                    "type",
                    "alias",
                ),
                *("hash", "jobs", "getopts", "let", "sleep"),
            )
        ),
        Step("(exit 3)", code=3),
        Step("cd /; printf x; pwd", b"fake cd\nfake printf\nfake pwd\n", at="@DIR@"),
        Step("echo next", b"next\n", cwd="/", env={"y": "1"}, input="x", at="@DIR@"),
        Step("unset -f cd pwd; cd /; pwd", b"/\n", at="/"),
        on=("bash", "zsh"),
    ),
    case(
        "functions with the names of builtins, elsewhere",
        Step(
            fakes("cd", "printf", "read", "pwd", "test", "true", "false", "kill", "wait", "umask", "type", "alias")
        ),
        Step("(exit 3)", code=3),
        Step("cd /; printf x; pwd", b"fake cd\nfake printf\nfake pwd\n", at="@DIR@"),
        Step("echo next", b"next\n", cwd="/", env={"y": "1"}, input="x", at="@DIR@"),
        Step("unset -f cd pwd; cd /; pwd", b"/\n", at="/"),
        on=POSIX,
    ),
    case(
        "functions with the names of special builtins",
        # Not `builtin`, `command` and `.`: see the known limits below.
        Step(
            fakes(
                *("eval", "source", "exec", "trap", "set", "export", "declare", "local", "shift", ":", "readonly"),
                *("shopt", "mapfile", "break", "continue", "unset", "enable", "compgen"),
            )
        ),
        Step("(builtin exit 3)", code=3),
        Step("echo next; eval; set", b"next\nfake eval\nfake set\n", cwd="/", input="x", at="@DIR@"),
        Step("echo next; trap", b"next\nfake trap\n", cwd="/", env={"y": "1"}, input="x", at="@DIR@"),
        Step("builtin unset -f eval unset; eval 'echo $?'", b"0\n"),
        on=BASH,
    ),
    case(
        "a function named return",
        Step('return() { echo "fake $1"; }'),
        Step("(exit 3)", code=3),
        Step("echo $?; return 1; echo on", b"3\nfake 1\non\n"),
        on=BASH,
    ),
    case(
        "a function named exit",
        Step("exit() { echo fake $1; }"),
        Step("exit 3", b"fake 3\n"),
        Step("eval 'exit 4'", b"fake 4\n"),
        Step("unset -f exit; exit 5", code=5),
        Closed("exited with code 5"),
        on=BASH,
    ),
    case(
        "a function named exit, beside what may end the shell",
        Step("set +x; exit() { echo fake $1; }"),
        Step("exit 3", b"fake 3\n"),
        on=BASH,
    ),
    *(
        case(
            f"known limit: a function named {name}",
            # Our own lines need it, so that only another shell can answer. One that has a timeout, as one that may
            # end the shell, is preceded by a note of what is exported.
            Step("export x=5"),
            Step(f"{name}() {{ :; }}", code=125, timeout=60, restored="exports"),
            Step("echo $x", b"5\n"),
            on=shells,
        )
        for name, shells in (("builtin", BASH), ("command", POSIX))
    ),
    case(
        "known limit: a function named .",
        Step("export x=5; .() { echo fake; }"),
        Step("echo no", b"fake\n", code=125, restored="exports"),
        ALIVE,
        on=BASH,
    ),
    case(
        "aliases with the names of builtins",
        Step(
            "alias "
            + " ".join(
                f"{name}='echo A'"
                for name in (
                    *("eval", "source", "exec", "printf", "read", "builtin", "command", "trap", "return", "cd"),
                    *("set", "while"),
                )
            )
        ),
        Step("(exit 3)", code=3),
        Step("cd x", b"A x\n", cwd="/", env={"y": "1"}, input="x", at="@DIR@"),
        Step("unalias -a\ncd /\npwd", b"/\n", at="/"),
        on=BASH,
    ),
    case(
        "known limit: aliases with the names of keywords",
        # A directory of its own takes an `if` of ours.
        Step("export x=5; alias if='echo A'"),
        Step("echo hi", b"hi\n"),
        Step(
            "echo no",
            b"",
            like("[^\n]+: syntax error near unexpected token `then'\n.*"),
            125,
            cwd="/",
            timeout=60,
            restored="exports",
        ),
        Step("echo $x; pwd", b"5\n@DIR@\n", at="@DIR@"),
        on=BASH,
    ),
    case(
        "aliases with the names of builtins, elsewhere",
        Step(
            "alias "
            + " ".join(
                f"{name}='echo A'"
                for name in (
                    "eval",
                    ".",
                    "exec",
                    "printf",
                    "read",
                    "command",
                    "if",
                    "trap",
                    "return",
                    "cd",
                    "set",
                    "while",
                )
            )
        ),
        Step("(exit 3)", code=3),
        Step("cd x", b"A x\n", cwd="/", env={"y": "1"}, input="x", at="@DIR@"),
        Step("unalias -a\ncd /\npwd", b"/\n", at="/"),
        on=POSIX,
    ),
    case(
        "builtins switched off",
        Step("x=1; enable -n read eval source cd pwd test trap kill wait"),
        Step("(exit 3)", code=3),
        Step("echo next $x", b"next 1\n", at="@DIR@"),
        on=BASH,
    ),
    case(
        "the builtin [ switched off",
        Step("enable -n ["),
        Step("/bin/true"),
        Step("echo next", b"next\n"),
        on=BASH,
    ),
    case(
        "known limit: printf switched off",
        # The shell answers by it, so that only another shell can.
        Step("export x=5"),
        Step("enable -n printf", code=125, timeout=60, restored="exports"),
        Step("echo $x; printf '%s\\n' $x", b"5\n5\n", cwd="/", env={"y": "1"}, at="@DIR@"),
        on=BASH,
    ),
    case(
        "PATH is empty",
        Step("PATH="),
        Step("echo hi; cd /; pwd", b"hi\n/\n", at="/"),
        # No busybox has these: it runs a part of itself without a search for a file.
        Step("locale", err=ANY, code=127),
        Step("getconf", err=ANY, code=127, input="x"),
        Step("PATH=/usr/bin:/bin; ls -d /", b"/\n"),
        on=ALL,
    ),
    case("PATH is unset", Step("unset PATH"), ALIVE, Step("PATH=/usr/bin:/bin; ls -d /", b"/\n"), on=ALL),
    case(
        "IFS that splits everything",
        Step("IFS='0123456789/.abcdefghijklmnopqrstuvwxyz'"),
        Step("(exit 10)", code=10),
        Step("pwd", b"@DIR@\n", at="@DIR@"),
        ALIVE,
    ),
    case(
        "IFS is empty",
        Step("IFS="),
        Step("(exit 10)", code=10),
        Step("x='a b'; printf '[%s]' $x", b"[a b]", env={"y": "a b"}, at="@DIR@"),
    ),
    case(
        "a read-only IFS",
        Step("readonly IFS"),
        Step("(exit 10)", code=10),
        Step("echo $y", b"a b\n", env={"y": "a b"}, cwd="/", at="@DIR@"),
        ALIVE,
    ),
    case(
        "a read-only PWD",
        Step("readonly PWD; cd /", err=like("[^\n]+: PWD: [^\n]+\n"), code={"bash": 1, "": 2}),
        Step("/bin/pwd", b"/\n", at="/"),
        ALIVE,
    ),
    case(
        "PWD is a lie",
        Step("PWD=/nowhere"),
        Step("/bin/pwd", b"@DIR@\n"),
        Step("unset PWD OLDPWD"),
        Step("cd .; pwd", b"@DIR@\n", at="@DIR@"),
        on=SH,
    ),
    case("read-only REPLY", Step("readonly REPLY _x; true"), Step("pwd", b"/\n", cwd="/", at="@DIR@"), ALIVE),
    case(
        "a read-only OLDPWD",
        Step("readonly OLDPWD; x=1"),
        # The shell's own `cd` refuses.
        Step("echo no; x=2", b"", like("[^\n]+OLDPWD: [^\n]+\n"), 1, cwd="/", at="@DIR@"),
        Step("echo $x; pwd", b"1\n@DIR@\n", at="@DIR@"),
        on=SH,
    ),
    case(
        "CDPATH",
        Step("mkdir -p a/d d; export CDPATH=@DIR@/a"),
        Step("pwd", b"@DIR@/d\n", cwd="@DIR@/d", at="@DIR@"),
        ALIVE,
        Step("cd d", b"@DIR@/a/d\n", at="@DIR@/a/d"),
        on=SH,
    ),
    case(
        "prompts",
        Step("export PS1='foo> ' PS2='bar> '; PROMPT_COMMAND='echo PC'; PS0='zero'"),
        ALIVE,
        Step("echo a\n\necho b", b"a\nb\n"),
        on=BASH,
    ),
    case(
        "prompts, elsewhere",
        Step("export PS1='foo> ' PS2='bar> '"),
        ALIVE,
        Step("echo a\n\necho b", b"a\nb\n"),
        on=("dash", "ash", "zsh"),
    ),
    case(
        "BASH_ENV and ENV",
        Step("echo 'echo env file' >e; export BASH_ENV=@DIR@/e ENV=@DIR@/e"),
        ALIVE,
        Step("bash -c 'echo inner'", b"env file\ninner\n"),
        on=BASH,
    ),
    case(
        "every variable unset",
        Step("for v in $(compgen -v); do unset -v $v; done 2>/dev/null; :"),
        Step("echo next", b"next\n", at="@DIR@"),
        Step("(exit 3)", code=3),
        Step("echo $y", b"1\n", env={"y": "1"}),
        on=BASH,
    ),
    case(
        "every function unset",
        Step("unset -f $(compgen -A function); :"),
        Step("echo next", b"next\n", at="@DIR@"),
        Step("(exit 3)", code=3),
        Step("echo $y", b"1\n", env={"y": "1"}),
        on=BASH,
    ),
    case("everything exported", Step("set -a; x=1"), Step("env | grep -c ^x=", b"1\n"), Step("set +a"), ALIVE),
)
