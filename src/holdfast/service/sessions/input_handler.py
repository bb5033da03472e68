"""Sends input and runs commands: in the order of the calls, judged by the rules, recorded, then sent.

The input of one call stays together. The rules are about commands: a line at a prompt, in any number of pieces, and
the command of `RunCommand`. In a session with rules, a line that cannot be reconstructed is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from holdfast.service.api import InputResult, RunRequest, RunResult
from holdfast.service.policy.engine import refusal
from holdfast.service.policy.typed_lines import LineBuffer
from holdfast.service.problems import Denied, Invalid, NotNow
from holdfast.service.sessions.approvals import ApprovalBroker
from holdfast.service.sessions.backend.session_backend import BackendStatus, CommandOutcome
from holdfast.service.sessions.backend.shell import command_text
from holdfast.service.sessions.backend.terminal import begins_a_line
from holdfast.service.sessions.context import SessionContext
from holdfast.service.sessions.following.events import audit_entry, event_entry
from holdfast.service.sessions.following.leases import Leases
from holdfast.service.sessions.handles import UNREAD_COMMANDS, SessionHandle
from holdfast.service.sessions.input_judge import InputCall, InputJudge, Judgement, interrupts
from holdfast.service.sessions.ports import MetricEvent, body_of, first_row
from holdfast.service.sessions.rulebook import Rulebook
from holdfast.service.types import Approval, AuditEntry, AuditRow, Caller, SessionRecord

_SIGNALS: Final = ("SIGINT", "SIGTERM", "SIGKILL")
#: How long the next command of a shell waits for the follower to read the oldest unread command: longer than the
#: read takes, and short enough for a caller while the database is unreachable.
_FOLLOW_SECONDS: Final = 2.0


class InputHandler:
    """`SendInput` and `RunCommand`."""

    def __init__(self, context: SessionContext, rules: Rulebook, leases: Leases, approvals: ApprovalBroker) -> None:
        self._store = context.store
        self._clock = context.clock
        self._settings = context.settings
        self._redact = context.redact
        self._emit = context.emit
        self._rules = rules
        self._judge = InputJudge(context.store, rules)
        self._leases = leases
        self._approvals = approvals

    # --- SendInput -----------------------------------------------------------------------------------------------

    async def send(self, call: InputCall, request_id: str) -> InputResult:
        self._check(call)
        call = call._replace(command_id=_command_id(call.record, request_id))
        lock = call.handle.lock
        if not call.data and all(control.type in _SIGNALS for control in call.controls):
            # Signals overtake input that waits for the lock: they may be meant to stop what that input waits for.
            return await self._send(call, repeatable=bool(request_id), busy=False)
        busy = lock.locked()
        async with lock:
            return await self._send(call, repeatable=bool(request_id), busy=busy)

    def _check(self, call: InputCall) -> None:
        limit = self._settings.max_input_bytes
        if len(call.data) > limit:
            message = f"data: {len(call.data)} bytes; at most {limit} at a time (max_input_bytes)"
            raise Invalid(message, reason="INPUT_TOO_LARGE", field="data")
        for control in call.controls:
            if control.type != "RESIZE" and not (decision := self._rules.signal(call.record, control.type)).allowed:
                raise refusal(decision)
        call.handle.backend.check_controls(call.controls)

    async def _send(self, call: InputCall, *, repeatable: bool, busy: bool) -> InputResult:
        _, record, handle, data, controls, command_id = call
        # Only the rules depend on which program waits for input.
        guarded = self._rules.is_guarded(record)
        status = await handle.backend.status(input_wait=guarded)
        if guarded:
            status = await self._in_order(call, status)
        if status.state in ("CLOSING", "CLOSED", "ERROR"):
            message = f"session {record.session_id!r} is {status.state}: {status.reason}"
            raise NotNow(message, reason="SESSION_CLOSED")
        repeated = repeatable and await self._is_written(record, command_id)
        judged = await self._judge.judge(call, status)
        if judged.verdict == "deny":
            await self._deny(call, "; ".join(judged.commands), judged)
        if repeated:
            # Judged again: the input may differ from the first one, and the terminal may have dropped the first.
            if judged.verdict == "ask":
                return InputResult(True, command_id, status.state, queue_busy=status.queue_busy or busy)
            if judged.open or handle.line != LineBuffer():
                handle.line = LineBuffer(lost="input that was sent before")
        else:
            if judged.verdict == "ask":
                command = "\n".join(judged.commands)
                approval = await self._approvals.hold(record, command_id, command, judged.rule, judged.reason)
                return InputResult(False, command_id, status.state, approval.approval_id, status.queue_busy or busy)
            rows = await self._store.append(self._entries(call, status, judged))
            handle.last_row, handle.line = rows[-1].seq, judged.line
            if data:
                await self._notify_follower(call, status, rows[0], _line_ends(data))
        if guarded and data and interrupts(b"", controls):
            await handle.backend.send(command_id, data, (), new_line=status.drops_a_byte)
            if not await handle.backend.line_begun(self._settings.interrupt_seconds):
                raise _not_in_order(record, "the line was typed and has not begun: send the interrupt again")
            await handle.backend.send(command_id, b"", controls)
        else:
            await handle.backend.send(command_id, data, controls, new_line=status.drops_a_byte)
        self._touch(record)
        if begins_a_line(record, status, data, controls):
            return InputResult(True, command_id, "BUSY", queue_busy=status.queue_busy or busy)
        after = await handle.backend.status_after_input()
        return InputResult(True, command_id, after.state, queue_busy=after.queue_busy or busy)

    async def _in_order(self, call: InputCall, status: BackendStatus) -> BackendStatus:
        """Delay an interrupt until the shell has begun the line before it, and delay input after an interrupt until
        the shell or a program waits for input.

        The shell can drop the first byte of a line near an interrupt, and the rules judged the line with that byte.
        """
        backend, seconds = call.handle.backend, self._settings.interrupt_seconds
        interrupt = status.state == "IDLE" and interrupts(call.data, call.controls)
        if interrupt and not await backend.line_begun(seconds):
            raise _not_in_order(call.record, "the line that was typed before has not begun")
        if call.data and status.interrupted and status.state == "BUSY" and not status.continuation:
            if not status.awaiting_input:
                status = await backend.input_awaited(seconds)
            if status.state == "BUSY" and (status.shell_reads or not status.awaiting_input):
                raise _not_in_order(call.record, "no prompt since the interrupt, and no program waits for input")
        return status

    def _entries(self, call: InputCall, status: BackendStatus, judged: Judgement) -> list[AuditEntry]:
        entries = []
        by, data = call.caller.agent_id, call.data
        if data and call.record.kind == "shell":
            entries.append(self._entry(call, "command", **self._shown(data), by=by, **_rule(judged)))
        elif data:
            where = {"position": status.position, "lines": _line_ends(data), "open": judged.open}
            shown = {"hidden": True, "bytes": len(data)} if status.hidden else self._shown(data)
            entries.append(self._entry(call, "input", **shown, by=by, **where, **_rule(judged)))
        for control in call.controls:
            size = {"cols": control.cols, "rows": control.rows} if control.type == "RESIZE" else {}
            entries.append(self._entry(call, "control", action=control.type, by=by, open=judged.open, **size))
        return entries

    def _shown(self, data: bytes) -> dict[str, Any]:
        """Return input for an audit row, cut and without secrets."""
        text = self._redact(data.decode("utf-8", "backslashreplace"))
        limit = self._settings.audit_input_bytes
        return {"text": text[:limit], "bytes": len(data), "cut": len(text) > limit}

    async def _notify_follower(
        self, call: InputCall, status: BackendStatus | None, row: AuditRow, lines: int, *, runs: bool = False
    ) -> None:
        """Give the follower an input that can start a command. In a shell, wait for the follower to read the oldest
        command: a shell keeps the output of its last four commands only."""
        follower, recent = self._leases.follower(call.record.session_id), call.handle.recent
        if follower is not None:
            # A run without a status names itself in the event of its command.
            if status is not None:
                follower.typed(call.command_id, status.position, lines)
            follower.wrote(row, runs=runs)
        if call.record.kind == "shell":
            if follower is not None and len(recent) == UNREAD_COMMANDS and not follower.has_read(recent[0]):
                status = status or await call.handle.backend.status()
                if status.state == "IDLE":
                    await follower.caught_up(recent[0], _FOLLOW_SECONDS)
            recent.append(row.seq)

    def _touch(self, record: SessionRecord) -> None:
        follower = self._leases.follower(record.session_id)
        if follower is not None:
            follower.touched("input")

    # --- refusals and rows ---------------------------------------------------------------------------------------

    async def _deny(self, call: InputCall, command: str, judged: Judgement) -> None:
        record, command_id = call.record, call.command_id
        shown = self._redact(command)[: self._settings.audit_input_bytes]
        why = {"rule": judged.rule, "reason": judged.reason}
        decision = self._entry(call, "decision", verdict="deny", command=shown, by=call.caller.agent_id, **why)
        detail = f"refused: {shown or 'input'}: {judged.reason}"
        event = event_entry(record, self._clock.time(), "POLICY_VIOLATION", detail, command_id=command_id)
        await self._store.append([decision, event])
        self._emit(MetricEvent("violation", record.kind, 1, "command"))
        message = f"the policy does not allow this: {judged.reason}"
        raise Denied(message, reason="POLICY_DENIED", rule=judged.rule, command_id=command_id)

    async def _is_written(self, record: SessionRecord, command_id: str) -> bool:
        kinds = ("input", "control", "command")
        row = await first_row(self._store, session_id=record.session_id, command_id=command_id, kinds=kinds)
        return row is not None

    async def _is_same(self, record: SessionRecord, command_id: str, command: str) -> bool:
        """Return whether this command was recorded under this id."""
        kinds = ("command",)
        row = await first_row(self._store, session_id=record.session_id, command_id=command_id, kinds=kinds)
        return row is not None and self._shown(command.encode()).items() <= body_of(row).items()

    def _entry(self, call: InputCall, kind: str, /, **body: Any) -> AuditEntry:
        return audit_entry(call.record, self._clock.time(), kind, call.command_id, **body)

    # --- RunCommand ----------------------------------------------------------------------------------------------

    async def run(self, call: InputCall, request: RunRequest) -> RunResult:
        record = call.record
        command_id, command = _command_id(record, request.request_id), command_text(request.command.encode())
        call = call._replace(command_id=command_id, data=command.encode())
        outcome: CommandOutcome | None = None
        try:
            outcome, approval_id = await self._run(call, request, command)
        finally:
            if (follower := self._leases.follower(record.session_id)) is not None:
                follower.ran(command_id, outcome)
        self._touch(record)
        return RunResult(
            command_id=command_id,
            exit_code=outcome.exit_code,
            stdout=outcome.stdout,
            stderr=outcome.stderr,
            duration=outcome.duration,
            state=outcome.state,
            timed_out=outcome.timed_out,
            truncated=outcome.truncated,
            cwd=outcome.cwd,
            approval_id=approval_id,
        )

    async def _run(self, call: InputCall, request: RunRequest, command: str) -> tuple[CommandOutcome, str]:
        """Run a command to its end; return its outcome, and the id of its approval if it needed one."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        timeout = request.timeout or self._settings.command_seconds
        record, handle, command_id = call.record, call.handle, call.command_id
        status = await self._status_for_run(call)
        approval_id = ""
        judged = self._judge.strictest(record, "" if status is None else status.cwd, (command,))
        if judged.verdict == "deny":
            await self._deny(call, command, judged)
        if request.request_id and await self._is_written(record, command_id):
            # The command may differ from the first one, and the sandbox may have dropped the first.
            if judged.verdict == "ask" and not await self._is_same(record, command_id, command):
                message = "request_id: it belongs to another command"
                raise Invalid(message, reason="REQUEST_ID_REUSED", field="request_id")
        elif judged.verdict == "ask":
            why = judged.rule, judged.reason
            async with self._approvals.approved(record, command_id, command, *why, timeout) as approval:
                approval_id = approval.approval_id
                await self._write_command(call, await handle.backend.status(input_wait=False), judged)
        else:
            await self._write_command(call, status, judged)
        left = max(0.1, timeout - (loop.time() - began))
        max_bytes = min(request.max_bytes, self._settings.max_read_bytes)
        with _typing(handle):
            ran = await handle.backend.run(command_id, command, left, max_bytes)
        # A command that timed out may not have been typed: it may have waited for a prompt.
        handle.line = _lost(handle.line) if ran.timed_out else LineBuffer()
        return ran, approval_id

    async def _status_for_run(self, call: InputCall) -> BackendStatus | None:
        """Return the status of the session; None if neither the rules nor the row of the command needs it."""
        guarded = self._rules.is_guarded(call.record)
        if not guarded and await call.handle.backend.names_runs():
            return None
        return await call.handle.backend.status(input_wait=False)

    async def _write_command(
        self, call: InputCall, status: BackendStatus | None, judged: Judgement, *, runs: bool = True
    ) -> None:
        """Write the row of a command; `runs` if `run` runs the command, else it is typed as input."""
        handle, follower = call.handle, self._leases.follower(call.record.session_id)
        # Without a status: the position up to which the follower has read is not after that of the command.
        read_to = 0 if follower is None else follower.read_to
        position = read_to if status is None else status.position
        where = {"position": position, "lines": 1, "open": handle.line != LineBuffer()}
        by = call.caller.agent_id
        entry = self._entry(call, "command", **self._shown(call.data), by=by, **where, **_rule(judged))
        async with handle.lock:
            rows = await self._store.append([entry])
            handle.last_row = rows[-1].seq
            await self._notify_follower(call, status, rows[0], _line_ends(call.data) + 1, runs=runs)

    # --- approved input ------------------------------------------------------------------------------------------

    async def deliver(self, record: SessionRecord, handle: SessionHandle, approval: Approval) -> None:
        """Type the command of an approval."""
        command = approval.data.decode()
        if not await self._is_written(record, approval.command_id):
            caller = Caller(approval.answered_by)
            call = InputCall(caller, record, handle, approval.data, command_id=approval.command_id)
            judged = Judgement("allow", (command,), reason=f"approval {approval.approval_id}")
            status = await handle.backend.status(input_wait=False)
            await self._write_command(call, status, judged, runs=False)
        with _typing(handle):
            # Without the lock: the program in the foreground may need input before it ends.
            await handle.backend.type_command(approval.command_id, command)
        handle.line = LineBuffer()
        self._touch(record)


def _command_id(record: SessionRecord, request_id: str) -> str:
    if not request_id:
        return f"cmd-{secrets.token_hex(8)}"
    # Every replica derives the same id from the same request.
    digest = hashlib.blake2b(f"{record.session_id}:{request_id}".encode(), digest_size=8)
    return f"cmd-{digest.hexdigest()}"


def _not_in_order(record: SessionRecord, why: str) -> NotNow:
    return NotNow(f"session {record.session_id!r}: {why}", reason="SESSION_BUSY", retry_after=0.5)


@contextmanager
def _typing(handle: SessionHandle) -> Iterator[None]:
    """Count a command that is about to be typed, which deletes the text on the line."""
    handle.runs += 1
    try:
        yield
    except BaseException:
        handle.line = _lost(handle.line)
        raise
    finally:
        handle.runs -= 1


def _line_ends(data: bytes) -> int:
    return data.count(b"\n") + data.count(b"\r")


def _lost(line: LineBuffer) -> LineBuffer:
    return LineBuffer(lost="a command that may not have been typed") if line != LineBuffer() else line


def _rule(judged: Judgement) -> dict[str, Any]:
    return {"rule": judged.rule} if judged.rule else {}
