"""The queue of input for a process's stdin, in order and bounded. Touches one descriptor.

A write goes directly into the pipe if the pipe has room and the queue is empty. Else it is queued, and the writer
waits while the queue exceeds its bound: back-pressure from a process that does not read.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from holdfast.errors import StdinClosed

#: Write ids that are retained: a client repeats only writes that were unanswered when its connection broke.
RETAINED_WRITE_IDS: Final = 1_024
#: The first interval, and the longest, of polls for a reader of a named pipe: the kernel does not report one to a
#: writer.
READER_POLL_SECONDS: Final = (0.001, 0.05)
#: The end of input on a terminal; the descriptor must stay open for the terminal's output.
END_OF_TRANSMISSION: Final = b"\x04"


class InputQueue:
    """Serialises writers. `fd` is non-blocking; -1 is a stdin that was closed from the start.

    With `awaits_reader`, `fd` is the writing end of a named pipe without a reader yet, or is set later by `open`.
    The queue neither writes to the pipe nor closes it before it has a reader: a reader that opens a pipe without a
    writer would block.
    """

    __slots__ = (
        "_awaits_reader",
        "_closing",
        "_drained",
        "_fd",
        "_limit",
        "_name",
        "_owns_fd",
        "_queue",
        "_queued",
        "_reader_poll",
        "_writes",
        "on_put",
    )

    def __init__(self, fd: int, *, name: str, limit: int, owns_fd: bool, awaits_reader: bool = False) -> None:
        self._fd = fd
        self._awaits_reader = awaits_reader
        self._reader_poll: asyncio.TimerHandle | None = None
        self._name = name
        self._limit = limit
        self._owns_fd = owns_fd
        self._queue: deque[memoryview] = deque()
        self._queued = 0
        self._drained: asyncio.Event | None = None
        self._closing = fd < 0 and not awaits_reader
        self._writes: OrderedDict[str, None] = OrderedDict()
        #: Called with accepted input before it is written.
        self.on_put: Callable[[bytes], None] | None = None

    def open(self, fd: int) -> None:
        """Set the writing end of the named pipe."""
        self._fd = fd
        if self._closing or not self._is_empty:
            self._has_reader()

    def _has_reader(self) -> bool:
        """Whether input can be written; without a reader, start to poll for one."""
        if self._awaits_reader and self._reader_poll is None and self._fd >= 0:
            self._poll_for_reader(READER_POLL_SECONDS[0])
        return not self._awaits_reader

    def _poll_for_reader(self, seconds: float) -> None:
        self._reader_poll = None
        poll = select.poll()
        poll.register(self._fd, 0)  # POLLERR, which a pipe without a reader has, is always reported
        if poll.poll(0):
            later = min(2 * seconds, READER_POLL_SECONDS[1])
            self._reader_poll = asyncio.get_running_loop().call_later(seconds, self._poll_for_reader, later)
            return
        self._awaits_reader = False
        self._reader_opened()

    def _reader_opened(self) -> None:
        if self._queue:
            asyncio.get_running_loop().add_writer(self._fd, self._flush)
        elif self._closing:
            self._release()

    @property
    def queued_bytes(self) -> int:
        return self._queued

    async def write(self, data: bytes, write_id: str | None = None) -> None:
        """Accept `data`, once for each `write_id`; returns when the queue is within its bound again."""
        self.put(data, write_id)
        await self.wait_for_room()

    def put(self, data: bytes, write_id: str | None = None) -> None:
        """Accept `data` without waiting. Await `wait_for_room` next, or the queue is unbounded."""
        if write_id is not None and write_id in self._writes:
            return
        if self._closing:
            raise StdinClosed(f"stdin of process {self._name!r} is closed")
        self._accept(data, write_id)
        if write_id is not None:
            self._remember(write_id)

    def has_taken(self, write_id: str) -> bool:
        """Whether a write with this id was accepted, among the latest ones."""
        return write_id in self._writes

    def _remember(self, write_id: str) -> None:
        self._writes[write_id] = None
        if len(self._writes) > RETAINED_WRITE_IDS:
            self._writes.popitem(last=False)

    @property
    def has_room(self) -> bool:
        return self._queued <= self._limit

    async def wait_for_room(self) -> None:
        while not self.has_room:
            if self._drained is None:
                self._drained = asyncio.Event()
            await self._drained.wait()

    def close(self) -> None:
        """Close the input after the queued bytes; a terminal gets Ctrl-D."""
        if self._closing:
            return
        if not self._owns_fd:
            self._accept(END_OF_TRANSMISSION, None)
            return
        self._closing = True
        if self._has_reader() and self._is_empty:
            self._release()

    @property
    def _is_empty(self) -> bool:
        return not self._queue

    def abandon(self) -> None:
        """Drop the queue and wake all waiters: the process has ended."""
        self._closing = True
        self._awaits_reader = False
        self._queue.clear()
        self._queued = 0
        self._release()

    def _accept(self, data: bytes, write_id: str | None) -> None:
        if self.on_put is not None:
            self.on_put(data)
        view = memoryview(data)
        has_reader = self._has_reader()
        if has_reader and not self._queue:
            view = view[self._write(view) :]
        if view and (self._fd >= 0 or not has_reader):
            if has_reader and not self._queue:
                asyncio.get_running_loop().add_writer(self._fd, self._flush)
            self._queue.append(view)
            self._queued += len(view)

    def _write(self, view: memoryview) -> int:
        try:
            return os.write(self._fd, view)
        except BlockingIOError:
            return 0
        except OSError:
            # EPIPE, EIO: the reader closed its end. The process may run on without input.
            self.abandon()
            raise StdinClosed(f"process {self._name!r} closed its stdin") from None

    def _flush(self) -> None:
        try:
            while self._queue:
                written = self._write(self._queue[0])
                self._queued -= written
                if written < len(self._queue[0]):
                    self._queue[0] = self._queue[0][written:]
                    break
                self._queue.popleft()
        except StdinClosed:
            return  # waiters were woken; the next write raises
        if not self._queue:
            asyncio.get_running_loop().remove_writer(self._fd)
            if self._closing:
                self._release()
        self._wake()

    def _release(self) -> None:
        if self._reader_poll is not None:
            self._reader_poll.cancel()
            self._reader_poll = None
        if self._fd >= 0:
            asyncio.get_running_loop().remove_writer(self._fd)
            if self._owns_fd:
                os.close(self._fd)
            self._fd = -1
        self._wake()

    def _wake(self) -> None:
        if self._drained is not None and self.has_room:
            self._drained.set()
            self._drained = None
