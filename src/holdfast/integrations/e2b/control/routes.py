"""Parts that handlers of the control API share: query parameters, pages, unknown routes; pure."""

from __future__ import annotations

import base64
import binascii
import datetime
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from starlette.responses import Response

from holdfast.fleet.record import SandboxRef
from holdfast.integrations.e2b.problems import Problem, invalid, not_found

#: Entries of one page, and the most that a client may request.
PAGE: Final = 100

#: Called with the request and the parts of its path.
Handler = Callable[..., Awaitable[Response]]


def parse_metadata(text: str) -> dict[str, str]:
    """The filter `key=value&…`; the SDKs quote keys and values twice."""
    try:
        pairs = urllib.parse.parse_qsl(text, keep_blank_values=True, max_num_fields=100)
    except ValueError as error:
        raise invalid(f"metadata: {error}") from None
    return {urllib.parse.unquote(key): urllib.parse.unquote(value) for key, value in pairs}


def parse_moment(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        # In a query, an unquoted `+` of an offset is a space.
        return datetime.datetime.fromisoformat(text.replace(" ", "+")).timestamp()
    except (ValueError, OverflowError):
        raise invalid(f"{text[:64]!r} is not a time") from None


def parse_seconds(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 12:
        raise invalid(f"{text[:64]!r} is not a number of seconds")
    return int(text)


def parse_limit(text: str | None) -> int:
    if text is None:
        return PAGE
    if not text.isascii() or not text.isdecimal() or len(text) > 6 or not 1 <= int(text) <= PAGE:
        raise invalid(f"limit: {text[:64]!r} is not a number from 1 to {PAGE}")
    return int(text)


def paged(
    found: Sequence[SandboxRef], limit: int, token: str | None, order: str
) -> tuple[Sequence[SandboxRef], str | None]:
    """The entries after a token, in the order of their creation, and the token of the next page."""
    if order not in ("asc", "desc"):
        raise invalid(f"order: {order[:64]!r} is not asc or desc")

    def place(ref: SandboxRef) -> tuple[float, str]:
        return ref.created_at, ref.id

    ordered = sorted(found, key=place, reverse=order == "desc")
    if token:
        try:
            when, _, id = base64.urlsafe_b64decode(token.encode()).decode().partition(" ")
            last = (float(when), id)
        except (binascii.Error, ValueError):
            raise invalid("nextToken: not a token of this server") from None
        ordered = [ref for ref in ordered if (place(ref) < last if order == "desc" else place(ref) > last)]
    page = ordered[:limit]
    if len(ordered) <= limit:
        return page, None
    return page, base64.urlsafe_b64encode(f"{page[-1].created_at!r} {page[-1].id}".encode()).decode()


def next_page(token: str | None) -> dict[str, str]:
    return {"x-next-token": token} if token else {}


def unknown_route(method: str, path: str) -> Problem:
    return not_found(f"{method} {path[:200]}: this server does not have it; docs/e2b.md lists what it has")
