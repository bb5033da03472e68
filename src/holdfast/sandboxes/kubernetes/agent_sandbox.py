"""The resources of agent-sandbox (`agents.x-k8s.io`, v1beta1): a Sandbox, its pod, and its operating mode."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from holdfast.errors import SandboxError, SandboxGone
from holdfast.sandboxes.kubernetes.api import ApiError, ClusterApi

GROUP: Final = "agents.x-k8s.io"
EXTENSIONS: Final = "extensions.agents.x-k8s.io"
VERSION: Final = "v1beta1"
#: The pod of a Sandbox that was taken from a warm pool; otherwise the pod has the name of the Sandbox.
POD_NAME: Final = "agents.x-k8s.io/pod-name"

Mode = Literal["Running", "Suspended"]


class Condition(msgspec.Struct, frozen=True, rename="camel"):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    annotations: dict[str, str] = {}
    deletion_timestamp: str | None = None


class Status(msgspec.Struct, frozen=True, rename="camel"):
    conditions: tuple[Condition, ...] = ()


class SandboxSpec(msgspec.Struct, frozen=True, rename="camel"):
    operating_mode: Mode = "Running"


class SandboxObject(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of a Sandbox that are read."""

    metadata: Metadata
    spec: SandboxSpec = SandboxSpec()
    status: Status = Status()

    @property
    def pod(self) -> str:
        return self.metadata.annotations.get(POD_NAME) or self.metadata.name


def condition(conditions: tuple[Condition, ...], type: str) -> Condition:
    """The condition of this type; empty if there is none."""
    return next((each for each in conditions if each.type == type), Condition())


def path_of(group: str, resource: str, namespace: str, name: str = "") -> str:
    return f"/apis/{group}/{VERSION}/namespaces/{namespace}/{resource}" + (f"/{name}" if name else "")


def explain(error: ApiError, group: str, resource: str, namespace: str, name: str) -> Exception:
    """The error of a request about such an object: the object is missing, or the cluster lacks the resource."""
    if error.status != 404:
        return error
    if f'"{name}" not found' in error.message:
        return SandboxGone(f"kubernetes:{namespace}: {resource} {name!r}: there is none", final=True)
    return SandboxError(
        f"kubernetes:{namespace}: the cluster has no {resource}.{group}/{VERSION}: install agent-sandbox"
    )


async def get_sandbox(api: ClusterApi, namespace: str, name: str) -> SandboxObject:
    """Read a Sandbox. `SandboxGone` if there is none; `SandboxError` names a resource that the cluster lacks."""
    try:
        return await api.get(path_of(GROUP, "sandboxes", namespace, name), SandboxObject)
    except ApiError as error:
        raise explain(error, GROUP, "sandboxes", namespace, name) from None


async def pod_of(api: ClusterApi, namespace: str, name: str) -> str:
    """The name of the pod of a Sandbox that runs."""
    sandbox = await get_sandbox(api, namespace, name)
    if sandbox.spec.operating_mode == "Suspended":
        raise SandboxError(f"kubernetes:{namespace}?sandbox={name}: the sandbox is suspended; resume it first")
    return sandbox.pod


async def set_mode(api: ClusterApi, namespace: str, name: str, mode: Mode) -> None:
    """Suspend or resume a Sandbox; its controller ends or makes the pod after that."""
    try:
        await api.patch(path_of(GROUP, "sandboxes", namespace, name), {"spec": {"operatingMode": mode}})
    except ApiError as error:
        raise explain(error, GROUP, "sandboxes", namespace, name) from None
