"""What may be left when all jobs are over: as much as was there before, and not a descriptor more.

Reads /proc and the spool, and asks the server. Some things are let go of a moment later (the keeper reaps orphans,
a session ends): each is waited for, and told if it does not come.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from holdfast.client.sandbox import Sandbox
from holdfast.testing.servers import RunningServer, marked_processes

from .checking import Broken
from .faults import children, server_of

#: How long everything may take to be let go of.
SETTLE_SECONDS: Final = 20.0
#: A pool of threads, once used, stays: as many as Python makes.
POOL_THREADS: Final = 8
#: Files of a spool without processes.
SPOOL_FILES: Final = frozenset({"ledger", "terminal-reads"})


class Footing(msgspec.Struct, frozen=True):
    """What a server and its keeper have while nothing runs."""

    server: tuple[str, ...]
    keeper: tuple[str, ...]
    threads: int


def footing(server: RunningServer) -> Footing:
    keeper = server.process.pid
    pid = server_of(keeper)
    return Footing(descriptors(pid), descriptors(keeper), len(os.listdir(f"/proc/{pid}/task")))


def descriptors(pid: int) -> tuple[str, ...]:
    """What a process has open, each without what makes it unique."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue  # it was closed meanwhile
        found.append(re.sub(r"\[\d+\]", "", target))
    return tuple(sorted(found))


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        line = next(line for line in file if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


async def check(server: RunningServer, box: Sandbox, before: Footing, spool: str) -> None:
    """Raise `Broken` for whatever is left and should not be."""
    kept = await box.processes()
    if kept:
        raise Broken(f"the server still has {kept}, which were forgotten")
    keeper = server.process.pid
    await _until("children of the keeper", lambda: set(children(keeper)) - {server_of(keeper)})
    await _until("children of the server", lambda: set(children(server_of(keeper))))
    await _until("processes", lambda: set(marked_processes(server.mark)) - {keeper, server_of(keeper)})
    await _until("descriptors of the server", lambda: _more(descriptors(server_of(keeper)), before.server))
    await _until("descriptors of the keeper", lambda: _more(descriptors(keeper), before.keeper))
    await _until("files of the spool", lambda: _spool_files(spool) - SPOOL_FILES)
    threads = len(os.listdir(f"/proc/{server_of(keeper)}/task"))
    if threads > before.threads + POOL_THREADS:
        raise Broken(f"the server has {threads} threads; it began with {before.threads}")
    if (await box.status()).spool_bytes:
        raise Broken(f"the spool is said to hold {(await box.status()).spool_bytes} bytes of nothing")


async def _until(what: str, left: Callable[[], object]) -> None:
    """Nobody is told when these are gone, so they are looked at again and again."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_SECONDS
    while found := left():
        if loop.time() > deadline:
            raise Broken(f"{what} are left: {_named(found)}")
        await asyncio.sleep(0.05)


def _more(now: tuple[str, ...], before: tuple[str, ...]) -> list[str]:
    return sorted((Counter(now) - Counter(before)).elements())


def _spool_files(spool: str) -> set[str]:
    return {name for each in os.listdir(spool) for name in os.listdir(os.path.join(spool, each))}


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
