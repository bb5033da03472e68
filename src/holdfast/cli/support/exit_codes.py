"""The exit codes of the verbs; pure.

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
    HoldfastError,
    NotExecutable,
    TimeoutError,
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


def exit_code_of(error: Exception, *, ours: int) -> int:
    """Return the exit code for an error; `ours` is the verb's code for errors that are not the command's."""
    if isinstance(error, CommandNotFound):
        return NOT_FOUND
    if isinstance(error, NotExecutable):
        return NOT_EXECUTABLE
    if isinstance(error, TimeoutError):
        return TIMED_OUT
    return ours


def describe(error: Exception) -> str:
    """Return an error as one line."""
    if isinstance(error, HoldfastError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
