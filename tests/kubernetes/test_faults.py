"""Faults of a cluster in mid-stream: every byte arrives, or one error names the pod and the reason."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

import holdfast
from holdfast import OutputChunk, Sandbox
from holdfast.client.process import Process
from holdfast.errors import HoldfastError, SandboxError, SandboxGone, UnknownProcess
from holdfast.fleet.fleet import Fleet
from holdfast.sandboxes.kubernetes import Pod
from holdfast.testing.sandbox_suite import Subject
from tests.support.kubernetes import images
from tests.support.kubernetes.cluster import Cluster

from .conftest import MakePod, pod_object

PATIENCE = 120.0
#: Enough that no buffer on the way holds all of it.
BYTES = 48_000_000
#: Prints numbered lines, so that a byte that is lost, doubled or moved changes the hash; cut to `BYTES`.
LINES = f"seq 1 10000000 | head -c {BYTES}"


def expected() -> str:
    digest, size = hashlib.sha256(), 0
    for number in range(1, 10_000_001):
        line = b"%d\n" % number
        digest.update(line[: BYTES - size])
        size += len(line)
        if size >= BYTES:
            return digest.hexdigest()
    raise AssertionError("too few lines")


@contextlib.asynccontextmanager
async def connected(name: str, **options: Any) -> AsyncIterator[Sandbox]:
    async with asyncio.timeout(PATIENCE), holdfast.connect(f"kubernetes:default/{name}", **options) as box:
        yield box


async def hash_of(process: Process, halfway: asyncio.Event) -> str:
    """The hash of all output; `halfway` is set when a third of it has come, and reading waits for the fault."""
    digest, size = hashlib.sha256(), 0
    async for event in process.events():
        if isinstance(event, OutputChunk):
            digest.update(event.data)
            size += len(event.data)
            if size > BYTES // 3:
                halfway.set()
    assert size == BYTES
    return digest.hexdigest()


@pytest.mark.parametrize("program", ["kube-apiserver", "kubelet", "containerd"])
async def test_a_killed_program_of_the_cluster_loses_no_byte(
    cluster: Cluster, make_pod: MakePod, program: str
) -> None:
    name = make_pod(f"kill-{program}")
    async with connected(name, reconnect_deadline=PATIENCE) as box:
        # Retained until they were read: the reader is away while the cluster restarts.
        process = await box.start(["sh", "-c", LINES], overflow="block")
        halfway = asyncio.Event()
        reading = asyncio.create_task(hash_of(process, halfway))
        await halfway.wait()
        await asyncio.to_thread(cluster.kill, program)
        cluster.start(program)
        assert await reading == await asyncio.to_thread(expected)
        assert (await box.exec(["echo", "again"])).stdout == "again\n"
    await asyncio.to_thread(cluster.await_ready)


async def test_a_cut_channel_loses_no_byte(cluster: Cluster, make_pod: MakePod) -> None:
    name = make_pod("cut")
    subject = Subject(lambda: Pod("default", name, via="api"))
    async with asyncio.timeout(PATIENCE), subject.connect_and_cut() as (box, cut):
        process = await box.start(["sh", "-c", LINES], overflow="block")
        halfway = asyncio.Event()
        reading = asyncio.create_task(hash_of(process, halfway))
        await halfway.wait()
        cut()
        assert await reading == await asyncio.to_thread(expected)


async def test_200_megabytes_each_way(cluster: Cluster, make_pod: MakePod) -> None:
    name = make_pod("bulk", images.DEBIAN)
    block = bytes(range(256)) * 4096
    async with connected(name) as box:
        sink = await box.start(["sh", "-c", "sha256sum"], stdin="open")
        digest = hashlib.sha256()
        for _ in range(200):
            await sink.write(block)
            digest.update(block)
        await sink.close_stdin()
        shown = b""
        async for event in sink.events():
            if isinstance(event, OutputChunk):
                shown += event.data
        assert shown.split()[0].decode() == digest.hexdigest()
        source = await box.start(["sh", "-c", f"seq 1 100000000 | head -c {200 * len(block)} | tee /tmp/sent"])
        received, size = hashlib.sha256(), 0
        async for event in source.events():
            if isinstance(event, OutputChunk):
                received.update(event.data)
                size += len(event.data)
        assert size == 200 * len(block)
        assert (await box.exec(["sha256sum", "/tmp/sent"])).stdout.split()[0] == received.hexdigest()


async def exec_until_it_fails(box: Sandbox) -> None:
    """Run a command that outlasts the test: it ends with the error of the sandbox."""
    async with asyncio.timeout(PATIENCE):
        await box.exec(["sleep", "100000"])


# --- the pod goes away -------------------------------------------------------------------------------------------


async def test_a_deleted_pod_is_gone(cluster: Cluster, make_pod: MakePod) -> None:
    name = make_pod("deleted")
    async with connected(name) as box:
        process = await box.start(["sh", "-c", "while :; do echo line; sleep 0.1; done"])
        await process.wait_for_output("line")
        deleting = asyncio.create_task(asyncio.to_thread(cluster.kubectl, "delete", "pod", name))
        with pytest.raises(SandboxGone, match=f"kubernetes:default/{name}: "):
            async for _ in process.events():
                pass
        await deleting
        with pytest.raises(SandboxGone, match=name):
            await box.exec(["true"])


async def test_an_evicted_pod_is_gone_with_the_reason(cluster: Cluster, make_pod: MakePod) -> None:
    name = make_pod("evicted", restartPolicy="Never")
    async with connected(name) as box:
        assert (await box.exec(["true"])).success
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": "default"},
            "deleteOptions": {"gracePeriodSeconds": 1},
        }
        path = f"/api/v1/namespaces/default/pods/{name}/eviction"
        await asyncio.to_thread(
            cluster.kubectl, "create", "--raw", path, "--filename", "-", stdin=json.dumps(eviction).encode()
        )
        with pytest.raises(SandboxGone, match=name):
            await exec_until_it_fails(box)


async def test_a_sandbox_that_writes_beyond_its_disk_is_evicted(cluster: Cluster) -> None:
    async with Fleet("kubernetes") as fleet:
        ref = await fleet.create(image=images.BUSYBOX, disk="20MiB", options={"pull": "never"})
        try:
            async with await fleet.connect(ref.id) as box:
                await box.exec(["sh", "-c", "head -c 60000000 /dev/zero > /big"])
                with pytest.raises(SandboxGone, match=ref.id):
                    await exec_until_it_fails(box)
            assert (await fleet.get(ref.id)).state == "ended"
            # The kubelet reports the end of the container and the reason one after the other.
            wait = ("wait", "--for=jsonpath={.status.reason}=Evicted", f"pod/{ref.id}", "--timeout=60s")
            await asyncio.to_thread(cluster.kubectl, *wait)
        finally:
            await fleet.remove(ref.id)


async def test_another_pod_under_the_same_name_is_noticed(cluster: Cluster, make_pod: MakePod) -> None:
    name = make_pod("replaced")
    async with connected(name, reconnect_deadline=PATIENCE) as box:
        await box.start(["sleep", "600"], id="sleeper")
        await asyncio.to_thread(cluster.kubectl, "replace", "--force", "--filename", "-", stdin=_json(name))
        with pytest.raises(
            SandboxGone, match=f"{name}: (another pod has this name now|there is no such pod|.*deleted)"
        ):
            await box.exec(["true"])
    await asyncio.to_thread(cluster.kubectl, "wait", "--for=condition=Ready", f"pod/{name}", "--timeout=90s")
    async with connected(name) as box:
        assert (await box.exec(["echo", "new"])).stdout == "new\n"


def _json(name: str) -> bytes:
    return json.dumps(pod_object(name)).encode()


async def test_a_restarted_container_is_the_same_sandbox(cluster: Cluster, make_pod: MakePod) -> None:
    # The first process ends when the file appears, and the kubelet starts the container again.
    command = ["sh", "-c", "until [ -e /tmp/end ]; do sleep 0.2; done"]
    name = make_pod("restarted", container={"command": command})
    async with connected(name, reconnect_deadline=PATIENCE) as box:
        await box.start(["sleep", "600"], id="sleeper")
        await box.write_file("/tmp/end", "")
        restarted = "jsonpath={.status.containerStatuses[0].restartCount}=1"
        await asyncio.to_thread(cluster.await_object, f"pod/{name}", restarted)
        assert (await box.exec(["echo", "again"])).stdout == "again\n"
        with pytest.raises(UnknownProcess):
            await box.process("sleeper")


# --- the fleet ---------------------------------------------------------------------------------------------------


async def until_made(cluster: Cluster) -> None:
    """Until the cluster has the pod of a sandbox."""
    await asyncio.to_thread(cluster.await_object, "pod", "create", "--selector=holdfast.dev/sandbox")


async def test_sandboxes_are_made_while_the_api_server_restarts(cluster: Cluster) -> None:
    async with Fleet("kubernetes") as fleet:
        making = [
            asyncio.create_task(fleet.create(image=images.BUSYBOX, options={"pull": "never"})) for _ in range(4)
        ]
        await until_made(cluster)
        await asyncio.to_thread(cluster.kill, "kube-apiserver")
        cluster.start("kube-apiserver")
        refs = await asyncio.gather(*making, return_exceptions=True)
        failed = [each for each in refs if isinstance(each, BaseException)]
        assert all(isinstance(each, HoldfastError) for each in failed), failed
        await asyncio.to_thread(cluster.await_ready)
        made = {each.id for each in refs if not isinstance(each, BaseException)}
        # One that failed left nothing behind.
        assert {ref.id for ref in await fleet.list()} == made
        for id in made:
            async with await fleet.connect(id) as box:
                assert (await box.exec(["echo", "there"])).stdout == "there\n"
            await fleet.remove(id)


async def test_a_cancelled_create_leaves_nothing(cluster: Cluster) -> None:
    async with Fleet("kubernetes") as fleet:
        # No node matches, so that the pod is not ready before the cancellation.
        options = {"pull": "never", "node_selector": {"kubernetes.io/hostname": "nowhere"}}
        making = asyncio.create_task(fleet.create(image=images.BUSYBOX, options=options))
        await until_made(cluster)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert await fleet.list() == []


async def test_without_a_cluster_the_error_names_it(cluster: Cluster) -> None:
    await asyncio.to_thread(cluster.kill, "kube-apiserver")
    with pytest.raises(HoldfastError, match=cluster.server):
        async with holdfast.connect("kubernetes:default/anything", reconnect_deadline=0):
            pass
    with pytest.raises((SandboxError, HoldfastError), match=cluster.server):
        async with asyncio.timeout(PATIENCE), Fleet("kubernetes") as fleet:
            await fleet.list()
