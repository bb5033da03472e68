"""One function for each method of the protocol: converts the request, calls the service, converts the reply.

gRPC and HTTP share it, so the two cannot differ. It uses no status codes and no headers.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, cast

from holdfast.service.api import PreviewApi, SessionApi
from holdfast.service.fronts import replies, requests
from holdfast.service.fronts.view_handler import ViewHandler, closing, only_own
from holdfast.service.problems import NotNow
from holdfast.service.types import Caller, ServiceStruct
from holdfast.service.view_api import ViewApi
from holdfast.session.v1 import session_pb2 as pb

SERVICE: Final = pb.DESCRIPTOR.services_by_name["SessionService"]
SERVICE_NAME: Final[str] = SERVICE.full_name

Unary = Callable[[Caller, Any], Awaitable[Any]]
Stream = Callable[[Caller, Any], AsyncIterator[Any]]
# These calls wait and change nothing: a service that stops ends them, and clients repeat them at another replica.
_WAITING: Final = frozenset(
    {"ReadOutput", "StreamOutput", "StreamTerminal", "SubscribeSessionEvents", "WatchSessions"}
)


class RpcMethod(ServiceStruct, frozen=True):
    """A method of the protocol's descriptor."""

    name: str
    request: type[Any]
    reply: type[Any]
    stream: bool
    #: Whether a service that stops may end the call early.
    waits: bool

    @property
    def path(self) -> str:
        return f"/{SERVICE_NAME}/{self.name}"

    def makes_session(self, request: Any) -> bool:
        """Return whether this request creates a session, also for a single command."""
        return self.name == "CreateSession" or (self.name == "RunCommand" and not request.session_id)


def methods() -> list[RpcMethod]:
    """Return all methods of the protocol, in its order."""
    return [
        RpcMethod(
            name=each.name,
            request=getattr(pb, each.input_type.name),
            reply=getattr(pb, each.output_type.name),
            stream=each.server_streaming,
            waits=each.name in _WAITING,
        )
        for each in SERVICE.methods
    ]


class Handler(ViewHandler):
    """Serves both front ends. Raises only `Problem`, except for bugs."""

    def __init__(
        self, api: SessionApi, views: ViewApi | None = None, *, previews: PreviewApi | None = None
    ) -> None:
        """Without `views`, the methods for dashboards are refused; without `previews`, `CreatePreview` is."""
        super().__init__(views)
        self._api = api
        self._previews = previews

    def unary(self, method: RpcMethod) -> Unary:
        """Return the function for a method with one reply."""
        return cast(Unary, getattr(self, _function_name(method)))

    def stream(self, method: RpcMethod) -> Stream:
        """Return the function for a method with a stream of replies."""
        return cast(Stream, getattr(self, _function_name(method)))

    async def create_session(self, caller: Caller, request: pb.CreateSessionRequest) -> pb.CreateSessionResponse:
        requested = requests.create_request(request)
        only_own(caller, requested.agent_id)
        return replies.created(await self._api.create(caller, requested))

    async def send_input(self, caller: Caller, request: pb.SendInputRequest) -> pb.SendInputResponse:
        taken = await self._api.send_input(
            caller,
            requests.session_id(request),
            requests.input_data(request),
            requests.controls(request.actions),
            requests.identifier(request.request_id, "request_id"),
        )
        return replies.message(pb.SendInputResponse, taken)

    async def read_output(self, caller: Caller, request: pb.ReadOutputRequest) -> pb.ReadOutputResponse:
        read = await self._api.read_output(
            caller,
            requests.session_id(request),
            since=requests.identifier(request.since.value, "since.value"),
            max_bytes=min(requests.read_size(request.max_bytes), replies.LARGEST_REPLY),
            wait=requests.wait_seconds(request.wait_timeout_ms),
        )
        return replies.output(read)

    async def stream_output(self, caller: Caller, request: pb.StreamOutputRequest) -> AsyncIterator[pb.OutputChunk]:
        chunks = self._api.stream_output(
            caller, requests.session_id(request), requests.identifier(request.since.value, "since.value")
        )
        async with closing(chunks):
            async for chunk in chunks:
                yield replies.chunk(chunk)

    async def get_session(self, caller: Caller, request: pb.GetSessionRequest) -> pb.GetSessionResponse:
        return replies.session(await self._api.get(caller, requests.session_id(request)))

    async def list_sessions(self, caller: Caller, request: pb.ListSessionsRequest) -> pb.ListSessionsResponse:
        agent_id = requests.identifier(request.agent_id, "agent_id")
        only_own(caller, agent_id)
        found, next_page = await self._api.find(
            caller,
            agent_id=agent_id,
            states=requests.states(request.states),
            labels=requests.labels(request.labels),
            page_size=requests.page_size(request.page_size),
            page_token=requests.identifier(request.page_token, "page_token"),
        )
        return pb.ListSessionsResponse(sessions=map(replies.session, found), next_page_token=next_page)

    async def close_session(self, caller: Caller, request: pb.CloseSessionRequest) -> pb.CloseSessionResponse:
        closed = await self._api.close(caller, requests.session_id(request), requests.close_mode(request.mode))
        return pb.CloseSessionResponse(final_state=closed.state, summary=closed.summary)

    async def subscribe_session_events(
        self, caller: Caller, request: pb.SubscribeSessionEventsRequest
    ) -> AsyncIterator[pb.SessionEvent]:
        events = self._api.events(
            caller,
            requests.session_id(request, required=False),
            requests.identifier(request.since, "since"),
            requests.event_types(request.types),
        )
        async with closing(events):
            async for event in events:
                yield replies.message(pb.SessionEvent, event)

    async def run_command(self, caller: Caller, request: pb.RunCommandRequest) -> pb.RunCommandResponse:
        requested = requests.run_request(request)
        if requested.create is not None:
            only_own(caller, requested.create.agent_id)
        return replies.ran(await self._api.run_command(caller, requested))

    async def list_audit(self, caller: Caller, request: pb.ListAuditRequest) -> pb.ListAuditResponse:
        which = requests.audit_filter(request)
        only_own(caller, which.agent_id)
        rows, next_page = await self._api.audit(
            caller,
            which,
            page_size=requests.page_size(request.page_size),
            page_token=requests.identifier(request.page_token, "page_token"),
        )
        return replies.audit(rows, next_page)

    async def list_approvals(self, caller: Caller, request: pb.ListApprovalsRequest) -> pb.ListApprovalsResponse:
        session_id = requests.session_id(request, required=False)
        found = await self._api.approvals(caller, session_id, ended=request.ended)
        return pb.ListApprovalsResponse(approvals=[replies.message(pb.Approval, each) for each in found])

    async def create_preview(self, caller: Caller, request: pb.CreatePreviewRequest) -> pb.CreatePreviewResponse:
        requested = requests.preview_request(request)
        if self._previews is None:
            raise NotNow("this service has no port for previews (setting listen_preview)", reason="PREVIEWS_OFF")
        return replies.message(pb.CreatePreviewResponse, await self._previews.create_preview(caller, requested))

    async def answer_approval(self, caller: Caller, request: pb.AnswerApprovalRequest) -> pb.AnswerApprovalResponse:
        outcome = await self._api.answer_approval(
            caller,
            requests.identifier(request.approval_id, "approval_id", required=True),
            request.approve,
            requests.text(request.comment, "comment", requests.LONGEST_COMMENT),
        )
        return pb.AnswerApprovalResponse(outcome=outcome)


def _function_name(method: RpcMethod) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()
