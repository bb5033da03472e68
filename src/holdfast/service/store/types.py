"""Types of the store beside those of `service.types`: leases, fences, pages, agents; pure."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final, NamedTuple

import msgspec

from holdfast.service.audit.chain import GENESIS
from holdfast.service.problems import Invalid
from holdfast.service.types import Caller, Role, ServiceStruct, State

#: Default and largest size of a page, as `ListSessions` and `ListAudit` document.
PAGE_SIZE: Final = 100
MAX_PAGE_SIZE: Final = 1_000


class Page(ServiceStruct, frozen=True):
    """Part of a long list; `token` is from the end of the previous page."""

    size: int = PAGE_SIZE
    token: str = ""


FIRST_PAGE: Final = Page()


def page_size(page: Page) -> int:
    return min(page.size or PAGE_SIZE, MAX_PAGE_SIZE)


def encode_token(*position: float | str) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(position)).decode().rstrip("=")


def decode_token(token: str, *kinds: type) -> tuple[Any, ...]:
    """Return the position; raise Invalid for a token that `encode_token` did not make."""
    try:
        position = msgspec.json.decode(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)), type=list[Any])
        return msgspec.convert(position, tuple[kinds], strict=False)  # type: ignore[valid-type]
    except (binascii.Error, UnicodeError, ValueError, msgspec.MsgspecError):
        raise Invalid(f"page_token {token[:40]!r} is not a valid page token", reason="BAD_PAGE_TOKEN") from None


class SessionFilter(ServiceStruct, frozen=True):
    """Selects sessions. Empty selects all; a session must have all of the labels."""

    agent_id: str = ""
    states: tuple[State, ...] = ()
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    #: A text in the id, the agent, the sandbox or a label.
    search: str = ""
    sandbox: str = ""
    newest_first: bool = False


class SessionLease(ServiceStruct, frozen=True):
    """A replica's right to run a session's follower and timers. The next claim has a higher epoch."""

    session_id: str
    replica: str
    epoch: int
    expires_at: float


class OwnedSandbox(ServiceStruct, frozen=True):
    """A sandbox that was made for a session and is removed with it."""

    session_id: str
    agent_id: str
    #: `ENGINE:ID`.
    sandbox: str


class Fence(ServiceStruct, frozen=True):
    """Condition of an append: the session's lease is unchanged, and `audited_token` is below `token`.

    The append moves `audited_token` to `token`, so the same append again changes nothing. It also sets the fields
    in `metadata` of the session. An append without rows only needs the lease, and does not move `audited_token`
    back. A `patient` append waits a moment for other work to share its transaction.
    """

    session_id: str
    replica: str
    epoch: int
    token: int
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    patient: bool = False


class StreamHead(msgspec.Struct):
    """Head of a stream while rows are appended."""

    session_id: str
    last_seq: int = 0
    last_hash: str = GENESIS
    size: int = 0
    base_seq: int = 0
    base_hash: str = GENESIS
    opened_seq: int = 0
    marked_seq: int = 0
    removed_seq: int = 0
    closed: bool = False


class RowNotice(NamedTuple):
    """A row was appended. `MISSED`: some notices were lost, and the listener must read the table."""

    session_id: str
    seq: int


MISSED: Final = RowNotice("", 0)


class AgentRecord(ServiceStruct, frozen=True):
    """A registered caller. The token itself is not stored; `token_hash` is its SHA-256 in hexadecimal."""

    agent_id: str
    role: Role
    token_hash: str
    created_at: float
    #: Overrides of the rules' limits, by the rules' names.
    limits: dict[str, Any] = msgspec.field(default_factory=dict)
    disabled: bool = False
    #: Time of the current token.
    token_at: float = 0.0

    @property
    def caller(self) -> Caller:
        return Caller(self.agent_id, self.role)


class Removed(ServiceStruct, frozen=True):
    """Totals of one retention run."""

    sessions: int = 0
    rows: int = 0
    size: int = 0
