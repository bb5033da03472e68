"""The filtering proxy of confined processes: HTTP requests and CONNECT, to hosts on a list and to nobody else.

It runs outside of their network. A launcher brings it, over a Unix socket, the socket that listens inside. Names
are looked up here, each connection goes to the address that was checked, and every decision is told as a line of
JSON. Touches that Unix socket, the sockets that it is brought, and the network.
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
from holdfast.proxies.egress.rules import Rules, port_number, split_port
from holdfast.wire.http_messages import HOP_BY_HOP_HEADERS

#: A request's line and headers; cookies and tokens make a few kilobytes.
MAX_HEAD_BYTES: Final = 64 * 1024
#: Connections at a time. A package manager opens tens.
MAX_CONNECTIONS: Final = 256
HEAD_SECONDS: Final = 20.0
CONNECT_SECONDS: Final = 15.0
#: A tunnel in which nothing moves in either direction.
IDLE_SECONDS: Final = 600.0
#: Launchers that bring their socket at the same moment.
MAX_VISITS: Final = 64
#: A session has one, and one more for each process that it starts beside its shell.
SOCKETS_BEFORE_SWEEP: Final = 16
_PIECE: Final = 64 * 1024
_SIOCGSKNS: Final = 0x894C
_HOP_BY_HOP_HEADERS: Final = frozenset(name.encode() for name in HOP_BY_HOP_HEADERS)

Tell = Callable[[dict[str, object]], None]


class Refused(Exception):
    """With the status to answer, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def print_line(fact: dict[str, object]) -> None:
    """To stdout, for whoever started us."""
    os.write(1, json.dumps({"at": round(time.time(), 3), **fact}).encode() + b"\n")


async def run(path: str, rules: Rules, tell: Tell = print_line) -> None:
    """Serve until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    async with serving(path, rules, tell):
        await over.wait()


@contextlib.asynccontextmanager
async def serving(path: str, rules: Rules, tell: Tell) -> AsyncIterator[None]:
    """Take listening sockets at `path`, and serve on them."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    before = os.umask(0o177)
    try:
        door.bind(path)
        door.listen(16)
    except OSError as error:
        door.close()
        raise SandboxError(f"{path}: {error.strerror}") from None
    finally:
        os.umask(before)
    proxy = Proxy(rules, tell)
    taking = asyncio.create_task(proxy.take_sockets(door))
    tell({"event": "ready", "socket": path})
    try:
        yield
    finally:
        taking.cancel()
        await asyncio.wait((taking,))
        await proxy.close()
        door.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


class Proxy:
    """The sockets that it was brought, and the connections that came in by them."""

    def __init__(self, rules: Rules, tell: Tell) -> None:
        self._rules = rules
        self._tell = tell
        #: Each with the network that it listens in.
        self._servers: list[tuple[asyncio.Server, int]] = []
        self._open = 0
        self._visits: set[asyncio.Task[None]] = set()

    async def take_sockets(self, door: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            visitor, _ = await loop.sock_accept(door)
            if len(self._visits) >= MAX_VISITS:
                visitor.close()
                continue
            visit = asyncio.create_task(self._take_socket(loop, visitor))
            self._visits.add(visit)
            visit.add_done_callback(self._visits.discard)

    async def _take_socket(self, loop: asyncio.AbstractEventLoop, visitor: socket.socket) -> None:
        with visitor:
            if await self._has_spoken(loop, visitor):
                await self._listen_on(visitor)

    async def _has_spoken(self, loop: asyncio.AbstractEventLoop, visitor: socket.socket) -> bool:
        readable = asyncio.Event()
        loop.add_reader(visitor.fileno(), readable.set)
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                await readable.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(visitor.fileno())
        return True

    async def _listen_on(self, visitor: socket.socket) -> None:
        """What a visitor brings; it may be anything."""
        listener: socket.socket | None = None
        try:
            _, fds, _, _ = socket.recv_fds(visitor, 1, 1)
            if not fds:
                return
            listener = _socket_of(fds[0])
            self._leave_empty_networks()
            self._servers.append((await asyncio.start_server(self._serve, sock=listener), network_of(listener)))
            visitor.send(b"K")
        except (OSError, ValueError) as error:
            self._tell({"event": "error", "reason": f"a socket that was brought cannot be used: {error}"})
            if listener is not None:
                listener.close()

    def _leave_empty_networks(self) -> None:
        """Close what listens where nobody is any more: a shell that is replaced comes back in another network."""
        if len(self._servers) < SOCKETS_BEFORE_SWEEP:
            return
        inhabited = inhabited_networks()
        for server, network in self._servers:
            if network and network not in inhabited:
                server.close()
        self._servers = [each for each in self._servers if each[0].is_serving()]

    async def close(self) -> None:
        for visit in self._visits:
            visit.cancel()
        for server, _ in self._servers:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open > MAX_CONNECTIONS:
                await _answer(writer, 503, f"there are {MAX_CONNECTIONS} connections already; close some")
                return
            await self._handle(reader, writer)
        except (OSError, TimeoutError, h11.ProtocolError, asyncio.IncompleteReadError):
            pass  # one of both sides is gone, or does not speak HTTP: there is nobody to tell
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
            host, port, target = wanted(request)
            up = await self._reach(request.method.decode("ascii", "replace"), host, port)
        except Refused as refused:
            await _answer(writer, refused.status, str(refused))
            return
        up_reader, up_writer = up
        try:
            if request.method == b"CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                if ahead := inside.trailing_data[0]:
                    up_writer.write(ahead)
                await _tunnel((reader, up_writer), (up_reader, writer))
            else:
                await _pass_on(request, target, inside, reader, writer, up_reader, up_writer)
        finally:
            up_writer.close()

    async def _reach(self, method: str, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        why = self._rules.refuses_name(host, port)
        if why:
            self._decided(method, host, port, why)
            raise Refused(403, why)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError) as error:
            self._decided(method, host, port, f"{host}: {error}")
            raise Refused(502, f"{host}: {error}") from None
        except TimeoutError:
            self._decided(method, host, port, f"{host}: its name was not resolved in time")
            raise Refused(504, f"{host}: its name was not resolved in time") from None
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        allowed = [address for address in addresses if not self._rules.refuses_address(host, port, address)]
        if not allowed:
            why = self._rules.refuses_address(host, port, addresses[0])
            self._decided(method, host, port, why)
            raise Refused(403, why)
        self._decided(method, host, port, "", allowed[0])
        why = ""
        for address in allowed:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    return await asyncio.open_connection(address, port)
            except (OSError, TimeoutError) as error:
                why = f"{host}:{port} at {address}: {error or 'no answer'}"
        raise Refused(502, why)

    def _decided(self, method: str, host: str, port: int, reason: str, address: str = "") -> None:
        fact: dict[str, object] = {"event": "decision", "allowed": not reason, "method": method[:16]}
        fact |= {"host": host[:255], "port": port, **({"address": address} if address else {"reason": reason})}
        self._tell(fact)


def _socket_of(fd: int) -> socket.socket:
    try:
        found = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        raise
    found.setblocking(False)
    return found


def network_of(listener: socket.socket) -> int:
    """The number of the network that a socket is in; 0 if we may not know."""
    try:
        fd: int = fcntl.ioctl(listener.fileno(), _SIOCGSKNS)
    except OSError:
        return 0
    try:
        return os.fstat(fd).st_ino
    finally:
        os.close(fd)


def inhabited_networks() -> set[int]:
    """Those that some process is in."""
    found: set[int] = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                found.add(os.stat(f"/proc/{name}/ns/net").st_ino)
    return found


def wanted(request: h11.Request) -> tuple[str, int, bytes]:
    """The host, the port, and what is asked of them."""
    target = request.target.decode("ascii", "replace")
    if request.method == b"CONNECT":
        host, digits = split_port(target)
        port = port_number(digits)
        if not host or port is None:
            raise Refused(400, f"CONNECT {target[:300]!r}: not HOST:PORT")
        return host, port, b""
    try:
        url = urlsplit(target)
        asked = url.port or 80
    except ValueError as error:
        raise Refused(400, f"{target!r}: {error}") from None
    if url.scheme != "http" or not url.hostname:
        raise Refused(400, "this is a proxy: ask for http://HOST/PATH, or CONNECT HOST:PORT")
    path = url.path or "/"
    return url.hostname, asked, (f"{path}?{url.query}" if url.query else path).encode()


async def _pass_on(
    request: h11.Request,
    target: bytes,
    inside: h11.Connection,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    up_reader: asyncio.StreamReader,
    up_writer: asyncio.StreamWriter,
) -> None:
    """One request and its answer; both sides close then."""
    authority = urlsplit(request.target.decode("ascii", "replace")).netloc.rpartition("@")[2]
    headers = [(name, value) for name, value in request.headers if name not in _HOP_BY_HOP_HEADERS]
    chunked = any(name == b"transfer-encoding" for name, _ in request.headers)
    headers += [(b"host", authority.encode()), (b"connection", b"close")]
    if chunked:
        # Of two lengths, the one that we go by: the next to read it might go by the other.
        headers = [each for each in headers if each[0] != b"content-length"]
        headers.append((b"transfer-encoding", b"chunked"))
    outside = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
    up_writer.write(outside.send(h11.Request(method=request.method, target=target, headers=headers)) or b"")

    async def send_body() -> None:
        while True:
            event = await _next_event(inside, reader)
            if not isinstance(event, h11.Data | h11.EndOfMessage):
                return
            up_writer.write(outside.send(_bare(event)) or b"")
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
                kept = [(name, value) for name, value in event.headers if name not in _HOP_BY_HOP_HEADERS]
                if not any(name == b"content-length" for name, _ in kept):
                    kept.append((b"transfer-encoding", b"chunked"))
                kept.append((b"connection", b"close"))
                event = h11.Response(status_code=event.status_code, reason=event.reason, headers=kept)
            elif isinstance(event, h11.InformationalResponse):
                continue
            elif not isinstance(event, h11.Data | h11.EndOfMessage):
                return
            writer.write(inside.send(_bare(event)) or b"")
            await writer.drain()
            if isinstance(event, h11.EndOfMessage):
                return
    finally:
        body.cancel()
        await asyncio.gather(body, return_exceptions=True)


def _bare(event: h11.Event) -> h11.Event:
    """Without trailers, and with its data as bytes."""
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
    """Bytes both ways, each as fast as the other side takes them, until both have ended or nothing moves."""
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
