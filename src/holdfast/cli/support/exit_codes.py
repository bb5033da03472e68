"""The exit codes of the verbs, and the line that describes an error; pure.

The numbers are those of `timeout`, `env` and the shells, which scripts already handle.
"""

from __future__ import annotations

from typing import Final

from holdfast.errors import (
    EXIT_INTERRUPTED,
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    EXIT_TIMED_OUT,
    CommandNotFound,
    DuplicateProcess,
    HoldfastError,
    NotExecutable,
    TimeoutError,
    UnknownProcess,
    UnknownShell,
)

FAILED: Final = 1
USAGE: Final = 2
NO_SERVER: Final = 3
TIMED_OUT: Final = EXIT_TIMED_OUT
#: Holdfast or the connection to the sandbox failed, in a verb that otherwise exits with the command's code.
OURS: Final = 125
NOT_EXECUTABLE: Final = EXIT_NOT_EXECUTABLE
NOT_FOUND: Final = EXIT_NOT_FOUND
INTERRUPTED: Final = EXIT_INTERRUPTED
KILLED: Final = 137
BROKEN_PIPE: Final = 141

#: The verb to use after an error, by the class of the error.
_NEXT_STEPS: Final[dict[type[Exception], str]] = {
    UnknownProcess: "`holdfast ps --all` lists the ids",
    UnknownShell: "`holdfast shell list` lists the ids",
    DuplicateProcess: "choose another id, or drop an ended process with `holdfast rm`",
}
#: The same by the `reason` of an error of the session service.
_NEXT_STEPS_OF_REASONS: Final = {
    "AGENT_NOT_FOUND": "`holdfast service agent list` lists the agents",
    "APPROVAL_NOT_FOUND": "`holdfast session approve` lists those that wait",
    "SESSION_NOT_FOUND": "`holdfast session list --all` lists the ids",
    "TOKEN_UNKNOWN": "`holdfast service agent rotate AGENT` makes a new one",
}


def exit_code_of(error: Exception, *, ours: int) -> int:
    """Return the exit code for an error; `ours` is the verb's code for errors that are not the command's."""
    if isinstance(error, CommandNotFound):
        return NOT_FOUND
    if isinstance(error, NotExecutable):
        return NOT_EXECUTABLE
    if isinstance(error, TimeoutError):
        return TIMED_OUT
    return ours


def describe(error: Exception, suggestion: str = "") -> str:
    """Return an error as one line that ends with the next step, or with a `suggestion` (`near_ids`)."""
    if isinstance(error, HoldfastError):
        return error.message + (suggestion or _next_step(error))
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _next_step(error: HoldfastError) -> str:
    if error.message.endswith("?"):  # a suggestion
        return ""
    step = _NEXT_STEPS.get(type(error)) or _NEXT_STEPS_OF_REASONS.get(getattr(error, "reason", ""), "")
    return step and f"; {step}"
