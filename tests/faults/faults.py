"""The faults: what is done to the server while jobs run, when, and for how long; all of it drawn from a seed.

Cuts and delays are the relay's. Kills and stops are signals to the server, a stall is one to its keeper; scarcity
is a file that takes all the room of the spool's file system, or a limit on the server's descriptors. Touches the
server from outside, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Final

from tests.support.file_systems import fill_blocks
from tests.support.signalling import send_signal

from .crash_points import CRASHES
from .relay import Relay

KINDS: Final = ("kill", "crash", "stop", "stall", "cut", "delay", "enospc", "emfile")
#: How often each is drawn.
WEIGHTS: Final = {"kill": 4, "stop": 3, "stall": 1, "cut": 2, "enospc": 1, "emfile": 1}
#: The keeper gives up when five servers in a row do not come up, and waits longer before each start.
DEATHS_A_ROUND: Final = 4
#: The size of the file system that can be filled.
ROOM: Final = "size=192m"


class Faults:
    """Throws faults until it is cancelled. `kills` and `scarcities` count faults that may have touched a job."""

    def __init__(self, keeper: int, relay: Relay, seed: str, kinds: Collection[str], spool: str) -> None:
        self._keeper = keeper
        self._relay = relay
        self._random = random.Random(seed)
        self._kinds = [kind for kind in WEIGHTS if kind in kinds]
        self._spool = spool
        self._kills_left = DEATHS_A_ROUND - (CRASHES if "crash" in kinds else 0)
        self.done: Counter[str] = Counter()
        self.kills = 0
        #: How many have begun, and how many last.
        self.scarcities = 0
        self._lasting = 0
        self._peaces = 0
        #: How often the server has died at a place that was chosen.
        self.crashes: Callable[[], int] = lambda: 0

    def troubles(self) -> tuple[int, int, int]:
        return self.kills + self.crashes(), self.scarcities, self._lasting

    @contextlib.contextmanager
    def peace(self) -> Iterator[None]:
        """No new faults for the length of a block, but for crashes at chosen places."""
        self._peaces += 1
        self._relay.peaceful = True
        try:
            yield
        finally:
            self._peaces -= 1
            self._relay.peaceful = self._peaces > 0

    @contextlib.contextmanager
    def _scarcity(self) -> Iterator[None]:
        self.scarcities += 1
        self._lasting += 1
        try:
            yield
        finally:
            self._lasting -= 1

    async def run(self) -> None:
        """One after the other, for ever."""
        while self._kinds:
            await asyncio.sleep(self._random.expovariate(2.5))
            if self._peaces:
                continue
            weights = [WEIGHTS[kind] for kind in self._kinds]
            kind = self._random.choices(self._kinds, weights)[0]
            await getattr(self, f"_{kind}")()
            self.done[kind] += 1
            if not self._kills_left and "kill" in self._kinds:
                self._kinds.remove("kill")

    async def _kill(self) -> None:
        """Now and then twice: the second falls into the start of the next server."""
        twice = self._random.random() < 0.4
        again = self._random.uniform(0.0, 0.4)
        after = self._random.choice((0, 0, self._random.randrange(200_000)))
        await self._passed(after)
        self._signal(signal.SIGKILL)
        if twice:
            await asyncio.sleep(again)
            self._signal(signal.SIGKILL)

    async def _passed(self, count: int) -> None:
        """Until so many more bytes have passed, or for a moment: there may be none to come."""
        until = self._relay.passed + count
        for _ in range(20):
            if self._relay.passed >= until:
                return
            await asyncio.sleep(0.01)

    async def _stop(self) -> None:
        seconds = self._random.uniform(0.02, 1.2)
        pid = self._signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                if pid:
                    send_signal(pid, signal.SIGCONT)

    async def _stall(self) -> None:
        """The keeper is stopped: a server that calls it waits, one that dies is not started again yet."""
        seconds = self._random.uniform(0.02, 0.8)
        send_signal(self._keeper, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds / 2)
            if self._random.random() < 0.3 and "kill" in self._kinds:
                self._signal(signal.SIGKILL)
            await asyncio.sleep(seconds / 2)
        finally:
            send_signal(self._keeper, signal.SIGCONT)

    async def _cut(self) -> None:
        self._relay.cut_all()

    async def _enospc(self) -> None:
        """All the room of the spool's file system is taken, for a moment."""
        seconds = self._random.uniform(0.05, 0.5)
        path = os.path.join(self._spool, "filler")
        with self._scarcity():
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                fill_blocks(fd)
                await asyncio.sleep(seconds)
            finally:
                os.close(fd)
                os.unlink(path)

    async def _emfile(self) -> None:
        """The server may open a few more descriptors, or none, for a moment."""
        seconds = self._random.uniform(0.05, 0.5)
        more = self._random.randrange(8)
        pid = server_of(self._keeper)
        if not pid:
            return
        with contextlib.suppress(ProcessLookupError, FileNotFoundError), self._scarcity():
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            if before[0] != before[1]:
                return  # it has not raised its own yet, and would take ours for that of its processes
            highest = max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 1 + more, before[1]))
            try:
                await asyncio.sleep(seconds)
            finally:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    def _signal(self, number: signal.Signals) -> int:
        pid = server_of(self._keeper)
        if pid:
            if number == signal.SIGKILL:
                if not self._kills_left:
                    return pid
                self._kills_left -= 1
                self.kills += 1
            with contextlib.suppress(ProcessLookupError):
                send_signal(pid, number)
        return pid


def children(pid: int) -> list[int]:
    """Of one process with one thread, the ended ones too."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def server_of(keeper: int) -> int:
    """The server that this keeper has now; 0 while there is none."""
    for pid in children(keeper):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"--kept" in file.read().split(b"\0"):
                return pid
    return 0


@contextlib.contextmanager
def small_spool(directory: str) -> Iterator[bool]:
    """Make `directory` a file system that can be filled; False if we may not mount one."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"{ROOM},mode=0700", "holdfast-faults", directory], capture_output=True
    )
    try:
        yield made.returncode == 0
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", "--lazy", directory], check=True)
