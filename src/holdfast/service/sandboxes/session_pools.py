"""The pools of the rules: warm sandboxes for the sessions of this replica.

Each replica keeps a pool of its own for each `[pools.NAME]`. A pool whose engine fails is opened again until the
engine answers; meanwhile its sessions are refused with the engine's error, and all other sessions continue. Touches
engines through `holdfast.fleet`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

import msgspec

from holdfast.errors import HoldfastError
from holdfast.fleet.fleet import FleetSandbox
from holdfast.fleet.pool import Pool, PoolStatus
from holdfast.fleet.template import Template
from holdfast.service.policy.profiles import PolicyRules, PoolRules
from holdfast.service.problems import Invalid, NotNow

#: Between attempts to open a pool whose engine does not answer.
RETRY_SECONDS: Final = 30.0
#: The name of a pool on its engine: a program with a pool of the same name keeps sandboxes of its own.
PREFIX: Final = "service-"

_log = logging.getLogger("holdfast.service")

#: Gets the name of a pool, and the seconds that a session waited for its sandbox.
ObserveTake = Callable[[str, float], None]


class _NamedPool:
    """One pool of the rules: opened in the background, and opened again while its engine fails."""

    def __init__(self, name: str, rules: PoolRules, template: Template, retry_seconds: float) -> None:
        self.rules, self.template = rules, template
        self._name, self._retry_seconds = name, retry_seconds
        self.pool: Pool | None = None
        self.error: HoldfastError | None = None
        #: Set when the pool is open or its first attempt has failed.
        self._attempted = asyncio.Event()
        self._opening = asyncio.create_task(self._open())

    async def _open(self) -> None:
        rules = self.rules
        while True:
            try:
                pool = Pool(
                    rules.engine,
                    self.template,
                    warm=rules.warm,
                    max=rules.max,
                    name=PREFIX + self._name,
                    shrink_after=rules.shrink_after,
                    health_interval=rules.health_interval,
                )
                self.pool = await pool.__aenter__()
            except HoldfastError as error:
                self.error = error
                _log.error("pool %s: %s; next attempt in %g s", self._name, error.message, self._retry_seconds)
                self._attempted.set()
                await asyncio.sleep(self._retry_seconds)
            else:
                self.error = None
                self._attempted.set()
                return

    async def opened(self) -> Pool:
        """The open pool; the engine's error if it could not be opened yet."""
        await self._attempted.wait()
        if self.pool is None:
            raise self.error or NotNow(f"pool {self._name!r} is closing", reason="SANDBOX_NOT_READY")
        return self.pool

    async def close(self) -> None:
        """Remove the warm sandboxes; those of open sessions stay."""
        self._opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._opening
        if self.pool is not None:
            await self.pool.aclose()


class SessionPools:
    """The pools of this replica. `apply` makes them those of the rules."""

    def __init__(self, observe: ObserveTake | None = None, retry_seconds: float = RETRY_SECONDS) -> None:
        self._observe = observe
        self._retry_seconds = retry_seconds
        self._pools: dict[str, _NamedPool] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def apply(self, rules: PolicyRules) -> None:
        """Open the pools of these rules, and close those that the rules no longer have or have changed."""
        wanted = {
            name: (pool, _template(rules.templates[pool.template].template if pool.template else Template()))
            for name, pool in rules.pools.items()
        }
        for name, named in list(self._pools.items()):
            if wanted.get(name) != (named.rules, named.template):
                del self._pools[name]
                self._close(named)
        for name, (pool, template) in wanted.items():
            if name not in self._pools:
                self._pools[name] = _NamedPool(name, pool, template, self._retry_seconds)

    def _close(self, named: _NamedPool) -> None:
        task: asyncio.Task[Any] = asyncio.create_task(named.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def take(self, name: str, timeout: float) -> tuple[Pool, FleetSandbox]:
        """Take a sandbox of a pool: `keep` or `give_back` of the pool follows."""
        if name not in self._pools:
            raise Invalid(
                f"sandbox 'pool:{name}': the rules have no such pool", reason="UNKNOWN_POOL", field="sandbox"
            )
        began = perf_counter()
        pool = await self._pools[name].opened()
        box = await pool.acquire(timeout=timeout)
        if self._observe is not None:
            self._observe(name, perf_counter() - began)
        return pool, box

    def removed(self, id: str) -> None:
        """Make room in the pool that a removed sandbox was taken from."""
        for pool in self._open():
            pool.forget(id)

    def has(self, id: str) -> bool:
        """Whether a sandbox belongs to a pool of this replica."""
        return any(pool.has(id) for pool in self._open())

    def _open(self) -> list[Pool]:
        return [named.pool for named in self._pools.values() if named.pool is not None]

    @property
    def statuses(self) -> dict[str, PoolStatus]:
        """The numbers of each pool that is open."""
        return {name: each.pool.status for name, each in self._pools.items() if each.pool is not None}

    async def stop(self) -> None:
        """Remove the warm sandboxes of all pools. Sandboxes of open sessions stay."""
        for named in self._pools.values():
            self._close(named)
        self._pools.clear()
        if self._closing:
            await asyncio.wait(set(self._closing))


def _template(template: Template) -> Template:
    """The template of a pool's sandboxes; its lifetime and idle time count for sessions (`narrow_policy`)."""
    return msgspec.structs.replace(template, lifetime=None, idle=None)
