"""Programs that real shells run are among those found, or the line counts as unknown. Nothing may run unseen."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from holdfast.service.policy.command_line import read_command_line
from holdfast.service.policy.profiles import CommandRule, Commands, Profile
from holdfast.service.policy.typed_lines import LineBuffer, decide_input

from .installed_shells import Machine

TOKENS = [
    *[
        "p1",
        "p2",
        "p3",
        "p4",
        "p1 ",
        "p2 ",
        "p3 ",
        "'p1'",
        '"p2"',
        "p1;p2",
        "p3|p4",
        " ",
        " ",
        " ",
        "\t",
        "\n",
        "\n",
    ],
    *[
        ";",
        "; ",
        " && ",
        " || ",
        " | ",
        " & ",
        "|&",
        "&>",
        "2>",
        ">",
        "(",
        ")",
        "((",
        "))",
        "{ ",
        "; }",
        "[[ ",
        " ]]",
    ],
    *["$(", "$((", "${x:-", "}", "`", "'", '"', "$'", "\\", "\\\n", "$", "<(", "<<<", "<<E\n", "<<-E\n", "<<'E'\n"],
    *["\nE\n", "if ", "; then ", "else ", "elif ", "; fi", "; do ", "; done", "for x in a", "while p3", "until p1"],
    *[
        "case a in",
        "a) ",
        ";;",
        " esac",
        "in",
        "! ",
        "!",
        "# ",
        "x=",
        "f()",
        "function f ",
        "{p1,p2}",
        "*",
        "~",
        "[",
    ],
    *["]", "eval ", "sh -c ", "bash -c ", "env ", "nice ", "timeout 5 ", "xargs ", "find . -exec ", "\\;", "exec "],
    *["command ", "trap ", "EXIT", "time ", "coproc ", "cat", "-", "a"],
]
#: Lines that fuzzing against real shells is not likely to make.
CHOSEN = [
    "p1; p2 & p3 | p4; wait",
    "echo \"$(p1 '$(p2)')\" `p3 \\`p4\\``",
    "case a in a|b) p1;& c) p2;; esac; p3",
    "for i in 1 2; do p1; done; while p3; do p2; done",
    "f() { p1; }; f; function g { p2; }; g",
    "cat <<E | cat\n$(p1) `p2` \\$(p3)\nE\np4",
    "cat <<'E'\n$(p1)\nE\np2",
    "sh -c 'p1; bash -lc \"p2 && p3\"'",
    "find . -maxdepth 0 -exec p1 {} \\; -exec sh -c 'p2' \\;",
    "echo a | xargs p1; echo b | xargs -I{} sh -c 'p2 {}'",
    "env -u X A=1 nice -n 1 timeout 5 stdbuf -oL p1",
    "x=$(p1) y=`p2`; z=(1 $(p3)); cat <(p4)",
    "trap 'p1' EXIT; eval 'p2;' \"p3\"",
    "if p3; then p1; elif p1; then p2; else p4; fi",
    "echo \"${x:-$(p1)}\" ${x:-`p2`} \"${x:-'$(p3)'}\" ${x:-'$(p4)'}",
    "echo $((1 + $(p1; echo 1))) && ((p2)); ((p3); p4)",
    'p1 \\\n; p\\\n2; "$\\\n(p3)"',
    "bash <<E\np1\nE\nbash <<< p2; bash -s <<'E'\np3\nE",
    "! p3 && { p1; } && (p2) || p4",
    "setsid p1; nohup p2; coproc p3; exec p4",
]


#: Keys, and what bash runs of them.
TYPED = [
    (b"p1\np2\r", {"p1", "p2"}),
    (b"p1\x15p2\n", {"p2"}),
    (b"p1 p2\x17\x17p3\n", {"p3"}),
    (b"p11\x7f\n", {"p1"}),
    (b"p11\x08\n", {"p1"}),
    (b"p\xc3\xa9\x7f1\n", {"p1"}),
    (b"p1\x0c\x0b\n", {"p1"}),
    (b"\x1b[200~p1\np2\x1b[201~\n", {"p1", "p2"}),
    (b"\x1b[200~p1 'a\n\x1b[201~\x15p2\n", {"p2"}),
    (b"\x1b[200~p1\np2\x1b[201~\x17p3\n", {"p3"}),
    (b"\x1b[200~p1 'a\nb\x1b[201~\x17; p2\n", {"p1", "p2"}),
    (b"cat <<E\np1\nE\np2\n", {"p2"}),
    (b"for i in 1\ndo p1\np2\x15p3\ndone\n", {"p1", "p3"}),
    (b"p1 'a\np2\x15'; p3\n", {"p1", "p3"}),
]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    return Machine(tmp_path_factory.mktemp("machine"))


def shells() -> list[str]:
    """`sh` stands for dash where that is at hand."""
    return ["bash", "sh"] if shutil.which("dash") else ["bash"]


def run(machine: Machine, text: str, shell: str) -> set[str]:
    return machine.run(text, ["dash" if shell == "sh" else shell, "-c"])


@pytest.mark.parametrize("text", CHOSEN)
def test_what_bash_runs_was_found(machine: Machine, text: str) -> None:
    ran = run(machine, text, "bash")
    assert ran
    assert ran <= set(read_command_line(text).programs)


def test_what_a_shell_runs_of_any_text_was_found_or_told_as_unknown(machine: Machine) -> None:
    tried = 0

    @settings(max_examples=250, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=10).map("".join))
    def holds(text: str) -> None:
        nonlocal tried
        for shell in shells():
            line = read_command_line(text, shell=shell)
            if not line.unknown and not line.incomplete:
                tried += 1
                assert run(machine, text, shell) <= set(line.programs)

    holds()
    assert tried


def test_the_programs_of_the_machine_tell_their_names(machine: Machine, tmp_path: Path) -> None:
    assert run(machine, "p1; p3; false || p4 &", "bash") == {"p1", "p3", "p4"}


@pytest.mark.parametrize(("keys", "expected"), TYPED)
def test_what_bash_runs_of_typed_keys_was_followed(machine: Machine, keys: bytes, expected: set[str]) -> None:
    profile = Profile(name="p", commands=Commands(rules=(CommandRule("deny", ("nothing",)),)))
    decided = decide_input(profile, LineBuffer(), keys)
    assert decided.decision.allowed
    (entered,) = decided.entered
    assert machine.type(keys) == expected
    assert expected <= set(read_command_line(entered).programs)


@pytest.mark.parametrize(
    "text",
    [
        "[[ 'a[$(p1)]' -eq 0 ]]",
        "[[ -v 'a[$(p1)]' ]]",
        "test -v 'a[$(p1)]'",
        "[ -v 'a[$(p1)]' ]",
        "x=1; : ${x['a[$(p1)]']}",
        "x=1; : ${x['a[`p1`]']}",
        "x=abc; : ${x:'a[$(p1)]'}",
        r"x=1; : ${x[$'a[\x24(p1)]']}",
        "a=(['b[$(p1)]']=1)",
        r"declare -i n; n=a[\$\(p1\)]",
        "set -- 'a[$(p1)]'; : $(($1))",
        "for x in 'a[$(p1)]'; do ((x)); done",
        "read x <<< 'a[$(p1)]'; ((x))",
        ": ${PS0:=x}; : ${BASH_ENV:=p1}",
        "declare -n r=PATH; r=$PATH; p1",
        "printf -vPATH %s /nowhere:$PATH; p1",
        "mapfile -C p1 -c1 a <<< x",
        "compgen -W '$(p1)'",
        "hash -rp /bin/true p2; p1",
    ],
)
def test_builtins_run_nothing_unseen(text: str, tmp_path: Path) -> None:
    if not (bash := shutil.which("bash")):
        pytest.skip("no bash")
    line = read_command_line(text, interactive=True)
    assert line.unknown
    # That is for a reason: each of them runs a program, or changes which one the next name is.
    assert "p1" in Machine(tmp_path).run(text, [bash, "-c"]) or "PS0" in text


@pytest.mark.parametrize(
    "text",
    [
        "set -euo pipefail",
        "set -- $x",
        "[[ a[0] == b ]]",
        "echo ${a[0]:-$x} ${b:=1}",
        "awk '{a[$(NF)]++}' f",
        "stty size",
        "stty -a",
        "stty",
    ],
)
def test_what_is_usual_stays_known(text: str) -> None:
    assert read_command_line(text, interactive=True).unknown == ()


@pytest.mark.parametrize(
    "text",
    [
        "set +o emacs",
        "set -o vi",
        "shopt -uo emacs",
        "stty intr undef",
        "stty size intr undef",
        "stty $x",
        "stty -F f",
        "histchars=@^#",
    ],
)
def test_what_changes_the_keys_of_a_prompt_is_not_known(text: str) -> None:
    assert read_command_line(text, interactive=True).unknown
