"""Replies, requests and malformed requests, for Hypothesis."""

from __future__ import annotations

import json
from typing import Any, Final

from hypothesis import strategies as st

from holdfast.bridge.types import (
    DialectName,
    ModelReply,
    ModelRequest,
    Part,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    Usage,
)

#: Any text but lone surrogates, which are no characters and which UTF-8 cannot carry.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
names = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
signatures = st.sampled_from(["", "c2ln", "b3BhcXVl"])
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(names, st.integers(0, 9) | words, max_size=3).map(
    lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":"))
)
usages = st.builds(
    lambda fresh, cached, written, text_tokens, thought: Usage(
        fresh + cached + written, text_tokens + thought, cached, written, thought
    ),
    *[st.integers(0, 10**6)] * 5,
)


@st.composite
def replies(draw: st.DrawFn) -> ModelReply:
    """Answers that every dialect can express."""
    kinds = draw(st.lists(st.sampled_from(["text", "thinking", "call"]), max_size=6))
    content: list[Part] = []
    for index, kind in enumerate(kinds):
        if kind == "text":
            content.append(TextPart(draw(words)))
        elif kind == "thinking":
            content.append(ThinkingPart(draw(words)))
        else:
            content.append(ToolCallPart(f"call_{index}", draw(names), draw(arguments)))
    return ModelReply(tuple(content), usage=draw(usages))


def request_for(dialect: DialectName, **fields: Any) -> ModelRequest:
    return ModelRequest("m", dialect, id="1", created=1_700_000_000, **fields)


#: One request a path with much of what it may hold: malformed ones are made of these.
SAMPLES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {
                "role": "user",
                "name": "n",
                "content": [
                    {"type": "text", "text": "t"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}},
                    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
                    {"type": "file", "file": {"file_data": "AAAA", "filename": "f"}},
                    {"type": "refusal", "refusal": "r"},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "refusal": "r",
                "reasoning_content": "h",
                "function_call": {"name": "f", "arguments": "{}"},
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                    {"id": "d", "type": "custom", "custom": {"name": "f", "input": "x"}},
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
            {"type": "custom", "custom": {"name": "g"}},
        ],
        "functions": [{"name": "f", "parameters": {}}],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
        },
        "parallel_tool_calls": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        "max_tokens": 1,
        "max_completion_tokens": 2,
        "temperature": 0.5,
        "n": 1,
        "stop": ["a"],
        "reasoning_effort": "low",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {
        "model": "m",
        "instructions": "i",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]},
            {"role": "user", "content": [{"type": "input_file", "file_data": "AAAA", "filename": "f"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}], "content": []},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
            {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "o"},
            {"type": "web_search_call", "id": "w"},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": {}, "description": "d"},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "parameters": {}}]},
            {"type": "web_search"},
        ],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        "reasoning": {"effort": "low"},
        "max_output_tokens": 1,
        "metadata": {"a": "b"},
        "stream": True,
    },
    "/v1/completions": {"model": "m", "prompt": ["a", "b"], "max_tokens": 1, "stop": "x", "stream": False},
    "/v1/embeddings": {"model": "m", "input": ["a", [1, 2]], "encoding_format": "base64", "dimensions": 3},
    "/v1/messages": {
        "model": "m",
        "max_tokens": 1,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "t"},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
                    {"type": "document", "title": "t", "source": {"type": "text", "data": "x"}},
                    {"type": "tool_result", "tool_use_id": "u", "content": [{"type": "text", "text": "r"}]},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "h", "signature": "s"},
                    {"type": "redacted_thinking", "data": "d"},
                    {"type": "tool_use", "id": "u", "name": "f", "input": {"a": [1]}},
                ],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"format": {"type": "json_schema", "schema": {}}, "effort": "low"},
        "stop_sequences": ["a"],
        "stream": True,
    },
    "/v1beta/models/m:streamGenerateContent": {
        "contents": [
            {
                "role": "user",
                "parts": [
                    {"text": "t"},
                    {"inlineData": {"mimeType": "image/png", "data": "AAAA"}},
                    {"file_data": {"mime_type": "image/png", "file_uri": "u"}},
                    {"functionResponse": {"id": "c", "name": "f", "response": {"r": 1}, "parts": []}},
                ],
            },
            {
                "role": "model",
                "parts": [{"functionCall": {"name": "f", "args": {"a": 1}}, "thoughtSignature": "s"}],
            },
        ],
        "systemInstruction": {"parts": [{"text": "s"}]},
        "tools": [{"functionDeclarations": [{"name": "f", "parameters": {}}]}, {"googleSearch": {}}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
        "generationConfig": {
            "temperature": 1,
            "stopSequences": ["a"],
            "responseSchema": {},
            "thinkingConfig": {"thinkingBudget": 1, "thinkingLevel": "LOW"},
        },
    },
}


def locations(value: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in a JSON value, as the way to it."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(location for key, inner in inside for location in locations(inner, (*at, key)))]


def with_changed(value: Any, at: tuple[str | int, ...], new: Any) -> Any:
    """The same value with another one at that place."""
    if not at:
        return new
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = with_changed(value[at[0]], at[1:], new)
    return copy


@st.composite
def malformed(draw: st.DrawFn) -> tuple[str, Any]:
    """A path, and a request of its kind with something else in one or two places."""
    path = draw(st.sampled_from(sorted(SAMPLES)))
    body: Any = SAMPLES[path]
    for _ in range(draw(st.integers(1, 2))):
        body = with_changed(body, draw(st.sampled_from(locations(body))), draw(json_values))
    return path, body
