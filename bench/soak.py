"""`python -m bench.soak`: hours of work in minutes, to see whether anything grows that should not.

A kept server runs a steady mix of processes, streams, shells, terminals and connections that come, go and break;
now and then it is killed with -9. All that comes back is compared. Memory, descriptors and threads of server,
keeper and client are sampled every few seconds; `bench/steadiness.py` computes the growth. Exits with 1 on growth.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import hashlib
import os
import random
import sys
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final

from bench import report, steadiness
from bench.servers import BenchmarkError, kill_server, memory_bytes
from bench.steadiness import Sample
from holdfast.client.connection.channel_connection import ChannelConnection, Dial
from holdfast.client.dial import dialer
from holdfast.client.remote import RemoteExec
from holdfast.client.sandbox import Sandbox
from holdfast.errors import ConnectionLost, HoldfastError, InternalError, ShellClosed
from holdfast.transport.channel import Channel, Receiver
from holdfast.types import Closed, Exited, OutputChunk
from tests.support.servers import RunningServer, running_server

#: Everything retained must reach its bound long before the first sample that counts, or it would pass for growth.
#: A client that was cut may take seconds to come back on a loaded machine.
SETTINGS: Final[dict[str, object]] = {"max_exited_processes": 100, "detached_session_seconds": 60.0}
#: Between two pieces of work of one worker: the load is to be steady, not the highest possible.
PAUSE_SECONDS: Final = 0.05
#: Our own list of samples grows, too: by half a megabyte in half an hour.
SAMPLE_SECONDS: Final = 2.0
#: A piece of work takes less than a second, and a restart less than that; on a loaded machine, many times as long.
#: This turns a hang into a failure, and not slowness.
PATIENCE_SECONDS: Final = 300.0
STREAM_BYTES: Final = 20_000_000
LINE: Final = b"a line of a stream, as long as lines are\n"
#: Processes that run all the while, so that each new server has some to take over.
LASTING: Final = 20


class Soak:
    """One run: the workers, what they have done, and what was seen of the programs meanwhile."""

    def __init__(
        self,
        server: RunningServer,
        box: Sandbox,
        *,
        seconds: float,
        kill_seconds: float,
        sample_seconds: float,
        pause_seconds: float,
    ) -> None:
        self._server = server
        self._box = box
        self._seconds = seconds
        self._kill_seconds = kill_seconds
        self._sample_seconds = sample_seconds
        self._pause_seconds = pause_seconds
        self._began = monotonic()
        self._life = 0
        self._random = random.Random(5)
        self._stream_digest = _stream_digest()
        self.samples: list[Sample] = []
        self.kills: list[float] = []
        self.failures: list[str] = []
        self.done: collections.Counter[str] = collections.Counter()

    @property
    def _now(self) -> float:
        return monotonic() - self._began

    async def run(self) -> None:
        lasting = [await self._box.start(["sleep", "100000"]) for _ in range(LASTING)]
        work: dict[str, Callable[[], Awaitable[None]]] = {
            "commands": self._command,
            "inputs": self._input,
            "streams": self._stream,
            "kills of trees": self._tree,
            "shells": self._shell,
            "terminals": self._terminal,
            "connections": self._connection,
            "cuts": self._cut,
        }
        sampling = asyncio.create_task(self._sample())
        try:
            async with asyncio.TaskGroup() as group:
                for name, piece in work.items():
                    group.create_task(self._repeat(name, piece))
                group.create_task(self._kill())
        finally:
            sampling.cancel()
            await asyncio.wait([sampling])
        for process in lasting:
            _check((await process.describe()).running, "a process that was to last has ended")

    async def _repeat(self, name: str, piece: Callable[[], Awaitable[None]]) -> None:
        while self._now < self._seconds:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await piece()
            self.done[name] += 1
            await asyncio.sleep(self._pause_seconds)

    # --- the work --------------------------------------------------------------------------------------------

    async def _command(self) -> None:
        code = self._random.randrange(256)
        result = await self._box.exec(["sh", "-c", f"echo out; echo err >&2; exit {code}"])
        seen = (result.returncode, result.stdout, result.stderr)
        _check(seen == (code, "out\n", "err\n"), f"a command gave {seen}")

    async def _input(self) -> None:
        data = self._random.randbytes(self._random.randrange(200_000))
        result = await self._box.exec(["cat"], input=data)
        _check(result.stdout_bytes == data, f"{len(data)} bytes through cat came back as others")

    async def _stream(self) -> None:
        command = f"yes '{LINE.decode().rstrip()}' | head -c {STREAM_BYTES}; exit 3"
        process = await self._box.start(["sh", "-c", command], overflow="block")
        digest, size, code = hashlib.sha256(), 0, None
        async for event in process.events():
            if isinstance(event, OutputChunk):
                _check(event.offset == size, f"offset {event.offset} came after {size} bytes")
                size += len(event.data)
                digest.update(event.data)
            elif isinstance(event, Exited):
                code = event.status.exit_code
            elif isinstance(event, Closed):
                break
        _check((size, code) == (STREAM_BYTES, 3), f"a stream ended after {size} bytes with {code}")
        _check(digest.digest() == self._stream_digest, "a stream was not what was printed")
        await process.forget()

    async def _tree(self) -> None:
        process = await self._box.start(["sh", "-c", "sleep 1000 & setsid sleep 1000 & echo ready; wait"])
        await process.wait_for_output("ready")
        await process.terminate(force=True)
        _check((await process.wait()).signal == "SIGKILL", "a killed process ended in another way")

    async def _shell(self) -> None:
        # A shell does not survive its server, and its error reports that.
        with contextlib.suppress(ShellClosed):
            async with await self._box.shell() as shell:
                await shell.run("count=0")
                for number in range(1, 11):
                    result = await shell.run("count=$((count + 1)); echo $count; (exit $count)")
                    seen = (result.stdout, result.exit_code)
                    _check(seen == (f"{number}\n", number), f"a shell gave {seen} for {number}")
                    self.done["commands of shells"] += 1

    async def _terminal(self) -> None:
        async with await self._box.terminal(env={"PS1": "$ "}) as terminal:
            await terminal.wait_until_idle()
            broken = False
            for number in range(1, 6):
                try:
                    result = await terminal.run(f"echo number {number}; (exit {number})")
                except InternalError as error:
                    # The terminal goes on; what was typed when its server died is not known to have ended.
                    _check("the server was restarted" in error.message, f"a terminal said {error.message}")
                    self.done["runs broken by a kill"] += 1
                    broken = True
                    break
                _check(result.exit_code == number, f"a terminal's command {number} ended with {result.exit_code}")
                _check(f"number {number}" in result.output, f"a terminal printed {result.output!r}")
                self.done["commands of terminals"] += 1
            shown = (await terminal.screen()).text
            _check(broken or "number 5" in shown, f"the screen does not show the command, but {shown!r}")

    async def _connection(self) -> None:
        box, _ = await self._connect()
        try:
            _check((await box.exec(["true"])).success, "true failed")
        finally:
            await box.aclose()

    async def _cut(self) -> None:
        """A connection that breaks while its stream is read, and comes back."""
        box, channels = await self._connect()
        try:
            process = await box.start(["sh", "-c", "for i in 1 2 3; do echo $i; read x; done"], stdin="open")
            for number in (b"1", b"2", b"3"):
                await process.wait_for_output(number.decode())
                channels[-1].close()
                await process.write(b"go on\n")
            _check((await process.wait()).exit_code == 0, "a process failed whose client came and went")
            _check((await process.snapshot()).stdout == b"1\n2\n3\n", "output was lost with a connection")
        finally:
            await box.aclose()

    async def _connect(self) -> tuple[Sandbox, list[Channel]]:
        """A connection of its own, and the channels that it has had so far."""
        address = self._server.address("unix")
        channels: list[Channel] = []

        async def dial(receiver: Receiver) -> Channel:
            channels.append(await dialer(address)(receiver))
            return channels[-1]

        while True:
            connection = _connection(dial, address)
            try:
                await connection.open()
            except ConnectionLost:
                # The first handshake is tried once, and the server was killed in it.
                self.done["handshakes broken by a kill"] += 1
            else:
                return Sandbox(RemoteExec(connection)), channels

    # --- what happens to it ----------------------------------------------------------------------------------

    async def _kill(self) -> None:
        """Kill the server, again and again; not so late that nothing could be seen of the next one."""
        while self._now + 1.5 * self._kill_seconds <= self._seconds:
            await asyncio.sleep(self._kill_seconds)
            self.kills.append(self._now)
            await kill_server(self._server)
            self._server.pid = (await self._box.status()).pid
            self._life += 1
            self.done["kills of the server"] += 1

    async def _sample(self) -> None:
        while True:
            for who, pid in (
                ("server", self._server.pid),
                ("keeper", self._server.process.pid),
                ("client", os.getpid()),
            ):
                # A server that was killed a moment ago has nothing to show.
                with contextlib.suppress(OSError, StopIteration):
                    self.samples.append(
                        Sample(
                            at=self._now,
                            who=who,
                            life=self._life if who == "server" else 0,
                            rss_kb=memory_bytes(pid) / 1000,
                            anonymous_kb=memory_bytes(pid, "RssAnon") / 1000,
                            descriptors=len(os.listdir(f"/proc/{pid}/fd")),
                            threads=len(os.listdir(f"/proc/{pid}/task")),
                            spool_kb=_disk_bytes(self._server.spool) / 1000 if who == "server" else 0.0,
                        )
                    )
            await asyncio.sleep(self._sample_seconds)


def _connection(dial: Dial, address: str) -> ChannelConnection:
    """A connection that a slow machine does not break."""
    return ChannelConnection(
        dial,
        address=address,
        client_name="soak",
        reconnect_deadline=PATIENCE_SECONDS,
        ping_interval=PATIENCE_SECONDS,
        handshake_timeout=PATIENCE_SECONDS,
    )


def _check(right: bool, otherwise: str) -> None:
    if not right:
        raise BenchmarkError(otherwise)


def _stream_digest() -> bytes:
    lines = STREAM_BYTES // len(LINE)
    return hashlib.sha256(LINE * lines + LINE[: STREAM_BYTES - lines * len(LINE)]).digest()


def _disk_bytes(directory: str) -> int:
    """The disk space of the files below a directory; they come and go meanwhile."""
    total = 0
    for path, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(path, name)).st_blocks * 512
    return total


async def soak(*, seconds: float, kill_seconds: float, sample_seconds: float, pause_seconds: float) -> Soak:
    with running_server(settings=SETTINGS) as server:
        connection = _connection(dialer(server.address("unix")), server.address("unix"))
        await connection.open()
        async with Sandbox(RemoteExec(connection)) as box:
            run = Soak(
                server,
                box,
                seconds=seconds,
                kill_seconds=kill_seconds,
                sample_seconds=sample_seconds,
                pause_seconds=pause_seconds,
            )
            try:
                await run.run()
            # The samples until then are still evaluated.
            except* (BenchmarkError, HoldfastError, TimeoutError) as errors:
                run.failures += [f"{type(error).__name__}: {error}" for error in errors.exceptions]
    return run


def main() -> int:
    options = _options()
    run = asyncio.run(
        soak(
            seconds=options.seconds,
            kill_seconds=options.kill_seconds,
            sample_seconds=options.sample_seconds,
            pause_seconds=options.pause_seconds,
        )
    )
    steadiness.write_csv(f"{options.output}.csv", run.samples)
    steadiness.write_svg(f"{options.output}.svg", run.samples, run.kills)
    for failure in run.failures:
        sys.stderr.write(f"failed after {run.samples[-1].at:.0f} s: {failure}\n")
    growths = steadiness.measure(run.samples, options.warm_up_seconds)
    machine = report.this_machine()
    print(f"{machine.cores} cores, {machine.kernel}, {machine.python}, {machine.date}; {options.seconds:g} s")
    print(", ".join(f"{count:,} {name}" for name, count in run.done.items()))
    print(f"\n{steadiness.table(growths)}")
    print(f"\n{options.output}.csv has every sample, {options.output}.svg the plot")
    return 1 if run.failures or any(each.too_much for each in growths) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description="See whether anything grows.")
    parser.add_argument("--seconds", type=float, default=1800.0, help="how long (%(default)s)")
    parser.add_argument(
        "--kill-seconds", type=float, default=600.0, help="how long each server lives (%(default)s)"
    )
    parser.add_argument(
        "--warm-up-seconds",
        type=float,
        default=steadiness.WARM_UP_SECONDS,
        help="how much of each life does not count (%(default)s)",
    )
    parser.add_argument(
        "--sample-seconds", type=float, default=SAMPLE_SECONDS, help="how often to look (%(default)s)"
    )
    parser.add_argument(
        "--pause-seconds",
        type=float,
        default=PAUSE_SECONDS,
        help="between two pieces of work; longer beside other work on the machine (%(default)s)",
    )
    parser.add_argument(
        "--output", default="bench/soak", metavar="PATH", help="where the samples and the plot go (%(default)s)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
