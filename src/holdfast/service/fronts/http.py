"""The session service over HTTP/1.1: the Connect protocol in JSON and binary, metrics, probes, the console.

Endpoints are built from the protocol's descriptor. Touches the network through uvicorn, on the running event loop;
handles no signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import os
import ssl
from collections.abc import Callable
from typing import Final

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.service.access.admission import Admission, bug
from holdfast.service.fronts.connect import connect_application
from holdfast.service.fronts.connections import ConnectionLimits
from holdfast.service.fronts.handler import SERVICE_NAME, Handler, methods
from holdfast.service.fronts.listening import TlsFiles, bind, check_address, parse_address
from holdfast.service.fronts.readiness import Readiness
from holdfast.service.fronts.requests import KIB, MOST_INPUT
from holdfast.service.fronts.status_details import message_of
from holdfast.service.fronts.unary_calls import UnaryCalls
from holdfast.service.fronts.web_guard import WebGuard
from holdfast.service.fronts.web_server import WebServer
from holdfast.service.fronts.web_socket import LARGEST_MESSAGE, WebSocketStreams
from holdfast.service.problems import Problem
from holdfast.service.types import ServiceStruct

#: Accepted content types. gRPC has a separate port; its framing does not work over HTTP/1.1.
_CONTENT_TYPES: Final = frozenset(
    {"application/json", "application/proto", "application/connect+json", "application/connect+proto"}
)
_PATHS: Final = frozenset(method.path for method in methods())
_ACCEPTED_COMPRESSION: Final = (b"accept-encoding", b"connect-accept-encoding")


class HttpSettings(ServiceStruct, frozen=True):
    """Settings of the HTTP port."""

    listen: str = "127.0.0.1:7401"
    tls: TlsFiles | None = None
    #: Listen beyond this machine without TLS, behind a proxy with TLS.
    allow_plaintext: bool = False
    #: The largest input in base64 and the rest of its request.
    max_request_bytes: int = MOST_INPUT * 4 // 3 + 64 * KIB
    #: The time for a request to arrive: 4 MiB at 1 Mbit/s.
    request_seconds: float = 60.0
    #: Each long poll and each stream is a connection. Those that complete a request head beyond the limit get 503.
    connections: ConnectionLimits = ConnectionLimits()
    #: How long an unused connection is kept: longer than most pauses of an agent between two calls.
    keep_alive_seconds: int = 75
    #: `/metrics` needs no token, as scrapers expect. Metrics contain no session and no command.
    open_metrics: bool = True
    #: Accepted `Host` names, as patterns, beside those that DNS rebinding cannot use.
    allowed_hosts: tuple[str, ...] = ()


class HttpFront:
    """The HTTP server. Call `start`, then `stop` once."""

    def __init__(
        self,
        handler: Handler,
        admission: Admission,
        readiness: Readiness,
        settings: HttpSettings,
        *,
        metrics: Callable[[], tuple[bytes, str]] | None = None,
        console: ASGIApp | None = None,
    ) -> None:
        """`metrics` returns a page and its content type; `console` serves all other paths."""
        self._admission = admission
        self._readiness = readiness
        self._settings = settings
        self._metrics = metrics
        self._address = parse_address(settings.listen)
        app = Starlette(routes=self._routes(handler, console))
        # A redirect would contain the `Host` of the request, which the client chooses.
        app.router.redirect_slashes = False
        loopback = self._address.is_local and not self._address.is_unix
        calls = UnaryCalls(app, handler, admission, settings.request_seconds)
        self._app = WebGuard(calls, settings.allowed_hosts, loopback=loopback)
        self._server: WebServer | None = None
        self._tls: ssl.SSLContext | None = None
        #: `http://HOST:PORT`, `https://HOST:PORT` or `unix:PATH`.
        self.url = ""

    async def start(self) -> None:
        settings, address = self._settings, self._address
        check_address(address, settings.tls, allow_plaintext=settings.allow_plaintext)
        # Read before the bind: invalid files must not leave a bound port.
        self._tls = settings.tls.context() if settings.tls is not None else None
        listener = bind(address)
        self._server = WebServer(
            self._app,
            settings.connections,
            self._tls,
            keep_alive_seconds=settings.keep_alive_seconds,
            # The streams of browsers. Their client sends one short message.
            largest_message=LARGEST_MESSAGE,
        )
        await self._server.open(listener)
        if address.is_unix:
            self.url = str(address)
        else:
            host, port = listener.getsockname()[:2]
            scheme = "http" if self._tls is None else "https"
            self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def stop(self, grace: float = 5.0) -> None:
        """End streams and long polls with UNAVAILABLE; other calls have `grace` seconds to finish."""
        self._admission.stop()
        if self._server is None:
            return
        if self._address.is_unix:
            # While this server still listens, so the path cannot be that of the next service.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._address.path)
        await self._server.aclose(grace)

    def reload_tls(self) -> None:
        """Read the certificate and key again. Another client CA needs a restart."""
        if self._tls is not None and self._settings.tls is not None:
            self._settings.tls.load_into(self._tls)

    # --- routes --------------------------------------------------------------------------------------------------

    def _routes(self, handler: Handler, console: ASGIApp | None) -> list[BaseRoute]:
        service = _Guard(
            connect_application(handler, self._admission, self._settings.max_request_bytes), self._settings
        )
        streams = WebSocketStreams(handler, self._admission, self._settings.connections.head_seconds)
        routes: list[BaseRoute] = [
            WebSocketRoute(f"/{SERVICE_NAME}/{{method}}", streams),
            Route(f"/{SERVICE_NAME}/{{method}}", service),
            # A misspelt service gets the same error. The console has no POST routes.
            Route("/{service}/{method}", _unknown_service, methods=["POST"]),
            Route("/healthz", self._healthz, methods=["GET"]),
            Route("/readyz", self._readyz, methods=["GET"]),
            Route("/metrics", self._metrics_page, methods=["GET"]),
        ]
        return [*routes, Mount("/", console) if console is not None else Route("/", self._front_page)]

    async def _front_page(self, request: Request) -> Response:
        return PlainTextResponse(f"{SERVICE_NAME}: POST /{SERVICE_NAME}/METHOD; docs/service.md has examples.\n")

    async def _healthz(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _readyz(self, request: Request) -> Response:
        waiting = self._readiness.waiting_for()
        return JSONResponse({"ready": not waiting, "waiting_for": waiting}, status_code=503 if waiting else 200)

    async def _metrics_page(self, request: Request) -> Response:
        if self._metrics is None:
            return PlainTextResponse("no metrics are kept\n", status_code=404)
        if not self._settings.open_metrics:
            peer = request.client.host if request.client is not None else "unix"
            try:
                await self._admission.access.authenticate(request.headers.get("authorization"), peer)
            except Problem as problem:
                status = 401 if problem.status == "UNAUTHENTICATED" else 429
                return PlainTextResponse(f"{message_of(problem)}\n", status_code=status)
        page, content_type = self._metrics()
        return Response(page, headers={"content-type": content_type})


class _Guard:
    """Refuses requests that the Connect application would read in full or report as a bug."""

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in _PATHS:
            refused = no_such_method(scope["path"])
            return await refused(scope, receive, send)
        headers: dict[bytes, bytes] = dict(scope["headers"])
        content_type = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        if content_type not in _CONTENT_TYPES and scope["method"] == "POST":
            refused = _plain_error(415, "invalid_argument", f"send one of {', '.join(sorted(_CONTENT_TYPES))}")
            return await refused(scope, receive, send)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._settings.max_request_bytes:
            largest = self._settings.max_request_bytes
            refused = _plain_error(429, "resource_exhausted", f"the request is larger than {largest} bytes")
            return await refused(scope, receive, send)
        # Compression of a large reply would block the event loop; a proxy can do it. Requests may be compressed:
        # the decompressed size is bounded. Headers that are not ASCII are dropped: the next reader expects UTF-8.
        kept = [each for each in scope["headers"] if each[0] not in _ACCEPTED_COMPRESSION and each[1].isascii()]
        scope = {**scope, "headers": kept}
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, self._in_time(receive), watched_send)
        except Exception as error:
            problem = bug(error, scope["path"])
            if not started:
                refused = _plain_error(500, "internal", message_of(problem))
                await refused(scope, receive, send)
            else:
                raise

    def _in_time(self, receive: Receive) -> Receive:
        """Bound the time for the body; later messages, such as a disconnect, have no deadline."""
        deadline = asyncio.get_running_loop().time() + self._settings.request_seconds
        arrived = False

        async def received() -> Message:
            nonlocal arrived
            try:
                async with asyncio.timeout_at(None if arrived else deadline):
                    message = await receive()
            except TimeoutError:
                raise ConnectError(Code.DEADLINE_EXCEEDED, "the request did not arrive in time") from None
            arrived = arrived or not message.get("more_body", False)
            return message

        return received


def no_such_method(path: str) -> Response:
    """Return a Connect error for an unknown path, with the nearest method."""
    service, _, name = path.strip("/").rpartition("/")
    # The client chooses the names, which could be megabytes.
    message = f"there is no method {name[:100]!r}"
    if service != SERVICE_NAME:
        message = f"there is no service {service[:100]!r}"
    known = {method.name.lower(): method.name for method in methods()}
    nearest = difflib.get_close_matches(name[:100].lower(), known, n=1)
    if nearest:
        message += f"; did you mean /{SERVICE_NAME}/{known[nearest[0]]}?"
    else:
        message += f"; {SERVICE_NAME} has {', '.join(known.values())}"
    # Connect clients read the code; proxies and plain HTTP clients read the status.
    return _plain_error(404, "unimplemented", message)


async def _unknown_service(request: Request) -> Response:
    return no_such_method(request.url.path)


def _plain_error(status: int, code: str, message: str) -> Response:
    return JSONResponse({"code": code, "message": message}, status_code=status, headers={"connection": "close"})
