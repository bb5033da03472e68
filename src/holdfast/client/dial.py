"""Addresses, and how each is reached: `local`, `unix:/path`, `ws://…`, `wss://…`, or a command to talk through.

The transports are imported when an address asks for them, so that no client needs a library it does not use.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Mapping, Sequence

from holdfast.client.connection import CLIENT_NAME, MAX_MESSAGE_BYTES, Connection, Dial
from holdfast.errors import InvalidParams
from holdfast.sandboxes.registry import forms
from holdfast.transport.channel import Channel, Receiver

#: A word for where to connect, or the command whose stdin and stdout lead there.
Address = str | Sequence[str]


def describe(address: Address) -> str:
    """The address as people read it."""
    return address if isinstance(address, str) else shlex.join(address)


def dialer(
    address: Address,
    *,
    token: str | None = None,
    env: Mapping[str, str] | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> Dial:
    """What opens a channel to `address`.

    `token` is for WebSocket, HOLDFAST_TOKEN if it is not given; `env` is the environment of a command.
    """
    if not isinstance(address, str):
        return _command(tuple(address), env, max_message_bytes)
    scheme, _, rest = address.partition(":")
    if address == "local":
        return _Local(max_message_bytes)
    if scheme == "unix" and rest:
        return _unix(rest, max_message_bytes)
    if scheme in ("ws", "wss") and rest.startswith("//"):
        return _websocket(address, token or os.environ.get("HOLDFAST_TOKEN"), max_message_bytes)
    if scheme == "stdio" and rest:
        return _command(tuple(shlex.split(rest)), env, max_message_bytes)
    raise InvalidParams(f"{address!r} is no address of a server: not one of {forms(targets=False)}")


async def open_connection(
    address: Address,
    *,
    token: str | None = None,
    env: Mapping[str, str] | None = None,
    client_name: str = CLIENT_NAME,
    reconnect_deadline: float = 60.0,
) -> Connection:
    """A connection to `address` that is open and comes back by itself."""
    dial = dialer(address, token=token, env=env)
    connection = Connection(
        dial, address=describe(address), client_name=client_name, reconnect_deadline=reconnect_deadline
    )
    await connection.open()
    return connection


class _Local:
    """The machine's own server, started when the first connection needs it.

    A reconnect does not start it: a new server knows nothing of the processes that the caller waits for, and
    `holdfast stop` must be able to stop it.
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


def _unix(path: str, max_message_bytes: int) -> Dial:
    async def dial(receiver: Receiver) -> Channel:
        from holdfast.transport import unix

        return await unix.dial(path, receiver, max_message_bytes=max_message_bytes, lend=True)

    return dial


def _websocket(url: str, token: str | None, max_message_bytes: int) -> Dial:
    async def dial(receiver: Receiver) -> Channel:
        try:
            from holdfast.transport import websocket
        except ImportError as error:
            raise InvalidParams(f"{url}: {error.name} is not installed; install holdfast[websocket]") from error

        return await websocket.dial(url, receiver, token=token, max_message_bytes=max_message_bytes)

    return dial


def _command(argv: tuple[str, ...], env: Mapping[str, str] | None, max_message_bytes: int) -> Dial:
    async def dial(receiver: Receiver) -> Channel:
        from holdfast.transport import stdio

        return await stdio.dial(argv, receiver, env=env, max_message_bytes=max_message_bytes, lend=True)

    return dial
