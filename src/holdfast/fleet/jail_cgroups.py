"""The cgroups of jails: they limit a jail as a whole, and freeze it.

Each jail has a cgroup below the one that its maker is in, in every hierarchy that is needed. The directories are
noted beside the jail before they are made, so that any process can remove them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Final

from holdfast.errors import SandboxError
from holdfast.fleet.directories import SandboxDirectory
from holdfast.fleet.template import Template
from holdfast.runtime.confine.resource_groups import CgroupHierarchy, Controller, hierarchies
from holdfast.types import Confinement

PARENT: Final = "holdfast-jails"
#: The field of a template that each controller enforces.
FIELDS: Final[dict[Controller, str]] = {"memory": "memory", "pids": "processes", "cpu": "cpus"}
#: A cgroup can be removed a moment after its last process has ended; the kernel does not report when.
REMOVE_SECONDS: Final = 5.0


class JailGroups:
    """Functions on the cgroups of one jail; the jail's directory holds their state."""

    @staticmethod
    def missing(template: Template) -> Iterator[tuple[str, str]]:
        """The limits of a template that cannot be enforced here, each with the reason."""
        if template.memory is None and template.processes is None and template.cpus is None:
            return
        found = hierarchies()
        for controller, field in FIELDS.items():
            if getattr(template, field) is None:
                continue
            hierarchy = found.get(controller)
            why = f"no cgroup controller {controller} here" if hierarchy is None else hierarchy.why_not()
            if why:
                yield field, why

    @staticmethod
    def make(directory: SandboxDirectory, template: Template) -> list[str]:
        """Make the cgroups of a jail; the directories that its first process joins."""
        limits = Confinement(
            total_memory_bytes=template.memory, total_processes=template.processes, cpu_cores=template.cpus
        )
        wanted = [each for each in hierarchies().values() if each.wants(limits)]
        groups = {f"{each.base}/{PARENT}/{directory.id}": each for each in wanted}
        freezer = _freezer_base()
        if freezer is not None:
            groups.setdefault(f"{freezer}/{PARENT}/{directory.id}", CgroupHierarchy("memory", freezer, 1))
        directory.write("cgroups", "\n".join(groups))
        made: list[str] = []
        for path, hierarchy in groups.items():
            try:
                hierarchy.make(path)
                if hierarchy in wanted:
                    hierarchy.limit(path, limits)
            except OSError as error:
                if hierarchy in wanted:
                    raise SandboxError(f"bwrap: cgroup {path}: {error.strerror}") from None
                continue  # a jail that cannot be frozen is stopped by signals
            made.append(path)
        return made

    @staticmethod
    def freeze(directory: SandboxDirectory, frozen: bool) -> bool:
        """Freeze or thaw all processes of a jail; False if it has no cgroup for it."""
        for path in (directory.read("cgroups") or "").split("\n"):
            for name, words in (("cgroup.freeze", ("0", "1")), ("freezer.state", ("THAWED", "FROZEN"))):
                control = f"{path}/{name}"
                if not path or not os.path.exists(control):
                    continue
                with open(control, "w") as file:
                    file.write(words[frozen])
                if frozen:
                    _await_frozen(path, name)
                return True
        return False

    @staticmethod
    def remove(directory: SandboxDirectory) -> None:
        """Remove the cgroups of a jail whose processes have ended."""
        deadline = time.monotonic() + REMOVE_SECONDS
        for path in (directory.read("cgroups") or "").split("\n"):
            while path and os.path.isdir(path):
                try:
                    os.rmdir(path)
                except OSError as error:
                    if time.monotonic() > deadline:
                        raise SandboxError(f"cgroup {path}: cannot be removed: {error.strerror}") from None
                    time.sleep(0.01)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(path))


def _freezer_base() -> str | None:
    """The cgroup of this process in a hierarchy that can freeze: version 2, or the freezer of version 1."""
    with open("/proc/self/cgroup") as file:
        ours = [line.rstrip("\n").split(":", 2)[1:] for line in file]
    paths = {controller: path for names, path in ours for controller in names.split(",")}
    with open("/proc/self/mountinfo") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            kind, _, options, *_ = after.split()
            controller = "" if kind == "cgroup2" else "freezer"
            if (
                kind.startswith("cgroup")
                and controller in paths
                and (not controller or controller in options.split(","))
            ):
                return f"{before.split()[4]}{paths[controller].rstrip('/')}"
    return None


def _await_frozen(path: str, name: str) -> None:
    """Block until the kernel has stopped every process; it takes microseconds, and version 1 does not report it."""
    deadline = time.monotonic() + REMOVE_SECONDS
    file, sign = ("cgroup.events", "frozen 1") if name == "cgroup.freeze" else (name, "FROZEN")
    while True:
        with open(f"{path}/{file}") as state:
            if sign in state.read():
                return
        if time.monotonic() > deadline:
            raise SandboxError(f"cgroup {path}: cannot be frozen")
        time.sleep(0.001)
