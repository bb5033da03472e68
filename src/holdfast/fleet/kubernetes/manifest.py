"""The objects that are made in a cluster: the pod of a template, and the policy of pods without a network. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from holdfast.errors import InvalidParams
from holdfast.fleet.containers.first_process import UNTIL_KILLED
from holdfast.fleet.record import Record, encode_record
from holdfast.fleet.template import Template
from holdfast.launch import self_exec
from holdfast.sandboxes.containers import FIRST_PROCESS

#: Labels of every pod: its id, the engine object that made it, and whether it has a network.
ID_LABEL: Final = "holdfast.dev/sandbox"
MAKER_LABEL: Final = "holdfast.dev/maker"
NETWORK_LABEL: Final = "holdfast.dev/network"
#: Annotations: the record, a later expiry, and the directory of the server's files that an init container brings.
RECORD: Final = "holdfast.dev/record"
EXPIRY: Final = "holdfast.dev/expires-at"
TREE: Final = "holdfast.dev/tree"
#: The container that is the sandbox, and the one that copies the server's files before it starts.
CONTAINER: Final = "sandbox"
SERVER_CONTAINER: Final = "holdfast-server"
#: Where an image with the bundle has its tree, and the name of the volume into which it is copied.
IMAGE_TREE: Final = "/holdfast"
VOLUME: Final = "holdfast"
#: A node that is drained waits for its pods so long at most.
MAX_GRACE_SECONDS: Final = 3_600
#: The policy that keeps sandboxes without a network apart from everything, one for each namespace.
POLICY: Final = "holdfast-no-network"

#: The first process of a sandbox whose image has a shell: sleeps until it is killed. SIGTERM begins the grace
#: period of the pod, in which the sandbox is still used.
_SLEEP: Final = "trap '' TERM INT; while :; do sleep 3600 & wait $!; done"
#: Entry by entry: the directory of the volume belongs to root, and its times cannot be set by others.
_COPY: Final = """
import os, shutil, sys
for entry in os.scandir(sys.argv[1]):
    target = os.path.join(sys.argv[2], entry.name)
    if entry.is_dir(follow_symlinks=False):
        shutil.copytree(entry.path, target, symlinks=True)
    else:
        shutil.copy2(entry.path, target, follow_symlinks=False)
"""
#: The values that a label of Kubernetes may have.
_LABEL_WORD: Final = r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"
_LABEL_NAME: Final = re.compile(rf"([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_LABEL_WORD}", re.ASCII)
_LABEL_VALUE: Final = re.compile(rf"({_LABEL_WORD})?", re.ASCII)
_USER: Final = re.compile(r"(\d+)(?::(\d+))?")
_PULL: Final = {"missing": "IfNotPresent", "always": "Always", "never": "Never"}


class PodOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`Template.options` of this engine."""

    #: "missing", "always" or "never".
    pull: str = "missing"
    #: Names of secrets with the credentials of registries.
    pull_secrets: tuple[str, ...] = ()
    #: The image cannot be written; /tmp and /run are volumes of the pod.
    read_only: bool = False
    #: The rules of the pod security level `restricted`: no root, no capabilities, no way to gain any.
    restricted: bool = False
    #: `gvisor`, `kata`: a RuntimeClass of the cluster.
    runtime_class: str | None = None
    node_selector: dict[str, str] = {}
    tolerations: tuple[dict[str, Any], ...] = ()
    priority_class: str | None = None
    #: Resources that the scheduler reserves; by default, the limits.
    requests: dict[str, str] = {}
    #: An image with the bundle in /holdfast, for images without a shell or `tar`.
    server_image: str | None = None
    #: The cluster's garbage collector removes the sandbox with this object (`apiVersion`, `kind`, `name`, `uid`).
    owner: dict[str, str] | None = None
    #: Seconds after which the kubelet ends the pod, extended or not.
    active_deadline: int | None = None
    #: Seconds between the announcement of a drain, eviction or deletion and the end of the sandbox.
    grace: int = 30
    #: Seconds for which `create` waits until the pod runs.
    ready_timeout: float = 300.0
    #: A SandboxWarmPool of agent-sandbox, from which the sandbox is claimed instead of made.
    claim: str | None = None
    #: Laid over the pod's object. Not checked: it can remove every restriction.
    pod: dict[str, Any] = {}


def read_options(template: Template) -> PodOptions:
    """The options of a template; `InvalidParams` names a wrong one."""
    try:
        options = msgspec.convert(template.options, type=PodOptions)
    except msgspec.ValidationError as error:
        raise InvalidParams(f"engine kubernetes: options: {error}") from None
    if options.pull not in _PULL:
        raise InvalidParams("engine kubernetes: options: pull: one of missing, always, never")
    if not 0 < options.grace <= MAX_GRACE_SECONDS:
        raise InvalidParams(f"engine kubernetes: options: grace: seconds from 1 to {MAX_GRACE_SECONDS}")
    if options.owner is not None and options.owner.keys() != {"apiVersion", "kind", "name", "uid"}:
        raise InvalidParams("engine kubernetes: options: owner: apiVersion, kind, name and uid")
    return options


def read_user(user: str | None) -> dict[str, int]:
    """The user of a template as fields of a security context; names are not known outside of the image."""
    if user is None:
        return {}
    match = _USER.fullmatch(user)
    if match is None:
        raise InvalidParams(f"engine kubernetes: user: {user!r} is not UID or UID:GID in digits")
    return {"runAsUser": int(match[1])} | ({} if match[2] is None else {"runAsGroup": int(match[2])})


def pod_manifest(template: Template, record: Record, *, maker: str, tree: str) -> dict[str, Any]:
    """The pod of a template. `tree` is the directory of the server's files if an init container brings them."""
    options = read_options(template)
    metadata: dict[str, Any] = {
        "name": record.id,
        "labels": pod_labels(template, record, maker),
        "annotations": {RECORD: encode_record(record)} | ({TREE: tree} if options.server_image else {}),
    }
    if options.owner is not None:
        metadata["ownerReferences"] = [dict(options.owner)]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": _spec(template, options, tree)}
    merged: dict[str, Any] = _merged(pod, options.pod)
    return merged


def pod_labels(template: Template, record: Record, maker: str) -> dict[str, str]:
    """The labels of a sandbox's pod: ours, and those of the template that Kubernetes allows."""
    labels = {
        name: text
        for name, text in template.labels.items()
        if _LABEL_NAME.fullmatch(name) and _LABEL_VALUE.fullmatch(text)
    }
    labels |= {ID_LABEL: record.id, MAKER_LABEL: maker, "app.kubernetes.io/managed-by": "holdfast"}
    return labels | ({} if template.network == "host" else {NETWORK_LABEL: "none"})


def _spec(template: Template, options: PodOptions, tree: str) -> dict[str, Any]:
    container = _container(template, options)
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": options.grace,
        "containers": [container],
        "volumes": [],
    }
    if options.server_image is not None:
        container["command"] = [*self_exec.in_bundle(tree), "-m", FIRST_PROCESS, UNTIL_KILLED]
        parts = server_parts(options.server_image, tree, _PULL[options.pull])
        (copying,) = parts["initContainers"]
        copying |= {"securityContext": container["securityContext"], "resources": container["resources"]}
        spec["initContainers"] = [copying]
        spec["volumes"] += parts["volumes"]
        container["volumeMounts"] += parts["volumeMounts"]
    if options.read_only:
        for name in ("tmp", "run"):
            spec["volumes"].append({"name": name, "emptyDir": {}})
            container["volumeMounts"].append({"name": name, "mountPath": f"/{name}"})
    for key, value in (
        ("runtimeClassName", options.runtime_class),
        ("nodeSelector", options.node_selector),
        ("tolerations", list(options.tolerations)),
        ("priorityClassName", options.priority_class),
        ("imagePullSecrets", [{"name": name} for name in options.pull_secrets]),
        ("activeDeadlineSeconds", options.active_deadline),
    ):
        if value:
            spec[key] = value
    return spec


def server_parts(image: str, tree: str, pull: str) -> dict[str, Any]:
    """The parts of a pod that bring the server's files into `tree` without a shell.

    `initContainers` and `volumes` belong into the pod's spec, `volumeMounts` into the container of the sandbox.
    """
    mount = {"name": VOLUME, "mountPath": tree}
    copying = {
        "name": SERVER_CONTAINER,
        "image": image,
        "imagePullPolicy": pull,
        "command": [*self_exec.in_bundle(IMAGE_TREE), "-c", _COPY, IMAGE_TREE, tree],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [mount],
    }
    return {
        "initContainers": [copying],
        "volumes": [{"name": VOLUME, "emptyDir": {}}],
        "volumeMounts": [{**mount, "readOnly": True}],
    }


def _container(template: Template, options: PodOptions) -> dict[str, Any]:
    limits: dict[str, str] = {}
    if template.cpus is not None:
        limits["cpu"] = f"{max(1, round(template.cpus * 1000))}m"
    if template.memory is not None:
        limits["memory"] = str(template.memory)
    if template.disk is not None:
        limits["ephemeral-storage"] = str(template.disk)
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}, **read_user(template.user)}
    if options.read_only:
        security["readOnlyRootFilesystem"] = True
    if options.restricted:
        security |= {
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": template.image,
        "imagePullPolicy": _PULL[options.pull],
        "command": ["sh", "-c", _SLEEP],
        # The kubelet would replace $(NAME) by another variable.
        "env": [{"name": name, "value": text.replace("$(", "$$(")} for name, text in template.env.items()],
        "resources": {"limits": limits} | ({"requests": dict(options.requests)} if options.requests else {}),
        "securityContext": security,
        "volumeMounts": [],
    }
    return container | ({"workingDir": template.workdir} if template.workdir is not None else {})


def no_network_policy() -> dict[str, Any]:
    """Denies all traffic from and to the sandboxes of a namespace that have no network."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": POLICY, "labels": {"app.kubernetes.io/managed-by": "holdfast"}},
        "spec": {
            "podSelector": {"matchLabels": {NETWORK_LABEL: "none"}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": [],
        },
    }


def _merged(below: Any, above: Any) -> Any:
    """`above` laid over `below`: objects are merged, every other value replaces the one below."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    return {**below, **{key: _merged(below.get(key), value) for key, value in above.items()}}
