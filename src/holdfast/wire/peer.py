"""One end of a JSON-RPC conversation without IO: requests out, pending calls matched with replies; pure.

    peer.call(method, params, on_reply) -> bytes to send
    peer.receive(message)               -> a Request or Notice to handle, or None (a reply, already delivered)

Rules: a reply to an id that is not pending is dropped (it belongs to a call that was given up); a reply that cannot
be decoded fails the call whose id it has, and no other. Only a message without a readable id is an error of the
conversation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from msgspec import UNSET, Raw, UnsetType

from holdfast.errors import HandshakeFailed, HoldfastError, InvalidRequest, error_from_wire
from holdfast.wire.codec import Codec, Id
from holdfast.wire.methods import Method

P = TypeVar("P")
R = TypeVar("R")

#: Called once with the result, or with the error that came instead.
OnReply = Callable[[Any, HoldfastError | None], None]


class Request(NamedTuple):
    """The other side asks."""

    id: Id
    method: str
    params: Raw | UnsetType


class Notice(NamedTuple):
    """The other side tells."""

    method: str
    params: Raw | UnsetType


class Peer:
    """Our end: a codec, and the calls that wait for their replies. `name` is the other side's, for errors."""

    def __init__(self, codec: Codec | None = None, name: str = "the other side") -> None:
        self.codec = codec or Codec()
        self._name = name
        self._pending: dict[int | str, tuple[Method[Any, Any], OnReply]] = {}
        self._last_id = 0

    @property
    def pending(self) -> int:
        return len(self._pending)

    def call(self, method: Method[P, R], params: P, on_reply: OnReply) -> tuple[int, bytes]:
        """Register a call; returns its id and the message to send."""
        self._last_id += 1
        message = self.codec.request(self._last_id, method.name, params)
        self._pending[self._last_id] = (method, on_reply)
        return self._last_id, message

    def give_up(self, id: int) -> None:
        """Nobody waits for this reply any more."""
        self._pending.pop(id, None)

    def receive(self, message: bytes | memoryview) -> Request | Notice | None:
        """Take one message. Raises `ParseError` or `InvalidRequest` for one that is neither."""
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
                return Notice(envelope.method, envelope.params)
            return Request(envelope.id, envelope.method, envelope.params)
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

    def _undecodable(self, method: Method[Any, Any], error: HoldfastError) -> HandshakeFailed:
        return HandshakeFailed(f"{self._name}: the reply to {method.name} cannot be decoded: {error}")
