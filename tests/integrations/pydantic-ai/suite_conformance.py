"""pydantic-ai's conformance suite for workspaces, unmodified, over a jail. No rule is skipped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from pydantic_ai.workspaces import WorkspaceRef
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

import holdfast
from holdfast.integrations.pydantic_ai import Workspace

# The rule about permissions needs another user than root.
FIELDS = {"user": "nobody", "workdir": "/tmp"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class TestConformance(WorkspaceBackendSuite):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[Workspace]:
        async with holdfast.create("bwrap", **FIELDS) as box:
            yield Workspace(box)

    @pytest.fixture
    async def made(self) -> AsyncIterator[list[Workspace]]:
        workspaces: list[Workspace] = []
        yield workspaces
        for workspace in workspaces:
            await workspace.destroy()

    @pytest.fixture
    def fresh_backend(self, made: list[Workspace]) -> Callable[[], Workspace]:
        def fresh() -> Workspace:
            made.append(Workspace("bwrap", **FIELDS))
            return made[-1]

        return fresh

    @pytest.fixture
    def attach_backend(self, made: list[Workspace]) -> Callable[[WorkspaceRef], Workspace]:
        def attach(ref: WorkspaceRef) -> Workspace:
            made.append(Workspace(ref))
            return made[-1]

        return attach

    @pytest.fixture
    def destroy_environment(self) -> Callable[[Workspace], Awaitable[None]]:
        async def destroy(workspace: Workspace) -> None:
            assert workspace.ref is not None
            engine, _, id = workspace.ref.id.partition(":")
            async with holdfast.Fleet(engine) as fleet:
                await fleet.remove(id)

        return destroy
