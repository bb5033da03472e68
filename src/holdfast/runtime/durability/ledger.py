"""The file of `records` on the spool, each written before its fact counts.

A record is written with one system call and is there from then on: the page cache outlives the server. Touches one
file; knows nothing of processes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from holdfast import __version__
from holdfast.errors import ResourceExhausted, SandboxError
from holdfast.runtime.durability.records import (
    LEDGER_VERSION,
    AnyRecord,
    Head,
    decode_all,
    decode_records,
    encode_records,
    frame,
    frames,
)
from holdfast.runtime.libc import reserve

log = logging.getLogger(__name__)

#: A ledger below this size is not worth compacting.
COMPACT_BYTES: Final = 4 * 1024 * 1024
#: Room set aside behind the end of a ledger: some ten thousand records, for when the spool is full.
RESERVE_BYTES: Final = 1024 * 1024
#: So much of what could not be written is held in memory until there is room.
MAX_UNWRITTEN_BYTES: Final = 1024 * 1024

#: Gives the fewest records that tell the same as others.
Compaction = Callable[[Iterable[AnyRecord]], Iterable[AnyRecord]]


class Ledger:
    """The file, open for appending. What no longer matters is taken out by `compaction`, now and then.

    Room for `reserve_bytes` is set aside behind its end: a spool that others fill does not keep us from noting what
    becomes of processes that run. New ones are for `require_room` to refuse, while half of it is left.
    """

    def __init__(
        self,
        path: str,
        compaction: Compaction | None = None,
        head: Head | None = None,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        self.path = path
        self._head = () if head is None else (head,)
        self._reserve_bytes = reserve_bytes
        self._compaction = compaction
        self._encoder = msgspec.msgpack.Encoder()
        self._new_path = f"{path}.new"
        # Left by a server that was killed while it compacted: nothing reads it, and it holds the reserve's room.
        _unlink(self._new_path)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._compact_at = max(COMPACT_BYTES, self._size)
        self._thread: threading.Thread | None = None
        #: What the thread has made: the new file, its size, and up to where it tells the same as the old one.
        self._compacted: tuple[int, int, int] | None = None
        #: What found no room: it goes before what comes next.
        self._unwritten = bytearray()
        self._failed = False
        #: The file ends with a part of a record.
        self._torn = False
        #: The size at which more room is set aside, and why there was none.
        self._reserve_at = 0
        self._short = ""
        self._set_room_aside()
        if head is not None:
            self.write(head)

    def require_room(self) -> None:
        """Raise if what a new process needs to survive us might find no room."""
        if self._unwritten:
            self.write()
        if self._short:
            self._set_room_aside()
        if self._short or self._unwritten:
            raise ResourceExhausted(
                f"{self.path} cannot be written on ({self._short or 'no room'}): what is started now would not "
                "survive a restart of the server; make room there"
            )

    def write(self, *records: AnyRecord | Head) -> None:
        """Add records, all or none of them. When it returns, a new server will know."""
        if self._compacted is not None:
            self._change_over(*self._compacted)
        if len(records) == 1:  # nearly always
            data = frame(self._encoder, records[0])
        else:
            data = b"".join([frame(self._encoder, record) for record in records])
        if self._unwritten:
            data = bytes(self._unwritten) + data
        try:
            if self._torn:
                self._cut_torn_record()
            written = os.write(self._fd, data)
            if written < len(data):
                self._torn = True
                self._cut_torn_record()
                raise OSError(errno.ENOSPC, "no room")
        except OSError as error:
            self._put_off(data, error.strerror or str(error))
            return
        self._size += written
        if self._failed:
            self._failed = False
            self._unwritten.clear()
            log.warning("%s can be written again", self.path)
        if self._size > self._reserve_at:
            self._set_room_aside()
        if self._size > self._compact_at and self._thread is None and self._compaction is not None:
            self._compact_at = 2 * self._size  # not again if it fails
            self._compact_aside()

    def _cut_torn_record(self) -> None:
        """Remove the first part of a record whose rest found no room: it would hide all records after it."""
        os.ftruncate(self._fd, self._size)
        self._torn = False

    def _compact_aside(self) -> None:
        self._thread = threading.Thread(target=self._compact, args=(self._size,), name="holdfast-ledger")
        try:
            self._thread.start()
        except RuntimeError as error:  # no pids are left, or no memory
            self._thread = None
            log.warning("%s cannot be compacted: %s; it grows on", self.path, error)

    def close(self) -> None:
        try:
            self.settle()
        finally:
            os.close(self._fd)

    def settle(self) -> None:
        """Let a compaction that is under way come to its end."""
        thread = self._thread  # which sets it to None when it fails
        if thread is not None:
            thread.join()
        if self._compacted is not None:
            self._change_over(*self._compacted)

    def _compact(self, upto: int) -> None:
        """On a thread: what the first `upto` bytes tell, into a new file."""
        assert self._compaction is not None
        fd = -1
        try:
            records = self._compaction(decode_records(os.pread(self._fd, upto, 0)))
            data = encode_records((*self._head, *records))
            fd = os.open(self._new_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            _reserve(fd, 0, len(data) + self._reserve_bytes)
            if os.write(fd, data) < len(data):
                raise OSError(errno.ENOSPC, "no room")
        except (OSError, SandboxError, MemoryError) as error:
            if fd >= 0:
                os.close(fd)
                _unlink(self._new_path)
            log.warning("%s cannot be compacted: %s; it grows on", self.path, error)
            self._thread = None
            return
        self._compacted = (fd, len(data), upto)

    def _change_over(self, fd: int, size: int, upto: int) -> None:
        """The new file, with what was written since, takes the place of the old one in one step."""
        self._compacted = self._thread = None
        try:
            rest = os.pread(self._fd, self._size - upto, upto)
            if os.write(fd, rest) < len(rest):
                raise OSError(errno.ENOSPC, "no room")
            os.rename(self._new_path, self.path)
        except OSError as error:
            os.close(fd)
            _unlink(self._new_path)
            log.warning("%s cannot be compacted: %s; it grows on", self.path, error.strerror)
            return
        os.close(self._fd)
        self._fd, self._size = fd, size + len(rest)
        # Half of it will be garbage by then.
        self._compact_at = max(COMPACT_BYTES, 2 * self._size)
        self._set_room_aside()

    def _set_room_aside(self) -> None:
        try:
            _reserve(self._fd, self._size, self._reserve_bytes)
        except OSError as error:
            self._short = error.strerror or str(error)
            # Not at each record: a file system may go a long way before it finds that it is full.
            self._reserve_at = self._size + self._reserve_bytes // 16
        else:
            self._short = ""
            self._reserve_at = self._size + self._reserve_bytes // 2

    def _put_off(self, data: bytes, why: str) -> None:
        if len(data) <= MAX_UNWRITTEN_BYTES:
            self._unwritten[:] = data
        if not self._failed:
            self._failed = True
            log.error("%s cannot be written (%s): what happens now would not survive a restart", self.path, why)


def read_ledger(path: str) -> list[AnyRecord]:
    """Every whole record of a ledger, in order. What a dying server had written halfway is cut off.

    `SandboxError` if a later version wrote it, in a way that we do not understand; then nothing is changed.
    """
    return read_headed(path)[1]


def read_headed(path: str) -> tuple[Head | None, list[AnyRecord]]:
    """The same, and the head of the server that wrote last."""
    with open(path, "r+b") as file:
        data = file.read()
        head, records = None, []
        for record in decode_all(data, path):
            if not isinstance(record, Head):
                records.append(record)
                continue
            head = record
            if head.version > LEDGER_VERSION:
                raise SandboxError(
                    f"{path}: holdfast {head.program} wrote it in version {head.version}, and"
                    f" holdfast {__version__} knows {LEDGER_VERSION}: serve with that version, or a later one"
                )
        whole = max((end for _, end in frames(data)), default=0)
        if whole < len(data):
            file.truncate(whole)  # which gives up the room behind its end, too
    return head, records


def _unlink(path: str) -> None:
    """Remove a file, if it is there and can be removed: it only takes room."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _reserve(fd: int, offset: int, length: int) -> None:
    try:
        reserve(fd, offset, length)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):  # it has room when it has room, there
            raise


def boot_id() -> str:
    """What tells this run of the machine from others."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""  # hidden from us: then a spool of another boot is one whose processes are gone
