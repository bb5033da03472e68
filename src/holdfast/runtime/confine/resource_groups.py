"""Cgroups that limit a whole tree: its memory, the number of its processes, its share of the processors.

Version 2 has them in one hierarchy, version 1 has one for each controller; a machine may have both (hybrid). Makes
directories below the server's own cgroup, and writes limits; the launcher joins them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import Final, Literal

from holdfast.errors import PermissionRefused
from holdfast.types import Confinement

Controller = Literal["memory", "pids", "cpu"]
CONTROLLERS: Final[tuple[Controller, ...]] = ("memory", "pids", "cpu")
#: The age of a cgroup that `sweep` removes: a start takes less than that, also on a busy machine.
NEW_SECONDS: Final = 60.0
#: The kernel's default: the period of a quota.
_PERIOD_US: Final = 100_000
#: The least quota that the kernel accepts.
_LEAST_QUOTA_US: Final = 1_000
#: Files of kernels with swap accounting, and with the OOM killing of whole groups.
_NOT_EVERYWHERE: Final = frozenset({"memory.swap.max", "memory.oom.group", "memory.memsw.limit_in_bytes"})


class CgroupHierarchy:
    """The hierarchy of one controller; cgroups are made below `base`, the server's own cgroup."""

    def __init__(self, controller: Controller, base: str, version: Literal[1, 2]) -> None:
        self.controller = controller
        self.base = base
        self.version = version

    def why_not(self) -> str:
        """Why no limit can be set here; empty if it can. Tries it."""
        trial = f"{self.base}/holdfast-{os.getpid()}-trial"
        try:
            self.make(trial)
            self.limit(trial, Confinement(total_memory_bytes=1 << 30, total_processes=1 << 10, cpu_cores=1.0))
        except OSError as error:
            return _explain(self, error)
        finally:
            for directory in (f"{trial}/1", trial):
                with contextlib.suppress(OSError):
                    os.rmdir(directory)
        return ""

    def make(self, path: str) -> None:
        """Make a cgroup that can be limited; version 2 needs the controller enabled at each level above it."""
        if self.version == 2:
            above = os.path.dirname(path)
            if above != self.base:
                os.makedirs(above, exist_ok=True)
            for directory in dict.fromkeys((self.base, above)):
                control = f"{directory}/cgroup.subtree_control"
                with open(control) as file:
                    if self.controller in file.read().split():
                        continue
                _write(control, f"+{self.controller}")
        os.makedirs(path, exist_ok=True)

    def limit(self, path: str, confinement: Confinement) -> None:
        for name, value in self._settings(confinement).items():
            try:
                _write(f"{path}/{name}", value)
            except FileNotFoundError:
                if name not in _NOT_EVERYWHERE:
                    raise

    def limits_any_of(self, confinement: Confinement) -> bool:
        return self._settings(confinement) != {}

    def _settings(self, confinement: Confinement) -> dict[str, str]:
        memory, processes, cores = (
            confinement.total_memory_bytes,
            confinement.total_processes,
            confinement.cpu_cores,
        )
        if self.controller == "memory" and memory is not None:
            if self.version == 2:
                return {"memory.max": str(memory), "memory.swap.max": "0", "memory.oom.group": "1"}
            # In this order: memory and swap together must not be less than memory.
            return {"memory.limit_in_bytes": str(memory), "memory.memsw.limit_in_bytes": str(memory)}
        if self.controller == "pids" and processes is not None:
            return {"pids.max": str(processes)}
        if self.controller == "cpu" and cores is not None:
            quota = max(_LEAST_QUOTA_US, int(cores * _PERIOD_US))
            if self.version == 2:
                return {"cpu.max": f"{quota} {_PERIOD_US}"}
            return {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(quota)}
        return {}


class ResourceGroups:
    """The limiting cgroups of one server, in one directory with the given name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._hierarchies = hierarchies()
        for hierarchy in self._hierarchies.values():
            sweep(hierarchy.base)

    def make(self, name: str, confinement: Confinement) -> list[str]:
        """Make directories with these limits for one process; `PermissionRefused` names the missing controller."""
        made: list[str] = []
        for controller in CONTROLLERS:
            if not CgroupHierarchy(controller, "", 2).limits_any_of(confinement):
                continue
            hierarchy = self._hierarchies.get(controller)
            try:
                if hierarchy is None:
                    raise PermissionRefused(f"confinement: no cgroup controller {controller} here")
                path = f"{hierarchy.base}/{self._name}/{name}"
                made.append(path)
                hierarchy.make(path)
                hierarchy.limit(path, confinement)
            except (OSError, PermissionRefused) as error:
                for each in made:
                    with contextlib.suppress(OSError):
                        os.rmdir(each)
                if hierarchy is None or not isinstance(error, OSError):
                    raise
                raise PermissionRefused(f"confinement: {_explain(hierarchy, error)}") from None
        return made

    def existing(self, name: str) -> list[str]:
        """The directories that an earlier server has made for a process."""
        paths = (f"{hierarchy.base}/{self._name}/{name}" for hierarchy in self._hierarchies.values())
        return [path for path in paths if os.path.isdir(path)]

    def close(self) -> None:
        for hierarchy in self._hierarchies.values():
            _remove_tree(f"{hierarchy.base}/{self._name}")


def hierarchies() -> dict[Controller, CgroupHierarchy]:
    """The mounted hierarchies; a controller of version 2 only where it is enabled for the server's cgroup."""
    with open("/proc/self/cgroup") as file:
        ours = [line.rstrip("\n").split(":", 2)[1:] for line in file]
    paths = {controller: path for names, path in ours for controller in names.split(",")}
    found: dict[Controller, CgroupHierarchy] = {}
    with open("/proc/self/mountinfo") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            mount, (kind, _, options, *_) = before.split()[4], after.split()
            if kind == "cgroup2" and "" in paths:
                base = f"{mount}{paths[''].rstrip('/')}"
                for controller in CONTROLLERS:
                    if controller in _read(f"{base}/cgroup.controllers").split():
                        found[controller] = CgroupHierarchy(controller, base, 2)
            elif kind == "cgroup":
                for controller in CONTROLLERS:
                    if controller in options.split(",") and controller in paths:
                        base = f"{mount}{paths[controller].rstrip('/')}"
                        found.setdefault(controller, CgroupHierarchy(controller, base, 1))
    return found


def _explain(hierarchy: CgroupHierarchy, error: OSError) -> str:
    if error.errno == errno.EBUSY and hierarchy.version == 2:
        return (
            f"cgroup controller {hierarchy.controller}: {hierarchy.base} has processes of its own, so nothing can "
            "be limited below it; start the server in a cgroup of its own below that"
        )
    return f"cgroup controller {hierarchy.controller}: {error.filename or hierarchy.base}: {error.strerror}"


def sweep(base: str) -> None:
    """Remove the cgroups of servers that were killed, except new ones.

    A server in another pid namespace lives although its pid does not exist here, and the process for which it has
    just made a cgroup may not have joined yet.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(base):
            prefix, _, rest = name.partition("-")
            pid = rest.partition("-")[0]
            if prefix == "holdfast" and pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
                _remove_tree(f"{base}/{name}", least_seconds=NEW_SECONDS)


def _remove_tree(parent: str, *, least_seconds: float = 0.0) -> None:
    """Remove a cgroup and those in it; cgroups with processes stay, and those that are younger."""
    with contextlib.suppress(OSError):
        for path in (*(f"{parent}/{name}" for name in os.listdir(parent)), parent):
            if os.path.isdir(path):
                with contextlib.suppress(OSError):
                    if time.time() - os.stat(path).st_mtime >= least_seconds:
                        os.rmdir(path)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(fd)
