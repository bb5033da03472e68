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
from .job_context import LOST_LINE_SECONDS, JobContext, connected, follow, reported_unless_scarce, started


async def pipes(context: JobContext) -> None:
    """Both streams, apart, with pauses; one or two readers."""
    script, printed = "", {"stdout": b"", "stderr": b""}
    for _ in range(context.rng.randint(1, 12)):
        stream = context.rng.choice(("stdout", "stderr"))
        command, data = context.piece(1, context.rng.choice((10, 2_000, 70_000)))
        script += command if stream == "stdout" else command.replace(";", " >&2;")
        printed[stream] += data
        if context.rng.random() < 0.4:
            script += f"sleep {context.rng.uniform(0.01, 0.2):.3f}; "
    end, status = context.ending()
    process = await context.box.start(context.sh(script + end), overflow="block")
    async with started(context, process):
        readers = context.rng.randint(1, 2)
        await asyncio.gather(*(follow(context, process, printed, status) for _ in range(readers)))
        got = await process.wait()
        if got != status:
            raise Broken(f"{context.name}: wait tells {got} instead of {status}")


async def stream(context: JobContext) -> None:
    """A long one, as fast as it goes or with pauses."""
    pieces = [context.piece(100_000, 900_000) for _ in range(context.rng.randint(2, 8))]
    pause = "" if context.rng.random() < 0.5 else f"sleep {context.rng.uniform(0.02, 0.2):.3f}; "
    script = pause.join(command for command, _ in pieces)
    end, status = context.ending()
    process = await context.box.start(context.sh(script + end), overflow="block")
    async with started(context, process):
        await follow(context, process, {"stdout": b"".join(data for _, data in pieces), "stderr": b""}, status)


async def quick(context: JobContext) -> None:
    """Commands that end at once, one after the other, by `exec`."""
    for _ in range(context.rng.randint(2, 8)):
        out, printed = context.piece(0, 300)
        err, complained = context.piece(0, 300)
        code = context.rng.randrange(256)
        result = await context.box.exec(context.sh(f"{out}{err.replace(';', ' >&2;')}exit {code}"))
        if result.truncated and context.scarce:
            context.lost += 1
        else:
            same(f"{context.name}, stdout", result.stdout_bytes, printed)
            same(f"{context.name}, stderr", result.stderr_bytes, complained)
        if result.returncode != code:
            raise Broken(f"{context.name}: exit code {result.returncode} instead of {code}")
        context.seen += len(printed) + len(complained)


async def lines(context: JobContext) -> None:
    """Very long lines and very many short ones, as text."""
    first = context.rng.randrange(1_000_000)
    count = context.rng.randint(1, 20_000)
    width = context.rng.randint(1, 200_000)
    script = f"seq {first} {first + count - 1}; head -c {width} /dev/zero | tr '\\0' x; echo; exit 7"
    numbers = b"".join(b"%d\n" % n for n in range(first, first + count))
    process = await context.box.start(["sh", "-c", script], overflow="block")
    async with started(context, process):
        printed = {"stdout": numbers + b"x" * width + b"\n", "stderr": b""}
        await follow(context, process, printed, ExitStatus(7))


async def echo(context: JobContext) -> None:
    """Input in pieces of any size; the echo shows that each byte arrived once and in order."""
    process = await context.box.start(["cat"], stdin="open", overflow="block")
    _, data = context.piece(0, context.rng.choice((500, 50_000, 1_500_000)))
    async with started(context, process):
        following = asyncio.create_task(follow(context, process, {"stdout": data, "stderr": b""}, ExitStatus(0)))
        try:
            await write(context, process, data)
            await process.close_stdin()
            await following
        finally:
            following.cancel()
            await asyncio.wait((following,))


async def write(context: JobContext, process: Process, data: bytes) -> None:
    sent = 0
    most = context.rng.choice((100, 10_000, 400_000))
    while sent < len(data):
        count = context.rng.randint(1, max(most, len(data) // 200))
        await process.write(data[sent : sent + count])
        sent += count
        if context.rng.random() < 0.05:
            await asyncio.sleep(context.rng.uniform(0, 0.1))


async def later(context: JobContext) -> None:
    """No reader while it runs; then another client reads, piece by piece, by position."""
    pieces = [context.piece(1, 100_000) for _ in range(context.rng.randint(1, 5))]
    end, status = context.ending()
    script = f"sleep {context.rng.uniform(0, 0.3):.3f}; " + "".join(command for command, _ in pieces) + end
    id = context.name.replace(" ", "-")
    process = await context.box.start(context.sh(script), id=id)
    async with started(context, process):
        if context.rng.random() < 0.5:
            await process.wait()
        async with connected(context.address) as other:
            handle = await other.process(id)
            following = Following(
                context.name, {"stdout": b"".join(data for _, data in pieces), "stderr": b""}, status
            )
            since = 0
            while True:
                found = await handle.read(since, context.rng.randint(1, 60_000), wait=5.0)
                # Each lost part is reported before the output behind it.
                reported: list[OutputChunk | OutputGap] = [*found.gap, *found.chunks]
                reported.sort(key=lambda each: (each.stream, each.offset))
                for each in reported:
                    following.take(each)
                since = found.next_seq - 1
                if found.closed and not reported:
                    break
            following.all_printed()
            following.ended(await handle.wait())
            context.count(following, may_lose=True)


async def background(context: JobContext) -> None:
    """A child goes on printing after its leader has ended."""
    first, before = context.piece(1, 5_000)
    second, after = context.piece(1, 5_000)
    script = f"(sleep {context.rng.uniform(0.05, 0.5):.3f}; {second}) & {first}exit 4"
    process = await context.box.start(context.sh(script))
    async with started(context, process):
        await follow(context, process, {"stdout": before + after, "stderr": b""}, ExitStatus(4))


async def tree(context: JobContext) -> None:
    """A tree with an escaped branch is ended; nothing of it is left."""
    script = "setsid sleep 1000 & echo $!; (sleep 1000 & echo $!; wait) & sleep 1000; wait"
    process = await context.box.start(["sh", "-c", script], stdin="closed")
    async with started(context, process):
        with reported_unless_scarce(context):
            await process.wait_for_output(re.compile(rb"\d+\n\d+\n"), timeout=LOST_LINE_SECONDS)
        printed = (await process.snapshot()).stdout
        force = context.rng.random() < 0.5
        await process.terminate(grace=1.0, force=force)
        status = await process.wait()
        expected = "SIGKILL" if force else "SIGTERM"
        # The reply to a first attempt may be lost with its server, in the middle of the killing.
        if status.signal != expected and not (context.killed and status.signal == "SIGKILL"):
            raise Broken(f"{context.name}: ended by {status} instead of {expected}")
        left = [pid for pid in printed.split() if is_alive(int(pid)) and _is_sleep(int(pid))]
        if left:
            raise Broken(f"{context.name}: processes {left} are left of an ended tree")


def _is_sleep(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().startswith(b"sleep")
    except OSError:
        return False


async def signals(context: JobContext) -> None:
    """Each signal arrives once, however often it had to be sent."""
    script = "n=0; trap 'n=$((n+1)); echo $n' USR1; echo ready; while :; do read x && exit $n; done"
    process = await context.box.start(["sh", "-c", script], stdin="open")
    count = context.rng.randint(1, 6)
    async with started(context, process):
        with reported_unless_scarce(context):
            await process.wait_for_output("ready\n", timeout=LOST_LINE_SECONDS)
            for number in range(1, count + 1):
                await process.signal("USR1")
                await process.wait_for_output(f"{number}\n", timeout=LOST_LINE_SECONDS)
        if context.gave_up:
            return
        await process.write(b"end\n")
        printed = b"ready\n" + b"".join(b"%d\n" % n for n in range(1, count + 1))
        await follow(context, process, {"stdout": printed, "stderr": b""}, ExitStatus(count))


async def storm(context: JobContext) -> None:
    """Many starts at a time, that end at once."""

    async def one(number: int) -> None:
        process = await context.box.start(["sh", "-c", f"echo {number}; exit {number % 100}"])
        async with started(context, process):
            expected = {"stdout": b"%d\n" % number, "stderr": b""}
            await follow(context, process, expected, ExitStatus(number % 100))

    results = await asyncio.gather(*(one(n) for n in range(context.rng.randint(5, 40))), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def given_up(context: JobContext) -> None:
    """Commands with a caller that gives up, or with a timeout: they are killed, with all their children."""
    script = "sleep 1000 & sleep 1000; wait"
    if context.rng.random() < 0.5:
        try:
            await context.box.exec(
                ["sh", "-c", script], timeout=context.rng.uniform(0.01, 0.5), timeout_retry=False
            )
        except TimeoutError:
            return
        raise Broken(f"{context.name}: ended though it sleeps")
    running = asyncio.create_task(context.box.exec(["sh", "-c", script]))
    await asyncio.sleep(context.rng.uniform(0, 0.5))
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
        raise Broken(f"{context.name}: ended though it sleeps")


async def bound(context: JobContext) -> None:
    """It ends with its connection, and not before."""
    command, data = context.piece(1, 3_000)
    async with connected(context.address) as own:
        process = await own.start(context.sh(f"{command} exec sleep 1000"), lifetime="connection")
        await asyncio.sleep(context.rng.uniform(0, 1.0))
        if not (await process.describe()).running:
            raise Broken(f"{context.name}: it ended while its connection was there")
    handle = await context.box.process(process.id)
    async with started(context, handle):
        await follow(context, handle, {"stdout": data, "stderr": b""}, ExitStatus(143, "SIGTERM"))
