"""Shared by the tests of sandboxes: real engines and the bundle, made once for all of them.

Every engine is a real program of this machine: dockerd, podman, sshd, bwrap, namespaces. One that is missing skips
what needs it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.sandboxes.install.bundle import Bundle, make_bundle
from tests.support import engines
from tests.support.engines import ContainerEngine, Missing, SshServer
from tests.support.servers import server_environment

#: Images by the names that tests use.
BUSYBOX = "hf-busybox"
DEBIAN = "hf-debian"
#: Marks tests that take too long for `make test`.
longer = pytest.mark.skipif("HOLDFAST_LONGER_FAULTS" not in os.environ, reason="runs in `make faults`")


@contextlib.contextmanager
def or_skip() -> Iterator[None]:
    try:
        yield
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The bundle of this Python, in a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return make_bundle()


@pytest.fixture(scope="session")
def busybox_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with or_skip():
        return engines.busybox_root(tmp_path_factory.mktemp("busybox") / "root")


@pytest.fixture(scope="session")
def debian_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with or_skip():
        return engines.debian_root(tmp_path_factory.mktemp("debian") / "root")


@pytest.fixture(scope="package")
def bare_docker() -> Iterator[ContainerEngine]:
    """A Docker engine without images."""
    with contextlib.ExitStack() as stack:
        with or_skip():
            engine = stack.enter_context(engines.docker_engine())
        yield engine


@pytest.fixture(scope="package")
def docker(bare_docker: ContainerEngine, busybox_root: Path) -> ContainerEngine:
    """A Docker engine with the busybox image: no Python inside."""
    bare_docker.image(busybox_root, BUSYBOX)
    return bare_docker


@pytest.fixture(scope="package")
def debian_image(bare_docker: ContainerEngine, debian_root: Path) -> str:
    return bare_docker.image(debian_root, DEBIAN)


@pytest.fixture(scope="package")
def container(docker: ContainerEngine) -> Iterator[str]:
    """The name of a busybox container that tests share: each leaves it running, and nothing in it."""
    name = docker.container(BUSYBOX)
    yield name
    docker.remove(name)


@pytest.fixture(scope="package")
def podman(busybox_root: Path) -> Iterator[ContainerEngine]:
    with contextlib.ExitStack() as stack:
        with or_skip():
            engine = stack.enter_context(engines.podman_engine())
            engine.image(busybox_root, BUSYBOX)
            # Whether it can run anything here shows at the first container.
            engine.remove(engine.container(BUSYBOX))
        yield engine


@pytest.fixture(scope="package")
def sshd() -> Iterator[SshServer]:
    with contextlib.ExitStack() as stack:
        with or_skip():
            server = stack.enter_context(engines.ssh_server())
        yield server


@pytest.fixture(scope="package")
def namespaces(debian_root: Path) -> Iterator[list[str]]:
    """The command prefix that enters a Debian tree in namespaces of its own."""
    with contextlib.ExitStack() as stack:
        with or_skip():
            prefix = stack.enter_context(engines.namespaced_root(debian_root))
        yield prefix


@pytest.fixture(scope="session")
def bwrap() -> str:
    with or_skip():
        engines.need("bwrap", root=False)
        engines.run(["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"])
    return "bwrap"


@pytest.fixture(scope="module")
def own_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The machine's own server, in a directory of its own."""
    directory = str(tmp_path_factory.mktemp("local"))
    before = os.environ.get("HOLDFAST_DIRECTORY")
    os.environ["HOLDFAST_DIRECTORY"] = directory
    yield directory
    stop = [sys.executable, "-m", "holdfast", "stop", "--grace", "0", "--force"]
    stopped = subprocess.run(stop, env=server_environment(), capture_output=True, timeout=60)
    if before is None:
        del os.environ["HOLDFAST_DIRECTORY"]
    else:
        os.environ["HOLDFAST_DIRECTORY"] = before
    assert stopped.returncode in (0, 3), stopped.stderr
