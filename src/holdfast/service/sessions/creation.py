"""How a session is made: allowed, counted, confined, opened, and its first prompt awaited.

Everything that fails after it was counted closes what was opened, and is written down. The same `request_id` is the
same session, also when both requests come at once or to two replicas.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import secrets
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.errors import HoldfastError
from holdfast.secret_names import looks_secret
from holdfast.service.api import Created, CreateRequest, SessionView
from holdfast.service.positions import Position, write_token
from holdfast.service.problems import Denied, Invalid, NotNow, Problem, TooLate
from holdfast.service.sessions.backend.connections import problem_of
from holdfast.service.sessions.backend.terminal import Now
from holdfast.service.sessions.following.events import event_entry
from holdfast.service.sessions.ports import Enforcement, PlanEnforcement, Prepare, Told
from holdfast.service.store.types import SessionLease
from holdfast.service.types import SERVICE_STREAM, AuditEntry, Caller, SessionRecord

if TYPE_CHECKING:
    from holdfast.service.sessions.manager import SessionManager

#: Of one variable, and of all of them, so much stands in the row of a new session: a row has its limit.
_SHOWN_VALUE: Final = 256
_SHOWN_ENVIRONMENT: Final = 32 * 1024
#: The epoch of a lease that came with a new session.
_FIRST_EPOCH: Final = 1


class Creation:
    """`CreateSession`."""

    def __init__(self, manager: SessionManager, plan: PlanEnforcement, prepare: Prepare) -> None:
        self._manager = manager
        self._plan = plan
        self._prepare = prepare

    async def create(self, caller: Caller, request: CreateRequest) -> Created:
        manager = self._manager
        agent_id = request.agent_id or caller.agent_id
        try:
            record, environment = self._draft(caller, agent_id, request)
            stored = await manager.store.add_session(
                record,
                per_agent=manager.rules.max_sessions(agent_id),
                total=manager.settings.max_sessions,
                replica=manager.replica,
                seconds=manager.settings.lease_seconds,
            )
        except Problem as problem:
            body = {"reason": problem.reason, "detail": problem.message, "by": caller.agent_id}
            refused = AuditEntry(SERVICE_STREAM, manager.clock.time(), agent_id, "session_refused", "", body)
            await manager.store.append([refused])
            manager.tell(Told("violation", request.kind, 1, problem.reason))
            raise
        if stored.session_id != record.session_id:
            return await self._existing(stored)
        manager.leases.expect(record.session_id)
        try:
            return await self._open(caller, record, environment)
        except BaseException as error:
            await self._failed(record, error)
            raise

    def _draft(self, caller: Caller, agent_id: str, request: CreateRequest) -> tuple[SessionRecord, dict[str, str]]:
        """What is to be made, if it may be: the record, and the environment that it gets."""
        manager = self._manager
        if not caller.may_see(agent_id):
            raise Denied("agent_id: only an operator makes sessions for others", reason="NOT_AN_OPERATOR")
        sandbox = request.sandbox or manager.settings.sandbox
        if not manager.settings.allows_sandbox(sandbox):
            raise Denied(
                f"sandbox {sandbox!r}: the service does not allow it (allowed_sandboxes)",
                reason="SANDBOX_NOT_ALLOWED",
            )
        if not (0 < request.cols < 10_000 and 0 < request.rows < 10_000):
            raise Invalid("cols, rows: from 1 to 9999", reason="BAD_SIZE", field="cols")
        placed = msgspec.structs.replace(request, sandbox=sandbox)
        policy = manager.rules.resolve(agent_id, placed, operator=caller.role == "operator")
        environment = manager.rules.environment(policy, request.environment)
        now = manager.clock.time()
        record = SessionRecord(
            session_id=f"ses-{secrets.token_hex(10)}",
            agent_id=agent_id,
            kind=request.kind,
            sandbox=sandbox,
            policy=policy,
            created_at=now,
            last_activity_at=now,
            initial_cwd=manager.rules.cwd(policy, request.initial_cwd),
            # Until it is open: nobody can ask for it.
            state="UNKNOWN",
            shell=manager.rules.shell(policy, request.shell),
            environment={name: self._shown(name, value) for name, value in environment.items()},
            labels=request.labels,
            cols=request.cols,
            rows=request.rows,
            request_id=request.request_id,
        )
        return record, environment

    def _shown(self, name: str, value: str) -> str:
        if looks_secret(name):
            return "[hidden]"
        shown = self._manager.redact(value[: 8 * _SHOWN_VALUE])
        return shown if len(shown) <= _SHOWN_VALUE else f"{shown[:_SHOWN_VALUE]}…"

    async def _open(self, caller: Caller, record: SessionRecord, environment: dict[str, str]) -> Created:
        manager = self._manager
        session_id = record.session_id
        plan = await self._planned(record)
        wanted = record.policy.sandbox_mode
        enforced = "none" if plan.confinement is None else plan.confinement.mode
        record = msgspec.structs.replace(
            record, policy=msgspec.structs.replace(record.policy, sandbox_mode=enforced)
        )
        body: dict[str, Any] = {
            "kind": record.kind,
            "sandbox": record.sandbox,
            "profile": record.policy.profile,
            "sandbox_mode": enforced,
            **({} if wanted == enforced else {"wanted_sandbox_mode": wanted}),
            "cwd": record.initial_cwd,
            "shell": record.shell,
            "environment": _some(record.environment),
            "enforced": list(plan.enforced),
            "unenforced": list(plan.unenforced),
            **({} if plan.user is None else {"user": plan.user}),
            "by": caller.agent_id,
        }
        await manager.store.append(
            [AuditEntry(session_id, manager.clock.time(), record.agent_id, "session_created", "", body)]
        )
        if plan.user is not None and enforced == "none" and record.policy.writable:
            # The agent's user has no home directory on the machine; a jail makes one.
            environment = {"HOME": record.policy.writable[0], **environment}
        now, token = await manager.desk(record).live.open(environment, plan)
        if now.state in ("CLOSED", "ERROR"):
            raise NotNow(f"the session ended before its first prompt: {now.reason}", reason="SESSION_CLOSED")
        opened = await self._opened(record, plan, now)
        return Created(SessionView(opened, now.state, now.cwd or opened.initial_cwd, now.prompt), token)

    async def _planned(self, record: SessionRecord) -> Enforcement:
        try:
            info = await self._manager.pool.info(record.sandbox)
            await self._prepare(record, info)
        except Problem:
            raise
        except HoldfastError as error:
            raise problem_of(error, record.sandbox) from error
        return self._plan(record, info)

    async def _opened(self, record: SessionRecord, plan: Enforcement, now: Now) -> SessionRecord:
        manager = self._manager
        stored = await manager.store.update_session(
            record.session_id,
            state="RUNNING",
            policy=record.policy,
            enforced=plan.enforced,
            unenforced=plan.unenforced,
            initial_cwd=record.initial_cwd or now.cwd,
        )
        await manager.store.append(
            [event_entry(stored, manager.clock.time(), "SESSION_CREATED", f"{stored.kind} in {stored.sandbox}")]
        )
        expires = manager.clock.time() + manager.settings.lease_seconds
        manager.leases.follow(stored, SessionLease(record.session_id, manager.replica, _FIRST_EPOCH, expires))
        manager.tell(Told("session_opened", stored.kind))
        return stored

    async def _failed(self, record: SessionRecord, error: BaseException) -> None:
        """Close what may have been opened, also for a caller that gave up, and say so in the log."""
        cleaning = asyncio.ensure_future(self._clean_up(record, error))
        try:
            await asyncio.shield(cleaning)
        except asyncio.CancelledError:
            await asyncio.wait([cleaning])
            raise

    async def _clean_up(self, record: SessionRecord, error: BaseException) -> None:
        manager = self._manager
        with contextlib.suppress(Problem):
            await manager.live(record).close("force")
        reason = getattr(error, "reason", "") or type(error).__name__
        detail = error.message if isinstance(error, HoldfastError) else str(error) or "its caller gave up"
        await self._over(record, f"could not be opened: {detail}", reason)
        manager.leases.given_up(record.session_id)
        manager.forget(record.session_id)

    async def abandoned(self, record: SessionRecord) -> None:
        """Its creator died while it was made."""
        with contextlib.suppress(Problem):
            await self._manager.live(record).close("force")
        await self._over(record, "the service ended while it was being made", "ABANDONED")

    async def _over(self, record: SessionRecord, detail: str, reason: str) -> None:
        manager, now = self._manager, self._manager.clock.time()
        over = msgspec.structs.replace(record, state="ERROR")
        await manager.store.append(
            [
                AuditEntry(
                    record.session_id, now, record.agent_id, "error", "", {"detail": detail, "reason": reason}
                ),
                event_entry(over, now, "SESSION_ERROR", detail),
            ]
        )
        await manager.store.update_session(
            record.session_id, state="ERROR", closed_at=now, close_reason="creation failed", summary=detail
        )

    # --- the same request again ----------------------------------------------------------------------------------

    async def _existing(self, stored: SessionRecord) -> Created:
        manager = self._manager
        record = await self._made(stored)
        if record.state == "ERROR" and record.close_reason == "creation failed":
            raise NotNow(f"this request failed before: {record.summary}", reason="CREATION_FAILED")
        view = await manager.view(record)
        # From the beginning: what was shown meanwhile, the first prompt included, is read again.
        return Created(view, write_token(record.session_id, Position()))

    async def _made(self, stored: SessionRecord) -> SessionRecord:
        """Once whoever makes it is done."""
        manager = self._manager
        with manager.bell.watch(stored.session_id) as watch:
            try:
                async with asyncio.timeout(manager.settings.creation_seconds):
                    while True:
                        watch.clear()
                        record = await manager.store.session(stored.session_id)
                        if record.state != "UNKNOWN":
                            return record
                        await watch.wait()
            except builtins.TimeoutError:
                raise TooLate("the session is still being made", reason="SESSION_NOT_READY") from None


def _some(environment: dict[str, str]) -> dict[str, str]:
    """As much of it as a row may hold, and how many are left out."""
    kept: dict[str, str] = {}
    size = 0
    for name, value in environment.items():
        size += len(name) + len(value)
        if size > _SHOWN_ENVIRONMENT:
            return {**kept, "": f"{len(environment) - len(kept)} more"}
        kept[name] = value
    return kept
