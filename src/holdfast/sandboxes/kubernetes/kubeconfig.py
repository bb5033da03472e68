"""Finds the cluster and the credentials: kubeconfig files as kubectl reads them, or a pod's own service account.

Reads files; contacts nothing. An unknown field that changes the identity of the caller is an error, because the
request would otherwise be sent as another user.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from holdfast.errors import InvalidParams

#: Where the kubelet puts the account of a pod.
SERVICE_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
#: Keys of a user that are read here; a user without any of them is anonymous.
_USER_KEYS: Final = frozenset(
    {
        *("client-certificate", "client-certificate-data", "client-key", "client-key-data", "token", "tokenFile"),
        *("exec", "as", "as-uid", "as-groups", "as-user-extra", "extensions"),
    }
)


class ExecPlugin(msgspec.Struct, frozen=True):
    """A program that prints credentials (`client.authentication.k8s.io`)."""

    api_version: str
    command: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    #: Whether the program gets the cluster's address and certificate.
    provide_cluster_info: bool = False
    install_hint: str = ""


class ClusterConfig(msgspec.Struct, frozen=True):
    """One cluster, and the caller's identity there. Certificates and keys are in PEM."""

    server: str
    namespace: str = "default"
    ca: bytes | None = None
    verify: bool = True
    #: The name in the server's certificate, where it is not that of the address.
    tls_server_name: str | None = None
    proxy: str | None = None
    certificate: bytes | None = None
    key: bytes | None = None
    token: str | None = None
    #: A file whose token is replaced from time to time.
    token_file: str | None = None
    plugin: ExecPlugin | None = None
    #: Headers of impersonation.
    headers: tuple[tuple[str, str], ...] = ()
    #: The cluster's `extensions` for credential plugins.
    plugin_config: Any = None


def load_config(*, kubeconfig: str | None = None, context: str | None = None) -> ClusterConfig:
    """The cluster of kubeconfig's (current) context; without a kubeconfig, that of the pod this process runs in."""
    paths = config_paths(kubeconfig)
    merged = _merge([path for path in paths if path.exists()])
    if not merged["contexts"] and context is None and kubeconfig is None:
        if (found := in_cluster()) is not None:
            return found
        raise InvalidParams(
            f"kubernetes: no cluster is configured: no contexts in {', '.join(map(str, paths))} (KUBECONFIG names "
            "other files), and this process does not run in a pod"
        )
    name = context or merged["current-context"]
    if not name:
        raise InvalidParams("kubernetes: kubeconfig has no current-context: name a context")
    return _resolve(merged, name)


def config_paths(kubeconfig: str | None = None) -> list[Path]:
    """The files that are read, the first having precedence."""
    if kubeconfig is not None:
        return [Path(kubeconfig).expanduser()]
    listed = [Path(each) for each in os.environ.get("KUBECONFIG", "").split(os.pathsep) if each]
    return listed or [Path("~/.kube/config").expanduser()]


def is_configured() -> bool:
    """Whether there is a cluster to talk to; a look at files, without contact."""
    return any(path.exists() for path in config_paths()) or "KUBERNETES_SERVICE_HOST" in os.environ


def in_cluster() -> ClusterConfig | None:
    """The cluster that this process runs in; None outside of pods."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    token = Path(SERVICE_ACCOUNT, "token")
    if not host or not token.exists():
        return None
    namespace = Path(SERVICE_ACCOUNT, "namespace")
    return ClusterConfig(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        namespace=namespace.read_text().strip() if namespace.exists() else "default",
        ca=Path(SERVICE_ACCOUNT, "ca.crt").read_bytes(),
        token_file=str(token),
    )


def _merge(paths: list[Path]) -> dict[str, Any]:
    """The files as one: of entries with the same name, the first counts. Relative paths are made absolute."""
    merged: dict[str, Any] = {"current-context": "", "clusters": {}, "users": {}, "contexts": {}}
    for path in paths:
        try:
            document = yaml.safe_load(path.read_bytes()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise InvalidParams(f"kubernetes: {path}: {error}") from None
        if not isinstance(document, Mapping):
            raise InvalidParams(f"kubernetes: {path}: is not a kubeconfig")
        merged["current-context"] = merged["current-context"] or document.get("current-context") or ""
        for kind in ("clusters", "users", "contexts"):
            for entry in document.get(kind) or ():
                value = dict(entry.get(kind[:-1]) or {})
                for key in ("certificate-authority", "client-certificate", "client-key", "tokenFile"):
                    if value.get(key):
                        value[key] = str(path.parent / value[key])
                if isinstance(plugin := value.get("exec"), dict) and "/" in str(plugin.get("command", "")):
                    plugin["command"] = str(path.parent / plugin["command"])
                merged[kind].setdefault(entry.get("name"), value)
    return merged


def _resolve(merged: Mapping[str, Any], name: str) -> ClusterConfig:
    context = merged["contexts"].get(name)
    if context is None:
        raise InvalidParams(f"kubernetes: kubeconfig has no context {name!r}")
    cluster = merged["clusters"].get(context.get("cluster"))
    if cluster is None or not cluster.get("server"):
        raise InvalidParams(f"kubernetes: context {name!r}: kubeconfig has no cluster {context.get('cluster')!r}")
    user = merged["users"].get(context.get("user"), {})
    if unknown := sorted(user.keys() - _USER_KEYS):
        raise InvalidParams(f"kubernetes: user {context.get('user')!r}: {', '.join(unknown)}: not supported")
    plugin = user.get("exec")
    return ClusterConfig(
        server=str(cluster["server"]).rstrip("/"),
        namespace=context.get("namespace") or "default",
        ca=_pem(cluster, "certificate-authority"),
        verify=not cluster.get("insecure-skip-tls-verify", False),
        tls_server_name=cluster.get("tls-server-name"),
        proxy=cluster.get("proxy-url"),
        certificate=_pem(user, "client-certificate"),
        key=_pem(user, "client-key"),
        token=user.get("token") if not user.get("tokenFile") else None,
        token_file=user.get("tokenFile"),
        plugin=None if plugin is None else _plugin(plugin),
        headers=_impersonation(user),
        plugin_config=_plugin_config(cluster),
    )


def _pem(entry: Mapping[str, Any], key: str) -> bytes | None:
    if data := entry.get(f"{key}-data"):
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, TypeError):
            raise InvalidParams(f"kubernetes: kubeconfig: {key}-data: is not base64") from None
    if path := entry.get(key):
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise InvalidParams(f"kubernetes: {path}: {error.strerror}") from None
    return None


def _plugin(entry: Mapping[str, Any]) -> ExecPlugin:
    return ExecPlugin(
        api_version=entry.get("apiVersion") or "client.authentication.k8s.io/v1",
        command=str(entry.get("command") or ""),
        args=tuple(map(str, entry.get("args") or ())),
        env={each["name"]: str(each["value"]) for each in entry.get("env") or ()},
        provide_cluster_info=bool(entry.get("provideClusterInfo")),
        install_hint=(entry.get("installHint") or "").strip(),
    )


def _plugin_config(cluster: Mapping[str, Any]) -> Any:
    for each in cluster.get("extensions") or ():
        if each.get("name") == "client.authentication.k8s.io/exec":
            return each.get("extension")
    return None


def _impersonation(user: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    headers = [("Impersonate-User", user["as"])] if user.get("as") else []
    headers += [("Impersonate-Uid", user["as-uid"])] if user.get("as-uid") else []
    headers += [("Impersonate-Group", group) for group in user.get("as-groups") or ()]
    for name, values in (user.get("as-user-extra") or {}).items():
        headers += [(f"Impersonate-Extra-{name}", value) for value in values]
    return tuple((name, str(value)) for name, value in headers)
