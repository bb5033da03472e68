"""Containers of Docker and Podman: one that runs (`docker:NAME`), or a new one for the length of a `with` block.

Both engines have the same client commands. Channels to containers of Docker go through the engine's API where its
Unix socket is known (`sandboxes/docker_api/`), everything else through the client program.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from holdfast.client.opening import RECONNECT_DEADLINE
from holdfast.client.sandbox import Sandbox
from holdfast.errors import ConnectionLost, InvalidParams, SandboxError
from holdfast.sandboxes.docker_api.endpoint import EngineSocket, engine_socket
from holdfast.sandboxes.host_command import run_host_command
from holdfast.sandboxes.install.bundle import bundle
from holdfast.sandboxes.install.installation import TREE_REQUEST, BundleChoice, Installation
from holdfast.sandboxes.install.unpacking import unpacked
from holdfast.sandboxes.opening import open_target
from holdfast.sandboxes.target import CommandTarget, Signs
from holdfast.transport.channel import Channel, Receiver
from holdfast.transport.preamble import Reply

Engine = Literal["docker", "podman"]
Via = Literal["api", "client"]

#: On every container that `create` makes, to find containers after their creator was killed:
#: `docker ps --all --filter label=holdfast.created`.
LABEL: Final = "holdfast.created"
#: The limit for creating a container: its image may have to be pulled.
CREATE_SECONDS: Final = 600.0
#: The module of the bundle that is the first process of a container: it starts the server and reaps orphans.
FIRST_PROCESS: Final = "holdfast.fleet.containers.first_process"


class Container(CommandTarget):
    """A container that runs, reached through the API of Docker's engine, `docker exec` or `podman exec`.

    `via` is `api` or `client`; by default the API, if the `docker` client would use a Unix socket.
    """

    gone_signs: ClassVar[Signs] = (
        (re.compile(r"[Nn]o such container|no container with name or ID"), "there is no such container"),
        (re.compile(r"is not running|container state improper"), "the container does not run"),
        (re.compile(r"unable to find user|no matching entries in passwd"), "there is no such user"),
    )

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        user: str | None = None,
        directory: str | None = None,
        bundle: BundleChoice = True,
        via: Via | None = None,
    ) -> None:
        if not name or name.startswith("-"):
            raise InvalidParams(f"{engine}:{name}: names no container")
        super().__init__(f"{engine}:{name}", Installation(directory=directory, bundle=bundle))
        self.engine = engine
        self.program: str = engine
        self.name = name
        self.user = user
        if via not in (None, "api", "client"):
            raise InvalidParams(f"{self.address}: via={via}: api or client")
        self.via = via
        if via == "api" and (reason := self._api().reason):
            raise InvalidParams(f"{self.address}: via=api: {reason}")

    @classmethod
    def from_address(cls, scheme: str, rest: str, **options: Any) -> Self:
        return cls("podman" if scheme == "podman" else "docker", rest, **options)

    @property
    def is_near(self) -> bool:
        """Whether the engine is on this machine, as far as the environment shows; a context may name another."""
        hosts = (os.environ.get(name, "unix:") for name in ("DOCKER_HOST", "CONTAINER_HOST"))
        return all(host.startswith("unix:") for host in hosts)

    def command(self, argv: Sequence[str]) -> list[str]:
        user = [] if self.user is None else ["--user", self.user]
        return [self.program, "exec", "--interactive", *user, self.name, *argv]

    def _api(self) -> EngineSocket:
        """The engine's socket at this moment, or why there is none for this container."""
        if self.engine != "docker":
            return EngineSocket(reason=f"{self.engine} has another API than Docker's engine")
        if self.via is None and self.program != self.engine:
            return EngineSocket(reason=f"another client program is used: {self.program}")
        return engine_socket()

    async def start_channel(
        self, argv: Sequence[str], receiver: Receiver, report: bytes | None, reply: Reply | None = None
    ) -> Channel:
        api = EngineSocket(reason="via=client") if self.via == "client" else self._api()
        if self.via == "api" and api.reason:
            raise SandboxError(f"{self.address}: via=api: {api.reason}")
        if api.reason:
            return await super().start_channel(argv, receiver, report, reply)
        from holdfast.sandboxes.docker_api.api import EngineError
        from holdfast.sandboxes.docker_api.exec_channel import dial

        try:
            return await dial(
                api.path,
                self.name,
                argv,
                receiver,
                user=self.user,
                name=self.address,
                explain=self.channel_ended,
                report=report,
                request=TREE_REQUEST,
                reply=reply,
            )
        except EngineError as error:
            lost = ConnectionLost(f"{self.address}: {error}", exit_code=1, words=str(error))
            raise self.channel_ended(lost) from error

    async def copy_in(self, tree: Path, directory: str) -> bool:
        done = await run_host_command([self.program, "cp", str(tree), f"{self.name}:{directory}"])
        if done.exit_code != 0:
            raise self.explain(done.stderr) or SandboxError(f"{self.address}: the copy failed: {done.summary}")
        return True


@asynccontextmanager
async def create(
    image: str,
    *,
    engine: Engine = "docker",
    name: str | None = None,
    network: str = "none",
    memory: str | None = None,
    cpus: float | None = None,
    pids: int | None = None,
    user: str | None = None,
    env: Mapping[str, str] | None = None,
    volumes: Mapping[str, str] | None = None,
    workdir: str | None = None,
    read_only: bool = False,
    arguments: Sequence[str] = (),
    reconnect_deadline: float = RECONNECT_DEADLINE,
) -> AsyncIterator[Sandbox]:
    """Make a container of `image`, for the length of a `with` block, and connect to it as a sandbox.

    The container has no network unless `network` names one. `memory` is as engines write it ("512m"), `volumes` are
    paths here and inside; with `read_only` the image cannot be written, and /tmp and /run are memory. `arguments`
    are further options of `docker create`. The image needs neither a shell nor Python.

    Deprecated: `holdfast.create` also removes the container if this process is killed.
    """
    if not image or image.startswith("-"):
        raise InvalidParams(f"image {image!r}: names no image")
    chosen = await bundle()
    container = name or f"holdfast-{secrets.token_hex(6)}"
    options: list[str] = ["--name", container, "--label", LABEL, "--network", network]
    for flag, value in (("--memory", memory), ("--cpus", cpus), ("--pids-limit", pids), ("--user", user)):
        options += [] if value is None else [flag, str(value)]
    options += [] if workdir is None else ["--workdir", workdir]
    for variable, text in (env or {}).items():
        options += ["--env", f"{variable}={text}"]
    for here, inside in (volumes or {}).items():
        options += ["--volume", f"{here}:{inside}"]
    loader, *rest = chosen.interpreter(f"/{chosen.name}")
    first = [*rest, "-m", FIRST_PROCESS]
    async with AsyncExitStack() as stack:
        tree = await stack.enter_async_context(unpacked(chosen))
        if read_only:
            # The engine cannot copy into a read-only container: mount the tree instead.
            options += ["--read-only", "--tmpfs", "/tmp", "--tmpfs", "/run"]
            options += ["--volume", f"{tree}:/{chosen.name}:ro"]
        await _engine(engine, ["create", *options, *arguments, "--entrypoint", loader, image, *first])
        stack.push_async_callback(_engine, engine, ["rm", "--force", "--volumes", container])
        if not read_only:
            await _engine(engine, ["cp", str(tree), f"{container}:/"])
        await _engine(engine, ["start", container])
        target = Container(engine, container, user=user)
        target.installation.copied_to("")
        box = Sandbox(await open_target(target, reconnect_deadline=reconnect_deadline))
        stack.push_async_callback(box.aclose)
        yield box


async def _engine(engine: Engine, arguments: Sequence[str]) -> None:
    done = await run_host_command([engine, *arguments], seconds=CREATE_SECONDS)
    if done.exit_code != 0:
        raise SandboxError(f"{engine} {arguments[0]}: {done.summary}")
