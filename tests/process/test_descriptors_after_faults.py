"""After a fault nothing stays open: a killed server, a full spool, no descriptor where a server opens one.

The descriptors of the server, and of its keeper, are compared by what they are open on with those before the fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import itertools
import os
import re
import resource
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.client.sandbox import Sandbox
from holdfast.errors import HoldfastError, UnknownShell
from holdfast.runtime.durability import ledger as ledgers, records as r
from holdfast.runtime.durability.ledger import Ledger, read_ledger
from holdfast.types import Limits, TerminalSize
from tests.process.test_exhaustion import fill
from tests.process.test_recovery import DIE_BEFORE, Kill, kept
from tests.process.test_shell_recovery import go, nobody
from tests.support.file_systems import small_file_system
from tests.support.servers import PATIENCE_SECONDS, RunningServer, running_server, server_environment

#: Descriptors are closed a moment after the reply; nothing reports it.
SETTLE_SECONDS = PATIENCE_SECONDS


def descriptors(pid: int | str = "self") -> Counter[str]:
    """The open files of a process, each without its unique part."""
    found: Counter[str] = Counter()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            found[re.sub(r"\d+", "N", os.readlink(f"/proc/{pid}/fd/{name}"))] += 1
    return found


async def settles(what: str, pid: int, before: Counter[str]) -> None:
    """Wait until a process has nothing open that it had not before."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_SECONDS
    while more := descriptors(pid) - before:
        assert loop.time() < deadline, f"{what} still has {dict(more)}"
        await asyncio.sleep(0.02)


class Both:
    """The descriptors of a server and of its keeper, at a moment at which nothing is on its way between them."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._before = descriptors(server.pid)
        self._keeper_before = descriptors(server.process.pid)
        self._spool = next(path for path in self._before if "holdfast-spool-" in path and path.endswith("ledger"))
        self._spool = os.path.dirname(self._spool)

    async def are_as_before(self, kill: Kill, *, programs: int = 0) -> None:
        """The keeper has the pipes of a closed shell's programs until the shell is forgotten."""
        await settles("the server", self._server.pid, self._before)
        await kill()  # the keeper reads what it was sent before the server's end
        pipes = {f"{self._spool}/sN/pipes/{letter}N (deleted)": programs for letter in "oe"}
        pipes[f"{self._spool}/sN/pipes/saved (deleted)"] = min(programs, 1)
        await settles("the keeper", self._server.process.pid, self._keeper_before + Counter(pipes))


async def footing(server: RunningServer, kill: Kill) -> Both:
    await kill()
    return Both(server)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


# --- a server that is killed --------------------------------------------------------------------------------------


async def test_a_shell_whose_start_outlives_its_server_has_one_descriptor_of_its_program(
    tmp_path: Path, gate: Path
) -> None:
    """The next server opens /proc/PID/stat when it takes the program over, and again at the program's answer."""
    (tmp_path / ".bash_profile").write_text(f"echo >{tmp_path}/started; read x <{gate}\n")
    async with kept() as (server, box, kill):
        before = await footing(server, kill)
        opening = asyncio.create_task(box.shell("bash", login=True, env={"HOME": str(tmp_path)}))
        while not (tmp_path / "started").exists():  # noqa: ASYNC110 - a file of another program
            await asyncio.sleep(0.001)
        await kill()
        await go(gate)
        shell = await opening
        await shell.run("true")
        await shell.close()
        await before.are_as_before(kill, programs=1)


async def test_a_shell_whose_restart_outlives_its_server_has_one_descriptor_of_its_program(tmp_path: Path) -> None:
    flag = tmp_path / "die"
    script = DIE_BEFORE.format(
        module="holdfast.runtime.durability.shell_recorder", owner="ShellRecorder", method="ready", flag=str(flag)
    )
    async with customized(tmp_path, script) as (server, box, kill):
        before = await footing(server, kill)
        shell = await box.shell("bash")
        flag.touch()
        result = await shell.run("set -e; false")
        assert (result.exit_code, result.shell_restarted, flag.exists()) == (1, True, False)
        server.pid = (await box.status()).pid
        await shell.close()
        await before.are_as_before(kill, programs=2)


@pytest.mark.parametrize("killed", [False, True])
async def test_a_shell_that_does_not_start_again_closes_at_once_and_leaves_nothing(
    tmp_path: Path, gate: Path, killed: bool
) -> None:
    """Its program ends before it takes a command, under the server that started it, or under the next one."""
    bash = tmp_path / "bash"
    bash.write_text('#!/bin/sh\nexec /bin/bash "$@"\n')
    bash.chmod(0o755)
    async with kept() as (server, box, kill):
        before = await footing(server, kill)
        shell = await box.shell(str(bash))
        wait = f"echo >{tmp_path}/again; read x <{gate}; " if killed else ""
        bash.write_text(f"#!/bin/sh\n{wait}exit 3\n")
        running = asyncio.create_task(shell.run("set -e; false"))
        if killed:
            while not (tmp_path / "again").exists():  # noqa: ASYNC110 - a file of another program
                await asyncio.sleep(0.001)
            await kill()
            await go(gate)
        async with asyncio.timeout(PATIENCE_SECONDS):
            result = await running
        assert (result.exit_code, result.state) == (1, "closed")
        assert "ended with exit code 3 before it took a command" in result.reason
        await before.are_as_before(kill, programs=2)


async def test_a_shell_that_cannot_be_resumed_leaves_nothing() -> None:
    async with kept() as (server, box, kill):
        before = await footing(server, kill)
        shell = await box.shell("bash", id="s")
        await shell.run("echo printed; /bin/true")
        await shell.run("echo printed; /bin/true")
        async with nobody(server, kill):
            [directory] = glob.glob(f"{server.spool}/*/s*")
            shutil.rmtree(directory)
            os.close(os.open(directory, os.O_CREAT))  # so that no directory can be made here
        with pytest.raises(UnknownShell):
            await shell.run("true")
        assert "cannot resume shell 's'" in server.log()
        await before.are_as_before(kill)
        left = {os.path.basename(path) for path in glob.glob(f"{server.spool}/*/*")}
        assert left == {"ledger", "terminal-reads"}


@contextlib.asynccontextmanager
async def customized(directory: Path, script: str) -> AsyncIterator[tuple[RunningServer, Sandbox, Kill]]:
    """A server with a Python that runs this at its start."""
    (directory / "sitecustomize.py").write_text(script)
    path = os.pathsep.join((str(directory), server_environment()["PYTHONPATH"]))
    with running_server(environ={"PYTHONPATH": path}) as server:
        async with holdfast.connect(server.address("unix")) as box:
            yield server, box, Kill(server, box)


# --- a spool that is full -----------------------------------------------------------------------------------------


def _records(count: int) -> list[r.LedgerRecord]:
    return [r.ProcessStarted(number, 1, 2.0) for number in range(count)]


@pytest.mark.parametrize("room", range(28))
def test_a_ledger_that_finds_no_room_at_any_step_of_its_compaction(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Room for its file, for what is set aside, for its records, for later ones: each finds the last page taken."""
    page = os.sysconf("SC_PAGESIZE")
    monkeypatch.setattr(ledgers, "COMPACT_BYTES", page)
    with small_file_system("size=2m") as location:
        path = f"{location}/ledger"
        before = descriptors()
        written = _records(2_000)
        ledger = Ledger(path, lambda records: records, reserve_bytes=8 * page)
        try:
            for record in written[:-10]:
                ledger.write(record)
                if ledger._thread is not None:
                    break
            ledger.settle()
            fill(location, leave=room * page)
            ledger._compact_at = 0
            for record in (noted := written[len(read_ledger(path)[1]) :]):
                ledger.write(record)
                ledger._compact_at = 0  # again and again
            assert noted
            ledger.settle()
            assert descriptors() - before == Counter({re.sub(r"\d+", "N", path): 1})
            assert set(os.listdir(location)) == {"ledger", "filler"}
            os.unlink(f"{location}/filler")
            ledger.write(r.ProcessStarted(2_000, 1, 2.0))
        finally:
            ledger.close()
        assert read_ledger(path)[1] == [*written, r.ProcessStarted(2_000, 1, 2.0)]
        assert descriptors() == before


def test_a_new_ledger_that_a_killed_server_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "ledger.new").write_bytes(bytes(1_000_000))
    Ledger(str(tmp_path / "ledger")).close()
    assert os.listdir(tmp_path) == ["ledger"]


# --- no descriptors -----------------------------------------------------------------------------------------------

Work = Callable[[Sandbox], Awaitable[None]]


async def _process(box: Sandbox) -> None:
    process = await box.start(["sh", "-c", "cat; echo error >&2"], stdin="open")
    await process.write(b"x" * 100_000)
    await process.close_stdin()
    await process.wait()


async def _process_through_the_launcher(box: Sandbox) -> None:
    await (await box.start(["echo", "text"], limits=Limits(open_files=50))).wait()


async def _process_on_a_terminal(box: Sandbox) -> None:
    process = await box.start(["sh", "-c", "echo text; read x; echo $x"], tty=TerminalSize())
    await process.write(b"x\n")
    await process.wait()


async def _terminal(box: Sandbox) -> None:
    await (await box.terminal("bash")).run("echo text", PATIENCE_SECONDS)


async def _shell(box: Sandbox) -> None:
    # By one id: a closed shell is forgotten when another one takes its id.
    shell = await box.shell("bash", id="again")
    for _ in range(2):
        await shell.run("echo text; /bin/true")
    await (await shell.start("echo text")).wait()


async def _files(box: Sandbox) -> None:
    path = f"/tmp/holdfast-test-{os.getpid()}"
    await box.write_file(path, b"x" * 3_000_000)
    await box.read_file(path)
    await box.remove(path)


#: Work that is done so often in a row has all the descriptors that it can use; none needs so many as the other.
ENOUGH, MOST_REFUSALS = 4, 60

WORK: tuple[Work, ...] = (
    _process,
    _process_through_the_launcher,
    _process_on_a_terminal,
    _terminal,
    _shell,
    _files,
)


async def clean_up(box: Sandbox) -> None:
    """End and forget all that a piece of work has left."""
    for terminal in await box.terminals():
        await terminal.close(mode="force")
    for process in await box.processes():
        await process.terminate(force=True)
        await process.forget()
    for shell in await box.shells():
        await shell.close(grace=0)


@contextlib.contextmanager
def limited(pid: int, count: int) -> Iterator[None]:
    """A process can open no more than the lowest so many descriptors."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__[1:])
async def test_a_server_that_finds_no_descriptor_at_any_place_leaves_none_open(work: Work) -> None:
    """One more of them each time, from none to as many as it takes."""
    async with kept(cgroup="off") as (server, box, _):
        for _ in range(2):  # some are opened once, and stay
            await work(box)
            await clean_up(box)
        before = descriptors(server.pid)
        lowest = min(set(range(1_000)) - {int(name) for name in os.listdir(f"/proc/{server.pid}/fd")})
        refused = done = 0
        for count in itertools.count(lowest):
            with limited(server.pid, count):
                try:
                    async with asyncio.timeout(PATIENCE_SECONDS):
                        await work(box)
                    done += 1
                except HoldfastError:
                    refused, done = refused + 1, 0
            await clean_up(box)
            await settles(f"the server, which had {count - lowest} left,", server.pid, before)
            if done == ENOUGH:
                break
            assert refused < MOST_REFUSALS
        assert refused
