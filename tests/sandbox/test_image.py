"""The image of deploy/Dockerfile: built by a real engine without a network, small, and not root. `make image`.

The base is made from this machine's packages, and the wheels are those of `make image`: no registry is needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from tests.support.engines import ContainerEngine
from tests.support.service_image import BASE, build_image

#: The size of Python and its packages; a second copy of them, a compiler or a cache would exceed it.
LARGEST_ADDED = 250 * 1024 * 1024

pytestmark = pytest.mark.skipif(
    not os.environ.get("HOLDFAST_TEST_IMAGE"), reason="runs in `make image`, which takes minutes"
)


@pytest.fixture(scope="module")
def image(bare_docker: ContainerEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    build_image(bare_docker, tmp_path_factory.mktemp("python") / "root", "hf-holdfast")
    yield "hf-holdfast"
    bare_docker("rmi", "--force", "hf-holdfast")


def test_the_image_is_small_and_not_root(bare_docker: ContainerEngine, image: str) -> None:
    (made,) = json.loads(bare_docker("inspect", image))
    (base,) = json.loads(bare_docker("inspect", BASE))
    assert made["Config"]["User"] == "10001:10001"
    assert made["Size"] - base["Size"] < LARGEST_ADDED
    run = (
        "run",
        "--rm",
        "--network",
        "none",
        "--read-only",
        "--cap-drop",
        "ALL",
        "--entrypoint",
        "sh",
        image,
        "-c",
    )
    assert bare_docker(*run, "id -u; holdfast --version; ls /opt/holdfast/bin").splitlines()[0] == "10001"
    assert "pip" not in bare_docker(*run, "ls /opt/holdfast/bin").split()


def test_a_session_runs_in_the_sandbox_of_the_other_container(bare_docker: ContainerEngine, image: str) -> None:
    """The two containers of compose.yaml, with the same options: they share a socket and nothing else."""
    hardened = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true", "--tmpfs", "/tmp")
    run = ("--tmpfs", "/run/holdfast:uid=10001,gid=10001,mode=0700", "--volume", "hf-sandbox:/run/sandbox")
    address = "unix:/run/sandbox/server.sock"
    sandbox = bare_docker.container(image, "serve", "--listen", address, options=(*hardened, *run))
    ready = ("exec", sandbox, "sh", "-c", "until [ -S /run/sandbox/server.sock ]; do sleep 0.1; done")
    bare_docker(*ready)
    service = bare_docker.container(
        image, "service", "--json", options=(*hardened, *run, "--env", f"HOLDFAST_SERVICE_SANDBOX={address}")
    )
    try:
        token = ""
        while not token:
            state = json.loads(bare_docker("inspect", service))[0]["State"]
            assert state["Running"], bare_docker("logs", service)
            lines = bare_docker("logs", service).splitlines()
            token = next((json.loads(line)["operator_token"] for line in lines if "operator_token" in line), "")
        call = ("exec", "--env", f"HOLDFAST_SERVICE_TOKEN={token}", service, "holdfast", "session", "run")
        assert bare_docker(*call, "id -u; echo $HOSTNAME").split() == [
            "10001",
            sandbox_hostname(bare_docker, sandbox),
        ]
    finally:
        for name in (service, sandbox):
            bare_docker.remove(name)


def sandbox_hostname(docker: ContainerEngine, name: str) -> str:
    hostname: str = json.loads(docker("inspect", name))[0]["Config"]["Hostname"]
    return hostname
