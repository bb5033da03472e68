"""Problems as statuses with google.rpc details, in bytes; pure.

The three messages that we use are a few fields each and have been the same for years, so they are written here by
hand: the package that has them generated would be one more dependency for every installation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from holdfast.service.problems import Problem, StatusName
from holdfast.service.types import Struct

DOMAIN: Final = "holdfast.session.v1"
#: The numbers of google.rpc.Code.
CODES: Final[Mapping[StatusName, int]] = {
    "INVALID_ARGUMENT": 3,
    "DEADLINE_EXCEEDED": 4,
    "NOT_FOUND": 5,
    "ALREADY_EXISTS": 6,
    "PERMISSION_DENIED": 7,
    "RESOURCE_EXHAUSTED": 8,
    "FAILED_PRECONDITION": 9,
    "OUT_OF_RANGE": 11,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
    "UNAUTHENTICATED": 16,
}
# Statuses travel as headers, of which a gRPC client takes 8 KiB by default. The message is there up to three times,
# once percent-encoded and twice in the details, and these are in base64; a refused command may be any length.
_LONGEST_MESSAGE: Final = 1_024
_LONGEST_VALUE: Final = 128
_MOST_VALUES: Final = 8


class Detail(Struct, frozen=True):
    """One detail of a status: its type's name, its bytes, and the same for people."""

    type_name: str
    value: bytes
    shown: dict[str, Any]


def message_of(problem: Problem) -> str:
    """What the caller reads."""
    return _cut(problem.message, _LONGEST_MESSAGE)


def details_of(problem: Problem) -> list[Detail]:
    """An ErrorInfo always, a RetryInfo if waiting helps, a BadRequest if a field is to blame."""
    metadata = {
        _cut(name, _LONGEST_VALUE): _cut(str(value), _LONGEST_VALUE)
        for name, value in list(problem.details.items())[:_MOST_VALUES]
    }
    info = _text(1, problem.reason) + _text(2, DOMAIN)
    info += b"".join(_bytes(3, _text(1, name) + _text(2, value)) for name, value in metadata.items())
    shown: dict[str, Any] = {"reason": problem.reason, "domain": DOMAIN}
    details = [Detail("google.rpc.ErrorInfo", info, shown | ({"metadata": metadata} if metadata else {}))]
    if problem.retry_after is not None:
        seconds, nanos = divmod(max(0, round(problem.retry_after * 1e9)), 10**9)
        delay = _integer(1, seconds) + _integer(2, nanos)
        shown = {"retryDelay": f"{seconds + nanos / 1e9:.3f}s"}
        details.append(Detail("google.rpc.RetryInfo", _bytes(1, delay), shown))
    if (field := metadata.get("field")) is not None:
        violation = _text(1, field) + _text(2, message_of(problem))
        shown = {"fieldViolations": [{"field": field, "description": message_of(problem)}]}
        details.append(Detail("google.rpc.BadRequest", _bytes(1, violation), shown))
    return details


def status_bytes(problem: Problem) -> bytes:
    """A google.rpc.Status, as the trailer `grpc-status-details-bin` has it."""
    packed = b"".join(
        _bytes(3, _text(1, f"type.googleapis.com/{each.type_name}") + _bytes(2, each.value))
        for each in details_of(problem)
    )
    return _integer(1, CODES[problem.status]) + _text(2, message_of(problem)) + packed


def _cut(text: str, longest: int) -> str:
    """As much of it as `longest` bytes of a header hold; bytes that are not plain ASCII take three there."""
    room = longest
    for index, character in enumerate(text):
        room -= 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode("utf-8", "replace"))
        if room < 0:
            return text[:index] + "…"
    return text


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _integer(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value) if value else b""


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _text(number: int, value: str) -> bytes:
    # A lone surrogate can come from a file name; a status must be valid UTF-8 all the same.
    return _bytes(number, value.encode("utf-8", "replace"))
