"""The cost of making sandboxes: jails, containers, warm ones of a pool, forks, and many jails one after the other.

Every jail is in a directory of the benchmark's own. Docker is an engine of its own; where there is none, a line
names what is missing, and its row is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Final

from bench.measure import Row, Scale, Target, compare, figures, interleave_samples, latencies, one
from bench.servers import BenchmarkError
from bench.starts import run_exec
from holdfast.fleet.directories import DIRECTORY_VARIABLE
from holdfast.fleet.fleet import Fleet
from holdfast.fleet.pool import Pool
from tests.support.engines import Missing, busybox_root, docker_engine

IMAGE: Final = "hf-bench"
#: The namespaces of a jail, with the mounts that every jail has.
BWRAP_TRUE: Final = (
    *("bwrap", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
    *("--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/run", "true"),
)
#: Jails in a turn of the rows that take long, and files that a forked jail has changed at full scale.
TURNS: Final = 5
CHANGED_FILES: Final = 10_000
#: Jails that are made at a time when many are made.
AT_ONCE: Final = 4


async def making(scale: Scale) -> list[Row]:
    """Every figure of the fleet."""
    with fleet_directory() as directory:
        rows = [row for each in (_jails, _pool, _fork, _many) for row in await each(scale, directory)]
        return [*rows, *await _containers(scale)]


@contextlib.contextmanager
def fleet_directory() -> Iterator[str]:
    before = os.environ.get(DIRECTORY_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="hf-bench-") as directory:
        os.chmod(directory, 0o711)
        os.environ[DIRECTORY_VARIABLE] = directory
        try:
            yield directory
        finally:
            if before is None:
                del os.environ[DIRECTORY_VARIABLE]
            else:
                os.environ[DIRECTORY_VARIABLE] = before


async def _jails(scale: Scale, directory: str) -> list[Row]:
    """A jail until its first command has ended, beside bubblewrap alone."""
    async with Fleet("bwrap") as fleet:
        first = await _made(fleet)
        taken = await interleave_samples(
            scale.stream_rounds,
            min(TURNS, scale.starts),
            {"bwrap": one(_run_timed(BWRAP_TRUE)), "jail": one(lambda: _made(fleet))},
        )
    return [
        compare(
            "fleet-jail",
            '`create("bwrap")` until `exec(["true"])` has an answer',
            "ms",
            baseline_what="`bwrap … true` with the same namespaces",
            baseline=latencies(taken["bwrap"]),
            measured=latencies(taken["jail"]),
            target=Target("ratio at most", 6.0),
            note=f"the first of a process {first * 1000:,.0f} ms",
        )
    ]


async def _pool(scale: Scale, directory: str) -> list[Row]:
    """A warm jail until its first command has ended, beside a command on a connection that is open."""
    async with Pool("bwrap", warm=2, max=4) as pool, Fleet("bwrap").block() as box:

        async def take() -> float:
            await pool.ready()
            began = perf_counter()
            async with pool.take() as warm:
                await warm.exec(["true"])
                return perf_counter() - began

        taken = await interleave_samples(
            scale.stream_rounds, TURNS, {"exec": one(lambda: run_exec(box)), "take": one(take)}
        )
    return [
        compare(
            "fleet-pool",
            "`pool.take()` of a warm jail until `exec` has an answer",
            "ms",
            baseline_what="`exec` on an open connection",
            baseline=latencies(taken["exec"]),
            measured=latencies(taken["take"]),
            target=Target("ratio at most", 2.0),
        )
    ]


async def _fork(scale: Scale, directory: str) -> list[Row]:
    """A fork of a jail with many changed files, beside a copy of these files."""
    count = min(CHANGED_FILES, scale.crowd * 10)
    async with Fleet("bwrap") as fleet, fleet.block() as box:
        made = await box.exec(
            ["sh", "-c", f"mkdir d && cd d && for i in $(seq {count}); do echo $i > $i; done; ls | wc -l"]
        )
        if int(made.stdout or 0) != count:
            raise BenchmarkError(f"{made.stdout.strip()} files were made, of {count}: {made.stderr}")
        upper = f"{directory}/bwrap/{box.ref.id}/files/upper"

        async def copy() -> float:
            with tempfile.TemporaryDirectory(dir=directory) as target:
                return await _run_timed(["cp", "-a", "--reflink=auto", "--", upper, target])()

        async def fork() -> float:
            began = perf_counter()
            forked = await fleet.fork(box.ref.id)
            took = perf_counter() - began
            await fleet.remove(forked.id)
            return took

        taken = await interleave_samples(scale.server_rounds, 2, {"copy": one(copy), "fork": one(fork)})
    return [
        compare(
            "fleet-fork",
            f"fork of a jail with {count:,} changed files",
            "ms",
            baseline_what="`cp -a --reflink=auto` of the changed files",
            baseline=latencies(taken["copy"]),
            measured=latencies(taken["fork"]),
            target=Target("ratio at most", 1.5),
        )
    ]


async def _many(scale: Scale, directory: str) -> list[Row]:
    """Jails that are made, used and removed, a few at a time; then as many that live, and their memory here."""
    count = scale.sessions
    async with Fleet("bwrap", max_creates=AT_ONCE) as fleet:
        await _made(fleet)
        locations = asyncio.Semaphore(AT_ONCE)

        async def one_jail() -> None:
            async with locations:
                await _made(fleet)

        alone = perf_counter()
        for _ in range(AT_ONCE):
            await _run_timed(BWRAP_TRUE)()
        bare = AT_ONCE / (perf_counter() - alone)
        began = perf_counter()
        await asyncio.gather(*(one_jail() for _ in range(count)))
        rate = count / (perf_counter() - began)
        outside, resident, inside = await _memory_of_a_jail(max(2, count // 10))
        left = os.listdir(f"{directory}/bwrap")
        if left:
            raise BenchmarkError(f"{len(left)} of {count} jails are left")
    return [
        compare(
            "fleet-many",
            f"{count} jails made, used and removed, {AT_ONCE} at a time; 0 left",
            "/s",
            baseline_what="`bwrap … true`, one after the other",
            baseline=figures([bare]),
            measured=figures([rate]),
        ),
        compare(
            "fleet-rss",
            "memory of the host for each jail that lives and is connected: its maker, zygote and bubblewrap",
            "KB",
            baseline_what="the limit",
            baseline=figures([1024.0]),
            measured=figures([max(outside, 1.0)]),  # below a page, the processes reused memory that they had
            target=Target("at most", 1024.0),
            note=(
                f"proportional set size; resident, with libraries counted for each process, {resident:,.0f} KB; "
                f"the server and the keeper in the jail {inside:,.0f} KB"
            ),
        ),
    ]


async def _containers(scale: Scale) -> list[Row]:
    """A container until its first command has ended, beside `docker run` and `docker exec`."""
    with contextlib.ExitStack() as stack:
        try:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="hf-bench-"))
            engine = stack.enter_context(docker_engine())
            engine.image(busybox_root(Path(directory, "root")), IMAGE)
        except Missing as missing:
            sys.stderr.write(f"no Docker here, its row is left out: {missing}\n")
            return []
        number = iter(range(10**6))

        async def by_hand() -> float:
            name = f"hf-bench-{os.getpid()}-{next(number)}"
            run = ["docker", "run", "--detach", "--network", "none", "--name", name, IMAGE, "sleep", "9999"]
            took = await _run_timed(run)() + await _run_timed(["docker", "exec", name, "true"])()
            await _run_timed(["docker", "rm", "--force", "--volumes", name])()
            return took

        async with Fleet("docker") as fleet:
            taken = await interleave_samples(
                scale.server_rounds, 2, {"docker": one(by_hand), "fleet": one(lambda: _made(fleet, image=IMAGE))}
            )
    return [
        compare(
            "fleet-docker",
            '`create("docker")` until `exec(["true"])` has an answer',
            "ms",
            baseline_what="`docker run -d` and `docker exec` of the same image",
            baseline=latencies(taken["docker"]),
            measured=latencies(taken["fleet"]),
            target=Target("ratio at most", 1.5),
        )
    ]


async def _made(fleet: Fleet, image: str | None = None) -> float:
    """Make a sandbox, run `true` in it and remove it; the seconds until the answer."""
    began = perf_counter()
    async with fleet.block(image=image) as box:
        await box.exec(["true"])
        return perf_counter() - began


def _run_timed(argv: Sequence[str]) -> Callable[[], Awaitable[float]]:
    async def run() -> float:
        began = perf_counter()
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
        )
        if await process.wait() != 0:
            raise BenchmarkError(f"{argv[:3]} ended with {process.returncode}")
        return perf_counter() - began

    return run


async def _memory_of_a_jail(count: int) -> tuple[float, float, float]:
    """KB of each jail outside of it, proportional and resident, and KB of its own server and keeper.

    The maker is a fresh process: in this one, freed memory would be used again.
    """
    maker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _MAKER, str(count), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await maker.communicate()
    if maker.returncode != 0:
        raise BenchmarkError(f"the maker ended with {maker.returncode}")
    outside, resident, inside = map(float, printed.split())
    return outside, resident, inside


#: Counts bubblewrap's process outside of each jail, the zygote with the process that waits for the next jail, both
#: in equal parts, and the growth of the maker; and the processes within the jails.
_MAKER: Final = """
import asyncio, contextlib, os, sys
from holdfast.fleet.directories import children, fleet_directory
from holdfast.fleet.fleet import Fleet

def memory(pid, kind="Pss:"):
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) for line in file if line.startswith(kind))
    except (OSError, StopIteration):
        return 0

def namespace(pid):
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""

def processes():
    return {int(name) for name in os.listdir("/proc") if name.isdecimal()}

def zygotes():
    ours, found = namespace(os.getpid()), set()
    for pid in processes():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"jails.zygote" in file.read() and namespace(pid) == ours:
                found.add(pid)
    return found

def outer(box):
    with open(f"{fleet_directory()}/bwrap/{box.ref.id}/process") as file:
        return int(file.read().split()[0])

async def main(count):
    before = zygotes()
    async with Fleet("bwrap") as fleet, contextlib.AsyncExitStack() as stack:
        boxes = []
        for number in range(count + 2):
            boxes.append(await stack.enter_async_context(fleet.block()))
            await boxes[-1].exec(["true"])
            if number == 1:
                first = memory(os.getpid(), "Rss:")
        grown = memory(os.getpid(), "Rss:") - first
        shared = {*(zygotes() - before), *map(outer, boxes)}
        jails = {namespace(pid) for box in boxes for pid in children(outer(box))}
        inside = sum(memory(pid) for pid in processes() if namespace(pid) in jails)
        outside, resident = (sum(memory(pid, kind) for pid in shared) + grown for kind in ("Pss:", "Rss:"))
        print(outside / len(boxes), resident / len(boxes), inside / len(boxes))

asyncio.run(main(int(sys.argv[1])))
"""
