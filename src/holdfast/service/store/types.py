"""What the store takes and gives beside the nouns of `service.types`: leases, fences, pages, agents; pure."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final, NamedTuple

import msgspec

from holdfast.service.problems import Invalid
from holdfast.service.types import Caller, Role, State, Struct

#: A page that nobody gave a size for, and the largest that is given: what `ListSessions` and `ListAudit` promise.
PAGE_SIZE: Final = 100
MAX_PAGE_SIZE: Final = 1_000


class Page(Struct, frozen=True):
    """Which part of a long answer; `token` is what the page before it ended with."""

    size: int = PAGE_SIZE
    token: str = ""


FIRST_PAGE: Final = Page()


def page_size(page: Page) -> int:
    return min(page.size or PAGE_SIZE, MAX_PAGE_SIZE)


def encode_token(*position: float | str) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(position)).decode().rstrip("=")


def decode_token(token: str, *kinds: type) -> tuple[Any, ...]:
    """The position; what we never gave out is refused."""
    try:
        position = msgspec.json.decode(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)), type=list[Any])
        return msgspec.convert(position, tuple[kinds], strict=False)  # type: ignore[valid-type]
    except (binascii.Error, UnicodeError, ValueError, msgspec.MsgspecError):
        raise Invalid(f"page_token {token[:40]!r} is none that was given out", reason="BAD_PAGE_TOKEN") from None


class SessionFilter(Struct, frozen=True):
    """Which sessions. Empty is all; a session must have every one of the labels."""

    agent_id: str = ""
    states: tuple[State, ...] = ()
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class SessionLease(Struct, frozen=True):
    """A replica's right to run a session's follower and timers. Whoever claims it next has a higher epoch."""

    session_id: str
    replica: str
    epoch: int
    expires_at: float


class Fence(Struct, frozen=True):
    """What must hold for an append: the session's lease is still this one, and less than `token` was audited.

    The append moves the session's `audited_token` to `token` with it, so the same append again changes nothing.
    """

    session_id: str
    replica: str
    epoch: int
    token: int


class RowNotice(NamedTuple):
    """A row was appended. `MISSED` says that some were not told: look at what you follow again."""

    session_id: str
    seq: int


MISSED: Final = RowNotice("", 0)


class AgentRecord(Struct, frozen=True):
    """Who may call. The token itself is nowhere; `token_hash` is its SHA-256 in hexadecimal."""

    agent_id: str
    role: Role
    token_hash: str
    created_at: float
    #: What differs from the rules' limits, as the rules name it.
    limits: dict[str, Any] = msgspec.field(default_factory=dict)
    disabled: bool = False
    #: When it got the token that it has.
    token_at: float = 0.0

    @property
    def caller(self) -> Caller:
        return Caller(self.agent_id, self.role)


class Removed(Struct, frozen=True):
    """What retention took away."""

    sessions: int = 0
    rows: int = 0
    size: int = 0
