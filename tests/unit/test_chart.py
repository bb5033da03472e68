"""The Helm chart agrees with the service: its settings exist, its rules are accepted, its values have a schema."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from holdfast.service.settings import ServiceSettings

CHART = Path(__file__).parents[2] / "deploy" / "chart"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())


def test_every_variable_is_a_setting_of_the_service() -> None:
    text = (CHART / "templates" / "deployment.yaml").read_text()
    names = {name.lower() for name in re.findall(r"HOLDFAST_SERVICE_([A-Z_]+)", text)} - {""}
    assert "listen_grpc" in names
    assert names <= set(ServiceSettings.__struct_fields__)


def test_the_schema_has_every_value_and_refuses_others() -> None:
    def compare(values: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        assert schema["additionalProperties"] is False, where
        assert values.keys() <= schema["properties"].keys(), where
        for name, value in values.items():
            inner = schema["properties"][name]
            if isinstance(value, dict) and "properties" in inner:
                compare(value, inner, f"{where}.{name}")

    compare(VALUES, SCHEMA, "values")


def test_every_value_of_a_template_exists() -> None:
    for template in (CHART / "templates").iterdir():
        for path in re.findall(r"\.Values\.([\w.]+)", template.read_text()):
            found: Any = {**VALUES, "nameOverride": "", "fullnameOverride": ""}
            for part in path.split("."):
                assert part in found, f"{template.name}: {path}"
                found = found[part]
