"""Each extra installs all packages that its modules import: a fresh environment has no others."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
#: Extra, and the modules that its commands import.
MODULES = {
    "bridge": ("holdfast.bridge", "holdfast.bridge.upstream"),
    "e2b": ("holdfast.integrations.e2b.server",),
    "kubernetes": ("holdfast.fleet.kubernetes.engine",),
    "mcp": ("holdfast.integrations.mcp.server", "holdfast.integrations.mcp.stdio"),
    "service": ("holdfast.service.assembly", "holdfast.service.client"),
    "websocket": ("holdfast.transport.websocket",),
}
#: Imports modules where packages are missing, as in a fresh environment.
IMPORT = """
import importlib, sys
missing, modules = set(sys.argv[1].split(",")), sys.argv[2].split(",")
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
for module in modules:
    importlib.import_module(module)
"""


def distributions(extra: str) -> set[str]:
    """The names of the distributions that `pip install '.[EXTRA]'` installs, as far as they are installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: set[str] = set()
    left = [*project["dependencies"], *project["optional-dependencies"][extra]]
    while left:
        wanted = Requirement(left.pop())
        name = wanted.name.lower().replace("_", "-")
        extras = wanted.extras or {""}
        if name in found or (wanted.marker and not any(wanted.marker.evaluate({"extra": each}) for each in extras)):
            continue
        found.add(name)
        for line in importlib.metadata.requires(name) or ():
            below = Requirement(line)
            if below.marker is None or any(below.marker.evaluate({"extra": each}) for each in extras):
                below.marker = None
                left.append(str(below))
    return found


@pytest.mark.parametrize("extra", MODULES)
def test_an_extra_installs_what_its_modules_import(extra: str) -> None:
    wanted = {*distributions(extra), "holdfast"}
    missing = {
        top
        for top, names in importlib.metadata.packages_distributions().items()
        if not {name.lower().replace("_", "-") for name in names} & wanted
    }
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, ",".join(missing), ",".join(MODULES[extra])],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
