"""Every error that holdfast raises, as one tree; pure, imports no other module of holdfast.

    HoldfastError
    ├── CallerError                the request was wrong; repeating it will not help
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
    │   ├── ShellClosed            -32010  the shell has ended; the message has the reason
    │   ├── UnknownTerminal        -32011
    │   ├── TerminalClosed         -32012  its program has ended; the message has the reason
    │   ├── UnknownService         -32014  the host offers no service with this name and instance
    │   ├── EditConflict           -32015  a file does not have the content that an edit or a patch expects
    │   └── UnknownWatch           -32016  no watched directory has this id; it was not read for too long
    ├── SandboxError               the sandbox could not do it
    │   ├── InternalError          -32603  a bug of holdfast
    │   ├── CwdNotFound            -32020
    │   ├── UnknownUser            -32021
    │   ├── PermissionRefused      -32022  also Python's PermissionError
    │   ├── LimitReached           -32023  a limit of holdfast, named with its setting
    │   ├── ResourceExhausted      -32024  the machine has no more descriptors, pids, PTYs, room ...
    │   ├── ShuttingDown           -32025
    │   ├── FileError              -32026  a file operation failed; also Python's OSError
    │   │   ├── FileNotFound       -32004  also Python's FileNotFoundError
    │   │   ├── FileExists         -32027  also Python's FileExistsError
    │   │   ├── NotADirectory      -32028  also Python's NotADirectoryError
    │   │   └── IsADirectory       -32029  also Python's IsADirectoryError
    │   ├── SandboxGone            -32030  the container, pod or host does not exist, or has ended
    │   ├── HelperFailed           -32031  a helper process of the server could not start, or ended
    │   └── PortUnavailable        -32032  a port or socket without a listener, or in use already
    ├── ProcessError               the command itself
    │   ├── CommandNotFound        -32040  also Python's FileNotFoundError; exit code 127 on the command line
    │   ├── NotExecutable          -32041  also Python's PermissionError; exit code 126
    │   ├── TimeoutError           -32042  also Python's TimeoutError; exit code 124
    │   │   └── SilenceTimeout     -32045  it printed nothing for so long
    │   └── CommandFailed          -32044  a checked command ended with a non-zero exit code
    └── TransportError             the connection between caller and sandbox
        ├── ConnectionLost         -32060
        └── HandshakeFailed        -32061

Each class has the side at fault (`fault`) and its wire code (`code`), so that an error that crosses a connection
arrives as the same class.
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
    """The root. `message` names the offending thing; `details` has values for programs."""

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
    """No process has this id: it was never started, or is no longer retained."""

    code = -32002


class DuplicateProcess(CallerError):
    """The id is taken."""

    code = -32003


class StdinClosed(CallerError):
    """Input was sent to a process whose stdin is closed."""

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
    """The shell has ended; the message has the reason."""

    code = -32010


class UnknownTerminal(CallerError):
    """No terminal has this id."""

    code = -32011


class TerminalClosed(CallerError):
    """The terminal's program has ended, so it takes no input."""

    code = -32012


class UnknownService(CallerError):
    """The host offers no service with this name and instance, or no longer does."""

    code = -32014


class EditConflict(CallerError):
    """A file does not have the content that an edit or a patch expects.

    `details` has the `path`, and the number of the `hunk` for a patch.
    """

    code = -32015


class UnknownWatch(CallerError):
    """No watched directory has this id: it was closed, not read for too long, or watched by an earlier server."""

    code = -32016


class SandboxError(HoldfastError):
    """The sandbox could not do it."""

    fault = "sandbox"


class InternalError(SandboxError):
    """A bug of holdfast; the server's log has the traceback."""

    code = -32603


class CwdNotFound(SandboxError):
    """The working directory does not exist or cannot be entered."""

    code = -32020


class UnknownUser(SandboxError):
    """The sandbox has no such user."""

    code = -32021


class PermissionRefused(SandboxError, builtins.PermissionError):
    """The operating system refused it."""

    code = -32022


class LimitReached(SandboxError):
    """A limit of holdfast; the message names its setting."""

    code = -32023


class ResourceExhausted(SandboxError):
    """The machine ran out of descriptors, pids, PTYs, memory or disk."""

    code = -32024


class ShuttingDown(SandboxError):
    """The server is shutting down and starts nothing new."""

    code = -32025


class FileError(SandboxError, OSError):
    """A file operation in the sandbox failed; the message has the path and the reason."""

    code = -32026

    def __init__(self, message: str, /, **details: Any) -> None:
        super().__init__(message, **details)
        # `filename` is not set: Python would print it in place of the message.
        number = details.get("errno")
        self.errno = number if isinstance(number, int) else None


class FileNotFound(FileError, builtins.FileNotFoundError):
    """No file has this name. The Codex client recognizes it by this code."""

    code = -32004


class FileExists(FileError, builtins.FileExistsError):
    """A file of this name exists."""

    code = -32027


class NotADirectory(FileError, builtins.NotADirectoryError):
    """The path, or a part of it, is not a directory."""

    code = -32028


class IsADirectory(FileError, builtins.IsADirectoryError):
    """The path is a directory where a file was expected."""

    code = -32029


class SandboxGone(SandboxError):
    """The container, pod, jail or host does not exist or has ended, with all its processes."""

    code = -32030


class HelperFailed(SandboxError):
    """A helper process of the server could not be started, or ended before its reply.

    The message names the helper. The caller's path or command is not the cause.
    """

    code = -32031


class PortUnavailable(SandboxError):
    """Nothing accepts connections at a port or Unix socket, or another program listens there already."""

    code = -32032


class ProcessError(HoldfastError):
    """The command itself failed to start or to end in time."""

    fault = "process"
    code = -32043


class CommandNotFound(ProcessError, builtins.FileNotFoundError):
    """The program does not exist; `subprocess` raises `FileNotFoundError` for this."""

    code = -32040
    errno = errno.ENOENT


class NotExecutable(ProcessError, builtins.PermissionError):
    """The program exists and cannot be executed; `subprocess` raises `PermissionError` for this."""

    code = -32041
    errno = errno.EACCES


class TimeoutError(ProcessError, builtins.TimeoutError):
    """The command exceeded its timeout; its tree was killed.

    `stdout` and `stderr` have its output up to then.
    """

    code = -32042

    def __init__(self, message: str, /, *, stdout: str = "", stderr: str = "", **details: Any) -> None:
        printed = {name: text for name, text in (("stdout", stdout), ("stderr", stderr)) if text}
        super().__init__(message, **printed, **details)
        self.stdout = stdout
        self.stderr = stderr


class SilenceTimeout(TimeoutError):
    """The command printed nothing for its `silence`; its tree was killed."""

    code = -32045


class CommandFailed(ProcessError):
    """A command of `exec(..., check=True)` ended with a non-zero exit code.

    `result` is its `ExecResult`; `exit_code`, `stdout` and `stderr` are those of the result.
    """

    code = -32044

    def __init__(
        self,
        message: str,
        /,
        *,
        exit_code: int = -1,
        stdout: str = "",
        stderr: str = "",
        result: Any = None,
        **details: Any,
    ) -> None:
        super().__init__(message, **details)
        self.exit_code = exit_code
        self.stdout = stdout
        self.stderr = stderr
        self.result = result


class TransportError(HoldfastError):
    """The connection between the caller and the sandbox failed."""

    fault = "transport"
    code = -32062


class ConnectionLost(TransportError):
    """The connection broke and was not restored in time."""

    code = -32060


class HandshakeFailed(TransportError):
    """The server uses another protocol, or refused the connection."""

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
    """The error class for an errno of a file operation."""
    return _OF_FILES.get(number, FileError)(message, errno=number)


def error_classes() -> dict[int, type[HoldfastError]]:
    """The class for each wire code, for decoding and documentation."""
    table: dict[int, type[HoldfastError]] = {}
    pending: list[type[HoldfastError]] = [HoldfastError]
    while pending:
        cls = pending.pop()
        pending.extend(cls.__subclasses__())
        # A class without its own code, such as a user's subclass, crosses a connection as its base class.
        if "code" in vars(cls) and cls not in _ROOTS.values():
            table[cls.code] = cls
    return table


def error_from_wire(code: int, message: str, data: object = None) -> HoldfastError:
    """The error that the peer raised; an unknown code becomes the root class of its fault."""
    cls = error_classes().get(code)
    details = {k: v for k, v in data.items() if isinstance(k, str)} if isinstance(data, dict) else {}
    fault = details.pop("fault", "")
    if cls is None:
        root = _ROOTS.get(fault, HoldfastError) if isinstance(fault, str) else HoldfastError
        return root(message, **{**details, "code": code})
    return cls(message, **details)
