"""Nodes that exist only in the API: their pods are reported as running and run nothing. For measurements of scale.

A fake kubelet for all of them: it watches pods, reports those that were assigned to a node as running, and confirms
their deletion. Everything else is the real cluster: API server, etcd, scheduler, controllers.
"""

from __future__ import annotations

import asyncio
import datetime
from typing import Any, Final

from holdfast.errors import ConnectionLost
from holdfast.sandboxes.kubernetes.api import ApiError, ClusterApi

#: Pods of one node, as many as a large real one has.
PODS: Final = 250
#: Requests to the API at once.
AT_ONCE: Final = 32


def node(name: str) -> dict[str, Any]:
    capacity = {"cpu": "256", "memory": "1Ti", "pods": str(PODS), "ephemeral-storage": "1Ti"}
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Fake",
        "lastHeartbeatTime": _now(),
        "lastTransitionTime": _now(),
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "holdfast.test/fake": "yes"}},
        "status": {"capacity": capacity, "allocatable": capacity, "conditions": [ready]},
    }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class FakeKubelet:
    """Runs as a task until it is cancelled."""

    def __init__(self, api: ClusterApi, namespace: str = "default") -> None:
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._places = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._done: set[tuple[str, str]] = set()

    async def run(self) -> None:
        while True:
            try:
                async for kind, pod in self._api.watch(self._path, dict[str, Any], resourceVersion="0"):
                    self._take(kind, pod)
            except (ConnectionLost, ApiError):
                await asyncio.sleep(0.2)

    def _take(self, kind: str, pod: dict[str, Any]) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        if kind == "DELETED":
            self._done -= {(uid, "run"), (uid, "end")}
        elif pod["metadata"].get("deletionTimestamp"):
            self._start(uid, "end", self._end(name))
        elif pod["spec"].get("nodeName") and pod["status"].get("phase") == "Pending":
            self._start(uid, "run", self._report(name, pod))

    def _start(self, uid: str, step: str, work: Any) -> None:
        if (uid, step) in self._done:
            work.close()
            return
        self._done.add((uid, step))
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report(self, name: str, pod: dict[str, Any]) -> None:
        statuses = [
            {
                "name": each["name"],
                "ready": True,
                "state": {"running": {"startedAt": _now()}},
                "image": each["image"],
            }
            for each in pod["spec"]["containers"]
        ]
        status = {"phase": "Running", "containerStatuses": statuses}
        async with self._places:
            try:
                await self._api.patch(f"{self._path}/{name}/status", {"status": status})
            except ApiError as error:
                if error.status != 404:
                    raise

    async def _end(self, name: str) -> None:
        async with self._places:
            await self._api.delete(f"{self._path}/{name}", gracePeriodSeconds=0)
