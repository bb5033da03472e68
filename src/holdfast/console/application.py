"""Serves the files of the console, and nothing else, with headers that let a browser run these files alone.

The files are read once, from the package, and looked up by name: no request reaches a file system.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.resources import files
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: What the page shows is printed by programs that nobody trusts: should a text of theirs ever become markup, the
#: browser runs no script of it, loads nothing for it and sends nothing anywhere but to this service.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    # Browsers with Trusted Types refuse to make markup or script of any text, our own included.
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS: Final = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    # A page that opened this one, or was opened by it, gets no handle on its window.
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # Asked for again each time, and answered by its ETag: a new version of the service has a new page at once.
    (b"cache-control", b"no-cache"),
)
_CONTENT_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_PAGE: Final = "index.html"


def console_application() -> ASGIApp:
    """The page at `/`, its files beside it by their names, 404 for the rest."""
    app = Starlette(routes=list(_routes()))
    # To a path that was almost right: it would be made of the request's `Host`, which may be anything.
    app.router.redirect_slashes = False
    return _WithHeaders(app)


def _routes() -> Iterator[Route]:
    for file in files("holdfast.console").joinpath("static").iterdir():
        name, _, extension = file.name.rpartition(".")
        if name and extension in _CONTENT_TYPES:
            path = "/" if file.name == _PAGE else f"/{file.name}"
            yield Route(path, _File(file.read_bytes(), _CONTENT_TYPES[extension]), methods=["GET"])


class _File:
    """One file, as an application."""

    def __init__(self, content: bytes, media_type: str) -> None:
        self._content = content
        self._headers = {"etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
        self._media_type = media_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = Request(scope).headers.get("if-none-match", "")
        # A proxy that compresses makes the tag a weak one.
        if self._headers["etag"] in (each.strip().removeprefix("W/") for each in wanted.split(",")):
            reply = Response(status_code=304, headers=self._headers)
        else:
            reply = Response(self._content, media_type=self._media_type, headers=self._headers)
        await reply(scope, receive, send)


class _WithHeaders:
    """Puts the headers on every answer, also on a 404."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_HEADERS]}
            await send(message)

        await self._app(scope, receive, sent)
