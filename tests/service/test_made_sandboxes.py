"""Sandboxes that the service makes for sessions, and removes with them: real ones of `local`, one of `bwrap`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.fleet.fleet import Fleet, FleetSandbox
from holdfast.service.api import AuditFilter, CreateRequest
from holdfast.service.assembly import ServiceReplica
from holdfast.service.policy.made_sandbox import check_made_sandbox, find_made_sandbox
from holdfast.service.policy.rules import RulesInvalid, load_rules
from holdfast.service.problems import Denied, Invalid, NotNow, Problem
from holdfast.service.sandboxes.session_sandboxes import SessionSandboxes
from holdfast.service.sessions.manager import SessionManager
from holdfast.service.settings import ServiceSettings
from holdfast.service.store import Store
from holdfast.service.store.types import OwnedSandbox
from holdfast.service.types import Caller
from tests.service.conftest import OpenStore
from tests.service.session_records import record as make_record
from tests.support.parts import needs

OPERATOR = Caller("root", "operator")
ANN = Caller("ann")
RULES = """
[profiles.default]
sandbox.mode = "none"
sandbox.user = "server"
network.mode = "host"
directories.writable = ["/tmp"]
sandbox.engines = ["local", "bwrap"]
sandbox.templates = ["marked"]

[profiles.closed]
sandbox.engines = []
sandbox.templates = []

[templates.marked]
engine = "local"
env = { MARK = "from-the-template" }
lifetime = "1h"

[templates.broken]
engine = "local"
setup = ["exit 7"]

[agents.bob]
profile = "closed"
"""


@pytest.fixture(autouse=True)
def fleet_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path_factory.mktemp("f")
    monkeypatch.setenv("HOLDFAST_FLEET_DIRECTORY", str(directory))
    return directory


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    return ServiceSettings(
        listen_grpc="127.0.0.1:0",
        listen_http="",
        store=f"sqlite:///{tmp_path}/service.db",
        rules=str(rules),
        sandbox="inprocess",
    )


@pytest.fixture
async def service(settings: ServiceSettings) -> AsyncIterator[ServiceReplica]:
    replica = ServiceReplica(settings)
    await replica.start()
    yield replica
    await replica.stop()


async def kinds(service: ServiceReplica, session_id: str) -> list[str]:
    rows, _ = await service._store.rows(AuditFilter(session_id=session_id))
    return [row.kind for row in rows]


async def until_removed(service: ServiceReplica, session_id: str) -> None:
    """Wait for the audit row of the removal."""
    async with asyncio.timeout(60), service._store.listen(session_id) as notices:
        if "sandbox_removed" in await kinds(service, session_id):
            return
        async for _ in notices:
            if "sandbox_removed" in await kinds(service, session_id):
                return


async def made_ids(engine: str = "local") -> list[str]:
    async with Fleet(engine) as fleet:
        return [f"{engine}:{ref.id}" for ref in await fleet.list()]


# --- rules -----------------------------------------------------------------------------------------------------


def test_a_profile_allows_engines_and_templates_and_nothing_by_default() -> None:
    rules = load_rules(RULES, "rules")
    default, closed = rules.profile("default"), rules.profile("closed")
    for address in ("local:new", "bwrap:new", "local:new?template=marked"):
        made = find_made_sandbox(rules, address)
        assert made is not None
        check_made_sandbox(rules, default, made)
        with pytest.raises(Denied, match=r"profiles\.closed.sandbox"):
            check_made_sandbox(rules, closed, made)
    for address in ("docker:new", "local:new?template=broken", "bwrap:new?template=marked"):
        made = find_made_sandbox(rules, address)
        assert made is not None
        with pytest.raises(Denied, match=r"profiles\.default.sandbox"):
            check_made_sandbox(rules, default, made)
    assert find_made_sandbox(rules, "docker:web") is None
    for address in ("xen:new", "local:new?template=none", "local:new?image=debian"):
        with pytest.raises(Invalid):
            find_made_sandbox(rules, address)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[templates.a]\nimag = "x"', "rules:2: templates.a.imag: no such key; did you mean 'image'"),
        ('[templates.a]\nmemory = "lots"', "rules:2: templates.a.memory"),
        ('[templates.a]\nengine = "xen"', "rules:2: templates.a.engine: 'xen' is not one of"),
        ("[templates.a]\nlifetime = -1", "rules:2: templates.a.lifetime"),
        ('[profiles.p]\nsandbox.templates = ["b"]', "rules:2: profiles.p.sandbox.templates.0: 'b' is not one of"),
    ],
)
def test_a_mistake_in_a_template_refuses_the_file(text: str, complaint: str) -> None:
    with pytest.raises(RulesInvalid) as refused:
        load_rules(text, "rules")
    assert refused.value.complaints[0].startswith(complaint)


# --- the store -------------------------------------------------------------------------------------------------


async def test_one_replica_removes_the_sandbox_of_an_ended_session(open_store: OpenStore) -> None:
    first, second = await open_store(), await open_store()
    record = make_record("ses-1")
    await first.add_session(record, per_agent=5, total=5)
    owned = OwnedSandbox("ses-1", record.agent_id, "local:holdfast-x")
    await first.add_sandbox(owned)
    assert await second.keeps_sandbox("ses-1")
    assert await second.claim_removals(60.0) == []
    await first.update_session("ses-1", state="CLOSED")
    claims = await asyncio.gather(first.claim_removals(60.0), second.claim_removals(60.0))
    assert sorted(claims, key=len) == [[], [owned]]
    assert not await second.keeps_sandbox("ses-1")
    removed = await asyncio.gather(first.sandbox_removed("ses-1"), second.sandbox_removed("ses-1"))
    assert sorted(removed) == [False, True]
    assert await second.owned_sandboxes() == []


# --- whole -----------------------------------------------------------------------------------------------------


async def created(manager: SessionManager, sandbox: str) -> str:
    made = await manager.create(OPERATOR, CreateRequest(kind="shell", sandbox=sandbox))
    return made.view.record.session_id


async def test_a_sandbox_is_made_for_a_session_and_removed_with_it(service: ServiceReplica) -> None:
    manager = service._manager
    session_id = await created(manager, "local:new?template=marked")
    view = await manager.get(OPERATOR, session_id)
    assert await made_ids() == [view.record.sandbox]
    assert view.record.environment["MARK"] == "from-the-template"
    assert view.record.policy.max_lifetime == 3600.0
    with pytest.raises(Denied, match="belongs to another session"):
        await manager.create(OPERATOR, CreateRequest(kind="shell", sandbox=view.record.sandbox))
    await manager.close(OPERATOR, session_id)
    await until_removed(service, session_id)
    assert await made_ids() == []
    rows = await kinds(service, session_id)
    assert [rows.count(kind) for kind in ("sandbox_made", "sandbox_removed")] == [1, 1]


@needs("bwrap")
async def test_a_session_in_a_jail_of_its_own(service: ServiceReplica) -> None:
    session_id = await created(service._manager, "bwrap:new")
    assert await made_ids("bwrap") == [(await service._manager.get(OPERATOR, session_id)).record.sandbox]
    await service._manager.close(OPERATOR, session_id, "force")
    await until_removed(service, session_id)
    assert await made_ids("bwrap") == []


async def test_a_refused_or_failed_creation_leaves_no_sandbox(service: ServiceReplica) -> None:
    manager = service._manager
    with pytest.raises(Denied, match=r"sandbox\.engines"):
        await manager.create(Caller("bob"), CreateRequest(kind="shell", sandbox="local:new"))
    rules = load_rules(RULES.replace('["marked"]', '["broken"]', 1), "rules")
    service._rulebook.rules = rules
    with pytest.raises(NotNow, match="exit code 7"):
        await manager.create(ANN, CreateRequest(kind="shell", sandbox="local:new?template=broken"))
    async with asyncio.timeout(60):
        await service._sandboxes.stop()
    assert await made_ids() == []
    assert await service._store.owned_sandboxes() == []


async def test_a_restarted_service_uses_the_sandbox_and_removes_it(settings: ServiceSettings) -> None:
    first = ServiceReplica(settings)
    await first.start()
    session_id = await created(first._manager, "local:new")
    await first.stop()
    assert len(await made_ids()) == 1
    second = ServiceReplica(settings)
    await second.start()
    try:
        view = await second._manager.get(OPERATOR, session_id)
        assert (view.state, [view.record.sandbox]) == ("IDLE", await made_ids())
        await second._manager.close(OPERATOR, session_id)
        await until_removed(second, session_id)
        assert await made_ids() == []
    finally:
        await second.stop()


async def test_a_replica_that_stops_while_creating_leaves_a_row_that_the_next_one_clears(
    settings: ServiceSettings,
) -> None:
    """The state after a crash between the creation of the sandbox and the first prompt of the session."""
    async with await Store.open(settings.store) as store, Fleet("local") as fleet:
        ref = await fleet.create()
        address = f"local:{ref.id}"
        record = replace(make_record("ses-1"), state="UNKNOWN", sandbox=address)
        await store.add_session(record, per_agent=5, total=5, replica="crashed", seconds=60.0)
        await store.add_sandbox(OwnedSandbox("ses-1", record.agent_id, address))
    service = ServiceReplica(settings)
    await service.start()
    try:
        await until_removed(service, "ses-1")
        assert (await service._store.session("ses-1")).state == "ERROR"
        assert await made_ids() == []
    finally:
        await service.stop()


async def test_a_replica_that_lost_its_lease_while_creating_removes_what_it_made(
    settings: ServiceSettings,
) -> None:
    async with await Store.open(settings.store) as store:
        record = replace(make_record("ses-1"), state="UNKNOWN")
        await store.add_session(record, per_agent=5, total=5)

        class Overtaken(Fleet):
            """Another replica ends the session and claims its sandbox before the engine has made it."""

            async def make(self, *arguments: Any, **options: Any) -> FleetSandbox:
                await store.update_session("ses-1", state="ERROR")
                assert len(await store.claim_removals(60.0)) == 1
                return await super().make(*arguments, **options)

        sandboxes = SessionSandboxes(store, settings, lambda address: None, Overtaken)
        made = find_made_sandbox(load_rules(RULES, "rules"), "local:new")
        assert made is not None
        record = replace(record, sandbox=sandboxes.new_address(made))
        with pytest.raises(NotNow, match="another replica ended"):
            await sandboxes.make(record, made)
        await sandboxes.stop()
    assert await made_ids() == []


async def test_a_creation_whose_caller_is_gone_leaves_no_sandbox(service: ServiceReplica) -> None:
    manager = service._manager
    request = CreateRequest(kind="shell", sandbox="local:new", request_id="once")
    creating = asyncio.create_task(manager.create(OPERATOR, request))
    async with asyncio.timeout(60):
        while not await made_ids():  # noqa: ASYNC110 - no event reports a directory of the engine
            await asyncio.sleep(0)
    (record,) = await service._store.open_sessions()
    with pytest.raises(Problem) as refused:
        await manager.close(OPERATOR, record.session_id)
    assert refused.value.reason == "SESSION_NOT_READY"
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    await until_removed(service, record.session_id)
    assert await made_ids() == []
    body = json.loads((await service._store.rows(AuditFilter(session_id=record.session_id)))[0][-1].body)
    assert body == {"sandbox": record.sandbox}
