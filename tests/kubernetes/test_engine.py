"""The engine suite over pods, and what is particular to pods: security, images without a shell, network."""

from __future__ import annotations

import contextlib
import functools
import gc
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest

import holdfast
from holdfast.errors import InvalidParams, SandboxError
from holdfast.fleet.fleet import Fleet
from holdfast.fleet.kubernetes import engine as engine_module, network_check
from holdfast.fleet.template import Template
from holdfast.testing import engine_suite
from holdfast.testing.engine_suite import Check
from tests.support.kubernetes import images
from tests.support.kubernetes.cluster import NODE, Cluster

from .conftest import read

#: Images are on the node, and there is no registry.
NEVER: dict[str, Any] = {"pull": "never"}


@pytest.fixture
async def fleet(cluster: Cluster) -> AsyncIterator[Fleet]:
    async with Fleet("kubernetes") as fleet:
        yield fleet
        assert await fleet.list() == []


#: The server through the shell of the image, and from an image of its own for an unprivileged user.
TEMPLATES = {
    "shell": Template(image=images.BUSYBOX, options=NEVER),
    "server-image": Template(
        image=images.DEBIAN,
        user="1000",
        workdir="/tmp",
        options={**NEVER, "server_image": images.SERVER, "restricted": True, "read_only": True},
    ),
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("check", engine_suite.CHECKS, ids=lambda check: check.__name__)
async def test_suite(check: Check, fleet: Fleet, template: Template) -> None:
    await engine_suite.run_check(check, fleet, template)


async def test_the_fields_of_a_template_are_fields_of_the_pod(cluster: Cluster) -> None:
    options = {**NEVER, "restricted": True, "node_selector": {"kubernetes.io/hostname": "node"}}
    async with holdfast.create(
        "kubernetes",
        image=images.DEBIAN,
        cpus=0.5,
        memory="512MiB",
        disk="1GiB",
        user="1000:1000",
        workdir="/tmp/work",
        env={"PLAIN": "a b", "REFERENCE": "$(PLAIN)"},
        labels={"task": "17", "not a label": "of Kubernetes"},
        options=options,
    ) as box:
        shown = await box.exec(
            ["sh", "-c", 'id -u; id -g; pwd; echo "$PLAIN $REFERENCE"; grep CapEff /proc/self/status']
        )
        assert shown.stdout == "1000\n1000\n/tmp/work\na b $(PLAIN)\nCapEff:\t0000000000000000\n"
        # Neither a token of the cluster nor addresses of its services beside that of the API.
        assert not (await box.exec(["ls", "/var/run/secrets/kubernetes.io"])).success
        pod = read(cluster, "get", "pod", box.ref.id)
        assert pod["spec"]["containers"][0]["resources"]["limits"] == {
            "cpu": "500m",
            "memory": "536870912",
            "ephemeral-storage": "1073741824",
        }
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["nodeSelector"] == {"kubernetes.io/hostname": "node"}
        assert pod["metadata"]["labels"]["task"] == "17"
        assert "not a label" not in pod["metadata"]["labels"]
        assert box.ref.labels == {"task": "17", "not a label": "of Kubernetes"}


async def test_an_idle_connection_takes_less_than_100_kilobytes(cluster: Cluster) -> None:
    count = 10
    async with contextlib.AsyncExitStack() as stack:
        box = await stack.enter_async_context(
            holdfast.create("kubernetes", image=images.BUSYBOX, network="host", options=NEVER)
        )
        connect = functools.partial(holdfast.connect, box.ref.address)
        first = await stack.enter_async_context(connect())
        assert (await first.exec(["true"])).success  # fills caches
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        boxes = [await stack.enter_async_context(connect()) for _ in range(count)]
        assert all([(await each.exec(["true"])).success for each in boxes])
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] / count < 100_000


async def test_memory_is_limited(cluster: Cluster) -> None:
    async with holdfast.create("kubernetes", image=images.BUSYBOX, memory="128MiB", options=NEVER) as box:
        # Every page of a memory file system counts as memory of the pod.
        done = await box.exec(
            ["sh", "-c", "dd if=/dev/zero of=/dev/shm/big bs=1M count=60; tail /dev/zero"], timeout=60
        )
        assert done.returncode == 137, done


@pytest.mark.parametrize("image", [images.EMPTY, images.DEBIAN])
async def test_an_image_without_a_shell_and_a_root_that_cannot_be_written(cluster: Cluster, image: str) -> None:
    options = {**NEVER, "server_image": images.SERVER, "read_only": True, "restricted": True}
    async with holdfast.create("kubernetes", image=image, user="1000", options=options) as box:
        command = ["/bin/busybox-alone", "id", "-u"] if image == images.EMPTY else ["id", "-u"]
        assert (await box.exec(command)).stdout == "1000\n"
        await box.write_file("/tmp/here", b"\x00\xff")
        assert await box.read_file("/tmp/here") == b"\x00\xff"
        with pytest.raises(SandboxError, match=r"[Rr]ead-only"):
            await box.write_file("/here", "")
    async with Fleet("kubernetes") as fleet:
        ref = await fleet.create(image=image, user="1000", options=options)
        try:
            async with await fleet.connect(ref.id) as box:
                assert (await box.exec(command)).stdout == "1000\n"
        finally:
            await fleet.remove(ref.id)


def failing(policy: str) -> dict[str, Any]:
    """The spec of a pod whose first program fails; its other container never runs."""
    fails = {
        "name": "fails",
        "image": images.BUSYBOX,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", "exit 7"],
    }
    return {"restartPolicy": policy, "initContainers": [fails]}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"image": "holdfast.test/missing:1"}, "ErrImageNeverPull"),
        ({"image": "Not An Image"}, "InvalidImageName"),
        ({"image": images.EMPTY}, "the image has no shell: name an image with the bundle, options server_image"),
        ({"image": images.BUSYBOX, "cpus": 1000.0}, "not ready after 5 s: Unschedulable: .*Insufficient cpu"),
        ({"image": images.BUSYBOX, "node": "nowhere"}, "not ready after 5 s: Unschedulable: .*didn't match"),
        ({"image": images.BUSYBOX, "class": "gvisor"}, "RuntimeClass .*gvisor.* not found"),
        ({"image": images.DEBIAN, "server": "holdfast.test/missing:1"}, "ErrImageNeverPull"),
        # Nothing listens there.
        ({"image": "127.0.0.1:1/missing:1", "pull": "missing"}, "ImagePullBackOff: .*127.0.0.1:1"),
        ({"image": images.BUSYBOX, "pod": {"spec": failing("Never")}}, "fails: Error, exit code 7"),
        ({"image": images.BUSYBOX, "pod": {"spec": failing("Always")}}, "CrashLoopBackOff: .*restarting failed"),
    ],
    ids=["image", "name", "shell", "cpus", "node", "runtime", "server", "pull", "crash", "crash loop"],
)
async def test_a_pod_that_does_not_run_is_removed_and_its_reason_is_the_error(
    fleet: Fleet, fields: dict[str, Any], reason: str
) -> None:
    names = {"class": "runtime_class", "server": "server_image", "pull": "pull", "pod": "pod"}
    options = {**NEVER, **{option: fields[field] for field, option in names.items() if field in fields}}
    if "node" in fields:
        options["node_selector"] = {"kubernetes.io/hostname": fields["node"]}
    # Those that wait for a node fail with the time; the kubelet reports the others sooner.
    options["ready_timeout"] = 5.0 if "not ready" in reason else 100.0
    template = {name: value for name, value in fields.items() if name in ("image", "cpus")}
    with pytest.raises(SandboxError, match=reason):
        await fleet.create(**template, options=options)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "engine kubernetes: image: missing"),
        ({"image": "x", "root": None, "processes": 10}, "engine kubernetes: processes"),
        ({"image": "x", "mounts": ["/etc:/e"]}, "engine kubernetes: mounts"),
        ({"image": "x", "user": "root"}, "engine kubernetes: user: 'root' is not UID"),
        ({"image": "x", "user": "0", "options": {"restricted": True}}, "engine kubernetes: user: 0 is root"),
        ({"image": "x", "options": {"pull": "perhaps"}}, "engine kubernetes: options: pull"),
        ({"image": "x", "options": {"read_only": "yes"}}, "engine kubernetes: options: .*read_only"),
        ({"image": "x", "options": {"privileged": True}}, "engine kubernetes: options: privileged"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(fleet: Fleet, fields: dict[str, Any], words: str) -> None:
    with pytest.raises((InvalidParams, SandboxError), match=words):
        await fleet.create(**fields)


async def test_the_garbage_collector_removes_a_sandbox_with_its_owner(cluster: Cluster, fleet: Fleet) -> None:
    cluster.kubectl("create", "configmap", "owner")
    uid = read(cluster, "get", "configmap", "owner")["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid}
    ref = await fleet.create(image=images.BUSYBOX, options={**NEVER, "owner": owner, "grace": 1})
    cluster.kubectl("delete", "configmap", "owner")
    cluster.await_object(f"pod/{ref.id}", "delete")


async def test_the_kubelet_ends_a_sandbox_after_its_deadline(cluster: Cluster, fleet: Fleet) -> None:
    ref = await fleet.create(image=images.BUSYBOX, options={**NEVER, "active_deadline": 1, "grace": 1})
    cluster.await_object(f"pod/{ref.id}", "jsonpath={.status.reason}=DeadlineExceeded")
    assert (await fleet.get(ref.id)).state == "ended"
    await fleet.remove(ref.id)


async def test_a_runtime_class_and_a_priority_of_the_cluster(cluster: Cluster) -> None:
    cluster.apply(
        {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "plain"}, "handler": "runc"},
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "low"},
            "value": -10,
        },
    )
    options = {**NEVER, "runtime_class": "plain", "priority_class": "low", "requests": {"cpu": "10m"}}
    async with holdfast.create("kubernetes", image=images.BUSYBOX, options=options) as box:
        assert (await box.exec(["true"])).success
        spec = read(cluster, "get", "pod", box.ref.id)["spec"]
        assert (spec["runtimeClassName"], spec["priority"]) == ("plain", -10)
        assert spec["containers"][0]["resources"]["requests"] == {"cpu": "10m"}


async def test_a_tainted_node_takes_sandboxes_that_tolerate_it(cluster: Cluster, fleet: Fleet) -> None:
    cluster.kubectl("taint", "node", NODE, "holdfast.test/only=sandboxes:NoSchedule")
    try:
        with pytest.raises(SandboxError, match=r"Unschedulable: .*untolerated taint"):
            await fleet.create(image=images.BUSYBOX, options={**NEVER, "ready_timeout": 5.0})
        tolerations = [{"key": "holdfast.test/only", "operator": "Exists"}]
        async with fleet.block(image=images.BUSYBOX, options={**NEVER, "tolerations": tolerations}) as box:
            assert (await box.exec(["true"])).success
    finally:
        cluster.kubectl("taint", "node", NODE, "holdfast.test/only-")


async def test_a_cluster_that_does_not_enforce_policies_is_noticed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_checked", {})
    monkeypatch.setattr(network_check, "PAUSE_SECONDS", 0.01)
    # Without its label the policy does not select the pod: as if the network plugin ignored it.
    options = {**NEVER, "pod": {"metadata": {"labels": {"holdfast.dev/network": "ignored"}}}}
    with pytest.raises(SandboxError, match="does not enforce NetworkPolicy holdfast-no-network"):
        async with holdfast.create("kubernetes", image=images.BUSYBOX, options=options):
            pass
    async with Fleet("kubernetes") as fleet:
        assert await fleet.list() == []


async def test_the_network_of_pods(cluster: Cluster) -> None:
    async with holdfast.create("kubernetes", image=images.BUSYBOX, network="host", options=NEVER) as box:
        assert await network_check.reaches_the_network(box)
    async with holdfast.create("kubernetes", image=images.BUSYBOX, network=["pypi.org"], options=NEVER) as box:
        assert await network_check.reaches_the_network(box) is False
        assert "HTTPS_PROXY" in (await box.exec(["env"])).stdout
