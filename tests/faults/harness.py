"""Rounds: a server, a workload and faults from one seed; then the check of leftovers. `python -m tests.faults`.

A round is repeated by its seed alone: the jobs, what they print, the faults and the pauses between them are the
same, and only the machine's timing is not. Starts servers of its own in directories of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Collection
from typing import Final

import msgspec

from holdfast.client.sandbox import Sandbox
from holdfast.errors import HoldfastError, ResourceExhausted
from tests.support.servers import RunningServer, running_server, server_environment

from . import aftermath, hang_report
from .checking import Broken
from .crash_points import CrashPoints
from .faults import Faults, server_of, small_spool
from .job_context import BLOB_BYTES, JobContext, connected
from .relay import relaying
from .workload import JOBS

JOBS_A_ROUND: Final = 60
JOBS_AT_A_TIME: Final = 8
#: Clients that the jobs share; each is a connection through the relay.
CLIENTS: Final = 3
#: A job takes seconds. On a busy machine, if hundreds of its writes each meet a delay or a stopped server, it takes
#: minutes: one that takes this long is spared further faults.
PATIENCE_SECONDS: Final = 90.0
#: A job that takes this much longer without further faults waits for something that will not come.
PEACE_SECONDS: Final = 240.0
#: The part of a server's log that is shown at a failure.
LOG_BYTES: Final = 400_000
#: Servers of a round import `hang_report` from here.
REPOSITORY: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
#: Drawn for each round. Small ones make processes wait for their readers, and writers for their processes.
SETTINGS: Final[dict[str, tuple[object, ...]]] = {
    # Processes end with a client that does not return in this time; on a busy machine a client is late by seconds.
    "detached_session_seconds": (30.0,),
    "retained_output_bytes_per_process": (32 * 1024 * 1024, 1024 * 1024, 128 * 1024),
    "retained_chunks_per_process": (65_536, 256),
    "stdin_buffer_bytes": (1024 * 1024, 1024 * 1024, 4_096),
}
#: Of these, so many of ten rounds have a server that compacts its ledger again and again.
COMPACTING_OF_TEN: Final = 5
COMPACT_AT_ONCE: Final = """
import holdfast.runtime.durability.ledger as ledger
ledger.COMPACT_BYTES = 10_000
"""


class Failure(msgspec.Struct, frozen=True):
    """One broken invariant."""

    job: str
    what: str
    log: str


class RoundResult(msgspec.Struct, frozen=True):
    """The counts of one round."""

    seed: int
    seconds: float
    jobs: dict[str, int]
    faults: dict[str, int]
    restarts: int
    bytes_checked: int
    #: Reported as gaps or refusals while something was scarce.
    bytes_reported_lost: int
    refused: int
    #: Jobs that were spared further faults.
    slow: int
    server_rss: int
    failures: tuple[Failure, ...] = ()
    skipped: tuple[str, ...] = ()


def lower_soft_limit() -> None:
    """Give servers a soft limit of descriptors below the hard one, as most machines do.

    A server whose limits are equal sets none for its processes: they would inherit the limit of the fault `emfile`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))


class Round:
    """One server and what happens to it."""

    def __init__(self, seed: int, kinds: Collection[str], jobs: int = JOBS_A_ROUND) -> None:
        self._seed = seed
        self._kinds = set(kinds)
        self._job_count = jobs
        self._jobs: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._seen = 0
        self._lost = 0
        self._refused = 0
        self._slow = 0
        self._failures: list[Failure] = []
        self._skipped: list[str] = []
        self._rss = 0
        rng = random.Random(f"settings {seed}")
        self._settings = {name: rng.choice(values) for name, values in SETTINGS.items()}
        self._crashes: CrashPoints | None = None
        self._compacts = rng.randrange(10) < COMPACTING_OF_TEN
        self._restarts = 0

    async def run(self) -> RoundResult:
        began = time.monotonic()
        lower_soft_limit()
        own = os.listdir("/proc/self/fd")
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="hf-faults-", dir="/tmp"))
            blob = self._blob(directory)
            spool = self._spool(directory, stack)
            try:
                server = stack.enter_context(
                    running_server(
                        settings={**self._settings, "spool_directory": spool},
                        environ={"HOME": directory, **self._customized(directory)},
                        exit_code=0,
                    )
                )
                try:
                    await self._with_server(server, directory, spool, blob)
                except HoldfastError as error:
                    self._fail("the round", repr(error), server)
            except AssertionError as error:
                self._failures.append(Failure("the round", str(error), ""))
            try:
                # Leaves the server: its end is part of the round.
                stack.close()
            except AssertionError as error:
                self._failures.append(Failure("the server's end", str(error), ""))
            if len(os.listdir("/proc/self/fd")) > len(own):
                left = aftermath.descriptors(os.getpid())
                self._failures.append(Failure("the client", f"descriptors are left: {left}", ""))
        return RoundResult(
            seed=self._seed,
            seconds=time.monotonic() - began,
            jobs=dict(self._jobs),
            faults=dict(self._faults),
            restarts=self._restarts,
            bytes_checked=self._seen,
            bytes_reported_lost=self._lost,
            refused=self._refused,
            slow=self._slow,
            server_rss=self._rss,
            failures=tuple(self._failures),
            skipped=tuple(self._skipped),
        )

    def _blob(self, directory: str) -> tuple[str, bytes]:
        data = random.Random(self._seed).randbytes(BLOB_BYTES)
        path = os.path.join(directory, "blob")
        with open(path, "wb") as file:
            file.write(data)
        return path, data

    def _customized(self, directory: str) -> dict[str, str]:
        """Make the server write its tasks on a signal, compact its ledger often, or die at some place."""
        script = hang_report.SERVER_SCRIPT + (COMPACT_AT_ONCE if self._compacts else "")
        if "crash" in self._kinds:
            self._crashes = CrashPoints(directory, random.Random(f"crashes {self._seed}"))
            script += self._crashes.script
        with open(os.path.join(directory, "sitecustomize.py"), "w") as file:
            file.write(script)
        paths = (directory, server_environment()["PYTHONPATH"], REPOSITORY)
        return {"PYTHONPATH": os.pathsep.join(paths)}

    def _spool(self, directory: str, stack: contextlib.ExitStack) -> str:
        spool = os.path.join(directory, "spool")
        os.mkdir(spool)
        if not stack.enter_context(small_spool(spool)) and "enospc" in self._kinds:
            self._kinds.discard("enospc")
            self._skipped.append("enospc: no file system can be mounted here")
        return spool

    async def _with_server(
        self, server: RunningServer, directory: str, spool: str, blob: tuple[str, bytes]
    ) -> None:
        path = os.path.join(directory, "relay.sock")
        async with (
            relaying(path, server.socket, f"relay {self._seed}", self._kinds) as relay,
            connected(server.address("unix")) as control,
        ):
            before = await aftermath.footing(server)
            faults = Faults(server.process.pid, relay, f"faults {self._seed}", self._kinds, spool)
            if self._crashes is not None:
                faults.crashes = self._crashes.struck
                self._crashes.arm()
            throwing = asyncio.create_task(faults.run())
            try:
                async with self._clients(f"unix:{path}") as boxes:
                    await self._work(boxes, f"unix:{path}", blob, faults, server, control)
                    throwing.cancel()
                    await asyncio.wait((throwing,))
                    relay.peaceful = True
                    # A close drops the kills of cancelled commands if the server stays away; it is coming back.
                    for box in boxes:
                        await box.status()
            finally:
                throwing.cancel()
                await asyncio.wait((throwing,))
            if not throwing.cancelled() and (error := throwing.exception()) is not None:
                raise error
            self._faults = faults.done + Counter({"cut": relay.cuts - faults.done["cut"], "delay": relay.delays})
            if self._crashes is not None:
                self._crashes.disarm()
                self._faults["crash"] = self._crashes.struck()
            self._restarts = (await control.status()).restarts
            self._rss = aftermath.resident_bytes(server_of(server.process.pid))
            if not self._failures:
                try:
                    await aftermath.check(server, control, before, spool, scarce=faults.scarcities > 0)
                except Broken as error:
                    self._fail("what is left", str(error), server)

    @contextlib.asynccontextmanager
    async def _clients(self, address: str) -> AsyncIterator[list[Sandbox]]:
        async with contextlib.AsyncExitStack() as stack:
            yield [await stack.enter_async_context(connected(address)) for _ in range(CLIENTS)]

    async def _work(
        self,
        boxes: list[Sandbox],
        address: str,
        blob: tuple[str, bytes],
        faults: Faults,
        server: RunningServer,
        control: Sandbox,
    ) -> None:
        numbers = iter(range(self._job_count))

        async def worker() -> None:
            # The first failure ends the round: what comes after it may be its consequence.
            for number in numbers:
                if self._failures:
                    return
                await self._job(number, boxes[number % CLIENTS], address, blob, faults, server, control)

        await asyncio.gather(*(worker() for _ in range(JOBS_AT_A_TIME)))

    async def _job(
        self,
        number: int,
        box: Sandbox,
        address: str,
        blob: tuple[str, bytes],
        faults: Faults,
        server: RunningServer,
        control: Sandbox,
    ) -> None:
        rng = random.Random(f"job {number} {self._seed}")
        kind = rng.choices(list(JOBS), list(JOBS.values()))[0]
        name = f"{kind.__name__} {number}"
        little = self._settings != {name: values[0] for name, values in SETTINGS.items()}
        context = JobContext(name, rng, box, address, blob, faults.troubles, keeps_little=little)
        task = asyncio.create_task(kind(context), name=name)
        done, _ = await asyncio.wait((task,), timeout=PATIENCE_SECONDS)
        if not done:
            self._slow += 1
            with faults.peace():
                done, _ = await asyncio.wait((task,), timeout=PEACE_SECONDS)
        if not done:
            self._fail(name, f"it hangs\n{await hang_report.report(server, control)}", server)
            task.cancel()
            await asyncio.wait((task,), timeout=10)
            return
        try:
            task.result()
        except ResourceExhausted as error:
            # The promise is a clear error to the caller.
            if context.scarce:
                self._refused += 1
            else:
                self._fail(name, f"{error!r}, and nothing was scarce", server)
        except Broken as error:
            self._fail(name, str(error), server)
        except Exception as error:  # noqa: BLE001 - every other error is one that no caller should see
            self._fail(name, "".join(traceback.format_exception(error)), server)
        self._jobs[kind.__name__] += 1
        self._seen += context.seen
        self._lost += context.lost

    def _fail(self, job: str, what: str, server: RunningServer) -> None:
        if self._crashes is not None:
            what += "\nthe server dies " + ", ".join(self._crashes.named)
        self._failures.append(Failure(job, what, server.log()[-LOG_BYTES:]))
