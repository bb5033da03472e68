"""Answers calls with a short request and one reply in the Connect protocol, without routes and interceptors.

These take longer than the call itself. Whatever this does not accept, such as compression or a deadline, is left to
the application, which answers in the same way.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Final, NamedTuple

import msgspec
from google.protobuf.json_format import MessageToDict, ParseError
from google.protobuf.message import DecodeError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.service.access.admission import Admission, AdmittedCall
from holdfast.service.fronts.handler import Handler, RpcMethod, Unary, methods
from holdfast.service.fronts.json_codec import from_json, to_json
from holdfast.service.fronts.status_details import details_of, message_of
from holdfast.service.fronts.web_connection import ArrivedRequest
from holdfast.service.problems import Problem

_JSON: Final = "application/json"
_PROTO: Final = "application/proto"
#: Of the Connect protocol: https://connectrpc.com/docs/protocol#error-codes
_HTTP_STATUS: Final = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
#: A longer request is left to the application.
_LONGEST_BODY: Final = 65_536
#: Headers that change the meaning of a request or of its reply.
_SPECIAL: Final = frozenset({"connect-timeout-ms", "content-encoding", "transfer-encoding", "expect"})


class _UnaryMethod(NamedTuple):
    method: RpcMethod
    function: Unary


class _Response(NamedTuple):
    #: None if the client has left.
    status: int | None
    content_type: str
    body: bytes


_NO_RESPONSE: Final = _Response(None, "", b"")


class UnaryCalls:
    """The methods with one reply; other requests are forwarded to `app`."""

    def __init__(self, app: ASGIApp, handler: Handler, admission: Admission, request_seconds: float) -> None:
        """A request has `request_seconds` to arrive."""
        self._app = app
        self._admission = admission
        self._request_seconds = request_seconds
        self._methods = {
            method.path: _UnaryMethod(method, handler.unary(method)) for method in methods() if not method.stream
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = self._accepted(scope)
        if headers is None:
            await self._app(scope, receive, send)
            return
        status, content_type, body = await self._answer(scope, headers, receive)
        if status is None:
            return
        fields = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": body})

    def _accepted(self, scope: Scope) -> dict[str, str] | None:
        """Return the headers of a request that `_answer` answers; None for others."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._methods:
            return None
        if ArrivedRequest.NAME not in scope.get("extensions", {}):
            return None
        try:
            headers = {name.decode("ascii"): value.decode("ascii") for name, value in scope["headers"]}
        except UnicodeDecodeError:
            return None
        length = headers.get("content-length", "")
        if (
            len(headers) == len(scope["headers"])
            and headers.get("content-type") in (_JSON, _PROTO)
            and headers.get("connect-protocol-version", "1") == "1"
            and _SPECIAL.isdisjoint(headers)
            and length.isdigit()
            and int(length) <= _LONGEST_BODY
        ):
            return headers
        return None

    async def _answer(self, scope: Scope, headers: dict[str, str], receive: Receive) -> _Response:
        """Run the call. A client that leaves cancels it, and gets no response."""
        method, function = self._methods[scope["path"]]
        try:
            call = await self._admission.begin("http", method, headers, (scope["client"] or ("unix",))[0])
        except Problem as problem:
            return _refusal(problem)
        arrived: ArrivedRequest = scope["extensions"][ArrivedRequest.NAME]
        try:
            body = arrived.body()
            if body is None:
                body = await self._body(receive)
            if body is None:
                call.status = "DEADLINE_EXCEEDED"
                return _error(504, "deadline_exceeded", "the request did not arrive in time")
            return await arrived.unless_disconnected(
                _answered(call, function, body, is_json=headers["content-type"] == _JSON)
            )
        except ClientDisconnect:
            call.status = "CANCELLED"
            return _NO_RESPONSE
        finally:
            call.end()

    async def _body(self, receive: Receive) -> bytes | None:
        """Return the body, of at most the length in the head; None if it does not arrive in time."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._request_seconds):
                while (message := await receive())["type"] == "http.request":
                    body += message.get("body", b"")
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            return None
        raise ClientDisconnect


async def _answered(call: AdmittedCall, function: Unary, data: bytes, *, is_json: bool) -> _Response:
    message_class = call.method.request
    try:
        message = from_json(data, message_class) if is_json else message_class.FromString(data)
    except (ParseError, DecodeError, ValueError, RecursionError) as error:
        call.status = "INVALID_ARGUMENT"
        return _error(400, "invalid_argument", f"unmarshal message: {error}")
    try:
        with call.explained():
            call.check(message)
            reply = call.answered(await function(call.caller, message))
            body = to_json(reply) if is_json else reply.SerializeToString()
    except Problem as problem:
        return _refusal(problem)
    return _Response(200, _JSON if is_json else _PROTO, body)


def _refusal(problem: Problem) -> _Response:
    """Return the response with the Connect error of a Problem; each detail has a form that people can read."""
    details = [
        {
            "type": each.DESCRIPTOR.full_name,
            "value": base64.b64encode(each.SerializeToString()).decode().rstrip("="),
            "debug": MessageToDict(each),
        }
        for each in details_of(problem)
    ]
    return _error(_HTTP_STATUS[problem.status], problem.status.lower(), message_of(problem), details=details)


def _error(status: int, code: str, message: str, **more: Any) -> _Response:
    return _Response(status, _JSON, msgspec.json.encode({"code": code, "message": message, **more}))
