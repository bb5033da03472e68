"""The output of one stream, addressed by absolute byte offset, in a sparse file of bounded size.

The pipe is spliced into the file, so the bytes never enter Python; an offset in the file is always the offset in
the stream. A long stream retains its head and its tail, and the middle is punched out:

    0          lost_start      lost_end           end
    |== head ==|... punched ...|===== tail =======|

Touches the files of its spool; has no access to processes or to the event loop.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Final, Protocol

from holdfast.errors import ResourceExhausted
from holdfast.runtime.libc import punch_hole
from holdfast.runtime.output.spool import FileSystem, choose_directory, file_system_of

PAGE: Final = 4096
#: The most that one call moves, so that a flood of output does not block the event loop.
MOVE_BYTES: Final = 1024 * 1024
#: The fraction of the retained size for the head: the first lines of a command show its purpose.
HEAD_FRACTION: Final = 16
#: A tail may exceed its bound by this fraction before it is cut, so that cuts are rare.
SLACK_FRACTION: Final = 8
SPOOL_PREFIX: Final = "holdfast-spool-"
SWEEP_AFTER_SECONDS: Final = 10.0
#: The errors of a full file system, and of a lack of descriptors.
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
#: The space that a command needs for its files and for a first page of each stream. On a spool without that much,
#: output would wait for space that may never be free.
COMMAND_BYTES: Final = 16 * 1024
COMMAND_FILES: Final = 8


class Spool:
    """A private directory of output files, and the sum of their sizes.

    `taken` is the path and the lock of a spool that an earlier server made; this server owns it from now on.
    """

    def __init__(self, directory: str = "", *, wanted_bytes: int = 0, taken: tuple[str, int] | None = None) -> None:
        """Without a `directory` one with `wanted_bytes` free is chosen, or the one with the most."""
        #: The kernel releases `lock` when the server ends, so other servers detect an abandoned spool.
        self.path, self.lock = taken or _make_spool(directory or choose_directory(wanted_bytes))
        self.used = 0
        #: Drops the least valuable output when the file system is full; False if there is none.
        self.make_room: Callable[[], bool] = lambda: False
        self._files = 0
        try:
            #: Whether ranges may be sent by reference (sendfile) and punched out before they have arrived.
            self.file_system = file_system_of(self.path)
            self.lends_pages = lends_pages(self.file_system)
            found = os.statvfs(self.path)
        except OSError as error:
            if taken is None:
                self.remove()
            raise ResourceExhausted(f"the spool {self.path} cannot be used: {error.strerror}") from None
        #: The size of the file system in bytes.
        self.size = found.f_blocks * found.f_frsize

    @property
    def free(self) -> int:
        """The free bytes of the file system."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def require_room(self) -> None:
        """Raise `ResourceExhausted` if another command has no room, after `make_room` has dropped all it can."""
        while (short := self._short()) and self.make_room():
            pass
        if short:
            raise ResourceExhausted(
                f"the spool {self.path} is full: {short}; make room there, or set spool_directory to another place"
            )

    def _short(self) -> str:
        """Return a message about the space that another command lacks; empty if it has enough."""
        found = os.statvfs(self.path)
        free = found.f_bavail * found.f_frsize
        if free < COMMAND_BYTES:
            return f"{free} of {self.size} bytes are free, and a command needs {COMMAND_BYTES}"
        # A file system with dynamic inodes reports none.
        if found.f_files and found.f_favail < COMMAND_FILES:
            return f"{found.f_favail} of {found.f_files} inodes are free, and a command needs {COMMAND_FILES}"
        return ""

    def open(self) -> tuple[int, str]:
        """Create a file; returns its descriptor and its path."""
        self._files += 1
        path = f"{self.path}/{self._files}"
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), path

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def _make_spool(parent: str) -> tuple[str, int]:
    path, lock = "", -1
    try:
        # Other users may traverse it: the shell of another user has its own files below.
        os.makedirs(parent, mode=0o711, exist_ok=True)
        sweep_spools(parent)
        path = tempfile.mkdtemp(prefix=SPOOL_PREFIX, dir=parent)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if lock >= 0:
            os.close(lock)
        if path:
            with contextlib.suppress(OSError):
                os.rmdir(path)
        raise ResourceExhausted(f"no spool can be made in {parent}: {error.strerror}") from None
    return path, lock


def lends_pages(on: FileSystem) -> bool:
    """Whether a page that a socket still refers to retains its bytes when the file frees it.

    True for tmpfs with pages of the usual size. Where the cache works in larger units (ext4, huge pages), punching
    a part of one zeroes bytes that are being sent to a reader: there, output is copied.
    """
    if on.kind != "tmpfs" or any(option.startswith("huge=") and option != "huge=never" for option in on.options):
        return False
    try:
        with open("/sys/kernel/mm/transparent_hugepage/shmem_enabled") as file:
            return "[force]" not in file.read()
    except OSError:
        return True  # a kernel without huge pages


def sweep_spools(parent: str) -> None:
    """Remove the spools of killed servers: their output would fill memory until the next boot."""
    for name in os.listdir(parent):
        if not name.startswith(SPOOL_PREFIX):
            continue
        path = os.path.join(parent, name)
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # of another user
        try:
            found = os.fstat(lock)
            if os.path.exists(f"{path}/ledger"):
                continue  # of a server with a keeper: the next server handles it (`abandoned_spool`)
            # A new spool is unlocked for an instant.
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > SWEEP_AFTER_SECONDS:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue  # the server lives
        finally:
            os.close(lock)


class RangeLease(Protocol):
    """A range of the file that is being sent to a slow reader, by descriptor."""

    def rescue(self) -> None:
        """Copy the unsent bytes: the range is about to be freed."""
        ...


class OutputLog:
    """The output of one stream. The file is opened at the first byte: most processes print little or nothing."""

    __slots__ = (
        "_head",
        "_path",
        "_punching",
        "_spool",
        "_tail",
        "end",
        "fd",
        "leases",
        "lost_end",
        "lost_start",
        "waits_for",
    )

    def __init__(self, spool: Spool, retained_bytes: int) -> None:
        self._spool = spool
        self._head = retained_bytes // HEAD_FRACTION // PAGE * PAGE
        self._tail = retained_bytes - self._head
        self._punching = True
        self._path = ""
        self.fd = -1
        self.end = 0
        self.lost_start = 0
        self.lost_end = 0
        #: The errors at which the bytes stay in the pipe for a retry. A lack of descriptors is short; a file system
        #: may be full for long.
        self.waits_for: frozenset[int] = NO_DESCRIPTORS
        #: At most one for each connection that is in the middle of a frame of this log.
        self.leases: set[RangeLease] = set()

    @property
    def lends_pages(self) -> bool:
        return self._spool.lends_pages

    @property
    def kept_bytes(self) -> int:
        return self.end - (self.lost_end - self.lost_start)

    @property
    def truncated(self) -> bool:
        return self.lost_end > self.lost_start

    @property
    def capacity(self) -> int:
        return self._head + self._tail

    @property
    def head_end(self) -> int:
        """The offset at which the lost range begins, or will begin."""
        return self.lost_start if self.truncated else self._head

    def move_from(self, pipe: int, limit: int = MOVE_BYTES) -> int:
        """Splice the bytes of the pipe into the log; returns their number, 0 at the end of file.

        Raises `BlockingIOError` if the pipe is empty for now, and another `OSError` that this log `waits_for`.
        """
        if self.fd < 0:
            return self._copy_from(pipe, limit)  # this may be the end of file and not the first byte
        try:
            moved = os.splice(pipe, self.fd, limit, offset_dst=self.end, flags=os.SPLICE_F_NONBLOCK)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno == errno.EINVAL:  # a file system without splice
                return self._copy_from(pipe, limit)
            if error.errno in NO_ROOM and self._spool.make_room():
                return self.move_from(pipe, limit)
            # EFBIG: over the server's RLIMIT_FSIZE, which more free space does not change.
            if error.errno in (NO_ROOM | {errno.EFBIG}) - self.waits_for:
                return self._drop_from(pipe, limit)
            raise
        self._grown(moved)
        return moved

    def append(self, data: bytes) -> None:
        """Write bytes to the log; for a terminal, which cannot be spliced."""
        try:
            if self.fd < 0:
                self._open()
        except OSError:
            # No descriptors, no room, or the spool was removed. The bytes are read already, so they are counted as
            # lost.
            self._lose(len(data))
            return
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self.fd, data[written:], self.end + written)
        except OSError as error:
            if error.errno not in NO_ROOM | {errno.EFBIG}:
                raise
            if error.errno in NO_ROOM and self._spool.make_room():
                self.append(data)
            else:
                self._lose(len(data))
            return
        self._grown(len(data))

    def read(self, offset: int, length: int) -> bytes:
        """Return up to `length` bytes at `offset`; short at the end or at a lost range, empty inside one."""
        if self.lost_start <= offset < self.lost_end or self.fd < 0:
            return b""
        stop = self.end if offset >= self.lost_end else min(self.end, self._first_lost())
        return os.pread(self.fd, max(0, min(length, stop - offset)), offset)

    def is_kept(self, offset: int, length: int) -> bool:
        """Whether all of this range is readable."""
        return offset >= self.lost_end or offset + length <= self._first_lost()

    def next_kept(self, offset: int) -> int:
        """The first byte at or after `offset` that is not lost."""
        return self.lost_end if self.lost_start <= offset < self.lost_end else offset

    def trim(self, floor: int | None = None) -> None:
        """Free the middle beyond the bound, but no byte at or after `floor`."""
        tail_start = max(self._head, self.end - self._tail)
        if floor is not None:
            tail_start = min(tail_start, floor)
        if tail_start <= self._head:
            return
        if not self.truncated:
            self.lost_start = self.lost_end = self._head
        if tail_start - self.lost_end > self._tail // SLACK_FRACTION:
            self._cut(tail_start)

    def shrink(self, floor: int | None = None) -> None:
        """Halve the retained size; for when all logs together exceed their limit."""
        self._tail = max(PAGE, self._tail // 2)
        self.trim(floor)

    def release(self, floor: int) -> bool:
        """Free the bytes before `floor`, the head last; returns whether a page was freed."""
        if self.fd < 0 or not self._punching or floor < self.lost_end:
            return False
        for start in (self.head_end, 0):
            first, last = -(-start // PAGE), floor // PAGE
            if first < last and (not self.truncated or start < self.lost_start or last > self.lost_end // PAGE):
                return self._release(start, floor)
        return False

    def contents(self) -> bytes:
        """Return all retained bytes, head and tail joined."""
        if self.fd < 0:
            return b""
        if not self.truncated:
            return os.pread(self.fd, self.end, 0)
        return os.pread(self.fd, self.lost_start, 0) + os.pread(self.fd, self.end - self.lost_end, self.lost_end)

    def tail(self, start: int, end: int, max_bytes: int) -> tuple[bytes, bool]:
        """Return the retained part of the last `max_bytes` of a range, and whether that is less than the range."""
        wanted = end - start
        start = max(start, end - max_bytes)
        pieces = [self.read(start, end - start)]
        if self.lost_start < end and start < self.lost_end:
            pieces.append(self.read(self.lost_end, end - self.lost_end))
        data = b"".join(pieces)
        return data, len(data) < wanted

    def close(self) -> None:
        """Drop all output, for readers too."""
        kept, fd = self.kept_bytes, self.fd
        try:
            if fd >= 0:
                self._rescue_leases()
                self._losing(0, self.end)
        finally:
            self.fd = -1
            self.lost_start, self.lost_end = 0, self.end
            if fd >= 0:
                self._spool.used -= kept
                _remove(fd, self._path)

    def _losing(self, start: int, end: int) -> None:
        """Called with the new lost range before its pages are freed."""

    def _rescue_leases(self) -> None:
        for lease in self.leases:
            lease.rescue()
        self.leases.clear()

    def _first_lost(self) -> int:
        return self.lost_start if self.truncated else self.end

    def _open(self) -> None:
        self.fd, self._path = self._spool.open()

    def _grown(self, amount: int) -> None:
        self.end += amount
        self._spool.used += amount

    def _lose(self, amount: int) -> None:
        """Count bytes that could not be stored, and drop the tail before them: the lost bytes stay one range."""
        kept = self.kept_bytes
        if not self.truncated:
            self.lost_start = min(self._head, self.end)
        self.end += amount
        self.lost_end = self.end
        self._spool.used -= kept - self.lost_start
        self._losing(self.lost_start, self.lost_end)
        if self.fd >= 0:
            self._rescue_leases()
            os.ftruncate(self.fd, self.lost_start)

    def _copy_from(self, pipe: int, limit: int) -> int:
        data = os.read(pipe, limit)
        if data:
            self.append(data)
        return len(data)

    def _drop_from(self, pipe: int, limit: int) -> int:
        """Read the pipe and count its bytes as lost: without room the process must not block."""
        data = os.read(pipe, limit)
        if data:
            self._lose(len(data))
        return len(data)

    def _cut(self, tail_start: int) -> None:
        self._losing(self.lost_start, tail_start)
        self._spool.used -= tail_start - self.lost_end
        if self._punching:
            self._punch(self.lost_end, tail_start)
        self.lost_end = tail_start
        if not self._punching:
            self._rewrite()

    def _release(self, start: int, stop: int) -> bool:
        former, kept = (self.lost_start, self.lost_end), self.kept_bytes
        self._losing(start, stop)
        self.lost_start, self.lost_end = start, stop
        self._punch(start, stop)
        if not self._punching:
            # No page was freed. A new file, as `_rewrite` makes it, needs room first.
            self.lost_start, self.lost_end = former
            self._losing(*former)
            return False
        self._spool.used -= kept - self.kept_bytes
        return True

    def _punch(self, start: int, stop: int) -> None:
        # Whole pages only: of a part of a page the kernel frees nothing and zeroes the bytes. The head may end
        # inside a page, if there was no room for more of it: that page stays.
        first = max(start // PAGE, -(-self.lost_start // PAGE)) * PAGE
        last = stop // PAGE * PAGE
        if last <= first:
            return
        self._rescue_leases()
        try:
            punch_hole(self.fd, first, last - first)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM):
                raise
            self._punching = False

    def _rewrite(self) -> None:
        """Copy the retained ranges to a new sparse file; for a file system without hole punching."""
        self._rescue_leases()
        fd, path = -1, ""
        try:
            fd, path = self._spool.open()
            for start, stop in ((0, self.lost_start), (self.lost_end, self.end)):
                while start < stop:
                    start += os.pwrite(fd, os.pread(self.fd, min(MOVE_BYTES, stop - start), start), start)
            self._replace(fd, path)
        except OSError:
            if fd >= 0 and fd != self.fd:
                _remove(fd, path)
            self._lose(0)  # the log must shrink: without a new file the tail is dropped

    def _replace(self, fd: int, path: str) -> None:
        """Switch to the new file, which has all retained bytes."""
        former, former_path = self.fd, self._path
        self.fd, self._path = fd, path
        _remove(former, former_path)


def _remove(fd: int, path: str) -> None:
    os.close(fd)
    # Removed by another program, or on a failing file system: the file is removed with the spool.
    with contextlib.suppress(OSError):
        os.unlink(path)
