"""The one interface between callers and the place where processes run; pure, imports only the model.

`runtime.local.LocalExec` implements it in process; `client.remote.RemoteExec` implements it over a connection;
`server.dispatch` offers any implementation to the wire. One test suite runs over all of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from holdfast.model import (
    EnvironmentInfo,
    ExitStatus,
    ProcessEvent,
    ProcessInfo,
    ProcessSpec,
    ReadResult,
    ServerStatus,
    Snapshot,
    TerminalSize,
)


class EventStream(Protocol):
    """A reader with its own cursor. It ends after `Closed`; `aclose` ends it before."""

    def __aiter__(self) -> AsyncIterator[ProcessEvent]: ...

    async def __anext__(self) -> ProcessEvent: ...

    async def aclose(self) -> None: ...


class ExecApi(Protocol):
    """Processes by logical id. Every call may be repeated: none starts, writes or kills twice."""

    async def start(self, spec: ProcessSpec) -> ProcessInfo:
        """Start a process; the same `start_id` again returns the one that runs."""
        ...

    async def read(
        self, process_id: str, *, after_seq: int = 0, max_bytes: int | None = None, wait: float = 0.0
    ) -> ReadResult:
        """What came after `after_seq`, waiting up to `wait` seconds for something to come.

        At least one chunk is returned if there is one, even when it is larger than `max_bytes`.
        """
        ...

    def events(self, process_id: str, *, after_seq: int = 0, window: int | None = None) -> EventStream:
        """Everything after `after_seq` as it happens. `window` bounds the bytes on their way to the reader."""
        ...

    async def write(self, process_id: str, data: bytes, *, write_id: str | None = None) -> None:
        """Write to stdin; returns when the data is accepted, which waits while the process does not read."""
        ...

    async def close_stdin(self, process_id: str) -> None: ...

    async def resize(self, process_id: str, size: TerminalSize) -> None: ...

    async def signal(self, process_id: str, signal: str, *, signal_id: str | None = None) -> None:
        """Send a signal by name (`INT`, `SIGINT`, `interrupt`) to the process's group, once a `signal_id`."""
        ...

    async def terminate(self, process_id: str, *, grace: float = 5.0, force: bool = False) -> bool:
        """End the whole tree: TERM, up to `grace` seconds, KILL. Returns whether it was running.

        `force` sends KILL at once. When this returns, nothing that the process started is left.
        """
        ...

    async def wait(self, process_id: str, *, timeout: float | None = None) -> ExitStatus | None:
        """The exit status, or None if the process still runs after `timeout` seconds."""
        ...

    async def snapshot(self, process_id: str) -> Snapshot: ...

    async def describe(self, process_id: str) -> ProcessInfo: ...

    async def list(self) -> tuple[ProcessInfo, ...]: ...

    async def forget(self, process_id: str) -> None:
        """Drop an ended process and its output now rather than after its retention."""
        ...

    async def wait_for_port(self, port: int, *, host: str = "127.0.0.1", timeout: float = 30.0) -> None:
        """Return once something accepts connections there; `TimeoutError` otherwise."""
        ...

    async def info(self) -> EnvironmentInfo: ...

    async def status(self) -> ServerStatus: ...

    async def aclose(self) -> None: ...
