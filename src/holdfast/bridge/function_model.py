"""A function of the host's program as a model: asked in words of no provider, answering in the caller's dialect.

Whole or in deltas, whichever the function gives and whichever the caller wants. Touches nothing itself.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Protocol

from holdfast.bridge.dialects.streaming import AnswerStream, ReplyBuilder, deltas_of
from holdfast.bridge.limits import BYTES_A_TOKEN, estimate_tokens
from holdfast.bridge.types import Delta, ModelReply, ModelRequest, TextDelta, TextPart, TokenUsage
from holdfast.errors import HoldfastError, InvalidParams
from holdfast.wire.http_messages import Headers, HttpHead

log = logging.getLogger(__name__)

Deltas = AsyncIterable[Delta | str]
#: Words alone are an answer, too, and so are words among the deltas.
ModelFunction = Callable[[ModelRequest], Awaitable[ModelReply | str | Deltas] | Deltas]


class ModelError(HoldfastError):
    """Raise it in a function that is a model: the caller gets this status and message, in its dialect."""

    fault = "caller"

    def __init__(self, message: str, /, status: int = 500, kind: str = "") -> None:
        super().__init__(message)
        if not 400 <= status <= 599:
            raise InvalidParams(f"status {status}: an error's is 400 to 599")
        self.status = status
        self.kind = kind
        self.headers: Headers = ()


class AnswerDialect(Protocol):
    """How an answer is said."""

    def render(self, reply: ModelReply, request: ModelRequest) -> bytes: ...

    def stream(self, request: ModelRequest) -> AnswerStream: ...


class FunctionAnswer:
    """One call of a function. `usage` and `error` are known when `pieces` has ended."""

    def __init__(self, function: ModelFunction, request: ModelRequest, dialect: AnswerDialect) -> None:
        self._function = function
        self._request = request
        self._dialect = dialect
        self.usage: TokenUsage | None = None
        self._said = 0
        #: What went wrong after the answer had begun.
        self.error = ""

    def estimate(self) -> TokenUsage:
        """Where the function did not tell."""
        return TokenUsage(estimate_tokens(self._request), self._said // BYTES_A_TOKEN)

    async def pieces(self) -> AsyncGenerator[HttpHead | bytes, None]:
        """The head, once there is something to say, and then what there is, as it comes."""
        result = self._function(self._request)
        answer = await result if inspect.isawaitable(result) else result
        if isinstance(answer, str):
            answer = ModelReply((TextPart(answer),))
        if isinstance(answer, ModelReply):
            self.usage = answer.usage
            self._said = sum(map(_characters, answer.content))
            if not self._request.stream:
                yield HttpHead(200, (("content-type", "application/json"),))
                yield self._dialect.render(answer, self._request)
                return
            deltas = _whole(answer)
        elif isinstance(answer, AsyncIterable):
            deltas = self._counted(answer)
        else:
            raise ModelError(f"the model gave a {type(answer).__name__}: neither a ModelReply, words nor deltas")
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
                self._said += _characters(delta)
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
        yield HttpHead(200, (("content-type", "application/json"),))
        yield self._dialect.render(reply, self._request)

    async def _streamed(self, deltas: AsyncIterator[Delta]) -> AsyncGenerator[HttpHead | bytes, None]:
        stream = self._dialect.stream(self._request)
        # Before the first delta an error still has a status of its own.
        said = stream.begin()
        delta = await anext(deltas, None)
        yield HttpHead(200, (("content-type", stream.content_type), ("cache-control", "no-cache")))
        try:
            while delta is not None:
                said += stream.delta(delta)
                if said:
                    yield b"".join(said)
                said = []
                delta = await anext(deltas, None)
            said += stream.end()
        except Exception as error:  # noqa: BLE001 - the function is not ours; its answer ends with an error
            status, kind, message = failure_of(error)
            self.error = f"{type(error).__name__}: {error}"
            said += stream.error(status, kind, message)
        finally:
            self.usage = stream.reply().usage
        yield b"".join(said)


def failure_of(error: Exception) -> tuple[int, str, str]:
    """Status, kind and words for the caller. What broke inside the function is the host's business."""
    if isinstance(error, ModelError):
        return error.status, error.kind, error.message
    log.error("the model function failed", exc_info=error)
    return 500, "", f"the model failed: {type(error).__name__}"


async def _whole(reply: ModelReply) -> AsyncGenerator[Delta, None]:
    for delta in deltas_of(reply):
        yield delta


def _characters(part: object) -> int:
    """Of words, thoughts and arguments, whole or in deltas."""
    return len(getattr(part, "text", "")) + len(getattr(part, "arguments", ""))
