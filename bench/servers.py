"""Servers to measure, and ways to talk to them: each server is a process of its own in a private directory.

Touches the processes that it starts and /proc. A server that leaves anything behind fails the benchmark.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final

from holdfast.client.connection.channel_connection import ChannelConnection
from holdfast.client.dial import dialer
from holdfast.client.remote import RemoteExec
from holdfast.launch.pidfd_signals import signal_process
from holdfast.types import Closed, Exited, OutputChunk, Overflow, ProcessSpec
from holdfast.wire.messages import Encoding
from tests.support.servers import RunningServer

#: A crowd's processes end by themselves if the benchmark is killed.
SLEEP: Final = ("sleep", "600")
#: How many starts of a crowd are on their way at a time.
_AT_ONCE: Final = 16
#: Moving a thousand processes into cgroups takes the server's background thread some seconds.
_SETTLE_SECONDS: Final = 60.0
#: Bytes in the block that `producer` writes.
BLOCK: Final = 1024 * 1024
#: A tree for a kill: two children, one of them in a session of its own.
TREE: Final = "setsid sleep {mark} & sleep {mark} & wait"
TREE_SIZE: Final = 2


def size_of(blocks: int) -> str:
    """Format a number of blocks with its unit."""
    megabytes = blocks * BLOCK / 1e6
    return f"{megabytes / 1000:.0f} GB" if megabytes >= 1000 else f"{megabytes:.0f} MB"


class BenchmarkError(Exception):
    """The measured program did not do its job, so its figure would mean nothing."""


@contextlib.asynccontextmanager
async def talking_to(address: str, encoding: Encoding = "msgpack") -> AsyncIterator[RemoteExec]:
    """The exec interface over a connection of its own."""
    connection = ChannelConnection(dialer(address), address=address, client_name="bench", encoding=encoding)
    await connection.open()
    api = RemoteExec(connection)
    try:
        yield api
    finally:
        await api.aclose()


def spec_of(argv: Sequence[str], *, overflow: Overflow = "drop", pipe_stdin: bool = False) -> ProcessSpec:
    """A process with an id of its own."""
    return ProcessSpec(
        process_id=secrets.token_hex(6),
        argv=tuple(argv),
        overflow=overflow,
        pipe_stdin=pipe_stdin,
    )


def producer(blocks: int | None) -> tuple[str, ...]:
    """Prints so many blocks of zeros, or without end, as fast as a program can."""
    return ("dd", "if=/dev/zero", f"bs={BLOCK}", *([] if blocks is None else [f"count={blocks}"]), "status=none")


async def read_all(api: RemoteExec, argv: Sequence[str], *, overflow: Overflow) -> int:
    """Run a command, take all that it prints, and return how many bytes came."""
    _, events = await api.start_streaming(spec_of(argv, overflow=overflow))
    received = 0
    async for event in events:
        if isinstance(event, OutputChunk):
            received += len(event.data)
        elif isinstance(event, Exited) and not event.status.success:
            raise BenchmarkError(f"{argv[0]} ended with {event.status.exit_code}")
        elif isinstance(event, Closed):
            break
    return received


async def start_crowd(server: RunningServer, api: RemoteExec, count: int) -> None:
    """Start so many processes that do nothing, and wait until the server has no more work with them."""
    pids: list[int] = []
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            pids.append((await api.start(spec_of(SLEEP))).pid)

    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
    if any(way.startswith("cgroup") for way in (await api.status()).containment):
        await _settle(server.pid, pids)


async def _settle(server: int, pids: Sequence[int]) -> None:
    """Wait until every process is in a cgroup of its own, by polling: no event reports it."""
    own = _cgroups(server)
    try:
        async with asyncio.timeout(_SETTLE_SECONDS):
            while any(_cgroups(pid) == own for pid in pids):  # noqa: ASYNC110 - no event reports a move
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise BenchmarkError(f"processes were not in their cgroups after {_SETTLE_SECONDS:g} s") from None


def _cgroups(pid: int) -> str:
    with open(f"/proc/{pid}/cgroup") as file:
        return file.read()


async def kill_server(server: RunningServer) -> None:
    """Kill it with -9; on return it has ended, so that whatever answers is another one."""
    watch = os.pidfd_open(server.pid)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(watch, ended.set)
    try:
        signal.pidfd_send_signal(watch, signal.SIGKILL)
        await ended.wait()
    finally:
        loop.remove_reader(watch)
        os.close(watch)


def memory_bytes(pid: int, field: str = "VmRSS") -> int:
    """A figure of /proc/PID/status; output on tmpfs counts in none of them, unless it is mapped."""
    with open(f"/proc/{pid}/status") as file:
        line = next(line for line in file if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far, to the nanosecond; those that ended do not count."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/task/{thread}/schedstat") as file:
            total += int(file.read().split()[0])
    return total / 1e9


def processes_where(is_one: Callable[[int], bool]) -> list[int]:
    """The pids of this machine that satisfy a condition. A process that ends meanwhile does not."""

    def holds(pid: int) -> bool:
        try:
            return is_one(pid)
        except OSError:
            return False

    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and holds(int(name))]


def tree_mark() -> str:
    """An argument of `sleep` that is unique on this machine."""
    return f"{1000 + secrets.randbelow(10**6)}.25"


def sleepers(mark: str, *, end: bool = False) -> int:
    """The number of processes of a `TREE`; with `end`, they are killed."""

    def is_one(pid: int) -> bool:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == f"sleep\0{mark}\0".encode()

    found = processes_where(is_one)
    for pid in found if end else ():
        with contextlib.suppress(OSError):
            signal_process(pid, signal.SIGKILL, is_one)
    return len(found)
