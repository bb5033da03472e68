"""Which programs stand in a command line: a table, and what holds of any text."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given, settings, strategies as st

from holdfast.service.policy.command_line import MAX_TEXT, CommandLine, read_command_line

#: A line, and the programs in it.
KNOWN: list[tuple[str, str]] = [
    # lists and pipes
    ("ls", "ls"),
    ("ls -la /tmp", "ls"),
    ("  ls  ", "ls"),
    ("", ""),
    ("\n\n", ""),
    ("# rm -rf /", ""),
    ("ls # ; rm x", "ls"),
    ("echo a#b; rm x", "echo rm"),
    ("a; b; c", "a b c"),
    ("a;b", "a b"),
    ("a && b || c", "a b c"),
    ("a&&b||c", "a b c"),
    ("a | b | c", "a b c"),
    ("a |& b", "a b"),
    ("a &\nb", "a b"),
    ("a & b &", "a b"),
    ("a\nb\nc", "a b c"),
    ("a |\n b", "a b"),
    ("a &&\n\n# why\n b", "a b"),
    ("! a", "a"),
    ("! ! a | b", "a b"),
    ("a \\\n b; c", "a c"),
    ("a\\\nb", "ab"),
    # quoting
    ("'rm' x", "rm"),
    ('"rm" x', "rm"),
    ("r\\m x", "rm"),
    ("r'm' x", "rm"),
    ("r''m x", "rm"),
    ('r"m" x', "rm"),
    ("$'rm' x", "rm"),
    ("$'\\x72m' x", "rm"),
    ("$'\\162\\155' x", "rm"),
    ("$'\\u0072m'", "rm"),
    ('$"rm" x', "rm"),
    ("/bin/rm x", "rm"),
    ("./rm x", "rm"),
    ("~/bin/tool", "tool"),
    ("echo ';' '&&' \"|\" \\;", "echo"),
    ("echo 'a; rm x'", "echo"),
    ('echo "a; rm x"', "echo"),
    ("echo \"it's\"; rm x", "echo rm"),
    ("echo 'say \"hi'; rm x", "echo rm"),
    ("echo \\'; rm x", "echo rm"),
    ('echo "\\""; rm x', "echo rm"),
    ("echo '\\'; rm x", "echo rm"),
    ("echo 'two\nlines'; rm x", "echo rm"),
    # substitutions
    ("echo $(rm x)", "rm echo"),
    ('echo "$(rm x)"', "rm echo"),
    ("echo '$(rm x)'", "echo"),
    ("echo `rm x`", "rm echo"),
    ('echo "`rm x`"', "rm echo"),
    ("echo `a \\`b\\``", "b a echo"),
    ("echo $(a $(b $(c)))", "c b a echo"),
    ('echo "a $(b "c $(d)")"', "d b echo"),
    ('echo "$\\\n(rm x)"', "rm echo"),
    ("echo ${x:-$(rm x)}", "rm echo"),
    ('echo "${x:-$(rm x)}"', "rm echo"),
    ('echo "${x:-\'$(rm x)\'}"', "rm echo"),
    ("echo ${x:-'$(rm x)'}", "echo"),
    ("echo ${ rm x; }", "rm echo"),
    ("echo ${x%%*}", "echo"),
    ("echo $((1 + 2))", "echo"),
    ("echo $((1 + ${#x} + $?))", "echo"),
    ("echo $(( (1) + (2) ))", "echo"),
    ("echo $((a); (b))", "a b echo"),
    ("echo $[1 + 2]", "echo"),
    ("diff <(a) <(b)", "a b diff"),
    ("a > >(b)", "b a"),
    ("echo $x $1 $@ $? $$ $! $-", "echo"),
    ("echo $", "echo"),
    # assignments
    ("A=1 rm x", "rm"),
    ("A=1 B='2 3' rm x", "rm"),
    ("A=$(rm x)", "rm"),
    ("A=`rm x` b", "rm b"),
    ("A=1", ""),
    ("A+=1 rm", "rm"),
    ("a[0]=1 rm", "rm"),
    ("a=(1 2 $(rm x)) b", "rm b"),
    ("a=(\n1 # one\n2\n); b", "b"),
    ("'A'=1 rm", "A=1"),
    ("A=1; export A; b", "export b"),
    # redirections
    ("> f rm x", "rm"),
    ("2>&1 rm x", "rm"),
    ("rm x >/dev/null 2>&1", "rm"),
    ("rm x &> f; b", "rm b"),
    ("rm x &>> f", "rm"),
    ("a >| f; b", "a b"),
    ("a <> f; b", "a b"),
    ("a {fd}> f; b", "a b"),
    ("a <<< 'b; c'; d", "a d"),
    ("a <<< \"$(b)\"", "b a"),
    ("> $(rm x)", "rm"),
    ("a 3<&-; b", "a b"),
    # here-documents
    ("cat <<E\nrm x\nE\nb", "cat b"),
    ("cat <<E | a\nrm x\nE\nb", "a cat b"),
    ("cat <<'E'\n$(rm x)\nE\nb", "cat b"),
    ("cat <<E\n$(rm x)\nE\nb", "rm cat b"),
    ("cat <<E\n`rm x`\nE", "rm cat"),
    ("cat <<E\n\\$(rm x)\nE", "cat"),
    ("cat <<-E\n\trm\n\tE\nb", "cat b"),
    ("cat <<A <<B\n1\nA\n2\nB\nb", "cat b"),
    ("cat <<\"E F\"\n1\nE F\nb", "cat b"),
    ("cat <<E; a\n1\nE\nb", "a cat b"),
    ("x=$(cat <<E\nrm\nE\n); b", "cat b"),
    ("if cat <<E; then\n1\nE\nb; fi", "cat b"),
    # compound commands
    ("(a; b)", "a b"),
    ("(a) && (b)", "a b"),
    ("((a); b)", "a b"),
    ("{ a; b; }", "a b"),
    ("{ a; } > f; b", "a b"),
    ("{ { a; } }", "a"),
    ("{a; b", "{a b"),
    ("((x = 1)); a", "a"),
    ("x=1; ((x++)) && a", "a"),
    ("if a; then b; elif c; then d; else e; fi", "a b c d e"),
    ("if (a) then (b) fi", "a b"),
    ("if a\nthen\nb\nfi; c", "a b c"),
    ("while a; do b; done; c", "a b c"),
    ("until a; do b; done < f | c", "a b c"),
    ("for x in $(a) b; do c $x; done", "a c"),
    ("for x; do a; done", "a"),
    ("for x\ndo a\ndone", "a"),
    ("for x in a b\ndo\nc\ndone", "c"),
    ("for ((i=0; i<3; i++)); do a $i; done", "a"),
    ("for x in 1; { a; }", "a"),
    ("select x in a b; do c; done", "c"),
    ("case $(a) in b) c;; d|e) f;; esac; g", "a c f g"),
    ("case x in (a) b;; *) c; esac", "b c"),
    ("case x in a) b;& c) d;;& e) f;; esac", "b d f"),
    ("case x in rm) ls;; esac", "ls"),
    ("case x in esac; a", "a"),
    ("[[ -f x && $(a) == b ]] && c", "a c"),
    ("[[ x =~ ^(a|b)$ ]]; c", "c"),
    ("[[ a < b ]] || c", "c"),
    ("[ -f x ] && a", "[ a"),
    ("f() { rm x; }; g", "rm g"),
    ("f () ( rm x )", "rm"),
    ("f()\n{ rm x; }", "rm"),
    ("function f { rm x; }", "rm"),
    ("function f() { rm x; }; f", "rm f"),
    ("time a", "time a"),
    ("time -p a | b", "time a b"),
    ("time { a; b; }", "time a b"),
    ("time -o f a", "time a"),
    ("coproc a", "a"),
    ("coproc N { a; }", "a"),
    # wrappers
    ("env rm x", "env rm"),
    ("env A=1 B=2 rm x", "env rm"),
    ("env -i -u A -C /tmp rm x", "env rm"),
    ("env --unset=A --chdir /tmp -- rm x", "env rm"),
    ("env - rm", "env rm"),
    ("env A=\"$x\" rm", "env rm"),
    ("env", "env"),
    ("/usr/bin/env rm", "env rm"),
    ("nohup rm x", "nohup rm"),
    ("nice rm x", "nice rm"),
    ("nice -n 10 rm x", "nice rm"),
    ("nice -10 rm x", "nice rm"),
    ("ionice -c3 rm", "ionice rm"),
    ("timeout 5 rm x", "timeout rm"),
    ("timeout -k 1 -s KILL 5 rm x", "timeout rm"),
    ("timeout --signal=TERM --foreground 5 rm", "timeout rm"),
    ("stdbuf -oL -e0 rm x", "stdbuf rm"),
    ("setsid -f rm x", "setsid rm"),
    ("taskset -c 0 rm", "taskset rm"),
    ("sudo rm x", "sudo rm"),
    ("sudo -u root -E A=1 rm x", "sudo rm"),
    ("sudo -i rm", "sudo rm"),
    ("sudo -nu root -- rm", "sudo rm"),
    ("sudo -l", "sudo"),
    ("doas -u root rm", "doas rm"),
    ("chroot /x rm", "chroot rm"),
    ("strace -f -o out rm", "strace rm"),
    ("command rm x", "command rm"),
    ("command -v rm", "command"),
    ("builtin cd x", "builtin cd"),
    ("exec rm x", "exec rm"),
    ("exec -a name rm x", "exec rm"),
    ("exec > log", "exec"),
    ("a | xargs rm", "a xargs rm"),
    ("a | xargs -0 -n 1 -P4 rm -f", "a xargs rm"),
    ("a | xargs -I{} mv {} b", "a xargs mv"),
    ("a | xargs", "a xargs"),
    ("a | xargs env nice rm", "a xargs env nice rm"),
    ("a | xargs sh -c 'rm \"$@\"' _", "a xargs sh rm"),
    ("find . -name '*.py'", "find"),
    ("find . -exec rm {} \\;", "find rm"),
    ("find . -exec rm {} +", "find rm"),
    ("find . -execdir rm {} ';' -ok mv {} b \\;", "find rm mv"),
    ("find . -exec sh -c 'rm \"$1\"' _ {} \\;", "find sh rm"),
    ("sh -c 'rm x'", "sh rm"),
    ("sh -c 'rm x' a b", "sh rm"),
    ('bash -c "rm x; ls"', "bash rm ls"),
    ("bash -lc 'rm x'", "bash rm"),
    ("bash -l -c 'rm x'", "bash rm"),
    ("bash -o pipefail -ec 'rm x | a'", "bash rm a"),
    ("bash -c -e 'rm x'", "bash rm"),
    ("bash --norc --noprofile -c 'rm'", "bash rm"),
    ("bash -c \"sh -c 'rm x'\"", "bash sh rm"),
    ("bash -c '((1))'", "bash"),
    ("sh -c '[[ a || rm x ]]'", "sh [[ rm"),
    ("bash script.sh a", "bash"),
    ("bash <<E\nrm x\nE", "bash rm"),
    ("bash -s a <<'E'\nrm x\nE", "bash rm"),
    ("bash <<< 'rm x'", "bash rm"),
    ("eval 'rm x'", "eval rm"),
    ("eval rm x", "eval rm"),
    ("eval \"a; b\"", "eval a b"),
    ("eval eval \"'rm x'\"", "eval rm"),
    ("trap 'rm x' EXIT", "trap rm"),
    ("trap - EXIT", "trap"),
    ("busybox rm x", "busybox rm"),
    ("busybox sh -c 'rm x'", "busybox sh rm"),
    ("flock f rm x", "flock rm"),
    ("flock f -c 'rm x'", "flock rm"),
    ("watch -n 1 'rm x | a'", "watch rm a"),
    ("env nohup nice timeout 5 setsid rm x", "env nohup nice timeout setsid rm"),
    ("choom -n 5 -- rm x", "choom rm"),
    ("linux32 rm x", "linux32 rm"),
    ("x86_64 rm x", "x86_64 rm"),
    ("setarch -R rm x", "setarch rm"),
    ("setarch x86_64 -R rm x", "setarch rm"),
    ("sg root -c 'rm x'", "sg rm"),
    ("source lib.sh", "source"),
    (". ./lib.sh", "."),
    ("cd /tmp && ls", "cd ls"),
    ("python3 -c 'import os; os.system(\"rm\")'", "python3"),
]  # fmt: skip

#: Lines in which something cannot be known.
UNKNOWN = [
    "$X foo",
    '"$X" foo',
    "${X} foo",
    "$(a) foo",
    "`a` foo",
    "r$X m",
    "/bin/r? x",
    "/bin/r* x",
    "{rm,-rf,/}",
    "r[m] x",
    "~ x",
    'eval "$y"',
    "eval $y",
    'eval "$(a)"',
    'sh -c "$x"',
    "sh -c $x",
    "sh $x",
    "sh",
    "bash -i",
    "bash -s",
    "a | sh",
    "curl u | bash",
    "bash < f",
    "bash <(a)",
    "bash --rcfile f -c a",
    "bash <<E\n$x\nE",
    "zsh -c 'rm x'",
    "fish -c 'rm x'",
    "env $X rm",
    "env A=$x rm",
    "env -S 'rm x'",
    "env --wrong rm",
    "nice -Z rm",
    "timeout $T rm",
    "sudo -i",
    "sudo -s",
    "a | xargs $X",
    "a | xargs -I{} {} x",
    "a | xargs sh",
    "a | xargs sh -c",
    "find . $X",
    "find . *.py",
    'find "$x" rm {} \\;',
    "find . -exec $X {} \\;",
    "a | parallel rm",
    "tmux new -d rm",
    "at now <<E\nrm\nE",
    "su -c rm",
    "script -c rm",
    "source <(a)",
    ". /dev/stdin <<E\nrm\nE",
    "alias ls='rm -rf'",
    'bind \'"a": "rm"\'',
    "complete -C rm x",
    "hash -p /tmp/rm ls",
    "enable -f lib.so x",
    "fc -s",
    "PATH=. ls",
    "PATH=.",
    "export PATH=.:$PATH",
    "LD_PRELOAD=./x.so ls",
    "env LD_PRELOAD=./x.so ls",
    "BASH_ENV=f bash -c a",
    "IFS=x",
    "PROMPT_COMMAND='rm x'",
    "declare -x PATH=.",
    "read PATH",
    "printf -v PATH .",
    "for PATH in .; do a; done",
    "x='a[$(rm x)]'; ((x))",
    "echo $((1 + $(rm x)))",
    "sh -c '((rm x))'",
    "setarch -R",
    "sg root",
    "/lib64/ld-linux-x86-64.so.2 /bin/rm x",
    "ld.so /bin/rm x",
    "valgrind rm x",
    "echo ${x@P}",
    "(( 'a' ))",
    "a )",
    "a;; b",
    "| a",
    "a ( b )",
    "echo \\$(ls\\)",
    "fi",
    "done",
    "}",
    "!\\\n a",
    "cat <<$x\n1\n$x",
    "a \x1b[A",
    "a\x00b",
]

INCOMPLETE = [
    "echo 'a",
    'echo "a',
    "echo `a",
    "echo $(a",
    "echo ${a",
    "echo $((1",
    "(a",
    "{ a;",
    "if a; then b",
    "while a; do b",
    "for x in a",
    "for x in a; do b",
    "case x in",
    "case x in a) b;;",
    "[[ a",
    "a &&",
    "a ||",
    "a |",
    "a \\",
    "cat <<E",
    "cat <<E\n1\n",
    "f() {",
    "f(",
    "a=(1",
    "a >",
    "$'a",
]

BACKGROUND = [
    ("a &", "&"),
    ("a & b", "&"),
    ("(a &)", "&"),
    ("sh -c 'a &'", "&"),
    ("nohup a", "nohup"),
    ("nohup a &", "nohup &"),
    ("setsid a", "setsid"),
    ("env setsid a", "setsid"),
    ("disown", "disown"),
    ("disown -a", "disown"),
    ("bg %1", "bg"),
    ("coproc a", "coproc"),
    ("tmux new -d a", "tmux"),
    ("sudo -b a", "sudo"),
    ("a && b", ""),
    ("a 2>&1", ""),
    ("a &> f", ""),
    ("a >& f", ""),
    ("echo '&' \\& nohup", ""),
]

HISTORY = [
    *("!!", "!ls", "!-1", "echo !$", 'echo "!x"', "^a^b", "ls\n^a^b", "sudo !!", "((!x))", "echo ${x:-!y}"),
    *("echo $(a !x)", "echo !(x)", "!;", "a !|b", "!<<E\n)\nE", "echo {!x}", "echo [!x", "echo `a !x`", "(!)"),
    *("cat <<!x\n!x", 'a "b\n!x"'),
]
NO_HISTORY = [
    *("! a", "a != b", "[ ! -f x ]", "echo '!x'", "echo \\!x", "echo hi!", 'echo "hi!"', "echo ${!x@}", "x=!"),
    *("echo $!; b", "ls [!a]*", "[[ ! -f x ]]", "a # !x", "cat <<E\n#!/bin/sh\nE", "cat <<!\n1\n!"),
    *("echo 'a\n!x'", "echo $'!x'"),
]


def test_the_table_is_large() -> None:
    assert len(KNOWN) + len(UNKNOWN) + len(INCOMPLETE) >= 250


@pytest.mark.parametrize(("text", "programs"), KNOWN)
def test_every_program_of_a_line_is_found(text: str, programs: str) -> None:
    line = read_command_line(text)
    assert (set(line.programs), line.unknown, line.incomplete) == (set(programs.split()), (), "")
    assert list(line.programs) == programs.split()


@pytest.mark.parametrize("text", UNKNOWN)
def test_what_cannot_be_known_is_told(text: str) -> None:
    line = read_command_line(text)
    assert line.unknown
    assert line.incomplete == ""


@pytest.mark.parametrize("text", INCOMPLETE)
def test_a_line_that_ends_too_early_is_told(text: str) -> None:
    assert read_command_line(text).incomplete


@pytest.mark.parametrize(("text", "what"), BACKGROUND)
def test_what_goes_to_the_background_is_told(text: str, what: str) -> None:
    assert set(read_command_line(text).background) == set(what.split())


@pytest.mark.parametrize("text", HISTORY)
def test_at_a_prompt_earlier_commands_are_not_known(text: str) -> None:
    line = read_command_line(text, interactive=True)
    assert any("earlier" in reason or "before it" in reason for reason in line.unknown)
    assert not any("earlier" in reason for reason in read_command_line(text).unknown)


@pytest.mark.parametrize("text", NO_HISTORY)
def test_an_exclamation_mark_is_not_always_history(text: str) -> None:
    assert read_command_line(text, interactive=True).unknown == ()


@pytest.mark.parametrize(
    ("shell", "known"), [("bash", True), ("/bin/bash --login", True), ("zsh", False), ("", True)]
)
def test_only_shells_whose_language_is_read_are_known(shell: str, known: bool) -> None:
    assert (read_command_line("ls", shell=shell).unknown == ()) is known


def test_each_shell_is_read_as_it_reads() -> None:
    assert read_command_line("((rm x))", shell="bash").programs == ()
    assert read_command_line("((rm x))", shell="dash").programs == ("rm",)
    assert read_command_line("((rm x))", shell="/bin/sh").programs == ("rm",)
    assert read_command_line("a &> f", shell="dash").background == ("&",)


def test_after_a_line_that_a_shell_refuses_the_next_one_is_read() -> None:
    line = read_command_line(")\nrm x")
    assert line.programs == ("rm",)
    assert line.unknown


def test_arguments_are_known_or_not() -> None:
    (command,) = read_command_line("rm -rf 'a b' $x *.py ~ {1,2} \"$y\"").commands
    assert [(word.text, word.exact) for word in command.arguments] == [
        ("-rf", True),
        ("a b", True),
        ("$x", False),
        ("*.py", False),
        ("~", False),
        ("{1,2}", False),
        ('"$y"', False),
    ]


def test_a_command_tells_what_runs_it() -> None:
    line = read_command_line("env nohup sh -c 'nice rm x'")
    assert [(each.name, each.via, each.transparent) for each in line.commands] == [
        ("env", (), True),
        ("nohup", ("env",), True),
        ("sh", ("env", "nohup"), True),
        ("nice", ("env", "nohup", "sh"), True),
        ("rm", ("env", "nohup", "sh", "nice"), False),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "(" * 10_000,
        "$(" * 10_000,
        "$((" * 5_000,
        "${a:-" * 10_000,
        '"${a:-' * 10_000,
        "`" * 9_999,
        "{ " * 10_000,
        "if " * 10_000,
        "env " * 10_000 + "rm",
        "eval " * 10_000 + "rm",
        "coproc " * 5_000,
        "f() " * 10_000,
        "a | " * 20_000 + "b",
        "a;" * 20_000,
        "[" * 60_000,
        "{" * 60_000,
        "<<E " * 10_000,
        "x" * (MAX_TEXT + 1),
    ],
    ids=lambda text: text[:8],
)
def test_what_is_nested_or_repeated_too_often_is_not_known(text: str) -> None:
    line = read_command_line(text)
    assert line.unknown or line.incomplete or line.programs == (text,)


def nested(script: str, levels: int) -> str:
    for _ in range(levels):
        script = f"sh -c {shlex.quote(script)}"
    return script


def test_scripts_within_scripts_are_read_to_a_limit() -> None:
    assert "rm" in read_command_line(nested("rm x", 4)).programs
    assert read_command_line(nested("rm x", 12)).unknown


ALPHABET = st.sampled_from([*" \t\n;&|()<>{}[]$`'\"\\#!*?~=-abE0", "$(", "<<", "if ", "do ", "case ", "eval "])
TEXTS = st.one_of(st.text(max_size=60), st.lists(ALPHABET, max_size=40).map("".join))


@settings(max_examples=300)
@given(TEXTS, st.sampled_from(["bash", "sh", "dash"]), st.booleans())
def test_no_text_raises(text: str, shell: str, interactive: bool) -> None:
    assert isinstance(read_command_line(text, shell=shell, interactive=interactive), CommandLine)


WRAPPED = st.sampled_from(
    ["env {}", "nohup {}", "nice -n 5 {}", "timeout 5 {}", "setsid {}", "command {}", "sudo -u x {}", "time {}"]
)
SCRIPTED = st.sampled_from(["sh -c {}", "bash -lc {}", "eval {}", "env sh -c {}", "timeout 5 bash -c {}"])
SIMPLE = st.sampled_from(["rm x", "git push", "a 'b c'", "nohup a", "sh -c 'a; b'", "xargs rm", "$X y", "a $x"])


@settings(max_examples=150)
@given(SIMPLE, st.lists(WRAPPED, max_size=4))
def test_a_wrapper_hides_no_program(text: str, wrappers: list[str]) -> None:
    wrapped = text
    for wrapper in wrappers:
        wrapped = wrapper.format(wrapped)
    bare, seen = read_command_line(text), read_command_line(wrapped)
    assert set(bare.programs) <= set(seen.programs)
    assert bool(bare.unknown) <= bool(seen.unknown)


@settings(max_examples=200)
@given(TEXTS.filter(lambda text: text[:1] not in ("-", "+")), SCRIPTED)
def test_a_script_in_an_argument_hides_no_program(text: str, wrapper: str) -> None:
    bare, seen = read_command_line(text), read_command_line(wrapper.format(shlex.quote(text)))
    assert set(bare.programs) <= set(seen.programs) or seen.unknown
    assert bool(bare.unknown or bare.incomplete) <= bool(seen.unknown)


WORD = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=12)


@settings(max_examples=200)
@given(WORD, st.lists(WORD, max_size=4))
def test_words_quoted_by_shlex_are_read_back(program: str, arguments: list[str]) -> None:
    line = read_command_line(shlex.join(["x" + program, *arguments]), interactive=True)
    (command,) = line.commands
    assert (command.program, [word.text for word in command.arguments]) == ("x" + program, arguments)
    assert all(word.known for word in command.arguments)
