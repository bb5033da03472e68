"""The paths of a confined process: the machine's programs, the paths of its confinement, and the hidden ones in
both.

Reads the file system and changes nothing. Errors name the path.
"""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

from holdfast.errors import InvalidParams
from holdfast.types import Confinement

#: Directories that programs of the machine need; those that are missing here are omitted.
SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix")
#: Sockets that control the machine: a process that can connect to one of them is not confined.
DANGEROUS: Final = (
    "/run/containerd",
    "/run/crio",
    "/run/dbus",
    "/run/docker.sock",
    "/run/podman",
    "/run/systemd",
    "/run/user",
    "/var/run/docker.sock",
)
#: The directories of programs. Those beside them, such as /usr/lib, have libraries and helpers of programs.
PROGRAM_DIRECTORIES: Final = (
    *("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/usr/games"),
    "/usr/local/games",
)
_LIBRARIES: Final = ("/lib", "/lib32", "/lib64", "/libx32", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec")
#: Each is a mount of its own, and the kernel's table of mounts is bounded for all jails together.
_MOST_PROGRAMS: Final = 500
_ETC_DEPTH: Final = 3
#: In the directory of a live shell, the directory of its named pipes to the server.
PIPES: Final = "pipes"


class VisiblePaths(NamedTuple):
    """Sorted paths that may be read, that may be written, and that lie in those and are hidden."""

    readable: tuple[str, ...]
    writable: tuple[str, ...]
    hidden: tuple[str, ...]
    #: Directories with named pipes of the server, which may be written to.
    pipes: tuple[str, ...] = ()

    def shows(self, path: str) -> bool:
        """Whether a path is visible to the process, and not below a mask."""
        over = [each for each in (*self.readable, *self.writable) if is_beneath(path, each)]
        masks = [each for each in self.hidden if is_beneath(path, each)]
        return bool(over) and max(map(len, over)) > max(map(len, masks), default=-1)


def visible_paths(confinement: Confinement, own: Collection[str]) -> VisiblePaths:
    """The paths of a confinement. `own` are directories of the server, visible only where they are named."""
    named = [*confinement.writable, *confinement.readable]
    for path in named:
        _check(path)
        if os.path.normpath(path) in own:
            raise InvalidParams(f"confinement: {path} holds files of the server itself")
    # The resolver's file may be a link out of /etc.
    resolver = os.path.realpath("/etc/resolv.conf")
    extra = [resolver] if confinement.network == "host" and os.path.isfile(resolver) else []
    writable = {os.path.normpath(path) for path in confinement.writable}
    readable = {path for path in (*SYSTEM, *extra) if os.path.exists(path)}
    readable |= {os.path.normpath(path) for path in confinement.readable}
    readable -= writable
    hidden = {os.path.realpath(path) for path in (*confinement.hidden, *own, *DANGEROUS) if os.path.exists(path)}
    if "/etc" in readable:
        hidden |= set(unreadable_for_others("/etc"))
    over = readable | writable
    needed = {path for path in hidden if path not in over and any(is_beneath(path, each) for each in over)}
    # The directory of a live shell is the only visible one among the server's own.
    shells = (path for path in readable if any(is_beneath(path, each) for each in own))
    pipes = [f"{path}/{PIPES}" for path in shells if os.path.isdir(f"{path}/{PIPES}")]
    return VisiblePaths(
        tuple(sorted(readable)), tuple(sorted(writable)), tuple(sorted(needed)), tuple(sorted(pipes))
    )


def program_files(patterns: Collection[str], always: Collection[str]) -> dict[str, str]:
    """The programs of the machine with these names and paths, each with its real file; and those in `always`."""
    found = {path: os.path.realpath(path) for path in always if os.path.exists(path)}
    named = {pattern for pattern in patterns if not set("*?[") & set(pattern)}
    wild = [pattern for pattern in patterns if pattern not in named]
    for directory in PROGRAM_DIRECTORIES:
        for entry in sorted(os.listdir(directory)) if os.path.isdir(directory) else ():
            path = os.path.join(directory, entry)
            if {entry, path} & named or any(
                fnmatch.fnmatchcase(path if "/" in each else entry, each) for each in wild
            ):
                found[path] = os.path.realpath(path)
    found = {path: real for path, real in found.items() if os.path.isfile(real)}
    if len(found) > _MOST_PROGRAMS:
        raise InvalidParams(f"confinement: `programs` are {len(found):,}, more than {_MOST_PROGRAMS}")
    return found


def library_directories() -> list[str]:
    """The directories of the loader, of libraries, and of helpers that programs run."""
    return [path for path in _LIBRARIES if os.path.isdir(path)]


def is_beneath(path: str, directory: str) -> bool:
    """Whether a path is a directory or below it."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def unreadable_for_others(directory: str, depth: int = _ETC_DEPTH) -> Iterator[str]:
    """The files in it that not every user may read: passwords and keys, which a root server would expose."""
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return  # no permission, so the process has none either
    for entry in entries:
        if entry.is_symlink():
            continue
        try:
            mode = entry.stat(follow_symlinks=False).st_mode
        except FileNotFoundError:
            continue  # removed since the directory was read
        needed = stat.S_IROTH | stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH
        if mode & needed != needed:
            yield entry.path
        elif stat.S_ISDIR(mode) and depth > 1:
            yield from unreadable_for_others(entry.path, depth - 1)


def _check(path: str) -> None:
    if not os.path.isabs(path) or "\0" in path:
        raise InvalidParams(f"confinement: {path!r} is not an absolute path")
    real = os.path.realpath(path)
    if not os.path.exists(real):
        raise InvalidParams(f"confinement: {path} does not exist")
    # A user that may write above it could have replaced it by a link to anywhere.
    if real != os.path.normpath(path):
        raise InvalidParams(f"confinement: {path} is a symbolic link, or below one: name {real}")
