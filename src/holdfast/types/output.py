"""Output of jobs, their exit status, and the events in a journal; pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.types.base import Struct

Stream = Literal["stdout", "stderr", "pty"]
#: When output exceeds the retained size. `follow`: the process waits for readers that follow it, for a limited time
#: without progress. `drop`: it never waits. `block`: it waits for every attached reader.
Overflow = Literal["follow", "drop", "block"]


class OutputChunk(Struct, frozen=True):
    """Bytes that one stream printed, at their absolute offset in that stream.

    `seq` is the position in the process's sequence of output, exit and close; continue reading after it.
    """

    stream: Stream
    offset: int
    data: bytes = msgspec.field(name="chunk")
    seq: int


class OutputGap(Struct, frozen=True):
    """Bytes of one stream that were printed and are no longer retained."""

    stream: Stream
    offset: int
    length: int


class ExitStatus(Struct, frozen=True):
    """How a process ended. After signal n, `exit_code` is 128 + n, as in a shell, and `signal` is its name."""

    exit_code: int
    signal: str | None = None
    #: The kernel killed it for memory, or a child whose exit code 137 it passed on.
    oom: bool = False
    #: It was killed because it printed nothing for the time that its spec allows.
    silent: bool = False

    @property
    def success(self) -> bool:
        return self.exit_code == 0


class Exited(Struct, frozen=True):
    """The process's leader ended; all output that it printed before has preceded this event."""

    seq: int
    status: ExitStatus


class Closed(Struct, frozen=True):
    """All streams reached end of file; this is the last event."""

    seq: int


#: The events of a process, in order.
ProcessEvent = OutputChunk | OutputGap | Exited | Closed


class OutputTime(Struct, frozen=True):
    """The time at which a stream printed the bytes from an offset on, in seconds since 1970."""

    stream: Stream
    offset: int
    at: float


class ReadResult(Struct, frozen=True):
    """Output and state of a process after a position; continue with `after_seq`."""

    chunks: tuple[OutputChunk, ...]
    next_seq: int
    exited: bool
    exit_code: int | None
    closed: bool
    failure: str | None = None
    gap: tuple[OutputGap, ...] = ()
    sandbox_denied: bool = False
    #: Of the chunks, if requested; not on the wire otherwise, nor from servers before this field.
    times: tuple[OutputTime, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def after_seq(self) -> int:
        """The position for the next read: the `after_seq` of `ExecApi.read` and the `since` of `Process.read`."""
        return self.next_seq - 1


class Snapshot(Struct, frozen=True):
    """The retained output of a process; head and tail are joined where the middle was dropped."""

    stdout: bytes
    stderr: bytes
    terminal: bytes
    truncated: bool
    exit_code: int | None
    running: bool
