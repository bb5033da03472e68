"""Decides what a sandbox needs to run our server: nothing, our package, or the bundle; pure but for `own_probe`.

The sandbox's Python, if there is one, is asked once by `PROBE`. In doubt it is the bundle, which needs nothing.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from typing import Final, Literal

import msgspec

import holdfast
from holdfast.errors import SandboxError

#: Run as `python3 -I -c PROBE`; prints one line of JSON, a `Probe`. Any Python 3 can run it.
PROBE: Final = """\
import json, os, platform, sys, sysconfig
def version(name):
    try:
        from importlib import metadata
        return metadata.version(name)
    except Exception:
        return None
def importable(name):
    try:
        __import__(name)
        return True
    except Exception:
        return False
print(json.dumps({
    "python": list(sys.version_info[:2]),
    "implementation": sys.implementation.name,
    "soabi": sysconfig.get_config_var("SOABI") or "",
    "libc": os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else "",
    "machine": platform.machine(),
    "holdfast": version("holdfast"),
    "msgspec": version("msgspec") if importable("msgspec") else None,
    "complete": all(importable(name) for name in ("asyncio", "ctypes", "fcntl", "pwd", "resource", "select")),
}))
"""

#: As in pyproject.toml; a test compares.
PYTHON: Final = (3, 11)
MSGSPEC: Final = (0, 19)

Fit = Literal["installed", "package", "package-with-msgspec", "bundle"]


class Probe(msgspec.Struct, frozen=True):
    """What a sandbox's Python tells of itself."""

    python: tuple[int, int]
    implementation: str
    #: Names version, machine and kind of C library for which extension modules are built.
    soabi: str
    #: As in "glibc 2.36"; empty elsewhere.
    libc: str | None
    machine: str
    #: Versions of what is installed.
    holdfast: str | None = None
    msgspec: str | None = None
    #: Whether the parts of the standard library are there that distributions like to leave out.
    complete: bool = True


def read_probe(printed: str | bytes) -> Probe | None:
    """What `PROBE` printed; None if it is nothing of the kind, and so of no use."""
    try:
        return msgspec.json.decode(printed, type=Probe)
    except msgspec.DecodeError:
        return None


def fits(probe: Probe | None, own: Probe) -> Fit:
    """What to put into a sandbox whose Python told `probe`, from a machine whose own told `own`.

    - `installed`: it has this very version of holdfast, on a Python that can run it.
    - `package`: its Python is new enough and has a msgspec that is new enough.
    - `package-with-msgspec`: it lacks msgspec, and ours, an extension module, fits: the same SOABI, and a C library
      not older than ours, for which ours may have been built.
    - `bundle`: everything else, a sandbox without Python too.
    """
    if probe is None or probe.python < PYTHON or probe.implementation != "cpython" or not probe.complete:
        return "bundle"
    if probe.msgspec is not None and _numbers(probe.msgspec) >= MSGSPEC:
        return "installed" if probe.holdfast == own.holdfast else "package"
    same = bool(probe.soabi) and (probe.soabi, probe.machine) == (own.soabi, own.machine)
    if same and _numbers(probe.libc or "") >= _numbers(own.libc or ""):
        return "package-with-msgspec"
    return "bundle"


@functools.cache
def own_probe() -> Probe:
    """What the Python that runs us tells of itself."""
    done = subprocess.run([sys.executable, "-I", "-c", PROBE], capture_output=True, text=True, check=False)
    probe = read_probe(done.stdout)
    if probe is None:
        raise SandboxError(
            f"{sys.executable} does not tell its version: {done.stderr.strip() or done.stdout.strip()}"
        )
    # Run from sources we are not installed, and still of this version.
    return msgspec.structs.replace(probe, holdfast=holdfast.__version__)


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with; of `glibc 2.36`, those after the name."""
    found = re.search(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
