"""Codex's exec-server and ours, one client for both: `python -m bench.exec_servers` prints the table.

A holdfast server has the methods of `codex exec-server`, so the same messages go to both, in JSON over stdio and
over WebSocket. Codex is installed by `make parts`; without it the program prints that and ends. Touches the
processes that it starts and a directory of its own.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import itertools
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Protocol

import msgspec
from websockets.sync.client import ClientConnection, connect

import holdfast
from bench import report
from bench.servers import TREE, TREE_SIZE, BenchmarkError, memory_bytes, sleepers, tree_mark
from tests.sandbox.real_agents import AGENTS
from tests.support.servers import server_environment

CODEX: Final = AGENTS / "node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex"
SERVERS: Final = ("codex", "holdfast")
TRANSPORTS: Final = ("stdio", "websocket")
#: A hang becomes a failure after so long.
PATIENCE_SECONDS: Final = 60
#: Samples of a turn, and processes whose memory is measured.
BATCH: Final = 20
PROCESSES: Final = 100
#: Servers that are started for the row of starts.
STARTS: Final = 10
MARK: Final = "exec-servers"


class Link(Protocol):
    """Messages to and from a server."""

    def send(self, message: bytes) -> None: ...

    def receive(self) -> bytes: ...


class StdioLink:
    """A message is a line."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout

    def send(self, message: bytes) -> None:
        self._input.write(message + b"\n")
        self._input.flush()

    def receive(self) -> bytes:
        return self._output.readline()


class WebSocketLink:
    """A message is a text frame."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    def send(self, message: bytes) -> None:
        self._connection.send(message, text=True)

    def receive(self) -> bytes:
        return self._connection.recv(PATIENCE_SECONDS, decode=False)


class Server:
    """A server and the client of it, which waits for one thing at a time."""

    def __init__(self, link: Link, pid: int) -> None:
        self._link = link
        self.pid = pid
        self._numbers = itertools.count(1)

    def call(self, method: str, **params: Any) -> None:
        """Send a request and receive its reply; other messages before it are dropped."""
        number = self.request(method, **params)
        self.until(lambda message: message.get("id") == number)

    def request(self, method: str, **params: Any) -> int:
        number = next(self._numbers)
        self._link.send(msgspec.json.encode({"id": number, "method": method, "params": params}))
        return number

    def notify(self, method: str) -> None:
        self._link.send(msgspec.json.encode({"method": method, "params": {}}))

    def until(self, found: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while data := self._link.receive():
            message: dict[str, Any] = msgspec.json.decode(data)
            if "error" in message:
                raise BenchmarkError(f"a server refused: {message}")
            if found(message):
                return message
        raise BenchmarkError("a server closed the connection")

    def start(self, *argv: str, stdin: bool = False, tty: bool = False) -> str:
        """Send the start of a process; its reply is dropped with the first wait."""
        name = secrets.token_hex(8)
        self.request(
            "process/start",
            processId=name,
            argv=argv,
            cwd="file:///tmp",
            env={"PATH": os.environ["PATH"]},
            tty=tty,
            pipeStdin=stdin,
            arg0=None,
        )
        return name

    def write(self, name: str, data: bytes) -> None:
        chunk = base64.b64encode(data).decode()
        self.request("process/write", processId=name, chunk=chunk, writeId=secrets.token_hex(8))

    def closed(self, name: str) -> None:
        self.until(lambda each: each.get("method") == "process/closed" and each["params"]["processId"] == name)

    def output(self, name: str) -> None:
        self.until(lambda each: each.get("method") == "process/output" and each["params"]["processId"] == name)


@contextlib.contextmanager
def running(kind: str, transport: str) -> Iterator[Server]:
    """A server with a connection."""
    with tempfile.TemporaryDirectory(prefix="hf-bench-") as directory:
        port = _free_port()
        listen = "stdio" if transport == "stdio" else f"ws://127.0.0.1:{port}"
        if kind == "codex":
            argv = [str(CODEX), "exec-server", "--listen", listen]
        else:
            argv = [sys.executable, "-m", "holdfast", "serve", "--listen", listen, "--spool-directory", directory]
            argv += ["--no-auth"] if transport == "websocket" else []
        own = {"CODEX_HOME": directory, "HOLDFAST_DIRECTORY": directory}
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**server_environment(), **own},
        )
        try:
            with contextlib.ExitStack() as stack:
                if transport == "stdio":
                    link: Link = StdioLink(process)
                else:
                    _await_port(port)
                    url = f"ws://127.0.0.1:{port}"
                    link = WebSocketLink(stack.enter_context(connect(url, max_size=None, compression=None)))
                server = Server(link, process.pid)
                server.call("initialize", clientName="holdfast-bench")
                server.notify("initialized")
                yield server
        finally:
            # Codex's server ends with its input on stdio, where it does not heed the signal.
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_port(port: int) -> None:
    deadline = perf_counter() + PATIENCE_SECONDS
    while perf_counter() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        # Short, since it is part of the row of starts.
        time.sleep(0.002)
    raise BenchmarkError(f"nothing listens on port {port}")


# --- figures ------------------------------------------------------------------------------------------------------


def start(kind: str, transport: str) -> float:
    """A new server until it has answered the first request of a client."""
    began = perf_counter()
    with running(kind, transport):
        return (perf_counter() - began) * 1000


def true(server: Server) -> list[float]:
    """`/bin/true` from its start to its closed event."""
    return [_timed(lambda: server.closed(server.start("/bin/true"))) for _ in range(BATCH)]


def line(server: Server) -> list[float]:
    """A line to a running `cat`, to its output event."""
    return _echoes(server, server.start("/bin/cat", stdin=True))


def key(server: Server) -> list[float]:
    """A key to a `cat` on a terminal, to its echo."""
    return _echoes(server, server.start("/bin/cat", tty=True))


def _echoes(server: Server, name: str) -> list[float]:
    def echoed() -> None:
        server.write(name, b"x\n")
        server.output(name)

    echoed()
    taken = [_timed(echoed) for _ in range(BATCH)]
    server.call("process/terminate", processId=name)
    return taken


def _timed(act: Callable[[], object]) -> float:
    began = perf_counter()
    act()
    return (perf_counter() - began) * 1000


def stream(server: Server, megabytes: int) -> str:
    """The rate of a long output, and whether all of it arrived."""
    size, came = megabytes * 1_000_000, 0
    began = perf_counter()
    name = server.start("/usr/bin/head", "-c", str(size), "/dev/zero")

    def is_closed(message: dict[str, Any]) -> bool:
        nonlocal came
        if message.get("method") == "process/output":
            came += len(base64.b64decode(message["params"]["chunk"]))
        return message.get("method") == "process/closed" and message["params"]["processId"] == name

    server.until(is_closed)
    rate = came / 1e6 / (perf_counter() - began)
    return f"{rate:,.0f} MB/s, {'all' if came == size else f'{came / size:.0%}'} of the bytes"


def kill(server: Server) -> tuple[float, int]:
    """The time from `terminate` of a tree to its exited event, and its processes that are left a second later."""
    mark = tree_mark()
    name = server.start("/bin/sh", "-c", TREE.format(mark=mark))
    while sleepers(mark) < TREE_SIZE:
        time.sleep(0.01)
    began = perf_counter()
    server.request("process/terminate", processId=name)
    server.until(lambda each: each.get("method") == "process/exited")
    took = (perf_counter() - began) * 1000
    time.sleep(1)
    left = sleepers(mark, end=True)
    return took, left


def memory(server: Server) -> tuple[float, float]:
    """Resident memory in MB, and in KB for each running process."""
    programs = [server.pid, *_children(server.pid)]
    idle = sum(map(memory_bytes, programs))
    for _ in range(PROCESSES):
        server.write(name := server.start("/bin/cat", stdin=True), b"x\n")
        server.output(name)
    return idle / 1e6, (sum(map(memory_bytes, programs)) - idle) / PROCESSES / 1e3


def _children(pid: int) -> list[int]:
    """The other programs of a server: one with a keeper is a child of the keeper."""
    lists = [task.joinpath("children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(child) for each in lists for child in each]


def compare(transports: Sequence[str], rounds: int, megabytes: int, starts: int) -> str:
    """The table as Markdown: a column for each server and transport."""
    columns = [(kind, transport) for transport in transports for kind in SERVERS]
    rows: dict[str, list[str]] = {"": []}
    for kind, transport in columns:
        shown = subprocess.check_output([CODEX, "--version"], text=True).strip().replace("codex-cli", "Codex")
        name = shown if kind == "codex" else f"holdfast {holdfast.__version__}"
        rows[""].append(f"{name}, {transport}")
    latencies = {
        "`/bin/true`, start to closed": true,
        "a line through `cat`": line,
        "a key to its echo, on a terminal": key,
    }
    started: list[list[float]] = [[] for _ in columns]
    for _ in range(starts):
        for column, samples in zip(columns, started, strict=True):
            samples.append(start(*column))
    rows["start of the server, until it answers, p50 / p99"] = list(map(_shown, started))
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(running(*column)) for column in columns]
        idle = [memory(server) for server in servers]
        for what, sample in latencies.items():
            taken: list[list[float]] = [[] for _ in servers]
            for _ in range(rounds):
                for server, samples in zip(servers, taken, strict=True):
                    samples += sample(server)
            rows[f"{what}, p50 / p99"] = list(map(_shown, taken))
        rows[f"{megabytes} MB of output"] = [stream(server, megabytes) for server in servers]
        killed = [kill(server) for server in servers]
        rows["`terminate` of a tree, to its exit"] = [
            f"{took:.1f} ms, {left or 'none'} of its processes left" for took, left in killed
        ]
        rows["memory, idle"] = [f"{base:.1f} MB" for base, _ in idle]
        rows["memory for each running process"] = [f"{each:.1f} KB" for _, each in idle]
    return report.pipes([[what, *cells] for what, cells in rows.items()])


def _shown(samples: list[float]) -> str:
    p99 = statistics.quantiles(samples, n=100, method="inclusive")[-1]
    return f"{report.digits(statistics.median(samples))} / {report.digits(p99)} ms"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.exec_servers", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=TRANSPORTS, default=TRANSPORTS, metavar="TRANSPORT")
    parser.add_argument("--quick", action="store_true", help="some seconds: checks that it runs")
    parser.add_argument("--markdown", metavar="FILE", help="a page that gets the table between its marks")
    options = parser.parse_args()
    if not CODEX.exists() or shutil.which("setsid") is None:
        print(f"no Codex in {AGENTS}: make parts", file=sys.stderr)
        return 0
    machine = report.this_machine()
    rounds, megabytes, starts = (2, 10, 2) if options.quick else (10, 100, STARTS)
    table = compare(options.only, rounds, megabytes, starts)
    print(table)
    if options.markdown is not None:
        head = report.facts(report.Report(machine, options.quick, 0.0, (), {}))
        report.write_into(options.markdown, f"{head}.\n\n{table}", MARK)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
