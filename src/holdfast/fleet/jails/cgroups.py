"""The cgroups of jails: they limit a jail as a whole, and freeze it.

A jail has a cgroup below the one that its maker is in, in every hierarchy that its limits need. The cgroup that
freezes is made when the jail is first frozen: moving a process takes about ten milliseconds, a grace period of RCU.
The directories are noted beside the jail before they are made, so that any process can remove them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from holdfast.errors import SandboxError
from holdfast.fleet.directories import SandboxDirectory
from holdfast.fleet.template import Template
from holdfast.runtime.confine.resource_groups import Controller, hierarchies
from holdfast.runtime.tree.process_table import is_dead, stat_fields
from holdfast.types import Confinement

PARENT: Final = "holdfast-jails"
#: The field of a template that each controller enforces.
FIELDS: Final[dict[Controller, str]] = {"memory": "memory", "pids": "processes", "cpu": "cpus"}
#: A cgroup can be removed a moment after its last process has ended; the kernel does not report when.
REMOVE_SECONDS: Final = 5.0
#: Freezing takes microseconds, and longer on a busy machine; an attempt that takes longer is repeated.
FREEZE_SECONDS: Final = 5.0
FREEZE_ATTEMPT_SECONDS: Final = 0.1
#: Attempts to move or stop all processes of a jail while they fork.
MAX_ROUNDS: Final = 100


class _Switch(NamedTuple):
    """The values that freeze and thaw a cgroup, and the file and text that report a frozen one."""

    on: str
    off: str
    state_file: str
    frozen: str


_VERSION_1: Final = _Switch("FROZEN", "THAWED", "freezer.state", "FROZEN")
_VERSION_2: Final = _Switch("1", "0", "cgroup.events", "frozen 1")


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
        wanted = [each for each in hierarchies().values() if each.limits_any_of(limits)]
        groups = {f"{each.base}/{PARENT}/{directory.id}": each for each in wanted}
        if groups:
            directory.write("cgroups", "\n".join(groups))
        for path, hierarchy in groups.items():
            try:
                hierarchy.make(path)
                hierarchy.limit(path, limits)
            except OSError as error:
                raise SandboxError(f"bwrap: cgroup {path}: {error.strerror}") from None
        return list(groups)

    @staticmethod
    def freeze(directory: SandboxDirectory, members: Callable[[], Iterable[int]]) -> bool:
        """Freeze the processes of a jail, which `members` returns; False if no cgroup can be made for it."""
        control = _control(directory)
        if control is None and _join_freezer(directory, members):
            control = _control(directory)
        if control is None:
            return False
        _freeze(control)
        return True

    @staticmethod
    def thaw(directory: SandboxDirectory) -> bool:
        """Let the processes of a jail run again; False if it has no cgroup that freezes."""
        control = _control(directory)
        if control is None:
            return False
        _write(control, _switch(control).off)
        return True

    @staticmethod
    def remove(directory: SandboxDirectory) -> None:
        """Remove the cgroups of a jail whose processes have ended."""
        deadline = time.monotonic() + REMOVE_SECONDS
        for path in _paths(directory):
            while os.path.isdir(path):
                try:
                    os.rmdir(path)
                except OSError as error:
                    if time.monotonic() > deadline:
                        raise SandboxError(f"cgroup {path}: cannot be removed: {error.strerror}") from None
                    time.sleep(0.01)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(path))


def _paths(directory: SandboxDirectory) -> list[str]:
    return (directory.read("cgroups") or "").splitlines()


def _control(directory: SandboxDirectory) -> str | None:
    """The file that freezes a jail; version 2 has one in every cgroup."""
    for path in _paths(directory):
        for name in ("cgroup.freeze", "freezer.state"):
            if os.path.exists(f"{path}/{name}"):
                return f"{path}/{name}"
    return None


def _join_freezer(directory: SandboxDirectory, members: Callable[[], Iterable[int]]) -> bool:
    """Move the processes of a jail into a cgroup that freezes; False if there is none that can be written."""
    base = _freezer_base()
    if base is None:
        return False
    path = f"{base}/{PARENT}/{directory.id}"
    directory.write("cgroups", "\n".join([*_paths(directory), path]))
    try:
        os.makedirs(path, exist_ok=True)
        # Again while there are others: a process may fork before it is moved. Children of a moved one are inside,
        # and so a process that was born after the members were read is not counted.
        for _ in range(MAX_ROUNDS):
            found = set(members())
            with open(f"{path}/cgroup.procs") as file:
                inside = {int(line) for line in file}
            outside = [pid for pid in found - inside if _is_alive(pid)]
            if not outside:
                return True
            for pid in outside:
                _move(pid, path)
    except OSError:
        return False
    raise SandboxError(f"bwrap:{directory.id}: cannot be frozen: its processes fork too fast")


def _move(pid: int, path: str) -> None:
    """Move a process into a cgroup, unless it has ended."""
    try:
        _write(f"{path}/cgroup.procs", str(pid))
    except OSError:
        if _is_alive(pid):
            raise


def _is_alive(pid: int) -> bool:
    """Whether a process runs or can run. No cgroup lists a zombie, and a zombie does nothing to be stopped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return not is_dead(stat_fields(file.read()))
    except OSError:
        return False


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


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


def _switch(control: str) -> _Switch:
    return _VERSION_2 if control.endswith("cgroup.freeze") else _VERSION_1


def _freeze(control: str) -> None:
    """Freeze a cgroup and block until the kernel has stopped every process, which takes microseconds.

    Version 1 can remain in the state FREEZING: a parent in vfork cannot be stopped before its child executes a
    program, and the child may be stopped already. The cgroup is then thawed for a moment and frozen again.
    """
    switch = _switch(control)
    deadline = time.monotonic() + FREEZE_SECONDS
    while True:
        _write(control, switch.on)
        attempt_ends = time.monotonic() + FREEZE_ATTEMPT_SECONDS
        while time.monotonic() < attempt_ends:
            with open(f"{os.path.dirname(control)}/{switch.state_file}") as state:
                if switch.frozen in state.read():
                    return
            time.sleep(0.001)
        _write(control, switch.off)
        if time.monotonic() > deadline:
            raise SandboxError(f"cgroup {os.path.dirname(control)}: not frozen within {FREEZE_SECONDS:g} s")
        time.sleep(0.001)
