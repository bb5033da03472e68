"""The public names of the packages that import them late: listed, importable, and not loaded by the listing."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["holdfast", "holdfast.bridge"])
def test_every_public_name_is_listed_and_there(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_listing_the_names_loads_nothing() -> None:
    """The stateless `holdfast exec` imports the package, and must start in tens of milliseconds."""
    code = (
        "import sys; before = set(sys.modules); import holdfast; dir(holdfast); print(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"holdfast", "__future__"}


def test_a_star_import_has_connect() -> None:
    names: dict[str, object] = {}
    exec("from holdfast import *", names)
    assert {"connect", "Sandbox", "UnifiedExec", "sync"} <= names.keys()
