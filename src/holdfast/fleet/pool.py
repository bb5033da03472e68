"""`Pool`: warm sandboxes of one template. Taking one costs a call; the pool makes the next one in the background.

A warm sandbox has its server inside and its channel open. The engine holds the pool's state: warm sandboxes that an
earlier process of the same pool left behind are found by their record and taken over. One that was ever taken is
not: a file on this machine, written before a sandbox is handed out, marks it as used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Literal

import msgspec

from holdfast.errors import HoldfastError, InvalidParams, ResourceExhausted, SandboxError
from holdfast.fleet.directories import fleet_directory
from holdfast.fleet.engine import Engine
from holdfast.fleet.fleet import Fleet, FleetSandbox
from holdfast.fleet.record import SandboxRef, has_ended, new_record
from holdfast.fleet.template import Template, make_template

log = logging.getLogger(__name__)

Reuse = Literal["never", "reset"]

#: How long `take` waits for a sandbox while all are in use.
TAKE_SECONDS: Final = 300.0
#: A warm sandbox is called this often; one that does not reply in time is replaced.
HEALTH_SECONDS: Final = 30.0
HEALTH_REPLY_SECONDS: Final = 10.0
#: Warm sandboxes beyond the first are removed after this time without a `take`.
SHRINK_SECONDS: Final = 600.0
#: The lease of a pool's sandbox, renewed while the pool is open: how long a restarted pool can take it over.
POOL_LEASE_SECONDS: Final = 600.0
#: Waits between attempts to make a sandbox while the engine fails.
_RETRY_SECONDS: Final = (0.5, 1.0, 2.0, 5.0, 15.0, 30.0)


class PoolStatus(msgspec.Struct, frozen=True):
    """The numbers of a pool, for metrics."""

    warm: int
    taken: int
    creating: int
    waiting: int
    created_total: int
    failed_total: int
    replaced_total: int


class Pool:
    """Keep `warm` sandboxes ready, and at most `max` in all.

    Callers are served in the order in which they called. With `reuse="never"` a sandbox is removed after its block;
    with `"reset"`, which only jails have, it starts again with its private files thrown away.
    """

    def __init__(
        self,
        engine: str | Engine,
        template: Template | None = None,
        *,
        warm: int = 1,
        max: int = 10,
        name: str | None = None,
        reuse: Reuse = "never",
        shrink_after: float = SHRINK_SECONDS,
        health_interval: float = HEALTH_SECONDS,
        **fields: Any,
    ) -> None:
        if warm < 0 or max < 1 or warm > max:
            raise InvalidParams(f"pool: warm is {warm} and max is {max}: 0 <= warm <= max, and max is at least 1")
        if reuse not in ("never", "reset"):
            raise InvalidParams(f"pool: reuse: {reuse!r} is not 'never' or 'reset'")
        self.fleet = Fleet(engine)
        self.template = make_template(template, fields)
        self.name = name or self.template.hash
        self._marks = f"{fleet_directory()}/pools"
        self._warm_count, self._max, self._reuse = warm, max, reuse
        self._shrink_after, self._health_interval = shrink_after, health_interval
        self._warm: deque[FleetSandbox] = deque()
        self._taken: set[FleetSandbox] = set()
        self._waiting: deque[asyncio.Future[FleetSandbox]] = deque()
        self._making: set[asyncio.Task[None]] = set()
        self._background: list[asyncio.Task[None]] = []
        self._closing = False
        self._last_taken = time.monotonic()
        self._last_error: HoldfastError | None = None
        self._created = self._failed = self._replaced = 0

    # --- its life ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Pool:
        await self.fleet.engine.check(self.template)
        os.makedirs(self._marks, mode=0o700, exist_ok=True)
        await self.fleet.prune()
        await self._take_over()
        self._refill()
        self._background = [
            asyncio.create_task(self._check_health()),
            asyncio.create_task(self._renew()),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.aclose())

    async def aclose(self) -> None:
        """Remove every sandbox of the pool, those in use included."""
        self._closing = True
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(ResourceExhausted(f"pool {self.name}: closed"))
        tasks = [*self._background, *self._making]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        boxes = [*self._warm, *self._taken]
        self._warm.clear()
        self._taken.clear()
        await asyncio.gather(*(self._remove(box) for box in boxes))
        await self.fleet.aclose()

    @property
    def status(self) -> PoolStatus:
        return PoolStatus(
            warm=len(self._warm),
            taken=len(self._taken),
            creating=len(self._making),
            waiting=sum(not each.done() for each in self._waiting),
            created_total=self._created,
            failed_total=self._failed,
            replaced_total=self._replaced,
        )

    async def ready(self) -> None:
        """Wait until the warm sandboxes are there, or one could not be made."""
        while len(self._warm) < self._warm_count and self._making:
            await asyncio.wait(tuple(self._making), return_when=asyncio.FIRST_COMPLETED)
            if self._last_error is not None:
                raise self._last_error

    # --- taking --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def take(self, *, timeout: float = TAKE_SECONDS) -> AsyncIterator[FleetSandbox]:
        """A sandbox for an `async with` block; `ResourceExhausted` if none is free within `timeout` seconds."""
        box = await self._next(timeout)
        try:
            yield box
        finally:
            await asyncio.shield(self._give_back(box))

    async def _next(self, timeout: float) -> FleetSandbox:
        if self._closing or not self._background:
            raise InvalidParams(f"pool {self.name}: not open; use `async with`")
        self._last_taken = time.monotonic()
        if self._warm and not self._waiting:
            box = self._warm.popleft()
            self._mark_taken(box)
            self._refill()
            return box
        waiter: asyncio.Future[FleetSandbox] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._refill()
        try:
            async with asyncio.timeout(timeout):
                return await waiter
        except TimeoutError:
            self._stop_waiting(waiter)
            why = f": {self._last_error}" if self._last_error is not None else ""
            raise ResourceExhausted(
                f"pool {self.name}: no sandbox within {timeout:g} s; "
                f"{len(self._taken)} of {self._max} are in use{why}"
            ) from self._last_error
        except asyncio.CancelledError:
            self._stop_waiting(waiter)
            raise

    def _stop_waiting(self, waiter: asyncio.Future[FleetSandbox]) -> None:
        """Forget a caller that is gone; a sandbox that reached it in that moment goes to the next one, unused."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(waiter)
        if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            self._taken.discard(waiter.result())
            self._hand_out(waiter.result())

    async def _give_back(self, box: FleetSandbox) -> None:
        """Remove a used sandbox, or reset it to the template; then make room for the next caller."""
        fresh: FleetSandbox | None = None
        if self._reuse == "reset" and not self._closing:
            try:
                await box.aclose()
                fresh = await self.fleet.reset(box.ref.id, self.template)
            except HoldfastError as error:
                log.warning("pool %s: %s could not be reset: %s", self.name, box.ref.id, error)
        if fresh is None:
            await self._remove(box)
        self._taken.discard(box)
        if fresh is not None:
            self._unmark(fresh.ref.id)
            self._hand_out(fresh)
        self._refill()

    # --- making --------------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Start as many creations as the warm count and the waiting callers need, within `max`."""
        if self._closing:
            return
        waiting = sum(not each.done() for each in self._waiting)
        wanted = self._warm_count + waiting - len(self._warm) - len(self._making)
        room = self._max - len(self._warm) - len(self._making) - len(self._taken)
        for _ in range(min(wanted, room)):
            task = asyncio.create_task(self._make())
            self._making.add(task)
            task.add_done_callback(self._made)

    def _made(self, task: asyncio.Task[None]) -> None:
        self._making.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("pool %s: %s", self.name, error)
        self._refill()

    async def _make(self) -> None:
        for wait in (*_RETRY_SECONDS, _RETRY_SECONDS[-1]):
            lifetime = self.template.lifetime or POOL_LEASE_SECONDS
            record = new_record(self.template, now=time.time(), lifetime=lifetime, pool=self.name)
            try:
                box = await self.fleet.make(self.template, record)
            except HoldfastError as error:
                self._failed += 1
                self._last_error = error
                log.warning(
                    "pool %s: a sandbox could not be made, next attempt in %g s: %s", self.name, wait, error
                )
                await asyncio.sleep(wait)
            else:
                self._created += 1
                self._last_error = None
                self._hand_out(box)
                return

    def _hand_out(self, box: FleetSandbox) -> None:
        """Give a new sandbox to the caller that has waited longest, or keep it warm."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._mark_taken(box)
                waiter.set_result(box)
                return
        self._warm.append(box)

    async def _remove(self, box: FleetSandbox) -> None:
        with contextlib.suppress(HoldfastError):
            await box.aclose()
        try:
            await self.fleet.remove(box.ref.id)
            self._unmark(box.ref.id)
        except HoldfastError as error:
            # The lease is not renewed any more: the sandbox is pruned when it expires.
            log.warning("pool %s: %s could not be removed: %s", self.name, box.ref.id, error)

    # --- in the background ---------------------------------------------------------------------------------------

    async def _take_over(self) -> None:
        """Connect to warm sandboxes of this pool whose maker has ended, and remove its used ones."""
        refs = [ref for ref in await self.fleet.list() if self._is_abandoned(ref)]
        for ref in refs:
            usable = ref.state == "running" and ref.record.template_hash == self.template.hash
            if usable and not self._is_marked(ref.id) and len(self._warm) < self._warm_count:
                try:
                    self._warm.append(await self.fleet.connect(ref.id, reconnect_deadline=0.0))
                    continue
                except HoldfastError as error:
                    log.info("pool %s: %s is not usable: %s", self.name, ref.id, error)
            await self.fleet.remove(ref.id)
            self._unmark(ref.id)

    def _is_abandoned(self, ref: SandboxRef) -> bool:
        return ref.record.pool == self.name and has_ended(ref.record.owner)

    def _mark_taken(self, box: FleetSandbox) -> None:
        self._taken.add(box)
        with open(self._mark(box.ref.id), "w"):
            pass

    def _is_marked(self, id: str) -> bool:
        return os.path.exists(self._mark(id))

    def _unmark(self, id: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._mark(id))

    def _mark(self, id: str) -> str:
        return f"{self._marks}/{id}"

    async def _renew(self) -> None:
        """Extend the leases of all sandboxes while this process lives; remove warm ones that are not needed."""
        while True:
            await asyncio.sleep(min(POOL_LEASE_SECONDS / 3, self._shrink_after))
            if time.monotonic() - self._last_taken >= self._shrink_after:
                while len(self._warm) > 1:
                    await self._remove(self._warm.pop())
            if self.template.lifetime is not None:
                continue
            for box in (*self._warm, *self._taken):
                try:
                    await self.fleet.engine.extend(box.ref.id, time.time() + POOL_LEASE_SECONDS)
                except HoldfastError as error:
                    log.warning("pool %s: the lease of %s: %s", self.name, box.ref.id, error)

    async def _check_health(self) -> None:
        """Call every warm sandbox now and then, and replace those that do not reply."""
        while True:
            await asyncio.sleep(self._health_interval)
            for box in tuple(self._warm):
                try:
                    async with asyncio.timeout(HEALTH_REPLY_SECONDS):
                        await box.status()
                    self._check_age(box)
                except (HoldfastError, TimeoutError) as error:
                    if box in self._warm:
                        self._warm.remove(box)
                        self._replaced += 1
                        log.warning("pool %s: %s is replaced: %s", self.name, box.ref.id, error or "no reply")
                        await self._remove(box)
                        self._refill()

    def _check_age(self, box: FleetSandbox) -> None:
        """Raise `SandboxError` if less than half of a sandbox's lifetime is left."""
        lifetime = self.template.lifetime
        if lifetime is not None and time.time() - box.ref.created_at > lifetime / 2:
            raise SandboxError(f"half of its lifetime of {lifetime:g} s is over")
