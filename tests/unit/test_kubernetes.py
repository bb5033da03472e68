"""Pods through the API without a cluster: the protocol of exec, kubeconfig, the pod of a template, readiness."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.errors import InvalidParams, SandboxError, SandboxGone
from holdfast.fleet.kubernetes import manifest
from holdfast.fleet.kubernetes.readiness import PodObject, judge
from holdfast.fleet.record import decode_record, new_record
from holdfast.fleet.template import Template
from holdfast.sandboxes.kubernetes import exec_socket
from holdfast.sandboxes.kubernetes.api import ApiError, acquire, api_error, release
from holdfast.sandboxes.kubernetes.credentials import Credentials
from holdfast.sandboxes.kubernetes.exec_socket import Ended, read_ended
from holdfast.sandboxes.kubernetes.kubeconfig import ClusterConfig, load_config
from holdfast.sandboxes.kubernetes.pod import Pod
from tests.sandbox.kubectl import pod_object

from .kubernetes_api import FakeApi

PATIENCE = 60.0


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApi]:
    made = FakeApi(tmp_path)
    made.pod = pod_object()
    (tmp_path / "token").write_text("first\n")
    async with made.running(tmp_path, {"tokenFile": str(tmp_path / "token")}) as config:
        monkeypatch.setenv("KUBECONFIG", str(config))
        yield made


async def test_a_command_has_its_streams_its_input_and_its_exit_code(api: FakeApi) -> None:
    pod = Pod("team", "web", via="api")
    try:
        done = await pod.run(["sh", "-c", "cat; echo error >&2; exit 3"], stdin=b"\x00" * 600_000)
        assert (done.exit_code, len(done.stdout), done.stderr) == (3, 600_000, "error\n")
        assert (await pod.run(["true"])).exit_code == 0
    finally:
        await pod.aclose()


async def test_a_connection_outlives_its_channel_and_notices_another_pod(api: FakeApi) -> None:
    async with asyncio.timeout(PATIENCE), holdfast.connect("kubernetes:team/web", via="api") as box:
        assert (await box.exec(["cat"], input=b"\x00\xff")).stdout_bytes == b"\x00\xff"
        api.cut()
        assert (await box.exec(["echo", "again"])).stdout == "again\n"
        api.pod = pod_object(uid="uid-2")
        api.cut()
        with pytest.raises(SandboxGone, match="another pod has this name now"):
            await box.exec(["true"])


async def test_a_refused_token_is_read_again(api: FakeApi, tmp_path: Path) -> None:
    client = acquire()
    try:
        path = "/api/v1/namespaces/team/pods/web"
        assert json.loads(await client.request("GET", path))["kind"] == "Pod"
        api.token = "second"
        with pytest.raises(ApiError, match="Unauthorized"):
            await client.request("GET", path)
        (tmp_path / "token").write_text("second\n")
        assert json.loads(await client.request("GET", path))["kind"] == "Pod"
    finally:
        await release(client)


async def test_a_watch_with_a_refused_token_reads_it_again(api: FakeApi, tmp_path: Path) -> None:
    client = acquire()
    try:
        path = "/api/v1/namespaces/team/pods/web"
        await client.request("GET", path)
        # The token that the client holds is not due to be read again yet.
        api.token = "second"
        (tmp_path / "token").write_text("second\n")
        assert [kind async for kind, _ in client.watch(path, dict[str, Any])] == ["ADDED"]
    finally:
        await release(client)


async def test_what_the_api_refuses_is_final(api: FakeApi) -> None:
    api.pod = None
    with pytest.raises(SandboxGone, match="kubernetes:team/web: there is no such pod"):
        async with holdfast.connect("kubernetes:team/web", via="api"):
            pass


async def test_a_cluster_without_the_protocol(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_socket, "PROTOCOL", "v9.channel.k8s.io")
    with pytest.raises(holdfast.errors.HandshakeFailed, match="via=kubectl"):
        async with asyncio.timeout(PATIENCE), holdfast.connect("kubernetes:team/web", via="api"):
            pass


@pytest.mark.parametrize(
    ("status", "ended"),
    [
        ({"status": "Success"}, Ended(0)),
        ({"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "7"}]}}, Ended(7)),
        ({"status": "Failure", "message": "no container"}, Ended(1, "no container")),
        ("nonsense", Ended(-1, '"nonsense"')),
    ],
)
def test_the_outcome_of_a_command(status: Any, ended: Ended) -> None:
    assert read_ended(json.dumps(status).encode()) == ended


def test_an_error_that_a_proxy_wrote() -> None:
    assert str(api_error(502, b"<html>bad gateway</html>")) == "HTTP 502: <html>bad gateway</html>"


@pytest.mark.parametrize(
    ("server", "variables", "proxy"),
    [
        ("https://10.0.0.1:6443", {}, None),
        ("https://10.0.0.1:6443", {"HTTPS_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        ("https://10.0.0.1:6443", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "10.0.0.1"}, None),
        ("https://127.0.0.1:6443", {"HTTPS_PROXY": "http://proxy:3128"}, None),
    ],
)
def test_the_proxy_of_the_environment(
    server: str, variables: dict[str, str], proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Credentials(ClusterConfig(server)).proxy == proxy


# --- kubeconfig --------------------------------------------------------------------------------------------------


def write_config(path: Path, name: str, user: dict[str, Any], **cluster: Any) -> Path:
    document = {
        "current-context": name,
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": f"of-{name}"}}],
        "clusters": [{"name": name, "cluster": {"server": f"https://{name}:6443/", **cluster}}],
        "users": [{"name": name, "user": user}],
    }
    path.write_text(json.dumps(document))
    return path


def test_the_first_of_several_files_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write_config(tmp_path / "one", "one", {"token": "t1"}, **{"proxy-url": "http://proxy"})
    two = write_config(tmp_path / "two", "two", {"tokenFile": "beside"}, **{"tls-server-name": "api"})
    monkeypatch.setenv("KUBECONFIG", f"{one}:{tmp_path}/absent:{two}")
    first, second = load_config(), load_config(context="two")
    assert (first.server, first.namespace, first.token, first.proxy) == (
        *("https://one:6443", "of-one", "t1"),
        "http://proxy",
    )
    assert (second.token_file, second.tls_server_name) == (str(tmp_path / "beside"), "api")


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ({"auth-provider": {"name": "gcp"}}, "auth-provider: not supported"),
        ({"username": "ann", "password": "secret"}, "password, username: not supported"),
        ({"client-certificate-data": "!"}, "client-certificate-data: is not base64"),
        ({"client-key": "/no/such/file"}, "/no/such/file"),
    ],
)
def test_an_identity_that_is_not_understood_is_refused(tmp_path: Path, user: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParams, match=words):
        load_config(kubeconfig=str(write_config(tmp_path / "config", "a", user)))


def test_impersonation_becomes_headers(tmp_path: Path) -> None:
    user = {"token": "t", "as": "ann", "as-groups": ["x", "y"], "as-user-extra": {"scope": ["s"]}}
    config = load_config(kubeconfig=str(write_config(tmp_path / "config", "a", user)))
    assert config.headers == (
        ("Impersonate-User", "ann"),
        ("Impersonate-Group", "x"),
        ("Impersonate-Group", "y"),
        ("Impersonate-Extra-scope", "s"),
    )


def test_certificates_are_read_from_the_file_itself(tmp_path: Path) -> None:
    data = base64.b64encode(b"PEM").decode()
    user = {"client-certificate-data": data, "client-key-data": data}
    cluster: dict[str, Any] = {"certificate-authority-data": data, "insecure-skip-tls-verify": False}
    config = load_config(kubeconfig=str(write_config(tmp_path / "config", "a", user, **cluster)))
    assert (config.ca, config.certificate, config.key, config.verify) == (b"PEM", b"PEM", b"PEM", True)


def test_without_any_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(InvalidParams, match="no cluster is configured"):
        load_config()


# --- the pod of a template ---------------------------------------------------------------------------------------


def make_manifest(**fields: Any) -> dict[str, Any]:
    template = Template(**{"image": "x", **fields})
    record = new_record(template, now=1.0, lifetime=math.inf)
    made = manifest.pod_manifest(template, record, maker="m", tree="/holdfast-1")
    assert decode_record(made["metadata"]["annotations"][manifest.RECORD]) == record
    return made


def test_a_pod_has_no_account_and_no_network_by_default() -> None:
    made = make_manifest()
    assert made["spec"]["automountServiceAccountToken"] is False
    assert made["metadata"]["labels"][manifest.NETWORK_LABEL] == "none"
    assert manifest.NETWORK_LABEL not in make_manifest(network="host")["metadata"]["labels"]
    policy = manifest.no_network_policy()["spec"]
    assert policy["podSelector"]["matchLabels"] == {manifest.NETWORK_LABEL: "none"}
    assert (policy["ingress"], policy["egress"]) == ([], [])


def test_options_become_fields_of_the_pod() -> None:
    made = make_manifest(
        user="1:2",
        cpus=0.25,
        options={
            "server_image": "server",
            "runtime_class": "gvisor",
            "read_only": True,
            "restricted": True,
            "active_deadline": 60,
            "owner": {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"},
            "pod": {"spec": {"hostname": "h"}},
        },
    )
    spec, container = made["spec"], made["spec"]["containers"][0]
    assert (spec["runtimeClassName"], spec["activeDeadlineSeconds"], spec["hostname"]) == ("gvisor", 60, "h")
    assert made["metadata"]["ownerReferences"][0]["name"] == "p"
    assert spec["initContainers"][0]["image"] == "server"
    assert container["securityContext"] == {
        "seccompProfile": {"type": "RuntimeDefault"},
        "runAsUser": 1,
        "runAsGroup": 2,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"] == {"cpu": "250m"}
    assert {each["mountPath"] for each in container["volumeMounts"]} == {"/tmp", "/run", "/holdfast-1"}


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        ({}, (False, False, "it is not scheduled yet")),
        ({"containerStatuses": [{"name": "sandbox", "state": {"running": {}}}]}, (True, False, "")),
        (
            {"containerStatuses": [{"name": "sandbox", "state": {"waiting": {"reason": "ErrImagePull"}}}]},
            (False, False, "ErrImagePull"),
        ),
        (
            {"containerStatuses": [{"name": "sandbox", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]},
            (False, True, "ImagePullBackOff"),
        ),
        (
            {"initContainerStatuses": [{"name": "i", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]},
            (False, True, "CrashLoopBackOff"),
        ),
        ({"phase": "Failed", "reason": "Evicted", "message": "disk"}, (False, True, "Evicted: disk")),
        (
            {
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "m"}
                ]
            },
            (False, False, "Unschedulable: m"),
        ),
    ],
)
def test_whether_a_pod_runs(status: dict[str, Any], verdict: tuple[bool, bool, str]) -> None:
    found = judge(msgspec.convert({"metadata": {"name": "p"}, "status": status}, type=PodObject), "sandbox")
    assert (found.ready, found.hopeless, found.reason) == verdict


def test_a_wrong_option_is_named() -> None:
    with pytest.raises((InvalidParams, SandboxError), match="ready_timeout"):
        manifest.read_options(Template(options={"ready_timeout": "long"}))
