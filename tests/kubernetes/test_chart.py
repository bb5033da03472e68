"""deploy/chart installed by helm: replicas on PostgreSQL, a pod for each session, replicas killed."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import engines, postgres
from tests.support.kubernetes import build, images
from tests.support.kubernetes.cluster import Cluster
from tests.support.kubernetes.service_image import SERVICE, load_service

from .conftest import read

CHART = Path(__file__).parents[2] / "deploy/chart"
SELECTOR = "--selector=app.kubernetes.io/instance=holdfast"
ENDPOINTS = "--selector=kubernetes.io/service-name=holdfast"
RULES = f"""
[templates.agent]
engine = "kubernetes"
image = "{images.DEBIAN}"
options = {{ pull = "never" }}

[profiles.default]
sandbox.mode = "none"
sandbox.templates = ["agent"]
"""


@pytest.fixture(scope="module")
def helm() -> Path:
    if not build.helm().exists():
        pytest.skip("no helm: `make kubernetes` builds it")
    return build.helm()


@pytest.fixture(scope="module")
def store(running_cluster: Cluster) -> Iterator[str]:
    """The URL of a database that pods reach through the node."""
    programs = postgres.postgres_programs()
    if programs is None:
        pytest.skip("no PostgreSQL: `make parts` installs it on Debian")
    host, node = running_cluster.host_address, running_cluster.address
    running_cluster.inside(
        *("iptables", "-t", "nat", "-A", "POSTROUTING", "-s", running_cluster.pods, "-d", host, "-j", "MASQUERADE")
    )
    with postgres.running_cluster(programs) as database:
        name = database.new_database().removeprefix("postgresql://holdfast@/").partition("?")[0]
        port = database.listen_on(host, node)
        yield f"postgresql://holdfast@{host}:{port}/{name}"


@pytest.fixture(scope="module")
def release(
    running_cluster: Cluster, environment: None, helm: Path, store: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    load_service(running_cluster)
    running_cluster.kubectl("create", "secret", "generic", "holdfast-store", f"--from-literal=url={store}")
    repository, _, tag = SERVICE.rpartition(":")
    values = {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "tls": {"allowPlaintext": True},
        "rules": RULES,
        "settings": {"lease_seconds": 3},
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "1Gi"}},
    }
    file = tmp_path_factory.mktemp("chart") / "values.json"
    file.write_text(json.dumps(values))
    where = ("--kubeconfig", str(running_cluster.kubeconfig), "--namespace", "default")
    try:
        done = subprocess.run(
            [helm, "install", "holdfast", CHART, *where, "--values", file, "--wait", "--timeout", "150s"],
            capture_output=True,
            text=True,
            timeout=200,
        )
        if done.returncode != 0:
            state = running_cluster.kubectl("describe", "pods", SELECTOR)
            pytest.fail(f"{done.stderr}\n{state[-3000:]}\n{_logs(running_cluster)}")
        yield
    finally:
        subprocess.run([helm, "uninstall", "holdfast", *where], capture_output=True, timeout=120)


def _logs(cluster: Cluster) -> str:
    try:
        return cluster.kubectl("logs", SELECTOR, "--tail=40", "--prefix")
    except engines.Missing as missing:
        return str(missing)


def replicas(cluster: Cluster) -> dict[str, str]:
    """The names and addresses of the replicas that the Service selects as ready."""
    slices = read(cluster, "get", "endpointslices", ENDPOINTS)["items"]
    return {
        each["targetRef"]["name"]: each["addresses"][0]
        for slice in slices
        for each in slice["endpoints"]
        if each["conditions"].get("ready")
    }


class ServiceAddress:
    """The address of the Service in the node's network: what kube-proxy does, which this cluster has not."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._address = read(cluster, "get", "service", "holdfast")["spec"]["clusterIP"]
        # Some route must exist before the destination is replaced.
        cluster.inside("ip", "route", "add", f"{self._address}/32", "via", cluster.host_address)
        cluster.inside("iptables", "-t", "nat", "-N", "HF-SERVICE")
        cluster.inside("iptables", "-t", "nat", "-A", "OUTPUT", "-d", self._address, "-j", "HF-SERVICE")

    def update(self) -> None:
        """Forward to the replicas that are ready now, each with the same chance."""
        self._cluster.inside("iptables", "-t", "nat", "-F", "HF-SERVICE")
        ready = list(replicas(self._cluster).values())
        for left, address in zip(range(len(ready), 0, -1), ready, strict=True):
            chance = ("-m", "statistic", "--mode", "random", "--probability", f"{1 / left:.4f}")
            target = ("-p", "tcp", "--dport", "7401", *chance, "-j", "DNAT", "--to-destination", f"{address}:7401")
            self._cluster.inside("iptables", "-t", "nat", "-A", "HF-SERVICE", *target)

    def call(self, method: str, token: str, **fields: Any) -> Any:
        reply = self._cluster.inside(
            *("curl", "--silent", "--show-error", "--max-time", "100", "--noproxy", "*"),
            *("--header", f"Authorization: Bearer {token}", "--header", "Content-Type: application/json"),
            *(
                "--data",
                json.dumps(fields),
                f"http://{self._address}:7401/holdfast.session.v1.SessionService/{method}",
            ),
        )
        return json.loads(reply)


def until_replicas(cluster: Cluster, count: int, without: str = "") -> None:
    """Until the Service has so many replicas that are ready, and not the one that was removed."""
    for _ in cluster.watch("endpointslices", ENDPOINTS):
        found = replicas(cluster)
        if len(found) >= count and without not in found:
            return
    raise AssertionError(cluster.kubectl("describe", "pods", SELECTOR)[-3000:])


def run(service: ServiceAddress, token: str, session_id: str, command: str) -> str:
    done = service.call("RunCommand", token, sessionId=session_id, command=command)
    # JSON of protobuf leaves zeros out.
    assert "commandId" in done, done
    assert done.get("exitCode", 0) == 0, done
    return base64.b64decode(done["stdout"]).decode()


def test_a_session_outlives_the_replica_that_made_it(cluster: Cluster, release: None) -> None:
    until_replicas(cluster, 2)
    service = ServiceAddress(cluster)
    service.update()
    agent = cluster.kubectl("exec", "deploy/holdfast", "--", "holdfast", "service", "agent", "add", "ann").strip()
    created = service.call("CreateSession", agent, kind="SHELL")
    assert "sessionId" in created, (created, _logs(cluster))
    session_id = created["sessionId"]
    (pod,) = read(cluster, "get", "pods", "--selector=holdfast.dev/sandbox")["items"]
    assert run(service, agent, session_id, "X=kept; cat /etc/hostname") == f"{pod['metadata']['name']}\n"
    for name in sorted(replicas(cluster)):
        # One after the other, so that the replica that follows the session is among them.
        cluster.kubectl("delete", "pod", name, "--grace-period=0", "--force")
        until_replicas(cluster, 2, without=name)
        service.update()
        assert run(service, agent, session_id, "echo $X") == "kept\n"
    service.call("CloseSession", agent, sessionId=session_id)
    cluster.kubectl("wait", "--for=delete", f"pod/{pod['metadata']['name']}", "--timeout=90s")


def template(helm: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The chart rendered for a release that is not installed; without a version helm assumes an old one."""
    command = [str(helm), "template", "another", str(CHART), f"--kube-version={build.version()}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def rendered(helm: Path, *settings: str) -> dict[str, Any]:
    """The objects of the chart with these values, by their kind."""
    flags = [word for setting in ("tls.secretName=holdfast-tls", *settings) for word in ("--set", setting)]
    done = template(helm, *flags)
    assert done.returncode == 0, done.stderr
    return {each["kind"]: each for each in yaml.safe_load_all(done.stdout) if each is not None}


#: Every value that adds an object or a branch of a template.
EVERYTHING = (
    *("serviceMonitor.enabled=true", "serviceMonitor.labels.release=prometheus", "rbac.agentSandbox=true"),
    *("audit.existingSecret=audit", "imagePullSecrets[0].name=registry", "settings.max_sessions=5000"),
    *("nodeSelector.pool=services", "tolerations[0].operator=Exists", "podAnnotations.team=a"),
    "networkPolicy.from[0].podSelector.matchLabels.app=agents",
)


@pytest.mark.parametrize("settings", [(), EVERYTHING, (*EVERYTHING, "tls.clientCaKey=ca.crt")])
def test_the_api_server_accepts_every_object(cluster: Cluster, helm: Path, settings: tuple[str, ...]) -> None:
    objects = rendered(helm, *settings)
    # Of the Prometheus operator, which this cluster has not.
    assert ("ServiceMonitor" in objects) == ("serviceMonitor.enabled=true" in settings)
    objects.pop("ServiceMonitor", None)
    assert set(objects) == {
        *("ServiceAccount", "Role", "RoleBinding", "ConfigMap", "Service", "Deployment"),
        *("NetworkPolicy", "PodDisruptionBudget"),
    }
    items = {"apiVersion": "v1", "kind": "List", "items": list(objects.values())}
    options = ("--dry-run=server", "--validate=strict", "--filename", "-")
    cluster.kubectl("apply", "--namespace", "default", *options, stdin=json.dumps(items).encode())


def test_the_monitor_selects_the_service_and_its_port(helm: Path) -> None:
    objects = rendered(helm, *EVERYTHING)
    monitor, service = objects["ServiceMonitor"], objects["Service"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert (endpoint["scheme"], endpoint["path"]) == ("https", "/metrics")
    given = rendered(helm, *EVERYTHING, "serviceMonitor.tlsConfig.insecureSkipVerify=true")
    assert given["ServiceMonitor"]["spec"]["endpoints"][0]["tlsConfig"] == {"insecureSkipVerify": True}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("replicas=3", "replicas"),
        ("replicaCount=0", "replicaCount"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("service.grpcPort=high", "grpcPort"),
        ("serviceMonitor.enabled=perhaps", "serviceMonitor"),
        ("tls.secretName=", "tls.secretName: name a Secret"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(helm: Path, setting: str, words: str) -> None:
    done = template(helm, "--set", "tls.secretName=t", "--set", setting)
    assert done.returncode != 0
    assert words in done.stderr
