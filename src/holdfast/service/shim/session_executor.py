"""Single commands in a session of the service, over gRPC: the half of `BashExecutor` that needs it.

What is asked of the service, and what an answer means, is one generator that does no IO; a blocking and an
asynchronous driver carry it out. Touches the network as a client of the service alone.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf.message import Message

from holdfast.errors import EXIT_TIMED_OUT, HandshakeFailed, InvalidRequest
from holdfast.service import problems
from holdfast.service.shim.one_shot import ExecutionResult
from holdfast.service.shim.port_check import explain_failure
from holdfast.service.shim.rpc_status import problem_of
from holdfast.session.v1 import session_pb2 as pb

#: How long a service that cannot be reached is asked again: a restart, or another replica's turn, fits.
REACH_SECONDS: Final = 60.0
#: Between two tries, doubling.
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 2.0
#: What a call may take beyond its command's own time before we give up on the service.
SLACK_SECONDS: Final = 30.0
#: How often a session that died under us is made again for one command. A second death is the command's doing.
RENEWALS: Final = 2
#: `RunCommand` answers with two streams of at most this much together, and a little around them.
_OPTIONS: Final = [("grpc.max_receive_message_length", 16 * 1024 * 1024)]
_REPLIES: Final[dict[str, type[Message]]] = {
    "CreateSession": pb.CreateSessionResponse,
    "RunCommand": pb.RunCommandResponse,
    "ReadOutput": pb.ReadOutputResponse,
    "GetSession": pb.GetSessionResponse,
    "CloseSession": pb.CloseSessionResponse,
}
#: The reason of an UNAVAILABLE that gRPC made itself: the service gives one of its own.
NO_REPLY: Final = "UNAVAILABLE"
_OVER: Final = (pb.CLOSING, pb.CLOSED, pb.ERROR)


class Line(NamedTuple):
    """How the service is reached, and as whom."""

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
        """Why the port does not take our calls, if that is how they are made; blocks."""
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


class Ask(NamedTuple):
    """A call to make."""

    method: str
    request: Message
    timeout: float | None = SLACK_SECONDS


class Pause(NamedTuple):
    """Seconds to let pass."""

    seconds: float


class CheckPort(NamedTuple):
    """Find out why the port cannot be talked to; the answer is an explanation, or empty."""


Step = Ask | Pause | CheckPort
#: What a driver carries out: it sends the reply of a call back in, or throws the `Problem` that it ended with.
Steps = Generator[Step, Any, ExecutionResult]


class SessionExecutor:
    """Runs commands in one session, which is made at the first of them."""

    def __init__(
        self,
        line: Line,
        *,
        persistent: bool = True,
        sandbox: str = "",
        cwd: str = "",
        env: dict[str, str] | None = None,
        profile: str = "",
        max_output_bytes: int = 1024 * 1024,
    ) -> None:
        self._line = line
        self._persistent = persistent
        self._max_bytes = max_output_bytes
        self._create = pb.CreateSessionRequest(
            initial_cwd=cwd,
            environment=env or {},
            kind=pb.SHELL,
            sandbox=sandbox,
            policy=pb.SessionPolicy(profile=profile),
        )
        # Sessions of one executor are counted: creators that race name the same one, and so make it once.
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

    # --- what to ask ---------------------------------------------------------------------------------------------

    def steps(self, command: str, timeout: float | None) -> Steps:
        """From a command to its result."""
        request = pb.RunCommandRequest(
            command=command,
            timeout_ms=0 if timeout is None else max(1, round(timeout * 1000)),
            max_bytes=self._max_bytes,
            request_id=secrets.token_hex(16),
        )
        if not self._persistent:
            request.create.CopyFrom(self._create)
            # The same session again, should the call be made twice: what it ran is not run in another.
            request.create.request_id = request.request_id
            return (yield from self._run(request, timeout))
        for _ in range(RENEWALS):
            generation, request.session_id = yield from self._session()
            try:
                return (yield from self._run(request, timeout))
            except (problems.NotFound, problems.NotNow):
                # Refused, so not begun. Whether for the session's death is for the session to say.
                if not (yield from self._died(request.session_id)):
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
            created = yield from _reached(Ask("CreateSession", create))
            session_id = created.session_id
            with self._changing:
                if self._generation == generation:
                    self._session_id = session_id
        return generation, session_id

    def _run(self, request: pb.RunCommandRequest, timeout: float | None) -> Steps:
        limit = None if timeout is None else timeout + SLACK_SECONDS
        generation = self._generation
        reply = yield from _reached(Ask("RunCommand", request, limit))
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

    def _died(self, session_id: str) -> Generator[Step, Any, bool]:
        try:
            found = yield from _reached(Ask("GetSession", pb.GetSessionRequest(session_id=session_id)))
        except problems.NotFound:
            return True
        return found.state in _OVER

    def _forget(self, generation: int) -> None:
        with self._changing:
            if self._generation == generation:
                self._generation += 1
                self._session_id = ""

    # --- who asks ------------------------------------------------------------------------------------------------

    def run(self, command: str, *, timeout: float | None = None) -> ExecutionResult:
        return self._carry_out(self.steps(command, timeout))

    def _carry_out(self, steps: Steps) -> ExecutionResult:
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
                reply = self._line.explain_failure()
                continue
            try:
                reply = self._call(step)
            except grpc.RpcError as error:
                problem = problem_of(error)

    def _call(self, ask: Ask) -> Any:
        with self._changing:
            if self._channel is None:
                self._channel = open_channel(self._line)
            channel = self._channel
        return call(channel, self._line, ask)

    async def run_async(self, command: str, *, timeout: float | None = None) -> ExecutionResult:
        return await self._carry_out_async(self.steps(command, timeout))

    async def _carry_out_async(self, steps: Steps) -> ExecutionResult:
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
                reply = await asyncio.to_thread(self._line.explain_failure)
                continue
            try:
                reply = await self._call_async(step)
            except grpc.RpcError as error:
                problem = problem_of(error)

    async def _call_async(self, ask: Ask) -> Any:
        loop = asyncio.get_running_loop()
        if self._aio is None:
            self._aio = _aio_channel(self._line), loop
        if self._aio[1] is not loop:
            raise InvalidRequest("this executor belongs to another event loop; make one for each")
        method = self._aio[0].unary_unary(*_by_name(ask.method))
        return await method(ask.request, timeout=ask.timeout, metadata=self._line.metadata)

    # --- the end -------------------------------------------------------------------------------------------------

    def _last(self) -> Ask | None:
        """The call that closes the session, if there is one; it is forgotten either way."""
        with self._changing:
            session_id, self._session_id = self._session_id, ""
            self._generation += 1
        return Ask("CloseSession", pb.CloseSessionRequest(session_id=session_id)) if session_id else None

    def close(self) -> None:
        try:
            if (ask := self._last()) is not None:
                self._call(ask)
        except grpc.RpcError as error:
            _unless_over(error)
        finally:
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    async def aclose(self) -> None:
        try:
            if (ask := self._last()) is not None:
                await self._call_async(ask)
        except grpc.RpcError as error:
            _unless_over(error)
        finally:
            if self._aio is not None:
                channel, self._aio = self._aio[0], None
                await channel.close()


def _reached(ask: Ask) -> Generator[Step, Any, Any]:
    """The reply to a call, which is made again while the service cannot be reached.

    Calls that change something carry a `request_id`, so the one that was made twice happened once. A port that
    cannot be talked to as it is called, such as TLS in plain text, is `HandshakeFailed` at once.
    """
    pause, waited, checked = FIRST_PAUSE, 0.0, False
    while True:
        try:
            return (yield ask)
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
    """A method's path, and how its messages become bytes and back."""
    service = pb.DESCRIPTOR.services_by_name["SessionService"].full_name
    return f"/{service}/{method}", _as_bytes, _REPLIES[method].FromString


def _as_bytes(message: Message) -> bytes:
    return message.SerializeToString()


def _unless_over(error: grpc.RpcError) -> None:
    """A session that is over already needs no closing; one that cannot be reached closes by its idle time."""
    problem = problem_of(error)
    if not isinstance(problem, problems.NotFound | problems.NotNow | problems.Unavailable):
        raise problem from error


def call(channel: grpc.Channel, line: Line, ask: Ask) -> Any:
    """Make one call and wait for its reply."""
    method = channel.unary_unary(*_by_name(ask.method))
    return method(ask.request, timeout=ask.timeout, metadata=line.metadata)


def open_channel(line: Line) -> grpc.Channel:
    """For blocking calls. It connects at the first one."""
    credentials = line.credentials()
    if credentials is None:
        return grpc.insecure_channel(line.address, _OPTIONS)
    return grpc.secure_channel(line.address, credentials, _OPTIONS)


def _aio_channel(line: Line) -> grpc.aio.Channel:
    credentials = line.credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(line.address, _OPTIONS)
    return grpc.aio.secure_channel(line.address, credentials, _OPTIONS)


def _content(path: str | None) -> bytes | None:
    if path is None:
        return None
    with open(path, "rb") as file:
        return file.read()
