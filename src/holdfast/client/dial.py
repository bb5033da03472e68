"""Dialling an address: `local`, `unix:/path`, `ws://…`, `wss://…`, or a command that carries the connection.

Each transport is imported only for its addresses, so that no client needs a library that it does not use.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Mapping, Sequence
from functools import partial

from holdfast.client.connection.channel_connection import ChannelConnection, Dial
from holdfast.client.connection.connection import CLIENT_NAME
from holdfast.errors import InvalidParams
from holdfast.sandboxes.registry import forms
from holdfast.transport.channel import Channel, Receiver
from holdfast.types import MAX_MESSAGE_BYTES

#: An address as text, or a command that serves on its stdin and stdout.
Address = str | Sequence[str]


def describe(address: Address) -> str:
    """The address as text for messages."""
    return address if isinstance(address, str) else shlex.join(address)


def dialer(
    address: Address,
    *,
    token: str | None = None,
    env: Mapping[str, str] | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> Dial:
    """A function that opens a channel to `address`.

    `token` is for WebSocket, HOLDFAST_TOKEN if it is not given; `env` is the environment of a command.
    """
    if not isinstance(address, str):
        return partial(_command, tuple(address), env, max_message_bytes)
    scheme, _, rest = address.partition(":")
    if address == "local":
        return _Local(max_message_bytes)
    if scheme == "unix" and rest:
        return partial(_unix, rest, max_message_bytes)
    if scheme in ("ws", "wss") and rest.startswith("//"):
        return partial(_websocket, address, token or os.environ.get("HOLDFAST_TOKEN"), max_message_bytes)
    if scheme == "stdio" and rest:
        return partial(_command, shlex.split(rest), env, max_message_bytes)
    raise InvalidParams(f"{address!r} is no address of a server: not one of {forms(targets=False)}")


async def open_connection(
    address: Address,
    *,
    token: str | None = None,
    env: Mapping[str, str] | None = None,
    client_name: str = CLIENT_NAME,
    reconnect_deadline: float = 60.0,
) -> ChannelConnection:
    """An open connection to `address`, which reconnects by itself."""
    dial = dialer(address, token=token, env=env)
    connection = ChannelConnection(
        dial, address=describe(address), client_name=client_name, reconnect_deadline=reconnect_deadline
    )
    await connection.open()
    return connection


class _Local:
    """The machine's own server, started when the first connection needs it.

    A reconnect does not start it: a new server would not have the caller's processes, and `holdfast stop` must be
    able to stop it.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._path: str | None = None

    async def __call__(self, receiver: Receiver) -> Channel:
        from holdfast.launch.local_server import ensure_server
        from holdfast.transport import unix

        if self._path is None:
            self._path = await asyncio.to_thread(ensure_server)
        return await unix.dial(self._path, receiver, max_message_bytes=self._max_message_bytes, lend=True)


async def _unix(path: str, limit: int, receiver: Receiver) -> Channel:
    from holdfast.transport import unix

    return await unix.dial(path, receiver, max_message_bytes=limit, lend=True)


async def _websocket(url: str, token: str | None, limit: int, receiver: Receiver) -> Channel:
    try:
        from holdfast.transport import websocket
    except ImportError as error:
        raise InvalidParams(f"{url}: {error.name} is not installed; install holdfast[websocket]") from error

    return await websocket.dial(url, receiver, token=token, max_message_bytes=limit)


async def _command(argv: Sequence[str], env: Mapping[str, str] | None, limit: int, receiver: Receiver) -> Channel:
    from holdfast.transport import stdio

    return await stdio.dial(argv, receiver, env=env, max_message_bytes=limit, lend=True)
