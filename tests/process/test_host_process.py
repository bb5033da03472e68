"""Children of the host that make or reach a sandbox: their input and output, and their end with the caller."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from holdfast.errors import CommandNotFound, ConnectionLost
from holdfast.sandboxes.host_command import run_host_command
from holdfast.sandboxes.host_process import HostProcess

#: More than a pipe holds.
LARGE: Final = bytes(range(1, 128)) * 10_000
#: asyncio.run cancels all tasks at its end, some turns after the command was requested.
ENDS_EARLY: Final = """
import asyncio
from holdfast.sandboxes.host_command import run_host_command

async def main(turns):
    running = asyncio.ensure_future(run_host_command(["sleep", "1000"]))
    for _ in range(turns):
        await asyncio.sleep(0)

for turns in range(12):
    asyncio.run(main(turns))
print("ended")
"""


async def test_input_and_output_are_whole() -> None:
    done = await run_host_command(["sh", "-c", "tee /dev/stderr"], stdin=LARGE, kept_bytes=2 * len(LARGE))
    assert (done.exit_code, done.stdout, done.stderr) == (0, LARGE.decode(), LARGE[-1024 * 1024 :].decode())


async def test_a_file_is_its_input_and_the_end_of_its_output_is_kept(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(LARGE)
    done = await run_host_command(["sh", "-c", "cat; exit 3"], stdin=tmp_path / "input", kept_bytes=100)
    assert (done.exit_code, done.stdout) == (3, LARGE[-100:].decode())


async def test_a_command_may_end_without_reading_its_input() -> None:
    done = await run_host_command(["sh", "-c", "exec <&-; echo done"], stdin=LARGE)
    assert (done.exit_code, done.stdout) == (0, "done\n")


async def test_a_missing_program_is_named() -> None:
    with pytest.raises(CommandNotFound, match="no-such-program: No such file"):
        await run_host_command(["no-such-program"])


async def test_a_cancelled_command_is_killed_with_its_children(tmp_path: Path) -> None:
    held = tmp_path / "held"
    os.mkfifo(held)
    # The shell and its child have the pipe open for writing.
    script = 'exec >"$0"; sleep 1000 & echo started; wait'
    running = asyncio.create_task(run_host_command(["sh", "-c", script, str(held)]))
    with await asyncio.to_thread(held.open) as reader:
        assert await asyncio.to_thread(reader.readline) == "started\n"
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await asyncio.to_thread(reader.read) == ""


async def test_a_command_that_takes_too_long_is_named() -> None:
    with pytest.raises(ConnectionLost, match=r"sleep 1000 …: no end in 0\.01 s"):
        await run_host_command(["sleep", "1000"], seconds=0.01)


async def test_a_signal_is_its_exit_code() -> None:
    async with HostProcess(["sleep", "1000"]) as process:
        assert process.returncode is None
        process.kill()
        assert await process.wait() == -signal.SIGKILL
    assert process.returncode == -signal.SIGKILL


def test_a_program_ends_whose_commands_are_just_being_started() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS_EARLY], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
