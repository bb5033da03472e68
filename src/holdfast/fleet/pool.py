"""`Pool`: warm sandboxes of one template. Taking one costs a call; the pool makes the next one in the background.

A warm sandbox has its server inside and its channel open. The engine holds the pool's state: warm sandboxes that an
earlier process of the same pool left behind are found by their record and taken over. One that was ever taken is
not: a file on this machine (`pool_marks`), written before a sandbox is handed out, marks it as used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Literal

import msgspec

from holdfast.errors import HoldfastError, InvalidParams, ResourceExhausted, SandboxError
from holdfast.fleet.engine import Engine
from holdfast.fleet.fleet import Fleet, FleetSandbox
from holdfast.fleet.pool_marks import KEPT, TAKEN, PoolMarks
from holdfast.fleet.record import Record, SandboxRef, has_ended, new_record
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
#: A caller of a warm sandbox runs its first command within this time.
REFILL_SECONDS: Final = 0.01
#: Waits between attempts to make a sandbox while the engine fails.
_RETRY_SECONDS: Final = (0.5, 1.0, 2.0, 5.0, 15.0, 30.0)


class PoolStatus(msgspec.Struct, frozen=True):
    """The numbers of a pool, for metrics."""

    warm: int = 0
    #: In use: taken for a block, or kept for longer than the pool.
    taken: int = 0
    creating: int = 0
    waiting: int = 0
    created_total: int = 0
    failed_total: int = 0
    replaced_total: int = 0


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
        self._marks = PoolMarks(self.fleet.engine.name)
        self._warm_count, self._max, self._reuse = warm, max, reuse
        self._shrink_after, self._health_interval = shrink_after, health_interval
        self._warm: deque[FleetSandbox] = deque()
        self._taken: set[FleetSandbox] = set()
        #: Ids of sandboxes that are in use and outlive this object (`keep`).
        self._kept: set[str] = set()
        #: Ids of sandboxes that the engine could not remove yet.
        self._unremoved: set[str] = set()
        self._waiting: deque[asyncio.Future[FleetSandbox]] = deque()
        self._making: set[asyncio.Task[None]] = set()
        self._background: list[asyncio.Task[None]] = []
        self._removing: set[asyncio.Task[None]] = set()
        self._refilling: asyncio.TimerHandle | None = None
        self._closing = False
        self._last_taken = time.monotonic()
        self._last_error: HoldfastError | None = None
        self._created = self._failed = self._replaced = 0

    # --- its life ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Pool:
        await self.fleet.engine.check(self.template)
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
        """Remove every sandbox of the pool, those in use included, except those that `keep` was called for."""
        self._closing = True
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(ResourceExhausted(f"pool {self.name}: closed"))
        self._refill()  # cancels a pending one
        tasks = [*self._background, *self._making]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._removing:
            await asyncio.wait(set(self._removing))
        boxes = [*self._warm, *self._taken]
        self._warm.clear()
        self._taken.clear()
        await asyncio.gather(*(self._remove(box) for box in boxes))
        await self.fleet.aclose()

    @property
    def status(self) -> PoolStatus:
        return PoolStatus(
            warm=len(self._warm),
            taken=len(self._taken) + len(self._kept),
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
        box = await self.acquire(timeout=timeout)
        try:
            yield box
        finally:
            await asyncio.shield(self.give_back(box))

    async def acquire(self, *, timeout: float = TAKE_SECONDS) -> FleetSandbox:
        """Take a sandbox without a block: `give_back` or `keep` follows."""
        if self._closing or not self._background:
            raise InvalidParams(f"pool {self.name}: not open; use `async with`")
        self._last_taken = time.monotonic()
        while self._warm and not self._waiting:
            box = self._warm.popleft()
            if not box.is_connected:
                # Its engine or its server has ended since the last check.
                self._replace(box, "its connection is lost")
                continue
            self._mark_taken(box)
            self._refill_soon()
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
                f"{self.status.taken} of {self._max} are in use{why}"
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

    async def keep(self, box: FleetSandbox, lifetime: float) -> None:
        """Let a sandbox that was acquired outlive this pool, for `lifetime` seconds from now on.

        The caller closes and removes the sandbox, and then calls `forget`; until then it counts as in use. A later
        pool of the same name counts it, too, and leaves it alone.
        """
        await self.fleet.engine.extend(box.ref.id, time.time() + lifetime)
        self._marks.put(box.ref.id, KEPT)
        self._taken.discard(box)
        self._kept.add(box.ref.id)

    def forget(self, id: str) -> None:
        """Make room for another sandbox after a kept one was removed."""
        if id in self._kept:
            self._kept.discard(id)
            self._marks.clear(id)
            self._refill()

    def has(self, id: str) -> bool:
        """Whether a sandbox with this id belongs to the pool at this moment."""
        return id in self._kept or any(box.ref.id == id for box in (*self._warm, *self._taken))

    async def give_back(self, box: FleetSandbox) -> None:
        """Remove a used sandbox, or reset it to the template; then make room for the next caller."""
        fresh: FleetSandbox | None = None
        if self._reuse == "reset" and not self._closing:
            try:
                await box.aclose()
                fresh = await self.fleet.reset(box.ref.id, self.template)
                await fresh.warm_up()
            except HoldfastError as error:
                fresh = None
                log.warning("pool %s: %s could not be reset: %s", self.name, box.ref.id, error)
        if fresh is None:
            await self._remove(box)
        self._taken.discard(box)
        self._kept.discard(box.ref.id)
        if fresh is not None:
            self._marks.clear(fresh.ref.id)
            self._hand_out(fresh)
        self._refill()

    # --- making --------------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Start as many creations as the warm count and the waiting callers need, within `max`."""
        if self._refilling is not None:
            self._refilling.cancel()
            self._refilling = None
        if self._closing:
            return
        waiting = sum(not each.done() for each in self._waiting)
        wanted = self._warm_count + waiting - len(self._warm) - len(self._making)
        in_use = len(self._taken) + len(self._kept) + len(self._removing) + len(self._unremoved)
        room = self._max - len(self._warm) - len(self._making) - in_use
        for _ in range(min(wanted, room)):
            task = asyncio.create_task(self._make())
            self._making.add(task)
            task.add_done_callback(self._made)

    def _refill_soon(self) -> None:
        """Refill a moment later: the first command of the caller goes before the next sandbox."""
        if self._refilling is None:
            self._refilling = asyncio.get_running_loop().call_later(REFILL_SECONDS, self._refill)

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
                box = await self._make_warm(record)
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

    async def _make_warm(self, record: Record) -> FleetSandbox:
        box = await self.fleet.make(self.template, record)
        try:
            await box.warm_up()
        except BaseException:
            await asyncio.shield(self._remove(box))
            raise
        return box

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
            await self._remove_id(box.ref.id)
        except HoldfastError as error:
            # Removed with the next check; without this process, when its lease has expired.
            self._unremoved.add(box.ref.id)
            log.warning("pool %s: %s could not be removed: %s", self.name, box.ref.id, error)

    async def _remove_id(self, id: str) -> None:
        await self.fleet.remove(id)
        self._marks.clear(id)

    def _replace(self, box: FleetSandbox, why: str) -> None:
        """Remove a warm sandbox that is out of order, in the background; another one is made."""
        self._replaced += 1
        log.warning("pool %s: %s is replaced: %s", self.name, box.ref.id, why)
        task = asyncio.create_task(self._remove(box))
        self._removing.add(task)
        task.add_done_callback(self._removed)

    def _removed(self, task: asyncio.Task[None]) -> None:
        self._removing.discard(task)
        self._refill()

    # --- in the background ---------------------------------------------------------------------------------------

    async def _take_over(self) -> None:
        """Connect to warm sandboxes of this pool whose maker has ended, and remove its used ones."""
        marked = self._marks.all()  # before the list: the sandbox of a mark that is in neither has been removed
        refs = await self.fleet.list()
        self._marks.clear(*(marked - {ref.id for ref in refs}))
        for ref in refs:
            if not self._is_abandoned(ref):
                continue
            mark = self._marks.get(ref.id)
            if mark == KEPT and ref.state != "ended":
                self._kept.add(ref.id)
                continue
            usable = ref.state == "running" and ref.record.template_hash == self.template.hash
            if usable and mark is None and len(self._warm) < self._warm_count:
                try:
                    self._warm.append(await self.fleet.connect(ref.id, reconnect_deadline=0.0))
                    continue
                except HoldfastError as error:
                    log.info("pool %s: %s is not usable: %s", self.name, ref.id, error)
            await self._remove_id(ref.id)

    def _is_abandoned(self, ref: SandboxRef) -> bool:
        return ref.record.pool == self.name and has_ended(ref.record.owner)

    def _mark_taken(self, box: FleetSandbox) -> None:
        self._taken.add(box)
        self._marks.put(box.ref.id, TAKEN)

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
            await self._settle()
            await asyncio.gather(*(self._check(box) for box in self._warm))

    async def _check(self, box: FleetSandbox) -> None:
        try:
            async with asyncio.timeout(HEALTH_REPLY_SECONDS):
                await box.status()
            self._check_age(box)
        except (HoldfastError, TimeoutError) as error:
            if box in self._warm:
                self._warm.remove(box)
                self._replace(box, str(error) or "no reply")

    async def _settle(self) -> None:
        """Remove again what could not be removed, and forget kept sandboxes that another process has removed."""
        if not self._unremoved and not self._kept:
            return
        try:
            present = {ref.id for ref in await self.fleet.list()}
            for id in tuple(self._unremoved):
                await self._remove_id(id)
                self._unremoved.discard(id)
        except HoldfastError as error:
            log.warning("pool %s: the engine does not answer: %s", self.name, error)
            return
        for id in self._kept - present:
            self.forget(id)
        self._refill()

    def _check_age(self, box: FleetSandbox) -> None:
        """Raise `SandboxError` if less than half of a sandbox's lifetime is left."""
        lifetime = self.template.lifetime
        if lifetime is not None and time.time() - box.ref.created_at > lifetime / 2:
            raise SandboxError(f"half of its lifetime of {lifetime:g} s is over")
