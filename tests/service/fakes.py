"""The parts around the sessions for their tests: a store in memory, rules that allow, no confinement, a manager.

The store keeps the promises of the real one that sessions rely on: limits, one order a session, fences, leases.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec

from holdfast.exec_api import ExecApi
from holdfast.service.api import AuditFilter
from holdfast.service.clock import SystemClock, WallClock
from holdfast.service.policy.profiles import PolicyRules
from holdfast.service.policy.rules import load_rules
from holdfast.service.problems import Exhausted, NotFound, NotNow
from holdfast.service.sessions.backend.connections import SandboxConnections
from holdfast.service.sessions.backend.enforcement import EnforcementPlan
from holdfast.service.sessions.manager import SessionManager
from holdfast.service.sessions.ports import MetricEvent, SessionStore
from holdfast.service.sessions.rulebook import Rulebook
from holdfast.service.settings import ServiceSettings
from holdfast.service.store.approvals import REPLICA_GONE, SESSION_OVER, not_waiting
from holdfast.service.store.types import (
    Fence,
    Page,
    RowNotice,
    SessionFilter,
    SessionLease,
    decode_token,
    encode_token,
)
from holdfast.service.types import Approval, AuditEntry, AuditRow, Caller, ResourceUsage, SessionRecord
from holdfast.types import EnvironmentInfo

ANN = Caller("ann")
BOB = Caller("bob")
OPERATOR = Caller("root", "operator")

#: Nothing is confined, and everything may be done anywhere.
OPEN_RULES = """
[profiles.default.sandbox]
mode = "none"
[profiles.default.network]
mode = "host"
[profiles.default.directories]
writable = []
readable = ["/"]
"""


_ALL_SESSIONS = SessionFilter()
_ALL_ROWS = AuditFilter()
_FIRST = Page()


class MemoryStore:
    """A `SessionStore` without a database. Several managers on one are several replicas."""

    def __init__(self, clock: WallClock) -> None:
        self._clock = clock
        self.records: dict[str, SessionRecord] = {}
        self._leases: dict[str, SessionLease] = {}
        self.log: list[AuditRow] = []
        self._seqs: dict[str, int] = {}
        #: Of leases that were given up.
        self._epochs: dict[str, int] = {}
        self._listeners: set[asyncio.Queue[RowNotice]] = set()
        self._approvals: dict[str, Approval] = {}
        self._usages: dict[str, ResourceUsage] = {}
        self._waiters: set[asyncio.Event] = set()
        #: Raised by the next calls, once each.
        self.failures: list[Exception] = []

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)

    async def add_session(
        self, record: SessionRecord, *, per_agent: int, total: int, replica: str = "", seconds: float = 0.0
    ) -> SessionRecord:
        self._fail()
        for known in self.records.values():
            if record.request_id and (known.agent_id, known.request_id) == (record.agent_id, record.request_id):
                return known
        alive = [each for each in self.records.values() if not each.over]
        if len([each for each in alive if each.agent_id == record.agent_id]) >= per_agent or len(alive) >= total:
            raise Exhausted("too many sessions", reason="SESSION_LIMIT")
        self.records[record.session_id] = record
        if replica:
            expires = self._clock.time() + seconds
            self._leases[record.session_id] = SessionLease(record.session_id, replica, 1, expires)
        return record

    async def session(self, session_id: str) -> SessionRecord:
        self._fail()
        if session_id not in self.records:
            raise NotFound(f"no session {session_id!r}", reason="SESSION_NOT_FOUND")
        return self.records[session_id]

    async def sessions(
        self, which: SessionFilter = _ALL_SESSIONS, page: Page = _FIRST
    ) -> tuple[list[SessionRecord], str]:
        found = [
            each
            for each in self.records.values()
            if which.agent_id in ("", each.agent_id)
            and (not which.states or each.state in which.states)
            and which.labels.items() <= each.labels.items()
        ]
        start = int(page.token or 0)
        more = start + page.size < len(found)
        return found[start : start + page.size], str(start + page.size) if more else ""

    async def update_session(self, session_id: str, /, **fields: Any) -> SessionRecord:
        self._fail()
        record = await self.session(session_id)
        if not record.over:
            record = self.records[session_id] = msgspec.structs.replace(record, **fields)
            self._changed()
        return record

    async def claim(self, replica: str, seconds: float, limit: int) -> list[SessionLease]:
        self._fail()
        now = self._clock.time()
        taken: list[SessionLease] = []
        for session_id, record in self.records.items():
            lease = self._leases.get(session_id)
            if not record.over and (lease is None or lease.expires_at <= now) and len(taken) < limit:
                epoch = self._epochs.get(session_id, 0) if lease is None else lease.epoch
                taken.append(SessionLease(session_id, replica, epoch + 1, now + seconds))
        self._leases |= {each.session_id: each for each in taken}
        return taken

    async def renew(self, replica: str, seconds: float) -> list[str]:
        self._fail()
        ours = [
            each.session_id
            for each in self._leases.values()
            if each.replica == replica and not self.records[each.session_id].over
        ]
        for session_id in ours:
            lease = self._leases[session_id]
            self._leases[session_id] = msgspec.structs.replace(lease, expires_at=self._clock.time() + seconds)
        return ours

    async def next_end(self, replica: str) -> float:
        others = [
            each.expires_at
            for each in self._leases.values()
            if each.replica != replica and not self.records[each.session_id].over
        ]
        return min(others, default=math.inf) - self._clock.time()

    async def release(self, replica: str, session_id: str | None = None) -> int:
        ours = [each for each in self._leases.values() if each.replica == replica]
        for lease in ours:
            self._epochs[lease.session_id] = lease.epoch
            del self._leases[lease.session_id]
        return len(ours)

    async def append(self, entries: Sequence[AuditEntry], *, fence: Fence | None = None) -> list[AuditRow]:
        self._fail()
        if fence is not None:
            lease = self._leases.get(fence.session_id)
            if lease is None or (lease.replica, lease.epoch) != (fence.replica, fence.epoch):
                raise NotNow("another has the lease", reason="LEASE_LOST")
            record = self.records[fence.session_id]
            if entries and record.audited_token >= fence.token:
                return []
            self.records[fence.session_id] = msgspec.structs.replace(
                record, audited_token=max(record.audited_token, fence.token), **fence.metadata
            )
        rows = []
        for each in entries:
            seq = self._seqs[each.session_id] = self._seqs.get(each.session_id, 0) + 1
            body = msgspec.json.encode(each.body).decode()
            rows.append(
                AuditRow(each.session_id, seq, each.at, each.agent_id, each.kind, each.command_id, body, "", "")
            )
        self.log += rows
        self._changed()
        for row in rows:
            for listener in self._listeners:
                listener.put_nowait(RowNotice(row.session_id, row.seq))
        return rows

    async def rows(self, which: AuditFilter = _ALL_ROWS, page: Page = _FIRST) -> tuple[list[AuditRow], str]:
        self._fail()
        one = which.session_id is not None
        found = [row for row in self.log if _matches(row, which)]
        found.sort(key=lambda row: _place(row, one), reverse=which.newest_first)
        if page.token:
            kinds = (int,) if one else (float, str, int)
            after = decode_token(page.token, *kinds)
            found = [row for row in found if (_place(row, one) > after) != which.newest_first]
            found = [row for row in found if _place(row, one) != after]
        more = len(found) > page.size
        found = found[: page.size]
        return found, encode_token(*_place(found[-1], one)) if more else ""

    async def listen(self) -> AsyncIterator[RowNotice]:
        queue: asyncio.Queue[RowNotice] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._listeners.discard(queue)

    async def put_usages(self, usages: Mapping[str, ResourceUsage]) -> None:
        self._usages |= usages

    async def usages(self, session_ids: Collection[str]) -> dict[str, ResourceUsage]:
        return {name: self._usages[name] for name in session_ids if name in self._usages}

    async def add_approval(self, approval: Approval, *, caller_seconds: float = 0.0) -> Approval:
        if approval.caller:
            approval = msgspec.structs.replace(approval, caller_expires=self._clock.time() + caller_seconds)
        self._approvals[approval.approval_id] = approval
        return approval

    async def approval(self, approval_id: str) -> Approval:
        if approval_id not in self._approvals:
            raise NotFound(f"no approval {approval_id!r}", reason="APPROVAL_NOT_FOUND")
        return self._approvals[approval_id]

    async def answer_approval(
        self, approval_id: str, outcome: Literal["approved", "refused"], *, by: str = "", comment: str = ""
    ) -> Approval:
        found = await self.approval(approval_id)
        if not self._waits(found):
            raise not_waiting(found)
        answered = msgspec.structs.replace(found, outcome=outcome, answered_by=by, comment=comment)
        self._approvals[approval_id] = answered
        return answered

    async def end_approvals(self) -> list[Approval]:
        self._fail()
        ended = [each for each in self._approvals.values() if not each.outcome and not self._waits(each)]
        return [self._end(each) for each in ended]

    def _end(self, approval: Approval) -> Approval:
        if approval.expires_at <= self._clock.time():
            return self._put(approval, outcome="expired")
        over = self._is_over(approval)
        return self._put(approval, outcome="abandoned", comment=SESSION_OVER if over else REPLICA_GONE)

    def _put(self, approval: Approval, **fields: Any) -> Approval:
        changed = self._approvals[approval.approval_id] = msgspec.structs.replace(approval, **fields)
        return changed

    def _is_over(self, approval: Approval) -> bool:
        record = self.records.get(approval.session_id)
        return record is not None and record.over

    def _waits(self, approval: Approval) -> bool:
        now = self._clock.time()
        there = not approval.caller or approval.caller_expires > now
        return not approval.outcome and approval.expires_at > now and there and not self._is_over(approval)

    async def attach_caller(self, approval_id: str, caller: str, seconds: float) -> bool:
        found = await self.approval(approval_id)
        if not found.caller or not self._waits(found):
            return False
        self._put(found, caller=caller, caller_expires=self._clock.time() + seconds)
        return True

    async def renew_callers(self, callers: Collection[str], seconds: float) -> None:
        for each in list(self._approvals.values()):
            if each.caller in callers and not each.outcome:
                self._put(each, caller_expires=self._clock.time() + seconds)

    async def abandon_approvals(self, caller: str, why: str) -> list[Approval]:
        self._fail()
        left = [each for each in self._approvals.values() if each.caller == caller and not each.outcome]
        return [self._put(each, outcome="abandoned", comment=why) for each in left]

    async def open_approvals(self, *, session_id: str = "", agent_id: str = "") -> list[Approval]:
        found = await self.latest_approvals(session_id=session_id, agent_id=agent_id)
        return [each for each in reversed(found) if self._waits(each)]

    async def latest_approvals(self, *, session_id: str = "", agent_id: str = "") -> list[Approval]:
        found = list(reversed(self._approvals.values()))
        return [each for each in found if session_id in ("", each.session_id) and agent_id in ("", each.agent_id)]

    def _changed(self) -> None:
        for waiter in self._waiters:
            waiter.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something to hold of what is kept here."""
        changed = asyncio.Event()
        self._waiters.add(changed)
        try:
            async with asyncio.timeout(60):
                while not holds():
                    changed.clear()
                    await changed.wait()
        finally:
            self._waiters.discard(changed)

    # --- for tests -----------------------------------------------------------------------------------------------

    def kinds(self, session_id: str) -> list[str]:
        """The records of a session, in their order."""
        return [row.kind for row in self.log if row.session_id == session_id]

    def bodies(self, session_id: str, kind: str) -> list[dict[str, Any]]:
        return [
            msgspec.json.decode(row.body) for row in self.log if (row.session_id, row.kind) == (session_id, kind)
        ]

    def events(self, session_id: str) -> list[str]:
        return [body["type"] for body in self.bodies(session_id, "event")]


_STORE: Callable[[WallClock], SessionStore] = MemoryStore


def _place(row: AuditRow, one: bool) -> tuple[Any, ...]:
    return (row.seq,) if one else (row.at, row.session_id, row.seq)


def _matches(row: AuditRow, which: AuditFilter) -> bool:
    return (
        which.session_id in (None, row.session_id)
        and which.agent_id in ("", row.agent_id)
        and (not which.kinds or row.kind in which.kinds)
        and which.command_id in ("", row.command_id)
        and (which.since is None or row.at >= which.since)
        and which.contains in row.body
    )


async def own_uid(agent_id: str) -> int:
    """For a `Preparation` of one agent."""
    return 1_900_000_000


def plan_nothing(record: SessionRecord, info: EnvironmentInfo) -> EnforcementPlan:
    return EnforcementPlan(None, None, (), ("filesystem",))


def rules(text: str = "") -> PolicyRules:
    return load_rules(OPEN_RULES + text, "rules.toml")


def settings(**values: Any) -> ServiceSettings:
    values.setdefault("sandbox", "fake")
    # Rows at once: tests read them after some turns of the loop.
    values.setdefault("gather_seconds", 0.0)
    return ServiceSettings(**values)


def make_manager(
    store: SessionStore,
    connect: Callable[[str], Awaitable[ExecApi]],
    *,
    clock: WallClock | None = None,
    text: str = "",
    reported: list[MetricEvent] | None = None,
    **values: Any,
) -> SessionManager:
    """A manager that is not started."""
    clock = clock or SystemClock()
    chosen = settings(**values)
    pool = SandboxConnections(connect, clock, limit=chosen.max_sandboxes, idle_seconds=chosen.sandbox_idle_seconds)
    return SessionManager(
        store=store,
        rules=Rulebook(rules(text)),
        pool=pool,
        plan=plan_nothing,
        clock=clock,
        settings=chosen,
        emit=(reported if reported is not None else []).append,
    )


@asynccontextmanager
async def running(manager: SessionManager) -> AsyncIterator[SessionManager]:
    await manager.start()
    try:
        yield manager
    finally:
        await manager.stop()


def connecting(api: ExecApi) -> Callable[[str], Awaitable[ExecApi]]:
    """Every address leads there, and closing the connection closes nothing."""

    async def connect(address: str) -> ExecApi:
        return Uncloseable(api)

    return connect


class Uncloseable:
    """A sandbox that goes on when the connection to it is closed."""

    def __init__(self, api: ExecApi) -> None:
        self._api = api
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    async def aclose(self) -> None:
        self.closed = True


async def read_until(
    manager: SessionManager, session_id: str, done: Callable[[bytes, Any], bool], since: str = "", who: Caller = ANN
) -> tuple[bytes, str, list[Any]]:
    """Read output until a condition holds of all of it and the last chunk: the bytes, the token, the chunks."""
    printed, chunks = b"", []
    async with asyncio.timeout(60):
        while True:
            found = await manager.read_output(who, session_id, since=since, wait=10)
            since = found.token
            for chunk in found.chunks:
                printed += chunk.payload
                chunks.append(chunk)
            if any(done(printed, chunk) for chunk in found.chunks):
                return printed, since, chunks


async def row_written(store: SessionStore, session_id: str, kind: str) -> None:
    """Wait for a row of this kind: a follower writes what happened after the caller could read it."""
    which = AuditFilter(session_id=session_id, kinds=(kind,))
    async with asyncio.timeout(60):
        while not (await store.rows(which))[0]:  # noqa: ASYNC110 - the store of a test has no notices
            await asyncio.sleep(0.02)
