"""`SessionApi`: the interface between the front ends and the sessions, with plain Structs on both sides; pure.

The front ends call it through `fronts.handler`; `sessions.manager` implements it. Methods raise only `Problem`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

import msgspec

from holdfast.service.types import (
    Approval,
    AuditRow,
    Caller,
    CloseMode,
    EventType,
    Kind,
    Network,
    Resources,
    ResourceUsage,
    ServiceStruct,
    SessionRecord,
    State,
)

ControlType = Literal["CTRL_C", "CTRL_D", "SIGINT", "SIGTERM", "SIGKILL", "RESIZE"]


class PolicyRequest(ServiceStruct, frozen=True):
    """The policy that a creator requests; None and empty fields take the value of the profile."""

    profile: str = ""
    idle_timeout: float | None = None
    max_lifetime: float | None = None
    allow_background: bool = False
    inherit_workspace: bool = False
    require: tuple[str, ...] = ()
    network: Network | None = None
    #: Ports that may have previews: `8000`, `9000-9100`.
    ports: tuple[str, ...] = ()
    resources: Resources = Resources()


class CreateRequest(ServiceStruct, frozen=True):
    """`CreateSession`."""

    agent_id: str = ""
    initial_cwd: str = ""
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    policy: PolicyRequest = PolicyRequest()
    kind: Kind = "terminal"
    sandbox: str = ""
    shell: str = ""
    cols: int = 80
    rows: int = 24
    request_id: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class SessionView(ServiceStruct, frozen=True):
    """A session with the state that its sandbox reports and the last sample of the monitor."""

    record: SessionRecord
    state: State
    cwd: str = ""
    prompt: str = ""
    usage: ResourceUsage | None = None


class CreateResult(ServiceStruct, frozen=True):
    """The reply to `CreateSession`; `token` is the position after the first prompt."""

    view: SessionView
    token: str


class Control(ServiceStruct, frozen=True):
    """A key, a signal to the foreground process, or a terminal size."""

    type: ControlType
    cols: int = 0
    rows: int = 0


class InputResult(ServiceStruct, frozen=True):
    """The reply to `SendInput`. Input that is not accepted waits for the approval."""

    accepted: bool
    command_id: str
    state: State
    approval_id: str = ""
    queue_busy: bool = False


class PromptInfo(ServiceStruct, frozen=True):
    """A prompt that was shown, or a program that waits for input."""

    text: str
    awaiting_input: bool = False
    password: bool = False


class Chunk(ServiceStruct, frozen=True):
    """Output, or an event between outputs; `token` is the position after it."""

    session_id: str
    token: str
    timestamp: float
    state: State
    payload: bytes = b""
    #: Bytes before this chunk that were printed and are no longer kept.
    skipped_bytes: int = 0
    truncated: bool = False
    exit_code: int | None = None
    prompt: PromptInfo | None = None
    #: `stdout` or `stderr` of a shell.
    stream: str = ""
    command_id: str = ""


class OutputRead(ServiceStruct, frozen=True):
    """The reply to `ReadOutput`."""

    chunks: tuple[Chunk, ...]
    state: State
    token: str
    more: bool = False


class CloseResult(ServiceStruct, frozen=True):
    """The reply to `CloseSession`."""

    state: State
    summary: str


class SessionEvent(ServiceStruct, frozen=True):
    """An event for the owner of a session. `token` resumes a subscription after this event."""

    session_id: str
    type: EventType
    detail: str
    token: str
    timestamp: float
    approval_id: str = ""
    state: State = "UNKNOWN"


class RunRequest(ServiceStruct, frozen=True):
    """`RunCommand`: in an open session, or in one that is created for the command."""

    command: str
    session_id: str = ""
    create: CreateRequest | None = None
    timeout: float | None = None
    max_bytes: int = 64 * 1024
    request_id: str = ""


class RunResult(ServiceStruct, frozen=True):
    """The reply to `RunCommand`."""

    command_id: str
    exit_code: int
    stdout: bytes
    stderr: bytes
    duration: float
    state: State
    timed_out: bool = False
    truncated: bool = False
    cwd: str = ""
    approval_id: str = ""

    @property
    def success(self) -> bool:
        return self.exit_code == 0 and not self.timed_out


class AuditFilter(ServiceStruct, frozen=True):
    """Selects rows of the audit log."""

    session_id: str | None = None
    agent_id: str = ""
    kinds: tuple[str, ...] = ()
    command_id: str = ""
    since: float | None = None
    until: float | None = None
    contains: str = ""
    newest_first: bool = False


class PreviewRequest(ServiceStruct, frozen=True):
    """`CreatePreview`."""

    session_id: str
    port: int
    #: Seconds; None is the longest time that the service allows.
    lifetime: float | None = None


class Preview(ServiceStruct, frozen=True):
    """A preview of a port. Each URL contains a ticket: a browser that has it needs no token."""

    preview_id: str
    session_id: str
    port: int
    #: With a host name of the preview's own, or `path_url` where the service has no name for that.
    url: str
    #: `/preview/SESSION/PORT/` at the host name that all previews share.
    path_url: str
    expires_at: float


class PreviewApi(Protocol):
    """`CreatePreview`, in a service with a port for previews."""

    async def create_preview(self, caller: Caller, request: PreviewRequest) -> Preview: ...


class SessionApi(Protocol):
    """The methods of the protocol."""

    async def create(self, caller: Caller, request: CreateRequest) -> CreateResult: ...

    async def get(self, caller: Caller, session_id: str) -> SessionView: ...

    async def find(
        self,
        caller: Caller,
        *,
        agent_id: str = "",
        states: Sequence[State] = (),
        labels: dict[str, str] | None = None,
        page_size: int = 100,
        page_token: str = "",
    ) -> tuple[list[SessionView], str]:
        """Return a page of the sessions that the caller may see, oldest first, and the token of the next page."""
        ...

    async def send_input(
        self, caller: Caller, session_id: str, data: bytes, controls: Sequence[Control] = (), request_id: str = ""
    ) -> InputResult: ...

    async def read_output(
        self, caller: Caller, session_id: str, *, since: str = "", max_bytes: int = 64 * 1024, wait: float = 0.0
    ) -> OutputRead: ...

    def stream_output(self, caller: Caller, session_id: str, since: str = "") -> AsyncIterator[Chunk]: ...

    async def close(self, caller: Caller, session_id: str, mode: CloseMode = "graceful") -> CloseResult: ...

    def events(
        self, caller: Caller, session_id: str = "", since: str = "", types: Sequence[EventType] = ()
    ) -> AsyncIterator[SessionEvent]: ...

    async def run_command(self, caller: Caller, request: RunRequest) -> RunResult: ...

    async def audit(
        self, caller: Caller, which: AuditFilter, *, page_size: int = 100, page_token: str = ""
    ) -> tuple[list[AuditRow], str]: ...

    async def approvals(self, caller: Caller, session_id: str = "", *, ended: bool = False) -> list[Approval]:
        """Return the open approvals, oldest first; with `ended` the latest of all, newest first."""
        ...

    async def answer_approval(
        self, caller: Caller, approval_id: str, approve: bool, comment: str = ""
    ) -> Literal["approved", "refused"]: ...
