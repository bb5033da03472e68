"""Google's `:generateContent`, `:streamGenerateContent` and `:countTokens`: parses requests, renders replies; pure.

The path, not the body, has the model and whether it streams. A stream is server-sent events with `alt=sse` and one
JSON array without; a function call is sent whole, since its arguments are an object. Field names are accepted in
camel case and in snake case, as the provider does.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import parse_qs, quote, unquote

import msgspec

from holdfast.bridge.dialects.fields import Fields, body_fields, count, from_base64, json_text
from holdfast.bridge.dialects.streaming import AnswerStream, PartClosed, PartEvent, PartGrew
from holdfast.bridge.sse import CONTENT_TYPE, sse
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
from holdfast.errors import InvalidParams
from holdfast.wire.http_messages import HttpRequest

NAME: Final[DialectName] = "google"

_PATH: Final = re.compile(r"/v1[a-z0-9]*/(?:models|tunedModels)/([^:/]+):([A-Za-z]+)")
_SNAKE: Final = re.compile(r"_([a-z0-9])")

_FINISH_REASONS: Final[Mapping[StopReason, str]] = {
    "end": "STOP",
    "stop_sequence": "STOP",
    "tool_use": "STOP",
    "pause": "STOP",
    "length": "MAX_TOKENS",
    "refusal": "SAFETY",
}

_BLOCKED: Final = frozenset(
    ("SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "IMAGE_SAFETY", "IMAGE_PROHIBITED_CONTENT")
)

_STATUSES: Final[Mapping[int, str]] = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def path_of(path: str) -> tuple[str, str] | None:
    """Return model and action of a path, such as `/v1beta/models/NAME:generateContent`."""
    found = _PATH.fullmatch(path.replace("%3A", ":").replace("%3a", ":"))
    return None if found is None else (unquote(found[1]), found[2])


def canonical(path: str) -> str:
    """Return the path with its model in one spelling, so that the provider reads the name that was checked."""
    found = _PATH.fullmatch(path.replace("%3A", ":").replace("%3a", ":"))
    if found is None:
        return path
    return f"{path[: found.start(1)]}{quote(unquote(found[1]), safe='')}:{found[2]}"


def parse(request: HttpRequest) -> ModelRequest:
    found = path_of(request.path)
    if found is None:
        raise InvalidParams(f"{request.path}: has no model and action", path="path")
    model, action = found
    sent = body_fields(request)
    body = _camel(sent)
    if action == "countTokens" and body.has("generateContentRequest"):
        body = _camel(body.object("generateContentRequest"))
    if not body.has("contents"):
        body.refuse("contents", "is missing")
    messages: list[Message] = []
    for item in _listed(body, "contents"):
        messages.extend(_messages(item))
    system = body.maybe("systemInstruction")
    config = _camel(body.maybe("generationConfig") or Fields({}, body.at("generationConfig")))
    streams = action == "streamGenerateContent"
    return ModelRequest(
        model=model,
        dialect=NAME,
        messages=tuple(messages),
        system="" if system is None else "\n\n".join(p.text for p in _parts(system) if isinstance(p, TextPart)),
        tools=_tools(body),
        tool_choice=_tool_choice(body),
        params=Params(
            max_tokens=config.integer("maxOutputTokens"),
            temperature=config.number("temperature"),
            top_p=config.number("topP"),
            top_k=config.integer("topK"),
            stop=config.texts("stopSequences"),
            seed=config.integer("seed"),
            n=config.integer("candidateCount") or 1,
            presence_penalty=config.number("presencePenalty"),
            frequency_penalty=config.number("frequencyPenalty"),
            format=_format(config),
            thinking=_thinking(config),
        ),
        stream=streams,
        raw=sent.value,
        sse="sse" in parse_qs(request.query).get("alt", ()),
    )


def _camel(fields: Fields) -> Fields:
    """Return the object with the names of its own fields in camel case."""
    if not any("_" in name for name in fields.value):
        return fields
    return Fields({_SNAKE.sub(lambda m: m[1].upper(), name): v for name, v in fields.value.items()}, fields.path)


def _messages(item: Fields) -> list[Message]:
    """Convert a turn. One with function results becomes two, as in every dialect."""
    role = item.text("role", "user")
    parts = _parts(item)
    results = tuple(part for part in parts if isinstance(part, ToolResultPart))
    rest = tuple(part for part in parts if not isinstance(part, ToolResultPart))
    turns = [Message("tool", results)] if results else []
    turn = Message("assistant" if role == "model" else "system" if role == "system" else "user", rest)
    return [*turns, turn] if rest or not results else turns


def _parts(item: Fields) -> list[Part]:
    return [_part(_camel(part)) for part in _listed(item, "parts")]


def _listed(fields: Fields, name: str) -> Iterable[Fields]:
    """Yield the objects of a list. A single object counts as a list of one, as at the provider."""
    if isinstance(fields.value.get(name), dict):
        return [fields.object(name)]
    return fields.items(name)


def _part(part: Fields) -> Part:
    signature = part.text("thoughtSignature", "")
    if part.has("text"):
        text = part.text("text")
        return ThinkingPart(text, signature) if part.flag("thought") else TextPart(text, signature=signature)
    if part.has("inlineData"):
        blob = _camel(part.object("inlineData"))
        media_type, data = blob.text("mimeType", ""), blob.base64("data")
        if media_type.startswith("image/"):
            return ImagePart(data, media_type)
        return FilePart(data, media_type, name=blob.text("displayName", ""))
    if part.has("fileData"):
        where = _camel(part.object("fileData"))
        media_type, url = where.text("mimeType", ""), where.text("fileUri")
        if media_type.startswith("image/"):
            return ImagePart(media_type=media_type, url=url)
        return FilePart(media_type=media_type, url=url, name=where.text("displayName", ""))
    if part.has("functionCall"):
        call = part.object("functionCall")
        args = call.maybe("args")
        arguments = json_text({} if args is None else args.value)
        return ToolCallPart(call.text("id", ""), call.text("name"), arguments, signature=signature)
    if part.has("functionResponse"):
        return _result(part.object("functionResponse"))
    return OtherPart(NAME, next(iter(part.value), "empty"), part.value)


def _result(given: Fields) -> ToolResultPart:
    response = given.maybe("response")
    value = {} if response is None else response.value
    inside = [TextPart(json_text(value))]
    more = [p for p in _parts(given) if isinstance(p, ImagePart | FilePart | OtherPart)]
    return ToolResultPart(given.text("id", ""), (*inside, *more), "error" in value, given.text("name", ""))


def _tools(body: Fields) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for item in body.items("tools"):
        tool = _camel(item)
        for each in tool.items("functionDeclarations"):
            declared = _camel(each)
            schema = declared.maybe("parametersJsonSchema") or declared.maybe("parameters")
            name, about = declared.text("name"), declared.text("description", "")
            tools.append(Tool(name, about, {} if schema is None else schema.value, raw=each.value))
        others = (name for name in tool.value if name != "functionDeclarations" and tool.has(name))
        tools.extend(Tool(name, kind="builtin", raw=item.value) for name in others)
    return tuple(tools)


def _tool_choice(body: Fields) -> ToolChoice:
    config = body.maybe("toolConfig")
    inner = None if config is None else _camel(config).maybe("functionCallingConfig")
    if inner is None:
        return ToolChoice()
    calling = _camel(inner)
    names = calling.texts("allowedFunctionNames")
    mode = calling.text("mode", "AUTO").upper()
    return ToolChoice("required" if mode == "ANY" else "none" if mode == "NONE" else "auto", names)


def _format(config: Fields) -> Format | None:
    schema = config.maybe("responseJsonSchema") or config.maybe("responseSchema")
    if schema is not None:
        return Format("json_schema", schema.value)
    return Format("json") if config.text("responseMimeType", "") == "application/json" else None


def _thinking(config: Fields) -> Thinking | None:
    given = config.maybe("thinkingConfig")
    if given is None:
        return None
    thinking = _camel(given)
    budget = thinking.integer("thinkingBudget")
    # A budget of -1 leaves the amount to the model.
    return Thinking(
        budget != 0, None if budget is None or budget < 0 else budget, thinking.text("thinkingLevel", "")
    )


def error(status: int, kind: str, message: str) -> bytes:
    """Render an error. The values of `status` are fixed, so `kind` counts only if it is one of them."""
    return msgspec.json.encode(_error(status, kind, message))


def _error(status: int, kind: str, message: str) -> dict[str, Any]:
    by_status = "INTERNAL" if status >= 500 else "INVALID_ARGUMENT"
    word = kind if kind in _STATUSES.values() else _STATUSES.get(status, by_status)
    return {"error": {"code": status, "message": message, "status": word}}


def _usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "promptTokenCount": usage.input,
        "cachedContentTokenCount": usage.cached,
        "candidatesTokenCount": max(usage.output - usage.thinking, 0),
        "thoughtsTokenCount": usage.thinking,
        "totalTokenCount": usage.total,
    }


def usage_in(body: JsonObject) -> TokenUsage | None:
    """Return the token counts of a reply, or of a chunk of one."""
    found = body.get("usageMetadata")
    if not isinstance(found, dict):
        return None
    thinking = count(found, "thoughtsTokenCount")
    prompt = count(found, "promptTokenCount") + count(found, "toolUsePromptTokenCount")
    cached = count(found, "cachedContentTokenCount")
    return TokenUsage(prompt, count(found, "candidatesTokenCount") + thinking, cached, thinking=thinking)


def _rendered(part: Part) -> dict[str, Any] | None:
    """Render a part; None for parts that this dialect cannot represent."""
    match part:
        case TextPart():
            return {"text": part.text, **_signed(part.signature)}
        case ThinkingPart():
            return {"text": part.text, "thought": True, **_signed(part.signature)}
        case ToolCallPart():
            call = {"id": part.id, "name": part.name, "args": part.parsed_arguments()}
            return {"functionCall": {k: v for k, v in call.items() if k != "id" or v}, **_signed(part.signature)}
        case ImagePart(data=data) | FilePart(data=data) if data:
            return {"inlineData": {"mimeType": part.media_type, "data": base64.b64encode(data).decode()}}
        case ImagePart() | FilePart():
            return {"fileData": {"mimeType": part.media_type, "fileUri": part.url}} if part.url else None
        case OtherPart(dialect="google"):
            return dict(part.raw)
        case _:
            return None


def _signed(signature: str) -> dict[str, str]:
    """Return the signature field. Clients decode it as base64: any other value is not Google's, and is not sent."""
    return {"thoughtSignature": signature} if signature and from_base64(signature) is not None else {}


def _body(request: ModelRequest, parts: list[dict[str, Any]], reply: ModelReply | None = None) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    body: dict[str, Any] = {"candidates": [candidate], "modelVersion": request.model, "responseId": request.id}
    if reply is None:
        return body
    extra = dict(reply.extra.get(NAME, {}))
    candidate["finishReason"] = _FINISH_REASONS[reply.reason]
    candidate.update(extra.pop("candidate", {}))
    body["modelVersion"] = reply.model or request.model
    body["responseId"] = reply.id or request.id
    return body | {"usageMetadata": _usage(reply.usage)} | extra


def render(reply: ModelReply, request: ModelRequest) -> bytes:
    parts = [_rendered(part) for part in reply.content]
    return msgspec.json.encode(_body(request, [part for part in parts if part is not None], reply))


def read(body: JsonObject) -> ModelReply:
    """Parse the first candidate of a provider's whole reply. `STOP` may also end a reply with calls."""
    fields = Fields(dict(body))
    candidate = next(fields.items("candidates"), None)
    content = None if candidate is None else candidate.maybe("content")
    reason = "" if candidate is None else candidate.text("finishReason", "")
    return ModelReply(
        () if content is None else tuple(_parts(content)),
        "refusal" if reason in _BLOCKED else "length" if reason == "MAX_TOKENS" else None,
        usage_in(body) or TokenUsage(),
        fields.text("modelVersion", ""),
        fields.text("responseId", ""),
    )


def render_count(tokens: int) -> bytes:
    return msgspec.json.encode({"totalTokens": tokens})


def stream(request: ModelRequest) -> ContentStream:
    return ContentStream(request)


class ContentStream(AnswerStream):
    """A reply as a sequence of partial replies. Text is sent as it arrives; calls and images when whole."""

    def __init__(self, request: ModelRequest) -> None:
        super().__init__(request)
        self._sent = 0
        self.content_type = CONTENT_TYPE if request.sse else "application/json"

    def begin(self) -> list[bytes]:
        return [] if self.request.sse else [b"["]

    def written(self, steps: list[PartEvent]) -> list[bytes]:
        chunks: list[bytes] = []
        for step in steps:
            match step:
                case PartGrew(part=TextPart(), text=text):
                    chunks.append(self._chunk(_body(self.request, [{"text": text}])))
                case PartGrew(part=ThinkingPart(), text=text):
                    chunks.append(self._chunk(_body(self.request, [{"text": text, "thought": True}])))
                case PartClosed(part=TextPart(signature=signature) | ThinkingPart(signature=signature) as part):
                    if _signed(signature):
                        # The provider also sends the signature after the text, with an empty text.
                        thought = {"thought": True} if isinstance(part, ThinkingPart) else {}
                        signed = {"text": "", **thought, **_signed(signature)}
                        chunks.append(self._chunk(_body(self.request, [signed])))
                case PartClosed(part=part):
                    rendered = _rendered(part)
                    if rendered is not None:
                        chunks.append(self._chunk(_body(self.request, [rendered])))
                case _:
                    pass
        return chunks

    def finish(self, reply: ModelReply) -> list[bytes]:
        last = self._chunk(_body(self.request, [], reply))
        return [last] if self.request.sse else [last, b"]"]

    def error(self, status: int, kind: str, message: str) -> list[bytes]:
        last = self._chunk(_error(status, kind, message))
        return [last] if self.request.sse else [last, b"]"]

    def _chunk(self, body: JsonObject) -> bytes:
        self._sent += 1
        if self.request.sse:
            # Google's own clients search for CR LF.
            return sse(body)[:-2] + b"\r\n\r\n"
        return (b"," if self._sent > 1 else b"") + msgspec.json.encode(body)
