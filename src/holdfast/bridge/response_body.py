"""The body of an HTTP/1.1 response: bytes of the connection in, bytes of the body out; pure.

h11 makes an event of each chunk, which takes longer than everything else that the bridge does with a token. These
readers return all chunks of one read together.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Final

#: Longest line of a chunk's size, and most bytes of trailers. Real ones have a few bytes.
MAX_LINE_BYTES: Final = 16 * 1024

#: The size of a chunk, and extensions, which no provider uses (RFC 9112, section 7.1).
_SIZE_LINE: Final = re.compile(rb"([0-9a-fA-F]{1,16})[ \t]*(?:;[^\r\n]*)?\r\n")


class MalformedBody(Exception):
    """The body is not HTTP/1.1, or the connection ended in its middle."""


class ResponseBody(ABC):
    """One body. Feed it until `ended`; `rest` has the bytes after its end."""

    def __init__(self) -> None:
        self.ended = False
        self.rest = b""

    @abstractmethod
    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the body in `data`."""

    def connection_ended(self) -> None:
        """Handle the end of the connection; `MalformedBody` if the body is incomplete."""
        if not self.ended:
            raise MalformedBody("the connection ended in the middle of a response")

    def _end(self, rest: bytes) -> None:
        self.ended, self.rest = True, rest


class SizedBody(ResponseBody):
    """A body with a content-length; also one of no bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._left = size
        self.ended = size == 0

    def feed(self, data: bytes) -> bytes:
        part = data[: self._left]
        self._left -= len(part)
        if not self._left:
            self._end(data[len(part) :])
        return part


class UnsizedBody(ResponseBody):
    """A body that ends with its connection."""

    def feed(self, data: bytes) -> bytes:
        return data

    def connection_ended(self) -> None:
        self._end(b"")


class ChunkedBody(ResponseBody):
    """A body in chunks, each after its size; trailers are dropped."""

    def __init__(self) -> None:
        super().__init__()
        #: Beginning of a line whose end has not arrived.
        self._line = b""
        #: Bytes of the current chunk that have not arrived, and whether its line break has not.
        self._left = 0
        self._in_chunk = False
        self._in_trailers = False
        self._trailer_bytes = 0

    def feed(self, data: bytes) -> bytes:
        data = self._line + data if self._line else data
        parts: list[bytes] = []
        at = 0
        while not self.ended:
            if self._left:
                part = data[at : at + self._left]
                parts.append(part)
                self._left -= len(part)
                at += len(part)
                if self._left:
                    break
            after = self._after_line(data, at)
            if after < 0:
                break
            at = after
        self._line = b"" if self.ended else data[at:]
        if len(self._line) > MAX_LINE_BYTES:
            raise MalformedBody(f"a line of more than {MAX_LINE_BYTES} bytes between two chunks")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _after_line(self, data: bytes, at: int) -> int:
        """Read the line break after a chunk, the size of the next one, or a trailer.

        Returns the position behind it, or -1 if it has not arrived whole.
        """
        if self._in_chunk:
            if not b"\r\n".startswith(data[at : at + 2]):
                raise MalformedBody("a chunk is longer than its size")
            if len(data) < at + 2:
                return -1
            self._in_chunk = False
            return at + 2
        if self._in_trailers:
            end = data.find(b"\r\n", at)
            if end >= 0:
                self._take_trailer(end - at, data[end + 2 :])
            return end if end < 0 else end + 2
        found = _SIZE_LINE.match(data, at)
        if found is None:
            if b"\n" in data[at:]:
                raise MalformedBody(f"not the size of a chunk: {data[at : at + 32]!r}")
            return -1
        self._left = int(found[1], 16)
        self._in_chunk = self._left > 0
        self._in_trailers = not self._in_chunk
        return found.end()

    def _take_trailer(self, size: int, rest: bytes) -> None:
        self._trailer_bytes += size
        if size == 0:
            self._end(rest)
        elif self._trailer_bytes > MAX_LINE_BYTES:
            raise MalformedBody(f"trailers of more than {MAX_LINE_BYTES} bytes")
