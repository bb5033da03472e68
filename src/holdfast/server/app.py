"""Composes the server: settings, runtime, dispatch, listeners, signals. The only place where they meet.

Nothing here decides anything; it wires, waits for the word to stop, and takes apart in the reverse order.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Final, NoReturn, Protocol
from urllib.parse import urlsplit

from holdfast.config import ExecServerConfig
from holdfast.errors import HoldfastError, InvalidParams, InvalidRequest, ResourceExhausted
from holdfast.launch.keeper_client import command_socket_of
from holdfast.runtime.durability.ledger import NullLedger
from holdfast.runtime.durability.recovery import Recovery
from holdfast.runtime.local import LocalExec
from holdfast.server.client_session_records import ClientSessionReplay
from holdfast.server.client_sessions import Sessions
from holdfast.server.connection import ServerConnection
from holdfast.server.dispatch import Dispatcher
from holdfast.transport import stdio, stream, unix

log = logging.getLogger("holdfast.server")

#: What the keeper's keys of listening sockets begin with.
LISTENER_KEY: Final = "listen "


class Listener(Protocol):
    """Something that accepts connections until it is closed."""

    @property
    def address(self) -> str: ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...


def run_server(
    config: ExecServerConfig,
    listen: list[str],
    *,
    ready_fd: int | None = None,
    token: str | None = None,
    no_auth: bool = False,
    keeper_fd: int | None = None,
) -> int:
    """Serve until SIGTERM, SIGINT or `server/shutdown`; returns the exit code.

    Writes one JSON line to `ready_fd` once it listens, so that whoever started us need not guess. `keeper_fd` is
    our line to the keeper that started us.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    open_files = raise_descriptor_limit()
    # What is loaded by now stays: the collector need not look at it again and again.
    gc.freeze()
    seal_descriptors({ready_fd} if ready_fd is not None else set())
    try:
        asyncio.run(_serve(config, listen, ready_fd, token, no_auth, open_files, keeper_fd))
    except HoldfastError as error:
        log.error("%s", error)
        return 2
    return 0


def raise_descriptor_limit() -> int | None:
    """As many descriptors as we may have: a thousand processes need several thousand.

    Returns the limit that processes are to have, if it is no longer ours.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return None
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def seal_descriptors(keep: set[int]) -> None:
    """What we inherited by accident does not go on to processes."""
    try:
        names = os.listdir("/proc/self/fd")
    except FileNotFoundError:
        raise ResourceExhausted(
            "/proc is not mounted here: without it nothing tells which processes a command has started"
        ) from None
    for name in names:
        fd = int(name)
        if fd > 2 and fd not in keep:
            try:
                os.set_inheritable(fd, False)
            except OSError:
                continue  # the descriptor of the listing itself


class Server:
    """One running server: the runtime, its sessions, and everybody who is connected."""

    def __init__(self, exec_: LocalExec, recovery: Recovery | None = None) -> None:
        self.exec = exec_
        self._recovery = recovery
        self.sessions = Sessions(exec_, NullLedger() if recovery is None else recovery.ledger)
        self.listeners: list[Listener] = []
        self.dispatcher = Dispatcher(
            exec_,
            self.sessions,
            listening=lambda: tuple(listener.address for listener in self.listeners),
            shutdown=self._shutdown_requested,
        )
        self.connections: set[ServerConnection] = set()
        self.stopping = asyncio.Event()
        #: We stop, and what runs stays with the keeper.
        self.leaving = False
        self.grace = exec_.config.shutdown_grace_period_ms / 1000
        self._idle: asyncio.TimerHandle | None = None
        self._watch_idle()

    @property
    def is_full(self) -> bool:
        """Whether one more connection is one too many; the log is told."""
        if len(self.connections) < self.exec.config.max_connections:
            return False
        log.warning("refused a connection: %d are open (max_connections)", len(self.connections))
        return True

    def connect(self) -> ServerConnection:
        """The receiver for a new connection."""
        connection = ServerConnection(self.exec, self.dispatcher, self.sessions)
        self.connections.add(connection)
        connection.on_close = lambda: self._closed(connection)
        return connection

    def accept(self, sock: socket.socket) -> None:
        """Take a connected Unix socket, or turn it away when there are too many."""
        if self.is_full:
            sock.close()
            return
        connection = self.connect()
        connection.peer_pid, _ = unix.peer_of(sock)
        limit = self.exec.config.max_message_bytes
        connection.open(stream.from_socket(sock, connection, description="unix peer", max_message_bytes=limit))

    async def close(self) -> None:
        """Stop listening, end every process, tell who is still there, leave."""
        if self._recovery is not None:
            self._recovery.durability.link.stop()
        if self._idle is not None:
            self._idle.cancel()
        for listener in self.listeners:
            listener.close()
        await self.exec.shutdown(self.grace)
        for connection in tuple(self.connections):
            connection.channel.close()
        self.sessions.close()
        # The channels tell their loss in the next turn of the loop.
        await asyncio.sleep(0)

    def leave(self) -> NoReturn:
        """Stop, and leave everything to the keeper for the next server.

        As a killed server does, and no other way: nothing is undone, no task comes to its end. What the next server
        needs is written down before each fact counts.
        """
        assert self._recovery is not None
        self._recovery.ledger.settle()
        logging.shutdown()
        os._exit(0)

    def taken(self, address: str) -> int | None:
        """The socket that an earlier server listened on at this address."""
        held = None if self._recovery is None else self._recovery.take(f"{LISTENER_KEY}{address}")
        return None if held is None else held.fds[0]

    def listening(self, address: str, listener: Listener) -> None:
        """One more place where connections are accepted; while we are away they wait there."""
        self.listeners.append(listener)
        if self._recovery is not None:
            path = address.removeprefix("unix:") if address.startswith("unix:") else ""
            self._recovery.durability.link.keep(f"{LISTENER_KEY}{address}", [listener.fileno()], path)

    def keeper_lost(self) -> None:
        """Our line to the keeper can be read though nothing was asked: it is gone."""
        assert self._recovery is not None
        link = self._recovery.durability.link
        if link.check():
            return
        asyncio.get_running_loop().remove_reader(link.fileno())
        if self.exec.config.orphaned_jobs == "kill":
            log.error("the keeper, pid %d, is gone: stopping (orphaned_jobs is kill)", link.pid)
            self.stopping.set()
        else:
            log.error("the keeper, pid %d, is gone: nothing survives this server from now on", link.pid)

    def _shutdown_requested(self, grace: float | None, keep: bool) -> None:
        if keep:
            self._have_keeper_wait()
            self.leaving = True
        if grace is not None:
            self.grace = grace
        # After the reply to whoever asked.
        asyncio.get_running_loop().call_soon(self.stopping.set)

    def _have_keeper_wait(self) -> None:
        if self._recovery is None or not self._recovery.durability.link.check():
            raise InvalidRequest("this server has no keeper, and what runs would end with it: nothing was stopped")
        paths = [each.address.removeprefix("unix:") for each in self.listeners if each.address.startswith("unix:")]
        if not paths:
            raise InvalidRequest("this server has no Unix socket to find its keeper by: nothing was stopped")
        cannot = self._recovery.durability.link.wait_for_next(command_socket_of(paths[0]))
        if cannot is not None:
            raise ResourceExhausted(f"the keeper cannot wait for another server: {cannot}; nothing was stopped")

    def _closed(self, connection: ServerConnection) -> None:
        self.connections.discard(connection)
        self._watch_idle()

    def _watch_idle(self) -> None:
        seconds = self.exec.config.idle_shutdown_seconds
        if seconds > 0 and self._idle is None:
            self._idle = asyncio.get_running_loop().call_later(seconds, self._stop_if_idle)

    def _stop_if_idle(self) -> None:
        self._idle = None
        if self.connections or self.exec.running:
            self._watch_idle()
        else:
            self.stopping.set()


async def _serve(
    config: ExecServerConfig,
    listen: list[str],
    ready_fd: int | None,
    token: str | None,
    no_auth: bool,
    open_files: int | None,
    keeper_fd: int | None,
) -> None:
    loop = asyncio.get_running_loop()
    recovery = None if keeper_fd is None else Recovery(keeper_fd, config, _home(listen), ClientSessionReplay)
    durability = None if recovery is None else recovery.durability
    exec_ = LocalExec(config, adopt_orphans=True, open_files=open_files, durability=durability)
    exec_.keep_to_ourselves(_socket_directories(listen))
    server = Server(exec_, recovery)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stopping.set)
    try:
        if recovery is not None:
            await recovery.end_doomed()
            recovery.take_over(exec_)
            replayed = recovery.replay.extension
            assert isinstance(replayed, ClientSessionReplay)
            server.sessions.restore(replayed.sessions.values(), recovery.replay.last_seqs())
        for address in listen:
            await _listen(server, address, token, no_auth)
        if recovery is not None:
            loop.add_reader(recovery.durability.link.fileno(), server.keeper_lost)
            recovery.release()
            recovery.durability.link.up()
        if ready_fd is not None:
            addresses = [listener.address for listener in server.listeners]
            keeper = None if recovery is None else recovery.durability.link.pid
            with open(ready_fd, "w") as file:  # noqa: ASYNC230 - one line into a pipe
                file.write(json.dumps({"pid": os.getpid(), "keeper": keeper, "listening": addresses}) + "\n")
    except BaseException:
        # What an earlier server has started is not ours to end because we cannot go on with it: the next one may.
        if recovery is None or recovery.is_first:
            await server.close()
        raise
    await server.stopping.wait()
    if server.leaving:
        log.info("stopping: %d processes are left to the keeper", exec_.running)
        server.leave()
    log.info("stopping: %d processes run", exec_.running)
    await server.close()


def _home(listen: list[str]) -> str:
    """What tells this server from others of the machine: its first address that has a path."""
    paths = [address.removeprefix("unix:") for address in listen if address.startswith("unix:")]
    return os.path.abspath(paths[0]) if paths else ""


def _socket_directories(listen: list[str]) -> list[str]:
    paths = [address.removeprefix("unix:") for address in listen if address.startswith("unix:")]
    return [os.path.dirname(os.path.abspath(path)) for path in paths]


async def _listen(server: Server, address: str, token: str | None, no_auth: bool) -> None:
    limit = server.exec.config.max_message_bytes
    if address == "stdio":
        connection = server.connect()
        connection.open(stdio.serve(connection, max_message_bytes=limit))
        connection.on_close = _both(connection.on_close, server.stopping.set)
    elif address.startswith("unix:"):
        path = address.removeprefix("unix:")
        server.listening(address, unix.listen(path, server.accept, taken=server.taken(address)))
    elif address.startswith("ws://"):
        try:
            from holdfast.transport import websocket
        except ModuleNotFoundError as error:
            raise InvalidParams(f"cannot listen on {address!r}: it needs {error.name}, which is not here") from None

        def accept(channel: websocket.WebSocketChannel) -> ServerConnection:
            full = server.is_full
            connection = server.connect()
            connection.open(channel)
            if full:
                channel.close()
            return connection

        parts = urlsplit(address)
        listener = await websocket.listen(
            parts.hostname or "127.0.0.1",
            parts.port or 0,
            accept,
            token=token,
            no_auth=no_auth,
            max_message_bytes=limit,
            taken=server.taken(address),
        )
        server.listening(address, listener)
    else:
        raise InvalidParams(f"cannot listen on {address!r}: unix:PATH, ws://HOST:PORT or stdio")


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call
