"""The keeper itself: it starts the server again, gives up in the end, obeys signals, leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from holdfast.runtime.durability import keeper
from holdfast.runtime.durability.keeper_link import KeeperLink
from tests.support.servers import (
    conversation,
    is_alive,
    running_server,
    server_command,
    server_environment,
)
from tests.support.signalling import send_signal

#: Plays a server: `link` is its line to the keeper, `turn` counts the servers before it.
PLAY = """
import os, resource, sys
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))  # as a server does
from holdfast.runtime.durability.keeper_link import KeeperLink
link = KeeperLink(int(sys.argv[sys.argv.index("--kept") + 1]))
held = link.take()
turn = link.restarts
def say(text): os.write(1, text.encode() + b"\\n")
"""


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Runs a keeper with this script as its server."""

    def run(script: str, orphaned_jobs: str = "kill", *, hurried: bool = False) -> subprocess.Popen[str]:
        path = tmp_path / "server.py"
        path.write_text(PLAY + script)
        program = [keeper.__file__]
        if hurried:
            program = ["-c", Path(keeper.__file__).read_text().replace("5.0)", "0.0)").replace("1.6, 3.2,", "")]
        program = [sys.executable, "-I", "-S", *program, "-", orphaned_jobs, sys.executable, str(path)]
        return subprocess.Popen(
            program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=server_environment(), text=True
        )

    return run


def test_a_server_that_dies_is_started_again_and_gets_everything_back(
    play: Callable[..., subprocess.Popen[str]],
) -> None:
    process = play(
        """
if turn == 0:
    reading, writing = os.pipe()
    os.write(writing, b"from before")
    link.keep("pipe", [reading, writing], "/some/path")
    link.keep("dropped", [reading])
    link.drop("dropped")
    link.up()
    os.kill(os.getpid(), 9)
path, fds = held["pipe"]
say(f"{sorted(held)} {path} {os.read(fds[0], 100)} restarts={turn}")
link.stop()
sys.exit(3)
"""
    )
    printed, log = process.communicate(timeout=60)
    assert printed == "['pipe'] /some/path b'from before' restarts=1\n"
    assert process.returncode == 3, "its own exit code is the server's"
    assert log.count("was killed by signal 9; starting it again") == 1


def test_descriptors_that_the_keeper_has_no_room_for_are_told_and_not_taken_for_the_whole(
    play: Callable[..., subprocess.Popen[str]],
) -> None:
    process = play(
        """
import resource
if turn == 0:
    link.keep("before", [0])
    link.up()
    link.status(os.getpid())
    limits = resource.prlimit(link.pid, resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir(f"/proc/{link.pid}/fd"))
    resource.prlimit(link.pid, resource.RLIMIT_NOFILE, (used + 2, limits[1]))
    link.keep("too many", [0] * 10)
    link.status(os.getpid())
    resource.prlimit(link.pid, resource.RLIMIT_NOFILE, limits)
    link.keep("after", [0, 0])
    os.kill(os.getpid(), 9)
say(str({key: len(one.fds) for key, one in held.items()}))
link.stop()
"""
    )
    printed, log = process.communicate(timeout=60)
    assert printed == "{'before': 1, 'after': 2}\n", log
    assert "too many will not survive the server: no descriptors are left, of" in log


def test_the_status_of_a_process_outlives_the_server_that_started_it(
    play: Callable[..., subprocess.Popen[str]],
) -> None:
    process = play(
        """
if turn == 0:
    link.up()
    pids = [os.posix_spawn("/bin/sh", ["sh", "-c", script], os.environ) for script in ("exit 7", "kill -9 $$")]
    # Both have ended, and nobody has asked how.
    for pid in pids:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    link.keep(f"{pids[0]} {pids[1]}", [0])
    os.kill(os.getpid(), 9)
pids = [int(pid) for pid in next(iter(held)).split()]
link.lead(pids)
link.up()
said = [link.status(pid) for pid in pids]
assert said == [link.status(pid) for pid in pids]
say(str(said))
for pid in pids:
    link.free(pid)
say(str([link.status(pid) for pid in pids]))
link.stop()
"""
    )
    printed, log = process.communicate(timeout=60)
    assert printed == f"{[(os.CLD_EXITED, 7), (os.CLD_KILLED, 9)]}\n[None, None]\n", log


def test_what_a_server_handed_over_is_kept_though_it_died_with_an_answer_unread(
    play: Callable[..., subprocess.Popen[str]],
) -> None:
    process = play(
        """
import select
if turn == 0:
    link.up()
    link._send(("STATUS", 1))
    link.ring()
    select.select([link], [], [])
    link.keep("late", [0], "/some/path")
    os.kill(os.getpid(), 9)
say(str(sorted(held)))
link.stop()
"""
    )
    printed, log = process.communicate(timeout=60)
    assert printed == "['late']\n", log


def test_a_leader_that_may_go_is_gone_though_nobody_rings(play: Callable[..., subprocess.Popen[str]]) -> None:
    process = play(
        """
import time
if turn == 0:
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 7"], os.environ)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    link.keep(str(pid), [0])
    link.up()
    os.kill(os.getpid(), 9)
pid = int(next(iter(held)))
link.lead([pid])
link.up()
assert link.status(pid) == (os.CLD_EXITED, 7)
link.free(pid)
while os.path.exists(f"/proc/{pid}"):
    time.sleep(0.01)
say("gone")
link.stop()
"""
    )
    printed, log = process.communicate(timeout=60)
    assert printed == "gone\n", log


@pytest.mark.parametrize("orphaned_jobs", ["kill", "keep"])
def test_it_gives_up_on_a_server_that_does_not_come_up(
    play: Callable[..., subprocess.Popen[str]], orphaned_jobs: str, tmp_path: Path
) -> None:
    spool = tmp_path / "spool"
    (spool / "below").mkdir(parents=True)
    process = play(
        f"""
if turn == 0:
    say(str(os.posix_spawn("/bin/sh", ["sh", "-c", "exec sleep 1000 >&- 2>&-"], os.environ)))
    link.keep("spool", [0], {str(spool)!r})
    link.up()
os.kill(os.getpid(), 9)
""",
        orphaned_jobs,
        hurried=True,
    )
    printed, log = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"given up: it did not come up {keeper.MAX_FAILURES} times in a row" in log
    assert is_alive(int(printed)) == (orphaned_jobs == "keep")
    assert spool.exists() == (orphaned_jobs == "keep"), "the next server finds there what runs on"
    if orphaned_jobs == "keep":
        send_signal(int(printed), signal.SIGKILL)


def test_a_server_that_ends_before_it_ever_served_is_not_started_again(
    play: Callable[..., subprocess.Popen[str]],
) -> None:
    process = play("say('no'); sys.exit(4)")
    assert process.communicate(timeout=60) == ("no\n", "")
    assert process.returncode == 4


def test_a_word_to_stop_while_no_server_lives(play: Callable[..., subprocess.Popen[str]]) -> None:
    # It waits before the second start in a row, and gets a message meanwhile.
    process = play("link.up(); say(str(turn)); os.kill(os.getpid(), 9)")
    assert process.stdout is not None
    assert process.stderr is not None
    for line in process.stderr:
        if "starting it again in" in line:
            break
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def test_the_delays_grow_and_begin_anew_after_a_long_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    one = keeper.Keeper(["/bin/false"], None, kill_jobs=True)
    waits = []
    for lived in (1, 1, 1, 1, 1, 1, 1, 1, 1, 100, 1):
        one._is_up, one._started_at = True, now
        now += lived
        one._failed("it ended")
        assert one._start_due is not None
        waits.append(round(one._start_due - now, 1))
    signal.set_wakeup_fd(-1)
    for number in (*keeper.STOPPING, signal.SIGCHLD, keeper.BELL):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    assert waits == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 0.0, 0.1]


async def test_status_tells_of_the_keeper_and_of_restarts() -> None:
    with running_server() as server:
        async with holdfast.connect(server.address("unix")) as box:
            before = await box.status()
            assert (before.keeper_pid, before.restarts) == (server.process.pid, 0)
            send_signal(server.pid, signal.SIGKILL)
            after = await box.status()
            assert (after.keeper_pid, after.restarts) == (server.process.pid, 1)
            assert after.pid != before.pid
            assert after.uptime < (after.keeper_uptime or 0.0)
            server.pid = after.pid


async def test_a_server_can_be_without_a_keeper() -> None:
    with running_server(settings={"keeper": False}) as server:
        assert server.pid == server.process.pid
        async with holdfast.connect(server.address("unix")) as box:
            assert (await box.status()).keeper_pid is None


async def test_both_end_in_order_after_a_restart() -> None:
    with running_server(["unix", "ws"]) as server:
        async with holdfast.connect(server.address("ws")) as box:
            before = await box.start(["sleep", "1000"])
            await box.start(["sh", "-c", "setsid sleep 1000 & echo"])
            send_signal(server.pid, signal.SIGKILL)
            after = await box.start(["sleep", "1000"])
            assert await asyncio.to_thread(server.stop) == 0
            assert not any(is_alive(pid) for pid in (before.pid, after.pid))
            assert server.leftovers() == []


async def test_a_server_that_is_killed_while_it_starts() -> None:
    """At once, and then again at every moment of its start that a hundred milliseconds may hit."""
    with running_server() as server:
        async with holdfast.connect(server.address("unix")) as box:
            process = await box.start(["sh", "-c", "echo ready; read x; exit 9"], stdin="open")
            await process.wait_for_output("ready")
            for delay in (0.0, 0.02, 0.1):
                send_signal(server.pid, signal.SIGKILL)
                server.pid = await _next_server(server.process.pid, server.pid)
                await asyncio.sleep(delay)
            send_signal(server.pid, signal.SIGKILL)
            await process.close_stdin()
            assert (await process.wait()).exit_code == 9


async def _next_server(keeper_pid: int, former: int) -> int:
    while (pid := find_server(keeper_pid)) in (None, former):  # noqa: ASYNC110 - the kernel reports no event
        await asyncio.sleep(0)
    assert pid is not None
    return pid


def find_server(keeper_pid: int) -> int | None:
    """The server among the keeper's children."""
    with open(f"/proc/{keeper_pid}/task/{keeper_pid}/children") as children:
        for child in children.read().split():
            with contextlib.suppress(OSError), open(f"/proc/{child}/cmdline", "rb") as command:
                if b"--kept" in command.read():
                    return int(child)
    return None


async def test_without_its_keeper_a_server_ends_and_takes_everything_with_it() -> None:
    with running_server(exit_code=None) as server:
        async with conversation(server.address("unix")) as talk:
            await talk.initialize()
            await talk.result("process/start", processId="p", argv=["sleep", "1000"])
            server.process.kill()
            exited = await talk.notice("process/exited")
            assert exited["signal"] == "SIGTERM"
            watch = os.pidfd_open(server.pid)
            await asyncio.to_thread(select.select, [watch], [], [])
            os.close(watch)
        assert server.leftovers() == []


async def test_a_server_may_go_on_without_its_keeper() -> None:
    with running_server(settings={"orphaned_jobs": "keep"}, exit_code=None) as server:
        async with conversation(server.address("unix")) as talk:
            await talk.initialize()
            await talk.result("process/start", processId="p", argv=["cat"], pipeStdin=True)
            server.process.kill()
            await asyncio.to_thread(server.process.wait)
            await talk.result("process/closeStdin", processId="p")
            assert (await talk.result("process/wait", processId="p"))["exitCode"] == 0
            await talk.result("server/shutdown")
            watch = os.pidfd_open(server.pid)
            await asyncio.to_thread(select.select, [watch], [], [])
            os.close(watch)
        assert server.leftovers() == []


def test_an_address_that_is_taken_is_told_at_once(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o700)
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(tmp_path / "s"))
        taken.listen()
        command = server_command([f"unix:{tmp_path}/s"])
        done = subprocess.run(command, env=server_environment(), capture_output=True, timeout=60)
    assert done.returncode == 2
    assert b"a server already listens there" in done.stderr


def test_the_line_to_a_keeper_that_is_gone_is_told_and_not_waited_for() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = KeeperLink(ours.detach())
    assert link.check()
    theirs.close()
    assert not link.check()
    link.keep("key", [0])
    assert link.status(1) is None
    link.close()


def test_a_server_that_is_stopped_ends_when_it_is_told() -> None:
    with running_server() as server:
        send_signal(server.pid, signal.SIGSTOP)
        assert server.stop() == 0


def test_a_keeper_that_holds_more_descriptors_than_its_server_may_have_starts_the_next_one(
    play: Callable[..., subprocess.Popen[str]],
) -> None:
    """It watches the server by a descriptor of its own limit, not of the one that it gives to the server."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
    try:
        process = play(
            """
if turn == 0:
    for number in range(10):
        link.keep(str(number), [0] * 8)
    link.up()
    os.kill(os.getpid(), 9)
link.up()
say(f"{turn} {len(held)} {sum(len(each.fds) for each in held.values())}")
link.stop()
""",
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    printed, log = process.communicate(timeout=60)
    assert (printed, process.returncode) == ("1 10 80\n", 0), log
