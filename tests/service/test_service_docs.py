"""docs/service.md names every setting with its default, every method, every event and every status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from holdfast.service.problems import Problem
from holdfast.service.settings import ServiceSettings
from holdfast.session.v1 import session_pb2 as pb

PAGE = (Path(__file__).parents[2] / "docs" / "service.md").read_text()
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in PAGE.splitlines()
    if line.startswith("|")
    for cells in [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]]
}


@pytest.mark.parametrize("field", msgspec.structs.fields(ServiceSettings), ids=lambda field: field.name)
def test_every_setting_is_on_the_page_with_its_default(field: msgspec.structs.FieldInfo) -> None:
    assert ROWS[field.name][0].split(" (")[0] == f"`{json.dumps(msgspec.to_builtins(field.default))}`"
    assert len(ROWS[field.name][1]) > 10


def test_the_page_names_no_setting_that_is_not_there() -> None:
    table = PAGE[PAGE.index("## Settings") :]
    names = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert names == set(ServiceSettings.__struct_fields__)


def test_every_method_event_and_state_is_on_the_page() -> None:
    methods = [method.name for method in pb.DESCRIPTOR.services_by_name["SessionService"].methods]
    words = [*methods, *pb.SessionEvent.Type.keys(), *pb.SessionState.keys()]
    assert [word for word in words if word != "UNKNOWN" and f"`{word}`" not in PAGE] == []


def test_every_status_is_on_the_page() -> None:
    assert [kind.status for kind in Problem.__subclasses__() if kind.status not in ROWS] == []
