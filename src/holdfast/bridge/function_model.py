"""A function of the host's program as a model: takes provider-neutral requests, answers in the caller's dialect.

Converts between whole replies and deltas as the caller requested. Does no IO itself.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Final, Protocol

from holdfast.bridge.dialects.streaming import AnswerStream, ReplyBuilder, deltas_of
from holdfast.bridge.limits import BYTES_A_TOKEN, estimate_tokens
from holdfast.bridge.types import Delta, ModelReply, ModelRequest, TextDelta, TextPart, TokenUsage
from holdfast.errors import HoldfastError, InvalidParams
from holdfast.wire.http_messages import Headers, HttpHead

log = logging.getLogger(__name__)

JSON_HEADERS: Final[Headers] = (("content-type", "application/json"),)
Deltas = AsyncIterable[Delta | str]
#: A plain string is a valid reply, and a valid delta.
ModelFunction = Callable[[ModelRequest], Awaitable[ModelReply | str | Deltas] | Deltas]


class ModelError(HoldfastError):
    """Raise it in a model function: the caller receives this status and message, in its dialect."""

    fault = "caller"

    def __init__(self, message: str, /, status: int = 500, kind: str = "") -> None:
        super().__init__(message)
        if not 400 <= status <= 599:
            raise InvalidParams(f"status {status}: an error's is 400 to 599")
        self.status = status
        self.kind = kind
        self.headers: Headers = ()


class AnswerDialect(Protocol):
    """The two methods of a dialect that render a reply."""

    def render(self, reply: ModelReply, request: ModelRequest) -> bytes: ...

    def stream(self, request: ModelRequest) -> AnswerStream: ...


class FunctionAnswer:
    """One call of a function. `usage` and `error` are known once `pieces` has ended."""

    def __init__(self, function: ModelFunction, request: ModelRequest, dialect: AnswerDialect) -> None:
        self._function = function
        self._request = request
        self._dialect = dialect
        self.usage: TokenUsage | None = None
        self._characters = 0
        #: Error after the response had begun.
        self.error = ""

    def estimate(self) -> TokenUsage:
        """Estimate the usage where the function returned none."""
        return TokenUsage(estimate_tokens(self._request), self._characters // BYTES_A_TOKEN)

    async def pieces(self) -> AsyncGenerator[HttpHead | bytes, None]:
        """Yield the head once the function has produced something, then the body as it is produced."""
        result = self._function(self._request)
        answer = await result if inspect.isawaitable(result) else result
        if isinstance(answer, str):
            answer = ModelReply((TextPart(answer),))
        if isinstance(answer, ModelReply):
            self.usage = answer.usage
            self._characters = sum(map(_length, answer.content))
            if not self._request.stream:
                yield HttpHead(200, JSON_HEADERS)
                yield self._dialect.render(answer, self._request)
                return
            deltas = _whole(answer)
        elif isinstance(answer, AsyncIterable):
            deltas = self._counted(answer)
        else:
            raise ModelError(
                f"the model returned a {type(answer).__name__}: neither a ModelReply, a str nor deltas"
            )
        pieces = self._streamed(deltas) if self._request.stream else self._gathered(deltas)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()
            await deltas.aclose()

    async def _counted(self, given: Deltas) -> AsyncGenerator[Delta, None]:
        try:
            async for each in given:
                delta = TextDelta(each) if isinstance(each, str) else each
                self._characters += _length(delta)
                yield delta
        finally:
            close = getattr(given, "aclose", None)
            if close is not None:
                await close()

    async def _gathered(self, deltas: AsyncIterator[Delta]) -> AsyncGenerator[HttpHead | bytes, None]:
        builder = ReplyBuilder(f"call_{self._request.id}")
        async for delta in deltas:
            builder.feed(delta)
        reply = builder.reply()
        self.usage = reply.usage
        yield HttpHead(200, JSON_HEADERS)
        yield self._dialect.render(reply, self._request)

    async def _streamed(self, deltas: AsyncIterator[Delta]) -> AsyncGenerator[HttpHead | bytes, None]:
        stream = self._dialect.stream(self._request)
        # Before the first delta an error still gets a status of its own.
        pending = stream.begin()
        delta = await anext(deltas, None)
        yield HttpHead(200, (("content-type", stream.content_type), ("cache-control", "no-cache")))
        try:
            while delta is not None:
                pending += stream.delta(delta)
                if pending:
                    yield b"".join(pending)
                pending = []
                delta = await anext(deltas, None)
            pending += stream.end()
        except Exception as error:  # noqa: BLE001 - the function is not ours; its answer ends with an error
            status, kind, message = failure_of(error)
            self.error = f"{type(error).__name__}: {error}"
            pending += stream.error(status, kind, message)
        finally:
            self.usage = stream.reply().usage
        yield b"".join(pending)


def failure_of(error: Exception) -> tuple[int, str, str]:
    """Return status, kind and message for the caller. Details of an exception stay in the host's log."""
    if isinstance(error, ModelError):
        return error.status, error.kind, error.message
    log.error("the model function failed", exc_info=error)
    return 500, "", f"the model failed: {type(error).__name__}"


async def _whole(reply: ModelReply) -> AsyncGenerator[Delta, None]:
    for delta in deltas_of(reply):
        yield delta


def _length(part: object) -> int:
    """Length of the text or arguments of a part or delta."""
    return len(getattr(part, "text", "")) + len(getattr(part, "arguments", ""))
