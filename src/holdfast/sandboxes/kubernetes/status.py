"""The status of a pod and of one container in it, read from the API's object; pure."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from holdfast.types import Struct

#: The annotation with the container that `kubectl exec` takes if none is named.
_DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"


class PodStatus(Struct, frozen=True):
    """The status of a pod and of one container in it, from the API."""

    uid: str
    phase: str
    deleting: bool
    container: Literal["waiting", "running", "terminated"]
    #: By the pod's readiness probe; a running container without a probe is ready.
    ready: bool
    #: Whether the kubelet starts the container again when it has ended.
    restarts: bool
    #: Why the container does not run, or why the pod ended.
    why: str

    @property
    def gone(self) -> str | None:
        """Why the container will not run again; None if it runs, or may run later."""
        if self.phase in ("Succeeded", "Failed"):
            return f"the pod has ended ({self.why or self.phase})"
        if self.container == "running":
            return None
        if self.deleting:
            return "the pod is being deleted, and its container does not run"
        if self.container == "terminated" and not self.restarts:
            return f"the container has ended ({self.why}) and is not restarted"
        return None


def read_status(text: str | bytes, container: str | None) -> PodStatus | None:
    """Read the status in the JSON of a pod; None if that is something else."""
    try:
        pod = msgspec.json.decode(text, type=_Pod)
    except msgspec.DecodeError:
        return None
    name = (
        container
        or pod.metadata.annotations.get(_DEFAULT_CONTAINER)
        or next((each.name for each in pod.spec.containers), "")
    )
    specs = (*pod.spec.containers, *pod.spec.init_containers)
    spec = next((each for each in specs if each.name == name), _Container())
    statuses = (*pod.status.container_statuses, *pod.status.init_container_statuses)
    status = next((each for each in statuses if each.name == name), _ContainerStatus())
    policy = spec.restart_policy or pod.spec.restart_policy
    kind, state = next(iter(status.state.items()), ("waiting", {}))
    why = _reason(state) or pod.status.reason or pod.status.phase
    return PodStatus(
        uid=pod.metadata.uid,
        phase=pod.status.phase,
        deleting=pod.metadata.deletion_timestamp is not None,
        container=kind,
        ready=status.ready,
        restarts=policy == "Always"
        or bool(spec.restart_policy_rules)
        or (policy == "OnFailure" and state.get("exitCode") != 0),
        why=why,
    )


def _reason(state: dict[str, Any]) -> str:
    """Return the reason of a state: `CrashLoopBackOff: back-off 10s restarting …`, `OOMKilled, exit code 137`."""
    reason = ": ".join(str(state[key]) for key in ("reason", "message") if state.get(key))
    return f"{reason}, exit code {state['exitCode']}".removeprefix(", ") if "exitCode" in state else reason


# --- the fields that are read of the API's objects -------------------------------------------------------------


class _Metadata(Struct, frozen=True):
    uid: str
    deletion_timestamp: str | None = None
    annotations: dict[str, str] = msgspec.field(default_factory=dict)


class _Container(Struct, frozen=True):
    name: str = ""
    restart_policy: str = ""
    restart_policy_rules: tuple[Any, ...] = ()


class _Spec(Struct, frozen=True):
    containers: tuple[_Container, ...] = ()
    init_containers: tuple[_Container, ...] = ()
    restart_policy: str = "Always"


class _ContainerStatus(Struct, frozen=True):
    name: str = ""
    ready: bool = False
    state: dict[Literal["waiting", "running", "terminated"], dict[str, Any]] = msgspec.field(default_factory=dict)


class _Status(Struct, frozen=True):
    phase: str = ""
    reason: str = ""
    container_statuses: tuple[_ContainerStatus, ...] = ()
    init_container_statuses: tuple[_ContainerStatus, ...] = ()


class _Pod(Struct, frozen=True):
    metadata: _Metadata
    spec: _Spec = _Spec()
    status: _Status = _Status()
