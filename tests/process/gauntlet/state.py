"""State that one command leaves to the next: variables, functions, aliases, arrays, the directory. Pure data."""

from __future__ import annotations

from tests.process.gauntlet.case import ALIVE, ALL, ANY, BASH, BASH_ZSH, OUR_TRAP, SH, Case, Step, case, like, says

STATE: tuple[Case, ...] = (
    case(
        "variables last",
        Step("x='a  b'; export y=2"),
        Step('echo "$x" $y; sh -c \'echo "$x$y"\'', b"a  b 2\n2\n"),
        on=ALL,
    ),
    case("unset lasts", Step("x=1"), Step("unset x"), Step("echo ${x-none}", b"none\n"), on=ALL),
    case(
        "cd lasts",
        Step("mkdir d; cd d", at="@DIR@/d"),
        Step("pwd", b"@DIR@/d\n", at="@DIR@/d"),
        Step("cd ..", at="@DIR@"),
        on=ALL,
    ),
    case("cd -", Step("cd /", at="/"), Step("cd -", b"@DIR@\n", at="@DIR@"), Step("echo $OLDPWD", b"/\n"), on=SH),
    case(
        "functions last",
        Step('f() { echo "f:$1"; g=$2; return 3; }'),
        Step("f a b", b"f:a\n", code=3),
        Step("echo $g", b"b\n"),
        on=ALL,
    ),
    case("aliases last", Step("alias ll='echo LL'"), Step("ll x", b"LL x\n"), Step("unalias ll; alias")),
    case("an alias and its quotes", Step("""alias q="printf '%s|' 'a b'" """), Step("q c", b"a b|c|"), on=ALL),
    case("umask lasts", Step("umask 077"), Step("umask; touch f; stat -c %a f", b"0077\n600\n"), on=SH),
    case(
        "a umask that takes all rights",
        Step("umask 777"),
        ALIVE,
        Step("umask", b"0777\n"),
        Step("cat", b"in", input="in"),
    ),
    case("shopt lasts", Step("shopt -s extglob nullglob"), Step("touch a b; echo !(a) z*", b"b\n"), on=BASH),
    case("shopt of one line counts in the next", Step("shopt -s extglob\ntouch a b\necho !(a)", b"b\n"), on=BASH),
    case(
        "arrays last",
        Step("a=(1 'b c' 3); a+=(4)"),
        Step('echo ${#a[@]} "${a[1]}"; unset "a[0]"; echo ${!a[@]}', b"4 b c\n1 2 3\n"),
        on=BASH,
    ),
    case(
        "associative arrays last",
        Step("declare -A m=([k]=v ['a b']=c)"),
        Step('echo ${m[k]} "${m[a b]}" ${#m[@]}', b"v c 2\n"),
        on=BASH,
    ),
    case(
        "declare is global",
        Step("declare x=1; typeset y=2; declare -i n=5; n+=3"),
        Step("echo $x $y $n", b"1 2 8\n"),
        on=BASH,
    ),
    case("typeset is global", Step("typeset x=1; y=2"), Step("echo $x $y", b"1 2\n"), on=("zsh",)),
    case("a reference to a name", Step("declare -n r=t; r=5"), Step("echo $t $r", b"5 5\n"), on=BASH),
    case(
        "local outside a function",
        Step("local x=1", err=says("local: can only be used in a function"), code=1),
        ALIVE,
        on=BASH,
    ),
    case(
        "positional parameters last",
        Step("echo $#", b"0\n"),
        Step("set -- a 'b c' d"),
        Step('echo $# "$2"; shift', b"3 b c\n"),
        Step('echo "$*"', b"b c d\n"),
        on=ALL,
    ),
    case(
        "getopts goes on",
        Step("set -- -a -b v; getopts ab: o; echo $o", b"a\n"),
        Step("getopts ab: o; echo $o $OPTARG", b"b v\n"),
        on=("bash", "dash"),
    ),
    case("REPLY lasts", Step("read -r <<< 'a b'"), Step("echo $REPLY", b"a b\n"), on=BASH),
    case(
        "the directory stack lasts",
        Step("pushd / >/dev/null"),
        Step("pwd", b"@DIR@\n", cwd="@DIR@"),
        Step("dirs -l -p", b"/\n@DIR@\n"),
        Step("popd >/dev/null; pwd", b"@DIR@\n"),
        on=BASH,
    ),
    case(
        "one process throughout",
        Step("first=$$"),
        Step("[ $first = $$ ] && echo same; sh -c '[ $PPID = '$$' ] && echo child'", b"same\nchild\n"),
        on=ALL,
    ),
    case("not in a subshell", Step("[ $$ = $BASHPID ]; echo $? $BASH_SUBSHELL", b"0 0\n"), on=BASH),
    case(
        "line numbers begin at one",
        Step("echo $LINENO\n\necho $LINENO", b"1\n3\n"),
        Step("echo $LINENO", b"1\n"),
        on=BASH,
    ),
    case("its name", Step("echo $0", like("(.*/)?bash\n")), on=BASH),
    case("not interactive", Step("case $- in *i*) echo interactive;; *) echo batch;; esac", b"batch\n"), on=BASH),
    case("nothing is defined at first", Step("alias; trap; jobs; echo $#$!", like(OUR_TRAP + "0\n"))),
    case(
        "sourcing a file",
        Step("echo 'x=5; echo $1; return 4; echo no' >f; . ./f arg", b"arg\n", code=4),
        Step("echo $x", b"5\n"),
        on=("bash", "ash", "zsh"),
    ),
    case(
        "exported functions", Step("f() { echo exported; }; export -f f"), Step("bash -c f", b"exported\n"), on=BASH
    ),
    case(
        "what to do when a command is not found",
        Step('command_not_found_handle() { echo "no $1"; return 42; }'),
        Step("nosuch", b"no nosuch\n", code=42),
        on=BASH,
    ),
    case("lastpipe", Step("shopt -s lastpipe; echo x | read -r v; echo $v", b"x\n"), on=BASH),
    case(
        "process substitution",
        Step("cat <(echo a) <(echo b); diff <(echo a) <(echo b)", b"a\nb\n1c1\n< a\n---\n> b\n", code=1),
        ALIVE,
        on=BASH_ZSH,
    ),
    case("process substitution for output", Step("echo x > >(tr x y >f); wait $!; cat f", b"y\n"), ALIVE, on=BASH),
    case(
        "a coprocess lasts",
        Step("coproc cat; echo one >&${COPROC[1]}; read -r x <&${COPROC[0]}; echo $x", b"one\n"),
        Step("echo two >&${COPROC[1]}; read -r x <&${COPROC[0]}; echo $x", b"two\n"),
        Step("kill $COPROC_PID; wait $COPROC_PID; echo $?", b"143\n", ANY),
        on=BASH,
    ),
    case(
        "quoting by bash",
        Step(
            "x=$'a b\\n\\''; printf '%q\\n' \"$x\"; echo ${x@Q}; echo f >f; echo $(<f)",
            b"$'a b\\n\\''\n$'a b\\n\\''\nf\n",
        ),
        on=BASH,
    ),
    case(
        "a function as it was written",
        Step('f() { echo "a"; }'),
        Step("declare -f f; type -t f", b'f () \n{ \n    echo "a"\n}\nfunction\n'),
        on=BASH,
    ),
)
