"""Inspect's own checks of a sandbox provider, unmodified, in containers of Docker and Podman."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from holdfast.integrations.inspect_ai import Config
from tests.support.engines import Missing, docker_engine, podman_engine
from tests.support.inspect_root import inspect_root
from tests.support.inspect_self_check import made_of, sandbox_env  # noqa: F401

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


made = made_of(CONFIGS)


@pytest.fixture(scope="module", autouse=True)
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
