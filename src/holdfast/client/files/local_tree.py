"""A local directory that receives files of a sandbox, and outside of which nothing is written.

The sandbox may be hostile. Each name is checked; every step uses descriptors and follows no link, so that a link in
the tree cannot redirect a write. Blocking: call it in a thread.
"""

from __future__ import annotations

import os
import secrets
import stat
from typing import Final

from holdfast.errors import FileError, FileExists, IsADirectory

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Permission bits without setuid and setgid: the sandbox must not choose the rights of a local program.
MODE_BITS: Final = 0o777


class LocalTree:
    """The directory `root`, which is created if it is missing. Paths in it are tuples of names."""

    def __init__(self, root: str) -> None:
        self.root = root
        os.makedirs(root, exist_ok=True)
        # Held open, because its path could be redirected by a link while files arrive.
        self._fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._fd)

    def path(self, names: tuple[str, ...]) -> str:
        return os.path.join(self.root, *names)

    def open_directory(self, names: tuple[str, ...]) -> int:
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            for name in names:
                inner = os.open(check_name(name), _DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = inner
        except OSError:
            os.close(fd)
            raise
        return fd

    def make_directory(self, names: tuple[str, ...]) -> None:
        parent = self.open_directory(names[:-1])
        try:
            os.mkdir(check_name(names[-1]), 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(names[-1], dir_fd=parent).st_mode):
                raise FileExists(f"local file {self.path(names)}: exists and is not a directory") from None
        finally:
            os.close(parent)

    def finish_directory(self, names: tuple[str, ...], mode: int, mtime_ns: int) -> None:
        """Set mode and time, once the directory is complete."""
        fd = self.open_directory(names)
        try:
            os.utime(fd, ns=(mtime_ns, mtime_ns))
            os.fchmod(fd, mode & MODE_BITS)
        finally:
            os.close(fd)

    def make_link(self, names: tuple[str, ...], target: str) -> None:
        """Create a symbolic link, which must satisfy `stays_inside`."""
        parent = self.open_directory(names[:-1])
        temporary = _temporary_name(check_name(names[-1]))
        try:
            _check_no_directory(parent, names[-1], self.path(names))
            os.symlink(target, temporary, dir_fd=parent)
            os.rename(temporary, names[-1], src_dir_fd=parent, dst_dir_fd=parent)
        finally:
            os.close(parent)

    def begin_file(self, names: tuple[str, ...]) -> LocalFile:
        parent = self.open_directory(names[:-1])
        try:
            _check_no_directory(parent, check_name(names[-1]), self.path(names))
            return LocalFile(parent, names[-1])
        except BaseException:
            os.close(parent)
            raise


class LocalFile:
    """A file in transfer, under a temporary name until `finish`. Ends with that or `discard`."""

    def __init__(self, parent: int, name: str) -> None:
        self._parent = parent
        self._name = name
        self._temporary = _temporary_name(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._temporary, flags, 0o600, dir_fd=parent)
        self._open = True

    def write(self, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def finish(self, mode: int, mtime_ns: int) -> None:
        os.utime(self._fd, ns=(mtime_ns, mtime_ns))
        os.fchmod(self._fd, mode & MODE_BITS)
        os.rename(self._temporary, self._name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
        self._close()

    def discard(self) -> None:
        """Remove the temporary file; no effect after `finish`."""
        if self._open:
            os.unlink(self._temporary, dir_fd=self._parent)
            self._close()

    def _close(self) -> None:
        self._open = False
        os.close(self._fd)
        os.close(self._parent)


def check_name(name: str) -> str:
    """Check a file name from the sandbox: a path could lead anywhere."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise FileError(f"the sandbox sent {name!r}, which is not a file name")
    return name


def stays_inside(names: tuple[str, ...], target: str) -> bool:
    """Whether a link at `names` to `target` cannot lead out of the tree, whatever other links it passes.

    `..` is allowed at its beginning, through real directories, but not after a name: that name may be a link, and
    the parent of the link's target is not known.
    """
    steps = [step for step in target.split("/") if step not in ("", ".")]
    climbs = 0
    while climbs < len(steps) and steps[climbs] == "..":
        climbs += 1
    return not target.startswith("/") and ".." not in steps[climbs:] and climbs < len(names)


def _check_no_directory(parent: int, name: str, path: str) -> None:
    try:
        found = os.lstat(name, dir_fd=parent)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectory(f"local file {path}: is a directory")


def _temporary_name(name: str) -> str:
    return os.fsdecode(b".%s.holdfast-%s" % (os.fsencode(name)[:180], secrets.token_hex(8).encode()))
