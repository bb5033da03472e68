"""Sandboxes that are containers of Docker or Podman, made through the engine's client program.

The record is a label of the container. Labels cannot be changed, so an extension is a volume without content whose
name holds the new expiry. A fork is an image that is committed from the container and removed with the fork.
"""

from __future__ import annotations

import asyncio
import csv
import datetime
import io
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final

import msgspec

from holdfast.errors import InvalidParams, SandboxError, SandboxGone
from holdfast.exec_api import ExecApi
from holdfast.fleet.containers.pulling import pull
from holdfast.fleet.engine import Engine, Progress, make_ref
from holdfast.fleet.record import (
    Record,
    Refs,
    SandboxRef,
    State,
    check_id,
    decode_record,
    encode_record,
    has_ended,
    is_id,
)
from holdfast.fleet.template import Template
from holdfast.sandboxes.containers import FIRST_PROCESS, Container
from holdfast.sandboxes.host_command import Outcome, run_host_command
from holdfast.sandboxes.install.bundle import Bundle, bundle
from holdfast.sandboxes.install.unpacking import keep_tree, unpacked
from holdfast.sandboxes.opening import open_target

#: On every container: its id, the record, and the directory of the server's files inside.
ID_LABEL: Final = "holdfast.sandbox"
RECORD_LABEL: Final = "holdfast.record"
TREE_LABEL: Final = "holdfast.tree"
#: On a volume that extends a lease, and on an image that was committed for a fork.
LEASE_LABEL: Final = "holdfast.lease"
FORK_LABEL: Final = "holdfast.fork"
#: The repository of committed images; the tag is the id of the fork.
FORK_REPOSITORY: Final = "holdfast/fork"
#: `create` commits the image of a fork before its container exists; an image this old has no such maker any more.
FORK_SECONDS: Final = 3_600.0
COMMAND_SECONDS: Final = 120.0
PULL_SECONDS: Final = 1_800.0
#: For a sandbox without an expiry: a time that every file system can store, in the year 2286.
NEVER: Final = 10_000_000_000.0
log = logging.getLogger(__name__)

#: Enough of the engine's output for the `inspect` of a thousand containers.
LISTING_BYTES: Final = 64 * 1024 * 1024
#: Ids of one `inspect`: a command line has its limits.
INSPECT_COUNT: Final = 500

_NO_IMAGE: Final = re.compile(
    r"[Nn]o such image|image not known|Unable to find image|does not exist locally|unable to find"
)
_NO_SOURCE: Final = re.compile(r"bind source path does not exist|no such file or directory|permission denied", re.I)
_NO_WORKDIR: Final = re.compile(r"workdir .* does not exist on container")
_NO_QUOTA: Final = re.compile(r"quota|storage.opt|size option", re.I)
_NO_CONTAINER: Final = re.compile(r"[Nn]o such (container|object)|no container with|no such object", re.I)
_NOT_FROZEN: Final = re.compile(r"unable to freeze")
#: More attempts to pause a container after one that failed. With cgroup v1 the runtime gives up if processes fork
#: faster than they are frozen, which a later attempt may not meet.
_MORE_PAUSES: Final = 4
_STATES: Final[dict[str, State]] = {
    "created": "creating",
    "initialized": "creating",
    "running": "running",
    "paused": "paused",
}


class ContainerEngine(Engine):
    """Docker, or an engine whose client takes the same commands."""

    fields: ClassVar = frozenset(
        {"image", "cpus", "memory", "disk", "processes", "network", "env", "user", "workdir", "mounts"}
    )
    #: `pull`: "missing" (default), "always" or "never"; `read_only`: the image cannot be written, /tmp and /run are
    #: memory; `server_as_root`: the server runs as root and commands as the template's user, or that of the image,
    #: so that a call may name any user; `arguments`: further options of `docker run`.
    options: ClassVar = frozenset({"pull", "read_only", "server_as_root", "arguments"})

    #: Options of `commit` that stop the container's processes meanwhile; Docker does so by default.
    _pause_at_commit: ClassVar[tuple[str, ...]] = ()
    #: The working directory of the client program; None: that of this process.
    _cwd: ClassVar[str | None] = None

    def __init__(self, *, program: str | None = None) -> None:
        self.program = program or self.name

    def is_installed(self) -> bool:
        return shutil.which(self.program) is not None

    async def check(self, template: Template) -> None:
        await super().check(template)
        if template.image is None:
            self.refuse("image", "a container is made of an image; name one")
        if template.options.get("pull", "missing") not in ("missing", "always", "never"):
            self.refuse("options", "pull: one of missing, always, never")
        if not isinstance(template.options.get("arguments", ()), list | tuple):
            self.refuse("options", "arguments: a list of options of `run`")

    async def create(self, template: Template, record: Record, progress: Progress | None = None) -> SandboxRef:
        image = template.image
        assert image is not None
        if template.options.get("pull") == "always":
            await self._pull(image, progress)
        if template.options.get("server_as_root") and template.user is None:
            template = msgspec.structs.replace(template, user=await self._image_user(image, template, progress))
            record = msgspec.structs.replace(record, template=msgspec.structs.replace(template, files={}, setup=()))
        try:
            return await self._create(template, record, image)
        except _ImageMissing as missing:
            if template.options.get("pull") == "never":
                raise SandboxError(f"{self.name}: image {image}: {missing}") from None
        await self._pull(image, progress)
        return await self._create(template, record, image)

    async def _image_user(self, image: str, template: Template, progress: Progress | None) -> str | None:
        """The user of an image, which is pulled if it is missing; None for root."""
        argv = [self.program, "image", "inspect", "--format", "{{.Config.User}}", image]
        done = await run_host_command(argv, seconds=COMMAND_SECONDS)
        if done.exit_code != 0 and template.options.get("pull") != "never":
            await self._pull(image, progress)
            done = await run_host_command(argv, seconds=COMMAND_SECONDS)
        return done.stdout.strip().partition(":")[0] or None

    async def _create(self, template: Template, record: Record, image: str) -> SandboxRef:
        chosen = await bundle()
        try:
            async with unpacked(chosen) as tree:
                keep_tree(chosen.name, record.expires_at or NEVER)
                mount = ["--mount", _bind(str(tree), f"/{chosen.name}", writable=False)]
                done = await self._attempt(["run", "--detach", *mount], template, record, chosen, image)
                if done.exit_code != 0 and _NO_WORKDIR.search(done.stderr):
                    await self._remove_container(record.id)
                    bare = msgspec.structs.replace(template, workdir=None)
                    done = await self._attempt(["run", "--detach", *mount], bare, record, chosen, image)
                    if done.exit_code == 0:
                        await self._make_workdir(template, record, chosen)
                if done.exit_code != 0:
                    await self._discard(record.id)
                    if not _NO_SOURCE.search(done.stderr):
                        raise self._explain(done, template, image)
                    # The engine does not see our files: it is on another machine, or runs as another user.
                    if template.options.get("read_only"):
                        self.refuse("options", "read_only: the engine cannot mount the server's files from here")
                    done = await self._attempt(["create"], template, record, chosen, image)
                    if done.exit_code != 0:
                        raise self._explain(done, template, image)
                    await self._run(["cp", str(tree), f"{record.id}:/"])
                    await self._run(["start", record.id])
        except BaseException:
            await asyncio.shield(self._discard(record.id))
            raise
        address = f"{self.name}:{record.id}"
        return make_ref(self.name, address, record, "running", expires_at=record.expires_at)

    async def _attempt(
        self, verb: Sequence[str], template: Template, record: Record, chosen: Bundle, image: str
    ) -> Outcome:
        loader, *rest = chosen.interpreter(f"/{chosen.name}")
        return await run_host_command(
            [
                *(self.program, *verb, "--pull", "never", "--name", record.id),
                *("--label", f"{ID_LABEL}={record.id}"),
                *("--label", f"{RECORD_LABEL}={encode_record(record)}"),
                *("--label", f"{TREE_LABEL}=/{chosen.name}"),
                *self._options(template),
                *("--entrypoint", loader, image, *rest, "-m", FIRST_PROCESS),
            ],
            seconds=COMMAND_SECONDS,
            cwd=self._cwd,
        )

    async def _make_workdir(self, template: Template, record: Record, chosen: Bundle) -> None:
        """Make the directory of commands where the image has none, as Docker does; Podman refuses the container."""
        make = ["-c", "import os, sys; os.makedirs(sys.argv[1])", str(template.workdir)]
        await self._run(["exec", "--user", "0", record.id, *chosen.interpreter(f"/{chosen.name}"), *make])

    def _options(self, template: Template) -> list[str]:
        """The options of `run` that stand for the fields of a template."""
        network = "host" if template.network == "host" else "none"
        options = ["--network", network]
        if template.memory is not None:
            # Without the second the engine adds as much swap.
            options += ["--memory", str(template.memory), "--memory-swap", str(template.memory)]
        for flag, value in (
            ("--cpus", template.cpus),
            ("--pids-limit", template.processes),
            ("--user", "0" if template.options.get("server_as_root") else template.user),
            ("--workdir", template.workdir),
        ):
            options += [] if value is None else [flag, str(value)]
        if template.disk is not None:
            options += ["--storage-opt", f"size={template.disk}"]
        for name, text in template.env.items():
            options += ["--env", f"{name}={text}"]
        for name, text in template.labels.items():
            options += ["--label", f"{name}={text}"]
        for mount in template.mounts:
            options += ["--mount", _bind(mount.source, mount.target, writable=mount.writable)]
        if template.options.get("read_only"):
            options += ["--read-only", "--tmpfs", "/tmp", "--tmpfs", "/run"]
        return [*options, *map(str, template.options.get("arguments", ()))]

    def _explain(self, done: Outcome, template: Template, image: str) -> Exception:
        if _NO_IMAGE.search(done.stderr):
            return _ImageMissing(done.summary)
        if template.disk is not None and _NO_QUOTA.search(done.stderr):
            return InvalidParams(f"engine {self.name}: disk: {done.summary}")
        for mount in template.mounts:
            if mount.source in done.stderr:
                return InvalidParams(f"engine {self.name}: mounts: {mount.source}: {done.summary}")
        return SandboxError(f"{self.name}: image {image}: {done.summary}")

    async def _pull(self, image: str, progress: Progress | None) -> None:
        if progress is None:
            done = await run_host_command([self.program, "pull", "--quiet", image], seconds=PULL_SECONDS)
        else:
            progress(f"pulling {image}", None)
            done = await pull([self.program, "pull", image], f"pulling {image}", progress, seconds=PULL_SECONDS)
        if done.exit_code != 0:
            raise SandboxError(f"{self.name}: image {image}: {done.summary}")

    # --- finding -----------------------------------------------------------------------------------------------

    async def list(self) -> Refs:
        listing = await self._run(["ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={ID_LABEL}"])
        found, leases = await asyncio.gather(self._inspect(listing.split()), self._leases())
        refs = (self._ref(each, leases) for each in found)
        return sorted((ref for ref in refs if ref is not None), key=lambda ref: ref.created_at)

    async def get(self, id: str) -> SandboxRef:
        found, leases = await asyncio.gather(self._inspect([check_id(id)]), self._leases())
        refs = [ref for each in found if (ref := self._ref(each, leases)) is not None]
        if not refs:
            raise SandboxGone(f"{self.name}:{id}: there is no such sandbox", final=True)
        return refs[0]

    async def _inspect(self, ids: Sequence[str]) -> Sequence[dict[str, Any]]:
        """The engine's descriptions of these containers, without those that no longer exist."""
        found: list[dict[str, Any]] = []
        for start in range(0, len(ids), INSPECT_COUNT):
            argv = [self.program, "container", "inspect", *ids[start : start + INSPECT_COUNT]]
            done = await run_host_command(argv, seconds=COMMAND_SECONDS, kept_bytes=LISTING_BYTES)
            if done.exit_code != 0 and not _NO_CONTAINER.search(done.stderr):
                raise SandboxError(f"{self.name} inspect: {done.summary}")
            found += json.loads(done.stdout or "[]")
        return found

    def _ref(self, container: dict[str, Any], leases: dict[str, float | None]) -> SandboxRef | None:
        labels = container["Config"].get("Labels") or {}
        record = decode_record(labels.get(RECORD_LABEL, ""))
        # An image that was committed by hand passes our labels on to containers that are not ours.
        if record is None or container["Name"].removeprefix("/") != record.id:
            return None
        state = _STATES.get(container["State"]["Status"], "ended")
        # The lease is the later decision, and may be a shorter life.
        expires_at = leases.get(record.id, record.expires_at)
        return make_ref(self.name, f"{self.name}:{record.id}", record, state, expires_at=expires_at)

    async def open(self, ref: SandboxRef, *, reconnect_deadline: float) -> ExecApi:
        target = Container(self.name, ref.id)  # type: ignore[arg-type]
        target.program = self.program
        target.installation.copied_to("")
        return await open_target(target, reconnect_deadline=reconnect_deadline)

    # --- leases ------------------------------------------------------------------------------------------------

    async def extend(self, id: str, expires_at: float | None) -> None:
        found = await self._inspect([check_id(id)])
        if not found:
            raise SandboxGone(f"{self.name}:{id}: there is no such sandbox", final=True)
        tree = (found[0]["Config"].get("Labels") or {}).get(TREE_LABEL, "")
        keep_tree(tree.removeprefix("/"), expires_at or NEVER)
        until = "never" if expires_at is None else str(int(expires_at) + 1)
        name = f"{id}-until-{until}"
        await self._run(["volume", "create", "--label", f"{LEASE_LABEL}={id}", name])
        older = [volume for volume in await self._lease_volumes() if volume.startswith(id) and volume != name]
        await self._remove_volumes(older)

    async def _leases(self) -> dict[str, float | None]:
        """The latest extension of each sandbox that has one."""
        leases: dict[str, float | None] = {}
        for name in await self._lease_volumes():
            id, _, until = name.partition("-until-")
            if not is_id(id) or not (until == "never" or until.isdecimal()):
                continue
            if until == "never":
                leases[id] = None
            elif id not in leases:
                leases[id] = float(until)
            elif (latest := leases[id]) is not None:
                leases[id] = max(latest, float(until))
        return leases

    async def _lease_volumes(self) -> Sequence[str]:
        return (await self._run(["volume", "ls", "--quiet", "--filter", f"label={LEASE_LABEL}"])).split()

    async def _remove_volumes(self, names: Iterable[str]) -> None:
        if names := list(names):
            await run_host_command([self.program, "volume", "rm", "--force", *names], seconds=COMMAND_SECONDS)

    # --- the rest of a life ------------------------------------------------------------------------------------

    async def pause(self, id: str) -> None:
        await self._run_paused(["pause", check_id(id)])

    async def resume(self, id: str) -> None:
        await self._run(["unpause", check_id(id)])

    async def fork(self, ref: SandboxRef, record: Record) -> SandboxRef:
        image = f"{FORK_REPOSITORY}:{record.id}"
        try:
            # A paused container stays so; its engine would refuse to pause it a second time.
            pause = () if ref.state == "paused" else self._pause_at_commit
            await self._run_paused(["commit", *pause, "--change", f"LABEL {FORK_LABEL}={record.id}", ref.id, image])
            return await self._create(record.template, record, image)
        except BaseException:
            await asyncio.shield(self.remove(record.id))
            raise

    async def remove(self, id: str) -> None:
        await self._remove_container(check_id(id))
        await run_host_command(
            [self.program, "image", "rm", "--force", f"{FORK_REPOSITORY}:{id}"], seconds=COMMAND_SECONDS
        )
        await self._remove_volumes([name for name in await self._lease_volumes() if name.startswith(id)])

    async def _discard(self, id: str) -> None:
        """Remove what a failed start left. The error of the start stays the one that the caller gets."""
        try:
            await self._remove_container(id)
        except SandboxError as error:
            log.info("%s", error)

    async def _remove_container(self, id: str) -> None:
        done = await run_host_command([self.program, "rm", "--force", "--volumes", id], seconds=COMMAND_SECONDS)
        if done.exit_code != 0 and not _NO_CONTAINER.search(done.stderr):
            raise SandboxError(f"{self.name} rm {id}: {done.summary}")

    async def sweep(self) -> int:
        """Remove lease volumes and fork images whose container is gone."""
        volumes, listing = await asyncio.gather(
            self._lease_volumes(),
            self._run(["image", "ls", "--quiet", "--no-trunc", "--filter", f"label={FORK_LABEL}"]),
        )
        images = await self._fork_images(listing.split())
        if not volumes and not images:
            return 0
        present = {ref.id for ref in await self.list()}
        left = [name for name in volumes if name.partition("-until-")[0] not in present]
        await self._remove_volumes(left)
        old = [tag for tag in images if tag.rpartition(":")[2] not in present]
        for tag in old:
            await run_host_command([self.program, "image", "rm", "--force", tag], seconds=COMMAND_SECONDS)
        return len(left) + len(old)

    async def _fork_images(self, ids: Sequence[str]) -> Sequence[str]:
        """Tags of committed images that are old enough to have lost their maker."""
        if not ids:
            return []
        done = await run_host_command(
            [self.program, "image", "inspect", *ids], seconds=COMMAND_SECONDS, kept_bytes=LISTING_BYTES
        )
        tags: list[str] = []
        for image in json.loads(done.stdout or "[]"):
            record = decode_record(((image.get("Config") or {}).get("Labels") or {}).get(RECORD_LABEL, ""))
            created = datetime.datetime.fromisoformat(re.sub(r"\.\d+", "", image["Created"]).replace("Z", "+00:00"))
            if time.time() - created.timestamp() > FORK_SECONDS or (record is not None and has_ended(record.owner)):
                tags += [tag for tag in image.get("RepoTags") or () if f"{FORK_REPOSITORY}:" in tag]
        return tags

    async def _run_paused(self, arguments: Sequence[str]) -> None:
        """Run a command that pauses a container, again if the kernel could not freeze processes that fork."""
        for _ in range(_MORE_PAUSES):
            try:
                await self._run(arguments)
            except SandboxError as error:
                if not _NOT_FROZEN.search(error.message):
                    raise
            else:
                return
        await self._run(arguments)

    async def _run(self, arguments: Sequence[str]) -> str:
        done = await run_host_command(
            [self.program, *arguments], seconds=COMMAND_SECONDS, cwd=self._cwd, kept_bytes=LISTING_BYTES
        )
        if done.exit_code == 0:
            return done.stdout
        if _NO_CONTAINER.search(done.stderr):
            raise SandboxGone(f"{self.name}: {done.summary}", final=True)
        raise SandboxError(f"{self.name} {arguments[0]}: {done.summary}")


class DockerEngine(ContainerEngine):
    name: ClassVar[str] = "docker"


class PodmanEngine(ContainerEngine):
    name: ClassVar[str] = "podman"
    _pause_at_commit: ClassVar = ("--pause",)
    # conmon inherits the directory, and makes a file `oom` in it when a process of the container is killed for
    # memory. In /proc no file can be made.
    _cwd: ClassVar = "/proc" if os.path.isdir("/proc") else None


class _ImageMissing(SandboxError):
    """The engine does not have the image yet."""


def _bind(source: str, target: str, *, writable: bool) -> str:
    """The value of `--mount`, a line of CSV: a path may have commas in it."""
    fields = ["type=bind", f"src={source}", f"dst={target}", *([] if writable else ["readonly"])]
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()
