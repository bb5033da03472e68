"""Texts that a shell evaluates again: each of them runs a program in a real bash, and the reader reports it.

`STATE` is the state that an earlier command may leave in the shell. The differential fuzz, `fuzz/shells.py`, finds
more; the hits of its runs are in `RUNNING`.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from fuzz.shell_texts import TextMaker
from fuzz.shells import PROFILE, SHELLS, Ground
from holdfast.service.policy.command_line import read_command_line
from holdfast.service.policy.engine import decide_command

from .installed_shells import Machine

#: Each may be put together from pieces of which none resembles a command.
STATE = "D=\\$; E='a[$(p1)]'; N=E; V=-v; M='-v a[$(p1)]'; set -- -v 'a[$(p1)]'; S='$(p1)'\n"

RUNNING = [
    # arithmetic
    'D=\\$; x="a[$D(p1)]"; ((x))',
    "x='a[$'; x+='(p1)]'; ((x))",
    "((E))",
    "((1 + E))",
    "((0 || E))",
    "((x=E))",
    "((E++))",
    "((a[E]))",
    "((E=1/0)); ((E))",
    "((E=08)); ((E))",
    "((E=$!)); ((E))",
    "echo $((E))",
    "echo $[E]",
    "echo $(($E))",
    "let E",
    "let x=E",
    "let 'x = E'",
    'let "$E"',
    "for ((i=E; i<1; i++)); do :; done",
    "for ((; E; )); do break; done",
    "for ((i=0; i<1; E++)); do i=1; done",
    "for x in a*; do ((x)); done",
    "for E in 1 $E; do ((E)); done",
    ": ${P:+$((E=5))}; ((E))",
    "false && E=5; ((E))",
    "E=5 | :; ((E))",
    "(E=5); ((E))",
    "E=5 & wait; ((E))",
    "E=5 true; ((E))",
    "if false; then E=5; fi; ((E))",
    "f() { E=5; }; ((E))",
    "x=5; f() { x=$E; }; f; ((x))",
    "x=5; f() { eval 'x=$E'; }; f; ((x))",
    'x=5; f() { read x; }; f <<< "$E"; ((x))',
    "x=5; f() { if false; then local x; fi; x=$E; }; f; ((x))",
    "x=5; g() { unset x; }; f() { local x; g; x=$E; }; f; ((x))",
    "x=5; trap 'x=$E' DEBUG; ((x))",
    "x=5; echo() { x=$E; }; echo; ((x))",
    "x=5; : ${y:=$E}; ((y))",
    "echo $((1/0)); E=5\n((E))",
    "readonly E\nE=5\n((E))",
    # conditions
    "[[ E -eq 0 ]]",
    "[[ 0 -lt E ]]",
    '[[ "$E" -gt 0 ]]',
    '[[ $(echo "$E") -eq 0 ]]',
    "[[ -v $E ]]",
    "[[ -v a[E] ]]",
    'test -v "a[$D(p1)]"',
    "test $V $E",
    '[ "$V" "$E" ]',
    "[ $M ]",
    "[ 1 -a \"$V\" 'a[$(p1)]' ]",
    '[ "$@" ]',
    "[ -v a* ]",
    # expansions
    "echo ${PWD:E}",
    "echo ${PWD:0:E}",
    "echo ${PWD: -1:E}",
    "echo ${a[E]}",
    "a=(1); echo ${#a[E]}",
    "echo ${!E}",
    "echo ${!2}",
    "echo ${S@P}",
    "echo ${S@\\\nP}",
    "echo ${PWD:\\\nE}",
    "cat <<X\n${PWD:E}\nX",
    # assignments
    "a[E]=1",
    "a[1 + E]=1",
    "a[E]+=1",
    "a=([E]=1)",
    "a=([1 + E]=1)",
    "RANDOM=$E",
    "declare -i x; x=$E",
    "declare -i x=$E",
    "local_() { local -i x=$E; }; local_",
    "declare a[E]=1",
    "declare -a 'x=($(p1))'",
    'declare -a x="($S)"',
    "declare -n r=E; declare -i E=1; r='a[$(p1)]'",
    "printf -v 'a[$(p1)]' x",
    "printf -v x 'a[\\x24(p1)]'; ((x))",
    'printf "$V" "$E" x',
    'printf -vx "$@" y',
    'read "$E" <<< 1',
    "read a[E] <<< 1",
    "a=(1); unset a[E]",
    'a=(1); unset "$E"',
    "{a[E]}>o true",
    ": & wait -p a[E] $!",
    ": & wait $O a[E]; wait -n -p 'a[$(p1)]'",
    "getopts x 'a[$(p1)]' -x; ((OPTIND=1)); set -- -x; a=(); read 'a[$(p1)]' < /dev/null",
    # text that is read as commands
    ". //dev/stdin <<< p1",
    ". /dev/../dev/fd/0 <<< p1",
    "bash /dev/stdin <<< p1",
    "bash //proc/self/fd/0 <<< p1",
    "$'\\x{70}1'",
    "set -k; bash -c : BASH_ENV=f; PS4='$(p1)'; set -x; :",
]
#: Set what decides which program a name is, or what runs beside it.
STEERING = [
    "((PATH=5))",
    "{PATH}>f",
    ": {PATH}>f",
    "let PATH=5",
    "coproc PATH { :; }",
    "for ((PATH=1; ;)); do break; done",
    "echo $((PATH=5))",
    "MAILPATH='f?$(p1)'",
    "MAIL=f",
    "HOME=.",
    "SHELL=./x",
    "GIT_SSH_COMMAND=p1 git fetch",
    "PAGER=p1 git log",
    "LESSOPEN='|p1' less f",
    "BASH_ARGV0=x",
    "EDITOR=p1 git commit",
    "TEXTDOMAINDIR=.",
    "exec < f",
    "exec 0<> f",
    "exec <<< p1",
    "set -o posix",
    "enable x",
    "trap 'p1' USR1",
]
#: Texts of people and agents that the reader follows.
USUAL = [
    "for ((i=0; i<5; i++)); do curl x$i; done",
    "i=0; while ((i < 5)); do sleep 1; ((i++)); done",
    "i=0; until [ $i -ge 5 ]; do i=$((i + 1)); done",
    "n=5; echo $((n * 2)) ${x:n} ${a[n]} ${a[$n]}",
    "for i in {1..5}; do echo $((i + 1)); done",
    "for i in 1 2 3; do ((i > 1)) && echo $i; done",
    "[ $? -eq 0 ] && [[ $# -gt 1 ]]",
    '[ -n "$x" ] && [ "$x" = y ] || [ ! -f "$x" ]',
    'x=$(ls | wc -l); [ "$x" -gt 3 ]',
    "sleep 5 & pid=$!; wait $pid",
    'echo "${a[@]}" ${a[0]} ${a[-1]} ${#a[@]} ${!a[@]} ${x:0:5} ${x: -3} ${x/a/b} ${x##*/} ${x^^}',
    "f() { local i=0 x=$1; ((i++)); x=$2; }; f 1",
    "x='$(date)'; y='a[$(x)]'",
    "while read -r line; do echo $line; done < f",
    'export A="$B"; declare -x C=1; declare -a l',
    "read -p 'Go on? [y/n] ' answer",
    "printf '%s\\n' \"$x\"",
    "SECONDS=0; OPTIND=1",
    "exec 3< f; exec > log",
    "trap 'rm -f x' EXIT; trap '' INT; trap - TERM",
    'GIT_AUTHOR_NAME=x git commit -m "$m"',
    "git -C x --no-pager log --oneline -5",
    "tar xzf a.tgz; ssh host ls; rsync -a a b; sort -u f; find . -name x",
]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    return Machine(tmp_path_factory.mktemp("machine"))


@pytest.mark.parametrize("text", RUNNING)
def test_text_that_a_shell_evaluates_is_not_known(machine: Machine, text: str) -> None:
    assert read_command_line(text).unknown or read_command_line(text).incomplete
    # For a reason: with what an earlier command may have left, it runs a program.
    ran = machine.run(STATE + ">'a[$(p1)]'\n" + text, ["bash", "-c"])
    assert "p1" in ran


@pytest.mark.parametrize("text", STEERING)
def test_what_decides_which_programs_run_is_not_known(text: str) -> None:
    assert read_command_line(text).unknown


@pytest.mark.parametrize("text", USUAL)
def test_arithmetic_with_numbers_stays_known(text: str) -> None:
    assert read_command_line(text).unknown == ()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_runs_nothing_that_is_not_allowed(shell: str, tmp_path: Path) -> None:
    """A short run of the differential fuzz."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    maker = TextMaker(random.Random(20))
    texts = [maker.text() for _ in range(500)]
    allowed = [
        text for text in texts if decide_command(PROFILE, text, shell=shell, interactive=False).verdict == "allow"
    ]
    assert len(allowed) > 30
    ground = Ground(tmp_path)
    assert ground.hits(allowed, shell) == []
    # One that is not allowed is seen: the comparison can fail.
    assert ground.hits([": $(canary)", ":"], shell) == [": $(canary)"]
