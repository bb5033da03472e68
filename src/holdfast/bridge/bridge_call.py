"""One call of a bridge on its way: what was asked and answered so far, and the record that is made of it.

Pure but for the clock, which is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from holdfast.bridge.dialects import DIALECTS, dialect_of, route_of
from holdfast.bridge.forwarding import ForwardedAnswer
from holdfast.bridge.function_model import FunctionAnswer, ModelError, failure_of
from holdfast.bridge.limits import BridgeLimits, Refusal, Reservation
from holdfast.bridge.record import CallRecord, Excerpt
from holdfast.bridge.redaction import Redaction
from holdfast.bridge.types import TokenUsage
from holdfast.bridge.upstream import ProviderFailed
from holdfast.errors import ConnectionLost, HoldfastError, InvalidParams
from holdfast.wire.http_messages import HttpHead, HttpRequest

JSON: Final = (("content-type", "application/json"),)


def refused(refusal: Refusal) -> ModelError:
    """A refusal as the error that tells the caller."""
    error = ModelError(refusal.message, refusal.status, "budget_exhausted" if refusal.final else "")
    if refusal.status == 429:
        # The providers' clients obey both.
        error.headers = (("x-should-retry", "false"),) if refusal.final else (("retry-after", "1"),)
    return error


class BridgeCall:
    """The facts of one call."""

    def __init__(self, request: HttpRequest, clock: Callable[[], float]) -> None:
        self.request = request
        self.route = route_of(request)
        self.dialect = dialect_of(request) if self.route is None else DIALECTS[self.route.dialect]
        self.model = ""
        #: By which its price is found.
        self.paid_model = ""
        self.stream = False
        self.answering: ForwardedAnswer | FunctionAnswer | None = None
        #: Whether it was let in.
        self.counted = False
        self.reservation: Reservation | None = None
        self.status = 0
        self.complete = False
        self.error = ""
        self._clock = clock
        self._started = clock()
        self._first_token: float | None = None
        self._request = Excerpt()
        self._request.add(request.body)
        self._reply = Excerpt()

    def saw(self, piece: HttpHead | bytes) -> None:
        """A piece is on its way to the caller."""
        if isinstance(piece, HttpHead):
            self.status = piece.status
            return
        if self._first_token is None:
            self._first_token = self._clock() - self._started
        self._reply.add(piece)

    def failure(self, error: Exception) -> tuple[HttpHead, bytes]:
        """The error as the answer, in the caller's dialect. Once an answer has begun it is raised instead."""
        status, kind, message = self._told(error)
        if self.status:
            # Nothing can be said in the middle of somebody's answer; that it breaks off tells its caller.
            raise ConnectionLost(message) from None
        headers = error.headers if isinstance(error, ModelError) else ()
        return HttpHead(status, (*JSON, *headers)), self.dialect.error(status, kind, message)

    def _told(self, error: Exception) -> tuple[int, str, str]:
        if isinstance(error, ProviderFailed):
            self.error = error.detail
            return error.status, "", error.message
        if isinstance(error, ModelError):
            self.error = error.message
            return error.status, error.kind, error.message
        if isinstance(error, InvalidParams) and self.answering is None:
            # Of reading the request: it names the field that is wrong.
            self.error = error.message
            return 400, "", error.message
        self.error = error.message if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
        return failure_of(error)

    def usage(self) -> tuple[TokenUsage | None, bool]:
        """The tokens, and whether they are a guess: of an answer that did not tell them, or was left before."""
        if self.answering is None or self.status >= 400:
            return None, False
        told = self.answering.usage
        if told is not None and told.total:
            return told, False
        # A budget that counted nothing here could be evaded by leaving every answer before its end.
        return self.answering.estimate(), True

    def record(self, number: int, at: float, limits: BridgeLimits, redaction: Redaction) -> CallRecord:
        """What is written down of it, when it has ended."""
        usage, estimated = self.usage()
        price = limits.price_of(self.paid_model)
        error = self.error
        if isinstance(self.answering, FunctionAnswer) and self.answering.error:
            error = self.answering.error
        latency = self._clock() - self._started
        return CallRecord(
            number=number,
            started_at=at - latency,
            method=self.request.method,
            path=self.request.path,
            dialect="" if self.route is None else self.route.dialect,
            model=self.model,
            stream=self.stream,
            status=self.status,
            request=redaction.for_record(self._request.bytes()),
            reply=redaction.for_record(self._reply.bytes()),
            request_bytes=self._request.length,
            reply_bytes=self._reply.length,
            usage=usage,
            usage_estimated=estimated,
            money=0.0 if usage is None or price is None else price.of(usage),
            first_token=self._first_token,
            latency=latency,
            cancelled=not self.complete and not error,
            error=redaction.for_record(error.encode(errors="replace")),
        )
