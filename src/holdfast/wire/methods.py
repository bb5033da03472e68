"""The method table: each method and notification with the types of its parameters and result; pure.

The server's dispatch, the client and the test of `docs/protocol.md` use these rows.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

from holdfast.types import (
    DirPage,
    EndedProcesses,
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
    WatchRead,
)
from holdfast.wire import codex_messages as c, file_messages as f, messages as m, stream_messages as s

P = TypeVar("P")
R = TypeVar("R")

#: Incremented when a change breaks older peers; part of the reply to `initialize`.
PROTOCOL_VERSION: Final = 1


class WireMethod(Generic[P, R]):
    """One request: its name on the wire and the types of its parameters and result."""

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


INITIALIZE = WireMethod("initialize", m.InitializeParams, m.InitializeResult)
PING = WireMethod("ping", m.Empty, m.Empty)
ENVIRONMENT_INFO = WireMethod("environment/info", m.Empty, EnvironmentInfo)
ENVIRONMENT_STATUS = WireMethod("environment/status", m.Empty, ServerStatus)
SERVER_SHUTDOWN = WireMethod("server/shutdown", m.ShutdownParams, m.Empty)

PROCESS_START = WireMethod("process/start", m.StartParams, m.StartResult)
PROCESS_READ = WireMethod("process/read", m.ReadParams, ReadResult)
PROCESS_WRITE = WireMethod("process/write", m.WriteParams, m.WriteResult)
PROCESS_CLOSE_STDIN = WireMethod("process/closeStdin", m.ProcessParams, m.Empty)
PROCESS_RESIZE = WireMethod("process/resize", m.ResizeParams, m.Empty)
PROCESS_SIGNAL = WireMethod("process/signal", m.SignalParams, m.Empty)
PROCESS_TERMINATE = WireMethod("process/terminate", m.TerminateParams, m.TerminateResult)
PROCESS_WAIT = WireMethod("process/wait", m.WaitParams, m.WaitResult)
PROCESS_ENDED = WireMethod("process/ended", m.EndedParams, EndedProcesses)
PROCESS_SNAPSHOT = WireMethod("process/snapshot", m.ProcessParams, Snapshot)
PROCESS_DESCRIBE = WireMethod("process/describe", m.ProcessParams, ProcessInfo)
PROCESS_LIST = WireMethod("process/list", m.Empty, m.ListResult)
PROCESS_USAGE = WireMethod("process/usage", m.UsageParams, UsageSample)
PROCESS_FORGET = WireMethod("process/forget", m.ProcessParams, m.Empty)
PROCESS_SUBSCRIBE = WireMethod("process/subscribe", m.SubscribeParams, m.Empty)
PROCESS_UNSUBSCRIBE = WireMethod("process/unsubscribe", m.UnsubscribeParams, m.Empty)
PORT_WAIT = WireMethod("port/wait", m.WaitForPortParams, m.Empty)

SHELL_OPEN = WireMethod("shell/open", ShellSpec, ShellStatus)
SHELL_RUN = WireMethod("shell/run", m.ShellRunParams, m.ShellRunResult)
SHELL_START = WireMethod("shell/start", m.ShellStartParams, ProcessInfo)
SHELL_INTERRUPT = WireMethod("shell/interrupt", m.ShellInterruptParams, m.ShellInterruptResult)
SHELL_CLOSE = WireMethod("shell/close", m.ShellCloseParams, m.Empty)
SHELL_DESCRIBE = WireMethod("shell/describe", m.ShellParams, ShellStatus)
SHELL_LIST = WireMethod("shell/list", m.Empty, m.ShellListResult)

TERMINAL_OPEN = WireMethod("terminal/open", TerminalSpec, TerminalStatus)
TERMINAL_READ = WireMethod("terminal/read", m.TerminalReadParams, TerminalRead)
TERMINAL_RUN = WireMethod("terminal/run", m.TerminalRunParams, TerminalCommandEnded)
TERMINAL_WITHDRAW = WireMethod("terminal/withdraw", m.TerminalWithdrawParams, m.Empty)
TERMINAL_KEYS = WireMethod("terminal/keys", m.TerminalKeysParams, m.Empty)
TERMINAL_WAIT = WireMethod("terminal/wait", m.TerminalWaitParams, m.TerminalWaitResult)
TERMINAL_CLOSE = WireMethod("terminal/close", m.TerminalCloseParams, TerminalStatus)
TERMINAL_DESCRIBE = WireMethod("terminal/describe", m.TerminalParams, TerminalStatus)
TERMINAL_LIST = WireMethod("terminal/list", m.Empty, m.TerminalListResult)

FILE_READ = WireMethod("file/read", f.FileReadParams, FilePiece)
FILE_WRITE = WireMethod("file/write", f.FileWriteParams, f.FileWriteResult)
FILE_COMMIT = WireMethod("file/commit", f.FileCommitParams, FileInfo)
FILE_ABANDON = WireMethod("file/abandon", f.FileAbandonParams, m.Empty)
FILE_STAT = WireMethod("file/stat", f.FileStatParams, FileInfo)
FILE_LIST = WireMethod("file/list", f.FileListParams, DirPage)
FILE_MAKE_DIR = WireMethod("file/makeDir", f.FileMakeDirParams, m.Empty)
FILE_REMOVE = WireMethod("file/remove", f.FileRemoveParams, m.Empty)
FILE_MOVE = WireMethod("file/move", f.FileMoveParams, m.Empty)
FILE_COPY = WireMethod("file/copy", f.FileCopyParams, m.Empty)
FILE_MAKE_LINK = WireMethod("file/makeLink", f.FileMakeLinkParams, m.Empty)
FILE_SET_ATTRIBUTES = WireMethod("file/setAttributes", f.FileSetAttributesParams, m.Empty)
FILE_REAL_PATH = WireMethod("file/realPath", f.FileRealPathParams, f.FileRealPathResult)
FILE_WATCH = WireMethod("file/watch", f.FileWatchParams, m.Empty)
FILE_READ_WATCH = WireMethod("file/readWatch", f.FileReadWatchParams, WatchRead)
FILE_UNWATCH = WireMethod("file/unwatch", f.FileUnwatchParams, m.Empty)

FS_READ_FILE = WireMethod("fs/readFile", f.FsPathParams, f.FsReadFileResult)
FS_WRITE_FILE = WireMethod("fs/writeFile", f.FsWriteFileParams, m.Empty)
FS_CREATE_DIRECTORY = WireMethod("fs/createDirectory", f.FsCreateDirectoryParams, m.Empty)
FS_GET_METADATA = WireMethod("fs/getMetadata", f.FsPathParams, f.FsMetadata)
FS_CANONICALIZE = WireMethod("fs/canonicalize", f.FsPathParams, f.FileRealPathResult)
FS_READ_DIRECTORY = WireMethod("fs/readDirectory", f.FsPathParams, f.FsReadDirectoryResult)
FS_REMOVE = WireMethod("fs/remove", f.FsRemoveParams, m.Empty)
FS_COPY = WireMethod("fs/copy", f.FsCopyParams, m.Empty)
FS_OPEN = WireMethod("fs/open", f.FsOpenParams, f.FsHandle)
FS_READ_BLOCK = WireMethod("fs/readBlock", f.FsReadBlockParams, f.FsBlock)
FS_CLOSE = WireMethod("fs/close", f.FsHandle, m.Empty)
FS_WRITE_BLOCK = WireMethod("fs/writeBlock", f.FsWriteBlockParams, m.Empty)
FS_WALK = WireMethod("fs/walk", f.FsWalkParams, f.FsWalkResult)
FS_WATCH_MISSING = WireMethod("fs/watchMissing", f.FsWatchMissingParams, f.FsWatchMissingResult)

ENVIRONMENT_CONFIG_READ = WireMethod("environmentConfig/read", c.EnvironmentConfigReadParams, c.EnvironmentConfig)
CAPABILITY_ROOTS = WireMethod("capabilityRoots/discoverV1", c.CapabilityRootsParams, c.CapabilityRootsResult)
CAPABILITIES = WireMethod("capabilities/discoverV2", c.CapabilitiesParams, c.CapabilitiesResult)
HTTP_REQUEST = WireMethod("http/request", c.HttpRequestParams, c.HttpRequestResult)

HOST_OFFER = WireMethod("service/offer", m.HostOfferParams, m.HostOfferResult)
HOST_ANSWER = WireMethod("service/answer", m.HostAnswerParams, m.HostAnswerResult)
HOST_WITHDRAW = WireMethod("service/withdraw", m.HostWithdrawParams, m.Empty)
HOST_CALL = WireMethod("service/call", m.HostCallParams, m.HostAnswerPieces)
HOST_RECEIVE = WireMethod("service/receive", m.HostReceiveParams, m.HostAnswerPieces)
HOST_CANCEL = WireMethod("service/cancel", m.HostCancelParams, m.Empty)

STREAM_OPEN = WireMethod("stream/open", s.StreamOpenParams, s.StreamOpenResult)
STREAM_DIAL = WireMethod("stream/dial", s.StreamDialParams, m.Empty)
STREAM_LISTEN = WireMethod("stream/listen", s.StreamListenParams, s.StreamListenResult)
STREAM_UNLISTEN = WireMethod("stream/unlisten", s.StreamUnlistenParams, m.Empty)

EXEC_REMOTE_START = WireMethod("exec_remote_start", m.ExecRemoteStartParams, m.ExecRemoteStartResult)
EXEC_REMOTE_POLL = WireMethod("exec_remote_poll", m.ExecRemotePollParams, m.ExecRemotePollResult)
EXEC_REMOTE_KILL = WireMethod("exec_remote_kill", m.ExecRemotePidParams, m.ExecRemoteDone)
EXEC_REMOTE_WRITE_STDIN = WireMethod("exec_remote_write_stdin", m.ExecRemoteWriteParams, m.ExecRemoteDone)
EXEC_REMOTE_CLOSE_STDIN = WireMethod("exec_remote_close_stdin", m.ExecRemotePidParams, m.ExecRemoteDone)

INITIALIZED = Notification("initialized", m.Empty, sender="client")
REQUEST_CANCEL = Notification("request/cancel", m.CancelParams, sender="client")
PROCESS_CREDIT = Notification("process/credit", m.CreditParams, sender="client")
PROCESS_OUTPUT = Notification("process/output", m.OutputParams, sender="server")
PROCESS_EXITED = Notification("process/exited", m.ExitedParams, sender="server")
PROCESS_CLOSED = Notification("process/closed", m.ClosedParams, sender="server")
HTTP_REQUEST_BODY_DELTA = Notification("http/request/bodyDelta", c.HttpBodyDelta, sender="server")
STREAM_ACCEPTED = Notification("stream/accepted", s.StreamAcceptedParams, sender="server")
STREAM_DATA = Notification("stream/data", s.StreamDataParams, sender="both")
STREAM_CREDIT = Notification("stream/credit", s.StreamCreditParams, sender="both")
STREAM_ENDED = Notification("stream/ended", s.StreamEndedParams, sender="both")
STREAM_RESET = Notification("stream/reset", s.StreamResetParams, sender="both")


def methods() -> dict[str, WireMethod[object, object]]:
    """Every method by its wire name."""
    return {v.name: v for v in globals().values() if isinstance(v, WireMethod)}


def notifications() -> dict[str, Notification[object]]:
    """Every notification by its wire name."""
    return {v.name: v for v in globals().values() if isinstance(v, Notification)}
