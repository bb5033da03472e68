"""A forwarded port beside the same port without: an echo, a gigabyte, and a thousand connections at once.

The echo server, the server of the sandbox and `holdfast forward` are processes of their own.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator
from time import perf_counter
from typing import Final

from bench.measure import Row, Scale, Target, compare, figures, interleave, interleave_samples, latencies
from bench.servers import BenchmarkError
from tests.support.servers import running_server, server_environment

MESSAGE: Final = b"a request of an ordinary size".ljust(256)
BATCH: Final = 20
PIECE: Final = 1024 * 1024
CONNECTIONS: Final = 1_000
#: Echoes small requests; answers `G` with as many MiB as the next four bytes have.
SERVER: Final = """
import socket, threading
listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
print(listener.getsockname()[1], flush=True)
def serve(connection):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := connection.recv(65536):
        if data[:1] == b"G":
            for _ in range(int.from_bytes(data[1:5], "big")):
                connection.sendall(bytes(1024 * 1024))
        else:
            connection.sendall(data)
threading.stack_size(256 * 1024)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
#: The least that any relay does: it copies between one connection and another, and has nothing else to do.
BARE_RELAY: Final = """
import select, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
near, far = listener.accept()[0], socket.create_connection(("127.0.0.1", int(sys.argv[1])))
ends, epoll, room = {}, select.epoll(), memoryview(bytearray(65536))
for end, other in ((near, far), (far, near)):
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ends[end.fileno()] = end, other
    epoll.register(end, select.EPOLLIN)
while True:
    for fd, _ in epoll.poll():
        end, other = ends[fd]
        count = end.recv_into(room)
        if not count:
            sys.exit()
        other.sendall(room[:count])
"""


async def forwarded(scale: Scale) -> list[Row]:
    """A request and its echo, a download, and many connections, through the forward and without."""
    blocks = scale.unix_blocks
    with (
        _ports() as (direct, through, relay),
        _connected(direct) as near,
        _connected(through) as far,
        _connected(relay) as relayed,
    ):

        async def echo_near() -> list[float]:
            return [_echo(near) for _ in range(BATCH)]

        async def echo_far() -> list[float]:
            return [_echo(far) for _ in range(BATCH)]

        async def echo_relayed() -> list[float]:
            return [_echo(relayed) for _ in range(BATCH)]

        async def rate_near() -> float:
            return _download(near, blocks)

        async def rate_far() -> float:
            return _download(far, blocks)

        async def many_near() -> float:
            return _many(direct)

        async def many_far() -> float:
            return _many(through)

        echoes = await interleave_samples(
            scale.rounds,
            scale.echoes // BATCH,
            {"direct": echo_near, "forward": echo_far, "relay": echo_relayed},
        )
        rates = await interleave(scale.stream_rounds, {"direct": rate_near, "forward": rate_far})
        many = await interleave(scale.stream_rounds, {"direct": many_near, "forward": many_far})
    baseline = "the same without the forward, over loopback"
    return [
        compare(
            "forward-echo",
            "a request and its echo on an open connection, through `forward`",
            "ms",
            baseline_what=baseline,
            baseline=latencies(echoes["direct"]),
            measured=latencies(echoes["forward"]),
            target=Target("ratio at most", 3.0),
            note=f"a bare relay of twenty lines {latencies(echoes['relay']).median:.3f} ms",
        ),
        compare(
            "forward-rate",
            f"{blocks} MiB through `forward`",
            "MB/s",
            baseline_what=baseline,
            baseline=figures(rates["direct"]),
            measured=figures(rates["forward"]),
            target=Target("ratio at least", 0.3),
        ),
        compare(
            "forward-many",
            f"{CONNECTIONS:,} connections at once, each with a request",
            "ms",
            baseline_what=baseline,
            baseline=figures(many["direct"]),
            measured=figures(many["forward"]),
        ),
    ]


@contextlib.contextmanager
def _ports() -> Iterator[tuple[int, int, int]]:
    """The ports of an echo server, of a forward to it, and of a bare relay to it for one connection."""
    with running_server() as server, contextlib.ExitStack() as stack:
        echo = stack.enter_context(subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE))
        stack.callback(echo.kill)
        assert echo.stdout is not None
        direct = int(echo.stdout.readline())
        verb = (sys.executable, "-m", "holdfast", "forward", "--json", "--sandbox", server.address("unix"))
        forward = stack.enter_context(
            subprocess.Popen([*verb, str(direct)], stdout=subprocess.PIPE, env=server_environment())
        )
        stack.callback(forward.kill)
        assert forward.stdout is not None
        relay = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", BARE_RELAY, str(direct)], stdout=subprocess.PIPE)
        )
        stack.callback(relay.kill)
        assert relay.stdout is not None
        through = int(json.loads(forward.stdout.readline())["address"].rpartition(":")[2])
        yield direct, through, int(relay.stdout.readline())


@contextlib.contextmanager
def _connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sock


def _echo(sock: socket.socket) -> float:
    started = perf_counter()
    sock.sendall(MESSAGE)
    if sock.recv(4096) != MESSAGE:
        raise BenchmarkError("the echo is not the request")
    return perf_counter() - started


def _download(sock: socket.socket, blocks: int) -> float:
    started = perf_counter()
    sock.sendall(b"G" + blocks.to_bytes(4, "big"))
    left, room = blocks * PIECE, bytearray(PIECE)
    while left:
        left -= sock.recv_into(room, min(left, PIECE))
    return blocks * PIECE / 1e6 / (perf_counter() - started)


def _many(port: int) -> float:
    """Open all connections, then send a request on each, then read every echo."""
    started = perf_counter()
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        opened = [stack.enter_context(_connected(port)) for _ in range(CONNECTIONS)]
        for sock in opened:
            sock.sendall(MESSAGE)
            selector.register(sock, selectors.EVENT_READ)
        left = CONNECTIONS
        while left:
            for key, _ in selector.select(60):
                answered = key.fileobj
                assert isinstance(answered, socket.socket)
                if answered.recv(4096) != MESSAGE:
                    raise BenchmarkError("the echo is not the request")
                selector.unregister(answered)
                left -= 1
    return (perf_counter() - started) * 1000
