"""Pods, reached through `kubectl exec`; the cluster is that of kubectl's configuration.

A pod is not its name: its containers are restarted, and another pod may get the name. So `kubectl get` reads the
pod before each channel, and its UID identifies it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Literal, Self

import msgspec

from holdfast.errors import ConnectionLost, InvalidParams, SandboxError, SandboxGone
from holdfast.sandboxes.host_command import run_host_command
from holdfast.sandboxes.install.installation import BundleChoice, Installation
from holdfast.sandboxes.target import CommandTarget, Signs, environment
from holdfast.transport.channel import Channel, Receiver
from holdfast.types import Struct

log = logging.getLogger(__name__)

#: The limit for one `kubectl get`.
_GET_SECONDS: Final = 30.0
#: Between two reads of a pod that is not ready yet: doubling from the first to the second.
_POLL_SECONDS: Final = (0.2, 2.0)
#: The annotation with the container that `kubectl exec` takes if none is named.
_DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"
#: containerd and CRI-O report a program that is not in the image as an error of their own, with exit code 1.
_NO_PROGRAM: Final = re.compile(
    r"executable file not found|exec: \"?[^\s:]*: (stat .*: )?no such file or directory"
)


class PodStatus(Struct, frozen=True):
    """The status of a pod and of one container in it, from `kubectl get pod`."""

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


class Pod(CommandTarget):
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
        bundle: BundleChoice = True,
        wait_ready: float = 0.0,
    ) -> None:
        names = [namespace, pod, *([] if container is None else [container])]
        if not all(re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name) for name in names):
            raise InvalidParams(
                f"kubernetes:{'/'.join(names)}: NAMESPACE/POD or NAMESPACE/POD/CONTAINER, in small letters"
            )
        super().__init__(f"kubernetes:{'/'.join(names)}", Installation(directory=directory, bundle=bundle))
        if not (math.isfinite(wait_ready) and wait_ready >= 0):
            raise InvalidParams(f"{self.address}: wait_ready={wait_ready}: not a number of seconds")
        self.namespace = namespace
        self.pod = pod
        self.container = container
        self.context = context
        self.wait_ready = wait_ready
        #: The UID of the pod that was connected first.
        self._uid: str | None = None
        #: Whether `open` has just read the pod.
        self._was_read = False

    @classmethod
    def from_address(cls, scheme: str, rest: str, **options: Any) -> Self:
        namespace, _, rest = rest.partition("/")
        pod, slash, container = rest.partition("/")
        return cls(namespace, pod, container if slash else None, **options)

    def command(self, argv: Sequence[str]) -> list[str]:
        container = [] if self.container is None else ["--container", self.container]
        pod = ["--namespace", self.namespace, self.pod]
        return [*self._kubectl(), "exec", "--stdin", "--quiet", *pod, *container, "--", *argv]

    def _kubectl(self) -> list[str]:
        return ["kubectl", *([] if self.context is None else ["--context", self.context])]

    def lacks_program(self, exit_code: int, text: str) -> bool:
        return super().lacks_program(exit_code, text) or (exit_code != 0 and bool(_NO_PROGRAM.search(text)))

    def cannot_copy(self, why: str) -> SandboxError:
        return SandboxError(
            f"{self.address}: the server cannot be installed: {why}; only programs of the image can write "
            "files in a pod: use an image that has sh and tar, or name another container of the pod"
        )

    # --- its life --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Read the pod, and wait until it is ready if `wait_ready` is set."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + self.wait_ready, _POLL_SECONDS[0]
        while True:
            status, reason = await self._read()
            if status is None and not self.wait_ready:
                return  # `kubectl exec` fails with a better error, or succeeds
            if status is not None and status.container == "running" and (status.ready or not self.wait_ready):
                self._was_read = True
                return
            if status is not None:
                reason = status.why or "it is not ready"
            if not self.wait_ready:
                raise ConnectionLost(
                    f"{self.address}: the container does not run yet: {reason}; wait_ready=SECONDS waits for it"
                )
            if loop.time() + pause > deadline:
                raise ConnectionLost(f"{self.address}: not ready after {self.wait_ready:g} s: {reason}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])

    async def dial(self, receiver: Receiver) -> Channel:
        if self._was_read:
            self._was_read = False
        else:
            status, reason = await self._read()
            if status is not None and status.container != "running":
                raise ConnectionLost(f"{self.address}: the container does not run: {status.why}")
            if status is None and self._uid is not None:
                # It may be another pod by now.
                raise ConnectionLost(f"{self.address}: {reason}")
        return await super().dial(receiver)

    async def _read(self) -> tuple[PodStatus | None, str]:
        """Return the pod's status, or None and kubectl's error. `SandboxGone` if it has ended or is another pod."""
        query = ["get", "pod", "--namespace", self.namespace, self.pod, "--output", "json"]
        try:
            done = await run_host_command([*self._kubectl(), *query], seconds=_GET_SECONDS, env=environment())
        except ConnectionLost as late:
            return None, late.message
        if done.exit_code != 0:
            if (gone := self.explain(done.error)) is not None:
                raise gone
            return None, done.summary
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
        if status.gone is not None:
            raise SandboxGone(f"{self.address}: {status.gone}", final=True)
        self._uid = status.uid
        return status, ""


def read_status(text: str, container: str | None) -> PodStatus | None:
    """Read the status in the JSON of `kubectl get pod`; None if that is something else."""
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
