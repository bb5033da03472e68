"""From a place to its processes: opens it, connects, replaces a server of an older version that does nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import holdfast
from holdfast.client.channel_connection import ChannelConnection
from holdfast.client.connection import CLIENT_NAME, ClientConnection
from holdfast.client.remote import RemoteExec
from holdfast.errors import HoldfastError, InvalidParams
from holdfast.sandboxes.addresses import place_at
from holdfast.sandboxes.polling import POLL_SECONDS, PolledConnection
from holdfast.sandboxes.sandbox_kind import CommandPlace, Place
from holdfast.types import ExitStatus
from holdfast.wire import messages as m, methods

log = logging.getLogger(__name__)


class PlacedExec(RemoteExec):
    """The processes of a sandbox that we opened, and close."""

    def __init__(self, connection: ClientConnection, place: Place) -> None:
        super().__init__(connection)
        self.place = place

    async def aclose(self) -> None:
        try:
            await super().aclose()
        finally:
            await self.place.aclose()


class PolledExec(PlacedExec):
    """The same where no command may take long: waits are asked for piece by piece."""

    async def wait(self, process_id: str, *, timeout: float | None = None) -> ExitStatus | None:
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            left = POLL_SECONDS if deadline is None else min(POLL_SECONDS, max(0.0, deadline - loop.time()))
            status = await super().wait(process_id, timeout=left)
            if status is not None or (deadline is not None and loop.time() >= deadline):
                return status


async def open_sandbox(
    address: str | Place,
    options: Mapping[str, Any],
    *,
    reconnect_deadline: float,
    client_name: str = CLIENT_NAME,
) -> PlacedExec:
    """The processes of the sandbox at an address, or of a place that the caller made. The caller closes it."""
    if isinstance(address, str):
        place = place_at(address, **options)
        return await open_place(place, reconnect_deadline=reconnect_deadline, client_name=client_name)
    if options:
        raise InvalidParams(f"{', '.join(options)}: give options to the place itself, {address.address}")
    return await open_place(address, reconnect_deadline=reconnect_deadline, client_name=client_name)


async def open_place(place: Place, *, reconnect_deadline: float, client_name: str = CLIENT_NAME) -> PlacedExec:
    """Connect to the server in a sandbox, which is put there if it is not. The caller closes it."""
    await place.open()
    try:
        if isinstance(place, CommandPlace) and not place.channel:
            polled = PolledConnection(place, reconnect_deadline=reconnect_deadline)
            await polled.open()
            return PolledExec(polled, place)
        connection = await _connect(place, reconnect_deadline, client_name)
        if _is_older(connection):
            connection = await _replace(connection, place, reconnect_deadline, client_name)
    except BaseException:
        await place.aclose()
        raise
    return PlacedExec(connection, place)


async def _connect(place: Place, reconnect_deadline: float, client_name: str) -> ChannelConnection:
    connection = ChannelConnection(
        place.dial,
        address=place.address,
        client_name=client_name,
        reconnect_deadline=reconnect_deadline,
        handshake_timeout=place.handshake_seconds,
    )
    try:
        await connection.open()
    except HoldfastError:
        if not place.may_try_again():
            raise
        await connection.open()
    return connection


def _is_older(connection: ChannelConnection) -> bool:
    assert connection.server is not None
    return _numbers(connection.server.server_version) < _numbers(holdfast.__version__)


def _numbers(version: str) -> tuple[int, ...]:
    """`1.10.2` as numbers; what is none of them is of no importance here."""
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


async def _replace(
    connection: ChannelConnection, place: Place, reconnect_deadline: float, client_name: str
) -> ChannelConnection:
    """The server inside is older than we are. If it has nothing to do it makes room; else it is used as it is."""
    assert connection.server is not None
    old = connection.server.server_version
    api = RemoteExec(connection)
    try:
        status = await api.status()
        is_idle = not (status.processes_running or status.shells or status.terminals)
    except HoldfastError:
        is_idle = False  # too old to tell
    if not is_idle:
        log.warning("%s: the server inside is of version %s and busy; it is used as it is", place.address, old)
        return connection
    await connection.call(methods.SERVER_SHUTDOWN, m.ShutdownParams())
    await connection.aclose()
    return await _connect(place, reconnect_deadline, client_name)
