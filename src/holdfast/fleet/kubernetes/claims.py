"""Sandboxes that are claimed from a warm pool of agent-sandbox: a SandboxClaim, the Sandbox that it got, its pod.

The claim has the id of the sandbox as its name, and the record as an annotation, so that any process finds it. Its
labels are laid over the pod by the controller, among them the one that our NetworkPolicy selects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec

from holdfast.errors import InvalidParams, SandboxError
from holdfast.fleet.kubernetes import manifest
from holdfast.fleet.kubernetes.readiness import PodObject
from holdfast.fleet.record import Record, State, encode_record
from holdfast.fleet.template import Template
from holdfast.sandboxes.kubernetes.agent_sandbox import (
    EXTENSIONS,
    GROUP,
    VERSION,
    Condition,
    Metadata,
    Mode,
    SandboxObject,
    condition,
    explain,
    get_sandbox,
    path_of,
    set_mode,
)
from holdfast.sandboxes.kubernetes.api import ApiError, ClusterApi

RESOURCE: Final = "sandboxclaims"
#: Between two reads of an object that is not ready yet: doubling from the first to the second.
_POLL_SECONDS: Final = (0.1, 2.0)
#: The fields of a template that the SandboxTemplate of the pool determines.
_OF_THE_POOL: Final = ("image", "cpus", "memory", "disk", "user", "env")
_OPTIONS: Final = frozenset({"claim", "ready_timeout"})


class ClaimedSandbox(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""


class ClaimStatus(msgspec.Struct, frozen=True, rename="camel"):
    conditions: tuple[Condition, ...] = ()
    sandbox: ClaimedSandbox = ClaimedSandbox()


class ClaimObject(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of a SandboxClaim that are read."""

    metadata: Metadata
    status: ClaimStatus = ClaimStatus()

    @property
    def state(self) -> State:
        ready = condition(self.status.conditions, "Ready")
        if ready.status == "True":
            return "running"
        return "paused" if ready.reason == "SandboxSuspended" else "creating"


def check_claim(template: Template) -> None:
    """Refuse fields that a claim cannot set: the pods of a warm pool exist already."""
    defaults = Template()
    for field in _OF_THE_POOL:
        if getattr(template, field) != getattr(defaults, field):
            raise InvalidParams(f"engine kubernetes: {field}: the SandboxTemplate of the warm pool determines it")
    if others := sorted(template.options.keys() - _OPTIONS):
        raise InvalidParams(f"engine kubernetes: options: {', '.join(others)}: not with `claim`")


def claim_manifest(template: Template, record: Record, maker: str) -> dict[str, Any]:
    labels = manifest.pod_labels(template, record, maker)
    return {
        "apiVersion": f"{EXTENSIONS}/{VERSION}",
        "kind": "SandboxClaim",
        "metadata": {
            "name": record.id,
            "labels": {manifest.ID_LABEL: record.id},
            "annotations": {manifest.RECORD: encode_record(record)},
        },
        "spec": {
            "warmPoolRef": {"name": template.options["claim"]},
            "additionalPodMetadata": {"labels": labels},
        },
    }


class Claims:
    """The claims of one namespace."""

    def __init__(self, api: ClusterApi, namespace: str) -> None:
        self._api, self._namespace = api, namespace
        #: Whether the cluster has the resource; None before the first list.
        self._exist: bool | None = None

    def _path(self, id: str = "") -> str:
        return path_of(EXTENSIONS, RESOURCE, self._namespace, id)

    def _explain(self, error: ApiError, id: str) -> Exception:
        return explain(error, EXTENSIONS, RESOURCE, self._namespace, id)

    async def make(self, template: Template, record: Record, maker: str, seconds: float) -> ClaimObject:
        """Claim a sandbox, and return the claim once its pod is ready."""
        try:
            await self._api.post(self._path(), claim_manifest(template, record, maker))
        except ApiError as error:
            if error.status != 409 or error.reason != "AlreadyExists":
                raise self._explain(error, record.id) from None
        claim: ClaimObject = await self._until(
            self._path(record.id), ClaimObject, _is_bound, seconds, f"claim {record.id}"
        )
        await self._check_pod(claim, template)
        return claim

    async def _check_pod(self, claim: ClaimObject, template: Template) -> None:
        """Refuse a pod without the label that our policy selects."""
        if template.network == "host":
            return
        sandbox = await get_sandbox(self._api, self._namespace, claim.status.sandbox.name)
        pod = await self._api.get(f"/api/v1/namespaces/{self._namespace}/pods/{sandbox.pod}", PodObject)
        if pod.metadata.labels.get(manifest.NETWORK_LABEL) != "none":
            raise SandboxError(
                f"kubernetes:{self._namespace}/{sandbox.pod}: network: the controller of agent-sandbox did not set "
                f'the label {manifest.NETWORK_LABEL} of the claim on the pod; network="host" needs none'
            )

    async def get(self, id: str) -> ClaimObject:
        try:
            return await self._api.get(self._path(id), ClaimObject)
        except ApiError as error:
            raise self._explain(error, id) from None

    async def list(self) -> list[ClaimObject]:
        """All claims of sandboxes; none where the cluster does not have the resource, or denies it."""
        if self._exist is False:
            return []
        try:
            found, _ = await self._api.list(self._path(), ClaimObject, labelSelector=manifest.ID_LABEL)
        except ApiError as error:
            if error.status not in (403, 404):
                raise
            self._exist = False
            return []
        self._exist = True
        return [claim for claim in found if claim.metadata.deletion_timestamp is None]

    async def patch(self, id: str, body: Any) -> None:
        try:
            await self._api.patch(self._path(id), body)
        except ApiError as error:
            raise self._explain(error, id) from None

    async def remove(self, id: str) -> None:
        """Delete a claim; the cluster's garbage collector removes its Sandbox and pod."""
        try:
            await self._api.delete(self._path(id), propagationPolicy="Background")
        except ApiError as error:
            if error.status != 403:
                raise

    async def set_mode(self, id: str, mode: Mode, seconds: float) -> None:
        """Suspend or resume the Sandbox of a claim; wait until its pod is gone or ready, and the claim shows it."""
        name = (await self.get(id)).status.sandbox.name
        await set_mode(self._api, self._namespace, name, mode)
        done = _is_ready if mode == "Running" else _is_suspended
        await self._until(
            path_of(GROUP, "sandboxes", self._namespace, name), SandboxObject, done, seconds, f"sandbox {name}"
        )
        # Its own controller copies the state, a moment later.
        shown = _is_bound if mode == "Running" else _is_unready
        await self._until(self._path(id), ClaimObject, shown, seconds, f"claim {id}")

    async def _until(
        self, path: str, kind: type[Any], done: Callable[[Any], bool], seconds: float, what: str
    ) -> Any:
        """Read an object until it is as expected; its condition is the reason if it is not in time."""
        pause, found = _POLL_SECONDS[0], None
        try:
            async with asyncio.timeout(seconds):
                while True:
                    found = await self._api.get(path, kind)
                    if done(found):
                        return found
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _POLL_SECONDS[1])
        except TimeoutError:
            ready = Condition() if found is None else condition(found.status.conditions, "Ready")
            reason = ": ".join(filter(None, (ready.reason, ready.message))) or "no controller has answered"
            raise SandboxError(
                f"kubernetes:{self._namespace}: {what}: not ready after {seconds:g} s: {reason}"
            ) from None


def _is_bound(claim: ClaimObject) -> bool:
    return bool(claim.status.sandbox.name) and claim.state == "running"


def _is_unready(claim: ClaimObject) -> bool:
    return claim.state != "running"


def _is_ready(sandbox: SandboxObject) -> bool:
    return condition(sandbox.status.conditions, "Ready").status == "True"


def _is_suspended(sandbox: SandboxObject) -> bool:
    return condition(sandbox.status.conditions, "Suspended").status == "True"
