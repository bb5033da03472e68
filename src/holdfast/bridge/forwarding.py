"""Forwards one request to a provider and its response back piece by piece, counting tokens.

The request is changed only as configured: another model name, and a usage count where a budget needs one. Touches
only the provider.
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

#: Dialects whose streams include usage only on request.
_USAGE_ON_REQUEST: Final = ("openai_chat", "openai_completions")
#: Largest whole response that is parsed. The tokens of a larger one are estimated from its length.
BODY_BYTES: Final = 16 * 1024 * 1024
#: Separators of events; the split keeps them.
_EVENT_END: Final = re.compile(rb"(\r\n\r\n|\n\n|\r\r)")


class ForwardedAnswer:
    """One call of a provider. Usage is known once `pieces` has ended or was closed."""

    def __init__(
        self, provider: ProviderClient, request: HttpRequest, dialect: ProviderDialect, *, needs_usage: bool
    ) -> None:
        self._provider = provider
        self._dialect = dialect
        adds_usage = needs_usage and dialect.name in _USAGE_ON_REQUEST and _omits_usage(request)
        self._filter = UsageEventFilter() if adds_usage else None
        self._request = rewritten(request, model=provider.upstream.model, request_usage=adds_usage)
        self._meter: UsageMeter | None = None

    @property
    def usage(self) -> TokenUsage | None:
        return None if self._meter is None else self._meter.usage()

    def estimate(self) -> TokenUsage:
        """Estimate the usage of a response without counts. In a stream an event holds about one token."""
        request = len(self._request.body) // BYTES_A_TOKEN
        if self._meter is None:
            return TokenUsage(request)
        return TokenUsage(request, self._meter.events or self._meter.bytes // BYTES_A_TOKEN)

    async def pieces(self) -> AsyncGenerator[HttpHead | bytes, None]:
        """Yield the head when the body begins, then the body as it arrives."""
        async with aclosing(await self._provider.send(self._request, self._dialect.name)) as answer:
            if answer.status == 401:
                # The provider's message about the key stays on the host: some messages contain a part of the key.
                detail = (await answer.whole()).decode(errors="replace")
                raise ProviderFailed(
                    401,
                    "the provider rejected the bridge's key; the host's record of this call has the reason",
                    detail,
                )
            if answer.status >= 400:
                yield HttpHead(answer.status, answer.headers)
                yield await answer.whole()
                return
            self._meter = UsageMeter(self._dialect.usage_in, is_stream=answer.is_stream)
            head: HttpHead | None = HttpHead(answer.status, answer.headers)
            while piece := await answer.next_piece():
                self._meter.feed(piece)
                passed = piece if self._filter is None else self._filter.feed(piece)
                if passed:
                    if head is not None:
                        yield head
                        head = None
                    yield passed
            if head is not None:
                yield head
            if self._filter is not None and (rest := self._filter.end()):
                yield rest


def rewritten(request: HttpRequest, *, model: str | None, request_usage: bool = False) -> HttpRequest:
    """Return the request with another model name, in the body or in the path, and with usage requested."""
    if model is None and not request_usage:
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
    if request_usage:
        body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    return msgspec.structs.replace(request, body=msgspec.json.encode(body))


def _omits_usage(request: HttpRequest) -> bool:
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
    """Counts tokens from the pieces of one response. `usage_in` belongs to the dialect."""

    def __init__(self, usage_in: Callable[[JsonObject], TokenUsage | None], *, is_stream: bool) -> None:
        self._usage_in = usage_in
        self._reader = SseReader() if is_stream else None
        self._body = bytearray()
        self._usage: TokenUsage | None = None
        self.bytes = 0
        #: Events of a stream: about one for each token.
        self.events = 0

    def feed(self, piece: bytes) -> None:
        self.bytes += len(piece)
        if self._reader is None:
            if self.bytes <= BODY_BYTES:
                self._body += piece
            else:
                self._body.clear()
            return
        if self._reader.is_between_events:
            # The common case: whole events without usage, which need no parsing.
            whole = _length_without_usage(piece)
            self.events += piece.count(b"\n\n", 0, whole)
            piece = piece[whole:]
        for event in self._reader.feed(piece):
            self.events += 1
            # Every dialect's field name begins like this. Most events have none and are not decoded.
            if b'"usage' in event.data:
                self._parse(event.data)

    def usage(self) -> TokenUsage | None:
        """Return the usage so far; None if the response has no counts."""
        if self._body:
            self._parse(bytes(self._body))
            self._body.clear()
        return self._usage

    def _parse(self, data: bytes) -> None:
        try:
            value: Any = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return  # forwarded as it is, without counts
        # Google's older stream is one array of responses.
        for each in value if isinstance(value, list) else [value]:
            found = self._usage_in(each) if isinstance(each, dict) else None
            if found is not None:
                self._usage = found if self._usage is None else self._usage.merged(found)


def _length_without_usage(piece: bytes) -> int:
    """Return the length of the beginning of `piece` that is certainly a run of whole events without usage."""
    if not piece.startswith((b"data:", b"event:")) or b"\r" in piece:
        return 0
    usage = piece.find(b'"usage')
    end = piece.rfind(b"\n\n", 0, len(piece) if usage < 0 else usage)
    return 0 if end < 0 else end + 2


class UsageEventFilter:
    """Removes the usage-only event from a stream of chat completions that did not request it.

    The bridge requested the event for its budget; a client that did not would read the first of no choices, and
    fail.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        parts = _EVENT_END.split(self._rest + piece)
        self._rest = parts.pop()
        pairs = zip(parts[::2], parts[1::2], strict=True)
        passed = b"".join(event + end for event, end in pairs if not _is_usage_alone(event))
        if len(self._rest) > EVENT_BYTES:
            # Too large to be a usage event.
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
