"""Pods, reached through `kubectl exec`; which cluster is kubectl's own to know.

A pod is not its name: its containers are restarted, and another pod may get the name. So the pod is looked up with
`kubectl get` before each channel, and recognised by its UID.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Literal

import msgspec

from holdfast.errors import ConnectionLost, InvalidParams, SandboxError, SandboxGone
from holdfast.sandboxes.host_command import run_outside
from holdfast.sandboxes.install.injection import Injection, What
from holdfast.sandboxes.sandbox_kind import CommandPlace, Signs, environment
from holdfast.transport.channel import Channel, Receiver
from holdfast.types import Struct

log = logging.getLogger(__name__)

#: For one `kubectl get`.
_LOOK_SECONDS: Final = 30.0
#: Between two looks at a pod that is not ready yet: doubling from the first to the second.
_AGAIN_SECONDS: Final = (0.2, 2.0)
#: Which container `kubectl exec` takes if none is named.
_DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"
#: containerd and CRI-O report a program that is not in the image as an error of their own, with exit code 1.
_NO_PROGRAM: Final = re.compile(
    r"executable file not found|exec: \"?[^\s:]*: (stat .*: )?no such file or directory"
)


class PodStatus(Struct, frozen=True):
    """What `kubectl get pod` says of a pod and of one container in it."""

    uid: str
    phase: str
    deleting: bool
    container: Literal["waiting", "running", "terminated"]
    #: By the pod's readiness probe; a running container without one is ready.
    ready: bool
    #: Whether the kubelet starts the container again when it has ended.
    restarts: bool
    #: Why the container does not run, or why the pod ended.
    why: str

    @property
    def gone(self) -> str | None:
        """Why waiting would not bring the container back; None if it runs, or may come."""
        if self.phase in ("Succeeded", "Failed"):
            return f"the pod has ended ({self.why or self.phase})"
        if self.container == "running":
            return None
        if self.deleting:
            return "the pod is being deleted, and its container does not run"
        if self.container == "terminated" and not self.restarts:
            return f"the container has ended ({self.why}) and is not restarted"
        return None


class Pod(CommandPlace):
    """A container of a pod: `kubernetes:NAMESPACE/POD` or `kubernetes:NAMESPACE/POD/CONTAINER`.

    `wait_ready` is how many seconds the first connection waits for the container to run and be ready.
    """

    gone_signs: ClassVar[Signs] = (
        (
            re.compile(r"\(NotFound\)|container .* is not valid for pod|container \S+ not found in pod"),
            "there is no such pod or container",
        ),
        (re.compile(r"completed pod"), "the pod has ended"),
    )

    def __init__(
        self,
        namespace: str,
        pod: str,
        container: str | None = None,
        *,
        context: str | None = None,
        directory: str | None = None,
        bundle: What = True,
        wait_ready: float = 0.0,
    ) -> None:
        names = [namespace, pod, *([] if container is None else [container])]
        if not all(re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name) for name in names):
            raise InvalidParams(
                f"kubernetes:{'/'.join(names)}: NAMESPACE/POD or NAMESPACE/POD/CONTAINER, in small letters"
            )
        super().__init__(f"kubernetes:{'/'.join(names)}", Injection(directory=directory, bundle=bundle))
        if not (math.isfinite(wait_ready) and wait_ready >= 0):
            raise InvalidParams(f"{self.address}: wait_ready={wait_ready}: not a number of seconds")
        self.namespace = namespace
        self.pod = pod
        self.container = container
        self.context = context
        self.wait_ready = wait_ready
        #: Of the pod that was connected first.
        self._uid: str | None = None
        #: Whether `open` has just looked.
        self._looked = False

    def command(self, argv: Sequence[str]) -> list[str]:
        container = [] if self.container is None else ["--container", self.container]
        pod = ["--namespace", self.namespace, self.pod]
        return [*self._kubectl(), "exec", "--stdin", "--quiet", *pod, *container, "--", *argv]

    def _kubectl(self) -> list[str]:
        return ["kubectl", *([] if self.context is None else ["--context", self.context])]

    def lacks_program(self, exit_code: int, words: str) -> bool:
        return super().lacks_program(exit_code, words) or (exit_code != 0 and bool(_NO_PROGRAM.search(words)))

    def cannot_copy(self, why: str) -> SandboxError:
        return SandboxError(
            f"{self.address}: the server cannot be brought in: {why}; a pod can be given files only by "
            "programs of its image: use an image that has sh and tar, or name another container of the pod"
        )

    # --- its life --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Look at the pod, and wait until it is ready if that was asked for."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + self.wait_ready, _AGAIN_SECONDS[0]
        while True:
            status, words = await self._look()
            if status is None and not self.wait_ready:
                return  # `kubectl exec` will fail with better words, or work
            if status is not None and status.container == "running" and (status.ready or not self.wait_ready):
                self._looked = True
                return
            if status is not None:
                words = status.why or "it is not ready"
            if not self.wait_ready:
                raise ConnectionLost(
                    f"{self.address}: the container does not run yet: {words}; wait_ready=SECONDS waits for it"
                )
            if loop.time() + pause > deadline:
                raise ConnectionLost(f"{self.address}: not ready after {self.wait_ready:g} s: {words}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _AGAIN_SECONDS[1])

    async def dial(self, receiver: Receiver) -> Channel:
        if self._looked:
            self._looked = False
        else:
            status, words = await self._look()
            if status is not None and status.container != "running":
                raise ConnectionLost(f"{self.address}: the container does not run: {status.why}")
            if status is None and self._uid is not None:
                # It may be another pod by now.
                raise ConnectionLost(f"{self.address}: {words}")
        return await super().dial(receiver)

    async def _look(self) -> tuple[PodStatus | None, str]:
        """The pod as it is now, or None and kubectl's words. `SandboxGone` if it has ended or is another one."""
        query = ["get", "pod", "--namespace", self.namespace, self.pod, "--output", "json"]
        try:
            done = await run_outside([*self._kubectl(), *query], seconds=_LOOK_SECONDS, env=environment())
        except ConnectionLost as late:
            return None, late.message
        if done.exit_code != 0:
            if (gone := self.explain(done.words)) is not None:
                raise gone
            return None, done.said
        status = read_status(done.stdout, self.container)
        if status is None:
            log.debug("%s: kubectl get pod printed no pod", self.address)
            return None, "kubectl get pod printed no pod"
        if self._uid is not None and status.uid != self._uid:
            raise SandboxGone(
                f"{self.address}: another pod has this name now (UID {status.uid}); the pod that was connected "
                f"(UID {self._uid}) is gone",
                final=True,
            )
        if (gone_by := status.gone) is not None:
            raise SandboxGone(f"{self.address}: {gone_by}", final=True)
        self._uid = status.uid
        return status, ""


def read_status(text: str, container: str | None) -> PodStatus | None:
    """The status in the JSON of `kubectl get pod`; None if that is something else."""
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
    """`CrashLoopBackOff: back-off 10s restarting …`, `OOMKilled, exit code 137`."""
    words = ": ".join(str(state[key]) for key in ("reason", "message") if state.get(key))
    return f"{words}, exit code {state['exitCode']}".removeprefix(", ") if "exitCode" in state else words


# --- as much of the API's objects as is looked at --------------------------------------------------------------


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
