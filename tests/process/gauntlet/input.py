"""Commands that read stdin, and commands, values and environments that are large. Pure data."""

from __future__ import annotations

from tests.process.gauntlet.case import ALIVE, ALL, ANY, BASH, EVERY_BYTE, SH, Case, Step, case, like

INPUT: tuple[Case, ...] = (
    case("cat without input", Step("cat"), Step("cat -"), Step("cat /dev/stdin"), on=ALL),
    case("read without input", Step("read x; echo got:$x", b"got:\n"), Step("read x", code=1), on=ALL),
    case(
        "python without input",
        Step("python3 -c 'input()'", err=like(".*EOFError: EOF when reading a line\n"), code=1),
        needs=("python3",),
    ),
    case("input", Step("cat", b"a\nb", input=b"a\nb"), Step("cat"), on=ALL),
    case("input as text", Step("cat", "é\n".encode(), input="é\n"), on=ALL),
    case("input of every byte", Step("cat", EVERY_BYTE, input=EVERY_BYTE), on=ALL),
    case("no input at all", Step("cat; echo $?", b"0\n", input=b""), on=ALL),
    case(
        "no input after a lot of it",
        Step("wc -c", b"5000\n", input=b"x" * 5000),
        Step("cat; echo $?", b"0\n", input=b""),
        on=ALL,
    ),
    case(
        "input read line by line",
        Step("read -r x; read -r y; echo $y $x; cat", b"b a\\\nc\n", input=b"a\\\nb\nc\n"),
    ),
    case(
        "input in a loop",
        Step('while IFS= read -r l; do echo "[$l]"; done', b"[ a ]\n[]\n[b]\n", input=b" a \n\nb\n"),
        on=ALL,
    ),
    case("input that nobody reads", Step("echo done", b"done\n", input=b"x" * 3_000_000), Step("cat"), ALIVE),
    case(
        "input of which only the beginning is read",
        Step("head -c 3", b"abc", input=b"abc" + b"x" * 1_000_000),
        Step("cat"),
        ALIVE,
    ),
    case("a lot of input", Step("cat | wc -c", b"5000000\n", input=b"x" * 5_000_000), ALIVE),
    case("input for a shell", Step("bash -s", b"inner\n", input="echo inner; exit 3\n", code=3), ALIVE, on=BASH),
    case(
        "read with options",
        Step('read -r -n 3 x; read -r -d : y; echo "$x|$y"', b"abc|de\n", input="abcde:f"),
        on=BASH,
    ),
    case(
        "mapfile",
        Step("mapfile -t l; echo ${#l[@]} ${l[1]}", b"3 b\n", input="a\nb\nc\n"),
        Step("echo ${l[2]}", b"c\n"),
        on=BASH,
    ),
    case(
        "select",
        Step("select x in one two; do echo $x; break; done", b"two\n", b"1) one\n2) two\n#? ", input="2\n"),
        on=BASH,
    ),
    case(
        "select without input",
        Step("select x in one two; do echo $x; break; done; echo end", b"\nend\n", b"1) one\n2) two\n#? "),
        on=BASH,
    ),
    case(
        "exec <file lasts for its command",
        Step("echo a >f; exec <f; cat", b"a\n"),
        Step("cat"),
        Step("cat", b"b", input="b"),
    ),
    case("stdin closed for good", Step("exec <&-"), Step("cat", b"b", input="b"), ALIVE),
    case(
        "a background job reads nothing of it",
        Step("cat >f & wait; wc -c <f; cat", b"0\nrest", input="rest"),
        on=("bash", "dash"),
    ),
    case(
        "no terminal",
        Step("tty", b"not a tty\n", code=1),
        Step("[ -t 0 ] || [ -t 2 ] || echo none", b"none\n"),
        on=ALL,
    ),
    case("stty", Step("stty raw -echo", err=like("[^\n]+\n"), code=1), ALIVE, on=ALL),
    case(
        "commands as input",
        Step(". /dev/stdin; echo $y", b"sourced\n3\n", input="echo sourced\ny=3\n"),
        Step("echo $y", b"3\n"),
        on=SH,
    ),
    case(
        "a program that eats the input of a loop",
        Step("while read -r l; do echo $l; cat >/dev/null; done", b"a\n", input="a\nb\nc\n"),
        on=ALL,
    ),
)

LARGE: tuple[Case, ...] = (
    case("a command of 20 KB", Step("echo " + "x" * 20_000, b"x" * 20_000 + b"\n"), ALIVE, on=ALL),
    case("a command of 200 KB", Step("echo " + "x" * 200_000 + " | wc -c", b"200001\n"), ALIVE, on=ALL),
    case(
        "a command of 1 MB",
        Step("x='" + "y" * 1_000_000 + "'; echo ${#x}", b"1000000\n"),
        Step("echo ${#x}", b"1000000\n"),
        on=SH,
    ),
    case("many lines", Step("i=0\n" + "i=$((i+1))\n" * 20_000 + "echo $i", b"20000\n")),
    case("a comment of 1 MB", Step("# " + "x" * 1_000_000 + "\necho end", b"end\n")),
    case("ten thousand words", Step("set -- " + "w " * 10_000 + "; echo $#", b"10000\n")),
    case(
        "too long for a child",
        Step("/bin/echo " + "x" * 200_000, err=like("[^\n]+rgument list too long[^\n]*\n"), code=126),
        ALIVE,
        on=BASH,
    ),
    case(
        "a huge environment",
        Step("x=$(head -c 100000 /dev/zero | tr '\\0' v); for i in 1 2 3 4 5 6 7 8 9; do export V$i=$x; done"),
        Step("env | grep -c '^V[1-9]=v*$'; echo ${#V9}", b"9\n100000\n"),
        Step("cat", b"in", input="in", env={"V1": "short"}),
    ),
    case(
        "an environment too large for any child",
        Step("export BIG=$(head -c 200000 /dev/zero | tr '\\0' v)"),
        Step("/bin/echo no", err=like("[^\n]+rgument list too long[^\n]*\n"), code=126),
        Step("echo ${#BIG}", b"200000\n"),
        Step("unset BIG; /bin/echo yes", b"yes\n"),
        on=BASH,
    ),
    case(
        "a value of 5 MB that is not exported",
        Step("x=$(head -c 5000000 /dev/zero | tr '\\0' v)"),
        Step("echo ${#x}", b"5000000\n"),
        ALIVE,
        on=BASH,
    ),
    case(
        "a deep directory",
        Step(
            "d=dddddddddddddddddddd; for i in 1 2 3 4 5 6 7 8 9; do mkdir $d; cd $d; done; pwd | wc -c; cd @DIR@",
            ANY,
        ),
        ALIVE,
    ),
)
