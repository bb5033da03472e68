"""A Harbor environment: each trial runs in a sandbox of a fleet.

`harbor run -e holdfast.integrations.harbor:Environment`, with options by `--ek NAME=VALUE`. The task's image is
pulled or built by the engine; the sandbox is a container of it, with the Holdfast server inside. Needs Python 3.12.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import has_agent_environment_definition, should_use_prebuilt_docker_image
from harbor.models.task.config import NetworkMode
from harbor.models.trial.config import ResourceMode

import holdfast
from holdfast.client.command import oom_note
from holdfast.errors import InvalidParams
from holdfast.fleet.fleet import FleetSandbox

#: Engines whose sandboxes are made from images of a registry or a Dockerfile.
_CONTAINERS: Final = ("docker", "podman")
#: Tasks expect bash; small images have only sh.
_SHELL: Final = ("sh", "-c", 'command -v bash >/dev/null && exec bash -c "$1"; exec sh -c "$1"', "harbor")
#: The end of a failed build's output in its error.
BUILD_OUTPUT_CHARACTERS: Final = 2_000


class Environment(BaseEnvironment):
    """One sandbox. `stop(delete=True)` removes it; otherwise it ends by its lifetime, a day by default."""

    def __init__(
        self,
        *args: Any,
        engine: str | None = None,
        template: Mapping[str, Any] | None = None,
        host_system: bool = False,
        **kwargs: Any,
    ) -> None:
        """`template` has fields of `holdfast.Template` that replace those of the task.

        The default engine is `docker`, or `bwrap` for a task without an image. With `host_system` a jail shows the
        system directories of this machine in place of the task's image.
        """
        self._engine = engine
        self._fields = dict(template or {})
        self._host_system = host_system
        self._fleet: holdfast.Fleet | None = None
        self._connected: FleetSandbox | None = None
        self._image_user: str | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "holdfast"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
        )

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True)

    def _validate_definition(self) -> None:
        image = self.task_env_config.docker_image
        defined = has_agent_environment_definition(self.environment_dir, docker_image=image)
        self._engine = self._engine or ("docker" if defined else "bwrap")
        if any(self.environment_dir.glob("docker-compose.y*ml")):
            raise ValueError(f"{self.environment_name}: Docker Compose tasks are not supported")
        if self._engine in _CONTAINERS or {"image", "root"} & self._fields.keys():
            return
        if defined and not self._host_system:
            raise ValueError(
                f"{self.environment_name}: engine {self._engine} makes no images. Give a tar of the image "
                '(template={"image": ...}), a root directory, or host_system=true'
            )

    @property
    def box(self) -> FleetSandbox:
        """The sandbox of a started environment."""
        if self._connected is None:
            raise InvalidParams(f"environment {self.session_id}: not started")
        return self._connected

    # --- lifecycle -----------------------------------------------------------------------------------------------

    async def start(self, force_build: bool) -> None:
        assert self._engine is not None
        fields: dict[str, Any] = {
            "cpus": self._resource_limit_value("cpu", auto_mode=ResourceMode.LIMIT),
            "network": self._network(),
            "labels": {"harbor": self.session_id},
        }
        if (memory := self._resource_limit_value("memory", auto_mode=ResourceMode.LIMIT)) is not None:
            fields["memory"] = f"{memory}MiB"
        if self._engine in _CONTAINERS:
            image = self._fields.get("image") or await self._image(force_build)
            self._image_user = await self._user_of(image)
            # The server is root, so that each command can have a user of its own.
            fields |= {"image": image, "user": "root"}
        self._fleet = holdfast.Fleet(self._engine)
        made = await self._fleet.create(**fields | self._fields)
        self._connected = await self._fleet.connect(made.id)
        if workdir := self.task_env_config.workdir:
            await self.box.make_dir(workdir)
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        box, fleet = self._connected, self._fleet
        self._connected = self._fleet = None
        if box is not None:
            await box.aclose()
        if fleet is not None:
            if delete and box is not None:
                await fleet.remove(box.ref.id)
            await fleet.aclose()

    def _network(self) -> str | list[str]:
        match self.network_policy.network_mode:
            case NetworkMode.NO_NETWORK:
                return "none"
            case NetworkMode.ALLOWLIST:
                return list(self.network_policy.allowed_hosts)
            case _:
                return "host"

    async def _image(self, force_build: bool) -> str:
        """The task's image, or the image that its Dockerfile makes; one is made again only with `force_build`."""
        image = self.task_env_config.docker_image
        if image and should_use_prebuilt_docker_image(
            self.environment_dir, docker_image=image, force_build=force_build
        ):
            return str(image)
        made = f"holdfast-harbor:{self.environment_id}"
        if force_build or (await self._program("image", "inspect", made))[0] != 0:
            timeout = self.task_env_config.build_timeout_sec
            code, output = await self._program("build", "-t", made, str(self.environment_dir), timeout=timeout)
            if code != 0:
                raise SandboxBuildFailedError(f"{self.environment_name}: {output[-BUILD_OUTPUT_CHARACTERS:]}")
        return made

    async def _user_of(self, image: str) -> str | None:
        """The user of commands without one: that of the image, if the image is here already."""
        code, output = await self._program("image", "inspect", image)
        return (json.loads(output)[0].get("Config", {}).get("User") or None) if code == 0 else None

    async def _program(self, *arguments: str, timeout: float = 60.0) -> tuple[int, str]:
        """Run the engine's program on this machine; returns its exit code and its output."""
        assert self._engine is not None
        async with holdfast.connect("inprocess") as host:
            result = await host.exec([self._engine, *arguments], timeout=timeout, start_errors="result")
        return result.exit_code, result.stdout if result.success else result.stderr

    # --- commands ------------------------------------------------------------------------------------------------

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        wanted = self._resolve_user(user)
        options = holdfast.ExecRemoteOptions(
            cwd=cwd or self.task_env_config.workdir,
            env=self._merge_env(env),
            timeout=timeout_sec,
            user=self._image_user if wanted is None else str(wanted),
        )
        emit = self._output_callback()
        process = self.box.exec_remote([*_SHELL, command], options)
        try:
            async for event in process:
                match event:
                    case holdfast.StdoutChunk(data=text) if emit is not None:
                        await emit(text, "stdout")
                    case holdfast.StderrChunk(data=text) if emit is not None:
                        await emit(text, "stderr")
                    case holdfast.Completed() as end:
                        stderr = end.stderr + oom_note(end.oom)
                        return ExecResult(stdout=end.stdout, stderr=stderr, return_code=end.exit_code)
        except holdfast.TimeoutError as error:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from error
        raise RuntimeError(f"{command}: terminated")

    # --- files ---------------------------------------------------------------------------------------------------

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self.box.upload(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self.box.make_dir(target_dir)
        await self.box.upload(source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await asyncio.to_thread(os.makedirs, os.path.dirname(target_path) or ".", exist_ok=True)
        await self.box.download(source_path, target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await asyncio.to_thread(os.makedirs, target_dir, exist_ok=True)
        await self.box.download(source_dir, target_dir)
