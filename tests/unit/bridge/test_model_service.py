"""The bridge's service without a sandbox: packed requests in, pieces of answers out, records and counts beside."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
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
    Upstream,
    Usage,
)
from holdfast.bridge.dialects.embeddings import EmbeddingsRequest
from holdfast.bridge.model_calls import ModelCalls
from holdfast.errors import ConnectionLost, InvalidParams, MethodNotFound
from holdfast.wire.http_messages import HTTP_METHOD, HttpHead, HttpRequest, pack_request, unpack_head

CHAT = "/v1/chat/completions"


async def greet(request: ModelRequest) -> ModelReply:
    return ModelReply((TextPart("hello"),), usage=Usage(3, 2))


def chat(**more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}).encode()


async def ask(
    service: ModelCalls, path: str = CHAT, body: bytes = b"", headers: tuple[tuple[str, str], ...] = ()
) -> tuple[HttpHead, bytes]:
    request = HttpRequest("POST" if body else "GET", path, "", headers, body)
    pieces = [piece async for piece in await service.handle(HTTP_METHOD, pack_request(request))]
    return unpack_head(pieces[0]), b"".join(pieces[1:])


async def test_a_call_is_answered_counted_and_written_down() -> None:
    reported: list[CallRecord] = []
    service = ModelCalls(greet, Limits(prices={"m": Price(1_000_000, 1_000_000)}), on_call=reported.append)
    head, body = await ask(service, body=chat())
    assert head.status == 200
    assert json.loads(body)["choices"][0]["message"]["content"] == "hello"
    (call,) = service.calls
    assert reported == [call]
    assert (call.number, call.dialect, call.model, call.status, call.usage) == (
        1,
        "openai_chat",
        "m",
        200,
        Usage(3, 2),
    )
    assert (call.request, call.reply, call.money) == (chat().decode(), body.decode(), 5.0)
    assert (service.spent.requests, service.spent.tokens, service.spent.running) == (1, 5, 0)


async def test_a_call_is_recorded_after_the_end_of_its_answer_and_before_the_next_event() -> None:
    reported: list[CallRecord] = []
    service = ModelCalls(greet, Limits(requests=2), on_call=reported.append)
    await ask(service, body=chat())
    assert reported == []  # the host call service sends the end of the answer before the loop's next turn
    await asyncio.sleep(0)
    assert [call.number for call in reported] == [1]
    await ask(service, body=chat())
    # Neither an admission nor a reader misses a call that has just ended.
    assert (await ask(service, body=chat()))[0].status == 429
    assert (service.spent.requests, service.spent.running, len(service.calls)) == (2, 0, 3)
    assert [call.number for call in reported] == [1, 2, 3]


async def test_a_bridge_that_closes_has_recorded_every_call() -> None:
    reported: list[CallRecord] = []
    service = ModelCalls(greet, on_call=reported.append)
    await ask(service, body=chat())
    await service.aclose()
    assert len(reported) == 1


async def test_a_websocket_is_refused_with_the_status_that_means_use_http() -> None:
    head, body = await ask(ModelCalls(greet), "/v1/responses", headers=(("sec-websocket-key", "AAAA"),))
    assert (head.status, "use POST" in json.loads(body)["error"]["message"]) == (426, True)


@pytest.mark.parametrize("stream", [False, True])
async def test_words_and_deltas_are_an_answer_whole_or_streamed(stream: bool) -> None:
    async def speak(request: ModelRequest) -> AsyncIterator[str | TextDelta]:
        yield "one "
        yield TextDelta("two")

    head, body = await ask(ModelCalls(speak), body=chat(stream=stream))
    kind = dict(head.headers)["content-type"].partition(";")[0]
    assert kind == ("text/event-stream" if stream else "application/json")
    assert (b'"one "' in body and b'"two"' in body) if stream else b'"one two"' in body


async def test_a_function_that_fails_in_its_stream_ends_it_with_an_error() -> None:
    async def break_off(request: ModelRequest) -> AsyncIterator[str]:
        yield "one"
        raise ModelError("no more", 529)

    service = ModelCalls(break_off)
    head, body = await ask(service, body=chat(stream=True))
    assert (head.status, b"no more" in body, b"[DONE]" in body) == (200, True, False)
    assert service.calls[0].error == "ModelError: no more"


async def test_a_function_that_gives_something_else_is_an_error() -> None:
    async def wrong(request: ModelRequest) -> Any:
        return 3

    head, body = await ask(ModelCalls(wrong), body=chat())
    assert head.status == 500
    assert "returned a int" in json.loads(body)["error"]["message"]


async def test_an_answer_that_hangs_in_its_middle_is_broken_off() -> None:
    async def hang(request: ModelRequest) -> AsyncIterator[str]:
        yield "one"
        await asyncio.Event().wait()

    service = ModelCalls(hang, Limits(timeout=0.01))
    with pytest.raises(ConnectionLost, match="not ended in time"):
        await ask(service, body=chat(stream=True))
    (call,) = service.calls
    assert (call.status, call.error, call.cancelled) == (200, "the response has not ended in time", False)
    assert service.spent.running == 0


async def test_a_timeout_of_the_functions_own_is_its_own() -> None:
    async def slow(request: ModelRequest) -> str:
        raise TimeoutError("of mine")

    head, body = await ask(ModelCalls(slow), body=chat())
    assert (head.status, b"TimeoutError" in body) == (500, True)


async def test_a_caller_that_leaves_is_estimated() -> None:
    async def endless(request: ModelRequest) -> AsyncIterator[str]:
        while True:
            yield "four "

    service = ModelCalls(endless, Limits(tokens=10))
    request = HttpRequest("POST", CHAT, "", (), chat(stream=True))
    answer: Any = await service.handle(HTTP_METHOD, pack_request(request))
    for _ in range(10):
        await anext(answer)
    await answer.aclose()
    (call,) = service.calls
    assert (call.cancelled, call.usage_estimated) == (True, True)
    assert service.spent.tokens >= 10
    assert (await ask(service, body=chat()))[0].status == 429


async def test_calls_that_run_at_once_cannot_pass_a_budget_together() -> None:
    go_on = asyncio.Event()

    async def slow(request: ModelRequest) -> ModelReply:
        await go_on.wait()
        return ModelReply((TextPart("x"),), usage=Usage(5, 40))

    service = ModelCalls(slow, Limits(tokens=150))
    first = [asyncio.create_task(ask(service, body=chat(max_tokens=40))) for _ in range(10)]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    refused = [head for head, _ in (task.result() for task in first if task.done())]
    assert len(refused) == 7
    assert {head.status for head in refused} == {429}
    # Reserved tokens may come back, so a client may try again.
    assert all(dict(head.headers)["retry-after"] == "1" for head in refused)
    assert service.spent.reserved_tokens == 3 * 45
    go_on.set()
    await asyncio.gather(*first)
    assert (service.spent.tokens, service.spent.reserved_tokens, service.spent.running) == (135, 0, 0)
    head, body = await ask(service, body=chat(max_tokens=40))
    assert (head.status, dict(head.headers)["x-should-retry"]) == (429, "false")
    assert "15 of the budget of 150" in json.loads(body)["error"]["message"]


async def test_a_call_that_fails_gives_back_what_was_reserved() -> None:
    async def fail(request: ModelRequest) -> ModelReply:
        raise ModelError("no", 500)

    service = ModelCalls(fail, Limits(tokens=1000))
    assert (await ask(service, body=chat(max_tokens=900)))[0].status == 500
    assert (service.spent.reserved_tokens, service.spent.tokens) == (0, 0)


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        (b'{"model": "", "input": "x"}', 400, "model"),
        (b'{"model": "m", "model": "dear", "input": "x"}', 400, "model"),
        (b'{"model": "m", "Model": "dear", "input": "x"}', 400, "Model"),
        (b'{"model": "m", "input": "x", "background": true}', 403, "background"),
        (b'{"model": "m", "input": "x", "previous_response_id": "r"}', 403, "previous_response_id"),
    ],
)
async def test_what_would_pass_the_limits_is_refused_before_a_provider_sees_it(
    body: bytes, status: int, named: str
) -> None:
    limits = Limits(models=("m",), tokens=1_000_000)
    service = ModelCalls(Upstream("http://127.0.0.1:1", "sk-0123456789"), limits)
    head, answer = await ask(service, "/v1/responses", body)
    assert (head.status, json.loads(answer)["error"]["message"].partition(":")[0]) == (status, named)
    assert service.spent.running == 0
    await service.aclose()


KEY = "sk-of-the-host-0123456789-abcdef"
ECHOES = [
    KEY,
    "sk-of************************cdef",
    "".join(f"\\\\u{ord(each):04x}" for each in KEY),
    KEY.replace("-", "%2D"),
    base64.b64encode(KEY.encode()).decode(),
    base64.b64encode(f"user:{KEY}".encode()).decode(),
    base64.b64encode(f"Bearer {KEY}".encode()).decode(),
]


@pytest.mark.parametrize("status", [200, 400, 403, 429, 500])
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_no_form_of_the_key_comes_back_and_the_body_is_sent_as_it_was_checked(status: int, kind: str) -> None:
    received: list[bytes] = []
    body = "".join(f'data: {{"said": "{echo}"}}\n\n' for echo in ECHOES).encode()

    async def provide(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])  # type: ignore[index]
        received.append(await reader.readexactly(length))
        writer.write(
            f"HTTP/1.1 {status} Some\r\ncontent-type: {kind}\r\nx-request-id: {ECHOES[1]} {ECHOES[6]}\r\n".encode()
        )
        writer.write(b"content-length: %d\r\n\r\n" % len(body))
        for at in range(0, len(body), 7):
            writer.write(body[at : at + 7])
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(provide, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        service = ModelCalls(Upstream(f"http://127.0.0.1:{port}", KEY))
        head, answer = await ask(service, "/v1/messages", b' {"\\u006dodel" : "m", "messages":[ ]}')
        await service.aclose()
    assert head.status == status
    shown = answer.decode() + repr(head.headers) + service.calls[0].reply
    assert answer.count(b"[redacted]") == len(ECHOES)
    for echo in (*ECHOES, "sk-of", "cdef"):
        assert echo not in shown
    assert received == [b'{"model":"m","messages":[]}']


async def test_lists_of_models_have_those_that_are_allowed() -> None:
    service = ModelCalls({"b": greet, "a": greet, "dear": greet}, Limits(models=("a", "b")))
    _, openai = await ask(service, "/v1/models")
    _, anthropic = await ask(service, "/v1/models", headers=(("anthropic-version", "1"),))
    assert [each["id"] for each in json.loads(openai)["data"]] == ["a", "b"]
    assert [each["id"] for each in json.loads(anthropic)["data"]] == ["a", "b"]
    assert (await ask(service, "/v1/models/a"))[0].status == 200
    assert (await ask(service, "/v1/models/dear"))[0].status == 403


async def test_a_model_that_is_not_there_names_those_that_are() -> None:
    head, body = await ask(ModelCalls({"mine": greet}), body=chat())
    assert (head.status, "known models: mine" in json.loads(body)["error"]["message"]) == (404, True)


async def test_embeddings_come_from_the_functions_embed() -> None:
    class Embedding:
        async def __call__(self, request: ModelRequest) -> str:
            return ""

        async def embed(self, request: EmbeddingsRequest) -> list[list[float]]:
            return [[float(len(each))] for each in request.input]

    body = json.dumps({"model": "m", "input": ["a", "abc"]}).encode()
    head, answer = await ask(ModelCalls(Embedding()), "/v1/embeddings", body)
    assert (head.status, [each["embedding"] for each in json.loads(answer)["data"]]) == (200, [[1.0], [3.0]])
    assert (await ask(ModelCalls(greet), "/v1/embeddings", body))[0].status == 404


async def test_tokens_are_counted_by_estimate() -> None:
    head, body = await ask(ModelCalls(greet), "/v1/messages/count_tokens", chat())
    assert (head.status, json.loads(body)["input_tokens"] > 0) == (200, True)


async def test_a_callback_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def fail(call: CallRecord) -> None:
        raise RuntimeError("mine")

    service = ModelCalls(greet, on_call=fail)
    with caplog.at_level(logging.ERROR):
        assert (await ask(service, body=chat()))[0].status == 200
        assert len(service.calls) == 1
    assert "on_call failed" in caplog.text


async def test_what_is_no_call_of_http_is_refused() -> None:
    service = ModelCalls(greet)
    with pytest.raises(MethodNotFound):
        await service.handle("other", b"")
    with pytest.raises(InvalidParams):
        await service.handle(HTTP_METHOD, msgspec.msgpack.encode({"no": "request"}))


@pytest.mark.parametrize("model", [{}, {"m": 3}, 3])
def test_a_model_that_is_none_is_refused(model: Model) -> None:
    with pytest.raises(InvalidParams, match="model"):
        ModelCalls(model)
