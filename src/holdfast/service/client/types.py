"""Sessions as `ServiceClient` returns them; pure. The other results are in `service.api` and `service.types`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.service.api import PolicyRequest
from holdfast.service.types import OVER, Kind, ResourceUsage, ServiceStruct, State
from holdfast.service.view_api import ModelCall

if TYPE_CHECKING:
    from holdfast.bridge.record import CallRecord


class Session(ServiceStruct, frozen=True):
    """A session: its metadata and its state. Times are seconds since 1970."""

    session_id: str
    agent_id: str
    kind: Kind
    state: State = "UNKNOWN"
    sandbox: str = ""
    #: The confinement: `bubblewrap`, `landlock`, `none`.
    sandbox_mode: str = ""
    initial_cwd: str = ""
    cwd: str = ""
    #: Values of secrets are hidden.
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    #: The policy in force.
    policy: PolicyRequest = PolicyRequest()
    created_at: float = 0.0
    last_activity_at: float = 0.0
    expires_at: float = 0.0
    closed_at: float | None = None
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    cols: int = 0
    rows: int = 0
    enforced: tuple[str, ...] = ()
    unenforced: tuple[str, ...] = ()
    commands_run: int = 0
    shell: str = ""
    close_reason: str = ""
    summary: str = ""
    #: None before the monitor's first sample.
    usage: ResourceUsage | None = None

    @property
    def over(self) -> bool:
        return self.state in OVER


class CreatedSession(Session, frozen=True):
    """A new session; `token` is the position after its first prompt."""

    prompt: str = ""
    token: str = ""


def model_call(record: CallRecord, prefix: str) -> ModelCall:
    """Return a record of a bridge without its texts; the call's id is its number after `prefix`."""
    usage = record.usage
    return ModelCall(
        call_id=f"{prefix}-{record.number}",
        started_at=record.started_at,
        model=record.model,
        path=record.path,
        status=record.status,
        input_tokens=0 if usage is None else usage.input,
        output_tokens=0 if usage is None else usage.output,
        cached_tokens=0 if usage is None else usage.cached,
        estimated=record.usage_estimated,
        money=record.money,
        duration_seconds=record.latency,
    )
