"""The method table: every method and notification, its parameters and its result, once; pure.

Dispatch, the client and the test of `docs/protocol.md` all come from these rows.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

from holdfast.types import (
    EnvironmentInfo,
    FileInfo,
    FilePiece,
    ProcessInfo,
    ReadResult,
    ServerStatus,
    ShellSpec,
    ShellStatus,
    Snapshot,
    TerminalCommandEnded,
    TerminalRead,
    TerminalSpec,
    TerminalStatus,
    UsageSample,
)
from holdfast.wire import file_messages as f, messages as m

P = TypeVar("P")
R = TypeVar("R")

#: Raised when a change breaks older peers; `initialize` tells it.
PROTOCOL_VERSION: Final = 1


class Method(Generic[P, R]):
    """One request: its name on the wire and the types of its two halves."""

    __slots__ = ("name", "params", "result")

    def __init__(self, name: str, params: type[P], result: type[R]) -> None:
        self.name = name
        self.params = params
        self.result = result


class Notification(Generic[P]):
    """One message without a reply."""

    __slots__ = ("name", "params", "sender")

    def __init__(self, name: str, params: type[P], sender: str) -> None:
        self.name = name
        self.params = params
        self.sender = sender


INITIALIZE = Method("initialize", m.InitializeParams, m.InitializeResult)
PING = Method("ping", m.Empty, m.Empty)
ENVIRONMENT_INFO = Method("environment/info", m.Empty, EnvironmentInfo)
ENVIRONMENT_STATUS = Method("environment/status", m.Empty, ServerStatus)
SERVER_SHUTDOWN = Method("server/shutdown", m.ShutdownParams, m.Empty)

PROCESS_START = Method("process/start", m.StartParams, m.StartResult)
PROCESS_READ = Method("process/read", m.ReadParams, ReadResult)
PROCESS_WRITE = Method("process/write", m.WriteParams, m.WriteResult)
PROCESS_CLOSE_STDIN = Method("process/closeStdin", m.ProcessParams, m.Empty)
PROCESS_RESIZE = Method("process/resize", m.ResizeParams, m.Empty)
PROCESS_SIGNAL = Method("process/signal", m.SignalParams, m.Empty)
PROCESS_TERMINATE = Method("process/terminate", m.TerminateParams, m.TerminateResult)
PROCESS_WAIT = Method("process/wait", m.WaitParams, m.WaitResult)
PROCESS_SNAPSHOT = Method("process/snapshot", m.ProcessParams, Snapshot)
PROCESS_DESCRIBE = Method("process/describe", m.ProcessParams, ProcessInfo)
PROCESS_LIST = Method("process/list", m.Empty, m.ListResult)
PROCESS_USAGE = Method("process/usage", m.UsageParams, UsageSample)
PROCESS_FORGET = Method("process/forget", m.ProcessParams, m.Empty)
PROCESS_SUBSCRIBE = Method("process/subscribe", m.SubscribeParams, m.Empty)
PROCESS_UNSUBSCRIBE = Method("process/unsubscribe", m.UnsubscribeParams, m.Empty)
PORT_WAIT = Method("port/wait", m.WaitForPortParams, m.Empty)

SHELL_OPEN = Method("shell/open", ShellSpec, ShellStatus)
SHELL_RUN = Method("shell/run", m.ShellRunParams, m.ShellRunResult)
SHELL_START = Method("shell/start", m.ShellStartParams, ProcessInfo)
SHELL_INTERRUPT = Method("shell/interrupt", m.ShellInterruptParams, m.ShellInterruptResult)
SHELL_CLOSE = Method("shell/close", m.ShellCloseParams, m.Empty)
SHELL_DESCRIBE = Method("shell/describe", m.ShellParams, ShellStatus)
SHELL_LIST = Method("shell/list", m.Empty, m.ShellListResult)

TERMINAL_OPEN = Method("terminal/open", TerminalSpec, TerminalStatus)
TERMINAL_READ = Method("terminal/read", m.TerminalReadParams, TerminalRead)
TERMINAL_RUN = Method("terminal/run", m.TerminalRunParams, TerminalCommandEnded)
TERMINAL_WITHDRAW = Method("terminal/withdraw", m.TerminalWithdrawParams, m.Empty)
TERMINAL_KEYS = Method("terminal/keys", m.TerminalKeysParams, m.Empty)
TERMINAL_WAIT = Method("terminal/wait", m.TerminalWaitParams, m.TerminalWaitResult)
TERMINAL_CLOSE = Method("terminal/close", m.TerminalCloseParams, TerminalStatus)
TERMINAL_DESCRIBE = Method("terminal/describe", m.TerminalParams, TerminalStatus)
TERMINAL_LIST = Method("terminal/list", m.Empty, m.TerminalListResult)

FILE_READ = Method("file/read", f.FileReadParams, FilePiece)
FILE_WRITE = Method("file/write", f.FileWriteParams, f.FileWriteResult)
FILE_COMMIT = Method("file/commit", f.FileCommitParams, FileInfo)
FILE_ABANDON = Method("file/abandon", f.FileAbandonParams, m.Empty)
FILE_STAT = Method("file/stat", f.FileStatParams, FileInfo)
FILE_LIST = Method("file/list", f.FileListParams, f.FileListResult)
FILE_MAKE_DIR = Method("file/makeDir", f.FileMakeDirParams, m.Empty)
FILE_REMOVE = Method("file/remove", f.FileRemoveParams, m.Empty)
FILE_MOVE = Method("file/move", f.FileMoveParams, m.Empty)
FILE_COPY = Method("file/copy", f.FileCopyParams, m.Empty)
FILE_MAKE_LINK = Method("file/makeLink", f.FileMakeLinkParams, m.Empty)
FILE_SET_ATTRIBUTES = Method("file/setAttributes", f.FileSetAttributesParams, m.Empty)
FILE_REAL_PATH = Method("file/realPath", f.FileRealPathParams, f.FileRealPathResult)

FS_READ_FILE = Method("fs/readFile", f.FsPathParams, f.FsReadFileResult)
FS_WRITE_FILE = Method("fs/writeFile", f.FsWriteFileParams, m.Empty)
FS_CREATE_DIRECTORY = Method("fs/createDirectory", f.FsCreateDirectoryParams, m.Empty)
FS_GET_METADATA = Method("fs/getMetadata", f.FsPathParams, f.FsMetadata)
FS_CANONICALIZE = Method("fs/canonicalize", f.FsPathParams, f.FileRealPathResult)
FS_READ_DIRECTORY = Method("fs/readDirectory", f.FsPathParams, f.FsReadDirectoryResult)
FS_REMOVE = Method("fs/remove", f.FsRemoveParams, m.Empty)
FS_COPY = Method("fs/copy", f.FsCopyParams, m.Empty)
FS_OPEN = Method("fs/open", f.FsOpenParams, f.FsHandle)
FS_READ_BLOCK = Method("fs/readBlock", f.FsReadBlockParams, f.FsBlock)
FS_CLOSE = Method("fs/close", f.FsHandle, m.Empty)

SERVICE_OFFER = Method("service/offer", m.ServiceOfferParams, m.ServiceOfferResult)
SERVICE_ANSWER = Method("service/answer", m.ServiceAnswerParams, m.ServiceAnswerResult)
SERVICE_WITHDRAW = Method("service/withdraw", m.ServiceWithdrawParams, m.Empty)
SERVICE_CALL = Method("service/call", m.ServiceCallParams, m.ServicePieces)
SERVICE_RECEIVE = Method("service/receive", m.ServiceReceiveParams, m.ServicePieces)
SERVICE_CANCEL = Method("service/cancel", m.ServiceCancelParams, m.Empty)

EXEC_REMOTE_START = Method("exec_remote_start", m.ExecRemoteStartParams, m.ExecRemoteStartResult)
EXEC_REMOTE_POLL = Method("exec_remote_poll", m.ExecRemotePollParams, m.ExecRemotePollResult)
EXEC_REMOTE_KILL = Method("exec_remote_kill", m.ExecRemotePidParams, m.ExecRemoteDone)
EXEC_REMOTE_WRITE_STDIN = Method("exec_remote_write_stdin", m.ExecRemoteWriteParams, m.ExecRemoteDone)
EXEC_REMOTE_CLOSE_STDIN = Method("exec_remote_close_stdin", m.ExecRemotePidParams, m.ExecRemoteDone)

INITIALIZED = Notification("initialized", m.Empty, sender="client")
REQUEST_CANCEL = Notification("request/cancel", m.CancelParams, sender="client")
PROCESS_CREDIT = Notification("process/credit", m.CreditParams, sender="client")
PROCESS_OUTPUT = Notification("process/output", m.OutputParams, sender="server")
PROCESS_EXITED = Notification("process/exited", m.ExitedParams, sender="server")
PROCESS_CLOSED = Notification("process/closed", m.ClosedParams, sender="server")


def methods() -> dict[str, Method[object, object]]:
    """Every method by its wire name."""
    return {v.name: v for v in globals().values() if isinstance(v, Method)}


def notifications() -> dict[str, Notification[object]]:
    """Every notification by its wire name."""
    return {v.name: v for v in globals().values() if isinstance(v, Notification)}
