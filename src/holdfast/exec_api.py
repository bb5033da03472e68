"""The one interface between callers and the place where processes run; pure, imports only the model.

`runtime.local.LocalExec` implements it in process; `client.remote.RemoteExec` implements it over a connection;
`server.dispatch` offers any implementation to the wire. One test suite runs over all of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, runtime_checkable

from holdfast.types import (
    DIRECTORY_PAGE,
    FILE_PIECE_BYTES,
    TERMINAL_OUTPUT_BYTES,
    CloseMode,
    CommandEvent,
    CommandSpec,
    DirPage,
    EnvironmentInfo,
    ExitStatus,
    FileAttributes,
    FileInfo,
    FilePiece,
    JobsAtClose,
    ProcessEvent,
    ProcessInfo,
    ProcessSpec,
    ReadResult,
    ReadUntil,
    ServerStatus,
    ShellSpec,
    ShellStatus,
    Snapshot,
    TerminalCommandEnded,
    TerminalRead,
    TerminalSize,
    TerminalSpec,
    TerminalStatus,
    TerminalWait,
    UsageSample,
)


class EventStream(Protocol):
    """A reader with its own cursor. It ends after `Closed`; `aclose` ends it before."""

    def __aiter__(self) -> AsyncIterator[ProcessEvent]: ...

    async def __anext__(self) -> ProcessEvent: ...

    async def aclose(self) -> None: ...


@runtime_checkable
class PolledStream(Protocol):
    """An event stream that may have to ask: at most every so many seconds."""

    poll_interval: float | None


class CommandStream(Protocol):
    """A command in a shell: what it prints, as it comes, and at last how it ended.

    `aclose` before its end withdraws it: one that waits is taken out of the queue, one that runs is interrupted.
    """

    def __aiter__(self) -> AsyncIterator[CommandEvent]: ...

    async def __anext__(self) -> CommandEvent: ...

    async def aclose(self) -> None: ...


class FileApi(Protocol):
    """Files by path, piece by piece. Every call may be repeated: the same `request_id` does nothing twice.

    A path is text as `os.fsdecode` gives it; a relative one begins at the server's working directory. With a `user`
    everything is done as that user, with that user's rights and no others.
    """

    async def read(
        self, path: str, *, offset: int = 0, size: int = FILE_PIECE_BYTES, user: str | None = None
    ) -> FilePiece:
        """A part of a regular file, at most `FILE_PIECE_BYTES` of it."""
        ...

    async def write(
        self,
        path: str,
        data: bytes,
        *,
        attributes: FileAttributes | None = None,
        make_parents: bool = True,
        user: str | None = None,
    ) -> None:
        """A whole file that fits one piece: at once, or not at all."""
        ...

    async def write_piece(
        self,
        path: str,
        data: bytes,
        *,
        upload_id: str,
        offset: int,
        make_parents: bool = True,
        user: str | None = None,
    ) -> None:
        """A part of a file that nobody sees under its name before `commit`.

        The first, at offset 0, makes the file; once it is there, the others may come in any order.
        """
        ...

    async def commit(
        self,
        path: str,
        *,
        upload_id: str,
        size: int,
        attributes: FileAttributes | None = None,
        user: str | None = None,
    ) -> FileInfo:
        """Give what was written its name, `size` bytes of it; `size` must be what was sent."""
        ...

    async def abandon(self, path: str, *, upload_id: str, user: str | None = None) -> None:
        """Remove what was written under this id; nothing if there is nothing."""
        ...

    async def stat(self, path: str, *, follow: bool = True, user: str | None = None) -> FileInfo: ...

    async def list(
        self, path: str, *, after: str = "", limit: int = DIRECTORY_PAGE, user: str | None = None
    ) -> DirPage:
        """Entries in the order of their names' bytes, those after the name `after`."""
        ...

    async def make_dir(
        self,
        path: str,
        *,
        parents: bool = True,
        exist_ok: bool = True,
        mode: int | None = None,
        user: str | None = None,
        owner: int | None = None,
        request_id: str | None = None,
    ) -> None: ...

    async def remove(
        self,
        path: str,
        *,
        recursive: bool = False,
        missing_ok: bool = False,
        user: str | None = None,
        request_id: str | None = None,
    ) -> None: ...

    async def move(
        self, source: str, target: str, *, user: str | None = None, request_id: str | None = None
    ) -> None:
        """Rename, within one file system or from one to another."""
        ...

    async def copy(
        self,
        source: str,
        target: str,
        *,
        recursive: bool = False,
        user: str | None = None,
        request_id: str | None = None,
    ) -> None: ...

    async def make_link(self, path: str, target: str, *, user: str | None = None) -> None:
        """A symbolic link; it takes the place of a file or link that has its name."""
        ...

    async def set_attributes(self, path: str, attributes: FileAttributes, *, user: str | None = None) -> None: ...

    async def real_path(self, path: str, *, user: str | None = None) -> str:
        """The path without symbolic links; `FileNotFound` if there is nothing."""
        ...


class ExecApi(Protocol):
    """Processes by logical id. Every call may be repeated: none starts, writes or kills twice."""

    @property
    def files(self) -> FileApi:
        """The files of the place where the processes run."""
        ...

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
        """Write to stdin; returns when the data is accepted, which waits while the process does not read.

        The id may be that of a command in a shell that has `pipe_stdin`; so also for `close_stdin`.
        """
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

    async def usage(self, process_ids: Sequence[str]) -> UsageSample:
        """What processes, terminals and shells use, and all that they started. Ids that nobody has are left out."""
        ...

    async def forget(self, process_id: str) -> None:
        """Drop an ended process and its output now rather than after its retention."""
        ...

    async def open_shell(self, spec: ShellSpec) -> ShellStatus:
        """Start a shell; the same `start_id` again returns the one that is there. It takes commands on return."""
        ...

    def run_in_shell(
        self, shell_id: str, command: CommandSpec, *, live: bool = False, window: int | None = None
    ) -> CommandStream:
        """Queue a command. `live` wants output as it is printed; without it, little output may come at the end."""
        ...

    async def start_in_shell(
        self,
        shell_id: str,
        command: str,
        process_id: str,
        *,
        start_id: str | None = None,
        pipe_stdin: bool = False,
    ) -> ProcessInfo:
        """Start a process of its own with the shell's directory, variables and functions.

        Its stdin is empty, or with `pipe_stdin` writable.
        """
        ...

    async def interrupt_shell(self, shell_id: str, *, interrupt_id: str | None = None) -> bool:
        """End the command that runs, and all it started in the foreground. Returns whether one ran."""
        ...

    async def close_shell(self, shell_id: str, *, keep: bool = False, grace: float = 5.0) -> None:
        """End a shell and all that it started; `keep` lets its background jobs run on."""
        ...

    async def describe_shell(self, shell_id: str) -> ShellStatus: ...

    async def list_shells(self) -> tuple[ShellStatus, ...]: ...

    async def open_terminal(self, spec: TerminalSpec) -> TerminalStatus:
        """Open a terminal; the same `start_id` again returns the one that is there.

        Its id is a process id, too: `write`, `resize`, `signal`, `events` and the rest take it.
        """
        ...

    async def read_terminal(
        self,
        terminal_id: str,
        *,
        since: int = 0,
        max_bytes: int | None = None,
        wait: float = 0.0,
        timing: bool = False,
        marks: bool = False,
        until: ReadUntil | None = None,
    ) -> TerminalRead:
        """Output and events after the position `since`, waiting up to `wait` seconds for something to come.

        With `until`, the wait lasts until one of its conditions holds, and the result has an `outcome`. `timing`
        gives output of different times in events of their own; `marks` gives prompt marks a payload.
        """
        ...

    async def run_in_terminal(
        self,
        terminal_id: str,
        command: str,
        *,
        timeout: float | None = None,
        max_bytes: int = TERMINAL_OUTPUT_BYTES,
        run_id: str | None = None,
    ) -> TerminalCommandEnded:
        """Type a command at the prompt and wait until the prompt is back; once for each `run_id`.

        A cancelled call interrupts the command.
        """
        ...

    async def press_keys(self, terminal_id: str, keys: Sequence[str], *, write_id: str | None = None) -> None:
        """Keys by name (`C-c`, `Up`, `F5`), encoded as the program in the foreground expects them."""
        ...

    async def wait_terminal(
        self, terminal_id: str, until: TerminalWait, *, timeout: float | None = None, changes: int = 0
    ) -> tuple[bool, TerminalStatus]:
        """Wait for a condition: whether it came in time, and how the terminal is.

        `change` waits for a status with more than so many `changes`. `TerminalClosed` if it cannot come any more.
        """
        ...

    async def close_terminal(
        self, terminal_id: str, *, mode: CloseMode = "graceful", jobs: JobsAtClose = "kill", grace: float = 5.0
    ) -> TerminalStatus:
        """End a terminal and what runs in it; `jobs="keep"` lets background jobs run on."""
        ...

    async def describe_terminal(self, terminal_id: str, *, look: bool = True) -> TerminalStatus:
        """How it is now. Without a look, which costs most of it, `awaiting_input` is None."""
        ...

    async def list_terminals(self) -> tuple[TerminalStatus, ...]: ...

    async def wait_for_port(self, port: int, *, host: str = "127.0.0.1", timeout: float = 30.0) -> None:
        """Return once something accepts connections there; `TimeoutError` otherwise."""
        ...

    async def info(self) -> EnvironmentInfo: ...

    async def status(self) -> ServerStatus: ...

    async def aclose(self) -> None: ...
