"""An engine that is killed and started again, is full, lacks an image, or fails at setup: nothing is left of it.

Each test prints a count of what is left. The longer tests run in `make faults`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import HoldfastError, SandboxError
from holdfast.fleet.containers.engine import FORK_LABEL, ID_LABEL, LEASE_LABEL
from holdfast.fleet.fleet import Fleet
from holdfast.fleet.pool import Pool
from tests.sandbox.conftest import longer, or_skip
from tests.support.engines import DockerDaemon, docker_engine
from tests.support.file_systems import small_file_system
from tests.support.parts import require

IMAGE = "hf-busybox"
#: Moments of a `create` and a `remove` at which the engine is killed.
MOMENTS = 12
PATIENCE = 240.0


@pytest.fixture(autouse=True)
def fleet_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path_factory.mktemp("f")
    monkeypatch.setenv("HOLDFAST_FLEET_DIRECTORY", str(directory))
    return directory


@pytest.fixture
def daemon(busybox_root: Path) -> Iterator[DockerDaemon]:
    """A daemon for one test, which may kill it."""
    with contextlib.ExitStack() as stack:
        with or_skip():
            engine = stack.enter_context(docker_engine())
            engine.image(busybox_root, IMAGE)
        yield engine


def left(engine: DockerDaemon) -> dict[str, list[str]]:
    """Everything of sandboxes that the engine has."""
    found = {
        "containers": engine("ps", "--all", "--quiet", "--filter", f"label={ID_LABEL}").split(),
        "volumes": engine("volume", "ls", "--quiet", "--filter", f"label={LEASE_LABEL}").split(),
        "forks": engine("image", "ls", "--quiet", "--filter", f"label={FORK_LABEL}").split(),
    }
    print("left of sandboxes:", {kind: len(names) for kind, names in found.items()})
    return found


def nothing(engine: DockerDaemon) -> bool:
    return not any(left(engine).values())


@longer
async def test_a_pool_recovers_when_its_engine_is_killed_and_started_again(daemon: DockerDaemon) -> None:
    async with asyncio.timeout(PATIENCE):
        async with Pool("docker", image=IMAGE, warm=2, max=4, health_interval=1.0) as pool:
            await pool.ready()
            async with pool.take():
                await asyncio.to_thread(daemon.kill)
                daemon.start()
            while True:
                # Until the pool has noticed it, a sandbox may be one that ended with the engine.
                async with pool.take() as box:
                    with contextlib.suppress(HoldfastError):
                        if (await box.exec(["echo", "again"])).stdout == "again\n":
                            break
            await pool.ready()
            assert pool.status.replaced_total >= 1
        assert nothing(daemon)


@longer
async def test_an_engine_that_is_killed_during_create_and_remove_leaves_nothing(daemon: DockerDaemon) -> None:
    async with asyncio.timeout(PATIENCE), Fleet("docker") as fleet:
        for moment in range(MOMENTS):
            work = asyncio.create_task(_made_and_removed(fleet))
            # No event of the engine marks a step; the moments spread over the second that the work takes.
            await asyncio.sleep(moment / 10)
            await asyncio.to_thread(daemon.kill)
            with contextlib.suppress(HoldfastError):
                await work
            daemon.start()
            for ref in await fleet.list():
                # The call of the maker has failed; the maker removes what the engine has made nevertheless.
                await fleet.remove(ref.id)
            await fleet.prune()
            assert nothing(daemon), f"killed after {moment / 10} s"


async def _made_and_removed(fleet: Fleet) -> None:
    ref = await fleet.create(image=IMAGE)
    await fleet.extend(ref.id, 60)
    await fleet.remove(ref.id)


@longer
async def test_an_engine_without_space_fails_the_creation_and_leaves_nothing(busybox_root: Path) -> None:
    with contextlib.ExitStack() as stack:
        with or_skip():
            data = stack.enter_context(small_file_system("size=64m,mode=711"))
            engine = stack.enter_context(docker_engine(data))
            engine.image(busybox_root, IMAGE)
        async with Fleet("docker") as fleet:
            ref = await fleet.create(image=IMAGE)
            await fleet.remove(ref.id)
            await asyncio.to_thread(_fill, data)
            with pytest.raises(SandboxError, match="no space left"):
                await fleet.create(image=IMAGE)
            assert nothing(engine)
            os.unlink(f"{data}/filler")
            ref = await fleet.create(image=IMAGE)
            await fleet.remove(ref.id)
            assert nothing(engine)


def _fill(directory: str) -> None:
    with contextlib.suppress(OSError), open(f"{directory}/filler", "wb", 0) as filler:
        while True:
            filler.write(bytes(65_536))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"image": "hf-nowhere", "options": {"pull": "never"}}, "docker: image hf-nowhere: .*No such image"),
        ({"image": IMAGE, "setup": ["echo broken >&2; exit 3"]}, "setup: .*exit code 3: broken"),
    ],
)
async def test_a_creation_that_fails_leaves_nothing(
    docker: DockerDaemon, fields: dict[str, Any], complaint: str
) -> None:
    async with Fleet("docker") as fleet:
        with pytest.raises(SandboxError, match=complaint):
            await fleet.create(**fields)
    assert nothing(docker)


@longer
async def test_a_pull_reports_its_progress(docker: DockerDaemon, busybox_root: Path, tmp_path: Path) -> None:
    with registry(tmp_path) as address:
        name = f"{address}/hf-pulled:1"
        docker("tag", IMAGE, name)
        docker("push", name)
        docker("rmi", name, IMAGE)
        reported: list[tuple[str, float | None]] = []
        try:
            async with Fleet("docker") as fleet:
                ref = await fleet.create(image=name, progress=lambda *what: reported.append(what))
                await fleet.remove(ref.id)
                with pytest.raises(SandboxError, match=r"hf-other.*not found"):
                    await fleet.create(image=name.replace("pulled", "other"), progress=lambda *_: None)
        finally:
            docker.image(busybox_root, IMAGE)
    assert {text for text, _ in reported} == {f"pulling {name}"}
    shares = [share for _, share in reported if share is not None]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert nothing(docker)


@contextlib.contextmanager
def registry(directory: Path) -> Iterator[str]:
    """A registry of images on loopback; its address."""
    require("docker-registry")
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    settings = directory / "registry.yml"
    storage = {"filesystem": {"rootdirectory": str(directory / "images")}}
    settings.write_text(json.dumps({"version": "0.1", "storage": storage, "http": {"addr": f"127.0.0.1:{port}"}}))
    with open(directory / "log", "w") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(settings)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)  # a foreign program announces no readiness
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


_PROGRAM = """
import asyncio, holdfast
async def main():
    async with holdfast.create("bwrap") as box:
        print((await box.exec(["echo", "ran"])).stdout, end="")
asyncio.run(main())
"""


async def test_a_program_that_made_jails_ends_without_a_warning() -> None:
    require("bwrap")
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-W", "error", "-c", _PROGRAM], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")
