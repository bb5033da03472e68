"""The first server of a background start is a fork of its `serve`, beside which the keeper starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.launch import local_server
from holdfast.types import OutputChunk
from tests.support.servers import server_environment
from tests.support.signalling import send_signal

PATIENCE = 60.0
#: Forks a server and plays it: `link` is its socket to the keeper, which may not have begun yet.
PLAY = """
import os, signal
from holdfast.cli.verbs.inside.serve import _fork_server
from holdfast.runtime.durability.keeper_link import KeeperLink
kept = _fork_server(["/bin/false"], None, "kill")
link = KeeperLink(kept)
"""


def play(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PLAY + script],
        env=server_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_signals_before_the_keeper_has_its_handlers_are_not_lost() -> None:
    done = play("""
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
os.kill(link.pid, signal.SIGTERM)
link.take()  # it signals the keeper, too
signal.pause()
""")
    assert (done.returncode, done.stderr) == (7, "")


def test_a_server_that_ends_before_its_keeper_has_begun_ends_the_keeper() -> None:
    done = play("os._exit(3)")
    assert (done.returncode, done.stderr) == (3, "")


def test_the_server_has_the_signal_mask_of_its_start() -> None:
    done = play("""
held = link.take()
print(held, signal.pthread_sigmask(signal.SIG_BLOCK, ()), int(signal.getsignal(signal.SIGUSR1)), flush=True)
link.stop()
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "{} set() 0\n", "")


async def test_a_forked_server_is_restarted_by_its_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_DIRECTORY", str(tmp_path / "run"))
    path = await asyncio.to_thread(local_server.ensure_server)
    log = f"{tmp_path}/run/server.log"
    async with asyncio.timeout(PATIENCE), holdfast.connect(f"unix:{path}") as box:
        first = (await box.status()).pid
        keeper = parent_of(first)
        try:
            assert "--kept" not in command_of(first)
            for pid in (first, keeper):
                assert [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1, 2)] == ["/dev/null", log, log]
            script = "grep SigBlk /proc/self/status; read x; echo $x"
            process = await box.start(["sh", "-c", script], stdin="open")
            with ended(first):
                send_signal(first, signal.SIGKILL)
            await process.write("still here\n")
            await process.close_stdin()
            assert (await process.wait()).exit_code == 0
            printed = b"".join([chunk.data async for chunk in process.output() if isinstance(chunk, OutputChunk)])
            assert printed.split() == [b"SigBlk:", b"0" * 16, b"still", b"here"]
            second = (await box.status()).pid
            assert (parent_of(second), "--kept" in command_of(second)) == (keeper, True)
        finally:
            with ended(keeper):
                send_signal(keeper, signal.SIGTERM)
    assert not os.path.exists(f"/proc/{second}")  # noqa: ASYNC240 - one system call


@contextlib.contextmanager
def ended(pid: int) -> Iterator[None]:
    """Wait at the end of the block until the process has ended."""
    watch = os.pidfd_open(pid)
    try:
        yield
        select.select([watch], [], [], PATIENCE)
    finally:
        os.close(watch)
