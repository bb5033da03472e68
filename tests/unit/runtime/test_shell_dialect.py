"""Lines sent to a live shell, and the parsing of its answers; checked with real shells where installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from holdfast.runtime.shell.dialect import (
    Answer,
    Bash,
    ShellDialect,
    ShellStep,
    SuspendedTracing,
    Zsh,
    dialect_for,
    is_complete,
    parse_answer,
    quote,
)
from tests.support.parts import needs

SHELLS = [
    pytest.param(argv, id=argv[0], marks=needs(argv[0]))
    for argv in (["bash"], ["dash"], ["busybox", "ash"], ["zsh", "-f"])
]
STEP = ShellStep("/private", "/private/pipes")
#: All that a word may hold, with more of what means something to a shell than chance would bring.
WORDS = st.text(
    st.one_of(st.sampled_from("'\"\\$`!*~ \n\t;&|#\x81\x7f"), st.characters(codec="utf-8")), max_size=20
)
WORDS = WORDS.map(lambda text: text.replace("\0", ""))


def dialect_of(argv: list[str]) -> ShellDialect:
    return dialect_for(argv[0])


def run(argv: list[str], script: bytes, stdin: int = subprocess.DEVNULL) -> bytes:
    done = subprocess.run(
        [*argv, "-c", script], stdin=stdin, stdout=subprocess.PIPE, env={**os.environ, "LC_ALL": "C"}
    )
    assert done.returncode == 0
    return done.stdout


# --- quoting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", SHELLS)
@settings(max_examples=60)
@given(words=st.lists(WORDS, min_size=1, max_size=20))
def test_a_quoted_text_is_one_word_of_every_shell(argv: list[str], words: list[str]) -> None:
    script = "printf '%s\\0' " + " ".join(quote(word) for word in words)
    assert run(argv, script.encode()) == b"".join(word.encode() + b"\0" for word in words)


@pytest.mark.parametrize("argv", SHELLS)
def test_bytes_that_are_no_text_are_quoted_too(argv: list[str]) -> None:
    every = bytes(range(1, 256))
    script = "printf %s " + quote(every.decode("utf-8", "surrogateescape"))
    assert run(argv, script.encode("utf-8", "surrogateescape")) == every


# --- answers ------------------------------------------------------------------------------------------------------


def answer_bytes(traps: bytes = b"", first: bytes = b"0:hB::", cwd: bytes = b"/", old: bytes = b"") -> bytes:
    return b"\0".join([traps, first + b":" * (4 - first.count(b":")), cwd, old, b"\1"])


def test_an_answer_has_all_its_parts() -> None:
    traps = b"trap -- 'echo bye' EXIT\ntrap -- 'x' SIGERR\n"
    answer = parse_answer(answer_bytes(traps, b"3:ehB:123:3:last:one", b"/a b", b"/old"))
    assert answer == Answer(3, "ehB", "123", "last:one", "/a b", "/old", {"EXIT": "'echo bye'", "ERR": "'x'"})


def test_a_shell_that_cannot_tell_its_last_argument_says_nothing_of_it() -> None:
    assert parse_answer(answer_bytes(first=b"0:hB:::")).last is None
    assert parse_answer(answer_bytes(first=b"0:hB::0:")).last == ""


def test_a_directory_is_any_bytes_but_nul() -> None:
    name = b"/a\nb:\x01\xff" + "\N{SNOWMAN}".encode()
    answer = parse_answer(answer_bytes(cwd=name, old=b"\n"))
    assert (os.fsencode(answer.cwd), answer.old_cwd) == (name, "\n")


@pytest.mark.parametrize(
    ("printed", "traps"),
    [
        (b"", {}),
        (b"trap -- '' EXIT\n", {"EXIT": "''"}),
        (b"trap -- 'a\nb' EXIT\n", {"EXIT": "'a\nb'"}),
        (b"trap -- 'it'\\''s' EXIT\n", {"EXIT": "'it'\\''s'"}),
        (b"trap -- 'echo EXIT' DEBUG\ntrap -- 'y' RETURN\n", {"DEBUG": "'echo EXIT'", "RETURN": "'y'"}),
        (b"trap -- 'y' ZERR\ntrap -- 'x' SIGTERM\n", {"ZERR": "'y'"}),
        (b"trap -- 'x' SIGRTMIN+23\n", {}),
    ],
)
def test_traps_are_read_as_the_shell_prints_them(printed: bytes, traps: dict[str, str]) -> None:
    assert parse_answer(answer_bytes(printed)).traps == traps


@pytest.mark.parametrize(
    "printed",
    [
        b"trap -- 'echo EXIT\necho two' EXIT\n",
        b"trap -- 'echo DEBUG\n:' EXIT\n",
        b"trap -- 'x' SIGTERM\ntrap -- 'a\ntrap -- b ERR\nc' EXIT\n",
    ],
)
def test_a_line_of_a_trap_that_looks_like_the_end_of_one_is_part_of_it(printed: bytes) -> None:
    action = printed[: -len(b" EXIT\n")].rpartition(b"SIGTERM\n")[2].removeprefix(b"trap -- ").decode()
    assert parse_answer(answer_bytes(printed)).traps == {"EXIT": action}


@pytest.mark.parametrize(
    "received", [b"\0\1", b"hello\0\1", b"0:hB::\0/\0\1", b"x:hB:::\0/\0/\0\1", b"0\0/\0/\0\1"]
)
def test_what_is_no_answer_is_an_error(received: bytes) -> None:
    assert is_complete(received)
    with pytest.raises(ValueError):  # noqa: PT011 - whatever the reason, the caller treats it the same
        parse_answer(received)


def test_part_of_an_answer_is_not_whole() -> None:
    whole = answer_bytes(cwd=b"/\1\0"[:2])
    assert [length for length in range(len(whole) + 1) if is_complete(whole[:length])] == [len(whole)]


@pytest.mark.parametrize("argv", SHELLS)
@settings(max_examples=25)
@given(action=WORDS, status=st.integers(0, 255), name=WORDS)
def test_a_real_answer_tells_the_status_the_directory_and_the_exit_trap(
    argv: list[str], action: str, status: int, name: str, tmp_path: Path
) -> None:
    # A trap on EXIT runs at the end of this shell too: what it prints or does must not matter.
    action = f": {quote(action)}"
    location = os.path.join(tmp_path, f"at {name.replace('/', '-')}")
    os.makedirs(location, exist_ok=True)
    dialect = dialect_of(argv)
    lines = [
        f"cd {quote(location)}",
        f"trap {quote(action)} EXIT",
        f"(exit {status}); {dialect.answer()}",
        "trap - EXIT",
    ]
    with open(tmp_path / "answer", "w+b") as file:
        run(argv, "\n".join(lines).encode(), file.fileno())
        file.seek(0)
        received = file.read()
    assert is_complete(received)
    answer = parse_answer(received)
    assert (answer.status, answer.cwd, answer.old_cwd) == (status, location, os.getcwd())
    if not (action.isascii() and action.isprintable()):
        return  # shells differ in how they quote these, and each reads its own form
    assert run(argv, f"printf %s {answer.traps['EXIT']}".encode()).decode() == action


# --- what a command is like ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wants"),
    [
        ("echo $_", True),
        ('echo "$_"', True),
        ("echo $_.txt", True),
        ("echo ${_}", True),
        ("echo ${_##*/}", True),
        ("$_", True),
        ("echo $_name", False),
        ("echo ${_name}", False),
        ("echo $_1", False),
        ("_=1", False),
        ("echo a_b", False),
    ],
)
def test_the_last_argument_is_brought_back_where_it_is_wanted(text: str, wants: bool) -> None:
    assert Bash().wants_last(text) is wants
    assert not ShellDialect().wants_last(text)
    assert not Zsh().wants_last(text)


@pytest.mark.parametrize(
    ("text", "may"),
    [
        ("set -e; false", True),
        ("set -o nounset", True),
        ("echo ${x:?gone}", True),
        ("eval false", True),
        ("source file", True),
        (". ./file", True),
        ("a && . ./file", True),
        ("shopt -s failglob", True),
        ("echo $?", True),
        ("ls .", False),
        ("cd ..", False),
        ("setsid sleep 1", False),
        ("git reset", False),
        ("echo offset", False),
        ("make test", False),
    ],
)
def test_commands_that_may_end_the_shell_are_known(text: str, may: bool) -> None:
    for dialect in (Bash(), ShellDialect(), Zsh()):
        assert dialect.may_abort(text, "hB") is may
        assert dialect.may_abort(text, "ehB")
        assert dialect.may_abort(text, "huB")


@pytest.mark.parametrize(
    ("text", "may"),
    [
        *((f"{word} x", True) for word in ("export", "declare", "typeset", "readonly", "unset", "read", "set")),
        *((f"cd /tmp\n{word}\tx", True) for word in ("source", "eval", ".")),
        ("x=1", True),
        ("ls .", False),
        ("git reset --hard; cat readme.md offset", False),
        ("echo exported declared evaluated", False),
    ],
)
def test_commands_that_may_change_the_exports_are_known(text: str, may: bool) -> None:
    assert ShellDialect().may_export(text) is may
    assert ShellDialect().may_export(f"{'true; ' * 1000}{text}") is may


@pytest.mark.parametrize("argv", SHELLS)
@pytest.mark.parametrize(
    "text", ["echo hi", "echo hi\n", "echo a\necho b # no more", "", "echo hi;", "echo a & wait"]
)
def test_a_command_prints_what_its_text_prints(argv: list[str], text: str, tmp_path: Path) -> None:
    written = dialect_of(argv).command(text, SuspendedTracing(), STEP)
    assert written.startswith(text.removesuffix("\n") + "\n")
    (tmp_path / "command").write_text(written)
    assert run(argv, f". {tmp_path}/command".encode()) == run(argv, text.encode())


@pytest.mark.parametrize("text", ["cat <<x", "echo hi \\", "a &&", "a |", "!", "trap x EXIT", "set -v"])
def test_nothing_is_put_behind_what_would_take_it_in(text: str) -> None:
    assert Bash().command(text, SuspendedTracing(), STEP) == text + "\n"


def test_bash_tells_its_last_argument_after_a_plain_command() -> None:
    script = f'f() {{ {Bash().command("echo one two", SuspendedTracing(), STEP)} }}; f\necho "$? $_holdfast_"'
    assert run(["bash"], script.encode()) == b"one two\n0 0:two\n"


def test_what_was_taken_off_is_put_back_before_the_first_word() -> None:
    resumed = SuspendedTracing("x", (("DEBUG", "'d'"), ("ERR", "'e'")))
    text = ShellDialect().command("echo hi", resumed, STEP)
    before, _, after = text.partition("; } >/dev/null 2>&1; ")
    assert after == "echo hi\n"
    # The DEBUG trap last: it would run for the others.
    assert [before.index(word) for word in ("set -x", "'e' ERR", "'d' DEBUG")] == sorted(
        before.index(word) for word in ("set -x", "'e' ERR", "'d' DEBUG")
    )
    # `set -v` shows the line that it stands on.
    assert ShellDialect().command("echo hi", SuspendedTracing("v"), STEP).splitlines()[1] == "echo hi"


def test_only_what_shows_is_taken_off() -> None:
    traps = {"EXIT": "'a'", "DEBUG": "'b'", "ERR": "'c'"}
    taken = SuspendedTracing.after(Answer(0, "exuvhB", "", None, "/", "", traps))
    assert taken == SuspendedTracing("xv", (("DEBUG", "'b'"), ("ERR", "'c'")))
    assert not SuspendedTracing.after(Answer(0, "ehB", "", None, "/", "", {"EXIT": "'a'"}))


# --- between two commands -----------------------------------------------------------------------------------------


def test_nothing_to_do_is_nothing_to_say() -> None:
    noisy = SuspendedTracing("xv", (("DEBUG", "'b'"),))
    for dialect in (Bash(), Zsh(), ShellDialect()):
        assert dialect.clean_up(suspend=SuspendedTracing()) == ""
        # The options went off with the answer; the traps too, where the shell can do that.
        assert bool(dialect.clean_up(suspend=noisy)) is not dialect.clears_traps
    assert "trap - ERR" in ShellDialect().clean_up(suspend=SuspendedTracing("", (("ERR", "'b'"),)))


@pytest.mark.parametrize("argv", SHELLS)
@settings(max_examples=20)
@given(name=WORDS, old=WORDS)
def test_the_way_back_is_silent_and_exact(argv: list[str], name: str, old: str, tmp_path: Path) -> None:
    location = os.path.join(tmp_path, f"at {name.replace('/', '-')}")
    os.makedirs(location, exist_ok=True)
    line = dialect_of(argv).clean_up(suspend=SuspendedTracing(), back=(location, old))
    assert line.endswith("\n")
    printed = run(argv, f'cd /\n{line}printf \'%s\\0\' "$PWD" "$OLDPWD"'.encode())
    assert printed == location.encode() + b"\0" + old.encode() + b"\0"
    gone = dialect_of(argv).clean_up(suspend=SuspendedTracing(), back=(f"{tmp_path}/gone", old))
    assert run(argv, f"cd /\n{gone}printf '%s\\0' \"$PWD\"".encode()) == b"/\0"


def test_bash_gets_back_the_options_that_stopping_took() -> None:
    lines = Bash().clean_up(suspend=SuspendedTracing(), stopped_with="ehBT")
    script = f"set -eT\n{Bash.stop}\n{lines}echo $-; shopt extdebug || trap -p DEBUG"
    printed = run(["bash"], script.encode()).decode()
    flags, rest = printed.split("\n", 1)
    assert {"e", "T"} <= set(flags)
    assert rest.split() == ["extdebug", "off"]
    without = Bash().clean_up(suspend=SuspendedTracing(), stopped_with="hB")
    flags = run(["bash"], f"{Bash.stop}\n{without}echo $-".encode()).decode()
    assert not set(flags.strip()) & set("eET")


# --- which shell it is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "kind", "arg0"),
    [
        ("/bin/bash", Bash, None),
        ("bash", Bash, None),
        ("/usr/bin/zsh", Zsh, None),
        ("/usr/bin/zsh5", Zsh, None),
        ("/bin/dash", ShellDialect, None),
        ("/bin/busybox", ShellDialect, "ash"),
        ("/opt/bash-5/bin/mksh", ShellDialect, None),
    ],
)
def test_shells_go_by_the_name_of_their_program(path: str, kind: type[ShellDialect], arg0: str | None) -> None:
    dialect = dialect_for(path)
    assert type(dialect) is kind
    assert dialect.arg0(path) == arg0
    assert dialect.arguments(login=True) != dialect.arguments(login=False)
    assert dialect.arguments(login=True)[-1] == dialect.arguments(login=False)[-1] == "-s"
