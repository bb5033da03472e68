"""What callers type and run: in their order, judged by the rules, written down, then sent.

One call's input stays together. Rules are about commands: a line at a prompt, in whatever pieces it comes, and what
`RunCommand` runs. If they say anything at all and it cannot be known what a line is, it is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from holdfast.service.api import AuditFilter, Control, InputTaken, RunRequest, RunResult
from holdfast.service.clock import Clock
from holdfast.service.policy.engine import refusal
from holdfast.service.policy.typed_lines import LineBuffer
from holdfast.service.problems import Denied, Invalid, NotNow
from holdfast.service.sessions.approvals import Approvals
from holdfast.service.sessions.backend.shell import ShellLive, command_text
from holdfast.service.sessions.backend.terminal import Now, TerminalLive, begins_a_line
from holdfast.service.sessions.following.events import event_entry
from holdfast.service.sessions.following.leases import Leases
from holdfast.service.sessions.following.shell import ShellFollower
from holdfast.service.sessions.following.terminal import TerminalFollower, Typed
from holdfast.service.sessions.judging import UNREAD_COMMANDS, Desk, Judge, Judged, interrupts
from holdfast.service.sessions.ports import Redact, SessionStore, Tell, Told
from holdfast.service.sessions.rulebook import Rulebook
from holdfast.service.settings import ServiceSettings
from holdfast.service.store.types import Page
from holdfast.service.types import Approval, AuditEntry, Caller, SessionRecord

_SIGNALS: Final = ("SIGINT", "SIGTERM", "SIGKILL")
#: How long a shell's next command waits for the follower to have read the first of those before it: longer than
#: that takes, shorter than a caller's patience with a database that is away.
_FOLLOW_SECONDS: Final = 2.0


class InputDesk:
    """`SendInput` and `RunCommand`."""

    def __init__(
        self,
        store: SessionStore,
        rules: Rulebook,
        clock: Clock,
        settings: ServiceSettings,
        leases: Leases,
        redact: Redact,
        tell: Tell,
    ) -> None:
        self._store = store
        self._rules = rules
        self._judge = Judge(store, rules)
        self._clock = clock
        self._settings = settings
        self._leases = leases
        self._redact = redact
        self._tell = tell
        #: Set by whoever puts the parts together: approvals deliver through us, and we ask through them.
        self.approvals: Approvals

    # --- SendInput -----------------------------------------------------------------------------------------------

    async def send(
        self,
        caller: Caller,
        record: SessionRecord,
        desk: Desk,
        data: bytes,
        controls: Sequence[Control],
        request_id: str,
    ) -> InputTaken:
        self._check(record, desk, data, controls)
        command_id = self._command_id(record, request_id)
        if not data and all(control.type in _SIGNALS for control in controls):
            # Signals overtake what waits to be typed: that may be what they are about.
            return await self._send(caller, record, desk, command_id, data, controls, request_id, busy=False)
        busy = desk.lock.locked()
        async with desk.lock:
            return await self._send(caller, record, desk, command_id, data, controls, request_id, busy=busy)

    def _check(self, record: SessionRecord, desk: Desk, data: bytes, controls: Sequence[Control]) -> None:
        if not data and not controls:
            raise Invalid("data: nothing to type, and no action", reason="EMPTY_INPUT", field="data")
        if len(data) > self._settings.max_input_bytes:
            raise Invalid(
                f"data: {len(data)} bytes; at most {self._settings.max_input_bytes} at a time (max_input_bytes)",
                reason="INPUT_TOO_LARGE",
                field="data",
            )
        for control in controls:
            if control.type == "RESIZE" and not (0 < control.cols < 10_000 and 0 < control.rows < 10_000):
                raise Invalid("actions: RESIZE needs cols and rows", reason="BAD_SIZE", field="actions")
            if control.type != "RESIZE":
                decision = self._rules.signal(record, control.type)
                if not decision.allowed:
                    raise refusal(decision)
        if isinstance(desk.live, ShellLive):
            desk.live.check_controls(controls)

    async def _send(
        self,
        caller: Caller,
        record: SessionRecord,
        desk: Desk,
        command_id: str,
        data: bytes,
        controls: Sequence[Control],
        request_id: str,
        *,
        busy: bool,
    ) -> InputTaken:
        # Which program waits for input matters to the rules alone.
        guarded = self._rules.is_guarded(record)
        now = await desk.live.now(look=guarded)
        if guarded and isinstance(desk.live, TerminalLive):
            now = await self._in_order(record, desk.live, now, data, controls)
        if now.state in ("CLOSING", "CLOSED", "ERROR"):
            raise NotNow(f"session {record.session_id!r} is {now.state}: {now.reason}", reason="SESSION_CLOSED")
        repeated = bool(request_id) and await self._is_written(record, command_id)
        judged = await self._judge.judge(record, desk, now, data, controls)
        if judged.verdict == "deny":
            await self._deny(caller, record, command_id, "; ".join(judged.commands), judged)
        if repeated:
            # Judged all the same: it need not be what was sent before, and its terminal may have forgotten that.
            if judged.verdict == "ask":
                return InputTaken(True, command_id, now.state, queue_busy=now.queue_busy or busy)
            if judged.open or desk.line != LineBuffer():
                desk.line = LineBuffer(lost="input that was sent before")
        else:
            if judged.verdict == "ask":
                command = "\n".join(judged.commands)
                approval = await self.approvals.hold(record, command_id, command, judged.rule, judged.reason)
                return InputTaken(False, command_id, now.state, approval.approval_id, now.queue_busy or busy)
            entries = self._entries(caller, record, desk, now, command_id, data, controls, judged)
            rows = await self._store.append(entries)
            desk.last_row, desk.line = rows[-1].seq, judged.line
            self._note(record, command_id, now, data)
            if data and record.kind == "shell":
                await self._let_follow(record, desk, now, rows[0].seq)
        if guarded and data and interrupts(b"", controls) and isinstance(desk.live, TerminalLive):
            await desk.live.send(command_id, data, (), new_line=now.drops_a_byte)
            if not await desk.live.line_begun(self._settings.interrupt_seconds):
                raise _not_in_order(record, "the line was typed and has not begun: send the interrupt again")
            await desk.live.send(command_id, b"", controls)
        else:
            await desk.live.send(command_id, data, controls, new_line=now.drops_a_byte)
        self._touch(record)
        if begins_a_line(record, now, data, controls):
            return InputTaken(True, command_id, "BUSY", queue_busy=now.queue_busy or busy)
        after = await desk.live.settled()
        return InputTaken(True, command_id, after.state, queue_busy=after.queue_busy or busy)

    async def _in_order(
        self, record: SessionRecord, live: TerminalLive, now: Now, data: bytes, controls: Sequence[Control]
    ) -> Now:
        """Hold an interrupt until the shell has begun the line before it, and input after an interrupt until the
        shell or a program waits for input. The shell can drop the first byte of a line that an interrupt comes near
        to, and the rules judged the line with that byte."""
        seconds = self._settings.interrupt_seconds
        if now.state == "IDLE" and interrupts(data, controls) and not await live.line_begun(seconds):
            raise _not_in_order(record, "the line that was typed before has not begun")
        if data and now.interrupted and now.state == "BUSY" and not now.continuation:
            if not now.awaiting_input:
                now = await live.input_awaited(seconds)
            if now.state == "BUSY" and (now.shell_reads or not now.awaiting_input):
                raise _not_in_order(record, "no prompt since the interrupt, and no program waits for input")
        return now

    def _entries(
        self,
        caller: Caller,
        record: SessionRecord,
        desk: Desk,
        now: Now,
        command_id: str,
        data: bytes,
        controls: Sequence[Control],
        judged: Judged,
    ) -> list[AuditEntry]:
        entries = []
        if data and isinstance(desk.live, ShellLive):
            body = {**self._shown(data, hidden=False), "by": caller.agent_id, **_rule(judged)}
            entries.append(self._entry(record, "command", command_id, body))
        elif data:
            body = {
                **self._shown(data, hidden=now.hidden),
                "by": caller.agent_id,
                "position": now.position,
                "lines": data.count(b"\n") + data.count(b"\r"),
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
        """Input as it may be written down: cut, without secrets, and a password by its length alone."""
        if hidden:
            return {"hidden": True, "bytes": len(data)}
        text = self._redact(data.decode("utf-8", "backslashreplace"))
        limit = self._settings.audit_input_bytes
        return {"text": text[:limit], "bytes": len(data), "cut": len(text) > limit}

    def _note(self, record: SessionRecord, command_id: str, now: Now, data: bytes) -> None:
        follower = self._leases.follower(record.session_id)
        lines = data.count(b"\n") + data.count(b"\r")
        if isinstance(follower, TerminalFollower) and lines:
            follower.typed.add(Typed(command_id, now.position, lines))

    async def _let_follow(self, record: SessionRecord, desk: Desk, now: Now, number: int) -> None:
        """A shell keeps what its last four commands printed: do not run on before the follower has read them."""
        follower = self._leases.follower(record.session_id)
        if isinstance(follower, ShellFollower) and now.state == "IDLE" and len(desk.recent) == UNREAD_COMMANDS:
            await follower.caught_up(desk.recent[0], _FOLLOW_SECONDS)
        desk.recent.append(number)

    def _touch(self, record: SessionRecord) -> None:
        follower = self._leases.follower(record.session_id)
        if follower is not None:
            follower.touched("input")

    # --- refusals and rows ---------------------------------------------------------------------------------------

    async def _deny(
        self, caller: Caller, record: SessionRecord, command_id: str, command: str, judged: Judged
    ) -> None:
        now = self._clock.time()
        shown = self._redact(command)[: self._settings.audit_input_bytes]
        body = {"verdict": "deny", "command": shown, "by": caller.agent_id, "rule": judged.rule}
        detail = f"refused: {shown or 'input'}: {judged.reason}"
        await self._store.append(
            [
                self._entry(record, "decision", command_id, {**body, "reason": judged.reason}),
                event_entry(record, now, "POLICY_VIOLATION", detail, command_id=command_id),
            ]
        )
        self._tell(Told("violation", record.kind, 1, "command"))
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
        """Whether this is the command that was allowed under this id."""
        which = AuditFilter(session_id=record.session_id, command_id=command_id, kinds=("command",))
        rows, _ = await self._store.rows(which, Page(1))
        shown = self._shown(command.encode(), hidden=False)
        return bool(rows) and shown.items() <= msgspec.json.decode(rows[0].body, type=dict[str, Any]).items()

    def _command_id(self, record: SessionRecord, request_id: str) -> str:
        if not request_id:
            return f"cmd-{secrets.token_hex(8)}"
        # The same for every replica that gets the same request.
        digest = hashlib.blake2b(f"{record.session_id}:{request_id}".encode(), digest_size=8)
        return f"cmd-{digest.hexdigest()}"

    def _entry(self, record: SessionRecord, kind: str, command_id: str, body: dict[str, Any]) -> AuditEntry:
        return AuditEntry(record.session_id, self._clock.time(), record.agent_id, kind, command_id, body)

    # --- RunCommand ----------------------------------------------------------------------------------------------

    async def run(self, caller: Caller, record: SessionRecord, desk: Desk, request: RunRequest) -> RunResult:
        loop = asyncio.get_running_loop()
        began = loop.time()
        timeout = request.timeout or self._settings.command_seconds
        command_id = self._command_id(record, request.request_id)
        command = command_text(request.command.encode())
        now = await desk.live.now(look=False)
        approval_id = ""
        judged = self._judge.strictest(record, now.cwd, (command,))
        if judged.verdict == "deny":
            await self._deny(caller, record, command_id, command, judged)
        if request.request_id and await self._is_written(record, command_id):
            # It need not be what was run before, and its sandbox may have forgotten that.
            if judged.verdict == "ask" and not await self._is_same(record, command_id, command):
                raise Invalid(
                    "request_id: it was another command's", reason="REQUEST_ID_REUSED", field="request_id"
                )
        elif judged.verdict == "ask":
            async with self.approvals.approved(
                record, command_id, command, judged.rule, judged.reason, timeout
            ) as approval:
                approval_id = approval.approval_id
                now = await desk.live.now(look=False)
                await self._write_command(caller, record, desk, now, command_id, command, judged)
        else:
            await self._write_command(caller, record, desk, now, command_id, command, judged)
        left = max(0.1, timeout - (loop.time() - began))
        max_bytes = min(request.max_bytes, self._settings.max_read_bytes)
        with _typing(desk):
            ran = await desk.live.run(command_id, command, left, max_bytes)
        # One that timed out may have waited for a prompt all the time.
        desk.line = _lost(desk.line) if ran.timed_out else LineBuffer()
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
        desk: Desk,
        now: Now,
        command_id: str,
        command: str,
        judged: Judged,
    ) -> None:
        data = command.encode()
        body = {
            **self._shown(data, hidden=False),
            "by": caller.agent_id,
            "position": now.position,
            "lines": 1,
            "open": desk.line != LineBuffer(),
            **_rule(judged),
        }
        async with desk.lock:
            rows = await self._store.append([self._entry(record, "command", command_id, body)])
            desk.last_row = rows[-1].seq
            if record.kind == "shell":
                await self._let_follow(record, desk, now, rows[0].seq)
        self._note(record, command_id, now, data + b"\n")

    # --- what was allowed later ----------------------------------------------------------------------------------

    async def deliver(self, record: SessionRecord, desk: Desk, approval: Approval) -> None:
        """Type what was held."""
        command = approval.data.decode()
        judged = Judged("allow", (command,), reason=f"approval {approval.approval_id}")
        caller = Caller(approval.answered_by)
        if not await self._is_written(record, approval.command_id):
            now = await desk.live.now(look=False)
            await self._write_command(caller, record, desk, now, approval.command_id, command, judged)
        with _typing(desk):
            # Without the lock: a program that is to end first may have to be answered.
            await desk.live.type_command(approval.command_id, command)
        desk.line = LineBuffer()
        self._touch(record)


def _not_in_order(record: SessionRecord, why: str) -> NotNow:
    return NotNow(f"session {record.session_id!r}: {why}", reason="SESSION_BUSY", retry_after=0.5)


@contextmanager
def _typing(desk: Desk) -> Iterator[None]:
    """Around a command that is typed: what stands on the line is deleted before it, if it comes to that."""
    desk.runs += 1
    try:
        yield
    except BaseException:
        desk.line = _lost(desk.line)
        raise
    finally:
        desk.runs -= 1


def _lost(line: LineBuffer) -> LineBuffer:
    return LineBuffer(lost="a command that may not have been typed") if line != LineBuffer() else line


def _rule(judged: Judged) -> dict[str, Any]:
    return {"rule": judged.rule} if judged.rule else {}
