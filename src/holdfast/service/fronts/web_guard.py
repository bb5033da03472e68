"""Protects the HTTP port from web pages of other sites: refuses rebound host names, forbids MIME sniffing; pure.

A page of another site reaches a loopback port by DNS rebinding: the name of the site resolves to 127.0.0.1, and the
browser treats the replies as those of the site. The API needs a token; without this check the page could read
`/metrics`, and show the console under its name.
"""

from __future__ import annotations

import fnmatch
import ipaddress
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NO_SNIFFING: Final = (b"x-content-type-options", b"nosniff")


def rebindable(host: str) -> bool:
    """Return whether the owner of a web page could make the name in a `Host` header resolve to a loopback address.

    Such a name is in the public DNS and has a dot. Address literals are not resolved, and names without a dot
    (`localhost`, a container, an upstream of a proxy) are not in the public DNS.
    """
    name = _name(host)
    if "." not in name or name.endswith(".localhost"):
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return True
    return False


def _name(host: str) -> str:
    """Return the name in the header without its port, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).removesuffix(".")


class WebGuard:
    """Forwards a request if its `Host` is allowed, and adds `nosniff` to every response."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str], *, loopback: bool) -> None:
        """`allowed` has patterns of names. Without patterns, a port beyond loopback accepts every name."""
        self._app = app
        self._allowed = tuple(pattern.lower() for pattern in allowed)
        self._checks = loopback or bool(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], _NO_SNIFFING]}
            await send(message)

        app = self._app
        if self._checks:
            # An HTTP/1.0 probe may have no Host; a browser always sends one.
            host = Headers(scope=scope).get("host", "")
            if rebindable(host) and not self._is_allowed(host):
                words = f"{_name(host)[:100]!r} is not a name of this service (setting allowed_hosts)\n"
                app = PlainTextResponse(words, status_code=421, headers={"connection": "close"})
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": 1008})
                    return
        await app(scope, receive, sent)

    def _is_allowed(self, host: str) -> bool:
        return any(fnmatch.fnmatchcase(_name(host), pattern) for pattern in self._allowed)
