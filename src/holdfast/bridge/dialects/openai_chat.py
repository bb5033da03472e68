"""OpenAI's `/v1/chat/completions`: parses requests, renders replies and streams of chunks; pure.

The API defines no field for reasoning; `reasoning_content`, which many servers and clients use, carries it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from holdfast.bridge.dialects.fields import Fields, body_fields, from_base64
from holdfast.bridge.dialects.openai_wire import (
    call_id,
    error,
    error_object,
    file_part,
    finish_reason,
    image_part,
    join_turns,
    split_system,
    stop_reason,
    usage_in,
    usage_object,
)
from holdfast.bridge.dialects.streaming import AnswerStream, PartEvent, PartGrew, PartOpened
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
    TextPart,
    Thinking,
    ThinkingPart,
    TokenUsage,
    Tool,
    ToolCallPart,
    ToolChoice,
    ToolKind,
    ToolResultPart,
)
from holdfast.wire.http_messages import HttpRequest

__all__ = ["NAME", "error", "parse", "read", "render", "stream", "usage_in"]

NAME: Final[DialectName] = "openai_chat"

_ROLES: Final[Mapping[str, Role]] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def parse(request: HttpRequest) -> ModelRequest:
    body = body_fields(request)
    if not body.has("messages"):
        body.refuse("messages", "is missing")
    system, turns = split_system(join_turns((_message(item) for item in body.items("messages")), "tool"))
    return ModelRequest(
        model=body.text("model"),
        dialect=NAME,
        messages=turns,
        system=system,
        tools=_tools(body),
        tool_choice=_tool_choice(body),
        params=params(body),
        stream=body.flag("stream"),
        raw=body.value,
    )


def params(body: Fields) -> Params:
    """Return the sampling parameters, which chat and completions share."""
    effort = body.text("reasoning_effort", "")
    limit = body.integer("max_completion_tokens")
    return Params(
        max_tokens=body.integer("max_tokens") if limit is None else limit,
        temperature=body.number("temperature"),
        top_p=body.number("top_p"),
        top_k=body.integer("top_k"),
        stop=body.texts("stop"),
        seed=body.integer("seed"),
        n=body.integer("n") or 1,
        presence_penalty=body.number("presence_penalty"),
        frequency_penalty=body.number("frequency_penalty"),
        format=_format(body),
        thinking=Thinking(effort != "none", effort=effort) if effort else None,
    )


def _format(body: Fields) -> Format | None:
    found = body.maybe("response_format")
    kind = "" if found is None else found.text("type", "")
    if found is None or kind not in ("json_object", "json_schema"):
        return None
    if kind == "json_object":
        return Format("json")
    inner = found.object("json_schema")
    schema = inner.maybe("schema")
    return Format("json_schema", {} if schema is None else schema.value, inner.text("name", ""))


def _message(item: Fields) -> Message:
    role = _ROLES.get(item.text("role"))
    if role is None:
        item.refuse("role", f"{item.text('role')!r} is not one of {', '.join(_ROLES)}")
    content = [*_reasoning(item), *_content(item)]
    if role == "tool":
        inside = tuple(p for p in content if isinstance(p, TextPart | ImagePart | FilePart | OtherPart))
        return Message(role, (ToolResultPart(item.text("tool_call_id", ""), inside, name=item.text("name", "")),))
    refusal = item.text("refusal", "")
    if refusal:
        content.append(TextPart(refusal, refusal=True))
    content.extend(_tool_call(call) for call in item.items("tool_calls"))
    legacy = item.maybe("function_call")
    if legacy is not None:
        content.append(ToolCallPart("", legacy.text("name"), legacy.text("arguments", "")))
    return Message(role, tuple(content), item.text("name", ""))


def _reasoning(item: Fields) -> list[Part]:
    thought = item.text("reasoning_content", "")
    return [ThinkingPart(thought)] if thought else []


def _content(item: Fields) -> list[Part]:
    value = item.value.get("content")
    if value is None:
        return []
    if isinstance(value, str):
        return [TextPart(value)]
    if not isinstance(value, list):
        item.wrong("content", "a string or an array")
    return [_part(part) for part in item.items("content")]


def _part(part: Fields) -> Part:
    kind = part.text("type")
    if kind == "text":
        return TextPart(part.text("text"))
    if kind == "refusal":
        return TextPart(part.text("refusal"), refusal=True)
    if kind == "image_url":
        image = part.object("image_url")
        return image_part(image.text("url"), image.text("detail", ""))
    if kind == "input_audio":
        sound = part.object("input_audio")
        data = from_base64(sound.text("data"))
        if data is None:
            sound.refuse("data", "is not base64")
        return FilePart(data=data, media_type=f"audio/{sound.text('format', 'wav')}")
    if kind == "file":
        return file_part(part.object("file"))
    return OtherPart(NAME, kind, part.value)


def _tool_call(call: Fields) -> ToolCallPart:
    if call.text("type", "function") == "custom":
        custom = call.object("custom")
        return ToolCallPart(call.text("id", ""), custom.text("name"), custom.text("input", ""), "custom")
    function = call.object("function")
    return ToolCallPart(call.text("id", ""), function.text("name"), function.text("arguments", ""))


def _tools(body: Fields) -> tuple[Tool, ...]:
    legacy = (_tool("function", item, item) for item in body.items("functions"))
    return (*(_typed_tool(item) for item in body.items("tools")), *legacy)


def _typed_tool(item: Fields) -> Tool:
    kind = item.text("type", "function")
    if kind not in ("function", "custom"):
        return Tool(kind, kind="builtin", raw=item.value)
    return _tool("function" if kind == "function" else "custom", item.object(kind), item)


def _tool(kind: ToolKind, inner: Fields, item: Fields) -> Tool:
    schema = inner.maybe("parameters")
    return Tool(
        inner.text("name"),
        inner.text("description", ""),
        {} if schema is None else schema.value,
        kind,
        raw=item.value,
    )


def _tool_choice(body: Fields) -> ToolChoice:
    parallel = body.flag("parallel_tool_calls", True)
    value = body.value.get("tool_choice", body.value.get("function_call"))
    if value is None or value == "auto":
        return ToolChoice(parallel=parallel)
    if value == "none":
        return ToolChoice("none", parallel=parallel)
    if value == "required":
        return ToolChoice("required", parallel=parallel)
    field = "tool_choice" if body.has("tool_choice") else "function_call"
    choice = body.object(field)
    kind = choice.text("type", "function")
    if kind == "allowed_tools":
        allowed = choice.object("allowed_tools")
        named = [tool.maybe(tool.text("type", "function")) for tool in allowed.items("tools")]
        names = tuple(tool.text("name") for tool in named if tool is not None)
        return ToolChoice("required" if allowed.text("mode") == "required" else "auto", names, parallel)
    named_tool = choice.maybe(kind) or choice
    return ToolChoice("required", (named_tool.text("name"),), parallel)


def _call_object(part: ToolCallPart, id_: str) -> dict[str, Any]:
    if part.kind == "custom":
        return {"id": id_, "type": "custom", "custom": {"name": part.name, "input": part.arguments}}
    return {"id": id_, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}


def _whole_call(part: ToolCallPart, id_: str) -> dict[str, Any]:
    if part.kind == "function" and not part.arguments:
        part = msgspec.structs.replace(part, arguments="{}")
    return _call_object(part, id_)


def render(reply: ModelReply, request: ModelRequest) -> bytes:
    """Render the body of a whole reply."""
    texts = [part.text for part in reply.content if isinstance(part, TextPart) and not part.refusal]
    refused = [part.text for part in reply.content if isinstance(part, TextPart) and part.refusal]
    thought = "".join(part.text for part in reply.content if isinstance(part, ThinkingPart))
    calls = [part for part in reply.content if isinstance(part, ToolCallPart)]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(texts) if texts else None,
        "refusal": "".join(refused) if refused else None,
    }
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [_whole_call(part, call_id(part, request.id, i)) for i, part in enumerate(calls)]
    extra = dict(reply.extra.get(NAME, {}))
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(reply)}
    choice.update(extra.pop("choice", {}))
    body = {
        "id": reply.id or f"chatcmpl-{request.id}",
        "object": "chat.completion",
        "created": request.created,
        "model": reply.model or request.model,
        "choices": [choice],
        "usage": usage_object(reply.usage),
    }
    return msgspec.json.encode(body | extra)


def read(body: JsonObject) -> ModelReply:
    """Parse the first choice of a provider's whole reply."""
    fields = Fields(dict(body))
    choice = next(fields.items("choices"), None)
    message = None if choice is None else choice.maybe("message")
    content = () if message is None else _message(message).content
    reason = "" if choice is None else choice.text("finish_reason", "")
    usage = usage_in(body) or TokenUsage()
    return ModelReply(content, stop_reason(reason, content), usage, fields.text("model", ""), fields.text("id", ""))


def stream(request: ModelRequest) -> ChatStream:
    return ChatStream(request)


class ChatStream(AnswerStream):
    """A reply as chunks. The last has the counts, if the caller requested them; then `[DONE]`."""

    def __init__(self, request: ModelRequest) -> None:
        super().__init__(request)
        self._calls = -1
        options = request.raw.get("stream_options")
        self._counts = isinstance(options, dict) and options.get("include_usage") is True

    def begin(self) -> list[bytes]:
        return [self._delta({"role": "assistant", "content": ""})]

    def written(self, steps: list[PartEvent]) -> list[bytes]:
        chunks: list[bytes] = []
        for step in steps:
            match step:
                case PartOpened(part=ToolCallPart() as call):
                    self._calls += 1
                    chunks.append(
                        self._delta({"tool_calls": [{"index": self._calls, **_call_object(call, call.id)}]})
                    )
                case PartGrew(part=ToolCallPart() as call, text=text):
                    inner = (
                        {"custom": {"input": text}} if call.kind == "custom" else {"function": {"arguments": text}}
                    )
                    chunks.append(self._delta({"tool_calls": [{"index": self._calls, **inner}]}))
                case PartGrew(part=ThinkingPart(), text=text):
                    chunks.append(self._delta({"reasoning_content": text}))
                case PartGrew(part=TextPart() as part, text=text):
                    chunks.append(self._delta({"refusal" if part.refusal else "content": text}))
                case _:
                    pass
        return chunks

    def finish(self, reply: ModelReply) -> list[bytes]:
        extra = dict(reply.extra.get(NAME, {}))
        choice = {"finish_reason": finish_reason(reply), **extra.pop("choice", {})}
        chunks = [self._chunk({}, choice, extra)]
        if self._counts:
            chunks.append(sse({**self._head(), "choices": [], "usage": usage_object(reply.usage)}))
        return [*chunks, sse(b"[DONE]")]

    def error(self, status: int, kind: str, message: str) -> list[bytes]:
        return [sse({"error": error_object(status, kind, message)})]

    def _head(self) -> dict[str, Any]:
        request = self.request
        return {
            "id": f"chatcmpl-{request.id}",
            "object": "chat.completion.chunk",
            "created": request.created,
            "model": request.model,
        }

    def _delta(self, delta: JsonObject) -> bytes:
        return self._chunk(delta, {}, {})

    def _chunk(self, delta: JsonObject, choice: JsonObject, extra: JsonObject) -> bytes:
        only = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **choice}
        usage = {"usage": None} if self._counts else {}
        return sse({**self._head(), "choices": [only], **usage, **extra})
