"""Curves: the cost of one operation, of one more thing and of idleness, by the number of things that exist.

    python -m bench.growth                          # 1 to 1,000 of each kind; some minutes
    python -m bench.growth --only shells --most 10000
    python -m bench.growth --markdown docs/benchmarks.md --svg docs/growth.svg

Beside the latency of an operation stands the processor time of the program that holds the things: on a busy
machine the latency shows the machine, the processor time shows the growth. Touches what each kind starts, and the
files that are named on its command line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from time import perf_counter
from typing import Final
from xml.sax.saxutils import escape

import msgspec

import holdfast
from bench import report
from bench.fleet import fleet_directory
from bench.servers import BenchmarkError, cpu_seconds, memory_bytes, start_crowd, talking_to
from bench.services import grpc_caller, new_deployment, running_service
from bench.starts import run_streamed
from holdfast.errors import ResourceExhausted
from holdfast.fleet.fleet import Fleet
from holdfast.service.store.store import Store
from holdfast.service.types import AuditEntry
from holdfast.types import OutputChunk
from tests.support.servers import running_server

#: The lines of a page around the table.
MARK: Final = "growth"
#: Operations of a turn at each count, after a few that are not timed. The processor time is that of the turn with
#: the least, which other programs on the machine have disturbed the least.
TURNS: Final = 10
OPERATIONS: Final = 20
WARM_UP: Final = 10
#: Seconds without an operation, in which the holder's processor time is measured.
IDLE_SECONDS: Final = 2.0
#: The same for a service: it renews its leases, pings its database and takes samples every 5 s, so a shorter time
#: has all of that work or none of it.
IDLE_SERVICE_SECONDS: Final = 10.0
#: Things that are made at a time.
AT_ONCE: Final = 16
#: Processor time of one operation may grow by this factor for each tenfold count: n log n in total, and the noise
#: of caches that hold less of each thing.
TENFOLD: Final = 1.6


class Point(msgspec.Struct, frozen=True):
    """The figures at one count."""

    count: int
    #: Milliseconds of one operation, and the holder's processor time for it.
    latency: float
    cpu: float
    #: The holder's memory for each thing in KB, above its memory with one.
    memory: float
    #: Percent of a core that the holder takes while nothing happens.
    idle: float


class Curve(msgspec.Struct, frozen=True):
    kind: str
    operation: str
    points: tuple[Point, ...]

    @property
    def tenfold(self) -> float:
        """The factor of processor time for each tenfold count, from the smallest to the largest."""
        first, last = self.points[0], self.points[-1]
        decades = math.log10(last.count / first.count) if last.count > first.count else 1.0
        return float((last.cpu / first.cpu) ** (1 / decades))


class Holder(msgspec.Struct):
    """Things of one kind, and the program that holds them."""

    operation: str
    pid: int
    grow: Callable[[int], Awaitable[None]]  #: Makes so many more.
    operate: Callable[[], Awaitable[object]]
    idle_seconds: float = IDLE_SECONDS


Kind = Callable[[], contextlib.AbstractAsyncContextManager[Holder]]


async def measure(kind: str, holding: Kind, counts: Sequence[int]) -> Curve:
    """The curve of one kind; it ends early at a count that this machine does not hold."""
    points: list[Point] = []
    async with holding() as holder:
        has, alone = 0, 0
        for count in counts:
            try:
                await holder.grow(count - has)
            except (ResourceExhausted, MemoryError) as error:
                print(f"{kind}: {count} are too many here: {error}", file=sys.stderr)
                break
            has = count
            for _ in range(WARM_UP):
                await holder.operate()
            alone = alone or memory_bytes(holder.pid)
            points.append(await _point(holder, count, alone))
            print(f"{kind}: {points[-1]}", file=sys.stderr)
    return Curve(kind, holder.operation, tuple(points))


async def _point(holder: Holder, count: int, alone: int) -> Point:
    memory, taken, spent = memory_bytes(holder.pid), [], []
    for _ in range(TURNS):
        began_cpu = cpu_seconds(holder.pid)
        for _ in range(OPERATIONS):
            began = perf_counter()
            await holder.operate()
            taken.append(perf_counter() - began)
        spent.append((cpu_seconds(holder.pid) - began_cpu) / OPERATIONS)
    # Timers of the operations: clean-ups, moves into cgroups.
    await asyncio.sleep(holder.idle_seconds / 2)
    began_cpu = cpu_seconds(holder.pid)
    await asyncio.sleep(holder.idle_seconds)
    idle = (cpu_seconds(holder.pid) - began_cpu) / holder.idle_seconds * 100
    each = (memory - alone) / 1024 / (count - 1) if count > 1 else 0.0
    return Point(count, statistics.median(taken) * 1000, min(spent) * 1000, each, idle)


async def _make(count: int, make: Callable[[], Awaitable[object]]) -> None:
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            await make()

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


# --- the kinds ---------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def processes() -> AsyncIterator[Holder]:
    with running_server(settings={"max_processes_per_connection": 20_000}) as server:
        async with talking_to(server.address("unix")) as api:
            yield Holder(
                "`/bin/true`, start to exited",
                server.pid,
                lambda more: start_crowd(server, api, more),
                lambda: run_streamed(api),
            )


@contextlib.asynccontextmanager
async def shells() -> AsyncIterator[Holder]:
    with running_server(settings={"max_shells": 20_000}) as server:
        async with holdfast.connect(server.address("unix")) as box:
            shell = await box.shell("bash")
            yield Holder(
                "`true` in one of them",
                server.pid,
                lambda more: _make(more, lambda: box.shell("bash")),
                lambda: shell.run("true"),
            )


@contextlib.asynccontextmanager
async def terminals() -> AsyncIterator[Holder]:
    # Without a home directory no profile is read.
    with running_server(settings={"max_terminals": 20_000}, environ={"HOME": "/nonexistent"}) as server:
        async with holdfast.connect(server.address("unix")) as box:
            terminal = await box.terminal("bash")
            await terminal.run("true")
            yield Holder(
                "`true` at the prompt of one of them",
                server.pid,
                lambda more: _make(more, lambda: box.terminal("bash")),
                lambda: terminal.run("true"),
            )


@contextlib.asynccontextmanager
async def connections() -> AsyncIterator[Holder]:
    with running_server(settings={"max_connections": 20_000}) as server:
        async with contextlib.AsyncExitStack() as stack:
            address = server.address("unix")
            api = await stack.enter_async_context(talking_to(address))
            yield Holder(
                "`process/list`, of none, on one of them",
                server.pid,
                lambda more: _make(more, lambda: stack.enter_async_context(talking_to(address))),
                api.list,
            )


@contextlib.asynccontextmanager
async def log_megabytes() -> AsyncIterator[Holder]:
    """Retained output of one process, in MB."""
    room = {f"retained_output_bytes_{of}": 4 * 1024**3 for of in ("per_process", "total")}
    with running_server(settings=room) as server:
        async with holdfast.connect(server.address("unix")) as box:
            printer = await box.start(
                ["sh", "-c", "while read n; do head -c ${n}000000 /dev/zero; echo done >&2; done"], stdin="open"
            )
            events = printer.events()

            async def grow(more: int) -> None:
                await printer.write(f"{more}\n")
                while (event := await anext(events, None)) is not None:
                    if isinstance(event, OutputChunk) and event.stream == "stderr":
                        return
                raise BenchmarkError("the printer ended")

            async def read() -> None:
                if not (await box.api.read(printer.id, after_seq=1, max_bytes=4096)).chunks:
                    raise BenchmarkError("no output is there")

            yield Holder("a read of 4 KB at its start", server.pid, grow, read)
            await printer.terminate(force=True)


@contextlib.asynccontextmanager
async def sessions() -> AsyncIterator[Holder]:
    with new_deployment() as place:
        async with running_service(place) as service, contextlib.AsyncExitStack() as stack:
            (token,) = await service.new_agents(1)
            caller = await stack.enter_async_context(grpc_caller(service, token))
            other = await stack.enter_async_context(grpc_caller(service, token))
            await caller.create()
            yield Holder(
                "`RunCommand` of `true` in one of them, gRPC",
                service.pid,
                lambda more: _make(more, other.create),
                lambda: caller.run("true"),
                IDLE_SERVICE_SECONDS,
            )


@contextlib.asynccontextmanager
async def sandboxes() -> AsyncIterator[Holder]:
    with fleet_directory():
        async with Fleet("bwrap", max_creates=AT_ONCE) as fleet, contextlib.AsyncExitStack() as stack:
            box = await stack.enter_async_context(fleet.block())
            yield Holder(
                "`true` in one of them (bubblewrap)",
                os.getpid(),
                lambda more: _make(more, lambda: stack.enter_async_context(fleet.block())),
                lambda: box.exec(["true"]),
            )


@contextlib.asynccontextmanager
async def audit_rows() -> AsyncIterator[Holder]:
    with tempfile.TemporaryDirectory(prefix="hf-bench-") as directory:
        async with await Store.open(f"sqlite:///{directory}/service.db") as store:

            def entries(count: int) -> list[AuditEntry]:
                return [AuditEntry("s", time.time(), "a", "command", body={"n": n}) for n in range(count)]

            async def grow(more: int) -> None:
                for first in range(0, more, 1_000):
                    await store.append(entries(min(1_000, more - first)))

            async def operate() -> None:
                await store.append(entries(1))
                await store.rows()

            yield Holder("one more row, and the first page", os.getpid(), grow, operate)


#: Kinds, and how many of each a run makes at most: each sandbox is a bubblewrap with a server, and a session three
#: processes.
KINDS: Final[dict[str, tuple[Kind, int]]] = {
    "processes": (processes, 10_000),
    "shells": (shells, 10_000),
    "terminals": (terminals, 10_000),
    "connections": (connections, 10_000),
    "log MB": (log_megabytes, 1_000),
    "sessions": (sessions, 1_000),
    "sandboxes": (sandboxes, 100),
    "audit rows": (audit_rows, 100_000),
}


# --- the output --------------------------------------------------------------------------------------------------


def table(curves: Sequence[Curve]) -> str:
    lines = [
        "| things | operation | count | latency | processor time of the holder | memory for each | idle |",
        "|---|---|---|---|---|---|---|",
    ]
    for curve in curves:
        for number, each in enumerate(curve.points):
            what = (curve.kind, curve.operation) if not number else ("", "")
            memory = "" if each.count == 1 else f"{max(0.0, each.memory):.1f} KB"
            lines.append(
                f"| {what[0]} | {what[1]} | {each.count:,} | {each.latency:.2f} ms | {each.cpu:.3f} ms"
                f" | {memory} | {each.idle:.1f} % |"
            )
    return "\n".join(lines)


_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 320, 60, 30
_COLOURS: Final = ("#1f6feb", "#d29922", "#2da44e", "#cf222e", "#8250df", "#0a7ea4", "#bc4c00", "#57606a")


def plot(curves: Sequence[Curve]) -> str:
    """Processor time of an operation by count as an SVG, both axes logarithmic: a flat line is no growth."""
    points = [point for curve in curves for point in curve.points]
    most = math.log10(max(point.count for point in points)) or 1.0
    low = math.floor(math.log10(min(point.cpu for point in points)))
    high = math.ceil(math.log10(max(point.cpu for point in points)))

    def x(count: int) -> float:
        return round(_LEFT + math.log10(count) / most * _WIDTH, 1)

    def y(cpu: float) -> float:
        return round(_TOP + _HEIGHT * (high - math.log10(cpu)) / (high - low), 1)

    bottom = _TOP + _HEIGHT
    parts = [f'<path d="M{_LEFT} {_TOP}V{bottom}H{_LEFT + _WIDTH}" fill="none" stroke="black"/>']
    for power in range(low, high + 1):
        parts.append(f'<text x="{_LEFT - 6}" y="{y(10.0**power) + 4}" text-anchor="end">{10.0**power:g} ms</text>')
    for power in range(int(most) + 1):
        parts.append(f'<text x="{x(10**power)}" y="{bottom + 16}" text-anchor="middle">{10**power:,}</text>')
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        line = " ".join(f"{x(each.count)},{y(each.cpu)}" for each in curve.points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        text = f"{curve.kind}: {curve.operation.replace('`', '')}"
        parts.append(
            f'<text x="{_LEFT + _WIDTH + 12}" y="{_TOP + 16 * number + 8}" fill="{colour}">{escape(text)}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 360}" height="{bottom + 30}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )


def counts_up_to(most: int) -> list[int]:
    """1, 10, 100 and so on, and `most` itself."""
    return [*(10**power for power in range(int(math.log10(most)) + 1) if 10**power < most), most]


async def _measure_all(kinds: Sequence[str], most: int) -> list[Curve]:
    return [await measure(kind, KINDS[kind][0], counts_up_to(min(most, KINDS[kind][1]))) for kind in kinds]


def _allow_descriptors() -> None:
    """Raise the limit of open descriptors of this program and of the servers that it starts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _read(path: str) -> list[Curve]:
    with open(path, "rb") as file:
        return msgspec.json.decode(file.read(), type=list[Curve])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--most", type=int, default=1_000, help="the largest count of a kind; default 1000")
    parser.add_argument(
        "--read", nargs="+", default=[], metavar="FILE", help="figures of earlier runs: measure none"
    )
    parser.add_argument("--markdown", help="a page with a place for the table")
    parser.add_argument("--svg", help="where the plot goes")
    parser.add_argument("--json", default="bench/growth.json", help="where the figures go")
    options = parser.parse_args()
    if options.read:
        curves = [curve for path in options.read for curve in _read(path)]
    else:
        _allow_descriptors()
        curves = asyncio.run(_measure_all(options.only, options.most))
        with open(options.json, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(curves)) + b"\n")
    text = table(curves)
    print(text)
    if options.svg:
        with open(options.svg, "w", encoding="utf-8") as svg:
            svg.write(plot(curves))
    if options.markdown:
        report.write_into(options.markdown, text, MARK)
    steep = [curve for curve in curves if curve.tenfold > TENFOLD]
    for curve in steep:
        print(f"{curve.kind}: {curve.tenfold:.2f} times the processor time for each tenfold count", file=sys.stderr)
    return 1 if steep else 0


if __name__ == "__main__":
    raise SystemExit(main())
