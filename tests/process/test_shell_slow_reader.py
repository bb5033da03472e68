"""A command that has ended in its shell while its reader has not taken all: its end waits, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import ShellClosed
from holdfast.exec_api import CommandStream
from holdfast.runtime.local import LocalExec
from holdfast.runtime.shell.command import ShellCommand
from holdfast.runtime.shell.live import TRANSITIONS, LiveShell
from holdfast.types import CommandEnded, CommandSpec, OutputChunk, ShellSpec
from tests.support.signalling import send_signal

MakeExec = Callable[..., LocalExec]
SAFETY_NET = 60
MIB = 1024 * 1024
#: The bound of one stream: after it the pipe is not read any more.
KEPT = MIB
#: Printed then, and less than the pipe holds: the shell gets rid of it and answers.
MORE = 1000
PRINTED = KEPT + MORE


@pytest.fixture
async def api(make_exec: MakeExec) -> LocalExec:
    api = make_exec(retained_output_bytes_per_process=2 * KEPT, interrupt_grace_seconds=0.05)
    await api.open_shell(ShellSpec("sh", "bash"))
    await all_of(api.run_in_shell("sh", CommandSpec("before", "word=kept")))
    return api


async def all_of(stream: CommandStream) -> tuple[bytes, CommandEnded]:
    printed = b""
    async with asyncio.timeout(SAFETY_NET):
        async for event in stream:
            if isinstance(event, CommandEnded):
                return printed, event
            if isinstance(event, OutputChunk):
                printed += event.data
    raise AssertionError("it ended without its end")


async def stalled(api: LocalExec, tmp_path: Path) -> tuple[CommandStream, LiveShell, ShellCommand]:
    """A command in a shell that waits for the next one already, while its reader has taken nothing."""
    go = tmp_path / "go"
    os.mkfifo(go)
    flood = f"head -c {KEPT} /dev/zero; read -r _ <{go}; head -c {MORE} /dev/zero; (exit 7)"
    stream = api.run_in_shell("sh", CommandSpec("long", flood))
    shell = api.shells.shell("sh")
    command = shell._current
    assert command is not None
    async with asyncio.timeout(SAFETY_NET):
        while command.logs[0].end < KEPT:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.to_thread(go.write_text, "on\n")
        while command.ended is None or not shell._program.reads_line():  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert command.running
    return stream, shell, command


async def state_of(api: LocalExec) -> tuple[bytes, int, bool]:
    printed, ended = await all_of(api.run_in_shell("sh", CommandSpec("after", "echo $word; (exit 3)")))
    return printed, ended.exit_code, ended.shell_restarted


async def test_the_end_waits_for_the_reader(api: LocalExec, tmp_path: Path) -> None:
    stream, shell, _ = await stalled(api, tmp_path)
    assert (shell.info().state, shell.info().command_id) == ("running", "long")
    behind = api.run_in_shell("sh", CommandSpec("behind", "echo $word"))
    assert shell.info().queued == 1
    printed, ended = await all_of(stream)
    assert (len(printed), ended.exit_code, ended.shell_restarted) == (PRINTED, 7, False)
    assert (await all_of(behind))[0] == b"kept\n"


async def test_a_shell_that_has_answered_is_not_taken_for_one_that_cannot(api: LocalExec, tmp_path: Path) -> None:
    stream, shell, command = await stalled(api, tmp_path)
    # As the timer would, twice: the first check finds the shell waiting, the second still.
    for waiting in (None, command):
        if shell._silence is not None:
            shell._silence.cancel()
        shell._check_silence(0.2, waiting)
    printed, ended = await all_of(stream)
    assert (len(printed), ended.exit_code, ended.shell_restarted) == (PRINTED, 7, False)
    assert await state_of(api) == (b"kept\n", 3, False)


async def test_an_interrupt_that_comes_after_the_answer_does_not_reach_the_next_command(
    api: LocalExec, tmp_path: Path
) -> None:
    stream, shell, _ = await stalled(api, tmp_path)
    async with asyncio.timeout(SAFETY_NET):
        await api.interrupt_shell("sh")
    _, ended = await all_of(stream)
    assert (ended.exit_code, ended.shell_restarted) == (7, False)
    assert await state_of(api) == (b"kept\n", 3, False)
    assert shell.info().restarts == 0


async def test_a_reader_that_leaves_after_the_answer_leaves_the_shell_as_it_is(
    api: LocalExec, tmp_path: Path
) -> None:
    stream, shell, _ = await stalled(api, tmp_path)
    await stream.aclose()
    assert await state_of(api) == (b"kept\n", 3, False)
    assert shell.info().restarts == 0


async def test_a_shell_that_is_killed_after_the_answer_keeps_the_result(api: LocalExec, tmp_path: Path) -> None:
    stream, shell, _ = await stalled(api, tmp_path)
    behind = api.run_in_shell("sh", CommandSpec("behind", "echo $word"))
    send_signal(shell.info().pid, signal.SIGKILL)
    with pytest.raises(ShellClosed, match="killed by SIGKILL"):
        await all_of(behind)
    printed, ended = await all_of(stream)
    assert (len(printed), ended.exit_code, ended.shell_restarted) == (PRINTED, 7, False)
    assert (shell.info().state, shell.info().commands_run) == ("closed", 2)


def test_every_phase_is_reached_and_left_by_the_table() -> None:
    assert {after for phases in TRANSITIONS.values() for after in phases} == TRANSITIONS.keys() - {"starting"}
    assert [phase for phase, after in TRANSITIONS.items() if not after] == ["closed"]
