"""Two channels joined in memory, for tests of both ends without a socket. Touches only the event loop.

The bytes are really framed and really parsed, so a cut may fall in the middle of a message, as on a real wire.
Delivery happens one event-loop turn after the send, in order, and nothing depends on time.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque

from holdfast.errors import ConnectionLost
from holdfast.transport.channel import Receiver, Source, SpoolFrame
from holdfast.wire.framing import FrameReader, Oversized, frame_length, frame_line

MAX_MESSAGE_BYTES = 96 * 1024 * 1024


class MemoryWire:
    """The wire between two ends. Bytes can be held back, and the wire can be cut after any number of them."""

    def __init__(self) -> None:
        self.ends: tuple[MemoryChannel, MemoryChannel] | None = None
        self.held = False
        self.carried = 0
        self._cut_at: int | None = None
        self.is_cut = False

    def hold(self) -> None:
        """Keep what is sent from arriving, as a stalled network does."""
        self.held = True

    def release(self) -> None:
        """Let everything that was held arrive."""
        self.held = False
        for end in self.ends or ():
            end._schedule()

    def cut_after(self, count: int) -> None:
        """Break once `count` more bytes have been carried, both directions together."""
        self._cut_at = self.carried + count

    def cut(self, error: Exception | None = None) -> None:
        """Break now: both ends lose the connection, and what has not arrived never does."""
        if not self.is_cut:
            self.is_cut = True
            for end in self.ends or ():
                end._break(error or ConnectionResetError("the wire was cut"))

    def admit(self, data: bytes) -> bytes:
        """How much of `data` gets through before the cut."""
        if self._cut_at is not None:
            data = data[: max(0, self._cut_at - self.carried)]
        self.carried += len(data)
        return data

    @property
    def due(self) -> bool:
        return self._cut_at is not None and self.carried >= self._cut_at


class MemoryChannel:
    """One end, a `Channel`. `capacity` bounds the output on its way: the source is read only below it."""

    def __init__(self, wire: MemoryWire, receiver: Receiver, description: str, capacity: int, limit: int) -> None:
        self.description = description
        self._wire = wire
        self._receiver = receiver
        self._capacity = capacity
        self._loop = asyncio.get_running_loop()
        self._frames = FrameReader(limit)
        self._lengths = False
        self._source: Source | None = None
        self._on_the_way: deque[bytes] = deque()
        self._scheduled = False
        self._reading = True
        self._closed = False
        self._lost = False
        self._drained: list[asyncio.Future[None]] = []
        self.other: MemoryChannel | None = None

    @property
    def takes_spool_frames(self) -> bool:
        return self._lengths

    passes_descriptors = False

    def pass_descriptor(self, fd: int) -> None:
        raise AssertionError("memory carries no descriptors")

    @property
    def queued_bytes(self) -> int:
        return sum(map(len, self._on_the_way))

    def send(self, message: bytes) -> None:
        if not self._closed:
            self._on_the_way.append(frame_length(message) if self._lengths else frame_line(message))
            self._schedule()

    def set_source(self, source: Source | None) -> None:
        self._source = source
        self.wake()

    def wake(self) -> None:
        self._schedule()

    def use_lengths(self) -> None:
        self._lengths = True
        self._frames.use_lengths()

    def hold_frame(self) -> None:
        """Nothing to take: a frame is read from its file when it is pulled."""

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        if self.other is not None:
            self.other._schedule()

    async def drain(self) -> None:
        while self._on_the_way:
            if self._closed:
                raise ConnectionLost(f"{self.description}: the connection is closed")
            waiter = self._loop.create_future()
            self._drained.append(waiter)
            await waiter

    def close(self) -> None:
        if self._closed:
            return
        self._source = None
        if not self._wire.held:
            self._carry()
        if not self._closed:
            self._closed = True
            self._loop.call_soon(self._lose, None)
            if self.other is not None:
                self._loop.call_soon(self.other._break, None)

    # --- moving bytes ----------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if not self._closed and not self._wire.held:
            self._carry()

    def _carry(self) -> None:
        """Deliver what was sent, then output while there is some."""
        other = self.other
        moved = 0
        while other is not None and other._reading and not other._closed and not self._wire.is_cut:
            if not self._on_the_way:
                if moved >= self._capacity:
                    self._schedule()
                    break
                frame = None if self._source is None else self._source.next_frame()
                if frame is None:
                    break
                self._on_the_way.append(self._framed(frame))
            data = self._wire.admit(self._on_the_way.popleft())
            moved += len(data)
            other._arrive(data)
            if self._wire.due:
                self._wire.cut()
        if not self._on_the_way:
            self._wake_drained()

    def _framed(self, frame: bytes | SpoolFrame) -> bytes:
        if isinstance(frame, SpoolFrame):
            frame = frame.header + os.pread(frame.fd, frame.length, frame.offset)
        return frame_length(frame) if self._lengths else frame_line(frame)

    def _arrive(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            if self._closed:
                return
            self._deliver(message)

    def _deliver(self, message: bytes | Oversized) -> None:
        self._receiver.message_received(message)

    def _break(self, error: Exception | None) -> None:
        if not self._closed:
            self._closed = True
            self._loop.call_soon(self._lose, error)

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self._source = None
            self._wake_drained()
            self._receiver.connection_lost(error)

    def _wake_drained(self) -> None:
        waiters, self._drained = self._drained, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def memory_pair(
    left: Receiver,
    right: Receiver,
    *,
    capacity: int = 1024 * 1024,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    description: str = "memory",
) -> tuple[MemoryChannel, MemoryChannel, MemoryWire]:
    """Two ends joined, and the wire between them."""
    wire = MemoryWire()
    one = MemoryChannel(wire, left, description, capacity, max_message_bytes)
    two = MemoryChannel(wire, right, description, capacity, max_message_bytes)
    one.other, two.other = two, one
    wire.ends = (one, two)
    return one, two, wire
