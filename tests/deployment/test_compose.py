"""deploy/compose.yaml started by a real `docker compose`, without a registry. `make deployment`.

Images of PostgreSQL and Prometheus come from this machine's packages, that of Holdfast from deploy/Dockerfile.
Grafana has no package in Debian, so it is not started: Prometheus evaluates the queries of its dashboard instead.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deployment.compose_images import make_images
from tests.support import go_programs
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
#: For the health checks of all containers, and for a scrape of Prometheus.
PATIENCE_SECONDS = 180

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

    def up(self, *services: str) -> None:
        """Start services, and wait for the engine's report that each is healthy."""
        self("up", "--detach", "--no-build", "--wait", "--wait-timeout", str(PATIENCE_SECONDS), *services)

    def token(self) -> str:
        """The token that the first start of the service prints. The log is followed until then."""
        argv = [*self._argv, "logs", "--follow", "--no-log-prefix", "service"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as log:
            assert log.stdout is not None
            try:
                return next(found[0] for line in log.stdout if (found := re.search(r"hf_[\w-]+", line)))
            finally:
                log.kill()

    def session(self, token: str, command: str) -> list[str]:
        """The words that a command in a session prints."""
        call = ("exec", "-T", "--env", f"HOLDFAST_SERVICE_TOKEN={token}", "service", "holdfast", "session", "run")
        return self(*call, command).split()

    def get(self, service: str, port: int, path: str) -> str:
        address = self("port", service, str(port)).strip()
        with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
            return str(answer.read().decode())


def compose_program() -> list[str]:
    """The program that HOLDFAST_COMPOSE names, or that `make deployment` built, or that of this machine."""
    named = os.environ.get("HOLDFAST_COMPOSE", str(go_programs.compose()))
    for argv in ([named], ["docker-compose"], ["docker", "compose"]):
        if shutil.which(argv[0]) is None:
            continue
        shown = subprocess.run([*argv, "version", "--short"], capture_output=True, text=True)
        if shown.returncode == 0 and re.match(r"v?2\.(2[4-9]|[3-9]\d)", shown.stdout):
            return argv
    pytest.skip("no `docker compose` of version 2.24: install Go 1.24.9 or the plugin, or set HOLDFAST_COMPOSE")


@pytest.fixture
def compose(tmp_path: Path) -> Iterator[Compose]:
    program = compose_program()
    try:
        with docker_engine(storage="") as docker:
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
        compose.up(*STARTED)
        token = compose.token()
        # In the container of the sandbox: another host name than that of the service, and no network.
        user, host = compose.session(token, "id -u; echo $HOSTNAME")
        assert user == "10001"
        shown = compose("exec", "-T", "sandbox", "sh", "-c", "echo $HOSTNAME; ls /sys/class/net").split()
        assert shown == [host, "lo"]
        check_metrics(compose)
        compose("kill", "--signal", "KILL", "service")
        compose.up("service")
        assert compose.session(token, "echo again") == ["again"]
        # Volumes stay: the token and the sessions are in the database.
        compose("down")
        compose.up(*STARTED)
        assert compose.session(token, "echo kept") == ["kept"]
    finally:
        compose("down", "--volumes", "--timeout", "1")


def check_metrics(compose: Compose) -> None:
    """Wait for a scrape of the service, and evaluate every query of the dashboard."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not _query(compose, 'up{job="holdfast"} == 1'):
        assert time.monotonic() < deadline, compose("logs", "prometheus")
        time.sleep(1)  # Prometheus announces no scrape.
    dashboard = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    for variable, value in (("$job", ".+"), ("$__rate_interval", "1m")):
        expressions = [each.replace(variable, value) for each in expressions]
    # Most are rates, which have no series before the second scrape.
    found = {each: _query(compose, each) for each in expressions}
    assert {"BUSY", "IDLE"} <= {
        series["metric"].get("state") for each in found if "sessions_active" in each for series in found[each]
    }


def _query(compose: Compose, expression: str) -> list[Any]:
    """The series of an expression; an error of Prometheus is one of the test."""
    answer = json.loads(compose.get("prometheus", 9090, f"/api/v1/query?query={urllib.parse.quote(expression)}"))
    series: list[Any] = answer["data"]["result"]
    return series
