"""The streaming methods of the protocol over WebSockets, for browsers.

A browser opens at most six HTTP/1.1 connections to a host, and each stream holds one; WebSockets are not counted.
The first message of the client has the token and the request: `{"authorization": "Bearer …", "request": {…}}`. Then
each reply is a message `{"reply": {…}}`, and the last message is `{"end": {}}` or `{"error": {…}}`. A client that
reads slowly delays only its own stream: the next reply is made when the connection has room. A browser reads its
connections as fast as it can and queues the messages, so a client may bound them itself: with `"window": N` in the
first message at most N replies are sent before the client's `{"ack": COUNT}`, the number that it has handled.
With `"binary": true`, a reply with output is a binary message: four bytes with the length of the JSON text, the
JSON text without the output, and the output as it is, which base64 would make a third larger.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from google.protobuf.json_format import MessageToDict, MessageToJson, ParseDict, ParseError
from starlette.types import Receive, Scope, Send

from holdfast.service.access.admission import Admission, AdmittedCall
from holdfast.service.fronts.handler import Handler, RpcMethod, methods
from holdfast.service.fronts.status_details import details_of, message_of
from holdfast.service.problems import Invalid, Problem, TooLate

#: The first message: a token and a request with some hundred ids.
LARGEST_MESSAGE: Final = 64 * 1024
_POLICY_VIOLATION: Final = 1008


class WebSocketStreams:
    """An ASGI application for the WebSockets of all streaming methods."""

    def __init__(self, handler: Handler, admission: Admission, first_seconds: float) -> None:
        """`first_seconds` is the time for the first message."""
        self._handler = handler
        self._admission = admission
        self._first_seconds = first_seconds
        self._methods = {method.path: method for method in methods() if method.stream}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = self._methods.get(scope["path"])
        if method is None or not same_origin(scope):
            return await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        await receive()  # websocket.connect
        await send({"type": "websocket.accept"})
        try:
            await self._serve(method, scope, receive, send)
            last: dict[str, Any] = {"end": {}}
        except Problem as problem:
            last = {"error": _error(problem)}
        except _Disconnected:
            return None
        with contextlib.suppress(OSError):
            await send({"type": "websocket.send", "text": json.dumps(last)})
            await send({"type": "websocket.close", "code": 1000})
        return None

    async def _serve(self, method: RpcMethod, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        peer = client[0] if client else "unix"
        first = await self._first(method, receive)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        call = await self._admission.begin("http", method, {**headers, "authorization": first.authorization}, peer)
        try:
            with call.explained():
                call.check(first.request)
                replies = self._handler.stream(method)(call.caller, first.request)
                credit = _Credit(first.window, receive)
                await self._copy(call, replies, credit, send, binary_message if first.binary else text_message)
        finally:
            call.end()

    async def _first(self, method: RpcMethod, receive: Receive) -> _First:
        try:
            async with asyncio.timeout(self._first_seconds):
                message = await receive()
        except TimeoutError:
            raise TooLate("the first message did not arrive in time", reason="NO_REQUEST") from None
        if message["type"] == "websocket.disconnect":
            raise _Disconnected
        try:
            first = json.loads(message.get("text") or "")
            # A misspelt field is an error, as over HTTP.
            request = ParseDict(first["request"], method.request())
            window, binary = int(first.get("window", 0)), first.get("binary") is True
            return _First(str(first["authorization"]), request, window, binary)
        except (ValueError, KeyError, TypeError, ParseError) as error:
            raise Invalid(
                'the first message must be {"authorization": "Bearer …", "request": {…}}: ' + str(error)[:200],
                reason="MALFORMED_REQUEST",
            ) from None

    async def _copy(
        self,
        call: AdmittedCall,
        replies: AsyncIterator[Any],
        credit: _Credit,
        send: Send,
        encode: Callable[[Any], dict[str, Any]],
    ) -> None:
        """Send the replies until they end or the client disconnects."""
        task = asyncio.current_task()
        assert task is not None
        gone = False

        async def watch() -> None:
            nonlocal gone
            await credit.read()
            gone = True
            task.cancel()

        watching = asyncio.create_task(watch())
        try:
            async with contextlib.aclosing(replies) as each_reply:  # type: ignore[type-var]
                async for reply in each_reply:
                    await send({"type": "websocket.send", **encode(reply)})
                    await credit.spend()
        except asyncio.CancelledError:
            if not gone:
                raise
            task.uncancel()
            call.status = "CANCELLED"
            raise _Disconnected from None
        except OSError:
            # The connection broke in the middle of a message.
            call.status = "CANCELLED"
            raise _Disconnected from None
        finally:
            watching.cancel()


class _First(NamedTuple):
    """The first message of a client."""

    authorization: str
    request: Any
    window: int
    binary: bool


def text_message(reply: Any) -> dict[str, Any]:
    """Return the message of a reply as JSON."""
    text = MessageToJson(reply, indent=None, always_print_fields_with_no_presence=True)
    return {"text": f'{{"reply": {text}}}'}


def binary_message(reply: Any) -> dict[str, Any]:
    """Return the message of a reply with its output beside the JSON; a reply without output is JSON alone."""
    payload = getattr(reply, "payload", b"")
    if not payload:
        return text_message(reply)
    reply.ClearField("payload")
    head = text_message(reply)["text"].encode()
    return {"bytes": len(head).to_bytes(4, "big") + head + payload}


class _Credit:
    """The messages that may be sent before the client acknowledges them; without a window, no limit."""

    def __init__(self, window: int, receive: Receive) -> None:
        self._window = window
        self._receive = receive
        self._sent = 0
        self._handled = 0
        self._changed = asyncio.Event()

    async def read(self) -> None:
        """Read acknowledgements until the client disconnects; other messages are ignored."""
        while (message := await self._receive())["type"] != "websocket.disconnect":
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._handled = max(self._handled, int(json.loads(message.get("text") or "")["ack"]))
                self._changed.set()

    async def spend(self) -> None:
        """Count a message, and wait until the client has handled enough of them."""
        self._sent += 1
        while self._window > 0 and self._sent - self._handled >= self._window:
            self._changed.clear()
            await self._changed.wait()
        # Neither a send with room in the buffer nor a read of present output yields to the event loop.
        await asyncio.sleep(0)


class _Disconnected(BaseException):
    """The client has closed the connection. Not an `Exception`: the call's own handling must not report a bug."""


def same_origin(scope: Scope) -> bool:
    """Return whether a handshake comes from a page of this service, or from no page at all."""
    headers = dict(scope["headers"])
    origin = headers.get(b"origin", b"").decode("latin-1")
    return not origin or urlsplit(origin).netloc.lower() == headers.get(b"host", b"").decode("latin-1").lower()


def _error(problem: Problem) -> dict[str, Any]:
    return {
        "code": problem.status.lower(),
        "message": message_of(problem),
        "details": [{"debug": MessageToDict(each)} for each in details_of(problem)],
    }
