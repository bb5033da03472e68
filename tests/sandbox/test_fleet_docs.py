"""The page about the fleet: its programs run, and its table has every field and option of each engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.fleet.engine import ENGINES, FLEET_FIELDS, make_engine
from holdfast.fleet.template import Template
from tests.support.parts import require

PAGE = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text()
PROGRAMS = [code for code in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if "asyncio.run(" in code]
ROWS = {
    line.split("|")[1].strip(" `"): [cell.strip() for cell in line.split("|")[2:-1]]
    for line in PAGE.partition("## Engines and fields")[2].partition("\n\nA field")[0].splitlines()
    if line.startswith("| `")
}
COLUMNS = {"bwrap": 0, "docker": 1, "podman": 1, "kubernetes": 2, "local": 3}


@pytest.mark.parametrize("code", PROGRAMS, ids=range(len(PROGRAMS)))
def test_programs_run(code: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    require("bwrap")
    directory = tmp_path_factory.mktemp("f")
    directory.chmod(0o711)
    environment = {**os.environ, "HOLDFAST_FLEET_DIRECTORY": str(directory)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(directory.glob("bwrap/*")) == []


@pytest.mark.parametrize("name", [name for name in ENGINES if name in COLUMNS])
def test_the_table_has_the_fields_of_each_engine(name: str) -> None:
    engine = make_engine(name)
    for field in Template.__struct_fields__:
        cell = ROWS[field][COLUMNS[name]]
        if field == "options":
            assert set(re.findall(r"`(\w+)`", cell)) == engine.options
        else:
            assert bool(cell) == (field in engine.fields | FLEET_FIELDS), (name, field)
