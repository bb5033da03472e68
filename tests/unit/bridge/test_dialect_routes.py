"""The dialect of each path, the form of its errors, and the requests that only a provider can answer."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from holdfast.bridge.dialects import (
    DIALECTS,
    Route,
    canonical_request,
    dialect_of,
    embeddings,
    model_and_stream,
    requested_tokens,
    route_of,
    unsupported_by_function,
)
from holdfast.bridge.dialects.fields import Fields, checked_body
from holdfast.bridge.limits import IMAGE_TOKENS, estimate_tokens
from holdfast.bridge.types import (
    FilePart,
    ImagePart,
    Message,
    ModelReply,
    ModelRequest,
    TextPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
    Usage,
)
from holdfast.errors import InvalidParams
from holdfast.wire.http_messages import Headers, HttpRequest

from .replies import request_for


def asking(method: str, path: str, headers: Headers = (), body: Any = None) -> HttpRequest:
    return HttpRequest(method, path, "", headers, b"" if body is None else json.dumps(body).encode())


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/chat/completions", Route("openai_chat", "generate")),
        ("/v1/chat/completions/", Route("openai_chat", "generate")),
        ("/v1/responses", Route("openai_responses", "generate")),
        ("/v1/completions", Route("openai_completions", "generate")),
        ("/v1/embeddings", Route("openai_chat", "embeddings")),
        ("/v1/messages", Route("anthropic", "generate")),
        ("/v1/messages/count_tokens", Route("anthropic", "count_tokens")),
        ("/v1beta/models/g-1.5:generateContent", Route("google", "generate", "g-1.5")),
        ("/v1beta/models/g%2Fx%3AstreamGenerateContent", Route("google", "generate", "g/x")),
        ("/v1/models/g:countTokens", Route("google", "count_tokens", "g")),
        ("/v1beta/models/g:predict", None),
        ("/v1/images/generations", None),
        ("/v1/models", None),
        ("/", None),
    ],
)
def test_posts(path: str, route: Route | None) -> None:
    assert route_of(asking("POST", path)) == route


@pytest.mark.parametrize(
    ("path", "headers", "route"),
    [
        ("/v1/models", (), Route("openai_chat", "models")),
        ("/v1/models/org/m:1", (), Route("openai_chat", "model", "org/m:1")),
        ("/v1/models", (("anthropic-version", "2023-06-01"),), Route("anthropic", "models")),
        ("/v1/models/m", (("x-goog-api-key", "k"),), Route("google", "model", "m")),
        ("/v1beta/models", (), Route("google", "models")),
        ("/v1/messages", (), None),
    ],
)
def test_gets(path: str, headers: Headers, route: Route | None) -> None:
    assert route_of(asking("GET", path, headers)) == route


@pytest.mark.parametrize(
    ("path", "headers", "name"),
    [
        ("/v1/images", (), "openai_chat"),
        ("/v1/responses", (), "openai_responses"),
        ("/v1/messages/batches", (), "anthropic"),
        ("/v1/files", (("anthropic-version", "2023-06-01"),), "anthropic"),
        ("/v1beta/files", (), "google"),
    ],
)
def test_errors_are_in_the_dialect_of_the_caller(path: str, headers: Headers, name: str) -> None:
    assert dialect_of(asking("POST", path, headers)).name == name


def test_asked_of_looks_only_at_model_and_stream() -> None:
    broken = {"model": "m", "stream": True, "messages": "not a list"}
    request = asking("POST", "/v1/messages", body=broken)
    assert model_and_stream(checked_body(request), request, Route("anthropic", "generate")) == ("m", True)
    streaming = asking("POST", "/v1beta/models/g:streamGenerateContent")
    assert model_and_stream(Fields({}), streaming, Route("google", "generate", "g")) == ("g", True)
    assert model_and_stream(Fields({}), asking("GET", "/v1/models"), Route("openai_chat", "models")) == ("", False)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{}", "model: is missing"),
        (b'{"model": ""}', "model: is empty"),
        (b'{"model": " "}', "model: is empty"),
        (b'{"model": "m", "model": "dear"}', "model: appears twice"),
        (b'{"model": "m", "\\u006dodel": "dear"}', "model: appears twice"),
        (b'{"model": "m", "x": {"a": 1, "a": 2}}', "a: appears twice"),
        (b'{"model": "m", "Model": "dear"}', "Model: conflicts with 'model'"),
        (b'{"MODEL": "dear"}', "MODEL: must be written 'model'"),
        (b'{"model": "m", "Background": true}', "Background: must be written 'background'"),
        (b'{"model": "m", "maxTokens": 9}', "maxTokens: must be written 'max_tokens'"),
        (b'{"model": "m", "generationConfig": {}, "generation_config": {}}', "conflicts with 'generationConfig'"),
        (b'{"model": "m", "a": NaN}', "is not JSON"),
        (b'{"model": "m", "a": "\\ud800"}', "is not JSON"),
    ],
)
def test_a_body_that_two_readers_read_differently_is_refused(body: bytes, says: str) -> None:
    request = HttpRequest("POST", "/v1/messages", "", (), body)
    with pytest.raises(InvalidParams, match=re.escape(says)):
        model_and_stream(checked_body(request), request, Route("anthropic", "generate"))


def test_a_body_is_sent_as_it_was_read() -> None:
    written = b' {"model" : "\\u006d" , "messages" : [ 1.5 , null , {"Name": 1, "name": 2} ] , "x" : "\\u00e9"} '
    request = HttpRequest("POST", "/v1beta/models/%67%2F%2E:generateContent", "", (), written)
    sent = canonical_request(request, checked_body(request))
    assert json.loads(sent.body) == json.loads(written)
    assert sent.path == "/v1beta/models/g%2F.:generateContent"
    assert canonical_request(sent, checked_body(sent)) == sent


@pytest.mark.parametrize(
    ("path", "more", "output"),
    [
        ("/v1/chat/completions", {}, None),
        ("/v1/chat/completions", {"max_tokens": 10}, 10),
        ("/v1/chat/completions", {"max_tokens": 10, "max_completion_tokens": 30, "n": 4}, 120),
        ("/v1/responses", {"max_output_tokens": 7, "messages": None, "input": "hello"}, 7),
        ("/v1/messages", {"max_tokens": 11}, 11),
        ("/v1/completions", {"max_tokens": 5, "prompt": ["a", "b"], "best_of": 3}, 30),
        ("/v1beta/models/g:generateContent", {"generationConfig": {"maxOutputTokens": 9, "candidateCount": 2}}, 18),
        ("/v1/chat/completions", {"max_tokens": -1}, None),
        ("/v1/chat/completions", {"max_tokens": "many"}, None),
    ],
)
def test_what_a_request_asks_for_is_known_before(path: str, more: dict[str, Any], output: int | None) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 400}], **more}
    request = asking("POST", path, body=body)
    route = route_of(request)
    assert route is not None
    requested = requested_tokens(request, checked_body(request), route)
    assert requested.output == output
    assert requested.input >= 1


def test_an_image_is_no_text() -> None:
    url = "data:image/png;base64," + "A" * 400_000
    content = [{"type": "image_url", "image_url": {"url": url}}]
    request = asking(
        "POST", "/v1/chat/completions", body={"model": "m", "messages": [{"role": "user", "content": content}]}
    )
    requested = requested_tokens(request, checked_body(request), Route("openai_chat", "generate"))
    assert 1_000 < requested.input < 10_000


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/chat/completions", {"messages": [], "n": 2}, "2 replies"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "2 prompts"),
        (
            "/v1/responses",
            {"input": "?", "previous_response_id": "resp_1"},
            "previous_response_id: .* keeps no state",
        ),
        ("/v1/responses", {"input": "?", "conversation": "conv_1"}, "conversation: "),
        ("/v1/responses", {"input": "?", "background": True}, "background: "),
        ("/v1/responses", {"prompt": {"id": "p"}}, "prompt: "),
    ],
)
def test_what_only_a_provider_can_answer(path: str, body: dict[str, Any], says: str) -> None:
    request = asking("POST", path, body={"model": "m", **body})
    route = route_of(request)
    assert route is not None
    reason = unsupported_by_function(DIALECTS[route.dialect].parse(request))
    assert reason is not None
    with pytest.raises(InvalidParams, match=says):
        raise InvalidParams(reason)


def test_what_a_function_can_answer() -> None:
    body = {"model": "m", "input": "?", "store": False, "background": False, "previous_response_id": None}
    assert (
        unsupported_by_function(DIALECTS["openai_responses"].parse(asking("POST", "/v1/responses", body=body)))
        is None
    )


def test_compressed_bodies_are_refused_in_words() -> None:
    request = asking("POST", "/v1/messages", (("content-encoding", "zstd"),), {})
    with pytest.raises(InvalidParams, match="content-encoding: zstd is not supported"):
        DIALECTS["anthropic"].parse(request)


def test_arguments_that_are_no_object_are_told_where_an_object_is_needed() -> None:
    for written in ("[1]", "{", '"x"'):
        reply = ModelReply((ToolCallPart("c", "f", written),))
        for name in ("anthropic", "google"):
            with pytest.raises(InvalidParams, match="the arguments of tool call 'f' are not"):
                DIALECTS[name].render(reply, request_for("anthropic"))
        assert json.dumps(written).encode() in DIALECTS["openai_chat"].render(reply, request_for("openai_chat"))


def test_embeddings_must_be_one_for_each_input() -> None:
    request = embeddings.parse(asking("POST", "/v1/embeddings", body={"model": "e", "input": ["a", "b"]}))
    with pytest.raises(InvalidParams, match="1 vectors for 2 inputs"):
        embeddings.render([[1.0]], request, Usage())
    with pytest.raises(InvalidParams, match=r"input\[1\]: must be a string or an array of token numbers"):
        embeddings.parse(asking("POST", "/v1/embeddings", body={"model": "e", "input": ["a", 1.5]}))


def test_the_estimate_counts_everything_that_is_sent() -> None:
    def of(**fields: Any) -> int:
        return estimate_tokens(ModelRequest("m", "anthropic", **fields))

    assert of() == 1
    assert of(system="x" * 400) == 100
    assert of(tools=(Tool("f" * 40, "d" * 400, {"type": "object"}),)) > 110
    image = Message("user", (ImagePart(b"x"),))
    assert of(messages=(image,)) >= IMAGE_TOKENS
    inside = (TextPart("r" * 400),)
    for part in (FilePart(b"x" * 400), ToolResultPart("c", inside), ToolCallPart("c", "f", "a" * 400)):
        assert of(messages=(Message("user", (part,)),)) >= 100


def test_google_takes_snake_case_and_single_objects() -> None:
    body = {
        "system_instruction": {"parts": {"text": "Be brief."}},
        "contents": {"parts": [{"inline_data": {"mime_type": "image/png", "data": "_-8"}}]},
        "generation_config": {"max_output_tokens": 5},
    }
    request = DIALECTS["google"].parse(asking("POST", "/v1beta/models/g:generateContent", body=body))
    assert request.system == "Be brief."
    assert request.messages == (Message("user", (ImagePart(b"\xff\xef", "image/png"),)),)
    assert request.params.max_tokens == 5
    assert request.raw == body


def test_namespaces_of_tools_are_kept() -> None:
    tools = [{"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "f", "parameters": None}]}]
    body = {"model": "m", "input": "?", "tools": tools}
    request = DIALECTS["openai_responses"].parse(asking("POST", "/v1/responses", body=body))
    assert [(tool.name, tool.namespace, tool.schema) for tool in request.tools] == [("f", "mcp", {})]
    answer = DIALECTS["openai_responses"].render(
        ModelReply((ToolCallPart("c", "f", "{}", namespace="mcp"),)), request
    )
    assert json.loads(answer)["output"][0]["namespace"] == "mcp"
