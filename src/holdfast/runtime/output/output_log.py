"""Everything one stream printed, addressed by absolute byte offset, in a sparse file of bounded size.

The pipe is spliced into the file, so the bytes never enter Python; the offset in the file is the offset in the
stream, for ever. Of a long stream the head and the tail are kept and the middle is punched out:

    0          lost_start      lost_end           end
    |== head ==|... punched ...|===== tail =======|

Touches its spool's files only; knows no processes and no event loop.
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
from holdfast.runtime.output.spool import FileSystem, choose_place, file_system_of

PAGE: Final = 4096
#: At most this much is moved by one call, so that one flood does not hold the event loop.
MOVE_BYTES: Final = 1024 * 1024
#: Of what is kept, the part that belongs to the beginning: a command's first lines tell what it was about to do.
HEAD_FRACTION: Final = 16
#: A tail may exceed its bound by this fraction before it is cut, so that cutting is rare.
SLACK_FRACTION: Final = 8
SPOOL_PREFIX: Final = "holdfast-spool-"
SWEEP_AFTER_SECONDS: Final = 10.0
#: What the kernel says when there is no room for a file, and when there is no descriptor for it.
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
#: What a command needs to be run at all: its files, and a first page of each stream. On a spool without that much,
#: output would wait for room that may never come.
COMMAND_BYTES: Final = 16 * 1024
COMMAND_FILES: Final = 8


class Spool:
    """A private directory of output files, and how many bytes they hold together.

    `taken` is one that an earlier server made, its path and its lock: kept for us, and ours from now on.
    """

    def __init__(self, directory: str = "", *, wanted_bytes: int = 0, taken: tuple[str, int] | None = None) -> None:
        """Without a `directory` it is put where there are `wanted_bytes`, if they are anywhere."""
        #: `lock` is held while we live; the kernel lets go of it however we end, so others see that we are gone.
        self.path, self.lock = taken or _make_spool(directory or choose_place(wanted_bytes))
        self.used = 0
        #: Gives up what can best be spared, once there is no room; False if nothing can.
        self.make_room: Callable[[], bool] = lambda: False
        self._files = 0
        try:
            #: Whether ranges may be sent by reference (sendfile) and punched out while they are on their way.
            self.file_system = file_system_of(self.path)
            self.lends_pages = lends_pages(self.file_system)
            found = os.statvfs(self.path)
        except OSError as error:
            if taken is None:
                self.remove()
            raise ResourceExhausted(f"the spool {self.path} cannot be used: {error.strerror}") from None
        #: All the bytes there are.
        self.size = found.f_blocks * found.f_frsize

    @property
    def free(self) -> int:
        """Bytes that are free now."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def require_room(self) -> None:
        """Raise if there is no room for another command, after all was given up that can be."""
        while (short := self._short()) and self.make_room():
            pass
        if short:
            raise ResourceExhausted(
                f"the spool {self.path} is full: {short}; make room there, or set spool_directory to another place"
            )

    def _short(self) -> str:
        """What is missing for another command; empty if nothing is."""
        found = os.statvfs(self.path)
        free = found.f_bavail * found.f_frsize
        if free < COMMAND_BYTES:
            return f"{free} of {self.size} bytes are free, and a command needs {COMMAND_BYTES}"
        # A file system that makes inodes as it goes tells of none.
        if found.f_files and found.f_favail < COMMAND_FILES:
            return f"{found.f_favail} of {found.f_files} inodes are free, and a command needs {COMMAND_FILES}"
        return ""

    def open(self) -> tuple[int, str]:
        """A new file: its descriptor and its path."""
        self._files += 1
        path = f"{self.path}/{self._files}"
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), path

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def _make_spool(parent: str) -> tuple[str, int]:
    path, lock = "", -1
    try:
        # Others may pass through by name: the shell of another user has files of its own below.
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
    """Whether a page that a socket still refers to keeps its bytes when the file gives it back.

    True of tmpfs with pages of the usual size. Where the cache works in larger units (ext4, huge pages), punching a
    part of one zeroes bytes that are already on their way to a reader: there, output is copied.
    """
    if on.kind != "tmpfs" or any(option.startswith("huge=") and option != "huge=never" for option in on.options):
        return False
    try:
        with open("/sys/kernel/mm/transparent_hugepage/shmem_enabled") as file:
            return "[force]" not in file.read()
    except OSError:
        return True  # a kernel without huge pages


def sweep_spools(parent: str) -> None:
    """Remove what servers left that were killed: their output would fill memory until the next boot."""
    for name in os.listdir(parent):
        if not name.startswith(SPOOL_PREFIX):
            continue
        path = os.path.join(parent, name)
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # another user's
        try:
            found = os.fstat(lock)
            if os.path.exists(f"{path}/ledger"):
                continue  # of a kept server: the next one finds there what runs on, and ends it first
            # A spool just made is not locked yet for an instant.
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > SWEEP_AFTER_SECONDS:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue  # its server lives
        finally:
            os.close(lock)


class RangeLease(Protocol):
    """Somebody who is sending a range of the file to a slow reader, by descriptor."""

    def rescue(self) -> None:
        """Copy what is not sent yet: the range is about to be given back."""
        ...


class OutputLog:
    """One stream's output. The file is opened at the first byte: most processes print little or nothing."""

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
        #: The errors at which a pipe is left as it is, for later: nothing of it is lost. A want of descriptors is
        #: over soon; room may be wanting for long.
        self.waits_for: frozenset[int] = NO_DESCRIPTORS
        #: Few at a time: one a connection that is in the middle of a frame of this log.
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
        """Where what is lost begins, or will begin."""
        return self.lost_start if self.truncated else self._head

    def move_from(self, pipe: int, limit: int = MOVE_BYTES) -> int:
        """Splice what the pipe holds into the log; returns how much, 0 at its end.

        Raises `BlockingIOError` when the pipe is empty for now, and another `OSError` that this log `waits_for`.
        """
        if self.fd < 0:
            return self._copy_from(pipe, limit)  # it may be the end and not the first byte
        try:
            moved = os.splice(pipe, self.fd, limit, offset_dst=self.end, flags=os.SPLICE_F_NONBLOCK)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno == errno.EINVAL:  # a file system that does not take part in splicing
                return self._copy_from(pipe, limit)
            if error.errno in NO_ROOM and self._spool.make_room():
                return self.move_from(pipe, limit)
            # EFBIG: over our own RLIMIT_FSIZE, which no room of others' changes.
            if error.errno in (NO_ROOM | {errno.EFBIG}) - self.waits_for:
                return self._drop_from(pipe, limit)
            raise
        self._grown(moved)
        return moved

    def append(self, data: bytes) -> None:
        """Write bytes that had to be read anyway: a terminal cannot be spliced."""
        try:
            if self.fd < 0:
                self._open()
        except OSError:
            # No descriptors, no room, or somebody removed the spool. Raising would not help: the bytes are printed,
            # and more come.
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
        """Up to `length` bytes at `offset`; short where the log ends or a lost range begins, empty inside one."""
        if self.lost_start <= offset < self.lost_end or self.fd < 0:
            return b""
        stop = self.end if offset >= self.lost_end else min(self.end, self._first_lost())
        return os.pread(self.fd, max(0, min(length, stop - offset)), offset)

    def is_kept(self, offset: int, length: int) -> bool:
        """Whether all of this range can be read."""
        return offset + length <= self._first_lost() or offset >= self.lost_end

    def next_kept(self, offset: int) -> int:
        """The first byte at or after `offset` that is not lost."""
        return self.lost_end if self.lost_start <= offset < self.lost_end else offset

    def trim(self, floor: int | None = None) -> None:
        """Give back what is over the bound: the middle, and nothing at or after `floor`."""
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
        """Keep half as much from now on; for when all logs together hold too much."""
        self._tail = max(PAGE, self._tail // 2)
        self.trim(floor)

    def release(self, floor: int) -> bool:
        """Give back what lies before `floor`, the head only if there is nothing else; whether a page came free."""
        if self.fd < 0 or not self._punching or floor < self.lost_end:
            return False
        for start in (self.head_end, 0):
            first, last = -(-start // PAGE), floor // PAGE
            if first < last and (not self.truncated or start < self.lost_start or last > self.lost_end // PAGE):
                return self._release(start, floor)
        return False

    def contents(self) -> bytes:
        """All that is kept, head and tail joined."""
        if self.fd < 0:
            return b""
        if not self.truncated:
            return os.pread(self.fd, self.end, 0)
        return os.pread(self.fd, self.lost_start, 0) + os.pread(self.fd, self.end - self.lost_end, self.lost_end)

    def tail(self, start: int, end: int, max_bytes: int) -> tuple[bytes, bool]:
        """The latest `max_bytes` of a range, as far as they are kept, and whether that is less than all of it."""
        wanted = end - start
        start = max(start, end - max_bytes)
        pieces = [self.read(start, end - start)]
        if self.lost_start < end and start < self.lost_end:
            pieces.append(self.read(self.lost_end, end - self.lost_end))
        data = b"".join(pieces)
        return data, len(data) < wanted

    def close(self) -> None:
        """Forget everything: all of it is lost from now on, to a reader that is still there too."""
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
        """This range will be all that is lost; nothing of it was given back yet."""

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
        """Count bytes that were printed and could not be kept: the tail before them goes too, so that one range
        says what is lost."""
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
        """No room: the process goes on, and what it prints is counted as lost."""
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
            # Nothing was given back. A new file, as `_rewrite` makes it, needs room first.
            self.lost_start, self.lost_end = former
            self._losing(*former)
            return False
        self._spool.used -= kept - self.kept_bytes
        return True

    def _punch(self, start: int, stop: int) -> None:
        # Whole pages only: the kernel would zero the rest of a page that still holds kept bytes for nothing. The
        # head may end inside a page, if there was no room for more of it: that page stays.
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
        """Where holes cannot be punched: a new sparse file with the kept ranges at their old offsets."""
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
            self._lose(0)  # what is over the bound must go, and the tail with it if it can go nowhere

    def _replace(self, fd: int, path: str) -> None:
        """The new file has all that is kept."""
        former, former_path = self.fd, self._path
        self.fd, self._path = fd, path
        _remove(former, former_path)


def _remove(fd: int, path: str) -> None:
    os.close(fd)
    # Removed by others, or on a file system that fails: the file goes with the spool, and no caller could do more.
    with contextlib.suppress(OSError):
        os.unlink(path)
