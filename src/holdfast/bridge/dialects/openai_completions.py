"""OpenAI's `/v1/completions`, the older endpoint for prompts and texts: parses requests, renders replies; pure.

A prompt is one turn of the user; several prompts are several turns. A prompt of token numbers has no text and stays
unparsed.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from holdfast.bridge.dialects.fields import Fields, body_fields
from holdfast.bridge.dialects.openai_chat import params
from holdfast.bridge.dialects.openai_wire import (
    error,
    error_object,
    finish_reason,
    stop_reason,
    usage_in,
    usage_object,
)
from holdfast.bridge.dialects.streaming import AnswerStream, PartEvent, PartGrew
from holdfast.bridge.sse import sse
from holdfast.bridge.types import (
    DialectName,
    JsonObject,
    Message,
    ModelReply,
    ModelRequest,
    OtherPart,
    TextPart,
    TokenUsage,
)
from holdfast.wire.http_messages import HttpRequest

__all__ = ["NAME", "error", "parse", "read", "render", "stream", "usage_in"]

NAME: Final[DialectName] = "openai_completions"


def parse(request: HttpRequest) -> ModelRequest:
    body = body_fields(request)
    return ModelRequest(
        model=body.text("model"),
        dialect=NAME,
        messages=_prompts(body),
        params=params(body),
        stream=body.flag("stream"),
        raw=body.value,
    )


def _prompts(body: Fields) -> tuple[Message, ...]:
    value = body.value.get("prompt")
    if value is None:
        body.refuse("prompt", "is missing")
    if isinstance(value, str):
        return (Message("user", (TextPart(value),)),)
    if not isinstance(value, list):
        body.wrong("prompt", "a string or an array")
    if all(isinstance(item, str) for item in value):
        return tuple(Message("user", (TextPart(item),)) for item in value)
    return (Message("user", (OtherPart(NAME, "tokens", {"prompt": value}),)),)


def _finish(reply: ModelReply) -> str:
    # This dialect has no tools, so a reply cannot end for one.
    return "stop" if reply.reason == "tool_use" else finish_reason(reply)


def _head(request: ModelRequest, model: str = "", id_: str = "") -> dict[str, Any]:
    return {
        "id": id_ or f"cmpl-{request.id}",
        "object": "text_completion",
        "created": request.created,
        "model": model or request.model,
    }


def render(reply: ModelReply, request: ModelRequest) -> bytes:
    extra = dict(reply.extra.get(NAME, {}))
    choice = {"index": 0, "text": reply.text, "logprobs": None, "finish_reason": _finish(reply)}
    choice.update(extra.pop("choice", {}))
    body = {**_head(request, reply.model, reply.id), "choices": [choice], "usage": usage_object(reply.usage)}
    return msgspec.json.encode(body | extra)


def read(body: JsonObject) -> ModelReply:
    """Parse the first choice of a provider's whole reply."""
    fields = Fields(dict(body))
    choice = next(fields.items("choices"), None)
    text, reason = ("", "") if choice is None else (choice.text("text", ""), choice.text("finish_reason", ""))
    content = (TextPart(text),) if text else ()
    usage = usage_in(body) or TokenUsage()
    return ModelReply(content, stop_reason(reason, content), usage, fields.text("model", ""), fields.text("id", ""))


def stream(request: ModelRequest) -> CompletionStream:
    return CompletionStream(request)


class CompletionStream(AnswerStream):
    """A reply as chunks of text; then `[DONE]`."""

    def __init__(self, request: ModelRequest) -> None:
        super().__init__(request)
        options = request.raw.get("stream_options")
        self._counts = isinstance(options, dict) and options.get("include_usage") is True

    def begin(self) -> list[bytes]:
        return []

    def written(self, steps: list[PartEvent]) -> list[bytes]:
        return [
            self._chunk(step.text, {}, {})
            for step in steps
            if isinstance(step, PartGrew) and isinstance(step.part, TextPart) and not step.part.refusal
        ]

    def finish(self, reply: ModelReply) -> list[bytes]:
        extra = dict(reply.extra.get(NAME, {}))
        chunks = [self._chunk("", {"finish_reason": _finish(reply), **extra.pop("choice", {})}, extra)]
        if self._counts:
            chunks.append(sse({**_head(self.request), "choices": [], "usage": usage_object(reply.usage)}))
        return [*chunks, sse(b"[DONE]")]

    def error(self, status: int, kind: str, message: str) -> list[bytes]:
        return [sse({"error": error_object(status, kind, message)})]

    def _chunk(self, text: str, choice: JsonObject, extra: JsonObject) -> bytes:
        only = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, **choice}
        return sse({**_head(self.request), "choices": [only], **extra})
