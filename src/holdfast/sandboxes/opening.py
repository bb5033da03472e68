"""Opens a sandbox and connects to its server, which it replaces if that is idle and of an older version."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import holdfast
from holdfast.client.connection import CLIENT_NAME, Connection
from holdfast.client.remote import RemoteExec
from holdfast.errors import HoldfastError, InvalidParams
from holdfast.sandboxes.polling import POLL_SECONDS, PolledConnection
from holdfast.sandboxes.registry import target_at
from holdfast.sandboxes.target import CommandTarget, SandboxTarget
from holdfast.types import ExitStatus
from holdfast.wire import messages as m, methods

log = logging.getLogger(__name__)


class TargetExec(RemoteExec):
    """The processes of a sandbox; closing it closes the target."""

    def __init__(self, connection: Connection, target: SandboxTarget) -> None:
        super().__init__(connection)
        self.target = target

    async def aclose(self) -> None:
        try:
            await super().aclose()
        finally:
            await self.target.aclose()


class PolledExec(TargetExec):
    """The processes of a sandbox in which no command may take long: a long wait is several short ones."""

    async def wait(self, process_id: str, *, timeout: float | None = None) -> ExitStatus | None:
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            left = POLL_SECONDS if deadline is None else min(POLL_SECONDS, max(0.0, deadline - loop.time()))
            status = await super().wait(process_id, timeout=left)
            if status is not None or (deadline is not None and loop.time() >= deadline):
                return status


async def open_sandbox(
    address: str | SandboxTarget,
    options: Mapping[str, Any],
    *,
    reconnect_deadline: float,
    client_name: str = CLIENT_NAME,
) -> TargetExec:
    """Open the sandbox at an address, or a target that the caller made. The caller closes the result."""
    if isinstance(address, str):
        target = target_at(address, **options)
        return await open_target(target, reconnect_deadline=reconnect_deadline, client_name=client_name)
    if options:
        raise InvalidParams(f"{', '.join(options)}: pass options to the target itself, {address.address}")
    return await open_target(address, reconnect_deadline=reconnect_deadline, client_name=client_name)


async def open_target(
    target: SandboxTarget, *, reconnect_deadline: float, client_name: str = CLIENT_NAME
) -> TargetExec:
    """Connect to the server in a sandbox, and install it there if it is missing. The caller closes the result."""
    await target.open()
    try:
        if isinstance(target, CommandTarget) and not target.channel:
            polled = PolledConnection(target, reconnect_deadline=reconnect_deadline)
            await polled.open()
            return PolledExec(polled, target)
        connection = await _connect(target, reconnect_deadline, client_name)
        if _is_older(connection):
            connection = await _replace(connection, target, reconnect_deadline, client_name)
    except BaseException:
        await target.aclose()
        raise
    return TargetExec(connection, target)


async def _connect(target: SandboxTarget, reconnect_deadline: float, client_name: str) -> Connection:
    connection = Connection(
        target.dial,
        address=target.address,
        client_name=client_name,
        reconnect_deadline=reconnect_deadline,
        handshake_timeout=target.handshake_seconds,
    )
    await connection.open()
    return connection


def _is_older(connection: Connection) -> bool:
    assert connection.server is not None
    return _numbers(connection.server.server_version) < _numbers(holdfast.__version__)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version such as `1.10.2`."""
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


async def _replace(
    connection: Connection, target: SandboxTarget, reconnect_deadline: float, client_name: str
) -> Connection:
    """Replace a server inside that is older than this client, unless it is busy; return the connection to use."""
    assert connection.server is not None
    old = connection.server.server_version
    api = RemoteExec(connection)
    try:
        status = await api.status()
        is_idle = not (status.processes_running or status.shells or status.terminals)
    except HoldfastError:
        is_idle = False  # too old to report its status
    if not is_idle:
        log.warning("%s: the server inside has version %s and is busy; it is not replaced", target.address, old)
        return connection
    await connection.call(methods.SERVER_SHUTDOWN, m.ShutdownParams())
    await connection.aclose()
    return await _connect(target, reconnect_deadline, client_name)
