"""The filtering proxy of confined processes: HTTP requests and CONNECT, only to hosts on a list.

It runs outside of their network. A launcher passes it, over a Unix socket, the socket that listens inside. The
proxy resolves names, connects only to the address that it checked, and prints every decision as a line of JSON.
Touches that Unix socket, the passed sockets, and the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import http
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Final
from urllib.parse import urlsplit

import h11

from holdfast.errors import SandboxError
from holdfast.proxies.egress.rules import EgressRules, port_number, split_port
from holdfast.wire.http_messages import HOP_BY_HOP_HEADERS

#: The request line and headers; cookies and tokens take a few kilobytes.
MAX_HEAD_BYTES: Final = 64 * 1024
#: Connections at a time. A package manager opens tens.
MAX_CONNECTIONS: Final = 256
HEAD_SECONDS: Final = 20.0
CONNECT_SECONDS: Final = 15.0
#: For a tunnel without data in either direction.
IDLE_SECONDS: Final = 600.0
#: Launchers that pass their socket at the same moment.
MAX_HANDOVERS: Final = 64
#: A session has one socket, and one more for each process that it starts beside its shell.
SOCKETS_BEFORE_SWEEP: Final = 16
_PIECE: Final = 64 * 1024
_SIOCGSKNS: Final = 0x894C
_HOP_BY_HOP_HEADERS: Final = frozenset(name.encode() for name in HOP_BY_HOP_HEADERS)

Report = Callable[[dict[str, object]], None]


class RequestRefused(Exception):
    """A refused request: the HTTP status of the answer, and the reason."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def print_line(fact: dict[str, object]) -> None:
    """Print a fact on stdout as a line of JSON, for the parent process."""
    os.write(1, json.dumps({"at": round(time.time(), 3), **fact}).encode() + b"\n")


async def run(path: str, rules: EgressRules, report: Report = print_line) -> None:
    """Serve until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    async with serving(path, rules, report):
        await over.wait()


@contextlib.asynccontextmanager
async def serving(path: str, rules: EgressRules, report: Report) -> AsyncIterator[None]:
    """Accept listening sockets at `path`, and serve on them."""
    handover = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    before = os.umask(0o177)
    try:
        handover.bind(path)
        handover.listen(16)
    except OSError as error:
        handover.close()
        raise SandboxError(f"{path}: {error.strerror}") from None
    finally:
        os.umask(before)
    proxy = EgressProxy(rules, report)
    accepting = asyncio.create_task(proxy.accept_sockets(handover))
    report({"event": "ready", "socket": path})
    try:
        yield
    finally:
        accepting.cancel()
        await asyncio.wait((accepting,))
        await proxy.close()
        handover.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


class EgressProxy:
    """The passed sockets, and the connections accepted on them."""

    def __init__(self, rules: EgressRules, report: Report) -> None:
        self._rules = rules
        self._report = report
        #: Each with the inode of its network namespace.
        self._servers: list[tuple[asyncio.Server, int]] = []
        self._open = 0
        self._handovers: set[asyncio.Task[None]] = set()

    async def accept_sockets(self, handover: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            launcher, _ = await loop.sock_accept(handover)
            if len(self._handovers) >= MAX_HANDOVERS:
                launcher.close()
                continue
            task = asyncio.create_task(self._receive_socket(loop, launcher))
            self._handovers.add(task)
            task.add_done_callback(self._handovers.discard)

    async def _receive_socket(self, loop: asyncio.AbstractEventLoop, launcher: socket.socket) -> None:
        readable = asyncio.Event()
        with launcher:
            loop.add_reader(launcher.fileno(), readable.set)
            try:
                async with asyncio.timeout(HEAD_SECONDS):
                    await readable.wait()
            except TimeoutError:
                return
            finally:
                loop.remove_reader(launcher.fileno())
            await self._listen_on_passed(launcher)

    async def _listen_on_passed(self, launcher: socket.socket) -> None:
        """Serve on the descriptor that a launcher passes, which may be of any kind."""
        listener: socket.socket | None = None
        try:
            _, fds, _, _ = socket.recv_fds(launcher, 1, 1)
            if not fds:
                return
            listener = _socket_of(fds[0])
            self._close_empty_networks()
            self._servers.append((await asyncio.start_server(self.serve, sock=listener), network_of(listener)))
            launcher.send(b"K")
        except (OSError, ValueError) as error:
            self._report({"event": "error", "reason": f"a passed socket cannot be used: {error}"})
            if listener is not None:
                listener.close()

    def _close_empty_networks(self) -> None:
        """Close the sockets of networks without processes: a replaced shell gets another network."""
        if len(self._servers) < SOCKETS_BEFORE_SWEEP:
            return
        used = used_networks()
        for server, network in self._servers:
            if network and network not in used:
                server.close()
        self._servers = [each for each in self._servers if each[0].is_serving()]

    async def close(self) -> None:
        for task in self._handovers:
            task.cancel()
        for server, _ in self._servers:
            server.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one request on a connection from inside, and close the connection."""
        self._open += 1
        try:
            if self._open > MAX_CONNECTIONS:
                await _answer(writer, 503, f"the limit of {MAX_CONNECTIONS} connections is reached; close some")
                return
            await self._handle(reader, writer)
        except (OSError, TimeoutError, h11.ProtocolError, asyncio.IncompleteReadError):
            pass  # one side closed its connection, or does not use HTTP
        finally:
            self._open -= 1
            writer.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inside = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                request = await _next_event(inside, reader)
        except h11.RemoteProtocolError as error:
            await _answer(writer, 400, str(error))
            return
        if not isinstance(request, h11.Request):
            return
        try:
            host, port, target = requested_host(request)
            up_reader, up_writer = await self._connect(request.method.decode("ascii", "replace"), host, port)
        except RequestRefused as refused:
            await _answer(writer, refused.status, str(refused))
            return
        try:
            if request.method == b"CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                if ahead := inside.trailing_data[0]:
                    up_writer.write(ahead)
                await _tunnel((reader, up_writer), (up_reader, writer))
            else:
                await _forward(request, target, inside, reader, writer, up_reader, up_writer)
        finally:
            up_writer.close()

    async def _connect(
        self, method: str, host: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        why = self._rules.refuses_name(host, port)
        if why:
            self._decided(method, host, port, why)
            raise RequestRefused(403, why)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError) as error:
            self._decided(method, host, port, f"{host}: {error}")
            raise RequestRefused(502, f"{host}: {error}") from None
        except TimeoutError:
            self._decided(method, host, port, f"{host}: name resolution timed out")
            raise RequestRefused(504, f"{host}: name resolution timed out") from None
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        allowed = [address for address in addresses if not self._rules.refuses_address(host, port, address)]
        if not allowed:
            why = self._rules.refuses_address(host, port, addresses[0])
            self._decided(method, host, port, why)
            raise RequestRefused(403, why)
        self._decided(method, host, port, "", allowed[0])
        why = ""
        for address in allowed:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    return await asyncio.open_connection(address, port)
            except (OSError, TimeoutError) as error:
                why = f"{host}:{port} at {address}: {error or 'no answer'}"
        raise RequestRefused(502, why)

    def _decided(self, method: str, host: str, port: int, reason: str, address: str = "") -> None:
        fact: dict[str, object] = {"event": "decision", "allowed": not reason, "method": method[:16]}
        fact |= {"host": host[:255], "port": port, **({"address": address} if address else {"reason": reason})}
        self._report(fact)


def _socket_of(fd: int) -> socket.socket:
    try:
        found = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        raise
    found.setblocking(False)
    return found


def network_of(listener: socket.socket) -> int:
    """Return the inode of a socket's network namespace; 0 if the kernel refuses it."""
    try:
        fd: int = fcntl.ioctl(listener.fileno(), _SIOCGSKNS)
    except OSError:
        return 0
    try:
        return os.fstat(fd).st_ino
    finally:
        os.close(fd)


def used_networks() -> set[int]:
    """Return the network namespaces that have a process."""
    found: set[int] = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                found.add(os.stat(f"/proc/{name}/ns/net").st_ino)
    return found


def requested_host(request: h11.Request) -> tuple[str, int, bytes]:
    """Return the host and the port of a request, and the target to send there."""
    target = request.target.decode("ascii", "replace")
    if request.method == b"CONNECT":
        host, digits = split_port(target)
        port = port_number(digits)
        if not host or port is None:
            raise RequestRefused(400, f"CONNECT {target[:300]!r}: not HOST:PORT")
        return host, port, b""
    try:
        url = urlsplit(target)
        port = url.port or 80
    except ValueError as error:
        raise RequestRefused(400, f"{target!r}: {error}") from None
    if url.scheme != "http" or not url.hostname:
        raise RequestRefused(400, "this is a proxy: request http://HOST/PATH, or CONNECT HOST:PORT")
    path = url.path or "/"
    return url.hostname, port, (f"{path}?{url.query}" if url.query else path).encode()


async def _forward(
    request: h11.Request,
    target: bytes,
    inside: h11.Connection,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    up_reader: asyncio.StreamReader,
    up_writer: asyncio.StreamWriter,
) -> None:
    """Forward one request and its answer; then both sides close."""
    authority = urlsplit(request.target.decode("ascii", "replace")).netloc.rpartition("@")[2]
    headers = [(name, value) for name, value in request.headers if name not in _HOP_BY_HOP_HEADERS]
    chunked = any(name == b"transfer-encoding" for name, _ in request.headers)
    headers += [(b"host", authority.encode()), (b"connection", b"close")]
    if chunked:
        # Send only the length that this proxy uses: the next hop might use the other one.
        headers = [each for each in headers if each[0] != b"content-length"]
        headers.append((b"transfer-encoding", b"chunked"))
    outside = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
    up_writer.write(outside.send(h11.Request(method=request.method, target=target, headers=headers)) or b"")

    async def send_body() -> None:
        while True:
            event = await _next_event(inside, reader)
            if not isinstance(event, h11.Data | h11.EndOfMessage):
                return
            up_writer.write(outside.send(_without_trailers(event)) or b"")
            await up_writer.drain()
            if isinstance(event, h11.EndOfMessage):
                return

    if inside.they_are_waiting_for_100_continue:
        writer.write(inside.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
    body = asyncio.create_task(send_body())
    try:
        while True:
            async with asyncio.timeout(IDLE_SECONDS):
                event = await _next_event(outside, up_reader)
            if isinstance(event, h11.Response):
                passed = [(name, value) for name, value in event.headers if name not in _HOP_BY_HOP_HEADERS]
                if not any(name == b"content-length" for name, _ in passed):
                    passed.append((b"transfer-encoding", b"chunked"))
                passed.append((b"connection", b"close"))
                event = h11.Response(status_code=event.status_code, reason=event.reason, headers=passed)
            elif isinstance(event, h11.InformationalResponse):
                continue
            elif not isinstance(event, h11.Data | h11.EndOfMessage):
                return
            writer.write(inside.send(_without_trailers(event)) or b"")
            await writer.drain()
            if isinstance(event, h11.EndOfMessage):
                return
    finally:
        body.cancel()
        await asyncio.gather(body, return_exceptions=True)


def _without_trailers(event: h11.Event) -> h11.Event:
    """Return an event without trailers, and with its data as bytes."""
    if isinstance(event, h11.Data):
        return h11.Data(data=bytes(event.data))
    return h11.EndOfMessage() if isinstance(event, h11.EndOfMessage) else event


async def _next_event(connection: h11.Connection, reader: asyncio.StreamReader) -> object:
    while True:
        event = connection.next_event()
        if event is not h11.NEED_DATA:
            return event
        connection.receive_data(await reader.read(_PIECE))


async def _tunnel(*ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Copy bytes in both directions, with back-pressure, until both have ended or the tunnel is idle."""
    moved = [time.monotonic()]

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_PIECE):
            moved[0] = time.monotonic()
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    copies = [asyncio.create_task(copy(*way)) for way in ways]
    try:
        while not all(each.done() for each in copies):
            left = moved[0] + IDLE_SECONDS - time.monotonic()
            if left <= 0 or any(each.done() and each.exception() for each in copies):
                return
            await asyncio.wait(
                [each for each in copies if not each.done()], timeout=left, return_when="FIRST_COMPLETED"
            )
    finally:
        for each in copies:
            each.cancel()
        await asyncio.gather(*copies, return_exceptions=True)


async def _answer(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    body = f"holdfast egress: {text}\n".encode()
    connection = h11.Connection(h11.SERVER)
    phrase = http.HTTPStatus(status).phrase.encode()
    headers = [
        ("content-type", "text/plain; charset=utf-8"),
        ("content-length", str(len(body))),
        ("connection", "close"),
    ]
    for event in (
        h11.Response(status_code=status, reason=phrase, headers=headers),
        h11.Data(data=body),
        h11.EndOfMessage(),
    ):
        writer.write(connection.send(event) or b"")
    await writer.drain()
