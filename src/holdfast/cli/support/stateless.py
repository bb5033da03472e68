"""Sends one request over the server's socket and returns its reply, without an event loop.

The handshake and the request are one write, so that a call costs one round trip. Standard library only.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from typing import Any

_INITIALIZE_ID = "holdfast-exec/initialize"
_BARRIER_ID = "holdfast-exec/barrier"
_INITIALIZE = b'{"jsonrpc":"2.0","id":"%s","method":"initialize","params":{"clientName":"holdfast-exec"}}\n' % (
    _INITIALIZE_ID.encode()
)
_INITIALIZED = b'{"jsonrpc":"2.0","method":"initialized","params":{}}\n'
#: Sent after a notification: messages are handled in order, so the reply proves that the notification was handled.
_BARRIER = b'{"jsonrpc":"2.0","id":"%s","method":"ping","params":{}}\n' % _BARRIER_ID.encode()

_RECEIVE_BYTES = 256 * 1024


class HandshakeRefused(ConnectionError):
    """The server did not accept the handshake."""


class ReplyLine:
    """A reply: the line as it arrived, and the decoded message."""

    __slots__ = ("line", "message")

    def __init__(self, line: bytes, message: dict[str, Any]) -> None:
        self.line = line
        self.message = message

    @property
    def is_error(self) -> bool:
        return "error" in self.message


def exchange(connection: socket.socket, request: bytes, *, greet: bool = True) -> ReplyLine | None:
    """Send one request and return its reply; None for a notification, which has none.

    A request that is not JSON is sent as it is, and the server replies with an error. `ConnectionError` if the
    server closes the connection first. `greet` sends the handshake, which only the first request of a connection
    may do.
    """
    # In JSON a line break occurs only between tokens, so a space means the same and keeps the message in one line.
    line = request.replace(b"\r", b" ").replace(b"\n", b" ") + b"\n"
    method, has_id = _parse_request(request)
    is_notification = method is not None and not has_id
    greet = greet and method != "initialize"
    parts = [_INITIALIZE, _INITIALIZED, line] if greet else [line]
    if is_notification:
        parts.append(_BARRIER)
    connection.sendall(b"".join(parts))
    awaiting_initialize = greet
    for answer in _lines(connection):
        message = json.loads(answer)
        if not isinstance(message, dict) or "method" in message:
            continue
        if awaiting_initialize and message.get("id") == _INITIALIZE_ID:
            awaiting_initialize = False
            if "error" in message:
                raise HandshakeRefused(f"the server refused: {message['error'].get('message', 'no reason given')}")
        elif is_notification:
            if message.get("id") == _BARRIER_ID:
                return None
        else:
            return ReplyLine(answer, message)
    raise ConnectionResetError("the server closed the connection before it replied")


def call(connection: socket.socket, method: str, params: dict[str, Any], *, greet: bool = True) -> ReplyLine:
    """Call a method with parameters; see `exchange`."""
    request = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
    reply = exchange(connection, request.encode(), greet=greet)
    if reply is None:
        raise ConnectionResetError(f"no reply to {method}")
    return reply


def _parse_request(request: bytes) -> tuple[str | None, bool]:
    """Return the method, or None if this is not a request, and whether it has an id."""
    try:
        message = json.loads(request)
    except (ValueError, RecursionError):
        return None, False
    if not isinstance(message, dict) or not isinstance(message.get("method"), str):
        return None, False
    return message["method"], "id" in message


def _lines(connection: socket.socket) -> Iterator[bytes]:
    parts: list[bytes] = []
    while True:
        data = connection.recv(_RECEIVE_BYTES)
        if not data:
            return
        head, newline, rest = data.partition(b"\n")
        parts.append(head)
        while newline:
            line = b"".join(parts)
            if line:
                yield line
            head, newline, rest = rest.partition(b"\n")
            parts = [head]
