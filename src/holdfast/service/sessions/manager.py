"""The SessionManager creates, finds and closes sessions, and passes each call to the part that answers it.

It implements `api.SessionApi`. The assembly gives it the store, the rules, the sandbox pool and the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, Literal

import msgspec

from holdfast.service.api import (
    AuditFilter,
    Chunk,
    CloseResult,
    Control,
    CreateRequest,
    CreateResult,
    InputResult,
    OutputRead,
    RunRequest,
    RunResult,
    SessionEvent,
    SessionView,
)
from holdfast.service.clock import WallClock
from holdfast.service.observability.tracing import NullTracer, Tracer
from holdfast.service.problems import NotFound, NotNow, Problem
from holdfast.service.sessions.approvals import ApprovalBroker
from holdfast.service.sessions.backend.connections import SandboxConnections
from holdfast.service.sessions.closing import SessionCloser
from holdfast.service.sessions.context import SessionContext
from holdfast.service.sessions.creation import SessionCreator
from holdfast.service.sessions.following.events import EventStreams, NoticeHub
from holdfast.service.sessions.following.leases import Leases
from holdfast.service.sessions.handles import SessionHandles
from holdfast.service.sessions.input_handler import InputHandler
from holdfast.service.sessions.input_judge import InputCall
from holdfast.service.sessions.ports import (
    AssignedProfile,
    EmitMetric,
    FindUsage,
    MetricEvent,
    NoSandboxes,
    PlanEnforcement,
    Prepare,
    Redact,
    SandboxSource,
    SessionStore,
    SessionWatcher,
    as_is,
    body_of,
    first_row,
    ignore_metric,
    no_profile,
    no_usage,
    nothing_to_prepare,
)
from holdfast.service.sessions.rulebook import Rulebook
from holdfast.service.sessions.takeover import Takeovers
from holdfast.service.sessions.timers import SessionTimers, TimerHeap, background
from holdfast.service.settings import ServiceSettings
from holdfast.service.store.types import Page, SessionFilter
from holdfast.service.types import (
    OVER,
    Approval,
    AuditRow,
    Caller,
    CloseMode,
    EventType,
    ResourceUsage,
    SessionRecord,
    State,
)

#: States that only the sandbox reports; the database has RUNNING for all of them.
_LIVE: Final[tuple[State, ...]] = ("RUNNING", "BUSY", "IDLE")


class SessionManager:
    """The sessions of the service in one replica."""

    def __init__(
        self,
        *,
        store: SessionStore,
        rules: Rulebook,
        pool: SandboxConnections,
        plan: PlanEnforcement,
        prepare: Prepare = nothing_to_prepare,
        clock: WallClock,
        settings: ServiceSettings,
        redact: Redact = as_is,
        usage: FindUsage = no_usage,
        emit: EmitMetric = ignore_metric,
        tracer: Tracer | None = None,
        watchers: Sequence[SessionWatcher] = (),
        assigned_profile: AssignedProfile = no_profile,
        sandboxes: SandboxSource | None = None,
    ) -> None:
        self.replica = settings.replica or f"replica-{secrets.token_hex(6)}"
        self.store = store
        self.pool = pool
        self.settings = settings
        self._clock = clock
        self._emit = emit
        self._usage = usage
        self._notices = NoticeHub(store, clock)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._heap = TimerHeap(clock)
        spawn = background(self._tasks)
        context = SessionContext(store, pool, self._notices, clock, settings, redact, emit, self.replica)
        self._handles = SessionHandles(context, tracer or NullTracer())
        self._approvals = ApprovalBroker(
            store,
            self._notices,
            self._heap,
            clock,
            redact,
            spawn,
            self._deliver,
            replica=self.replica,
            caller_seconds=settings.lease_seconds,
        )
        timers = SessionTimers(self._heap, store, rules, clock, self._close_for, spawn)
        self.leases = Leases(context, timers, self._adopt, watchers, self._approvals.keep)
        self._input = InputHandler(context, rules, self.leases, self._approvals)
        self._takeovers = Takeovers(context, rules)
        self._events = EventStreams(store, self._notices, clock)
        self._creator = SessionCreator(
            context,
            rules,
            self._handles,
            self.leases,
            self.view,
            plan=plan,
            prepare=prepare,
            assigned_profile=assigned_profile,
            sandboxes=sandboxes or NoSandboxes(),
        )
        self._closer = SessionCloser(context, self._handles, self.leases)

    async def start(self) -> None:
        """Claim the sessions that no other replica follows, and follow them."""
        self._notices.start()
        await self.leases.start()
        await self._approvals.resume()

    async def stop(self) -> None:
        """Release all sessions, which continue in their sandboxes."""
        await self.leases.stop()
        await self._approvals.stop()
        self._heap.stop()
        await self._notices.stop()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.pool.aclose()

    # --- sessions ------------------------------------------------------------------------------------------------

    async def create(self, caller: Caller, request: CreateRequest) -> CreateResult:
        return await self._creator.create(caller, request)

    async def get(self, caller: Caller, session_id: str) -> SessionView:
        record = await self.visible(caller, session_id)
        return await self.view(record, (await self._usages([record])).get(session_id))

    async def find(
        self,
        caller: Caller,
        *,
        agent_id: str = "",
        states: Sequence[State] = (),
        labels: dict[str, str] | None = None,
        page_size: int = 100,
        page_token: str = "",
    ) -> tuple[list[SessionView], str]:
        if caller.role != "operator":
            if agent_id and agent_id != caller.agent_id:
                return [], ""
            agent_id = caller.agent_id
        stored = tuple({"RUNNING" if state in _LIVE else state for state in states})
        which = SessionFilter(agent_id, stored, labels or {})
        records, token = await self.store.sessions(which, Page(page_size, page_token))
        usages = await self._usages(records)
        views = await asyncio.gather(*(self.view(record, usages.get(record.session_id)) for record in records))
        return [view for view in views if not states or view.state in states], token

    async def close(self, caller: Caller, session_id: str, mode: CloseMode = "graceful") -> CloseResult:
        record = await self.visible(caller, session_id)
        return await self._closer.close(record, mode, by=caller.agent_id, reason=f"closed by {caller.agent_id}")

    async def visible(self, caller: Caller, session_id: str) -> SessionRecord:
        """Return the session. A session that the caller may not see is `NotFound`, like one that does not exist."""
        record = await self.store.session(session_id)
        if not caller.may_see(record.agent_id):
            raise NotFound(f"no session {session_id!r}", reason="SESSION_NOT_FOUND")
        follower = self.leases.follower(session_id)
        if follower is not None and not record.over:
            known = follower.record
            record = msgspec.structs.replace(
                record,
                last_activity_at=max(record.last_activity_at, known.last_activity_at),
                commands_run=max(record.commands_run, known.commands_run),
                warned_at=known.warned_at,
            )
        return record

    async def _known(self, caller: Caller, session_id: str) -> SessionRecord:
        """Return the session without a query of the store if this replica follows it.

        For calls to the sandbox, which reports by itself if the session is over.
        """
        follower = self.leases.follower(session_id)
        if follower is None or follower.over.is_set() or not caller.may_see(follower.record.agent_id):
            return await self.visible(caller, session_id)
        return follower.record

    async def _usages(self, records: Sequence[SessionRecord]) -> dict[str, ResourceUsage]:
        """Return the last samples of the sessions that another replica's monitor watches."""
        others = [each.session_id for each in records if not each.over and self._usage(each.session_id) is None]
        return await self.store.usages(others) if others else {}

    async def view(self, record: SessionRecord, usage: ResourceUsage | None = None) -> SessionView:
        """Return the session with its current state; `usage` is for a session that this replica does not watch."""
        usage = self._usage(record.session_id) or usage
        if record.over or record.state == "UNKNOWN":
            return SessionView(record, record.state, record.initial_cwd, usage=usage)
        try:
            status = await self._handles.get(record).backend.status(input_wait=False)
        except Problem:
            # The follower finds out whether the session is lost or only unreachable. A list still has the others.
            return SessionView(record, "UNKNOWN", record.initial_cwd, usage=usage)
        state = _shown_state(record, status.state)
        return SessionView(record, state, status.cwd or record.initial_cwd, status.prompt, usage)

    async def _adopt(self, record: SessionRecord) -> SessionRecord | None:
        """Prepare to follow a session of another replica, or of this one before a restart."""
        if record.state == "UNKNOWN":
            await self._creator.abandoned(record)
            return None
        if record.state == "CLOSING":
            background(self._tasks)(self._close_again(record))
        return record

    async def _close_again(self, record: SessionRecord) -> None:
        with contextlib.suppress(Problem):
            await self._handles.backend(record).close("force")

    async def _close_for(self, session_id: str, reason: str) -> None:
        record = await self.store.session(session_id)
        await self._closer.close(record, "graceful", by="", reason=reason)

    async def enforce_limit(self, record: SessionRecord, step: Literal["terminate", "close"]) -> None:
        """Act on a session that is over a limit which the operating system does not enforce.

        `terminate` sends TERM to the foreground; `close` closes the session by force.
        """
        if step == "terminate":
            terminate = (Control("SIGTERM"),)
            await self._handles.get(record).backend.send(f"limit-{secrets.token_hex(8)}", b"", terminate)
        else:
            await self._closer.close(record, "force", by="", reason="over a limit")

    # --- input and output ----------------------------------------------------------------------------------------

    async def send_input(
        self, caller: Caller, session_id: str, data: bytes, controls: Sequence[Control] = (), request_id: str = ""
    ) -> InputResult:
        record = await self._open(caller, session_id)
        call = InputCall(caller, record, self._handles.get(record), data, controls)
        await self._takeovers.begin(caller, record, call.handle)
        taken = await self._input.send(call, request_id)
        sizes = [control for control in controls if control.type == "RESIZE"]
        if sizes:
            await self.store.update_session(session_id, cols=sizes[-1].cols, rows=sizes[-1].rows)
        return taken

    async def read_output(
        self, caller: Caller, session_id: str, *, since: str = "", max_bytes: int = 64 * 1024, wait: float = 0.0
    ) -> OutputRead:
        record = await self._known(caller, session_id)
        return await self._read(record, since, max_bytes, wait)

    async def _read(self, record: SessionRecord, since: str, max_bytes: int, wait: float) -> OutputRead:
        settings = self.settings
        size = min(max_bytes, settings.max_read_bytes)
        found = await self._handles.get(record).backend.read(since, size, min(wait, settings.max_wait_seconds))
        return msgspec.structs.replace(found, state=_shown_state(record, found.state))

    async def stream_output(self, caller: Caller, session_id: str, since: str = "") -> AsyncIterator[Chunk]:
        """Yield chunks as fast as they are consumed."""
        record = await self.visible(caller, session_id)
        while True:
            found = await self._read(record, since, 64 * 1024, self.settings.max_wait_seconds)
            for chunk in found.chunks:
                yield chunk
            moved, since = found.token != since, found.token
            if found.state in ("CLOSED", "ERROR") and not found.more and not moved:
                return

    async def run_command(self, caller: Caller, request: RunRequest) -> RunResult:
        if request.session_id:
            record = await self._open(caller, request.session_id)
            call = InputCall(caller, record, self._handles.get(record))
            await self._takeovers.begin(caller, record, call.handle)
            return await self._input.run(call, request)
        # A shell by default: the caller gets stdout and stderr apart.
        created = await self.create(caller, request.create or CreateRequest(kind="shell"))
        record = created.view.record
        try:
            return await self._input.run(InputCall(caller, record, self._handles.get(record)), request)
        finally:
            ending = asyncio.ensure_future(self._closer.close(record, "force", by="", reason="command over"))
            self._tasks.add(ending)
            ending.add_done_callback(self._tasks.discard)
            await asyncio.shield(ending)

    async def take_over(self, caller: Caller, session_id: str, *, release: bool = False) -> None:
        """Record that a caller other than the owner begins or ends to type; `Denied` if the rules forbid it."""
        record = await self._open(caller, session_id)
        change = self._takeovers.end if release else self._takeovers.begin
        await change(caller, record, self._handles.get(record))

    @property
    def notices(self) -> NoticeHub:
        return self._notices

    async def _open(self, caller: Caller, session_id: str) -> SessionRecord:
        record = await self._known(caller, session_id)
        if record.over or record.state == "CLOSING":
            raise NotNow(
                f"session {session_id!r} is {record.state}: {record.close_reason or record.summary}",
                reason="SESSION_CLOSED",
            )
        if record.state == "UNKNOWN":
            raise NotNow(
                f"session {session_id!r} is still being created", reason="SESSION_NOT_READY", retry_after=0.5
            )
        return record

    # --- the audit log -------------------------------------------------------------------------------------------

    async def events(
        self, caller: Caller, session_id: str = "", since: str = "", types: Sequence[EventType] = ()
    ) -> AsyncIterator[SessionEvent]:
        if session_id:
            await self.visible(caller, session_id)
        self._emit(MetricEvent("subscribers", amount=1))
        try:
            # Closed with this generator, also when the subscriber disconnects.
            async with contextlib.aclosing(self._events.subscribe(caller, session_id, since, types)) as events:
                async for event in events:
                    yield event
        finally:
            self._emit(MetricEvent("subscribers", amount=-1))

    async def audit(
        self, caller: Caller, which: AuditFilter, *, page_size: int = 100, page_token: str = ""
    ) -> tuple[list[AuditRow], str]:
        if which.session_id:
            await self.visible(caller, which.session_id)
        if caller.role != "operator":
            if which.agent_id and which.agent_id != caller.agent_id:
                return [], ""
            which = msgspec.structs.replace(which, agent_id=caller.agent_id)
        return await self.store.rows(which, Page(page_size, page_token))

    async def approvals(self, caller: Caller, session_id: str = "", *, ended: bool = False) -> list[Approval]:
        if session_id:
            await self.visible(caller, session_id)
        found = await self._approvals.visible(caller, session_id, ended=ended)
        return list(await asyncio.gather(*(self._with_rule(each) for each in found)))

    async def _with_rule(self, approval: Approval) -> Approval:
        which = {"session_id": approval.session_id, "command_id": approval.command_id}
        row = await first_row(self.store, kinds=("decision",), newest_first=True, **which)
        return approval if row is None else msgspec.structs.replace(approval, rule=body_of(row).get("rule", ""))

    async def answer_approval(
        self, caller: Caller, approval_id: str, approve: bool, comment: str = ""
    ) -> Literal["approved", "refused"]:
        return await self._approvals.answer(caller, approval_id, approve, comment)

    async def _deliver(self, record: SessionRecord, approval: Approval) -> None:
        await self._input.deliver(record, self._handles.get(record), approval)


def _shown_state(record: SessionRecord, state: State) -> State:
    """Return the state that the sandbox reports, or CLOSING while a close is under way."""
    return "CLOSING" if record.state == "CLOSING" and state not in OVER else state
