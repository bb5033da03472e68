"""The interface that the server needs of the exec that it serves: `ExecApi`, and access without a task or a copy.

Over `ExecApi` alone, each request would cost a task and each byte of output a copy through Python. The server
therefore also reads the runtime's jobs, output logs and input queues in place. `runtime.local.LocalExec` implements
this interface; in `server/`, only the assembly (`app.py`) names that class.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

from holdfast.exec_api import ExecApi, FileApi

if TYPE_CHECKING:
    from holdfast.config import ExecServerConfig
    from holdfast.runtime.output.job import Job
    from holdfast.runtime.process.input import InputQueue
    from holdfast.runtime.process.process import ManagedProcess
    from holdfast.runtime.shell.command import ShellCommand
    from holdfast.types import CommandSpec, Confinement, ProcessSpec, ReadResult, ShellStatus, TerminalCommandEnded


class ServedProcesses(Protocol):
    """The processes of a served exec."""

    @property
    def running(self) -> int:
        """Number of running processes."""

    def start_now(self, spec: ProcessSpec) -> ManagedProcess:
        """Start a process without waiting; its spec must satisfy `starts_at_once`."""

    async def start(self, spec: ProcessSpec) -> ManagedProcess:
        """Start any process, through the launcher if the spec needs it."""

    def process(self, process_id: str) -> ManagedProcess:
        """The process with this id; `UnknownProcess` if there is none."""

    def is_known(self, process_id: str) -> bool: ...

    def is_running(self, process_id: str) -> bool: ...

    def bound(self) -> Sequence[str]:
        """Ids of running processes with `lifetime="connection"`."""

    def check_room(self, running: int) -> None:
        """Raise `LimitReached` if a client with `running` processes may start no more."""


class ServedShells(Protocol):
    """The live shells of a served exec."""

    def run(self, shell_id: str, spec: CommandSpec) -> ShellCommand:
        """Queue a command; the same `command_id` again returns the same command."""

    def withdraw(self, command_id: str) -> bool:
        """Remove a command from the queue or interrupt it. Returns whether it was queued or running."""

    def describe(self, shell_id: str) -> ShellStatus: ...

    def is_open(self, shell_id: str) -> bool: ...

    def bound(self) -> Sequence[str]:
        """Ids of open shells with `lifetime="connection"`."""


class ServedTerminals(Protocol):
    """The terminals of a served exec."""

    async def run(
        self, terminal_id: str, command: str, *, timeout: float | None, max_bytes: int, run_id: str
    ) -> TerminalCommandEnded:
        """Type a command; unlike `ExecApi.run_in_terminal`, a cancelled call leaves the command running."""

    def withdraw(self, terminal_id: str, run_id: str) -> None:
        """Interrupt the command that was typed under this id."""


class ServedExec(ExecApi, Protocol):
    """An `ExecApi` on this machine, with its jobs in reach."""

    @property
    def config(self) -> ExecServerConfig: ...

    @property
    def shells(self) -> ServedShells: ...

    @property
    def terminals(self) -> ServedTerminals: ...

    @property
    def processes(self) -> ServedProcesses: ...

    def recorded(self, id: str) -> Job:
        """The job with this id: a process, a command of a shell, or a shell's late output."""

    def input(self, process_id: str) -> InputQueue:
        """The stdin of a process, or of a command in a shell."""

    async def read(
        self,
        process_id: str,
        *,
        after_seq: int = 0,
        max_bytes: int | None = None,
        wait: float = 0.0,
        reader: str | None = None,
        timing: bool = False,
    ) -> ReadResult:
        """As `ExecApi.read`. A named `reader` holds output back for its next poll, as a subscription does."""

    async def write_in_place(self, path: str, file_id: str, offset: int, data: bytes) -> None:
        """Write into an existing file; `FileNotFound` if it is another file than `file_id`."""

    def confined_files(self, confinement: Confinement) -> AbstractAsyncContextManager[FileApi]:
        """The files under a confinement, for the length of a block."""

    async def shutdown(self, grace: float) -> None:
        """End every process, shell and terminal; nothing starts after this call."""
