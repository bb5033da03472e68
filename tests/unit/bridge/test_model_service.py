"""The bridge's service without a sandbox: packed requests in, pieces of answers out, records and counts beside."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from holdfast.bridge import (
    CallRecord,
    Limits,
    Model,
    ModelError,
    ModelReply,
    ModelRequest,
    Price,
    TextDelta,
    TextPart,
    Usage,
)
from holdfast.bridge.dialects.embeddings import EmbeddingsRequest
from holdfast.bridge.model_service import ModelService
from holdfast.errors import ConnectionLost, InvalidParams, MethodNotFound
from holdfast.wire.http_messages import HTTP_METHOD, HttpHead, HttpRequest, pack_request, unpack_head

CHAT = "/v1/chat/completions"


async def greet(request: ModelRequest) -> ModelReply:
    return ModelReply((TextPart("hello"),), usage=Usage(3, 2))


def chat(**more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}).encode()


async def ask(
    service: ModelService, path: str = CHAT, body: bytes = b"", headers: tuple[tuple[str, str], ...] = ()
) -> tuple[HttpHead, bytes]:
    request = HttpRequest("POST" if body else "GET", path, "", headers, body)
    pieces = [piece async for piece in await service.handle(HTTP_METHOD, pack_request(request))]
    return unpack_head(pieces[0]), b"".join(pieces[1:])


async def test_a_call_is_answered_counted_and_written_down() -> None:
    told: list[CallRecord] = []
    service = ModelService(greet, Limits(prices={"m": Price(1_000_000, 1_000_000)}), on_call=told.append)
    head, body = await ask(service, body=chat())
    assert head.status == 200
    assert json.loads(body)["choices"][0]["message"]["content"] == "hello"
    (call,) = service.calls
    assert told == [call]
    assert (call.number, call.dialect, call.model, call.status, call.usage) == (
        1,
        "openai_chat",
        "m",
        200,
        Usage(3, 2),
    )
    assert (call.request, call.reply, call.money) == (chat().decode(), body.decode(), 5.0)
    assert (service.spent.requests, service.spent.tokens, service.spent.running) == (1, 5, 0)


async def test_a_websocket_is_refused_with_the_status_that_means_use_http() -> None:
    head, body = await ask(ModelService(greet), "/v1/responses", headers=(("sec-websocket-key", "AAAA"),))
    assert (head.status, "use POST" in json.loads(body)["error"]["message"]) == (426, True)


@pytest.mark.parametrize("stream", [False, True])
async def test_words_and_deltas_are_an_answer_whole_or_streamed(stream: bool) -> None:
    async def speak(request: ModelRequest) -> AsyncIterator[str | TextDelta]:
        yield "one "
        yield TextDelta("two")

    head, body = await ask(ModelService(speak), body=chat(stream=stream))
    kind = dict(head.headers)["content-type"].partition(";")[0]
    assert kind == ("text/event-stream" if stream else "application/json")
    assert (b'"one "' in body and b'"two"' in body) if stream else b'"one two"' in body


async def test_a_function_that_fails_in_its_stream_ends_it_with_an_error() -> None:
    async def break_off(request: ModelRequest) -> AsyncIterator[str]:
        yield "one"
        raise ModelError("no more", 529)

    service = ModelService(break_off)
    head, body = await ask(service, body=chat(stream=True))
    assert (head.status, b"no more" in body, b"[DONE]" in body) == (200, True, False)
    assert service.calls[0].error == "ModelError: no more"


async def test_a_function_that_gives_something_else_is_an_error() -> None:
    async def wrong(request: ModelRequest) -> Any:
        return 3

    head, body = await ask(ModelService(wrong), body=chat())
    assert head.status == 500
    assert "gave a int" in json.loads(body)["error"]["message"]


async def test_an_answer_that_hangs_in_its_middle_is_broken_off() -> None:
    async def hang(request: ModelRequest) -> AsyncIterator[str]:
        yield "one"
        await asyncio.Event().wait()

    service = ModelService(hang, Limits(timeout=0.01))
    with pytest.raises(ConnectionLost, match="not ended in time"):
        await ask(service, body=chat(stream=True))
    (call,) = service.calls
    assert (call.status, call.error, call.cancelled) == (200, "the answer has not ended in time", False)
    assert service.spent.running == 0


async def test_a_timeout_of_the_functions_own_is_its_own() -> None:
    async def slow(request: ModelRequest) -> str:
        raise TimeoutError("of mine")

    head, body = await ask(ModelService(slow), body=chat())
    assert (head.status, b"TimeoutError" in body) == (500, True)


async def test_a_caller_that_leaves_is_estimated() -> None:
    async def endless(request: ModelRequest) -> AsyncIterator[str]:
        while True:
            yield "four "

    service = ModelService(endless, Limits(tokens=5))
    request = HttpRequest("POST", CHAT, "", (), chat(stream=True))
    answer: Any = await service.handle(HTTP_METHOD, pack_request(request))
    for _ in range(10):
        await anext(answer)
    await answer.aclose()
    (call,) = service.calls
    assert (call.cancelled, call.usage_estimated) == (True, True)
    assert service.spent.tokens >= 10
    assert (await ask(service, body=chat()))[0].status == 429


async def test_lists_of_models_have_those_that_are_allowed() -> None:
    service = ModelService({"b": greet, "a": greet, "dear": greet}, Limits(models=("a", "b")))
    _, openai = await ask(service, "/v1/models")
    _, anthropic = await ask(service, "/v1/models", headers=(("anthropic-version", "1"),))
    assert [each["id"] for each in json.loads(openai)["data"]] == ["a", "b"]
    assert [each["id"] for each in json.loads(anthropic)["data"]] == ["a", "b"]
    assert (await ask(service, "/v1/models/a"))[0].status == 200
    assert (await ask(service, "/v1/models/dear"))[0].status == 403


async def test_a_model_that_is_not_there_names_those_that_are() -> None:
    head, body = await ask(ModelService({"mine": greet}), body=chat())
    assert (head.status, "there are mine" in json.loads(body)["error"]["message"]) == (404, True)


async def test_embeddings_come_from_the_functions_embed() -> None:
    class Embedding:
        async def __call__(self, request: ModelRequest) -> str:
            return ""

        async def embed(self, request: EmbeddingsRequest) -> list[list[float]]:
            return [[float(len(each))] for each in request.input]

    body = json.dumps({"model": "m", "input": ["a", "abc"]}).encode()
    head, answer = await ask(ModelService(Embedding()), "/v1/embeddings", body)
    assert (head.status, [each["embedding"] for each in json.loads(answer)["data"]]) == (200, [[1.0], [3.0]])
    assert (await ask(ModelService(greet), "/v1/embeddings", body))[0].status == 404


async def test_tokens_are_counted_by_estimate() -> None:
    head, body = await ask(ModelService(greet), "/v1/messages/count_tokens", chat())
    assert (head.status, json.loads(body)["input_tokens"] > 0) == (200, True)


async def test_a_callback_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def fail(call: CallRecord) -> None:
        raise RuntimeError("mine")

    service = ModelService(greet, on_call=fail)
    with caplog.at_level(logging.ERROR):
        assert (await ask(service, body=chat()))[0].status == 200
    assert "on_call failed" in caplog.text
    assert len(service.calls) == 1


async def test_what_is_no_call_of_http_is_refused() -> None:
    service = ModelService(greet)
    with pytest.raises(MethodNotFound):
        await service.handle("other", b"")
    with pytest.raises(InvalidParams):
        await service.handle(HTTP_METHOD, msgspec.msgpack.encode({"no": "request"}))


@pytest.mark.parametrize("model", [{}, {"m": 3}, 3])
def test_a_model_that_is_none_is_refused(model: Model) -> None:
    with pytest.raises(InvalidParams, match="model"):
        ModelService(model)
