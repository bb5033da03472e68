"""The errors of the service, one class for each status code; pure.

Each has the name of the code in gRPC and Connect, a `reason` in capitals for programs, and a message that names the
object and the remedy. The front ends convert them to statuses with details.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from holdfast.errors import HoldfastError

StatusName = Literal[
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "OUT_OF_RANGE",
    "DEADLINE_EXCEEDED",
    "UNAVAILABLE",
    "INTERNAL",
]


class Problem(HoldfastError):
    """The root. `details` become the metadata of an ErrorInfo; `retry_after` a RetryInfo, in seconds."""

    status: ClassVar[StatusName] = "INTERNAL"

    def __init__(self, message: str, /, *, reason: str, retry_after: float | None = None, **details: Any) -> None:
        super().__init__(message, **details)
        self.reason = reason
        self.retry_after = retry_after


class Invalid(Problem):
    """A field is missing, of the wrong form or out of range."""

    status = "INVALID_ARGUMENT"


class NotFound(Problem):
    """The object does not exist, or the caller may not see it; the two cases are not distinguishable."""

    status = "NOT_FOUND"


class Exists(Problem):
    """The name is taken."""

    status = "ALREADY_EXISTS"


class Denied(Problem):
    """The policy, or the caller's role, does not allow it."""

    status = "PERMISSION_DENIED"


class Unauthenticated(Problem):
    """No token, or an unknown one."""

    status = "UNAUTHENTICATED"


class Exhausted(Problem):
    """A limit of the service is reached; the message names it and its setting."""

    status = "RESOURCE_EXHAUSTED"


class NotNow(Problem):
    """The object is in the wrong state: a closed session, an answered approval."""

    status = "FAILED_PRECONDITION"


class BadToken(Problem):
    """A position that this session never had."""

    status = "OUT_OF_RANGE"


class TooLate(Problem):
    """The deadline has passed."""

    status = "DEADLINE_EXCEEDED"


class Unavailable(Problem):
    """The sandbox or the database is unreachable; a retry can succeed."""

    status = "UNAVAILABLE"


class Bug(Problem):
    """A bug in the service. The caller gets an id; the log has the traceback under that id."""

    status = "INTERNAL"
