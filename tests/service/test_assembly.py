"""The parts put together in this process: what starts, what stops, what is done every so often, what is seen."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from holdfast.service.access import agents
from holdfast.service.access.tokens import hash_token
from holdfast.service.assembly import ServiceReplica, own_files
from holdfast.service.fronts.readiness import Readiness
from holdfast.service.housekeeping import DAY_SECONDS, PING_SECONDS, Housekeeping
from holdfast.service.observability.logs import call_ids
from holdfast.service.observability.metrics import Metrics
from holdfast.service.observability.observer import ServiceCallObserver, count_metrics, count_sessions
from holdfast.service.observability.tracing import NullTracer, OtelTracer
from holdfast.service.problems import Exists, Invalid, NotFound, NotNow, Unavailable
from holdfast.service.rules_file import read_rules, shown_rules
from holdfast.service.sessions.ports import MetricEvent
from holdfast.service.settings import ServiceSettings, default_store_path, store_url
from holdfast.service.store import Store
from holdfast.service.types import AuditEntry, Caller, SessionPolicy, SessionRecord
from holdfast.session.v1 import session_pb2 as pb, session_pb2_grpc
from holdfast.testing import FakeClock


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    return ServiceSettings(
        listen_grpc="127.0.0.1:0",
        listen_http="127.0.0.1:0",
        store=f"sqlite:///{tmp_path}/service.db",
        sandbox="inprocess",
    )


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with await Store.open(f"sqlite:///{tmp_path}/store.db", clock=FakeClock(1000.0)) as opened:
        yield opened


async def until_ready(readiness: Readiness, wanted: bool) -> None:
    async with asyncio.timeout(60):
        while True:
            changed = readiness.changed
            if readiness.ready == wanted:
                return
            await changed.wait()


# --- start and stop --------------------------------------------------------------------------------------------


async def test_it_is_ready_once_all_parts_are_and_not_when_it_stops(settings: ServiceSettings) -> None:
    service = ServiceReplica(settings)
    assert not service.readiness.ready
    started = await service.start()
    await until_ready(service.readiness, True)
    assert started.grpc.startswith("127.0.0.1:")
    assert started.http.startswith("http://127.0.0.1:")
    assert started.operator_token.startswith("hf_")
    await service.stop()
    assert service.readiness.waiting_for() == {"service": "stopping"}


async def test_a_start_that_fails_leaves_nothing_behind(settings: ServiceSettings, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        tasks = asyncio.all_tasks()
        with pytest.raises(NotNow, match="in use"):
            await ServiceReplica(
                ServiceSettings(listen_http=address, listen_grpc="127.0.0.1:0", store=settings.store)
            ).start()
        assert asyncio.all_tasks() == tasks
    # Its database is closed, and another one can have it. The failed start has printed no token.
    service = ServiceReplica(settings)
    started = await service.start()
    await service.stop()
    assert started.operator_token.startswith("hf_")


async def test_either_port_can_be_left_out(settings: ServiceSettings) -> None:
    service = ServiceReplica(replace(settings, listen_http=""))
    started = await service.start()
    await service.stop()
    assert (started.http, bool(started.grpc)) == ("", True)


async def test_rules_that_are_wrong_are_not_taken_at_a_reload(
    settings: ServiceSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("[profiles.one]\n")
    service = ServiceReplica(replace(settings, rules=str(rules)))
    await service.start()
    rules.write_text("[profiles.two]\nnonsense = 1\n")
    service.reload()
    assert f"{rules}:2" in caplog.text
    assert "one" in service.rules.profiles
    rules.write_text("[profiles.two]\n")
    service.reload()
    assert sorted(service.rules.profiles) == ["default", "two"]
    await service.stop()


# --- agents ----------------------------------------------------------------------------------------------------


async def test_an_agent_is_kept_as_the_hash_of_its_token_and_every_change_is_a_row(store: Store) -> None:
    token = await agents.add(store, "builder", profile="ci")
    found = await store.find_agent(hash_token(token))
    assert found is not None
    assert (found.agent_id, found.role, found.limits) == ("builder", "agent", {"profile": "ci"})
    other = await agents.rotate(store, "builder")
    assert await store.find_agent(hash_token(token)) is None
    assert await store.find_agent(hash_token(other)) is not None
    await agents.remove(store, "builder")
    assert await agents.listed(store) == []
    rows, _ = await store.rows()
    assert [row.kind for row in rows] == ["agent_added", "agent_rotated", "agent_removed"]
    assert not any(token in row.body or other in row.body for row in rows)


async def test_names_that_are_taken_wrong_or_nobodys_are_told(store: Store) -> None:
    await agents.add(store, "a")
    with pytest.raises(Exists):
        await agents.add(store, "a")
    for wrong in ("", "a b", "../x", "a/b", "x" * 200):
        with pytest.raises(Invalid):
            await agents.add(store, wrong)
    with pytest.raises(NotFound):
        await agents.rotate(store, "nobody")


async def test_the_first_operator_is_made_once_and_anew_when_none_is_left(store: Store) -> None:
    assert await agents.make_first_operator(store)
    assert await agents.make_first_operator(store) == ""
    await store.set_agent("operator", disabled=True)
    assert await agents.make_first_operator(store)
    assert [each.agent_id for each in await agents.listed(store)] == ["operator", "operator-"]


# --- housekeeping ----------------------------------------------------------------------------------------------


def closed_session(session_id: str, at: float) -> SessionRecord:
    policy = SessionPolicy(profile="default", idle_timeout=60, max_lifetime=60, idle_grace=1)
    return SessionRecord(session_id, "a", "shell", "local", policy, at, at, "/")


async def test_what_is_too_old_is_removed_and_what_is_open_stays(store: Store, settings: ServiceSettings) -> None:
    clock = store.database.clock
    assert isinstance(clock, FakeClock)
    for name in ("old", "open"):
        await store.add_session(closed_session(name, clock.time()), per_agent=9, total=9)
        await store.append([AuditEntry(name, clock.time(), "a", "session_created")])
    await store.update_session("old", state="CLOSED", closed_at=clock.time())
    keeping = Housekeeping(store, Readiness(), clock, settings)
    assert (await keeping.retain_once()).sessions == 0
    await clock.advance(settings.audit_retention_days * DAY_SECONDS + 1)
    assert (await keeping.retain_once()).sessions == 1
    assert (await store.session("open")).session_id == "open"


class Pinged:
    """A store that answers or does not."""

    def __init__(self) -> None:
        self.away = False
        self.pings = 0

    async def ping(self) -> None:
        self.pings += 1
        if self.away:
            raise Unavailable("the database secret-host is away", reason="STORE_UNAVAILABLE")

    async def retain(self, **limits: Any) -> Any:
        raise Unavailable("away", reason="STORE_UNAVAILABLE")


async def test_a_database_that_does_not_answer_is_told_to_probes_without_its_name(
    settings: ServiceSettings,
) -> None:
    pinged, readiness, clock = Pinged(), Readiness(), FakeClock(0.0)
    readiness.set("service")
    keeping = Housekeeping(pinged, readiness, clock, settings)  # type: ignore[arg-type]
    keeping.start()
    await clock.advance(0)
    assert (pinged.pings, readiness.ready) == (1, True)
    pinged.away = True
    await clock.advance(PING_SECONDS)
    await until_ready(readiness, False)
    assert readiness.waiting_for() == {"store": "the database does not answer"}
    pinged.away = False
    await clock.advance(PING_SECONDS)
    await until_ready(readiness, True)
    await keeping.stop()


async def test_a_call_is_a_span_with_children_for_the_work_in_the_sandbox(
    settings: ServiceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="no OpenTelemetry here")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    service = ServiceReplica(settings, tracer=OtelTracer(provider))
    started = await service.start()
    async with grpc.aio.insecure_channel(started.grpc) as channel:
        stub: Any = session_pb2_grpc.SessionServiceStub(channel)  # type: ignore[no-untyped-call]
        who = (("authorization", f"Bearer {started.operator_token}"),)
        await stub.RunCommand(pb.RunCommandRequest(command="true"), metadata=who)
    await service.stop()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    call = spans["SessionService/RunCommand"]
    for work in ("shell.open_shell", "shell.run", "shell.close"):
        assert spans[work].context.trace_id == call.context.trace_id, work


# --- what is seen ----------------------------------------------------------------------------------------------


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_call_is_counted_with_its_status_and_its_lines_have_its_agent_session_and_command() -> None:
    metrics = Metrics(own_process=False)
    call = ServiceCallObserver(metrics, NullTracer()).begin("grpc", "GetSession", {"x-request-id": "r1"})
    call.identified(Caller("anna"))
    assert call_ids.get({}) == {"request_id": "r1", "agent_id": "anna"}
    call.concerns("s1", "")
    call.concerns("s1", "c1")
    ids = {"request_id": "r1", "agent_id": "anna", "session_id": "s1", "command_id": "c1"}
    assert call_ids.get({}) == ids
    call.end("RESOURCE_EXHAUSTED")
    assert call_ids.get({}) == {}
    labels = {"front": "grpc", "method": "GetSession", "code": "RESOURCE_EXHAUSTED"}
    assert sample(metrics, "holdfast_rpc_calls_total", **labels) == 1
    assert sample(metrics, "holdfast_requests_refused_total", reason="RESOURCE_EXHAUSTED") == 1


def test_what_sessions_tell_is_counted() -> None:
    metrics = Metrics(own_process=False)
    tell = count_metrics(metrics)
    for reported in (
        MetricEvent("session_over", "shell", 5.0, "exited"),
        MetricEvent("command_ended", "terminal", 0.2),
        MetricEvent("violation", "shell", 1, "POLICY_DENIED"),
        MetricEvent("lease_taken", "shell"),
        MetricEvent("lease_lost", "shell"),
    ):
        tell(reported)
    count_sessions(metrics, [("shell", "IDLE"), ("shell", "IDLE"), ("terminal", "BUSY")])
    assert sample(metrics, "session_duration_seconds_count", kind="shell", reason="exited") == 1
    assert sample(metrics, "command_latency_seconds_count", kind="terminal") == 1
    assert sample(metrics, "policy_violations_total", reason="POLICY_DENIED") == 1
    assert sample(metrics, "holdfast_leases_taken_over_total") == 1
    assert sample(metrics, "holdfast_leases_lost_total") == 1
    assert sample(metrics, "sessions_active", kind="shell", state="IDLE") == 2


# --- places and rules ------------------------------------------------------------------------------------------


def test_the_database_is_in_the_users_state_directory() -> None:
    assert default_store_path({"XDG_STATE_HOME": "/state"}) == "/state/holdfast/service.db"
    assert default_store_path({"XDG_STATE_HOME": "relative"}).endswith("/.local/state/holdfast/service.db")
    assert store_url("postgresql://x/y") == "postgresql://x/y"
    assert store_url("").startswith("sqlite:////")


def test_without_a_file_the_rules_are_built_in_and_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert list(shown_rules(read_rules(""))["profiles"]) == ["default"]
    with pytest.raises(Invalid, match=r"no-such\.toml: No such file"):
        read_rules(str(tmp_path / "no-such.toml"))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(Invalid, match="not UTF-8"):
        read_rules(str(binary))


async def test_the_database_and_the_keys_are_kept_from_sessions(store: Store, tmp_path: Path) -> None:
    key, tls = str(tmp_path / "audit.key"), str(tmp_path / "tls.key")
    found = own_files(store, ServiceSettings(audit_key_file=key, tls_key=tls, tls_cert="cert"))
    assert {key, tls} <= set(found)
    assert (store.database.url.database in found) is store.database.is_sqlite
