"""`Template.build`: a sandbox of the base template, the steps as commands in it, and a snapshot of its files.

So every engine that can fork can build. Builds and uploaded files live as long as the server: a client of a server
that was killed builds again. Touches a temporary directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import re
import secrets
import shlex
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from holdfast.errors import HoldfastError
from holdfast.fleet.fleet import FleetSandbox
from holdfast.fleet.template import Template, make_template
from holdfast.integrations.e2b.control import records
from holdfast.integrations.e2b.control.requests import Body
from holdfast.integrations.e2b.control.sandboxes import Sandboxes
from holdfast.integrations.e2b.control.templates import BASE, CODE_INTERPRETER
from holdfast.integrations.e2b.problems import Problem, invalid, not_found, problem_of, unsupported

#: Images of E2B that the SDKs name if the program names none, and our templates for them.
_E2B_IMAGES: Final = {"e2bdev/base": BASE, "e2bdev/code-interpreter": CODE_INTERPRETER}
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,100}", re.ASCII)
_HASH: Final = re.compile(r"[0-9a-f]{16,128}", re.ASCII)
#: Builds that are remembered, and log lines of one; the oldest are dropped.
MAX_BUILDS: Final = 100
MAX_LOGS: Final = 10_000
_LOG_PAGE: Final = 100
MAX_STEPS: Final = 500
#: Uploaded files of all builds together, on this machine's disk.
MAX_UPLOADS_BYTES: Final = 4 * 1024 * 1024 * 1024
_BUILD_SECONDS: Final = 3_600.0
#: Unpacks the tar of a COPY step beside `$1` and copies the files that match to `$2`, with the mode `$3` and the
#: owner `$4`. A directory is copied with its contents; a single file gets the name `$2` unless that ends with `/`.
_COPY: Final = r"""set -e
mkdir "$1"; cd "$1"; tar -xf "$1.tar"
[ -z "$3" ] || chmod -R "$3" .
for found in PATTERN; do
  if [ -d "$found" ]; then mkdir -p "$2"; cp -a "$found/." "$2"; continue; fi
  case "$2" in */) mkdir -p "$2" ;; *) mkdir -p "$(dirname "$2")" ;; esac
  cp -a "$found" "$2"
done
[ -z "$4" ] || chown -R "$4" "$2"
rm -r "$1" "$1.tar"
"""


class NewBuild(Body, frozen=True):
    name: str = ""
    alias: str = ""
    tags: tuple[str, ...] = ()
    team_id: str | None = msgspec.field(name="teamID", default=None)
    cpu_count: int | None = None
    memory_mb: int | None = msgspec.field(name="memoryMB", default=None)
    min_free_disk_mb: int | None = msgspec.field(name="minFreeDiskMb", default=None)


class Step(Body, frozen=True):
    type: str
    args: tuple[str, ...] | None = None
    files_hash: str | None = None
    force: bool | None = None
    force_upload: bool | None = None


class StartBuild(Body, frozen=True):
    from_image: str | None = None
    from_template: str | None = None
    from_image_registry: dict[str, Any] | None = None
    force: bool = False
    steps: tuple[Step, ...] = ()
    start_cmd: str | None = None
    ready_cmd: str | None = None


class Build:
    """One build and its log."""

    def __init__(self, name: str, wanted: NewBuild) -> None:
        self.id = str(uuid.uuid4())
        self.name = name
        self.wanted = wanted
        self.status: Literal["waiting", "building", "ready", "error"] = "waiting"
        self.reason = ""
        self.step: int | None = None
        self.logs: list[dict[str, Any]] = []
        self.task: asyncio.Task[None] | None = None

    def log(self, message: str, level: str = "info") -> None:
        if len(self.logs) < MAX_LOGS:
            now = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
            self.logs.append({"timestamp": now, "message": message[:2_000], "level": level})

    def shown(self, offset: int) -> dict[str, Any]:
        state: dict[str, Any] = {
            "templateID": self.name,
            "buildID": self.id,
            "status": self.status,
            "logs": [],
            "logEntries": self.logs[offset : offset + _LOG_PAGE],
        }
        if self.status == "error":
            state["reason"] = {"message": self.reason, "logEntries": []}
            if self.step is not None:
                state["reason"]["step"] = str(self.step)
        return state


class Builds:
    """The builds of one server."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._builds: dict[str, Build] = {}
        #: Made by the first upload.
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._uploaded = 0

    async def aclose(self) -> None:
        tasks = [build.task for build in self._builds.values() if build.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._directory is not None:
            self._directory.cleanup()

    def new(self, wanted: NewBuild) -> Build:
        name = (wanted.name or wanted.alias).removesuffix(":default")
        if not _NAME.fullmatch(name):
            raise invalid(f"name: {name[:100]!r}: lower-case letters, digits, '.', '_' and '-', without a tag")
        if tags := [tag for tag in wanted.tags if tag != "default"]:
            raise invalid(f"tags: {', '.join(tags)[:100]}: this server has no tags of templates")
        if name in self._sandboxes.templates:
            raise invalid(f"name: {name!r} is a template of the server's file")
        while len(self._builds) >= MAX_BUILDS:
            oldest = next((id for id, build in self._builds.items() if build.status != "building"), None)
            if oldest is None:
                raise Problem(429, "resource_exhausted", f"{MAX_BUILDS} builds are running")
            del self._builds[oldest]
        build = Build(name, wanted)
        self._builds[build.id] = build
        return build

    def get(self, id: str) -> Build:
        build = self._builds.get(id)
        if build is None:
            raise not_found(f"build {id[:64]!r} not found")
        return build

    # --- files ---------------------------------------------------------------------------------------------------

    def uploaded(self, hash: str) -> Path | None:
        path = self._path(hash)
        return path if path.exists() else None

    def _path(self, hash: str) -> Path:
        if not _HASH.fullmatch(hash):
            raise invalid(f"hash: {hash[:140]!r} is not a hash")
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="holdfast-e2b-")
        return Path(self._directory.name, hash)

    async def upload(self, hash: str, body: AsyncIterator[bytes]) -> None:
        """Store the files of a COPY step, a tar."""
        path = self._path(hash)
        part = Path(f"{path}.{secrets.token_hex(4)}")
        size = 0
        try:
            with open(part, "xb") as file:  # noqa: ASYNC230 - small writes to the page cache
                async for piece in body:
                    size += len(piece)
                    if self._uploaded + size > MAX_UPLOADS_BYTES:
                        raise Problem(507, "resource_exhausted", f"uploads of more than {MAX_UPLOADS_BYTES} bytes")
                    file.write(piece)
            os.replace(part, path)
            self._uploaded += size
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)

    # --- building ------------------------------------------------------------------------------------------------

    async def start(self, build: Build, wanted: StartBuild) -> None:
        """Begin a build; a step or a base that this server cannot build is an error of the request."""
        if build.status != "waiting":
            raise Problem(409, "already_exists", f"build {build.id} has begun")
        engine = self._sandboxes.fleet.engine.name
        if wanted.start_cmd or wanted.ready_cmd:
            raise unsupported(engine, "start and ready commands", "a template has files, and no processes")
        if wanted.from_image_registry is not None:
            raise unsupported(engine, "registries with credentials", "log the engine itself in")
        if len(wanted.steps) > MAX_STEPS:
            raise invalid(f"steps: more than {MAX_STEPS}")
        for step in wanted.steps:
            _check_step(step, self)
        template = await self._base(wanted)
        build.status = "building"
        build.task = asyncio.create_task(self._run(build, wanted, template))

    async def _base(self, wanted: StartBuild) -> Template | str:
        """The template of the build's sandbox, or the id of a snapshot."""
        sandboxes, image = self._sandboxes, wanted.from_image
        name = wanted.from_template or _E2B_IMAGES.get((image or "e2bdev/base").removesuffix(":latest"))
        if name is not None:
            if (template := sandboxes.templates.get(name)) is not None:
                return template
            snapshot = await sandboxes.snapshot_named(name)
            if snapshot is None:
                raise not_found(f"template {name[:100]!r} not found")
            return snapshot.id
        if sandboxes.fleet.engine.name not in ("docker", "podman"):
            reason = "this engine pulls no images; name the image's tar in the file of templates"
            raise unsupported(sandboxes.fleet.engine.name, f"from_image({image!r})", reason)
        return make_template(sandboxes.templates[BASE], {"image": image})

    async def _run(self, build: Build, wanted: StartBuild, base: Template | str) -> None:
        id = ""
        try:
            async with asyncio.timeout(_BUILD_SECONDS):
                id = await self._make(build, base)
                async with await self._sandboxes.fleet.connect(id) as box:
                    state = _State(box)
                    for number, step in enumerate(wanted.steps, 1):
                        build.step = number
                        build.log(f"[{number}/{len(wanted.steps)}] {step.type} {shlex.join(step.args or ())}")
                        await state.apply(build, step, self)
                build.step = None
                older = await self._sandboxes.snapshot_named(build.name)
                await self._sandboxes.make_snapshot(id, build.name, state.fields)
                if older is not None:
                    await self._sandboxes.remove(older.id)
            build.status = "ready"
            build.log("the template is ready")
        except TimeoutError:
            self._failed(build, f"not ended within {_BUILD_SECONDS:g} s")
        except Problem as problem:
            self._failed(build, problem.message)
        except HoldfastError as error:
            self._failed(build, problem_of(error).message)
        except asyncio.CancelledError:
            self._failed(build, "the server was stopped")
            raise
        finally:
            if id:
                await asyncio.shield(self._sandboxes.remove(id))

    @staticmethod
    def _failed(build: Build, reason: str) -> None:
        build.status, build.reason = "error", reason
        build.log(reason, "error")

    async def _make(self, build: Build, base: Template | str) -> str:
        fields: dict[str, Any] = {
            "labels": {records.KIND: "build", records.NAMES: build.name},
            "lifetime": 2 * _BUILD_SECONDS,
        }
        if build.wanted.cpu_count is not None:
            fields["cpus"] = float(build.wanted.cpu_count)
        if build.wanted.memory_mb is not None:
            fields["memory"] = build.wanted.memory_mb << 20
        if isinstance(base, str):
            return (await self._sandboxes.fork_of(base, fields)).id
        return (await self._sandboxes.fleet.create(make_template(base, fields))).id


class _State:
    """Variables, directory and user after the steps so far."""

    def __init__(self, box: FleetSandbox) -> None:
        self._box = box
        template = box.ref.record.template
        self._env = dict(template.env)
        self._workdir = template.workdir
        self._user: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of sandboxes from this template."""
        fields: dict[str, Any] = {"env": self._env}
        if self._workdir is not None:
            fields["workdir"] = self._workdir
        if self._user is not None:
            fields["user"] = self._user
        return fields

    async def apply(self, build: Build, step: Step, builds: Builds) -> None:
        args = step.args or ()
        if step.type == "RUN":
            await self._command(build, args[0], args[1] if len(args) > 1 and args[1] else self._user)
        elif step.type == "ENV":
            self._env.update(zip(args[::2], args[1::2], strict=True))
        elif step.type == "WORKDIR":
            self._workdir = os.path.join(self._workdir or "/", args[0])
            await self._command(build, f"mkdir -p {shlex.quote(self._workdir)}", self._user, cwd="/")
        elif step.type == "USER":
            self._user = args[0]
        else:
            await self._copy(build, step, builds)

    async def _command(
        self, build: Build, command: str, user: str | None, cwd: str | None = None, *arguments: str
    ) -> None:
        argv = ["sh", "-c", command, "sh", *arguments]
        done = await self._box.exec(argv, cwd=cwd or self._workdir, env=self._env, user=user, merge_stderr=True)
        for line in done.stdout.splitlines():
            build.log(line)
        if done.exit_code != 0:
            last = done.stdout.strip().splitlines()[-1:] or ["no output"]
            raise invalid(f"exit code {done.exit_code} from {command[:200]!r}: {last[0][:500]}")

    async def _copy(self, build: Build, step: Step, builds: Builds) -> None:
        source, target, *more = step.args or ()
        user, mode = (*more, "", "")[:2]
        tar = builds.uploaded(step.files_hash or "")
        assert tar is not None  # checked at the start
        place = f"/tmp/copy-{secrets.token_hex(8)}"
        await self._box.write_file(f"{place}.tar", tar)
        owner = user or self._user or ""
        script = _COPY.replace("PATTERN", _pattern(source))
        arguments = (place, os.path.join(self._workdir or "/", target), mode, owner)
        await self._command(build, script, None, "/", *arguments)


def _pattern(source: str) -> str:
    """A path with `*`, `?` and `[` for the shell, everything else quoted."""
    parts = re.split(r"([*?\[\]])", source.removeprefix("./") or ".")
    return "".join(part if part in ("*", "?", "[", "]") else shlex.quote(part) for part in parts if part)


def _check_step(step: Step, builds: Builds) -> None:
    args = step.args or ()
    least = {"RUN": 1, "ENV": 0, "WORKDIR": 1, "USER": 1, "COPY": 2}.get(step.type)
    if least is None:
        raise invalid(f"step {step.type[:40]!r}: not one of RUN, COPY, ENV, WORKDIR, USER")
    if len(args) < least or (step.type == "ENV" and len(args) % 2):
        raise invalid(f"step {step.type}: arguments are missing")
    if step.type == "COPY":
        if step.files_hash is None or builds.uploaded(step.files_hash) is None:
            raise invalid(f"step COPY {args[0][:100]!r}: its files were not uploaded")
        if ".." in args[0].split("/") or args[0].startswith("/"):
            raise invalid(f"step COPY {args[0][:100]!r}: not a path below the context")
