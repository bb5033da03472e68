"""The headers of a preview: our secrets do not reach the sandbox, and its headers affect its own page only; pure.

The page and its server are hostile. With a host name of its own, a preview has an origin of its own. Below the
path, all previews share one: a page there is sandboxed by the browser, without an origin, cookies or CORS.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from holdfast.service.fronts.previews.proxy import HeaderList

COOKIE: Final = "holdfast_preview"
SAFE_METHODS: Final = ("GET", "HEAD")
#: Of this service, or of the way to it. `Authorization` may be a token that a client sends by mistake.
FOR_US: Final = frozenset(
    {
        b"authorization",
        b"forwarded",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-port",
        b"x-forwarded-prefix",
        b"x-forwarded-proto",
        b"x-real-ip",
    }
)
#: Response headers with an effect beyond the page: on other paths, on other ports of the host, on later visits. A
#: password that a browser prompts for would not reach the sandbox either.
_BEYOND_THE_PAGE: Final = frozenset(
    {
        b"alt-svc",
        b"clear-site-data",
        b"nel",
        b"public-key-pins",
        b"report-to",
        b"reporting-endpoints",
        b"service-worker-allowed",
        b"strict-transport-security",
        b"www-authenticate",
    }
)
#: Set by us for every response.
_OURS: Final = frozenset({b"referrer-policy", b"x-content-type-options"})
_ADDED: Final = ((b"referrer-policy", b"no-referrer"), (b"x-content-type-options", b"nosniff"))
#: Another policy of the page itself applies as well: a browser enforces all of them.
_OWN_ORIGIN: Final = (b"content-security-policy", b"frame-ancestors 'self'")
_SHARED_ORIGIN: Final = (
    b"content-security-policy",
    b"sandbox allow-scripts allow-forms; frame-ancestors 'none'",
)


def cookies(headers: HeaderList) -> list[str]:
    """Return the values of our cookie."""
    found = (part.partition(b"=") for part in _cookie_parts(headers))
    return [value.decode("latin-1") for name, _, value in found if name == COOKIE.encode()]


def _cookie_parts(headers: HeaderList) -> list[bytes]:
    return [part.strip() for name, value in headers if name == b"cookie" for part in value.split(b";")]


def request_headers(headers: HeaderList, *, shared: bool) -> HeaderList:
    """Return the headers for the sandbox, without our cookie.

    With a shared host name all cookies are dropped: they can be those of programs on other ports of the host.
    """
    kept = [each for each in headers if each[0] != b"cookie"]
    if not shared:
        own = [part for part in _cookie_parts(headers) if part.partition(b"=")[0] != COOKIE.encode()]
        kept += [(b"cookie", b"; ".join(own))] if any(own) else []
    return kept


def response_headers(headers: HeaderList, *, shared: bool) -> HeaderList:
    """Return the sandbox's headers for the browser."""
    kept = [each for each in headers if each[0] not in _BEYOND_THE_PAGE | _OURS and _passes(*each, shared=shared)]
    return [*kept, *_ADDED, _SHARED_ORIGIN if shared else _OWN_ORIGIN]


def _passes(name: bytes, value: bytes, *, shared: bool) -> bool:
    if name == b"set-cookie":
        first, *attributes = value.split(b";")
        named = {part.partition(b"=")[0].strip().lower() for part in attributes}
        return not shared and b"domain" not in named and first.partition(b"=")[0].strip() != COOKIE.encode()
    # The pages of all previews have the origin `null` there: one could allow itself to read another.
    return not (shared and name.startswith(b"access-control-"))


def set_cookie(value: str, path: str, seconds: float, *, secure: bool) -> str:
    end = "; Secure" if secure else ""
    return f"{COOKIE}={value}; Path={path}; Max-Age={max(1, int(seconds))}; HttpOnly; SameSite=Lax{end}"


def is_foreign(headers: Headers, method: str) -> bool:
    """Return whether a page of another origin makes this request; a browser may send the cookie with it.

    Names below one domain are the same site, so `SameSite` does not separate previews from each other.
    """
    origin = headers.get("origin")
    if origin is not None and method not in SAFE_METHODS:
        return urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
    site, mode = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode", "navigate")
    return site in ("same-site", "cross-site") and mode != "navigate"
