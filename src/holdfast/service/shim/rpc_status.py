"""What a gRPC client makes of a call that failed: the `Problem` that the service raised, with its reason; pure.

The details come as a `google.rpc.Status` in a trailer. Three fields of it are read, so it is read here rather than
with the package that has those messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import grpc

from holdfast.service.problems import Problem

_TRAILER: Final = "grpc-status-details-bin"
_ERROR_INFO: Final = "type.googleapis.com/google.rpc.ErrorInfo"


def problem_of(error: grpc.RpcError) -> Problem:
    """The same problem on this side. A code that the service does not use becomes the root class."""
    call: Any = error  # what is raised is a call, which the class of the error does not say
    name = call.code().name
    kind = next((each for each in Problem.__subclasses__() if each.status == name), Problem)
    trailers = dict(call.trailing_metadata() or ())
    reason, details = _error_info(trailers.get(_TRAILER, b""))
    problem = kind(call.details() or name, reason=reason or name)
    problem.details.update(details)
    return problem


def _error_info(status: bytes) -> tuple[str, dict[str, str]]:
    """`reason` and `metadata` of the ErrorInfo among the details of a Status; empty if there is none."""
    for number, detail in _fields(status):
        if number != 3 or not isinstance(detail, bytes):
            continue
        packed = dict(_fields(detail))
        if packed.get(1) == _ERROR_INFO.encode():
            info = list(_fields(_as_bytes(packed.get(2))))
            pairs = [dict(_fields(_as_bytes(value))) for number, value in info if number == 3]
            return _text(dict(info).get(1)), {_text(pair.get(1)): _text(pair.get(2)) for pair in pairs}
    return "", {}


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message that are numbers or have a length; what follows another kind is not read."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        value, at = _varint(data, at)
        if key & 7 == 0:
            yield key >> 3, value
        elif key & 7 == 2:
            yield key >> 3, data[at : at + value]
            at += value
        else:
            return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            break
    return value, at


def _text(value: int | bytes | None) -> str:
    return _as_bytes(value).decode("utf-8", "replace")


def _as_bytes(value: int | bytes | None) -> bytes:
    return value if isinstance(value, bytes) else b""
