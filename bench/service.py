"""The cost of the session service: each figure beside the same by the client library over the runtime's own socket.

The service and the sandbox's server are processes of their own; the callers, gRPC's threads included, are this
program. Where PostgreSQL is installed, a second service has its database there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import holdfast
from bench.measure import Row, Samples, Scale, Target, compare, figures, interleave, interleave_samples, latencies
from bench.servers import BenchmarkError, cpu_seconds, memory_bytes
from bench.services import (
    Caller,
    Deployment,
    GrpcCaller,
    HttpCaller,
    Service,
    grpc_caller,
    http_caller,
    new_deployment,
    postgres,
    running_service,
)
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.client.sandbox import Sandbox
    from holdfast.client.shell import Shell
    from holdfast.client.terminal import Terminal

SOCKET: Final = "the client library over the runtime's socket"
#: The line of a command as it is typed.
TRUE: Final = b"true\n"
#: Commands in a turn: what follows another at once finds all the programs awake.
BATCH: Final = 5
#: Flushes of a disk that are timed.
FLUSHES: Final = 51
#: Sessions with a shell at a time, as many as the shells of `shell-32`.
SHELLS: Final = 32
#: Sessions that are being made at a time.
_AT_ONCE: Final = 16
#: The monitor of a service may take so much of a core.
MONITOR_PERCENT: Final = 2.0
#: Interval of the monitor's samples, unless a run is shorter; the default of the service.
LOOK_SECONDS: Final = 5.0
#: Longer than any run.
NEVER: Final = "1000000"


# --- one command --------------------------------------------------------------------------------------------------


class SocketCaller:
    """The same by the client library."""

    def __init__(self, box: Sandbox, terminal: Terminal, token: int) -> None:
        self._api = box.api
        self._terminal = terminal
        self._token = token

    async def send_and_read(self, data: bytes) -> None:
        await self._terminal.send(data)
        while True:
            found = await self._api.read_terminal(self._terminal.id, since=self._token, wait=30.0)
            self._token = found.token
            if any(event.type == "prompt" for event in found.events):
                return

    async def run(self, command: str) -> None:
        result = await self._terminal.run(command)
        if result.exit_code or result.timed_out:
            raise BenchmarkError(f"{command} answered {result!r}")


async def true_in_a_session(scale: Scale) -> list[Row]:
    """`true` typed into a session and read until the prompt is back, and run as a command."""
    with new_deployment() as location, postgres() as url, tempfile.TemporaryDirectory(prefix="hf-bench-") as disk:
        async with contextlib.AsyncExitStack() as stack:
            stores = {"disk": f"sqlite:///{disk}/service.db"} | ({} if url is None else {"postgres": url})
            callers = await _callers(stack, location, stores)
            contenders = {f"{name} typed": _timed(each.send_and_read, TRUE) for name, each in callers.items()}
            contenders |= {f"{name} run": _timed(each.run, "true") for name, each in callers.items()}
            taken = await interleave_samples(scale.rounds, scale.calls, contenders)
            flush = statistics.median(_flush(disk) for _ in range(FLUSHES)) * 1000
    ways = {
        "grpc": ("", "gRPC"),
        "disk": ("-disk", "gRPC, SQLite on a disk"),
        "http": ("-http", "HTTP/JSON"),
        "postgres": ("-postgres", "gRPC, PostgreSQL"),
    }
    return [
        compare(
            f"service-{row}{ending}",
            f"`true` {what} a session over {spoken}",
            "ms",
            baseline_what=SOCKET,
            baseline=latencies(taken[f"socket {how}"]),
            measured=latencies(taken[f"{name} {how}"]),
            target=Target("ratio at most", 4.0 if name == "grpc" else 5.0)
            if how == "typed" and name != "http"
            else None,
            note=f"a flush to that disk alone {flush:.2f} ms" if name == "disk" else "",
        )
        for how, row, what in (("typed", "true", "typed into"), ("run", "run", "run in"))
        for name, (ending, spoken) in ways.items()
        if name in callers
    ]


async def _callers(
    stack: contextlib.AsyncExitStack, location: Deployment, stores: Mapping[str, str]
) -> dict[str, Caller]:
    """Each with a session of its own, all in one sandbox; each store has a service of its own."""
    box = await stack.enter_async_context(holdfast.connect(location.sandbox))
    service = await stack.enter_async_context(running_service(location))
    (token,) = await service.new_agents(1)
    over_grpc = await stack.enter_async_context(grpc_caller(service, token))
    over_http = await stack.enter_async_context(http_caller(service, token))
    await over_grpc.create()
    await over_http.create()
    callers: dict[str, Caller] = {"socket": await _socket_caller(box), "grpc": over_grpc, "http": over_http}
    for name, store in stores.items():
        another = await stack.enter_async_context(running_service(location, store))
        (token,) = await another.new_agents(1)
        callers[name] = caller = await stack.enter_async_context(grpc_caller(another, token))
        await caller.create()
    return callers


def _flush(directory: str) -> float:
    """How long a page takes to the disk."""
    with open(os.path.join(directory, "page"), "wb", buffering=0) as file:
        file.write(bytes(4096))
        began = perf_counter()
        os.fdatasync(file.fileno())
        return perf_counter() - began


async def _socket_caller(box: Sandbox) -> SocketCaller:
    terminal = await box.terminal()
    await terminal.run("true")
    return SocketCaller(box, terminal, (await box.api.describe_terminal(terminal.id)).token)


def _timed(act: Callable[..., Awaitable[None]], *arguments: object) -> Samples:
    async def batch() -> list[float]:
        taken = []
        for _ in range(BATCH):
            began = perf_counter()
            await act(*arguments)
            taken.append(perf_counter() - began)
        return taken

    return batch


# --- many idle sessions -------------------------------------------------------------------------------------------


class Spent(NamedTuple):
    """Percents of a core that service and server took."""

    service: float
    server: float

    @property
    def both(self) -> float:
        return self.service + self.server


async def idle_sessions(scale: Scale) -> list[Row]:
    """Sessions that show their prompt: what each weighs, what all compute, with the monitor and without."""
    count, interval = scale.sessions, min(LOOK_SECONDS, scale.idle_seconds / 2)
    watching: list[Spent] = []
    alone: list[Spent] = []
    with new_deployment() as location:
        async with running_service(location) as service:
            grown = await _grown_by_sessions(location, service, count)
        # The sessions live on, and each service finds them again.
        for _ in range(scale.server_rounds):
            for spent, every in ((watching, str(interval)), (alone, NEVER)):
                async with running_service(
                    location, environ={"HOLDFAST_SERVICE_MONITOR_INTERVAL": every}
                ) as service:
                    await asyncio.sleep(scale.idle_seconds / 3)
                    spent.append(await _spent(service, location, scale.idle_seconds))
    baseline = figures([each.both for each in alone])
    each_service, each_server = (figures([each[part] for each in watching]).median for part in (0, 1))
    return [
        compare(
            "service-rss",
            f"service RSS, each of {count} idle sessions",
            "KB",
            baseline_what="what the same adds to the sandbox's server",
            baseline=figures([grown[1] / count / 1e3]),
            measured=figures([grown[0] / count / 1e3]),
        ),
        compare(
            "service-monitor",
            f"CPU of service and server with {count} idle sessions, the monitor looking every {interval:g} s",
            "%",
            baseline_what="the same without the monitor",
            baseline=baseline,
            measured=figures([each.both for each in watching]),
            target=Target("at most", baseline.median + MONITOR_PERCENT),
            note=f"service {each_service:.2f}, server {each_server:.2f}; "
            f"each session {(each_service + each_server) / count * 1e4:.0f} µs a second",
        ),
    ]


async def _grown_by_sessions(location: Deployment, service: Service, count: int) -> tuple[float, float]:
    """By how many bytes service and server grew with so many sessions, the first left out: it loads code."""
    (token,) = await service.new_agents(1)
    async with grpc_caller(service, token) as caller:
        await caller.create()
        before = memory_bytes(service.pid), memory_bytes(location.server.pid)
        await _create(caller for _ in range(count - 1))
    # A page at least: so few sessions as a quick run has may fit into what is there.
    return (
        max(4096.0, memory_bytes(service.pid) - before[0]),
        max(4096.0, memory_bytes(location.server.pid) - before[1]),
    )


async def _create(callers: Iterable[GrpcCaller]) -> None:
    left = iter(callers)

    async def work() -> None:
        for caller in left:
            await caller.create()

    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))


async def _spent(service: Service, location: Deployment, seconds: float) -> Spent:
    pids = service.pid, location.server.pid
    began, before = perf_counter(), [cpu_seconds(pid) for pid in pids]
    await asyncio.sleep(seconds)
    after = [cpu_seconds(pid) for pid in pids]
    took = perf_counter() - began
    return Spent(*((end - start) / took * 100 for start, end in zip(before, after, strict=True)))


# --- many agents at once ------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """The results of many callers in one round."""

    rate: float
    latencies: list[float]


async def agents_at_once(scale: Scale) -> list[Row]:
    """Agents with a session each that all run commands, one after the other."""
    count, each = scale.agents, scale.calls * 2
    with new_deployment() as location, postgres() as url:
        stores = {"": None} | ({} if url is None else {"-postgres": url})
        async with contextlib.AsyncExitStack() as stack:
            box = await stack.enter_async_context(holdfast.connect(location.sandbox))
            crowds: dict[str, Sequence[Caller]] = {
                "socket": [await _socket_caller(box) for _ in range(count)],
            }
            for ending, store in stores.items():
                service = await stack.enter_async_context(running_service(location, store))
                tokens = await service.new_agents(count)
                callers = [await stack.enter_async_context(grpc_caller(service, token)) for token in tokens]
                await _create(callers)
                crowds[f"service{ending}"] = callers
                if not ending:
                    # In the same sessions.
                    crowds["service-http"] = [
                        await _over_http(stack, service, token, caller)
                        for token, caller in zip(tokens, callers, strict=True)
                    ]
            taken = await interleave(
                scale.server_rounds, {name: _loaded(crowd, each) for name, crowd in crowds.items()}
            )
    rows = []
    names = {"": "SQLite", "-http": "SQLite, over HTTP/JSON", "-postgres": "PostgreSQL"}
    for ending, name in names.items():
        if f"service{ending}" not in taken:
            continue
        loads = taken[f"service{ending}"]
        rows += [
            compare(
                f"service-200{ending}",
                f"{count} agents at once, each with a session, commands a second, {name}",
                "/s",
                baseline_what=f"{count} terminals, {SOCKET}",
                baseline=figures([load.rate for load in taken["socket"]]),
                measured=figures([load.rate for load in loads]),
                target=Target("ratio at least", 0.6) if not ending else None,
                note=f"{sum(len(load.latencies) for load in loads):,} commands, no error",
            ),
            compare(
                f"service-200{ending}-latency",
                f"a command of one of them, {name}",
                "ms",
                baseline_what="the same",
                baseline=latencies([load.latencies for load in taken["socket"]]),
                measured=latencies([load.latencies for load in loads]),
            ),
        ]
    return rows


async def _over_http(
    stack: contextlib.AsyncExitStack, service: Service, token: str, caller: GrpcCaller
) -> HttpCaller:
    over_http = await stack.enter_async_context(http_caller(service, token))
    over_http.use(caller.session)
    return over_http


class _ShellCaller:
    """A live shell by the client library."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    async def run(self, command: str) -> None:
        result = await self._shell.run(command)
        if result.exit_code or result.timed_out:
            raise BenchmarkError(f"{command} answered {result!r}")


async def shells_at_once(scale: Scale) -> list[Row]:
    """Sessions with a shell that all run commands over HTTP, one after the other."""
    count, each = min(SHELLS, scale.agents), scale.calls * 4
    async with contextlib.AsyncExitStack() as stack:
        location = stack.enter_context(new_deployment())
        box = await stack.enter_async_context(holdfast.connect(location.sandbox))
        service = await stack.enter_async_context(running_service(location))
        callers = []
        for token in await service.new_agents(count):
            callers.append(caller := await stack.enter_async_context(http_caller(service, token)))
            # At once: a connection without a request is closed after some seconds.
            await caller.create("SHELL")
        shells = [_ShellCaller(await box.shell()) for _ in range(count)]
        contenders = {"socket": _loaded(shells, each), "service": _loaded(callers, each)}
        taken = await interleave(scale.server_rounds, contenders)
    return [
        compare(
            "service-shells",
            f"{count} sessions with a shell at once, commands a second over HTTP/JSON",
            "/s",
            baseline_what=f"{count} shells, `Shell.run`, {SOCKET}",
            baseline=figures([load.rate for load in taken["socket"]]),
            measured=figures([load.rate for load in taken["service"]]),
            target=Target("ratio at least", 0.5),
            note=f"{sum(len(load.latencies) for load in taken['service']):,} commands, no error",
        ),
        compare(
            "service-shells-latency",
            "a command of one of them",
            "ms",
            baseline_what="the same",
            baseline=latencies([load.latencies for load in taken["socket"]]),
            measured=latencies([load.latencies for load in taken["service"]]),
        ),
    ]


class _Runner(Protocol):
    async def run(self, command: str) -> None: ...


def _loaded(callers: Sequence[_Runner], each: int) -> Callable[[], Awaitable[Load]]:
    """Run all callers at once, so many commands each; a failed command fails the benchmark."""

    async def load() -> Load:
        taken: list[float] = []
        errors: list[Exception] = []

        async def work(caller: _Runner) -> None:
            for _ in range(each):
                began = perf_counter()
                try:
                    await caller.run("true")
                except (BenchmarkError, HoldfastError) as error:
                    errors.append(error)
                else:
                    taken.append(perf_counter() - began)

        began = perf_counter()
        await asyncio.gather(*map(work, callers))
        seconds = perf_counter() - began
        if errors:
            raise BenchmarkError(f"{len(errors)} of {len(callers) * each} commands failed, one with {errors[0]!r}")
        return Load(len(taken) / seconds, taken)

    return load
