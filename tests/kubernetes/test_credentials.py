"""The identity and the permissions of the caller: tokens, certificates, plugins, a pod's own account, rights."""

from __future__ import annotations

import asyncio
import json
import ssl
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import ConnectionLost, HoldfastError, InvalidParams, SandboxError, SandboxGone
from holdfast.fleet.fleet import Fleet
from holdfast.sandboxes.kubernetes import kubeconfig as kubeconfig_module
from holdfast.sandboxes.kubernetes.api import acquire, release
from tests.support.kubernetes import images
from tests.support.kubernetes.cluster import Cluster

from .conftest import MakePod
from .test_faults import exec_until_it_fails

SandboxRole = Callable[..., str]
#: All that a connection needs, and all that the fleet needs.
CONNECT = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]
EXEC = [{"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["get", "create"]}]
FLEET = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "delete", "get", "list", "patch", "watch"]},
    *EXEC,
    {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": ["create", "patch"]},
]


@pytest.fixture
def account(cluster: Cluster, request: pytest.FixtureRequest) -> SandboxRole:
    """Makes a service account with these rights; gives its name."""
    name = f"account-{abs(hash(request.node.nodeid)) % 10**8}"

    def make(*rules: dict[str, Any]) -> str:
        metadata = {"name": name, "namespace": "default"}
        group = "rbac.authorization.k8s.io"
        subject = {"kind": "ServiceAccount", **metadata}
        cluster.apply(
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
            {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": list(rules)},
            {
                "apiVersion": f"{group}/v1",
                "kind": "RoleBinding",
                "metadata": metadata,
                "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
                "subjects": [subject],
            },
        )
        return name

    return make


def config(cluster: Cluster, path: Path, user: Mapping[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.authority.kubeconfig(path, cluster.server, user)))


async def hello(name: str, **options: Any) -> str:
    async with asyncio.timeout(60), holdfast.connect(f"kubernetes:default/{name}", **options) as box:
        return (await box.exec(["echo", "hello"])).stdout


async def test_a_token(
    cluster: Cluster, account: SandboxRole, make_pod: MakePod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, pod = account(*CONNECT, *EXEC), make_pod("token")
    config(cluster, tmp_path / "config", {"token": cluster.token(name)}, monkeypatch)
    assert await hello(pod) == "hello\n"


async def test_a_token_file_is_read_again_when_the_cluster_refuses_its_token(
    cluster: Cluster, account: SandboxRole, make_pod: MakePod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, pod = account(*CONNECT, *EXEC), make_pod("token-file")
    token = tmp_path / "token"
    token.write_text("not.a.token")
    config(cluster, tmp_path / "config", {"tokenFile": str(token)}, monkeypatch)
    api = acquire()
    try:
        with pytest.raises(SandboxError, match="Unauthorized"):
            await api.request("GET", "/api/v1/namespaces/default/pods/token-file")
        # The kubelet replaces the file while a client runs.
        token.write_text(cluster.token(name) + "\n")
        assert await hello(pod) == "hello\n"
        assert json.loads(await api.request("GET", f"/api/v1/namespaces/default/pods/{pod}"))["kind"] == "Pod"
    finally:
        await release(api)


async def test_a_credential_plugin(
    cluster: Cluster, account: SandboxRole, make_pod: MakePod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, pod = account(*CONNECT, *EXEC), make_pod("plugin")
    program = tmp_path / "plugin"
    version = "client.authentication.k8s.io/v1"
    # The first credential has expired already, so that the next request needs another one.
    program.write_text(
        f'#!/bin/sh\necho "$KUBERNETES_EXEC_INFO" >> {tmp_path}/calls\n'
        f"exec {cluster.programs}/kubectl --kubeconfig {cluster.kubeconfig} create token {name} "
        f'--output go-template=\'{{"apiVersion":"{version}","kind":"ExecCredential","status":'
        '{"token":"{{.status.token}}","expirationTimestamp":"2020-01-01T00:00:00Z"}}\'\n'
    )
    program.chmod(0o755)
    plugin = {"apiVersion": version, "command": "./plugin", "provideClusterInfo": True, "interactiveMode": "Never"}
    config(cluster, tmp_path / "config", {"exec": plugin}, monkeypatch)
    assert await hello(pod) == "hello\n"
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert len(calls) > 1
    assert calls[0]["spec"]["cluster"]["server"] == cluster.server
    program.write_text("#!/bin/sh\necho no login >&2; exit 3\n")
    with pytest.raises(SandboxError, match=r"credential plugin .*: no login"):
        await hello(pod)
    program.unlink()
    with pytest.raises(HoldfastError, match="credential plugin"):
        await hello(pod)


async def test_certificates_of_a_plugin(
    cluster: Cluster, make_pod: MakePod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = make_pod("plugin-certificate")
    certificate, key = (
        path.read_text() for path in cluster.authority.pair("plugin", "plugged", group="system:masters")
    )
    version = "client.authentication.k8s.io/v1"
    status = {"clientCertificateData": certificate, "clientKeyData": key}
    credential = {"apiVersion": version, "kind": "ExecCredential", "status": status}
    (tmp_path / "credential").write_text(json.dumps(credential))
    plugin = {"apiVersion": version, "command": "cat", "args": [str(tmp_path / "credential")]}
    config(cluster, tmp_path / "config", {"exec": plugin}, monkeypatch)
    assert await hello(pod) == "hello\n"


async def test_in_the_cluster_the_account_of_the_pod_is_used(
    cluster: Cluster, account: SandboxRole, make_pod: MakePod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, pod = account(*CONNECT, *EXEC), make_pod("in-cluster")
    (tmp_path / "token").write_text(cluster.token(name))
    (tmp_path / "namespace").write_text("default")
    (tmp_path / "ca.crt").write_bytes(cluster.authority.certificate.read_bytes())
    monkeypatch.setattr(kubeconfig_module, "SERVICE_ACCOUNT", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", cluster.address)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    assert await hello(pod) == "hello\n"


async def test_an_impersonated_user_has_that_users_rights(
    cluster: Cluster, account: SandboxRole, make_pod: MakePod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = make_pod("impersonated")
    admin = cluster.authority.directory
    user = {"client-certificate": str(admin / "admin.crt"), "client-key": str(admin / "admin.key"), "as": "nobody"}
    config(cluster, tmp_path / "config", user, monkeypatch)
    with pytest.raises(SandboxGone, match=r'denies access: .*User "nobody" cannot'):
        await hello(pod)


async def test_the_certificate_of_another_authority_is_refused(
    cluster: Cluster, make_pod: MakePod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.kubernetes.certificates import Authority

    other = Authority(tmp_path / "other")
    path = other.kubeconfig(tmp_path / "config", cluster.server, {"token": "secret"})
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(ConnectionLost, match="certificate verify failed") as failed:
        await hello("anything", reconnect_deadline=0)
    assert "secret" not in str(failed.value)


async def test_a_proxy_of_kubeconfig_carries_everything(
    cluster: Cluster, make_pod: MakePod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = make_pod("proxied")
    requests: list[bytes] = []
    writers: set[asyncio.StreamWriter] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        requests.append(head.split(b"\r\n")[0])
        host, _, port = head.split()[1].decode().rpartition(":")
        upstream_reader, upstream = await asyncio.open_connection(host, int(port))
        writers.add(upstream)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(pump(reader, upstream), pump(upstream_reader, writer))

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(carry, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        text = cluster.kubeconfig.read_text().replace(
            f"server: {cluster.server}", f"server: {cluster.server}\n    proxy-url: http://127.0.0.1:{port}"
        )
        (tmp_path / "config").write_text(text)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        assert await hello(pod) == "hello\n"
        for writer in writers:
            writer.close()
    assert len(requests) >= 2
    assert set(requests) == {f"CONNECT {cluster.address}:6443 HTTP/1.1".encode()}


# --- permissions -------------------------------------------------------------------------------------------------


async def test_a_caller_that_may_not_exec(
    cluster: Cluster, account: SandboxRole, make_pod: MakePod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, pod = account(*CONNECT), make_pod("no-exec")
    config(cluster, tmp_path / "config", {"token": cluster.token(name)}, monkeypatch)
    with pytest.raises(SandboxGone, match=f"{pod}: the cluster denies access: .*pods/exec"):
        await hello(pod)


async def test_a_caller_that_may_exec_and_not_get(
    cluster: Cluster, account: SandboxRole, make_pod: MakePod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, pod = account(*EXEC), make_pod("no-get")
    config(cluster, tmp_path / "config", {"token": cluster.token(name)}, monkeypatch)
    assert await hello(pod) == "hello\n"


async def test_a_right_that_is_taken_away_ends_the_sandbox_at_the_next_channel(
    cluster: Cluster, account: SandboxRole, make_pod: MakePod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, pod = account(*CONNECT, *EXEC), make_pod("revoked")
    config(cluster, tmp_path / "config", {"token": cluster.token(name)}, monkeypatch)
    async with asyncio.timeout(120), holdfast.connect(f"kubernetes:default/{pod}") as box:
        assert (await box.exec(["true"])).success
        await asyncio.to_thread(cluster.kubectl, "delete", "rolebinding", name)
        # A channel that is open stays open; the cluster looks at rights when one is opened.
        assert (await box.exec(["true"])).success
        await asyncio.to_thread(cluster.kill, "kube-apiserver")
        cluster.start("kube-apiserver")
        with pytest.raises(HoldfastError, match=pod):
            await exec_until_it_fails(box)


async def test_the_rights_of_the_documentation_suffice_for_the_fleet(
    cluster: Cluster, account: SandboxRole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = account(*FLEET)
    config(cluster, tmp_path / "config", {"token": cluster.token(name)}, monkeypatch)
    async with Fleet("kubernetes") as fleet:
        async with fleet.block(image=images.BUSYBOX, options={"pull": "never"}) as box:
            assert (await box.exec(["echo", "made"])).stdout == "made\n"
            await fleet.extend(box.ref.id, 60)
            assert box.ref.id in {ref.id for ref in await fleet.list()}
        assert await fleet.prune() == []


async def test_a_fleet_without_rights(
    cluster: Cluster, account: SandboxRole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = account(*FLEET[1:])
    config(cluster, tmp_path / "config", {"token": cluster.token(name)}, monkeypatch)
    async with Fleet("kubernetes") as fleet:
        with pytest.raises(SandboxError, match='cannot create resource "pods"'):
            await fleet.create(image=images.BUSYBOX, options={"pull": "never"})
        with pytest.raises(SandboxError, match='cannot list resource "pods"'):
            await fleet.list()


# --- kubeconfig --------------------------------------------------------------------------------------------------


def test_key_files_are_private_and_gone(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    paths: list[str] = []
    load = ssl.SSLContext.load_cert_chain

    def look(self: ssl.SSLContext, path: str, *rest: Any, **more: Any) -> None:
        paths.append(path)
        modes.append(stat.S_IMODE(Path(path).stat().st_mode))
        load(self, path, *rest, **more)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", look)

    async def open_and_close() -> None:
        await release(acquire())

    asyncio.run(open_and_close())
    assert modes == [0o600]
    assert not Path(paths[0]).exists()


async def test_an_unknown_context(cluster: Cluster) -> None:
    with pytest.raises(InvalidParams, match="no context 'elsewhere'"):
        await hello("anything", context="elsewhere")
