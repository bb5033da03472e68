"""Shells with a program that has to be replaced: the state that the new one has of the old, and the lost rest."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import CommandResult, Sandbox
from holdfast.client.shell import Shell
from holdfast.errors import ShellClosed
from holdfast.runtime.local import LocalExec
from holdfast.testing.sandbox_suite import TIMEOUTS
from tests.contract.shell_ways import Running, late_output
from tests.contract.ways import fifo
from tests.support.servers import is_alive

MakeExec = Callable[..., LocalExec]
#: A loop that no trap of ours gets out of: only a new program helps.
DEAF = "trap '' 57; echo deaf; while :; do :; done"


@pytest.fixture
async def sandbox(make_exec: MakeExec) -> Sandbox:
    return Sandbox(make_exec(interrupt_grace_seconds=0.05))


@pytest.fixture
async def sh(sandbox: Sandbox) -> Shell:
    return await sandbox.shell("bash", env={"GIVEN": "1"})


async def run_deaf(sh: Shell, command: str = "", **options: Any) -> CommandResult:
    """Run DEAF after `command` until its time is up, with more time while the shell did not get as far as DEAF."""
    for timeout in TIMEOUTS:
        result = await sh.run(command + DEAF, timeout=timeout, **options)
        if result.stdout.endswith("deaf\n"):
            break
    return result


# --- with all of its state ----------------------------------------------------------------------------------------

STATE = r"""
plain='two
lines'; export EXPORTED="quote ' and \ more"; declare -i number=7; list=(a 'b c' ''); declare -A map=([k y]=v)
readonly fixed=constant; empty=; unset GIVEN
f() { echo "f got $# in $PWD"; }; alias hello='echo aliased'
shopt -s extglob nullglob; set -o pipefail; umask 027
trap 'echo got USR1' USR1; trap '' HUP; set -- one 'two three'
"""
SHOW = r"""
printf '%s|' "$plain" "$EXPORTED" "${list[@]}" "${map[k y]}" "$fixed" "${empty-unset}" "${GIVEN-unset}"; echo
number+=1; echo $number; f x; hello there; printenv EXPORTED; echo *.none; echo "$# $2"; umask
shopt extglob nullglob | grep -c on; set -o | grep -c 'pipefail.*on'; trap -p USR1 HUP; kill -USR1 $$
"""


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        # To bring a status back would end a shell with this option again.
        ("set -e; false; echo not here", 0),
        ("set -u; echo $not_set; echo not here", 1),
        ("echo ${not_set:?}; echo not here", 1),
    ],
)
async def test_an_option_that_ends_a_command_leaves_the_shell_its_state(
    sh: Shell, tmp_path: Path, ends: str, status: int
) -> None:
    assert (await sh.run(f"{STATE}\ncd {tmp_path}")).exit_code == 0
    before = await sh.run(SHOW)
    assert before.stderr == ""
    await sh.run("number=7")
    pid = (await sh.describe()).pid
    result = await sh.run(ends)
    assert (result.exit_code, result.stdout, result.state) == (1, "", "idle")
    assert (result.shell_restarted, result.restored, result.cwd) == (True, "state", str(tmp_path))
    assert (await sh.run("echo $?; set +eu")).stdout == f"{status}\n"
    after = await sh.run(SHOW)
    assert (after.stdout, after.stderr) == (before.stdout, "")
    described = await sh.describe()
    assert (described.restarts, described.pid == pid) == (1, False)


async def test_the_option_itself_is_part_of_the_state(sh: Shell) -> None:
    assert (await sh.run("set -e; word=kept")).exit_code == 0
    for _ in range(3):
        result = await sh.run("echo $word; false; echo not here")
        assert (result.stdout, result.exit_code, result.restored) == ("kept\n", 1, "state")
    assert re.search("e", (await sh.run("echo $-")).stdout)


async def test_an_exit_that_is_meant_closes_though_an_option_is_set(sh: Shell) -> None:
    await sh.run("set -eu")
    result = await sh.run("(exit 3) || exit 4")
    assert (result.exit_code, result.state, result.shell_restarted) == (4, "closed", False)
    with pytest.raises(ShellClosed, match="exited with code 4"):
        await sh.run("echo more")


# --- with its exported variables ----------------------------------------------------------------------------------


async def test_a_shell_that_does_not_come_back_is_replaced_with_its_exports(sh: Shell, tmp_path: Path) -> None:
    value = "two\nlines 'and' \"more\" \\ $HOME"
    await sh.run(
        f"export VALUE; unset GIVEN; plain=1; f() {{ :; }}; cd {tmp_path}; read -r -d '' VALUE", input=value
    )
    pid = (await sh.describe()).pid
    result = await run_deaf(sh, "export LATER=1; echo before; ")
    assert (result.stdout, result.exit_code, result.timed_out) == ("before\ndeaf\n", 124, True)
    assert (result.shell_restarted, result.restored, result.cwd) == (True, "exports", str(tmp_path))
    after = await sh.run('echo "$?|$VALUE|${GIVEN-unset}|${plain-unset}|$PWD"; declare -F f')
    assert (after.stdout, after.exit_code) == (f"124|{value}|unset|unset|{tmp_path}\n", 1)
    assert not is_alive(pid)
    assert (await sh.describe()).restarts == 1


async def test_a_directory_that_is_gone_is_not_gone_back_to(sh: Shell, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    await sh.run(f"cd {tmp_path}/gone; rmdir ../gone")
    result = await run_deaf(sh)
    assert (result.exit_code, result.restored, result.cwd) == (124, "exports", "/")
    assert (await sh.run("pwd")).stdout == "/\n"


async def test_a_directory_for_one_command_is_not_where_the_new_program_stays(sh: Shell, tmp_path: Path) -> None:
    here = sh.cwd
    result = await run_deaf(sh, "pwd; ", cwd=str(tmp_path))
    assert (result.stdout, result.shell_restarted, result.cwd) == (f"{tmp_path}\ndeaf\n", True, here)
    assert (await sh.run("pwd")).stdout == f"{here}\n"


async def test_a_posix_shell_is_replaced_too(sandbox: Sandbox, tmp_path: Path) -> None:
    sh = await sandbox.shell("dash", cwd=str(tmp_path))
    await sh.run("export WORD='kept well'; plain=1")
    result = await run_deaf(sh)
    assert (result.exit_code, result.restored, result.cwd) == (124, "exports", str(tmp_path))
    assert (await sh.run('echo "$? $WORD ${plain-unset}"; pwd')).stdout == f"124 kept well unset\n{tmp_path}\n"


async def test_commands_that_wait_meanwhile_run_in_the_new_program(sh: Shell, tmp_path: Path) -> None:
    await sh.run("export WORD=kept")
    # With a time limit the exports are written down before it begins, else once the shell was idle for a moment.
    running = Running(sh, DEAF, timeout=1000)
    await running.until(b"deaf\n")
    waiting = [Running(sh, f"echo {number} $WORD") for number in range(3)]
    assert await sh.interrupt()
    assert (await running.task).exit_code == 130
    assert [(await each.task).stdout for each in waiting] == [f"{number} kept\n" for number in range(3)]


# --- jobs of the program before -----------------------------------------------------------------------------------


async def test_background_jobs_of_a_program_that_was_replaced_live_on_and_end_with_the_shell(
    sh: Shell, tmp_path: Path
) -> None:
    with fifo(str(tmp_path), "go") as (path, fd):
        started = await sh.run(
            f"{{ read x < {path}; echo late; exec sleep 1000; }} & echo $!\nsetsid sleep 1000 & echo $!"
        )
        jobs = [int(pid) for pid in started.stdout.split()]
        assert (await run_deaf(sh)).restored == "exports"
        third = await sh.run("env -i setsid sleep 1000 & echo $!")
        jobs.append(int(third.stdout))
        assert (await sh.run("set -e; false")).restored == "state"
        assert [pid for pid in jobs if not is_alive(pid)] == []
        os.write(fd, b"\n")
        await late_output(sh, b"late\n")
    assert (await sh.run("echo own")).stdout == "own\n"
    await sh.close(grace=0.05)
    assert [pid for pid in jobs if is_alive(pid)] == []


# --- shells that do not answer ------------------------------------------------------------------------------------


async def test_a_shell_that_reads_without_running_is_replaced(sh: Shell, tmp_path: Path) -> None:
    """With `set -n` a shell reads commands and runs none: no answer comes, and no event reports it."""
    await sh.run(f"export WORD=kept; cd {tmp_path}")
    result = await sh.run("set -n; touch ran")
    assert (result.shell_restarted, result.restored, result.success) == (True, "exports", False)
    assert (result.cwd, (tmp_path / "ran").exists()) == (str(tmp_path), False)
    assert (await sh.run("echo $WORD")).stdout == "kept\n"


@pytest.mark.parametrize("shell", ["bash", "dash"])
async def test_a_command_that_did_not_run_is_refused(sandbox: Sandbox, shell: str, tmp_path: Path) -> None:
    """With `set -t` a shell ends after one more command; the next one comes before we know, or after."""
    for number in range(10):
        sh = await sandbox.shell(shell, cwd=str(tmp_path))
        try:
            assert (await sh.run("set -t")).exit_code in (0, 2)
            ran = (await sh.run(f"touch ran{number}; (exit 7)")).exit_code
        except ShellClosed:
            assert not (tmp_path / f"ran{number}").exists()
        else:
            assert ran == 7
            assert (tmp_path / f"ran{number}").exists()
        await sh.close()
