"""The `google-genai` package, unmodified, understands what is rendered and is understood; streams as arrays."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.bridge.types import (
    FilePart,
    Format,
    ImagePart,
    Message,
    ModelReply,
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
from holdfast.wire.http_messages import HttpRequest

from .scripted_model import Failure, Script, ScriptedModel, client_http

genai = pytest.importorskip("google.genai", reason="the package google-genai is not installed: extra `clients`")

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
COUNTS = Usage(input=30, output=12, cached=10, thinking=5)
TOOL_RUN: Script = [
    ThinkingDelta("Where "),
    ThinkingDelta("is it?"),
    TextDelta("Let me "),
    TextDelta("look."),
    ToolCallDelta(0, "c1", "weather", '{"city"'),
    ToolCallDelta(0, arguments=':"Graz"}', signature="c2ln"),
    ToolCallDelta(1, "c2", "now"),
    StopDelta(usage=COUNTS),
]


def client_of(model: ScriptedModel) -> Any:
    """Keep it in a variable: it closes its connections when its last reference goes."""
    http = client_http()
    options = genai.types.HttpOptions(
        base_url="http://bridge", api_version="v1beta", client_args={"transport": model.transport(http)}
    )
    return genai.Client(api_key="none", http_options=options)


def parts_of(answers: list[Any]) -> list[Any]:
    return [part for answer in answers for part in answer.candidates[0].content.parts or []]


def check_run(parts: list[Any]) -> None:
    assert "".join(part.text for part in parts if part.text and part.thought) == "Where is it?"
    assert "".join(part.text for part in parts if part.text and not part.thought) == "Let me look."
    weather, now = (part for part in parts if part.function_call is not None)
    assert (weather.function_call.id, weather.function_call.name) == ("c1", "weather")
    assert weather.function_call.args == {"city": "Graz"}
    assert weather.thought_signature == b"sig"
    assert (now.function_call.name, now.function_call.args) == ("now", {})


def check_counts(usage: Any) -> None:
    assert (usage.prompt_token_count, usage.candidates_token_count, usage.thoughts_token_count) == (30, 7, 5)
    assert (usage.cached_content_token_count, usage.total_token_count) == (10, 42)


def test_whole() -> None:
    model = ScriptedModel(TOOL_RUN)
    types = genai.types
    client = client_of(model)
    answer = client.models.generate_content(
        model="small",
        contents=["See", types.Part.from_bytes(data=b"\xfb\xff\xfe", mime_type="image/png")],
        config=types.GenerateContentConfig(
            system_instruction="Be brief.",
            max_output_tokens=50,
            temperature=0.5,
            top_k=3,
            stop_sequences=["END"],
            seed=7,
            response_mime_type="application/json",
            response_json_schema=SCHEMA,
            thinking_config=types.ThinkingConfig(thinking_budget=99),
            tools=[
                types.Tool(
                    function_declarations=[
                        types.FunctionDeclaration(
                            name="weather", description="Asks.", parameters_json_schema=SCHEMA
                        )
                    ]
                ),
                types.Tool(google_search=types.GoogleSearch()),
            ],
            tool_config=types.ToolConfig(
                function_calling_config=types.FunctionCallingConfig(mode="ANY", allowed_function_names=["weather"])
            ),
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        ),
    )
    requested = model.requested[0]
    assert (requested.model, requested.dialect, requested.stream, requested.system) == (
        "small",
        "google",
        False,
        "Be brief.",
    )
    assert requested.messages == (Message("user", (TextPart("See"), ImagePart(b"\xfb\xff\xfe", "image/png"))),)
    params = requested.params
    assert (params.max_tokens, params.temperature, params.top_k, params.stop, params.seed) == (
        50,
        0.5,
        3,
        ("END",),
        7,
    )
    assert params.format == Format("json_schema", SCHEMA)
    assert params.thinking == Thinking(budget=99)
    assert {tool.name: tool.kind for tool in requested.tools} == {"weather": "function", "googleSearch": "builtin"}
    assert [tool.schema for tool in requested.tools if tool.kind == "function"] == [SCHEMA]
    assert requested.tool_choice == ToolChoice("required", ("weather",))
    check_run(parts_of([answer]))
    check_counts(answer.usage_metadata)
    assert answer.candidates[0].finish_reason == "STOP"


def test_stream() -> None:
    model = ScriptedModel(TOOL_RUN)
    client = client_of(model)
    answers = list(client.models.generate_content_stream(model="small", contents="?"))
    assert model.requested[0].sse
    check_run(parts_of(answers))
    check_counts(answers[-1].usage_metadata)
    assert [answer.candidates[0].finish_reason for answer in answers[:-1]] == [None] * (len(answers) - 1)
    assert answers[-1].candidates[0].finish_reason == "STOP"


def test_stream_as_one_array() -> None:
    model = ScriptedModel(TOOL_RUN)
    body = json.dumps({"contents": [{"parts": [{"text": "?"}]}]}).encode()
    path = "/v1beta/models/small:streamGenerateContent"
    status, content_type, pieces = model.answer(HttpRequest("POST", path, "key=none", (), body))
    assert (status, content_type) == (200, "application/json")
    assert not isinstance(pieces, bytes)
    answers = [genai.types.GenerateContentResponse.model_validate(each) for each in json.loads(b"".join(pieces))]
    check_run(parts_of(answers))
    check_counts(answers[-1].usage_metadata)


def test_history_with_files_thinking_and_results() -> None:
    model = ScriptedModel(ModelReply((TextPart("ok"),)))
    types = genai.types
    client = client_of(model)
    client.models.generate_content(
        model="small",
        contents=[
            types.Content(
                role="user",
                parts=[
                    types.Part.from_uri(file_uri="https://host/a.png", mime_type="image/png"),
                    types.Part.from_bytes(data=b"%PDF", mime_type="application/pdf"),
                ],
            ),
            types.Content(
                role="model",
                parts=[
                    types.Part(text="Hm.", thought=True, thought_signature=b"sig"),
                    types.Part(
                        function_call=types.FunctionCall(id="c1", name="weather", args={"city": "Graz"}),
                        thought_signature=b"sig",
                    ),
                ],
            ),
            types.Content(
                role="user",
                parts=[
                    types.Part(
                        function_response=types.FunctionResponse(
                            id="c1", name="weather", response={"result": "rain"}
                        )
                    ),
                    types.Part(function_response=types.FunctionResponse(name="now", response={"error": "no"})),
                ],
            ),
        ],
    )
    user, assistant, results = model.requested[0].messages
    assert user.content == (
        ImagePart(media_type="image/png", url="https://host/a.png"),
        FilePart(b"%PDF", "application/pdf"),
    )
    assert assistant == Message(
        "assistant",
        (ThinkingPart("Hm.", "c2ln"), ToolCallPart("c1", "weather", '{"city":"Graz"}', signature="c2ln")),
    )
    assert results == Message(
        "tool",
        (
            ToolResultPart("c1", (TextPart('{"result":"rain"}'),), name="weather"),
            ToolResultPart("", (TextPart('{"error":"no"}'),), is_error=True, name="now"),
        ),
    )


def test_images_in_answers() -> None:
    client = client_of(ScriptedModel(ModelReply((TextPart("Here:"), ImagePart(b"\x89PNG", "image/png")))))
    whole = [client.models.generate_content(model="m", contents="draw")]
    for answers in (whole, list(client.models.generate_content_stream(model="m", contents="draw"))):
        blob = next(part.inline_data for part in parts_of(answers) if part.inline_data is not None)
        assert (blob.data, blob.mime_type) == (b"\x89PNG", "image/png")


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (ModelReply((TextPart("a"),), "length"), "MAX_TOKENS"),
        (ModelReply((), "refusal"), "SAFETY"),
        (ModelReply((TextPart("a"),), "stop_sequence"), "STOP"),
    ],
)
def test_finish_reasons(reply: ModelReply, reason: str) -> None:
    client = client_of(ScriptedModel(reply))
    assert client.models.generate_content(model="m", contents="?").candidates[0].finish_reason == reason
    last = list(client.models.generate_content_stream(model="m", contents="?"))[-1]
    assert last.candidates[0].finish_reason == reason


@pytest.mark.parametrize(
    ("status", "word"), [(400, "INVALID_ARGUMENT"), (403, "PERMISSION_DENIED"), (429, "RESOURCE_EXHAUSTED")]
)
def test_errors(status: int, word: str) -> None:
    client = client_of(ScriptedModel(Failure(status, "the budget is spent")))
    with pytest.raises(genai.errors.ClientError, match="the budget is spent") as caught:
        client.models.generate_content(model="m", contents="?")
    assert (caught.value.code, caught.value.status) == (status, word)
    with pytest.raises(genai.errors.ClientError, match="the budget is spent"):
        list(client.models.generate_content_stream(model="m", contents="?"))


def test_an_error_in_the_middle_of_a_stream() -> None:
    client = client_of(ScriptedModel(Failure(503, "the model broke", [TextDelta("Hal")])))
    texts: list[str] = []
    answers = client.models.generate_content_stream(model="m", contents="?")
    with pytest.raises(genai.errors.ServerError, match="the model broke"):
        texts.extend(answer.text for answer in answers)
    assert texts == ["Hal"]


def test_counts_and_models() -> None:
    client = client_of(ScriptedModel(ModelReply()))
    short = client.models.count_tokens(model="m", contents="word")
    longer = client.models.count_tokens(model="m", contents="word " * 100)
    assert 0 < short.total_tokens < longer.total_tokens
    assert [model.name for model in client.models.list()] == ["models/small", "models/large"]
    assert client.models.get(model="small").display_name == "small"


def test_the_version_of_the_path_does_not_matter() -> None:
    http, model = client_http(), ScriptedModel(ModelReply((TextPart("ok"),)))
    for version in ("v1", "v1beta", "v1alpha"):
        options = genai.types.HttpOptions(
            base_url="http://bridge", api_version=version, client_args={"transport": model.transport(http)}
        )
        client = genai.Client(api_key="none", http_options=options)
        assert client.models.generate_content(model="m", contents="?").text == "ok"
        assert [each.name for each in client.models.list()] == ["models/small", "models/large"]
