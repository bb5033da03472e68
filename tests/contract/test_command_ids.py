"""`exec_remote` with an id finds its command again; failed commands raise; results have a short `repr`."""

from __future__ import annotations

import asyncio
import sys

import pytest

from holdfast import CommandFailed, Completed, ExecRemoteOptions, ExecResult, ProcessError, Sandbox, StdoutChunk
from holdfast.errors import DuplicateProcess
from tests.support.servers import RunningServer


async def test_a_restarted_script_finds_its_command_by_its_id(box: Sandbox) -> None:
    argv = ["sh", "-c", "echo $$; read x; echo $x; exit 3"]
    options = ExecRemoteOptions(id="named", stdin_open=True)
    first = box.exec_remote(argv, options)
    pid = await anext(first)
    assert isinstance(pid, StdoutChunk)
    again = box.exec_remote(argv, options)
    assert await anext(again) == pid
    await again.write_stdin("on\n")
    ends = [[event async for event in each][-1] for each in (first, again)]
    assert ends == 2 * [Completed(3, f"{pid.data}on\n", "")]
    # It has ended, and is still there to be read; nothing is started and no input is written.
    result = await box.exec_remote(argv, ExecRemoteOptions(id="named", input="other"), stream=False)
    assert (result.returncode, result.stdout) == (3, f"{pid.data}on\n")


async def test_an_id_that_another_command_has_is_refused_and_the_other_goes_on(box: Sandbox) -> None:
    other = await box.start(["sleep", "1000"], id="taken")
    with pytest.raises(DuplicateProcess, match="taken"):
        await anext(box.exec_remote(["true"], ExecRemoteOptions(id="taken")))
    with pytest.raises(DuplicateProcess, match="taken"):
        await box.exec_remote(["true"], ExecRemoteOptions(id="taken"), stream=False)
    assert (await other.describe()).running


async def test_the_repr_of_a_result_is_bounded(box: Sandbox) -> None:
    big = ["sh", "-c", "yes | head -c 3000000"]
    async for event in box.exec_remote(big):
        completed = event
    assert isinstance(completed, Completed)
    result = await box.exec(big)
    assert (len(completed.stdout), len(result.stdout), completed.truncated) == (3_000_000, 3_000_000, False)
    for each in (completed, result):
        assert len(repr(each)) < 20_000
        assert "2998000 more" in repr(each)


#: Prints the pid of its command, then waits for the command to end.
SCRIPT = """
import asyncio, sys, holdfast
async def main():
    async with holdfast.connect(sys.argv[1]) as box:
        options = holdfast.ExecRemoteOptions(id="of-a-script")
        async for event in box.exec_remote(["sh", "-c", "echo $$; exec sleep 1000"], options):
            print(event.data, end="", flush=True)
asyncio.run(main())
"""


async def test_a_script_that_was_killed_finds_its_command_again(server: RunningServer) -> None:
    pids = []
    for _ in range(2):
        script = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SCRIPT, server.address("unix"), stdout=asyncio.subprocess.PIPE
        )
        assert script.stdout is not None
        pids.append(await script.stdout.readline())
        script.kill()
        await script.wait()
    assert pids[0] == pids[1] != b""


async def test_a_checked_command_that_fails_raises_its_result(box: Sandbox) -> None:
    assert (await box.exec(["echo", "fine"], check=True)).stdout == "fine\n"
    with pytest.raises(CommandFailed, match=r"exit code 3 from sh -c .*: the reason") as caught:
        await box.exec(["sh", "-c", "echo out; echo first >&2; echo the reason >&2; exit 3"], check=True)
    error = caught.value
    assert (error.exit_code, error.stdout, error.stderr) == (3, "out\n", "first\nthe reason\n")
    assert isinstance(error.result, ExecResult)
    assert error.result.stdout_bytes == b"out\n"
    assert isinstance(error, ProcessError)
    with pytest.raises(CommandFailed, match="exit code 127"):
        await box.exec(["no-such-program"], check=True, start_errors="result")
