"""The port for previews: checks the ticket or the cookie of a request and passes it to the session's sandbox.

It is another port, and so another origin, than the console's. A request is for the preview in its host name, or
for that at `/preview/SESSION/PORT/`. Touches the network through uvicorn, on the running event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from holdfast.errors import HoldfastError, PortUnavailable
from holdfast.service.clock import WallClock
from holdfast.service.fronts.connections import ConnectionLimits
from holdfast.service.fronts.listening import TlsFiles, bind, check_address, parse_address
from holdfast.service.fronts.previews.headers import (
    FOR_US,
    SAFE_METHODS,
    cookies,
    is_foreign,
    request_headers,
    response_headers,
    set_cookie,
)
from holdfast.service.fronts.previews.proxy import PortFailed, PortUpstream, proxy_http, proxy_websocket
from holdfast.service.fronts.web_server import WebServer
from holdfast.service.previews.previews import OpenPreview, Previews
from holdfast.service.previews.urls import PREFIX, TICKET, PreviewUrls, split_path
from holdfast.service.problems import Invalid, NotNow
from holdfast.service.settings import ServiceSettings

_TICKET: Final = TICKET.encode()
_HOW: Final = "open the URL of `holdfast session preview ID PORT`, which has a ticket, or make a new one"
#: Close codes of WebSockets: the preview has ended; the request is refused.
_GOING_AWAY: Final = 1001
_REFUSED: Final = 1008


class _Refused(Exception):
    """A request that is not passed on."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Target:
    """A request and the preview that it is for."""

    def __init__(self, scope: Scope, urls: PreviewUrls) -> None:
        self.headers = Headers(scope=scope)
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        parts: list[bytes] = scope["query_string"].split(b"&") if scope["query_string"] else []
        tickets = [part for part in parts if part.partition(b"=")[0] == _TICKET]
        self.ticket = unquote(tickets[0].partition(b"=")[2].decode("latin-1")) if tickets else ""
        self.query = b"&".join(part for part in parts if part not in tickets)
        self.preview_id = urls.preview_id(self.headers.get("host", ""))
        #: Whether the host name is that of all previews.
        self.shared = self.preview_id is None
        self.session_port: tuple[str, int] | None = None
        self.prefix, self.path = b"", raw
        if self.shared:
            found = split_path(raw)
            if found is None:
                raise _Refused(404, f"there is no preview here: {_HOW}")
            session_id, port, self.path = found
            self.session_port = (session_id, port)
            self.prefix = f"{PREFIX}{session_id}/{port}".encode()

    def is_for(self, opened: OpenPreview | None) -> bool:
        """Whether a preview found by its secret is the one that the URL names."""
        if opened is None:
            return False
        if self.shared:
            return self.session_port == (opened.record.session_id, opened.port)
        return self.preview_id == opened.preview_id

    def location(self) -> bytes:
        """The URL without its ticket; a path that cannot be read as another host."""
        path = self.prefix + b"/" + self.path.lstrip(b"/").replace(b"\\", b"%5C")
        return path + (b"?" + self.query if self.query else b"")


class PreviewApplication:
    """The ASGI application of the port."""

    def __init__(self, previews: Previews, settings: ServiceSettings, clock: WallClock) -> None:
        self._previews = previews
        self._settings = settings
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def sent(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._serve(scope, receive, sent)
        except _Refused as refused:
            await _refuse(scope, receive, send, refused, started)
        except NotNow as ended:
            await _refuse(scope, receive, send, _Refused(410, ended.message), started)
        except PortUnavailable:
            await _refuse(scope, receive, send, _Refused(502, "nothing listens on the port"), started)
        except (PortFailed, HoldfastError) as error:
            await _refuse(scope, receive, send, _Refused(502, f"the port does not answer: {error}"), started)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        target = _Target(scope, self._previews.urls)
        is_socket = scope["type"] == "websocket"
        opened = self._authenticate(target, "WEBSOCKET" if is_socket else scope["method"])
        await self._previews.check_session(opened)
        if not is_socket and scope["method"] in SAFE_METHODS and (target.ticket or not target.path):
            return await self._redirect(target, opened, scope, receive, send)
        await self._run(opened, self._pass(target, opened, scope, receive, send))
        return None

    def _authenticate(self, target: _Target, method: str) -> OpenPreview:
        if target.ticket:
            opened = self._previews.by_ticket(target.ticket)
            if opened is None or not target.is_for(opened):
                self._refuse_of_other_replica(target.ticket)
                raise _Refused(403, f"the ticket is not one of this preview, or has expired: {_HOW}")
            return opened
        values = list(cookies(target.headers.raw))
        found = map(self._previews.by_cookie, values)
        opened = next((each for each in found if target.is_for(each)), None)
        if opened is None:
            self._refuse_of_other_replica(*values)
            raise _Refused(401, f"the request has neither a ticket nor a cookie of this preview: {_HOW}")
        if target.shared and method not in SAFE_METHODS:
            # A page of another preview has the same origin, so its requests look like those of this one.
            raise _Refused(403, "below this path only GET needs no ticket: use the preview's own host name")
        if is_foreign(target.headers, method):
            raise _Refused(403, "a page of another origin made the request")
        return opened

    def _refuse_of_other_replica(self, *secrets: str) -> None:
        """Refuse a request whose secret was made by another replica, with its name."""
        if name := next(filter(None, map(self._previews.other_replica, secrets)), ""):
            raise _Refused(
                421,
                f"the preview was opened by replica {name!r}, and a preview is known to its replica alone: "
                "give each replica a preview_url of its own, or route its host names to it",
            )

    async def _redirect(
        self, target: _Target, opened: OpenPreview, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Exchange the ticket for a cookie, so that the page and its links do not have the ticket."""
        path = target.prefix.decode() + "/"
        left = opened.expires_at - self._clock.time()
        headers = {
            "location": target.location().decode("latin-1"),
            "set-cookie": set_cookie(opened.cookie, path, left, secure=self._previews.urls.secure),
            "cache-control": "no-store",
            "referrer-policy": "no-referrer",
        }
        await PlainTextResponse("", 303, headers)(scope, receive, send)

    async def _run(self, opened: OpenPreview, passing: Coroutine[Any, Any, None]) -> None:
        """Run a request as one of the preview's, which ends with the preview."""
        most = self._settings.connections_per_preview
        if len(opened.requests) >= most:
            passing.close()
            raise _Refused(503, f"{most} requests of the preview are open (connections_per_preview)")
        task = asyncio.create_task(passing)
        opened.requests.add(task)
        try:
            await asyncio.wait((task,))
        finally:
            opened.requests.discard(task)
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():
            raise _Refused(410, f"the preview has ended: {opened.ended}")
        task.result()

    async def _pass(self, target: _Target, opened: OpenPreview, scope: Scope, receive: Receive, send: Send) -> None:
        shared, settings = target.shared, self._settings
        added = [
            (b"x-forwarded-host", target.headers.get("host", "").encode("latin-1")),
            (b"x-forwarded-proto", b"https" if self._previews.urls.secure else b"http"),
            *([(b"x-forwarded-prefix", target.prefix)] if shared else []),
        ]
        changed = {
            **scope,
            "raw_path": target.path or b"/",
            "query_string": target.query,
            "headers": request_headers(target.headers.raw, shared=shared),
        }
        async with self._previews.channel(opened) as dial:
            upstream = PortUpstream(
                dial,
                FOR_US,
                tuple(added),
                lambda headers: response_headers(headers, shared=shared),
                settings.preview_answer_seconds,
            )
            if scope["type"] == "websocket":
                await proxy_websocket(upstream, changed, receive, send, settings.preview_message_bytes)
            else:
                await proxy_http(upstream, changed, receive, send, self._body(receive))

    async def _body(self, receive: Receive) -> AsyncIterator[bytes]:
        settings, size = self._settings, 0
        more = True
        while more:
            try:
                async with asyncio.timeout(settings.preview_idle_seconds):
                    message = await receive()
            except TimeoutError:
                raise _Refused(408, "the request did not arrive in time (preview_idle_seconds)") from None
            if message["type"] == "http.disconnect":
                raise _Refused(499, "the client closed the connection")
            size += len(message.get("body", b""))
            if size > settings.preview_request_bytes:
                raise _Refused(413, f"the request is larger than {settings.preview_request_bytes} bytes")
            more = message.get("more_body", False)
            if message.get("body"):
                yield message["body"]


async def _refuse(scope: Scope, receive: Receive, send: Send, refused: _Refused, started: bool) -> None:
    if scope["type"] == "websocket":
        code = _GOING_AWAY if refused.status == 410 else _REFUSED
        with contextlib.suppress(RuntimeError, OSError):
            await send({"type": "websocket.close", "code": code, "reason": str(refused)[:120]})
    elif not started:
        headers = {
            "cache-control": "no-store",
            "content-security-policy": "default-src 'none'; sandbox",
            "x-content-type-options": "nosniff",
            "connection": "close",
        }
        await PlainTextResponse(f"{refused}\n", refused.status, headers)(scope, receive, send)
    # Otherwise uvicorn closes a connection whose response is not complete.


class PreviewFront:
    """The server of the port. Call `start`, then `stop` once."""

    def __init__(
        self, previews: Previews, settings: ServiceSettings, tls: TlsFiles | None, clock: WallClock
    ) -> None:
        self._previews = previews
        self._settings = settings
        self._tls_files = tls
        self._tls: ssl.SSLContext | None = None
        self._app = PreviewApplication(previews, settings, clock)
        self._server: WebServer | None = None
        #: The URL that the previews' URLs begin with.
        self.url = ""

    async def start(self, limits: ConnectionLimits) -> None:
        settings = self._settings
        address = parse_address(settings.listen_preview)
        if address.is_unix:
            raise Invalid("listen_preview: give HOST:PORT, also behind a proxy", reason="BAD_ADDRESS")
        if not address.is_local and not settings.preview_url:
            raise Invalid(f"listen_preview is {address}: browsers need preview_url as well", reason="BAD_ADDRESS")
        check_address(address, self._tls_files, allow_plaintext=settings.allow_plaintext)
        if settings.preview_url:
            PreviewUrls(settings.preview_url)
        # Read before the bind: invalid files must not leave a bound port.
        self._tls = self._tls_files.context() if self._tls_files is not None else None
        listener = bind(address)
        scheme = "http" if self._tls is None else "https"
        # Browsers resolve every name below `localhost` to this machine.
        self.url = settings.preview_url or f"{scheme}://localhost:{listener.getsockname()[1]}"
        self._previews.urls = PreviewUrls(self.url)
        self._server = WebServer(self._app, limits, self._tls, largest_message=settings.preview_message_bytes)
        await self._server.open(listener)

    async def stop(self, grace: float = 5.0) -> None:
        if self._server is not None:
            await self._server.aclose(grace)

    def reload_tls(self) -> None:
        """Read the certificate and key again."""
        if self._tls is not None and self._tls_files is not None:
            self._tls_files.load_into(self._tls)
