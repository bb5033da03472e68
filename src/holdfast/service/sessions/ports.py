"""What the sessions need of the parts around them, as interfaces: the store, enforcement, the monitor; pure.

The real store is `service.store`; tests have a small one in memory. A type checker holds both to these.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

from holdfast.service.api import AuditFilter
from holdfast.service.store.types import Fence, Page, RowNotice, SessionFilter, SessionLease, encode_token
from holdfast.service.types import (
    Approval,
    AuditEntry,
    AuditRow,
    Guard,
    SessionRecord,
    Struct,
    Usage,
)
from holdfast.types import EnvironmentInfo, Limits

#: Replaces secrets in a text.
Redact = Callable[[str], str]


class SessionStore(Protocol):
    """Sessions, leases, the audit log and approvals."""

    async def add_session(
        self, record: SessionRecord, *, per_agent: int, total: int, replica: str = "", seconds: float = 0.0
    ) -> SessionRecord:
        """The record itself, or the one that the same agent has under the same `request_id`. `Exhausted` over the
        limits. With `replica`, the new session's lease is that replica's from the beginning, at epoch 1."""
        ...

    async def session(self, session_id: str) -> SessionRecord:
        """`NotFound` if there is none."""
        ...

    async def sessions(self, which: SessionFilter = ..., page: Page = ...) -> tuple[list[SessionRecord], str]: ...

    async def update_session(self, session_id: str, /, **fields: Any) -> SessionRecord: ...

    async def claim(self, replica: str, seconds: float, limit: int) -> Sequence[SessionLease]:
        """Sessions that are not over and that nobody has, or no longer."""
        ...

    async def renew(self, replica: str, seconds: float) -> Collection[str]:
        """Those that are still ours."""
        ...

    async def next_end(self, replica: str) -> float:
        """In how many seconds the first lease of another ends."""
        ...

    async def release(self, replica: str, session_id: str | None = None) -> int: ...

    async def append(self, entries: Sequence[AuditEntry], *, fence: Fence | None = None) -> list[AuditRow]:
        """The rows. With a fence: `NotNow` (LEASE_LOST) if the lease is another's, none if it was done before."""
        ...

    async def rows(self, which: AuditFilter = ..., page: Page = ...) -> tuple[list[AuditRow], str]: ...

    def listen(self) -> AsyncIterator[RowNotice]: ...

    async def put_usages(self, usages: Mapping[str, Usage]) -> None:
        """Keep the last sample of each session, for the other replicas."""
        ...

    async def usages(self, session_ids: Collection[str]) -> dict[str, Usage]:
        """The last samples that were kept, of those sessions that have one."""
        ...

    async def add_approval(self, approval: Approval, *, caller_seconds: float = 0.0) -> Approval:
        """Record it; its caller, if it has one, counts as there for `caller_seconds`."""
        ...

    async def approval(self, approval_id: str) -> Approval:
        """`NotFound` if there is none."""
        ...

    async def answer_approval(
        self, approval_id: str, outcome: Literal["approved", "refused"], *, by: str = "", comment: str = ""
    ) -> Approval:
        """`NotNow` if it was answered before, has expired, or its caller or session is gone."""
        ...

    async def end_approvals(self) -> list[Approval]:
        """End those that expired, or whose caller or session is gone; returns those that this call ended."""
        ...

    async def attach_caller(self, approval_id: str, caller: str, seconds: float) -> bool:
        """Replace the call that the approval waits with. False: it has ended, or no call waits for it."""
        ...

    async def renew_callers(self, callers: Collection[str], seconds: float) -> None:
        """These calls still wait."""
        ...

    async def abandon_approvals(self, caller: str, why: str) -> list[Approval]:
        """The call is over: end what it waited for, and return what was not answered before."""
        ...

    async def open_approvals(self, *, session_id: str = "", agent_id: str = "") -> list[Approval]: ...

    async def latest_approvals(self, *, session_id: str = "", agent_id: str = "") -> list[Approval]:
        """The latest 100, ended ones among them, newest first."""
        ...


def page_after(size: int, *position: float | str) -> Page:
    """The page that begins after a row: its number, or of several sessions its time, its session and its number."""
    return Page(size, encode_token(*position))


class Enforcement(Protocol):
    """How a policy is enforced in one sandbox: `enforcement.Plan`."""

    @property
    def confinement(self) -> Any: ...

    @property
    def limits(self) -> Limits | None: ...

    @property
    def enforced(self) -> tuple[Guard, ...]: ...

    @property
    def unenforced(self) -> tuple[Guard, ...]: ...

    @property
    def user(self) -> str | None: ...


#: `enforcement.plan`: what the policy wants, of what the sandbox offers. `Denied` for a guard that cannot be had.
PlanEnforcement = Callable[[SessionRecord, EnvironmentInfo], Enforcement]
#: What must be there in the sandbox before a session is opened: its workspace, the proxy of an allow-list.
Prepare = Callable[[SessionRecord, EnvironmentInfo], Awaitable[None]]
#: What the monitor last saw of a session.
FindUsage = Callable[[str], Usage | None]


class Watcher(Protocol):
    """Who wants to know which sessions are ours: the monitor."""

    def watch(self, record: SessionRecord) -> None: ...

    def forget(self, session_id: str) -> None:
        """Another replica has it."""
        ...

    def closed(self, session_id: str) -> None:
        """It is over."""
        ...


class Told(Struct, frozen=True):
    """Something for the metrics; the sessions know none of them by name."""

    what: Literal[
        "session_opened", "session_over", "command_ended", "output", "violation", "lease_taken", "lease_lost"
    ]
    kind: str = ""
    amount: float = 1.0
    detail: str = ""


#: Called for each; must not block.
Tell = Callable[[Told], None]


def tell_nobody(told: Told) -> None:
    """For a service without metrics."""


async def nothing_to_prepare(record: SessionRecord, info: EnvironmentInfo) -> None:
    """For sandboxes that have everything."""


def no_usage(session_id: str) -> Usage | None:
    """For a service without a monitor."""
    return None


def as_is(text: str) -> str:
    """For a service without redaction."""
    return text
