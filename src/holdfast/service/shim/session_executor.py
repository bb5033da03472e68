"""Runs single commands in a session of the service, over gRPC; the part of `BashExecutor` that needs gRPC.

A generator without IO decides which calls to make; a blocking and an asynchronous driver make them. Touches the
network only as a client of the service.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from holdfast.errors import EXIT_TIMED_OUT, HandshakeFailed, InvalidRequest
from holdfast.service import problems
from holdfast.service.shim.one_shot import ExecutionResult
from holdfast.service.shim.port_check import explain_failure
from holdfast.session.v1 import session_pb2 as pb

#: How long calls to an unreachable service are repeated: longer than a restart or a change of replicas.
REACH_SECONDS: Final = 60.0
#: Between two attempts, doubling.
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 2.0
#: How long a call may take beyond the timeout of its command.
SLACK_SECONDS: Final = 30.0
#: Sessions that one command may use in turn. The end of a second session is an effect of the command.
RENEWALS: Final = 2
#: The reply to `RunCommand` has two streams, which fit into this size together.
_OPTIONS: Final = [("grpc.max_receive_message_length", 16 * 1024 * 1024)]
_REPLIES: Final[dict[str, type[Message]]] = {
    "CreateSession": pb.CreateSessionResponse,
    "RunCommand": pb.RunCommandResponse,
    "ReadOutput": pb.ReadOutputResponse,
    "GetSession": pb.GetSessionResponse,
    "CloseSession": pb.CloseSessionResponse,
}
#: The reason of an UNAVAILABLE from gRPC itself; those of the service have other reasons.
NO_REPLY: Final = "UNAVAILABLE"
_OVER: Final = (pb.CLOSING, pb.CLOSED, pb.ERROR)


class ServiceEndpoint(NamedTuple):
    """Address, token and TLS files for calls to the service."""

    address: str
    token: str
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    def credentials(self) -> grpc.ChannelCredentials | None:
        if self.tls_ca is None and self.tls_cert is None:
            return None
        return grpc.ssl_channel_credentials(_content(self.tls_ca), _content(self.tls_key), _content(self.tls_cert))

    def explain_failure(self) -> str:
        """Return why calls to the port fail, if client and port do not match; blocks."""
        return explain_failure(
            self.address,
            tls=self.credentials() is not None,
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
        )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),)


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
#: A driver sends the result of each step into the generator, or throws the `Problem` of a failed call.
Steps = Generator[Step, Any, ExecutionResult]


class SessionExecutor:
    """Runs commands in one session, which is created at the first command."""

    def __init__(
        self,
        endpoint: ServiceEndpoint,
        *,
        persistent: bool = True,
        sandbox: str = "",
        cwd: str = "",
        env: dict[str, str] | None = None,
        profile: str = "",
        max_output_bytes: int = 1024 * 1024,
    ) -> None:
        self._endpoint = endpoint
        self._persistent = persistent
        self._max_bytes = max_output_bytes
        self._create = pb.CreateSessionRequest(
            initial_cwd=cwd,
            environment=env or {},
            kind=pb.SHELL,
            sandbox=sandbox,
            policy=pb.SessionPolicy(profile=profile),
        )
        # Sessions of one executor are numbered: concurrent creators use the same request id and create one session.
        self._name = secrets.token_hex(8)
        self._generation = 0
        self._session_id = ""
        self._changing = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._aio: tuple[grpc.aio.Channel, asyncio.AbstractEventLoop] | None = None

    @property
    def session_id(self) -> str:
        """The session in use; empty before the first command."""
        return self._session_id

    # --- steps ---------------------------------------------------------------------------------------------------

    def steps(self, command: str, timeout: float | None) -> Steps:
        """Yield the steps of a command, and return its result."""
        request = pb.RunCommandRequest(
            command=command,
            timeout_ms=0 if timeout is None else max(1, round(timeout * 1000)),
            max_bytes=self._max_bytes,
            request_id=secrets.token_hex(16),
        )
        if not self._persistent:
            request.create.CopyFrom(self._create)
            # A repeated call gets the same session, so the command does not run in a second one.
            request.create.request_id = request.request_id
            return (yield from self._run(request, timeout))
        for _ in range(RENEWALS):
            generation, request.session_id = yield from self._session()
            try:
                return (yield from self._run(request, timeout))
            except (problems.NotFound, problems.NotNow):
                # Refused, so the command has not started. The state of the session shows whether it ended.
                if not (yield from self._session_over(request.session_id)):
                    raise
                self._forget(generation)
        _, request.session_id = yield from self._session()
        return (yield from self._run(request, timeout))

    def _session(self) -> Generator[Step, Any, tuple[int, str]]:
        with self._changing:
            generation, session_id = self._generation, self._session_id
        if not session_id:
            create = pb.CreateSessionRequest()
            create.CopyFrom(self._create)
            create.request_id = f"{self._name}-{generation}"
            created = yield from _retried(RpcCall("CreateSession", create))
            session_id = created.session_id
            with self._changing:
                if self._generation == generation:
                    self._session_id = session_id
        return generation, session_id

    def _run(self, request: pb.RunCommandRequest, timeout: float | None) -> Steps:
        limit = None if timeout is None else timeout + SLACK_SECONDS
        generation = self._generation
        reply = yield from _retried(RpcCall("RunCommand", request, limit))
        if request.session_id and reply.state in _OVER:
            self._forget(generation)
        return ExecutionResult(
            stdout=reply.stdout.decode("utf-8", "replace"),
            stderr=reply.stderr.decode("utf-8", "replace"),
            exit_code=EXIT_TIMED_OUT if reply.timed_out else reply.exit_code,
            timed_out=reply.timed_out,
            duration=reply.duration_ms / 1000,
            truncated=reply.truncated,
        )

    def _session_over(self, session_id: str) -> Generator[Step, Any, bool]:
        try:
            found = yield from _retried(RpcCall("GetSession", pb.GetSessionRequest(session_id=session_id)))
        except problems.NotFound:
            return True
        return found.state in _OVER

    def _forget(self, generation: int) -> None:
        with self._changing:
            if self._generation == generation:
                self._generation += 1
                self._session_id = ""

    # --- drivers -------------------------------------------------------------------------------------------------

    def run(self, command: str, *, timeout: float | None = None) -> ExecutionResult:
        return self._drive(self.steps(command, timeout))

    def _drive(self, steps: Steps) -> ExecutionResult:
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
                continue
            if isinstance(step, CheckPort):
                reply = self._endpoint.explain_failure()
                continue
            try:
                reply = self._call(step)
            except grpc.RpcError as error:
                problem = problem_of(error)

    def _call(self, rpc: RpcCall) -> Any:
        with self._changing:
            if self._channel is None:
                self._channel = open_channel(self._endpoint)
            channel = self._channel
        return call(channel, self._endpoint, rpc)

    async def run_async(self, command: str, *, timeout: float | None = None) -> ExecutionResult:
        return await self._drive_async(self.steps(command, timeout))

    async def _drive_async(self, steps: Steps) -> ExecutionResult:
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
                continue
            if isinstance(step, CheckPort):
                reply = await asyncio.to_thread(self._endpoint.explain_failure)
                continue
            try:
                reply = await self._call_async(step)
            except grpc.RpcError as error:
                problem = problem_of(error)

    async def _call_async(self, rpc: RpcCall) -> Any:
        loop = asyncio.get_running_loop()
        if self._aio is None:
            self._aio = _aio_channel(self._endpoint), loop
        if self._aio[1] is not loop:
            raise InvalidRequest("this executor belongs to another event loop; make one for each")
        method = self._aio[0].unary_unary(*_by_name(rpc.method))
        return await method(rpc.request, timeout=rpc.timeout, metadata=self._endpoint.metadata)

    # --- close ---------------------------------------------------------------------------------------------------

    def _closing_call(self) -> RpcCall | None:
        """Forget the session; return the call that closes it, if there is one."""
        with self._changing:
            session_id, self._session_id = self._session_id, ""
            self._generation += 1
        return RpcCall("CloseSession", pb.CloseSessionRequest(session_id=session_id)) if session_id else None

    def close(self) -> None:
        try:
            if (rpc := self._closing_call()) is not None:
                self._call(rpc)
        except grpc.RpcError as error:
            _raise_unless_over(error)
        finally:
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    async def aclose(self) -> None:
        try:
            if (rpc := self._closing_call()) is not None:
                await self._call_async(rpc)
        except grpc.RpcError as error:
            _raise_unless_over(error)
        finally:
            if self._aio is not None:
                channel, self._aio = self._aio[0], None
                await channel.close()


def _retried(rpc: RpcCall) -> Generator[Step, Any, Any]:
    """Return the reply to a call, which is repeated while the service is unreachable.

    Calls with an effect have a `request_id`, so a repeated one has its effect once. A port that does not match the
    client, such as plain text to TLS, raises `HandshakeFailed` at once.
    """
    pause, waited, checked = FIRST_PAUSE, 0.0, False
    while True:
        try:
            return (yield rpc)
        except problems.Unavailable as problem:
            failure = problem
        if waited >= REACH_SECONDS:
            raise failure
        if failure.reason == NO_REPLY and not checked:
            checked = True
            if why := (yield CheckPort()):
                raise HandshakeFailed(why) from failure
        yield Pause(pause)
        waited += pause
        pause = min(pause * 2, LONGEST_PAUSE)


def _by_name(method: str) -> tuple[str, Callable[[Any], bytes], Callable[[bytes], Any]]:
    """Return the path of a method and its serializers."""
    service = pb.DESCRIPTOR.services_by_name["SessionService"].full_name
    return f"/{service}/{method}", _as_bytes, _REPLIES[method].FromString


def _as_bytes(message: Message) -> bytes:
    return message.SerializeToString()


def _raise_unless_over(error: grpc.RpcError) -> None:
    """Raise the error of a close, except for a session that is over or unreachable: its idle timeout closes it."""
    problem = problem_of(error)
    if not isinstance(problem, problems.NotFound | problems.NotNow | problems.Unavailable):
        raise problem from error


def problem_of(error: grpc.RpcError) -> problems.Problem:
    """Return the `Problem` that the service raised. A code that the service does not use becomes the root class."""
    call: Any = error  # gRPC raises the call itself, which its type does not declare
    name = call.code().name
    kind = next((each for each in problems.Problem.__subclasses__() if each.status == name), problems.Problem)
    info = error_details_pb2.ErrorInfo()
    try:
        status = rpc_status.from_call(call)
        any(detail.Unpack(info) for detail in (status.details if status is not None else ()))
    except (DecodeError, ValueError):
        info.Clear()  # not a status of the service: a proxy can answer in its place
    problem = kind(call.details() or name, reason=info.reason or name)
    problem.details.update(info.metadata)
    return problem


def call(channel: grpc.Channel, endpoint: ServiceEndpoint, rpc: RpcCall) -> Any:
    """Make one call and return its reply."""
    method = channel.unary_unary(*_by_name(rpc.method))
    return method(rpc.request, timeout=rpc.timeout, metadata=endpoint.metadata)


def open_channel(endpoint: ServiceEndpoint) -> grpc.Channel:
    """Return a channel for blocking calls, which connects at the first call."""
    credentials = endpoint.credentials()
    if credentials is None:
        return grpc.insecure_channel(endpoint.address, _OPTIONS)
    return grpc.secure_channel(endpoint.address, credentials, _OPTIONS)


def _aio_channel(endpoint: ServiceEndpoint) -> grpc.aio.Channel:
    credentials = endpoint.credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(endpoint.address, _OPTIONS)
    return grpc.aio.secure_channel(endpoint.address, credentials, _OPTIONS)


def _content(path: str | None) -> bytes | None:
    if path is None:
        return None
    with open(path, "rb") as file:
        return file.read()
