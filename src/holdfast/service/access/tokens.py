"""Who calls: tokens looked up by their SHA-256, remembered for seconds, and wrong ones slowed down by peer.

A token is 32 random bytes, so its plain hash cannot be guessed back, and needs no salt. Tokens are in no log, no
error and no cache: only their hashes are.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections import OrderedDict
from typing import Final, Protocol

from holdfast.service.access.rates import Buckets
from holdfast.service.clock import Clock
from holdfast.service.problems import Exhausted, Unauthenticated
from holdfast.service.types import Caller, Role, Struct

TOKEN_PREFIX: Final = "hf_"
#: 32 bytes in base64 are 43 characters; anything much longer is not worth hashing.
_LONGEST_HEADER: Final = 1_024
_WRONG: Final = "the token is wrong, or was removed"


class KnownAgent(Protocol):
    """What a row of an agent says to us."""

    @property
    def agent_id(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def token_hash(self) -> str: ...
    @property
    def disabled(self) -> bool: ...


class AgentFinder(Protocol):
    """The store."""

    async def find_agent(self, token_hash: str) -> KnownAgent | None: ...


class AccessSettings(Struct, frozen=True):
    """How long is remembered, how much, and how often a peer may be wrong."""

    #: A token that was removed stops working everywhere after this long; a look-up saved for each call until then.
    remember_seconds: float = 5.0
    #: Tokens remembered; some hundred bytes each.
    remember_tokens: int = 4_096
    #: Wrong tokens from one address: a person who mistypes is not stopped, a loop with an old token is.
    failures_per_second: float = 1.0
    failures_burst: int = 20
    #: Look-ups of tokens from one address that are not remembered. A look-up is one read by an index, well below a
    #: millisecond; new agents behind one proxy share its address, and a deployment starts some hundred at a time.
    lookups_per_second: float = 100.0
    lookups_burst: int = 200
    #: A wrong token is not looked up again for this long: a loop with an old token takes no look-ups from others.
    wrong_seconds: float = 1.0


class _CachedCaller(Struct, frozen=True):
    #: None for a token that was wrong.
    caller: Caller | None
    at: float
    seconds: float

    def holds(self, now: float) -> bool:
        # A wall clock that was set back must not keep a removed token alive.
        return self.at <= now < self.at + self.seconds


def new_token() -> str:
    """A token for an agent. It is shown once; what is kept is `hash_token` of it."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    """As the store has it."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


class Access:
    """From an `authorization` header to a caller."""

    def __init__(self, agents: AgentFinder, clock: Clock, settings: AccessSettings | None = None) -> None:
        self._agents = agents
        self._clock = clock
        self._settings = settings or AccessSettings()
        self._remembered: OrderedDict[str, _CachedCaller] = OrderedDict()
        self._looking: dict[str, asyncio.Task[Caller | None]] = {}
        self._wrong: OrderedDict[str, _CachedCaller] = OrderedDict()
        self._failures = Buckets(self._settings.failures_per_second, self._settings.failures_burst, clock)
        self._lookups = Buckets(self._settings.lookups_per_second, self._settings.lookups_burst, clock)
        #: Calls with no token or a wrong one since the start, for the metrics.
        self.failed = 0

    async def authenticate(self, authorization: str | None, peer: str) -> Caller:
        """The caller. `peer` is the other end's address without its port."""
        token = _token_in(authorization)
        if token is None:
            raise self._refused(peer, "this call needs the header `authorization: Bearer TOKEN`", "TOKEN_MISSING")
        token_hash = hash_token(token)
        now = self._clock.time()
        remembered = self._remembered.get(token_hash)
        if remembered is not None and remembered.caller is not None and remembered.holds(now):
            self._remembered.move_to_end(token_hash)
            return remembered.caller
        wrong = self._wrong.get(token_hash)
        if not token.startswith(TOKEN_PREFIX) or (wrong is not None and wrong.holds(now)):
            raise self._refused(peer, _WRONG, "TOKEN_UNKNOWN")
        # Look-ups have a bucket of their own, so calls without a token from the same address refuse no token that
        # is right. A token that was right before, and one that is being looked up, take nothing from that bucket.
        if remembered is None and token_hash not in self._looking and (wait := self._lookups.take(peer)):
            raise Exhausted(
                "too many tokens that are not known came from this address",
                reason="AUTHENTICATION_RATE_LIMIT",
                retry_after=wait,
            )
        caller = await self._look_up(token_hash)
        if caller is None:
            self._remembered.pop(token_hash, None)
            self._remember(self._wrong, token_hash, None, self._settings.wrong_seconds)
            raise self._refused(peer, _WRONG, "TOKEN_UNKNOWN")
        return caller

    def forget(self) -> None:
        """Look every token up anew: agents were changed in this process."""
        self._remembered.clear()
        self._wrong.clear()

    async def _look_up(self, token_hash: str) -> Caller | None:
        # Calls of one agent come in crowds; one look-up serves all that wait for it. It is a task of its own, so
        # that a caller that goes away takes nothing from the others.
        task = self._looking.get(token_hash)
        if task is None:
            task = asyncio.create_task(self._find(token_hash))
            self._looking[token_hash] = task
            task.add_done_callback(lambda task: self._looked(token_hash, task))
        return await asyncio.shield(task)

    def _looked(self, token_hash: str, task: asyncio.Task[Caller | None]) -> None:
        self._looking.pop(token_hash, None)
        # Every caller that waited may be gone; then nobody else asks how it ended.
        if not task.cancelled():
            task.exception()

    async def _find(self, token_hash: str) -> Caller | None:
        found = await self._agents.find_agent(token_hash)
        if found is None or found.disabled or not hmac.compare_digest(found.token_hash, token_hash):
            return None
        caller = Caller(agent_id=found.agent_id, role=found.role)
        self._remember(self._remembered, token_hash, caller, self._settings.remember_seconds)
        return caller

    def _remember(
        self, known: OrderedDict[str, _CachedCaller], token_hash: str, caller: Caller | None, seconds: float
    ) -> None:
        known[token_hash] = _CachedCaller(caller, self._clock.time(), seconds)
        known.move_to_end(token_hash)
        while len(known) > self._settings.remember_tokens:
            known.popitem(last=False)

    def _refused(self, peer: str, message: str, reason: str) -> Exhausted | Unauthenticated:
        self.failed += 1
        if wait := self._failures.take(peer):
            return Exhausted(
                "too many calls with no token or a wrong one came from this address",
                reason="AUTHENTICATION_RATE_LIMIT",
                retry_after=wait,
            )
        return Unauthenticated(message, reason=reason)


def _token_in(authorization: str | None) -> str | None:
    if authorization is None or len(authorization) > _LONGEST_HEADER:
        return None
    scheme, _, token = authorization.strip().partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and token else None
