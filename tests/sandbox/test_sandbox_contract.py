"""The contract suite over every kind of sandbox, each a real one, with one connection for all checks of a kind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from holdfast import Sandbox
from holdfast.sandboxes.bubblewrap import BwrapJail
from holdfast.sandboxes.containers import Container
from holdfast.sandboxes.ssh import SshHost
from holdfast.sandboxes.target import CommandSandbox, SandboxTarget
from holdfast.testing import sandbox_suite
from holdfast.testing.sandbox_suite import AddressTarget, Check, Subject
from tests.support.engines import ContainerEngine, SshServer

KINDS = ("local", "docker-busybox", "docker-debian", "podman-busybox", "ssh", "bwrap", "command")


def local(request: pytest.FixtureRequest) -> Callable[[], SandboxTarget]:
    request.getfixturevalue("own_directory")
    return lambda: AddressTarget("local")


def docker_busybox(request: pytest.FixtureRequest) -> Callable[[], SandboxTarget]:
    engine: ContainerEngine = request.getfixturevalue("docker")
    return in_container(request, engine, "hf-busybox")


def docker_debian(request: pytest.FixtureRequest) -> Callable[[], SandboxTarget]:
    engine: ContainerEngine = request.getfixturevalue("bare_docker")
    return in_container(request, engine, request.getfixturevalue("debian_image"))


def podman_busybox(request: pytest.FixtureRequest) -> Callable[[], SandboxTarget]:
    engine: ContainerEngine = request.getfixturevalue("podman")
    return in_container(request, engine, "hf-busybox")


def in_container(
    request: pytest.FixtureRequest, engine: ContainerEngine, image: str
) -> Callable[[], SandboxTarget]:
    name = engine.container(image)
    request.addfinalizer(lambda: engine.remove(name))
    return lambda: Container("podman" if engine.program == "podman" else "docker", name)


def ssh(request: pytest.FixtureRequest) -> Callable[[], SandboxTarget]:
    server: SshServer = request.getfixturevalue("sshd")
    return lambda: SshHost(server.destination, port=server.port, options=server.options())


def bwrap(request: pytest.FixtureRequest) -> Callable[[], SandboxTarget]:
    request.getfixturevalue("bwrap")
    directory: Path = request.getfixturevalue("tmp_path_factory").mktemp("jail")
    return lambda: BwrapJail(str(directory))


def command(request: pytest.FixtureRequest) -> Callable[[], SandboxTarget]:
    prefix: list[str] = request.getfixturevalue("namespaces")
    return lambda: CommandSandbox(prefix, name="namespaces")


@pytest.fixture(scope="module", params=KINDS)
def subject(request: pytest.FixtureRequest) -> Subject:
    make = globals()[request.param.replace("-", "_")](request)
    return Subject(make, keeps_processes=request.param != "bwrap")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(subject: Subject) -> AsyncIterator[Sandbox]:
    async with subject.connect() as box:
        yield box


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", sandbox_suite.CHECKS, ids=lambda check: check.__name__)
async def test_contract(check: Check, box: Sandbox, subject: Subject) -> None:
    await check(box, subject)
