"""Sends input and runs commands: in the order of the calls, judged by the rules, recorded, then sent.

The input of one call stays together. The rules are about commands: a line at a prompt, in any number of pieces, and
the command of `RunCommand`. In a session with rules, a line that cannot be reconstructed is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from holdfast.service.api import AuditFilter, Control, InputResult, RunRequest, RunResult
from holdfast.service.policy.engine import refusal
from holdfast.service.policy.typed_lines import LineBuffer
from holdfast.service.problems import Denied, Invalid, NotNow
from holdfast.service.sessions.approvals import ApprovalBroker
from holdfast.service.sessions.backend.session_backend import BackendStatus, SessionBackend
from holdfast.service.sessions.backend.shell import command_text
from holdfast.service.sessions.backend.terminal import begins_a_line
from holdfast.service.sessions.context import SessionContext
from holdfast.service.sessions.following.events import event_entry
from holdfast.service.sessions.following.leases import Leases
from holdfast.service.sessions.handles import UNREAD_COMMANDS, SessionHandle
from holdfast.service.sessions.input_judge import InputJudge, Judgement, interrupts
from holdfast.service.sessions.ports import MetricEvent
from holdfast.service.sessions.rulebook import Rulebook
from holdfast.service.store.types import Page
from holdfast.service.types import Approval, AuditEntry, Caller, SessionRecord

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

    async def send(
        self,
        caller: Caller,
        record: SessionRecord,
        handle: SessionHandle,
        data: bytes,
        controls: Sequence[Control],
        request_id: str,
    ) -> InputResult:
        self._check(record, handle, data, controls)
        command_id = self._command_id(record, request_id)
        if not data and all(control.type in _SIGNALS for control in controls):
            # Signals overtake input that waits for the lock: they may be meant to stop what that input waits for.
            return await self._send(caller, record, handle, command_id, data, controls, request_id, busy=False)
        busy = handle.lock.locked()
        async with handle.lock:
            return await self._send(caller, record, handle, command_id, data, controls, request_id, busy=busy)

    def _check(
        self, record: SessionRecord, handle: SessionHandle, data: bytes, controls: Sequence[Control]
    ) -> None:
        if len(data) > self._settings.max_input_bytes:
            raise Invalid(
                f"data: {len(data)} bytes; at most {self._settings.max_input_bytes} at a time (max_input_bytes)",
                reason="INPUT_TOO_LARGE",
                field="data",
            )
        for control in controls:
            if control.type != "RESIZE":
                decision = self._rules.signal(record, control.type)
                if not decision.allowed:
                    raise refusal(decision)
        handle.backend.check_controls(controls)

    async def _send(
        self,
        caller: Caller,
        record: SessionRecord,
        handle: SessionHandle,
        command_id: str,
        data: bytes,
        controls: Sequence[Control],
        request_id: str,
        *,
        busy: bool,
    ) -> InputResult:
        # Only the rules depend on which program waits for input.
        guarded = self._rules.is_guarded(record)
        status = await handle.backend.status(input_wait=guarded)
        if guarded:
            status = await self._in_order(record, handle.backend, status, data, controls)
        if status.state in ("CLOSING", "CLOSED", "ERROR"):
            raise NotNow(
                f"session {record.session_id!r} is {status.state}: {status.reason}", reason="SESSION_CLOSED"
            )
        repeated = bool(request_id) and await self._is_written(record, command_id)
        judged = await self._judge.judge(record, handle, status, data, controls)
        if judged.verdict == "deny":
            await self._deny(caller, record, command_id, "; ".join(judged.commands), judged)
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
            entries = self._entries(caller, record, handle, status, command_id, data, controls, judged)
            rows = await self._store.append(entries)
            handle.last_row, handle.line = rows[-1].seq, judged.line
            self._note(record, command_id, status, data)
            if data and record.kind == "shell":
                await self._let_follow(record, handle, status, rows[0].seq)
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

    async def _in_order(
        self,
        record: SessionRecord,
        backend: SessionBackend,
        status: BackendStatus,
        data: bytes,
        controls: Sequence[Control],
    ) -> BackendStatus:
        """Delay an interrupt until the shell has begun the line before it, and delay input after an interrupt until
        the shell or a program waits for input.

        The shell can drop the first byte of a line near an interrupt, and the rules judged the line with that byte.
        """
        seconds = self._settings.interrupt_seconds
        if status.state == "IDLE" and interrupts(data, controls) and not await backend.line_begun(seconds):
            raise _not_in_order(record, "the line that was typed before has not begun")
        if data and status.interrupted and status.state == "BUSY" and not status.continuation:
            if not status.awaiting_input:
                status = await backend.input_awaited(seconds)
            if status.state == "BUSY" and (status.shell_reads or not status.awaiting_input):
                raise _not_in_order(record, "no prompt since the interrupt, and no program waits for input")
        return status

    def _entries(
        self,
        caller: Caller,
        record: SessionRecord,
        handle: SessionHandle,
        status: BackendStatus,
        command_id: str,
        data: bytes,
        controls: Sequence[Control],
        judged: Judgement,
    ) -> list[AuditEntry]:
        entries = []
        if data and record.kind == "shell":
            body = {**self._shown(data, hidden=False), "by": caller.agent_id, **_rule(judged)}
            entries.append(self._entry(record, "command", command_id, body))
        elif data:
            body = {
                **self._shown(data, hidden=status.hidden),
                "by": caller.agent_id,
                "position": status.position,
                "lines": _line_ends(data),
                "open": judged.open,
                **_rule(judged),
            }
            entries.append(self._entry(record, "input", command_id, body))
        for control in controls:
            action: dict[str, Any] = {"action": control.type, "by": caller.agent_id, "open": judged.open}
            if control.type == "RESIZE":
                action |= {"cols": control.cols, "rows": control.rows}
            entries.append(self._entry(record, "control", command_id, action))
        return entries

    def _shown(self, data: bytes, *, hidden: bool) -> dict[str, Any]:
        """Return input for an audit row: cut, without secrets, and for a password only its length."""
        if hidden:
            return {"hidden": True, "bytes": len(data)}
        text = self._redact(data.decode("utf-8", "backslashreplace"))
        limit = self._settings.audit_input_bytes
        return {"text": text[:limit], "bytes": len(data), "cut": len(text) > limit}

    def _note(self, record: SessionRecord, command_id: str, status: BackendStatus, data: bytes) -> None:
        follower = self._leases.follower(record.session_id)
        if follower is not None:
            follower.typed(command_id, status.position, _line_ends(data))

    async def _let_follow(
        self, record: SessionRecord, handle: SessionHandle, status: BackendStatus, number: int
    ) -> None:
        """Wait for the follower: a shell keeps the output of its last four commands only."""
        follower = self._leases.follower(record.session_id)
        if follower is not None and status.state == "IDLE" and len(handle.recent) == UNREAD_COMMANDS:
            await follower.caught_up(handle.recent[0], _FOLLOW_SECONDS)
        handle.recent.append(number)

    def _touch(self, record: SessionRecord) -> None:
        follower = self._leases.follower(record.session_id)
        if follower is not None:
            follower.touched("input")

    # --- refusals and rows ---------------------------------------------------------------------------------------

    async def _deny(
        self, caller: Caller, record: SessionRecord, command_id: str, command: str, judged: Judgement
    ) -> None:
        shown = self._redact(command)[: self._settings.audit_input_bytes]
        body = {"verdict": "deny", "command": shown, "by": caller.agent_id, "rule": judged.rule}
        detail = f"refused: {shown or 'input'}: {judged.reason}"
        await self._store.append(
            [
                self._entry(record, "decision", command_id, {**body, "reason": judged.reason}),
                event_entry(record, self._clock.time(), "POLICY_VIOLATION", detail, command_id=command_id),
            ]
        )
        self._emit(MetricEvent("violation", record.kind, 1, "command"))
        raise Denied(
            f"the policy does not allow this: {judged.reason}",
            reason="POLICY_DENIED",
            rule=judged.rule,
            command_id=command_id,
        )

    async def _is_written(self, record: SessionRecord, command_id: str) -> bool:
        which = AuditFilter(
            session_id=record.session_id, command_id=command_id, kinds=("input", "control", "command")
        )
        rows, _ = await self._store.rows(which, Page(1))
        return bool(rows)

    async def _is_same(self, record: SessionRecord, command_id: str, command: str) -> bool:
        """Return whether this command was recorded under this id."""
        which = AuditFilter(session_id=record.session_id, command_id=command_id, kinds=("command",))
        rows, _ = await self._store.rows(which, Page(1))
        shown = self._shown(command.encode(), hidden=False)
        return bool(rows) and shown.items() <= msgspec.json.decode(rows[0].body, type=dict[str, Any]).items()

    def _command_id(self, record: SessionRecord, request_id: str) -> str:
        if not request_id:
            return f"cmd-{secrets.token_hex(8)}"
        # Every replica derives the same id from the same request.
        digest = hashlib.blake2b(f"{record.session_id}:{request_id}".encode(), digest_size=8)
        return f"cmd-{digest.hexdigest()}"

    def _entry(self, record: SessionRecord, kind: str, command_id: str, body: dict[str, Any]) -> AuditEntry:
        return AuditEntry(record.session_id, self._clock.time(), record.agent_id, kind, command_id, body)

    # --- RunCommand ----------------------------------------------------------------------------------------------

    async def run(
        self, caller: Caller, record: SessionRecord, handle: SessionHandle, request: RunRequest
    ) -> RunResult:
        loop = asyncio.get_running_loop()
        began = loop.time()
        timeout = request.timeout or self._settings.command_seconds
        command_id = self._command_id(record, request.request_id)
        command = command_text(request.command.encode())
        status = await handle.backend.status(input_wait=False)
        approval_id = ""
        judged = self._judge.strictest(record, status.cwd, (command,))
        if judged.verdict == "deny":
            await self._deny(caller, record, command_id, command, judged)
        if request.request_id and await self._is_written(record, command_id):
            # The command may differ from the first one, and the sandbox may have dropped the first.
            if judged.verdict == "ask" and not await self._is_same(record, command_id, command):
                raise Invalid(
                    "request_id: it belongs to another command", reason="REQUEST_ID_REUSED", field="request_id"
                )
        elif judged.verdict == "ask":
            async with self._approvals.approved(
                record, command_id, command, judged.rule, judged.reason, timeout
            ) as approval:
                approval_id = approval.approval_id
                status = await handle.backend.status(input_wait=False)
                await self._write_command(caller, record, handle, status, command_id, command, judged)
        else:
            await self._write_command(caller, record, handle, status, command_id, command, judged)
        left = max(0.1, timeout - (loop.time() - began))
        max_bytes = min(request.max_bytes, self._settings.max_read_bytes)
        with _typing(handle):
            ran = await handle.backend.run(command_id, command, left, max_bytes)
        # A command that timed out may not have been typed: it may have waited for a prompt.
        handle.line = _lost(handle.line) if ran.timed_out else LineBuffer()
        self._touch(record)
        return RunResult(
            command_id=command_id,
            exit_code=ran.exit_code,
            stdout=ran.stdout,
            stderr=ran.stderr,
            duration=ran.duration,
            state=ran.state,
            timed_out=ran.timed_out,
            truncated=ran.truncated,
            cwd=ran.cwd,
            approval_id=approval_id,
        )

    async def _write_command(
        self,
        caller: Caller,
        record: SessionRecord,
        handle: SessionHandle,
        status: BackendStatus,
        command_id: str,
        command: str,
        judged: Judgement,
    ) -> None:
        data = command.encode()
        body = {
            **self._shown(data, hidden=False),
            "by": caller.agent_id,
            "position": status.position,
            "lines": 1,
            "open": handle.line != LineBuffer(),
            **_rule(judged),
        }
        async with handle.lock:
            rows = await self._store.append([self._entry(record, "command", command_id, body)])
            handle.last_row = rows[-1].seq
            if record.kind == "shell":
                await self._let_follow(record, handle, status, rows[0].seq)
        self._note(record, command_id, status, data + b"\n")

    # --- approved input ------------------------------------------------------------------------------------------

    async def deliver(self, record: SessionRecord, handle: SessionHandle, approval: Approval) -> None:
        """Type the command of an approval."""
        command = approval.data.decode()
        judged = Judgement("allow", (command,), reason=f"approval {approval.approval_id}")
        caller = Caller(approval.answered_by)
        if not await self._is_written(record, approval.command_id):
            status = await handle.backend.status(input_wait=False)
            await self._write_command(caller, record, handle, status, approval.command_id, command, judged)
        with _typing(handle):
            # Without the lock: the program in the foreground may need input before it ends.
            await handle.backend.type_command(approval.command_id, command)
        handle.line = LineBuffer()
        self._touch(record)


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
