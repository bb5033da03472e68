"""The methods of the protocol for dashboards: converts the request, calls the views, converts the reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final, cast

import holdfast
from holdfast.service.fronts import replies, requests
from holdfast.service.problems import Denied, NotNow
from holdfast.service.types import Caller
from holdfast.service.view_api import SessionSummary, ViewApi
from holdfast.session.v1 import session_pb2 as pb

#: Screens of one call, and sessions whose usage one stream follows: a wall, and a page of a list.
MOST_SCREENS: Final = 50
MOST_FOLLOWED: Final = 200
#: Model calls of one report: more than an agent makes between two of them.
MOST_CALLS: Final = 100


class ViewHandler:
    """The part of the handler that serves the views."""

    def __init__(self, views: ViewApi | None) -> None:
        self._known_views = views

    @property
    def _views(self) -> ViewApi:
        if self._known_views is None:
            raise NotNow("this service has no views", reason="NO_VIEWS")
        return self._known_views

    async def get_caller(self, caller: Caller, request: pb.GetCallerRequest) -> pb.GetCallerResponse:
        return replies.message(pb.GetCallerResponse, caller, version=holdfast.__version__)

    async def list_summaries(self, caller: Caller, request: pb.ListSummariesRequest) -> pb.ListSummariesResponse:
        which = requests.summary_filter(request)
        only_own(caller, which.agent_id)
        page = await self._views.summaries(
            caller,
            which,
            page_size=requests.page_size(request.page_size),
            page_token=requests.identifier(request.page_token, "page_token"),
        )
        return pb.ListSummariesResponse(
            sessions=map(_summary, page.sessions), next_page_token=page.next_page_token, counts=page.counts
        )

    async def watch_sessions(
        self, caller: Caller, request: pb.WatchSessionsRequest
    ) -> AsyncIterator[pb.SessionChange]:
        names = requests.session_ids(request.session_ids, MOST_FOLLOWED)
        changes = self._views.changes(caller, names, only=request.only)
        async with closing(changes):
            async for change in changes:
                session = None if change.session is None else _summary(change.session)
                yield pb.SessionChange(session=session, reload=change.reload)

    async def stream_terminal(
        self, caller: Caller, request: pb.StreamTerminalRequest
    ) -> AsyncIterator[pb.TerminalFrame]:
        since = requests.identifier(request.since.value, "since.value")
        frames = self._views.stream_terminal(caller, requests.session_id(request), since)
        async with closing(frames):
            async for frame in frames:
                yield replies.message(pb.TerminalFrame, frame)

    async def get_screens(self, caller: Caller, request: pb.GetScreensRequest) -> pb.GetScreensResponse:
        found = await self._views.screens(caller, requests.session_ids(request.session_ids, MOST_SCREENS))
        return pb.GetScreensResponse(screens=[replies.message(pb.TerminalScreen, each) for each in found])

    async def list_commands(self, caller: Caller, request: pb.ListCommandsRequest) -> pb.ListCommandsResponse:
        found, token = await self._views.commands(
            caller,
            requests.session_id(request),
            page_token=requests.identifier(request.page_token, "page_token"),
        )
        commands = [replies.message(pb.SessionCommand, each) for each in found]
        return pb.ListCommandsResponse(commands=commands, next_page_token=token)

    async def read_recording(self, caller: Caller, request: pb.ReadRecordingRequest) -> pb.ReadRecordingResponse:
        part = await self._views.recording(
            caller,
            requests.session_id(request),
            since=requests.identifier(request.since.value, "since.value"),
            max_bytes=min(requests.read_size(request.max_bytes or requests.MIB), replies.LARGEST_REPLY // 2),
        )
        return replies.message(pb.ReadRecordingResponse, part)

    async def list_usage(self, caller: Caller, request: pb.ListUsageRequest) -> pb.ListUsageResponse:
        found = await self._views.usage(caller, requests.session_id(request, required=False))
        return pb.ListUsageResponse(samples=[replies.message(pb.UsageSample, each) for each in found])

    async def list_sandboxes(self, caller: Caller, request: pb.ListSandboxesRequest) -> pb.ListSandboxesResponse:
        return replies.message(pb.ListSandboxesResponse, await self._views.sandboxes(caller))

    async def verify_audit(self, caller: Caller, request: pb.VerifyAuditRequest) -> pb.VerifyAuditResponse:
        found = await self._views.verify_audit(caller, requests.session_id(request, required=False))
        return replies.message(pb.VerifyAuditResponse, found)

    async def take_over(self, caller: Caller, request: pb.TakeOverRequest) -> pb.TakeOverResponse:
        await self._views.take_over(caller, requests.session_id(request), release=request.release)
        return pb.TakeOverResponse()

    async def record_model_calls(
        self, caller: Caller, request: pb.RecordModelCallsRequest
    ) -> pb.RecordModelCallsResponse:
        calls = requests.model_calls(request.calls, MOST_CALLS)
        await self._views.record_model_calls(caller, requests.session_id(request), calls)
        return pb.RecordModelCallsResponse()

    async def list_model_calls(
        self, caller: Caller, request: pb.ListModelCallsRequest
    ) -> pb.ListModelCallsResponse:
        found = await self._views.model_calls(caller, requests.session_id(request, required=False))
        return replies.message(pb.ListModelCallsResponse, found)


def _summary(summary: SessionSummary) -> pb.SessionSummary:
    usage = summary.usage
    return replies.message(
        pb.SessionSummary,
        summary,
        kind=pb.SHELL if summary.kind == "shell" else pb.TERMINAL,
        usage=usage and replies.message(pb.ResourceUsage, usage, long_running_flag=usage.long_running),
    )


def only_own(caller: Caller, agent_id: str) -> None:
    if agent_id and not caller.may_see(agent_id):
        raise Denied("only an operator may name another agent", reason="NOT_OPERATOR", field="agent_id")


def closing(iterator: AsyncIterator[Any]) -> aclosing[AsyncGenerator[Any, None]]:
    # The sessions return generators; the interface promises only iterators.
    return aclosing(cast("AsyncGenerator[Any, None]", iterator))
