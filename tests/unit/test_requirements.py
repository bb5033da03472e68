"""Requirements of a sandbox, decided from the report of its Python."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from holdfast.sandboxes.install.requirements import (
    MSGSPEC,
    PYTHON,
    Probe,
    Requirement,
    own_probe,
    read_probe,
    required,
)

OWN = Probe((3, 11), "cpython", "cpython-311-x86_64-linux-gnu", "glibc 2.36", "x86_64", holdfast="0.1.0")
MUSL = "cpython-311-x86_64-linux-musl"


def probe(**changes: object) -> Probe:
    return msgspec.structs.replace(OWN, **changes)


@pytest.mark.parametrize(
    ("found", "needed"),
    [
        (None, "bundle"),
        (probe(msgspec="0.19.0"), "installed"),
        (probe(msgspec="0.19.0", holdfast="0.0.9"), "package"),
        (probe(msgspec="0.20", holdfast=None, python=(3, 14), soabi="cpython-314-aarch64-linux-gnu"), "package"),
        (probe(holdfast=None), "package-with-msgspec"),
        (probe(holdfast=None, libc="glibc 2.41"), "package-with-msgspec"),
        (probe(holdfast=None, msgspec="0.18.6"), "package-with-msgspec"),
        (probe(libc="glibc 2.9"), "bundle"),
        (probe(libc="", soabi=MUSL), "bundle"),
        (probe(soabi="cpython-312-x86_64-linux-gnu", python=(3, 12)), "bundle"),
        (probe(soabi="", libc=None), "bundle"),
        (probe(python=(3, 10), msgspec="0.19.0"), "bundle"),
        (probe(implementation="pypy", msgspec="0.19.0"), "bundle"),
        (probe(complete=False, msgspec="0.19.0"), "bundle"),
    ],
)
def test_what_required(found: Probe | None, needed: Requirement) -> None:
    assert required(found, OWN) == needed


def test_on_musl_ours_fits_another_of_the_kind() -> None:
    assert required(probe(libc="", soabi=MUSL), probe(libc="", soabi=MUSL)) == "package-with-msgspec"


def test_our_own_python_has_what_it_needs() -> None:
    assert required(own_probe(), own_probe()) == "installed"


def test_what_is_no_probe_is_none() -> None:
    assert read_probe("sh: python3: not found\n") is None
    assert read_probe(b"") is None


def test_the_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=" + ".".join(map(str, PYTHON))
    assert any(re.fullmatch(rf"msgspec>={MSGSPEC[0]}\.{MSGSPEC[1]}", each) for each in project["dependencies"])
