"""Counting tokens: those that an answer on its way through tells of, and an estimate where nobody tells; pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from holdfast.bridge.normal import (
    FilePart,
    ImagePart,
    JsonObject,
    ModelRequest,
    Part,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
    Usage,
)
from holdfast.bridge.sse import SseReader

#: The largest whole body that is looked into. A larger one passes through uncounted.
BODY_BYTES: Final = 16 * 1024 * 1024
#: English text and code take about four bytes a token in the tokenizers of today.
BYTES_A_TOKEN: Final = 4
#: What an image of about a million pixels takes at the providers that say.
IMAGE_TOKENS: Final = 1_600
#: Roles and separators around each turn.
TURN_TOKENS: Final = 4


class UsageMeter:
    """Reads the counts in an answer while its pieces pass. `usage_in` is the dialect's; it never changes a byte."""

    def __init__(self, usage_in: Callable[[JsonObject], Usage | None], content_type: str) -> None:
        self._usage_in = usage_in
        self._events = SseReader() if content_type.startswith("text/event-stream") else None
        self._body = bytearray()
        self._too_long = False
        #: None until the answer has told something.
        self.usage: Usage | None = None

    def feed(self, piece: bytes) -> None:
        if self._events is not None:
            for event in self._events.feed(piece):
                # Most events have no counts: only those that may have are decoded.
                if b'"usage' in event.data:
                    self._look(_decoded(event.data))
        elif len(self._body) + len(piece) > BODY_BYTES:
            self._too_long = True
            self._body.clear()
        elif not self._too_long:
            self._body += piece

    def end(self) -> Usage | None:
        """The counts, once the answer is complete."""
        if self._body:
            self._look(_decoded(bytes(self._body)))
            self._body.clear()
        return self.usage

    def _look(self, value: Any) -> None:
        # Google's older stream is one array of answers.
        for each in value if isinstance(value, list) else [value]:
            found = self._usage_in(each) if isinstance(each, dict) else None
            if found is not None:
                self.usage = found if self.usage is None else self.usage.merged(found)


def _decoded(data: bytes) -> Any:
    """JSON, or None: an answer is passed on whatever it is, so one that is no JSON merely has no counts."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def estimate_tokens(request: ModelRequest) -> int:
    """About how many tokens a request is: for callers that ask, where the model is a function and cannot tell."""
    size = len(request.system.encode())
    for tool in request.tools:
        size += len(tool.name.encode()) + len(tool.description.encode()) + len(msgspec.json.encode(tool.schema))
    parts = [part for message in request.messages for part in message.content]
    fixed = TURN_TOKENS * len(request.messages) + sum(IMAGE_TOKENS for part in parts if isinstance(part, ImagePart))
    return max(1, fixed + -(-(size + sum(_bytes_of(part) for part in parts)) // BYTES_A_TOKEN))


def _bytes_of(part: Part) -> int:
    match part:
        case TextPart() | ThinkingPart():
            return len(part.text.encode())
        case ToolCallPart():
            return len(part.name.encode()) + len(part.arguments.encode())
        case ToolResultPart():
            return sum(_bytes_of(inner) for inner in part.content)
        case FilePart():
            return len(part.data)
        case _:
            return 0
