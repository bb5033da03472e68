"""The `openai` package, unmodified, understands what is rendered and is understood: chat, Responses, the rest."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from holdfast.bridge.types import (
    Delta,
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

from .scripted_model import Failure, ScriptedModel, client_http

openai = pytest.importorskip("openai", reason="the package openai is not installed: extra `clients`")

PNG = b"\x89PNG\r\n"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
COUNTS = Usage(input=30, output=12, cached=10, cache_write=2, thinking=5)
WEATHER = ToolCallPart("call_1", "weather", '{"city":"Graz"}')
TIME = ToolCallPart("call_2", "time", '{"zone": "CET"}')
TOOL_RUN: list[Delta] = [
    ThinkingDelta("Where "),
    ThinkingDelta("is it?", encrypted="gAAA", id="rs_1"),
    TextDelta("Let me "),
    TextDelta("look."),
    ToolCallDelta(0, "call_1", "weather", '{"city"'),
    ToolCallDelta(0, arguments=':"Graz"}'),
    ToolCallDelta(1, "call_2", "time", '{"zone": "CET"}'),
    StopDelta(usage=COUNTS),
]


def client_of(model: ScriptedModel) -> Any:
    http = client_http()
    return openai.OpenAI(
        api_key="none",
        base_url="http://bridge/v1",
        http_client=http.Client(transport=model.transport(http)),
        max_retries=0,
    )


def test_chat_whole() -> None:
    model = ScriptedModel(ModelReply((TextPart("Good day."),), usage=COUNTS))
    answer = client_of(model).chat.completions.create(
        model="small",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": "Hello", "name": "ada"},
        ],
        max_completion_tokens=50,
        temperature=0.5,
        top_p=0.9,
        stop=["END"],
        seed=7,
        reasoning_effort="high",
        logprobs=True,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}},
    )
    requested = model.requested[0]
    assert (requested.model, requested.dialect, requested.stream) == ("small", "openai_chat", False)
    assert requested.system == "Be brief.\n\nBe kind."
    assert requested.messages == (Message("user", (TextPart("Hello"),), "ada"),)
    params = requested.params
    assert (params.max_tokens, params.temperature, params.top_p, params.stop, params.seed) == (
        50,
        0.5,
        0.9,
        ("END",),
        7,
    )
    assert params.format == Format("json_schema", SCHEMA, "place")
    assert params.thinking == Thinking(effort="high")
    assert requested.raw["logprobs"] is True
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason, answer.model) == ("Good day.", "stop", "small")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (30, 12, 42)
    assert usage.prompt_tokens_details.cached_tokens == 10
    assert usage.completion_tokens_details.reasoning_tokens == 5


def test_chat_history_with_images_files_and_parallel_calls() -> None:
    model = ScriptedModel(ModelReply((WEATHER, TIME)))
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    answer = client_of(model).chat.completions.create(
        model="small",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is this?"},
                    {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
                    {"type": "image_url", "image_url": {"url": "https://host/cat.png"}},
                    {
                        "type": "file",
                        "file": {"file_data": "data:application/pdf;base64,JVBERg==", "filename": "a.pdf"},
                    },
                    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
                    {"id": "c2", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "done"}]},
        ],
        tools=[{"type": "function", "function": {"name": "weather", "description": "Asks.", "parameters": SCHEMA}}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
    )
    requested = model.requested[0]
    user, assistant, results = requested.messages
    assert user.content == (
        TextPart("What is this?"),
        ImagePart(PNG, "image/png", detail="low"),
        ImagePart(url="https://host/cat.png"),
        FilePart(b"%PDF", "application/pdf", name="a.pdf"),
        FilePart(b"\0\0\0", "audio/mp3"),
    )
    assert assistant.content == (
        ToolCallPart("c1", "weather", "{}"),
        ToolCallPart("c2", "patch", "*** Begin", "custom"),
    )
    assert results == Message(
        "tool", (ToolResultPart("c1", (TextPart("rain"),)), ToolResultPart("c2", (TextPart("done"),)))
    )
    assert (requested.tools[0].name, requested.tools[0].description, requested.tools[0].schema) == (
        "weather",
        "Asks.",
        SCHEMA,
    )
    assert requested.tool_choice == ToolChoice("required", ("weather",), parallel=False)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert [(call.id, call.function.name) for call in choice.message.tool_calls] == [
        ("call_1", "weather"),
        ("call_2", "time"),
    ]


def test_chat_stream_is_gathered_by_the_client() -> None:
    model = ScriptedModel(TOOL_RUN)
    with client_of(model).chat.completions.stream(
        model="small", messages=[{"role": "user", "content": "?"}], stream_options={"include_usage": True}
    ) as events:
        kinds = [event.type for event in events]
        whole = events.get_final_completion()
    message = whole.choices[0].message
    assert message.content == "Let me look."
    assert [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("call_1", "weather", '{"city":"Graz"}'),
        ("call_2", "time", '{"zone": "CET"}'),
    ]
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.usage.total_tokens == 42
    assert kinds.count("tool_calls.function.arguments.done") == 2


def test_chat_stream_without_counts_and_with_thinking() -> None:
    model = ScriptedModel(TOOL_RUN)
    chunks = list(
        client_of(model).chat.completions.create(
            model="small", messages=[{"role": "user", "content": "?"}], stream=True
        )
    )
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    thought = [getattr(chunk.choices[0].delta, "reasoning_content", None) for chunk in chunks]
    assert "".join(piece for piece in thought if piece) == "Where is it?"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (ModelReply((TextPart("a"),), "length"), "length"),
        (ModelReply((TextPart("a"),), "stop_sequence", stop_sequence="END"), "stop"),
        (ModelReply((), "refusal"), "content_filter"),
        (ModelReply((TextPart("No.", refusal=True),), "refusal"), "stop"),
    ],
)
def test_chat_finish_reasons(reply: ModelReply, reason: str) -> None:
    whole = client_of(ScriptedModel(reply)).chat.completions.create(model="m", messages=[])
    pieces = list(client_of(ScriptedModel(reply)).chat.completions.create(model="m", messages=[], stream=True))
    assert whole.choices[0].finish_reason == pieces[-1].choices[0].finish_reason == reason
    refusal = "".join(piece.choices[0].delta.refusal or "" for piece in pieces)
    assert (whole.choices[0].message.refusal or "") == refusal


def test_chat_extra_fields_reach_the_client() -> None:
    logprobs: dict[str, Any] = {
        "content": [{"token": "a", "logprob": -0.5, "bytes": None, "top_logprobs": []}],
        "refusal": None,
    }
    extra = {"openai_chat": {"system_fingerprint": "fp_1", "choice": {"logprobs": logprobs}}}
    answer = client_of(ScriptedModel(ModelReply((TextPart("a"),), extra=extra))).chat.completions.create(
        model="m", messages=[]
    )
    assert answer.system_fingerprint == "fp_1"
    assert answer.choices[0].logprobs.content[0].logprob == -0.5


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, "BadRequestError"),
        (401, "AuthenticationError"),
        (403, "PermissionDeniedError"),
        (404, "NotFoundError"),
        (429, "RateLimitError"),
        (500, "InternalServerError"),
        (504, "InternalServerError"),
    ],
)
def test_errors(status: int, error: str) -> None:
    client = client_of(ScriptedModel(Failure(status, "the budget is spent")))
    for endpoint, requested in (
        (client.chat.completions, {"messages": []}),
        (client.responses, {"input": "?"}),
        (client.completions, {"prompt": "?"}),
    ):
        with pytest.raises(getattr(openai, error), match="the budget is spent") as caught:
            endpoint.create(model="m", **requested)
        assert caught.value.body["type"]
        assert caught.value.status_code == status


def test_an_error_in_the_middle_of_a_chat_stream() -> None:
    client = client_of(ScriptedModel(Failure(500, "the model broke", [TextDelta("Hal")])))
    refusal: list[str] = []
    chunks = client.chat.completions.create(model="m", messages=[], stream=True)
    with pytest.raises(openai.APIError, match="the model broke"):
        refusal.extend(chunk.choices[0].delta.content for chunk in chunks)
    assert refusal == ["", "Hal"]


def test_a_malformed_request_is_told_by_field() -> None:
    client = client_of(ScriptedModel(ModelReply()))
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.role: 'robot' is not one of"):
        client.chat.completions.create(model="m", messages=[{"role": "robot", "content": "?"}])
    with pytest.raises(openai.NotFoundError, match="no such route"):
        client.images.generate(model="m", prompt="a cat")


def test_completions() -> None:
    reply = ModelReply((TextPart("one"), TextPart(" two")), "length", COUNTS)
    model = ScriptedModel(reply)
    whole = client_of(model).completions.create(model="m", prompt="count", max_tokens=2, stop="x")
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("one two", "length")
    assert whole.usage.total_tokens == 42
    chunks = list(
        client_of(model).completions.create(
            model="m", prompt="count", stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "one two"
    assert chunks[-1].usage.prompt_tokens == 30
    assert model.requested[0].messages == (Message("user", (TextPart("count"),)),)


def test_responses_whole() -> None:
    reply = ModelReply(
        (ThinkingPart("Hm.", encrypted="gAAA", id="rs_9"), TextPart("Looking."), WEATHER, TIME), usage=COUNTS
    )
    model = ScriptedModel(reply)
    answer = client_of(model).responses.create(
        model="small",
        instructions="Be brief.",
        input="Weather?",
        max_output_tokens=99,
        reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        text={"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}},
        tools=[
            {"type": "function", "name": "weather", "description": "Asks.", "parameters": SCHEMA, "strict": True},
            {"type": "custom", "name": "patch", "description": "Edits."},
            {"type": "web_search"},
        ],
        tool_choice="required",
        metadata={"run": "7"},
    )
    requested = model.requested[0]
    assert requested.system == "Be brief."
    assert requested.messages == (Message("user", (TextPart("Weather?"),)),)
    assert [(tool.name, tool.kind) for tool in requested.tools] == [
        ("weather", "function"),
        ("patch", "custom"),
        ("web_search", "builtin"),
    ]
    assert requested.params.format == Format("json_schema", SCHEMA, "place")
    assert requested.params.thinking == Thinking(effort="low")
    assert requested.tool_choice == ToolChoice("required")
    assert requested.raw["include"] == ["reasoning.encrypted_content"]
    assert answer.status == "completed"
    assert answer.output_text == "Looking."
    reasoning, message, weather, _ = answer.output
    assert (reasoning.id, reasoning.encrypted_content, reasoning.summary[0].text) == ("rs_9", "gAAA", "Hm.")
    assert message.role == "assistant"
    assert (weather.call_id, weather.name, weather.arguments) == ("call_1", "weather", '{"city":"Graz"}')
    assert answer.usage.input_tokens_details.cached_tokens == 10
    assert answer.usage.output_tokens_details.reasoning_tokens == 5
    assert answer.metadata == {"run": "7"}
    assert answer.max_output_tokens == 99


def test_responses_history_is_read_item_by_item() -> None:
    model = ScriptedModel(ModelReply((TextPart("ok"),)))
    client_of(model).responses.create(
        model="small",
        input=[
            {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "See"},
                    {"type": "input_image", "image_url": "https://host/a.png", "detail": "auto"},
                    {"type": "input_image", "file_id": "file-1", "detail": "auto"},
                    {"type": "input_file", "file_url": "https://host/a.pdf"},
                ],
            },
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "Hm."}],
                "encrypted_content": "gAAA",
            },
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Calling", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}", "namespace": "mcp"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "***"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            {
                "type": "custom_tool_call_output",
                "call_id": "c2",
                "output": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}],
            },
        ],
    )
    requested = model.requested[0]
    user, assistant, results = requested.messages
    assert requested.system == "Be kind."
    assert user.content == (
        TextPart("See"),
        ImagePart(url="https://host/a.png", detail="auto"),
        ImagePart(file_id="file-1", detail="auto"),
        FilePart(url="https://host/a.pdf"),
    )
    assert assistant.content[:4] == (
        ThinkingPart("Hm.", encrypted="gAAA", id="rs_1"),
        TextPart("Calling"),
        ToolCallPart("c1", "weather", "{}", namespace="mcp"),
        ToolCallPart("c2", "patch", "***", "custom"),
    )
    search = assistant.content[4]
    assert isinstance(search, OtherPart)
    assert (search.kind, search.raw["id"]) == ("web_search_call", "ws_1")
    assert results.content == (
        ToolResultPart("c1", (TextPart("rain"),)),
        ToolResultPart("c2", (ImagePart(b"\0\0\0", "image/png"),), kind="custom"),
    )


def test_tools_that_come_with_the_input_are_tools_and_no_turn() -> None:
    model = ScriptedModel(ModelReply((TextPart("ok"),)))
    shell = {"type": "custom", "name": "exec", "description": "Runs."}
    sleep = {"type": "function", "name": "sleep", "parameters": {"type": "object"}, "strict": False}
    client_of(model).responses.create(
        model="small",
        tools=[{"type": "web_search"}],
        input=[
            {
                "type": "additional_tools",
                "role": "developer",
                "tools": [{"type": "namespace", "name": "functions", "description": "", "tools": [shell]}, sleep],
            },
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": "?"},
            {"type": "configuration_update", "reasoning": {"effort": "low"}},
        ],
    )
    requested = model.requested[0]
    tools = [(tool.name, tool.kind, tool.namespace) for tool in requested.tools]
    assert tools == [("web_search", "builtin", ""), ("exec", "custom", "functions"), ("sleep", "function", "")]
    assert (requested.system, requested.messages) == ("Be kind.", (Message("user", (TextPart("?"),)),))


def test_responses_stream_is_gathered_by_the_client() -> None:
    says = [*TOOL_RUN[:-1], ToolCallDelta(2, "call_3", "patch", "*** ", "custom"), TOOL_RUN[-1]]
    model = ScriptedModel(says)
    with client_of(model).responses.stream(model="small", input="?") as stream:
        events = list(stream)
        whole = stream.get_final_response()
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == sorted(set(numbers))
    assert [item.type for item in whole.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "custom_tool_call",
    ]
    assert whole.output[0].summary[0].text == "Where is it?"
    assert whole.output[0].encrypted_content == "gAAA"
    assert whole.output_text == "Let me look."
    assert json.loads(whole.output[2].arguments) == {"city": "Graz"}
    assert whole.output[4].input == "*** "
    assert whole.usage.total_tokens == 42
    kinds = {event.type for event in events}
    assert {
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta",
        "response.output_item.done",
        "response.completed",
    } <= kinds


def test_responses_stream_items_are_those_of_the_whole() -> None:
    """Each finished item and the last event's output agree, under the announced ids."""
    model = ScriptedModel(TOOL_RUN)
    events = list(client_of(model).responses.create(model="small", input="?", stream=True))
    announced = [event.item.id for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == announced
    assert [item.to_dict() for item in done] == [item.to_dict() for item in events[-1].response.output]
    assert events[-1].response.id == events[0].response.id


def test_responses_cut_short_and_refused() -> None:
    cut = client_of(ScriptedModel(ModelReply((TextPart("a"),), "length"))).responses
    assert cut.create(model="m", input="?").incomplete_details.reason == "max_output_tokens"
    last = list(cut.create(model="m", input="?", stream=True))[-1]
    assert (last.type, last.response.incomplete_details.reason) == ("response.incomplete", "max_output_tokens")
    refused = client_of(ScriptedModel(ModelReply((TextPart("No.", refusal=True),), "refusal"))).responses
    assert refused.create(model="m", input="?").output[0].content[0].refusal == "No."
    events = list(refused.create(model="m", input="?", stream=True))
    assert [event.delta for event in events if event.type == "response.refusal.delta"] == ["No."]


def test_an_error_in_the_middle_of_a_response() -> None:
    client = client_of(ScriptedModel(Failure(429, "the budget is spent", [TextDelta("Hal")])))
    last = list(client.responses.create(model="m", input="?", stream=True))[-1]
    assert last.type == "response.failed"
    assert (last.response.error.code, last.response.error.message) == ("rate_limit_exceeded", "the budget is spent")


def test_embeddings_models_and_counts() -> None:
    client = client_of(ScriptedModel(ModelReply()))
    packed = client.embeddings.create(model="e", input=["a", "b"])
    assert [item.embedding for item in packed.data] == [[0.5, -0.25, 0.0], [0.5, -0.25, 1.0]]
    plain = client.embeddings.create(model="e", input=[1, 2, 3], encoding_format="float")
    assert [item.embedding for item in plain.data] == [[0.5, -0.25, 0.0]]
    assert plain.usage.prompt_tokens == 7
    assert [model.id for model in client.models.list()] == ["small", "large"]
    assert client.models.retrieve("small").object == "model"
    assert client.responses.input_tokens.count(model="m", input="four words of input").input_tokens > 4
