"""`Fleet`: the sandboxes of one engine, from `create` to `prune`; and `create`, a sandbox for one block.

What every engine has in common is here: a template is checked before anything is made, its files and setup commands
are applied through the connection, and a failure on the way leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import shlex
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from holdfast.client.opening import RECONNECT_DEADLINE
from holdfast.client.remote import RemoteExec
from holdfast.client.sandbox import Sandbox
from holdfast.errors import (
    CommandNotFound,
    CwdNotFound,
    HoldfastError,
    InvalidParams,
    NotExecutable,
    SandboxError,
    SandboxGone,
)
from holdfast.exec_api import ExecApi
from holdfast.fleet.egress import EgressOffer
from holdfast.fleet.engine import Activity, Engine, Progress, make_engine
from holdfast.fleet.record import Record, Refs, SandboxRef, has_ended, is_alive, new_record
from holdfast.fleet.template import Template, make_template

log = logging.getLogger(__name__)

#: How long a sandbox of `Fleet.create` lives if its template has no `lifetime`: a working day's job fits, and a
#: forgotten sandbox is gone the next day.
DEFAULT_LIFETIME: Final = 86_400.0
#: The lease of a sandbox that ends with its maker, renewed while the maker lives. On the maker's own machine its
#: end is noticed at once; elsewhere the sandbox is removed after this time.
LEASE_SECONDS: Final = 3_600.0
#: Sandboxes that one `Fleet` makes at a time; further calls wait. Engines become slower with more at once.
MAX_CREATES: Final = 20
#: At most one automatic prune in this time for each `Fleet`.
PRUNE_SECONDS: Final = 60.0
#: How long a sandbox without a reply may take to report its use.
ACTIVITY_SECONDS: Final = 10.0
#: For the first command of a warm sandbox; it takes milliseconds, and seconds on an engine under load.
WARM_UP_SECONDS: Final = 30.0
SETUP_OUTPUT_CHARACTERS: Final = 2_000


class FleetSandbox(Sandbox):
    """A `Sandbox` that a fleet made. `ref` is its reference; `async with` closes the connection at the end."""

    def __init__(
        self,
        api: ExecApi,
        ref: SandboxRef,
        *,
        egress: EgressOffer | None = None,
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`egress` is the proxy of a network allow-list; this object closes it."""
        super().__init__(api, user=user, cwd=cwd, env=env)
        self.ref = ref
        #: The user and the variables of every call, beside those of the sandbox itself.
        self.default_user = user
        self.variables = dict(env or {})
        self._egress = egress

    @property
    def is_connected(self) -> bool:
        """Whether the channel to the server in the sandbox is up at this moment."""
        return not isinstance(self.api, RemoteExec) or self.api.connection.connected

    async def warm_up(self) -> None:
        """Run a first command, before a caller waits for one.

        It costs a server several times as much as later ones, and its end shows that the sandbox can run processes.
        An image without `true` has to do without.
        """
        try:
            async with asyncio.timeout(WARM_UP_SECONDS):
                with contextlib.suppress(CommandNotFound, NotExecutable, CwdNotFound):
                    await self.exec(["true"])
        except TimeoutError:
            raise SandboxError(f"{self.ref.id}: `true` has not ended within {WARM_UP_SECONDS:g} s") from None

    async def aclose(self) -> None:
        try:
            if self._egress is not None:
                await self._egress.aclose()
        finally:
            await super().aclose()


class Fleet:
    """The sandboxes of one engine: `Fleet("docker")`. Holds no connection; sandboxes outlive it."""

    def __init__(self, engine: str | Engine, *, max_creates: int = MAX_CREATES, **options: Any) -> None:
        self.engine = make_engine(engine, **options)
        self._creating = asyncio.Semaphore(max_creates)
        #: Sandboxes that are being made at this moment.
        self.creating = 0
        self._pruned_at = -math.inf
        self._pruning: asyncio.Task[Any] | None = None

    async def create(
        self, template: Template | None = None, *, progress: Progress | None = None, **fields: Any
    ) -> SandboxRef:
        """Make a sandbox and return its reference once its setup commands have run.

        It lives for `lifetime` seconds, a day by default (`math.inf`: until it is removed). Keywords are fields of
        `Template`, laid over `template`.
        """
        template = make_template(template, fields)
        record = new_record(template, now=time.time(), lifetime=template.lifetime or DEFAULT_LIFETIME)
        box = await self.make(template, record, progress)
        await box.aclose()
        return box.ref

    @asynccontextmanager
    async def block(
        self, template: Template | None = None, *, progress: Progress | None = None, **fields: Any
    ) -> AsyncIterator[FleetSandbox]:
        """A sandbox for the length of an `async with` block. If this process is killed, any other removes it."""
        template = make_template(template, fields)
        record = new_record(template, now=time.time(), lifetime=template.lifetime or LEASE_SECONDS, bound=True)
        box = await self.make(template, record, progress)
        async with self._held(box, renew=not template.lifetime):
            yield box

    @asynccontextmanager
    async def _held(self, box: FleetSandbox, *, renew: bool) -> AsyncIterator[None]:
        """Renew the lease of a bound sandbox during a block, and remove the sandbox after it."""
        renewing = asyncio.create_task(self._renew(box.ref.record)) if renew else None
        try:
            yield
        finally:
            if renewing is not None:
                renewing.cancel()
            await asyncio.shield(self._end(box))

    async def _end(self, box: FleetSandbox) -> None:
        try:
            await box.aclose()
        finally:
            await self.engine.remove(box.ref.id)

    async def _renew(self, record: Record) -> None:
        """Extend the lease of a bound sandbox for as long as this process lives."""
        while True:
            await asyncio.sleep(LEASE_SECONDS / 3)
            try:
                await self.engine.extend(record.id, time.time() + LEASE_SECONDS)
            except SandboxGone:
                return
            except HoldfastError as error:
                log.warning("%s: the lease could not be extended: %s", record.id, error)

    async def make(self, template: Template, record: Record, progress: Progress | None = None) -> FleetSandbox:
        """Make a sandbox with a record that the caller chose, and stay connected to it."""
        await self.engine.check(template)
        self._prune_in_background()
        async with self._creation_slot():
            ref = await self.engine.create(template, record, progress)
            try:
                box = await self._connect(ref)
                try:
                    await _apply(box, template, progress)
                except BaseException:
                    await box.aclose()
                    raise
            except BaseException:
                await asyncio.shield(self.engine.remove(ref.id))
                raise
        return box

    @asynccontextmanager
    async def _creation_slot(self) -> AsyncIterator[None]:
        """One of the places for sandboxes that are being made."""
        async with self._creating:
            self.creating += 1
            try:
                yield
            except OSError as error:
                if isinstance(error, HoldfastError) or error.errno is None:
                    raise
                # The file system of the engine's directory: full, read-only, or not ours.
                raise SandboxError(f"engine {self.engine.name}: {error}") from error
            finally:
                self.creating -= 1

    async def reset(self, id: str, template: Template) -> FleetSandbox:
        """Start a sandbox again from its template, without the files that it wrote, and connect to it."""
        ref = await self.engine.reset(await self.engine.get(id))
        box = await self._connect(ref)
        try:
            await _apply(box, template, None)
        except BaseException:
            await box.aclose()
            raise
        return box

    async def connect(self, id: str, *, reconnect_deadline: float = RECONNECT_DEADLINE) -> FleetSandbox:
        """Connect to a sandbox of this fleet. The caller closes it: `aclose`, or `async with`."""
        return await self._connect(await self.engine.get(id), reconnect_deadline)

    async def _connect(
        self, ref: SandboxRef, reconnect_deadline: float = RECONNECT_DEADLINE, *, observes: bool = False
    ) -> FleetSandbox:
        """Connect to a sandbox; with `observes` no command is run, and so no proxy is needed."""
        if ref.state == "paused":
            raise InvalidParams(f"{ref.id}: the sandbox is paused; resume it first")
        template = ref.record.template
        api = await self.engine.open(ref, reconnect_deadline=reconnect_deadline)
        env: dict[str, str] = {}
        egress: EgressOffer | None = None
        try:
            if template.allowed_hosts and not observes:
                egress = await self._offer_egress(api, template.allowed_hosts)
                env = {**egress.env, **template.env}
        except BaseException:
            await api.aclose()
            raise
        as_user = self.engine.serves_as_user and not template.options.get("server_as_root")
        user = None if as_user else template.user
        return FleetSandbox(api, ref, egress=egress, user=user, cwd=template.workdir, env=env or None)

    async def _offer_egress(self, api: ExecApi, hosts: tuple[str, ...]) -> EgressOffer:
        if not isinstance(api, RemoteExec):
            raise InvalidParams(f"engine {self.engine.name}: network: an allow-list needs a server in the sandbox")
        egress = EgressOffer(api.connection, hosts)
        await egress.start()
        return egress

    async def list(self, *, labels: Mapping[str, str] | None = None) -> Refs:
        """All sandboxes of this engine, of any maker; with `labels`, those that carry all of them."""
        wanted = (labels or {}).items()
        return [ref for ref in await self.engine.list() if wanted <= ref.labels.items()]

    async def get(self, id: str) -> SandboxRef:
        """The sandbox with this id. `SandboxGone` if there is none."""
        return await self.engine.get(id)

    async def extend(self, id: str, seconds: float) -> SandboxRef:
        """Let a sandbox live `seconds` longer, from now if it has expired already."""
        if not seconds > 0:
            raise InvalidParams(f"seconds: {seconds!r} is not a positive number")
        ref = await self.engine.get(id)
        if ref.expires_at is not None:
            until = None if math.isinf(seconds) else max(ref.expires_at, time.time()) + seconds
            await self.engine.extend(id, until)
        return await self.engine.get(id)

    async def pause(self, id: str) -> None:
        """Stop all processes of a sandbox; its memory and files stay."""
        await self.engine.pause(id)

    async def resume(self, id: str) -> None:
        await self.engine.resume(id)

    async def fork(self, id: str, **fields: Any) -> SandboxRef:
        """Make a sandbox with the files of another one as they are at this moment. Processes are not copied.

        `labels`, `lifetime`, `idle`, `env` and limits can be given anew; the rest is as it was.
        """
        ref = await self.engine.get(id)
        # The record is JSON, which has no infinite lifetime: there, such a sandbox has no expiry.
        usual = math.inf if ref.record.expires_at is None else DEFAULT_LIFETIME
        return await self._fork(ref, fields, usual)

    @asynccontextmanager
    async def forked(self, id: str, **fields: Any) -> AsyncIterator[FleetSandbox]:
        """A fork for the length of an `async with` block, as `block` makes a sandbox."""
        ref = await self._fork(await self.engine.get(id), fields, LEASE_SECONDS, bound=True)
        try:
            box = await self._connect(ref)
        except BaseException:
            await asyncio.shield(self.engine.remove(ref.id))
            raise
        async with self._held(box, renew=not ref.record.template.lifetime):
            yield box

    async def _fork(
        self, ref: SandboxRef, fields: Mapping[str, Any], usual: float, *, bound: bool = False
    ) -> SandboxRef:
        if fields.keys() & {"image", "root", "files", "setup"}:
            raise InvalidParams("fork: image, root, files and setup are those of the forked sandbox")
        template = make_template(ref.record.template, dict(fields))
        await self.engine.check(template)
        lifetime = template.lifetime or usual
        record = new_record(template, now=time.time(), lifetime=lifetime, bound=bound, fork_of=ref.id)
        async with self._creation_slot():
            return await self.engine.fork(ref, record)

    async def remove(self, id: str) -> None:
        """Remove a sandbox with all that it holds. No error if it is gone already."""
        await self.engine.remove(id)

    # --- pruning -----------------------------------------------------------------------------------------------

    async def prune(self) -> Refs:
        """Remove the sandboxes of any maker that have expired, are idle for too long, or lost their maker.

        Returns those that were removed. One that cannot be removed is logged, and the others are removed still.
        """
        self._pruned_at = time.monotonic()
        removed: Refs = []
        for ref in await self.engine.list():
            if not await self._is_over(ref):
                continue
            try:
                await self.engine.remove(ref.id)
            except HoldfastError as error:
                log.warning("%s: the sandbox has expired and cannot be removed: %s", ref.id, error)
            else:
                removed.append(ref)
        await self.engine.sweep()
        return removed

    async def _is_over(self, ref: SandboxRef) -> bool:
        if ref.expires_at is not None and ref.expires_at <= time.time():
            # The lease of a maker that runs here is not over: the clock was set forward, or the maker was stopped.
            is_lease = ref.record.bound and ref.record.template.lifetime is None
            return not (is_lease and is_alive(ref.record.owner))
        if ref.record.bound and has_ended(ref.record.owner):
            return True
        idle = ref.record.template.idle
        if idle is None:
            return False
        activity = await self.activity(ref)
        if activity is None:
            return False
        busy = bool(activity.running) and not ref.record.template.idle_while_running
        return not busy and activity.idle_seconds >= idle

    async def activity(self, ref: SandboxRef, *, timeout: float = ACTIVITY_SECONDS) -> Activity | None:
        """How much a sandbox is used; None if it does not run or does not reply. Not a use of it by itself."""
        if ref.state != "running":
            return None
        try:
            async with asyncio.timeout(timeout):
                box = await self._connect(ref, reconnect_deadline=0.0, observes=True)
                try:
                    status = await box.status()
                finally:
                    await box.aclose()
        except (HoldfastError, TimeoutError) as error:
            log.info("%s: does not report its use: %s", ref.id, error)
            return None
        if status.idle_seconds is None:
            return None
        return Activity(status.idle_seconds, status.processes_running)

    def _prune_in_background(self) -> None:
        """Prune at most once a minute: every maker cleans up after those that were killed."""
        if time.monotonic() - self._pruned_at < PRUNE_SECONDS or self._pruning is not None:
            return
        self._pruned_at = time.monotonic()
        self._pruning = asyncio.create_task(self.prune())
        self._pruning.add_done_callback(self._pruned)

    def _pruned(self, task: asyncio.Task[Any]) -> None:
        self._pruning = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("engine %s: expired sandboxes could not be removed: %s", self.engine.name, error)

    async def aclose(self) -> None:
        """Release what this object holds. Sandboxes stay."""
        if self._pruning is not None:
            self._pruning.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pruning
        await self.engine.aclose()

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


@asynccontextmanager
async def create(
    engine: str | Engine, template: Template | None = None, *, progress: Progress | None = None, **fields: Any
) -> AsyncIterator[FleetSandbox]:
    """A sandbox made for an `async with` block, and removed after it.

    `engine` is `bwrap`, `docker`, `podman`, `kubernetes` or `local`; keywords are fields of `Template`.
    """
    async with Fleet(engine) as fleet, fleet.block(template, progress=progress, **fields) as box:
        yield box


async def _apply(box: Sandbox, template: Template, progress: Progress | None) -> None:
    """Write the files and run the setup commands of a template."""
    for path, content in template.files.items():
        await box.write_file(path, content)
    for number, command in enumerate(template.setup):
        if progress is not None:
            progress(f"setup: {shlex.join(command)}", number / len(template.setup))
        result = await box.exec(command)
        if result.exit_code != 0:
            printed = (result.stderr or result.stdout)[-SETUP_OUTPUT_CHARACTERS:].strip()
            raise SandboxError(
                f"setup: {shlex.join(command)}: exit code {result.exit_code}: {printed or 'it printed nothing'}"
            )
