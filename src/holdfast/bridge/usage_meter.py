"""The tokens of an answer, read off its bytes while they pass; pure, and never a byte is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from holdfast.bridge.normal import JsonObject, Usage
from holdfast.bridge.sse import SseReader

#: The largest whole answer that is looked into. A larger one passes uncounted, and is estimated by its length.
BODY_BYTES: Final = 16 * 1024 * 1024


class UsageMeter:
    """What the pieces of one answer tell. `usage_in` is the dialect's."""

    def __init__(self, usage_in: Callable[[JsonObject], Usage | None], *, is_stream: bool) -> None:
        self._usage_in = usage_in
        self._reader = SseReader() if is_stream else None
        self._body = bytearray()
        self._told: Usage | None = None
        self.bytes = 0
        #: Of a stream: about as many as it has tokens.
        self.events = 0

    def feed(self, piece: bytes) -> None:
        self.bytes += len(piece)
        if self._reader is None:
            if self.bytes <= BODY_BYTES:
                self._body += piece
            else:
                self._body.clear()
            return
        if self._reader.is_between_events and _has_whole_events_alone(piece):
            # Nearly every piece of nearly every stream: nothing in it is worth taking apart.
            self.events += piece.count(b"\n\n")
            return
        for event in self._reader.feed(piece):
            self.events += 1
            # Every dialect's word for it begins so. Most events have none, and are not decoded.
            if b'"usage' in event.data:
                self._look(event.data)

    def usage(self) -> Usage | None:
        """At the end, or where its caller left; None if nothing was told."""
        if self._body:
            self._look(bytes(self._body))
            self._body.clear()
        return self._told

    def _look(self, data: bytes) -> None:
        try:
            value: Any = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return  # it is passed on, whatever it is; it merely has no counts
        # Google's older stream is one array of answers.
        for each in value if isinstance(value, list) else [value]:
            found = self._usage_in(each) if isinstance(each, dict) else None
            if found is not None:
                self._told = found if self._told is None else self._told.merged(found)


def _has_whole_events_alone(piece: bytes) -> bool:
    """Whether it surely begins and ends with an event, and tells no usage."""
    begins = piece.startswith((b"data:", b"event:"))
    return begins and piece.endswith(b"\n\n") and b'"usage' not in piece and b"\r" not in piece
