"""Composes the service: settings, store, rules, sessions, monitor, fronts, signals. The only place where they meet.

Nothing here decides anything; it wires, waits for the word to stop, and takes apart in the reverse order. Sessions
are no part of what is taken apart: they live in their sandboxes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Final

from msgspec.structs import replace

from holdfast.client.sandbox import open_exec
from holdfast.console.application import console_application
from holdfast.errors import HoldfastError
from holdfast.exec_api import ExecApi
from holdfast.launch.local_server import ensure_server
from holdfast.sandboxes.registry import check_address
from holdfast.secret_names import is_dropped
from holdfast.service.access import agents
from holdfast.service.access.admission import Admission
from holdfast.service.access.rates import Rates, RateSettings
from holdfast.service.access.session_users import check_free, parse_uids
from holdfast.service.access.tokens import Access, AccessSettings
from holdfast.service.agent_sessions import AgentRulebook, AgentSessions
from holdfast.service.audit.redaction import Redactor
from holdfast.service.clock import Clock, SystemClock
from holdfast.service.fronts.connections import ConnectionLimits, descriptors_for_ports
from holdfast.service.fronts.grpc import GrpcFront, GrpcSettings
from holdfast.service.fronts.handler import Handler
from holdfast.service.fronts.http import HttpFront, HttpSettings
from holdfast.service.fronts.listening import TlsFiles
from holdfast.service.fronts.readiness import Readiness
from holdfast.service.monitor.monitor import MonitorSettings, ResourceMonitor
from holdfast.service.monitor.session_usage import SandboxesOutside, Watchers
from holdfast.service.monitor.thresholds import ThresholdSettings
from holdfast.service.observability.logs import LogSettings, configure_logs
from holdfast.service.observability.metered_store import MeteredStore
from holdfast.service.observability.metrics import Metrics
from holdfast.service.observability.observer import Calls, count_sessions, tell_metrics
from holdfast.service.observability.tracing import Tracer, open_tracer
from holdfast.service.policy.profiles import Rules
from holdfast.service.problems import Problem
from holdfast.service.rules_file import read_rules
from holdfast.service.sessions.backend.connections import SandboxPool
from holdfast.service.sessions.backend.egress import Egress
from holdfast.service.sessions.backend.preparation import Preparation
from holdfast.service.settings import ServiceSettings
from holdfast.service.store import Store
from holdfast.service.store.database.file_claim import claim_file
from holdfast.service.store.opening import open_store
from holdfast.service.store_housekeeping import Housekeeping
from holdfast.service.types import Struct

#: How long calls that are under way have to finish when the service stops. `docker stop` waits 10 s in all.
STOP_SECONDS: Final = 5.0
#: As the service names itself to the servers in sandboxes: `holdfast stop` shows it.
CLIENT_NAME: Final = "holdfast-service"

_log = logging.getLogger("holdfast.service")


class Started(Struct, frozen=True):
    """What whoever started the service wants to know."""

    grpc: str
    http: str
    store: str
    rules: str
    sandbox: str
    #: Of an operator that was made just now.
    operator_token: str = ""


class Service:
    """One replica. `start`, then `stop` once."""

    def __init__(self, settings: ServiceSettings, clock: Clock | None = None, tracer: Tracer | None = None) -> None:
        """Without a tracer, spans go where the environment says (`OTEL_*`)."""
        self._settings = settings
        self._clock = clock or SystemClock()
        self._tracer = tracer or open_tracer(os.environ)
        self.readiness = Readiness()
        self.metrics = Metrics()
        self._redact = Redactor(settings.redact)
        self._rulebook = AgentRulebook(read_rules(settings.rules))
        self._http: HttpFront | None = None
        #: Taken apart in the reverse order.
        self._parts = AsyncExitStack()

    @property
    def rules(self) -> Rules:
        """Those in force."""
        return self._rulebook.rules

    async def start(self) -> Started:
        """Everything, in the order in which the parts need each other; what fails takes the others down."""
        try:
            return await self._start()
        except BaseException:
            await self._parts.aclose()
            raise

    async def _start(self) -> Started:
        settings, clock, parts = self._settings, self._clock, self._parts
        parts.callback(self._tracer.close)
        check_address(settings.sandbox)
        store = await open_store(settings, clock=clock, kind=MeteredStore)
        assert isinstance(store, MeteredStore)
        store.metrics = self.metrics
        self._store = store
        parts.push_async_callback(store.close)
        if store.database.is_sqlite:
            parts.callback(claim_file(str(store.database.url.database)).close)
            # Whoever had them is dead, or it would hold the file.
            await store.release_everybody()
        token = await agents.make_first_operator(store)
        manager = await self._sessions(store)
        housekeeping = Housekeeping(store, self.readiness, clock, settings)
        housekeeping.start()
        parts.push_async_callback(housekeeping.stop)

        access = Access(store, clock, _access(settings))
        admission = Admission(access, Rates(_rates(settings), clock), Calls(self.metrics, self._tracer))
        started = await self._fronts(Handler(manager), admission)
        self.readiness.set("service")
        return replace(started, store=store.database.place, operator_token=token)

    async def _sessions(self, store: Store) -> AgentSessions:
        settings, clock, parts = self._settings, self._clock, self._parts
        pool = SandboxPool(
            self._connect, clock, limit=settings.max_sandboxes, idle_seconds=settings.sandbox_idle_seconds
        )
        outside = SandboxesOutside(pool, store, clock)
        monitor = ResourceMonitor(outside, clock, self.metrics, _monitor(settings))
        egress = Egress(pool, store, clock)
        uids = parse_uids(settings.session_uids)
        if os.geteuid() == 0:
            check_free(uids)
        preparation = Preparation(
            pool, egress, lambda agent_id: store.session_uid(agent_id, uids), hidden=own_files(store, settings)
        )
        manager = AgentSessions(
            store=store,
            rules=self._rulebook,
            pool=pool,
            plan=preparation.plan,
            prepare=preparation.prepare,
            clock=clock,
            settings=settings,
            redact=self._redact,
            usage=monitor.latest,
            tell=tell_metrics(self.metrics),
        )
        manager.agents, manager.rulebook, manager.tracer = store, self._rulebook, self._tracer
        manager.subscribers = self.metrics.event_subscribers
        outside.manager = manager
        manager.leases.watcher = Watchers(monitor, egress)
        self._manager = manager
        parts.push_async_callback(manager.stop)
        parts.push_async_callback(egress.stop)
        parts.push_async_callback(monitor.stop)
        await manager.start()
        monitor.start()
        return manager

    async def _connect(self, address: str) -> ExecApi:
        try:
            if address == "local":
                # Before the client does: a server that it starts has all of our environment.
                await asyncio.to_thread(ensure_server, environ=for_sandboxes(os.environ))
            return await open_exec(
                address, reconnect_deadline=self._settings.reconnect_seconds, client_name=CLIENT_NAME
            )
        except HoldfastError:
            self.metrics.sandbox_failures.inc()
            raise

    async def _fronts(self, handler: Handler, admission: Admission) -> Started:
        settings = self._settings
        tls = TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca) if settings.tls_cert else None
        limits = _connections(settings)
        started = Started("", "", "", settings.rules, settings.sandbox)
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
        # Before either front stops: a client that is sent away by one must not be sent to the other.
        self._parts.callback(admission.stop)
        return started

    def _render_metrics(self) -> tuple[bytes, str]:
        followers = self._manager.leases.followers()
        count_sessions(self.metrics, ((each.record.kind, "BUSY" if each.busy else "IDLE") for each in followers))
        self.metrics.leases_held.set(len(followers))
        self.metrics.audit_queue.set(self._store.writer.queued)
        self.metrics.sandbox_connections.set(len(self._manager.pool.addresses))
        return self.metrics.render()

    def reload(self) -> None:
        """The rules and the TLS files again. What is wrong with them is logged, and the old ones stay."""
        try:
            self._rulebook.rules = read_rules(self._settings.rules)
            if self._http is not None:
                self._http.reload_tls()
        except Problem as problem:
            _log.error("reload: %s; nothing was changed", problem.message)
        else:
            _log.info("reload: the rules are those of %s", self._settings.rules or "holdfast itself")

    async def stop(self) -> None:
        """Let nobody in, end streams, let go of the sessions, write down what is left. Sessions live on."""
        self.readiness.set("service", why_not="stopping")
        await self._parts.aclose()


async def run_service(settings: ServiceSettings, announce: Callable[[Started], None]) -> int:
    """Serve until TERM or INT; returns the exit code. HUP reads the rules and the TLS files again."""
    undo = configure_logs(
        LogSettings(format=settings.log_format, level=settings.log_level),
        redact=Redactor(settings.redact),
    )
    stopping = asyncio.Event()
    service = Service(settings)
    try:
        _on_signals(_cancel_this_task())
        started = await service.start()
        _on_signals(stopping.set)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, service.reload)
        announce(started)
        await stopping.wait()
        # A second one does not wait for calls that are under way.
        _on_signals(_cancel_this_task())
        _log.info("stopping: sessions live on in their sandboxes")
        await service.stop()
    finally:
        undo()
    return 0


def _on_signals(do: Callable[[], object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, do)


def _cancel_this_task() -> Callable[[], object]:
    task = asyncio.current_task()
    assert task is not None
    return task.cancel


def _connections(settings: ServiceSettings) -> ConnectionLimits:
    """The limits of each port, within the descriptors that the process may have."""
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


def _rates(settings: ServiceSettings) -> RateSettings:
    names = RateSettings.__struct_fields__
    return RateSettings(**{name: getattr(settings, name) for name in names})


def _monitor(settings: ServiceSettings) -> MonitorSettings:
    near = settings.resource_warning
    return MonitorSettings(
        interval=settings.monitor_interval,
        long_running_seconds=settings.long_running_seconds,
        # Told again only after it went down by a tenth of the limit: see `ThresholdSettings.far`.
        thresholds=ThresholdSettings(near=near, far=max(0.0, near - 0.1)),
    )


def for_sandboxes(environ: Mapping[str, str]) -> dict[str, str]:
    """What the machine's server gets of our environment: neither our settings nor what looks like a secret."""
    ours = (name for name in environ if name.startswith("HOLDFAST_SERVICE_"))
    secret = (name for name, value in environ.items() if is_dropped(name, value))
    left_out = {*ours, *secret}
    return {name: value for name, value in environ.items() if name not in left_out}


def own_files(store: Store, settings: ServiceSettings) -> tuple[str, ...]:
    """The database and the keys, which sessions on the same machine must not see."""
    path = store.database.url.database or ""
    database = [path + end for end in ("", "-wal", "-shm")] if store.database.is_sqlite else []
    keys = [os.path.abspath(each) for each in (settings.audit_key_file, settings.tls_key) if each]
    return (*database, *keys)
