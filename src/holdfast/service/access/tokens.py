"""Authentication: finds tokens by their SHA-256, caches them for seconds, limits wrong tokens by peer.

A token has 32 random bytes, so its plain hash cannot be reversed and needs no salt. Logs, errors and caches have
only hashes of tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections import OrderedDict
from typing import Final, Protocol

from holdfast.service.access.rates import Buckets
from holdfast.service.clock import WallClock
from holdfast.service.problems import Exhausted, Unauthenticated
from holdfast.service.settings import DEFAULTS
from holdfast.service.types import Caller, Role, ServiceStruct

TOKEN_PREFIX: Final = "hf_"
#: 32 bytes in base64 are 43 characters; a much longer header is not hashed.
_LONGEST_HEADER: Final = 1_024
_WRONG: Final = "the token is wrong, or was removed"


class KnownAgent(Protocol):
    """The columns of an agent that authentication needs."""

    @property
    def agent_id(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def token_hash(self) -> str: ...
    @property
    def disabled(self) -> bool: ...


class AgentFinder(Protocol):
    """The method of the store that authentication needs."""

    async def find_agent(self, token_hash: str) -> KnownAgent | None: ...


class AccessSettings(ServiceStruct, frozen=True):
    """Cache times and sizes, and rate limits by peer."""

    remember_seconds: float = DEFAULTS.token_cache_seconds
    #: Cached tokens; some hundred bytes each.
    remember_tokens: int = 4_096
    #: Wrong tokens from one address: above the rate of a person's typing errors, below that of a loop.
    failures_per_second: float = 1.0
    failures_burst: int = 20
    lookups_per_second: float = DEFAULTS.token_lookups_per_second
    lookups_burst: int = DEFAULTS.token_lookups_burst
    #: A wrong token is not queried again for this long: a loop with an old token uses no queries of others.
    wrong_seconds: float = 1.0


class _CachedCaller(ServiceStruct, frozen=True):
    #: None for a wrong token.
    caller: Caller | None
    at: float
    seconds: float

    def holds(self, now: float) -> bool:
        # A clock that was set back must not prolong the life of a removed token.
        return self.at <= now < self.at + self.seconds


def new_token() -> str:
    """Return a new token. It is shown once; the store keeps its `hash_token`."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    """Return the hash of a token, as in the store."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


class Access:
    """Authenticates callers by their `authorization` header."""

    def __init__(self, agents: AgentFinder, clock: WallClock, settings: AccessSettings | None = None) -> None:
        self._agents = agents
        self._clock = clock
        self._settings = settings or AccessSettings()
        self._cached: OrderedDict[str, _CachedCaller] = OrderedDict()
        self._queries: dict[str, asyncio.Task[Caller | None]] = {}
        self._wrong: OrderedDict[str, _CachedCaller] = OrderedDict()
        self._failures = Buckets(self._settings.failures_per_second, self._settings.failures_burst, clock)
        self._lookups = Buckets(self._settings.lookups_per_second, self._settings.lookups_burst, clock)
        #: Calls with no token or a wrong one since the start, for the metrics.
        self.failed = 0

    async def authenticate(self, authorization: str | None, peer: str) -> Caller:
        """Return the caller. `peer` is the address of the client without its port."""
        token = _token_in(authorization)
        if token is None:
            raise self._refused(peer, "this call needs the header `authorization: Bearer TOKEN`", "TOKEN_MISSING")
        token_hash = hash_token(token)
        now = self._clock.time()
        cached = self._cached.get(token_hash)
        if cached is not None and cached.caller is not None and cached.holds(now):
            self._cached.move_to_end(token_hash)
            return cached.caller
        wrong = self._wrong.get(token_hash)
        if not token.startswith(TOKEN_PREFIX) or (wrong is not None and wrong.holds(now)):
            raise self._refused(peer, _WRONG, "TOKEN_UNKNOWN")
        # Queries have a separate bucket, so calls without a token do not block valid tokens from the same address.
        # A token that was valid before, and one with a pending query, take nothing from that bucket.
        if cached is None and token_hash not in self._queries and (wait := self._lookups.take(peer)):
            raise Exhausted(
                "too many unknown tokens came from this address",
                reason="AUTHENTICATION_RATE_LIMIT",
                retry_after=wait,
            )
        caller = await self._query(token_hash)
        if caller is None:
            self._cached.pop(token_hash, None)
            self._cache(self._wrong, token_hash, None, self._settings.wrong_seconds)
            raise self._refused(peer, _WRONG, "TOKEN_UNKNOWN")
        return caller

    def forget(self) -> None:
        """Clear the cache, after agents were changed in this process."""
        self._cached.clear()
        self._wrong.clear()

    async def _query(self, token_hash: str) -> Caller | None:
        # Many calls of one agent arrive at once; one query serves all of them. It is a separate task, so that the
        # disconnect of one caller does not cancel the query of the others.
        task = self._queries.get(token_hash)
        if task is None:
            task = asyncio.create_task(self._find(token_hash))
            self._queries[token_hash] = task
            task.add_done_callback(lambda task: self._queried(token_hash, task))
        return await asyncio.shield(task)

    def _queried(self, token_hash: str, task: asyncio.Task[Caller | None]) -> None:
        self._queries.pop(token_hash, None)
        # All callers may have disconnected; then the exception would be reported as never retrieved.
        if not task.cancelled():
            task.exception()

    async def _find(self, token_hash: str) -> Caller | None:
        found = await self._agents.find_agent(token_hash)
        if found is None or found.disabled or not hmac.compare_digest(found.token_hash, token_hash):
            return None
        caller = Caller(agent_id=found.agent_id, role=found.role)
        self._cache(self._cached, token_hash, caller, self._settings.remember_seconds)
        return caller

    def _cache(
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
