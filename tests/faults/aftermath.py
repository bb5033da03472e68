"""Leftovers when all jobs are over: as much as was there before, and not a descriptor more.

Reads /proc and the spool, and queries the server. Some things end a moment later (the keeper reaps orphans,
a session ends): each is waited for, and reported if it does not end.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from holdfast.client.sandbox import Sandbox
from tests.support.servers import RunningServer, marked_processes
from tests.support.signalling import send_signal

from .checking import Broken
from .faults import children, server_of

#: How long everything may take to be let go of.
SETTLE_SECONDS: Final = 60.0
#: A pool of threads, once used, stays: as many as Python makes.
POOL_THREADS: Final = 8
#: Files of a spool without processes.
SPOOL_FILES: Final = frozenset({"ledger", "terminal-reads"})

#: Two streams of each of the last commands, and of what came later.
FILES_A_SHELL: Final = 10


class Footing(msgspec.Struct, frozen=True):
    """The resources of a server and its keeper while nothing runs."""

    server: tuple[str, ...]
    keeper: tuple[str, ...]
    threads: int


async def footing(server: RunningServer) -> Footing:
    keeper = server.process.pid
    # The server is up once it listens; the keeper may read of its sockets and its spool a moment later.
    await _until("things that the keeper does not hold yet", lambda: _awaited(descriptors(keeper)))
    pid = server_of(keeper)
    return Footing(descriptors(pid), descriptors(keeper), len(os.listdir(f"/proc/{pid}/task")))


def descriptors(pid: int) -> tuple[str, ...]:
    """The open files of a process, each without its unique part."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue  # it was closed meanwhile
        found.append(re.sub(r"\[\d+\]|(?<=^/proc/)\d+", "", target))
    return tuple(sorted(found))


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        line = next(line for line in file if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


async def check(server: RunningServer, box: Sandbox, before: Footing, spool: str, *, scarce: bool) -> None:
    """Raise `Broken` for whatever is left and should not be.

    If something was `scarce`, the directory of a shell may be left: to remove one takes a descriptor.
    """
    for process in await box.processes():
        # Those of `exec` and `exec_remote` have no handle by which they could be forgotten.
        if process.info.running or not process.id.startswith(("exec-", "stream-")):
            raise Broken(f"the server still has {process.info}")
        await process.forget()
    keeper = server.process.pid
    await _until("children of the keeper", lambda: set(children(keeper)) - {server_of(keeper)})
    await _until("children of the server", lambda: set(children(server_of(keeper))))
    await _until("processes", lambda: set(marked_processes(server.mark)) - {keeper, server_of(keeper)})
    # Closed shells can be queried for a while, and so can their last commands.
    shells = FILES_A_SHELL * len(await box.shells())
    send_signal(keeper, signal.SIGUSR1)  # what the server has let go of may wait in the socket until it is rung
    await _until(
        "descriptors of the server", lambda: _over(_more(descriptors(server_of(keeper)), before.server), shells)
    )
    await _until("descriptors of the keeper", lambda: _over(_more(descriptors(keeper), before.keeper), shells))
    await _until("files of the spool", lambda: _over(_spool_files(spool, scarce), shells))
    threads = len(os.listdir(f"/proc/{server_of(keeper)}/task"))
    if threads > before.threads + POOL_THREADS:
        raise Broken(f"the server has {threads} threads; it began with {before.threads}")
    if not shells and (await box.status()).spool_bytes:
        raise Broken(f"the spool is said to hold {(await box.status()).spool_bytes} bytes of nothing")


async def _until(what: str, left: Callable[[], object]) -> None:
    """No event reports that these are gone, so they are polled."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_SECONDS
    while found := left():
        if loop.time() > deadline:
            raise Broken(f"{what} are left: {_named(found)}")
        await asyncio.sleep(0.05)


def _awaited(found: tuple[str, ...]) -> list[str]:
    spool = any("holdfast-spool-" in each for each in found)
    return [] if spool and found.count("socket:") >= 2 else ["the spool's lock, or the socket that listens"]


def _more(now: tuple[str, ...], before: tuple[str, ...]) -> list[str]:
    return sorted((Counter(now) - Counter(before)).elements())


def _over(found: list[str], files: int) -> list[str]:
    """All of them, if there are more than so many files of the spool, or others."""
    others = [each for each in found if "holdfast-spool-" not in each and not each[:1].isdecimal()]
    return found if others or len(found) > files else []


def _spool_files(spool: str, scarce: bool) -> list[str]:
    found = {name for each in os.listdir(spool) for name in os.listdir(os.path.join(spool, each))}
    return sorted(name for name in found - SPOOL_FILES if not (scarce and re.fullmatch(r"s\d+", name)))


def _named(found: object) -> object:
    """Pids with what runs there."""
    if not isinstance(found, set):
        return found
    named = []
    for each in found:
        shown = str(each)
        if isinstance(each, int):
            try:
                with open(f"/proc/{each}/stat") as stat, open(f"/proc/{each}/cmdline") as file:
                    state = stat.read().rpartition(")")[2].split()[0]
                    shown += f" ({state} {file.read().replace(chr(0), ' ').strip()[:200]})"
            except OSError:
                shown += " (gone by now)"
        named.append(shown)
    return named
