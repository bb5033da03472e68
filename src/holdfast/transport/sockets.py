"""Sockets by address for streams: connect, listen, accept and reset. Touches sockets and the event loop."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Final

from holdfast.errors import InvalidParams, LimitReached, PortUnavailable
from holdfast.wire.stream_messages import StreamAddress

log = logging.getLogger(__name__)

#: Connections that the kernel holds until they are accepted: a thousand clients may connect at the same moment.
BACKLOG: Final = 1_024
#: Connections accepted in one turn of the event loop, so that a flood of them delays no other work.
ACCEPTS_A_TURN: Final = 64
#: How long a listener pauses when the process has no descriptor left.
PAUSE_SECONDS: Final = 1.0
#: Longer than the retries of a busy listener in the same machine, shorter than the patience of an HTTP client.
CONNECT_SECONDS: Final = 15.0
#: The size of a Unix socket's path in the kernel, with its final zero byte.
MAX_PATH_BYTES: Final = 107
_RESET: Final = struct.pack("ii", 1, 0)
_NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def check_address(address: StreamAddress, *, listens: bool = False) -> StreamAddress:
    """Return `address` if it is a port or a path, and not both; port 0 only for a listener."""
    if (address.port is None) == (address.path is None):
        raise InvalidParams("address: give a port or the path of a Unix socket, and not both")
    if address.path is not None:
        if not 0 < len(os.fsencode(address.path)) <= MAX_PATH_BYTES or "\0" in address.path:
            raise InvalidParams(f"address: {address.path!r}: a path of 1 to {MAX_PATH_BYTES} bytes")
    elif address.port is not None and not (0 if listens else 1) <= address.port <= 65_535:
        raise InvalidParams(f"address: {address.port} is not a port from {0 if listens else 1} to 65535")
    return address


async def dial(address: StreamAddress) -> socket.socket:
    """Connect; `PortUnavailable` names the address and the reason."""
    check_address(address)
    loop = asyncio.get_running_loop()
    reason: object = "no address"
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            for family, where in await _resolved(loop, address):
                sock = new_socket(family)
                try:
                    await loop.sock_connect(sock, where)
                except OSError as error:
                    sock.close()
                    # asyncio puts the address in place of the reason.
                    reason = os.strerror(error.errno) if error.errno else error
                except BaseException:
                    sock.close()
                    raise
                else:
                    return sock
    except TimeoutError:
        reason = f"no answer in {CONNECT_SECONDS:g} s"
    except OSError as error:
        reason = error.strerror or error
    except UnicodeError as error:
        reason = error
    raise PortUnavailable(f"{address}: {reason}")


def listen(address: StreamAddress) -> socket.socket:
    """Listen at an address; `PortUnavailable` if it is taken."""
    check_address(address, listens=True)
    try:
        ip = None if address.path is not None else ipaddress.ip_address(address.host)
    except ValueError:
        raise InvalidParams(f"address: {address.host!r}: listen on an IP address, not a name") from None
    family = socket.AF_UNIX if ip is None else socket.AF_INET6 if ip.version == 6 else socket.AF_INET
    sock = new_socket(family)
    try:
        if ip is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address.path if address.path is not None else (address.host, address.port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise PortUnavailable(f"{address}: {error.strerror}; choose another one") from None
    return sock


def address_of(sock: socket.socket) -> StreamAddress:
    """The address that a listening socket is bound to."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return StreamAddress(path=os.fsdecode(name))
    return StreamAddress(host=name[0], port=name[1])


def new_socket(family: int) -> socket.socket:
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        if error.errno in _NO_DESCRIPTORS:
            raise LimitReached(f"a socket: {error.strerror}; raise the limit of open files") from None
        raise
    sock.setblocking(False)
    if family != socket.AF_UNIX:
        # Without it the kernel holds back the second of two small writes until the first is acknowledged.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def reset(sock: socket.socket) -> None:
    """Close a connection so that its TCP peer gets an error and not an orderly end of file."""
    if sock.family != socket.AF_UNIX:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        except OSError:
            log.debug("a connection had ended before its reset")
    sock.close()


async def _resolved(
    loop: asyncio.AbstractEventLoop, address: StreamAddress
) -> list[tuple[int, str | tuple[str, int]]]:
    if address.path is not None:
        return [(socket.AF_UNIX, address.path)]
    assert address.port is not None
    try:
        # Without the thread of `getaddrinfo`: most hosts are addresses.
        ip = ipaddress.ip_address(address.host)
    except ValueError:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        return [(each[0], (str(each[4][0]), address.port)) for each in found]
    return [(socket.AF_INET6 if ip.version == 6 else socket.AF_INET, (address.host, address.port))]


class Acceptor:
    """Accepts the connections of a listening socket, which it owns and closes."""

    def __init__(self, sock: socket.socket, accepted: Callable[[socket.socket], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._accepted = accepted
        self._paused: asyncio.TimerHandle | None = None
        self.address = address_of(sock)
        self._loop.add_reader(sock, self._readable)

    def _readable(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("%s: accepts no connection for %g s: %s", self.address, PAUSE_SECONDS, error)
                self._loop.remove_reader(self._sock)
                self._paused = self._loop.call_later(PAUSE_SECONDS, self._resume)
                return
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._accepted(connection)
            if self._sock.fileno() < 0:
                return

    def _resume(self) -> None:
        self._paused = None
        self._loop.add_reader(self._sock, self._readable)

    def close(self) -> None:
        if self._sock.fileno() < 0:
            return
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()
        if self.address.path is not None:
            try:
                os.unlink(self.address.path)
            except FileNotFoundError:
                log.debug("%s was removed already", self.address)
