"""Answers short requests for one reply in the Connect protocol: a request in, the bytes of an HTTP response out.

What it does not accept, such as compression or a deadline, the Connect application answers in the same way.
"""

from __future__ import annotations

import base64
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import msgspec
from google.protobuf.json_format import MessageToDict, ParseError
from google.protobuf.message import DecodeError

from holdfast.service.access.admission import Admission, AdmittedCall
from holdfast.service.fronts.handler import Handler, RpcMethod, Unary, methods
from holdfast.service.fronts.json_codec import from_json, to_json
from holdfast.service.fronts.short_requests import ShortRequest
from holdfast.service.fronts.status_details import details_of, message_of
from holdfast.service.fronts.web_guard import WebGuard
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
_STATUS_LINES: Final = {
    status: f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n" for status in {200, *_HTTP_STATUS.values()}
}


class _UnaryMethod(NamedTuple):
    method: RpcMethod
    function: Unary


class UnaryCalls:
    """The methods with one reply."""

    def __init__(self, handler: Handler, admission: Admission, guard: WebGuard) -> None:
        self._admission = admission
        self._guard = guard
        self._methods = {
            method.path: _UnaryMethod(method, handler.unary(method)) for method in methods() if not method.stream
        }

    def accepts(self, request: ShortRequest) -> bool:
        """Return whether `answer` can answer the request, or would refuse it as a call."""
        headers = request.headers
        return (
            request.path in self._methods
            and headers.get("content-type") in (_JSON, _PROTO)
            and "connect-timeout-ms" not in headers
            and headers.get("connect-protocol-version", "1") == "1"
            and self._guard.admits(headers["host"])
        )

    async def answer(self, request: ShortRequest, peer: str) -> bytes:
        """Run the call; return the whole response. A cancelled call has none."""
        method, function = self._methods[request.path]
        try:
            call = await self._admission.begin("http", method, request.headers, peer)
        except Problem as problem:
            return _refusal(problem)
        try:
            return await _answered(call, function, request)
        finally:
            call.end()


async def _answered(call: AdmittedCall, function: Unary, request: ShortRequest) -> bytes:
    is_json = request.headers["content-type"] == _JSON
    message_class = call.method.request
    try:
        message = from_json(request.body, message_class) if is_json else message_class.FromString(request.body)
    except (ParseError, DecodeError, ValueError, RecursionError) as error:
        call.status = "INVALID_ARGUMENT"
        text = {"code": "invalid_argument", "message": f"unmarshal message: {error}"}
        return _response(400, _JSON, msgspec.json.encode(text))
    try:
        with call.explained():
            call.check(message)
            reply = call.answered(await function(call.caller, message))
            body = to_json(reply) if is_json else reply.SerializeToString()
    except Problem as problem:
        return _refusal(problem)
    return _response(200, _JSON if is_json else _PROTO, body)


def _refusal(problem: Problem) -> bytes:
    """Return the response with the Connect error of a Problem; each detail has a form that people can read."""
    details = [
        {
            "type": each.DESCRIPTOR.full_name,
            "value": base64.b64encode(each.SerializeToString()).decode().rstrip("="),
            "debug": MessageToDict(each),
        }
        for each in details_of(problem)
    ]
    error: dict[str, Any] = {"code": problem.status.lower(), "message": message_of(problem), "details": details}
    return _response(_HTTP_STATUS[problem.status], _JSON, msgspec.json.encode(error))


def _response(status: int, content_type: str, body: bytes) -> bytes:
    head = f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\nx-content-type-options: nosniff\r\n\r\n"
    return (_STATUS_LINES[status] + head).encode() + body
