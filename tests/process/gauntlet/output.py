"""Output of commands: every byte, every size, on both streams, with nothing lost and nothing added. Pure data."""

from __future__ import annotations

from tests.process.gauntlet.case import (
    ALIVE,
    ALL,
    BASH,
    BASH_ZSH,
    EVERY_BYTE,
    OCTAL,
    Case,
    Step,
    case,
    ends,
    like,
    says,
)

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
