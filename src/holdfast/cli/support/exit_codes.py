"""Which exit code tells what, in one place; pure.

The numbers are those of `timeout`, `env` and every shell, so that scripts need not learn new ones.
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
#: Holdfast itself or the way to the sandbox failed, where the exit code is otherwise the command's.
OURS: Final = 125
NOT_EXECUTABLE: Final = EXIT_NOT_EXECUTABLE
NOT_FOUND: Final = EXIT_NOT_FOUND
INTERRUPTED: Final = EXIT_INTERRUPTED
KILLED: Final = 137
BROKEN_PIPE: Final = 141


def exit_code_of(error: Exception, *, ours: int) -> int:
    """The exit code for an error; `ours` is the verb's own code for everything that is not the command's fault."""
    if isinstance(error, CommandNotFound):
        return NOT_FOUND
    if isinstance(error, NotExecutable):
        return NOT_EXECUTABLE
    if isinstance(error, TimeoutError):
        return TIMED_OUT
    return ours


def describe(error: Exception) -> str:
    """An error as one line that names the offending thing."""
    if isinstance(error, HoldfastError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
