"""Jobs of processes on pipes: both streams, input, signals, trees, late readers; by the public client.

Their output, their input and their exit code are known from the seed alone; `Broken` describes a difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import re

from holdfast.client.process import Process
from holdfast.types import ExitStatus, OutputChunk, OutputGap
from tests.support.servers import is_alive

from .checking import Broken, Following, same
from .place import LOST_LINE_SECONDS, Place, connected, follow, started, told_unless_scarce


async def pipes(place: Place) -> None:
    """Both streams, apart, with pauses; one or two readers."""
    script, printed = "", {"stdout": b"", "stderr": b""}
    for _ in range(place.rng.randint(1, 12)):
        stream = place.rng.choice(("stdout", "stderr"))
        command, data = place.piece(1, place.rng.choice((10, 2_000, 70_000)))
        script += command if stream == "stdout" else command.replace(";", " >&2;")
        printed[stream] += data
        if place.rng.random() < 0.4:
            script += f"sleep {place.rng.uniform(0.01, 0.2):.3f}; "
    end, status = place.ending()
    process = await place.box.start(place.sh(script + end), overflow="block")
    async with started(place, process):
        readers = place.rng.randint(1, 2)
        await asyncio.gather(*(follow(place, process, printed, status) for _ in range(readers)))
        got = await process.wait()
        if got != status:
            raise Broken(f"{place.name}: wait tells {got} instead of {status}")


async def stream(place: Place) -> None:
    """A long one, as fast as it goes or with pauses."""
    pieces = [place.piece(100_000, 900_000) for _ in range(place.rng.randint(2, 8))]
    pause = "" if place.rng.random() < 0.5 else f"sleep {place.rng.uniform(0.02, 0.2):.3f}; "
    script = pause.join(command for command, _ in pieces)
    end, status = place.ending()
    process = await place.box.start(place.sh(script + end), overflow="block")
    async with started(place, process):
        await follow(place, process, {"stdout": b"".join(data for _, data in pieces), "stderr": b""}, status)


async def quick(place: Place) -> None:
    """Commands that end at once, one after the other, by `exec`."""
    for _ in range(place.rng.randint(2, 8)):
        out, printed = place.piece(0, 300)
        err, complained = place.piece(0, 300)
        code = place.rng.randrange(256)
        result = await place.box.exec(place.sh(f"{out}{err.replace(';', ' >&2;')}exit {code}"))
        if result.truncated and place.scarce:
            place.lost += 1
        else:
            same(f"{place.name}, stdout", result.stdout_bytes, printed)
            same(f"{place.name}, stderr", result.stderr_bytes, complained)
        if result.returncode != code:
            raise Broken(f"{place.name}: exit code {result.returncode} instead of {code}")
        place.seen += len(printed) + len(complained)


async def lines(place: Place) -> None:
    """Very long lines and very many short ones, as text."""
    first = place.rng.randrange(1_000_000)
    count = place.rng.randint(1, 20_000)
    width = place.rng.randint(1, 200_000)
    script = f"seq {first} {first + count - 1}; head -c {width} /dev/zero | tr '\\0' x; echo; exit 7"
    numbers = b"".join(b"%d\n" % n for n in range(first, first + count))
    process = await place.box.start(["sh", "-c", script], overflow="block")
    async with started(place, process):
        printed = {"stdout": numbers + b"x" * width + b"\n", "stderr": b""}
        await follow(place, process, printed, ExitStatus(7))


async def echo(place: Place) -> None:
    """Input in pieces of any size; the echo shows that each byte arrived once and in order."""
    process = await place.box.start(["cat"], stdin="open", overflow="block")
    _, data = place.piece(0, place.rng.choice((500, 50_000, 1_500_000)))
    async with started(place, process):
        following = asyncio.create_task(follow(place, process, {"stdout": data, "stderr": b""}, ExitStatus(0)))
        try:
            await write(place, process, data)
            await process.close_stdin()
            await following
        finally:
            following.cancel()
            await asyncio.wait((following,))


async def write(place: Place, process: Process, data: bytes) -> None:
    sent = 0
    most = place.rng.choice((100, 10_000, 400_000))
    while sent < len(data):
        count = place.rng.randint(1, max(most, len(data) // 200))
        await process.write(data[sent : sent + count])
        sent += count
        if place.rng.random() < 0.05:
            await asyncio.sleep(place.rng.uniform(0, 0.1))


async def later(place: Place) -> None:
    """No reader while it runs; then another client reads, piece by piece, by position."""
    pieces = [place.piece(1, 100_000) for _ in range(place.rng.randint(1, 5))]
    end, status = place.ending()
    script = f"sleep {place.rng.uniform(0, 0.3):.3f}; " + "".join(command for command, _ in pieces) + end
    id = place.name.replace(" ", "-")
    process = await place.box.start(place.sh(script), id=id)
    async with started(place, process):
        if place.rng.random() < 0.5:
            await process.wait()
        async with connected(place.address) as other:
            handle = await other.process(id)
            following = Following(
                place.name, {"stdout": b"".join(data for _, data in pieces), "stderr": b""}, status
            )
            since = 0
            while True:
                found = await handle.read(since, place.rng.randint(1, 60_000), wait=5.0)
                # Each lost part is reported before the output behind it.
                told: list[OutputChunk | OutputGap] = [*found.gap, *found.chunks]
                told.sort(key=lambda each: (each.stream, each.offset))
                for each in told:
                    following.take(each)
                since = found.next_seq - 1
                if found.closed and not told:
                    break
            following.all_printed()
            following.ended(await handle.wait())
            place.count(following, may_lose=True)


async def background(place: Place) -> None:
    """A child goes on printing after its leader has ended."""
    first, before = place.piece(1, 5_000)
    second, after = place.piece(1, 5_000)
    script = f"(sleep {place.rng.uniform(0.05, 0.5):.3f}; {second}) & {first}exit 4"
    process = await place.box.start(place.sh(script))
    async with started(place, process):
        await follow(place, process, {"stdout": before + after, "stderr": b""}, ExitStatus(4))


async def tree(place: Place) -> None:
    """A tree with an escaped branch is ended; nothing of it is left."""
    script = "setsid sleep 1000 & echo $!; (sleep 1000 & echo $!; wait) & sleep 1000; wait"
    process = await place.box.start(["sh", "-c", script], stdin="closed")
    async with started(place, process):
        with told_unless_scarce(place):
            await process.wait_for_output(re.compile(rb"\d+\n\d+\n"), timeout=LOST_LINE_SECONDS)
        printed = (await process.snapshot()).stdout
        force = place.rng.random() < 0.5
        await process.terminate(grace=1.0, force=force)
        status = await process.wait()
        expected = "SIGKILL" if force else "SIGTERM"
        # The reply to a first attempt may be lost with its server, in the middle of the killing.
        if status.signal != expected and not (place.killed and status.signal == "SIGKILL"):
            raise Broken(f"{place.name}: ended by {status} instead of {expected}")
        left = [pid for pid in printed.split() if is_alive(int(pid)) and _is_sleep(int(pid))]
        if left:
            raise Broken(f"{place.name}: processes {left} are left of an ended tree")


def _is_sleep(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().startswith(b"sleep")
    except OSError:
        return False


async def signals(place: Place) -> None:
    """Each signal arrives once, however often it had to be sent."""
    script = "n=0; trap 'n=$((n+1)); echo $n' USR1; echo ready; while :; do read x && exit $n; done"
    process = await place.box.start(["sh", "-c", script], stdin="open")
    count = place.rng.randint(1, 6)
    async with started(place, process):
        with told_unless_scarce(place):
            await process.wait_for_output("ready\n", timeout=LOST_LINE_SECONDS)
            for number in range(1, count + 1):
                await process.signal("USR1")
                await process.wait_for_output(f"{number}\n", timeout=LOST_LINE_SECONDS)
        if place.gave_up:
            return
        await process.write(b"end\n")
        printed = b"ready\n" + b"".join(b"%d\n" % n for n in range(1, count + 1))
        await follow(place, process, {"stdout": printed, "stderr": b""}, ExitStatus(count))


async def storm(place: Place) -> None:
    """Many starts at a time, that end at once."""

    async def one(number: int) -> None:
        process = await place.box.start(["sh", "-c", f"echo {number}; exit {number % 100}"])
        async with started(place, process):
            expected = {"stdout": b"%d\n" % number, "stderr": b""}
            await follow(place, process, expected, ExitStatus(number % 100))

    results = await asyncio.gather(*(one(n) for n in range(place.rng.randint(5, 40))), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def given_up(place: Place) -> None:
    """Commands with a caller that gives up, or with a timeout: they are killed, with all their children."""
    script = "sleep 1000 & sleep 1000; wait"
    if place.rng.random() < 0.5:
        try:
            await place.box.exec(["sh", "-c", script], timeout=place.rng.uniform(0.01, 0.5), timeout_retry=False)
        except TimeoutError:
            return
        raise Broken(f"{place.name}: ended though it sleeps")
    running = asyncio.create_task(place.box.exec(["sh", "-c", script]))
    await asyncio.sleep(place.rng.uniform(0, 0.5))
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
        raise Broken(f"{place.name}: ended though it sleeps")


async def bound(place: Place) -> None:
    """It ends with its connection, and not before."""
    command, data = place.piece(1, 3_000)
    async with connected(place.address) as own:
        process = await own.start(place.sh(f"{command} exec sleep 1000"), lifetime="connection")
        await asyncio.sleep(place.rng.uniform(0, 1.0))
        if not (await process.describe()).running:
            raise Broken(f"{place.name}: it ended while its connection was there")
    handle = await place.box.process(process.id)
    async with started(place, handle):
        await follow(place, handle, {"stdout": data, "stderr": b""}, ExitStatus(143, "SIGTERM"))
