"""The end of a background process wakes its client, a silent command is ended, a kill for memory is reported."""

from __future__ import annotations

import asyncio
import sys

import pytest

from holdfast import Confinement, ExitStatus, Sandbox, UnifiedExec
from holdfast.client.exec_remote import Completed, ExecRemoteOptions
from holdfast.client.tools.unified_exec import ExecCommandEnd, UnifiedExecEvent
from holdfast.errors import InvalidParams, PermissionRefused, SilenceTimeout, TimeoutError
from holdfast.testing.sandbox_suite import TIMEOUTS

#: Takes 64 MB in pieces, which is more than the limit below.
HOG = "held = []\nfor _ in range(8): held.append(b'x' * (8 << 20))\nprint('all of it')"
LIMITED = Confinement(total_memory_bytes=32 << 20)


# --- wake-up ------------------------------------------------------------------------------------------------------


async def test_ended_yields_processes_in_the_order_of_their_ends(box: Sandbox) -> None:
    endings = box.ended()
    first = await box.start(["sh", "-c", "read line; exit 3"], stdin="open")
    second = await box.start(["cat"], stdin="open")
    await box.exec(["true"])  # its caller awaits it: not among them
    await second.close_stdin()
    assert (await anext(endings)).id == second.id
    await first.write("go\n")
    ended = await anext(endings)
    assert (ended.id, ended.info.exit_code, ended.info.running) == (first.id, 3, False)
    await endings.aclose()


async def test_ended_begins_at_its_call(box: Sandbox) -> None:
    before = await box.start(["true"])
    await before.wait()
    endings = box.ended()
    after = box.exec_remote(["sh", "-c", "exit 4"])
    assert [event.exit_code async for event in after if isinstance(event, Completed)] == [4]
    found = await anext(endings)
    assert (found.id, found.info.exit_code) == (after.id, 4)
    await endings.aclose()


async def test_on_exit_calls_back_once(box: Sandbox) -> None:
    statuses: list[ExitStatus] = []
    process = await box.start(["sh", "-c", "read line; kill -USR1 $$"], stdin="open")
    called = process.on_exit(statuses.append)
    assert not statuses
    await process.write("go\n")
    await called
    await process.on_exit(statuses.append)  # it has ended: at once
    assert statuses == [ExitStatus(138, "SIGUSR1")] * 2


async def test_on_exit_of_a_streamed_command_awaits_its_callback(box: Sandbox) -> None:
    done = asyncio.Event()

    async def callback(status: ExitStatus) -> None:
        assert status.exit_code == 5
        done.set()

    await box.exec_remote(["sh", "-c", "exit 5"]).on_exit(callback)
    assert done.is_set()


async def test_the_end_of_a_session_of_a_model_is_an_event(box: Sandbox) -> None:
    over: asyncio.Future[ExecCommandEnd] = asyncio.get_running_loop().create_future()

    def on_event(event: UnifiedExecEvent) -> None:
        if isinstance(event, ExecCommandEnd):
            over.set_result(event)

    async with UnifiedExec(box, on_event) as tools:
        output = await tools.exec_command("read line; exit 6", tty=True, yield_time_ms=250)
        assert output.session_id is not None
        await tools.sessions()[output.session_id].write("go\n")
        assert (await over).exit_code == 6


# --- silence ------------------------------------------------------------------------------------------------------


async def test_exec_ends_a_silent_command_with_its_output(box: Sandbox) -> None:
    for seconds in TIMEOUTS:
        with pytest.raises(SilenceTimeout, match=f"printed nothing for {seconds:g} s") as raised:
            await box.exec(["sh", "-c", "echo begin; sleep 1000"], silence=seconds)
        if raised.value.stdout == "begin\n":
            break
    assert raised.value.stdout == "begin\n"
    assert isinstance(raised.value, TimeoutError)


async def test_output_keeps_a_command_alive(box: Sandbox) -> None:
    # Prints for about a second, never pausing longer than a tenth of its silence.
    result = await box.exec(["sh", "-c", "for i in 1 2 3 4 5 6; do echo $i; sleep 0.2; done"], silence=2)
    assert result.stdout == "1\n2\n3\n4\n5\n6\n"


async def test_a_silent_process_and_stream_name_the_reason(box: Sandbox) -> None:
    process = await box.start(["sleep", "1000"], silence=0.1)
    assert await process.wait() == ExitStatus(137, "SIGKILL", silent=True)
    assert (await process.describe()).silent
    with pytest.raises(SilenceTimeout):
        async for _ in box.exec_remote(["sleep", "1000"], ExecRemoteOptions(silence=0.1)):
            pass


async def test_a_silent_command_of_a_shell_is_ended_and_the_shell_continues(box: Sandbox) -> None:
    async with await box.shell("sh") as shell:
        result = await shell.run("sleep 1000", silence=0.2)
        assert (result.exit_code, result.timed_out, result.silent) == (124, True, True)
        after = await shell.run("echo still here", silence=60)
        assert (after.stdout, after.silent) == ("still here\n", False)


async def test_a_silence_of_no_time_is_refused(box: Sandbox) -> None:
    with pytest.raises(InvalidParams, match="silence"):
        await box.exec(["true"], silence=0)


# --- out of memory ------------------------------------------------------------------------------------------------


async def test_a_kill_for_memory_is_in_the_exit_status(box: Sandbox) -> None:
    try:
        process = await box.start([sys.executable, "-c", HOG], confinement=LIMITED)
    except PermissionRefused as error:
        pytest.skip(f"memory cannot be limited here: {error}")
    status = await process.wait()
    assert status == ExitStatus(137, "SIGKILL", oom=True)
    assert (await process.describe()).oom


async def test_a_kill_for_memory_in_a_shell_is_in_the_result(box: Sandbox) -> None:
    try:
        shell = await box.shell("sh", confinement=LIMITED)
    except PermissionRefused as error:
        pytest.skip(f"memory cannot be limited here: {error}")
    async with shell:
        result = await shell.run(f'{sys.executable} -c "{HOG}"; exit $?')
        assert (result.exit_code, result.oom) == (137, True)


async def test_a_kill_by_a_person_is_not_for_memory(box: Sandbox) -> None:
    assert not (await (await box.start(["sh", "-c", "kill -9 $$"])).wait()).oom
    assert not (await box.exec(["sh", "-c", "exit 137"])).oom
