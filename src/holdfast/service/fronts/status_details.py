"""Problems as `google.rpc.Status` messages with details; pure."""

from __future__ import annotations

from typing import Final

from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2 as rpc, status_pb2

from holdfast.service.problems import Problem

DOMAIN: Final = "holdfast.session.v1"
# A status travels in headers, and a gRPC client accepts 8 KiB of headers by default. The message is in them up to
# three times, once percent-encoded and twice in the details, which are in base64; a refused command has any length.
_LONGEST_MESSAGE: Final = 1_024
_LONGEST_VALUE: Final = 128
_MOST_VALUES: Final = 8


def message_of(problem: Problem) -> str:
    """Return the message for the caller."""
    return _cut(problem.message, _LONGEST_MESSAGE)


def details_of(problem: Problem) -> list[Message]:
    """Return an ErrorInfo; also a RetryInfo if a retry can succeed, and a BadRequest if a field is invalid."""
    metadata = {
        _cut(name, _LONGEST_VALUE): _cut(str(value), _LONGEST_VALUE)
        for name, value in list(problem.details.items())[:_MOST_VALUES]
    }
    details: list[Message] = [rpc.ErrorInfo(reason=problem.reason, domain=DOMAIN, metadata=metadata)]
    if problem.retry_after is not None:
        retry = rpc.RetryInfo()
        retry.retry_delay.FromNanoseconds(max(0, round(problem.retry_after * 1e9)))
        details.append(retry)
    if (field := metadata.get("field")) is not None:
        violation = rpc.BadRequest.FieldViolation(field=field, description=message_of(problem))
        details.append(rpc.BadRequest(field_violations=[violation]))
    return details


def status_of(problem: Problem) -> status_pb2.Status:
    """Return the status with its details."""
    status = status_pb2.Status(code=code_pb2.Code.Value(problem.status), message=message_of(problem))
    for detail in details_of(problem):
        status.details.add().Pack(detail)
    return status


def _cut(text: str, longest: int) -> str:
    """Return as much of a text as `longest` bytes of a header hold; a byte that is not plain ASCII takes three."""
    # A lone surrogate can come from a file name, and a status must be valid UTF-8.
    text = text.encode("utf-8", "replace").decode()
    room = longest
    for index, character in enumerate(text):
        room -= 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())
        if room < 0:
            return text[:index] + "…"
    return text
