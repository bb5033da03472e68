"""How a process ends: its exit code, signals, and that nothing of its tree is left."""

from __future__ import annotations

import asyncio
import sys

import pytest

from holdfast import ExitStatus, Sandbox
from holdfast.errors import InvalidRequest, UnknownProcess, UnknownSignal
from tests.contract.ways import Starter, kill_quietly, line_of, printed
from tests.support.servers import is_alive


async def test_exit_codes(starter: Starter) -> None:
    for code in (0, 1, 42, 126, 127, 255):
        process = await starter.sh(f"exit {code}")
        assert await process.wait() == ExitStatus(code)
        info = await process.describe()
        assert (info.exit_code, info.signal, info.running) == (code, None, False)
        assert info.exited_at is not None


async def test_exit_codes_by_signal(starter: Starter) -> None:
    for name, number in (("HUP", 1), ("INT", 2), ("KILL", 9), ("USR1", 10), ("SEGV", 11), ("TERM", 15)):
        process = await starter.sh(f"kill -{name} $$; exit 0")
        assert await process.wait() == ExitStatus(128 + number, f"SIG{name}")
        info = await process.describe()
        assert (info.exit_code, info.signal) == (128 + number, f"SIG{name}")


async def test_a_signal_reaches_the_process_by_any_of_its_names(starter: Starter) -> None:
    script = "trap 'echo caught; exit 7' INT; echo ready; while :; do sleep 0.01; done"
    for name in ("INT", "SIGINT", "interrupt", "2"):
        process = await starter.sh(script)
        await process.wait_for_output("ready")
        await process.signal(name)
        assert (await process.wait()).exit_code == 7
        assert starter.lines(b"caught\n") in await printed(process)


async def test_a_signal_by_number_and_to_one_that_ended(box: Sandbox) -> None:
    process = await box.start(["sleep", "1000"])
    await process.signal(15)
    assert await process.wait() == ExitStatus(143, "SIGTERM")
    with pytest.raises(InvalidRequest, match=f"{process.id}.*ended"):
        await process.signal("TERM")
    with pytest.raises(UnknownSignal, match="'BOGUS'"):
        await process.signal("BOGUS")


async def test_a_child_in_a_group_of_its_own_gets_no_signal_of_ours(box: Sandbox) -> None:
    process = await box.start(["sh", "-c", "trap '' INT; setsid sleep 1000 & echo pid: $!; echo ready; wait"])
    child = int(await line_of(process, "pid: "))
    await process.signal("INT")
    assert (await process.describe()).running
    assert is_alive(child)
    assert await process.terminate(force=True)
    assert not is_alive(child)


# --- trees --------------------------------------------------------------------------------------------------------

#: Ways to leave the process tree. Each prints the pid of the process that tries.
ESCAPES = {
    "plain child": "sleep 1000 & echo pid: $!; wait",
    "setsid": "setsid sh -c 'echo pid: $$; exec sleep 1000' & wait",
    "nohup": "nohup sleep 1000 > /dev/null 2>&1 & echo pid: $!; wait",
    "double fork": "(setsid sh -c 'echo pid: $$; exec sleep 1000' &) ; sleep 1000",
    "ignores TERM": "sh -c 'trap \"\" TERM HUP INT; echo pid: $$; while :; do sleep 1000; done' & wait",
    "leader ignores TERM": "trap '' TERM; echo pid: $$; while :; do sleep 1000; done",
    "empty environment": "(env -i setsid sh -c 'echo pid: $$; exec sleep 1000' &) ; sleep 1000",
    "stopped": "setsid sh -c 'echo pid: $$; kill -STOP $$' & wait",
    "closed streams": "(setsid sh -c 'echo pid: $$; exec sleep 1000 <&- >&- 2>&-' &) ; sleep 1000",
    # The leader reads a line of the child first: a terminal that has lost its leader takes no more output.
    "leader gone": "exec 3>&1; { setsid sh -c 'echo pid: $$ >&3; echo; exec sleep 999 >&3' & } | read x; exit 0",
}


@pytest.mark.parametrize("force", [True, False], ids=["force", "grace"])
async def test_nothing_survives_a_kill(starter: Starter, force: bool) -> None:
    processes = {escape: await starter.sh(script) for escape, script in ESCAPES.items()}
    children = {escape: int(await line_of(process, "pid: ")) for escape, process in processes.items()}
    try:
        await asyncio.gather(*(process.terminate(force=force, grace=0.05) for process in processes.values()))
        assert [escape for escape, pid in children.items() if is_alive(pid)] == []
        assert [escape for escape, process in processes.items() if is_alive(process.pid)] == []
        for process in processes.values():
            info = await process.describe()
            assert (info.running, info.closed) == (False, True)
    finally:
        for pid in children.values():
            kill_quietly(pid)


async def test_the_children_of_an_ended_leader_are_killed_too(box: Sandbox) -> None:
    process = await box.start(["sh", "-c", "setsid sleep 1000 & echo pid: $!; exit 0"])
    child = int(await line_of(process, "pid: "))
    assert (await process.wait()).exit_code == 0
    assert not await process.terminate(force=True), "the leader had ended"
    assert not is_alive(child)


async def test_a_tree_that_keeps_forking_is_killed(box: Sandbox) -> None:
    fork = (
        "import os, time\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        time.sleep(1000)\n"
        "    time.sleep(0.001)\n"
    )
    process = await box.start([sys.executable, "-I", "-S", "-c", fork])
    await process.wait_for_output("ready")
    await process.terminate(force=True)
    # A surviving process would hold the streams open, and this would not end.
    assert await printed(process) == b"ready\n"
    assert (await process.describe()).closed


async def test_grace_lets_a_process_finish(starter: Starter) -> None:
    process = await starter.sh("trap 'echo saved; exit 5' TERM; echo ready; while :; do sleep 0.01; done")
    await process.wait_for_output("ready")
    assert await process.terminate(grace=60)
    assert await process.wait() == ExitStatus(5)
    assert starter.lines(b"saved\n") in await printed(process)


async def test_terminate_tells_whether_it_ran_and_may_be_repeated(box: Sandbox) -> None:
    process = await box.start(["sleep", "1000"])
    assert await process.terminate(force=True)
    assert not await process.terminate(force=True)
    assert await process.wait() == ExitStatus(137, "SIGKILL")


async def test_a_kill_spares_the_neighbours(box: Sandbox) -> None:
    first, second = await box.start(["sleep", "1000"]), await box.start(["sleep", "1000"])
    await first.terminate(force=True)
    assert (await second.describe()).running


async def test_an_ended_process_can_be_forgotten_and_a_running_one_not(box: Sandbox) -> None:
    process = await box.start(["cat"], id="short-lived", stdin="open")
    with pytest.raises(InvalidRequest, match=r"short-lived.*still runs"):
        await process.forget()
    await process.close_stdin()
    await process.wait()
    await process.forget()
    with pytest.raises(UnknownProcess, match="short-lived"):
        await box.process("short-lived")
    again = await box.start(["true"], id="short-lived")
    assert (await again.wait()).exit_code == 0
