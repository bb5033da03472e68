"""What the service answers when it cannot do what it was asked: one class for each status code; pure.

Each has the code's name as gRPC and Connect have it, a `reason` in capitals that programs may rely on, and a
message that names the thing and what to do. The front ends make statuses with details of them; nothing else does.
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
    """There is none, or the caller may not know of it: both read the same."""

    status = "NOT_FOUND"


class Exists(Problem):
    """The name is taken."""

    status = "ALREADY_EXISTS"


class Denied(Problem):
    """The policy, or the caller's role, does not allow it."""

    status = "PERMISSION_DENIED"


class Unauthenticated(Problem):
    """No token, or one that nobody has."""

    status = "UNAUTHENTICATED"


class Exhausted(Problem):
    """A limit of ours is reached; the message names it and its setting."""

    status = "RESOURCE_EXHAUSTED"


class NotNow(Problem):
    """Not in the state that the thing is in: a session that is closed, an approval that was answered."""

    status = "FAILED_PRECONDITION"


class BadToken(Problem):
    """A position that this session never had."""

    status = "OUT_OF_RANGE"


class TooLate(Problem):
    """It was not done in time."""

    status = "DEADLINE_EXCEEDED"


class Unavailable(Problem):
    """The sandbox or the database cannot be reached now; the same call may go through later."""

    status = "UNAVAILABLE"


class Bug(Problem):
    """A bug of ours. The caller hears no more than that; the log has the rest."""

    status = "INTERNAL"
