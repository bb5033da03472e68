"""The machine runs out of room, inodes, descriptors, pids or terminals: the caller gets an error, the rest goes on.

Each case has a server of its own under a keeper, a process that runs through it all, and an end at which there is
enough again. Cases that need root, a mount or a cgroup are skipped where it cannot be had.
"""

from __future__ import annotations

import asyncio
import glob
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

import holdfast
from holdfast.client.process import Process
from holdfast.client.sandbox import Sandbox
from holdfast.errors import ResourceExhausted
from holdfast.exec_api import EventStream
from holdfast.types import OutputChunk, OutputGap, Overflow
from tests.support.file_systems import fill_blocks, small_file_system
from tests.support.parts import require
from tests.support.servers import (
    PATIENCE_SECONDS,
    RunningServer,
    is_alive,
    running_server,
    server_command,
    server_environment,
)
from tests.support.signalling import send_signal

#: A process does not wait long for room that a test does not make, and for ever for a reader that can make it.
HASTY = {"full_disk_seconds": 0.1, "reader_stall_seconds": 3600.0}
#: Eight bytes a line, more than there is room for.
COUNT = "seq 1000000 1499999"
COUNTED = b"".join(b"%d\n" % number for number in range(1_000_000, 1_500_000))
#: Answers each line of input; the rest of the machine is none of its business.
BYSTANDER = "echo ready; while read line; do echo got $line; done; exit 5"


def fill(path: str, leave: int = 0) -> None:
    """Take every block that is free, but for so many bytes."""
    file = os.open(f"{path}/filler", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fill_blocks(file, leave)
    os.close(file)


def fill_inodes(path: str) -> None:
    os.mkdir(f"{path}/filler")
    while os.statvfs(path).f_ffree:
        os.close(os.open(f"{path}/filler/{secrets.token_hex(8)}", os.O_CREAT | os.O_CLOEXEC))


def empty(path: str) -> None:
    if os.path.isdir(f"{path}/filler"):
        shutil.rmtree(f"{path}/filler")
    else:
        os.unlink(f"{path}/filler")


@asynccontextmanager
async def bystander(box: Sandbox) -> AsyncIterator[Process]:
    """A process that ran before, that answers in between, and with a whole output that is right at the end."""
    process = await box.start(["sh", "-c", BYSTANDER], stdin="open")
    await process.wait_for_output("ready")
    await process.write(b"before\n")
    await process.wait_for_output("got before")
    yield process
    await process.write(b"after\n")
    await process.close_stdin()
    assert (await process.wait()).exit_code == 5
    assert (await process.snapshot()).stdout.endswith(b"got after\n")
    assert not (await process.snapshot()).truncated


@asynccontextmanager
async def on_small_spool(
    options: str, settings: Mapping[str, float] = HASTY
) -> AsyncIterator[tuple[str, RunningServer, Sandbox]]:
    with (
        small_file_system(options) as path,
        running_server(settings={"spool_directory": path, **settings}) as server,
    ):
        async with holdfast.connect(server.address("unix")) as box:
            yield path, server, box
            server.pid = (await box.status()).pid


async def kill_server(server: RunningServer, box: Sandbox) -> None:
    send_signal(server.pid, signal.SIGKILL)
    server.pid = (await box.status()).pid


# --- room -------------------------------------------------------------------------------------------------------


def test_a_server_says_that_its_spool_is_full_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    with small_file_system("size=1m") as path:
        fill(path)
        command = server_command([f"unix:{tmp_path}/s"], {"spool_directory": path})
        done = subprocess.run(command, env=server_environment(), capture_output=True, text=True, timeout=60)
        assert os.listdir(path) == ["filler"]
    assert done.returncode == 2
    assert f"the spool {path}/holdfast-spool-" in done.stderr
    assert "cannot be used" in done.stderr
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize(("options", "take"), [("size=2m", fill), ("size=8m,nr_inodes=40", fill_inodes)])
async def test_a_full_spool_is_told_to_who_asks_and_starts_go_on(options: str, take: Callable[[str], None]) -> None:
    async with on_small_spool(options) as (path, server, box), bystander(box) as running:
        fed = await box.start(["cat"], stdin="open")
        shell = await box.shell()
        take(path)
        async with asyncio.timeout(PATIENCE_SECONDS):
            lost = await box.exec(["sh", "-c", "echo what; exit 3"])
        assert (lost.returncode, lost.stdout, lost.truncated) == (3, "", True), "it ran, and says what is missing"
        with pytest.raises(ResourceExhausted, match=r"input of process .* cannot be stored: No space left"):
            await fed.write(b"refused")
        with pytest.raises(ResourceExhausted, match=r"the spool .* is full: \d+ of \d+ (bytes|inodes) are free"):
            await shell.run("echo " + 5_000 * "x")
        with pytest.raises(ResourceExhausted, match=r"cannot be (written|made): No space left on device"):
            await box.shell()
        with pytest.raises(ResourceExhausted, match=r"cannot be (written|made): No space left on device"):
            await box.terminal()
        async with holdfast.connect(server.address("unix")) as other:
            assert (await other.exec(["true"])).success, "a session needs no room of the spool"
        # Records in the reserved room are there for the next server.
        await kill_server(server, box)
        assert (await running.describe()).running
        empty(path)
        await fed.write(b"taken once")
        await fed.close_stdin()
        await fed.wait()
        assert (await fed.snapshot()).stdout == b"taken once"
        assert (await box.exec(["echo", "again"])).stdout == "again\n"
        assert (await (await box.shell()).run("echo again")).stdout == "again\n"


async def test_a_flood_over_a_small_spool_is_bounded_and_accounted_for_to_the_byte() -> None:
    amount = 20_000_000
    async with on_small_spool("size=4m") as (_, _, box), bystander(box):
        flood = await box.start(["sh", "-c", f"yes 0123456789abcde | head -c {amount}; exit 3"])
        assert (await flood.wait()).exit_code == 3
        read = await flood.read(max_bytes=amount)
        kept = sum(len(chunk.data) for chunk in read.chunks)
        assert kept + sum(gap.length for gap in read.gap) == amount
        assert 0 < kept < 4 * 1024 * 1024
        for chunk in read.chunks:
            line = b"0123456789abcde\n" * (len(chunk.data) // 16 + 2)
            assert chunk.data == line[chunk.offset % 16 :][: len(chunk.data)]


#: Prints so many kilobytes for each number that it reads.
PRINTER = (
    "echo ready; while read count; do head -c ${count}k /dev/zero | tr '\\0' $count; echo done >&2; done; exit 4"
)


async def test_what_is_printed_while_somebody_fills_the_spool_is_a_gap_and_later_output_is_kept() -> None:
    async with on_small_spool("size=2m") as (path, _, box), bystander(box):
        printer = await box.start(["sh", "-c", PRINTER], stdin="open")
        await printer.write(b"8\n")
        await printer.wait_for_output("done")
        # Its input has a file by now, and the next line fits in the same page.
        fill(path)
        await printer.write(b"100\n")
        while (await printer.describe()).stdout_bytes < 8 * 1024 + 100 * 1024:
            await printer.read(since=(await printer.read()).next_seq - 1, wait=1.0)
        empty(path)
        await printer.write(b"9\n")
        await printer.close_stdin()
        assert (await printer.wait()).exit_code == 4
        events = [event async for event in printer.output()]
        length = {OutputChunk: 0, OutputGap: 0}
        for event in events:
            if event.stream == "stdout":
                length[type(event)] += len(event.data) if isinstance(event, OutputChunk) else event.length
        assert length[OutputGap] > 0
        assert sum(length.values()) == (8 + 100 + 9) * 1024 + len("ready\n")
        assert (await printer.snapshot()).stdout.endswith(b"9" * 9 * 1024)


async def test_a_lossless_process_waits_until_there_is_room_and_ended_output_goes_first() -> None:
    async with on_small_spool("size=2m") as (path, _, box), bystander(box):
        ended = await box.start(["sh", "-c", "head -c 8000 /dev/zero"])
        await ended.wait()
        held = await box.start(["sh", "-c", "read x; seq 50000; exit 6"], stdin="open", overflow="block")
        fill(path)
        assert (await box.exec(["echo", "fits now"])).stdout == "fits now\n"
        assert (await ended.snapshot()).truncated
        fill(path)
        await held.close_stdin()
        assert (await box.exec(["true"])).success
        assert (await held.describe()).running, "a pipe holds less than it prints"
        empty(path)
        assert (await held.wait()).exit_code == 6
        snapshot = await held.snapshot()
        assert snapshot.stdout == b"".join(b"%d\n" % n for n in range(1, 50_001))


@pytest.mark.parametrize("overflow", ["follow", "block"])
async def test_a_reader_that_reads_on_makes_room_on_a_full_disk(overflow: Overflow) -> None:
    """Far less room than is kept otherwise: what the reader has taken is given back, and every byte comes."""
    async with on_small_spool("size=4m") as (path, _, box), bystander(box):
        flood = await box.start(["sh", "-c", f"read x; {COUNT}; exit 6"], stdin="open", overflow=overflow)
        fill(path, leave=256 * 1024)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await flood.close_stdin()
            events = [event async for event in flood.output()]
        assert b"".join(event.data for event in events if isinstance(event, OutputChunk)) == COUNTED
        assert not any(isinstance(event, OutputGap) for event in events)
        assert (await flood.wait()).exit_code == 6
        assert (await flood.snapshot()).truncated


async def test_a_command_in_a_shell_makes_room_on_a_full_disk() -> None:
    """Its output fits into a reply, and not on the disk."""
    async with on_small_spool("size=4m") as (path, _, box), bystander(box), await box.shell() as shell:
        await shell.run("true")
        fill(path, leave=16 * 1024)
        async with asyncio.timeout(PATIENCE_SECONDS):
            result = await shell.run("seq 10000")
        assert result.stdout_bytes == b"".join(b"%d\n" % n for n in range(1, 10_001))
        assert (result.exit_code, result.truncated) == (0, False)


async def test_a_reader_that_stalls_on_a_full_disk_is_given_up_and_the_other_loses_nothing() -> None:
    # Long enough for a reader that reads all the time on a busy machine.
    settings = {"full_disk_seconds": 3600.0, "reader_stall_seconds": 2.0}
    async with on_small_spool("size=4m", settings) as (path, _, box), bystander(box):
        flood = await box.start(["sh", "-c", f"echo ready; read x; {COUNT}"], stdin="open")
        readers = [box.api.events(flood.id, window=64 * 1024) for _ in range(2)]
        for reader in readers:
            assert isinstance(await anext(reader), OutputChunk)
        eager, stalled = readers
        fill(path, leave=256 * 1024)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await flood.close_stdin()
            data, gaps = await rest(eager, len(b"ready\n"))
            assert (data, gaps) == (COUNTED, 0)
            data, gaps = await rest(stalled, len(b"ready\n"))
        assert 0 < gaps == len(COUNTED) - len(data)


async def rest(reader: EventStream, position: int) -> tuple[bytes, int]:
    """The bytes that a reader still gets, and how many are in gaps; each byte is one or the other."""
    data, gaps = [], 0
    async for event in reader:
        if isinstance(event, OutputChunk):
            assert event.offset == position
            data.append(event.data)
            position += len(event.data)
        elif isinstance(event, OutputGap):
            assert event.offset == position
            gaps += event.length
            position += event.length
    return b"".join(data), gaps


async def test_input_that_finds_no_room_is_refused_and_what_was_taken_before_arrives_once() -> None:
    first = os.urandom(150_000)
    async with on_small_spool("size=4m") as (path, server, box), bystander(box):
        fed = await box.start(["cat"], stdin="open")
        await fed.signal("STOP")
        await fed.write(first)
        fill(path)
        with pytest.raises(ResourceExhausted, match=r"input of process .* cannot be stored: No space left"):
            await fed.write(os.urandom(500_000))
        await kill_server(server, box)
        empty(path)
        await fed.signal("CONT")
        await fed.write(b"the end")
        await fed.close_stdin()
        assert (await fed.wait()).exit_code == 0
        assert (await fed.snapshot()).stdout == first + b"the end"


async def test_a_terminal_and_a_shell_keep_their_state_through_a_full_spool() -> None:
    async with on_small_spool("size=2m") as (path, _, box), bystander(box):
        terminal, shell = await box.terminal(), await box.shell()
        assert (await terminal.run("word=kept; echo ok")).exit_code == 0
        await shell.run("word=kept")
        fill(path)
        result = await terminal.run("head -c 30000 /dev/zero | tr '\\0' x; (exit 7)")
        assert result.exit_code == 7
        with pytest.raises(ResourceExhausted, match=r"the spool .* is full: \d+ of \d+ (bytes|inodes) are free"):
            await shell.run("echo " + 5_000 * "x")
        empty(path)
        assert "is-kept" in (await terminal.run("echo is-$word")).output
        assert (await shell.run("echo $word")).stdout == "kept\n"
        await terminal.close()


async def test_a_shell_without_its_files_is_resumed_on_a_full_spool() -> None:
    """As after a server that was killed while it closed the shell: a command is refused until there is room."""
    async with on_small_spool("size=2m") as (path, server, box), bystander(box):
        shell = await box.shell()
        await shell.run("word=kept")
        (file,) = glob.glob(f"{path}/holdfast-spool-*/s*/keep")
        os.unlink(file)
        fill(path)
        await kill_server(server, box)
        with pytest.raises(ResourceExhausted):
            await shell.run("echo $word")
        empty(path)
        assert (await shell.run("echo $word")).stdout == "kept\n"
        await shell.close()


async def start_many(box: Sandbox) -> None:
    """With so much to note of each that what is set aside is soon used up."""
    for _ in range(1_000):
        await box.exec(["true", 4_000 * "x"])


async def test_starts_are_refused_when_they_could_not_be_noted_and_what_runs_goes_on() -> None:
    async with on_small_spool("size=1m") as (path, server, box), bystander(box) as running:
        fill(path)
        with pytest.raises(
            ResourceExhausted, match=r"ledger cannot be written on \(No space left on device\).* would not survive"
        ):
            await start_many(box)
        # Half of what was set aside is left for this.
        await running.signal("CONT")
        await kill_server(server, box)
        with pytest.raises(ResourceExhausted, match="would not survive a restart of the server; make room there"):
            await box.exec(["true"])
        empty(path)
        assert (await box.exec(["echo", "again"])).stdout == "again\n"


# --- descriptors ------------------------------------------------------------------------------------------------


@contextmanager
def no_descriptors(pid: int) -> Iterator[None]:
    """A process may open none beside those that it has: the limit is the lowest number that is free."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    limit = next(number for number in range(len(used) + 1) if number not in used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


@asynccontextmanager
async def on_server() -> AsyncIterator[tuple[RunningServer, Sandbox]]:
    with running_server() as server:
        async with holdfast.connect(server.address("unix")) as box:
            yield server, box
            server.pid = (await box.status()).pid


async def test_without_descriptors_starts_are_refused_and_what_runs_goes_on() -> None:
    async with on_server() as (server, box), bystander(box) as running:
        silent = await box.start(["sh", "-c", "read x; echo first words; exit 7"], stdin="open")
        with no_descriptors(server.pid):
            for start in (box.exec(["true"]), box.start(["cat"], tty=holdfast.TerminalSize(24, 80))):
                with pytest.raises(ResourceExhausted, match=r"too many open files .* limit is \d+ .*RLIMIT_NOFILE"):
                    await start
            with pytest.raises(ResourceExhausted):
                await box.shell()
            await running.write(b"meanwhile\n")
            await running.wait_for_output("got meanwhile")
            # It has printed nothing yet, and there may be no descriptor for its log: then the pipe keeps its words.
            await silent.close_stdin()
            while is_alive(silent.pid):
                await box.status()
            await box.status()  # by now the server has seen its end
        assert (await silent.wait()).exit_code == 7
        assert (await silent.snapshot()).stdout == b"first words\n"
        assert (await box.exec(["echo", "again"])).stdout == "again\n"


async def _started_until_refused(box: Sandbox, most: int) -> list[int]:
    pids = []
    try:
        for _ in range(most):
            pids.append((await box.start(["sleep", "1000"], stdin="open")).pid)
    except ResourceExhausted:
        return pids
    raise AssertionError(f"{most} processes were started")


async def test_a_stop_ends_everything_where_not_all_can_have_a_descriptor_at_once() -> None:
    with running_server() as server:
        async with holdfast.connect(server.address("unix")) as box:
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (400, 400))
            pids = await _started_until_refused(box, 400)
            assert len(pids) > 64
        send_signal(server.process.pid, signal.SIGTERM)
        assert server.process.wait(PATIENCE_SECONDS) == 0
        assert [pid for pid in pids if is_alive(pid)] == []


async def test_a_hard_limit_that_was_lowered_holds_for_new_processes() -> None:
    """The server gives processes the soft limit that it was started with, or the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    try:
        async with on_server() as (server, box):
            assert (await box.exec(["sh", "-c", "ulimit -n"])).stdout == "1000\n"
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (400, 400))
            assert (await box.exec(["sh", "-c", "ulimit -n"])).stdout == "400\n"
            assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (400, 400)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_who_connects_while_there_are_no_descriptors_waits_and_the_log_tells_once() -> None:
    async with on_server() as (server, box), bystander(box):

        async def connect() -> str:
            async with holdfast.connect(server.address("unix")) as other:
                return (await other.exec(["echo", "here"])).stdout

        with no_descriptors(server.pid):
            waiting = asyncio.create_task(connect())
            while "cannot accept" not in server.log():
                assert (await box.status()).pid == server.pid
                await asyncio.sleep(0)
        assert await waiting == "here\n"
        assert server.log().count("cannot accept: Too many open files; trying again shortly") == 1


async def test_a_keeper_without_descriptors_gets_no_new_processes_to_hold() -> None:
    async with on_server() as (server, box), bystander(box):
        with (
            no_descriptors(server.process.pid),
            pytest.raises(ResourceExhausted, match=r"keeper, pid \d+, holds \d+ descriptors, and its limit is"),
        ):
            await box.exec(["true"])
        assert (await box.exec(["echo", "again"])).stdout == "again\n"


# --- pids -------------------------------------------------------------------------------------------------------


@contextmanager
def pids_cgroup() -> Iterator[Path]:
    """A cgroup with a `pids.max` that can be set."""
    path = Path(f"/sys/fs/cgroup/pids/holdfast-test-{secrets.token_hex(4)}")
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no pids cgroup can be made here: {error}")
    try:
        yield path
    finally:
        path.rmdir()


async def test_without_pids_starts_are_refused_and_kills_work() -> None:
    with pids_cgroup() as group:
        async with on_server() as (server, box), bystander(box):
            shell = await box.shell()
            family = "sleep 1000 & setsid sleep 1000 & echo started; read x"
            doomed = [await box.start(["sh", "-c", family], stdin="open") for _ in range(2)]
            for process in doomed:
                await process.wait_for_output("started")
            for pid in (server.process.pid, server.pid):
                (group / "cgroup.procs").write_text(str(pid))
            (group / "pids.max").write_text("0")
            starts = [box.exec(["true"]), box.exec(["true"], user=str(os.geteuid())), box.shell(), box.terminal()]
            for start in starts:
                with pytest.raises(ResourceExhausted, match=r"no more processes .*RLIMIT_NPROC.*pids.max"):
                    await start
            assert (await shell.run("echo $((1 + 1))")).stdout == "2\n"
            assert await doomed[0].terminate(force=True)
            assert await doomed[1].terminate(grace=5.0)
            assert "Traceback" not in server.log()
            (group / "pids.max").write_text("max")
            assert (await box.exec(["echo", "again"])).stdout == "again\n"


# --- terminals --------------------------------------------------------------------------------------------------

#: In a mount namespace of its own, with a devpts that has two terminals.
TERMINALS = """
import asyncio, holdfast

async def main():
    async with holdfast.connect("inprocess") as box:
        size = holdfast.TerminalSize(24, 80)
        open = [await box.start(["cat"], tty=size) for _ in range(2)]
        try:
            await box.start(["cat"], tty=size)
        except holdfast.HoldfastError as error:
            print(type(error).__name__, error)
        print((await box.exec(["echo", "pipes"])).stdout)
        await open[0].terminate(force=True)
        print((await (await box.start(["sh", "-c", "exit 3"], tty=size)).wait()).exit_code)

asyncio.run(main())
"""


def test_without_terminals_one_is_refused_and_the_others_stay() -> None:
    mounts = (
        "mount -t devpts -o newinstance,ptmxmode=0666,max=2 devpts /dev/pts"
        ' && mount --bind /dev/pts/ptmx /dev/ptmx && exec "$0" -c "$1"'
    )
    require("unshare")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounts, sys.executable, TERMINALS],
        env=server_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no devpts can be mounted here: {done.stderr.strip()}")
    refused, pipes, _, exit_code = done.stdout.splitlines()
    assert refused.startswith("ResourceExhausted cannot start 'cat': no terminal is left: ")
    assert refused.endswith("close some, or raise kernel.pty.max")
    assert (pipes, exit_code) == ("pipes", "3")
