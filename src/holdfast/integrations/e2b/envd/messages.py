"""The request messages of envd's services `process.Process` and `filesystem.Filesystem`, as JSON; pure."""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.integrations.e2b.problems import invalid

SIGNALS: Final = {"SIGNAL_SIGTERM": "TERM", "SIGNAL_SIGKILL": "KILL", "15": "TERM", "9": "KILL"}
#: Rows and columns of a terminal; the kernel has 16 bits for each.
MAX_SIDE: Final = 65_535


class Message(msgspec.Struct, frozen=True, rename="camel"):
    """Base of all messages. Fields that are not known are ignored."""


class Selector(Message, frozen=True):
    pid: int | None = None
    tag: str | None = None

    def check(self) -> Selector:
        if (self.pid is None) == (self.tag is None):
            raise invalid("process: give a pid or a tag")
        return self


class Size(Message, frozen=True):
    cols: int = 0
    rows: int = 0


class Pty(Message, frozen=True):
    size: Size | None = None

    def checked_size(self) -> Size:
        size = self.size or Size()
        if not (0 <= size.cols <= MAX_SIDE and 0 <= size.rows <= MAX_SIDE):
            raise invalid(f"pty.size: rows and columns are 0 to {MAX_SIDE}")
        # A terminal of size 0 is one without a size yet.
        return size if size.cols and size.rows else Size(80, 24)


class ProcessConfig(Message, frozen=True):
    cmd: str = ""
    args: tuple[str, ...] = ()
    envs: dict[str, str] | None = None
    cwd: str | None = None


class StartRequest(Message, frozen=True):
    process: ProcessConfig | None = None
    pty: Pty | None = None
    tag: str | None = None
    #: Clients that do not send it expect an open stdin.
    stdin: bool | None = None


class ProcessRequest(Message, frozen=True):
    """Of `Connect` and `CloseStdin`."""

    process: Selector | None = None

    def selector(self) -> Selector:
        return (self.process or Selector()).check()


class UpdateRequest(ProcessRequest, frozen=True):
    pty: Pty | None = None


class Input(Message, frozen=True):
    stdin: bytes | None = None
    pty: bytes | None = None

    @property
    def data(self) -> bytes:
        return self.stdin if self.stdin is not None else self.pty or b""


class SendInputRequest(ProcessRequest, frozen=True):
    input: Input | None = None


class SendSignalRequest(ProcessRequest, frozen=True):
    signal: str | int = ""

    def name(self) -> str:
        name = SIGNALS.get(str(self.signal))
        if name is None:
            raise invalid(f"signal: {str(self.signal)[:40]!r} is not one of SIGNAL_SIGTERM, SIGNAL_SIGKILL")
        return name


class StreamInputData(Message, frozen=True):
    input: Input | None = None


class StreamInputRequest(Message, frozen=True):
    start: ProcessRequest | None = None
    data: StreamInputData | None = None


class PathRequest(Message, frozen=True):
    """Of `Stat`, `MakeDir` and `Remove`."""

    path: str = ""


class ListDirRequest(PathRequest, frozen=True):
    depth: int = 0


class MoveRequest(Message, frozen=True):
    source: str = ""
    destination: str = ""


class WatchRequest(PathRequest, frozen=True):
    """Of `WatchDir` and `CreateWatcher`."""

    recursive: bool = False
    include_entry: bool = False
    allow_network_mounts: bool = False


class WatcherRequest(Message, frozen=True):
    watcher_id: str = ""
