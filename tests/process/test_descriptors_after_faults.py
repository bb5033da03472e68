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
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.client.sandbox import Sandbox
from holdfast.errors import HoldfastError, InternalError, UnknownShell
from holdfast.runtime.durability import ledger as ledgers, records as r
from holdfast.runtime.durability.ledger import Ledger, read_ledger
from holdfast.runtime.output.output_log import PAGE
from holdfast.types import Limits, TerminalSize
from tests.process.test_exhaustion import empty, fill, fill_inodes
from tests.process.test_recovery import DIE_BEFORE, Kill, kept
from tests.process.test_shell_recovery import go, nobody
from tests.support.descriptors import descriptors, settles
from tests.support.file_systems import small_file_system
from tests.support.servers import PATIENCE_SECONDS, RunningServer, running_server, server_environment


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


class Compacting:
    """A ledger on a small file system during a compaction: its thread waits in front of its first file."""

    def __init__(self, place: str, *, reserve_bytes: int) -> None:
        self.path = f"{place}/ledger"
        self.new_path = f"{self.path}.new"
        self._before = descriptors()
        self._written: list[r.LedgerRecord] = []
        self._go = threading.Event()
        self.ledger = Ledger(self.path, self._compaction, reserve_bytes=reserve_bytes)
        self.write_until_it_compacts()

    def _compaction(self, records: Iterable[r.LedgerRecord]) -> Iterable[r.LedgerRecord]:
        self._go.wait(PATIENCE_SECONDS)
        return records

    def write(self, size: int = 0) -> None:
        record = r.InputAccepted(len(self._written), "x" * size, 0)
        self._written.append(record)
        self.ledger.write(record)

    def write_until_it_compacts(self) -> None:
        while self.ledger._thread is None:
            self.write()

    def go_on(self) -> None:
        """Let the thread end; the next record, or `settle`, puts the new file into its place."""
        self._go.set()
        if self.ledger._thread is not None:
            self.ledger._thread.join()

    def is_whole(self, *left: str) -> None:
        """All records are there, in one file with one descriptor, and in no other."""
        assert descriptors() - self._before == Counter({re.sub(r"\d+", "N", self.path): 1})
        assert set(os.listdir(os.path.dirname(self.path))) == {"ledger", *left}
        assert read_ledger(self.path)[1] == self._written

    def compacts_again(self) -> None:
        file = os.stat(self.path).st_ino
        self.write_until_it_compacts()
        self.ledger.settle()
        assert os.stat(self.path).st_ino != file
        self.is_whole()

    def close(self) -> None:
        self._go.set()
        self.ledger.close()
        assert descriptors() == self._before


@pytest.fixture
def compacting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compacting]:
    monkeypatch.setattr(ledgers, "COMPACT_BYTES", PAGE)
    with (
        small_file_system("size=2m,nr_inodes=16") as place,
        contextlib.closing(Compacting(place, reserve_bytes=8 * PAGE)) as compacting,
    ):
        yield compacting


def test_a_compaction_without_an_inode_for_its_file(compacting: Compacting) -> None:
    fill_inodes(os.path.dirname(compacting.path))
    compacting.go_on()
    compacting.is_whole("filler")
    empty(os.path.dirname(compacting.path))
    compacting.compacts_again()


def test_a_compaction_without_room_for_its_reserve(compacting: Compacting) -> None:
    fill(os.path.dirname(compacting.path))
    compacting.go_on()
    compacting.is_whole("filler")
    empty(os.path.dirname(compacting.path))
    compacting.compacts_again()


def test_a_compaction_without_room_for_its_records(compacting: Compacting, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that reserves no room, the write itself is short."""
    monkeypatch.setattr(ledgers, "_reserve", lambda *_: None)
    fill(os.path.dirname(compacting.path), leave=PAGE)
    compacting.go_on()
    compacting.is_whole("filler")
    empty(os.path.dirname(compacting.path))
    compacting.compacts_again()


def test_a_compaction_without_room_for_the_records_since(compacting: Compacting) -> None:
    """They are in the reserve of the old file, and exceed that of the new one, which has a new reserve to keep."""
    place = os.path.dirname(compacting.path)
    compacting.write(size=12 * PAGE)
    compacting.go_on()
    fill(place)
    compacting.ledger.settle()
    compacting.is_whole("filler")
    empty(place)
    compacting.compacts_again()


def test_a_compaction_whose_file_was_removed(compacting: Compacting) -> None:
    compacting.go_on()
    os.unlink(compacting.new_path)
    compacting.ledger.settle()
    compacting.is_whole()
    compacting.compacts_again()


def test_a_record_with_room_for_its_beginning_alone(compacting: Compacting) -> None:
    """The part that was written would hide all later records."""
    place = os.path.dirname(compacting.path)
    compacting.go_on()
    compacting.ledger.settle()
    fill(place)
    compacting.write(size=40 * PAGE)
    compacting.write()
    file = os.stat(compacting.path)
    assert file.st_size == compacting.ledger._size
    empty(place)
    compacting.write()
    compacting.ledger.settle()
    compacting.is_whole()


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


async def _queries_and_signals(box: Sandbox) -> None:
    process = await box.start(["sh", "-c", "trap : USR1; echo ready; while :; do read x; done"], stdin="open")
    await process.wait_for_output("ready\n", timeout=PATIENCE_SECONDS)
    terminal = await box.terminal("bash")
    await terminal.wait_until_idle(PATIENCE_SECONDS)
    await terminal.describe()
    await terminal.control("CTRL_C")
    await terminal.signal("INT")
    await process.signal("USR1")
    await box.usage([process.id, terminal.id], members=True)
    await box.status()
    await box.info()
    await process.terminate(force=True)


#: Work that is done so often in a row has all the descriptors that it can use; none needs so many as the other.
ENOUGH, MOST_REFUSALS = 4, 60

WORK: tuple[Work, ...] = (
    _process,
    _process_through_the_launcher,
    _process_on_a_terminal,
    _terminal,
    _shell,
    _files,
    _queries_and_signals,
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
                except InternalError:
                    pytest.fail(server.log()[-3_000:])
                except HoldfastError:
                    refused, done = refused + 1, 0
            await clean_up(box)
            await settles(f"the server, which had {count - lowest} left,", server.pid, before)
            if done == ENOUGH:
                break
            assert refused < MOST_REFUSALS
        assert refused
