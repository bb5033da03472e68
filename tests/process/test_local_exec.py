"""The exec interface in this process: ids, repeated starts, retention, terminals, bounds, and the end of it all."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import ExecServerConfig
from holdfast.errors import (
    CommandNotFound,
    DuplicateProcess,
    Forbidden,
    InvalidParams,
    InvalidRequest,
    LimitReached,
    NotATerminal,
    ShuttingDown,
    TimeoutError,
    UnknownProcess,
    UnknownSignal,
)
from holdfast.exec_api import EventStream
from holdfast.runtime.local import LocalExec
from holdfast.runtime.process.process import ManagedProcess
from holdfast.runtime.tree.process_table import ProcessTable, read_mark
from holdfast.types import (
    Closed,
    Exited,
    ExitStatus,
    Limits,
    OutputChunk,
    OutputGap,
    ProcessEvent,
    ProcessSpec,
    TerminalSize,
)

MakeExec = Callable[..., LocalExec]
SAFETY_NET = 60
#: Through the launcher a start takes a while, and others can come in between.
SLOW = Limits(core_bytes=0)


def sh(script: str, process_id: str = "p", **fields: Any) -> ProcessSpec:
    return ProcessSpec(process_id, ("sh", "-c", script), **fields)


async def rest(events: EventStream) -> list[ProcessEvent]:
    async with asyncio.timeout(SAFETY_NET):
        return [event async for event in events]


async def until(events: EventStream, text: bytes) -> bytes:
    seen = b""
    async with asyncio.timeout(SAFETY_NET):
        while text not in seen:
            event = await anext(events)
            if isinstance(event, OutputChunk):
                seen += event.data
    return seen


def survivors(marks: set[int]) -> list[int]:
    """Living processes with one of these marks."""
    return [pid for pid, entry in ProcessTable.read().entries.items() if not entry.dead and read_mark(pid) in marks]


def write_line(directory: str, name: str) -> None:
    Path(directory, name).write_text("\n")


def exists(path: str) -> bool:
    return Path(path).exists()


def children() -> set[int]:
    """Our children, ended ones too. The tests of a session may share a server, which is one."""
    return set(ProcessTable.read().children.get(os.getpid(), ()))


# --- ids and starts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [None, SLOW])
async def test_the_same_start_id_starts_once(box: LocalExec, limits: Limits | None) -> None:
    spec = sh("echo once", start_id="attempt", limits=limits)
    first, second = await asyncio.gather(box.start(spec), box.start(spec))
    third = await box.start(spec)
    assert first.pid == second.pid == third.pid
    assert len(await box.list()) == 1
    await rest(box.events("p"))
    assert (await box.start(spec)).exit_code == 0
    assert (await box.snapshot("p")).stdout == b"once\n"


@pytest.mark.parametrize("limits", [None, SLOW])
@pytest.mark.parametrize("start_id", [None, "other"])
async def test_another_start_of_the_same_id_is_refused(
    box: LocalExec, start_id: str | None, limits: Limits | None
) -> None:
    await box.start(sh("read x", start_id="attempt", pipe_stdin=True))
    with pytest.raises(DuplicateProcess, match="'p'"):
        await box.start(sh("echo twice", start_id=start_id, limits=limits))
    assert (await box.describe("p")).argv == ("sh", "-c", "read x")


async def test_a_start_without_a_name_is_never_a_repetition(box: LocalExec) -> None:
    results = await asyncio.gather(*(box.start(sh("true", limits=SLOW)) for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(result, DuplicateProcess) for result in results) == 4


async def test_attempts_that_wait_for_a_failing_one_try_for_themselves(box: LocalExec) -> None:
    failing = ProcessSpec("p", ("no-such-program",), start_id="same", limits=SLOW)
    late = ProcessSpec("p", ("/no/such/program",), start_id="same", limits=SLOW)
    results = await asyncio.gather(*(box.start(late) for _ in range(4)), return_exceptions=True)
    assert [type(result) for result in results] == [CommandNotFound] * 4
    with pytest.raises(CommandNotFound):
        await box.start(failing)
    assert (await box.start(sh("exit 0", start_id="same"))).pid > 0


async def test_a_caller_that_gives_up_and_comes_back_finds_its_process(box: LocalExec) -> None:
    """A connection breaks while a start is under way; the client sends it again. It must not run twice."""
    spec = sh("echo once; read x", start_id="attempt", limits=SLOW, pipe_stdin=True)
    gone = asyncio.ensure_future(box.start(spec))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gone.cancel()
    first, second = await asyncio.gather(box.start(spec), box.start(spec))
    assert first.pid == second.pid
    assert gone.cancelled()
    marks = {box.process("p").tree._mark}
    assert survivors(marks) == [first.pid]
    assert len(await box.list()) == 1


@pytest.mark.parametrize("process_id", ["", "x" * 257])
async def test_an_id_has_a_length(box: LocalExec, process_id: str) -> None:
    with pytest.raises(InvalidParams, match="processId"):
        await box.start(sh("true", process_id))


async def test_any_other_text_is_an_id(box: LocalExec) -> None:
    for process_id in ("x" * 256, "../../etc", "a b", "ü", "\n"):
        await box.start(sh("true", process_id))
    assert len(await box.list()) == 5


@pytest.mark.parametrize("kind", ["direct", "prepared"])
async def test_each_kind_can_be_switched_off(make_exec: MakeExec, kind: Any) -> None:
    box = make_exec(**{f"allow_{kind}_exec": False})
    with pytest.raises(Forbidden, match=f"allow_{kind}_exec"):
        await box.start(sh("true", kind=kind))
    other: Any = {"direct": "prepared", "prepared": "direct"}[kind]
    await box.start(sh("true", kind=other))


CALLS: list[Callable[[LocalExec], Awaitable[object]]] = [
    lambda box: box.read("nobody"),
    lambda box: box.write("nobody", b""),
    lambda box: box.close_stdin("nobody"),
    lambda box: box.resize("nobody", TerminalSize()),
    lambda box: box.signal("nobody", "INT"),
    lambda box: box.terminate("nobody"),
    lambda box: box.wait("nobody"),
    lambda box: box.snapshot("nobody"),
    lambda box: box.describe("nobody"),
    lambda box: box.forget("nobody"),
]


@pytest.mark.parametrize("call", CALLS)
async def test_an_unknown_process_is_named(box: LocalExec, call: Callable[[LocalExec], Awaitable[object]]) -> None:
    with pytest.raises(UnknownProcess, match="'nobody'"):
        await call(box)
    with pytest.raises(UnknownProcess, match="'nobody'"):
        box.events("nobody")


async def test_bad_signals_are_named(box: LocalExec) -> None:
    await box.start(sh("exit 0"))
    with pytest.raises(UnknownSignal, match="'NOPE'"):
        await box.signal("p", "NOPE")
    await box.wait("p")
    with pytest.raises(InvalidRequest, match="'p'"):
        await box.signal("p", "INT")


async def test_a_process_is_described(box: LocalExec) -> None:
    await box.start(sh("printf 12345; printf 123 >&2; read x; exit 4", cwd="/", pipe_stdin=True))
    events = box.events("p")
    await until(events, b"123")
    info = await box.describe("p")
    assert (info.argv[0], info.cwd, info.tty, info.running, info.closed) == ("sh", "/", False, True, False)
    assert (info.exit_code, info.exited_at, info.size) == (None, None, None)
    await box.write("p", b"\n")
    await rest(events)
    info = await box.describe("p")
    assert (info.stdout_bytes, info.stderr_bytes, info.exit_code, info.closed) == (5, 3, 4, True)
    assert info.exited_at is not None
    assert info.exited_at >= info.started_at


async def test_waiting_has_a_timeout_and_many_may_wait(box: LocalExec) -> None:
    await box.start(sh("read x; exit 2", pipe_stdin=True))
    assert await box.wait("p", timeout=0) is None
    assert await box.wait("p", timeout=0.01) is None
    waiting = asyncio.gather(*(box.wait("p") for _ in range(10)))
    await box.write("p", b"\n")
    assert await waiting == [ExitStatus(2)] * 10
    assert await box.wait("p", timeout=0) == ExitStatus(2)


# --- terminals -------------------------------------------------------------------------------------------------


async def test_a_terminal_has_its_size_and_tells_a_change(box: LocalExec) -> None:
    script = (
        "import os, signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})\n"
        "while True:\n"
        "    size = os.get_terminal_size()\n"
        "    print(size.lines, size.columns, flush=True)\n"
        "    signal.sigwait({signal.SIGWINCH})\n"
    )
    spec = ProcessSpec("p", (sys.executable, "-S", "-c", script), tty=True, size=TerminalSize(33, 101))
    await box.start(spec)
    events = box.events("p")
    await until(events, b"33 101\r\n")
    await box.resize("p", TerminalSize(44, 202))
    await until(events, b"44 202\r\n")
    assert (await box.describe("p")).size == TerminalSize(44, 202)
    for size in (TerminalSize(0, 80), TerminalSize(24, -1), TerminalSize(24, 65536)):
        with pytest.raises(InvalidParams, match=f"{size.rows}x{size.cols}"):
            await box.resize("p", size)
    assert (await box.describe("p")).size == TerminalSize(44, 202)


async def test_a_pipe_has_no_size(box: LocalExec) -> None:
    await box.start(sh("read x", pipe_stdin=True))
    with pytest.raises(NotATerminal, match="'p'"):
        await box.resize("p", TerminalSize())
    assert (await box.describe("p")).size is None


async def test_control_c_through_the_terminal_ends_the_program(box: LocalExec) -> None:
    await box.start(sh("echo up; exec sleep 1000", tty=True))
    await until(box.events("p"), b"up")
    await box.write("p", b"\x03")
    assert await box.wait("p", timeout=SAFETY_NET) == ExitStatus(130, "SIGINT")


async def test_a_program_may_turn_away_from_its_terminal(box: LocalExec) -> None:
    """No process holds the terminal, which reads as its end; the program runs on, and its exit code is its own."""
    await box.start(sh("exec <&- >&- 2>&-; sleep 0.05; exit 3", tty=True))
    assert await rest(box.events("p")) == [Exited(1, ExitStatus(3)), Closed(2)]


async def test_a_program_may_come_back_to_its_terminal(box: LocalExec) -> None:
    await box.start(sh("exec <&- >&- 2>&-; sleep 0.05; echo back >/dev/tty; exit 3", tty=True))
    events = await rest(box.events("p"))
    assert b"".join(event.data for event in events if isinstance(event, OutputChunk)) == b"back\r\n"
    assert events[-2:] == [Exited(2, ExitStatus(3)), Closed(3)]


async def test_the_default_size_and_name_of_a_terminal(make_exec: MakeExec) -> None:
    box = make_exec(environ={"PATH": os.environ["PATH"]})
    await box.start(sh("stty size; echo $TERM; tty", tty=True))
    await rest(box.events("p"))
    size, name, path = (await box.snapshot("p")).terminal.split(b"\r\n")[:3]
    assert (size, name) == (b"24 80", b"xterm-256color")
    assert path.startswith(b"/dev/pts/")


# --- retention and bounds --------------------------------------------------------------------------------------


async def test_ended_processes_are_kept_by_count(make_exec: MakeExec) -> None:
    box = make_exec(max_exited_processes=3)
    for number in range(6):
        await box.start(sh("echo x", str(number)))
        await rest(box.events(str(number)))
    assert [info.process_id for info in await box.list()] == ["3", "4", "5"]
    assert (await box.snapshot("5")).stdout == b"x\n"


async def test_ended_processes_are_kept_for_a_while(make_exec: MakeExec, monkeypatch: pytest.MonkeyPatch) -> None:
    box = make_exec(exited_retention_seconds=0.05)
    forgotten: asyncio.Queue[str] = asyncio.Queue()
    drop = box.processes.retention._forget

    def note(process: ManagedProcess) -> None:
        drop(process)
        forgotten.put_nowait(process.spec.process_id)

    monkeypatch.setattr(box.processes.retention, "_forget", note)
    await box.start(sh("read x", "runs", pipe_stdin=True))
    for number in range(3):
        await box.start(sh("echo x", str(number)))
    async with asyncio.timeout(SAFETY_NET):
        assert sorted([await forgotten.get() for _ in range(3)]) == ["0", "1", "2"]
    assert [info.process_id for info in await box.list()] == ["runs"]
    assert box._spool.used == 0


async def test_a_process_whose_child_still_prints_is_not_forgotten(make_exec: MakeExec) -> None:
    """Forgetting would close the pipe under a child that runs on, and kill it by SIGPIPE."""
    box = make_exec(max_exited_processes=0, exited_retention_seconds=0.0)
    await box.start(sh("mkfifo f; (read x <f; echo late) & exit 0", cwd=box._spool.path))
    assert await box.wait("p", timeout=SAFETY_NET) == ExitStatus(0)
    events = box.events("p")
    for number in range(3):
        await box.start(sh("true", str(number)))
        await box.wait(str(number))
    assert not (await box.describe("p")).closed
    write_line(box._spool.path, "f")
    reported = await rest(events)
    assert any(isinstance(event, OutputChunk | OutputGap) for event in reported)
    assert [type(event) for event in reported if isinstance(event, Exited | Closed)] == [Exited, Closed]
    with pytest.raises(UnknownProcess):
        await box.describe("p")


async def test_forget_drops_an_ended_process_only(box: LocalExec) -> None:
    await box.start(sh("read x; echo out", pipe_stdin=True))
    with pytest.raises(InvalidRequest, match="'p'"):
        await box.forget("p")
    await box.write("p", b"\n")
    await rest(box.events("p"))
    assert box._spool.used == 4
    await box.forget("p")
    assert box._spool.used == 0
    with pytest.raises(UnknownProcess):
        await box.read("p")
    await box.start(sh("true"))


async def test_over_the_total_the_oldest_output_goes_and_its_exit_code_stays(make_exec: MakeExec) -> None:
    box = make_exec(retained_output_bytes_total=250_000)
    for number in range(4):
        await box.start(sh(f"head -c 100000 /dev/zero; exit {number}", str(number)))
        await rest(box.events(str(number)))
        assert box._spool.used <= 250_000
    assert [len((await box.snapshot(str(number))).stdout) for number in range(4)] == [0, 0, 100_000, 100_000]
    for number in range(4):
        assert await box.wait(str(number)) == ExitStatus(number)
    assert (await box.snapshot("0")).truncated
    assert (await box.read("0")).gap == (OutputGap("stdout", 0, 100_000),)


async def test_over_the_total_the_largest_running_keeps_less(make_exec: MakeExec) -> None:
    box = make_exec(retained_output_bytes_total=500_000, retained_output_bytes_per_process=4_000_000)
    await box.start(sh("echo small; read x", "small", pipe_stdin=True))
    await box.start(sh("head -c 3000000 /dev/zero; echo up >&2; read x", "large", pipe_stdin=True))
    await until(box.events("small"), b"small")
    process = box.process("large")
    async with asyncio.timeout(SAFETY_NET):
        while process.logs[0].end < 3_000_000:
            await process.changed()
    assert box._spool.used <= 1_500_000  # the bound, and what one move brings
    assert (await box.snapshot("small")).stdout == b"small\n"


async def test_a_session_has_a_number_of_processes(make_exec: MakeExec) -> None:
    box = make_exec(max_processes_per_connection=3)
    box.check_room(2)
    with pytest.raises(LimitReached, match="max_processes_per_connection"):
        box.check_room(3)


async def test_no_descriptor_and_no_file_is_left_by_what_came_and_went(box: LocalExec) -> None:
    async def one(number: int) -> None:
        id = str(number)
        kind = {"tty": True} if number % 3 == 0 else {"pipe_stdin": number % 2 == 0}
        await box.start(sh("echo out; echo err >&2", id, **kind))
        await rest(box.events(id))
        await box.forget(id)

    await one(0)
    ours = children()
    before = sorted(os.listdir("/proc/self/fd"))
    for start in range(0, 200, 20):
        await asyncio.gather(*(one(number) for number in range(start, start + 20)))
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert os.listdir(box._spool.path) == []
    assert (box._spool.used, box.running, await box.list()) == (0, 0, ())
    assert children() == ours


async def test_three_hundred_at_once(box: LocalExec) -> None:
    ids = [str(number) for number in range(300)]
    await asyncio.gather(*(box.start(sh("read x; echo got $x", id, pipe_stdin=True)) for id in ids))
    assert box.running == 300
    assert (await box.status()).processes_running == 300
    await asyncio.gather(*(box.write(id, b"%s\n" % id.encode()) for id in ids))
    events = await asyncio.gather(*(rest(box.events(id)) for id in ids))
    for id, reported in zip(ids, events, strict=True):
        assert b"".join(e.data for e in reported if isinstance(e, OutputChunk)) == b"got %s\n" % id.encode()
    assert (await box.status()).processes_kept == 300


# --- the machine -----------------------------------------------------------------------------------------------


async def test_a_port_is_waited_for(box: LocalExec) -> None:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
        with pytest.raises(TimeoutError, match=str(port)):
            await box.wait_for_port(port, timeout=0.02)
        waiting = asyncio.ensure_future(box.wait_for_port(port, timeout=SAFETY_NET))
        await asyncio.sleep(0)
        chosen.listen()
        await waiting
    for wrong in (0, -1, 65536):
        with pytest.raises(InvalidParams, match="port"):
            await box.wait_for_port(wrong)


async def test_info_and_status(box: LocalExec) -> None:
    info = await box.info()
    assert (info.cwd, info.hostname) == (os.getcwd(), socket.gethostname())
    assert os.access(info.shell.path, os.X_OK)
    await box.start(sh("echo 12345"))
    await rest(box.events("p"))
    status = await box.status()
    assert (status.pid, status.processes_running, status.processes_kept, status.spool_bytes) == (
        os.getpid(),
        0,
        1,
        6,
    )


# --- the end ---------------------------------------------------------------------------------------------------


async def test_the_end_takes_everything_with_it(make_exec: MakeExec) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    box = make_exec(shutdown_grace_period_ms=50)
    scripts = [
        "exec sleep 1000",
        "trap '' TERM; echo up; while :; do sleep 1000; done",
        "setsid sleep 1000 & exit 0",
    ]
    for number, script in enumerate(scripts):
        await box.start(sh(script, str(number)))
    await until(box.events("1"), b"up")
    await box.start(sh("yes", "3", overflow="block"))
    marks = {box.process(str(number)).tree._mark for number in range(4)}
    reader = asyncio.ensure_future(rest(box.events("0")))
    waiter = asyncio.ensure_future(box.wait("1"))
    path = box._spool.path
    async with asyncio.timeout(SAFETY_NET):
        await box.aclose()
        assert [type(event) for event in await reader] == [Exited, Closed]
        assert await waiter == ExitStatus(137, "SIGKILL")
    assert survivors(marks) == []
    assert not exists(path)
    assert sorted(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ShuttingDown):
        await box.start(sh("true"))
    with pytest.raises(UnknownProcess):
        await box.describe("0")


async def test_the_end_waits_for_a_start_that_is_under_way(make_exec: MakeExec) -> None:
    box = make_exec()
    starting = asyncio.ensure_future(box.start_process(sh("exec sleep 1000", limits=SLOW)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    async with asyncio.timeout(SAFETY_NET):
        await box.shutdown(0)
        process = await starting
    assert not process.running
    assert survivors({process.tree._mark}) == []


async def test_the_end_may_be_asked_for_twice_and_the_second_may_be_in_a_hurry(make_exec: MakeExec) -> None:
    box = make_exec()
    await box.start(sh("trap '' TERM; echo up; while :; do sleep 1000; done"))
    await until(box.events("p"), b"up")
    patient = asyncio.ensure_future(box.shutdown(1000))
    await asyncio.sleep(0)
    async with asyncio.timeout(SAFETY_NET):
        await box.shutdown(0)
        await patient
        await box.shutdown(0)
        await box.aclose()


async def test_two_exec_interfaces_do_not_meet(make_exec: MakeExec) -> None:
    one, two = make_exec(), make_exec()
    await one.start(sh("exec sleep 1000"))
    await two.start(sh("exec sleep 1000"))
    await one.shutdown(0)
    assert (await two.describe("p")).running
    assert isinstance(two.config, ExecServerConfig)
