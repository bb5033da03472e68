"""One end of a JSON-RPC connection without IO: encodes requests and matches replies with pending calls; pure.

    peer.call(method, params, on_reply) -> bytes to send
    peer.receive(message)               -> a request or notification to handle, or None for a delivered reply

Rules: a reply to an id that is not pending is dropped, because its call was given up; an undecodable reply fails
only the call with its id. Only a message without a readable id is an error of the connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from msgspec import UNSET, Raw, Struct, UnsetType

from holdfast.errors import HandshakeFailed, HoldfastError, InvalidRequest, error_from_wire
from holdfast.wire.codec import Codec, Id
from holdfast.wire.methods import WireMethod

P = TypeVar("P")
R = TypeVar("R")

#: Called once with the result or the error.
OnReply = Callable[[Any, HoldfastError | None], None]


class IncomingRequest(Struct, frozen=True):
    """A request from the peer."""

    id: Id
    method: str
    params: Raw | UnsetType


class IncomingNotification(Struct, frozen=True):
    """A notification from the peer."""

    method: str
    params: Raw | UnsetType


class Peer:
    """A codec and the pending calls. `name` is the peer's name in errors."""

    def __init__(self, codec: Codec | None = None, name: str = "the peer") -> None:
        self.codec = codec or Codec()
        self._name = name
        self._pending: dict[int | str, tuple[WireMethod[Any, Any], OnReply]] = {}
        self._last_id = 0

    @property
    def pending(self) -> int:
        return len(self._pending)

    def call(self, method: WireMethod[P, R], params: P, on_reply: OnReply) -> tuple[int, bytes]:
        """Register a call; returns its id and the message to send."""
        self._last_id += 1
        message = self.codec.request(self._last_id, method.name, params)
        self._pending[self._last_id] = (method, on_reply)
        return self._last_id, message

    def give_up(self, id: int) -> None:
        """Drop a pending call; its reply will be ignored."""
        self._pending.pop(id, None)

    def receive(self, message: bytes | memoryview) -> IncomingRequest | IncomingNotification | None:
        """Process one message; `ParseError` or `InvalidRequest` if it is not a JSON-RPC message."""
        try:
            envelope = self.codec.decode(message)
        except HoldfastError as malformed:
            id = self.codec.reply_id(message) if self._pending else None
            if id is None or id not in self._pending:
                raise
            method, on_reply = self._pending.pop(id)
            on_reply(None, self._undecodable(method, malformed))
            return None
        if envelope.method is not UNSET:
            if envelope.id is UNSET:
                return IncomingNotification(envelope.method, envelope.params)
            return IncomingRequest(envelope.id, envelope.method, envelope.params)
        if envelope.id is UNSET or (envelope.result is UNSET and envelope.error in (UNSET, None)):
            raise InvalidRequest("a message needs `method`, or `id` with `result` or `error`")
        if envelope.id is not None and envelope.id in self._pending:
            method, on_reply = self._pending.pop(envelope.id)
            if envelope.error is not UNSET and envelope.error is not None:
                error = envelope.error
                on_reply(None, error_from_wire(error.code, error.message, error.data))
                return None
            try:
                result = self.codec.decode_body(envelope.result, method.result, f"result of {method.name}")
            except HoldfastError as error:
                on_reply(None, self._undecodable(method, error))
            else:
                on_reply(result, None)
        return None

    def _undecodable(self, method: WireMethod[Any, Any], error: HoldfastError) -> HandshakeFailed:
        return HandshakeFailed(f"{self._name}: the reply to {method.name} cannot be decoded: {error}")
