"""Server-sent events as bytes: written whole, read piece by piece; pure.

The reader buffers at most one incomplete event, and drops an event that exceeds its limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

#: Largest event that the reader accepts. The largest that providers send is a final one with the whole reply.
EVENT_BYTES: Final = 16 * 1024 * 1024

CONTENT_TYPE: Final = "text/event-stream; charset=utf-8"


class ServerSentEvent(msgspec.Struct, frozen=True):
    """One event, its data lines joined."""

    event: str
    data: bytes


def sse(data: Mapping[str, Any] | bytes, event: str = "") -> bytes:
    """Return one event. The data is one line: compact JSON contains no line breaks."""
    body = data if isinstance(data, bytes) else msgspec.json.encode(data)
    head = b"event: " + event.encode() + b"\n" if event else b""
    return head + b"data: " + body + b"\n\n"


class SseReader:
    """Parses bytes into events. Lines end with LF, CR or CR LF, as the standard allows."""

    def __init__(self, limit: int = EVENT_BYTES) -> None:
        self._limit = limit
        self._line = bytearray()
        self._after_cr = False
        self._event = ""
        self._data: list[bytes] = []
        self._size = 0
        self._too_long = False

    @property
    def is_between_events(self) -> bool:
        """True if the next byte begins an event."""
        return not (self._line or self._data or self._event or self._too_long or self._after_cr)

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        if not chunk:
            return []
        if self._after_cr and chunk[:1] == b"\n":
            # The CR ended the line already; this LF belongs to it.
            chunk = chunk[1:]
        self._after_cr = chunk[-1:] == b"\r"
        text = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        events: list[ServerSentEvent] = []
        *ended, rest = text.split(b"\n")
        for piece in ended:
            self._keep(piece)
            line = bytes(self._line)
            self._line.clear()
            if line:
                self._take(line)
            else:
                events.extend(self._finish())
        self._keep(rest)
        return events

    def _keep(self, piece: bytes) -> None:
        if len(self._line) + self._size + len(piece) > self._limit:
            self._too_long = True
        if self._too_long:
            # An empty line ends the event, so only the emptiness of the line matters now.
            self._data, self._size = [], 0
            self._line[:] = b":" if self._line or piece else b""
        else:
            self._line += piece

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._size += len(value) + 1
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")

    def _finish(self) -> list[ServerSentEvent]:
        event = ServerSentEvent(self._event, b"\n".join(self._data))
        given = bool(self._data) and not self._too_long
        self._event, self._data, self._size, self._too_long = "", [], 0, False
        return [event] if given else []
