"""Opens a sandbox and connects to its server, which it replaces if that is idle and of an older version."""

from __future__ import annotations

import asyncio
import logging

import holdfast
from holdfast.client.connection.channel_connection import ChannelConnection
from holdfast.client.connection.connection import CLIENT_NAME, ClientConnection
from holdfast.client.remote import RemoteExec
from holdfast.errors import HoldfastError
from holdfast.sandboxes.install.requirements import version_numbers
from holdfast.sandboxes.polling import POLL_SECONDS, PolledConnection
from holdfast.sandboxes.target import CommandTarget, SandboxTarget
from holdfast.types import ExitStatus
from holdfast.wire import messages as m

log = logging.getLogger(__name__)


class TargetExec(RemoteExec):
    """The processes of a sandbox; closing it closes the target."""

    def __init__(self, connection: ClientConnection, target: SandboxTarget) -> None:
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


async def open_target(
    target: SandboxTarget, *, reconnect_deadline: float, client_name: str = CLIENT_NAME
) -> TargetExec:
    """Connect to the server in a sandbox, and install it there if it is missing. The caller closes the result."""

    async def connect() -> ChannelConnection:
        connection = ChannelConnection(
            target.dial,
            address=target.address,
            client_name=client_name,
            reconnect_deadline=reconnect_deadline,
            handshake_timeout=target.handshake_seconds,
        )
        await connection.open()
        return connection

    await target.open()
    try:
        if isinstance(target, CommandTarget) and not target.channel:
            polled = PolledConnection(target, reconnect_deadline=reconnect_deadline)
            await polled.open()
            return PolledExec(polled, target)
        connection = await connect()
        if await _shut_down_if_old(connection):
            connection = await connect()
    except BaseException:
        await target.aclose()
        raise
    return TargetExec(connection, target)


async def _shut_down_if_old(connection: ChannelConnection) -> bool:
    """Shut down a server inside that is idle and older than this client; whether it was shut down."""
    assert connection.server is not None
    version = connection.server.server_version
    if version_numbers(version) >= version_numbers(holdfast.__version__):
        return False
    try:
        status = await RemoteExec(connection).status()
        is_idle = not (status.processes_running or status.shells or status.terminals)
    except HoldfastError:
        is_idle = False  # too old to report its status
    if is_idle:
        await connection.call(m.SERVER_SHUTDOWN, m.ShutdownParams())
        await connection.aclose()
    else:
        log.warning("%s: the server has version %s and is busy; it is not replaced", connection.address, version)
    return is_idle
