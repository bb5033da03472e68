"""Serves the files of the console, and nothing else, with headers that let a browser run only these files.

The console is built from `console/` into the folder `built` of this package. Where it was not built, the plain page
in `static` takes its place; the plain page is always at `/plain`. The files are read from the package once, and
requests are matched by name: no request reaches a file system.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: The page shows output of untrusted programs. Should such a text ever become markup, the browser runs no script of
#: it, loads nothing for it and sends nothing except to this service.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    # Browsers with Trusted Types refuse to turn any text into markup or script, our own included.
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS: Final = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    # Pages that open this one, or are opened by it, get no reference to its window.
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # Revalidated by ETag each time, so that a new version of the service has its new page at once.
    (b"cache-control", b"no-cache"),
)
_CONTENT_TYPES: Final = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "txt": "text/plain",
}
_PAGE: Final = "index.html"
#: Addresses of the console that can be shared; the page itself shows what they name.
_PAGES: Final = ("/", "/sessions", "/sessions/{id}", "/wall", "/fleet", "/approvals", "/audit", "/usage")


def console_application() -> ASGIApp:
    """Return the application: the console at its addresses, the plain page at `/plain`, 404 for other paths."""
    plain = files("holdfast.console").joinpath("static")
    built = files("holdfast.console").joinpath("built")
    is_built = built.joinpath(_PAGE).is_file()
    routes = _routes(plain, "/", ("/plain",) if is_built else ("/plain", "/"))
    app = Starlette(routes=[*routes, *(_routes(built, "/", _PAGES) if is_built else ())])
    # Redirects would be made from the request's `Host` header, which is untrusted.
    app.router.redirect_slashes = False
    return _WithHeaders(app)


def _routes(folder: Traversable, prefix: str, pages: tuple[str, ...]) -> Iterator[Route]:
    """Yield a route for each file of a folder; its page is at all of `places`."""
    for file in folder.iterdir():
        name, _, extension = file.name.rpartition(".")
        if file.is_dir():
            yield from _routes(file, f"{prefix}{file.name}/", ())
        elif file.name == _PAGE:
            page = _File(file.read_bytes(), "text/html")
            yield from (Route(place, page, methods=["GET"]) for place in pages)
        elif name and extension in _CONTENT_TYPES:
            served = _File(file.read_bytes(), _CONTENT_TYPES[extension])
            yield Route(f"{prefix}{file.name}", served, methods=["GET"])


class _File:
    """An application that serves one file."""

    def __init__(self, content: bytes, media_type: str) -> None:
        self._content = content
        self._headers = {"etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
        self._media_type = media_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = Request(scope).headers.get("if-none-match", "")
        # A proxy that compresses turns the tag into a weak one.
        if self._headers["etag"] in (each.strip().removeprefix("W/") for each in wanted.split(",")):
            reply = Response(status_code=304, headers=self._headers)
        else:
            reply = Response(self._content, media_type=self._media_type, headers=self._headers)
        await reply(scope, receive, send)


class _WithHeaders:
    """Adds the headers to every answer, 404 included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_HEADERS]}
            await send(message)

        await self._app(scope, receive, sent)
