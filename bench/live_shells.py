"""The cost of a command in a live shell, beside a bare `bash` on pipes.

Touches a file with lines in a temporary directory, and the processes that it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Final

import msgspec

import holdfast
from bench.measure import Row, Samples, Scale, Target, compare, figures, interleave, interleave_samples, latencies
from bench.servers import BenchmarkError, memory_bytes
from tests.support.servers import running_server
from tests.support.signalling import kill_group

if TYPE_CHECKING:
    from holdfast.client.shell import Shell

BARE: Final = "a bare bash on pipes"
#: Shells that run at once, and commands that each of them runs.
SHELLS: Final = 32
COMMANDS: Final = 20
#: Commands in a turn: one that follows another at once finds all the programs awake.
BATCH: Final = 20
#: Lines are numbers of nine digits, so that a lost, doubled or moved one shows.
LINE_BYTES: Final = 10
FIRST_LINE: Final = 100_000_000
#: Ends a command of a bare bash that prints something.
MARK: Final = "HOLDFAST-BENCH"


async def true_in_a_shell(scale: Scale) -> list[Row]:
    """A builtin, and a program, in a live shell."""
    with running_server() as server, Coprocess() as bare:
        async with holdfast.connect(server.address("unix")) as box:
            shell = await box.shell("bash")
            builtin = await interleave_samples(
                scale.rounds,
                scale.echoes // BATCH,
                {"bare": asking(bare, "true"), "shell": _running(shell, "true")},
            )
            program = await interleave_samples(
                scale.rounds,
                -(-scale.starts // BATCH),
                {"bare": asking(bare, "/bin/true"), "shell": _running(shell, "/bin/true")},
            )
            await shell.close()
    ours = latencies(builtin["shell"])
    return [
        compare(
            "shell-true",
            "`true` in a live shell, Unix socket",
            "ms",
            baseline_what=BARE,
            baseline=latencies(builtin["bare"]),
            measured=ours,
            target=Target("ratio at most", 25.0),
        ),
        compare(
            "shell-true-p99",
            "the p99 of the same",
            "ms",
            baseline_what="its p50",
            baseline=figures([ours.median]),
            measured=figures([ours.p99 or 0.0]),
            target=Target("ratio at most", 10.0),
        ),
        compare(
            "shell-program",
            "`/bin/true` in a live shell",
            "ms",
            baseline_what=BARE,
            baseline=latencies(program["bare"]),
            measured=latencies(program["shell"]),
            target=Target("ratio at most", 1.3),
        ),
    ]


async def lines_of_a_shell(scale: Scale) -> list[Row]:
    """Lines that a command prints, to the caller as bytes, each of them compared."""
    size = scale.unix_blocks // 10 * 1_000_000
    with running_server() as server, file_of_lines(size) as (path, lines):
        async with holdfast.connect(server.address("unix")) as box:
            shell = await box.shell("bash")

            async def bare() -> float:
                return _rate_of_run(path, lines)

            async def ours() -> float:
                began = perf_counter()
                result = await shell.run(f"cat {path}")
                took = perf_counter() - began
                if result.exit_code != 0 or result.truncated or result.stdout_bytes != lines:
                    raise BenchmarkError(f"{len(result.stdout_bytes)} bytes came of {size}, or others than these")
                return size / took / 1e6

            taken = await interleave(scale.stream_rounds, {"bare": bare, "shell": ours})
            await shell.close()
    return [
        compare(
            "shell-lines",
            f"{size // 1_000_000} MB of lines in a live shell, as bytes",
            "MB/s",
            baseline_what="subprocess.run(..., capture_output=True)",
            baseline=figures(taken["bare"]),
            measured=figures(taken["shell"]),
            target=Target("ratio at least", 0.95),
        )
    ]


async def shells_at_once(scale: Scale) -> list[Row]:
    """Many shells, each with its own commands one after the other."""
    with running_server() as server, contextlib.ExitStack() as stack:
        coprocesses = [stack.enter_context(Coprocess()) for _ in range(SHELLS)]
        async with holdfast.connect(server.address("unix")) as box:
            shells = [await box.shell("bash") for _ in range(SHELLS)]

            async def bare() -> float:
                return rate_of_coprocesses(coprocesses)

            async def ours() -> float:
                async def work(shell: Shell) -> None:
                    for _ in range(COMMANDS):
                        await _run_well(shell, "true")

                began = perf_counter()
                await asyncio.gather(*map(work, shells))
                return SHELLS * COMMANDS / (perf_counter() - began)

            taken = await interleave(scale.rounds, {"bare": bare, "shells": ours})
            for shell in shells:
                await shell.close()
    return [
        compare(
            "shell-32",
            f"{SHELLS} shells, each {COMMANDS} x `true`, at once",
            "/s",
            baseline_what=f"{SHELLS} times {BARE}",
            baseline=figures(taken["bare"]),
            measured=figures(taken["shells"]),
            target=Target("at least", 10_000.0),
        )
    ]


async def memory_of_a_shell(scale: Scale) -> list[Row]:
    """The memory that each of many shells, after one command each, adds to the server."""
    count = scale.crowd // 10
    added = [await _added_by_shells(count) for _ in range(scale.server_rounds)]
    return [
        compare(
            "shell-rss",
            f"server RSS, each of {count} shells",
            "KB",
            baseline_what="bash itself",
            baseline=figures([bash / 1e3 for bash, _ in added]),
            measured=figures([each / 1e3 for _, each in added]),
            target=Target("at most", 50.0),
        )
    ]


async def _added_by_shells(count: int) -> tuple[int, float]:
    """A fresh server: what bash weighs, and what each shell adds. The first loads code, so it does not count."""
    with running_server() as server, Coprocess() as bare:
        bare.ask("true")
        async with holdfast.connect(server.address("unix")) as box:
            shells = [await box.shell("bash")]
            await _run_well(shells[0], "true")
            before = memory_bytes(server.pid)
            for _ in range(count):
                shells.append(await box.shell("bash"))
                await _run_well(shells[-1], "true")
            each = (memory_bytes(server.pid) - before) / count
            for shell in shells:
                await shell.close()
        return memory_bytes(bare.pid), each


def asking(coprocess: Coprocess, command: str) -> Samples:
    async def batch() -> list[float]:
        return [_timed(coprocess, command) for _ in range(BATCH)]

    return batch


def _timed(coprocess: Coprocess, command: str) -> float:
    began = perf_counter()
    status = coprocess.ask(command)
    took = perf_counter() - began
    if status != b"0\n":
        raise BenchmarkError(f"a bare bash answered {status!r} to {command}")
    return took


def _running(shell: Shell, command: str) -> Samples:
    async def batch() -> list[float]:
        return [await _run_well(shell, command) for _ in range(BATCH)]

    return batch


async def _run_well(shell: Shell, command: str) -> float:
    began = perf_counter()
    result = await shell.run(command)
    took = perf_counter() - began
    if result.exit_code != 0 or result.stdout_bytes or result.shell_restarted:
        raise BenchmarkError(f"{command} answered {result!r}")
    return took


def _rate_of_run(path: str, lines: bytes) -> float:
    began = perf_counter()
    done = subprocess.run(["cat", path], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    took = perf_counter() - began
    if done.stdout != lines:
        raise BenchmarkError(f"subprocess.run gave {len(done.stdout)} bytes of {len(lines)}")
    return len(lines) / took / 1e6


def rate_of_coprocesses(coprocesses: Sequence[Coprocess]) -> float:
    began = perf_counter()
    for _ in range(COMMANDS):
        for coprocess in coprocesses:
            coprocess.send("true; echo $?\n")
        for coprocess in coprocesses:
            coprocess.line()
    return len(coprocesses) * COMMANDS / (perf_counter() - began)


@contextlib.contextmanager
def file_of_lines(size: int) -> Iterator[tuple[str, bytes]]:
    """A file with so many bytes of numbered lines: its path, and what is in it."""
    lines = b"".join(b"%d\n" % number for number in range(FIRST_LINE, FIRST_LINE + size // LINE_BYTES))
    with tempfile.NamedTemporaryFile(prefix="hf-lines-") as file:
        file.write(lines)
        file.flush()
        yield file.name, lines


class Answer(msgspec.Struct, frozen=True):
    """The result of one command in a shell. Text from peers is encoded again."""

    output: bytes
    exit_code: int | None


class Coprocess:
    """A `bash` on pipes that reads a command and prints the status after it: the least that a shell can cost."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ("bash", "--norc"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in = self._process.stdin.fileno()
        self._out = self._process.stdout.fileno()
        self.pid = self._process.pid

    def __enter__(self) -> Coprocess:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            kill_group(self.pid)

    def send(self, text: str) -> None:
        os.write(self._in, text.encode())

    def line(self) -> bytes:
        data = b""
        while not data.endswith(b"\n"):
            more = os.read(self._out, 65_536)
            if not more:
                raise EOFError
            data += more
        return data

    def ask(self, command: str) -> bytes:
        """Run a command that prints nothing; returns its status as a line."""
        self.send(f"{command}; echo $?\n")
        return self.line()

    async def run(self, command: str, timeout: float) -> Answer:
        """Run any command with a mark in the output as its end: the method of a shell of a few lines."""
        self.send(f"{command}\necho {MARK} $?\n")
        poller = select.poll()
        poller.register(self._out, select.POLLIN)
        until = perf_counter() + timeout
        data = bytearray()
        while not (mark := re.search(rb"%s (\d+)\n$" % MARK.encode(), data[-64:])):
            if not poller.poll(max(0.0, until - perf_counter()) * 1000):
                raise TimeoutError
            more = os.read(self._out, 1_048_576)
            if not more:
                raise EOFError
            data += more
        return Answer(bytes(data[: -len(mark[0])]), int(mark[1]))

    async def close(self) -> None:
        self.__exit__()
