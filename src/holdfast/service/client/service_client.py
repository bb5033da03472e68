"""`ServiceClient`: the methods of the session service for Python programs, over gRPC.

gRPC is part of the extra `service`, so this module imports it when a client is made. A call that fails because the
service is unreachable is repeated: reads have no effect, and calls with an effect carry a request id, under which
the service acts once. Streams resume after the last item that was yielded.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar

from holdfast.client.defaults import StrPath
from holdfast.errors import InvalidParams
from holdfast.service import problems
from holdfast.service.api import (
    Chunk,
    CloseResult,
    Control,
    ControlType,
    CreateRequest,
    InputResult,
    OutputRead,
    PolicyRequest,
    Preview,
    RunRequest,
    RunResult,
    SessionEvent,
)
from holdfast.service.client.endpoint import endpoint
from holdfast.service.client.types import CreatedSession, Session, model_call
from holdfast.service.types import Approval, AuditRow, EventType, Kind, State
from holdfast.service.view_api import ModelCall
from holdfast.sync.facade import Blocking, Closing, LoopThread, Streaming

if TYPE_CHECKING:
    from holdfast.bridge.record import CallRecord

#: How long a call may take beyond the time that the request itself allows: the first session in a new sandbox
#: takes some seconds.
TIMEOUT_SECONDS: Final = 30.0
#: How long calls to an unreachable service are repeated: longer than a restart or a change of replicas.
RETRY_SECONDS: Final = 60.0
#: Rows and sessions of one page, the largest that the service returns.
_PAGE: Final = 1_000
#: Model calls of one report, as many as the service takes; and those that wait while it is unreachable: more than
#: an agent makes in `RETRY_SECONDS`. Of more, the oldest are left out.
_CALLS: Final = 100
_MOST_WAITING: Final = 10_000

_Item = TypeVar("_Item")


class ServiceClient:
    """A client of the session service, for one event loop.

        async with holdfast.ServiceClient("https://agents.example.com:7400", token="hf_...") as service:
            session = await service.create_session(labels={"task": "17"})
            result = await service.run_command("make test", session.session_id, timeout=600)

    Errors of the service are those of `holdfast.service.problems`, each with its `reason`.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        tls_ca: StrPath | None = None,
        tls_cert: StrPath | None = None,
        tls_key: StrPath | None = None,
        timeout: float = TIMEOUT_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """`address` is that of the gRPC port: `https://HOST:PORT`, `http://HOST:PORT`, `unix:PATH` or `HOST:PORT`.

        Without `address` and `token`, HOLDFAST_SERVICE_ADDRESS and HOLDFAST_SERVICE_TOKEN are used. `tls_ca` is a
        file with the authority that signed the service's certificate, by default those of the system; `tls_cert`
        and `tls_key` are the client's, if the service requires them. `timeout` bounds each attempt of a call,
        beyond the wait or timeout of the request; `retry_seconds` is how long an unreachable service is retried.
        """
        try:
            from holdfast.service.client import messages, rpc
            from holdfast.session.v1 import session_pb2
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "holdfast":
                raise
            raise InvalidParams(f"ServiceClient needs {error.name}: pip install 'holdfast[service]'") from None
        self._rpc, self._messages, self._pb = rpc, messages, session_pb2
        self._caller = rpc.AsyncCaller(endpoint(address, token, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key))
        self._timeout = timeout
        self._retry_seconds = retry_seconds

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection. Sessions stay open."""
        await self._caller.aclose()

    # --- sessions ------------------------------------------------------------------------------------------------

    async def create_session(
        self,
        *,
        kind: Kind = "terminal",
        sandbox: str = "",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        policy: PolicyRequest | None = None,
        shell: str = "",
        cols: int = 80,
        rows: int = 24,
        labels: Mapping[str, str] | None = None,
        agent_id: str = "",
        request_id: str = "",
    ) -> CreatedSession:
        """Open a session and wait for its first prompt. The same `request_id` returns the same session."""
        request = CreateRequest(
            agent_id=agent_id,
            initial_cwd=cwd,
            environment=dict(env or {}),
            policy=policy or PolicyRequest(),
            kind=kind,
            sandbox=sandbox,
            shell=shell,
            cols=cols,
            rows=rows,
            labels=dict(labels or {}),
            request_id=request_id or _new_id(),
        )
        return self._messages.created(await self._call("CreateSession", self._messages.create(request)))

    async def get_session(self, session_id: str) -> Session:
        """Return a session with its state and the monitor's last sample."""
        request = self._pb.GetSessionRequest(session_id=session_id)
        return self._messages.session(await self._call("GetSession", request))

    async def list_sessions(
        self,
        *,
        agent_id: str = "",
        states: Sequence[State] = (),
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
    ) -> list[Session]:
        """Return the sessions that the caller may see, oldest first; `limit` bounds their number."""
        for state in states:
            self._messages.check_name("state", state, State)
        request = self._pb.ListSessionsRequest(
            agent_id=agent_id,
            states=states,
            labels=dict(labels or {}),
        )
        pages = self._pages("ListSessions", request, lambda reply: reply.sessions, limit)
        async with contextlib.aclosing(pages) as found:
            return [self._messages.session(each) async for each in found]

    async def close_session(self, session_id: str, *, force: bool = False) -> CloseResult:
        """End a session with its processes. `force` kills at once. Closing a closed session is no error."""
        mode = self._pb.FORCE if force else self._pb.GRACEFUL
        request = self._pb.CloseSessionRequest(session_id=session_id, mode=mode)
        return self._messages.closed(await self._call("CloseSession", request))

    async def create_preview(self, session_id: str, port: int, *, lifetime: float | None = None) -> Preview:
        """Open a port of the session's sandbox to browsers, for `lifetime` seconds at most; `url` has a ticket."""
        seconds = 0 if lifetime is None else max(1, int(lifetime))
        request = self._pb.CreatePreviewRequest(session_id=session_id, port=port, lifetime_seconds=seconds)
        return self._messages.struct(Preview, await self._call("CreatePreview", request))

    # --- input and output ----------------------------------------------------------------------------------------

    async def send_input(
        self,
        session_id: str,
        data: str | bytes = b"",
        *controls: ControlType | Control,
        request_id: str = "",
    ) -> InputResult:
        """Type text, and then send control actions; `Control("RESIZE", cols, rows)` sets the size."""
        request = self._pb.SendInputRequest(
            session_id=session_id,
            data=data.encode() if isinstance(data, str) else data,
            actions=[
                self._messages.control(each if isinstance(each, Control) else Control(each)) for each in controls
            ],
            request_id=request_id or _new_id(),
        )
        return self._messages.struct(InputResult, await self._call("SendInput", request))

    async def read_output(
        self, session_id: str, *, since: str = "", max_bytes: int = 64 * 1024, wait: float = 0.0
    ) -> OutputRead:
        """Return the output after a token; wait up to `wait` seconds, at most 60, for output."""
        request = self._pb.ReadOutputRequest(
            session_id=session_id,
            since=self._pb.OutputToken(value=since),
            max_bytes=max_bytes,
            wait_timeout_ms=round(wait * 1000),
        )
        return self._messages.output(await self._call("ReadOutput", request, wait))

    async def stream_output(self, session_id: str, *, since: str = "") -> AsyncGenerator[Chunk]:
        """Yield the output after a token until the session is over; resumes after a lost connection."""

        def request(position: str) -> Any:
            token = self._pb.OutputToken(value=position)
            return self._pb.StreamOutputRequest(session_id=session_id, since=token)

        stream = self._resumed("StreamOutput", request, since, lambda message: message.token.value)
        async with contextlib.aclosing(stream) as found:
            async for message in found:
                yield self._messages.struct(Chunk, message)

    async def run_command(
        self,
        command: str,
        session_id: str = "",
        *,
        create: CreateRequest | None = None,
        timeout: float | None = None,
        max_bytes: int = 64 * 1024,
        request_id: str = "",
    ) -> RunResult:
        """Run a command to its end: in a session, or in one that is made from `create` and closed after it.

        After `timeout` seconds the command is ended and `timed_out` is set; None is the service's default. A call
        with the same `request_id` returns the result of the same run.
        """
        request_id = request_id or _new_id()
        message = self._messages.run(
            RunRequest(
                command=command,
                session_id=session_id,
                create=create,
                timeout=timeout,
                max_bytes=max_bytes,
                request_id=request_id,
            )
        )
        if not session_id and not message.create.request_id:
            # A repeated call gets the same session, so the command does not run in a second one.
            message.create.request_id = request_id
        return self._messages.ran(await self._call("RunCommand", message, timeout))

    # --- events, audit, approvals --------------------------------------------------------------------------------

    async def events(
        self, session_id: str = "", *, since: str = "", types: Sequence[EventType] = ()
    ) -> AsyncGenerator[SessionEvent]:
        """Yield events of a session, or of all that the caller may see; resumes after the last one.

        Without `since` only new events are yielded. A connection that is lost before the first event resumes with
        new events: read `list_approvals` after the first event of a subscription if none may be missed.
        """

        for each in types:
            self._messages.check_name("type", each, EventType)

        def request(position: str) -> Any:
            return self._pb.SubscribeSessionEventsRequest(session_id=session_id, since=position, types=types)

        stream = self._resumed("SubscribeSessionEvents", request, since, lambda message: message.token)
        async with contextlib.aclosing(stream) as found:
            async for message in found:
                if (event := self._messages.event(message)) is not None:
                    yield event

    async def audit(
        self,
        session_id: str = "",
        *,
        agent_id: str = "",
        kinds: Sequence[str] = (),
        command_id: str = "",
        since: float | None = None,
        until: float | None = None,
        contains: str = "",
        newest_first: bool = False,
        limit: int | None = None,
    ) -> AsyncGenerator[AuditRow]:
        """Yield rows of the audit log, page by page. Their `previous` is empty: the protocol does not have it."""
        request = self._pb.ListAuditRequest(
            session_id=session_id,
            agent_id=agent_id,
            kinds=kinds,
            command_id=command_id,
            since=self._messages.timestamp(since),
            until=self._messages.timestamp(until),
            contains=contains,
            newest_first=newest_first,
        )
        pages = self._pages("ListAudit", request, lambda reply: reply.records, limit)
        async with contextlib.aclosing(pages) as found:
            async for record in found:
                yield self._messages.audit_row(record)

    async def list_approvals(self, session_id: str = "", *, ended: bool = False) -> list[Approval]:
        """Return the commands that wait for an approval, oldest first; with `ended` the latest 100 of all."""
        request = self._pb.ListApprovalsRequest(session_id=session_id, ended=ended)
        reply = await self._call("ListApprovals", request)
        return [self._messages.struct(Approval, each) for each in reply.approvals]

    async def answer_approval(
        self, approval_id: str, approve: bool, *, comment: str = ""
    ) -> Literal["approved", "refused"]:
        """Approve or refuse a command that waits. Raises `NotNow` if its approval ended before."""
        request = self._pb.AnswerApprovalRequest(approval_id=approval_id, approve=approve, comment=comment)
        outcome: Literal["approved", "refused"] = "approved" if approve else "refused"
        attempt = self._rpc.RpcCall("AnswerApproval", request, self._timeout)
        try:
            await self._caller.call(attempt)
        except problems.Unavailable as problem:
            retry = self._rpc.Retry(self._retry_seconds)
            await self._caller.drive(retry.after(problem))
        else:
            return outcome
        try:
            await self._call("AnswerApproval", request)
        except problems.NotNow:
            # The reply to the first attempt can be lost after the answer was stored.
            if not await self._answered(approval_id, outcome, comment):
                raise
        return outcome

    async def _answered(self, approval_id: str, outcome: str, comment: str) -> bool:
        for each in await self.list_approvals(ended=True):
            if each.approval_id == approval_id:
                return each.outcome == outcome and each.comment == comment
        return False

    # --- model calls ---------------------------------------------------------------------------------------------

    async def record_model_calls(self, session_id: str, calls: Sequence[ModelCall]) -> None:
        """Add ended model calls to the log of a session. A call whose `call_id` the log has is left out."""
        for at in range(0, len(calls), _CALLS):
            request = self._pb.RecordModelCallsRequest(
                session_id=session_id, calls=map(self._messages.model_call, calls[at : at + _CALLS])
            )
            await self._call("RecordModelCalls", request)

    @contextlib.asynccontextmanager
    async def recording_model_calls(self, session_id: str) -> AsyncIterator[Callable[[CallRecord], None]]:
        """Yield a function for `on_call` of a bridge, which records its calls in a session.

        Calls are sent in the background, and the last ones when the block ends. A failure to send is raised at the
        end of the block: it must not end the agent.
        """
        prefix, ended = _new_id(), False
        waiting: deque[ModelCall] = deque(maxlen=_MOST_WAITING)
        changed = asyncio.Event()

        def add(record: CallRecord) -> None:
            waiting.append(model_call(record, prefix))
            changed.set()

        async def send() -> None:
            while waiting or not ended:
                await changed.wait()
                changed.clear()
                calls = list(waiting)
                waiting.clear()
                await self.record_model_calls(session_id, calls)

        sending = asyncio.create_task(send())
        try:
            yield add
        finally:
            ended = True
            changed.set()
            await sending

    # --- calls ---------------------------------------------------------------------------------------------------

    async def _call(self, method: str, request: Any, seconds: float | None = 0.0) -> Any:
        """Make a call that may be repeated; `seconds` is the time that the request itself allows, None any."""
        timeout = None if seconds is None else seconds + self._timeout
        return await self._caller.drive(
            self._rpc.retried(self._rpc.RpcCall(method, request, timeout), self._retry_seconds)
        )

    async def _resumed(
        self, method: str, request: Callable[[str], Any], position: str, position_of: Callable[[Any], str]
    ) -> AsyncGenerator[Any]:
        """Yield the messages of a stream, which begins again after the last position if the connection is lost."""
        retry = self._rpc.Retry(self._retry_seconds)
        while True:
            stream: Any = self._caller.stream(method, request(position))
            try:
                async with contextlib.aclosing(stream) as messages:
                    async for message in messages:
                        retry.succeeded()
                        # Before the yield: a caller that closes the generator has received this message.
                        position = position_of(message) or position
                        yield message
                return
            except problems.Unavailable as problem:
                failure = problem
            await self._caller.drive(retry.after(failure))

    async def _pages(
        self, method: str, request: Any, items: Callable[[Any], Sequence[_Item]], limit: int | None
    ) -> AsyncGenerator[_Item]:
        left = limit
        while left is None or left > 0:
            request.page_size = _PAGE if left is None else min(left, _PAGE)
            reply = await self._call(method, request)
            for item in items(reply):
                yield item
            if left is not None:
                left -= len(items(reply))
            if not reply.next_page_token:
                return
            request.page_token = reply.next_page_token


class BlockingServiceClient(Closing[ServiceClient]):
    """`holdfast.sync.ServiceClient`: a blocking client, for use from any number of threads.

    One thread runs an event loop for each client; every call runs there while the calling thread waits. Leaving its
    `with` block, or `close`, closes the connection. Sessions stay open.
    """

    def __init__(self, address: str | None = None, **options: Any) -> None:
        """`address` and `options` are those of `holdfast.ServiceClient`."""
        inner = ServiceClient(address, **options)
        super().__init__(LoopThread(), inner)

    def close(self) -> None:
        """Close the connection. Closing twice is no error."""
        if not self._loop.closed:
            try:
                self._loop.run(self._inner.aclose())
            finally:
                self._loop.close()

    create_session = Blocking(ServiceClient.create_session)
    get_session = Blocking(ServiceClient.get_session)
    list_sessions = Blocking(ServiceClient.list_sessions)
    close_session = Blocking(ServiceClient.close_session)
    create_preview = Blocking(ServiceClient.create_preview)
    send_input = Blocking(ServiceClient.send_input)
    read_output = Blocking(ServiceClient.read_output)
    stream_output = Streaming(ServiceClient.stream_output)
    run_command = Blocking(ServiceClient.run_command)
    events = Streaming(ServiceClient.events)
    audit = Streaming(ServiceClient.audit)
    list_approvals = Blocking(ServiceClient.list_approvals)
    answer_approval = Blocking(ServiceClient.answer_approval)
    record_model_calls = Blocking(ServiceClient.record_model_calls)


def _new_id() -> str:
    return secrets.token_hex(16)
