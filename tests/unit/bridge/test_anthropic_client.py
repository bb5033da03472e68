"""The `anthropic` package, unmodified, understands what is rendered and is understood: whole, streamed, errors."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.bridge.types import (
    FilePart,
    Format,
    ImagePart,
    Message,
    ModelReply,
    OtherPart,
    StopDelta,
    TextDelta,
    TextPart,
    Thinking,
    ThinkingDelta,
    ThinkingPart,
    ToolCallDelta,
    ToolCallPart,
    ToolChoice,
    ToolResultPart,
    Usage,
)

from .scripted_model import Failure, Script, ScriptedModel, client_http

anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed: extra `clients`")

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
COUNTS = Usage(input=30, output=12, cached=10, cache_write=2, thinking=5)
ASK = {"model": "small", "max_tokens": 100, "messages": [{"role": "user", "content": "?"}]}
TOOL_RUN: Script = [
    ThinkingDelta("Where "),
    ThinkingDelta("is it?", signature="c2ln"),
    ThinkingDelta(encrypted="b3BhcXVl", begins=True),
    TextDelta("Let me "),
    TextDelta("look."),
    ToolCallDelta(0, "toolu_1", "weather", '{"city"'),
    ToolCallDelta(0, arguments=':"Graz"}'),
    ToolCallDelta(1, "toolu_2", "now"),
    StopDelta(usage=COUNTS),
]


def client_of(model: ScriptedModel) -> Any:
    http = client_http()
    return anthropic.Anthropic(
        api_key="none",
        base_url="http://bridge",
        http_client=http.Client(transport=model.transport(http)),
        max_retries=0,
    )


def parts_of(content: Any) -> list[tuple[Any, ...]]:
    """The client's view of an answer, block by block."""
    blocks: list[tuple[Any, ...]] = []
    for block in content:
        match block.type:
            case "text":
                blocks.append(("text", block.text))
            case "thinking":
                blocks.append(("thinking", block.thinking, block.signature))
            case "redacted_thinking":
                blocks.append(("redacted_thinking", block.data))
            case "tool_use":
                blocks.append(("tool_use", block.id, block.name, block.input))
            case other:
                blocks.append((other,))
    return blocks


WHOLE_RUN = [
    ("thinking", "Where is it?", "c2ln"),
    ("redacted_thinking", "b3BhcXVl"),
    ("text", "Let me look."),
    ("tool_use", "toolu_1", "weather", {"city": "Graz"}),
    ("tool_use", "toolu_2", "now", {}),
]


def test_whole() -> None:
    model = ScriptedModel(TOOL_RUN)
    answer = client_of(model).messages.create(
        model="small",
        max_tokens=2000,
        system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
        messages=[{"role": "user", "content": "Weather?"}],
        stop_sequences=["END"],
        thinking={"type": "enabled", "budget_tokens": 1024},
        tools=[
            {"name": "weather", "description": "Asks.", "input_schema": SCHEMA},
            {"type": "bash_20250124", "name": "bash"},
        ],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
        metadata={"user_id": "u"},
    )
    requested = model.requested[0]
    assert requested.system == "Be brief.\n\nBe kind."
    assert requested.messages == (Message("user", (TextPart("Weather?"),)),)
    params = requested.params
    assert (params.max_tokens, params.stop) == (2000, ("END",))
    assert params.thinking == Thinking(True, 1024, "low")
    assert params.format == Format("json_schema", SCHEMA)
    assert [(tool.name, tool.kind) for tool in requested.tools] == [("weather", "function"), ("bash", "builtin")]
    assert requested.tools[0].schema == SCHEMA
    assert requested.tool_choice == ToolChoice("required", parallel=False)
    assert requested.raw["metadata"] == {"user_id": "u"}
    assert parts_of(answer.content) == WHOLE_RUN
    assert answer.stop_reason == "tool_use"
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (18, 10, 2)
    assert (usage.output_tokens, usage.output_tokens_details.thinking_tokens) == (12, 5)


def test_stream_is_gathered_by_the_client_to_the_same() -> None:
    with client_of(ScriptedModel(TOOL_RUN)).messages.stream(**ASK) as stream:
        kinds = [event.type for event in stream]
        whole = stream.get_final_message()
    assert parts_of(whole.content) == WHOLE_RUN
    assert whole.stop_reason == "tool_use"
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (18, 12)
    assert kinds.count("content_block_stop") == 5
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def test_raw_events_open_and_close_one_block_at_a_time() -> None:
    opened: list[int] = []
    count = 0
    for event in client_of(ScriptedModel(TOOL_RUN)).messages.create(**ASK, stream=True):
        if event.type == "content_block_start":
            assert opened == []
            assert event.index == count
            opened, count = [event.index], count + 1
        elif event.type == "content_block_delta":
            assert opened == [event.index]
        elif event.type == "content_block_stop":
            assert opened == [event.index]
            opened = []
    assert (opened, count) == ([], 5)


def test_history_with_images_documents_thinking_and_results() -> None:
    model = ScriptedModel(ModelReply((TextPart("ok"),)))
    client_of(model).messages.create(
        model="small",
        max_tokens=10,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
                    {"type": "image", "source": {"type": "url", "url": "https://host/a.png"}},
                    {
                        "type": "document",
                        "title": "a.pdf",
                        "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="},
                    },
                    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}},
                    {"type": "document", "source": {"type": "file", "file_id": "file_1"}},
                    {"type": "text", "text": "See", "cache_control": {"type": "ephemeral"}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
                    {"type": "redacted_thinking", "data": "b3BhcXVl"},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Graz"}},
                    {"type": "tool_use", "id": "t2", "name": "now", "input": {}},
                    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "is_error": True,
                        "content": [
                            {"type": "text", "text": "no"},
                            {
                                "type": "image",
                                "source": {"type": "base64", "media_type": "image/gif", "data": "AAAA"},
                            },
                        ],
                    },
                    {"type": "text", "text": "Go on."},
                ],
            },
        ],
    )
    user, assistant, results, more = model.requested[0].messages
    assert user.content == (
        ImagePart(b"\0\0\0", "image/png"),
        ImagePart(url="https://host/a.png"),
        FilePart(b"%PDF", "application/pdf", name="a.pdf"),
        FilePart(b"words", "text/plain"),
        FilePart(file_id="file_1"),
        TextPart("See"),
    )
    assert assistant.content[:4] == (
        ThinkingPart("Hm.", "c2ln"),
        ThinkingPart(encrypted="b3BhcXVl"),
        ToolCallPart("t1", "weather", '{"city":"Graz"}'),
        ToolCallPart("t2", "now", "{}"),
    )
    search = assistant.content[4]
    assert isinstance(search, OtherPart)
    assert search.raw["id"] == "s1"
    assert results == Message(
        "tool",
        (
            ToolResultPart("t1", (TextPart("rain"),)),
            ToolResultPart("t2", (TextPart("no"), ImagePart(b"\0\0\0", "image/gif")), is_error=True),
        ),
    )
    assert more == Message("user", (TextPart("Go on."),))


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (ModelReply((TextPart("a"),)), "end_turn"),
        (ModelReply((TextPart("a"),), "length"), "max_tokens"),
        (ModelReply((TextPart("a"),), "stop_sequence", stop_sequence="END"), "stop_sequence"),
        (ModelReply((TextPart("No.", refusal=True),), "refusal"), "refusal"),
        (ModelReply((TextPart("a"),), "pause"), "pause_turn"),
    ],
)
def test_stop_reasons(reply: ModelReply, reason: str) -> None:
    client = client_of(ScriptedModel(reply))
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        gathered = stream.get_final_message()
    assert whole.stop_reason == gathered.stop_reason == reason
    assert whole.stop_sequence == gathered.stop_sequence == (reply.stop_sequence or None)
    assert parts_of(whole.content) == parts_of(gathered.content)


def test_blocks_with_no_word_of_ours_go_back_as_they_are() -> None:
    raw = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}}
    client = client_of(ScriptedModel(ModelReply((OtherPart("anthropic", "server_tool_use", raw), TextPart("a")))))
    with client.messages.stream(**ASK) as stream:
        gathered = stream.get_final_message()
    for answer in (client.messages.create(**ASK), gathered):
        assert [block.type for block in answer.content] == ["server_tool_use", "text"]
        assert answer.content[0].input == {"query": "x"}


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, "BadRequestError", "invalid_request_error"),
        (401, "AuthenticationError", "authentication_error"),
        (403, "PermissionDeniedError", "permission_error"),
        (404, "NotFoundError", "not_found_error"),
        (413, "RequestTooLargeError", "request_too_large"),
        (429, "RateLimitError", "rate_limit_error"),
        (500, "InternalServerError", "api_error"),
    ],
)
def test_errors(status: int, error: str, kind: str) -> None:
    client = client_of(ScriptedModel(Failure(status, "the budget is spent")))
    with pytest.raises(getattr(anthropic, error, anthropic.APIStatusError), match="the budget is spent") as caught:
        client.messages.create(**ASK)
    assert caught.value.status_code == status
    assert caught.value.body["error"]["type"] == kind


def test_an_error_in_the_middle_of_a_stream() -> None:
    client = client_of(ScriptedModel(Failure(529, "too many at once", [TextDelta("Hal")])))
    said_so_far: list[str] = []
    events = client.messages.create(**ASK, stream=True)
    with pytest.raises(anthropic.APIStatusError, match="too many at once"):
        said_so_far.extend(event.delta.text for event in events if event.type == "content_block_delta")
    assert said_so_far == ["Hal"]


def test_a_malformed_request_is_told_by_field() -> None:
    client = client_of(ScriptedModel(ModelReply()))
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.text: is missing"):
        client.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": [{"type": "text"}]}])


def test_counts_and_models() -> None:
    client = client_of(ScriptedModel(ModelReply()))
    short = client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "word"}])
    longer = client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "word " * 100}])
    assert 0 < short.input_tokens < longer.input_tokens
    models = client.models.list()
    assert [(model.id, model.created_at.year) for model in models] == [("small", 2023), ("large", 2023)]
    assert client.models.retrieve("small").display_name == "small"
