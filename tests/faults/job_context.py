"""Where a job runs: its random numbers, its way to the server, and what may have touched it. Starts nothing itself.

Output is cut from one file of random bytes, so that every byte is known and no two ranges are alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final

import holdfast
from holdfast.client.process import Process
from holdfast.client.sandbox import Sandbox
from holdfast.errors import HoldfastError, ResourceExhausted
from holdfast.runtime.process.signals import signal_name
from holdfast.types import ExitStatus

from .checking import Broken, Following

#: A line that is awaited comes at once, or after the server's return.
LOST_LINE_SECONDS: Final = 30.0
#: Three servers that die one after the other, each at its start, take longer than the default on a busy machine.
RECONNECT_SECONDS: Final = 300.0
BLOB_BYTES: Final = 4 * 1024 * 1024
#: `o FROM COUNT` prints a part of the blob at the script's $0.
PRELUDE: Final = 'o() { dd if="$0" iflag=skip_bytes,count_bytes skip=$1 count=$2 bs=64k status=none; }; '


class JobContext:
    """Where one job runs: its random numbers, its way to the server, and what has happened around it."""

    def __init__(
        self,
        name: str,
        rng: random.Random,
        box: Sandbox,
        address: str,
        blob: tuple[str, bytes],
        troubles: Callable[[], tuple[int, int, int]],
        *,
        keeps_little: bool = False,
    ) -> None:
        self.name = name
        self.rng = rng
        self.box = box
        #: A way to the server through which faults may come, for a connection of its own.
        self.address = address
        self.blob_path, self.blob = blob
        self._troubles = troubles
        self._before = troubles()
        #: Whether a process without a reader may lose output, by the server's settings.
        self.keeps_little = keeps_little
        self.seen = 0
        self.lost = 0
        self.gave_up = False

    @property
    def killed(self) -> bool:
        """Whether a server was killed since the job began."""
        return self._troubles()[0] > self._before[0]

    @property
    def scarce(self) -> bool:
        """Whether room or descriptors were short then, or since then."""
        _, begun, lasting = self._before
        return lasting > 0 or self._troubles()[1] > begun

    def piece(self, least: int, most: int) -> tuple[str, bytes]:
        """A command that prints a part of the blob, and what it prints."""
        count = self.rng.randint(least, most)
        start = self.rng.randrange(len(self.blob) - count)
        return f"o {start} {count}; ", self.blob[start : start + count]

    def sh(self, script: str) -> list[str]:
        return ["sh", "-c", PRELUDE + script, self.blob_path]

    def ending(self) -> tuple[str, ExitStatus]:
        """How a script ends."""
        if self.rng.random() < 0.2:
            number = self.rng.choice((9, 15, 6))
            return f"kill -{number} $$; sleep 1000", ExitStatus(128 + number, signal_name(number))
        code = self.rng.choice((0, 0, 1, 3, 77, 126, 255))
        return f"exit {code}", ExitStatus(code)

    def count(self, following: Following, *, may_lose: bool = False) -> None:
        self.seen += following.seen
        if following.lost and not self.scarce and not (may_lose and self.keeps_little):
            raise Broken(f"{self.name}: {following.lost} bytes were told to be lost, and nothing was scarce")
        self.lost += following.lost


@contextlib.asynccontextmanager
async def started(context: JobContext, process: Process) -> AsyncIterator[Process]:
    """A process that is forgotten at the end, whatever became of the job."""
    try:
        yield process
    finally:
        await patiently(context, lambda: process.terminate(force=True))
        await patiently(context, process.forget)


async def patiently(context: JobContext, do: Callable[[], Awaitable[object]]) -> None:
    """Clean up; again for as long as something is scarce."""
    while True:
        try:
            await do()
            return
        except ResourceExhausted:
            if not context.scarce:
                raise
            await asyncio.sleep(0.1)


async def follow(context: JobContext, process: Process, expected: dict[str, bytes], status: ExitStatus) -> None:
    """Read it to its end, as it comes."""
    following = Following(context.name, expected, status)
    async for event in process.events():
        following.take(event)
    following.over()
    context.count(following)


@contextlib.contextmanager
def reported_unless_scarce(context: JobContext) -> Iterator[None]:
    """A line that was lost for want of room comes with the next one: a waiter for it may wait for ever."""
    try:
        yield
    except TimeoutError:
        if not context.scarce:
            raise
        context.gave_up = True
        context.lost += 1


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[Sandbox]:
    """A connection of its own. Only its first handshake is tried once; that is no fault of the server's."""
    for attempt in range(20):
        try:
            context = holdfast.connect(address, reconnect_deadline=RECONNECT_SECONDS)
            box = await context.__aenter__()
            break
        except HoldfastError:
            if attempt == 19:
                raise
            await asyncio.sleep(0.1)
    try:
        yield box
    finally:
        await context.__aexit__(None, None, None)
