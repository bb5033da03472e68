"""Sessions of the service with a pod of their own: a drain of the node is announced before the pod goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.service.api import AuditFilter, CreateRequest, RunRequest
from holdfast.service.assembly import ServiceReplica
from holdfast.service.settings import ServiceSettings
from holdfast.service.types import Caller
from tests.support.kubernetes import images
from tests.support.kubernetes.cluster import NODE, Cluster

from .conftest import read

ANN = Caller("ann")
RULES = f"""
[profiles.default]
sandbox.mode = "none"
network.mode = "none"
sandbox.templates = ["pod", "server"]

[templates.pod]
engine = "kubernetes"
image = "{images.DEBIAN}"
options = {{ pull = "never", grace = 10 }}

[templates.server]
engine = "kubernetes"
image = "{images.DEBIAN}"
options = {{ pull = "never", grace = 10, server_image = "{images.SERVER}" }}
"""


@pytest.fixture
async def service(cluster: Cluster, tmp_path: Path) -> AsyncIterator[ServiceReplica]:
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    replica = ServiceReplica(
        ServiceSettings(
            listen_grpc="127.0.0.1:0",
            listen_http="",
            store=f"sqlite:///{tmp_path}/service.db",
            rules=str(rules),
            sandbox="kubernetes:new?template=pod",
        )
    )
    await replica.start()
    yield replica
    await replica.stop()


@pytest.mark.parametrize("template", ["pod", "server"])
async def test_a_drain_is_announced_before_the_pod_goes(
    service: ServiceReplica, cluster: Cluster, template: str
) -> None:
    manager = service._manager
    async with asyncio.timeout(120):
        request = CreateRequest(kind="shell", sandbox=f"kubernetes:new?template={template}")
        record = (await manager.create(ANN, request)).view.record
        session_id, pod = record.session_id, record.sandbox.partition(":")[2]
        events = manager.events(ANN, session_id)
        coming = asyncio.ensure_future(anext(events))
        drain = ("drain", NODE, f"--pod-selector=holdfast.dev/sandbox={pod}", "--force", "--delete-emptydir-data")
        draining = asyncio.create_task(asyncio.to_thread(cluster.kubectl, *drain))
        try:
            announced = await coming
            assert announced.type == "SANDBOX_ENDING"
            assert "EvictionByEvictionAPI" in announced.detail
            # The pod has its deletion before it, and the session goes on until then.
            assert read(cluster, "get", "pod", pod)["spec"]["terminationGracePeriodSeconds"] == 10
            done = await manager.run_command(ANN, RunRequest("echo saved", session_id=session_id))
            assert done.stdout == b"saved\n"
            rest = [event.type async for event in events]
        finally:
            await draining
            await asyncio.to_thread(cluster.kubectl, "uncordon", NODE)
    assert rest == ["SESSION_ERROR"]
    over = await manager.store.session(session_id)
    assert over.state == "ERROR"
    assert over.close_reason.startswith("sandbox ended: EvictionByEvictionAPI")
    rows, _ = await manager.audit(ANN, AuditFilter(session_id=session_id, kinds=("sandbox_ending",)))
    body = json.loads(rows[0].body)
    assert body["sandbox"] == record.sandbox
    assert 0 < body["seconds"] <= 10


async def test_the_pod_of_a_closed_session_is_removed_without_an_announcement(
    service: ServiceReplica, cluster: Cluster
) -> None:
    manager = service._manager
    async with asyncio.timeout(120):
        record = (await manager.create(ANN, CreateRequest(kind="shell"))).view.record
        pod = record.sandbox.partition(":")[2]
        await manager.close(ANN, record.session_id)
        await asyncio.to_thread(cluster.kubectl, "wait", "--for=delete", f"pod/{pod}", "--timeout=60s")
        rows, _ = await manager.audit(ANN, AuditFilter(session_id=record.session_id, kinds=("sandbox_ending",)))
    assert rows == []
