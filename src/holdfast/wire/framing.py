"""Messages on a byte stream: JSON a line each, or MessagePack behind a 4-byte big-endian length; pure.

    feed(bytes) -> messages

The reader starts with lines and is switched to lengths once, right after the message that asked for it. A message
over the limit is skipped as it streams in, is never held in memory, and shows up as an `Oversized`, so the
connection goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

LENGTH_BYTES: Final = 4


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

    def use_lengths(self) -> None:
        """From the next byte on, messages come behind their length."""
        self._lengths = True
        self._scanned = 0

    @property
    def buffered(self) -> int:
        """Bytes held of a message that is not complete yet."""
        return len(self._buffer)

    def missing(self) -> int:
        """How many more bytes the message under way needs; 0 if that is not known."""
        if not self._lengths or self._skipping or len(self._buffer) < LENGTH_BYTES:
            return 0
        size = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
        return max(0, LENGTH_BYTES + size - len(self._buffer))

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[bytes | Oversized]:
        """Take bytes; give the messages that are complete. Must be run to its end before the next feed.

        A generator, because the consumer of one message may switch the framing of the next.
        """
        self._buffer += data
        while True:
            message = self._next_by_length() if self._lengths else self._next_line()
            if message is None:
                return
            if message != b"" or self._lengths:
                yield message

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
            return None
        with memoryview(buffer) as view:
            message = bytes(view[LENGTH_BYTES:end])
        del buffer[:end]
        return message


def frame_line(message: bytes) -> bytes:
    """A JSON message as a line. JSON escapes newlines inside strings, so the message holds none."""
    return message + b"\n"


def frame_length(message: bytes) -> bytes:
    """A message behind its length."""
    return len(message).to_bytes(LENGTH_BYTES, "big") + message
