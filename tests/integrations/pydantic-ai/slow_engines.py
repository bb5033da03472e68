"""The conformance suite over containers of Docker and Podman, each as a user without privileges."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

import holdfast
from holdfast.integrations.pydantic_ai import Workspace
from tests.support.engines import ContainerEngine, Missing, debian_root, docker_engine, podman_engine

IMAGE = "holdfast-test-pydantic"
ENGINES = {"docker": docker_engine, "podman": podman_engine}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerEngine]:
    root = tmp_path_factory.mktemp("root")
    root.chmod(0o755)  # it is the root directory of a user without privileges
    try:
        with ENGINES[request.param]() as engine:
            engine.image(debian_root(root), IMAGE)
            yield engine
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
async def box(engine: ContainerEngine, anyio_backend: str) -> AsyncIterator[holdfast.Sandbox]:
    async with holdfast.create(engine.program, image=IMAGE, user="65534", workdir="/tmp") as box:
        yield box


class TestConformance(WorkspaceBackendSuite):
    @pytest.fixture
    def backend(self, box: holdfast.Sandbox) -> Workspace:
        return Workspace(box)
