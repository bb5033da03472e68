"""deploy/compose.yaml started by a real `docker compose`, without a registry. `make deployment`.

Images of PostgreSQL and Prometheus come from this machine's packages, that of Holdfast from deploy/Dockerfile.
Grafana has no package in Debian, so it is not started.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deployment.compose_images import make_images
from tests.support.engines import Missing, docker_engine
from tests.support.service_image import build_image

ROOT = Path(__file__).parents[2]
STARTED = ("service", "sandbox", "postgres", "prometheus")
#: Free ports in place of those of the file, which a service on this machine may use.
PORTS = """
services:
  service:
    ports: !override ["127.0.0.1:0:7401"]
  prometheus:
    ports: !override ["127.0.0.1:0:9090"]
"""
#: For a restart, and for two scrapes of Prometheus.
PATIENCE_SECONDS = 180.0

pytestmark = pytest.mark.skipif(
    not os.environ.get("HOLDFAST_DEPLOYMENT"), reason="runs in `make deployment`, which takes minutes"
)


class Compose:
    """`docker compose` with deploy/compose.yaml."""

    def __init__(self, program: list[str], override: Path) -> None:
        self._argv = [*program, "--file", str(ROOT / "deploy/compose.yaml"), "--file", str(override)]

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run([*self._argv, *arguments], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
        return done.stdout

    def session(self, token: str, command: str) -> list[str]:
        """The words that a command in a session prints."""
        call = ("exec", "-T", "--env", f"HOLDFAST_SERVICE_TOKEN={token}", "service", "holdfast", "session", "run")
        return self(*call, command).split()

    def get(self, service: str, port: int, path: str) -> str:
        address = self("port", service, str(port)).strip()
        with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
            return str(answer.read().decode())


def compose_program() -> list[str]:
    """`docker compose`, or the program that HOLDFAST_COMPOSE names."""
    for argv in ([os.environ.get("HOLDFAST_COMPOSE", "docker-compose")], ["docker", "compose"]):
        if shutil.which(argv[0]) is None:
            continue
        shown = subprocess.run([*argv, "version", "--short"], capture_output=True, text=True)
        if shown.returncode == 0 and re.match(r"v?2\.(2[4-9]|[3-9]\d)", shown.stdout):
            return argv
    pytest.skip("no `docker compose` of version 2.24: install the plugin, or name the program in HOLDFAST_COMPOSE")


@pytest.fixture
def compose(tmp_path: Path) -> Iterator[Compose]:
    program = compose_program()
    try:
        with docker_engine() as docker:
            make_images(docker, tmp_path)
            build_image(docker, tmp_path / "python", "holdfast")
            (tmp_path / "ports.yaml").write_text(PORTS)
            yield Compose(program, tmp_path / "ports.yaml")
    except Missing as missing:
        pytest.skip(str(missing))


def test_the_stack_runs_a_session_and_keeps_its_state(compose: Compose) -> None:
    check_stack(compose)


def check_stack(compose: Compose) -> None:
    """Start the stack, use it, kill the service, and start the stack again."""
    try:
        compose("up", "--detach", "--no-build", *STARTED)
        token = until(lambda: next(iter(re.findall(r"hf_[\w-]+", compose("logs", "service"))), ""))
        until(lambda: _or_empty(lambda: compose.get("service", 7401, "/readyz")))
        # In the container of the sandbox: another host name than that of the service, and no network.
        user, host, *interfaces = compose.session(token, "id -u; echo $HOSTNAME; ls /sys/class/net")
        assert (user, interfaces) == ("10001", ["lo"])
        assert compose("exec", "-T", "sandbox", "sh", "-c", "echo $HOSTNAME").strip() == host
        assert until(lambda: [t for t in _targets(compose) if t["health"] == "up"])
        compose("kill", "--signal", "KILL", "service")
        compose("up", "--detach", "--no-build", "service")
        until(lambda: _or_empty(lambda: compose.get("service", 7401, "/readyz")))
        assert compose.session(token, "echo again") == ["again"]
        # Volumes stay: the token and the sessions are in the database.
        compose("down")
        compose("up", "--detach", "--no-build", *STARTED)
        until(lambda: _or_empty(lambda: compose.get("service", 7401, "/readyz")))
        assert compose.session(token, "echo kept") == ["kept"]
    finally:
        compose("down", "--volumes", "--timeout", "1")


def _targets(compose: Compose) -> list[dict[str, str]]:
    found = json.loads(_or_empty(lambda: compose.get("prometheus", 9090, "/api/v1/targets")) or '{"data": {}}')
    targets: list[dict[str, str]] = found["data"].get("activeTargets", [])
    return targets


def _or_empty(call: Callable[[], str]) -> str:
    """The result of a request, empty while its server does not reply."""
    try:
        return call()
    except OSError:
        return ""


def until(probe: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := probe()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found
