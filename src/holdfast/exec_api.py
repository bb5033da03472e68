"""The interface between callers and the place where processes run; pure, imports only `holdfast.types`.

`runtime.local.LocalExec` implements it in process, `client.remote.RemoteExec` over a connection. One test suite
runs over both. A server needs more than this interface: `server.served_exec.ServedExec`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, runtime_checkable

from holdfast.types import (
    DIRECTORY_PAGE,
    FILE_PIECE_BYTES,
    TERMINAL_OUTPUT_BYTES,
    WATCH_EVENTS,
    CloseMode,
    CommandEvent,
    CommandSpec,
    DirPage,
    EndedProcesses,
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
    WatchRead,
)


class EventStream(Protocol):
    """A reader with its own cursor. It ends after `Closed`, or at `aclose`."""

    def __aiter__(self) -> AsyncIterator[ProcessEvent]: ...

    async def __anext__(self) -> ProcessEvent: ...

    async def aclose(self) -> None: ...


@runtime_checkable
class PolledStream(Protocol):
    """An event stream that may have to poll, at this interval in seconds."""

    poll_interval: float | None


class CommandStream(Protocol):
    """The events of a command in a shell: output as it is printed, and at last `CommandEnded`.

    `aclose` before its end withdraws the command: a queued one is removed, a running one is interrupted.
    """

    def __aiter__(self) -> AsyncIterator[CommandEvent]: ...

    async def __anext__(self) -> CommandEvent: ...

    async def aclose(self) -> None: ...


class FileApi(Protocol):
    """Files by path, piece by piece. Every call may be repeated; `request_id` is an idempotency key.

    A path is text as `os.fsdecode` returns it; a relative one begins at the server's working directory. With a
    `user`, the call has the rights of that user and no others.
    """

    async def read(
        self, path: str, *, offset: int = 0, size: int = FILE_PIECE_BYTES, user: str | None = None
    ) -> FilePiece:
        """Read a part of a regular file, at most `FILE_PIECE_BYTES`."""

    async def write(
        self,
        path: str,
        data: bytes,
        *,
        attributes: FileAttributes | None = None,
        make_parents: bool = True,
        user: str | None = None,
    ) -> None:
        """Write a whole file that fits in one piece, atomically."""

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
        """Write a part of a file that appears under its name at `commit`.

        The first piece, at offset 0, creates the file; the others may follow in any order.
        """

    async def commit(
        self,
        path: str,
        *,
        upload_id: str,
        size: int,
        attributes: FileAttributes | None = None,
        user: str | None = None,
    ) -> FileInfo:
        """Give the uploaded file its name; `size` must be the number of bytes that were sent."""

    async def abandon(self, path: str, *, upload_id: str, user: str | None = None) -> None:
        """Remove an upload; no effect if there is none."""

    async def stat(self, path: str, *, follow: bool = True, user: str | None = None) -> FileInfo: ...

    async def list(
        self, path: str, *, after: str = "", limit: int = DIRECTORY_PAGE, user: str | None = None
    ) -> DirPage:
        """Entries in the order of their names' bytes, after the name `after`."""

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
        """Rename, also between file systems."""

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
        """Create a symbolic link, replacing a file or link of its name."""

    async def set_attributes(self, path: str, attributes: FileAttributes, *, user: str | None = None) -> None: ...

    async def real_path(self, path: str, *, strict: bool = True, user: str | None = None) -> str:
        """The path without symbolic links; `FileNotFound` if it is `strict` and does not exist."""

    async def watch(self, path: str, *, watch_id: str, recursive: bool = False, user: str | None = None) -> None:
        """Watch a directory; on return every later change becomes an event. A repeated `watch_id` has no effect."""

    async def read_watch(
        self, watch_id: str, *, after: int = 0, limit: int = WATCH_EVENTS, wait: float = 0.0
    ) -> WatchRead:
        """Events after the number `after`, waiting up to `wait` seconds for the first; earlier ones are dropped.

        `UnknownWatch` if there is none with this id.
        """

    async def unwatch(self, watch_id: str) -> None:
        """End a watch; no effect if there is none."""


class ExecApi(Protocol):
    """Processes by logical id. Every call may be repeated without starting, writing or killing twice."""

    @property
    def files(self) -> FileApi:
        """The files of the machine where the processes run."""

    async def start(self, spec: ProcessSpec) -> ProcessInfo:
        """Start a process; a repeated `start_id` returns the existing one."""

    async def read(
        self,
        process_id: str,
        *,
        after_seq: int = 0,
        max_bytes: int | None = None,
        wait: float = 0.0,
        timing: bool = False,
    ) -> ReadResult:
        """Output and state after `after_seq`, waiting up to `wait` seconds for the first event.

        Returns at least one chunk if there is one, even if it is larger than `max_bytes`. `timing` adds `times`.
        """

    def events(self, process_id: str, *, after_seq: int = 0, window: int | None = None) -> EventStream:
        """Events after `after_seq` as they happen. `window` bounds the bytes in flight to the reader."""

    async def write(self, process_id: str, data: bytes, *, write_id: str | None = None) -> None:
        """Write to stdin; returns when the data is accepted, and waits while the process does not read.

        The id may also be that of a command in a shell with `pipe_stdin`; so for `close_stdin`.
        """

    async def close_stdin(self, process_id: str) -> None: ...

    async def resize(self, process_id: str, size: TerminalSize) -> None: ...

    async def signal(self, process_id: str, signal: str, *, signal_id: str | None = None) -> None:
        """Send a signal by name (`INT`, `SIGINT`, `interrupt`) to the process's group, once a `signal_id`."""

    async def terminate(self, process_id: str, *, grace: float = 5.0, force: bool = False) -> bool:
        """End the whole tree: TERM, up to `grace` seconds, KILL. Returns whether it was running.

        `force` sends KILL at once. On return no process of the tree is left.
        """

    async def wait(self, process_id: str, *, timeout: float | None = None) -> ExitStatus | None:
        """The exit status, or None if the process still runs after `timeout` seconds."""

    async def ended(self, *, after: int | None = None, wait: float = 0.0) -> EndedProcesses:
        """The processes of any client that ended, from the number `after` on, in order.

        Waits up to `wait` seconds for the first. Without `after`: the number to begin at, for ends from now on.
        Commands whose caller awaits them (`AWAITED_PREFIX`) and the programs of shells are left out.
        """

    async def snapshot(self, process_id: str) -> Snapshot: ...

    async def describe(self, process_id: str) -> ProcessInfo: ...

    async def list(self) -> tuple[ProcessInfo, ...]: ...

    async def usage(self, process_ids: Sequence[str], *, members: bool = False) -> UsageSample:
        """Resources of processes, terminals and shells with all that they started. Unknown ids are left out.

        With `members`, each has a list of its operating system processes.
        """

    async def forget(self, process_id: str) -> None:
        """Drop an ended process and its output before its retention ends."""

    async def open_shell(self, spec: ShellSpec) -> ShellStatus:
        """Start a shell; a repeated `start_id` returns the existing one. On return it takes commands."""

    def run_in_shell(
        self, shell_id: str, command: CommandSpec, *, live: bool = False, window: int | None = None
    ) -> CommandStream:
        """Queue a command. With `live`, output is sent as it is printed; otherwise a little may come at the end."""

    async def start_in_shell(
        self,
        shell_id: str,
        command: str,
        process_id: str,
        *,
        start_id: str | None = None,
        pipe_stdin: bool = False,
    ) -> ProcessInfo:
        """Start a separate process with the shell's directory, variables and functions.

        Its stdin is empty, or writable with `pipe_stdin`.
        """

    async def interrupt_shell(self, shell_id: str, *, interrupt_id: str | None = None) -> bool:
        """End the running command and its foreground processes. Returns whether one was running."""

    async def close_shell(self, shell_id: str, *, keep: bool = False, grace: float = 5.0) -> None:
        """End a shell and all that it started; `keep` leaves its background jobs running."""

    async def describe_shell(self, shell_id: str) -> ShellStatus: ...

    async def list_shells(self) -> tuple[ShellStatus, ...]: ...

    async def open_terminal(self, spec: TerminalSpec) -> TerminalStatus:
        """Open a terminal; a repeated `start_id` returns the existing one.

        Its id is also a process id: `write`, `resize`, `signal`, `events` and the other calls accept it.
        """

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
        gather: float = 0.0,
    ) -> TerminalRead:
        """Output and events after the position `since`, waiting up to `wait` seconds for the first.

        With `until`, the wait lasts until one of its conditions holds, and the result has an `outcome`. Without it,
        the read waits `gather` seconds after the first for more, within `wait`, unless it can return no more.
        `timing` splits output of different times into separate events; `marks` gives prompt marks a payload.
        """

    async def run_in_terminal(
        self,
        terminal_id: str,
        command: str,
        *,
        timeout: float | None = None,
        max_bytes: int = TERMINAL_OUTPUT_BYTES,
        run_id: str | None = None,
    ) -> TerminalCommandEnded:
        """Type a command at the prompt and wait for the next prompt; once for each `run_id`.

        A cancelled call interrupts the command.
        """

    async def press_keys(self, terminal_id: str, keys: Sequence[str], *, write_id: str | None = None) -> None:
        """Press keys by name (`C-c`, `Up`, `F5`), encoded as the foreground program expects."""

    async def wait_terminal(
        self, terminal_id: str, until: TerminalWait, *, timeout: float | None = None, changes: int = 0
    ) -> tuple[bool, TerminalStatus]:
        """Wait for a condition; returns whether it was reached in time, and the status.

        `change` waits for a status with a larger `changes`. `TerminalClosed` if it can no longer be reached.
        """

    async def close_terminal(
        self, terminal_id: str, *, mode: CloseMode = "graceful", jobs: JobsAtClose = "kill", grace: float = 5.0
    ) -> TerminalStatus:
        """End a terminal and its programs; `jobs="keep"` leaves background jobs running."""

    async def describe_terminal(self, terminal_id: str, *, look: bool = True) -> TerminalStatus:
        """The current status. Without `look`, which is the expensive part, `awaiting_input` is None."""

    async def list_terminals(self) -> tuple[TerminalStatus, ...]: ...

    async def wait_for_port(self, port: int, *, host: str = "127.0.0.1", timeout: float = 30.0) -> None:
        """Wait until a program accepts connections there; `TimeoutError` otherwise."""

    async def info(self) -> EnvironmentInfo: ...

    async def status(self) -> ServerStatus: ...

    async def aclose(self) -> None: ...
