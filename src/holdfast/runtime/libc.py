"""System calls that the standard library lacks, through ctypes; touches nothing but the C library.

Each function raises `OSError` with the right errno, so callers treat them like functions of `os`.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import signal
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

_libc: Final = ctypes.CDLL(None, use_errno=True)

# fallocate(2)
_FALLOC_FL_KEEP_SIZE: Final = 0x01
_FALLOC_FL_PUNCH_HOLE: Final = 0x02

# prctl(2)
_PR_SET_CHILD_SUBREAPER: Final = 36

# ioctl_tty(2)
_TIOCGPTPEER: Final = 0x5441

# statx(2), by its number: the C library of Alpine Linux has it since 2024
_STATX_CALL: Final = {"x86_64": 332, "aarch64": 291}
_AT_FDCWD: Final = -100
_AT_STATX_DONT_SYNC: Final = 0x4000
_STATX_TYPE_AND_INO: Final = 0x101
#: stx_mode and stx_ino; major and minor of stx_rdev, and of stx_dev.
_STATX: Final = struct.Struct("=28xH2xQ88x4I")

# close_range(2), the same number on every machine; in the C library since glibc 2.34
_CLOSE_RANGE_CALL: Final = 436
_CLOSE_RANGE_UNSHARE: Final = 2

# spawn.h, the same numbers in glibc and musl
_POSIX_SPAWN_SETSIGDEF: Final = 0x04
_POSIX_SPAWN_SETSIGMASK: Final = 0x08
_POSIX_SPAWN_SETSID: Final = 0x80

#: Larger than posix_spawnattr_t (336 bytes), posix_spawn_file_actions_t (80) and sigset_t (128) anywhere.
_OPAQUE_BYTES: Final = 512

_fallocate: Final = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_posix_spawn: Final = _libc.posix_spawn
_inotify_add_watch: Final = _libc.inotify_add_watch
_inotify_add_watch.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]
_add_chdir: Final = _libc.posix_spawn_file_actions_addchdir_np
#: glibc 2.34; elsewhere all descriptors are close-on-exec anyway.
_add_closefrom: Final = getattr(_libc, "posix_spawn_file_actions_addclosefrom_np", None)


def _last_error(path: str | None = None) -> OSError:
    error = ctypes.get_errno()
    return OSError(error, os.strerror(error), path)


def reserve(fd: int, offset: int, length: int) -> None:
    """Allocate blocks for this range of a file, which may be behind its end; its length and its bytes stay."""
    if _fallocate(fd, _FALLOC_FL_KEEP_SIZE, offset, length) != 0:
        raise _last_error()


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Free the blocks of this range of a file; its length and all other bytes stay."""
    if _fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, length) != 0:
        raise _last_error()


class FileIdentity(NamedTuple):
    """The type and the identity of a file."""

    mode: int
    device: int
    inode: int
    #: The number of a device file.
    node: int


def stat_cached(path: str) -> FileIdentity:
    """As os.stat(), from the kernel's cache: a network or FUSE file system that hangs does not block the caller."""
    found = ctypes.create_string_buffer(256)
    number = _STATX_CALL[os.uname().machine]
    if _libc.syscall(number, _AT_FDCWD, os.fsencode(path), _AT_STATX_DONT_SYNC, _STATX_TYPE_AND_INO, found) != 0:
        raise _last_error(path)
    mode, inode, *numbers = _STATX.unpack_from(found)
    return FileIdentity(mode, os.makedev(numbers[2], numbers[3]), inode, os.makedev(numbers[0], numbers[1]))


def open_pty_peer(master: int, flags: int) -> int:
    """Open the other side of a PTY, the one that programs have, by its `master`."""
    fd: int = fcntl.ioctl(master, _TIOCGPTPEER, flags | os.O_NOCTTY | os.O_CLOEXEC)
    return fd


def open_inotify() -> int:
    """A descriptor of inotify(7), readable whenever an event of a watched directory is queued."""
    fd: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise _last_error()
    return fd


def add_inotify_watch(fd: int, path: str, mask: int) -> int:
    """Watch a file or a directory; returns the watch's number, the same one for the same inode."""
    number: int = _inotify_add_watch(fd, os.fsencode(path), mask)
    if number < 0:
        raise _last_error(path)
    return number


def remove_inotify_watch(fd: int, number: int) -> None:
    if _libc.inotify_rm_watch(fd, number) != 0:
        raise _last_error()


def child_signals() -> int:
    """A descriptor that is readable whenever a child has exited: SIGCHLD, which is blocked from now on.

    Cheaper than a handler, which would run Python for every child.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
    signals = ctypes.create_string_buffer(_OPAQUE_BYTES)
    _libc.sigemptyset(signals)
    _libc.sigaddset(signals, int(signal.SIGCHLD))
    fd: int = _libc.signalfd(-1, signals, os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise _last_error()
    return fd


def unshare_descriptors(keep: int) -> None:
    """Give the calling thread a descriptor table of its own, with the standard descriptors and `keep` (at least 3).

    The other threads keep theirs. Needs no privilege, unlike unshare(2) in many containers.
    """
    last = ctypes.c_uint(-1)
    if _libc.syscall(_CLOSE_RANGE_CALL, ctypes.c_uint(keep + 1), last, _CLOSE_RANGE_UNSHARE) != 0:
        raise _last_error()
    os.closerange(3, keep)


def become_subreaper() -> None:
    """Make this process the subreaper: orphaned descendants become its children instead of init's."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise _last_error()


@functools.cache
def _spawn_attributes() -> ctypes.Array[ctypes.c_char]:
    """Spawn attributes: a new session, every signal at its default, no signal blocked."""
    attributes = ctypes.create_string_buffer(_OPAQUE_BYTES)
    signals = ctypes.create_string_buffer(_OPAQUE_BYTES)
    _check(_libc.posix_spawnattr_init(attributes))
    _libc.sigfillset(signals)
    _check(_libc.posix_spawnattr_setsigdefault(attributes, signals))
    _libc.sigemptyset(signals)
    _check(_libc.posix_spawnattr_setsigmask(attributes, signals))
    flags = _POSIX_SPAWN_SETSID | _POSIX_SPAWN_SETSIGDEF | _POSIX_SPAWN_SETSIGMASK
    _check(_libc.posix_spawnattr_setflags(attributes, ctypes.c_short(flags)))
    return attributes


class SpawnPlan:
    """The file actions of one posix_spawn(3), in the order in which the child applies them.

    They run after setsid, so that a terminal opened by `open` becomes the controlling terminal.
    """

    def __init__(self) -> None:
        self._actions = ctypes.create_string_buffer(_OPAQUE_BYTES)
        _check(_libc.posix_spawn_file_actions_init(self._actions))

    def chdir(self, path: bytes) -> None:
        _check(_add_chdir(self._actions, path))

    def open(self, fd: int, path: bytes, flags: int) -> None:
        _check(_libc.posix_spawn_file_actions_addopen(self._actions, fd, path, flags, 0))

    def dup2(self, source: int, target: int) -> None:
        _check(_libc.posix_spawn_file_actions_adddup2(self._actions, source, target))

    def close_from(self, lowest: int) -> None:
        if _add_closefrom is not None:
            _check(_add_closefrom(self._actions, lowest))

    def run(self, path: bytes, argv: Sequence[bytes], environment: Sequence[bytes]) -> int:
        """Start the program; returns its pid. Blocks until the exec has happened or failed (vfork)."""
        pid = ctypes.c_int()
        arguments = (ctypes.c_char_p * (len(argv) + 1))(*argv, None)
        variables = (ctypes.c_char_p * (len(environment) + 1))(*environment, None)
        attributes = _spawn_attributes()
        try:
            _check(_posix_spawn(ctypes.byref(pid), path, self._actions, attributes, arguments, variables))
        finally:
            _libc.posix_spawn_file_actions_destroy(self._actions)
        return pid.value


def _check(error: int) -> None:
    """Raise `OSError` for the errno that a spawn function returned."""
    if error != 0:
        raise OSError(error, os.strerror(error))
