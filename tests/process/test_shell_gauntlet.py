"""Runs the gauntlet: every case in a live shell of its own, on every shell that it names and this machine has."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

import holdfast
from holdfast.client.shell import Shell
from holdfast.types import OutputChunk, OutputGap
from tests.process.gauntlet import CASES
from tests.process.gauntlet.case import Case, Closed, Expected, Late, Step
from tests.support.parts import require
from tests.support.servers import is_alive

#: Nothing here waits for time to pass; whatever takes this long hangs.
SAFETY_NET = 60
#: The name that a shell is started by, and the program that must be there for it.
PROGRAMS = {"bash": "bash", "dash": "dash", "ash": "busybox", "zsh": "zsh"}


def stream_on(shell: str, expected: Expected | Mapping[str, Expected]) -> Expected:
    if isinstance(expected, Mapping):
        return expected[shell] if shell in expected else expected[""]
    return expected


def code_on(shell: str, expected: int | Mapping[str, int]) -> int:
    if isinstance(expected, Mapping):
        return expected[shell] if shell in expected else expected[""]
    return expected


def check(what: str, expected: Expected, got: bytes, directory: str) -> None:
    location = os.fsencode(directory)
    if isinstance(expected, bytes):
        wanted = expected.replace(b"@DIR@", location)
        if got != wanted:
            # By parts: pytest would take minutes to show how two megabytes differ.
            assert (len(got), got[:500], got[-500:]) == (len(wanted), wanted[:500], wanted[-500:]), what
            raise AssertionError(f"{what}: they differ in the middle")
    else:
        pattern = re.compile(expected.pattern.replace(b"@DIR@", re.escape(location)), expected.flags)
        assert pattern.fullmatch(got), f"{what}: {got[:500]!r} is not like {pattern.pattern!r}"


async def take(sh: Shell, step: Step, shell: str, directory: str) -> None:
    interrupting: list[asyncio.Task[bool]] = []
    printed = bytearray()

    def interrupt(event: OutputChunk | OutputGap) -> None:
        if isinstance(event, OutputChunk) and event.stream == "stdout":
            printed.extend(event.data)
        if step.interrupt_at is not None and step.interrupt_at in printed and not interrupting:
            interrupting.append(asyncio.ensure_future(sh.interrupt()))

    def here(text: str) -> str:
        return text.replace("@DIR@", directory)

    result = await sh.run(
        here(step.command),
        timeout=step.timeout,
        cwd=None if step.cwd is None else here(step.cwd),
        env=None if step.env is None else {name: here(value) for name, value in step.env.items()},
        input=step.input,
        on_output=None if step.interrupt_at is None else interrupt,
    )
    for task in interrupting:
        assert await task
    about = (
        f"{step.command[:200]!r} on {shell}: exit code {result.exit_code}, stderr {result.stderr_bytes[:500]!r}: "
    )
    check(about + "stdout", stream_on(shell, step.out), result.stdout_bytes, directory)
    check(about + "stderr", stream_on(shell, step.err), result.stderr_bytes, directory)
    assert result.exit_code == code_on(shell, step.code), about
    assert result.success == (result.exit_code == 0), about
    assert result.timed_out == step.timed_out, about
    assert result.restored in (step.restored if isinstance(step.restored, tuple) else (step.restored,)), about
    assert result.shell_restarted == (result.restored != ""), about
    assert not result.truncated, about
    assert result.stdout == result.stdout_bytes.decode("utf-8", "replace"), about
    assert result.stderr == result.stderr_bytes.decode("utf-8", "replace"), about
    if step.at is not None:
        assert result.cwd == here(step.at), about


async def late_output(sh: Shell, expected: Late) -> None:
    """Reads the shell's own output until as much came as must come."""
    printed = {"stdout": b"", "stderr": b""}
    async for event in sh.output():
        assert isinstance(event, OutputChunk)
        printed[event.stream] += event.data
        if len(printed["stdout"]) >= len(expected.out) and len(printed["stderr"]) >= len(expected.err):
            break
    assert printed == {"stdout": expected.out, "stderr": expected.err}


def noted(location: Path) -> list[int]:
    """The processes of which a case noted that it left them behind."""
    pids = location / "pids"
    return [int(pid) for pid in pids.read_text().split()] if pids.exists() else []


@pytest.mark.parametrize(
    ("each", "shell"),
    [pytest.param(each, shell, id=f"{each.name[:60]}-{shell}") for each in CASES for shell in each.shells],
)
async def test_gauntlet(each: Case, shell: str, tmp_path: Path) -> None:
    require(PROGRAMS[shell], *each.needs)
    location = tmp_path / "place"
    location.mkdir()
    directory = str(location.resolve())
    path = shell
    if shell == "ash":
        # Busybox is the shell that it is called by.
        path = str(tmp_path / "ash")
        os.symlink(str(shutil.which("busybox")), path)
    async with asyncio.timeout(SAFETY_NET), holdfast.connect("inprocess") as box:
        sh = await box.shell(shell=path, cwd=directory, env={"LC_ALL": "C.UTF-8"})
        for step in each.steps:
            if isinstance(step, Step):
                await take(sh, step, shell, directory)
            elif isinstance(step, Late):
                await late_output(sh, step)
            else:
                with pytest.raises(holdfast.ShellClosed, match=re.escape(step.why)):
                    await sh.run("echo no")
        assert sh.state == ("closed" if isinstance(each.steps[-1], Closed) else "idle")
        await sh.close()
        assert [pid for pid in noted(location) if is_alive(pid)] == []


@pytest.mark.parametrize("shell", ["bash", "dash", "zsh"])
async def test_many_commands_leave_no_descriptors(shell: str) -> None:
    require(shell)
    async with asyncio.timeout(SAFETY_NET), holdfast.connect("inprocess") as box:
        sh = await box.shell(shell=shell)
        # By the shell itself: while it starts a program it may hold a descriptor more.
        before = await sh.run("echo /proc/$$/fd/*")
        for number in range(150):
            result = await sh.run(f"echo {number} $A; cat >&2", cwd="/", env={"A": "a"}, input="in")
            assert (result.stdout, result.stderr) == (f"{number} a\n", "in")
        assert (await sh.run("echo /proc/$$/fd/*")).stdout == before.stdout


async def test_a_prompt_is_seen_while_the_command_waits(tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    os.mkfifo(answer)
    async with asyncio.timeout(SAFETY_NET), holdfast.connect("inprocess") as box:
        sh = await box.shell(shell="bash", env={"ANSWER": str(answer)})
        printed = b""
        async for event in sh.stream('printf "Password: "; read -r x <"$ANSWER"; echo "got $x"'):
            if isinstance(event, OutputChunk):
                printed += event.data
                if printed == b"Password: ":
                    # Opens at once, for the command is about to read; no newline was needed to get here.
                    await asyncio.to_thread(answer.write_text, "secret\n")
        assert printed == b"Password: got secret\n"


async def test_an_idle_shell_with_tmout_set_is_still_there() -> None:
    """TMOUT bounds every `read` of bash by real seconds: a job of the shell announces that they have passed."""
    async with asyncio.timeout(SAFETY_NET), holdfast.connect("inprocess") as box:
        sh = await box.shell(shell="bash")
        assert (await sh.run("x=5; TMOUT=1; (sleep 1.3; echo passed) &")).exit_code == 0
        async for chunk in sh.output():
            assert isinstance(chunk, OutputChunk)
            assert chunk.data == b"passed\n"
            break
        assert (await sh.run("echo $x")).stdout == "5\n"


def test_the_gauntlet_is_long_enough() -> None:
    names = [each.name for each in CASES]
    assert len(names) == len(set(names))
    assert len(names) >= 150
    for shell, least in (("bash", 150), ("dash", 100), ("ash", 100), ("zsh", 60)):
        assert sum(shell in each.shells for each in CASES) >= least
