"""Sessions whose policy the operating system enforces: planned, applied and told, an allow-list of hosts too."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from holdfast.client.sandbox import open_exec
from holdfast.exec_api import ExecApi
from holdfast.service.api import AuditFilter, CreateRequest, PolicyRequest, RunRequest
from holdfast.service.clock import SystemClock
from holdfast.service.policy.rules import load_rules
from holdfast.service.problems import Denied
from holdfast.service.sessions.manager import SessionManager
from holdfast.service.sessions.rulebook import Rulebook
from holdfast.service.sessions.sandbox_pool import SandboxPool
from holdfast.service.store import Store
from holdfast.testing.servers import RunningServer, running_server
from service.fakes import ANN, running, settings

RULES = """
workspaces = "{place}"
[profiles.default.network]
mode = "allow-list"
hosts = ["127.0.0.1:1"]
"""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await Store.open(f"sqlite:///{tmp_path}/service.db")
    yield store
    await store.close()


@pytest.fixture
async def manager(server: RunningServer, store: Store, tmp_path: Path) -> AsyncIterator[SessionManager]:
    address = server.address("unix")

    async def connect(_: str) -> ExecApi:
        return await open_exec(address)

    clock = SystemClock()
    pool = SandboxPool(connect, clock)
    manager = SessionManager(
        store=store,
        rules=Rulebook(load_rules(RULES.format(place=tmp_path / "work"), "rules.toml")),
        pool=pool,
        clock=clock,
        settings=settings(),
        hidden=(str(tmp_path / "service.db"),),
    )
    async with running(manager):
        features = (await pool.info("fake")).features
        if not {"bubblewrap", "network", "egress"} <= set(features):
            pytest.skip("no bubblewrap, network namespaces or h11 here")
        yield manager


@pytest.mark.parametrize("kind", ["terminal", "shell"])
async def test_a_session_is_confined_by_its_policy_and_its_hosts_are_counted(
    manager: SessionManager, store: Store, kind: str, tmp_path: Path
) -> None:
    created = await manager.create(ANN, CreateRequest(kind=kind))  # type: ignore[arg-type]
    record = created.view.record
    assert created.view.cwd == str(tmp_path / "work" / "ann")
    assert {"filesystem", "network"} <= set(record.enforced)
    ran = await manager.run_command(ANN, RunRequest("echo mine > file && cat file", record.session_id))
    assert (ran.stdout.strip(), ran.exit_code) == (b"mine", 0)
    assert (tmp_path / "work" / "ann" / "file").read_text() == "mine\n"
    outside = await manager.run_command(
        ANN, RunRequest(f"echo x > {tmp_path}/outside; ls {tmp_path}", record.session_id)
    )
    assert b"service.db" not in outside.stdout
    assert not (tmp_path / "outside").exists()
    asks = "python3 -c \"import urllib.request as r; r.urlopen('http://example.invalid:8/')\""
    assert (await manager.run_command(ANN, RunRequest(asks, record.session_id))).exit_code == 1
    closed = await manager.close(ANN, record.session_id)
    assert closed.state == "CLOSED"
    rows, _ = await store.rows(AuditFilter(session_id=record.session_id, kinds=("network",)))
    assert [('"refused":{"example.invalid:8":1}' in row.body) for row in rows] == [True]
    assert not os.path.exists(f"/tmp/hf-{record.session_id}")


async def test_a_guard_that_is_required_and_cannot_be_had_refuses_the_session(
    manager: SessionManager, store: Store
) -> None:
    with pytest.raises(Denied) as refused:
        await manager.create(ANN, CreateRequest(policy=PolicyRequest(require=("output",))))
    assert refused.value.reason == "GUARD_UNAVAILABLE"
    (view,) = (await manager.find(ANN))[0]
    assert (view.state, view.record.close_reason) == ("ERROR", "creation failed")
