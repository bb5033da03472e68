"""Input that reaches a process exactly once, also across a crash of the server.

Accepted input is appended to a file on the spool and recorded in the ledger; the kernel moves it from there into
the pipe (splice) or the terminal (sendfile), from the file's own position. The position belongs to the open file,
which the keeper holds too, so the next server has the exact number of delivered bytes. Touches one file and one
descriptor.
"""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING, Final

from holdfast.errors import ResourceExhausted, StdinClosed
from holdfast.runtime.libc import punch_hole
from holdfast.runtime.output.output_log import PAGE
from holdfast.runtime.process.input import InputQueue

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.runtime.durability.recorder import JobRecorder

#: Pages of delivered input are freed once they are this many bytes.
_FREE_BYTES: Final = 1024 * 1024
#: The most that one call moves; a pipe holds less.
_MOVE_BYTES: Final = 1024 * 1024


class DurableInput(InputQueue):
    """An input queue in a file, which is opened at the first write: most processes get no input."""

    __slots__ = ("_end", "_file", "_freed", "_recorder", "_sent", "_waits")

    def __init__(
        self, recorder: JobRecorder, fd: int, *, name: str, limit: int, owns_fd: bool, awaits_reader: bool
    ) -> None:
        super().__init__(fd, name=name, limit=limit, owns_fd=owns_fd, awaits_reader=awaits_reader)
        self._recorder = recorder
        self._file = -1
        #: Bytes accepted, bytes delivered, and delivered bytes with freed pages.
        self._end = 0
        self._sent = 0
        self._freed = 0
        self._waits = False

    def recall(self, write_ids: Iterable[str]) -> None:
        """Treat these ids as accepted: an earlier server accepted their writes."""
        for write_id in write_ids:
            self._remember(write_id)

    def resume(self, file: int, end: int) -> None:
        """Continue the delivery of an earlier server, which had accepted input up to `end`."""
        self._file, self._end = file, end
        # The server may have died between the write to the file and the record: then the caller writes again.
        os.ftruncate(file, end)
        self._sent = os.lseek(file, 0, os.SEEK_CUR)
        self._deliver_more()

    def close(self) -> None:
        if self._owns_fd and not self._closing:
            self._recorder.close_input()
        super().close()

    def abandon(self) -> None:
        self._end = self._sent
        super().abandon()

    def _accept(self, data: bytes, write_id: str | None) -> None:
        if self.on_put is not None:
            self.on_put(data)
        self._store(data)
        self._recorder.input_accepted(write_id, self._end)
        self._queued = self._end - self._sent
        if not self._waits and self._has_reader():
            self._deliver()

    def _reader_opened(self) -> None:
        self._deliver_more()

    @property
    def _is_empty(self) -> bool:
        return self._sent >= self._end

    def _store(self, data: bytes) -> None:
        try:
            if self._file < 0:
                self._file = self._recorder.open_input()
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._end + written)
        except OSError as error:
            raise ResourceExhausted(f"input of process {self._name!r} cannot be stored: {error.strerror}") from None
        self._end += len(data)

    def _deliver(self) -> None:
        """Deliver as much as the process accepts now; a writer callback delivers the rest."""
        try:
            while self._sent < self._end and self._fd >= 0:
                self._sent += self._move(min(self._end - self._sent, _MOVE_BYTES))
        except BlockingIOError:
            if not self._waits:
                self._waits = True
                asyncio.get_running_loop().add_writer(self._fd, self._deliver_more)
        except OSError:
            # EPIPE, EIO: the reader closed its end. The process may run on without input.
            self.abandon()
            raise StdinClosed(f"process {self._name!r} closed its stdin") from None
        self._queued = self._end - self._sent
        if self._sent - self._freed >= _FREE_BYTES:
            self._free_delivered()

    def _move(self, count: int) -> int:
        try:
            if self._owns_fd:
                return os.splice(self._file, self._fd, count, flags=os.SPLICE_F_NONBLOCK)
            return os.sendfile(self._fd, self._file, None, count)  # None: from the file's own position
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise
        # A file system or a terminal without splice and sendfile: only here can a crash repeat bytes.
        written = os.write(self._fd, os.pread(self._file, count, self._sent))
        os.lseek(self._file, self._sent + written, os.SEEK_SET)
        return written

    def _deliver_more(self) -> None:
        if not self._has_reader():
            return
        try:
            self._deliver()
        except StdinClosed:
            return  # waiters were woken; the next write raises
        if self._is_empty:
            if self._waits:
                self._waits = False
                asyncio.get_running_loop().remove_writer(self._fd)
            if self._closing:
                self._release()
        self._wake()

    def _free_delivered(self) -> None:
        """Free the pages of delivered input, where a pipe that refers to them keeps its bytes."""
        upto = self._sent // PAGE * PAGE
        if self._recorder.lends_pages and upto > self._freed:
            punch_hole(self._file, self._freed, upto - self._freed)
        self._freed = upto

    def _release(self) -> None:
        if self._fd >= 0 or self._file >= 0:
            self._waits = False
            self._recorder.let_go_of_input(self._owns_fd and self._fd >= 0, self._file)
            self._file = -1
        super()._release()
