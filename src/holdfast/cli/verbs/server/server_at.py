"""Reaches the server at an address for `status` and `stop`, which neither start nor install one.

`local` and `unix:PATH` are sockets of this machine. In a container, a pod or a host over ssh the same verb runs
inside and prints JSON. A server at a WebSocket is called as by any client.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from holdfast.cli.support.sandbox_option import CLIENT_NAME, LOCAL
from holdfast.client.dial import open_connection
from holdfast.client.remote import RemoteExec
from holdfast.errors import InvalidParams
from holdfast.launch.local_server import socket_path
from holdfast.sandboxes.host_command import Outcome
from holdfast.sandboxes.registry import check_address, target_at
from holdfast.sandboxes.target import CommandTarget


def socket_at(address: str) -> str | None:
    """Return the path of the server's socket on this machine; None if the address leads elsewhere."""
    kind = check_address(address)
    if address == LOCAL:
        return socket_path()
    if kind.ends_with_client:
        raise InvalidParams(f"{address}: has no server of its own: its processes end with the client")
    return address.partition(":")[2] if kind.scheme == "unix" else None


def is_websocket(address: str) -> bool:
    return address.startswith(("ws:", "wss:"))


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[RemoteExec]:
    """Connect to a server at a WebSocket, without reconnecting, because the server may have been stopped."""
    api = RemoteExec(await open_connection(address, client_name=CLIENT_NAME, reconnect_deadline=0))
    try:
        yield api
    finally:
        await api.aclose()


async def run_inside(address: str, verb: Sequence[str], *, seconds: float | None = None) -> Outcome | None:
    """Run a verb in the sandbox; None if Holdfast is not installed there, so that no server runs."""
    target = target_at(address)
    assert isinstance(target, CommandTarget)
    await target.open()
    try:
        return await target.installation.run_verb(target, verb, seconds=seconds)
    finally:
        await target.aclose()
