"""A small controller of the agent-sandbox resources, for tests: keeps pools warm, binds claims, suspends, resumes.

Written from the types of the resources (v1beta1). It does what Holdfast relies on, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.errors import ConnectionLost
from holdfast.sandboxes.kubernetes.api import ApiError, ClusterApi, acquire, release

RESOURCES: Final = Path(__file__).with_name("agent_sandbox.yaml")
CORE: Final = "/apis/agents.x-k8s.io/v1beta1/namespaces/default/sandboxes"
EXTENSIONS: Final = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/default"
PODS: Final = "/api/v1/namespaces/default/pods"
WARM: Final = "agents.x-k8s.io/warm-pool-sandbox"
POD_NAME: Final = "agents.x-k8s.io/pod-name"
STATUS_PATCH: Final = "application/merge-patch+json"

Object = dict[str, Any]


class Controller:
    """Brings pods, Sandboxes and claims of the namespace `default` in line after every change of one of them."""

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._changed = asyncio.Event()

    async def run(self) -> None:
        paths = (CORE, f"{EXTENSIONS}/sandboxclaims", f"{EXTENSIONS}/sandboxwarmpools", PODS)
        watching = [asyncio.create_task(self._watch(path)) for path in paths]
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                try:
                    await self._reconcile()
                except ApiError as error:
                    # Another version of an object, or an object that is gone: the next change comes soon.
                    if error.status not in (404, 409):
                        raise
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    async def _watch(self, path: str) -> None:
        while True:
            with contextlib.suppress(ApiError, ConnectionLost):
                async for _ in self._api.watch(path, dict[str, Any], resourceVersion="0"):
                    self._changed.set()
            await asyncio.sleep(0.2)

    async def _all(self, path: str) -> dict[str, Object]:
        found, _ = await self._api.list(path, dict[str, Any])
        return {each["metadata"]["name"]: each for each in found if "deletionTimestamp" not in each["metadata"]}

    async def _reconcile(self) -> None:
        sandboxes, claims = await self._all(CORE), await self._all(f"{EXTENSIONS}/sandboxclaims")
        for pool in (await self._all(f"{EXTENSIONS}/sandboxwarmpools")).values():
            await self._fill(pool, sandboxes)
        for claim in claims.values():
            if not claim.get("status", {}).get("sandbox", {}).get("name"):
                await self._bind(claim, sandboxes)
        pods = await self._all(PODS)
        for sandbox in (await self._all(CORE)).values():
            await self._run_pod(sandbox, pods)
        sandboxes = await self._all(CORE)
        for claim in (await self._all(f"{EXTENSIONS}/sandboxclaims")).values():
            name = claim.get("status", {}).get("sandbox", {}).get("name", "")
            if name in sandboxes:
                ready = [each for each in _conditions(sandboxes[name]) if each["type"] == "Ready"]
                await self._set_status(f"{EXTENSIONS}/sandboxclaims", claim, {"conditions": ready})

    async def _fill(self, pool: Object, sandboxes: dict[str, Object]) -> None:
        name = pool["metadata"]["name"]
        warm = [each for each in sandboxes.values() if each["metadata"].get("labels", {}).get(WARM) == name]
        template = (await self._all(f"{EXTENSIONS}/sandboxtemplates"))[pool["spec"]["sandboxTemplateRef"]["name"]]
        for _ in range(pool["spec"]["replicas"] - len(warm)):
            await self._api.post(
                CORE,
                {
                    "apiVersion": "agents.x-k8s.io/v1beta1",
                    "kind": "Sandbox",
                    "metadata": {
                        "generateName": f"{name}-",
                        "labels": {WARM: name},
                        "ownerReferences": [_owner(pool)],
                    },
                    "spec": {"podTemplate": template["spec"]["podTemplate"]},
                },
            )

    async def _bind(self, claim: Object, sandboxes: dict[str, Object]) -> None:
        """Give the claim a warm Sandbox; the labels of the claim are laid over its pod."""
        pool = claim["spec"]["warmPoolRef"]["name"]
        for sandbox in sandboxes.values():
            metadata = sandbox["metadata"]
            is_ready = any(each["type"] == "Ready" and each["status"] == "True" for each in _conditions(sandbox))
            if metadata.get("labels", {}).get(WARM) != pool or not is_ready:
                continue
            name = metadata["name"]
            metadata["labels"].pop(WARM)
            added = claim["spec"].get("additionalPodMetadata", {})
            body = {
                "metadata": {
                    "resourceVersion": metadata["resourceVersion"],
                    "labels": {WARM: None},
                    "ownerReferences": [_owner(claim)],
                },
                "spec": {"podTemplate": {"metadata": added}},
            }
            await self._api.patch(f"{CORE}/{name}", body)
            await self._api.patch(f"{PODS}/{metadata['annotations'][POD_NAME]}", {"metadata": added})
            await self._set_status(f"{EXTENSIONS}/sandboxclaims", claim, {"sandbox": {"name": name}})
            return

    async def _run_pod(self, sandbox: Object, pods: dict[str, Object]) -> None:
        metadata = sandbox["metadata"]
        name = metadata.get("annotations", {}).get(POD_NAME, "")
        suspended = sandbox["spec"].get("operatingMode") == "Suspended"
        if suspended and name in pods:
            await self._api.delete(f"{PODS}/{name}", gracePeriodSeconds=1)
            del pods[name]
        if not suspended and name not in pods:
            template = sandbox["spec"]["podTemplate"]
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                # Not the name of the Sandbox: it is to be resolved.
                "metadata": {
                    **template.get("metadata", {}),
                    "generateName": f"{metadata['name']}-pod-",
                    "ownerReferences": [_owner(sandbox)],
                },
                "spec": template["spec"],
            }
            made = msgspec.json.decode(await self._api.post(PODS, pod))
            pods[made["metadata"]["name"]] = made
            body = {"metadata": {"annotations": {POD_NAME: made["metadata"]["name"]}}}
            await self._api.patch(f"{CORE}/{metadata['name']}", body)
            name = made["metadata"]["name"]
        conditions = pods.get(name, {}).get("status", {}).get("conditions", ())
        is_ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
        reason = "SandboxSuspended" if suspended else "DependenciesReady" if is_ready else "DependenciesNotReady"
        status = [
            {"type": "Ready", "status": str(is_ready and not suspended), "reason": reason},
            {"type": "Suspended", "status": str(suspended), "reason": "PodTerminated" if suspended else "Running"},
        ]
        await self._set_status(CORE, sandbox, {"conditions": status})

    async def _set_status(self, path: str, object: Object, status: Object) -> None:
        known = object.get("status", {})
        if all(known.get(key) == value for key, value in status.items()):
            return
        await self._api.patch(f"{path}/{object['metadata']['name']}/status", {"status": status})


def _conditions(object: Object) -> list[Object]:
    return list(object.get("status", {}).get("conditions", ()))


def _owner(object: Object) -> Object:
    return {
        "apiVersion": object["apiVersion"],
        "kind": object["kind"],
        "name": object["metadata"]["name"],
        "uid": object["metadata"]["uid"],
        "controller": True,
    }


@contextlib.asynccontextmanager
async def running_controller() -> AsyncIterator[None]:
    """The controller, for the cluster of KUBECONFIG."""
    api = acquire()
    task = asyncio.create_task(Controller(api).run())
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await release(api)
