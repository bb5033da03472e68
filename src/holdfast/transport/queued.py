"""Bases of channels on which a whole message is sent by one call: the queue, the source, and two tasks around them.

Touches nothing; the subclasses have the connections.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from typing import Final

from holdfast.errors import ConnectionLost, InvalidRequest
from holdfast.transport.channel import Source, SpoolFrame


class QueuedChannel(ABC):
    """`Channel` without spool frames and descriptors."""

    takes_spool_frames: Final = False
    passes_descriptors: Final = False

    def __init__(self, description: str) -> None:
        self.description = description
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._source: Source | None = None
        self._drained = asyncio.Event()
        self._drained.set()
        self._closing = False

    @abstractmethod
    def _proceed(self) -> None:
        """Send what waits, first the queue and then the frames of the source; after `close`, end the connection."""

    def _framed(self, message: bytes) -> bytes:
        """The message as the connection takes it."""
        return message

    def _next_control(self) -> bytes:
        """Remove the next framed message from the queue, or several as one. Call `_sent` with its size next."""
        return self._queue.popleft()

    # --- Channel -----------------------------------------------------------------------------------------------

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def send(self, message: bytes) -> None:
        if self._closing:
            return
        frame = self._framed(message)
        self._queue.append(frame)
        self._queued_bytes += len(frame)
        self._drained.clear()
        self._proceed()

    def set_source(self, source: Source | None) -> None:
        self._source = source
        self.wake()

    def wake(self) -> None:
        self._proceed()

    def use_lengths(self) -> None:  # noqa: B027 optional
        """No effect, unless the subclass has a framing of its own."""

    def hold_frame(self) -> None:  # noqa: B027 complete
        """No effect: there are no spool frames."""

    def pass_descriptor(self, fd: int) -> None:
        raise InvalidRequest(f"{self.description}: the connection is not a Unix socket and carries no descriptors")

    async def drain(self) -> None:
        await self._drained.wait()
        if self._queued_bytes:
            raise ConnectionLost(f"{self.description}: the connection is closed")

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._source = None
        self._proceed()

    # --- for subclasses ----------------------------------------------------------------------------------------

    def _sent(self, size: int) -> None:
        """Count a control message as sent."""
        self._queued_bytes -= size
        if not self._queued_bytes:
            self._drained.set()

    def _next_frame(self) -> bytes | None:
        frame = None if self._source is None else self._source.next_frame()
        if isinstance(frame, SpoolFrame):
            raise TypeError(f"{self.description}: the channel takes no spool frames")
        return frame

    def _lost(self) -> bool:
        """The connection has ended: nothing more is sent. Returns whether `close` caused it."""
        closed_by_us, self._closing = self._closing, True
        self._source = None
        self._drained.set()
        return closed_by_us


class TaskChannel(QueuedChannel):
    """A channel of which a subclass runs two tasks: one reads, the other is `_write`."""

    def __init__(self, description: str) -> None:
        super().__init__(description)
        self._something_to_send = asyncio.Event()
        self._may_read = asyncio.Event()
        self._may_read.set()

    @abstractmethod
    async def _transmit(self, data: bytes) -> None:
        """Send a framed message; returns when the connection accepts the next one."""

    @abstractmethod
    async def _end(self) -> None:
        """Close the connection in order, after `close` and the last queued message."""

    def _proceed(self) -> None:
        self._something_to_send.set()

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    def close(self) -> None:
        # The writer sends the queue, then closes; the reader then reports the end to the receiver.
        super().close()
        self._may_read.set()

    async def _write(self) -> None:
        while True:
            if self._queue:
                data = self._next_control()
                await self._transmit(data)
                self._sent(len(data))
            elif self._closing:
                await self._end()
                return
            elif (frame := self._next_frame()) is not None:
                await self._transmit(self._framed(frame))
            else:
                self._something_to_send.clear()
                await self._something_to_send.wait()
