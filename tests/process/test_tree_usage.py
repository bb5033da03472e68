"""Resource usage of processes: all are counted, however they left the tree; and the state of the foreground."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import Sandbox
from holdfast.client.terminal import Terminal
from holdfast.runtime.confine.features import detect_features
from holdfast.runtime.local import LocalExec
from holdfast.runtime.tree import usage as tree_usage
from holdfast.runtime.tree.process_table import read_mark
from holdfast.runtime.tree.usage import (
    SLICE_SECONDS,
    STRAY_SECONDS,
    UsageSampler,
    cgroup_cpu_seconds,
    cgroup_memory,
    counter,
    parse_stat,
)
from holdfast.types import CommandSpec, Confinement, OutputChunk, ProcessSpec, ProcessUsage, ShellSpec
from tests.support.signalling import send_signal

OFFERED = {feature.word.partition(":")[0]: feature.missing for feature in detect_features()}
needs_bubblewrap = pytest.mark.skipif(bool(OFFERED["bubblewrap"]), reason=f"no jail: {OFFERED['bubblewrap']}")
MakeExec = Callable[..., LocalExec]
SAFETY_NET = 60.0


async def words(box: LocalExec, count: int, process_id: str = "p") -> list[bytes]:
    """The first words that a process and its children print."""
    seen = b""
    events = box.events(process_id)
    async with asyncio.timeout(SAFETY_NET):
        while len(seen.split()) < count or not seen.endswith(b"\n"):
            event = await anext(events)
            if isinstance(event, OutputChunk):
                seen += event.data
    await events.aclose()
    return seen.split()


async def usage(box: LocalExec, process_id: str = "p") -> ProcessUsage:
    (found,) = (await box.usage([process_id])).usages
    return found


async def until(box: LocalExec, holds: Callable[[ProcessUsage], bool], process_id: str = "p") -> ProcessUsage:
    """No event reports that a process has been started or scheduled: poll, and give others the time for it."""
    async with asyncio.timeout(SAFETY_NET):
        while not holds(found := await usage(box, process_id)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


#: Each prints the pid of every process that it is, and then holds out.
TREES = {
    "children and grandchildren": (
        "sh -c 'echo $$; sh -c \"echo \\$\\$; exec sleep 1000\" & wait' & echo $$; wait",
        3,
    ),
    "setsid": ("setsid sh -c 'echo $$; exec sleep 1000' & echo $$; wait", 2),
    "double fork": ("(setsid sh -c 'echo $$; exec sleep 1000' &); echo $$; exec sleep 1000", 2),
    "clean environment": ("(env -i setsid sh -c 'echo $$; exec sleep 1000' &); echo $$; exec sleep 1000", 2),
    "leader gone": ("(setsid sh -c 'echo $$; exec sleep 1000' >&2 &); exit 0", 1),
}


@pytest.mark.parametrize("cgroup", ["auto", "off"])
@pytest.mark.parametrize(("script", "count"), TREES.values(), ids=TREES.keys())
async def test_pid_tree_enumeration(make_exec: MakeExec, script: str, count: int, cgroup: str) -> None:
    box = make_exec(cgroup=cgroup)
    await box.start(ProcessSpec("p", ("sh", "-c", script)))
    pids = sorted(map(int, await words(box, count)))
    if script.endswith("exit 0"):
        await box.wait("p")
    found = await usage(box)
    assert list(found.pids) == pids
    assert (found.process_count, found.running) == (count, not script.endswith("exit 0"))
    assert found.thread_count == count
    assert found.memory_bytes > 0
    await box.terminate("p", force=True)
    assert (await usage(box)).process_count == 0


async def test_one_look_tells_each_its_own_and_leaves_out_who_is_not_there(box: LocalExec) -> None:
    for name in ("one", "two"):
        await box.start(ProcessSpec(name, ("sh", "-c", TREES["double fork"][0])))
    pids = {name: sorted(map(int, await words(box, 2, name))) for name in ("one", "two")}
    sample = await box.usage(["two", "nobody", "one", "two"])
    assert [each.process_id for each in sample.usages] == ["two", "one"]
    assert {each.process_id: list(each.pids) for each in sample.usages} == pids


async def test_cpu_time_and_what_was_printed_are_counted(box: LocalExec) -> None:
    script = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; echo done; exec sleep 1000"
    await box.start(ProcessSpec("p", ("sh", "-c", f"sh -c '{script}' & wait")))
    await words(box, 1)
    found = await usage(box)
    assert found.cpu_seconds > 0
    assert found.printed_bytes == len("done\n")
    assert found.foreground is None
    assert found.background_seconds == found.longest_running_seconds > 0


async def test_the_time_of_children_that_have_ended_stays_counted(box: LocalExec) -> None:
    script = "sh -c 'i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done'; echo done; cat"
    await box.start(ProcessSpec("p", ("sh", "-c", script), pipe_stdin=True))
    await words(box, 1)
    found = await until(box, lambda usage: usage.process_count == 2)
    assert found.cpu_seconds > 0


async def test_bytes_written_to_storage_are_those_that_the_kernel_counts(box: LocalExec, tmp_path: Path) -> None:
    script = f"dd if=/dev/zero of={tmp_path}/file bs=64k count=16 conv=fsync 2>/dev/null; echo $$; exec sleep 1000"
    await box.start(ProcessSpec("p", ("sh", "-c", script)))
    (pid,) = await words(box, 1)
    counted = counter(read(f"/proc/{int(pid)}/io"), b"write_bytes:")
    if counted == 0:
        pytest.skip(f"{tmp_path} is no storage: a file system in memory writes nothing")
    assert (await usage(box)).written_bytes == counted >= 1024 * 1024


async def start_inside_a_cgroup(box: LocalExec, answer: str) -> None:
    """One that answers each line; it has answered the first in its cgroup, and so has used CPU time there."""
    if not any(means.startswith("cgroup.kill") for means in (await box.status()).containment):
        pytest.skip("needs a cgroup of version 2 that can be written: only such a one counts CPU time")
    script = f"while read line; do {answer}; echo answered; done"
    await box.start(ProcessSpec("p", ("sh", "-c", script), pipe_stdin=True))
    tree = box.processes.process("p").tree
    async with asyncio.timeout(SAFETY_NET):
        while tree.cgroup is None or not tree.cgroup.pids():  # noqa: ASYNC110 - it is moved beside the loop
            await asyncio.sleep(0.01)
    await box.write("p", b"\n")
    await words(box, 1)


async def test_who_read_or_wrote_and_slept_since_stays_counted(box: LocalExec, tmp_path: Path) -> None:
    """However little CPU time it took, and though the files of a process that sleeps are not read again."""
    await start_inside_a_cgroup(box, f"echo more >>{tmp_path}/file")
    before = await until(box, lambda usage: usage.process_count == 1)
    if before.written_bytes == 0:
        pytest.skip(f"{tmp_path} is no storage: a file system in memory writes nothing")
    for turn in range(2, 5):
        (tmp_path / "file").unlink()  # a page that is waiting to be written is not counted again
        await box.write("p", b"\n")
        await words(box, turn)
        for _ in range(3):
            found = await usage(box)
            assert found.written_bytes == counter(read(f"/proc/{found.pids[0]}/io"), b"write_bytes:")
        assert found.written_bytes > before.written_bytes
        before = found


async def test_the_files_of_who_did_not_run_are_read_once(box: LocalExec, monkeypatch: pytest.MonkeyPatch) -> None:
    await start_inside_a_cgroup(box, ":")
    (pid,) = (await usage(box)).pids
    seen: list[str] = []
    starts = b""
    kernel = tree_usage._read

    def reading(path: str) -> bytes:
        seen.append(path)
        text = kernel(path)
        if starts and path == f"/proc/{pid}/stat":
            text = text.replace(parse_stat(text).started, starts)
        return text

    monkeypatch.setattr(tree_usage, "_read", reading)
    async with asyncio.timeout(SAFETY_NET):
        while True:  # it may have only just gone to sleep
            seen.clear()
            await usage(box)
            if f"/proc/{pid}/io" not in seen:
                break
    assert f"/proc/{pid}/stat" in seen
    starts = b"99"  # another process has the number now
    await usage(box)
    assert f"/proc/{pid}/io" in seen


async def test_a_shell_and_its_commands(box: LocalExec) -> None:
    await box.open_shell(ShellSpec("s"))
    idle = await usage(box, "s")
    assert (idle.process_count, idle.foreground, idle.running) == (1, None, True)
    async for _ in box.run_in_shell("s", CommandSpec("c1", "sleep 1000 & echo hello")):
        pass
    jobs = await until(box, lambda usage: usage.process_count == 2, "s")
    assert (jobs.foreground, jobs.printed_bytes) == (None, 6)
    running = box.run_in_shell("s", CommandSpec("c2", "echo more; sleep 999"))
    busy = await until(box, lambda usage: usage.foreground == "sleep" and usage.printed_bytes == 11, "s")
    assert busy.process_count == 3
    await running.aclose()
    after = await until(box, lambda usage: usage.foreground is None, "s")
    assert after.printed_bytes >= 11
    await box.close_shell("s")
    assert (await usage(box, "s")).process_count == 0


async def test_a_loop_of_a_shell_s_own_is_in_its_foreground(box: LocalExec) -> None:
    await box.open_shell(ShellSpec("s", shell="bash"))
    running = box.run_in_shell("s", CommandSpec("c", "while :; do :; done"))
    busy = await until(box, lambda usage: usage.cpu_seconds > 0.05, "s")
    assert (busy.foreground, busy.process_count) == ("bash", 1)
    assert busy.foreground_seconds > 0
    await running.aclose()


@pytest.fixture
async def terminal(box: LocalExec, tmp_path: Path) -> Terminal:
    home = tmp_path / "home"
    home.mkdir()
    return await Sandbox(box).terminal("bash", id="t", env={"HOME": str(home), "PATH": os.environ["PATH"]})


async def test_a_terminal_s_foreground_and_who_waits_for_input(box: LocalExec, terminal: Terminal) -> None:
    at_prompt = await usage(box, "t")
    assert (at_prompt.foreground, at_prompt.process_count) == (None, 1)
    assert at_prompt.printed_bytes > 0
    await terminal.send("sleep 1000 & sleep 999\n")
    # The clock of process starts ticks a hundred times a second: a check can come before it does.
    busy = await until(box, lambda usage: usage.foreground == "sleep" and usage.background_seconds > 0, "t")
    assert (busy.process_count, busy.awaiting_input in (False, None)) == (3, True)
    await terminal.send_keys("C-c")
    await terminal.wait_until_idle(SAFETY_NET)
    await terminal.send("cat\n")
    asks = await until(box, lambda usage: usage.foreground == "cat" and usage.awaiting_input is not False, "t")
    assert asks.running
    await terminal.close("force")


async def test_a_loop_of_builtins_in_a_terminal_is_timed(box: LocalExec, terminal: Terminal) -> None:
    await terminal.send("while :; do :; done\n")
    busy = await until(box, lambda usage: usage.foreground is not None and usage.cpu_seconds > 0.05, "t")
    assert (busy.foreground, busy.process_count) == ("bash", 1)
    assert busy.foreground_seconds > 0
    await terminal.close("force")


@needs_bubblewrap
async def test_a_jail_around_a_shell_is_no_command_of_its(box: LocalExec, tmp_path: Path) -> None:
    confinement = Confinement(mode="bubblewrap", writable=(str(tmp_path),), network="none")
    terminal = await Sandbox(box).terminal("bash", id="t", cwd=str(tmp_path), confinement=confinement)
    await terminal.wait_until_idle(SAFETY_NET)
    idle = await usage(box, "t")
    assert (idle.foreground, idle.foreground_seconds, idle.background_seconds) == (None, 0.0, 0.0)
    assert idle.process_count == 3
    await terminal.send("while :; do :; done\n")
    busy = await until(box, lambda usage: usage.foreground is not None, "t")
    assert (busy.foreground, busy.background_seconds) == ("bash", 0.0)
    await terminal.send_keys("C-c")
    await terminal.wait_until_idle(SAFETY_NET)
    await terminal.send("sleep 1000 & cat\n")
    asks = await until(box, lambda usage: usage.foreground == "cat" and usage.background_seconds > 0, "t")
    assert asks.process_count == 5
    await terminal.close("force")
    await box.open_shell(ShellSpec("s", cwd=str(tmp_path), confinement=confinement))
    shell = await usage(box, "s")
    assert (shell.foreground, shell.background_seconds) == (None, 0.0)
    await box.close_shell("s")


async def test_what_a_forgotten_process_left_is_a_stray(make_exec: MakeExec, tmp_path: Path) -> None:
    """Only of our adopted children: `LocalExec` does not adopt in a test, so the parent is queried in its stead."""
    box = make_exec(cgroup="off")
    await box.start(ProcessSpec("p", ("sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!")))
    (text,) = await words(box, 1)
    await box.wait("p")
    left = (await usage(box)).pids
    assert left == (int(text),)
    mark = read_mark(left[0])
    parent = parse_stat(read(f"/proc/{left[0]}/stat")).parent
    assert mark is not None
    sampler = UsageSampler(keeper=parent)

    async def strays(known: set[int]) -> tuple[int, ...]:
        return (await sampler.sample([], leaders=lambda: (), known_marks=lambda: known)).strays

    try:
        async with asyncio.timeout(SAFETY_NET):
            while left[0] not in await strays(set()):  # noqa: ASYNC110
                await asyncio.sleep(STRAY_SECONDS / 20)
        assert left[0] not in await strays({mark})
    finally:
        send_signal(left[0], signal.SIGKILL)


async def test_the_loop_runs_between_the_slices_of_a_look(box: LocalExec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one slice is as short as can be, the loop has a turn at every process."""
    monkeypatch.setattr("holdfast.runtime.tree.usage.SLICE_SECONDS", 0.0)
    assert SLICE_SECONDS <= 0.005
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await box.start(ProcessSpec("p", ("sleep", "1000")))
    processes = sum(name.isdecimal() for name in os.listdir("/proc"))
    await usage(box)
    counting.cancel()
    assert turns > processes / 2


def test_a_name_may_hold_parentheses() -> None:
    fields = "S 7 8 9 0 -1 4194304 0 0 0 0 10 20 30 40 20 0 3 0 12345 1000 77 18446744073709551615 1"
    stat = parse_stat(f"5 (a) S (b) {fields}".encode())
    assert (stat.name, stat.parent, stat.group, stat.session) == ("a) S (b", 7, 8, 9)
    assert (stat.cpu, stat.threads, stat.started, stat.resident, stat.dead) == (100, 3, b"12345", 77, False)


def test_the_files_of_a_cgroup(tmp_path: Path) -> None:
    assert (cgroup_cpu_seconds(str(tmp_path)), cgroup_memory(str(tmp_path))) == (0.0, 0)
    (tmp_path / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 300\n")
    assert (cgroup_cpu_seconds(str(tmp_path)), cgroup_memory(str(tmp_path))) == (2.5, 700)


def test_a_counter_is_found_by_its_whole_name_or_is_nothing() -> None:
    text = b"rchar: 1\ncancelled_write_bytes: 7\nwrite_bytes: 22\nlast 3\n"
    assert counter(text, b"rchar:") == 1
    assert counter(text, b"write_bytes:") == 22
    assert counter(text + b"more 1", b"more ") == 0  # there may have been another digit
    assert counter(text, b"char:") == counter(text, b"missing ") == counter(b"", b"rchar:") == 0
