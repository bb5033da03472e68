"""Where a request goes, with which headers, and what is changed in it: pure, without a provider."""

from __future__ import annotations

import json

import pytest

from holdfast.bridge import Upstream, Usage
from holdfast.bridge.dialects import DIALECTS
from holdfast.bridge.forwarding import UsageEventFilter, UsageMeter, rewritten
from holdfast.errors import InvalidParams
from holdfast.wire.http_messages import HttpRequest

KEY = "sk-of-the-host-0123456789"


def request(path: str = "/v1/chat/completions", query: str = "", body: bytes = b"", **headers: str) -> HttpRequest:
    named = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return HttpRequest("POST", path, query, named, body)


@pytest.mark.parametrize(
    ("base", "path", "query", "url"),
    [
        ("https://a.example/v1", "/v1/responses", "", "https://a.example/v1/responses"),
        ("https://a.example/v1/", "/v1/responses", "", "https://a.example/v1/responses"),
        ("https://a.example", "/v1/messages", "beta=true", "https://a.example/v1/messages?beta=true"),
        ("https://a.example/api/v1", "/v1/models", "", "https://a.example/api/v1/models"),
        ("https://a.example", "/v1beta/models/m:x", "alt=sse&key=k", "https://a.example/v1beta/models/m:x?alt=sse"),
    ],
)
def test_the_version_is_said_once_and_keys_are_left_out(base: str, path: str, query: str, url: str) -> None:
    assert Upstream(base).url(request(path, query)) == url


PATHS = ["/v1/models/../files", "/v1/models/%2E%2e/files", "/v1/x%2F..", "/v1/models/a\\..\\b", "/v1/./files"]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(InvalidParams, match=r"contains `\.` or"):
        Upstream("https://a.example").url(request(path))


@pytest.mark.parametrize(
    ("dialect", "name", "value"),
    [
        ("openai_chat", "authorization", f"Bearer {KEY}"),
        ("openai_responses", "authorization", f"Bearer {KEY}"),
        ("anthropic", "x-api-key", KEY),
        ("google", "x-goog-api-key", KEY),
    ],
)
def test_the_key_is_shown_as_the_providers_own_clients_do(dialect: str, name: str, value: str) -> None:
    theirs = request(authorization="Bearer theirs", x_api_key="theirs", x_goog_api_key="theirs")
    headers = Upstream("https://a.example", KEY).headers_for(theirs, dialect)
    assert headers == {name: value, "accept-encoding": "identity"}


def test_headers_are_passed_on_by_name() -> None:
    upstream = Upstream("https://a.example", headers={"X-Extra": "secret-extra"}, forward=("X-Mine*",))
    sent = upstream.headers_for(
        request(anthropic_beta="b", x_mine_too="1", cookie="c", host="h", x_forwarded_for="1.2.3.4"), "anthropic"
    )
    assert sent == {
        "anthropic-beta": "b",
        "x-mine-too": "1",
        "x-extra": "secret-extra",
        "accept-encoding": "identity",
    }
    assert upstream.redaction.text("it was secret-extra") == "it was [redacted]"


def test_how_the_key_is_shown_can_be_chosen() -> None:
    headers = Upstream("https://a.example", KEY, auth="bearer").headers_for(request(), "anthropic")
    assert headers["authorization"] == f"Bearer {KEY}"


def test_the_key_is_not_in_its_repr() -> None:
    assert KEY not in repr(Upstream("https://a.example", KEY))


@pytest.mark.parametrize("url", ["ftp://a.example", "a.example", f"https://user:{KEY}@a.example", "https://a?b=c"])
def test_a_base_url_that_cannot_be_is_refused_without_telling_secrets(url: str) -> None:
    with pytest.raises(InvalidParams) as reported:
        Upstream(url)
    assert KEY not in str(reported.value)


def test_a_key_with_a_line_end_is_refused_without_telling_it() -> None:
    with pytest.raises(InvalidParams) as reported:
        Upstream("https://a.example", KEY + "\n")
    assert KEY not in str(reported.value)


def test_another_model_is_put_into_the_body_or_the_path() -> None:
    body = json.dumps({"model": "asked", "input": "x"}).encode()
    assert json.loads(rewritten(request(body=body), model="ours").body) == {"model": "ours", "input": "x"}
    google = rewritten(request("/v1beta/models/asked:streamGenerateContent", body=b"{}"), model="ours")
    assert google.path == "/v1beta/models/ours:streamGenerateContent"


def test_a_request_that_needs_no_change_is_passed_on_as_it_is() -> None:
    odd = request(body=b'{"model" :  "asked"}')
    assert rewritten(odd, model=None) is odd


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_the_event_of_the_usage_alone_is_left_out(end: bytes) -> None:
    first_event = b'data: {"choices": [{"delta": {}}], "usage": null}' + end
    usage = b'data: {"choices": [], "usage": {"total_tokens": 3}}' + end
    done = b"data: [DONE]" + end
    whole = first_event + usage + done
    for cut in range(len(whole)):
        left_out = UsageEventFilter()
        passed = left_out.feed(whole[:cut]) + left_out.feed(whole[cut:]) + left_out.end()
        assert passed == first_event + done


@pytest.mark.parametrize(("is_stream", "events"), [(True, 2), (False, 0)])
def test_tokens_are_read_off_what_passes(is_stream: bool, events: int) -> None:
    usage = b'{"usage": {"prompt_tokens": 3, "completion_tokens": 2}}'
    whole = b'data: {"a": 1}\n\ndata: ' + usage + b"\n\n" if is_stream else usage
    meter = UsageMeter(DIALECTS["openai_chat"].usage_in, is_stream=is_stream)
    for byte in whole:
        meter.feed(bytes([byte]))
    assert (meter.usage(), meter.bytes, meter.events) == (Usage(3, 2), len(whole), events)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_tokens_are_the_same_wherever_a_stream_is_cut(end: bytes) -> None:
    usage = b'data: {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}'
    lines = [b'data: {"a": 1}', b"", b"event: b", b'data: {"b": 1}', b"", b": a remark", b"", usage, b"", b""]
    whole = end.join(lines)
    for first in range(len(whole) + 1):
        for second in range(first, len(whole) + 1):
            meter = UsageMeter(DIALECTS["openai_chat"].usage_in, is_stream=True)
            for piece in (whole[:first], whole[first:second], whole[second:]):
                meter.feed(piece)
            reported = (meter.usage(), meter.bytes)
            assert reported == (Usage(3, 2), len(whole)), (first, second)
            # A remark may be counted as an event: they are for an estimate.
            assert meter.events in (3, 4), (first, second)


def test_what_is_no_json_has_no_tokens() -> None:
    meter = UsageMeter(DIALECTS["openai_chat"].usage_in, is_stream=False)
    meter.feed(b'"usage')
    assert meter.usage() is None
