"""Recognizes the request that nearly every call is: a short POST in one or two pieces, without any option; pure.

The pattern is strict. A request that differs in anything, also one that is invalid, is left to the HTTP parser, so
there is no second opinion on what a request is.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

#: A longer head is left to the HTTP parser, which has a limit of its own; a call's has some hundred bytes.
_LONGEST_HEAD: Final = 8_192
#: A longer body is left to it, too: the time that it takes to parse its head does not matter then.
LONGEST_BODY: Final = 65_536
_HEAD: Final = re.compile(
    rb"POST (/[A-Za-z0-9./]+) HTTP/1\.1\r\n((?:[A-Za-z0-9-]+: ?[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?\r\n)+)\r\n"
)
_LINE: Final = re.compile(r"([A-Za-z0-9-]+): ?(.+)\r\n")
#: Fields that change how a request or its reply is read.
_SPECIAL: Final = frozenset({"transfer-encoding", "content-encoding", "expect", "upgrade", "trailer", "te"})


class ShortRequest(NamedTuple):
    """A request; the names of its headers are in lower case, and none is repeated."""

    path: str
    headers: dict[str, str]
    body: bytes
    #: Bytes of the body that have not arrived.
    missing: int


def short_request(data: bytes) -> ShortRequest | None:
    """Return the request that these bytes are, or begin if only a part of the body is missing; None for others."""
    if not (head := _HEAD.match(data, 0, _LONGEST_HEAD)):
        return None
    lines = _LINE.findall(head[2].decode())
    headers = {name.lower(): value for name, value in lines}
    length = headers.get("content-length", "")
    if (
        len(headers) < len(lines)
        or not length.isdigit()
        or "host" not in headers
        or not _SPECIAL.isdisjoint(headers)
    ):
        return None
    if headers.get("connection", "keep-alive").lower() != "keep-alive":
        return None
    missing = head.end() + int(length[:8]) - len(data)
    if missing < 0 or int(length[:8]) > LONGEST_BODY:
        return None
    return ShortRequest(head[1].decode(), headers, data[head.end() :], missing)
