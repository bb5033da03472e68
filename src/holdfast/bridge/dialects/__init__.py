"""The HTTP dialects that the bridge implements, and the mapping from paths to them; pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec

from holdfast.bridge.dialects import (
    anthropic,
    google,
    openai_chat,
    openai_completions,
    openai_responses,
    openai_responses_stream,
    openai_wire,
)
from holdfast.bridge.dialects.fields import Fields, count, json_text
from holdfast.bridge.dialects.streaming import AnswerStream
from holdfast.bridge.limits import BYTES_A_TOKEN, RequestedTokens, estimate_tokens
from holdfast.bridge.types import DialectName, JsonObject, ModelReply, ModelRequest, TokenUsage
from holdfast.errors import InvalidParams
from holdfast.wire.http_messages import HttpRequest

__all__ = [
    "DIALECTS",
    "AnswerStream",
    "ProviderDialect",
    "Route",
    "canonical_request",
    "dialect_of",
    "model_and_stream",
    "render_model",
    "render_models",
    "requested_tokens",
    "route_of",
    "unsupported_by_function",
]

#: Owner of the bridge's models in model lists that name one.
_OWNER = "holdfast"

Operation = Literal["generate", "count_tokens", "embeddings", "models", "model"]


class ProviderDialect(msgspec.Struct, frozen=True):
    """One dialect as pure functions."""

    name: DialectName
    #: Parse a request. InvalidParams names the wrong field; nothing else is raised.
    parse: Callable[[HttpRequest], ModelRequest]
    #: Render the body of a whole reply.
    render: Callable[[ModelReply, ModelRequest], bytes]
    #: Start a streamed reply.
    stream: Callable[[ModelRequest], AnswerStream]
    #: Render the body of an error: status, kind (empty: by the status), message.
    error: Callable[[int, str, str], bytes]
    #: Token counts of a reply's JSON, or of one event of a stream; None where it has none.
    usage_in: Callable[[JsonObject], TokenUsage | None]
    #: Render the response to a request to count tokens.
    render_count: Callable[[int], bytes]
    #: Parse a provider's whole reply, for records. InvalidParams if it is not one.
    read: Callable[[JsonObject], ModelReply]


class Route(msgspec.Struct, frozen=True):
    """Operation of a path. `model` comes from Google's paths, and from paths about one model."""

    dialect: DialectName
    operation: Operation
    model: str = ""


DIALECTS: Final[Mapping[DialectName, ProviderDialect]] = {
    "openai_chat": ProviderDialect(
        "openai_chat",
        openai_chat.parse,
        openai_chat.render,
        openai_chat.stream,
        openai_wire.error,
        openai_wire.usage_in,
        openai_wire.render_count,
        openai_chat.read,
    ),
    "openai_responses": ProviderDialect(
        "openai_responses",
        openai_responses.parse,
        openai_responses.render,
        openai_responses_stream.stream,
        openai_wire.error,
        openai_responses.usage_in,
        openai_wire.render_count,
        openai_responses.read,
    ),
    "openai_completions": ProviderDialect(
        "openai_completions",
        openai_completions.parse,
        openai_completions.render,
        openai_completions.stream,
        openai_wire.error,
        openai_wire.usage_in,
        openai_wire.render_count,
        openai_completions.read,
    ),
    "anthropic": ProviderDialect(
        "anthropic",
        anthropic.parse,
        anthropic.render,
        anthropic.stream,
        anthropic.error,
        anthropic.usage_in,
        anthropic.render_count,
        anthropic.read,
    ),
    "google": ProviderDialect(
        "google",
        google.parse,
        google.render,
        google.stream,
        google.error,
        google.usage_in,
        google.render_count,
        google.read,
    ),
}

_POSTS: Final[Mapping[str, Route]] = {
    "/v1/chat/completions": Route("openai_chat", "generate"),
    "/v1/responses": Route("openai_responses", "generate"),
    "/v1/responses/input_tokens": Route("openai_responses", "count_tokens"),
    "/v1/completions": Route("openai_completions", "generate"),
    "/v1/embeddings": Route("openai_chat", "embeddings"),
    "/v1/messages": Route("anthropic", "generate"),
    "/v1/messages/count_tokens": Route("anthropic", "count_tokens"),
}
_GOOGLE_ACTIONS: Final[Mapping[str, Operation]] = {
    "generateContent": "generate",
    "streamGenerateContent": "generate",
    "countTokens": "count_tokens",
}
#: Names of the fields for the maximum output, and for the number of replies.
_MAXIMA: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens", "maxOutputTokens")
_TIMES: Final = ("n", "best_of", "candidateCount", "candidate_count")
_MODELS: Final = re.compile(r"/(v1[a-z0-9]*)/models(?:/(.+))?")


def route_of(request: HttpRequest) -> Route | None:
    """Return the route of a request; None if no dialect has this path."""
    path = request.path.rstrip("/")
    if request.method == "POST":
        found = google.path_of(path)
        if found is None:
            return _POSTS.get(path)
        operation = _GOOGLE_ACTIONS.get(found[1])
        return None if operation is None else Route("google", operation, found[0])
    listing = _MODELS.fullmatch(path) if request.method == "GET" else None
    if listing is None:
        return None
    return Route(dialect_of(request).name, "model" if listing[2] else "models", listing[2] or "")


def dialect_of(request: HttpRequest) -> ProviderDialect:
    """Return the dialect for errors of any path; OpenAI's by default."""
    if (
        request.path.startswith(("/v1/messages", "/v1/complete/"))
        or request.header("anthropic-version") is not None
    ):
        return DIALECTS["anthropic"]
    if request.header("x-goog-api-key") is not None or request.header("x-goog-api-client") is not None:
        return DIALECTS["google"]
    if request.path.startswith(("/v1beta", "/v1alpha")) or google.path_of(request.path) is not None:
        return DIALECTS["google"]
    known = _POSTS.get(request.path.rstrip("/"))
    return DIALECTS["openai_chat" if known is None else known.dialect]


def model_and_stream(body: Fields, request: HttpRequest, route: Route) -> tuple[str, bool]:
    """Return the model's name and whether the reply streams, without parsing the rest of the request."""
    if route.model:
        found = google.path_of(request.path)
        return route.model, found is not None and found[1] == "streamGenerateContent"
    if route.operation == "models":
        return "", False
    model = body.text("model")
    if not model.strip():
        body.refuse("model", "is empty")
    return model, body.flag("stream")


def canonical_request(request: HttpRequest, body: Fields) -> HttpRequest:
    """Return the request re-encoded from the parsed body, so that the provider reads what was checked."""
    return msgspec.structs.replace(
        request, path=google.canonical(request.path), body=json_text(body.value).encode()
    )


def requested_tokens(request: HttpRequest, body: Fields, route: Route) -> RequestedTokens:
    """Return the tokens that a request may use, before its reply is known."""
    size = -(-len(request.body) // BYTES_A_TOKEN)
    if route.operation == "embeddings":
        return RequestedTokens(size, 0)
    try:
        estimate = estimate_tokens(DIALECTS[route.dialect].parse(request))
    except InvalidParams:
        # The provider may accept more than this parser; the size is an estimate as well.
        estimate = size
    config = body.value.get("generationConfig", body.value.get("generation_config"))
    objects = [body.value, *([config] if isinstance(config, dict) else [])]
    most = [count(each, name) for each in objects for name in _MAXIMA]
    times = max(1, *(count(each, name) for each in objects for name in _TIMES))
    prompts = body.value.get("prompt")
    if route.dialect == "openai_completions" and isinstance(prompts, list):
        times *= max(1, sum(isinstance(each, str | list) for each in prompts))
    return RequestedTokens(estimate, max(most) * times if any(most) else None)


def unsupported_by_function(request: ModelRequest) -> str | None:
    """Return why a function cannot answer this request; None if it can.

    A function gets one request and gives one reply. A request that needs state at the provider, or several replies,
    is refused instead of answered in part.
    """
    if request.params.n > 1:
        return f"{request.params.n} replies are requested; this model gives one"
    if request.dialect == "openai_completions" and len(request.messages) > 1:
        return f"prompt: {len(request.messages)} prompts are given; this model takes one"
    for name in ("previous_response_id", "conversation", "cachedContent", "cached_content"):
        if request.raw.get(name) is not None:
            return f"{name}: this model keeps no state between requests; send the whole input"
    if request.dialect == "openai_responses":
        if request.raw.get("background") is True:
            return "background: this model answers only within the request"
        if isinstance(request.raw.get("prompt"), dict):
            return "prompt: this model has no stored prompts; send the input"
    return None


def render_models(names: Sequence[str], dialect: DialectName, created: int = 0) -> bytes:
    """Return all models as one page."""
    models = [_model(name, dialect, created) for name in names]
    if dialect == "google":
        return msgspec.json.encode({"models": models})
    if dialect == "anthropic":
        ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return msgspec.json.encode({"data": models, "has_more": False, **ends})
    return msgspec.json.encode({"object": "list", "data": models})


def render_model(name: str, dialect: DialectName, created: int = 0) -> bytes:
    return msgspec.json.encode(_model(name, dialect, created))


def _model(name: str, dialect: DialectName, created: int) -> dict[str, Any]:
    if dialect == "google":
        actions = ["generateContent", "streamGenerateContent", "countTokens"]
        full = name if name.startswith("models/") else f"models/{name}"
        return {"name": full, "displayName": name, "version": "1", "supportedGenerationMethods": actions}
    if dialect == "anthropic":
        when = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"type": "model", "id": name, "display_name": name, "created_at": when, "lifecycle": "active"}
    return {"id": name, "object": "model", "created": created, "owned_by": _OWNER}
