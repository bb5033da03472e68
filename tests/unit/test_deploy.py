"""The files of deploy/: valid for the programs that read them, and true about the service."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import yaml

from holdfast.service.settings import PREFIX, ServiceSettings
from tests.support.parts import needs

DEPLOY = Path(__file__).parents[2] / "deploy"
SETTINGS = {f"{PREFIX}{field.name.upper()}" for field in msgspec.structs.fields(ServiceSettings)}


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return loaded


@needs("systemd-analyze")
def test_the_unit_is_valid_and_hardened(tmp_path: Path) -> None:
    unit = tmp_path / "holdfast.service"
    # The program of the unit need not be installed here.
    unit.write_text((DEPLOY / "holdfast.service").read_text().replace("/opt/holdfast/bin/holdfast", "/bin/true"))
    verified = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    # In tenths: 1.2 of 10.
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=15", str(unit)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout[-200:]


def test_the_parts_of_compose_exist() -> None:
    file = compose()
    services = file["services"]
    assert set(services) == {"service", "sandbox", "postgres", "prometheus", "grafana"}
    for name, service in services.items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in file["volumes"] or (DEPLOY / source).is_file(), f"{name}: {volume}"
        assert set(service.get("networks", ())) <= set(file["networks"]), name
        assert set(service.get("depends_on", ())) <= set(services), name
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name}: {port} is published beyond this machine"
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_the_sandbox_has_no_network_and_no_secret() -> None:
    services = compose()["services"]
    service, sandbox = services["service"], services["sandbox"]
    assert set(service["environment"]) <= SETTINGS
    assert sandbox["network_mode"] == "none"
    assert "environment" not in sandbox
    shared = {each.split(":")[0] for each in service["volumes"]} & {
        each.split(":")[0] for each in sandbox["volumes"]
    }
    assert shared == {"sandbox"}
    for each in (service, sandbox):
        assert each["read_only"]
        assert each["cap_drop"] == ["ALL"]
    assert service["environment"]["HOLDFAST_SERVICE_SANDBOX"] in sandbox["command"]


def test_prometheus_and_grafana_find_their_files() -> None:
    services = compose()["services"]
    prometheus = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    targets = prometheus["scrape_configs"][0]["static_configs"][0]["targets"]
    assert targets == ["service:7401"]
    mounted = {each.split(":")[1] for each in services["prometheus"]["volumes"]}
    assert {f"/etc/prometheus/{name}" for name in prometheus["rule_files"]} <= mounted
    provider = yaml.safe_load((DEPLOY / "grafana/dashboards.yml").read_text())["providers"][0]
    assert any(
        each.split(":")[1].startswith(provider["options"]["path"]) for each in services["grafana"]["volumes"]
    )


def test_the_image_copies_files_that_exist_and_does_not_run_as_root() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    copied = re.findall(r"^COPY ([^-\n]*) \S+$", text, re.MULTILINE)
    ignored = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    for source in " ".join(copied).split():
        if source != "wheel[s]":  # which may be missing
            assert (DEPLOY.parent / source).exists(), source
            assert f"!{source}" in ignored, source
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", text, re.MULTILINE)
