"""Makes a sandbox for a session or takes one of a pool, connects to it, and removes it after the session.

The store has a row for each sandbox from before it is made until it is removed, so any replica removes the sandbox
of a session that is over, also after a crash. The row of a pool's sandbox is written when it is taken; until then
the pool removes it, and after a crash its lease expires. Touches engines through `holdfast.fleet`, and the store.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Protocol

import msgspec

from holdfast.errors import HoldfastError
from holdfast.exec_api import ExecApi
from holdfast.fleet.engine import ENGINES, SandboxEnding
from holdfast.fleet.fleet import Fleet, FleetSandbox
from holdfast.fleet.record import ID_PREFIX, Refs, is_id, new_id, new_record
from holdfast.fleet.template import Template
from holdfast.service.policy.made_sandbox import MadeSandbox
from holdfast.service.problems import Denied, NotNow, Problem, TooLate
from holdfast.service.sandboxes.session_pools import SessionPools
from holdfast.service.sessions.backend.connections import problem_of
from holdfast.service.sessions.following.events import audit_entry
from holdfast.service.settings import ServiceSettings
from holdfast.service.store.types import OwnedSandbox
from holdfast.service.types import AuditEntry, SessionRecord

#: A sandbox outlives the lifetime of its session by so much: the session closes in order first, also when its
#: replica ended and another one takes the lease. After that any Holdfast process prunes the sandbox.
SPARE_SECONDS: Final = 600.0
#: How long one replica has for a removal before another one repeats it: engines stop processes in half a minute.
REMOVAL_SECONDS: Final = 120.0

_IDS: Final = re.compile(re.escape(ID_PREFIX) + r"[a-z0-9]{16}")

_log = logging.getLogger("holdfast.service")


class SandboxStore(Protocol):
    """The part of the store that has the sandboxes of sessions."""

    async def add_sandbox(self, owned: OwnedSandbox) -> None: ...

    async def keeps_sandbox(self, session_id: str) -> bool: ...

    async def owned_sandboxes(self, sandbox: str = "") -> list[OwnedSandbox]: ...

    async def claim_removals(
        self, seconds: float, limit: int = 100, session_id: str | None = None
    ) -> list[OwnedSandbox]: ...

    async def sandbox_removed(self, session_id: str) -> bool: ...

    async def session(self, session_id: str) -> SessionRecord: ...

    async def update_session(self, session_id: str, /, **fields: Any) -> SessionRecord: ...

    async def append(self, entries: list[AuditEntry]) -> Any: ...


class SessionSandboxes:
    """The sandboxes of this replica's sessions; a `ports.SessionWatcher` that removes those of closed ones."""

    def __init__(
        self,
        store: SandboxStore,
        settings: ServiceSettings,
        retire: Callable[[str], None],
        make_fleet: Callable[[str], Fleet] = Fleet,
        pools: SessionPools | None = None,
    ) -> None:
        """`retire` closes the connection to an address that is removed."""
        self.pools = pools or SessionPools()
        self._store = store
        self._settings = settings
        self._retire = retire
        self._make_fleet = make_fleet
        self._fleets: dict[str, Fleet] = {}
        #: New sandboxes that are connected already, until the first use of their address.
        self._connected: dict[str, FleetSandbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # --- making --------------------------------------------------------------------------------------------------

    def new_address(self, made: MadeSandbox) -> str:
        """Return the address of a sandbox that is to be made. The store has the address before the engine does.

        A pool chooses the sandbox later; until then the session has the address of the pool.
        """
        return f"pool:{made.pool}" if made.pool else f"{made.engine}:{new_id()}"

    async def check_unowned(self, address: str) -> None:
        """Refuse the address of a sandbox that belongs to a session or to a pool."""
        if ID_PREFIX not in address:
            return
        for id in _IDS.findall(address):
            if self.pools.has(id):
                raise Denied(f"sandbox {address!r} belongs to a pool", reason="SANDBOX_NOT_ALLOWED")
        for owned in await self._store.owned_sandboxes():
            if owned.sandbox.partition(":")[2] in address:
                raise Denied(f"sandbox {address!r} belongs to another session", reason="SANDBOX_NOT_ALLOWED")

    async def make(self, record: SessionRecord, made: MadeSandbox) -> SessionRecord:
        """Make or take the sandbox of a session that the store has; return the session with its address."""
        record, hash = await (self._take(record, made) if made.pool else self._make(record, made))
        body = {"sandbox": record.sandbox, "template": made.template_name, "template_hash": hash}
        if made.pool:
            body["pool"] = made.pool
        await self._store.append([audit_entry(record, time.time(), "sandbox_made", **body)])
        return record

    async def _take(self, record: SessionRecord, made: MadeSandbox) -> tuple[SessionRecord, str]:
        """Take a sandbox of a pool. The session has the sandbox once the store has both."""
        try:
            async with asyncio.timeout(self._settings.sandbox_seconds):
                pool, box = await self.pools.take(made.pool, self._settings.sandbox_seconds)
        except TimeoutError:
            raise self._too_late(record) from None
        except HoldfastError as error:
            raise problem_of(error, record.sandbox) from error
        address = f"{made.engine}:{box.ref.id}"
        try:
            await self._store.add_sandbox(OwnedSandbox(record.session_id, record.agent_id, address))
            await pool.keep(box, record.policy.max_lifetime + SPARE_SECONDS)
            # A session that is over does not change: another replica took the lease and closed the session.
            taken = await self._store.update_session(record.session_id, sandbox=address)
            if taken.sandbox != address:
                raise _overtaken()
        except BaseException as error:
            await asyncio.shield(pool.give_back(box))
            if isinstance(error, HoldfastError):
                raise problem_of(error, address) from error
            raise
        self._connected[address] = box
        return taken, pool.template.hash

    async def _make(self, record: SessionRecord, made: MadeSandbox) -> tuple[SessionRecord, str]:
        engine, _, id = record.sandbox.partition(":")
        await self._store.add_sandbox(OwnedSandbox(record.session_id, record.agent_id, record.sandbox))
        if engine == "bwrap" and made.template.user is not None:
            raise NotNow(
                f"template {made.template_name!r}: user: in a jail the user of a session is sandbox.user",
                reason="SANDBOX_UNUSABLE",
            )
        # The session's own limits apply instead, see `narrow_policy`.
        labels = {**made.template.labels, "session": record.session_id, "agent": record.agent_id}
        template = msgspec.structs.replace(made.template, lifetime=None, idle=None, labels=labels)
        lifetime = record.policy.max_lifetime + SPARE_SECONDS
        new = msgspec.structs.replace(new_record(template, now=time.time(), lifetime=lifetime), id=id)
        try:
            async with asyncio.timeout(self._settings.sandbox_seconds):
                box = await self._fleet(engine).make(template, new)
        except TimeoutError:
            raise self._too_late(record) from None
        except HoldfastError as error:
            raise problem_of(error, record.sandbox) from error
        self._connected[record.sandbox] = box
        if not await self._store.keeps_sandbox(record.session_id):
            # Another replica took the lease meanwhile, closed the session, and found no sandbox to remove.
            await self._remove(record.sandbox)
            raise _overtaken()
        return record, template.hash

    def _too_late(self, record: SessionRecord) -> TooLate:
        return TooLate(
            f"sandbox {record.sandbox!r}: not made within {self._settings.sandbox_seconds:g} s (sandbox_seconds)",
            reason="SANDBOX_NOT_READY",
        )

    async def connect(self, address: str) -> ExecApi | None:
        """Connect to a sandbox of the fleet by `ENGINE:ID`; None for another address."""
        engine, _, id = address.partition(":")
        if engine == "pool":
            raise NotNow(f"sandbox {address!r}: the session has no sandbox yet", reason="SANDBOX_NOT_READY")
        if engine not in ENGINES or not is_id(id):
            return None
        if (box := self._connected.pop(address, None)) is not None:
            return box.api
        fleet = self._fleet(engine)
        ref = await fleet.get(id)
        return await fleet.engine.open(ref, reconnect_deadline=self._settings.reconnect_seconds)

    async def template_of(self, record: SessionRecord) -> Template | None:
        """Return the template of the sandbox that was made for this session; None if there is no such sandbox."""
        owned = await self._store.owned_sandboxes(record.sandbox)
        if not any(each.session_id == record.session_id and each.sandbox == record.sandbox for each in owned):
            return None
        engine, _, id = record.sandbox.partition(":")
        try:
            return (await self._fleet(engine).get(id)).record.template
        except HoldfastError as error:
            raise problem_of(error, record.sandbox) from error

    def _fleet(self, engine: str) -> Fleet:
        if engine not in self._fleets:
            self._fleets[engine] = self._make_fleet(engine)
        return self._fleets[engine]

    def endings(self, engine: str) -> AsyncIterator[SandboxEnding]:
        """The ends of sandboxes that an engine announces."""
        return self._fleet(engine).engine.endings()

    async def listed(self, engine: str) -> Refs | None:
        """Return the sandboxes of an engine, of any maker; None if this machine does not have the engine."""
        fleet = self._fleet(engine)
        return await fleet.list() if fleet.engine.is_installed() else None

    # --- removing ------------------------------------------------------------------------------------------------

    def watch(self, record: SessionRecord) -> None:
        """`ports.SessionWatcher`: nothing is to be done while a session is open."""

    def forget(self, session_id: str) -> None:
        """`ports.SessionWatcher`: the replica that follows the session removes its sandbox."""

    def closed(self, session_id: str) -> None:
        """`ports.SessionWatcher`: remove the sandbox of a session that is over, if it has one."""
        task = asyncio.create_task(self._remove_later(session_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _remove_later(self, session_id: str) -> None:
        try:
            await self.remove_ended(session_id)
        except HoldfastError as error:
            _log.warning("session %s: its sandbox is removed later: %s", session_id, error.message)

    async def remove_ended(self, session_id: str | None = None) -> int:
        """Remove the sandboxes of sessions that are over, or of one such session; return their number."""
        removed = 0
        for owned in await self._store.claim_removals(REMOVAL_SECONDS, session_id=session_id):
            try:
                await self._remove(owned.sandbox)
            except HoldfastError as error:
                # The claim ends, and the next pass of any replica repeats the removal.
                _log.warning("sandbox %s cannot be removed: %s", owned.sandbox, error.message)
                continue
            if await self._store.sandbox_removed(owned.session_id):
                removed += 1
                await self._record_removal(owned)
        return removed

    async def _remove(self, address: str) -> None:
        engine, _, id = address.partition(":")
        self._retire(address)
        if (box := self._connected.pop(address, None)) is not None:
            await box.aclose()
        await self._fleet(engine).remove(id)
        self.pools.removed(id)

    async def _record_removal(self, owned: OwnedSandbox) -> None:
        try:
            record = await self._store.session(owned.session_id)
            await self._store.append([audit_entry(record, time.time(), "sandbox_removed", sandbox=owned.sandbox)])
        except Problem as problem:  # retention has removed the session
            _log.info("sandbox %s removed, without an audit row: %s", owned.sandbox, problem.message)

    async def prune(self) -> None:
        """Remove expired sandboxes of the engines that this replica uses, of any maker."""
        for engine in {*self._fleets, *(each.sandbox.partition(":")[0] for each in await self._owned())}:
            try:
                for ref in await self._fleet(engine).prune():
                    _log.info("sandbox %s:%s had expired and is removed", engine, ref.id)
            except HoldfastError as error:
                _log.warning("engine %s: expired sandboxes cannot be removed: %s", engine, error.message)

    async def _owned(self) -> list[OwnedSandbox]:
        return await self._store.owned_sandboxes()

    async def stop(self) -> None:
        """Finish removals, and close connections that no session uses. Sandboxes of open sessions stay."""
        await self.pools.stop()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for box in self._connected.values():
            await box.aclose()
        self._connected.clear()
        for fleet in self._fleets.values():
            await fleet.aclose()


def _overtaken() -> NotNow:
    return NotNow("another replica ended the session while its sandbox was made", reason="SESSION_CLOSED")
