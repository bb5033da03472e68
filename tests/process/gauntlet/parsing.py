"""How commands are read: quotes, expansions, lines, comments and compound commands, as typed. Pure data."""

from __future__ import annotations

from tests.process.gauntlet.case import ALIVE, ALL, BASH, BASH_ZSH, POSIX, SH, SOMETHING, Case, Step, case, ends

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
