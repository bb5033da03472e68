"""From one version's server to another's with jobs running: same pids, every byte once, and no way to lose them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import marshal
import os
import signal
import socket
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

import holdfast
from holdfast.client.process import Process
from holdfast.errors import InvalidRequest
from holdfast.launch.keeper_client import SUFFIX, find
from holdfast.runtime.durability import keeper, ledger, records
from holdfast.types import OutputChunk, OutputGap, TerminalSize
from tests.process.versions import (
    PATIENCE_SECONDS,
    ServerHome,
    copy_package,
    earlier_package,
    home,
    package_with_earlier_keeper,
    variation,
)
from tests.support.servers import conversation, is_alive, running_server
from tests.support.signalling import send_signal

VERSION = ("__init__.py", '__version__ = "0.1.0"', '__version__ = "99.0.0"')
ECHO = "echo ready; while read line; do echo got $line; done; exit 5"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[ServerHome]:
    with home(tmp_path / "place") as made:
        yield made


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_package(tmp_path_factory.mktemp("newer"), VERSION)


async def digest(process: Process) -> tuple[str, int]:
    """Of all that it prints on stdout, checked to be contiguous, and how much that was."""
    found, end = hashlib.sha256(), 0
    async for event in process.events():
        assert not isinstance(event, OutputGap), event
        if isinstance(event, OutputChunk):
            assert event.offset == end
            end += len(event.data)
            found.update(event.data)
    return found.hexdigest(), end


async def test_from_one_version_to_another_with_jobs_running(here: ServerHome, newer: Path) -> None:
    last = 300_000
    old, reported = here.serve()
    async with holdfast.connect(here.address) as box:
        flood = await box.start(
            ["sh", "-c", f"read go; seq {last // 2}; read go; seq {last // 2 + 1} {last}; exit 3"],
            stdin="open",
            overflow="block",
        )
        talk = await box.start(["sh", "-c", ECHO], stdin="open")
        terminal = await box.start(["sh", "-c", f"stty -echo; {ECHO}"], tty=TerminalSize(10, 20))
        for each in (talk, terminal):
            await each.wait_for_output("ready")
        pids = [each.pid for each in (flood, talk, terminal)]
        reading = asyncio.create_task(digest(flood))
        await flood.write(b"go\n")
        await flood.wait_for_output("\n1000\n")

        left = here.holdfast("stop", "--keep", "--json")
        assert json.loads(left.stdout) == {"pid": reported["pid"], "stopped": True, "keeperPid": old.pid}, (
            left.stderr
        )
        assert not is_alive(reported["pid"])
        assert all(is_alive(pid) for pid in pids)
        # Sent while no server runs: it waits in the backlog, and is answered by the other version.
        requested = asyncio.create_task(talk.write(b"between\n"))
        absent = here.holdfast("status")
        assert absent.returncode == 3
        assert f"a keeper, pid {old.pid}, holds 3 processes and waits" in absent.stderr
        assert "`holdfast upgrade` or `holdfast serve` adopts" in absent.stderr

        waiter, now = here.serve(newer)
        await requested
        status = await box.status()
        assert (status.version, status.pid, status.keeper_pid) == ("99.0.0", now["pid"], old.pid)
        await flood.write(b"go\n")
        printed = b"".join(b"%d\n" % n for n in range(1, last + 1))
        assert await reading == (hashlib.sha256(printed).hexdigest(), len(printed))
        assert (await flood.wait()).exit_code == 3
        await terminal.write(b"typed\n")
        await terminal.wait_for_output("got typed")
        assert [(await each.describe()).pid for each in (flood, talk, terminal)] == pids
        await talk.close_stdin()
        assert (await talk.wait()).exit_code == 5
        assert (await talk.snapshot()).stdout == b"ready\ngot between\n"
    # A word to the sender of the command is a word to the server.
    waiter.send_signal(signal.SIGTERM)
    assert waiter.wait(PATIENCE_SECONDS) == 0
    assert old.wait(PATIENCE_SECONDS) == 0


@pytest.mark.parametrize("make", [earlier_package, package_with_earlier_keeper])
async def test_a_server_below_an_earlier_keeper_is_taken_over(
    here: ServerHome, tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    """This client works with the earlier server, and this server resumes its processes, shells and terminals."""
    package = make(tmp_path / "earlier")
    keeper, _ = here.serve(package)
    async with holdfast.connect(here.address) as box:
        done = await box.start(["sh", "-c", "echo done; exit 3"])
        assert (await done.wait()).exit_code == 3
        talk = await box.start(["sh", "-c", ECHO], stdin="open")
        await talk.wait_for_output("ready")
        shell = await box.shell("/bin/sh")
        await shell.run("x=kept; cd /")
        terminal = await box.terminal("/bin/bash", env={"HOME": str(tmp_path), "PS1": "$ "})
        assert (await terminal.run("y=kept; echo $y")).output == "kept\n"
        pids = [talk.pid, shell.pid, terminal.pid]

        await here.leave()
        here.serve()
        status = await box.status()
        assert (status.keeper_pid, status.restarts) == (keeper.pid, 1)
        assert [(await talk.describe()).pid, (await shell.describe()).pid, (await terminal.describe()).pid] == pids
        assert (await done.snapshot()).stdout == b"done\n"
        assert (await done.wait()).exit_code == 3
        await talk.write(b"after\n")
        await talk.close_stdin()
        assert (await talk.wait()).exit_code == 5
        assert (await talk.snapshot()).stdout == b"ready\ngot after\n"
        result = await shell.run("echo $x; pwd")
        assert (result.stdout, result.exit_code) == ("kept\n/\n", 0)
        assert (await terminal.run("echo $y")).output == "kept\n"
    here.stop(keeper)


async def test_upgrade_in_one_verb_and_in_the_background(here: ServerHome, newer: Path) -> None:
    assert here.holdfast("upgrade", package=newer).returncode == 3
    old, _ = here.serve(settings={"HOLDFAST_MAX_CONNECTIONS": "7"})
    async with holdfast.connect(here.address) as box:
        process = await box.start(["sh", "-c", ECHO], stdin="open")
        await process.wait_for_output("ready")
        done = here.holdfast("upgrade", "--json", package=newer)
        reported = json.loads(done.stdout)
        assert (reported["from"], reported["to"], reported["processesRunning"]) == ("0.1.0", "99.0.0", 1), (
            done.stderr
        )
        await process.write(b"x\n")
        await process.wait_for_output("got x")
        again = here.holdfast("serve", "--listen", here.address)
        assert again.returncode == 2
        assert f"pid {reported['pid']}, version 99.0.0" in again.stderr
        assert "`holdfast upgrade`" in again.stderr
        assert "`holdfast stop --keep`" in again.stderr
    assert here.holdfast("stop").returncode == 0
    assert old.wait(PATIENCE_SECONDS) == 0


async def test_a_server_whose_records_the_new_version_cannot_read_is_not_stopped(
    here: ServerHome, newer: Path, tmp_path: Path
) -> None:
    begun = "class ProcessBegun(JobRecord, frozen=True, tag={})"
    change = ("runtime/durability/records.py", begun.format(1), begun.format(98))
    other = copy_package(tmp_path / "other", change)
    old, reported = here.serve()
    async with holdfast.connect(here.address) as box:
        process = await box.start(["sh", "-c", ECHO], stdin="open")
        await process.wait_for_output("ready")
        refused = here.holdfast("upgrade", package=other)
        assert refused.returncode == 1
        (line,) = refused.stderr.splitlines()
        assert "the running server continues, and holdfast 0.1.0 cannot take over from it: " in line
        status = await box.status()
        assert (status.pid, status.restarts) == (reported["pid"], 0)
        upgraded = here.holdfast("upgrade", "--json", package=newer)
        assert json.loads(upgraded.stdout)["processesRunning"] == 1, upgraded.stderr
        await process.close_stdin()
        assert (await process.wait()).exit_code == 5
    here.stop(old)


async def test_whoever_starts_servers_goes_on_with_what_a_keeper_holds(here: ServerHome) -> None:
    old, _ = here.serve()
    async with holdfast.connect(here.address) as box:
        process = await box.start(["sleep", "1000"])
    await here.leave()
    listed = here.holdfast("ps", "--json")
    assert str(process.pid) in listed.stdout, listed.stderr
    here.stop(old)
    assert not is_alive(process.pid)


async def test_stop_ends_a_keeper_that_waits_and_all_that_it_holds(here: ServerHome) -> None:
    """For any setting of what becomes of jobs that never ended."""
    old, _ = here.serve(settings={"HOLDFAST_ORPHANED_JOBS": "keep"})
    async with holdfast.connect(here.address) as box:
        script = "trap 'echo > term; exit' TERM; setsid sleep 1000 & echo ready; sleep 1000 & wait"
        process = await box.start(["sh", "-c", script], cwd=str(here.directory))
        await process.wait_for_output("ready")
    await here.leave()
    refused = here.holdfast("serve", "--listen", here.address, "--keeper", "no")
    assert refused.returncode == 2
    assert "waits there with processes of an earlier server" in refused.stderr
    again = here.holdfast("stop", "--keep")
    assert again.returncode == 3
    assert "waits for one already" in again.stderr
    done = here.holdfast("stop", "--json")
    assert json.loads(done.stdout) == {"pid": None, "stopped": True, "keeperPid": old.pid}
    assert old.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM
    assert (here.directory / "term").exists(), "it had its time to end"
    assert here.leftovers() == []


async def test_a_version_that_does_not_come_up_costs_nothing(here: ServerHome, newer: Path, tmp_path: Path) -> None:
    """Each gives its reason, the keeper waits again, and in the end another version goes on."""
    old, _ = here.serve()
    async with holdfast.connect(here.address) as box:
        process = await box.start(["sh", "-c", ECHO], stdin="open")
        await process.wait_for_output("ready")
        await here.leave()
        for packet in (
            b"no language of ours",
            marshal.dumps(("SERVE",), 2),
            marshal.dumps(("SERVE", 1, 2), 2),
            b"",
        ):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(f"{here.socket}{SUFFIX}")
                stranger.send(packet)
                assert stranger.recv(1) == b""
        ends, dies = "os._exit(9)", "os.kill(os.getpid(), 9)"
        server_only = "import os, sys\nif '--kept' in sys.orig_argv: "
        demanding = "import holdfast.runtime.durability.recovery as recovery; recovery.NEEDED_PROTOCOL = 2"
        for n, (code, says) in enumerate(
            [
                (server_only + ends, "ended with exit code 9 before it served"),
                (server_only + dies, "was killed by signal 9 before it served"),
                (demanding, "has protocol version 1, and this server needs 2"),
            ]
        ):
            waiter, reported = here.serve(variation(tmp_path / f"version-{n}", code))
            assert reported == {}
            assert waiter.wait(PATIENCE_SECONDS) == 1
            assert says in here.log.read_text()
        # A record that a later version may have written.
        path = next(here.spool.glob("*/ledger"))
        size = path.stat().st_size
        head = records.LedgerHead(2, "99.0.0", old.pid, ledger.boot_id(), "kill", "")
        for record, says in (
            ([99, 1, "of a kind that nobody knows"], "does not know"),
            (head, "holdfast 99.0.0 wrote it in version 2, and holdfast 0.1.0 reads 1"),
        ):
            data = msgspec.msgpack.encode(record)
            with path.open("ab") as file:
                file.write(len(data).to_bytes(4, "little") + data)
            waiter, _ = here.serve()
            assert waiter.wait(PATIENCE_SECONDS) == 1
            assert says in here.log.read_text()
            assert path.stat().st_size == size + 4 + len(data), "it is as it was"
            os.truncate(path, size)
        here.serve(newer)
        await process.write(b"x\n")
        await process.wait_for_output("got x")
        # One that has served and is killed is started again, as ever.
        send_signal((await box.status()).pid, signal.SIGKILL)
        await process.close_stdin()
        assert (await process.wait()).exit_code == 5
        assert (await process.snapshot()).stdout == b"ready\ngot x\n"
    here.stop(old)


def test_records_grow_at_their_end() -> None:
    """A field that a later version added is passed over; one that an earlier one did not have has its default."""

    class Grown(records.LedgerRecord, frozen=True, tag=2):
        key: int
        pid: int
        started_at: float
        more: str = ""

    later = records.encode_records([Grown(1, 2, 3.0, "new")])
    assert list(records.decode_records(later)) == [records.ProcessStarted(1, 2, 3.0)]
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(records.ProcessStarted(1, 2, 3.0)), type=Grown)
    assert back == Grown(1, 2, 3.0, "")


async def test_a_server_without_a_keeper_is_not_stopped(here: ServerHome) -> None:
    server, _ = here.serve(settings={"HOLDFAST_KEEPER": "false"})
    done = here.holdfast("stop", "--keep")
    assert done.returncode == 1
    assert "has no keeper, and its processes would end with it: nothing was stopped" in done.stderr
    async with conversation(here.address) as talk:
        await talk.initialize()
        code, _ = await talk.error("server/shutdown", keep=True)
        assert code == InvalidRequest.code
        assert (await talk.result("environment/status"))["pid"] == server.pid
    assert here.holdfast("stop").returncode == 0


async def test_a_keeper_that_was_killed_while_it_waited_is_no_keeper(here: ServerHome) -> None:
    old, _ = here.serve()
    async with holdfast.connect(here.address) as box:
        process = await box.start(["sleep", "1000"])
    await here.leave()
    old.kill()
    old.wait()
    assert find(str(here.socket)) is None
    assert not here.socket.with_name(here.socket.name + SUFFIX).exists()
    new, _ = here.serve()
    assert not is_alive(process.pid)
    here.stop(new)


async def test_the_word_to_leave_needs_a_unix_socket() -> None:
    with running_server(["ws"]) as server:
        async with conversation(server.address("ws")) as talk:
            await talk.initialize()
            code, message = await talk.error("server/shutdown", keep=True)
            assert (code, "no Unix socket" in message) == (InvalidRequest.code, True)


async def test_a_package_in_a_zip_file_has_its_keeper(here: ServerHome, tmp_path: Path) -> None:
    archive = tmp_path / "holdfast.zip"
    root = Path(holdfast.__file__).parents[1]
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted((root / "holdfast").rglob("*.py")):
            file.write(path, path.relative_to(root))
    process, reported = here.serve(archive)
    assert reported["keeper"] == process.pid, here.log.read_text()
    send_signal(reported["pid"], signal.SIGKILL)
    async with conversation(here.address) as talk:
        await talk.initialize()
        assert (await talk.result("environment/status"))["restarts"] == 1
    here.stop(process)


def test_another_user_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper closes the connection of a peer that is neither root nor its own user."""
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    class Listener:
        def accept(self) -> tuple[socket.socket, str]:
            return ours, ""

    monkeypatch.setattr(os, "geteuid", lambda: 4_242)
    # In this module alone: the thread that reports to the test runner unpacks, too.
    monkeypatch.setattr(keeper, "struct", SimpleNamespace(unpack=lambda *_: (1, 4_243, 1)))
    one = object.__new__(keeper.Keeper)
    one._clients = {}
    one._accept_client(cast("socket.socket", Listener()))
    assert one._clients == {}
    assert theirs.recv(1) == b""
    theirs.close()


def test_it_waits_long_enough_for_a_machine_that_is_short_of_memory() -> None:
    """The delays before the starts that are tried in a row."""
    waits = [keeper.DELAYS[min(n, len(keeper.DELAYS)) - 1] for n in range(1, keeper.MAX_FAILURES + 1)]
    assert sum(waits) > 20
