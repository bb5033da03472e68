"""Composes the service: settings, store, rules, sessions, monitor, front ends, signals.

The assembly starts the parts, waits for a signal, and stops the parts in reverse order. Sessions are not stopped:
they continue in their sandboxes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

from msgspec.structs import replace

from holdfast.client.opening import open_exec
from holdfast.console.application import console_application
from holdfast.errors import HoldfastError
from holdfast.exec_api import ExecApi
from holdfast.launch.local_server import ensure_server
from holdfast.sandboxes.registry import check_address
from holdfast.secret_names import is_dropped
from holdfast.service.access import agents
from holdfast.service.access.admission import Admission
from holdfast.service.access.rates import Rates
from holdfast.service.access.session_users import check_free, parse_uids
from holdfast.service.access.tokens import Access, AccessSettings
from holdfast.service.audit.redaction import Redactor
from holdfast.service.clock import SystemClock, WallClock
from holdfast.service.fronts.connections import ConnectionLimits, descriptors_for_ports
from holdfast.service.fronts.grpc import GrpcFront, GrpcSettings
from holdfast.service.fronts.handler import Handler
from holdfast.service.fronts.http import HttpFront, HttpSettings
from holdfast.service.fronts.listening import TlsFiles
from holdfast.service.fronts.previews.application import PreviewFront
from holdfast.service.fronts.readiness import Readiness
from holdfast.service.housekeeping import Housekeeping
from holdfast.service.monitor.gateway import MonitorGateway
from holdfast.service.monitor.monitor import MonitorSettings, ResourceMonitor
from holdfast.service.monitor.thresholds import ThresholdSettings
from holdfast.service.observability.logs import LogSettings, configure_logs
from holdfast.service.observability.metered_store import MeteredStore
from holdfast.service.observability.metrics import Metrics
from holdfast.service.observability.observer import ServiceCallObserver, count_metrics, count_sessions
from holdfast.service.observability.tracing import Tracer, open_tracer
from holdfast.service.policy.made_sandbox import is_made
from holdfast.service.policy.profiles import PolicyRules
from holdfast.service.previews.previews import Previews
from holdfast.service.problems import Problem
from holdfast.service.rules_file import read_rules
from holdfast.service.sandboxes.sandbox_endings import SandboxEndings
from holdfast.service.sandboxes.session_pools import SessionPools
from holdfast.service.sandboxes.session_sandboxes import SessionSandboxes
from holdfast.service.sessions.backend.connections import SandboxConnections
from holdfast.service.sessions.backend.egress import Egress
from holdfast.service.sessions.backend.preparation import Preparation
from holdfast.service.sessions.manager import SessionManager
from holdfast.service.sessions.rulebook import Rulebook
from holdfast.service.settings import ServiceSettings
from holdfast.service.store import Store, open_store
from holdfast.service.store.database.sqlite_file import claim_file
from holdfast.service.types import ServiceStruct
from holdfast.service.views.session_views import SessionViews

#: Time for pending calls to finish when the service stops. `docker stop` waits 10 s in all.
STOP_SECONDS: Final = 5.0
#: The client name that servers in sandboxes get; `holdfast stop` shows it.
CLIENT_NAME: Final = "holdfast-service"
#: New objects before a collection: those of some dozens of calls. 700 are one call.
_YOUNG_OBJECTS: Final = 20_000

_log = logging.getLogger("holdfast.service")


class StartupReport(ServiceStruct, frozen=True):
    """Addresses and files of a service that started."""

    grpc: str
    http: str
    store: str
    rules: str
    sandbox: str
    #: The URL that those of previews begin with; empty without a port for previews.
    preview: str = ""
    #: The token of an operator that this start created.
    operator_token: str = ""


class ServiceReplica:
    """One replica of the session service. Call `start`, then `stop` once."""

    def __init__(
        self, settings: ServiceSettings, clock: WallClock | None = None, tracer: Tracer | None = None
    ) -> None:
        """Without a tracer, the environment (`OTEL_*`) selects the exporter of spans."""
        self._settings = settings
        self._clock = clock or SystemClock()
        self._tracer = tracer or open_tracer(os.environ)
        self.readiness = Readiness()
        self.metrics = Metrics()
        self._redact = Redactor(settings.redact)
        self._rulebook = Rulebook(read_rules(settings.rules))
        self._http: HttpFront | None = None
        self._previews: Previews | None = None
        self._preview: PreviewFront | None = None
        #: Stopped in reverse order.
        self._parts = AsyncExitStack()

    @property
    def rules(self) -> PolicyRules:
        """The current rules."""
        return self._rulebook.rules

    async def start(self) -> StartupReport:
        """Start all parts in the order of their dependencies; a failure stops the started ones."""
        try:
            return await self._start()
        except BaseException:
            await self._parts.aclose()
            raise

    async def _start(self) -> StartupReport:
        settings, clock, parts = self._settings, self._clock, self._parts
        parts.callback(self._tracer.close)
        if not is_made(settings.sandbox):
            check_address(settings.sandbox)
        store = self._store = await open_store(settings, clock=clock, kind=MeteredStore, metrics=self.metrics)
        parts.push_async_callback(store.close)
        if store.database.is_sqlite:
            parts.callback(claim_file(str(store.database.url.database)).close)
            # The claim on the file proves that the replicas of these leases have exited.
            await store.release_all()
        manager = await self._sessions(store)
        housekeeping = Housekeeping(store, self.readiness, clock, settings, self._sandboxes)
        housekeeping.start()
        parts.push_async_callback(housekeeping.stop)

        access = Access(store, clock, _access(settings))
        admission = Admission(access, Rates(settings, clock), ServiceCallObserver(self.metrics, self._tracer))
        views = SessionViews(manager, store, self._monitor, self._sandboxes, lambda: self.rules, clock, settings)
        parts.push_async_callback(views.stop)
        started = await self._fronts(Handler(manager, views, previews=self._previews), admission)
        if self._previews is not None:
            started = replace(started, preview=await self._preview_front(self._previews))
        # The last step that can fail: the caller prints the token, and no later start can.
        token = await agents.make_first_operator(store)
        self.readiness.set("service")
        return replace(started, store=store.database.location, operator_token=token)

    async def _sessions(self, store: Store) -> SessionManager:
        settings, clock, parts = self._settings, self._clock, self._parts
        pool = SandboxConnections(
            self._connect, clock, limit=settings.max_sandboxes, idle_seconds=settings.sandbox_idle_seconds
        )
        pools = SessionPools(self.metrics.pool_taken)
        sandboxes = self._sandboxes = SessionSandboxes(store, settings, pool.retire, pools=pools)
        parts.push_async_callback(sandboxes.stop)
        # The manager gets the monitor in its constructor, so the gateway calls the manager through this replica.
        gateway = MonitorGateway(pool, store, clock, lambda *work: self._manager.enforce_limit(*work))
        monitor = self._monitor = ResourceMonitor(gateway, clock, self.metrics, _monitor(settings))
        egress = Egress(pool, store, clock)
        endings = SandboxEndings(store, clock, sandboxes.endings)
        uids = parse_uids(settings.session_uids)
        if os.geteuid() == 0:
            check_free(uids)
        if settings.listen_preview:
            count = self.metrics.previews.set
            self._previews = Previews(store, sandboxes, pool, lambda: self.rules, clock, settings, count)
        preparation = Preparation(
            pool, egress, lambda agent_id: store.session_uid(agent_id, uids), hidden=own_files(store, settings)
        )
        manager = self._manager = SessionManager(
            store=store,
            rules=self._rulebook,
            pool=pool,
            plan=preparation.plan,
            prepare=preparation.prepare,
            clock=clock,
            settings=settings,
            redact=self._redact,
            usage=monitor.latest,
            emit=count_metrics(self.metrics),
            tracer=self._tracer,
            watchers=(monitor, egress, sandboxes, endings, *([self._previews] if self._previews else [])),
            sandboxes=sandboxes,
            assigned_profile=partial(agents.assigned_profile, store),
        )
        parts.push_async_callback(manager.stop)
        parts.push_async_callback(endings.stop)
        if self._previews is not None:
            self._previews.sessions = manager
            parts.push_async_callback(self._previews.stop)
        parts.push_async_callback(egress.stop)
        parts.push_async_callback(monitor.stop)
        await manager.start()
        monitor.start()
        pools.apply(self.rules)
        return manager

    async def _connect(self, address: str) -> ExecApi:
        try:
            if address == "local":
                # Before the client does: a server that the client starts gets the whole environment.
                await asyncio.to_thread(ensure_server, environ=for_sandboxes(os.environ))
            if (made := await self._sandboxes.connect(address)) is not None:
                return made
            return await open_exec(
                address, reconnect_deadline=self._settings.reconnect_seconds, client_name=CLIENT_NAME
            )
        except HoldfastError:
            self.metrics.sandbox_failures.inc()
            raise

    async def _fronts(self, handler: Handler, admission: Admission) -> StartupReport:
        settings = self._settings
        tls = _tls(settings)
        limits = _connections(settings)
        started = StartupReport("", "", "", settings.rules, settings.sandbox)
        if settings.listen_grpc:
            grpc = GrpcFront(
                handler,
                admission,
                self.readiness,
                GrpcSettings(
                    listen=settings.listen_grpc,
                    tls=tls,
                    allow_plaintext=settings.allow_plaintext,
                    open_services=settings.open_reflection,
                    connections=limits,
                ),
            )
            await grpc.start()
            self._parts.push_async_callback(grpc.stop, STOP_SECONDS)
            started = replace(started, grpc=grpc.address)
        if settings.listen_http:
            self._http = HttpFront(
                handler,
                admission,
                self.readiness,
                HttpSettings(
                    listen=settings.listen_http,
                    tls=tls,
                    allow_plaintext=settings.allow_plaintext,
                    connections=limits,
                    allowed_hosts=settings.allowed_hosts,
                ),
                metrics=self._render_metrics,
                console=console_application() if settings.console else None,
            )
            await self._http.start()
            self._parts.push_async_callback(self._http.stop, STOP_SECONDS)
            started = replace(started, http=self._http.url)
        # Before either front end stops: a client that one refuses must not get through to the other.
        self._parts.callback(admission.stop)
        return started

    async def _preview_front(self, previews: Previews) -> str:
        settings = self._settings
        self._preview = PreviewFront(previews, settings, _tls(settings), self._clock)
        limits = ConnectionLimits(
            settings.preview_connections,
            settings.preview_connections_per_address,
            settings.half_open_connections,
            settings.head_seconds,
        )
        # A request has a connection to its client, and the two ends of the one to the sandbox.
        room = descriptors_for_ports(3 * limits.most, settings.reserved_descriptors + 2 * settings.max_connections)
        await self._preview.start(limits.within(room // 3))
        self._parts.push_async_callback(self._preview.stop, STOP_SECONDS)
        # First, so that open WebSockets and streams do not delay the stop.
        self._parts.push_async_callback(previews.stop)
        return self._preview.url

    def _render_metrics(self) -> tuple[bytes, str]:
        followers = self._manager.leases.followers()
        count_sessions(self.metrics, ((each.record.kind, "BUSY" if each.busy else "IDLE") for each in followers))
        self.metrics.leases_held.set(len(followers))
        self.metrics.audit_queue.set(self._store.writer.queued)
        self.metrics.sandbox_connections.set(len(self._manager.pool.addresses))
        self.metrics.set_pools(self._sandboxes.pools.statuses)
        return self.metrics.render()

    def reload(self) -> None:
        """Read the rules and the TLS files again. An error is logged, and the old ones stay."""
        try:
            self._rulebook.rules = read_rules(self._settings.rules)
            self._sandboxes.pools.apply(self.rules)
            if self._http is not None:
                self._http.reload_tls()
            if self._preview is not None:
                self._preview.reload_tls()
        except Problem as problem:
            _log.error("reload: %s; the old rules and certificates stay", problem.message)
        else:
            _log.info("reload: the rules are %s", self._settings.rules or "the built-in ones")

    async def stop(self) -> None:
        """Refuse calls, end streams, release the sessions, write pending rows. Sessions continue."""
        self.readiness.set("service", why_not="stopping")
        await self._parts.aclose()


async def run_service(settings: ServiceSettings, announce: Callable[[StartupReport], None]) -> int:
    """Serve until TERM or INT; return the exit code. HUP reads the rules and the TLS files again."""
    undo = configure_logs(
        LogSettings(format=settings.log_format, level=settings.log_level),
        redact=Redactor(settings.redact),
    )
    stopping = asyncio.Event()
    service = ServiceReplica(settings)
    try:
        _on_signals(_cancel_this_task())
        started = await service.start()
        _settle_collector()
        _on_signals(stopping.set)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, service.reload)
        announce(started)
        await stopping.wait()
        # A second signal does not wait for pending calls.
        _on_signals(_cancel_this_task())
        _log.info("stopping: sessions continue in their sandboxes")
        await service.stop()
    finally:
        undo()
    return 0


def _settle_collector() -> None:
    """Exempt the objects of the start, most of them modules, from collections, and collect less often.

    A traversal of them for each call took a tenth of the processor time under load. Calls leave few cycles behind.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])


def _on_signals(do: Callable[[], object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, do)


def _cancel_this_task() -> Callable[[], object]:
    task = asyncio.current_task()
    assert task is not None
    return task.cancel


def _tls(settings: ServiceSettings) -> TlsFiles | None:
    return TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca) if settings.tls_cert else None


def _connections(settings: ServiceSettings) -> ConnectionLimits:
    """Return the limits of each port, within the descriptors that the process may have."""
    limits = ConnectionLimits(
        settings.max_connections,
        settings.connections_per_address,
        settings.half_open_connections,
        settings.head_seconds,
    )
    return limits.within(descriptors_for_ports(2 * limits.most, settings.reserved_descriptors) // 2)


def _access(settings: ServiceSettings) -> AccessSettings:
    return AccessSettings(
        remember_seconds=settings.token_cache_seconds,
        lookups_per_second=settings.token_lookups_per_second,
        lookups_burst=settings.token_lookups_burst,
    )


def _monitor(settings: ServiceSettings) -> MonitorSettings:
    near = settings.resource_warning
    return MonitorSettings(
        interval=settings.monitor_interval,
        long_running_seconds=settings.long_running_seconds,
        # A second warning needs a drop by a tenth of the limit: see `ThresholdSettings.far`.
        thresholds=ThresholdSettings(near=near, far=max(0.0, near - 0.1)),
    )


def for_sandboxes(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for the server of this machine, without settings of the service and secrets."""
    ours = (name for name in environ if name.startswith("HOLDFAST_SERVICE_"))
    secret = (name for name, value in environ.items() if is_dropped(name, value))
    left_out = {*ours, *secret}
    return {name: value for name, value in environ.items() if name not in left_out}


def own_files(store: Store, settings: ServiceSettings) -> tuple[str, ...]:
    """Return the paths of the database and the keys, which sessions on the same machine must not see."""
    path = store.database.url.database or ""
    database = [path + end for end in ("", "-wal", "-shm")] if store.database.is_sqlite else []
    keys = [os.path.abspath(each) for each in (settings.audit_key_file, settings.tls_key) if each]
    return (*database, *keys)
