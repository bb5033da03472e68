"""Keeper and server are killed together: the next one ends or resumes the survivors, and reports the loss."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import StdinClosed
from holdfast.runtime.durability import keeper
from holdfast.runtime.tree import cgroup
from holdfast.types import Closed, Exited, TerminalSize
from tests.process.versions import ServerHome, home
from tests.support.servers import conversation, is_alive
from tests.support.signalling import send_signal

#: Prints and goes on, with a child that got away from its session; neither prints again.
QUIET = "echo printed; setsid sleep 1000 & exec sleep 1000"
KEEP = {"HOLDFAST_ORPHANED_JOBS": "keep"}


@pytest.fixture
def here(tmp_path: Path) -> Iterator[ServerHome]:
    with home(tmp_path / "place") as made:
        yield made


def kill_both(process: subprocess.Popen[bytes], server: int) -> None:
    """At once: neither sees the other die."""
    send_signal(process.pid, signal.SIGSTOP)
    send_signal(server, signal.SIGKILL)
    process.kill()
    process.wait()
    while is_alive(server):  # its sockets and its locks are open until then
        os.sched_yield()


async def test_the_next_server_ends_what_a_killed_keeper_left(here: ServerHome) -> None:
    first, reported = here.serve()
    async with holdfast.connect(here.address, reconnect_deadline=0) as box:
        process = await box.start(["sh", "-c", QUIET])
        await process.wait_for_output("printed")
        kill_both(first, reported["pid"])
    assert is_alive(process.pid)
    second, reported = here.serve()
    assert not is_alive(process.pid)
    assert len(list(here.spool.iterdir())) == 1, "the one of the server that runs"
    async with holdfast.connect(here.address) as box:
        status = await box.status()
        assert status.lost == f"the keeper, pid {first.pid}, was killed: 1 processes were ended"
        assert await box.processes() == []
    assert f"process '{process.id}', pid {process.pid}, is lost" in here.log.read_text()
    assert cgroups_of(first.pid) == []
    here.stop(second)


def cgroups_of(pid: int) -> list[str]:
    """Of a keeper that had this pid."""
    return [
        path for mount, own in cgroup._hierarchies() if os.path.isdir(path := f"{mount}{own}/holdfast-{pid}-kept")
    ]


async def test_the_next_server_goes_on_without_their_streams(here: ServerHome) -> None:
    first, reported = here.serve(settings=KEEP)
    async with holdfast.connect(here.address, reconnect_deadline=0) as box:
        quiet = await box.start(["sh", "-c", QUIET], stdin="open")
        terminal = await box.start(["sh", "-c", "trap '' HUP; echo printed; sleep 1000"], tty=TerminalSize())
        chatty = await box.start(["sh", "-c", "echo printed; while :; do echo more; done"], overflow="block")
        ended = await box.start(["sh", "-c", "echo printed; exit 4"])
        for each in (quiet, terminal, chatty, ended):
            await each.wait_for_output("printed")
        await chatty.wait_for_output("more")
        await ended.wait()
        kill_both(first, reported["pid"])
    # Its pipe has no reader: SIGPIPE ends it.
    while is_alive(chatty.pid):
        os.sched_yield()
    second, reported = here.serve(settings=KEEP)
    log = here.log.read_text()
    assert f"process '{quiet.id}', pid {quiet.pid}, runs on, without its streams" in log
    assert f"process '{chatty.id}', pid {chatty.pid}, is gone" in log
    async with holdfast.connect(here.address) as box:
        summary = f"the keeper, pid {first.pid}, was killed: 1 processes are gone, 2 run on without their streams"
        assert (await box.status()).lost == summary
        again = await box.process(ended.id)
        assert ((await again.wait()).exit_code, (await again.describe()).failure) == (4, None)
        assert (await again.snapshot()).stdout == b"printed\n"
        gone = await box.process(chatty.id)
        assert (await gone.wait()).exit_code == 255
        lost = f"its keeper, pid {first.pid}, and its server were killed: its later output is lost"
        assert (await gone.read()).failure == f"{lost}, and its exit status"
        assert (await gone.snapshot()).stdout.startswith(b"printed\nmore\n")
        for n in range(2):
            running = await box.process(quiet.id)
            info = await running.describe()
            assert (info.running, info.pid, info.failure) == (True, quiet.pid, f"{lost}, and its exit status")
            assert (await running.snapshot()).stdout == b"printed\n"
            if n == 0:
                # A server that comes after knows it, too.
                send_signal(reported["pid"], signal.SIGKILL)
        with pytest.raises(StdinClosed):
            await running.write(b"x")
        assert await running.terminate(grace=5.0)
        assert (await running.wait()).exit_code == 255
        assert [type(event) async for event in running.events()][-2:] == [Exited, Closed]
        on_terminal = await box.process(terminal.id)
        assert (await on_terminal.describe()).running
        assert await on_terminal.terminate(force=True)
    assert cgroups_of(first.pid) == []
    here.stop(second)


async def test_what_another_server_may_come_back_for_is_left_alone(here: ServerHome, tmp_path: Path) -> None:
    first, reported = here.serve(settings=KEEP)
    async with holdfast.connect(here.address, reconnect_deadline=0) as box:
        process = await box.start(["sleep", "1000"])
        kill_both(first, reported["pid"])
    [spool] = here.spool.iterdir()
    with home(tmp_path / "elsewhere") as other:
        other.spool = here.spool
        second, _ = other.serve()
        assert is_alive(process.pid)
        assert spool.exists()
        other.stop(second)
        send_signal(process.pid, signal.SIGKILL)
        while is_alive(process.pid):
            os.sched_yield()
        third, _ = other.serve()
        assert not spool.exists(), "nothing runs there any more"
        other.stop(third)
    here.socket.unlink()


async def test_a_server_without_its_keeper_ends_in_order_though_its_cgroups_were_swept(here: ServerHome) -> None:
    """As a server that starts elsewhere does with those of a keeper that is gone."""
    first, reported = here.serve(settings=KEEP)
    async with conversation(here.address) as talk:
        await talk.initialize()
        first.kill()
        first.wait()
        for path in cgroups_of(first.pid):
            cgroup._remove_below(path)
        watch = os.pidfd_open(reported["pid"])
        assert (await talk.result("environment/status"))["keeperPid"] is None
        await talk.result("server/shutdown")
    await asyncio.to_thread(select.select, [watch], [], [])
    os.close(watch)
    assert here.leftovers() == []


def test_a_process_is_dying_from_the_moment_its_main_thread_is() -> None:
    """Its other threads keep its files open: a hang-up comes too late to show whose children these are."""
    script = (
        "import ctypes, os, threading; threading.Thread(target=os.read, args=(0, 1)).start();"
        "print('ready', flush=True); ctypes.CDLL(None).pthread_exit(None)"
    )
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        one = object.__new__(keeper.Keeper)
        one._link, theirs = socket.socketpair()
        one._server = os.getpid()
        assert not one._is_dying()
        one._server = process.pid
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        while not one._is_dying():
            os.sched_yield()
        assert process.poll() is None, "its files are open"
        process.kill()
    assert one._is_dying(), "it is gone"
    one._server = os.getpid()
    theirs.close()
    assert one._is_dying(), "it hung up"
    one._link.close()
