"""The commands that break session shells, as data: what is typed, and exactly what must come back, byte by byte.

Each case runs in a live shell of its own, step after step, on every shell it names. `@DIR@` in a command or in an
expectation stands for the case's own empty directory, where the shell starts. Pure: nothing here runs anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

BASH = ("bash",)
SH = ("bash", "dash", "ash")
POSIX = ("dash", "ash")
ALL = ("bash", "dash", "ash", "zsh")
BASH_ZSH = ("bash", "zsh")

#: What a stream must be: these bytes, or something that this pattern matches whole.
Expected = bytes | re.Pattern[bytes]


class Step(msgspec.Struct, frozen=True):
    """One command, and all that must be true of its result."""

    command: str
    #: A mapping gives the expectation by shell; "" is for those it does not name.
    out: Expected | Mapping[str, Expected] = b""
    err: Expected | Mapping[str, Expected] = b""
    code: int | Mapping[str, int] = 0
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    input: bytes | str | None = None
    timeout: float | None = None
    #: Interrupt the command once it has printed this to stdout.
    interrupt_at: bytes | None = None
    timed_out: bool = False
    restarted: bool = False
    #: The directory that the result must name.
    at: str | None = None


class Closed(msgspec.Struct, frozen=True):
    """From here on the shell is closed, and the error says why."""

    why: str


class Late(msgspec.Struct, frozen=True):
    """What background jobs printed after their commands: exactly this is the shell's own output."""

    out: bytes = b""
    err: bytes = b""


class Case(msgspec.Struct, frozen=True):
    """Steps in one live shell. It must live to the end unless the last step says that it is closed."""

    name: str
    steps: tuple[Step | Closed | Late, ...]
    shells: tuple[str, ...] = SH
    #: Programs without which the case cannot be run.
    needs: tuple[str, ...] = ()


def case(name: str, *steps: Step | Closed | Late, on: tuple[str, ...] = SH, needs: tuple[str, ...] = ()) -> Case:
    return Case(name, steps, on, needs)


def like(pattern: str) -> re.Pattern[bytes]:
    """Any bytes that this pattern matches whole; a dot matches newlines too."""
    return re.compile(pattern.encode(), re.DOTALL)


def says(text: str, line: int | None = 1) -> re.Pattern[bytes]:
    """One line of bash on stderr: the path of the command, the line in it, the message."""
    where = f": line {line}: " if line else ": "
    return re.compile(rb"[^\n]+" + re.escape((where + text).encode()) + rb"\n")


def fakes(*names: str) -> str:
    """Functions with these names, each of which only says that it was called."""
    return "; ".join(f"{name}() {{ echo fake {name}; }}" for name in names)


def ends(text: str) -> re.Pattern[bytes]:
    """One line that ends so: for messages whose beginning each shell writes in its own way."""
    return re.compile(rb"[^\n]*" + re.escape(text.encode()) + rb"\n")


ANY = like(".*")
SOMETHING = like(".+\n")
ALIVE = Step("echo alive", b"alive\n")
EVERY_BYTE = bytes(range(256))
OCTAL = "".join(f"\\{value:03o}" for value in range(256))

OUTPUT: tuple[Case, ...] = (
    case("a silent command", Step("true"), Step("x=1"), Step(":"), ALIVE, on=ALL),
    case("one line", Step("echo hello", b"hello\n"), on=ALL),
    case("no final newline", Step("printf x", b"x"), Step("printf y >&2", b"", b"y"), ALIVE, on=ALL),
    case("many final newlines", Step(r"printf 'a\n\n\n\n'", b"a\n\n\n\n"), ALIVE, on=ALL),
    case("blank lines first", Step(r"printf '\n\n\na'", b"\n\n\na"), ALIVE, on=ALL),
    case("one newline", Step("echo", b"\n"), Step("echo >&2", b"", b"\n"), on=ALL),
    case("spaces only", Step("printf '  \\n \\t \\n  '", b"  \n \t \n  "), on=ALL),
    case("NUL", Step(r"printf 'a\0b\0'", b"a\0b\0"), ALIVE, on=ALL),
    case("every byte on stdout", Step(f"printf '{OCTAL.replace('%', '%%')}'", EVERY_BYTE), ALIVE, on=ALL),
    case("every byte on stderr", Step(f"printf '{OCTAL}' >&2", b"", EVERY_BYTE), ALIVE, on=ALL),
    case("invalid UTF-8", Step(r"printf '\377\376\300\200\355\240\200'", b"\xff\xfe\xc0\x80\xed\xa0\x80"), on=ALL),
    case(
        "the stream prefixes of others",
        Step(
            r"printf '\001\001\001out\n\002\002\002err\n'; printf '\001\001\001x\n' >&2",
            b"\x01\x01\x01out\n\x02\x02\x02err\n",
            b"\x01\x01\x01x\n",
        ),
        on=ALL,
    ),
    case("CR and tabs", Step(r"printf 'a\rb\tc\r\n\r'", b"a\rb\tc\r\n\r"), on=ALL),
    case(
        "percent signs and backslashes",
        Step(r"printf '%s\n' '100% %s %d \n \\ \t \0'", rb"100% %s %d \n \\ \t \0" + b"\n"),
        on=ALL,
    ),
    case(
        "escape sequences and prompt marks",
        Step(
            r"printf '\033[31mred\033[0m\033]133;D;0\007\033]133;A\007'",
            b"\x1b[31mred\x1b[0m\x1b]133;D;0\x07\x1b]133;A\x07",
        ),
        ALIVE,
        on=ALL,
    ),
    case(
        "wide characters across every buffer's edge",
        Step("cat", b"x" + "語".encode() * 50_000, input="x" + "語" * 50_000),
        on=ALL,
    ),
    case(
        "a line of a megabyte",
        Step("head -c 1000000 /dev/zero | tr '\\0' x", b"x" * 1_000_000),
        ALIVE,
        on=ALL,
    ),
    case(
        "both streams at once at full speed",
        Step(
            "head -c 3000000 /dev/zero & head -c 3000000 /dev/zero >&2; wait", b"\0" * 3_000_000, b"\0" * 3_000_000
        ),
        ALIVE,
    ),
    case("twenty thousand lines", Step("seq 1 20000", b"".join(b"%d\n" % n for n in range(1, 20_001))), on=ALL),
    case("stdout and stderr apart", Step("echo a; echo b >&2; echo c; echo d >&2", b"a\nc\n", b"b\nd\n"), on=ALL),
    case(
        "a lot of output, then a failure",
        Step("head -c 300000 /dev/zero; (exit 9)", b"\0" * 300_000, code=9),
        ALIVE,
    ),
    case(
        "marks that tools end commands by",
        Step(
            "echo '0'; echo '0 @DIR@'; echo EXIT_CODE=0; echo '__END__ 0'; echo '###PS1JSON###';"
            " echo SHELLPS1PREFIX;"
            r" printf '\0000 /\0\n'; (exit 5)",
            b"0\n0 @DIR@\nEXIT_CODE=0\n__END__ 0\n###PS1JSON###\nSHELLPS1PREFIX\n\x000 /\0\n",
            code=5,
        ),
        ALIVE,
    ),
    case(
        "the standard streams by name",
        Step(
            "echo a >/dev/stdout; echo b >/dev/stderr; echo c >/dev/fd/1; echo d >/proc/self/fd/2",
            b"a\nc\n",
            b"b\nd\n",
        ),
        on=ALL,
    ),
    case(
        "they are pipes",
        Step("[ -p /dev/stdout ] && [ -p /dev/stderr ] && ! [ -t 1 ] && echo pipes", b"pipes\n"),
        on=ALL,
    ),
    case(
        "a child that makes its stdout non-blocking",
        Step(
            "python3 -c 'import os; os.set_blocking(1, False); os.set_blocking(2, False)'; seq 1 9",
            b"1\n2\n3\n4\n5\n6\n7\n8\n9\n",
        ),
        Step("head -c 2000000 /dev/zero", b"\0" * 2_000_000),
        needs=("python3",),
    ),
    case("echo -e and -n", Step(r"echo -e 'a\tb\\'; echo -n c", b"a\tb\\\nc"), on=BASH),
    case(
        "a wide character is read as one, and as bytes in another locale",
        Step("x='é語'; echo ${#x}", b"2\n"),
        Step("LC_ALL=C; echo ${#x}", b"5\n"),
        Step("LC_ALL=C.UTF-8; echo ${#x}; echo $x", "2\né語\n".encode()),
        on=BASH_ZSH,
    ),
    case(
        "a locale that is not there",
        Step(
            "LC_ALL=xx_YY.nope; echo set",
            b"set\n",
            says("warning: setlocale: LC_ALL: cannot change locale (xx_YY.nope): No such file or directory"),
        ),
        ALIVE,
        on=BASH,
    ),
    case(
        "SIGPIPE is as it is in every shell", Step("yes | head -n 1; echo ${PIPESTATUS[@]}", b"y\n141 0\n"), on=BASH
    ),
    case(
        "signals are neither ignored nor blocked in children",
        # 32 and 33 are the C library's own, and its posix_spawn has them ignored.
        Step("grep -E '^Sig(Blk|Ign)' /proc/self/status", like("SigBlk:\t0{16}\nSigIgn:\t0{7}[01][08]0{7}\n")),
        on=ALL,
    ),
    case("no controlling terminal", Step("cat /dev/tty", err=ends("No such device or address"), code=1), on=ALL),
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
)

EXIT_CODES += (
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

PARSING: tuple[Case, ...] = (
    case(
        "quotes",
        Step("""echo 'a "b"' "c 'd'" 'it'\\''s' "\\$x \\\\" e\\ f""", b"a \"b\" c 'd' it's $x \\ e f\n"),
        on=SH,
    ),
    case("quotes of C", Step(r"printf '%s|' $'a\tb\n\x41\'' ''", b"a\tb\nA'||"), on=("bash", "ash", "zsh")),
    case("quotes over several lines", Step("echo 'a\n\n  b'", b"a\n\n  b\n"), on=ALL),
    case(
        "substitution in substitution",
        Step('echo "$(echo "a $(echo "b  c")")" `echo \\`echo d\\``', b"a b  c d\n"),
        on=ALL,
    ),
    case(
        "final newlines of a substitution", Step(r"""x=$(printf 'a\n\n\n'); printf '[%s]' "$x" """, b"[a]"), on=ALL
    ),
    case(
        "parameter expansion",
        Step(
            "x=a.b.c; echo ${x#*.} ${x##*.} ${x%.*} ${x%%.*} ${#x} ${y:-none} ${x:+some}",
            b"b.c c a.b a 5 none some\n",
        ),
        on=ALL,
    ),
    case(
        "replacement and slices",
        Step("x=banana; echo ${x//a/o} ${x/a/o} ${x:2:3} ${x^^}", b"bonono bonana nan BANANA\n"),
        on=BASH,
    ),
    case("arithmetic", Step("echo $((1 + 2 * 3)) $(( (1 << 10) % 1000 )) $((0x1f))", b"7 24 31\n"), on=ALL),
    case("braces", Step("echo {a,b}{1..3} {01..03}", b"a1 a2 a3 b1 b2 b3 01 02 03\n"), on=BASH_ZSH),
    case("tilde", Step("HOME=/somewhere; echo ~ ~/x '~'", b"/somewhere /somewhere/x ~\n"), on=ALL),
    case("globs", Step("touch b a .h; echo * [ab]; echo 'no*' z*", b"a b a b\nno* z*\n")),
    case(
        "word splitting", Step("x='a  b'; set -- $x; echo $#; IFS=:; y=1:2:3; set -- $y; echo $# $2", b"2\n3 2\n")
    ),
    case("an exclamation mark", Step("""echo hi! "a!b" '!!' !x "!"; ! false""", b"hi! a!b !! !x !\n"), ALIVE),
    case(
        "history expansion switched on",
        Step("set -o history -o histexpand"),
        Step("echo 'a!b' \"c!\" d!", b"a!b c! d!\n"),
        ALIVE,
        on=BASH,
    ),
    case("several lines", Step("a=1\nb=2\n\nif [ $a = 1 ]; then\n  echo one\nfi\necho $b", b"one\n2\n"), on=ALL),
    case("several lines with a last newline", Step("echo a\necho b\n\n\n", b"a\nb\n"), on=ALL),
    case("a continued line", Step("echo a \\\n  b \\\n  c", b"a b c\n"), on=ALL),
    case("a comment only", Step("# nothing"), Step("#"), ALIVE, on=SH),
    case("a comment behind", Step("echo a # b", b"a\n"), Step("echo a#b", b"a#b\n"), on=SH),
    case("a script with its first line", Step("#!/bin/sh\n# why\necho hi\n", b"hi\n"), on=SH),
    case("nothing", Step(""), ALIVE, on=ALL),
    case("white space only", Step(" \t \n\n  \n"), ALIVE, on=ALL),
    case("blanks around", Step("  \t echo a \t ", b"a\n"), on=ALL),
    case("a semicolon behind", Step("echo a;", b"a\n"), Step("echo b; ", b"b\n"), on=ALL),
    case("an ampersand behind", Step("true &"), Step("echo a >f & wait; cat f", b"a\n"), ALIVE, on=ALL),
    case("an ampersand and blanks behind", Step("true & \n"), ALIVE, on=ALL),
    case("only an ampersand", Step("&", err=SOMETHING, code=2), ALIVE),
    case("find -exec", Step(r"touch a b; find . -type f -exec echo {} \; | sort", b"./a\n./b\n"), on=ALL),
    case(
        "find -exec at the end",
        Step(r"touch a; find . -type f -exec echo {} \;", b"./a\n"),
        Step("find . -type f -exec echo {} +", b"./a\n"),
        on=ALL,
    ),
    case("a backslash at the end", Step("echo hi \\", b"hi\n"), ALIVE),
    case("two backslashes at the end", Step("echo hi \\\\", b"hi \\\n"), ALIVE),
    case("a carriage return", Step("echo hi\r\necho ho\r\n", b"hi\r\nho\r\n"), ALIVE, on=ALL),
    case("tabs", Step("echo\ta\t'b\tc'", b"a b\tc\n"), on=ALL),
    case("letters of every kind", Step("echo 'héllo 語 🎈' \u00a0x", "héllo 語 🎈 \u00a0x\n".encode()), on=SH),
    case("a command that begins with a dash", Step("-x", err=ends(": not found"), code=127), on=POSIX),
    case("a word that is like an option", Step("echo -- -n -e", b"-- -n -e\n"), on=BASH),
    case(
        "compound commands",
        Step(
            "for i in 1 2 3; do case $i in 2) continue;; esac; echo $i; done\n"
            "until true; do :; done; while [ $i -gt 1 ]; do i=$((i-1)); done; echo $i",
            b"1\n3\n1\n",
        ),
        on=ALL,
    ),
    case("the loop of C", Step("for ((i=0; i<3; i++)); do printf $i; done", b"012"), on=BASH_ZSH),
    case("patterns", Step("[[ abc == a* && abc =~ b(.) ]] && echo yes", b"yes\n"), on=BASH_ZSH),
    case(
        "BASH_REMATCH of the command before",
        Step("[[ abc =~ b(.) ]]"),
        Step("echo ${BASH_REMATCH[1]}", b"c\n"),
        on=BASH,
    ),
    case("deep nesting", Step("echo " + "$(echo " * 40 + "deep" + ")" * 40, b"deep\n")),
    case("many parentheses", Step("( " * 60 + "echo deep" + " )" * 60, b"deep\n")),
    case(
        "eval",
        Step("eval 'echo \"a b\"; x=5'; echo $x", b"a b\n5\n"),
        Step("eval 'echo a\necho b'", b"a\nb\n"),
        on=ALL,
    ),
    case("a syntax error in eval", Step("eval 'if'; echo after $?", b"after 2\n", SOMETHING), ALIVE, on=BASH),
    case(
        "a syntax error in eval ends the command",
        Step("kept=1; eval 'if'; echo after $?", b"", SOMETHING, 2),
        Step("echo $kept", b"1\n"),
        on=POSIX,
    ),
)

#: Text that no shell can parse: told at once, nothing of it run, the shell as it was.
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
)

INPUT += (
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
    case("nothing is defined at first", Step("alias; trap; jobs; echo $#$!", b"0\n")),
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
)

STATE += (
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
        Step(
            fakes(
                *(
                    "eval",
                    "source",
                    "exec",
                    "trap",
                    "set",
                    "export",
                    "return",
                    "exit",
                    "command",
                    "declare",
                    "local",
                ),
                *(
                    "shift",
                    ".",
                    ":",
                    "readonly",
                    "shopt",
                    "mapfile",
                    "break",
                    "continue",
                    "unset",
                    "enable",
                    "compgen",
                ),
            )
        ),
        Step("(builtin exit 3)", code=3),
        Step(
            "echo next; eval; exit", b"next\nfake eval\nfake exit\n", cwd="/", env={"y": "1"}, input="x", at="@DIR@"
        ),
        Step("builtin unset -f eval exit; eval 'echo $?'", b"0\n"),
        on=BASH,
    ),
    case(
        "aliases with the names of builtins",
        Step(
            "alias "
            + " ".join(
                f"{name}='echo A'"
                for name in (
                    "eval",
                    "source",
                    "exec",
                    "printf",
                    "read",
                    "builtin",
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
        Step("enable -n printf read eval source cd pwd test [ trap kill wait"),
        Step("(exit 3)", code=3),
        Step("echo next", b"next\n", cwd="/", env={"y": "1"}, at="@DIR@"),
        on=BASH,
    ),
    case(
        "PATH is empty",
        Step("PATH="),
        Step("echo hi; cd /; pwd", b"hi\n/\n", at="/"),
        Step("ls", err=ANY, code=127),
        Step("cat", err=ANY, code=127, input="x"),
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
    case(
        "read-only OLDPWD and REPLY",
        Step("readonly OLDPWD REPLY _x; true"),
        Step("pwd", b"/\n", cwd="/", at="@DIR@"),
        ALIVE,
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

OPTIONS: tuple[Case, ...] = (
    case(
        "set -x",
        Step("set -x"),
        Step("echo hi", b"hi\n", b"++ echo hi\n"),
        Step("set +x", b"", b"++ set +x\n"),
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
        Step("echo hi", b"hi\n", b"++ echo hi\n", cwd="/", env={"y": "1"}, input="x"),
        Step("set +x", b"", ANY),
        ALIVE,
        on=BASH,
    ),
    case(
        "PS4",
        Step("PS4='T '; set -x"),
        Step("echo hi", b"hi\n", b"TT echo hi\n"),
        Step("PS4='$(echo X) '; set +x", b"", ANY),
        ALIVE,
        on=BASH,
    ),
    case(
        "BASH_XTRACEFD",
        Step("exec 9>t; BASH_XTRACEFD=9; set -x"),
        Step("echo hi", b"hi\n"),
        Step("set +x; cat t", b"++ echo hi\n++ set +x\n"),
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
        Step("fi", b"", SOMETHING, 2),
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
        Step("echo a; false; echo b", b"a\n", code=1, restarted=True),
        Step("echo $x; pwd; case $- in *e*) echo still;; esac", b"5\n/\nstill\n", at="/"),
        on=BASH,
    ),
    case(
        "set -e in one command",
        Step("x=5; set -e; (exit 9); echo no", b"", code=9, restarted=True),
        Step("echo $x", b"5\n"),
        Step("false", code=1, restarted=True),
        Step("set +e; false", code=1),
        ALIVE,
        on=BASH,
    ),
    case(
        "set -e in a function",
        Step("f() { false; echo no; }; set -e"),
        Step("f; echo no", code=1, restarted=True),
        Step("f || true; set +e", b"no\n"),
        ALIVE,
        on=BASH,
    ),
    case(
        "set -e with a command that is not found",
        Step(
            "set -e; nosuch-program; echo no", b"", says("nosuch-program: command not found"), 127, restarted=True
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
        Step("echo a; echo $nn; echo b", b"a\n", says("nn: unbound variable"), 1, restarted=True),
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
        Step("echo ${nn:?is gone}; echo no", b"", says("nn: is gone"), 1, restarted=True),
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
        Step("echo hi | cat", b"hi\n", like(r"(\+\+ echo hi\n\+\+ cat\n|\+\+ cat\n\+\+ echo hi\n)")),
        Step("set +eux", b"", b"++ set +eux\n"),
        Step("false | true", code=1),
        on=BASH,
    ),
    case(
        "all of them and a failure",
        Step("set -euo pipefail; x=1"),
        Step("echo a; false | true; echo b", b"a\n", code=1, restarted=True),
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
        Step("set -e; false", code=1, restarted=True, at="@DIR@/d d"),
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
        Step("set -e; false", code=1, restarted=True),
        Step("umask", b"0027\n"),
        on=BASH,
    ),
    case(
        "a restart keeps the parameters",
        Step("set -- p 'q r'"),
        Step("set -e; false", code=1, restarted=True),
        Step('echo $# "$2"', b"2 q r\n"),
        on=BASH,
    ),
    case(
        "a restart keeps a background job",
        Step("sleep 1000 & echo $! >pids; echo $! >pid"),
        Step("set -e; false", code=1, restarted=True),
        Step("kill -0 $(cat pid) && echo runs", b"runs\n"),
        on=BASH,
    ),
    case(
        "a restart and what the command set",
        Step("a=1"),
        Step("a=2; b=3; cd /; set -e; false", code=1, restarted=True),
        Step("echo $a$b; pwd", b"23\n/\n"),
        on=BASH,
    ),
    case(
        "set -n",
        # The shell reads on and runs nothing more, so that only another shell can answer.
        Step("export x=5; echo a", b"a\n"),
        Step("set -n; echo no", b"", b"", 125, restarted=True),
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
)

OPTIONS += (
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
            "set +x; builtin exit 3",
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
        "$? with a trap on ERR",
        Step("trap 'echo E' ERR"),
        Step("(exit 3)", b"E\n", code=3),
        Step("echo $?", b"3\n"),
        on=BASH,
    ),
)

TRAPS: tuple[Case, ...] = (
    case(
        "a trap for a signal",
        Step("trap 'echo got' USR1; kill -USR1 $$; echo after", b"got\nafter\n"),
        Step("kill -USR1 $$", b"got\n"),
        Step("trap - USR1; trap"),
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
        Step("trap", b"trap -- 'echo a' SIGUSR1\ntrap -- '' SIGUSR2\n"),
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
        "a trap on EXIT when set -e ends the command",
        Step("trap 'echo bye' EXIT; x=5"),
        Step("set -e; false", like("(bye\n)?"), code=1, restarted=True),
        Step("echo $x; set +e", b"5\n"),
        Step("exit 3", b"bye\n", code=3),
        Closed("exited with code 3"),
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

CONTROL: tuple[Case, ...] = (
    case("return at the top", Step("echo a; return 5; echo no", b"a\n", code=5), Step("echo $?", b"5\n"), on=ALL),
    case(
        "return without a number",
        Step("false; return", code=1),
        Step("return", code=1),
        Step("true; return"),
        ALIVE,
        on=ALL,
    ),
    case("return of a large number", Step("return 300", code=44), ALIVE, on=BASH),
    case("return in a loop", Step("while :; do return 4; done; echo no", code=4), ALIVE, on=ALL),
    case(
        "break at the top",
        Step("break; echo x", b"x\n", says("break: only meaningful in a `for', `while', or `until' loop")),
        ALIVE,
        on=BASH,
    ),
    case(
        "continue at the top",
        Step("continue 2; echo x", b"x\n", says("continue: only meaningful in a `for', `while', or `until' loop")),
        ALIVE,
        on=BASH,
    ),
    case(
        "break and continue at the top, elsewhere",
        Step("break; continue; break 9; echo x", b"x\n"),
        ALIVE,
        on=POSIX,
    ),
    case(
        "break out of more loops than there are",
        Step("for i in 1 2; do break 99; done; echo x", b"x\n"),
        ALIVE,
        on=SH,
    ),
    case(
        "exit in a subshell and in a pipe",
        Step("(exit 3)", code=3),
        Step("exit 4 | exit 5", code=5),
        Step("x=$(echo a; exit 6); echo $?", b"6\n"),
        ALIVE,
        on=SH,
    ),
    case(
        "exit", Step("echo a; echo b >&2; exit 3; echo no", b"a\n", b"b\n", 3), Closed("exited with code 3"), on=ALL
    ),
    case("exit 0", Step("exit 0"), Closed("exited with code 0"), on=ALL),
    case("exit with the last code", Step("false; exit", code=1), Closed("exited with code 1"), on=ALL),
    case(
        "exit with the code of the command before",
        Step("(exit 6)", code=6),
        Step("exit", code=6),
        Closed("exited with code 6"),
        on=ALL,
    ),
    case(
        "exit in a function in a loop",
        Step("f() { while :; do exit 9; done; }; f", code=9),
        Closed("exited with code 9"),
        on=ALL,
    ),
    case(
        "exit in eval and in a file",
        Step("echo 'eval \"exit 8\"' >f; . ./f", code=8),
        Closed("exited with code 8"),
        on=ALL,
    ),
    case(
        "exit behind a lot of output",
        Step("head -c 500000 /dev/zero; exit 3", b"\0" * 500_000, code=3),
        Closed("exited with code 3"),
        on=ALL,
    ),
    case(
        "exit with a background job that holds the streams",
        Step("sleep 1000 & echo $! >pids; exit 3", code=3),
        Closed("exited with code 3"),
        on=ALL,
    ),
    case(
        "exit with what is no number",
        Step("exit abc", b"", says("exit: abc: numeric argument required"), 2),
        Closed("exited with code 2"),
        on=BASH,
    ),
    case("logout", Step("logout", b"", says("logout: not login shell: use `exit'"), 1), ALIVE, on=BASH),
    case("exec of a program", Step("exec echo replaced", b"replaced\n"), Closed("replaced by"), on=ALL),
    case(
        "exec of a program that fails",
        Step("exec sh -c 'echo replaced; echo err >&2; exit 4'", b"replaced\n", b"err\n", 4),
        Closed("replaced by"),
        on=ALL,
    ),
    case("exec bash", Step("exec bash"), Closed("replaced by"), on=BASH),
    case("exec sh", Step("x=1; exec sh"), Closed("replaced by"), on=ALL),
    case("exec cat with input", Step("exec cat", b"in", input="in"), Closed("replaced by"), on=ALL),
    case("exec in a subshell", Step("(exec echo a); exec 3>f; echo b", b"a\nb\n"), ALIVE, on=ALL),
    case(
        "exec of what is not there",
        Step("x=5; exec nosuch-program", b"", like("[^\n]+nosuch-program: not found\n"), 127),
        Step("echo $x", b"5\n"),
        on=BASH,
    ),
    case(
        "exec of what is not there, and more",
        Step("exec nosuch-program; echo $?", b"127\n", SOMETHING),
        ALIVE,
        on=BASH,
    ),
    case(
        "kill -9 itself", Step("echo a; kill -9 $$; echo no", b"a\n", code=137), Closed("killed by SIGKILL"), on=ALL
    ),
    case("terminate itself", Step("kill -TERM $$; echo no", code=143), Closed("killed by SIGTERM"), on=SH),
    case("hang up on itself", Step("kill -HUP $$; echo no", code=129), Closed("killed by SIGHUP"), on=SH),
    case("abort itself", Step("kill -ABRT $$; echo no", code=134), Closed("killed by SIGABRT"), on=SH),
    case("kill its group", Step("kill -9 0; echo no", code=137), Closed("killed by SIGKILL"), on=SH),
    case("stop itself", Step("kill -STOP $$; echo on", b"on\n"), ALIVE, on=ALL),
    case("stop itself by other signals", Step("kill -TSTP $$; echo on", b"on\n"), ALIVE, on=SH),
    case("stop its group", Step("kill -STOP 0; echo on", b"on\n"), ALIVE, on=SH),
    case(
        "suspend",
        Step("suspend", b"", says("suspend: cannot suspend: no job control"), 1),
        Step("suspend -f; echo on", b"on\n"),
        ALIVE,
        on=BASH,
    ),
    case(
        "a division by zero",
        Step("x=5; echo $((1/0)); echo no", b"", says('1/0: division by 0 (error token is "0")'), 1),
        Step("echo $x", b"5\n"),
        on=BASH,
    ),
    case(
        "a division by zero, elsewhere",
        Step("x=5; echo $((1/0)); echo no", b"", SOMETHING, 2),
        Step("echo $x", b"5\n"),
        on=POSIX,
    ),
    case(
        "a bad substitution",
        Step("x=5; echo ${x y}; echo no", b"", says("${x y}: bad substitution"), 1),
        Step("echo $x", b"5\n"),
        on=BASH,
    ),
    case(
        "a bad substitution, elsewhere",
        Step("x=5; echo ${x y}; echo no", b"", SOMETHING, 2),
        Step("echo $x", b"5\n"),
        on=POSIX,
    ),
    case(
        "a read-only variable",
        Step("readonly R=1; R=2; echo no", b"", says("R: readonly variable"), 1),
        Step("echo $R; unset R", b"1\n", says("unset: R: cannot unset: readonly variable"), 1),
        ALIVE,
        on=BASH,
    ),
    case(
        "a read-only variable, elsewhere",
        Step("readonly R=1; R=2; echo no", b"", ends("R: is read only"), 2),
        Step("echo $R", b"1\n"),
        on=POSIX,
    ),
    case(
        "a special builtin that fails",
        Step("x=5; . ./nosuch; echo no", b"", SOMETHING, 2),
        Step("echo $x", b"5\n"),
        Step("set -u; unset nn; readonly R=1; : $((R=2)); echo no", b"", SOMETHING, 2),
        Step("echo $x", b"5\n"),
        on=POSIX,
    ),
    case(
        "a special builtin that fails in dash",
        Step("x=5; shift 9; echo no", b"", SOMETHING, 2),
        Step("set -o nosuch; echo no", b"", SOMETHING, 2),
        Step("echo $x", b"5\n"),
        on=("dash",),
    ),
    case(
        "a file that is not there",
        Step(". ./nosuch; echo $?", b"1\n", says("./nosuch: No such file or directory")),
        on=BASH,
    ),
    case(
        "a redirection that fails",
        Step("x=5; echo a >/no/such/file; echo $x", b"5\n", SOMETHING),
        Step(": >/no/such/file; echo b", {"bash": b"b\n", "": b""}, SOMETHING, {"bash": 0, "dash": 2, "ash": 1}),
        Step("echo $x", b"5\n"),
    ),
    case(
        "functions nested too deep",
        Step(
            "x=5; FUNCNEST=50; f() { f; }; f; echo no",
            b"",
            says("f: maximum function nesting level exceeded (50)"),
            1,
        ),
        Step("echo $x", b"5\n"),
        on=BASH,
    ),
)

CONTROL += (
    case(
        "exec is told from exit each time",
        *(Step("true") for _ in range(3)),
        Step("exec true"),
        Closed("replaced by"),
        on=ALL,
    ),
)

DESCRIPTORS: tuple[Case, ...] = (
    case(
        "children get the three and no more",
        Step("ls /proc/self/fd", b"0\n1\n2\n3\n"),
        Step("ls /proc/self/fd", b"0\n1\n2\n3\n", input="x", cwd="/", env={"y": "1"}),
        on=ALL,
    ),
    case("background children too", Step("ls /proc/self/fd >f & wait; cat f", b"0\n1\n2\n3\n"), on=ALL),
    case(
        "3 to 9 are free",
        Step("for fd in 3 4 5 6 7 8 9; do if { true >&$fd; } 2>/dev/null; then echo $fd; fi; done", b""),
        on=SH,
    ),
    case(
        "a descriptor lasts",
        Step("exec 3>f; echo a >&3"),
        Step("echo b >&3; cat f", b"a\nb\n"),
        Step("exec 3>&-; echo c >&3", b"", SOMETHING, {"": 1, "dash": 2}),
        ALIVE,
        on=("bash", "dash", "ash"),
    ),
    case(
        "a descriptor to read from lasts",
        Step(r"printf 'a\nb\n' >f; exec 4<f; read x <&4; echo $x", b"a\n"),
        Step("read x <&4; echo $x; exec 4<&-", b"b\n"),
        on=ALL,
    ),
    case(
        "all of 3 to 9 in use",
        Step('for n in 3 4 5 6 7 8 9; do eval "exec $n>f$n"; done'),
        Step(
            'for n in 3 4 5 6 7 8 9; do eval "echo $n >&$n"; done; cat f*',
            b"3\n4\n5\n6\n7\n8\n9\n",
            input="x",
            env={"y": "1"},
        ),
        Step("exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-"),
        ALIVE,
        on=ALL,
    ),
    case(
        "descriptors that bash chooses",
        Step("exec {a}>f; echo x >&$a"),
        Step("echo y >&$a; exec {a}>&-; cat f", b"x\ny\n"),
        ALIVE,
        on=BASH,
    ),
    case(
        "a lock on descriptor 200",
        Step("exec 200>lock; flock 200 && echo locked", b"locked\n"),
        Step("flock -n lock true", code=1),
        Step("exec 200>&-; flock -n lock echo free", b"free\n"),
        on=BASH,
        needs=("flock",),
    ),
    case(
        "high descriptors",
        Step("exec 20>f 63>g; echo a >&20; echo b >&63"),
        Step("cat f g", b"a\nb\n"),
        ALIVE,
        on=BASH,
    ),
    case(
        "a descriptor for both ways",
        Step("mkfifo p; exec 5<>p; echo a >&5; read -r x <&5; echo $x", b"a\n"),
        Step("echo b >&5; read -r x <&5; echo $x", b"b\n"),
        on=ALL,
    ),
    case("streams swapped", Step("{ echo a; echo b >&2; } 3>&1 1>&2 2>&3", b"b\n", b"a\n"), ALIVE, on=SH),
    case(
        "a command without stdout",
        Step("echo hi >&-", b"", SOMETHING, 1),
        Step("echo hi >&2 2>&-", b"", b"hi\n"),
        ALIVE,
    ),
    case(
        "exec >file lasts",
        Step("exec >f; echo a; echo e >&2", b"", b"e\n"),
        Step("echo b"),
        Step("cat f >&2", b"", b"a\nb\n"),
    ),
    case(
        "exec 2>file lasts",
        Step("exec 2>f; echo e >&2; echo a", b"a\n"),
        Step("echo e2 >&2; nosuch-program", code=127),
        Step("head -n 2 f; wc -l <f", like("e\ne2\n *3\n")),
    ),
    case(
        "exec >file and back in one command",
        Step("exec 3>&1 >f; echo a; exec >&3 3>&-; echo b; cat f", b"b\na\n"),
        ALIVE,
        on=ALL,
    ),
    case(
        "exec >/dev/null 2>&1",
        Step("exec >/dev/null 2>&1; echo a"),
        Step("echo next; nosuch-program", code=127),
        Step("(exit 3)", code=3),
        Step("echo x >f"),
        Step("[ $(cat f) = x ]"),
        on=ALL,
    ),
    case("exec 2>&1 lasts", Step("exec 2>&1; echo a >&2", b"a\n"), Step("echo b >&2; echo c", b"b\nc\n")),
    case(
        "stdout closed for good",
        Step("exec >&-"),
        Step("echo a", b"", SOMETHING, 1),
        Step("echo b >&2; (exit 3)", b"", b"b\n", 3),
        Step("/bin/echo c >f; cat f >&2", b"", b"c\n"),
    ),
    case(
        "stderr closed for good",
        Step("exec 2>&-"),
        Step("nosuch-program; echo a", b"a\n"),
        Step("(exit 3)", code=3),
    ),
    case(
        "both closed for good",
        Step("exec >&- 2>&-"),
        Step("echo a", code=1),
        Step("(exit 3)", code=3),
        Step("cat >f", input="in"),
        Step("[ $(cat f) = in ]"),
    ),
    case(
        "all three closed for good",
        Step("exec <&- >&- 2>&-"),
        Step("(exit 3)", code=3),
        Step("/bin/true"),
        Step("cat >f", input="in"),
        Step("[ $(cat f) = in ]"),
    ),
    case(
        "a descriptor on the command's own stdout lasts",
        Step("exec 3>&1; echo a >&3", b"a\n"),
        Step("echo b", b"b\n"),
        Step("exec 3>&-"),
        ALIVE,
        on=ALL,
    ),
    case(
        "forged answers on every descriptor",
        Step("for fd in $(seq 10 255); do { printf '0\\n0 /\\n' >&$fd; } 2>/dev/null; done; (exit 7)", ANY, ANY, 7),
        Step("echo next; (exit 8)", b"next\n", code=8, at="@DIR@"),
        on=BASH,
    ),
    case(
        "every high descriptor closed",
        Step(
            'for fd in $(seq 10 255); do eval "exec $fd>&- $fd<&-"; done; echo closed',
            b"closed\n",
            ANY,
            restarted=True,
        ),
        ALIVE,
        on=BASH,
    ),
)

DESCRIPTORS += (
    case(
        "exec >file and back in another command",
        Step("exec 3>&1 >f"),
        Step("echo a"),
        Step("exec >&3 3>&-; cat f", b"a\n"),
        Step("echo b", b"b\n"),
    ),
)

JOBS: tuple[Case, ...] = (
    case(
        "a background job and the next command",
        Step("sleep 1000 & echo $! >pids; echo started", b"started\n"),
        ALIVE,
        on=ALL,
    ),
    case(
        "$! lasts",
        Step("sleep 1000 & p=$!"),
        Step('[ "$p" = "$!" ] && echo same; kill $!; wait $!; echo $?', b"same\n143\n", ANY),
        ALIVE,
    ),
    case("wait for a job of a command before", Step("(exit 5) & true"), Step("wait $!; echo $?", b"5\n"), on=ALL),
    case(
        "jobs",
        Step("sleep 1000 & echo $! >pids; jobs", like(r"\[1\]\+  Running +sleep 1000 &[^\n]*\n")),
        Step("jobs", like(r"\[1\]\+  Running +sleep 1000 &[^\n]*\n")),
        Step("kill %1; wait %1; echo $?", b"143\n", ANY),
        Step("jobs"),
        on=BASH,
    ),
    case("fg without job control", Step("fg", b"", says("fg: no job control"), 1), ALIVE, on=BASH),
    case(
        "set -m",
        Step("set -m"),
        Step("sleep 1000 & kill %1; wait %1; echo $?", b"143\n", ANY),
        Step("echo a | cat", b"a\n"),
        Step("set +m"),
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
        Step("kill $p"),
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
)

JOBS += (
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

PLACES: tuple[Case, ...] = (
    case(
        "a directory for one command",
        Step("mkdir d"),
        Step("pwd; /bin/pwd", b"@DIR@/d\n@DIR@/d\n", cwd="@DIR@/d"),
        Step("pwd", b"@DIR@\n", at="@DIR@"),
        on=ALL,
    ),
    case(
        "cd in another directory",
        Step("mkdir -p d/e"),
        Step("cd e; pwd", b"@DIR@/d/e\n", cwd="@DIR@/d"),
        Step("pwd", b"@DIR@\n", at="@DIR@"),
        on=ALL,
    ),
    case(
        "a relative directory",
        Step("mkdir -p d/e; cd d"),
        Step("pwd", b"@DIR@/d/e\n", cwd="e"),
        Step("pwd", b"@DIR@/d\n", at="@DIR@/d"),
        on=ALL,
    ),
    case(
        "a directory with a name like an option",
        Step("mkdir -- -d -"),
        Step("pwd", b"@DIR@/-d\n", cwd="-d"),
        Step("pwd", b"@DIR@\n"),
        on=ALL,
    ),
    case(
        "a directory that is not there",
        Step("x=1"),
        Step("echo no; x=2", b"", like("[^\n]*/no/such/place[^\n]*\n"), 1, cwd="/no/such/place"),
        Step("echo $x; pwd", b"1\n@DIR@\n", at="@DIR@"),
        on=ALL,
    ),
    case(
        "a file as a directory",
        Step("touch f"),
        Step("echo no", b"", like("[^\n]*@DIR@/f[^\n]*\n"), 1, cwd="@DIR@/f"),
        ALIVE,
        on=ALL,
    ),
    case(
        "OLDPWD is not touched",
        Step("cd /; cd @DIR@"),
        Step("true", cwd="/usr"),
        Step("echo $OLDPWD", b"/\n"),
        on=ALL,
    ),
    case(
        "names with everything in them",
        Step(
            "for d in 'a b' \"it's\" '$x' '%s' 'a\\b' '*' '\"'; do mkdir \"$d\"; cd \"$d\"; pwd; cd ..; done",
            b"@DIR@/a b\n@DIR@/it's\n@DIR@/$x\n@DIR@/%s\n@DIR@/a\\b\n@DIR@/*\n@DIR@/\"\n",
        ),
        Step('cd "it\'s"', at="@DIR@/it's"),
        Step("pwd", b"@DIR@/a\\b\n", cwd="@DIR@/a\\b", at="@DIR@/it's"),
        Step("cd ../'$x'", at="@DIR@/$x"),
        Step("pwd", b'@DIR@/"\n', cwd='@DIR@/"', at="@DIR@/$x"),
        Step("cd ../'%s'", at="@DIR@/%s"),
        Step("cd ../'a\\b'", at="@DIR@/a\\b"),
        on=SH,
    ),
    case(
        "a name with a newline inside",
        Step("mkdir 'a\nb'; cd 'a\nb'", at="@DIR@/a\nb"),
        Step("pwd", b"@DIR@/a\nb\n", at="@DIR@/a\nb"),
        Step("cd ..; pwd", b"@DIR@\n", at="@DIR@"),
        Step("pwd", b"@DIR@/a\nb\n", cwd="@DIR@/a\nb", at="@DIR@"),
        on=ALL,
    ),
    case(
        "a name with a newline at its end",
        Step("mkdir 'd\n\n'; cd 'd\n\n'", at="@DIR@/d\n\n"),
        Step("pwd", b"@DIR@/d\n\n\n", at="@DIR@/d\n\n"),
        Step("pwd", b"/\n", cwd="/", at="@DIR@/d\n\n"),
        Step("pwd", b"@DIR@/d\n\n\n", at="@DIR@/d\n\n"),
        on=ALL,
    ),
    case(
        "a name that is not UTF-8",
        Step('n=$(printf \'x\\377\'); mkdir "$n"; cd "$n"', at="@DIR@/x\udcff"),
        Step("pwd", b"@DIR@/x\xff\n"),
        Step("pwd", b"/\n", cwd="/"),
        Step("pwd", b"@DIR@/x\xff\n"),
        on=SH,
    ),
    case(
        "files with newlines in their names",
        Step("touch 'a\nb' 'c\n'; for f in *; do printf '[%s]' \"$f\"; done", b"[a\nb][c\n]"),
        on=ALL,
    ),
    case(
        "a symbolic link",
        Step("mkdir d; ln -s d l; cd l; pwd; pwd -P", b"@DIR@/l\n@DIR@/d\n", at="@DIR@/l"),
        Step("pwd", b"/\n", cwd="/"),
        Step("pwd", b"@DIR@/l\n"),
        Step("cd ..; pwd", b"@DIR@\n"),
        on=ALL,
    ),
    case(
        "a directory that was removed",
        Step("mkdir d; cd d; rmdir ../d"),
        Step("echo hi", b"hi\n"),
        Step("(exit 3)", code=3),
        Step("cd @DIR@; pwd", b"@DIR@\n", at="@DIR@"),
        on=ALL,
    ),
    case(
        "another directory while one's own is gone",
        Step("mkdir d; cd d; rmdir ../d"),
        Step("pwd", b"/\n", cwd="/"),
        Step("cd @DIR@", at="@DIR@"),
        ALIVE,
        on=ALL,
    ),
)

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
        Step("set -e; false", code=1, env={"A": "1"}, cwd="/", restarted=True),
        Step("echo ${A-none}; pwd", b"none\n@DIR@\n"),
        on=BASH,
    ),
    case(
        "with a trap on EXIT and exit",
        # Bash has put the variables back by the time that it runs the trap.
        Step("trap 'echo $A' EXIT; exit 3", {"bash": b"\n", "": b"1\n"}, code=3, env={"A": "1"}),
        Closed("exited with code 3"),
        on=ALL,
    ),
    case(
        "all at once",
        Step("pwd; echo $A; cat; (exit 3)", b"/\n1\nin", code=3, cwd="/", env={"A": "1"}, input="in"),
        Step("pwd; echo ${A-none}; cat", b"@DIR@\nnone\n"),
        on=ALL,
    ),
)

ENVIRONMENT += (
    case(
        "a variable that is read-only",
        Step("readonly A=1"),
        Step("echo $A", ANY, like("[^\n]+: A: [^\n]*read-? ?only[^\n]*\n"), {"bash": 0, "": 2}, env={"A": "2"}),
        Step("echo $A", b"1\n"),
    ),
)

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
        Step("x=1"),
        Step("echo before; sleep 1000; echo after", b"before\n", ANY, 130, interrupt_at=b"before\n"),
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
        Step(
            "echo before; while :; do sleep 1000; done; echo after", b"before\n", ANY, 130, interrupt_at=b"before\n"
        ),
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
            "echo before; sleep 1000 || echo one; sleep 1000 && echo two; sleep 1000; echo three",
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
        Step("echo before; sleep 1000 | cat; echo after", b"before\n", ANY, 130, interrupt_at=b"before\n"),
        ALIVE,
        on=SH,
    ),
    case(
        "an interrupt of a substitution",
        Step("echo before; x=$(sleep 1000); echo after", b"before\n", ANY, 130, interrupt_at=b"before\n"),
        ALIVE,
        on=SH,
    ),
    case(
        "an interrupt of wait leaves the job",
        Step(
            "sleep 1000 & echo $! >pids; p=$!; echo before; wait; echo after",
            b"before\n",
            ANY,
            130,
            interrupt_at=b"before\n",
        ),
        Step("kill -0 $p && echo runs", b"runs\n"),
        on=BASH,
    ),
    case(
        "an interrupt of read",
        Step("mkfifo p; echo before; read x <p; echo after", b"before\n", ANY, 130, interrupt_at=b"before\n"),
        ALIVE,
        on=SH,
    ),
    case(
        "an interrupt with set -m",
        Step("set -m"),
        Step("echo before; sleep 1000; echo after", b"before\n", ANY, 130, interrupt_at=b"before\n"),
        ALIVE,
        on=BASH,
    ),
    case(
        "an interrupt with traps",
        Step("trap 'echo T' TERM; trap 'echo I' INT; trap 'echo U' USR1; trap 'echo V' USR2"),
        Step("echo before; sleep 1000; echo after", like("before\n[TIUV\n]*"), ANY, 130, interrupt_at=b"before\n"),
        ALIVE,
        Step("kill -USR1 $$; kill -INT $$", b"U\nI\n"),
        on=BASH,
    ),
    case(
        "an interrupt with cwd and env",
        Step("echo before; sleep 1000", b"before\n", ANY, 130, cwd="/", env={"A": "1"}, interrupt_at=b"before\n"),
        Step("pwd; echo ${A-none}", b"@DIR@\nnone\n"),
        on=SH,
    ),
)

ENDINGS += (
    case(
        "a timeout of a child that stopped itself",
        Step("sh -c 'kill -STOP $$'; echo no", b"", ANY, 124, timeout=0.3, timed_out=True),
        ALIVE,
        on=SH,
    ),
    case(
        "an interrupt of a child that ignores it",
        Step(
            "sh -c 'trap \"\" TERM INT; echo ready; while :; do sleep 1000; done'; echo no",
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
)

ENDINGS += (
    case(
        "an interrupt leaves the jobs of commands before",
        Step("sleep 1000 & p=$!; echo $! >pids"),
        Step("echo before; sleep 1000", b"before\n", ANY, 130, interrupt_at=b"before\n"),
        Step("kill -0 $p && echo runs", b"runs\n"),
    ),
    case(
        "an interrupt leaves a job that handles interrupts",
        Step("mkfifo p; (trap : INT; echo >p; while :; do sleep 1000; done) & p=$!; echo $! >pids; read x <p"),
        Step("echo before; sleep 1000", b"before\n", ANY, 130, interrupt_at=b"before\n"),
        Step("kill -0 $p && echo runs", b"runs\n"),
        on=BASH,
    ),
    case(
        "an interrupt leaves a job of set -m",
        Step("set -m; sleep 1000 & p=$!; echo $! >pids"),
        Step("echo before; sleep 1000", b"before\n", ANY, 130, interrupt_at=b"before\n"),
        Step("kill -0 $p && echo runs", b"runs\n"),
        on=BASH,
    ),
    case(
        "an interrupt with set -e",
        Step("set -e; x=1"),
        Step("echo before; sleep 1000; echo after", b"before\n", ANY, 130, interrupt_at=b"before\n"),
        Step("echo $x; set +e", b"1\n"),
        on=BASH,
    ),
)

PRIVATE: tuple[Case, ...] = (
    case(
        "its own directory removed",
        Step('rm -rf "$(dirname "$BASH_SOURCE")"; echo removed', b"removed\n"),
        Step("echo next", b"next\n"),
        Step("cat", b"in", input="in", cwd="/", env={"A": "1"}),
        Step("(exit 3)", code=3),
        on=BASH,
    ),
    case(
        "its own directory emptied",
        Step('rm -rf "$(dirname "$BASH_SOURCE")"/*; echo removed', b"removed\n"),
        Step("echo next", b"next\n"),
        Step("(exit 3)", code=3),
        on=BASH,
    ),
    case(
        "its own command file overwritten",
        Step(': >"$BASH_SOURCE"; chmod 000 "$BASH_SOURCE"\necho went on', b"went on\n"),
        Step("echo next", b"next\n"),
        on=BASH,
    ),
    case(
        "its own directory removed, then a restart",
        Step('x=5; rm -rf "$(dirname "$BASH_SOURCE")"; set -e; false', code=1, restarted=True),
        Step("echo $x; set +e", b"5\n"),
        ALIVE,
        on=BASH,
    ),
)

CASES: tuple[Case, ...] = (
    *OUTPUT,
    *EXIT_CODES,
    *PARSING,
    *SYNTAX,
    *HERE_DOCUMENTS,
    *INPUT,
    *LARGE,
    *STATE,
    *NAMES,
    *OPTIONS,
    *TRAPS,
    *CONTROL,
    *DESCRIPTORS,
    *JOBS,
    *PLACES,
    *ENVIRONMENT,
    *ENDINGS,
    *PRIVATE,
)
