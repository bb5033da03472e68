"""Whether a pod runs, and the reason if it does not. Pure: reads the API's object."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from holdfast.fleet.record import State

#: Reasons of a waiting container that time does not change.
_HOPELESS: Final = frozenset(
    {
        *("ErrImageNeverPull", "InvalidImageName", "ImageInspectError", "ImagePullBackOff", "CrashLoopBackOff"),
        *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
    }
)
_NO_SHELL: Final = re.compile(r"exec: \"sh\": .*(not found|no such file)", re.IGNORECASE)
_STATES: Final[dict[str, State]] = {"Pending": "creating", "Running": "running"}


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    uid: str = ""
    annotations: dict[str, str] = {}
    labels: dict[str, str] = {}
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    resource_version: str = ""


class ContainerStatus(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    state: dict[str, dict[str, Any]] = {}


class Condition(msgspec.Struct, frozen=True, rename="camel"):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: tuple[Condition, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    termination_grace_period_seconds: int = 30


class PodObject(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of a pod that are read."""

    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def state(self) -> State:
        return _STATES.get(self.status.phase, "ended")


class Verdict(msgspec.Struct, frozen=True):
    """`ready` if the sandbox runs; `hopeless` if it will not; otherwise it may yet, and `reason` is about now."""

    ready: bool = False
    hopeless: bool = False
    reason: str = ""


def judge(pod: PodObject, container: str) -> Verdict:
    """Whether the sandbox of a pod runs."""
    if pod.metadata.deletion_timestamp is not None:
        return Verdict(hopeless=True, reason="it was deleted")
    if pod.status.phase in ("Failed", "Succeeded"):
        reason = _explain(_ended(pod) or ": ".join(filter(None, (pod.status.reason, pod.status.message))))
        return Verdict(hopeless=True, reason=reason or pod.status.phase)
    for status in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        if status.name == container and "running" in status.state:
            return Verdict(ready=True)
        waiting = status.state.get("waiting", {})
        if (why := waiting.get("reason")) and why not in ("PodInitializing", "ContainerCreating"):
            reason = _explain(": ".join(filter(None, (why, waiting.get("message", "")))))
            return Verdict(hopeless=why in _HOPELESS, reason=reason)
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False":
            return Verdict(reason=f"{condition.reason}: {condition.message}")
    return Verdict(reason="its containers are being made" if pod.status.conditions else "it is not scheduled yet")


def _ended(pod: PodObject) -> str:
    """How the first container that failed ended."""
    for status in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        ended = status.state.get("terminated")
        if ended is not None and (ended.get("exitCode") or ended.get("reason") != "Completed"):
            reason = ": ".join(str(ended[key]) for key in ("reason", "message") if ended.get(key))
            return f"{status.name}: {reason}, exit code {ended.get('exitCode')}"
    return ""


def _explain(reason: str) -> str:
    if _NO_SHELL.search(reason):
        return f"the image has no shell: name an image with the bundle, options server_image ({reason})"
    return reason
