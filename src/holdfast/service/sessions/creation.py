"""Creates sessions: checks the rules and limits, plans the confinement, opens the session, waits for its prompt.

A failure after the session was counted closes it and has an audit row. Requests with the same `request_id` get the
same session, also when they arrive at once or at two replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from holdfast.errors import HoldfastError
from holdfast.secret_names import looks_secret
from holdfast.service.api import CreateRequest, CreateResult, SessionView
from holdfast.service.policy.made_sandbox import MadeSandbox
from holdfast.service.positions import Position, write_token
from holdfast.service.problems import Denied, NotNow, Problem, TooLate
from holdfast.service.sessions.backend.connections import problem_of
from holdfast.service.sessions.backend.enforcement import EnforcementPlan
from holdfast.service.sessions.backend.session_backend import BackendStatus
from holdfast.service.sessions.context import SessionContext
from holdfast.service.sessions.following.events import audit_entry, event_entry
from holdfast.service.sessions.following.leases import Leases
from holdfast.service.sessions.handles import SessionHandles
from holdfast.service.sessions.ports import AssignedProfile, MetricEvent, PlanEnforcement, Prepare, SandboxSource
from holdfast.service.sessions.rulebook import Rulebook
from holdfast.service.store.types import SessionLease
from holdfast.service.types import SERVICE_STREAM, AuditEntry, Caller, SessionRecord

#: Characters of one variable, and of all variables, in the row of a new session: a row has a limit.
_SHOWN_VALUE: Final = 256
_SHOWN_ENVIRONMENT: Final = 32 * 1024
#: The epoch of the lease that a new session is stored with.
_FIRST_EPOCH: Final = 1


class SessionCreator:
    """`CreateSession`."""

    def __init__(
        self,
        context: SessionContext,
        rules: Rulebook,
        handles: SessionHandles,
        leases: Leases,
        view: Callable[[SessionRecord], Awaitable[SessionView]],
        *,
        plan: PlanEnforcement,
        prepare: Prepare,
        assigned_profile: AssignedProfile,
        sandboxes: SandboxSource,
    ) -> None:
        self._context = context
        self._rules = rules
        self._handles = handles
        self._leases = leases
        self._view = view
        self._plan = plan
        self._prepare = prepare
        self._assigned_profile = assigned_profile
        self._sandboxes = sandboxes

    async def create(self, caller: Caller, request: CreateRequest) -> CreateResult:
        context = self._context
        agent_id = request.agent_id or caller.agent_id
        profile = await self._assigned_profile(agent_id)
        try:
            sandbox = request.sandbox or context.settings.sandbox
            made = self._rules.made_sandbox(sandbox)
            if made is None:
                await self._sandboxes.check_unowned(sandbox)
            record, environment = self._draft(caller, agent_id, profile, request, sandbox, made)
            stored = await context.store.add_session(
                record,
                per_agent=self._rules.max_sessions(agent_id),
                total=context.settings.max_sessions,
                replica=context.replica,
                seconds=context.settings.lease_seconds,
            )
        except Problem as problem:
            body = {"reason": problem.reason, "detail": problem.message, "by": caller.agent_id}
            refused = AuditEntry(SERVICE_STREAM, context.clock.time(), agent_id, "session_refused", "", body)
            await context.store.append([refused])
            context.emit(MetricEvent("violation", request.kind, 1, problem.reason))
            raise
        if stored.session_id != record.session_id:
            return await self._existing(stored)
        self._leases.expect(record.session_id)
        try:
            if made is not None:
                record = await self._sandboxes.make(record, made)
            return await self._open(caller, record, environment)
        except BaseException as error:
            await self._failed(record, error)
            raise

    def _draft(
        self,
        caller: Caller,
        agent_id: str,
        profile: str,
        request: CreateRequest,
        sandbox: str,
        made: MadeSandbox | None,
    ) -> tuple[SessionRecord, dict[str, str]]:
        """Return the record and the environment of the new session; `Denied` if the rules forbid it."""
        context = self._context
        if not caller.may_see(agent_id):
            raise Denied("agent_id: only an operator creates sessions for other agents", reason="NOT_AN_OPERATOR")
        if made is None and not context.settings.allows_sandbox(sandbox):
            message = f"sandbox {sandbox!r}: the service does not allow it (allowed_sandboxes)"
            raise Denied(message, reason="SANDBOX_NOT_ALLOWED")
        placed = msgspec.structs.replace(request, sandbox=sandbox if made is None else made.placement)
        policy = self._rules.resolve(agent_id, placed, operator=caller.role == "operator", assigned=profile)
        environment = self._rules.environment(policy, request.environment)
        if made is not None:
            policy = self._rules.within_template(policy, made)
            environment = {**made.template.env, **environment}
            sandbox = self._sandboxes.new_address(made)
        now = context.clock.time()
        record = SessionRecord(
            session_id=f"ses-{secrets.token_hex(10)}",
            agent_id=agent_id,
            kind=request.kind,
            sandbox=sandbox,
            policy=policy,
            created_at=now,
            last_activity_at=now,
            initial_cwd=self._rules.cwd(policy, request.initial_cwd),
            # Until the session is open, no call can use it.
            state="UNKNOWN",
            shell=self._rules.shell(policy, request.shell),
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
        shown = self._context.redact(value[: 8 * _SHOWN_VALUE])
        return shown if len(shown) <= _SHOWN_VALUE else f"{shown[:_SHOWN_VALUE]}…"

    async def _open(self, caller: Caller, record: SessionRecord, environment: dict[str, str]) -> CreateResult:
        context = self._context
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
        await context.store.append([audit_entry(record, context.clock.time(), "session_created", **body)])
        if plan.user is not None and enforced == "none" and record.policy.writable:
            # The agent's user has no home directory on the machine. A jail makes one.
            environment = {"HOME": record.policy.writable[0], **environment}
        status, token = await self._handles.get(record).backend.open(environment, plan)
        if status.state in ("CLOSED", "ERROR"):
            raise NotNow(f"the session ended before its first prompt: {status.reason}", reason="SESSION_CLOSED")
        opened = await self._opened(record, plan, status)
        view = SessionView(opened, status.state, status.cwd or opened.initial_cwd, status.prompt)
        return CreateResult(view, token)

    async def _planned(self, record: SessionRecord) -> EnforcementPlan:
        try:
            info = await self._context.pool.info(record.sandbox)
            await self._prepare(record, info)
        except Problem:
            raise
        except HoldfastError as error:
            raise problem_of(error, record.sandbox) from error
        return self._plan(record, info)

    async def _opened(self, record: SessionRecord, plan: EnforcementPlan, status: BackendStatus) -> SessionRecord:
        context = self._context
        stored = await context.store.update_session(
            record.session_id,
            state="RUNNING",
            policy=record.policy,
            enforced=plan.enforced,
            unenforced=plan.unenforced,
            initial_cwd=record.initial_cwd or status.cwd,
        )
        await context.store.append(
            [event_entry(stored, context.clock.time(), "SESSION_CREATED", f"{stored.kind} in {stored.sandbox}")]
        )
        expires = context.clock.time() + context.settings.lease_seconds
        self._leases.follow(stored, SessionLease(record.session_id, context.replica, _FIRST_EPOCH, expires))
        context.emit(MetricEvent("session_opened", stored.kind))
        return stored

    async def _failed(self, record: SessionRecord, error: BaseException) -> None:
        """Close the session if it was opened, also when the caller disconnected, and record the error."""
        cleaning = asyncio.ensure_future(self._clean_up(record, error))
        try:
            await asyncio.shield(cleaning)
        except asyncio.CancelledError:
            await asyncio.wait([cleaning])
            raise

    async def _clean_up(self, record: SessionRecord, error: BaseException) -> None:
        with contextlib.suppress(Problem):
            await self._handles.backend(record).close("force")
        reason = getattr(error, "reason", "") or type(error).__name__
        detail = error.message if isinstance(error, HoldfastError) else str(error) or "the caller disconnected"
        await self._over(record, f"could not be opened: {detail}", reason)
        self._leases.creation_failed(record.session_id)
        self._handles.drop(record.session_id)

    async def abandoned(self, record: SessionRecord) -> None:
        """Close a session that a stopped replica had not finished creating."""
        with contextlib.suppress(Problem):
            await self._handles.backend(record).close("force")
        await self._over(record, "the service stopped before the session was open", "ABANDONED")
        self._leases.creation_failed(record.session_id)

    async def _over(self, record: SessionRecord, detail: str, reason: str) -> None:
        context, now = self._context, self._context.clock.time()
        over = msgspec.structs.replace(record, state="ERROR")
        error = audit_entry(record, now, "error", detail=detail, reason=reason)
        await context.store.append([error, event_entry(over, now, "SESSION_ERROR", detail)])
        await context.store.update_session(
            record.session_id, state="ERROR", closed_at=now, close_reason="creation failed", summary=detail
        )

    # --- the same request again ----------------------------------------------------------------------------------

    async def _existing(self, stored: SessionRecord) -> CreateResult:
        record = await self._made(stored)
        if record.state == "ERROR" and record.close_reason == "creation failed":
            raise NotNow(f"this request failed before: {record.summary}", reason="CREATION_FAILED")
        view = await self._view(record)
        # The first position: output since then, the first prompt included, is read again.
        return CreateResult(view, write_token(record.session_id, Position()))

    async def _made(self, stored: SessionRecord) -> SessionRecord:
        """Wait until the session is created, perhaps by another replica."""
        context = self._context

        async def created() -> SessionRecord | None:
            record = await context.store.session(stored.session_id)
            return record if record.state != "UNKNOWN" else None

        record = await context.notices.until(stored.session_id, created, context.settings.creation_seconds)
        if record is None:
            raise TooLate("the session is still being created", reason="SESSION_NOT_READY")
        return record


def _some(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that fit into a row, and the number of those left out."""
    kept: dict[str, str] = {}
    size = 0
    for name, value in environment.items():
        size += len(name) + len(value)
        if size > _SHOWN_ENVIRONMENT:
            return {**kept, "": f"{len(environment) - len(kept)} more"}
        kept[name] = value
    return kept
