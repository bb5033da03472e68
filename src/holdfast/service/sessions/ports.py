"""The interfaces that the sessions need from other parts: the store, enforcement, the monitor; pure.

`service.store` implements the store; tests use one in memory. The type checker checks both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from holdfast.service.api import AuditFilter
from holdfast.service.policy.made_sandbox import MadeSandbox
from holdfast.service.problems import Denied
from holdfast.service.sessions.backend.enforcement import EnforcementPlan
from holdfast.service.store.types import Fence, Page, RowNotice, SessionFilter, SessionLease, encode_token
from holdfast.service.types import (
    Approval,
    AuditEntry,
    AuditRow,
    ResourceUsage,
    ServiceStruct,
    SessionRecord,
)
from holdfast.types import EnvironmentInfo

#: Replaces secrets in a text.
Redact = Callable[[str], str]


class SessionStore(Protocol):
    """Sessions, leases, the audit log and approvals."""

    async def add_session(
        self, record: SessionRecord, *, per_agent: int, total: int, replica: str = "", seconds: float = 0.0
    ) -> SessionRecord:
        """Add a session and return it, or return the agent's session with the same `request_id`.

        Raises `Exhausted` over the limits. With `replica`, that replica gets the lease at epoch 1.
        """
        ...

    async def session(self, session_id: str) -> SessionRecord:
        """`NotFound` if there is none."""
        ...

    async def sessions(self, which: SessionFilter = ..., page: Page = ...) -> tuple[list[SessionRecord], str]: ...

    async def update_session(self, session_id: str, /, **fields: Any) -> SessionRecord: ...

    async def claim(self, replica: str, seconds: float, limit: int) -> Sequence[SessionLease]:
        """Take the leases of open sessions without a valid lease."""
        ...

    async def renew(self, replica: str, seconds: float) -> Collection[str]:
        """Renew the leases of a replica; return the ids of its sessions."""
        ...

    async def next_end(self, replica: str) -> float:
        """Return the seconds until the first lease of another replica ends."""
        ...

    async def release(self, replica: str, session_id: str | None = None) -> int: ...

    async def append(self, entries: Sequence[AuditEntry], *, fence: Fence | None = None) -> list[AuditRow]:
        """Append rows and return them.

        With a fence: `NotNow` (LEASE_LOST) if another replica has the lease; no rows if they were appended before.
        """
        ...

    async def rows(self, which: AuditFilter = ..., page: Page = ...) -> tuple[list[AuditRow], str]: ...

    def listen(self) -> AsyncIterator[RowNotice]: ...

    async def put_usages(self, usages: Mapping[str, ResourceUsage]) -> None:
        """Store the last sample of each session, for the other replicas."""
        ...

    async def usages(self, session_ids: Collection[str]) -> dict[str, ResourceUsage]:
        """Return the last stored samples of these sessions."""
        ...

    async def add_approval(self, approval: Approval, *, caller_seconds: float = 0.0) -> Approval:
        """Store an approval; its call, if any, counts as alive for `caller_seconds`."""
        ...

    async def approval(self, approval_id: str) -> Approval:
        """`NotFound` if there is none."""
        ...

    async def answer_approval(
        self, approval_id: str, outcome: Literal["approved", "refused"], *, by: str = "", comment: str = ""
    ) -> Approval:
        """Store an answer. `NotNow` if the approval was answered, has expired, or its call or session ended."""
        ...

    async def end_approvals(self) -> list[Approval]:
        """End approvals that expired, or of an ended call or session; return those that this call ended."""
        ...

    async def attach_caller(self, approval_id: str, caller: str, seconds: float) -> bool:
        """Replace the call that waits for the approval. False if the approval has ended, or no call waits."""
        ...

    async def renew_callers(self, callers: Collection[str], seconds: float) -> None:
        """Keep these calls alive for so many seconds more."""
        ...

    async def abandon_approvals(self, caller: str, why: str) -> list[Approval]:
        """End the open approvals of a call that ended, and return them."""
        ...

    async def open_approvals(self, *, session_id: str = "", agent_id: str = "") -> list[Approval]: ...

    async def latest_approvals(self, *, session_id: str = "", agent_id: str = "") -> list[Approval]:
        """Return the latest 100, ended ones included, newest first."""
        ...


async def first_row(store: SessionStore, **which: Any) -> AuditRow | None:
    """Return the first row that an `AuditFilter` with these fields selects."""
    rows, _ = await store.rows(AuditFilter(**which), Page(1))
    return rows[0] if rows else None


def body_of(row: AuditRow) -> dict[str, Any]:
    return msgspec.json.decode(row.body, type=dict[str, Any])


def page_after(size: int, *position: float | str) -> Page:
    """Return the page after a row: its number, or for several sessions its time, session and number."""
    return Page(size, encode_token(*position))


#: `enforcement.plan`: plans the policy with the features of the sandbox. `Denied` for an unavailable guard.
PlanEnforcement = Callable[[SessionRecord, EnvironmentInfo], EnforcementPlan]
#: Prepares the sandbox for a session: its workspace, the proxy of an allow-list.
Prepare = Callable[[SessionRecord, EnvironmentInfo], Awaitable[None]]
#: The profile that an operator gave to an agent (`agent add --profile`); empty if there is none.
AssignedProfile = Callable[[str], Awaitable[str]]
#: The last sample of the monitor for a session.
FindUsage = Callable[[str], ResourceUsage | None]


class SessionWatcher(Protocol):
    """Gets notice of the sessions that this replica follows."""

    def watch(self, record: SessionRecord) -> None: ...

    def forget(self, session_id: str) -> None:
        """Another replica follows the session."""
        ...

    def closed(self, session_id: str) -> None:
        """The session is over."""
        ...


class SandboxSource(Protocol):
    """Makes sandboxes for sessions; a `SessionWatcher` removes them."""

    def new_address(self, made: MadeSandbox) -> str: ...

    async def check_unowned(self, address: str) -> None:
        """`Denied` for the address of a sandbox that was made for a session."""
        ...

    async def make(self, record: SessionRecord, made: MadeSandbox) -> SessionRecord:
        """Make or take the sandbox of a stored session; return the session with the sandbox's address."""
        ...


class NoSandboxes:
    """For a service that makes no sandboxes."""

    def new_address(self, made: MadeSandbox) -> str:
        raise Denied("this service makes no sandboxes", reason="SANDBOX_NOT_ALLOWED")

    async def check_unowned(self, address: str) -> None: ...

    async def make(self, record: SessionRecord, made: MadeSandbox) -> SessionRecord:
        return record


class MetricEvent(ServiceStruct, frozen=True):
    """A measurement of the sessions; `observability` maps it to metrics."""

    what: Literal[
        "session_opened",
        "session_over",
        "command_ended",
        "output",
        "violation",
        "lease_taken",
        "lease_lost",
        "subscribers",
    ]
    kind: str = ""
    amount: float = 1.0
    detail: str = ""


#: Called for each measurement; must not block.
EmitMetric = Callable[[MetricEvent], None]


def ignore_metric(event: MetricEvent) -> None:
    """For a service without metrics."""


async def nothing_to_prepare(record: SessionRecord, info: EnvironmentInfo) -> None:
    """For sandboxes that need no preparation."""


async def no_profile(agent_id: str) -> str:
    """For a service without assigned profiles."""
    return ""


def no_usage(session_id: str) -> ResourceUsage | None:
    """For a service without a monitor."""
    return None


def as_is(text: str) -> str:
    """For a service without redaction."""
    return text
