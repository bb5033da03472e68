"""The part of the control API about templates: builds, their files, names, and deletion."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from holdfast.integrations.e2b.control import records, requests as r
from holdfast.integrations.e2b.control.builds import Builds, NewBuild, StartBuild
from holdfast.integrations.e2b.control.routes import Handler, parse_seconds
from holdfast.integrations.e2b.control.sandboxes import Sandboxes
from holdfast.integrations.e2b.problems import Problem, not_found, unsupported
from holdfast.integrations.e2b.settings import Keyring


class TemplateApi:
    """Handlers about templates."""

    def __init__(self, sandboxes: Sandboxes, builds: Builds, keys: Keyring) -> None:
        self._sandboxes = sandboxes
        self._builds = builds
        self._keys = keys

    def routes(self) -> dict[tuple[str, str], Handler]:
        return {
            ("GET", "/templates"): self._list,
            ("GET", "/v2/templates"): self._list,
            ("POST", "/v3/templates"): self._new,
            ("POST", "/v2/templates"): self._new,
            ("GET", "/templates/aliases/{alias}"): self._alias,
            ("DELETE", "/templates/{id}"): self._delete,
            ("GET", "/templates/{id}/files/{hash}"): self._file,
            ("POST", "/v2/templates/{id}/builds/{build}"): self._start,
            ("GET", "/templates/{id}/builds/{build}/status"): self._status,
            ("POST", "/templates/tags"): self._tags,
            ("DELETE", "/templates/tags"): self._tags,
            ("GET", "/templates/{id}/tags"): self._tags,
        }

    async def _list(self, request: Request) -> Response:
        names = [*self._sandboxes.templates]
        names += [ref.labels.get(records.NAMES) or ref.id for ref in await self._sandboxes.snapshots()]
        return JSONResponse(
            [
                {
                    "templateID": name,
                    "buildID": name,
                    "cpuCount": records.machine_cpus(),
                    "memoryMB": records.machine_memory() >> 20,
                    "diskSizeMB": 0,
                    "public": False,
                    "aliases": [name],
                    "names": [name],
                    "createdAt": records.moment(0),
                    "updatedAt": records.moment(0),
                    "createdBy": None,
                    "lastSpawnedAt": None,
                    "spawnCount": 0,
                    "buildCount": 1,
                    "envdVersion": records.ENVD_VERSION,
                    "buildStatus": "ready",
                }
                for name in names
            ]
        )

    async def _new(self, request: Request) -> Response:
        build = self._builds.new(r.parse_body(await request.body(), NewBuild))
        made = {
            "templateID": build.name,
            "buildID": build.id,
            "public": False,
            "names": [build.name],
            "tags": ["default"],
            "aliases": [build.name],
        }
        return JSONResponse(made, 202)

    async def _file(self, request: Request, id: str, hash: str) -> Response:
        present = self._builds.uploaded(hash) is not None
        # The SDKs send no key with the upload: the URL has a token for this hash alone.
        url = f"{str(request.base_url).rstrip('/')}/uploads/{hash}?token={self._keys.token('upload', hash)}"
        return JSONResponse({"present": present, "url": url}, 201)

    async def _start(self, request: Request, id: str, build: str) -> Response:
        await self._builds.start(self._builds.get(build), r.parse_body(await request.body(), StartBuild))
        return Response(status_code=202)

    async def _status(self, request: Request, id: str, build: str) -> Response:
        offset = parse_seconds(request.query_params.get("logsOffset")) or 0
        return JSONResponse(self._builds.get(build).shown(offset))

    async def _alias(self, request: Request, alias: str) -> Response:
        if alias not in self._sandboxes.templates and await self._sandboxes.snapshot_named(alias) is None:
            raise not_found(f"template {alias[:100]!r} not found")
        return JSONResponse({"templateID": alias, "public": False})

    async def _delete(self, request: Request, id: str) -> Response:
        snapshot = await self._sandboxes.snapshot_named(id)
        if snapshot is not None:
            await self._sandboxes.remove(snapshot.id)
            return Response(status_code=204)
        if id in self._sandboxes.templates:
            raise Problem(403, "permission_denied", f"template {id!r} is in the server's file of templates")
        raise not_found(f"template {id[:100]!r} not found")

    async def _tags(self, request: Request, id: str = "") -> Response:
        raise unsupported(self._sandboxes.fleet.engine.name, "tags of templates", "this server does not have them")
