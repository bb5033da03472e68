"""A scripted model behind the pure functions of the dialects, reached by real clients without a socket.

Requests are routed and parsed, the script's answers are rendered, whole or in pieces, as the bridge does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from holdfast.bridge.dialects import (
    DIALECTS,
    ProviderDialect,
    Route,
    dialect_of,
    embeddings,
    render_model,
    render_models,
    route_of,
)
from holdfast.bridge.dialects.streaming import ReplyBuilder, deltas_of
from holdfast.bridge.limits import estimate_tokens
from holdfast.bridge.types import Delta, ModelReply, ModelRequest, Usage
from holdfast.errors import InvalidParams
from holdfast.wire.http_messages import HttpRequest


class Failure:
    """An answer that is an error; after some deltas, one in the middle of a stream."""

    def __init__(self, status: int, message: str, after: Iterable[Delta] = ()) -> None:
        self.status = status
        self.message = message
        self.after = tuple(after)


Script = ModelReply | list[Delta] | Failure


class ScriptedModel:
    """Answers each request with `says`, and records the requests."""

    def __init__(self, says: Script) -> None:
        self.says = says
        self.requested: list[ModelRequest] = []

    def transport(self, httpx: Any) -> Any:
        def answer(request: Any) -> Any:
            status, content_type, content = self.answer(
                HttpRequest(
                    request.method,
                    request.url.raw_path.decode().partition("?")[0],
                    request.url.query.decode(),
                    tuple((name.lower(), value) for name, value in request.headers.items()),
                    request.read(),
                )
            )
            return httpx.Response(status, headers={"content-type": content_type}, content=content)

        return httpx.MockTransport(answer)

    def answer(self, request: HttpRequest) -> tuple[int, str, bytes | Iterator[bytes]]:
        route, dialect = route_of(request), dialect_of(request)
        if route is None:
            return 404, "application/json", dialect.error(404, "", f"{request.path}: no such route")
        if route.operation != "generate":
            return 200, "application/json", self._other(request, route)
        try:
            parsed = DIALECTS[route.dialect].parse(request)
        except InvalidParams as error:
            return 400, "application/json", dialect.error(400, "", error.message)
        self.requested.append(parsed)
        says = self.says
        if isinstance(says, Failure) and not (says.after and parsed.stream):
            return says.status, "application/json", dialect.error(says.status, "", says.message)
        if parsed.stream:
            return 200, DIALECTS[route.dialect].stream(parsed).content_type, streamed(dialect, parsed, says)
        return 200, "application/json", DIALECTS[route.dialect].render(gathered(says), parsed)

    def _other(self, request: HttpRequest, route: Route) -> bytes:
        if route.operation == "models":
            return render_models(["small", "large"], route.dialect, 1_700_000_000)
        if route.operation == "model":
            return render_model(route.model, route.dialect, 1_700_000_000)
        if route.operation == "embeddings":
            wanted = embeddings.parse(request)
            return embeddings.render([[0.5, -0.25, float(i)] for i in range(len(wanted.input))], wanted, Usage(7))
        dialect = DIALECTS[route.dialect]
        return dialect.render_count(estimate_tokens(dialect.parse(request)))


def gathered(says: Script) -> ModelReply:
    assert not isinstance(says, Failure)
    if isinstance(says, ModelReply):
        return says
    builder = ReplyBuilder()
    for delta in says:
        builder.feed(delta)
    return builder.reply()


def streamed(dialect: ProviderDialect, request: ModelRequest, says: Script) -> Iterator[bytes]:
    stream = DIALECTS[request.dialect].stream(request)
    yield from stream.begin()
    if isinstance(says, Failure):
        for delta in says.after:
            yield from stream.delta(delta)
        yield from stream.error(says.status, "", says.message)
        return
    for delta in deltas_of(says) if isinstance(says, ModelReply) else says:
        yield from stream.delta(delta)
    yield from stream.end()


def client_http() -> Any:
    """The HTTP library of the installed clients: httpx2 with the newer ones."""
    return pytest.importorskip(
        "httpx2", reason="the clients' HTTP library httpx2 is not installed: extra `clients`"
    )
