"""Structs to bytes and back, in JSON and in MessagePack, and the JSON-RPC envelope around them; pure.

An incoming message is decoded in two steps: the envelope with raw `params` and `result`, then these by the type in
the method table. Nothing is decoded into dictionaries in between.
"""

from __future__ import annotations

import json
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from holdfast.errors import HoldfastError, InvalidParams, InvalidRequest, ParseError
from holdfast.wire.messages import Encoding

T = TypeVar("T")
Id = int | str | None

_encoders: Final[dict[Encoding, msgspec.json.Encoder | msgspec.msgpack.Encoder]] = {
    "json": msgspec.json.Encoder(),
    "msgpack": msgspec.msgpack.Encoder(),
}


class WireError(msgspec.Struct, frozen=True):
    """The `error` member of a reply."""

    code: int
    message: str
    data: Any = None


class Envelope(msgspec.Struct, frozen=True):
    """Any JSON-RPC message; its members determine the kind."""

    jsonrpc: str | UnsetType = UNSET
    id: int | str | UnsetType | None = UNSET
    method: str | UnsetType = UNSET
    params: Raw | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: WireError | UnsetType | None = UNSET


class _Head(msgspec.Struct, frozen=True):
    """The members of a reply that identify its call."""

    id: int | str | UnsetType | None = UNSET
    method: Any = UNSET


class _Request(msgspec.Struct, frozen=True):
    """A request or notification. `params` must be encoded last (see `output_header`)."""

    jsonrpc: str | UnsetType
    id: int | str | UnsetType
    method: str
    params: Any


class _Result(msgspec.Struct, frozen=True):
    jsonrpc: str | UnsetType
    id: Id
    result: Any


class _Failure(msgspec.Struct, frozen=True):
    jsonrpc: str | UnsetType
    id: Id
    error: WireError


_envelope_json: Final = msgspec.json.Decoder(Envelope)
_envelope_msgpack: Final = msgspec.msgpack.Decoder(Envelope)


class Codec:
    """The encoding of one peer, and whether it sends `jsonrpc`; if it does not, this side leaves it out too."""

    def __init__(self, encoding: Encoding = "json") -> None:
        self.encoding: Encoding = encoding
        self._version: str | UnsetType = "2.0"

    @property
    def leaves_out_version(self) -> bool:
        """Whether the last message had no `jsonrpc`, which identifies the Codex client."""
        return self._version is UNSET

    def decode(self, message: bytes | bytearray | memoryview) -> Envelope:
        """Decode the envelope of one message. A first byte `{` means JSON: no MessagePack map begins with it."""
        try:
            if self.encoding == "json" or message[:1] == b"{":
                envelope = _envelope_json.decode(message)
            else:
                envelope = _envelope_msgpack.decode(message)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"not a JSON-RPC message: {error}") from None
        except msgspec.DecodeError as error:
            raise ParseError(f"malformed {self.encoding}: {error}") from None
        except UnicodeDecodeError as error:
            raise ParseError(f"malformed {self.encoding}: text that is not UTF-8 ({error.reason})") from None
        except RecursionError:
            raise ParseError("nested too deeply") from None
        self._version = UNSET if envelope.jsonrpc is UNSET else "2.0"
        return envelope

    def reply_id(self, message: bytes | bytearray | memoryview) -> Id:
        """The id of a reply that `decode` refuses, if a more tolerant decoder can read it; else None.

        A peer may send text that is not Unicode: a file name or an error message may hold half of a surrogate pair,
        which Python's JSON decoder accepts and msgspec refuses.
        """
        try:
            if self.encoding == "json" or message[:1] == b"{":
                head = msgspec.convert(json.loads(bytes(message).decode(errors="replace")), _Head)
            else:
                head = msgspec.msgpack.decode(message, type=_Head)
        except (ValueError, RecursionError):  # the errors of msgspec, json and Unicode are ValueErrors
            return None
        return None if head.method is not UNSET or isinstance(head.id, UnsetType) else head.id

    def decode_body(self, raw: Raw | UnsetType, kind: type[T], what: str) -> T:
        """Decode `params` or `result` as `kind`, which errors name `what`. Absent or null is an empty object."""
        if self.encoding == "msgpack" and raw is not UNSET:
            try:
                return msgspec.msgpack.decode(raw, type=kind)
            except (ValueError, RecursionError):
                pass  # absent, in JSON, or an error, which is reported below; the errors of msgspec are ValueErrors
        try:
            # Only the head is copied: a body may hold a megabyte of output.
            head = b"" if raw is UNSET else bytes(memoryview(raw)[:5])
            if raw is UNSET or head in (b"", b"null", b"\xc0"):
                return msgspec.convert({}, kind)
            if self.encoding == "json" or head[:1] in (b"{", b"["):
                return msgspec.json.decode(raw, type=kind)
            return msgspec.msgpack.decode(raw, type=kind)
        except msgspec.ValidationError as error:
            raise InvalidParams(f"{what}: {error}") from None
        except msgspec.DecodeError as error:
            raise ParseError(f"{what}: {error}") from None
        except UnicodeDecodeError as error:
            raise ParseError(f"{what}: text that is not UTF-8 ({error.reason})") from None
        except RecursionError:
            raise ParseError(f"{what}: nested too deeply") from None

    def request(self, id: int | str, method: str, params: object) -> bytes:
        try:
            return _encoders[self.encoding].encode(_Request(self._version, id, method, params))
        except UnicodeEncodeError:
            # Not escaped as in replies: the server would act on a different text than the caller gave.
            raise InvalidParams(
                f"{method}: a text holds bytes that are not UTF-8, or half a surrogate pair"
            ) from None

    def notification(self, method: str, params: object) -> bytes:
        return self._encode(_Request(self._version, UNSET, method, params))

    def result(self, id: Id, result: object) -> bytes:
        return self._encode(_Result(self._version, id, result))

    def failure(self, id: Id, error: HoldfastError) -> bytes:
        details = {"fault": error.fault, **error.details}
        return self._encode(_Failure(self._version, id, WireError(error.code, error.message, details)))

    def output_header(self, notification: bytes, length: int) -> bytes:
        """The start of a MessagePack notification that ends with a `chunk` of `length` bytes, without those bytes.

        `notification` was encoded with an empty chunk and so ends in the two bytes of an empty `bin`; they are
        replaced by a `bin 32` header. The caller then sends the bytes from the spool's file.
        """
        if not notification.endswith(b"\xc4\x00"):
            raise ValueError("the chunk is not the last member")
        return notification[:-2] + b"\xc6" + length.to_bytes(4, "big")

    def _encode(self, message: object) -> bytes:
        try:
            return _encoders[self.encoding].encode(message)
        except UnicodeEncodeError:
            return _encoders[self.encoding].encode(_escape(msgspec.to_builtins(message, builtin_types=(bytes,))))


def _escape(value: Any) -> Any:
    """`value` with backslash escapes in place of surrogates, which neither encoding accepts.

    Python decodes bytes that are not UTF-8, for example in a file name, to surrogates.
    """
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escape(key): _escape(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape(item) for item in value]
    return value
