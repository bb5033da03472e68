"""Shared by OpenAI's endpoints: errors, token counts, images and files given by URL or by bytes; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from holdfast.bridge.dialects.fields import Fields, count, from_data_url
from holdfast.bridge.types import (
    FilePart,
    ImagePart,
    JsonObject,
    Message,
    ModelReply,
    Part,
    Role,
    StopReason,
    TextPart,
    TokenUsage,
    ToolCallPart,
)

_ERROR_TYPES: Final[Mapping[int, tuple[str, str | None]]] = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("permission_error", "forbidden"),
    404: ("invalid_request_error", "not_found"),
    408: ("timeout_error", "timeout"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    503: ("server_error", "overloaded"),
    504: ("timeout_error", "timeout"),
}

_FINISH_REASONS: Final[Mapping[StopReason, str]] = {
    "end": "stop",
    "stop_sequence": "stop",
    "pause": "stop",
    "length": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


def finish_reason(reply: ModelReply) -> str:
    """Return the finish reason: `stop` for a refusal in text, `content_filter` for one without."""
    if reply.reason == "refusal" and any(isinstance(p, TextPart) and p.refusal for p in reply.content):
        return "stop"
    return _FINISH_REASONS[reply.reason]


def stop_reason(word: str, content: tuple[Part, ...]) -> StopReason | None:
    """Return the neutral stop reason of a choice; None where it follows from the content."""
    if any(isinstance(part, TextPart) and part.refusal for part in content):
        return "refusal"
    return "length" if word == "length" else "refusal" if word == "content_filter" else None


def join_turns(messages: Iterable[Message], *roles: Role) -> list[Message]:
    """Merge consecutive turns that have one of these roles."""
    joined: list[Message] = []
    for message in messages:
        if joined and message.role in roles and joined[-1].role == message.role:
            joined[-1] = Message(message.role, (*joined[-1].content, *message.content), message.name)
        else:
            joined.append(message)
    return joined


def split_system(messages: list[Message]) -> tuple[str, tuple[Message, ...]]:
    """Return the instructions before the first turn, and the remaining turns."""
    first = next((i for i, m in enumerate(messages) if m.role not in ("system", "developer")), len(messages))
    return "\n\n".join(m.text for m in messages[:first]), tuple(messages[first:])


def error_object(status: int, kind: str, message: str) -> dict[str, Any]:
    by_status = ("server_error", None) if status >= 500 else ("invalid_request_error", None)
    type_, code = _ERROR_TYPES.get(status, by_status)
    return {"message": message, "type": type_, "param": None, "code": kind or code}


def error(status: int, kind: str, message: str) -> bytes:
    """Render an error. `kind` is the machine-readable `code`; empty, it follows from the status."""
    return msgspec.json.encode({"error": error_object(status, kind, message)})


def render_count(tokens: int) -> bytes:
    """Render the response of `/v1/responses/input_tokens`, the only counting endpoint here."""
    return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})


def usage_object(usage: TokenUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input,
        "completion_tokens": usage.output,
        "total_tokens": usage.total,
        "prompt_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.cache_write},
        "completion_tokens_details": {"reasoning_tokens": usage.thinking},
    }


def usage_in(body: JsonObject) -> TokenUsage | None:
    """Return the token counts of a chat completion, a completion, a chunk of one, or embeddings."""
    found = body.get("usage")
    if not isinstance(found, dict):
        return None
    return TokenUsage(
        count(found, "prompt_tokens"),
        count(found, "completion_tokens"),
        count(found.get("prompt_tokens_details"), "cached_tokens"),
        count(found.get("prompt_tokens_details"), "cache_write_tokens"),
        count(found.get("completion_tokens_details"), "reasoning_tokens"),
    )


def image_part(url: str, detail: str = "") -> ImagePart:
    inline = from_data_url(url)
    if inline is None:
        return ImagePart(url=url, detail=detail)
    return ImagePart(data=inline[1], media_type=inline[0], detail=detail)


def file_part(fields: Fields) -> FilePart:
    """Parse a file of chat or of Responses: `file_data` is a data URL, or bare base64 in older clients."""
    name, file_id = fields.text("filename", ""), fields.text("file_id", "")
    if not fields.has("file_data"):
        return FilePart(url=fields.text("file_url", ""), file_id=file_id, name=name)
    inline = from_data_url(fields.text("file_data"))
    if inline is not None:
        return FilePart(data=inline[1], media_type=inline[0], file_id=file_id, name=name)
    return FilePart(data=fields.base64("file_data"), file_id=file_id, name=name)


def call_id(part: ToolCallPart, request_id: str, index: int) -> str:
    return part.id or f"call_{request_id}_{index}"
