"""Previews of the E2B server: requests to a port of a sandbox, passed to the server that listens there.

Tokens of this server are removed from the requests that the sandbox sees.
"""

from __future__ import annotations

import socket
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from holdfast.client.ports.port_dial import dial_port
from holdfast.client.ports.ports import parse_address
from holdfast.client.remote import RemoteExec
from holdfast.errors import InvalidParams, PortUnavailable
from holdfast.integrations.e2b.envd.connect_protocol import body_pieces
from holdfast.integrations.e2b.open_sandbox import OpenSandbox
from holdfast.integrations.e2b.problems import Problem
from holdfast.service.fronts.previews import proxy as port_proxy

#: Headers for this server alone.
_OURS: Final = frozenset(
    {
        b"e2b-sandbox-id",
        b"e2b-sandbox-port",
        b"e2b-traffic-access-token",
        b"x-access-token",
        b"x-api-key",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
    }
)


async def dial(opened: OpenSandbox, port: int) -> socket.socket:
    """A connection to a port of the sandbox."""
    api = opened.box.api
    if not isinstance(api, RemoteExec):
        raise InvalidParams("previews need a server in the sandbox")
    return await dial_port(api.connection, parse_address(port))


def _upstream(opened: OpenSandbox, port: int, scope: Scope) -> port_proxy.PortUpstream:
    client = scope.get("client")
    forwarded = (
        (b"x-forwarded-for", (client[0] if client else "").encode()),
        (b"x-forwarded-host", Headers(scope=scope).get("host", "").encode("latin-1")),
        (b"x-forwarded-proto", b"https" if scope["scheme"] in ("https", "wss") else b"http"),
    )
    return port_proxy.PortUpstream(lambda: dial(opened, port), _OURS, forwarded)


async def proxy_http(
    opened: OpenSandbox, port: int, scope: Scope, receive: Receive, send: Send, idle_seconds: float
) -> None:
    """Answer a request by the server in the sandbox."""
    body = body_pieces(receive, idle_seconds)
    try:
        await port_proxy.proxy_http(_upstream(opened, port, scope), scope, receive, send, body)
    except PortUnavailable:
        # The SDKs recognize "port is not open".
        raise Problem(
            502, "unavailable", f"The sandbox {opened.ref.id} is running but port is not open: {port}"
        ) from None
    except port_proxy.PortFailed as error:
        raise Problem(502, "unavailable", f"port {port}: {error}") from None


async def proxy_websocket(
    opened: OpenSandbox, port: int, scope: Scope, receive: Receive, send: Send, limit: int
) -> None:
    """Connect a WebSocket of a client with the server in the sandbox."""
    await port_proxy.proxy_websocket(_upstream(opened, port, scope), scope, receive, send, limit)
