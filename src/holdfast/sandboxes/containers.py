"""Containers of Docker and Podman: one that runs (`docker:NAME`), or a new one for the length of a `with` block.

Both engines have the same client commands. Touches the engine through its client program alone.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar, Final, Literal

from holdfast.client.sandbox import RECONNECT_DEADLINE, Sandbox
from holdfast.errors import InvalidParams, SandboxError
from holdfast.sandboxes.bundle import bundle
from holdfast.sandboxes.injection import Injection
from holdfast.sandboxes.outside import run_outside
from holdfast.sandboxes.place import CommandPlace, Signs
from holdfast.sandboxes.reach import open_place

Engine = Literal["docker", "podman"]

#: Where a new container has its server, which is its first process: outside of everything that an image may have.
SERVER_DIRECTORY: Final = "/var/lib/holdfast"
#: On every container that we make, so that those whose maker died can be found: `docker ps --filter label=...`.
LABEL: Final = "holdfast.created"


class Container(CommandPlace):
    """A container that runs, reached through `docker exec` or `podman exec`."""

    gone_signs: ClassVar[Signs] = (
        (re.compile(r"[Nn]o such container|no container with name or ID"), "there is no such container"),
        (re.compile(r"is not running|container state improper"), "the container is not running"),
    )

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        user: str | None = None,
        directory: str | None = None,
        bundle_path: Path | None = None,
    ) -> None:
        if not name or name.startswith("-"):
            raise InvalidParams(f"{engine}:{name}: names no container")
        super().__init__(f"{engine}:{name}", Injection(directory=directory, bundle_path=bundle_path))
        self.engine = engine
        self.name = name
        self.user = user

    def command(self, argv: Sequence[str]) -> list[str]:
        user = [] if self.user is None else ["--user", self.user]
        return [self.engine, "exec", "--interactive", *user, self.name, *argv]

    async def copy_in(self, archive: Path, directory: str) -> bool:
        """`docker cp` makes no directory above the one that it copies to; a tar has them all."""
        import gzip
        import tarfile

        return await _copy(self.engine, self.name, archive, directory, gzip, tarfile)


async def _copy(engine: str, name: str, archive: Path, directory: str, gzip: object, tarfile: object) -> bool:
    raise NotImplementedError


@asynccontextmanager
async def create(
    image: str,
    *,
    engine: Engine = "docker",
    name: str | None = None,
    memory: str | None = None,
    cpus: float | None = None,
    pids: int | None = None,
    network: str = "none",
    user: str | None = None,
    env: Mapping[str, str] | None = None,
    volumes: Mapping[str, str] | None = None,
    workdir: str | None = None,
    read_only: bool = False,
    arguments: Sequence[str] = (),
    reconnect_deadline: float = RECONNECT_DEADLINE,
) -> AsyncIterator[Sandbox]:
    """A new container of `image`, and the sandbox in it; removed at the end, with all that it holds.

    It has no network unless `network` names one. `arguments` are further options of `docker create`.
    """
    yield  # type: ignore[misc]
