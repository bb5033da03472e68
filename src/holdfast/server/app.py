"""Composes the server from settings, runtime, dispatch, listeners and signal handlers, and runs it."""

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
from functools import partial
from typing import Final, NoReturn, Protocol
from urllib.parse import urlsplit

from holdfast.config import ExecServerConfig
from holdfast.errors import HoldfastError, InvalidParams, InvalidRequest, ResourceExhausted
from holdfast.launch.keeper_client import command_socket_of
from holdfast.runtime.durability.ledger import NullLedger
from holdfast.runtime.durability.recovery import Recovery
from holdfast.runtime.local import LocalExec
from holdfast.server.client_session_records import ClientSessionReplay
from holdfast.server.clients import ClientRegistry
from holdfast.server.connection import ServerConnection
from holdfast.server.dispatch import Dispatcher
from holdfast.server.served_exec import ServedExec
from holdfast.transport import stdio, stream, unix

log = logging.getLogger("holdfast.server")

#: Prefix of the keeper's keys for listening sockets.
LISTENER_KEY: Final = "listen "
#: Collections of the middle generation before a full one. Ended shells, terminals and connections are cycles: with
#: Python's 10, five megabytes of them wait for it; with 3, two. A full one takes 2 ms, once in ten thousand starts.
MIDDLE_COLLECTIONS: Final = 3


class Listener(Protocol):
    """Accepts connections until it is closed."""

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

    Writes one JSON line to `ready_fd` once it listens, so that the parent need not poll. `keeper_fd` is the socket
    to the keeper that started this server.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    open_files = raise_descriptor_limit()
    tune_collector()
    seal_descriptors({ready_fd} if ready_fd is not None else set())
    try:
        asyncio.run(_serve(config, listen, ready_fd, token, no_auth, open_files, keeper_fd))
    except HoldfastError as error:
        log.error("%s", error)
        return 2
    return 0


def tune_collector() -> None:
    """Exempt the objects of the start from collections, and have full collections more often."""
    # Modules that are loaded by now stay, so the collector need not traverse them each time.
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], MIDDLE_COLLECTIONS)


def raise_descriptor_limit() -> int | None:
    """Raise the soft limit to the hard limit, because a thousand processes need several thousand descriptors.

    Returns the former soft limit, which processes get, if it was lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return None
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def seal_descriptors(keep: set[int]) -> None:
    """Make inherited descriptors close-on-exec, except `keep`, so that processes do not inherit them."""
    try:
        names = os.listdir("/proc/self/fd")
    except FileNotFoundError:
        raise ResourceExhausted(
            "/proc is not mounted here: without it the processes that a command starts cannot be found"
        ) from None
    for name in names:
        fd = int(name)
        if fd > 2 and fd not in keep:
            try:
                os.set_inheritable(fd, False)
            except OSError:
                continue  # the descriptor that listed the directory


class Server:
    """One running server: the exec that it serves, its clients, connections and listeners."""

    def __init__(self, exec_: ServedExec, recovery: Recovery | None = None) -> None:
        self.exec = exec_
        self._recovery = recovery
        self.clients = ClientRegistry(exec_, NullLedger() if recovery is None else recovery.ledger)
        self.listeners: list[Listener] = []
        self.dispatcher = Dispatcher(
            exec_,
            self.clients,
            listening=lambda: tuple(listener.address for listener in self.listeners),
            shutdown=self._shutdown_requested,
        )
        self.connections: set[ServerConnection] = set()
        self.stopping = asyncio.Event()
        #: Whether processes are left to the keeper when the server stops.
        self.leaving = False
        self.grace = exec_.config.shutdown_grace_period_ms / 1000
        self._idle: asyncio.TimerHandle | None = None
        self._watch_idle()

    @property
    def is_full(self) -> bool:
        """Whether `max_connections` is reached, which is also logged."""
        if len(self.connections) < self.exec.config.max_connections:
            return False
        log.warning("refused a connection: %d are open (max_connections)", len(self.connections))
        return True

    def connect(self, *, is_only: bool = False) -> ServerConnection:
        """The receiver for a new connection; at the end of one that `is_only`, the server stops."""
        on_close = partial(self._closed, stop=is_only)
        connection = ServerConnection(self.exec, self.dispatcher, self.clients, on_close)
        self.connections.add(connection)
        return connection

    def accept(self, sock: socket.socket) -> None:
        """Serve a connected Unix socket, or close it if there are too many."""
        if self.is_full:
            sock.close()
            return
        connection = self.connect()
        connection.peer_pid, _ = unix.peer_of(sock)
        limit = self.exec.config.max_message_bytes
        connection.open(stream.from_socket(sock, connection, description="unix peer", max_message_bytes=limit))

    async def close(self) -> None:
        """Stop listening, end every process, close the connections."""
        if self._recovery is not None:
            self._recovery.durability.link.stop()
        if self._idle is not None:
            self._idle.cancel()
        for listener in self.listeners:
            listener.close()
        await self.exec.shutdown(self.grace)
        for connection in tuple(self.connections):
            connection.channel.close()
        self.clients.close()
        # The channels report their loss in the next turn of the loop.
        await asyncio.sleep(0)

    def leave(self) -> NoReturn:
        """Exit and leave everything to the keeper for the next server.

        Exits as a killed server does: nothing is undone and no task is awaited. The ledger already holds all that
        the next server needs, because each record is written before it takes effect.
        """
        assert self._recovery is not None
        self._recovery.ledger.settle()
        logging.shutdown()
        os._exit(0)

    def taken(self, address: str) -> int | None:
        """The socket on which an earlier server listened at this address."""
        held = None if self._recovery is None else self._recovery.take(f"{LISTENER_KEY}{address}")
        return None if held is None else held.fds[0]

    def listening(self, address: str, listener: Listener) -> None:
        """Add a listener. The keeper holds its socket, so connections wait there while no server runs."""
        self.listeners.append(listener)
        if self._recovery is not None:
            path = address.removeprefix("unix:") if address.startswith("unix:") else ""
            self._recovery.durability.link.keep(f"{LISTENER_KEY}{address}", [listener.fileno()], path)

    def keeper_lost(self) -> None:
        """Called when the keeper's socket is readable without a request: at end of file the keeper is gone."""
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
        # After the reply to the request.
        asyncio.get_running_loop().call_soon(self.stopping.set)

    def _have_keeper_wait(self) -> None:
        if self._recovery is None or not self._recovery.durability.link.check():
            raise InvalidRequest("this server has no keeper: its processes would end with it; nothing was stopped")
        paths = [each.address.removeprefix("unix:") for each in self.listeners if each.address.startswith("unix:")]
        if not paths:
            raise InvalidRequest("this server has no Unix socket to find its keeper by: nothing was stopped")
        cannot = self._recovery.durability.link.wait_for_next(command_socket_of(paths[0]))
        if cannot is not None:
            raise ResourceExhausted(f"the keeper cannot wait for another server: {cannot}; nothing was stopped")

    def _closed(self, connection: ServerConnection, *, stop: bool) -> None:
        self.connections.discard(connection)
        self._watch_idle()
        if stop:
            self.stopping.set()

    def _watch_idle(self) -> None:
        seconds = self.exec.config.idle_shutdown_seconds
        if seconds > 0 and self._idle is None:
            self._idle = asyncio.get_running_loop().call_later(seconds, self._stop_if_idle)

    def _stop_if_idle(self) -> None:
        self._idle = None
        if self.connections or self.exec.processes.running:
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
    paths = _socket_paths(listen)
    home = paths[0] if paths else ""
    recovery = None if keeper_fd is None else Recovery(keeper_fd, config, home, ClientSessionReplay)
    durability = None if recovery is None else recovery.durability
    exec_ = LocalExec(config, adopt_orphans=True, open_files=open_files, durability=durability)
    exec_.processes.keep_to_ourselves(map(os.path.dirname, paths))
    server = Server(exec_, recovery)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stopping.set)
    try:
        if recovery is not None:
            await recovery.end_doomed()
            recovery.take_over(exec_)
            replayed = recovery.replay.extension
            assert isinstance(replayed, ClientSessionReplay)
            server.clients.restore(replayed.sessions.values(), recovery.replay.last_seqs())
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
    except BaseException as error:
        # Processes of an earlier server are not ended because this one fails: the next server may take them over.
        if recovery is not None and not recovery.is_first:
            _leave_half_resumed(error)
        await server.close()
        raise
    await server.stopping.wait()
    if server.leaving:
        log.info("stopping: %d processes are left to the keeper", exec_.processes.running)
        server.leave()
    log.info("stopping: %d processes run", exec_.processes.running)
    await server.close()


def _leave_half_resumed(error: BaseException) -> NoReturn:
    """Exit at once because the start fails, as a killed server does: the ledger has what the next server needs.

    In another turn of the event loop, output would be stored for jobs that do not own it yet, and cancelled tasks
    would interrupt commands.
    """
    log.error(
        "the server cannot start: %s", error, exc_info=None if isinstance(error, OSError | HoldfastError) else error
    )
    logging.shutdown()
    os._exit(2 if isinstance(error, HoldfastError) else 1)


def _socket_paths(listen: list[str]) -> list[str]:
    """The paths among the addresses; the first identifies the server among those of the machine."""
    return [os.path.abspath(address.removeprefix("unix:")) for address in listen if address.startswith("unix:")]


async def _listen(server: Server, address: str, token: str | None, no_auth: bool) -> None:
    limit = server.exec.config.max_message_bytes
    if address == "stdio":
        connection = server.connect(is_only=True)
        connection.open(stdio.serve(connection, max_message_bytes=limit))
    elif address.startswith("unix:"):
        path = address.removeprefix("unix:")
        server.listening(address, unix.listen(path, server.accept, taken=server.taken(address)))
    elif address.startswith("fd:"):
        server.listening(address, unix.adopt(address, server.accept, taken=server.taken(address)))
    elif address.startswith("ws://"):
        try:
            from holdfast.transport import websocket
        except ModuleNotFoundError as error:
            raise InvalidParams(f"cannot listen on {address!r}: {error.name} is not installed") from None

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
