"""The ASGI application: finds the sandbox and the port of a request, and passes it to the part that serves it.

A sandbox is named by the host name `{port}-{id}.DOMAIN`, by the SDK's headers, or by the signature of a file URL.
Everything else is the control API, which needs the API key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from typing import Final

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from holdfast.errors import HoldfastError
from holdfast.integrations.e2b.control.api import ControlApi
from holdfast.integrations.e2b.control.builds import Builds
from holdfast.integrations.e2b.control.records import Shapes
from holdfast.integrations.e2b.control.routes import Handler, unknown_route
from holdfast.integrations.e2b.control.sandboxes import Sandboxes
from holdfast.integrations.e2b.control.template_api import TemplateApi
from holdfast.integrations.e2b.envd import api as envd, connect_protocol as connect
from holdfast.integrations.e2b.ports.api import Ports
from holdfast.integrations.e2b.problems import Problem, problem_of, unauthorized
from holdfast.integrations.e2b.settings import E2BSettings, Keyring

log = logging.getLogger(__name__)

#: A sandbox's port in a host name: its label before the domain.
_LABEL: Final = re.compile(r"(?P<port>[0-9]{1,5})-(?P<id>[a-z0-9-]{1,63})", re.ASCII)

_UPLOADS: Final = "/uploads/"
#: A refused body is read up to this size, for this time: a client that still sends when the connection is closed
#: may lose the reply with it. The bytes are discarded; the time bounds the cost of a refusal.
_DRAIN_BYTES: Final = 64 * 1024 * 1024
_DRAIN_SECONDS: Final = 5.0


class Target(msgspec.Struct, frozen=True):
    """A port of a sandbox."""

    id: str
    port: int


def parse_host(host: str, domain: str) -> Target | None:
    """The target in a `Host` header; None if it is not a name of a sandbox."""
    name = host.strip().lower().partition(":")[0].removesuffix(".")
    if not domain or not name.endswith(f".{domain}"):
        return None
    found = _LABEL.fullmatch(name.removesuffix(f".{domain}"))
    return None if found is None else _target(found["id"], found["port"])


def target_of(headers: Headers, domain: str) -> Target | None:
    """The sandbox and port of a request; None for the control API."""
    target = parse_host(headers.get("host", ""), domain)
    if target is not None:
        return target
    id = headers.get("e2b-sandbox-id")
    return None if id is None else _target(id, headers.get("e2b-sandbox-port", str(envd.PORT)))


def _target(id: str, port: str) -> Target | None:
    if not port.isascii() or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65_536:
        return None
    return Target(id, int(port))


class Application:
    """The whole server as an ASGI application."""

    def __init__(self, sandboxes: Sandboxes, keys: Keyring, settings: E2BSettings) -> None:
        self._sandboxes = sandboxes
        self._keys = keys
        self._settings = settings
        self._envd = envd.EnvdApi(sandboxes, keys, settings)
        self._ports = Ports(sandboxes, keys, settings)
        self._builds = Builds(sandboxes)
        control = ControlApi(sandboxes, Shapes(settings, keys))
        templates = TemplateApi(sandboxes, self._builds, keys)
        self._routes: dict[tuple[str, int], list[tuple[re.Pattern[str], Handler]]] = {}
        for (method, path), handler in {**control.routes(), **templates.routes()}.items():
            pattern = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path))
            self._routes.setdefault((method, path.count("/")), []).append((pattern, handler))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            body = _RequestBody(receive, send)
            receive, send = body.receive, body.send
        headers = Headers(scope=scope)
        target = target_of(headers, self._settings.domain)
        if target is None and scope["type"] == "http":
            target = self._signed_target(scope)
        try:
            if target is None:
                await self._control(scope, headers, receive, send)
            elif target.port == envd.PORT and scope["type"] == "http":
                await self._envd.serve(target.id, scope, receive, send)
            else:
                await self._ports.serve(target.id, target.port, scope, receive, send)
        except Exception:
            # A bug: the client gets no details, the log has them.
            log.exception("%s %s failed", scope.get("method", "WebSocket"), scope["path"][:200])
            raise

    def _signed_target(self, scope: Scope) -> Target | None:
        """The sandbox of a signed file URL without its id, as SDKs make it with E2B_SANDBOX_URL."""
        if scope["path"] != "/files" or b"signature=" not in scope["query_string"]:
            return None
        query = QueryParams(scope["query_string"])
        operation = "read" if scope["method"] == "GET" else "write"
        arguments = query.get("path", ""), operation, query.get("username", ""), query.get("signature_expiration")
        for id in self._sandboxes.known():
            if self._keys.same(query.get("signature", ""), self._keys.signature(id, *arguments)):
                return Target(id, envd.PORT)
        return None

    async def aclose(self) -> None:
        await self._builds.aclose()

    async def _upload(self, hash: str, scope: Scope, receive: Receive) -> Response:
        """The files of a template's build; the URL has a token instead of the key."""
        token = QueryParams(scope["query_string"]).get("token")
        if not self._keys.accepts_token("upload", hash, token):
            raise unauthorized("token: not that of this upload")
        await self._builds.upload(hash, connect.body_pieces(receive, self._settings.body_idle_seconds))
        return Response(status_code=200)

    async def _control(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008, "reason": "not a port of a sandbox"})
            return
        response: Response
        try:
            try:
                if scope["method"] == "PUT" and scope["path"].startswith(_UPLOADS):
                    response = await self._upload(scope["path"].removeprefix(_UPLOADS), scope, receive)
                    await response(scope, receive, send)
                    return
                if not self._keys.accepts_key(headers.get("x-api-key")):
                    raise unauthorized("X-API-KEY: missing, or not the key of this server")
                body = await connect.whole_body(
                    receive, self._settings.max_message_bytes, self._settings.body_idle_seconds
                )
                response = await self._route(scope, body)
            except HoldfastError as error:
                raise problem_of(error) from error
        except Problem as problem:
            response = JSONResponse({"code": problem.status, "message": problem.message}, problem.status)
        await response(scope, receive, send)

    async def _route(self, scope: Scope, body: bytes) -> Response:
        path: str = scope["path"]
        for pattern, handler in self._routes.get((scope["method"], path.count("/")), ()):
            found = pattern.fullmatch(path)
            if found is not None:
                return await handler(_BufferedRequest(scope, body), **found.groupdict())
        raise unknown_route(scope["method"], path)


class _BufferedRequest(Request):
    """A request whose body has arrived."""

    def __init__(self, scope: Scope, body: bytes) -> None:
        super().__init__(scope)
        self._body = body


class _RequestBody:
    """The body of a request, of which a refusal reads the rest before it is sent.

    The connection is closed after a reply to a body that was not read, and a client that still sends gets a broken
    connection and not the reply.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._complete = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._complete = self._complete or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400 and not self._complete:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_SECONDS):
                    await self._drain()
        await self._send(message)

    async def _drain(self) -> None:
        size = 0
        while not self._complete and size < _DRAIN_BYTES:
            size += len((await self.receive()).get("body", b""))
