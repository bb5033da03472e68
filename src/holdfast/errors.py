"""Every error that holdfast raises, one tree, drawn here; pure, imports nothing of ours.

    HoldfastError
    ├── CallerError                the request was wrong; sending it again will not help
    │   ├── ParseError             -32700  not JSON, not MessagePack
    │   ├── InvalidRequest         -32600  not a JSON-RPC message, or out of order
    │   ├── MethodNotFound         -32601
    │   ├── InvalidParams          -32602  a field is missing, of the wrong type or out of range
    │   ├── MessageTooLarge        -32001
    │   ├── UnknownProcess         -32002
    │   ├── DuplicateProcess       -32003
    │   ├── StdinClosed            -32013
    │   ├── NotATerminal           -32005
    │   ├── UnknownSignal          -32006
    │   ├── Forbidden              -32007  switched off by the server's settings
    │   ├── Unauthorized           -32008  no token, a wrong one, or another user
    │   ├── UnknownShell           -32009
    │   ├── ShellClosed            -32010  the shell has ended; the message says why
    │   ├── UnknownTerminal        -32011
    │   ├── TerminalClosed         -32012  what ran in it has ended; the message says how
    │   └── UnknownService         -32014  the host offers none with this name and instance, or no longer
    ├── SandboxError               the place where commands run could not do it
    │   ├── InternalError          -32603  a bug of ours
    │   ├── CwdNotFound            -32020
    │   ├── UnknownUser            -32021
    │   ├── PermissionRefused      -32022  also Python's PermissionError
    │   ├── LimitReached           -32023  a limit of ours, named with its setting
    │   ├── ResourceExhausted      -32024  the machine has no more descriptors, pids, PTYs, room ...
    │   ├── ShuttingDown           -32025
    │   ├── FileError              -32026  a file could not be worked on; also Python's OSError
    │   │   ├── FileNotFound       -32004  also Python's FileNotFoundError
    │   │   ├── FileExists         -32027  also Python's FileExistsError
    │   │   ├── NotADirectory      -32028  also Python's NotADirectoryError
    │   │   └── IsADirectory       -32029  also Python's IsADirectoryError
    │   ├── SandboxGone            -32030  the container, pod or host is not there, or has ended
    │   └── HelperFailed           -32031  a process of ours that works for the server could not start, or ended
    ├── ProcessError               the command itself
    │   ├── CommandNotFound        -32040  also Python's FileNotFoundError; exit code 127 on the command line
    │   ├── NotExecutable          -32041  also Python's PermissionError; exit code 126
    │   └── TimeoutError           -32042  also Python's TimeoutError; exit code 124
    └── TransportError             the way between caller and sandbox
        ├── ConnectionLost         -32060
        └── HandshakeFailed        -32061

Each class says whose fault it was (`fault`) and carries its wire code (`code`), so an error that crosses a
connection arrives as the class that left.
"""

from __future__ import annotations

import builtins
import errno
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

Fault = Literal["caller", "sandbox", "process", "transport"]

#: Exit codes with the meaning that they have in `timeout`, `env` and shells.
EXIT_TIMED_OUT: Final = 124
EXIT_NOT_EXECUTABLE: Final = 126
EXIT_NOT_FOUND: Final = 127
EXIT_INTERRUPTED: Final = 130


class HoldfastError(Exception):
    """The root. `message` names the offending thing; `details` holds what a program may want to know."""

    code: ClassVar[int] = -32603
    fault: ClassVar[Fault] = "sandbox"

    def __init__(self, message: str, /, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = details


class CallerError(HoldfastError):
    """The request was wrong."""

    fault = "caller"
    code = -32600


class ParseError(CallerError):
    """The bytes are neither JSON nor MessagePack."""

    code = -32700


class InvalidRequest(CallerError):
    """A message that is not a request, or a request that comes out of order."""

    code = -32600


class MethodNotFound(CallerError):
    """No such method."""

    code = -32601


class InvalidParams(CallerError):
    """A parameter is missing, of the wrong type, or out of range."""

    code = -32602


class MessageTooLarge(CallerError):
    """A message over the size limit."""

    code = -32001


class UnknownProcess(CallerError):
    """No process has this id: it never started, or it ended and was forgotten."""

    code = -32002


class DuplicateProcess(CallerError):
    """The id is taken."""

    code = -32003


class StdinClosed(CallerError):
    """Input was sent to a process that takes none, or takes no more."""

    code = -32013


class NotATerminal(CallerError):
    """A terminal operation on a process that runs on pipes."""

    code = -32005


class UnknownSignal(CallerError):
    """No signal has this name."""

    code = -32006


class Forbidden(CallerError):
    """The server's settings refuse this."""

    code = -32007


class Unauthorized(CallerError):
    """No token, a wrong token, or a peer of another user."""

    code = -32008


class UnknownShell(CallerError):
    """No shell has this id."""

    code = -32009


class ShellClosed(CallerError):
    """The shell has ended and runs nothing any more; the message says why."""

    code = -32010


class UnknownTerminal(CallerError):
    """No terminal has this id."""

    code = -32011


class TerminalClosed(CallerError):
    """What runs in the terminal has ended: it takes nothing any more."""

    code = -32012


class UnknownService(CallerError):
    """The host offers no service with this name and instance, or does so no longer."""

    code = -32014


class SandboxError(HoldfastError):
    """The place where commands run could not do it."""

    fault = "sandbox"


class InternalError(SandboxError):
    """A bug of ours; the server's log has the traceback."""

    code = -32603


class CwdNotFound(SandboxError):
    """The working directory does not exist or cannot be entered."""

    code = -32020


class UnknownUser(SandboxError):
    """The sandbox has no such user."""

    code = -32021


class PermissionRefused(SandboxError, builtins.PermissionError):
    """The operating system said no."""

    code = -32022


class LimitReached(SandboxError):
    """One of our limits; the message names its setting."""

    code = -32023


class ResourceExhausted(SandboxError):
    """The machine ran out of descriptors, pids, PTYs, memory or disk."""

    code = -32024


class ShuttingDown(SandboxError):
    """The server is on its way out and starts nothing new."""

    code = -32025


class FileError(SandboxError, OSError):
    """A file of the sandbox could not be worked on; the message names it and says why."""

    code = -32026

    def __init__(self, message: str, /, **details: Any) -> None:
        super().__init__(message, **details)
        # Not `filename` as well: Python would then print that in place of the message.
        number = details.get("errno")
        self.errno = number if isinstance(number, int) else None


class FileNotFound(FileError, builtins.FileNotFoundError):
    """No file has this name. The code is the one by which the Codex client knows it."""

    code = -32004


class FileExists(FileError, builtins.FileExistsError):
    """Something has this name already."""

    code = -32027


class NotADirectory(FileError, builtins.NotADirectoryError):
    """A directory was wanted, or stands in the path, and it is something else."""

    code = -32028


class IsADirectory(FileError, builtins.IsADirectoryError):
    """Something other than a directory was wanted."""

    code = -32029


class SandboxGone(SandboxError):
    """The container, pod, jail or host is not there, or has ended, and all that ran in it."""

    code = -32030


class HelperFailed(SandboxError):
    """A process that the server starts to do a part of its work could not be started, or ended before its reply.

    The message names what failed. The path or command of the caller had no part in it.
    """

    code = -32031


class ProcessError(HoldfastError):
    """The command itself failed to start or to end in time."""

    fault = "process"
    code = -32043


class CommandNotFound(ProcessError, builtins.FileNotFoundError):
    """The program is not there: `subprocess` raises `FileNotFoundError` then."""

    code = -32040
    errno = errno.ENOENT


class NotExecutable(ProcessError, builtins.PermissionError):
    """The program is there and cannot be executed: `subprocess` raises `PermissionError` then."""

    code = -32041
    errno = errno.EACCES


class TimeoutError(ProcessError, builtins.TimeoutError):
    """The command ran longer than it was given; its tree was killed.

    `stdout` and `stderr` hold what it had printed by then.
    """

    code = -32042

    def __init__(self, message: str, /, *, stdout: str = "", stderr: str = "", **details: Any) -> None:
        printed = {name: text for name, text in (("stdout", stdout), ("stderr", stderr)) if text}
        super().__init__(message, **printed, **details)
        self.stdout = stdout
        self.stderr = stderr


class TransportError(HoldfastError):
    """The way between the caller and the sandbox."""

    fault = "transport"
    code = -32062


class ConnectionLost(TransportError):
    """The connection broke and did not come back in time."""

    code = -32060


class HandshakeFailed(TransportError):
    """The other side does not speak our protocol, or refused us."""

    code = -32061


_ROOTS: Final[Mapping[str, type[HoldfastError]]] = {
    "": HoldfastError,
    "caller": CallerError,
    "sandbox": SandboxError,
    "process": ProcessError,
    "transport": TransportError,
}


_OF_FILES: Final[Mapping[int, type[HoldfastError]]] = {
    errno.ENOENT: FileNotFound,
    errno.EEXIST: FileExists,
    errno.ENOTDIR: NotADirectory,
    errno.EISDIR: IsADirectory,
    errno.EACCES: PermissionRefused,
    errno.EPERM: PermissionRefused,
    errno.ENOSPC: ResourceExhausted,
    errno.EDQUOT: ResourceExhausted,
    errno.EMFILE: ResourceExhausted,
    errno.ENFILE: ResourceExhausted,
    errno.ENOMEM: ResourceExhausted,
}


def file_error(number: int, message: str) -> HoldfastError:
    """The error for what the system said of a file."""
    return _OF_FILES.get(number, FileError)(message, errno=number)


def error_classes() -> dict[int, type[HoldfastError]]:
    """The class for each wire code: the one table from which codes are decoded and documented."""
    table: dict[int, type[HoldfastError]] = {}
    pending: list[type[HoldfastError]] = [HoldfastError]
    while pending:
        cls = pending.pop()
        pending.extend(cls.__subclasses__())
        # A class without a code of its own, a user's subclass say, crosses a connection as the class above it.
        if "code" in vars(cls) and cls not in _ROOTS.values():
            table[cls.code] = cls
    return table


def error_from_wire(code: int, message: str, data: object = None) -> HoldfastError:
    """The error that the other side raised, as our own class; an unknown code becomes its nearest root."""
    cls = error_classes().get(code)
    details = {k: v for k, v in data.items() if isinstance(k, str)} if isinstance(data, dict) else {}
    fault = details.pop("fault", "")
    if cls is None:
        root = _ROOTS.get(fault, HoldfastError) if isinstance(fault, str) else HoldfastError
        return root(message, **{**details, "code": code})
    return cls(message, **details)
