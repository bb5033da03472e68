"""The file of records on the spool; each record is written before its fact takes effect.

A record is written by one system call and survives the server from then on, in the page cache. Touches one file;
has no access to processes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from typing import Final, ParamSpec

import msgspec

from holdfast import __version__
from holdfast.errors import ResourceExhausted, SandboxError
from holdfast.runtime.durability.records import (
    LEDGER_VERSION,
    Kinds,
    LedgerHead,
    LedgerRecord,
    decode_all,
    decode_records,
    encode_records,
    frame,
    frames,
)
from holdfast.runtime.libc import reserve

log = logging.getLogger(__name__)

P = ParamSpec("P")

#: A smaller ledger is not compacted.
COMPACT_BYTES: Final = 4 * 1024 * 1024
#: Space reserved after the end of a ledger: some ten thousand records, for a full spool.
RESERVE_BYTES: Final = 1024 * 1024
#: The bytes that are held in memory while the file cannot be written.
MAX_UNWRITTEN_BYTES: Final = 1024 * 1024

#: Returns the fewest records that describe the same state as the given ones.
Compaction = Callable[[Iterable[LedgerRecord]], Iterable[LedgerRecord]]


class NullLedger:
    """A ledger that stores nothing."""

    def record(self, make: Callable[P, LedgerRecord], *args: P.args, **kwargs: P.kwargs) -> None:
        """Return without a call of `make`."""

    def write(self, *records: LedgerRecord) -> None:
        """Ignore the records."""

    def require_room(self) -> None:
        """Return: no record needs room."""


class Ledger:
    """The file, open for appending; `compaction` removes obsolete records from time to time.

    `reserve_bytes` are reserved after the end of the file: on a spool that other programs fill, the fate of running
    processes can still be recorded. `require_room` refuses new processes while half of the reserve is left.
    """

    def __init__(
        self,
        path: str,
        compaction: Compaction | None = None,
        head: LedgerHead | None = None,
        reserve_bytes: int = RESERVE_BYTES,
        kinds: Kinds = (),
    ) -> None:
        """`kinds` are the record kinds of the server, beside those of the runtime."""
        self.path = path
        self._head = () if head is None else (head,)
        self._reserve_bytes = reserve_bytes
        self._kinds = kinds
        self._compaction = compaction
        self._encoder = msgspec.msgpack.Encoder()
        self._new_path = f"{path}.new"
        # A server that was killed during a compaction left this file; it occupies the space of the reserve.
        _unlink(self._new_path)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._compact_at = max(COMPACT_BYTES, self._size)
        self._thread: threading.Thread | None = None
        #: The result of the thread: the new file, its size, and the end of the part of the old file that it
        #: replaces.
        self._compacted: tuple[int, int, int] | None = None
        #: Records that could not be written; they are written before the next record.
        self._unwritten = bytearray()
        self._failed = False
        #: The file ends with a part of a record.
        self._torn = False
        #: The size at which more space is reserved, and the error of the last attempt.
        self._reserve_at = 0
        self._short = ""
        self._reserve_more()
        if head is not None:
            self.write(head)

    def require_room(self) -> None:
        """Raise `ResourceExhausted` if the records of a new process might find no room."""
        if self._unwritten:
            self.write()
        if self._short:
            self._reserve_more()
        if self._short or self._unwritten:
            raise ResourceExhausted(
                f"{self.path} cannot be written on ({self._short or 'no room'}): a process that is started now "
                "would not survive a restart of the server; make room there"
            )

    def record(self, make: Callable[P, LedgerRecord], *args: P.args, **kwargs: P.kwargs) -> None:
        """Append the record that `make` returns. A `NullLedger` builds none, so recording costs nothing there."""
        self.write(make(*args, **kwargs))

    def write(self, *records: LedgerRecord) -> None:
        """Append records, all or none of them; on return they survive the server."""
        if self._compacted is not None:
            self._switch_file(*self._compacted)
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
            self._hold_back(data, error.strerror or str(error))
            return
        self._size += written
        if self._failed:
            self._failed = False
            self._unwritten.clear()
            log.warning("%s can be written again", self.path)
        if self._size > self._reserve_at:
            self._reserve_more()
        if self._size > self._compact_at and self._thread is None and self._compaction is not None:
            self._compact_at = 2 * self._size  # not again if it fails
            self._compact_aside()

    def _cut_torn_record(self) -> None:
        """Remove a partly written record, which would hide all later records."""
        os.ftruncate(self._fd, self._size)
        self._torn = False

    def _compact_aside(self) -> None:
        self._thread = threading.Thread(target=self._compact, args=(self._size,), name="holdfast-ledger")
        try:
            self._thread.start()
        except RuntimeError as error:  # no pids are left, or no memory
            self._thread = None
            log.warning("%s cannot be compacted: %s; it continues to grow", self.path, error)

    def close(self) -> None:
        try:
            self.settle()
        finally:
            os.close(self._fd)

    def settle(self) -> None:
        """Wait for the end of a compaction that is under way."""
        thread = self._thread  # the thread sets the attribute to None when it fails
        if thread is not None:
            thread.join()
        if self._compacted is not None:
            self._switch_file(*self._compacted)

    def _compact(self, upto: int) -> None:
        """Write the state of the first `upto` bytes to a new file; runs on a thread."""
        assert self._compaction is not None
        fd = -1
        try:
            # Memory of its own, which is given back: the allocator would keep the megabytes for threads.
            old = mmap.mmap(-1, upto)
            os.preadv(self._fd, [old], 0)
            records = self._compaction(decode_records(memoryview(old), self._kinds))
            data = encode_records((*self._head, *records))
            fd = os.open(self._new_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            _reserve(fd, 0, len(data) + self._reserve_bytes)
            if os.write(fd, data) < len(data):
                raise OSError(errno.ENOSPC, "no room")
        except (OSError, SandboxError, MemoryError) as error:
            if fd >= 0:
                os.close(fd)
                _unlink(self._new_path)
            log.warning("%s cannot be compacted: %s; it continues to grow", self.path, error)
            self._thread = None
            return
        self._compacted = (fd, len(data), upto)

    def _switch_file(self, fd: int, size: int, upto: int) -> None:
        """Append the records written since to the new file, and rename it over the old one."""
        self._compacted = self._thread = None
        try:
            rest = os.pread(self._fd, self._size - upto, upto)
            if os.write(fd, rest) < len(rest):
                raise OSError(errno.ENOSPC, "no room")
            os.rename(self._new_path, self.path)
        except OSError as error:
            os.close(fd)
            _unlink(self._new_path)
            log.warning("%s cannot be compacted: %s; it continues to grow", self.path, error.strerror)
            return
        os.close(self._fd)
        self._fd, self._size = fd, size + len(rest)
        # By then half of the file is obsolete.
        self._compact_at = max(COMPACT_BYTES, 2 * self._size)
        self._reserve_more()

    def _reserve_more(self) -> None:
        try:
            _reserve(self._fd, self._size, self._reserve_bytes)
        except OSError as error:
            self._short = error.strerror or str(error)
            # Not at each record: a file system may search for long before it reports that it is full.
            self._reserve_at = self._size + self._reserve_bytes // 16
        else:
            self._short = ""
            self._reserve_at = self._size + self._reserve_bytes // 2

    def _hold_back(self, data: bytes, why: str) -> None:
        if len(data) <= MAX_UNWRITTEN_BYTES:
            self._unwritten[:] = data
        if not self._failed:
            self._failed = True
            log.error("%s cannot be written (%s): new facts would not survive a restart", self.path, why)


AnyLedger = Ledger | NullLedger


def read_ledger(path: str, kinds: Kinds = ()) -> tuple[LedgerHead | None, list[LedgerRecord]]:
    """Return the head of the last server that wrote, and every whole record; cuts off a partly written record.

    Raises `SandboxError`, and changes nothing, if a later version wrote the ledger in an unknown format.
    """
    with open(path, "r+b") as file:
        data = file.read()
        head, records = _decode(data, path, kinds)
        whole = max((end for _, end in frames(data)), default=0)
        if whole < len(data):
            file.truncate(whole)  # which frees the reserved space, too
    return head, records


def check_ledger(path: str, kinds: Kinds = ()) -> None:
    """Raise `SandboxError` if `read_ledger` of this version would. Changes nothing: a server may be writing."""
    with open(path, "rb") as file:
        _decode(file.read(), path, kinds)


def _decode(data: bytes, path: str, kinds: Kinds) -> tuple[LedgerHead | None, list[LedgerRecord]]:
    head, records = None, []
    for record in decode_all(data, path, kinds):
        if not isinstance(record, LedgerHead):
            records.append(record)
            continue
        head = record
        if head.version > LEDGER_VERSION:
            raise SandboxError(
                f"{path}: holdfast {head.program} wrote it in version {head.version}, and"
                f" holdfast {__version__} reads {LEDGER_VERSION}: serve with that version, or a later one"
            )
    return head, records


def _unlink(path: str) -> None:
    """Remove a file if it exists and can be removed."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _reserve(fd: int, offset: int, length: int) -> None:
    try:
        reserve(fd, offset, length)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):  # no reservation on this file system
            raise


def boot_id() -> str:
    """Return the id of this boot of the machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""  # not readable: then the processes of a spool show whether it is of this boot
