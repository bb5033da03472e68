"""Calls to the service over gRPC: channels, retries, and errors as `Problem`.

Generators without IO decide which calls to make and when to repeat them; a blocking and an asynchronous caller make
the calls. Touches the network only as a client of the service.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any, Final, NamedTuple, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from holdfast.errors import HandshakeFailed, InvalidRequest
from holdfast.service import problems
from holdfast.service.client.endpoint import ServiceEndpoint
from holdfast.session.v1 import session_pb2 as pb

#: How long calls to an unreachable service are repeated: longer than a restart or a change of replicas.
CONNECT_SECONDS: Final = 60.0
#: Between two attempts, doubling.
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 2.0
#: How long a call may take beyond the time that the request itself allows.
SLACK_SECONDS: Final = 30.0
_OPTIONS: Final = [
    # The reply to `RunCommand` has two streams, which fit into this size together.
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    # A channel refuses calls between two attempts to connect, by default up to 120 s.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", int(LONGEST_PAUSE * 1000)),
]
#: The reason of an UNAVAILABLE from gRPC itself; those of the service have other reasons.
NO_REPLY: Final = "UNAVAILABLE"
_SERVICE: Final = pb.DESCRIPTOR.services_by_name["SessionService"]

_Result = TypeVar("_Result")


class RpcCall(NamedTuple):
    """A step: make a call."""

    method: str
    request: Message
    timeout: float | None = SLACK_SECONDS


class Pause(NamedTuple):
    """A step: wait."""

    seconds: float


class CheckPort(NamedTuple):
    """A step: find out why calls fail. Its result is an explanation, or empty."""


Step = RpcCall | Pause | CheckPort
#: A caller sends the result of each step into the generator, or throws the `Problem` of a failed call.
Steps = Generator[Step, Any, _Result]


class Retry:
    """The pauses between attempts to reach the service, from the last success on."""

    def __init__(self, seconds: float = CONNECT_SECONDS) -> None:
        self._seconds = seconds
        self.succeeded()

    def succeeded(self) -> None:
        self._pause, self._waited, self._checked = FIRST_PAUSE, 0.0, False

    def after(self, failure: problems.Unavailable) -> Steps[None]:
        """Pause before the next attempt; raise the failure once the time for attempts is over.

        A port that does not match the client, such as plain text to TLS, raises `HandshakeFailed` at once.
        """
        if failure.reason == NO_REPLY and not self._checked:
            self._checked = True
            if why := (yield CheckPort()):
                raise HandshakeFailed(why) from failure
        if self._waited >= self._seconds:
            raise failure
        pause = max(self._pause, min(failure.retry_after or 0.0, LONGEST_PAUSE))
        yield Pause(pause)
        self._waited += pause
        self._pause = min(self._pause * 2, LONGEST_PAUSE)


def retried(rpc: RpcCall, seconds: float = CONNECT_SECONDS) -> Steps[Any]:
    """Return the reply to a call, which is repeated while the service is unreachable, for up to `seconds`.

    Calls with an effect have a `request_id`, so a repeated one has its effect once.
    """
    retry = Retry(seconds)
    while True:
        try:
            return (yield rpc)
        except problems.Unavailable as problem:
            failure = problem
        yield from retry.after(failure)


class BlockingCaller:
    """Makes calls in the calling thread, over one channel that connects at the first call."""

    def __init__(self, endpoint: ServiceEndpoint) -> None:
        self._endpoint = endpoint
        self._channel: grpc.Channel | None = None
        self._opening = threading.Lock()

    def drive(self, steps: Steps[_Result]) -> _Result:
        """Make the steps of a generator and return its result."""
        reply: Any = None
        problem: problems.Problem | None = None
        while True:
            try:
                step = steps.send(reply) if problem is None else steps.throw(problem)
            except StopIteration as ended:
                return ended.value  # type: ignore[no-any-return]
            reply = problem = None
            if isinstance(step, Pause):
                time.sleep(step.seconds)
            elif isinstance(step, CheckPort):
                reply = self._endpoint.explain_failure()
            else:
                try:
                    reply = self.call(step)
                except problems.Problem as error:
                    problem = error

    def call(self, rpc: RpcCall) -> Any:
        """Make one call and return its reply."""
        with self._opening:
            if self._channel is None:
                self._channel = _channel(self._endpoint)
            channel = self._channel
        method = channel.unary_unary(*_by_name(rpc.method))
        try:
            return method(rpc.request, timeout=rpc.timeout, metadata=self._endpoint.metadata)
        except grpc.RpcError as error:
            raise problem_of(error) from error

    def close(self) -> None:
        with self._opening:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


class AsyncCaller:
    """Makes calls on one event loop, over one channel that connects at the first call."""

    def __init__(self, endpoint: ServiceEndpoint) -> None:
        self._endpoint = endpoint
        self._opened: tuple[grpc.aio.Channel, asyncio.AbstractEventLoop] | None = None

    async def drive(self, steps: Steps[_Result]) -> _Result:
        """Make the steps of a generator and return its result."""
        reply: Any = None
        problem: problems.Problem | None = None
        while True:
            try:
                step = steps.send(reply) if problem is None else steps.throw(problem)
            except StopIteration as ended:
                return ended.value  # type: ignore[no-any-return]
            reply = problem = None
            if isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
            elif isinstance(step, CheckPort):
                reply = await asyncio.to_thread(self._endpoint.explain_failure)
            else:
                try:
                    reply = await self.call(step)
                except problems.Problem as error:
                    problem = error

    async def call(self, rpc: RpcCall) -> Any:
        """Make one call and return its reply."""
        method = self._channel().unary_unary(*_by_name(rpc.method))
        try:
            return await method(rpc.request, timeout=rpc.timeout, metadata=self._endpoint.metadata)
        except grpc.RpcError as error:
            raise problem_of(error) from error

    async def stream(self, method: str, request: Message) -> AsyncIterator[Any]:
        """Yield the messages of one server stream; the call is cancelled when the iterator is closed."""
        call = self._channel().unary_stream(*_by_name(method))(request, metadata=self._endpoint.metadata)
        try:
            async for message in call:
                yield message
        except grpc.RpcError as error:
            raise problem_of(error) from error
        finally:
            call.cancel()

    def _channel(self) -> grpc.aio.Channel:
        loop = asyncio.get_running_loop()
        if self._opened is None:
            self._opened = _aio_channel(self._endpoint), loop
        if self._opened[1] is not loop:
            raise InvalidRequest("this client of the service belongs to another event loop; make one for each")
        return self._opened[0]

    async def aclose(self) -> None:
        if self._opened is not None:
            channel, self._opened = self._opened[0], None
            await channel.close()


def _by_name(method: str) -> tuple[str, Callable[[Any], bytes], Callable[[bytes], Any]]:
    """Return the path of a method and its serializers."""
    reply = GetMessageClass(_SERVICE.methods_by_name[method].output_type)
    return f"/{_SERVICE.full_name}/{method}", _as_bytes, reply.FromString


def _as_bytes(message: Message) -> bytes:
    return message.SerializeToString()


def problem_of(error: grpc.RpcError) -> problems.Problem:
    """Return the `Problem` that the service raised. A code that the service does not use becomes the root class."""
    call: Any = error  # gRPC raises the call itself, which its type does not declare
    name = call.code().name
    kind = next((each for each in problems.Problem.__subclasses__() if each.status == name), problems.Problem)
    info, delay = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    retry_after: float | None = None
    try:
        status = rpc_status.from_call(call)
        for detail in status.details if status is not None else ():
            if detail.Unpack(delay):
                retry_after = delay.retry_delay.ToTimedelta().total_seconds()
            else:
                detail.Unpack(info)
    except (DecodeError, ValueError):
        info.Clear()  # not a status of the service: a proxy can answer in its place
    problem = kind(call.details() or name, reason=info.reason or name, retry_after=retry_after)
    problem.details.update(info.metadata)
    return problem


def _channel(endpoint: ServiceEndpoint) -> grpc.Channel:
    if endpoint.encrypted:
        return grpc.secure_channel(endpoint.address, _credentials(endpoint), _OPTIONS)
    return grpc.insecure_channel(endpoint.address, _OPTIONS)


def _aio_channel(endpoint: ServiceEndpoint) -> grpc.aio.Channel:
    if endpoint.encrypted:
        return grpc.aio.secure_channel(endpoint.address, _credentials(endpoint), _OPTIONS)
    return grpc.aio.insecure_channel(endpoint.address, _OPTIONS)


def _credentials(endpoint: ServiceEndpoint) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        _content(endpoint.tls_ca), _content(endpoint.tls_key), _content(endpoint.tls_cert)
    )


def _content(path: str | None) -> bytes | None:
    if path is None:
        return None
    with open(path, "rb") as file:
        return file.read()
