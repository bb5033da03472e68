"""Input that reaches a process exactly once, whatever becomes of the server. Touches one file and one descriptor.

What is accepted is appended to a file on the spool and noted in the ledger; from there the kernel moves it into the
pipe (splice) or the terminal (sendfile), from the file's own position. That position belongs to the open file,
which the keeper holds too: so the next server knows to the byte what was delivered.
"""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING, Final

from holdfast.errors import ResourceExhausted, StdinClosed
from holdfast.runtime.durability import records as r
from holdfast.runtime.libc import punch_hole
from holdfast.runtime.output.output_log import PAGE
from holdfast.runtime.process.input import InputQueue

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.runtime.durability.process_log import RecordNotes

#: Delivered input is given back once it is so much.
_GIVE_BACK_BYTES: Final = 1024 * 1024
#: At most this much is moved by one call; a pipe holds less.
_MOVE_BYTES: Final = 1024 * 1024


class KeptInput(InputQueue):
    """An input queue whose contents are a file. It is opened at the first write: most processes get none."""

    __slots__ = ("_end", "_file", "_given_back", "_notes", "_sent", "_waits")

    def __init__(
        self, fd: int, *, name: str, limit: int, owns_fd: bool, notes: RecordNotes, awaits_reader: bool = False
    ) -> None:
        super().__init__(fd, name=name, limit=limit, owns_fd=owns_fd, awaits_reader=awaits_reader)
        self._notes = notes
        self._file = -1
        #: How much was accepted, how much of it was delivered, and how much of that was given back.
        self._end = 0
        self._sent = 0
        self._given_back = 0
        self._waits = False

    def recall(self, write_ids: Iterable[str]) -> None:
        """An earlier server has accepted these, whatever became of the process since."""
        for write_id in write_ids:
            self._remember(write_id)

    def resume(self, file: int, end: int) -> None:
        """Go on where an earlier server was. `end` is what it had accepted."""
        self._file, self._end = file, end
        # It may have died after it wrote and before it accepted: then the caller writes again.
        os.ftruncate(file, end)
        self._sent = os.lseek(file, 0, os.SEEK_CUR)
        self._go_on()

    def close(self) -> None:
        if self._owns_fd and not self._closing:
            self._notes.close_input()
        super().close()

    def abandon(self) -> None:
        self._end = self._sent
        super().abandon()

    def _accept(self, data: bytes, write_id: str | None) -> None:
        if self.on_put is not None:
            self.on_put(data)
        self._store(data)
        self._notes.write(r.Written(self._notes.key, write_id, self._end))
        self._queued = self._end - self._sent
        if not self._waits and self._has_reader():
            self._deliver()

    def _reader_came(self) -> None:
        self._go_on()

    @property
    def _is_empty(self) -> bool:
        return self._sent >= self._end

    def _store(self, data: bytes) -> None:
        try:
            if self._file < 0:
                self._file = self._notes.open_input()
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._end + written)
        except OSError as error:
            raise ResourceExhausted(f"input of process {self._name!r} cannot be kept: {error.strerror}") from None
        self._end += len(data)

    def _deliver(self) -> None:
        """As much as the process takes now; the rest when it takes more."""
        try:
            while self._sent < self._end and self._fd >= 0:
                self._sent += self._move(min(self._end - self._sent, _MOVE_BYTES))
        except BlockingIOError:
            if not self._waits:
                self._waits = True
                asyncio.get_running_loop().add_writer(self._fd, self._go_on)
        except OSError:
            # EPIPE, EIO: the reader closed its end. The process may live on; its input is over.
            self.abandon()
            raise StdinClosed(f"process {self._name!r} closed its stdin") from None
        self._queued = self._end - self._sent
        if self._sent - self._given_back >= _GIVE_BACK_BYTES:
            self._give_back()

    def _move(self, count: int) -> int:
        try:
            if self._owns_fd:
                return os.splice(self._file, self._fd, count, flags=os.SPLICE_F_NONBLOCK)
            return os.sendfile(self._fd, self._file, None, count)  # None: from its own position
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise
        # A file system or a terminal that takes no part in this: here, and only here, a death could repeat bytes.
        written = os.write(self._fd, os.pread(self._file, count, self._sent))
        os.lseek(self._file, self._sent + written, os.SEEK_SET)
        return written

    def _go_on(self) -> None:
        if not self._has_reader():
            return
        try:
            self._deliver()
        except StdinClosed:
            return  # those who wait were woken; the next write is told
        if self._is_empty:
            if self._waits:
                self._waits = False
                asyncio.get_running_loop().remove_writer(self._fd)
            if self._closing:
                self._release()
        self._wake()

    def _give_back(self) -> None:
        """The pages of what was delivered, where a pipe that still refers to them keeps its bytes."""
        upto = self._sent // PAGE * PAGE
        if self._notes.lends_pages and upto > self._given_back:
            punch_hole(self._file, self._given_back, upto - self._given_back)
        self._given_back = upto

    def _release(self) -> None:
        if self._fd >= 0 or self._file >= 0:
            self._waits = False
            self._notes.let_go_of_input(self._owns_fd and self._fd >= 0, self._file)
            self._file = -1
        super()._release()
