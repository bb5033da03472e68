"""The tokens of an answer, read off its bytes as they pass; and the one event that is taken out again; pure.

Nothing here changes a byte that the caller gets, except that an event which the caller did not ask for is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from holdfast.bridge.normal import JsonObject, Usage
from holdfast.bridge.sse import EVENT_BYTES, SseReader

#: Of an answer that is not a stream, to look into it at its end. A longer one is counted by its length.
WHOLE_BYTES: Final = 16 * 1024 * 1024

#: What ends an event; kept by the split.
_EVENT_END: Final = re.compile(rb"(\r\n\r\n|\n\n|\r\r)")

UsageIn = Callable[[JsonObject], Usage | None]


class UsageCount:
    """What the pieces of one answer tell of its tokens."""

    def __init__(self, usage_in: UsageIn, *, is_stream: bool) -> None:
        self._usage_in = usage_in
        self._reader = SseReader() if is_stream else None
        self._whole = bytearray()
        self._told: Usage | None = None
        self.bytes = 0
        #: Of a stream: about as many as it has tokens.
        self.events = 0

    def feed(self, piece: bytes) -> None:
        self.bytes += len(piece)
        if self._reader is None:
            if self.bytes <= WHOLE_BYTES:
                self._whole += piece
            return
        for event in self._reader.feed(piece):
            self.events += 1
            # Every dialect's word for it begins so. Most events have none, and are not decoded.
            if b'"usage' in event.data:
                self._take(event.data)

    def usage(self) -> Usage | None:
        """After the end, or where its caller left."""
        if self._reader is None and self.bytes <= WHOLE_BYTES and b'"usage' in self._whole:
            self._take(bytes(self._whole))
            self._whole.clear()
        return self._told

    def _take(self, data: bytes) -> None:
        try:
            body = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError):
            return  # the provider's business, and the caller's: nothing is counted here
        for each in body if isinstance(body, list) else [body]:
            usage = self._usage_in(each) if isinstance(each, dict) else None
            if usage is not None:
                self._told = usage if self._told is None else self._told.merged(usage)


class LeftOutUsage:
    """A stream of chat completions without the event of the usage alone: the bridge asked for it, not the caller.

    A client that did not ask takes the first of no choices, and fails.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        parts = _EVENT_END.split(self._rest + piece)
        self._rest = parts.pop()
        pairs = zip(parts[::2], parts[1::2], strict=True)
        passed = b"".join(event + end for event, end in pairs if not _is_usage_alone(event))
        if len(self._rest) > EVENT_BYTES:
            # Not an event of ours, whatever it is.
            passed, self._rest = passed + self._rest, b""
        return passed

    def end(self) -> bytes:
        return b"" if _is_usage_alone(self._rest) else self._rest


def _is_usage_alone(event: bytes) -> bool:
    if b'"choices"' not in event or b'"usage"' not in event:
        return False
    try:
        body: Any = msgspec.json.decode(event.partition(b"data:")[2].strip())
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(body, dict) and body.get("choices") == [] and bool(body.get("usage"))
