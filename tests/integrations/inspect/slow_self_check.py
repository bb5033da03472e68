"""Inspect's own checks of a sandbox provider, unmodified, in containers of Docker and Podman."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from holdfast.integrations.inspect_ai import Config, HoldfastSandbox
from tests.support.engines import Missing, docker_engine, podman_engine
from tests.support.inspect_root import inspect_root

pytestmark = pytest.mark.asyncio(loop_scope="module")
IMAGE = "hf-inspect"
#: An unprivileged user by the configuration, and one of the image.
CONFIGS = {
    "docker-root": Config(engine="docker", image=IMAGE, options={"pull": "never"}),
    "docker-nobody": Config(engine="docker", image=IMAGE, user="nobody", workdir="/tmp", options={"pull": "never"}),
    "docker-image-user": Config(engine="docker", image=f"{IMAGE}-user", options={"pull": "never"}),
    "podman-root": Config(engine="podman", image=IMAGE, options={"pull": "never"}),
    "podman-nobody": Config(engine="podman", image=IMAGE, user="nobody", workdir="/tmp", options={"pull": "never"}),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    root = inspect_root(tmp_path_factory.mktemp("image") / "root")
    try:
        with docker_engine() as docker, podman_engine() as podman:
            docker.image(root, IMAGE)
            podman.image(root, IMAGE)
            container = docker.container(IMAGE)
            docker("commit", "--change", "USER nobody", "--change", "WORKDIR /tmp", container, f"{IMAGE}-user")
            docker.remove(container)
            yield
    except Missing as missing:
        pytest.skip(str(missing))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=CONFIGS)
async def made(request: pytest.FixtureRequest, engines: None) -> AsyncIterator[SandboxEnvironment]:
    config = CONFIGS[request.param]
    await HoldfastSandbox.task_init("self-check", config)
    environments = await HoldfastSandbox.sample_init("self-check", config, {})
    try:
        yield environments["default"]
    finally:
        await HoldfastSandbox.sample_cleanup("self-check", config, environments, False)


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox_env(made: SandboxEnvironment) -> SandboxEnvironment:
    return made
