"""The output of an exec: pieces of stdout and stderr, each after a header of eight bytes; pure.

The header has the number of the stream, three zero bytes and the size of the piece, big-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

STDOUT: Final = 1
#: Stderr, and errors of the engine itself.
_STREAMS: Final = (STDOUT, 2, 3)
_HEADER: Final = struct.Struct(">BxxxL")
HEADER_BYTES: Final = _HEADER.size


class NoOutput(Exception):
    """The bytes are no output of an exec."""


class OutputFrames:
    """Splits bytes of the connection into the pieces of its streams. Holds no output, at most part of a header."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._stream = STDOUT
        #: Bytes of the current piece that have not arrived.
        self._left = 0

    def split(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Yield each stream and its bytes. `NoOutput` if the bytes are none of an exec."""
        while len(data):
            if self._left:
                piece, data = data[: self._left], data[self._left :]
                self._left -= len(piece)
                yield self._stream, piece
                continue
            if self._header or len(data) < HEADER_BYTES:
                missing = HEADER_BYTES - len(self._header)
                self._header += data[:missing]
                data = data[missing:]
                if len(self._header) < HEADER_BYTES:
                    return
                self._stream, self._left = _HEADER.unpack(self._header)
                self._header.clear()
            else:
                self._stream, self._left = _HEADER.unpack_from(data)
                data = data[HEADER_BYTES:]
            if self._stream not in _STREAMS:
                raise NoOutput(f"stream {self._stream} in the output of a command")
