"""Sandboxes of agent-sandbox: claimed from a warm pool, resolved to their pods, suspended and resumed.

The resources and their controller are those of `tests/support/kubernetes/agent_sandbox.*`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import holdfast
from holdfast.errors import InvalidParams, SandboxError, SandboxGone
from holdfast.fleet.fleet import Fleet
from holdfast.fleet.kubernetes import network_check
from holdfast.fleet.kubernetes.manifest import NETWORK_LABEL
from tests.support.kubernetes import images
from tests.support.kubernetes.agent_sandbox import RESOURCES, running_controller
from tests.support.kubernetes.cluster import Cluster

from .conftest import read

PATIENCE = 120.0
POD_SPEC = {
    "terminationGracePeriodSeconds": 1,
    "automountServiceAccountToken": False,
    "containers": [
        {"name": "app", "image": images.DEBIAN, "imagePullPolicy": "Never", "command": ["sleep", "100000"]}
    ],
}
CLAIM: dict[str, Any] = {"claim": "agents", "ready_timeout": 60.0}


def test_a_cluster_without_the_resources_is_named(cluster: Cluster) -> None:
    async def work() -> None:
        missing = "the cluster has no sandboxclaims.extensions.agents.x-k8s.io/v1beta1"
        async with Fleet("kubernetes") as fleet:
            with pytest.raises(SandboxError, match=missing):
                await fleet.create(options=CLAIM)
            assert await fleet.list() == []
            await fleet.remove("holdfast-0123456789abcdef")
        with pytest.raises(SandboxError, match=r"the cluster has no sandboxes\.agents.x-k8s.io/v1beta1"):
            async with holdfast.connect("kubernetes:default?sandbox=anything"):
                pass

    asyncio.run(work())


@pytest.fixture(scope="module")
def resources(running_cluster: Cluster, environment: None) -> None:
    running_cluster.kubectl("apply", "--filename", str(RESOURCES))
    running_cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    version = "extensions.agents.x-k8s.io/v1beta1"
    running_cluster.apply(
        {
            "apiVersion": version,
            "kind": "SandboxTemplate",
            "metadata": {"name": "debian", "namespace": "default"},
            "spec": {"podTemplate": {"spec": POD_SPEC}},
        },
        {
            "apiVersion": version,
            "kind": "SandboxTemplate",
            "metadata": {"name": "isolated", "namespace": "default"},
            "spec": {"podTemplate": {"metadata": {"labels": {NETWORK_LABEL: "none"}}, "spec": POD_SPEC}},
        },
        {
            "apiVersion": version,
            "kind": "SandboxWarmPool",
            "metadata": {"name": "isolated", "namespace": "default"},
            "spec": {"replicas": 1, "sandboxTemplateRef": {"name": "isolated"}},
        },
        {
            "apiVersion": version,
            "kind": "SandboxWarmPool",
            "metadata": {"name": "agents", "namespace": "default"},
            "spec": {"replicas": 1, "sandboxTemplateRef": {"name": "debian"}},
        },
    )


@pytest.fixture
async def fleet(cluster: Cluster, resources: None) -> AsyncIterator[Fleet]:
    async with asyncio.timeout(PATIENCE), running_controller(), Fleet("kubernetes") as fleet:
        yield fleet
        assert await fleet.list() == []


async def test_a_sandbox_is_claimed_used_extended_and_removed(fleet: Fleet, cluster: Cluster) -> None:
    async with Fleet("kubernetes") as first:
        await first.engine._ensure_policy()  # type: ignore[attr-defined] # before the pool has its pods
    options = {**CLAIM, "claim": "isolated"}
    async with fleet.block(options=options, labels={"task": "17"}, workdir="/tmp") as box:
        assert (await box.exec(["pwd"])).stdout == "/tmp\n"
        assert box.ref.address.startswith("kubernetes:default?sandbox=isolated-")
        assert await network_check.reaches_the_network(box) is False
        (found,) = await fleet.list(labels={"task": "17"})
        assert (found.id, found.state) == (box.ref.id, "running")
        extended = await fleet.extend(box.ref.id, 3600.0)
        assert extended.expires_at is not None
        assert found.expires_at is not None
        assert extended.expires_at > found.expires_at
        async with holdfast.connect(box.ref.address) as same:
            assert (await same.exec(["echo", "same"])).stdout == "same\n"
        claim = read(cluster, "get", "sandboxclaim", box.ref.id)
    with pytest.raises(SandboxGone):
        await fleet.get(box.ref.id)
    sandbox = claim["status"]["sandbox"]["name"]
    await asyncio.to_thread(cluster.kubectl, "wait", "--for=delete", f"sandbox/{sandbox}", "--timeout=60s")


async def test_a_claimed_pod_that_reaches_the_network_is_refused(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The network plugin of this cluster applies policies when a pod starts, and not to labels that a claim adds.
    monkeypatch.setattr(network_check, "PAUSE_SECONDS", 0.01)
    with pytest.raises(SandboxError, match="does not enforce NetworkPolicy holdfast-no-network"):
        await fleet.create(options=CLAIM)


async def test_a_suspended_sandbox_has_no_pod_and_comes_back(fleet: Fleet, cluster: Cluster) -> None:
    ref = await fleet.create(options=CLAIM, network="host")
    try:
        await fleet.pause(ref.id)
        assert (await fleet.get(ref.id)).state == "paused"
        with pytest.raises(InvalidParams, match="paused"):
            await fleet.connect(ref.id)
        with pytest.raises(SandboxError, match="is suspended; resume it first"):
            async with holdfast.connect(ref.address):
                pass
        await fleet.resume(ref.id)
        async with await fleet.connect(ref.id) as box:
            assert (await box.exec(["echo", "again"])).stdout == "again\n"
    finally:
        await fleet.remove(ref.id)


async def test_a_pod_is_not_suspended(fleet: Fleet) -> None:
    ref = await fleet.create(image=images.BUSYBOX, options={"pull": "never"})
    try:
        with pytest.raises(InvalidParams, match=r"pause: only sandboxes of agents\.x-k8s\.io"):
            await fleet.pause(ref.id)
    finally:
        await fleet.remove(ref.id)


async def test_a_pool_that_does_not_exist_is_the_reason(fleet: Fleet) -> None:
    with pytest.raises(SandboxError, match="not ready after 1 s: no controller has answered"):
        await fleet.create(options={"claim": "missing", "ready_timeout": 1.0})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"image": "x"}, "image: the SandboxTemplate of the warm pool determines it"),
        ({"memory": "1GiB"}, "memory: the SandboxTemplate"),
        ({"env": {"A": "b"}}, "env: the SandboxTemplate"),
        ({"options": {**CLAIM, "restricted": True}}, "options: restricted: not with `claim`"),
    ],
)
async def test_fields_of_the_pool_are_refused(cluster: Cluster, fields: dict[str, Any], words: str) -> None:
    async with Fleet("kubernetes") as fleet:
        with pytest.raises(InvalidParams, match=words):
            await fleet.create(**{"options": CLAIM, **fields})
