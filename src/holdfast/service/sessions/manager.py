"""The SessionManager: makes, finds and ends sessions, and leads each call to the part that answers it.

It implements `api.SessionApi`. Whoever puts the service together gives it the store, the rules, the way to
sandboxes and the clock; it starts and stops what belongs to sessions.
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
    Closed,
    Control,
    Created,
    CreateRequest,
    Event,
    InputTaken,
    OutputRead,
    RunRequest,
    RunResult,
    SessionView,
)
from holdfast.service.clock import Clock
from holdfast.service.problems import Invalid, NotFound, NotNow, Problem
from holdfast.service.sessions.approvals import Approvals
from holdfast.service.sessions.backend.connections import SandboxPool
from holdfast.service.sessions.backend.shell import ShellLive
from holdfast.service.sessions.backend.terminal import Live, Now, TerminalLive
from holdfast.service.sessions.closing import Closing
from holdfast.service.sessions.creation import Creation
from holdfast.service.sessions.following.command_log import CommandLog
from holdfast.service.sessions.following.events import EventStreams, NoticeBell
from holdfast.service.sessions.following.follower import Surroundings
from holdfast.service.sessions.following.leases import Leases
from holdfast.service.sessions.input import InputDesk
from holdfast.service.sessions.judging import Desk
from holdfast.service.sessions.ports import (
    FindUsage,
    PlanEnforcement,
    Prepare,
    Redact,
    SessionStore,
    Tell,
    as_is,
    no_usage,
    nothing_to_prepare,
    tell_nobody,
)
from holdfast.service.sessions.rulebook import Rulebook
from holdfast.service.sessions.timers import SessionTimers, TimerHeap, background
from holdfast.service.settings import ServiceSettings
from holdfast.service.store.types import Page, SessionFilter
from holdfast.service.types import (
    Approval,
    AuditRow,
    Caller,
    CloseMode,
    EventType,
    SessionRecord,
    State,
    Usage,
)

#: States that only the sandbox tells; the database has RUNNING for all of them.
_LIVE: Final[tuple[State, ...]] = ("RUNNING", "BUSY", "IDLE")
_MAX_PAGE: Final = 1_000


class SessionManager:
    """The service's sessions, as one replica sees them."""

    def __init__(
        self,
        *,
        store: SessionStore,
        rules: Rulebook,
        pool: SandboxPool,
        plan: PlanEnforcement,
        prepare: Prepare = nothing_to_prepare,
        clock: Clock,
        settings: ServiceSettings,
        redact: Redact = as_is,
        usage: FindUsage = no_usage,
        tell: Tell = tell_nobody,
    ) -> None:
        self.replica = settings.replica or f"replica-{secrets.token_hex(6)}"
        self.store = store
        self.rules = rules
        self.pool = pool
        self.clock = clock
        self.settings = settings
        self.redact = redact
        self.tell = tell
        self.usage = usage
        self.bell = NoticeBell(store, clock)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._desks: dict[str, Desk] = {}
        self._heap = TimerHeap(clock)
        spawn = background(self._tasks)
        around = Surroundings(store, pool, self.bell, clock, settings, redact, tell, self.replica)
        self.timers = SessionTimers(self._heap, store, rules, clock, self._close_for, spawn)
        self.leases = Leases(around, self.timers, self._adopt)
        self._input = InputDesk(store, rules, clock, settings, self.leases, redact, tell)
        self._approvals = Approvals(
            store,
            self.bell,
            self._heap,
            clock,
            redact,
            spawn,
            self._deliver,
            replica=self.replica,
            caller_seconds=settings.lease_seconds,
        )
        self._input.approvals = self._approvals
        self.leases.beside.append(self._approvals.keep)
        self._events = EventStreams(store, self.bell, clock)
        self._creation = Creation(self, plan, prepare)
        self._closing = Closing(self)

    async def start(self) -> None:
        """Find the sessions again that are ours to run, and go on with them."""
        self.bell.start()
        await self.leases.start()
        await self._approvals.resume()

    async def stop(self) -> None:
        """Let go of everything. Sessions live on in their sandboxes."""
        await self.leases.stop()
        await self._approvals.stop()
        self._heap.stop()
        await self.bell.stop()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.pool.aclose()

    # --- sessions ------------------------------------------------------------------------------------------------

    async def create(self, caller: Caller, request: CreateRequest) -> Created:
        return await self._creation.create(caller, request)

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
        size = min(page_size or 100, _MAX_PAGE)
        records, token = await self.store.sessions(which, Page(size, page_token))
        usages = await self._usages(records)
        views = await asyncio.gather(*(self.view(record, usages.get(record.session_id)) for record in records))
        return [view for view in views if not states or view.state in states], token

    async def close(self, caller: Caller, session_id: str, mode: CloseMode = "graceful") -> Closed:
        record = await self.visible(caller, session_id)
        return await self._closing.close(record, mode, by=caller.agent_id, reason=f"closed by {caller.agent_id}")

    async def visible(self, caller: Caller, session_id: str) -> SessionRecord:
        """The session as it is now; one of somebody else reads like none."""
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
        """The same for a call to its sandbox, which tells by itself if it is over; one of ours is known here."""
        follower = self.leases.follower(session_id)
        if follower is None or follower.over.is_set() or not caller.may_see(follower.record.agent_id):
            return await self.visible(caller, session_id)
        return follower.record

    async def _usages(self, records: Sequence[SessionRecord]) -> dict[str, Usage]:
        """The last samples of the sessions that another replica's monitor watches."""
        others = [each.session_id for each in records if not each.over and self.usage(each.session_id) is None]
        return await self.store.usages(others) if others else {}

    async def view(self, record: SessionRecord, usage: Usage | None = None) -> SessionView:
        """A session as its owner sees it now; `usage` is what is known if this replica does not watch it."""
        usage = self.usage(record.session_id) or usage
        if record.over or record.state == "UNKNOWN":
            return SessionView(record, record.state, record.initial_cwd, usage=usage)
        try:
            now = await self.desk(record).live.now(look=False)
        except Problem:
            # Whether it is gone or only out of reach, its follower finds out. One does not hide others in a list.
            return SessionView(record, "UNKNOWN", record.initial_cwd, usage=usage)
        return SessionView(record, _shown_state(record, now), now.cwd or record.initial_cwd, now.prompt, usage)

    def desk(self, record: SessionRecord) -> Desk:
        desk = self._desks.get(record.session_id)
        if desk is None:
            desk = Desk(self.live(record))
            if not record.over:
                self._desks[record.session_id] = desk
                self._forget_desks()
        return desk

    def live(self, record: SessionRecord) -> Live:
        if record.kind == "terminal":
            return TerminalLive(record, self.pool, self.settings)
        commands = CommandLog(self.store, self.bell, record.session_id)
        return ShellLive(record, self.pool, self.settings, commands, self.clock.time)

    def _forget_desks(self) -> None:
        """Sessions that ended under another replica: nobody tells us of each."""
        surplus = len(self._desks) - 2 * self.settings.max_sessions - 16
        for session_id in list(self._desks)[: max(0, surplus)]:
            if not self._desks[session_id].lock.locked():
                del self._desks[session_id]

    def forget(self, session_id: str) -> None:
        self._desks.pop(session_id, None)

    async def _adopt(self, record: SessionRecord) -> SessionRecord | None:
        """A session of another replica, or from before a restart, is ours."""
        if record.state == "UNKNOWN":
            await self._creation.abandoned(record)
            return None
        if record.state == "CLOSING":
            background(self._tasks)(self._close_again(record))
        return record

    async def _close_again(self, record: SessionRecord) -> None:
        with contextlib.suppress(Problem):
            await self.live(record).close("force")

    async def _close_for(self, session_id: str, reason: str) -> None:
        record = await self.store.session(session_id)
        await self._closing.close(record, "graceful", by="", reason=reason)

    async def close_over_limit(self, record: SessionRecord) -> None:
        """The last step about a session that is over a limit which nobody else enforces."""
        await self._closing.close(record, "force", by="", reason="over a limit")

    # --- input and output ----------------------------------------------------------------------------------------

    async def send_input(
        self, caller: Caller, session_id: str, data: bytes, controls: Sequence[Control] = (), request_id: str = ""
    ) -> InputTaken:
        record = await self._open(caller, session_id)
        taken = await self._input.send(caller, record, self.desk(record), data, controls, request_id)
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
        size = min(max_bytes or 64 * 1024, settings.max_read_bytes)
        found = await self.desk(record).live.read(since, size, min(wait, settings.max_wait_seconds))
        if record.state == "CLOSING" and found.state not in ("CLOSED", "ERROR"):
            found = msgspec.structs.replace(found, state="CLOSING")
        return found

    async def stream_output(self, caller: Caller, session_id: str, since: str = "") -> AsyncIterator[Chunk]:
        """Read on as fast as the chunks are taken."""
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
            if request.create is not None:
                raise Invalid("create: not beside session_id", reason="BAD_REQUEST", field="create")
            record = await self._open(caller, request.session_id)
            return await self._input.run(caller, record, self.desk(record), request)
        # Nobody looks at it as a terminal: the two streams apart are worth more.
        created = await self.create(caller, request.create or CreateRequest(kind="shell"))
        record = created.view.record
        try:
            return await self._input.run(caller, record, self.desk(record), request)
        finally:
            ending = asyncio.ensure_future(self._closing.close(record, "force", by="", reason="command over"))
            self._tasks.add(ending)
            ending.add_done_callback(self._tasks.discard)
            await asyncio.shield(ending)

    async def _open(self, caller: Caller, session_id: str) -> SessionRecord:
        record = await self._known(caller, session_id)
        if record.over or record.state == "CLOSING":
            raise NotNow(
                f"session {session_id!r} is {record.state}: {record.close_reason or record.summary}",
                reason="SESSION_CLOSED",
            )
        if record.state == "UNKNOWN":
            raise NotNow(f"session {session_id!r} is still being made", reason="SESSION_NOT_READY", retry_after=0.5)
        return record

    # --- what was written down -----------------------------------------------------------------------------------

    async def events(
        self, caller: Caller, session_id: str = "", since: str = "", types: Sequence[EventType] = ()
    ) -> AsyncIterator[Event]:
        if session_id:
            await self.visible(caller, session_id)
        async for event in self._events.subscribe(caller, session_id, since, types):
            yield event

    async def audit(
        self, caller: Caller, which: AuditFilter, *, page_size: int = 100, page_token: str = ""
    ) -> tuple[list[AuditRow], str]:
        if which.session_id:
            await self.visible(caller, which.session_id)
        if caller.role != "operator":
            if which.agent_id and which.agent_id != caller.agent_id:
                return [], ""
            which = msgspec.structs.replace(which, agent_id=caller.agent_id)
        return await self.store.rows(which, Page(min(page_size or 100, _MAX_PAGE), page_token))

    async def approvals(self, caller: Caller, session_id: str = "", *, ended: bool = False) -> list[Approval]:
        if session_id:
            await self.visible(caller, session_id)
        return await self._approvals.visible(caller, session_id, ended=ended)

    async def answer_approval(
        self, caller: Caller, approval_id: str, approve: bool, comment: str = ""
    ) -> Literal["approved", "refused"]:
        return await self._approvals.answer(caller, approval_id, approve, comment)

    async def _deliver(self, record: SessionRecord, approval: Approval) -> None:
        await self._input.deliver(record, self.desk(record), approval)


def _shown_state(record: SessionRecord, now: Now) -> State:
    if record.state == "CLOSING" and now.state not in ("CLOSED", "ERROR"):
        return "CLOSING"
    return now.state
