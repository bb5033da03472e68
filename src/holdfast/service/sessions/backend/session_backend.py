"""The interface of a session in its sandbox; the terminal kind and the shell kind implement it.

A backend holds no state of the session. The server in the sandbox does, so the backends of two replicas return the
same.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from holdfast.service.api import Control, OutputRead
from holdfast.service.observability.tracing import ShellWork, Tracer
from holdfast.service.sessions.backend.connections import SandboxConnections
from holdfast.service.sessions.backend.enforcement import EnforcementPlan
from holdfast.service.settings import ServiceSettings
from holdfast.service.types import CloseMode, ServiceStruct, SessionRecord, State

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_Backend = TypeVar("_Backend", bound="SessionBackend")
_Method = Callable[Concatenate[_Backend, _Params], Coroutine[Any, Any, _Result]]


class BackendStatus(ServiceStruct, frozen=True):
    """The state of a session as its sandbox reports it."""

    state: State
    cwd: str = ""
    prompt: str = ""
    #: The position of a terminal; for a shell the number of commands that it ran.
    position: int = 0
    awaiting_input: bool = False
    #: The terminal shows a continuation prompt: input continues a command.
    continuation: bool = False
    #: The terminal does not echo input: a password prompt.
    hidden: bool = False
    #: An interrupt was typed or sent, and no line was entered since: the shell can drop the next line's first byte.
    interrupted: bool = False
    #: The program that waits for input is the session's shell, or another shell of that name: `read`.
    shell_reads: bool = False
    queue_busy: bool = False
    last_exit_code: int | None = None
    exit_code: int | None = None
    reason: str = ""

    @property
    def drops_a_byte(self) -> bool:
        """Whether the shell, at its prompt, can drop the first byte of its next line: input needs a new line."""
        return self.interrupted and self.state == "IDLE"


class LoggedOutput(ServiceStruct, frozen=True):
    """The beginning of a command's output in the order of its chunks, and the size of the output."""

    excerpt: bytes
    size: int


class CommandOutcome(ServiceStruct, frozen=True):
    """Output and exit code of a command that was run to its end."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    duration: float
    state: State
    cwd: str = ""
    timed_out: bool = False
    truncated: bool = False
    #: The output of a shell's command for the audit log; None if it is to be read from the command's record.
    logged: LoggedOutput | None = None


class SessionBackend(ABC):
    """Operations on one session of either kind. Errors are `Problem`s."""

    def __init__(
        self, record: SessionRecord, pool: SandboxConnections, settings: ServiceSettings, tracer: Tracer
    ) -> None:
        self.session_id = record.session_id
        self.tracer = tracer
        self._record = record
        self._pool = pool
        self._settings = settings

    @abstractmethod
    async def open(self, environment: dict[str, str], plan: EnforcementPlan) -> tuple[BackendStatus, str]:
        """Start the session and wait for its first prompt; return its status and the token after that prompt."""

    @abstractmethod
    async def status(self, *, input_wait: bool = True) -> BackendStatus:
        """Return the status. Without `input_wait`, which costs a scan of processes, `awaiting_input` is not set."""

    @abstractmethod
    async def status_after_input(self) -> BackendStatus:
        """Return the status; BUSY if a line that was typed has not begun."""

    @abstractmethod
    async def send(
        self, command_id: str, data: bytes, controls: Sequence[Control], *, new_line: bool = False
    ) -> None:
        """Type `data` and send signals; with `new_line`, `data` begins on a new, empty line of the shell."""

    def check_controls(self, controls: Sequence[Control]) -> None:
        """Raise `Invalid` for a control that this kind of session does not have."""
        return

    async def line_begun(self, timeout: float) -> bool:
        """Wait until the shell has begun or dropped each line typed at its prompt; False after the timeout."""
        return True

    async def input_awaited(self, timeout: float) -> BackendStatus:
        """Wait until the shell or a program waits for input; return the status then, or after the timeout."""
        return await self.status()

    async def names_runs(self) -> bool:
        """Return whether the record of a command in the sandbox has the id under which `run` ran the command."""
        return True

    @abstractmethod
    async def type_command(self, command_id: str, command: str) -> None:
        """Start a command, and discard text that is on the command line. Returns before the command ends."""

    @abstractmethod
    async def run(self, command_id: str, command: str, timeout: float, max_bytes: int) -> CommandOutcome:
        """Run a command to its end."""

    @abstractmethod
    async def read(self, since: str, max_bytes: int, wait: float) -> OutputRead:
        """Return the output after a token; wait for up to `wait` seconds if there is none."""

    @abstractmethod
    async def close(self, mode: CloseMode) -> None:
        """End the session; a session that is closed or lost counts as closed."""


def traced(work: ShellWork) -> Callable[[_Method[_Backend, _Params, _Result]], _Method[_Backend, _Params, _Result]]:
    """Decorate a method of a backend so that it runs in a span, a child of the span of its API call."""

    def decorate(method: _Method[_Backend, _Params, _Result]) -> _Method[_Backend, _Params, _Result]:
        @functools.wraps(method)
        async def spanned(self: _Backend, /, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
            with self.tracer.work(work, session_id=self.session_id):
                return await method(self, *args, **kwargs)

        return spanned

    return decorate
