"""A pydantic-ai workspace: the commands and files of an agent run are those of a sandbox.

A workspace is made from a sandbox, from an engine, whose sandbox is made by the first operation, or from the
reference of such a sandbox. It removes no sandbox by itself, as the framework's contract demands: a reference in a
message history continues to work.
"""

from __future__ import annotations

import asyncio
import math
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self

from pydantic_ai.workspaces import (
    CommandResult,
    FileEntry,
    WorkspaceOutputLimitError,
    WorkspaceRef,
    WorkspaceTimeoutError,
    WorkspaceUnavailableError,
)

import holdfast
from holdfast.client.command import OUTPUT_LIMIT_BYTES, oom_note
from holdfast.errors import ConnectionLost, InvalidParams, SandboxGone, ShuttingDown
from holdfast.fleet.engine import Engine
from holdfast.fleet.fleet import FleetSandbox

PROVIDER: Final = "holdfast"


class Workspace:
    """`Agent(...).run(..., workspace=Workspace(box))`: implements commands, files and `realpath` natively."""

    def __init__(
        self,
        source: holdfast.Sandbox | Engine | str | WorkspaceRef,
        template: holdfast.Template | None = None,
        **fields: Any,
    ) -> None:
        """`source` is a sandbox that the caller owns, an engine, or the reference of a workspace.

        The first operation makes the sandbox of an engine, from `template` and its `fields`. The sandbox lives for
        its `lifetime`, or until `destroy`.
        """
        self._source = source
        self._template = template
        self._fields = fields
        self._fleet: holdfast.Fleet | None = None
        self._opening: asyncio.Task[holdfast.Sandbox] | None = None
        self._ref = source if isinstance(source, WorkspaceRef) else None
        if isinstance(source, holdfast.Sandbox | WorkspaceRef) and (template is not None or fields):
            raise InvalidParams("template: the sandbox exists already; give an engine to make one")
        if isinstance(source, WorkspaceRef):
            _split(source)
        if isinstance(source, holdfast.Sandbox):
            # The reference of another connection is only a name: nothing can be attached by it.
            ref = source.ref if isinstance(source, FleetSandbox) else None
            self._ref = (
                _workspace_ref(ref) if ref else WorkspaceRef(provider=PROVIDER, id=f"connection:{id(source)}")
            )

    @property
    def ref(self) -> WorkspaceRef | None:
        return self._ref

    async def _box(self) -> holdfast.Sandbox:
        """The connected sandbox; the first call makes it or connects to it."""
        if isinstance(self._source, holdfast.Sandbox):
            return self._source
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.create_task(self._open())
        # A cancelled caller does not end the task: the sandbox would exist without a reference.
        return await asyncio.shield(self._opening)

    async def _open(self) -> holdfast.Sandbox:
        assert not isinstance(self._source, holdfast.Sandbox)
        if self._ref is not None:
            engine, id = _split(self._ref)
            self._fleet = self._fleet or holdfast.Fleet(engine)
        else:
            assert not isinstance(self._source, WorkspaceRef)
            self._fleet = self._fleet or holdfast.Fleet(self._source)
            made = await self._fleet.create(self._template, **self._fields)
            id, self._ref = made.id, _workspace_ref(made)
        return await self._fleet.connect(id)

    async def aclose(self) -> None:
        """Close the connection that this object opened. The sandbox stays."""
        if self._opening is not None and not self._opening.cancelled() and self._opening.exception() is None:
            await self._opening.result().aclose()
        if self._fleet is not None:
            await self._fleet.aclose()
        self._opening = self._fleet = None

    async def destroy(self) -> None:
        """Remove the sandbox that `ref` names, and close the connection."""
        if isinstance(self._source, holdfast.Sandbox):
            raise InvalidParams("destroy: the caller owns this sandbox")
        if self._ref is not None:
            engine, id = _split(self._ref)
            async with holdfast.Fleet(engine) as fleet:
                await fleet.remove(id)
        await self.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- commands ------------------------------------------------------------------------------------------------

    async def working_dir(self) -> str:
        with _availability():
            return await (await self._box()).real_path(".", strict=True)

    async def run(
        self,
        command: str | Sequence[str],
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        if isinstance(command, str) != shell:
            raise TypeError("a string needs shell=True, and a sequence of arguments shell=False")
        if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
            raise ValueError(f"timeout: {timeout!r} is not a positive number")
        argv = ["sh", "-c", command] if isinstance(command, str) else command
        try:
            with _availability():
                result = await (await self._box()).exec(argv, env=env, timeout=timeout, start_errors="result")
        except holdfast.TimeoutError as error:
            raise WorkspaceTimeoutError(str(error), stdout=error.stdout, stderr=error.stderr) from error
        if result.truncated:
            raise WorkspaceOutputLimitError(
                f"the command printed more than {OUTPUT_LIMIT_BYTES} bytes; redirect its output to a file",
                limit=OUTPUT_LIMIT_BYTES,
                stdout=result.stdout,
                stderr=result.stderr,
            )
        stderr = result.stderr + oom_note(result.oom)
        return CommandResult(exit_code=result.exit_code, stdout=result.stdout, stderr=stderr)

    # --- files ---------------------------------------------------------------------------------------------------

    async def read_bytes(self, path: str) -> bytes:
        with _availability():
            return await (await self._box()).read_file(path)

    async def write_bytes(self, path: str, data: bytes) -> None:
        with _availability():
            await (await self._box()).write_file(path, data)

    async def stat(self, path: str) -> FileEntry:
        with _availability():
            return _entry(path, await (await self._box()).stat(path))

    async def list_dir(self, path: str) -> Sequence[FileEntry]:
        with _availability():
            box = await self._box()
            entries = []
            for each in await box.list_dir(path):
                place, info = posixpath.join(path, each.name), each
                entries.append(_entry(place, await _target(box, place) if each.type == "symlink" else info))
            return entries

    async def make_dir(self, path: str) -> None:
        with _availability():
            await (await self._box()).make_dir(path)

    async def remove(self, path: str) -> None:
        with _availability():
            box = await self._box()
            directory = await box.real_path(posixpath.dirname(path))
            target = posixpath.normpath(posixpath.join(directory, posixpath.basename(path)))
            root = await box.real_path(".", strict=True)
            if f"{root}/".startswith(f"{target.rstrip('/')}/"):
                raise ValueError(f"{path}: the working directory and those above it cannot be removed")
            await box.remove(path, recursive=True)

    async def exists(self, path: str) -> bool:
        with _availability():
            return await (await self._box()).exists(path)

    async def realpath(self, path: str) -> str:
        with _availability():
            return await (await self._box()).real_path(path)


@contextmanager
def _availability() -> Iterator[None]:
    """Report a sandbox that has ended in the framework's terms; other errors are Python's own already."""
    try:
        yield
    except (SandboxGone, ConnectionLost, ShuttingDown) as error:
        raise WorkspaceUnavailableError(str(error)) from error


def _workspace_ref(ref: holdfast.SandboxRef) -> WorkspaceRef:
    return WorkspaceRef(provider=PROVIDER, id=f"{ref.engine}:{ref.id}")


def _split(ref: WorkspaceRef) -> tuple[str, str]:
    """The engine and the id of a sandbox."""
    engine, separator, id = ref.id.partition(":")
    if ref.provider != PROVIDER or not separator or engine == "connection":
        raise WorkspaceUnavailableError(f"{ref}: not the reference of a sandbox of an engine of Holdfast")
    return engine, id


async def _target(box: holdfast.Sandbox, link: str) -> holdfast.FileInfo | None:
    """The file that a symbolic link leads to; None for a dangling link or a loop."""
    try:
        return await box.stat(link)
    except OSError:
        return None


def _entry(path: str, info: holdfast.FileInfo | holdfast.DirEntry | None) -> FileEntry:
    is_dir = info is not None and info.type == "directory"
    return FileEntry(
        name=posixpath.basename(posixpath.normpath(path)),
        path=path,
        is_dir=is_dir,
        size=None if info is None or is_dir else info.size,
    )
