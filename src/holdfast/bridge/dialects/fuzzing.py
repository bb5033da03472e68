"""A target for fuzzers: any bytes at all, as the body of a request in every dialect; pure."""

from __future__ import annotations

from typing import Final

from holdfast.bridge.dialects import DIALECTS, asked_of, embeddings, route_of
from holdfast.bridge.normal import ModelReply
from holdfast.errors import InvalidParams
from holdfast.wire.http_messages import HttpRequest

PATHS: Final = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1beta/models/m:generateContent",
    "/v1beta/models/m:streamGenerateContent",
    "/v1beta/models/m:countTokens",
)


def fuzz_requests(data: bytes) -> int:
    """How many paths could read `data`. A request is read or InvalidParams: whatever else is raised is a bug."""
    return sum(_read(HttpRequest("POST", path, "", (), data)) for path in PATHS)


def _read(request: HttpRequest) -> bool:
    route = route_of(request)
    if route is None:
        raise AssertionError(f"no route for {request.path}")
    dialect = DIALECTS[route.dialect]
    try:
        asked_of(request, route)
        if route.operation == "embeddings":
            embeddings.parse(request)
            return True
        parsed = dialect.parse(request)
    except InvalidParams:
        return False
    # What could be read can be answered, with the settings that the answer repeats.
    dialect.render(ModelReply(), parsed)
    stream = dialect.stream(parsed)
    stream.begin()
    stream.end()
    return True
