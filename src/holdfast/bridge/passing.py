"""One request passed on to a provider, and its answer passed back piece by piece, counted on its way.

The request is changed only where the bridge was told to: another model's name, and a count of tokens where a budget
needs one. Touches only the provider.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final
from urllib.parse import quote

import msgspec

from holdfast.bridge.dialects import Dialect
from holdfast.bridge.normal import Usage
from holdfast.bridge.token_estimate import BYTES_A_TOKEN
from holdfast.bridge.upstream import ProviderFailed, UpstreamSession
from holdfast.bridge.usage_event import LeftOutUsage
from holdfast.bridge.usage_meter import UsageMeter
from holdfast.errors import InvalidParams
from holdfast.wire.http_messages import HttpHead, HttpRequest

#: Dialects whose streams tell their usage only if they are asked to.
_ASKED_FOR_USAGE: Final = ("openai_chat", "openai_completions")


class PassedAnswer:
    """One call of a provider. What it took is known when `pieces` has ended, and where it was left."""

    def __init__(
        self, session: UpstreamSession, request: HttpRequest, dialect: Dialect, *, needs_usage: bool
    ) -> None:
        self._session = session
        self._dialect = dialect
        asks = needs_usage and dialect.name in _ASKED_FOR_USAGE and _leaves_usage_out(request)
        self._left_out = LeftOutUsage() if asks else None
        self._request = rewritten(request, model=session.upstream.model, asks_for_usage=asks)
        self._meter: UsageMeter | None = None

    @property
    def usage(self) -> Usage | None:
        return None if self._meter is None else self._meter.usage()

    def estimate(self) -> Usage:
        """Where the answer did not tell. In a stream an event holds about a token."""
        asked = len(self._request.body) // BYTES_A_TOKEN
        if self._meter is None:
            return Usage(asked)
        return Usage(asked, self._meter.events or self._meter.bytes // BYTES_A_TOKEN)

    async def pieces(self) -> AsyncGenerator[HttpHead | bytes, None]:
        """The head, when the body begins, and the body as it comes."""
        async with self._session.ask(self._request, self._dialect.name) as answer:
            if answer.status == 401:
                # Whatever the provider says of the key is not for the sandbox: some show a part of it.
                said = (await answer.whole()).decode(errors="replace")
                raise ProviderFailed(401, "the provider refused the bridge's key: its host has to look", said)
            if answer.status >= 400:
                yield HttpHead(answer.status, answer.headers)
                yield await answer.whole()
                return
            self._meter = UsageMeter(self._dialect.usage_in, is_stream=answer.is_stream)
            head: HttpHead | None = HttpHead(answer.status, answer.headers)
            async with aclosing(answer.pieces()) as pieces:
                async for piece in pieces:
                    self._meter.feed(piece)
                    passed = piece if self._left_out is None else self._left_out.feed(piece)
                    if passed:
                        if head is not None:
                            yield head
                            head = None
                        yield passed
            if head is not None:
                yield head
            if self._left_out is not None and (rest := self._left_out.end()):
                yield rest


def rewritten(request: HttpRequest, *, model: str | None, asks_for_usage: bool = False) -> HttpRequest:
    """The request with another model's name in it, in the body or in the path, and asking for its usage."""
    if model is None and not asks_for_usage:
        return request
    before, models, after = request.path.partition("/models/")
    if model is not None and models:
        path = f"{before}/models/{quote(model, safe='')}" + (":" + after.partition(":")[2] if ":" in after else "")
        return msgspec.structs.replace(request, path=path)
    if not request.body:
        return request
    body = _object(request)
    if model is not None and "model" in body:
        body["model"] = model
    if asks_for_usage:
        body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    return msgspec.structs.replace(request, body=msgspec.json.encode(body))


def _leaves_usage_out(request: HttpRequest) -> bool:
    body = _object(request)
    options = body.get("stream_options")
    return body.get("stream") is True and not (isinstance(options, dict) and options.get("include_usage") is True)


def _object(request: HttpRequest) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(request.body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidParams(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidParams("the body is not a JSON object")
    return body
