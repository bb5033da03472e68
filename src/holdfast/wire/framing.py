"""Messages on a byte stream: JSON a line each, or MessagePack behind a 4-byte big-endian length; pure.

    feed(bytes) -> messages
    writable() -> room for the rest of a large message; wrote(count) -> that message once it is whole

The reader starts with lines and is switched to lengths once, right after the message that asked for it. A message
over the limit is skipped as it streams in, is never held in memory, and shows up as an `Oversized`, so the
connection goes on. Large messages need not pass through `feed`: a caller that can read straight into memory asks
for `writable()` first, and the bytes are copied by the kernel alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

LENGTH_BYTES: Final = 4

#: Messages from the first size on are read in place; below it one copy is cheaper than the bookkeeping.
BULK_MIN: Final = 32 * 1024
#: Up to this size the room is made at once and kept for the next message. Above it a message grows as it comes in,
#: so that four bytes from a peer do not make us set aside a hundred megabytes.
BULK_MAX: Final = 4 * 1024 * 1024


class Oversized:
    """Stands in the sequence of messages for one that was too large."""

    __slots__ = ("limit", "size")

    def __init__(self, size: int, limit: int) -> None:
        self.size = size
        self.limit = limit


class FrameReader:
    """Turns the bytes of a stream into messages. Switch with `use_lengths()` between two messages."""

    def __init__(self, max_message_bytes: int) -> None:
        self._limit = max_message_bytes
        self._buffer = bytearray()
        #: Where the search for a newline goes on, so that a long line is scanned once.
        self._scanned = 0
        #: Bytes of an oversized message still to be skipped; for a line, counted until its newline.
        self._skipping = 0
        self._skipped = 0
        self._lengths = False
        #: The large message under way: its room, and how much of it is filled. The room is used again.
        self._room = bytearray()
        self._bulk: memoryview | None = None
        self._filled = 0
        #: The last message that `wrote` gave; its holder may still look at it.
        self._lent: memoryview | None = None

    def use_lengths(self) -> None:
        """From the next byte on, messages come behind their length."""
        self._lengths = True
        self._scanned = 0

    @property
    def buffered(self) -> int:
        """Bytes held of a message that is not complete yet."""
        return len(self._buffer) if self._bulk is None else LENGTH_BYTES + self._filled

    def missing(self) -> int:
        """How many more bytes the message under way needs; 0 if that is not known."""
        if self._bulk is not None:
            return len(self._bulk) - self._filled
        if not self._lengths or self._skipping or len(self._buffer) < LENGTH_BYTES:
            return 0
        size = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
        return max(0, LENGTH_BYTES + size - len(self._buffer))

    def writable(self) -> memoryview | None:
        """Where the next bytes of a large message go; None while no large message is under way: use `feed`.

        Write to its start, then call `wrote`.
        """
        return None if self._bulk is None else self._bulk[self._filled :]

    def wrote(self, count: int) -> memoryview | None:
        """`count` bytes were put into `writable()`; gives the message if they completed it.

        The message is lent: its bytes change once the next message comes in, unless something decoded from it
        still refers to them, in which case they are left alone.
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
        """Take bytes; give the messages that are complete. Must be run to its end before the next feed.

        A generator, because the consumer of one message may switch the framing of the next.
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
        """Move what has come of a large message to where the rest of it can be written."""
        if self._lent is not None:
            try:
                self._lent.release()
                # A bytearray refuses to change its size while anything refers to its bytes; this moves none.
                self._room.append(self._room.pop())
            except BufferError:
                # Something made from the last message still refers to it: leave it those bytes.
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
    """A message behind its length."""
    return len(message).to_bytes(LENGTH_BYTES, "big") + message
