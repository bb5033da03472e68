"""`ViewApi`: what dashboards such as the console read beside `SessionApi`, with plain Structs; pure.

`views.session_views` implements it. Methods raise only `Problem`, and return only what the caller may see.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

import msgspec

from holdfast.service.types import Caller, Kind, ResourceUsage, ServiceStruct, State


class SummaryFilter(ServiceStruct, frozen=True):
    """Selects sessions for a list."""

    agent_id: str = ""
    states: tuple[State, ...] = ()
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    #: A text in the id, the agent, the sandbox or a label.
    search: str = ""
    sandbox: str = ""
    oldest_first: bool = False


class SessionSummary(ServiceStruct, frozen=True):
    """A session in a list, without its environment and its policy."""

    session_id: str
    agent_id: str
    kind: Kind
    sandbox: str
    state: State
    created_at: float
    last_activity_at: float
    closed_at: float | None = None
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    commands_run: int = 0
    close_reason: str = ""
    usage: ResourceUsage | None = None
    command: str = ""
    command_at: float | None = None
    exit_code: int | None = None
    approvals: int = 0
    cpu_history: tuple[float, ...] = ()


class SummaryPage(ServiceStruct, frozen=True):
    """A page of a list; `counts` are of all sessions that the caller may see, by their stored state."""

    sessions: tuple[SessionSummary, ...]
    next_page_token: str
    counts: dict[str, int]


class SessionChange(ServiceStruct, frozen=True):
    """A session that changed; with `reload`, changes were left out, and the list is to be read again."""

    session: SessionSummary | None = None
    reload: bool = False


class TerminalFrame(ServiceStruct, frozen=True):
    """A part of a terminal's output, or with `redraw` its whole screen; `token` is the position after it."""

    token: str
    state: State
    timestamp: float
    payload: bytes = b""
    redraw: bool = False
    cols: int = 0
    rows: int = 0
    skipped_bytes: int = 0
    ended: bool = False


class TerminalScreen(ServiceStruct, frozen=True):
    """The screen of a terminal at one moment, or the problem that prevents it."""

    session_id: str
    cols: int = 0
    rows: int = 0
    drawing: bytes = b""
    text: str = ""
    problem: str = ""


class SessionCommand(ServiceStruct, frozen=True):
    """A command of a session, as the audit log has it."""

    command_id: str
    number: int
    text: str
    by: str
    started_at: float
    ended_at: float | None = None
    exit_code: int | None = None
    duration_seconds: float = 0.0
    output_bytes: int = 0
    excerpt: str = ""
    start: str = ""


class RecordedEvent(ServiceStruct, frozen=True):
    """An event of a recording, `time` seconds after its start; codes as in asciicast."""

    time: float
    code: Literal["o", "r", "m"]
    data: bytes
    token: str


class RecordingPart(ServiceStruct, frozen=True):
    """A part of a recording, and the position after it."""

    events: tuple[RecordedEvent, ...]
    token: str
    more: bool
    started_at: float
    cols: int
    rows: int


class UsageTotal(ServiceStruct, frozen=True):
    """A usage sample of one session, or the sum of several."""

    sampled_at: float
    cpu_percent: float = 0.0
    memory_bytes: int = 0
    process_count: int = 0
    output_bytes: int = 0
    sessions: int = 1


class EngineState(ServiceStruct, frozen=True):
    """An engine that the rules allow."""

    name: str
    installed: bool
    sandboxes: int = 0
    problem: str = ""


class SandboxState(ServiceStruct, frozen=True):
    """A sandbox of an engine, or one that sessions use."""

    address: str
    engine: str = ""
    state: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    created_at: float | None = None
    expires_at: float | None = None
    sessions: int = 0
    connected: bool = False
    session_id: str = ""
    pool: str = ""


class PoolState(ServiceStruct, frozen=True):
    """A pool of the rules, as this replica has it; `open` is False while its engine does not respond."""

    name: str
    engine: str
    warm: int = 0
    taken: int = 0
    creating: int = 0
    waiting: int = 0
    warm_wanted: int = 0
    max: int = 0
    open: bool = False


class FleetState(ServiceStruct, frozen=True):
    """The engines and pools of the rules, and the sandboxes of them and of open sessions."""

    engines: tuple[EngineState, ...]
    sandboxes: tuple[SandboxState, ...]
    pools: tuple[PoolState, ...] = ()


class AuditState(ServiceStruct, frozen=True):
    """The result of a verification of the audit log."""

    holds: bool
    rows: int
    sessions: int
    breaks: tuple[str, ...]
    verified_at: float
    head_seq: int
    head_hash: str


class ModelCall(ServiceStruct, frozen=True):
    """An ended call of a model, as a bridge recorded it."""

    call_id: str
    started_at: float
    model: str = ""
    path: str = ""
    status: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    #: The reply had no counts: they are estimated from its length.
    estimated: bool = False
    money: float = 0.0
    duration_seconds: float = 0.0
    session_id: str = ""
    by: str = ""


class ModelTotal(ServiceStruct, frozen=True):
    """The sums of the calls of one model."""

    model: str
    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    money: float = 0.0
    failed: int = 0


class ModelCalls(ServiceStruct, frozen=True):
    """The latest calls, and the sums by model; with `more`, older calls are in neither."""

    calls: tuple[ModelCall, ...]
    totals: tuple[ModelTotal, ...]
    more: bool = False


class ViewApi(Protocol):
    """The methods of the protocol that only read for display, `take_over` and `record_model_calls`."""

    async def summaries(
        self, caller: Caller, which: SummaryFilter, *, page_size: int = 100, page_token: str = ""
    ) -> SummaryPage: ...

    def changes(
        self, caller: Caller, session_ids: Sequence[str] = (), *, only: bool = False
    ) -> AsyncIterator[SessionChange]:
        """Yield the sessions that change, with `only` those of `session_ids`, which also have new usage samples."""
        ...

    def stream_terminal(self, caller: Caller, session_id: str, since: str = "") -> AsyncIterator[TerminalFrame]: ...

    async def screens(self, caller: Caller, session_ids: Sequence[str]) -> list[TerminalScreen]: ...

    async def commands(
        self, caller: Caller, session_id: str, *, page_token: str = ""
    ) -> tuple[list[SessionCommand], str]: ...

    async def recording(
        self, caller: Caller, session_id: str, *, since: str = "", max_bytes: int = 1024 * 1024
    ) -> RecordingPart: ...

    async def usage(self, caller: Caller, session_id: str = "") -> list[UsageTotal]: ...

    async def sandboxes(self, caller: Caller) -> FleetState: ...

    async def verify_audit(self, caller: Caller, session_id: str = "") -> AuditState: ...

    async def take_over(self, caller: Caller, session_id: str, *, release: bool = False) -> None: ...

    async def record_model_calls(self, caller: Caller, session_id: str, calls: Sequence[ModelCall]) -> None:
        """Add calls to the log of a session; a call whose id the log has is left out."""
        ...

    async def model_calls(self, caller: Caller, session_id: str = "") -> ModelCalls: ...
