"""Errors as the E2B SDKs expect them: an HTTP status or a Connect code for each class of Holdfast; pure.

The SDKs choose the class of their exception by this number. Some classes depend on words of the message, which are
here as well.
"""

from __future__ import annotations

import errno
from typing import Final

from holdfast import errors as e

#: The HTTP status of each Connect code, by the Connect protocol.
CONNECT_STATUS: Final = {
    "canceled": 499,
    "unknown": 500,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "unimplemented": 501,
    "internal": 500,
    "data_loss": 500,
    "unavailable": 503,
    "unauthenticated": 401,
}


class Problem(Exception):
    """A reply that is an error: its HTTP status, its Connect code and its message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


def timed_out() -> Problem:
    """The SDKs raise `TimeoutException`."""
    return Problem(504, "deadline_exceeded", "the timeout of the request is over")


def invalid(message: str) -> Problem:
    """The SDKs raise `InvalidArgumentException`."""
    return Problem(400, "invalid_argument", message)


def not_found(message: str) -> Problem:
    """The SDKs raise a class of `NotFoundException`."""
    return Problem(404, "not_found", message)


def unauthorized(message: str) -> Problem:
    """The SDKs raise `AuthenticationException`."""
    return Problem(401, "unauthenticated", message)


def not_running(id: str) -> Problem:
    """The SDKs raise `SandboxNotRunningException`, by the words "was not found"."""
    return Problem(502, "unavailable", f"The sandbox {id[:64]!r} was not found: it has ended or is paused")


def unsupported(engine: str, feature: str, reason: str) -> Problem:
    """A feature that the engine does not have. The SDKs raise `SandboxException`, in a build `BuildException`."""
    return Problem(501, "unimplemented", f"engine {engine}: {feature}: {reason}")


#: The first class that an error is an instance of decides.
_CODES: Final[tuple[tuple[type[e.HoldfastError], int, str], ...]] = (
    (e.UnknownProcess, 404, "not_found"),
    (e.UnknownTerminal, 404, "not_found"),
    (e.FileNotFound, 404, "not_found"),
    (e.CwdNotFound, 400, "invalid_argument"),
    (e.FileExists, 409, "already_exists"),
    (e.NotADirectory, 400, "invalid_argument"),
    (e.IsADirectory, 400, "invalid_argument"),
    (e.UnknownUser, 401, "unauthenticated"),
    (e.PermissionRefused, 403, "permission_denied"),
    (e.Forbidden, 403, "permission_denied"),
    (e.StdinClosed, 400, "failed_precondition"),
    (e.TerminalClosed, 400, "failed_precondition"),
    (e.CommandNotFound, 400, "invalid_argument"),
    (e.NotExecutable, 400, "invalid_argument"),
    (e.TimeoutError, 504, "deadline_exceeded"),
    (e.LimitReached, 429, "resource_exhausted"),
    (e.ResourceExhausted, 429, "resource_exhausted"),
    (e.MessageTooLarge, 413, "resource_exhausted"),
    (e.SandboxGone, 502, "unavailable"),
    (e.TransportError, 502, "unavailable"),
    (e.CallerError, 400, "invalid_argument"),
)


def problem_of(error: e.HoldfastError, sandbox_id: str = "") -> Problem:
    """The reply for an error of Holdfast; `sandbox_id` is the sandbox of the request."""
    if isinstance(error, e.SandboxGone):
        return not_running(sandbox_id)
    if error.details.get("errno") in (errno.ENOSPC, errno.EDQUOT):
        # The SDKs raise `NotEnoughSpaceException`.
        return Problem(507, "resource_exhausted", error.message)
    for cls, status, code in _CODES:
        if isinstance(error, cls):
            return Problem(status, code, error.message)
    return Problem(500, "internal", error.message)
