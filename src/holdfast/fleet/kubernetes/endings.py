"""Pods that end soon: drained, evicted, preempted, deleted. One watch for all sandboxes of a namespace."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Final

from holdfast.errors import ConnectionLost
from holdfast.fleet.engine import SandboxEnding
from holdfast.fleet.kubernetes.manifest import ID_LABEL
from holdfast.fleet.kubernetes.readiness import PodObject
from holdfast.sandboxes.kubernetes.api import ApiError, ClusterApi

log = logging.getLogger(__name__)

#: Waits before the watch is opened again after it broke: doubling from the first to the second.
_RETRY_SECONDS: Final = (0.2, 3.0)
#: From the server's memory, with all pods that match first.
_START: Final = "0"


def _id(pod: PodObject) -> str:
    """The id of a sandbox; the pod of a claim has another name."""
    return pod.metadata.labels.get(ID_LABEL, pod.metadata.name)


def ending_of(pod: PodObject, now: float) -> SandboxEnding | None:
    """The end that the cluster has announced for a pod; None if there is none."""
    disruption = next((each for each in pod.status.conditions if each.type == "DisruptionTarget"), None)
    if disruption is not None and disruption.status != "True":
        disruption = None
    deleted_at = pod.metadata.deletion_timestamp
    if disruption is None and deleted_at is None:
        return None
    reason = "the pod was deleted"
    if disruption is not None:
        reason = ": ".join(filter(None, (disruption.reason, disruption.message))) or "DisruptionTarget"
    if pod.status.phase in ("Failed", "Succeeded"):
        return SandboxEnding(_id(pod), reason, 0.0)
    if deleted_at is None:
        # The deletion follows, with this grace period unless the request has another one.
        return SandboxEnding(_id(pod), reason, float(pod.spec.termination_grace_period_seconds))
    # The time stamp is the end, by the clock of the API server.
    left = datetime.fromisoformat(deleted_at).timestamp() - now
    grace = float(pod.metadata.deletion_grace_period_seconds or 0)
    return SandboxEnding(_id(pod), reason, max(0.0, min(left, grace)))


async def watch_endings(api: ClusterApi, path: str, selector: str) -> AsyncIterator[SandboxEnding]:
    """The ends of pods as the cluster announces them, each once, until the caller stops."""
    announced: set[str] = set()
    version, pause = _START, _RETRY_SECONDS[0]
    while True:
        try:
            query = {"labelSelector": selector, "resourceVersion": version}
            async for kind, pod in api.watch(path, PodObject, **query):
                pause, version = _RETRY_SECONDS[0], pod.metadata.resource_version or version
                if kind == "DELETED":
                    # A pod can be deleted without a grace period.
                    known = pod.metadata.uid in announced
                    announced.discard(pod.metadata.uid)
                    if not known:
                        ended = ending_of(pod, time.time())
                        reason = "the pod was deleted" if ended is None else ended.reason
                        yield SandboxEnding(_id(pod), reason, 0.0)
                    continue
                ending = ending_of(pod, time.time())
                if ending is not None and pod.metadata.uid not in announced:
                    announced.add(pod.metadata.uid)
                    yield ending
        except ApiError as error:
            if error.status in (401, 403, 404):
                raise
            # The version is too old: all pods come again, and those that were missed with them.
            version = _START
            log.info("the watch of ending pods ended: %s", error)
        except ConnectionLost as error:
            log.info("the watch of ending pods broke: %s", error)
        if version == _START:
            announced.clear()
        await asyncio.sleep(pause)
        pause = min(2 * pause, _RETRY_SECONDS[1])
