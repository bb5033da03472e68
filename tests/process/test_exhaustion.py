"""The machine runs out of room, inodes, descriptors, pids or terminals: who asked is told, the rest goes on.

Each case has a server of its own under a keeper, a process that runs through it all, and an end at which there is
enough again. What needs root, a mount or a cgroup is skipped where it cannot be had.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

import holdfast
from holdfast.client.process import Process
from holdfast.client.sandbox import Sandbox
from holdfast.errors import ResourceExhausted
from holdfast.model import OutputChunk, OutputGap
from holdfast.testing.servers import RunningServer, running_server, server_command, server_environment

#: Answers each line of input; the rest of the machine is none of its business.
BYSTANDER = "echo ready; while read line; do echo got $line; done; exit 5"


@contextmanager
def small_file_system(options: str) -> Iterator[str]:
    """A tmpfs of its own; it stands for a disk, too: both answer ENOSPC."""
    path = tempfile.mkdtemp(prefix="hf-", dir="/tmp")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], capture_output=True)
    try:
        if mounted.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
        yield path
    finally:
        if not mounted.returncode:
            subprocess.run(["umount", "--lazy", path], check=True)
        os.rmdir(path)


def fill(path: str, leave: int = 0) -> None:
    """Take every block that is free, but for so many bytes."""
    file = os.open(f"{path}/filler", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    while (free := _free(path) - leave) > 0:
        os.posix_fallocate(file, os.fstat(file).st_size, free)
    os.close(file)


def _free(path: str) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


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
    """A process that ran before, that answers in between, and whose whole output is right at the end."""
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
async def on_small_spool(options: str) -> AsyncIterator[tuple[str, RunningServer, Sandbox]]:
    with small_file_system(options) as path, running_server(settings={"spool_directory": path}) as server:
        async with holdfast.connect(server.address("unix")) as box:
            yield path, server, box
            server.pid = (await box.status()).pid


async def kill_server(server: RunningServer, box: Sandbox) -> None:
    os.kill(server.pid, signal.SIGKILL)
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
        lost = await box.exec(["sh", "-c", "echo what; exit 3"])
        assert (lost.returncode, lost.stdout, lost.truncated) == (3, "", True), "it ran, and says what is missing"
        with pytest.raises(ResourceExhausted, match=r"input of process .* cannot be kept: No space left on device"):
            await fed.write(b"refused")
        with pytest.raises(ResourceExhausted, match=r"cannot be (written|made): No space left on device"):
            await box.shell()
        with pytest.raises(ResourceExhausted, match=r"cannot be (written|made): No space left on device"):
            await box.terminal()
        async with holdfast.connect(server.address("unix")) as other:
            assert (await other.exec(["true"])).success, "a session needs no room of the spool"
        # What was noted in the room that was set aside is there for the next server.
        await kill_server(server, box)
        assert (await running.describe()).running
        empty(path)
        await fed.write(b"taken once")
        await fed.close_stdin()
        await fed.wait()
        assert (await fed.snapshot()).stdout == b"taken once"
        assert (await box.exec(["echo", "again"])).stdout == "again\n"
        assert (await shell.run("true")).exit_code == 0 if shell.state != "closed" else True
