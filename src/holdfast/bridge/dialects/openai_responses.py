"""OpenAI's `/v1/responses`: parses items into turns, renders replies as items; its stream has its own module. Pure.

Consecutive reasoning, messages and calls are one turn of the assistant. Reasoning keeps its id and its encrypted
text, so that it can be returned unchanged.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

from holdfast.bridge.dialects.fields import Fields, body_fields, count, json_text
from holdfast.bridge.dialects.openai_wire import (
    call_id,
    error,
    file_part,
    finish_reason,
    image_part,
    join_turns,
    split_system,
    stop_reason,
)
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

__all__ = ["NAME", "error", "finished", "item", "parse", "read", "render", "response", "text_content", "usage_in"]

NAME: Final[DialectName] = "openai_responses"

_ROLES: Final[Mapping[str, Role]] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
}
#: Items that are not turns. Tools in the input are tools of the request like any others.
_MORE_TOOLS: Final = "additional_tools"
_NO_TURNS: Final = (_MORE_TOOLS, "configuration_update")
#: Fields of the request that the response repeats, and their defaults.
_ECHOED: Final[Mapping[str, Any]] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": False,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


def parse(request: HttpRequest) -> ModelRequest:
    body = body_fields(request)
    leading, turns = split_system(join_turns(_turns(body), "assistant", "tool"))
    system = [text for text in (body.text("instructions", ""), leading) if text]
    return ModelRequest(
        model=body.text("model"),
        dialect=NAME,
        messages=turns,
        system="\n\n".join(system),
        tools=tuple(tool for each in _tool_objects(body) for tool in _tools(each)),
        tool_choice=_tool_choice(body),
        params=Params(
            max_tokens=body.integer("max_output_tokens"),
            temperature=body.number("temperature"),
            top_p=body.number("top_p"),
            format=_format(body),
            thinking=_thinking(body),
        ),
        stream=body.flag("stream"),
        raw=body.value,
    )


def _turns(body: Fields) -> list[Message]:
    value = body.value.get("input")
    if value is None:
        # A stored prompt or a continued conversation may need no input of its own.
        return []
    if isinstance(value, str):
        return [Message("user", (TextPart(value),))]
    if not isinstance(value, list):
        body.wrong("input", "a string or an array")
    return [_turn(each) for each in body.items("input") if each.value.get("type") not in _NO_TURNS]


def _turn(each: Fields) -> Message:
    kind = each.text("type", "message" if each.has("role") else "item_reference")
    if kind == "message":
        role = _ROLES.get(each.text("role"))
        if role is None:
            each.refuse("role", f"{each.text('role')!r} is not one of {', '.join(_ROLES)}")
        return Message(role, tuple(_content(each, "content")))
    if kind in ("function_call", "custom_tool_call"):
        tool_kind: ToolKind = "function" if kind == "function_call" else "custom"
        arguments = each.text("arguments" if kind == "function_call" else "input", "")
        namespace = each.text("namespace", "")
        return Message(
            "assistant", (ToolCallPart(each.text("call_id"), each.text("name"), arguments, tool_kind, namespace),)
        )
    if kind in ("function_call_output", "custom_tool_call_output"):
        return Message("tool", (_result(each, "function" if kind == "function_call_output" else "custom"),))
    if kind == "reasoning":
        return Message("assistant", (_reasoning(each),))
    return Message("tool" if kind.endswith("_output") else "assistant", (OtherPart(NAME, kind, each.value),))


def _reasoning(each: Fields) -> ThinkingPart:
    summary = [piece.text("text") for piece in each.items("summary")]
    texts = summary or [piece.text("text") for piece in each.items("content")]
    return ThinkingPart("\n\n".join(texts), encrypted=each.text("encrypted_content", ""), id=each.text("id", ""))


def _result(each: Fields, kind: ToolKind) -> ToolResultPart:
    inside = tuple(
        part for part in _content(each, "output") if isinstance(part, TextPart | ImagePart | FilePart | OtherPart)
    )
    return ToolResultPart(each.text("call_id", ""), inside, name=each.text("name", ""), kind=kind)


def _content(each: Fields, name: str) -> list[Part]:
    value = each.value.get(name)
    if value is None:
        each.refuse(name, "is missing")
    if isinstance(value, str):
        return [TextPart(value)]
    if not isinstance(value, list):
        each.wrong(name, "a string or an array")
    return [_part(part) for part in each.items(name)]


def _part(part: Fields) -> Part:
    kind = part.text("type")
    if kind in ("input_text", "output_text", "text"):
        return TextPart(part.text("text"))
    if kind == "refusal":
        return TextPart(part.text("refusal"), refusal=True)
    if kind == "input_image":
        detail = part.text("detail", "")
        if part.has("image_url"):
            return image_part(part.text("image_url"), detail)
        return ImagePart(file_id=part.text("file_id"), detail=detail)
    if kind == "input_file":
        return file_part(part)
    return OtherPart(NAME, kind, part.value)


def _tool_objects(body: Fields) -> list[Fields]:
    """Yield all tool definitions: the request's own, and those of items in its input."""
    found = list(body.items("tools"))
    if isinstance(body.value.get("input"), list):
        for each in body.items("input"):
            found += each.items("tools") if each.value.get("type") == _MORE_TOOLS else ()
    return found


def _tools(each: Fields, namespace: str = "") -> list[Tool]:
    kind = each.text("type", "function")
    if kind == "namespace":
        return [tool for inner in each.items("tools") for tool in _tools(inner, each.text("name"))]
    if kind not in ("function", "custom"):
        return [Tool(kind, kind="builtin", raw=each.value)]
    schema = each.maybe("parameters")
    return [
        Tool(
            each.text("name"),
            each.text("description", ""),
            {} if schema is None else schema.value,
            "function" if kind == "function" else "custom",
            namespace,
            each.value,
        )
    ]


def _tool_choice(body: Fields) -> ToolChoice:
    parallel = body.flag("parallel_tool_calls", True)
    value = body.value.get("tool_choice")
    if value is None or value == "auto":
        return ToolChoice(parallel=parallel)
    if value == "none":
        return ToolChoice("none", parallel=parallel)
    if value == "required":
        return ToolChoice("required", parallel=parallel)
    choice = body.object("tool_choice")
    kind = choice.text("type")
    if kind == "allowed_tools":
        names = tuple(tool.text("name", tool.text("type", "")) for tool in choice.items("tools"))
        return ToolChoice("required" if choice.text("mode") == "required" else "auto", names, parallel)
    return ToolChoice("required", (choice.text("name", kind),), parallel)


def _format(body: Fields) -> Format | None:
    config = body.maybe("text")
    found = None if config is None else config.maybe("format")
    kind = "" if found is None else found.text("type", "")
    if found is None or kind not in ("json_object", "json_schema"):
        return None
    if kind == "json_object":
        return Format("json")
    return Format("json_schema", found.object("schema").value, found.text("name", ""))


def _thinking(body: Fields) -> Thinking | None:
    found = body.maybe("reasoning")
    effort = "" if found is None else found.text("effort", "")
    return Thinking(effort != "none", effort=effort) if effort else None


def usage_object(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.cache_write},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.thinking},
        "total_tokens": usage.total,
    }


def usage_in(body: JsonObject) -> TokenUsage | None:
    """Return the token counts of a response, or of an event that carries one."""
    inner = body.get("response")
    found = inner.get("usage") if isinstance(inner, dict) else body.get("usage")
    if not isinstance(found, dict):
        return None
    details = found.get("input_tokens_details")
    return TokenUsage(
        count(found, "input_tokens"),
        count(found, "output_tokens"),
        count(details, "cached_tokens"),
        count(details, "cache_write_tokens"),
        count(found.get("output_tokens_details"), "reasoning_tokens"),
    )


def response(request: ModelRequest, status: str, output: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Return the response object with the settings of the request."""
    echoed = {
        name: default if request.raw.get(name) is None else request.raw[name] for name, default in _ECHOED.items()
    }
    return {
        "id": f"resp_{request.id}",
        "object": "response",
        "created_at": request.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": output,
        "usage": None,
        **echoed,
        **fields,
    }


def text_content(part: TextPart) -> dict[str, Any]:
    if part.refusal:
        return {"type": "refusal", "refusal": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def item(part: Part, request: ModelRequest, index: int, status: str = "completed") -> dict[str, Any] | None:
    """Render a part as an item; None for parts that this dialect cannot represent."""
    id_ = f"{request.id}_{index}"
    match part:
        case TextPart():
            content = [text_content(part)]
            return {
                "id": f"msg_{id_}",
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": content,
            }
        case ThinkingPart():
            summary = [{"type": "summary_text", "text": part.text}] if part.text else []
            encrypted = {"encrypted_content": part.encrypted} if part.encrypted else {}
            return {"id": part.id or f"rs_{id_}", "type": "reasoning", "summary": summary, **encrypted}
        case ToolCallPart():
            namespace = {"namespace": part.namespace} if part.namespace else {}
            called = {"call_id": call_id(part, request.id, index), "name": part.name, **namespace, "status": status}
            if part.kind == "custom":
                return {"id": f"ctc_{id_}", "type": "custom_tool_call", "input": part.arguments, **called}
            return {"id": f"fc_{id_}", "type": "function_call", "arguments": part.arguments or "{}", **called}
        case ImagePart(data=data) if data:
            result = base64.b64encode(data).decode()
            return {"id": f"ig_{id_}", "type": "image_generation_call", "status": status, "result": result}
        case OtherPart(dialect="openai_responses"):
            return dict(part.raw)
        case _:
            return None


def finished(reply: ModelReply, request: ModelRequest, items: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response at its end: complete, or cut by the length or by the filter."""
    why = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(finish_reason(reply))
    cut = {} if why is None else {"incomplete_details": {"reason": why}}
    body = response(request, "completed" if why is None else "incomplete", items, **cut)
    body.update(model=reply.model or request.model, usage=usage_object(reply.usage))
    if reply.id:
        body["id"] = reply.id
    return body | dict(reply.extra.get(NAME, {}))


def read(body: JsonObject) -> ModelReply:
    """Parse a provider's whole reply."""
    fields = Fields(dict(body))
    content = tuple(part for each in fields.items("output") for part in _turn(each).content)
    cut = fields.maybe("incomplete_details")
    why = {"max_output_tokens": "length"}.get(reason := "" if cut is None else cut.text("reason", ""), reason)
    usage = usage_in(body) or TokenUsage()
    return ModelReply(content, stop_reason(why, content), usage, fields.text("model", ""), fields.text("id", ""))


def render(reply: ModelReply, request: ModelRequest) -> bytes:
    items = [item(part, request, index) for index, part in enumerate(reply.content)]
    return json_text(finished(reply, request, [each for each in items if each is not None])).encode()
