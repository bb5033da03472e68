"""A real cluster for the tests of this folder, started once by `make kubernetes`; elsewhere they are skipped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import Missing
from tests.support.kubernetes import images
from tests.support.kubernetes.cluster import Cluster, cluster as start_cluster

MakePod = Callable[..., str]


@pytest.fixture(scope="session")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if "HOLDFAST_KUBERNETES" not in os.environ:
        pytest.skip("no cluster: `make kubernetes` builds one and runs these tests")
    try:
        with start_cluster(tmp_path_factory.mktemp("cluster")) as made:
            yield made
    except Missing as missing:
        pytest.fail(str(missing))


@pytest.fixture(scope="session")
def environment(running_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(running_cluster.kubeconfig))
        patch.setenv("PATH", str(running_cluster.programs), prepend=":")
        patch.setenv("HOLDFAST_FLEET_DIRECTORY", str(tmp_path_factory.mktemp("f")))
        yield


@pytest.fixture
def cluster(running_cluster: Cluster, environment: None) -> Iterator[Cluster]:
    """The cluster, whole before and after the test."""
    yield running_cluster
    for name in ("kube-apiserver", "containerd", "kubelet", "kube-controller-manager", "kube-scheduler"):
        if not running_cluster.is_running(name):
            running_cluster.start(name)
            running_cluster.await_ready()


def pod_object(name: str, image: str = images.BUSYBOX, **spec: Any) -> dict[str, Any]:
    """A pod that sleeps; `container` in `spec` is laid over its container."""
    container = {
        "name": "app",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["sleep", "100000"],
        **spec.pop("container", {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "containers": [container, *spec.pop("more_containers", ())],
            **spec,
        },
    }


@pytest.fixture(scope="module")
def make_pod(running_cluster: Cluster, environment: None) -> Iterator[MakePod]:
    """Makes a pod and waits until it runs; gives its name."""
    made: list[str] = []

    def make(name: str, image: str = images.BUSYBOX, *, wait: bool = True, **spec: Any) -> str:
        running_cluster.apply(pod_object(name, image, **spec))
        made.append(name)
        if wait:
            running_cluster.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=90s")
        return name

    yield make
    if made:
        running_cluster.kubectl("delete", "pod", "--ignore-not-found", "--wait=false", *made)


def read(cluster: Cluster, *arguments: str) -> Any:
    """The output of kubectl, decoded."""
    return json.loads(cluster.kubectl(*arguments, "--output", "json"))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path
