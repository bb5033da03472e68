"""`holdfast doctor`: shows which features of this machine the server can use, and the effect of missing ones.

Each probe examines one feature, changes nothing, and returns a `Diagnosis`. A probe never fails: an unknown result
is a diagnosis too.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from holdfast.cli.support.sandbox_option import JsonOption
from holdfast.cli.support.text import amount, show_table
from holdfast.config import ExecServerConfig
from holdfast.errors import HoldfastError, ResourceExhausted
from holdfast.runtime.output.spool import choose_directory, room_in
from holdfast.sandboxes.registry import KINDS
from holdfast.types import Struct

State = Literal["ok", "limited", "missing"]

HEADER: Final = ("WHAT", "STATE", "FOUND", "MEANS")
#: The limit for an engine or another program to answer; a daemon may hang.
_PROGRAM_SECONDS: Final = 5.0
_PR_GET_CHILD_SUBREAPER: Final = 37
#: Below this a flood of a few processes fills the spool: Docker gives 64 MiB.
_ENOUGH_SHM_BYTES: Final = 256 * 1024 * 1024
_ENOUGH_DESCRIPTORS: Final = 65_536


class Diagnosis(Struct, frozen=True):
    """One feature of the machine. `means` is its effect on holdfast."""

    name: str
    state: State
    found: str
    means: str


def command(as_json: JsonOption = False) -> int:
    """Show what this machine offers and what is missing."""
    findings = examine()
    if as_json:
        print(msgspec.json.encode(findings).decode())
    else:
        show_table(HEADER, [(f.name, f.state, f.found, f.means) for f in findings], wrap=True)
    return 0


def examine() -> list[Diagnosis]:
    """Return the results of all probes, in the order of the table."""
    findings = [probe() for probe in PROBES] + enforcement()
    return findings + [tool(*row) for row in TOOLS] + [engine(*row) for row in ENGINES] + [cluster()]


# --- the interpreter and the kernel ----------------------------------------------------------------------------


def python() -> Diagnosis:
    return Diagnosis("Python", "ok", f"{platform.python_version()} ({sys.executable})", "runs holdfast")


def kernel() -> Diagnosis:
    found = f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform == "linux":
        return Diagnosis("kernel", "ok", found, "can run the server")
    return Diagnosis("kernel", "limited", found, "the client works here; the server needs Linux")


def pidfd() -> Diagnosis:
    opener = getattr(os, "pidfd_open", None)
    if opener is not None:
        try:
            os.close(opener(os.getpid()))
        except OSError as error:
            return Diagnosis("pidfd", "missing", str(error.strerror), "the end of a process cannot be observed")
        return Diagnosis("pidfd", "ok", "pidfd_open", "the kernel reports the end of a process")
    return Diagnosis("pidfd", "missing", "not in this Python", "the server needs Linux 5.3 or newer")


def subreaper() -> Diagnosis:
    flag = ctypes.c_int()
    try:
        done = _libc().prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(flag), 0, 0, 0)
    except (OSError, AttributeError):
        done = -1
    if done == 0:
        return Diagnosis("subreaper", "ok", "prctl", "orphans of a process become children of the server")
    return Diagnosis("subreaper", "missing", "prctl refused", "double-forked children are found only by their mark")


def user_namespaces() -> Diagnosis:
    most = _read("/proc/sys/user/max_user_namespaces")
    switch = _read("/proc/sys/kernel/unprivileged_userns_clone")
    restricted = _read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    if not os.path.exists("/proc/self/ns/user") or most == "0":
        return Diagnosis("user namespaces", "missing", f"max {most or '-'}", "bubblewrap works for root only")
    if switch == "0" or restricted == "1":
        return Diagnosis("user namespaces", "limited", "root only", "bubblewrap works for root only")
    return Diagnosis("user namespaces", "ok", f"max {most or 'unknown'}", "bubblewrap works for every user")


# --- resources -------------------------------------------------------------------------------------------------


def terminals() -> Diagnosis:
    used, most = _read("/proc/sys/kernel/pty/nr"), _read("/proc/sys/kernel/pty/max")
    try:
        os.close(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
    except OSError as error:
        return Diagnosis("PTY", "missing", f"/dev/ptmx: {error.strerror}", "no process can have a terminal")
    return Diagnosis("PTY", "ok", f"{used or '?'} of {most or '?'} in use", "processes can have terminals")


def descriptors() -> Diagnosis:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    found = f"soft {_limit(soft)}, hard {_limit(hard)}"
    if most >= _ENOUGH_DESCRIPTORS:
        return Diagnosis(
            "descriptors", "ok", found, "the server raises its own limit; enough for thousands of processes"
        )
    return Diagnosis("descriptors", "limited", found, f"about {most // 8} processes at once")


def shared_memory() -> Diagnosis:
    try:
        room = os.statvfs("/dev/shm")
    except OSError as error:
        return Diagnosis("/dev/shm", "missing", str(error.strerror), "output is stored on disk")
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    found = f"{amount(free)} free of {amount(total)}"
    if not os.access("/dev/shm", os.W_OK):
        return Diagnosis("/dev/shm", "missing", f"{found}, not writable", "output is stored on disk")
    if free < _ENOUGH_SHM_BYTES:
        return Diagnosis("/dev/shm", "limited", found, "little space for output; set spool_directory or enlarge it")
    return Diagnosis("/dev/shm", "ok", found, "output is stored in memory")


def spool() -> Diagnosis:
    chosen = os.environ.get("HOLDFAST_SPOOL_DIRECTORY")
    if chosen:
        state: State = "ok" if os.access(chosen, os.W_OK) else "missing"
        return Diagnosis("spool", state, f"{chosen} (set)", "holds the output")
    try:
        chosen = choose_directory(ExecServerConfig().spool_minimum_bytes)
    except ResourceExhausted as error:
        return Diagnosis("spool", "missing", str(error), "set spool_directory")
    room = f"{chosen}, {amount(room_in(chosen) or 0)} free"
    state = "ok" if chosen == "/dev/shm" else "limited"
    return Diagnosis("spool", state, room, "holds the output unless spool_directory is set")


# --- control groups --------------------------------------------------------------------------------------------


def cgroup_v2() -> Diagnosis:
    mount = _cgroup_mount("cgroup2")
    if mount is None:
        return Diagnosis("cgroup v2", "missing", "not mounted", "processes are found by mark, tree and subreaper")
    own = _own_cgroup(mount)
    if os.access(own, os.W_OK) and os.access(os.path.join(own, "cgroup.procs"), os.W_OK):
        return Diagnosis("cgroup v2", "ok", f"{own}, writable", "each process can get a cgroup of its own")
    return Diagnosis("cgroup v2", "limited", f"{own}, not writable", "processes are contained without cgroups")


def cgroup_kill() -> Diagnosis:
    mount = _cgroup_mount("cgroup2")
    if mount is None:
        return Diagnosis("cgroup.kill", "missing", "no cgroup v2", "trees are killed process by process")
    # The root group has no such file: test our own group, or any other.
    groups = [_own_cgroup(mount), *(entry.path for entry in os.scandir(mount) if entry.is_dir())]
    if any(os.path.exists(os.path.join(group, "cgroup.kill")) for group in groups):
        return Diagnosis("cgroup.kill", "ok", "exists", "a whole tree is killed in one write")
    if _kernel_version() >= (5, 14):
        return Diagnosis("cgroup.kill", "ok", f"Linux {platform.release()}", "a whole tree is killed in one write")
    return Diagnosis(
        "cgroup.kill", "missing", f"Linux {platform.release()}", "needs 5.14; killed process by process"
    )


def cgroup_v1() -> Diagnosis:
    mount = _cgroup_mount("cgroup", "freezer")
    if mount is None:
        return Diagnosis("cgroup v1 freezer", "missing", "not mounted", "not needed where cgroup v2 is writable")
    if os.access(mount, os.W_OK):
        return Diagnosis("cgroup v1 freezer", "ok", f"{mount}, writable", "a tree can be frozen, then killed")
    return Diagnosis("cgroup v1 freezer", "limited", f"{mount}, not writable", "processes are contained without it")


# --- confinement ----------------------------------------------------------------------------------------------


def enforcement() -> list[Diagnosis]:
    """Try each feature that a confinement may use; docs/confinement.md describes them."""
    if sys.platform != "linux":
        return []
    from holdfast.runtime.confine.features import detect_features

    return [_offered(*feature) for feature in detect_features()]


def _offered(word: str, missing: str) -> Diagnosis:
    name, _, version = word.partition(":")
    shown, means = ENFORCED[name]
    if missing:
        return Diagnosis(shown, "missing", missing, f"a confinement cannot have {means}")
    return Diagnosis(
        shown, "ok", f"ABI {version}, tried" if version else "tried", f"a confinement can have {means}"
    )


# --- programs --------------------------------------------------------------------------------------------------


def tool(program: str, version_flag: str, means: str) -> Diagnosis:
    """Return whether a program that holdfast can use is installed."""
    path = shutil.which(program)
    if path is None:
        return Diagnosis(program, "missing", "not found", f"without it: no {means}")
    return Diagnosis(program, "ok", f"{path} {_first_line([path, version_flag])}".strip(), means)


def engine(program: str, arguments: tuple[str, ...], means: str, version: str = "") -> Diagnosis:
    """Return whether a client program is installed and its engine answers.

    The program prints a line, or, if `version` is given, JSON with the engine's version under these keys.
    """
    path = shutil.which(program)
    if path is None:
        return Diagnosis(program, "missing", "not found", f"without it: no {means}")
    succeeded, text = _query([path, *arguments], version)
    if succeeded:
        return Diagnosis(program, "ok", f"{path}, engine {text}", means)
    return Diagnosis(program, "limited", f"{path}, engine does not answer: {text}", f"no {means} until it answers")


def cluster() -> Diagnosis:
    """Return whether the API of a Kubernetes cluster is configured and answers."""
    from holdfast.sandboxes.kubernetes.pod import has_client

    means = f"Kubernetes sandboxes without kubectl ({KINDS['kubernetes'].form}), engine kubernetes"
    if not has_client():
        return Diagnosis("cluster", "missing", "the extra `kubernetes` is not installed", f"without it: no {means}")
    from holdfast.sandboxes.kubernetes.kubeconfig import config_paths, is_configured

    if not is_configured():
        paths = ", ".join(map(str, config_paths()))
        return Diagnosis("cluster", "missing", f"no {paths}, and this is not a pod", f"without it: no {means}")
    try:
        server, version = asyncio.run(_cluster_version())
    except (HoldfastError, TimeoutError) as error:
        text = f"does not answer: {error or f'no answer in {_PROGRAM_SECONDS:g} s'}"[:160]
        return Diagnosis("cluster", "limited", text, f"no {means} until it answers")
    return Diagnosis("cluster", "ok", f"{server}, {version}", means)


async def _cluster_version() -> tuple[str, str]:
    from holdfast.sandboxes.kubernetes.api import acquire, release

    api = acquire()
    try:
        async with asyncio.timeout(_PROGRAM_SECONDS):
            found = msgspec.json.decode(await api.request("GET", "/version", retry_seconds=0.0))
    finally:
        await release(api)
    return api.config.server, str(found["gitVersion"])


PROBES: Final[tuple[Callable[[], Diagnosis], ...]] = (
    python,
    kernel,
    pidfd,
    subreaper,
    descriptors,
    terminals,
    shared_memory,
    spool,
    cgroup_v2,
    cgroup_kill,
    cgroup_v1,
    user_namespaces,
)
#: By the names of `confine.features`: the name in the table, and the feature.
ENFORCED: Final = {
    "bubblewrap": ("bubblewrap jail", "a root and namespaces of its own"),
    "landlock": ("Landlock", "rights on paths, without a root of its own"),
    "seccomp": ("seccomp", "system calls refused"),
    "network": ("own network", "a network of its own, with a proxy or nothing in it"),
    "cgroup.memory": ("cgroup.memory", "the memory of a whole tree limited"),
    "cgroup.pids": ("cgroup.pids", "the number of processes of a whole tree limited"),
    "cgroup.cpu": ("cgroup.cpu", "the processor time of a whole tree limited"),
    "egress": ("egress proxy", "a list of hosts that may be reached"),
    "users": ("other users", "programs run as other users, each agent of a session service as its own"),
    "noexec": ("noexec mounts", "a list of programs that may be executed"),
}
TOOLS: Final = (
    ("bash", "--version", "shells with persistent state"),
    ("zsh", "--version", "zsh terminals"),
    ("dash", "", "dash shells"),
    ("bwrap", "--version", f"bubblewrap jails ({KINDS['bwrap'].form})"),
    ("ssh", "-V", f"sandboxes over ssh ({KINDS['ssh'].form})"),
)
ENGINES: Final = (
    ("docker", ("version", "--format", "{{.Server.Version}}"), f"Docker sandboxes ({KINDS['docker'].form})"),
    ("podman", ("version", "--format", "{{.Version}}"), f"Podman sandboxes ({KINDS['podman'].form})"),
    (
        "kubectl",
        ("version", "--output=json"),
        f"Kubernetes sandboxes through kubectl ({KINDS['kubernetes'].form}?via=kubectl)",
        "serverVersion.gitVersion",
    ),
)


def _query(argv: list[str], keys: str = "") -> tuple[bool, str]:
    """Return whether a program succeeded, and its most useful line, or the value in its JSON under these keys."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROGRAM_SECONDS)
    except subprocess.TimeoutExpired:
        return False, f"no answer in {_PROGRAM_SECONDS:g} s"
    except OSError as error:
        return False, str(error.strerror)
    text = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).decode(errors="replace").strip()
    if done.returncode == 0 and keys:
        return _found_in(text, keys)
    lines = text.splitlines() or [f"exit code {done.returncode}"]
    return done.returncode == 0, (lines[0] if done.returncode == 0 else lines[-1])[:120]


def _found_in(text: str, keys: str) -> tuple[bool, str]:
    try:
        found = msgspec.json.decode(text)
        for key in keys.split("."):
            found = found[key]
    except (msgspec.DecodeError, LookupError, TypeError):
        return False, f"no {keys} in what it printed"
    return True, str(found)[:120]


def _first_line(argv: list[str]) -> str:
    if not argv[-1]:
        return ""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROGRAM_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = (done.stdout or done.stderr).decode(errors="replace").splitlines()
    return f"({lines[0].strip()[:60]})" if lines else ""


def _cgroup_mount(kind: str, controller: str | None = None) -> str | None:
    for line in _read("/proc/self/mounts").splitlines():
        _, mount, found, options = line.split()[:4]
        if found == kind and (controller is None or controller in options.split(",")):
            return mount
    return None


def _own_cgroup(mount: str) -> str:
    for line in _read("/proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            return os.path.normpath(mount + "/" + line[3:])
    return mount


def _kernel_version() -> tuple[int, int]:
    major, minor = platform.release().split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
