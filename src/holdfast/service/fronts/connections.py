"""Counts and bounds the connections of a port from `accept(2)` on, in total and by address.

A connection is half-open until its first complete request head; a TLS handshake is part of that. The oldest
half-open connection is closed when there are too many, so a flood of incomplete heads does not delay other clients.
Touches the sockets that it accepted; `ConnectionGate` is pure.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Final

from holdfast.service.settings import DEFAULTS
from holdfast.service.types import ServiceStruct

#: Connections accepted before the event loop runs other work: a flood must not delay pending calls.
_AT_ONCE: Final = 16
#: Without a free descriptor, accepting pauses for this long.
_PAUSE_SECONDS: Final = 0.1
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_log = logging.getLogger("holdfast.service.fronts.connections")


class ConnectionLimits(ServiceStruct, frozen=True):
    """The limits of the connections of one port: in total, from one address, without a complete request head."""

    most: int = DEFAULTS.max_connections
    by_address: int = DEFAULTS.connections_per_address
    half_open: int = DEFAULTS.half_open_connections
    head_seconds: float = DEFAULTS.head_seconds

    def within(self, descriptors: int) -> ConnectionLimits:
        """Return these limits for a port that may have so many descriptors."""
        most = max(4, min(self.most, descriptors))
        return ConnectionLimits(
            most,
            max(2, min(self.by_address, (most + 1) // 2 if most < self.most else self.by_address)),
            max(1, min(self.half_open, most // 4)),
            self.head_seconds,
        )


def descriptors_for_ports(wanted: int, reserved: int) -> int:
    """Return the number of descriptors for connections: `wanted`, or what the limit leaves beside `reserved`.

    Raises the soft limit of the process up to the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = wanted + reserved
    if soft != resource.RLIM_INFINITY and soft < need:
        soft = need if hard == resource.RLIM_INFINITY else min(need, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= need:
        return wanted
    left = max(soft // 4, soft - reserved)
    _log.warning("%d open files are allowed: %d of %d connections at a time (ulimit -n)", soft, left, wanted)
    return left


class AcceptedConnection:
    """One accepted connection."""

    def __init__(self, address: str) -> None:
        self.address = address
        #: Closes the connection without a reply.
        self.close: Callable[[], object] = lambda: None
        #: The transport has the socket.
        self.connected = False


class ConnectionGate:
    """The open connections of a port, and the decision on a new one."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._connections: set[AcceptedConnection] = set()
        #: In the order of their arrival.
        self._half_open: dict[AcceptedConnection, None] = {}
        self._by_address: Counter[str] = Counter()

    @property
    def open(self) -> int:
        return len(self._connections)

    @property
    def half_open(self) -> int:
        return len(self._half_open)

    def admits(self, address: str) -> bool:
        """Return whether an address may have one more connection; closes the oldest half-open one to make room.

        The peers of a Unix socket have an empty address and no limit by address.
        """
        limits = self.limits
        if address and self._by_address[address] >= limits.by_address:
            oldest = next((connection for connection in self._half_open if connection.address == address), None)
        elif self.open >= limits.most or self.half_open >= limits.half_open:
            oldest = next(iter(self._half_open), None)
        else:
            return True
        if oldest is None:
            return False
        self.leave(oldest)
        oldest.close()
        return True

    def enter(self, connection: AcceptedConnection) -> None:
        self._connections.add(connection)
        self._half_open[connection] = None
        self._by_address[connection.address] += 1

    def complete(self, connection: AcceptedConnection) -> None:
        """The first request head of the connection has arrived."""
        self._half_open.pop(connection, None)

    def leave(self, connection: AcceptedConnection) -> None:
        """The connection is closed; may be called again."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._half_open.pop(connection, None)
        self._by_address[connection.address] -= 1
        if not self._by_address[connection.address]:
            del self._by_address[connection.address]


class GateAcceptor:
    """Accepts connections of one listening socket that the gate admits, and gives each a protocol."""

    def __init__(
        self,
        listener: socket.socket,
        gate: ConnectionGate,
        make_protocol: Callable[[AcceptedConnection], asyncio.Protocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._listener = listener
        self._gate = gate
        self._make_protocol = make_protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._paused: asyncio.TimerHandle | None = None
        self._handshakes: set[asyncio.Task[None]] = set()

    def start(self, backlog: int) -> None:
        self._listener.setblocking(False)
        self._listener.listen(backlog)
        self._resume()

    def stop(self) -> None:
        """Stop accepting, and cancel pending handshakes."""
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._listener)
        for task in list(self._handshakes):
            task.cancel()

    def _resume(self) -> None:
        self._paused = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    raise
                # The listening socket stays readable: without a pause, the event loop would be busy with it.
                _log.error("cannot accept a connection: %s", os.strerror(error.errno))
                self._loop.remove_reader(self._listener)
                self._paused = self._loop.call_later(_PAUSE_SECONDS, self._resume)
                return
            address = str(peer[0]) if isinstance(peer, tuple) else ""
            if not self._gate.admits(address):
                accepted.close()
                continue
            accepted.setblocking(False)
            connection = AcceptedConnection(address)
            self._gate.enter(connection)
            task = self._loop.create_task(self._take(accepted, connection))
            connection.close = task.cancel
            self._handshakes.add(task)
            task.add_done_callback(functools.partial(self._taken, accepted, connection))

    async def _take(self, accepted: socket.socket, connection: AcceptedConnection) -> None:
        limit = self._gate.limits.head_seconds if self._tls is not None else None
        # A handshake that fails or takes too long is the client's fault.
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(
                lambda: self._make_protocol(connection), accepted, ssl=self._tls, ssl_handshake_timeout=limit
            )
            connection.connected = True

    def _taken(self, accepted: socket.socket, connection: AcceptedConnection, task: asyncio.Task[None]) -> None:
        # Not in the task itself: a task that is cancelled before its start does not run.
        self._handshakes.discard(task)
        if not connection.connected:
            self._gate.leave(connection)
            accepted.close()
