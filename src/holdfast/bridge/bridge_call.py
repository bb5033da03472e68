"""State of one bridge call: request, answer so far, and the record made from them.

Pure except for the clock, which is passed in.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.bridge.dialects import DIALECTS, dialect_of, route_of
from holdfast.bridge.forwarding import ForwardedAnswer
from holdfast.bridge.function_model import JSON_HEADERS, FunctionAnswer, ModelError, failure_of
from holdfast.bridge.limits import BridgeLimits, Refusal, Reservation
from holdfast.bridge.record import CallRecord, Excerpt
from holdfast.bridge.redaction import Redaction
from holdfast.bridge.types import TokenUsage
from holdfast.bridge.upstream import ProviderFailed
from holdfast.errors import ConnectionLost, HoldfastError, InvalidParams
from holdfast.wire.http_messages import HttpHead, HttpRequest


def refused(refusal: Refusal) -> ModelError:
    """Return a refusal as the error that is sent to the caller."""
    error = ModelError(refusal.message, refusal.status, "budget_exhausted" if refusal.final else "")
    if refusal.status == 429:
        # The providers' clients obey both headers.
        error.headers = (("x-should-retry", "false"),) if refusal.final else (("retry-after", "1"),)
    return error


class BridgeCall:
    """State of one call."""

    def __init__(self, request: HttpRequest, clock: Callable[[], float]) -> None:
        self.request = request
        self.route = route_of(request)
        self.dialect = dialect_of(request) if self.route is None else DIALECTS[self.route.dialect]
        self.model = ""
        #: Name by which the price is found.
        self.paid_model = ""
        self.stream = False
        self.answering: ForwardedAnswer | FunctionAnswer | None = None
        #: True once the call was admitted.
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
        self._latency = 0.0
        self._reply = Excerpt()

    def note(self, piece: HttpHead | bytes) -> None:
        """Note a piece that is being sent to the caller."""
        if isinstance(piece, HttpHead):
            self.status = piece.status
            return
        if self._first_token is None:
            self._first_token = self._clock() - self._started
        self._reply.add(piece)

    def end(self) -> None:
        """Note the end of the call."""
        self._latency = self._clock() - self._started

    def failure(self, error: Exception) -> tuple[HttpHead, bytes]:
        """Return the error as a response in the caller's dialect; raise it if the response has already begun."""
        status, kind, message = self._describe(error)
        if self.status:
            # An error cannot be inserted into a provider's response; the caller sees a truncated one.
            raise ConnectionLost(message) from None
        headers = error.headers if isinstance(error, ModelError) else ()
        return HttpHead(status, (*JSON_HEADERS, *headers)), self.dialect.error(status, kind, message)

    def _describe(self, error: Exception) -> tuple[int, str, str]:
        if isinstance(error, ProviderFailed):
            self.error = error.detail
            return error.status, "", error.message
        if isinstance(error, ModelError):
            self.error = error.message
            return error.status, error.kind, error.message
        if isinstance(error, InvalidParams) and self.answering is None:
            # Raised while the request was parsed; the message names the field.
            self.error = error.message
            return 400, "", error.message
        self.error = error.message if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
        return failure_of(error)

    def usage(self) -> tuple[TokenUsage | None, bool]:
        """Return the tokens, and whether they are an estimate because the answer was cut or has no counts."""
        if self.answering is None or self.status >= 400:
            return None, False
        usage = self.answering.usage
        if usage is not None and usage.total:
            return usage, False
        # Without an estimate, an agent could evade its budget by closing every stream before its end.
        return self.answering.estimate(), True

    def record(self, number: int, at: float, limits: BridgeLimits, redaction: Redaction) -> CallRecord:
        """Return the record of a call that ended `at` this time."""
        usage, estimated = self.usage()
        price = limits.price_of(self.paid_model)
        error = self.error
        if isinstance(self.answering, FunctionAnswer) and self.answering.error:
            error = self.answering.error
        return CallRecord(
            number=number,
            started_at=at - self._latency,
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
            latency=self._latency,
            cancelled=not self.complete and not error,
            error=redaction.for_record(error.encode(errors="replace")),
        )
