"""The options of `bwrap` for one confined process. Pure: `paths` has read the file system.

bwrap gets them in a file and not on its command line, which every user can read, because they contain the
environment; and they contain it so that no variable of the process (LD_PRELOAD) takes effect outside of the jail.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Final

from holdfast.runtime.confine.paths import PROGRAM_DIRECTORIES, VisiblePaths, is_beneath
from holdfast.types import Confinement

HOSTNAME: Final = "holdfast"
#: A directory that hides another contains only mount points of the paths below it that are visible.
_MASK_BYTES: Final = 4096
#: For the program that changes the user: to change it, to empty the bounding set, and, for bwrap, to enter a
#: working directory that is closed to root without capabilities. That program drops them all, and so does bwrap's
#: own first process of the jail (verified with 0.8).
_TO_CHANGE_USER: Final = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_DAC_READ_SEARCH")
#: Root may write these without any capability; bwrap covers some of them, and not /proc/sys (verified with 0.8).
PROC_READ_ONLY: Final = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
#: These files describe the whole machine, and are of no use to a program in a jail.
PROC_HIDDEN: Final = (
    *("/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug"),
    *("/proc/scsi", "/proc/timer_list", "/proc/timer_stats"),
)


def options(
    confinement: Confinement,
    visible: VisiblePaths,
    *,
    environment: Mapping[str, str],
    cwd: str,
    as_root: bool,
    own_network: bool,
    directories: frozenset[str],
    proc: Collection[str],
    opened: Mapping[str, int],
    changes_user: bool = False,
    written: Mapping[str, int] | None = None,
    programs: Mapping[str, str] | None = None,
    scratch: Mapping[str, str] | None = None,
) -> list[str]:
    """The options. `own_network`: the process is already in a network namespace. `directories` are the hidden paths
    that are directories, `proc` the existing paths of `PROC_READ_ONLY` and `PROC_HIDDEN`, `opened` are paths that
    bwrap gets as a descriptor. `changes_user`: the first program in the jail drops root; `written` are files of the
    jail alone, with the descriptor of their content. `programs` is the whole content of the directories of
    programs, `scratch` are directories that were made for the jail, by their paths in it."""
    mounts = _mounts(confinement, visible, environment, directories, opened, home_mode(changes_user))
    for path, made in (scratch or {}).items():
        mounts[path] = ["--bind", made, path]
    for path, number in (written or {}).items():
        mounts[path] = ["--perms", "0644", "--ro-bind-data", str(number), path]
    if changes_user:
        # bwrap makes the directories above a private one private as well, for root.
        for path in {above for each in mounts for above in _above(each)} - mounts.keys():
            mounts[path] = ["--perms", "0755", "--dir", path]
    empty = []
    if programs is not None:
        empty = [path for path in PROGRAM_DIRECTORIES if visible.shows(path) and path in directories]
        mounts |= {path: ["--perms", "0755", "--size", str(_MASK_BYTES), "--tmpfs", path] for path in empty}
        mounts |= {path: ["--ro-bind", real, path] for path, real in programs.items() if visible.shows(path)}
    mounts |= {path: ["--ro-bind", path, path] for path in PROC_READ_ONLY if path in proc}
    mounts |= {path: _mask(path, directories) for path in PROC_HIDDEN if path in proc}
    words = [
        "--unshare-pid",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
        *([] if as_root else ["--unshare-user"]),
        *(["--unshare-net"] if confinement.network == "none" and not own_network else []),
        *("--hostname", HOSTNAME),
        *("--cap-drop", "ALL"),
        *(word for name in (_TO_CHANGE_USER if changes_user else ()) for word in ("--cap-add", name)),
    ]
    # A mount covers what is below it, so each comes after those above it.
    for path in sorted(mounts):
        words += mounts[path]
    masks = [path for path in sorted(mounts) if "0111" in mounts[path]]
    for path in (*reversed(masks), *empty, *(path for path in ("/dev", "/") if path not in visible.writable)):
        words += ["--remount-ro", path]
    words += ["--chdir", cwd, "--clearenv"]
    for name, value in environment.items():
        words += ["--setenv", name, value]
    return words


def _mounts(
    confinement: Confinement,
    visible: VisiblePaths,
    environment: Mapping[str, str],
    directories: frozenset[str],
    opened: Mapping[str, int],
    home_mode: str,
) -> dict[str, list[str]]:
    scratch = str(confinement.scratch_bytes)
    mounts = {
        "/dev": ["--dev", "/dev"],
        "/dev/shm": ["--perms", "1777", "--size", scratch, "--tmpfs", "/dev/shm"],
        "/proc": ["--proc", "/proc"],
        "/tmp": ["--perms", "1777", "--size", scratch, "--tmpfs", "/tmp"],
    }
    if not visible.shows("/var"):
        mounts["/var/tmp"] = ["--symlink", "../tmp", "/var/tmp"]
    home = scratch_home(visible, environment)
    if home is not None:
        mounts[home] = ["--perms", home_mode, "--size", scratch, "--tmpfs", home]
    for path in visible.hidden:
        if path in mounts:
            continue  # a mount of the jail covers it
        mounts[path] = _mask(path, directories)
    for path in visible.readable:
        mounts[path] = _bind("--ro-bind", path, opened)
    for path in visible.writable:
        mounts[path] = _bind("--bind", path, opened)
    return mounts


def _above(path: str) -> list[str]:
    """The directories between the root and a path."""
    names = path.strip("/").split("/")[:-1]
    return ["/" + "/".join(names[: index + 1]) for index in range(len(names))]


def home_mode(changes_user: bool) -> str:
    """The mode of the home directory, which root makes: a user that the jail changes to must be able to write."""
    return "1777" if changes_user else "0700"


def scratch_home(visible: VisiblePaths, environment: Mapping[str, str]) -> str | None:
    """The home directory, if the jail gets an empty one."""
    home = os.path.normpath(environment.get("HOME", "/"))
    given = home == "/" or not os.path.isabs(home) or visible.shows(home) or is_beneath(home, "/tmp")
    return None if given else home


def _bind(option: str, path: str, opened: Mapping[str, int]) -> list[str]:
    return [f"{option}-fd", str(opened[path]), path] if path in opened else [option, path, path]


def _mask(path: str, directories: frozenset[str]) -> list[str]:
    if path in directories:
        return ["--perms", "0111", "--size", str(_MASK_BYTES), "--tmpfs", path]
    return ["--ro-bind", "/dev/null", path]
