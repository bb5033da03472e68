"""Messages on a byte stream: JSON in lines, or MessagePack after a 4-byte big-endian length; pure.

    feed(bytes) -> messages
    writable() -> room for the rest of a large message; wrote(count) -> that message once it is whole

The reader starts with lines and is switched to lengths once, directly after the message that requested it. A
message over the limit is skipped as it arrives, is never held in memory, and is reported as an `Oversized`, so the
connection continues. Large messages need not pass through `feed`: a caller that reads into a buffer calls
`writable()` first, and only the kernel copies the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

LENGTH_BYTES: Final = 4

#: Messages from this size on are read in place; below it one copy is cheaper than the bookkeeping.
BULK_MIN: Final = 32 * 1024
#: Up to this size the buffer is allocated at once and reused. A larger message grows as it arrives, so that four
#: bytes from a peer do not allocate a hundred megabytes.
BULK_MAX: Final = 4 * 1024 * 1024


class Oversized:
    """Stands in the sequence of messages for one over the size limit."""

    __slots__ = ("limit", "size")

    def __init__(self, size: int, limit: int) -> None:
        self.size = size
        self.limit = limit


class FrameReader:
    """Turns the bytes of a stream into messages. Switch with `use_lengths()` between two messages."""

    def __init__(self, max_message_bytes: int) -> None:
        self._limit = max_message_bytes
        self._buffer = bytearray()
        #: Where the search for a newline continues, so that a long line is scanned once.
        self._scanned = 0
        #: Bytes of an oversized message still to be skipped; for a line, counted until its newline.
        self._skipping = 0
        self._skipped = 0
        self._lengths = False
        #: The large message that is being received: its buffer, which is reused, and how much of it is filled.
        self._room = bytearray()
        self._bulk: memoryview | None = None
        self._filled = 0
        #: The last message that `wrote` returned; the receiver may still hold it.
        self._lent: memoryview | None = None

    def use_lengths(self) -> None:
        """Expect a length before each message from the next byte on."""
        self._lengths = True
        self._scanned = 0

    @property
    def buffered(self) -> int:
        """Bytes held of an incomplete message."""
        return len(self._buffer) if self._bulk is None else LENGTH_BYTES + self._filled

    def missing(self) -> int:
        """How many more bytes the incomplete message needs; 0 if that is not known."""
        if self._bulk is not None:
            return len(self._bulk) - self._filled
        if not self._lengths or self._skipping or len(self._buffer) < LENGTH_BYTES:
            return 0
        size = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
        return max(0, LENGTH_BYTES + size - len(self._buffer))

    def writable(self) -> memoryview | None:
        """The buffer for the next bytes of a large message; None if there is none: use `feed`.

        Write to its start, then call `wrote`.
        """
        return None if self._bulk is None else self._bulk[self._filled :]

    def wrote(self, count: int) -> memoryview | None:
        """Count bytes that were written to `writable()`; returns the message if it is complete.

        The message is lent: its buffer is reused for the next message, unless something decoded from it still
        refers to the buffer.
        """
        bulk = self._bulk
        if bulk is None or count > len(bulk) - self._filled:
            raise ValueError("more bytes than there was room for")
        self._filled += count
        if self._filled < len(bulk):
            return None
        self._bulk, self._lent = None, bulk
        return bulk

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[bytes | Oversized]:
        """Take bytes and yield the complete messages. Exhaust the generator before the next `feed`.

        It is a generator because the consumer of one message may switch the framing of the next.
        """
        if self._bulk is not None:
            count = min(self.missing(), len(data))
            self._bulk[self._filled : self._filled + count] = data[:count]
            message = self.wrote(count)
            if message is None:
                return
            data = data[count:]
            self._buffer += data
            yield bytes(message)
        else:
            self._buffer += data
        while True:
            following = self._next_by_length() if self._lengths else self._next_line()
            if following is None:
                return
            if following != b"" or self._lengths:
                yield following

    def feed_lent(self, data: memoryview) -> Iterator[bytes | memoryview | Oversized]:
        """As `feed`, except that a large message is lent, as by `wrote`, and not copied once more."""
        while len(data):
            room = self.writable()
            if room is None:
                yield from self.feed(data)
                return
            count = min(len(room), len(data))
            room[:count] = data[:count]
            data = data[count:]
            if (message := self.wrote(count)) is not None:
                yield message

    def whole(self, data: bytes) -> bytes | None:
        """The message, if `data` is exactly one message with its length; None if not: use `feed`.

        Nearly every read returns one whole message, which then needs no buffer and no generator.
        """
        if (
            self._lengths
            and not self._buffer
            and not self._skipping
            and len(data) >= LENGTH_BYTES
            and int.from_bytes(data[:LENGTH_BYTES], "big") == len(data) - LENGTH_BYTES <= self._limit
        ):
            return data[LENGTH_BYTES:]
        return None

    def _next_line(self) -> bytes | Oversized | None:
        end = self._buffer.find(b"\n", self._scanned)
        if end < 0:
            self._scanned = len(self._buffer)
            if self._skipped or len(self._buffer) > self._limit:
                self._skipped += len(self._buffer)
                self._buffer.clear()
                self._scanned = 0
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._scanned = 0
        if self._skipped or len(line) > self._limit:
            oversized = Oversized(self._skipped + len(line), self._limit)
            self._skipped = 0
            return oversized
        return line.strip()

    def _next_by_length(self) -> bytes | Oversized | None:
        buffer = self._buffer
        if self._skipping:
            cut = min(self._skipping, len(buffer))
            del buffer[:cut]
            self._skipping -= cut
            if self._skipping:
                return None
            return Oversized(self._skipped, self._limit)
        if len(buffer) < LENGTH_BYTES:
            return None
        size = int.from_bytes(buffer[:LENGTH_BYTES], "big")
        if size > self._limit:
            self._skipping = self._skipped = size
            del buffer[:LENGTH_BYTES]
            return self._next_by_length()
        end = LENGTH_BYTES + size
        if len(buffer) < end:
            if BULK_MIN <= size <= BULK_MAX:
                self._begin_bulk(size)
            return None
        with memoryview(buffer) as view:
            message = bytes(view[LENGTH_BYTES:end])
        del buffer[:end]
        return message

    def _begin_bulk(self, size: int) -> None:
        """Move the received part of a large message into a buffer for all of it."""
        if self._lent is not None:
            try:
                self._lent.release()
                # A bytearray with exported buffers refuses to change its size; this append and pop move no bytes.
                self._room.append(self._room.pop())
            except BufferError:
                # An object that was decoded from the last message still refers to the buffer.
                self._room = bytearray()
            self._lent = None
        if len(self._room) < size:
            self._room = bytearray(size)
        with memoryview(self._room) as room:
            self._bulk = room[:size]
        self._filled = len(self._buffer) - LENGTH_BYTES
        with memoryview(self._buffer) as buffer:
            self._bulk[: self._filled] = buffer[LENGTH_BYTES:]
        self._buffer.clear()


def frame_line(message: bytes) -> bytes:
    """A JSON message as a line. JSON escapes newlines inside strings, so the message holds none."""
    return message + b"\n"


def frame_length(message: bytes) -> bytes:
    """A message with its length in front."""
    return len(message).to_bytes(LENGTH_BYTES, "big") + message
