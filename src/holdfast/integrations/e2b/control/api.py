"""The control API: HTTP requests to `Sandboxes`, and the JSON of its replies.

Every request needs the API key. Touches nothing but the request.
"""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from holdfast.errors import HoldfastError
from holdfast.integrations.e2b.control import records, requests as r
from holdfast.integrations.e2b.control.metrics import Metrics
from holdfast.integrations.e2b.control.routes import (
    PAGE,
    Handler,
    next_page,
    paged,
    parse_limit,
    parse_metadata,
    parse_moment,
    parse_seconds,
)
from holdfast.integrations.e2b.control.sandboxes import Sandboxes
from holdfast.integrations.e2b.problems import Problem, invalid, problem_of, unsupported

#: An idempotency key, as the SDKs check it.
MAX_KEY: Final = 255


class ControlApi:
    """Handlers of the control API; `routes` has them by method and path."""

    def __init__(self, sandboxes: Sandboxes, shapes: records.Shapes) -> None:
        self._sandboxes = sandboxes
        self._shapes = shapes
        self._metrics = Metrics()

    def routes(self) -> dict[tuple[str, str], Handler]:
        """Paths have `{id}` for one segment."""
        return {
            ("POST", "/v2/sandboxes"): self._create,
            ("POST", "/sandboxes"): self._create,
            ("GET", "/v2/sandboxes"): self._list,
            ("GET", "/sandboxes"): self._list,
            ("GET", "/sandboxes/metrics"): self._all_metrics,
            ("GET", "/sandboxes/{id}"): self._get,
            ("DELETE", "/sandboxes/{id}"): self._kill,
            ("POST", "/v2/sandboxes/{id}/connect"): self._connect,
            ("POST", "/sandboxes/{id}/connect"): self._connect,
            ("POST", "/sandboxes/{id}/resume"): self._resume,
            ("POST", "/sandboxes/{id}/timeout"): self._timeout,
            ("POST", "/sandboxes/{id}/refreshes"): self._refresh,
            ("POST", "/sandboxes/{id}/pause"): self._pause,
            ("POST", "/sandboxes/{id}/fork"): self._fork,
            ("POST", "/sandboxes/{id}/snapshots"): self._snapshot,
            ("PUT", "/sandboxes/{id}/network"): self._network,
            ("GET", "/sandboxes/{id}/metrics"): self._get_metrics,
            ("GET", "/sandboxes/{id}/logs"): self._logs,
            ("GET", "/v2/sandboxes/{id}/logs"): self._logs,
            ("GET", "/snapshots"): self._list_snapshots,
        }

    async def _create(self, request: Request) -> Response:
        wanted = r.parse_body(await request.body(), r.NewSandbox)
        key = request.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= MAX_KEY:
            raise invalid(f"Idempotency-Key: 1 to {MAX_KEY} characters")
        ref = await self._sandboxes.create(wanted, key)
        return JSONResponse(self._shapes.connected(ref), 201)

    async def _list(self, request: Request) -> Response:
        query = request.query_params
        wanted = parse_metadata(query.get("metadata", ""))
        states = set(query.get("state", "running,paused").split(","))
        template, after = query.get("template"), parse_moment(query.get("startedAfter"))
        found = [
            ref
            for ref in await self._sandboxes.list()
            if wanted.items() <= records.metadata_of(ref).items()
            and ("paused" if ref.state == "paused" else "running") in states
            and template in (None, ref.labels.get(records.TEMPLATE))
            and (after is None or ref.created_at > after)
        ]
        page, token = paged(
            found, parse_limit(query.get("limit")), query.get("nextToken"), query.get("order", "desc")
        )
        return JSONResponse([self._shapes.listed(ref) for ref in page], headers=next_page(token))

    async def _get(self, request: Request, id: str) -> Response:
        return JSONResponse(self._shapes.detailed(await self._sandboxes.get(id)))

    async def _kill(self, request: Request, id: str) -> Response:
        await self._sandboxes.kill(id)
        return Response(status_code=204)

    async def _connect(self, request: Request, id: str) -> Response:
        wanted = r.parse_body(await request.body(), r.Connect)
        if not wanted.memory:
            raise unsupported(self._engine, "on_resume='reboot'", "a paused sandbox resumes with its memory")
        ref, paused = await self._sandboxes.connect(id, wanted.timeout)
        return JSONResponse(self._shapes.connected(ref), 201 if paused else 200)

    async def _resume(self, request: Request, id: str) -> Response:
        wanted = r.parse_body(await request.body(), r.Connect)
        ref, paused = await self._sandboxes.connect(id, wanted.timeout)
        if not paused:
            raise Problem(409, "already_exists", f"sandbox {id} is running")
        return JSONResponse(self._shapes.connected(ref), 201)

    async def _timeout(self, request: Request, id: str) -> Response:
        await self._sandboxes.set_timeout(id, r.parse_body(await request.body(), r.Timeout).timeout)
        return Response(status_code=204)

    async def _refresh(self, request: Request, id: str) -> Response:
        seconds = r.parse_body(await request.body(), r.Refresh).duration
        await self._sandboxes.set_timeout(id, seconds, only_longer=True)
        return Response(status_code=204)

    async def _pause(self, request: Request, id: str) -> Response:
        wanted = r.parse_body(await request.body(), r.Pause)
        if not wanted.memory:
            raise unsupported(self._engine, "pause with mode='filesystem'", "a pause keeps the memory")
        if not await self._sandboxes.pause(id):
            raise Problem(409, "already_exists", f"sandbox {id} is paused already")
        return Response(status_code=204)

    async def _fork(self, request: Request, id: str) -> Response:
        wanted = r.parse_body(await request.body(), r.Fork)
        if not 1 <= wanted.count <= r.MAX_FORKS:
            raise invalid(f"count: {wanted.count} is not between 1 and {r.MAX_FORKS}")
        await self._sandboxes.get(id)
        results = []
        # One after the other: each stops the sandbox while its files are copied.
        for _ in range(wanted.count):
            try:
                results.append({"sandbox": self._shapes.connected(await self._sandboxes.fork(id, wanted.timeout))})
            except (HoldfastError, Problem) as error:
                problem = error if isinstance(error, Problem) else problem_of(error, id)
                results.append({"error": {"code": problem.status, "message": problem.message}})
        return JSONResponse(results, 201)

    async def _snapshot(self, request: Request, id: str) -> Response:
        wanted = r.parse_body(await request.body(), r.Snapshot)
        made = await self._sandboxes.snapshot(id, wanted.name)
        return JSONResponse(self._shapes.snapshot(made), 201)

    async def _list_snapshots(self, request: Request) -> Response:
        query = request.query_params
        source, name = query.get("sandboxID"), query.get("name")
        found = [
            ref
            for ref in await self._sandboxes.snapshots()
            if source in (None, ref.labels.get(records.SOURCE))
            and (name is None or name.removesuffix(":default") == ref.labels.get(records.NAMES))
        ]
        page, token = paged(found, parse_limit(query.get("limit")), query.get("nextToken"), "desc")
        return JSONResponse([self._shapes.snapshot(ref) for ref in page], headers=next_page(token))

    async def _network(self, request: Request, id: str) -> Response:
        wanted = r.parse_body(await request.body(), r.NetworkUpdate)
        ref = await self._sandboxes.get(id)
        present = ref.record.template.network
        allowed = r.effective_network(wanted, wanted.allow_internet_access, present)
        if allowed != present and not (allowed == "none" and present is None):
            raise unsupported(self._engine, "update_network", "the network of a running sandbox cannot be changed")
        return Response(status_code=204)

    async def _get_metrics(self, request: Request, id: str) -> Response:
        ref = await self._sandboxes.get(id)
        if ref.state == "paused":
            return JSONResponse([])
        sample = await self._metrics.sample(await self._sandboxes.open(id))
        start, end = (parse_seconds(request.query_params.get(name)) for name in ("start", "end"))
        now = sample["timestampUnix"]
        within = (start is None or start <= now) and (end is None or now <= end)
        return JSONResponse([sample] if within else [])

    async def _all_metrics(self, request: Request) -> Response:
        ids = [id for id in request.query_params.get("sandbox_ids", "").split(",") if id]
        if len(ids) > PAGE:
            raise invalid(f"sandbox_ids: more than {PAGE}")
        opened = await asyncio.gather(*(self._sandboxes.open(id) for id in ids))
        samples = [await self._metrics.sample(each) for each in opened]
        return JSONResponse({"sandboxes": dict(zip(ids, samples, strict=True))})

    async def _logs(self, request: Request, id: str) -> Response:
        await self._sandboxes.get(id)
        return JSONResponse({"logs": [], "logEntries": []})

    @property
    def _engine(self) -> str:
        return self._sandboxes.fleet.engine.name
