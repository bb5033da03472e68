"""`Sandboxes`: the sandboxes of the E2B server on one fleet: making, finding, ending them, and their connections.

The timeout of a sandbox is its expiry on the engine. A task removes or pauses sandboxes at their time; if no server
runs, any other Holdfast process removes them later. Touches the engine through the fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec

from holdfast.errors import HoldfastError, InvalidParams, SandboxGone
from holdfast.fleet.fleet import Fleet
from holdfast.fleet.record import Refs, SandboxRef, is_id
from holdfast.fleet.template import Template, make_template
from holdfast.integrations.e2b.control import records
from holdfast.integrations.e2b.control.requests import NewSandbox, check_metadata, effective_network
from holdfast.integrations.e2b.open_sandbox import OpenSandbox
from holdfast.integrations.e2b.problems import Problem, invalid, not_found, not_running, problem_of, unsupported
from holdfast.integrations.e2b.settings import E2BSettings

log = logging.getLogger(__name__)

#: How often the engine's sandboxes are listed again, for those that other processes made or removed.
_REFRESH_SECONDS: Final = 60.0
#: How long calls wait for a broken connection to a sandbox: one that ended must be reported soon.
_RECONNECT_SECONDS: Final = 10.0
#: Connections that are opened at a time when the server starts.
_OPEN_AT_ONCE: Final = 20


class Sandboxes:
    """All sandboxes of one server. Call `start` once, and `aclose` at the end."""

    def __init__(self, fleet: Fleet, templates: dict[str, Template], settings: E2BSettings) -> None:
        self.fleet = fleet
        self.templates = templates
        self.settings = settings
        self._open: dict[str, OpenSandbox] = {}
        self._opening: dict[str, asyncio.Task[OpenSandbox]] = {}
        #: The end of the timeout of each known sandbox; infinity for those without one.
        self._ends: dict[str, float] = {}
        self._ends_changed = asyncio.Event()
        self._making = 0
        self._keys: dict[str, asyncio.Lock] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._reaper: asyncio.Task[None] | None = None
        self._finding: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Find the sandboxes of earlier servers, and watch their timeouts and those of their processes."""
        await self._refresh()
        self._reaper = asyncio.create_task(self._reap())
        running = [ref.id for ref in await self.list() if ref.state == "running"]
        self._finding = asyncio.create_task(self._open_all(running))

    async def _open_all(self, ids: Sequence[str]) -> None:
        """Connect to sandboxes of an earlier server, whose processes may have deadlines."""
        for start in range(0, len(ids), _OPEN_AT_ONCE):
            group = ids[start : start + _OPEN_AT_ONCE]
            results = await asyncio.gather(*(self.open(id) for id in group), return_exceptions=True)
            for id, result in zip(group, results, strict=True):
                if isinstance(result, HoldfastError | Problem):
                    log.warning("%s: cannot connect: %s", id, result)
                elif isinstance(result, BaseException):
                    raise result

    async def aclose(self) -> None:
        """Close the connections; the sandboxes continue."""
        tasks = [task for task in (self._reaper, self._finding, *self._opening.values()) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for opened in self._open.values():
            await opened.aclose()
        self._open.clear()

    # --- making --------------------------------------------------------------------------------------------------

    async def create(self, wanted: NewSandbox, idempotency_key: str | None = None) -> SandboxRef:
        """Make the sandbox of a request; a repeated key returns the existing one."""
        if idempotency_key is None:
            return await self._create(wanted, {})
        key = hashlib.sha256(idempotency_key.encode()).hexdigest()
        lock = self._keys.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                labels = {records.IDEMPOTENCY: key}
                existing = await self.fleet.list(labels=labels)
                return existing[0] if existing else await self._create(wanted, labels)
        finally:
            if not lock.locked():
                self._keys.pop(key, None)

    async def _create(self, wanted: NewSandbox, labels: dict[str, str]) -> SandboxRef:
        for name in ("mcp", "iam", "volume_mounts"):
            if getattr(wanted, name):
                raise unsupported(self.fleet.engine.name, name, "this server does not have it")
        template = self.templates.get(wanted.template_id)
        source = None if template is not None else await self.snapshot_named(wanted.template_id)
        if template is None:
            if source is None:
                raise not_found(f"template {wanted.template_id[:100]!r} not found")
            template = source.record.template
        pauses = wanted.auto_pause
        resumes = wanted.auto_resume is not None and wanted.auto_resume.enabled
        public = None if wanted.network is None else wanted.network.allow_public_traffic
        fields: dict[str, Any] = {
            "network": effective_network(wanted.network, wanted.allow_internet_access, template.network),
            "env": {
                "E2B_SANDBOX": "true",
                "E2B_TEMPLATE_ID": wanted.template_id,
                **template.env,
                **(wanted.env_vars or {}),
            },
            "lifetime": self._lifetime(wanted.timeout, pauses),
            "labels": {
                **labels,
                records.KIND: records.SANDBOX,
                records.TEMPLATE: wanted.template_id,
                records.METADATA: msgspec.json.encode(check_metadata(wanted.metadata or {})).decode(),
                records.ON_TIMEOUT: "pause" if pauses else "kill",
                records.AUTO_RESUME: "true" if resumes else "false",
                records.PUBLIC: "" if public is None else str(public).lower(),
            },
        }
        async with self._creation_slot():
            if source is not None:
                ref = await self.fork_of(source.id, fields)
            else:
                ref = await self.fleet.create(make_template(template, fields))
        self._note(ref)
        return ref

    async def fork_of(self, id: str, fields: dict[str, Any]) -> SandboxRef:
        try:
            return await self.fleet.fork(id, **fields)
        except InvalidParams as error:
            if "fork: this engine" in error.message:
                raise unsupported(self.fleet.engine.name, "fork", "this engine does not have it") from None
            raise

    @contextlib.asynccontextmanager
    async def _creation_slot(self) -> Any:
        """One of the places for sandboxes; the check and the count have no await between them."""
        if len(self._ends) + self._making >= self.settings.max_sandboxes:
            raise Problem(
                429, "resource_exhausted", f"{self.settings.max_sandboxes} sandboxes exist (setting max_sandboxes)"
            )
        self._making += 1
        try:
            yield
        finally:
            self._making -= 1

    def check_timeout(self, seconds: int) -> int:
        if not 0 <= seconds <= self.settings.max_timeout:
            raise invalid(f"timeout: {seconds} is not between 0 and {self.settings.max_timeout} seconds")
        return seconds

    def _lifetime(self, timeout: int, pauses: bool) -> float:
        """The lifetime on the engine: a sandbox that pauses at its timeout must outlive it."""
        return max(1.0, self.check_timeout(timeout)) + (self.settings.paused_seconds if pauses else 0.0)

    # --- finding -------------------------------------------------------------------------------------------------

    async def get(self, id: str) -> SandboxRef:
        """The sandbox with this id, as an object of the control API; 404 if there is none."""
        if is_id(id):
            try:
                ref = await self.fleet.get(id)
                if records.is_sandbox(ref) and ref.state in ("running", "paused"):
                    return ref
            except SandboxGone:
                self._ends.pop(id, None)
        raise not_found(f"sandbox {id[:64]!r} not found")

    async def list(self) -> Refs:
        found = await self.fleet.list(labels={records.KIND: records.SANDBOX})
        now = time.time()
        return [
            ref
            for ref in found
            if ref.state in ("running", "paused") and (ref.expires_at is None or ref.expires_at > now)
        ]

    def known(self) -> tuple[str, ...]:
        """The ids of sandboxes that this server has made or found."""
        return tuple(self._ends)

    async def snapshots(self) -> Refs:
        return await self.fleet.list(labels={records.KIND: records.SNAPSHOT})

    async def snapshot_named(self, name: str) -> SandboxRef | None:
        """The latest snapshot with this id or name, also as `NAME:default`."""
        name = name.removesuffix(":default")
        found = [ref for ref in await self.snapshots() if name and name in (ref.id, ref.labels.get(records.NAMES))]
        return max(found, key=lambda ref: ref.created_at, default=None)

    # --- the rest of a life --------------------------------------------------------------------------------------

    async def kill(self, id: str) -> None:
        ref = await self.get(id)
        await self.remove(ref.id)

    async def remove(self, id: str) -> None:
        await self.drop(id)
        await self.fleet.remove(id)
        self._ends.pop(id, None)

    async def set_timeout(self, id: str, seconds: int, *, only_longer: bool = False) -> SandboxRef:
        """Let the timeout end `seconds` from now; with `only_longer`, not before its present end."""
        async with self._lock(id):
            return await self._set_timeout(id, seconds, only_longer=only_longer)

    async def _set_timeout(self, id: str, seconds: int, *, only_longer: bool) -> SandboxRef:
        ref = await self.get(id)
        until = time.time() + self._lifetime(seconds, records.pauses_at_end(ref))
        if only_longer and (ref.expires_at is None or until <= ref.expires_at):
            return ref
        await self.fleet.engine.extend(id, until)
        return self._note(await self.fleet.get(id))

    async def pause(self, id: str) -> bool:
        """Pause a sandbox; False if it is paused already."""
        async with self._lock(id):
            return await self._pause(id)

    async def _pause(self, id: str) -> bool:
        ref = await self.get(id)
        if ref.state == "paused":
            return False
        await self.drop(id)
        try:
            await self.fleet.pause(id)
        except InvalidParams as error:
            raise unsupported(self.fleet.engine.name, "pause", error.message) from None
        # A request may have connected meanwhile; its calls would wait until the sandbox is resumed.
        await self.drop(id)
        await self.fleet.engine.extend(id, time.time() + self.settings.paused_seconds)
        self._note(await self.fleet.get(id))
        return True

    async def connect(self, id: str, timeout: int) -> tuple[SandboxRef, bool]:
        """Resume a sandbox if it is paused, and let it live for `timeout` seconds; also whether it was paused."""
        self.check_timeout(timeout)
        async with self._lock(id):
            ref = await self.get(id)
            paused = ref.state == "paused"
            if paused:
                await self.fleet.resume(id)
            return await self._set_timeout(id, timeout, only_longer=not paused), paused

    def _lock(self, id: str) -> asyncio.Lock:
        """One change of a sandbox at a time: a pause at a timeout must not overlap with a resume."""
        return self._locks.setdefault(id, asyncio.Lock())

    async def fork(self, id: str, timeout: int) -> SandboxRef:
        ref = await self.get(id)
        labels = {name: value for name, value in ref.labels.items() if name != records.IDEMPOTENCY}
        lifetime = self._lifetime(timeout, records.pauses_at_end(ref))
        async with self._creation_slot():
            return self._note(await self.fork_of(id, {"labels": labels, "lifetime": lifetime}))

    async def snapshot(self, id: str, name: str | None) -> SandboxRef:
        """A paused copy of a sandbox's files, from which sandboxes are made. It replaces one of the same name."""
        ref = await self.get(id)
        older = None if not name else await self.snapshot_named(name)
        made = await self.make_snapshot(ref.id, name or "", {})
        if older is not None:
            await self.remove(older.id)
        return made

    async def make_snapshot(self, id: str, name: str, fields: dict[str, Any]) -> SandboxRef:
        labels = {records.KIND: records.SNAPSHOT, records.NAMES: name, records.SOURCE: id}
        async with self._creation_slot():
            made = await self.fork_of(id, {"labels": labels, "lifetime": math.inf, **fields})
        try:
            await self.fleet.pause(made.id)
        except BaseException:
            await asyncio.shield(self.fleet.remove(made.id))
            raise
        self._ends[made.id] = math.inf
        return await self.fleet.get(made.id)

    # --- connections ---------------------------------------------------------------------------------------------

    async def open(self, id: str) -> OpenSandbox:
        """The connection to a sandbox, opened by its first request. 502 if the sandbox does not run."""
        opened = self._open.get(id)
        if opened is not None:
            return opened
        if not is_id(id):
            raise not_running(id)
        task = self._opening.get(id)
        if task is None:
            task = self._opening[id] = asyncio.create_task(self._connect(id))
            task.add_done_callback(lambda _: self._opening.pop(id, None))
        # Several requests wait for one connection: the end of one of them must not end it.
        return await asyncio.shield(task)

    async def _connect(self, id: str) -> OpenSandbox:
        try:
            ref = await self.get(id)
        except Problem:
            raise not_running(id) from None
        if ref.state == "paused":
            if ref.labels.get(records.AUTO_RESUME) != "true":
                raise not_running(id)
            ref, _ = await self.connect(id, 300)
        try:
            box = await self.fleet.connect(id, reconnect_deadline=_RECONNECT_SECONDS)
            try:
                opened = OpenSandbox(ref, box, await box.info())
                await opened.watch_deadlines()
                self._open[id] = opened
            except BaseException:
                await box.aclose()
                raise
        except HoldfastError as error:
            raise problem_of(error, id) from error
        return opened

    async def drop(self, id: str) -> None:
        """Close the connection to a sandbox, whose streams end."""
        opened = self._open.pop(id, None)
        if opened is not None:
            await opened.aclose()

    # --- timeouts ------------------------------------------------------------------------------------------------

    def _note(self, ref: SandboxRef) -> SandboxRef:
        end = records.end_of(ref, self.settings)
        self._ends[ref.id] = math.inf if end is None else end
        self._ends_changed.set()
        return ref

    async def _refresh(self) -> None:
        known = [ref for ref in await self.fleet.list() if records.KIND in ref.labels]
        self._ends = {}
        for ref in known:
            self._note(ref)

    async def _reap(self) -> None:
        refreshed = time.monotonic()
        while True:
            now = time.time()
            for id in [id for id, end in self._ends.items() if end <= now]:
                await self._end(id)
            if time.monotonic() - refreshed > _REFRESH_SECONDS:
                refreshed = time.monotonic()
                try:
                    await self._refresh()
                except HoldfastError as error:
                    log.warning("engine %s: cannot list its sandboxes: %s", self.fleet.engine.name, error)
            self._ends_changed.clear()
            delay = max(0.0, min(_REFRESH_SECONDS, min(self._ends.values(), default=math.inf) - time.time()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._ends_changed.wait()

    async def _end(self, id: str) -> None:
        """The timeout of a sandbox is over."""
        try:
            async with self._lock(id):
                ref = await self.fleet.get(id)
                end = records.end_of(ref, self.settings)
                if end is None or end > time.time():
                    self._note(ref)
                elif records.pauses_at_end(ref) and ref.state == "running":
                    await self._pause(id)
                else:
                    await self.remove(id)
        except SandboxGone:
            self._ends.pop(id, None)
            await self.drop(id)
        except (HoldfastError, Problem) as error:
            log.warning("%s: cannot end after its timeout: %s", id, error)
            # Again with the next refresh, not at once.
            self._ends[id] = time.time() + _REFRESH_SECONDS
