"""MCP over streamable HTTP at `/mcp`: a bearer token, checked `Host` and `Origin`, bounds on size and time.

Touches one listening socket. The token is compared in constant time, before a byte of the body is read.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from mcp.server.mcpserver import MCPServer
from mcp.server.streamable_http import EventStore
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.errors import InvalidParams
from holdfast.integrations.mcp.events import RecentEvents
from holdfast.service.fronts.connections import ConnectionLimits
from holdfast.service.fronts.listening import Address, bind, parse_address
from holdfast.service.fronts.web_server import WebServer

PATH: Final = "/mcp"
#: The largest message of a client: the largest content of `write_file`, escaped as JSON, and the rest of its call.
MAX_REQUEST_BYTES: Final = 8 * 1024 * 1024
#: The time for a request to arrive, and for a client to read what fills its socket.
REQUEST_SECONDS: Final = 60.0
SEND_SECONDS: Final = 60.0
#: Sessions at a time. Each may have a sandbox of its own.
MAX_SESSIONS: Final = 64
#: A session without a request is closed after this time, and the sandbox that was made for it is removed.
IDLE_SECONDS: Final = 1_800.0
#: After this time a client whose stream broke is to connect again.
RETRY_MILLISECONDS: Final = 500
#: Each open stream is a connection.
CONNECTIONS: Final = ConnectionLimits(most=512, by_address=256, half_open=64)
#: At the end, calls that still run have this time.
STOP_SECONDS: Final = 3.0
MIN_TOKEN_CHARACTERS: Final = 16


class Sessions(StreamableHTTPSessionManager):
    """Sessions of clients, each with recent events of its own: names of streams are unique in a session only."""

    @property
    def event_store(self) -> EventStore | None:
        return RecentEvents()

    @event_store.setter
    def event_store(self, given: EventStore | None) -> None:
        assert given is None


class TokenGuard:
    """Passes requests with the token on, in time; refuses all others before their body is read."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if not self._permits(Headers(scope=scope).getlist("authorization")):
            refused = PlainTextResponse(
                "a bearer token is needed\n", status_code=401, headers={"www-authenticate": "Bearer"}
            )
            await refused(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _permits(self, given: Sequence[str]) -> bool:
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._expected)


class Deadlines:
    """Ends a request whose body arrives too slowly, or whose client does not read the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = asyncio.get_running_loop().time() + REQUEST_SECONDS
        arrived = False

        async def received() -> Message:
            nonlocal arrived
            async with asyncio.timeout_at(None if arrived else deadline):
                message = await receive()
            arrived = arrived or not message.get("more_body", False)
            return message

        async def sent(message: Message) -> None:
            async with asyncio.timeout(SEND_SECONDS):
                await send(message)

        try:
            await self._app(scope, received, sent)
        except TimeoutError:
            if arrived:
                raise
            await PlainTextResponse("the request did not arrive in time\n", status_code=408)(scope, receive, send)


def http_app(
    server: MCPServer[Any], address: Address, token: str | None, allowed_hosts: Sequence[str] = ()
) -> tuple[ASGIApp, Sessions]:
    """The ASGI application, which needs a token beyond loopback, and its sessions, which the caller runs."""
    if token is None and not address.is_local:
        raise InvalidParams(f"{address} is reachable from other machines: a token is needed")
    if token is not None and len(token) < MIN_TOKEN_CHARACTERS:
        raise InvalidParams(f"the token has {len(token)} characters; at least {MIN_TOKEN_CHARACTERS} are needed")
    if address.is_unix:
        raise InvalidParams(f"{address}: HOST:PORT is needed")
    sessions = Sessions(
        server._lowlevel_server,
        max_request_body_size=MAX_REQUEST_BYTES,
        max_sessions=MAX_SESSIONS,
        session_idle_timeout=IDLE_SECONDS,
        retry_interval=RETRY_MILLISECONDS,
        security_settings=_security(address, allowed_hosts),
    )
    app: ASGIApp = Starlette(routes=[Route(PATH, endpoint=StreamableHTTPASGIApp(sessions))])
    app = Deadlines(app)
    return (app if token is None else TokenGuard(app, token)), sessions


def _security(address: Address, allowed_hosts: Sequence[str]) -> TransportSecuritySettings:
    """The names under which browsers may reach the server: a rebound name of another site is none of them."""
    names = ["localhost", "127.0.0.1", "[::1]", *allowed_hosts]
    try:
        literal = ipaddress.ip_address(address.host)
    except ValueError:
        names.append(address.host)
    else:
        if not literal.is_unspecified:
            names.append(f"[{literal}]" if literal.version == 6 else str(literal))
    hosts = [each for name in names for each in (name, f"{name}:*")]
    origins = [f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts]
    return TransportSecuritySettings(allowed_hosts=hosts, allowed_origins=origins)


@asynccontextmanager
async def serving_http(
    server: MCPServer[Any], listen: str, token: str | None, allowed_hosts: Sequence[str] = ()
) -> AsyncIterator[str]:
    """Serve over HTTP for the length of a block, which gets the URL. Port 0 is any free port."""
    address = parse_address(listen)
    app, sessions = http_app(server, address, token, allowed_hosts)
    listener = bind(address)
    web = WebServer(app, CONNECTIONS, None)
    try:
        async with sessions.run():
            await web.open(listener)
            try:
                host, port = listener.getsockname()[:2]
                yield f"http://[{host}]:{port}{PATH}" if ":" in host else f"http://{host}:{port}{PATH}"
            finally:
                await asyncio.shield(web.aclose(STOP_SECONDS))
    finally:
        listener.close()
