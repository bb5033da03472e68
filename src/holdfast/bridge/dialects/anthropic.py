"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`: parses requests, renders replies and streams; pure.

Anthropic's token counts exclude cached input, the neutral ones include it; tool results are user turns there, and
turns of role `tool` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from holdfast.bridge.dialects.fields import Fields, body_fields, count, json_text, native
from holdfast.bridge.dialects.streaming import AnswerStream, PartClosed, PartEvent, PartGrew, PartOpened
from holdfast.bridge.sse import sse
from holdfast.bridge.types import (
    DialectName,
    FilePart,
    Format,
    ImagePart,
    JsonObject,
    Message,
    ModelReply,
    ModelRequest,
    OtherPart,
    Params,
    Part,
    Role,
    StopReason,
    TextPart,
    Thinking,
    ThinkingPart,
    TokenUsage,
    Tool,
    ToolCallPart,
    ToolChoice,
    ToolResultPart,
)
from holdfast.wire.http_messages import HttpRequest

NAME: Final[DialectName] = "anthropic"

_STOP_REASONS: Final[Mapping[StopReason, str]] = {
    "end": "end_turn",
    "length": "max_tokens",
    "stop_sequence": "stop_sequence",
    "tool_use": "tool_use",
    "refusal": "refusal",
    "pause": "pause_turn",
}

_ERROR_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def parse(request: HttpRequest) -> ModelRequest:
    """Parse a request for a message or for a token count; the latter has no `max_tokens`."""
    body = body_fields(request)
    if not body.has("messages"):
        body.refuse("messages", "is missing")
    messages: list[Message] = []
    for item in body.items("messages"):
        messages.extend(_messages(item))
    return ModelRequest(
        model=body.text("model"),
        dialect=NAME,
        messages=tuple(messages),
        system="\n\n".join(part.text for part in _content(body, "system") if isinstance(part, TextPart)),
        tools=tuple(_tool(item) for item in body.items("tools")),
        tool_choice=_tool_choice(body),
        params=Params(
            max_tokens=body.integer("max_tokens"),
            temperature=body.number("temperature"),
            top_p=body.number("top_p"),
            top_k=body.integer("top_k"),
            stop=body.texts("stop_sequences"),
            format=_format(body),
            thinking=_thinking(body),
        ),
        stream=body.flag("stream"),
        raw=body.value,
    )


def _messages(item: Fields) -> list[Message]:
    """Convert a turn. One with tool results becomes two: the results, then the user's text."""
    role = item.text("role")
    if role not in ("user", "assistant", "system"):
        item.refuse("role", f"{role!r} is not one of user, assistant, system")
    known: Role = "user" if role == "user" else "assistant" if role == "assistant" else "system"
    if not item.has("content"):
        item.refuse("content", "is missing")
    content = _content(item, "content")
    results = tuple(part for part in content if isinstance(part, ToolResultPart))
    rest = tuple(part for part in content if not isinstance(part, ToolResultPart))
    turns = [Message("tool", results)] if results else []
    return [*turns, Message(known, rest)] if rest or not results else turns


def _content(item: Fields, name: str) -> list[Part]:
    value = item.value.get(name)
    if value is None:
        return []
    if isinstance(value, str):
        return [TextPart(value)]
    if not isinstance(value, list):
        item.wrong(name, "a string or an array")
    return [_part(block) for block in item.items(name)]


def _part(block: Fields) -> Part:
    kind = block.text("type")
    if kind == "text":
        return TextPart(block.text("text"))
    if kind == "thinking":
        return ThinkingPart(block.text("thinking"), block.text("signature", ""))
    if kind == "redacted_thinking":
        return ThinkingPart(encrypted=block.text("data"))
    if kind == "tool_use":
        given = block.maybe("input")
        arguments = json_text({} if given is None else given.value)
        return ToolCallPart(block.text("id"), block.text("name"), arguments)
    if kind == "tool_result":
        inside = tuple(
            p for p in _content(block, "content") if isinstance(p, TextPart | ImagePart | FilePart | OtherPart)
        )
        return ToolResultPart(block.text("tool_use_id"), inside, block.flag("is_error"))
    if kind in ("image", "document"):
        return _sourced(kind, block)
    return OtherPart(NAME, kind, block.value)


def _sourced(kind: str, block: Fields) -> Part:
    source = block.object("source")
    how = source.text("type")
    media_type = source.text("media_type", "")
    data, url, file_id = b"", "", ""
    if how == "base64":
        data = source.base64("data")
    elif how == "text":
        data = source.text("data").encode()
    elif how == "url":
        url = source.text("url")
    elif how == "file":
        file_id = source.text("file_id")
    else:
        return OtherPart(NAME, kind, block.value)
    if kind == "image":
        return ImagePart(data, media_type, url, file_id)
    return FilePart(data, media_type, url, file_id, block.text("title", ""))


def _tool(item: Fields) -> Tool:
    kind = item.text("type", "custom")
    if kind != "custom":
        return Tool(item.text("name", kind), kind="builtin", raw=item.value)
    return Tool(
        item.text("name"),
        item.text("description", ""),
        item.object("input_schema").value,
        "function",
        raw=item.value,
    )


def _tool_choice(body: Fields) -> ToolChoice:
    choice = body.maybe("tool_choice")
    if choice is None:
        return ToolChoice()
    kind = choice.text("type")
    parallel = not choice.flag("disable_parallel_tool_use")
    if kind == "tool":
        return ToolChoice("required", (choice.text("name"),), parallel)
    if kind not in ("auto", "any", "none"):
        choice.refuse("type", f"{kind!r} is not one of auto, any, none, tool")
    return ToolChoice("required" if kind == "any" else "none" if kind == "none" else "auto", (), parallel)


def _format(body: Fields) -> Format | None:
    config = body.maybe("output_config")
    found = (None if config is None else config.maybe("format")) or body.maybe("output_format")
    if found is None or found.text("type", "") != "json_schema":
        return None
    return Format("json_schema", found.object("schema").value)


def _thinking(body: Fields) -> Thinking | None:
    config, given = body.maybe("output_config"), body.maybe("thinking")
    effort = "" if config is None else config.text("effort", "")
    if given is None:
        return Thinking(effort=effort) if effort else None
    return Thinking(given.text("type") != "disabled", given.integer("budget_tokens"), effort)


def error(status: int, kind: str, message: str) -> bytes:
    """Render an error. The values of `type` are fixed, so `kind` counts only if it is one of them."""
    return msgspec.json.encode(_error(status, kind, message))


def _error(status: int, kind: str, message: str) -> dict[str, Any]:
    by_status = "api_error" if status >= 500 else "invalid_request_error"
    known = kind if kind in _ERROR_TYPES.values() else _ERROR_TYPES.get(status, by_status)
    return {"type": "error", "error": {"type": known, "message": message}}


def _usage(usage: TokenUsage) -> dict[str, Any]:
    thought = {"output_tokens_details": {"thinking_tokens": usage.thinking}} if usage.thinking else {}
    return {
        "input_tokens": max(usage.input - usage.cached - usage.cache_write, 0),
        "cache_creation_input_tokens": usage.cache_write,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
        **thought,
    }


def usage_in(body: JsonObject) -> TokenUsage | None:
    """Return the counts of a message or a stream event: the first event has the input, the last the output."""
    message = body.get("message")
    found = message.get("usage") if isinstance(message, dict) else body.get("usage")
    if not isinstance(found, dict):
        return None
    cached, written = count(found, "cache_read_input_tokens"), count(found, "cache_creation_input_tokens")
    thinking = count(found.get("output_tokens_details"), "thinking_tokens")
    return TokenUsage(
        count(found, "input_tokens") + cached + written, count(found, "output_tokens"), cached, written, thinking
    )


def _block(part: Part, request: ModelRequest, index: int) -> dict[str, Any] | None:
    """Render a part; None for parts that this dialect cannot represent."""
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case ThinkingPart(text="", encrypted=encrypted) if encrypted:
            return {"type": "redacted_thinking", "data": encrypted}
        case ThinkingPart():
            return {"type": "thinking", "thinking": part.text, "signature": part.signature}
        case ToolCallPart():
            id_ = part.id or f"toolu_{request.id}_{index}"
            return {"type": "tool_use", "id": id_, "name": part.name, "input": part.parsed_arguments()}
        case OtherPart(dialect="anthropic"):
            return dict(part.raw)
        case _:
            return None


def render(reply: ModelReply, request: ModelRequest) -> bytes:
    blocks = [_block(part, request, index) for index, part in enumerate(reply.content)]
    body = {
        **_head(request, reply.model, reply.id),
        "content": [block for block in blocks if block is not None],
        "stop_reason": _STOP_REASONS[reply.reason],
        "stop_sequence": reply.stop_sequence or None,
        "usage": _usage(reply.usage),
    }
    return msgspec.json.encode(body | dict(reply.extra.get(NAME, {})))


def _head(request: ModelRequest, model: str = "", id_: str = "") -> dict[str, Any]:
    return {
        "id": id_ or f"msg_{request.id}",
        "type": "message",
        "role": "assistant",
        "model": model or request.model,
    }


def read(body: JsonObject) -> ModelReply:
    """Parse a provider's whole reply."""
    fields = Fields(dict(body))
    return ModelReply(
        tuple(_content(fields, "content")),
        native(_STOP_REASONS, body.get("stop_reason")),
        usage_in(body) or TokenUsage(),
        fields.text("model", ""),
        fields.text("id", ""),
        fields.text("stop_sequence", ""),
    )


def render_count(tokens: int) -> bytes:
    return msgspec.json.encode({"input_tokens": tokens})


def stream(request: ModelRequest) -> MessageStream:
    return MessageStream(request)


class MessageStream(AnswerStream):
    """A reply as named events. Blocks are renumbered, since parts without a representation take no number."""

    call_prefix = "toolu"

    def __init__(self, request: ModelRequest) -> None:
        super().__init__(request)
        self._blocks = 0
        self._thinking = False

    def begin(self) -> list[bytes]:
        message = {**_head(self.request), "content": [], "stop_reason": None, "stop_sequence": None}
        return [self._event("message_start", message={**message, "usage": _usage(TokenUsage())})]

    def written(self, steps: list[PartEvent]) -> list[bytes]:
        events: list[bytes] = []
        for step in steps:
            match step:
                case PartOpened(part=part):
                    events.extend(self._open(part))
                case PartGrew(part=part, text=text):
                    events.extend(self._grow(part, text))
                case PartClosed(part=part):
                    events.extend(self._close(part))
        return events

    def _open(self, part: Part) -> list[bytes]:
        match part:
            case TextPart():
                return [self._start({"type": "text", "text": ""})]
            case ToolCallPart():
                return [self._start({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})]
            case _:
                # A thinking block opens with its first text: one without text may be redacted, which only its end
                # shows.
                return []

    def _grow(self, part: Part, text: str) -> list[bytes]:
        match part:
            case TextPart():
                return [self._more({"type": "text_delta", "text": text})]
            case ToolCallPart():
                return [self._more({"type": "input_json_delta", "partial_json": text})]
            case ThinkingPart():
                return [*self._thought_started(), self._more({"type": "thinking_delta", "thinking": text})]
            case _:
                return []

    def _close(self, part: Part) -> list[bytes]:
        events: list[bytes] = []
        if isinstance(part, ThinkingPart):
            if part.encrypted and not part.text:
                events.append(self._start({"type": "redacted_thinking", "data": part.encrypted}))
            else:
                events.extend(self._thought_started())
                if part.signature:
                    events.append(self._more({"type": "signature_delta", "signature": part.signature}))
        elif isinstance(part, OtherPart) and part.dialect == NAME:
            events.append(self._start(part.raw))
        elif not isinstance(part, TextPart | ToolCallPart):
            return []
        events.append(self._event("content_block_stop", index=self._blocks))
        self._blocks += 1
        self._thinking = False
        return events

    def _thought_started(self) -> list[bytes]:
        if self._thinking:
            return []
        self._thinking = True
        return [self._start({"type": "thinking", "thinking": "", "signature": ""})]

    def finish(self, reply: ModelReply) -> list[bytes]:
        delta = {"stop_reason": _STOP_REASONS[reply.reason], "stop_sequence": reply.stop_sequence or None}
        extra = dict(reply.extra.get(NAME, {}))
        return [
            self._event("message_delta", delta=delta | extra, usage=_usage(reply.usage)),
            self._event("message_stop"),
        ]

    def error(self, status: int, kind: str, message: str) -> list[bytes]:
        return [sse(_error(status, kind, message), "error")]

    def _start(self, block: JsonObject) -> bytes:
        return self._event("content_block_start", index=self._blocks, content_block=block)

    def _more(self, delta: JsonObject) -> bytes:
        return self._event("content_block_delta", index=self._blocks, delta=delta)

    def _event(self, name: str, **fields: Any) -> bytes:
        return sse({"type": name, **fields}, name)
