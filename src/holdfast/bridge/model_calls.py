"""The host calls `model` of a bridge: admits requests from the proxy, calls the selected model, records usage.

Decides route and dialect, admission, model, time limit and record of each call. Touches only the models.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import msgspec

from holdfast.bridge.bridge_call import BridgeCall, refused
from holdfast.bridge.dialects import (
    Route,
    canonical_request,
    embeddings,
    model_and_stream,
    render_model,
    render_models,
    requested_tokens,
    unsupported_by_function,
)
from holdfast.bridge.dialects.embeddings import EmbeddingsRequest
from holdfast.bridge.dialects.fields import Fields, checked_body
from holdfast.bridge.forwarding import ForwardedAnswer
from holdfast.bridge.function_model import JSON_HEADERS, FunctionAnswer, ModelError, ModelFunction
from holdfast.bridge.limits import (
    BridgeLimits,
    Refusal,
    Spent,
    estimate_tokens,
    refuse_model,
    refuse_request,
    refuse_unmetered,
    refuse_unmetered_route,
    refuse_unpriced,
    reserve,
)
from holdfast.bridge.model_choice import Model, ModelChoice
from holdfast.bridge.record import CallRecord, CallRecords
from holdfast.bridge.types import TokenUsage
from holdfast.bridge.upstream import ProviderClient
from holdfast.errors import InvalidParams, MethodNotFound
from holdfast.wire.http_messages import HTTP_METHOD, HttpHead, HttpRequest, pack_head, unpack_request

log = logging.getLogger(__name__)

Pieces = AsyncGenerator[HttpHead | bytes, None]


class ModelCalls:
    """The models of one bridge, its limits and its records."""

    def __init__(
        self,
        model: Model,
        limits: BridgeLimits | None = None,
        *,
        on_call: Callable[[CallRecord], None] | None = None,
    ) -> None:
        self._models = ModelChoice(model)
        self._redaction = self._models.redaction
        self._limits = limits or BridgeLimits()
        self._on_call = on_call
        self._calls = CallRecords()
        self._spent = Spent()
        #: Ended calls without a record, with the time of their end.
        self._unrecorded: deque[tuple[BridgeCall, float]] = deque()

    @property
    def calls(self) -> CallRecords:
        self._record_ended()
        return self._calls

    @property
    def spent(self) -> Spent:
        self._record_ended()
        return self._spent

    async def handle(self, method: str, body: bytes) -> AsyncIterator[bytes]:
        """Handle a host call. Failures become error responses in the caller's dialect."""
        if method != HTTP_METHOD:
            raise MethodNotFound(f"the bridge accepts calls of {HTTP_METHOD!r}, not of {method!r}")
        try:
            request = unpack_request(body)
        except msgspec.DecodeError as error:
            raise InvalidParams(f"the request cannot be read: {error}") from None
        return self._answer(request)

    async def aclose(self) -> None:
        self._record_ended()
        await self._models.aclose()

    async def _answer(self, request: HttpRequest) -> AsyncGenerator[bytes, None]:
        call = BridgeCall(request, time.monotonic)
        deadline = _Deadline(self._limits)
        try:
            try:
                self._admit(call)
                async with aclosing(self._source(call)) as source:
                    while (piece := await deadline.next(source)) is not None:
                        call.note(piece)
                        yield pack_head(piece) if isinstance(piece, HttpHead) else piece
            except Exception as error:  # noqa: BLE001 - a function of the host's program may raise anything
                head, body = call.failure(error)
                call.note(head)
                yield pack_head(head)
                call.note(body)
                yield body
            call.complete = True
        finally:
            deadline.cancel()
            self._ended(call)

    def _admit(self, call: BridgeCall) -> None:
        request = call.request
        refusal = refuse_request(self._limits, self.spent, request.path, len(request.body))
        if refusal is not None:
            raise refused(refusal)
        self._spent = self.spent.begun()
        call.counted = True

    def _source(self, call: BridgeCall) -> Pieces:
        """Return the response generator of the selected model; nothing has been sent yet."""
        request, route = call.request, call.route
        if request.header("sec-websocket-key") is not None:
            # Codex tries a WebSocket first, and falls back to HTTP at once only for this status.
            raise ModelError(f"{request.path}: the bridge has no WebSockets; use POST", 426)
        if route is None:
            provider = self._models.only_provider
            if provider is None or self._limits.routes is None:
                raise ModelError(f"{request.method} {request.path}: the bridge has no such route", 404)
            if (refusal := refuse_unmetered_route(self._limits, request.method, request.path)) is not None:
                raise refused(refusal)
            # The limits allow this path by name, so the request is forwarded unparsed.
            return self._forwarded(call, provider)
        body = Fields({})
        if request.method == "POST":
            body = checked_body(request)
            # The parsed body is encoded again, so that the provider reads exactly the fields that were checked.
            call.request = request = canonical_request(request, body)
        call.model, call.stream = model_and_stream(body, request, route)
        if route.operation != "models" and (refusal := refuse_model(self._limits, call.model)) is not None:
            raise refused(refusal)
        if route.operation in ("models", "model"):
            provider = self._models.only_provider
            return self._listed(route) if provider is None else self._forwarded(call, provider)
        chosen = self._models.choose(call.model)
        call.paid_model = call.model
        if isinstance(chosen, ProviderClient):
            call.paid_model = chosen.upstream.model or call.model
            if (refusal := refuse_unmetered(self._limits, body.value)) is not None:
                raise refused(refusal)
        if (refusal := refuse_unpriced(self._limits, call.paid_model)) is not None:
            raise refused(refusal)
        if self._limits.has_budget and route.operation in ("generate", "embeddings"):
            self._reserve(call, body, route)
        if isinstance(chosen, ProviderClient):
            return self._forwarded(call, chosen)
        if route.operation == "embeddings":
            return _embedded(chosen, embeddings.parse(request))
        parsed = call.dialect.parse(request)
        if route.operation == "count_tokens":
            return _whole(call.dialect.render_count(estimate_tokens(parsed)))
        if (reason := unsupported_by_function(parsed)) is not None:
            raise ModelError(reason, 400)
        call.answering = FunctionAnswer(chosen, parsed, call.dialect)
        return call.answering.pieces()

    def _reserve(self, call: BridgeCall, body: Fields, route: Route) -> None:
        price = self._limits.price_of(call.paid_model)
        found = reserve(self._limits, self.spent, requested_tokens(call.request, body, route), price)
        if isinstance(found, Refusal):
            raise refused(found)
        call.reservation = found
        self._spent = self.spent.reserved(found)

    def _forwarded(self, call: BridgeCall, provider: ProviderClient) -> Pieces:
        answer = ForwardedAnswer(provider, call.request, call.dialect, needs_usage=self._limits.has_budget)
        if call.route is not None and call.route.operation in ("generate", "embeddings"):
            call.answering = answer
        return answer.pieces()

    def _listed(self, route: Route) -> Pieces:
        names = [name for name in self._models.names if self._limits.allows_model(name)]
        if route.operation == "models":
            return _whole(render_models(names, route.dialect))
        self._models.choose(route.model)
        return _whole(render_model(route.model, route.dialect))

    def _ended(self, call: BridgeCall) -> None:
        """Record the call in the next turn of the event loop: the search for keys would delay the answer.

        The end of the answer leaves in this turn. `calls`, `spent` and the next admission record the call at once.
        """
        call.end()
        if not self._unrecorded:
            asyncio.get_running_loop().call_soon(self._record_ended)
        self._unrecorded.append((call, time.time()))

    def _record_ended(self) -> None:
        while self._unrecorded:
            self._record(*self._unrecorded.popleft())

    def _record(self, call: BridgeCall, at: float) -> None:
        record = call.record(self._calls.total + 1, at, self._limits, self._redaction)
        if call.counted:
            tokens = 0 if record.usage is None else record.usage.total
            self._spent = self._spent.ended(tokens, record.money, call.reservation)
        self._calls.add(record)
        if self._on_call is not None:
            try:
                self._on_call(record)
            except Exception as error:
                log.error("on_call failed", exc_info=error)


async def _whole(body: bytes) -> Pieces:
    yield HttpHead(200, JSON_HEADERS)
    yield body


async def _embedded(model: ModelFunction, request: EmbeddingsRequest) -> Pieces:
    """Call the `embed` attribute of a model function: a request in, one vector for each input out."""
    embed = getattr(model, "embed", None)
    if embed is None:
        raise ModelError(f"model {request.model!r}: has no embeddings", 404)
    vectors = await embed(request)
    tokens = sum(len(each) // 4 if isinstance(each, str) else len(each) for each in request.input)
    yield HttpHead(200, JSON_HEADERS)
    yield embeddings.render(vectors, request, TokenUsage(input=tokens))


class _Deadline:
    """The time limits of one answer: until its body begins, and until its end. One timer serves all pieces.

    A limit that passes while no piece is awaited takes effect when the next one is.
    """

    def __init__(self, limits: BridgeLimits) -> None:
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self._last = None if limits.timeout is None else now + limits.timeout
        first = None if limits.first_token_timeout is None else now + limits.first_token_timeout
        self._when = min((each for each in (self._last, first) if each is not None), default=None)
        self._timer = None if self._when is None else self._loop.call_at(self._when, self._check)
        self._has_begun = False
        self._has_passed = False
        #: The task that awaits a piece, and whether its cancellation is the timer's.
        self._task: asyncio.Task[object] | None = None
        self._cancelled = False

    async def next(self, pieces: Pieces) -> HttpHead | bytes | None:
        """Return the next piece, None at the end; raise ModelError (504) if it does not come in time."""
        if self._has_passed:
            raise self._late()
        self._task = task = asyncio.current_task()
        assert task is not None
        cancelling = task.cancelling()
        try:
            piece = await anext(pieces, None)
        except asyncio.CancelledError:
            # Another cancellation takes precedence, as with asyncio's timeouts.
            if self._cancelled and task.uncancel() <= cancelling:
                raise self._late() from None
            raise
        except BaseException:
            if self._cancelled:
                task.uncancel()
            raise
        finally:
            self._task = None
        if self._cancelled:
            task.uncancel()
            self._cancelled = False
        if not self._has_begun and isinstance(piece, bytes):
            self._has_begun = True
            # Not earlier than before: the timer sets itself again.
            self._when = self._last
        return piece

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        if self._when is None:
            return
        if self._loop.time() < self._when:
            self._timer = self._loop.call_at(self._when, self._check)
            return
        self._has_passed = True
        if self._task is not None:
            self._cancelled = True
            self._task.cancel()

    def _late(self) -> ModelError:
        return ModelError(f"the response has not {'ended' if self._has_begun else 'begun'} in time", 504)
