"""An HTTP request that leaves the sandbox as a host call, and the head of its response; pure.

The body of a call is a packed request; the first piece of the answer is the head, all further pieces the body.
"""

from __future__ import annotations

from typing import Final

import msgspec

#: The host service that the proxy calls, and its one method.
MODEL_SERVICE = "model"
HTTP_METHOD = "http"

#: Headers of one connection (RFC 9110, section 7.6.1), never forwarded; `host` names only the proxy.
HOP_BY_HOP_HEADERS: Final = frozenset(
    (
        *("connection", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    )
)

Headers = tuple[tuple[str, str], ...]


class HttpRequest(msgspec.Struct, frozen=True, array_like=True):
    """A whole request. Header names are in lower case; hop-by-hop headers are left out."""

    method: str
    #: Without the query; percent-encoded as received.
    path: str
    query: str
    headers: Headers
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


class HttpHead(msgspec.Struct, frozen=True, array_like=True):
    """The head of a response."""

    status: int
    headers: Headers


def pack_request(request: HttpRequest) -> bytes:
    return msgspec.msgpack.encode(request)


def unpack_request(data: bytes) -> HttpRequest:
    return msgspec.msgpack.decode(data, type=HttpRequest)


def pack_head(head: HttpHead) -> bytes:
    return msgspec.msgpack.encode(head)


def unpack_head(data: bytes) -> HttpHead:
    return msgspec.msgpack.decode(data, type=HttpHead)
