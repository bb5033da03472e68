"""One watch for all pods that an engine is waiting for: a pod costs no request while it starts."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from holdfast.errors import ConnectionLost, HoldfastError, SandboxError
from holdfast.fleet.kubernetes.readiness import PodObject, Verdict, judge
from holdfast.sandboxes.kubernetes.api import ApiError, ClusterApi

log = logging.getLogger(__name__)

#: The watch ends this long after the last pod that was waited for.
LINGER_SECONDS: Final = 10.0
#: Waits before the watch is opened again after it broke: doubling from the first to the second.
_RETRY_SECONDS: Final = (0.2, 3.0)


class PodWatch:
    """Watches the pods of one selector while some of them are awaited."""

    def __init__(self, api: ClusterApi, path: str, selector: str, container: str) -> None:
        self._api, self._path, self._selector, self._container = api, path, selector, container
        self._waiting: dict[str, asyncio.Future[PodObject]] = {}
        self._reasons: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    def expect(self, name: str) -> asyncio.Future[PodObject]:
        """Begin to wait for a pod, before it is made. The future fails if the pod will not run."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        future: asyncio.Future[PodObject] = asyncio.get_running_loop().create_future()
        self._waiting[name] = future
        return future

    def forget(self, name: str) -> str:
        """Wait no more for a pod; returns why it does not run yet."""
        if (future := self._waiting.pop(name, None)) is not None:
            future.cancel()
        return self._reasons.pop(name, "no word of it came from the cluster")

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause, last = _RETRY_SECONDS[0], loop.time()
        while self._waiting or loop.time() - last < LINGER_SECONDS:
            last = loop.time() if self._waiting else last
            try:
                async with asyncio.timeout(LINGER_SECONDS if not self._waiting else None):
                    # From the server's memory, with all pods that match first: none is missed after a break.
                    query = {"labelSelector": self._selector, "resourceVersion": "0"}
                    async for kind, pod in self._api.watch(self._path, PodObject, **query):
                        pause = _RETRY_SECONDS[0]
                        self._take(kind, pod)
                        if not self._waiting and loop.time() - last > LINGER_SECONDS:
                            return
                        last = loop.time() if self._waiting else last
            except TimeoutError:
                continue
            except ApiError as error:
                if error.status in (401, 403, 404):
                    self._fail_all(SandboxError(f"kubernetes: pods cannot be watched: {error.message}"))
                    return
                log.info("the watch of pods ended: %s", error)
            except ConnectionLost as error:
                log.info("the watch of pods broke: %s", error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _RETRY_SECONDS[1])

    def _take(self, kind: str, pod: PodObject) -> None:
        name = pod.metadata.name
        future = self._waiting.get(name)
        if future is None or future.done():
            return
        gone = Verdict(hopeless=True, reason="it was deleted")
        verdict = gone if kind == "DELETED" else judge(pod, self._container)
        if verdict.ready:
            del self._waiting[name]
            self._reasons.pop(name, None)
            future.set_result(pod)
        elif verdict.hopeless:
            del self._waiting[name]
            self._reasons.pop(name, None)
            future.set_exception(SandboxError(verdict.reason))
        else:
            self._reasons[name] = verdict.reason

    def _fail_all(self, error: HoldfastError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()
