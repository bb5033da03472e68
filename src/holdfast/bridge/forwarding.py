"""One request passed on to a provider, and its answer passed back piece by piece, counted on its way.

The request is changed only where the bridge was told to: another model's name, and a count of tokens where a budget
needs one. Touches only the provider.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final
from urllib.parse import quote

import msgspec

from holdfast.bridge.dialects import ProviderDialect
from holdfast.bridge.limits import BYTES_A_TOKEN
from holdfast.bridge.sse import EVENT_BYTES, SseReader
from holdfast.bridge.types import JsonObject, TokenUsage
from holdfast.bridge.upstream import ProviderClient, ProviderFailed
from holdfast.errors import InvalidParams
from holdfast.wire.http_messages import HttpHead, HttpRequest

#: Dialects whose streams tell their usage only if they are asked to.
_ASKED_FOR_USAGE: Final = ("openai_chat", "openai_completions")
#: The largest whole answer that is looked into. A larger one passes uncounted, and is estimated by its length.
BODY_BYTES: Final = 16 * 1024 * 1024
#: What ends an event; kept by the split.
_EVENT_END: Final = re.compile(rb"(\r\n\r\n|\n\n|\r\r)")


class ForwardedAnswer:
    """One call of a provider. What it took is known when `pieces` has ended, and where it was left."""

    def __init__(
        self, session: ProviderClient, request: HttpRequest, dialect: ProviderDialect, *, needs_usage: bool
    ) -> None:
        self._session = session
        self._dialect = dialect
        asks = needs_usage and dialect.name in _ASKED_FOR_USAGE and _leaves_usage_out(request)
        self._left_out = UsageEventFilter() if asks else None
        self._request = rewritten(request, model=session.upstream.model, asks_for_usage=asks)
        self._meter: UsageMeter | None = None

    @property
    def usage(self) -> TokenUsage | None:
        return None if self._meter is None else self._meter.usage()

    def estimate(self) -> TokenUsage:
        """Where the answer did not tell. In a stream an event holds about a token."""
        asked = len(self._request.body) // BYTES_A_TOKEN
        if self._meter is None:
            return TokenUsage(asked)
        return TokenUsage(asked, self._meter.events or self._meter.bytes // BYTES_A_TOKEN)

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


class UsageMeter:
    """What the pieces of one answer tell. `usage_in` is the dialect's."""

    def __init__(self, usage_in: Callable[[JsonObject], TokenUsage | None], *, is_stream: bool) -> None:
        self._usage_in = usage_in
        self._reader = SseReader() if is_stream else None
        self._body = bytearray()
        self._told: TokenUsage | None = None
        self.bytes = 0
        #: Of a stream: about as many as it has tokens.
        self.events = 0

    def feed(self, piece: bytes) -> None:
        self.bytes += len(piece)
        if self._reader is None:
            if self.bytes <= BODY_BYTES:
                self._body += piece
            else:
                self._body.clear()
            return
        if self._reader.is_between_events and _has_whole_events_alone(piece):
            # Nearly every piece of nearly every stream: nothing in it is worth taking apart.
            self.events += piece.count(b"\n\n")
            return
        for event in self._reader.feed(piece):
            self.events += 1
            # Every dialect's word for it begins so. Most events have none, and are not decoded.
            if b'"usage' in event.data:
                self._look(event.data)

    def usage(self) -> TokenUsage | None:
        """At the end, or where its caller left; None if nothing was told."""
        if self._body:
            self._look(bytes(self._body))
            self._body.clear()
        return self._told

    def _look(self, data: bytes) -> None:
        try:
            value: Any = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return  # it is passed on, whatever it is; it merely has no counts
        # Google's older stream is one array of answers.
        for each in value if isinstance(value, list) else [value]:
            found = self._usage_in(each) if isinstance(each, dict) else None
            if found is not None:
                self._told = found if self._told is None else self._told.merged(found)


def _has_whole_events_alone(piece: bytes) -> bool:
    """Whether it surely begins and ends with an event, and tells no usage."""
    begins = piece.startswith((b"data:", b"event:"))
    return begins and piece.endswith(b"\n\n") and b'"usage' not in piece and b"\r" not in piece


class UsageEventFilter:
    """A stream of chat completions without the event of the usage alone: the bridge asked for it, not the caller.

    A client that did not ask takes the first of no choices, and fails.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        parts = _EVENT_END.split(self._rest + piece)
        self._rest = parts.pop()
        pairs = zip(parts[::2], parts[1::2], strict=True)
        passed = b"".join(event + end for event, end in pairs if not _is_usage_alone(event))
        if len(self._rest) > EVENT_BYTES:
            # Not an event of ours, whatever it is.
            passed, self._rest = passed + self._rest, b""
        return passed

    def end(self) -> bytes:
        return b"" if _is_usage_alone(self._rest) else self._rest


def _is_usage_alone(event: bytes) -> bool:
    if b'"choices"' not in event or b'"usage"' not in event:
        return False
    try:
        body: Any = msgspec.json.decode(event.partition(b"data:")[2].strip())
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(body, dict) and body.get("choices") == [] and bool(body.get("usage"))
