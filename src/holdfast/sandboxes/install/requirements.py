"""Decides what must be installed in a sandbox to run the server: nothing, our package, or the bundle.

`PROBE` runs once on the sandbox's Python, if there is one. In doubt the bundle is required, because it needs
nothing of the sandbox. Pure but for `own_probe`.
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

Requirement = Literal["installed", "package", "package-with-msgspec", "bundle"]


class Probe(msgspec.Struct, frozen=True):
    """The output of `PROBE`: the Python of a sandbox."""

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
    #: Whether it has the parts of the standard library that distributions often leave out.
    complete: bool = True


def read_probe(printed: str | bytes) -> Probe | None:
    """Decode the output of `PROBE`; None if it is something else."""
    try:
        return msgspec.json.decode(printed, type=Probe)
    except msgspec.DecodeError:
        return None


def required(probe: Probe | None, own: Probe) -> Requirement:
    """Return what to install in a sandbox with the Python `probe`, from a machine with the Python `own`.

    - `installed`: it has the same version of holdfast, on a Python that can run it.
    - `package`: its Python is new enough and has a msgspec that is new enough.
    - `package-with-msgspec`: it lacks msgspec, and ours, an extension module, fits: the same SOABI, and a C library
      not older than ours, for which ours may have been built.
    - `bundle`: everything else, a sandbox without Python too.
    """
    if probe is None or probe.python < PYTHON or probe.implementation != "cpython" or not probe.complete:
        return "bundle"
    if probe.msgspec is not None and version_numbers(probe.msgspec) >= MSGSPEC:
        return "installed" if probe.holdfast == own.holdfast else "package"
    same = bool(probe.soabi) and (probe.soabi, probe.machine) == (own.soabi, own.machine)
    if same and version_numbers(probe.libc or "") >= version_numbers(own.libc or ""):
        return "package-with-msgspec"
    return "bundle"


@functools.cache
def own_probe() -> Probe:
    """Return the probe of the Python that runs us."""
    done = subprocess.run([sys.executable, "-I", "-c", PROBE], capture_output=True, text=True, check=False)
    probe = read_probe(done.stdout)
    if probe is None:
        raise SandboxError(
            f"{sys.executable} does not print its version: {done.stderr.strip() or done.stdout.strip()}"
        )
    # Run from sources, holdfast has a version without being installed.
    return msgspec.structs.replace(probe, holdfast=holdfast.__version__)


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the first numbers of a version, `glibc 2.36` included."""
    found = re.search(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
