"""The methods of the protocol as a Connect application (ASGI), built from its descriptor.

A call is admitted before its body is read. Every Problem becomes a Connect error with its details.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any

from connectrpc.code import Code
from connectrpc.codec import Codec
from connectrpc.compat import google_protobuf_binary_codec
from connectrpc.errors import ConnectError, ErrorDetail
from connectrpc.method import IdempotencyLevel, MethodInfo, StreamType
from connectrpc.request import RequestContext
from connectrpc.server import ConnectASGIApplication, Endpoint
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from protobuf.wkt import Any as PackedAny, Struct as JsonObject
from starlette.types import ASGIApp

from holdfast.service.access.admission import Admission, AdmittedCall, bug
from holdfast.service.fronts.handler import SERVICE_NAME, Handler, RpcMethod, methods
from holdfast.service.fronts.json_codec import from_json, to_json
from holdfast.service.fronts.status_details import details_of, message_of
from holdfast.service.problems import Problem

_call: ContextVar[AdmittedCall] = ContextVar("holdfast_http_call")


def connect_application(handler: Handler, admission: Admission, max_request_bytes: int) -> ASGIApp:
    """Return the ASGI application for all methods of the protocol."""

    def endpoints(handler: Handler) -> Mapping[str, Endpoint[Any, Any]]:
        return {method.path: _endpoint(handler, method) for method in methods()}

    application: ASGIApp = _Application(
        service=handler,
        endpoints=endpoints,  # type: ignore[arg-type]
        interceptors=[_AdmissionInterceptor(admission)],
        read_max_bytes=max_request_bytes,
        codecs=[google_protobuf_binary_codec(), _JsonCodec()],
    )
    return application


class _Application(ConnectASGIApplication[Handler]):
    @property
    def path(self) -> str:
        return f"/{SERVICE_NAME}"


def _endpoint(handler: Handler, method: RpcMethod) -> Endpoint[Any, Any]:
    info = MethodInfo(
        name=method.name,
        service_name=SERVICE_NAME,
        input=method.request,
        output=method.reply,
        idempotency_level=IdempotencyLevel.UNKNOWN,
        stream_type=StreamType.SERVER_STREAM if method.stream else StreamType.UNARY,
    )
    if method.stream:
        return Endpoint.server_stream(info, _stream(handler, method))
    return Endpoint.unary(info, _unary(handler, method))


def _unary(handler: Handler, method: RpcMethod) -> Callable[[Any, RequestContext[Any, Any]], Awaitable[Any]]:
    function = handler.unary(method)

    async def answer(request: Any, context: RequestContext[Any, Any]) -> Any:
        call = _call.get()
        try:
            with call.explained():
                call.check(request)
                return call.answered(await function(call.caller, request))
        except Problem as problem:
            raise connect_error(problem) from problem

    return answer


def _stream(handler: Handler, method: RpcMethod) -> Callable[[Any, RequestContext[Any, Any]], AsyncIterator[Any]]:
    function = handler.stream(method)

    async def answer(request: Any, context: RequestContext[Any, Any]) -> AsyncIterator[Any]:
        call = _call.get()
        try:
            with call.explained():
                call.check(request)
                async with contextlib.aclosing(function(call.caller, request)) as replies:  # type: ignore[type-var]
                    async for reply in replies:
                        yield reply
                        # Neither a send with room in the buffer nor a read of present output yields to the event
                        # loop, and without a yield the disconnect of the client is not noticed.
                        await asyncio.sleep(0)
        except Problem as problem:
            raise connect_error(problem) from problem

    return answer


class _AdmissionInterceptor:
    """The interceptor that admits calls before their bodies are read."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._methods = {method.name: method for method in methods()}

    async def on_start(self, ctx: RequestContext[Any, Any]) -> AdmittedCall:
        # Without the port, and `unix` if there is no address.
        peer = (ctx.client_address or "unix").rpartition(":")[0] or "unix"
        headers = dict(ctx.request_headers.items())
        try:
            call = await self._admission.begin("http", self._methods[ctx.method.name], headers, peer)
        except Problem as problem:
            raise connect_error(problem) from problem
        # The endpoint runs in the same task, so it has this context variable.
        _call.set(call)
        return call

    async def on_end(self, token: AdmittedCall, ctx: RequestContext[Any, Any], error: Exception | None, /) -> None:
        try:
            if isinstance(error, ConnectError):
                token.status = "CANCELLED" if error.code is Code.CANCELED else error.code.name
            elif error is not None:
                token.status = "INTERNAL"
                raise connect_error(bug(error, ctx.method.name)) from error
        finally:
            token.end()


class _JsonCodec(Codec[Any, Any]):
    """An unknown field is an error: a misspelt name in a policy must not be ignored."""

    def name(self) -> str:
        return "json"

    def encode(self, message: Any) -> bytes:
        return to_json(message)

    def decode(self, data: bytes | bytearray, message_class: type[Any]) -> Any:
        return from_json(bytes(data), message_class)


def connect_error(problem: Problem) -> ConnectError:
    """Return the Connect error of a Problem."""
    details = [_ReadableDetail(each) for each in details_of(problem)]
    return ConnectError(Code[problem.status], message_of(problem), details)


class _ReadableDetail(ErrorDetail):
    """A detail with its JSON form in `debug`, for users of curl."""

    def __init__(self, detail: Message) -> None:
        url = f"type.googleapis.com/{detail.DESCRIPTOR.full_name}"
        super().__init__(PackedAny(type_url=url, value=detail.SerializeToString()))
        self._detail = detail

    def value(self, desc_or_registry: Any = None) -> Any:
        return JsonObject.from_json(MessageToJson(self._detail)) if desc_or_registry is None else None
