"""Real bash and zsh on a PTY: the sequence of marks, the bytes between them, the user's own ways unharmed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from holdfast.runtime.terminal.shell_integration import integrate
from tests.process.marked_shell import MARK, NONCE, Ran, Session, parse
from tests.support.parts import require

SHELLS = ("bash", "zsh")


Start = Callable[..., Session]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts shells in an own home; the private directory, named with quotes, is gone by the first prompt."""
    sessions: list[Session] = []
    home = tmp_path / "ho me"
    home.mkdir()

    def launch(
        kind: str,
        *,
        rc: str = "",
        files: Mapping[str, str] | None = None,
        argv: tuple[str, ...] | None = None,
        login: bool = False,
        env: Mapping[str, str] | None = None,
        plain: bool = False,
        edit: Callable[[str], str] = str,
        interrupt: bytes = b"",
    ) -> Session:
        require(kind)
        path = shutil.which(kind) or kind
        for name, content in {f".{kind}rc": f"PS1='pp> '\n{rc}", **(files or {})}.items():
            (home / name).write_text(content)
        environment = {"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "xterm-256color", **(env or {})}
        argv = argv or (kind,)
        if plain:
            sessions.append(Session((*argv, "-l") if login else argv, path, environment, home))
            return sessions[-1]
        directory = tmp_path / 'it\'s $(a) `b` "c" \\d'
        directory.mkdir(exist_ok=True)
        how = integrate(path, argv, directory=str(directory), nonce=NONCE, login=login, environment=environment)
        assert how is not None
        for name, content in how.files.items():
            (directory / name).write_text(edit(content))
        sessions.append(Session(how.argv, path, {**environment, **how.env}, home))
        if interrupt:
            sessions[-1].until(interrupt)
            sessions[-1].send("\x03")
            # bash stops reading: its hooks come with the first command.
            sessions[-1].until(rb"[#$%>] " if kind == "bash" else MARK.pattern.replace(b"[ABCDP]", b"B"))
        else:
            assert sessions[-1].prompt().marks.endswith("AB")
        shutil.rmtree(directory)
        return sessions[-1]

    yield launch
    for each in sessions:
        each.close()


def before_bash_5_1(rc: str) -> str:
    """The way of the older versions, in which PROMPT_COMMAND is one text, which newer ones take too."""
    assert ">= 501" in rc
    return rc.replace(">= 501", ">= 9999")


@pytest.mark.parametrize("login", [False, True], ids=["interactive", "login"])
@pytest.mark.parametrize("kind", SHELLS)
def test_commands_have_their_bytes_and_their_status(start: Start, kind: str, login: bool) -> None:
    files = {".bash_profile": ". ~/.bashrc"}
    shell = start(kind, files=files, login=login)
    ran = shell.run("echo hi")
    assert ran.marks == "CDAB"
    assert ran.output == b"hi\r\n"
    assert ran.status == 0
    assert ran.prompt == b"pp> "
    assert shell.run("printf abc; (exit 3)")[:3] == ("CDAB", b"abc", 3)
    assert shell.run("")[:3] == ("DAB", b"", 3)
    shell.run("true")
    assert shell.run("echo )")[:3] == ("DAB", b"", 2 if kind == "bash" else 1)


@pytest.mark.parametrize("kind", SHELLS)
def test_the_exclamation_mark_is_an_ordinary_character_unless_the_user_wants_it(start: Start, kind: str) -> None:
    shell = start(kind)
    assert shell.run('echo "a!b" !!')[:2] == ("CDAB", b"a!b !!\r\n")


@pytest.mark.parametrize(("kind", "rc"), [("bash", "set -H"), ("zsh", "setopt bang_hist")])
def test_history_expansion_stays_on_if_the_user_turns_it_on(start: Start, kind: str, rc: str) -> None:
    shell = start(kind, rc=rc)
    assert shell.run("echo one").output == b"one\r\n"
    assert shell.run("!! two").output.endswith(b"one two\r\n")


@pytest.mark.parametrize("kind", SHELLS)
def test_a_command_of_several_lines_shows_continuation_prompts(start: Start, kind: str) -> None:
    shell = start(kind, rc="PS2='more '")
    assert shell.run("for i in 1 2", "P").marks == "P"
    assert shell.run("do echo $i", "P").marks == "P"
    assert shell.run("done")[:3] == ("CDAB", b"1\r\n2\r\n", 0)
    shell.run('PS2="new $PS2 end"')
    shell.send("echo \\\r")
    assert MARK.sub(b"", shell.until(MARK.pattern.replace(b"[ABCDP]", b"P"))).endswith(b"new more  end")
    assert shell.run("x").output == b"x\r\n"


@pytest.mark.parametrize("kind", SHELLS)
def test_ctrl_c_at_the_prompt_shows_it_again(start: Start, kind: str) -> None:
    shell = start(kind)
    if kind == "zsh":
        shell.until(rb"\?2004h")
    shell.send("abc")
    shell.until(b"a.*b.*c")
    shell.wait_until_asleep()
    shell.send("\x03")
    assert shell.prompt().marks == "DAB"
    assert shell.run("echo hi")[:3] == ("CDAB", b"hi\r\n", 0)


@pytest.mark.parametrize("kind", SHELLS)
def test_ctrl_c_ends_a_command_with_its_status(start: Start, kind: str) -> None:
    shell = start(kind)
    shell.send("sh -c 'echo ready; exec cat'\r")
    shell.until(rb"133;C[^\n]*ready\r\n")
    shell.send("\x03")
    ended = shell.prompt()
    assert ended.marks == "DAB"
    assert ended.status == 130


@pytest.mark.parametrize("kind", SHELLS)
def test_ctrl_d_ends_the_shell_without_a_command(start: Start, kind: str) -> None:
    shell = start(kind)
    shell.run("true")
    rest, status = shell.end("\x04")
    assert not MARK.search(rest)
    assert status == 0


def test_bash_notice_of_a_background_job_is_no_output_of_a_command(start: Start) -> None:
    shell = start("bash", rc="gone() { while kill -0 $job 2>/dev/null; do read -t 0.01 x; done; }")
    shell.run("mkfifo gate; cat gate & job=$!")
    done = shell.run(": > gate; gone; echo over")
    assert done.output == b"over\r\n"
    assert b"Done" in done.hooks


@pytest.mark.parametrize("kind", SHELLS)
def test_a_line_longer_than_the_screen_may_redraw_the_prompt_with_its_marks(start: Start, kind: str) -> None:
    shell = start(kind)
    shell.send(f"echo {'x' * 200}\r")
    ran = parse(shell.until(rb"(?s)133;D;.*133;B;[0-9a-f]*\x07"))
    assert re.fullmatch("(AB)*CDAB", ran.marks)
    assert ran.output == b"x" * 200 + b"\r\n"


@pytest.mark.parametrize("kind", SHELLS)
def test_ctrl_c_in_the_users_files_does_not_lose_the_marks(start: Start, kind: str) -> None:
    shell = start(kind, rc="sh -c 'echo reading; exec cat'; echo not reached", interrupt=b"reading\r\n")
    assert shell.run("echo hi")[1:3] == (b"hi\r\n", 0)
    assert shell.run("(exit 3)")[:3] == ("CDAB", b"", 3)


@pytest.mark.parametrize("kind", SHELLS)
def test_prompts_set_at_each_prompt_are_wrapped_each_time(start: Start, kind: str) -> None:
    hook = {
        "bash": 'f() { PS1="s$?\\$(echo x)`echo y`> "; }; PROMPT_COMMAND=f',
        "zsh": 'setopt prompt_subst; f() { PS1="s$?\\$(echo x)`echo y`> " }; precmd_functions+=(f)',
    }
    shell = start(kind, rc=hook[kind])
    assert shell.run("(exit 4)")[2:] == (4, shell_hooks(kind), b"s4xy> ")
    assert shell.run("true").prompt == b"s0xy> "


def shell_hooks(kind: str) -> bytes:
    """The text between D and A without any hook of the user: zsh's mark of an unfinished line and its redraw."""
    if kind == "bash":
        return b""
    mark = b"\x1b[1m\x1b[7m" + (b"#" if os.geteuid() == 0 else b"%") + b"\x1b[27m\x1b[1m\x1b[0m"
    return mark + b" " * 79 + b"\r \r" + b"\r\x1b[0m\x1b[27m\x1b[24m\x1b[J"


@pytest.mark.parametrize("kind", SHELLS)
def test_text_put_around_the_prompt_ends_up_inside_the_marks(start: Start, kind: str) -> None:
    shell = start(kind)
    assert shell.run('old="$PS1"; PS1="(venv) $PS1"').prompt == b"(venv) pp> "
    assert shell.run('PS1="$PS1 after "').prompt == b"(venv) pp>  after "
    assert shell.run('PS1="$old"').prompt == b"pp> "
    assert shell.run("PS1=")[0:5:4] == ("CDAB", b"")
    assert shell.run("PS1=$'one\\ntwo> '").prompt in (b"one\r\ntwo> ", b"one\r\r\ntwo> ")
    assert shell.run("PS1='odd\\\\'" if kind == "bash" else "PS1=odd%").marks == "CDAB"
    assert shell.run("unset PS1").marks == "CDAB"
    assert shell.run("false")[:3] == ("CDAB", b"", 1)


@pytest.mark.parametrize("kind", SHELLS)
def test_the_users_hooks_see_the_status_and_print_after_the_mark(start: Start, kind: str) -> None:
    hook = {
        "bash": "PROMPT_COMMAND='echo \"[$? ${PIPESTATUS[*]}]\"'",
        "zsh": 'f() { echo "[$? $pipestatus]" }; precmd_functions=(f)',
    }
    shell = start(kind, rc=hook[kind])
    shell.run("true")
    ran = shell.run("(exit 3) | (exit 4)")
    assert ran[:3] == ("CDAB", b"", 4)
    assert b"[4 3 4]\r\n" in ran.hooks


def test_bash_prompt_command_may_be_changed_in_any_way(start: Start) -> None:
    shell = start("bash", rc="PROMPT_COMMAND='echo user'")
    assert shell.run("true")[:4] == ("CDAB", b"", 0, b"user\r\n")
    # A PROMPT_COMMAND that a line sets may print before D once; from the next line on it comes after.
    for line, hooks in (
        ("PROMPT_COMMAND=", b""),
        ("PROMPT_COMMAND='echo new'", b"new\r\n"),
        ('PROMPT_COMMAND="echo x;$PROMPT_COMMAND"', b"x\r\nnew\r\n"),
        ("PROMPT_COMMAND+='; echo y'", b"x\r\nnew\r\ny\r\n"),
        (". ~/.bashrc", b"user\r\n"),
        ("PROMPT_COMMAND=$'echo 1\\necho 2'", b"1\r\n2\r\n"),
        ("unset PROMPT_COMMAND", b""),
        ("PS1='q> '; PROMPT_COMMAND='PS1=r\\ '", b""),
    ):
        changed = shell.run(line)
        assert (changed.marks, changed.status) == ("CDAB", 0), line
        assert shell.run("echo out; (exit 9)")[:4] == ("CDAB", b"out\r\n", 9, hooks), line
        assert shell.run("")[:4] == ("DAB", b"", 9, hooks), line


def test_before_bash_5_1_prompt_command_may_be_changed_in_most_ways(start: Start) -> None:
    shell = start("bash", rc="PROMPT_COMMAND='echo user$?'", edit=before_bash_5_1)
    assert shell.run("(exit 8)")[:4] == ("CDAB", b"", 8, b"user8\r\n")
    for line, hooks in (
        ('PROMPT_COMMAND="echo x;$PROMPT_COMMAND"', b"x\r\nuser0\r\n"),
        ("PROMPT_COMMAND+='; echo y'", b"x\r\nuser0\r\ny\r\n"),
        ("unset PROMPT_COMMAND", b""),
        ("PROMPT_COMMAND+='; echo z'", b"z\r\n"),
        ("PROMPT_COMMAND=", b""),
    ):
        assert shell.run(line)[0:3:2] == ("CDAB", 0), line
        assert shell.run("echo out; (exit 9)")[:4] == ("CDAB", b"out\r\n", 9, hooks), line
        assert shell.run("")[:4] == ("DAB", b"", 9, hooks), line
    # Nothing can be put into a text that is not empty: now D comes from PS1, after what the hook prints.
    shell.run("PROMPT_COMMAND='echo only'")
    assert shell.run("(exit 9)")[0:3:2] == ("CDAB", 9)


def test_bash_prompt_command_may_be_an_array(start: Start) -> None:
    shell = start("bash", rc="PROMPT_COMMAND=('echo a$?' 'echo b$?')")
    assert shell.run("(exit 2)")[:4] == ("CDAB", b"", 2, b"a2\r\nb2\r\n")
    shell.run("PROMPT_COMMAND+=('echo c')")
    assert shell.run("true").hooks == b"a0\r\nb0\r\nc\r\n"
    shell.run('PROMPT_COMMAND=("echo z" "${PROMPT_COMMAND[@]}")')
    assert shell.run("true").hooks == b"z\r\na0\r\nb0\r\nc\r\n"
    assert shell.run("PROMPT_COMMAND=()").marks == "CDAB"
    assert shell.run("false")[:4] == ("CDAB", b"", 1, b"")


def test_bash_hooks_come_back_one_prompt_after_all_was_replaced_at_once(start: Start) -> None:
    shell = start("bash")
    shell.send("unset PROMPT_COMMAND; PS1='bare> '\r")
    shell.until(rb"133;C[^\n]*bare> ")
    assert shell.run("echo hi")[:3] == ("CDAB", b"hi\r\n", 0)


@pytest.mark.parametrize("edit", [str, before_bash_5_1], ids=["array", "text"])
def test_bash_read_only_variables_cause_no_errors(start: Start, edit: Callable[[str], str]) -> None:
    shell = start("bash", rc="PROMPT_COMMAND='echo user'; readonly PROMPT_COMMAND", edit=edit)
    ran = shell.run("false")
    assert (ran.marks, ran.status, ran.output.partition(b"\x1b")[0]) == ("CDAB", 1, b"user\r\n")
    shell = start("bash", rc="readonly PS1 PS2", edit=edit)
    assert shell.run("false") == Ran("CDAB", b"", 1, b"", b"")
    assert shell.run("true") == Ran("CDAB", b"", 0, b"", b"")
    shell = start("bash", edit=edit)
    shell.run("readonly PS1 PROMPT_COMMAND PS0 PS2")
    assert shell.run("false") == Ran("CDAB", b"", 1, b"", b"pp> ")


@pytest.mark.parametrize(
    "setting",
    [
        "set -u",
        "set -a",
        "set -o vi",
        "IFS=_:mPh",
        "shopt -u promptvars",
        "shopt -s extglob nocasematch compat44",
        "set -f",
        "shopt -u interactive_comments",
        "HISTCONTROL=ignoreboth",
        "set -o posix",
        "shopt -u patsub_replacement",
        "alias local=false printf=false set=false eval=false",
        "printf() { false; }",
    ],
)
def test_bash_settings_do_not_touch_the_marks(start: Start, setting: str) -> None:
    shell = start("bash", rc="PROMPT_COMMAND='echo u$?'")
    assert shell.run(setting).marks == "CDAB"
    assert shell.run("echo hi; (exit 5)")[:5] == ("CDAB", b"hi\r\n", 5, b"u5\r\n", b"pp> ")
    shell.run("PS1=\"new $PS1\" PROMPT_COMMAND+='; echo v'")
    assert shell.run("(exit 6)")[:5] == ("CDAB", b"", 6, b"u6\r\nv\r\n", b"new pp> ")
    if "promptvars" not in setting:  # there, a prompt cannot bring the hooks back
        shell.run("PROMPT_COMMAND=()")
        assert shell.run("(exit 6)")[:3] == ("CDAB", b"", 6)


def test_bash_errexit_does_not_end_the_shell_at_the_prompt(start: Start) -> None:
    shell = start("bash", rc="PROMPT_COMMAND=$'echo 1\\necho 2'; set -e")
    assert shell.run("! true")[:4] == ("CDAB", b"", 1, b"1\r\n2\r\n")
    assert shell.run("echo on")[:3] == ("CDAB", b"on\r\n", 0)


def test_bash_trace_and_debug_trap_see_the_names_of_the_hooks(start: Start) -> None:
    shell = start("bash")
    shell.run("set -x")
    ran = shell.run("echo hi")
    assert (ran.marks, ran.output, ran.hooks) == (
        "CDAB",
        b"+ echo hi\r\nhi\r\n++ _hold_first\r\n",
        b"++ _hold_last\r\n",
    )
    shell.run("set +x; trap 'echo \"<$BASH_COMMAND>\"' DEBUG")
    ran = shell.run("echo hi")
    assert (ran.marks, ran.output, ran.hooks) == (
        "CDAB",
        b"<echo hi>\r\nhi\r\n<_hold_first>\r\n",
        b"<_hold_last>\r\n",
    )


def test_bash_debug_trap_that_tells_commands_from_prompt_hooks_still_does(start: Start) -> None:
    """The way of bash-preexec: its last hook arms the trap, the next command that is no hook fires it."""
    rc = r"""
__bp_imported=defined
__bp_interactive_mode() { __bp_preexec_interactive_mode=on; }
known() {
  local each IFS=$'\n;'
  for each in ${PROMPT_COMMAND[*]}; do [[ $each != "$1" ]] || return 0; done
  return 1
}
fire() {
  [[ -n $__bp_preexec_interactive_mode ]] || return 0
  __bp_preexec_interactive_mode=
  known "$BASH_COMMAND" || echo "pre:$BASH_COMMAND"
}
PROMPT_COMMAND=$'echo pc$?\n__bp_interactive_mode'
trap fire DEBUG
"""
    shell = start("bash", rc=rc)
    for _ in range(2):
        ran = shell.run("echo hi")
        assert ran[:4] == ("CDAB", b"pre:echo hi\r\nhi\r\n", 0, b"pc0\r\n")
        assert shell.run("")[:4] == ("DAB", b"", 0, b"pc0\r\n")


def test_bash_own_ps0_comes_before_the_mark(start: Start) -> None:
    shell = start("bash", rc="PS0='started\\n'")
    shell.send("echo hi\r")
    assert b"\rstarted\r" in shell.until(rb"133;C")
    assert shell.prompt().marks == "DAB"
    shell.send('PS0="again $PS0"\r')
    shell.prompt()
    shell.send("true\r")
    assert b"\ragain started\r" in shell.until(rb"133;C")


def test_exported_prompts_mean_nothing_to_another_bash(start: Start) -> None:
    shell = start("bash")
    shell.run('set -a; export PS1 PS0 PS2 PROMPT_COMMAND; PS1="e $PS1"')
    assert NONCE.encode() not in shell.run("env").output
    inner = shell.run("bash --norc -iuc 'echo \"<${PS1@P}${PS0@P}${PS2@P}>\"; declare -p PROMPT_COMMAND'").output
    assert b"<e pp> > >" in inner.translate(None, b"\x01\x02")
    assert b"_hold_last" not in inner


DUMP = (
    '{ env; set -o; shopt; echo "$- $0 $SHLVL $#"; trap; alias; declare -p HISTFILE HISTFILESIZE MAILCHECK; }'
    " | sort > dump; echo DUMPED"
)


@pytest.mark.parametrize("login", [False, True], ids=["interactive", "login"])
def test_bash_is_otherwise_the_same_shell(start: Start, tmp_path: Path, login: bool) -> None:
    files = {".bash_profile": ". ~/.bashrc; export FROM=profile", ".bash_logout": "echo bye"}
    env = {"ENV": "it's $mine", "FOO": "b a r"}
    plain = start("bash", files=files, login=login, env=env, plain=True)
    plain.until(b"pp> ")
    plain.send(DUMP + "\r")
    plain.until(rb"\nDUMPED|\rDUMPED")
    expected = (tmp_path / "ho me" / "dump").read_text().splitlines()
    shell = start("bash", files=files, login=login, env=env)
    shell.run(DUMP)
    actual = (tmp_path / "ho me" / "dump").read_text().splitlines()
    only_plain = {line for line in expected if line not in actual}
    only_ours = {line for line in actual if line not in expected}
    assert {line.replace("\t", " ").split(" ")[0] for line in only_plain} == {"histexpand", "himBHs"}
    assert {line.replace("\t", " ").split(" ")[0] for line in only_ours} == {"histexpand", "himBs"}
    rest, _ = shell.end()
    assert (b"bye\r\n" in rest) is login


@pytest.mark.parametrize(
    ("present", "read"),
    [
        ((".bash_profile", ".bash_login", ".profile"), b"/.bash_profile"),
        ((".bash_login", ".profile"), b"/.bash_login"),
        ((".profile",), b"/.profile"),
        ((), b""),
    ],
)
def test_bash_login_reads_the_first_of_its_files(start: Start, present: tuple[str, ...], read: bytes) -> None:
    files = dict.fromkeys(present, "declare -x READ+=${BASH_SOURCE#$HOME}")
    shell = start("bash", files=files, rc="READ+=bashrc", login=True)
    assert shell.run('echo "<$READ>"; shopt login_shell').output == b"<" + read + b">\r\nlogin_shell    \ton\r\n"


def test_bash_history_goes_to_the_usual_file(start: Start, tmp_path: Path) -> None:
    shell = start("bash", files={".bash_history": "earlier\n"}, login=True)
    assert b"earlier" in shell.run("history").output
    shell.end()
    assert (tmp_path / "ho me" / ".bash_history").read_text() == "earlier\nhistory\nexit\n"


def test_zsh_reads_its_own_files_in_order(start: Start, tmp_path: Path) -> None:
    elsewhere = tmp_path / "dot dir"
    elsewhere.mkdir()
    for name in (".zshenv", ".zprofile", ".zshrc", ".zlogin", ".zlogout"):
        (elsewhere / name).write_text(f"READ+={name}; [[ $READ != *logout ]] || echo $READ\n")
    shell = start("zsh", login=True, env={"ZDOTDIR": str(elsewhere)})
    ran = shell.run('echo "$READ $ZDOTDIR"')
    assert ran.output == b".zshenv.zprofile.zshrc.zlogin " + os.fsencode(elsewhere) + b"\r\n"
    rest, _ = shell.end()
    assert b".zshenv.zprofile.zshrc.zlogin.zlogout\r\n" in rest


def test_zsh_leaves_no_trace_of_its_directory(start: Start) -> None:
    shell = start("zsh", files={".zshenv": "export SEEN=${ZDOTDIR-none}"})
    printed = shell.run("echo $SEEN ${ZDOTDIR-unset} $+functions[zsh-newuser-install]").output
    assert printed == b"none unset 0\r\n"
    # Names alone: the project, which is in PATH, may lie in a directory of that name.
    assert shell.run("env | cut -d= -f1 | grep -ci hold").output == b"0\r\n"


@pytest.mark.parametrize(
    "line",
    [
        "precmd_functions=()",
        "unset precmd_functions preexec_functions",
        "preexec_functions=()",
        "precmd() { echo mine }",
        "unfunction precmd",
        "setopt no_unset ksh_arrays sh_word_split",
        "setopt prompt_subst glob_subst all_export warn_create_global",
        "emulate ksh",
        "emulate sh",
        "bindkey -v",
        "IFS=_01",
        "setopt no_multibyte no_prompt_sp err_return",
        "alias print=false local=false; print() { false }",
    ],
)
def test_zsh_marks_survive(start: Start, line: str) -> None:
    shell = start("zsh")
    assert shell.run(line)[0] == "CDAB"
    assert shell.run("echo hi; (exit 5)")[:3] == ("CDAB", b"hi\r\n", 5)
    assert shell.run('PS1="new $PS1"').prompt == b"new pp> "
    assert shell.run("false")[:3] == ("CDAB", b"", 1)


@pytest.mark.parametrize(
    "rc",
    ["precmd_functions=(); precmd() { true }", "precmd_functions=(f); f() { PS1='pp> ' }; preexec_functions=()"],
)
def test_zsh_marks_survive_an_rc_file_that_clears_the_hooks(start: Start, rc: str) -> None:
    shell = start("zsh", rc=rc)
    assert shell.run("printf hi; (exit 5)")[:3] == ("CDAB", b"hi", 5)


def test_zsh_own_precmd_prints_after_the_mark(start: Start) -> None:
    shell = start("zsh", rc='precmd() { echo "mine $?" }; preexec() { echo "pre $1" }')
    shell.send("(exit 6)\r")
    assert b"pre (exit 6)\r\n" in shell.until(rb"133;C;[0-9a-f]*\x07")
    ran = shell.prompt()
    assert (ran.marks, ran.status) == ("DAB", 6)
    assert b"mine 6\r\n" in ran.hooks


def test_zsh_marks_an_unfinished_line_after_the_command(start: Start) -> None:
    shell = start("zsh")
    ran = shell.run("printf abc")
    assert (ran.output, ran.hooks) == (b"abc", shell_hooks("zsh"))
    shell.run("PROMPT_EOL_MARK='%F{red}xx%f'")
    assert b"\x1b[31mxx\x1b[39m" + b" " * 78 + b"\r  \r" in shell.run("printf abc").hooks
    shell.run("setopt no_prompt_sp")
    ran = shell.run("printf abc")
    assert (ran.output, ran.hooks) == (b"abc", b"\r\x1b[0m\x1b[27m\x1b[24m\x1b[J")


def test_zsh_trace_shows_little_of_the_hooks(start: Start) -> None:
    shell = start("zsh")
    shell.run("setopt xtrace")
    ran = shell.run("echo hi")
    assert (ran.marks, ran.output) == ("CDAB", b"+zsh:2> echo hi\r\nhi\r\n+precmd:1> _hold_first precmd\r\n")
    assert ran.hooks == shell_hooks("zsh")


def test_zsh_prompt_without_escapes_gets_its_marks_before_it(start: Start) -> None:
    shell = start("zsh")
    assert shell.run("setopt no_prompt_percent")[0::4] == ("CDAB", b"")
    assert shell.run("false")[:3] == ("CDAB", b"", 1)
    assert shell.run("setopt prompt_percent")[0::4] == ("CDAB", b"pp> ")


def test_zsh_does_not_export_the_nonce(start: Start) -> None:
    shell = start("zsh", rc="export PS1 PS2; setopt all_export")
    assert NONCE.encode() not in shell.run("env").output
