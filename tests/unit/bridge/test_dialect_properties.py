"""Properties of every dialect: streams add up, histories come back unchanged, no request breaks it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings, strategies as st

from fuzz.bridge_targets import PATHS, fuzz_requests
from holdfast.bridge.dialects import DIALECTS, embeddings, model_and_stream, route_of
from holdfast.bridge.dialects.fields import checked_body
from holdfast.bridge.dialects.streaming import ReplyBuilder, deltas_of
from holdfast.bridge.sse import SseReader
from holdfast.bridge.types import (
    Delta,
    DialectName,
    ModelReply,
    OtherPart,
    Part,
    StopDelta,
    StopReason,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    ToolCallDelta,
    ToolCallPart,
    Usage,
)
from holdfast.errors import InvalidParams
from holdfast.wire.http_messages import HttpRequest

from .replies import SAMPLES, json_values, locations, malformed, replies, request_for, signatures, with_changed

DIALECT_NAMES: list[DialectName] = sorted(DIALECTS)
WITH_TOOLS: list[DialectName] = ["anthropic", "google", "openai_chat", "openai_responses"]


def in_pieces(reply: ModelReply, size: int) -> list[Delta]:
    """The deltas of a reply, their words cut into pieces."""
    pieces: list[Delta] = []
    for delta in deltas_of(reply):
        match delta:
            case TextDelta() | ThinkingDelta():
                cut = [delta.text[i : i + size] for i in range(0, len(delta.text), size)] or [""]
                pieces.append(msgspec.structs.replace(delta, text=cut[0]))
                pieces.extend(msgspec.structs.replace(delta, text=text, begins=False) for text in cut[1:])
            case ToolCallDelta(arguments=text):
                cut = [text[i : i + size] for i in range(0, len(text), size)] or [""]
                pieces.append(msgspec.structs.replace(delta, arguments=cut[0]))
                pieces.extend(ToolCallDelta(delta.index, arguments=text) for text in cut[1:])
            case _:
                pieces.append(delta)
    return pieces


@given(replies(), st.integers(1, 7))
@settings(max_examples=60)
def test_deltas_add_up_to_the_reply(reply: ModelReply, size: int) -> None:
    builder = ReplyBuilder()
    for delta in in_pieces(reply, size):
        builder.feed(delta)
    assert builder.reply() == reply


def events_of(name: DialectName, reply: ModelReply, size: int) -> list[dict[str, Any]]:
    """The events of a stream, as JSON, without `[DONE]`."""
    raw = {"stream_options": {"include_usage": True}}
    stream = DIALECTS[name].stream(request_for(name, stream=True, raw=raw))
    sent = stream.begin()
    for delta in in_pieces(reply, size):
        sent.extend(stream.delta(delta))
    sent.extend(stream.end())
    assert stream.reply() == reply
    events = SseReader().feed(b"".join(sent))
    if name in ("openai_chat", "openai_completions"):
        assert events.pop().data == b"[DONE]"
    decoded = [json.loads(event.data) for event in events]
    if name in ("anthropic", "openai_responses"):
        assert [event.event for event in events] == [event["type"] for event in decoded]
    return decoded


def gathered_from(name: DialectName, events: list[dict[str, Any]]) -> Any:
    """The whole answer's content that a client makes of a stream, written a second time, by the definitions."""
    match name:
        case "openai_chat":
            deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
            calls: dict[int, list[str]] = {}
            for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
                whole = calls.setdefault(call["index"], [call.get("id", ""), call["function"].get("name", ""), ""])
                whole[2] += call["function"]["arguments"]
            text = "".join(delta.get("content") or "" for delta in deltas)
            return (
                text,
                "".join(delta.get("reasoning_content", "") for delta in deltas),
                list(calls.values()),
            )
        case "openai_completions":
            return "".join(event["choices"][0]["text"] for event in events if event["choices"])
        case "openai_responses":
            return events[-1]["response"]
        case "anthropic":
            blocks: list[dict[str, Any]] = []
            for event in events:
                if event["type"] == "content_block_start":
                    blocks.append(dict(event["content_block"]))
                elif event["type"] == "content_block_delta":
                    delta = dict(event["delta"])
                    kind = delta.pop("type")
                    for field, text in delta.items():
                        if kind == "signature_delta":
                            blocks[event["index"]][field] = text
                        else:
                            blocks[event["index"]][field] = blocks[event["index"]].get(field, "") + text
            for block in blocks:
                if block["type"] == "tool_use":
                    block["input"] = json.loads(block.pop("partial_json"))
            return blocks
        case "google":
            parts: list[dict[str, Any]] = []
            for part in (part for event in events for part in event["candidates"][0]["content"]["parts"]):
                if parts and "text" in part and "text" in parts[-1] and part.keys() == parts[-1].keys():
                    parts[-1] = {**part, "text": parts[-1]["text"] + part["text"]}
                else:
                    parts.append(part)
            return parts


def whole_of(name: DialectName, body: dict[str, Any]) -> Any:
    match name:
        case "openai_chat":
            message = body["choices"][0]["message"]
            calls = [
                [call["id"], call["function"]["name"], call["function"]["arguments"]]
                for call in message.get("tool_calls", ())
            ]
            return message["content"] or "", message.get("reasoning_content", ""), calls
        case "openai_completions":
            return body["choices"][0]["text"]
        case "openai_responses":
            return body
        case "anthropic":
            return body["content"]
        case "google":
            # Consecutive words cannot be distinguished in a stream of this dialect.
            return gathered_from("google", [body])


@pytest.mark.parametrize("name", DIALECT_NAMES)
@given(reply=replies(), size=st.integers(1, 7))
@settings(max_examples=40)
def test_a_stream_adds_up_to_the_whole_answer(name: DialectName, reply: ModelReply, size: int) -> None:
    raw = {"stream_options": {"include_usage": True}}
    whole = json.loads(DIALECTS[name].render(reply, request_for(name, stream=True, raw=raw)))
    events = events_of(name, reply, size)
    assert gathered_from(name, events) == whole_of(name, whole)
    usage_in = DIALECTS[name].usage_in
    reported = [usage for event in events if (usage := usage_in(event)) is not None]
    total = Usage()
    for usage in reported:
        total = total.merged(usage)
    in_whole = usage_in(whole)
    assert in_whole is not None
    assert total == in_whole
    assert (in_whole.input, in_whole.output, in_whole.cached) == (
        reply.usage.input,
        reply.usage.output,
        reply.usage.cached,
    )


def history_of(name: DialectName, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The request in which a client sends this answer back as part of the history."""
    match name:
        case "openai_chat":
            turns = [{"role": "user", "content": "?"}, body["choices"][0]["message"]]
            return "/v1/chat/completions", {"model": "m", "messages": turns}
        case "openai_responses":
            return "/v1/responses", {"model": "m", "input": [{"role": "user", "content": "?"}, *body["output"]]}
        case "anthropic":
            turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": body["content"]}]
            return "/v1/messages", {"model": "m", "max_tokens": 1, "messages": turns}
        case _:
            turns = [{"role": "user", "parts": [{"text": "?"}]}, body["candidates"][0]["content"]]
            return "/v1beta/models/m:generateContent", {"contents": turns}


def as_chat(content: tuple[Part, ...]) -> tuple[Part, ...]:
    """Chat has one run of thoughts, one of words, then the calls."""
    thought = "".join(part.text for part in content if isinstance(part, ThinkingPart))
    text = "".join(part.text for part in content if isinstance(part, TextPart))
    calls = [part for part in content if isinstance(part, ToolCallPart)]
    runs: list[Part] = [ThinkingPart(thought)] if thought else []
    return (*runs, *([TextPart(text)] if text else []), *calls)


@pytest.mark.parametrize("name", WITH_TOOLS)
@given(reply=replies(), signature=signatures)
@settings(max_examples=40)
def test_an_answer_comes_back_in_the_history_as_it_was(
    name: DialectName, reply: ModelReply, signature: str
) -> None:
    content = tuple(
        msgspec.structs.replace(part, signature=signature)
        if isinstance(part, ThinkingPart) and name in ("anthropic", "google")
        else msgspec.structs.replace(part, id=f"rs_{i}", encrypted=signature)
        if isinstance(part, ThinkingPart) and name == "openai_responses"
        else part
        for i, part in enumerate(reply.content)
    )
    body = json.loads(DIALECTS[name].render(ModelReply(content), request_for(name)))
    path, request = history_of(name, body)
    parsed = DIALECTS[name].parse(HttpRequest("POST", path, "", (), json.dumps(request).encode()))
    expected = as_chat(content) if name == "openai_chat" else content
    came_back = [message for message in parsed.messages[1:] if message.content]
    assert [message.role for message in came_back] == (["assistant"] if expected else [])
    assert (came_back[0].content if came_back else ()) == expected


@pytest.mark.parametrize("name", WITH_TOOLS)
@given(reply=replies(), reason=st.sampled_from([None, "length", "refusal"]))
@settings(max_examples=40)
def test_a_whole_answer_is_read_as_it_was_written(
    name: DialectName, reply: ModelReply, reason: StopReason | None
) -> None:
    if name == "openai_chat":
        reply = msgspec.structs.replace(reply, content=as_chat(reply.content))
    if name == "google":
        # It has no count of what was written to a cache.
        reply = msgspec.structs.replace(reply, usage=msgspec.structs.replace(reply.usage, cache_write=0))
    reply = msgspec.structs.replace(reply, stop_reason=reason, model="m-1", id="id-1")
    body = json.loads(DIALECTS[name].render(reply, request_for(name)))
    if name == "openai_responses":
        # Thoughts get an id, since this dialect has none without.
        content = tuple(
            msgspec.structs.replace(part, id=f"rs_1_{i}") if isinstance(part, ThinkingPart) else part
            for i, part in enumerate(reply.content)
        )
        reply = msgspec.structs.replace(reply, content=content)
    read = DIALECTS[name].read(body)
    assert read.reason == reply.reason
    assert msgspec.structs.replace(read, stop_reason=reason) == reply


@pytest.mark.parametrize("name", DIALECT_NAMES)
@given(value=st.dictionaries(st.sampled_from(["content", "choices", "output", "candidates", "usage"]), json_values))
@settings(max_examples=40)
def test_any_answer_is_read_or_refused(name: DialectName, value: dict[str, Any]) -> None:
    try:
        read = DIALECTS[name].read(value)
    except InvalidParams:
        return
    assert read.usage.total >= 0


@pytest.mark.parametrize("name", ["anthropic", "google", "openai_responses"])
def test_what_has_no_word_here_goes_back_as_it_came(name: DialectName) -> None:
    raw: dict[str, Any] = (
        {"type": "new_thing", "newThing": {"a": 1}} if name != "google" else {"newThing": {"a": 1}}
    )
    reply = ModelReply((OtherPart(name, "new_thing", raw),))
    path, request = history_of(name, json.loads(DIALECTS[name].render(reply, request_for(name))))
    parsed = DIALECTS[name].parse(HttpRequest("POST", path, "", (), json.dumps(request).encode()))
    (part,) = parsed.messages[1].content
    assert isinstance(part, OtherPart)
    assert part.raw == raw
    # Another dialect cannot express it.
    for other in set(DIALECT_NAMES) - {name}:
        assert b"newThing" not in DIALECTS[other].render(reply, request_for(other))


@given(st.binary(max_size=60))
@settings(max_examples=60)
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b'{"model": "\xff"}')
@example(b'{"model": "\\ud800"}')
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    assert 0 <= fuzz_requests(data) <= len(PATHS)


@given(json_values)
@settings(max_examples=60)
def test_any_json_is_read_or_refused(value: Any) -> None:
    assert 0 <= fuzz_requests(json.dumps(value).encode()) <= len(PATHS)


def refusal_of(path: str, body: Any) -> InvalidParams | None:
    """The error that refuses a request; None if it was read, whole."""
    request = HttpRequest("POST", path, "", (), json.dumps(body).encode())
    route = route_of(request)
    assert route is not None
    try:
        if route.operation == "embeddings":
            assert embeddings.parse(request).raw == body
        else:
            model_and_stream(checked_body(request), request, route)
            assert DIALECTS[route.dialect].parse(request).raw == body
    except InvalidParams as refusal:
        return refusal
    return None


def names_its_field(refusal: InvalidParams) -> bool:
    path = refusal.details.get("path")
    return path is not None and refusal.message.startswith(path or "the body")


@pytest.mark.parametrize("path", sorted(SAMPLES))
def test_a_wrong_value_in_any_place_is_read_or_refused_by_its_field(path: str) -> None:
    refused = 0
    for location in locations(SAMPLES[path]):
        for wrong in (None, True, 7, -1.5, "x", [], {}, ["x"], [7], {"type": "x"}, {"type": 7}):
            refusal = refusal_of(path, with_changed(SAMPLES[path], location, wrong))
            assert refusal is None or names_its_field(refusal), (location, wrong)
            refused += refusal is not None
    assert refused > len(locations(SAMPLES[path]))


@given(malformed())
@settings(max_examples=40)
def test_a_malformed_request_is_read_or_refused_by_its_field(given_: tuple[str, Any]) -> None:
    path, body = given_
    refusal = refusal_of(path, body)
    assert refusal is None or names_its_field(refusal)
    assert 0 <= fuzz_requests(json.dumps(body).encode()) <= len(PATHS)


def test_nesting_at_the_edge_of_the_stack_is_refused_like_any_mistake() -> None:
    """A value that the decoder takes may be too deep for the encoder, which runs deeper in the stack."""
    outcomes: list[str] = []
    for depth in (50, *range(850, 1000, 3), 200_000):
        body = b'{"model":"m","input":"?","metadata":' + b"[" * depth + b"]" * depth + b"}"
        try:
            outcomes.append("read" if fuzz_requests(body) else "refused")
        except InvalidParams as error:
            outcomes.append(error.message)
    assert set(outcomes) <= {"read", "refused", "the body is nested too deeply"}
    assert (outcomes[0], outcomes[-1]) == ("read", "refused")


@pytest.mark.parametrize("path", sorted(SAMPLES))
def test_the_samples_are_read(path: str) -> None:
    """The malformed requests are made of these, so these must be whole."""
    request = HttpRequest("POST", path, "", (), json.dumps(SAMPLES[path]).encode())
    route = route_of(request)
    assert route is not None
    model, _ = model_and_stream(checked_body(request), request, route)
    assert model == "m"
    if route.operation == "embeddings":
        assert embeddings.parse(request).input == ("a", (1, 2))
    else:
        assert DIALECTS[route.dialect].parse(request).raw == SAMPLES[path]


def test_late_pieces_of_a_call_are_refused() -> None:
    builder = ReplyBuilder()
    builder.feed(ToolCallDelta(0, "a", "f", "{"))
    builder.feed(ToolCallDelta(1, "b", "g", "{"))
    with pytest.raises(InvalidParams, match="tool call 0: a piece came after"):
        builder.feed(ToolCallDelta(0, arguments="}"))
    with pytest.raises(InvalidParams, match="tool call 2: its first piece has no name"):
        builder.feed(ToolCallDelta(2, arguments="{}"))


def test_a_stop_reason_left_out_follows_from_the_content() -> None:
    builder = ReplyBuilder("call_7")
    builder.feed(ToolCallDelta(0, name="f"))
    builder.feed(StopDelta())
    reply = builder.reply()
    assert reply.content == (ToolCallPart("call_7_0", "f", "{}"),)
    assert reply.reason == "tool_use"


def test_a_look_at_the_reply_changes_nothing() -> None:
    builder = ReplyBuilder()
    for text in ("one", " two"):
        builder.feed(TextDelta(text))
        builder.reply()
    assert builder.reply().content == (TextPart("one two"),)
    assert len(builder.close()) == 1
