"""About how many tokens a request is, for callers that ask a model which cannot tell; pure."""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.bridge.normal import (
    FilePart,
    ImagePart,
    ModelRequest,
    Part,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
)

#: English text and code take about four bytes a token in the tokenizers of today.
BYTES_A_TOKEN: Final = 4
#: What an image of about a million pixels takes at the providers that say.
IMAGE_TOKENS: Final = 1_600
#: Roles and separators around each turn.
TURN_TOKENS: Final = 4


def estimate_tokens(request: ModelRequest) -> int:
    """An estimate, by the sizes above: at least 1, and never less for a longer request."""
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
