"""Structs to bytes and back, in JSON and in MessagePack, and the JSON-RPC envelope around them; pure.

An incoming message is decoded in two steps: the envelope with `params`, `result` left raw, then those by the type
that the method table names. Nothing is decoded into dictionaries on the way.
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

_json_encoder: Final = msgspec.json.Encoder()
_msgpack_encoder: Final = msgspec.msgpack.Encoder()


class WireError(msgspec.Struct, frozen=True):
    """The `error` member of a reply."""

    code: int
    message: str
    data: Any = None


class Envelope(msgspec.Struct, frozen=True):
    """Any JSON-RPC message. Which one it is follows from which members it has."""

    jsonrpc: str | UnsetType = UNSET
    id: int | str | UnsetType | None = UNSET
    method: str | UnsetType = UNSET
    params: Raw | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: WireError | UnsetType | None = UNSET


class _Head(msgspec.Struct, frozen=True):
    """As much of a message as names the call that it answers."""

    id: int | str | UnsetType | None = UNSET
    method: Any = UNSET


class _Request(msgspec.Struct, frozen=True):
    """Encoding order matters to one reader: `params` stands last (see `output_header`)."""

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
    """One peer's dialect: its encoding, and whether it writes `jsonrpc` (to one that does not, nor do we)."""

    def __init__(self, encoding: Encoding = "json") -> None:
        self.encoding: Encoding = encoding
        self._version: str | UnsetType = "2.0"

    @property
    def leaves_out_version(self) -> bool:
        """Whether the last message came without `jsonrpc`, as those of the Codex client do."""
        return self._version is UNSET

    def decode(self, message: bytes | bytearray | memoryview) -> Envelope:
        """The envelope of one message. The first byte tells the encoding: `{` begins no MessagePack map."""
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
        """The id of a reply that `decode` refuses, if the rest of the message can be read past; else None.

        The other side is not trusted to write text that is Unicode: a file name or an error message may hold half
        of a surrogate pair, which Python's reader of JSON takes and ours does not.
        """
        try:
            if self.encoding == "json" or message[:1] == b"{":
                head = msgspec.convert(json.loads(bytes(message).decode(errors="replace")), _Head)
            else:
                head = msgspec.msgpack.decode(message, type=_Head)
        except (ValueError, RecursionError):  # those of msgspec, JSON and Unicode are ValueErrors
            return None
        return None if head.method is not UNSET or isinstance(head.id, UnsetType) else head.id

    def decode_body(self, raw: Raw | UnsetType, kind: type[T], what: str) -> T:
        """`params` or `result` as `kind`; `what` names it in the error. Absent or null is an empty object."""
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
            return self._encoder.encode(_Request(self._version, id, method, params))
        except UnicodeEncodeError:
            # Not escaped as in what we tell: the other side would do something else than was asked.
            raise InvalidParams(
                f"{method}: a text holds bytes that are no UTF-8, or half a surrogate pair"
            ) from None

    def notification(self, method: str, params: object) -> bytes:
        return self._encode(_Request(self._version, UNSET, method, params))

    def result(self, id: Id, result: object) -> bytes:
        return self._encode(_Result(self._version, id, result))

    def failure(self, id: Id, error: HoldfastError) -> bytes:
        details = {"fault": error.fault, **error.details}
        return self._encode(_Failure(self._version, id, WireError(error.code, error.message, details)))

    def output_header(self, notification: bytes, length: int) -> bytes:
        """The start of a MessagePack notification whose last member is `chunk`, for `length` bytes to follow.

        `notification` was encoded with an empty chunk and so ends in the two bytes of an empty `bin`; they are
        replaced by a `bin 32` header. The caller then sends the bytes themselves from the spool (sendfile).
        """
        if not notification.endswith(b"\xc4\x00"):
            raise ValueError("the chunk is not the last member")
        return notification[:-2] + b"\xc6" + length.to_bytes(4, "big")

    def _encode(self, message: object) -> bytes:
        try:
            return self._encoder.encode(message)
        except UnicodeEncodeError:
            return self._encoder.encode(_escape(msgspec.to_builtins(message, builtin_types=(bytes,))))

    @property
    def _encoder(self) -> msgspec.json.Encoder | msgspec.msgpack.Encoder:
        return _json_encoder if self.encoding == "json" else _msgpack_encoder


def _escape(value: Any) -> Any:
    """The same with backslashes in place of surrogates, which neither encoding takes.

    In Python's view of the system they stand for bytes that are no UTF-8, in a file name say.
    """
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escape(key): _escape(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape(item) for item in value]
    return value
