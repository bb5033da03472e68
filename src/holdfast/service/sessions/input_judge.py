"""Decides by the rules on input: on a line at a prompt, on lines after it for a program, on a command.

Reads the audit log to find out whether another replica typed since. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from holdfast.service.api import Control
from holdfast.service.policy.profiles import Verdict
from holdfast.service.policy.typed_lines import LineBuffer
from holdfast.service.problems import Denied, NotNow
from holdfast.service.sessions.backend.session_backend import BackendStatus
from holdfast.service.sessions.backend.shell import command_text
from holdfast.service.sessions.handles import SessionHandle
from holdfast.service.sessions.ports import SessionStore, body_of, first_row
from holdfast.service.sessions.rulebook import Rulebook
from holdfast.service.types import Caller, SessionRecord

#: Keys that end or stop the program in the foreground: input after one of them may reach the shell.
_LEAVING: Final = (b"\x03", b"\x04", b"\x1a", b"\x1c")
_STRICTNESS: Final[dict[Verdict, int]] = {"allow": 0, "ask": 1, "deny": 2}


def interrupts(data: bytes, controls: Sequence[Control]) -> bool:
    """Return whether input interrupts the foreground."""
    return b"\x03" in data or any(control.type in ("CTRL_C", "SIGINT") for control in controls)


class InputCall(NamedTuple):
    """The input of one call."""

    caller: Caller
    record: SessionRecord
    handle: SessionHandle
    data: bytes = b""
    controls: Sequence[Control] = ()
    command_id: str = ""


class Judgement(NamedTuple):
    """The decision on the input of one call."""

    verdict: Verdict
    #: The lines that the input would run.
    commands: tuple[str, ...] = ()
    rule: str = ""
    reason: str = ""
    #: The line after the input.
    line: LineBuffer = LineBuffer()

    @property
    def open(self) -> bool:
        """Whether the line has text after the input."""
        return self.line != LineBuffer()


class InputJudge:
    """Applies the rules to input."""

    def __init__(self, store: SessionStore, rules: Rulebook) -> None:
        self._store = store
        self._rules = rules

    async def judge(self, call: InputCall, status: BackendStatus) -> Judgement:
        record, handle, data = call.record, call.handle, call.data
        if record.kind == "shell":
            return self.strictest(record, status.cwd, (command_text(data),)) if data else Judgement("allow")
        if not self._rules.is_guarded(record):
            return Judgement("allow")
        typed = data + b"".join(b"\x03" for control in call.controls if control.type == "CTRL_C")
        if not typed:
            return Judgement("allow", line=handle.line)
        if status.state == "BUSY" and status.awaiting_input and not status.continuation:
            return self._for_a_program(record, status, data)
        if b"\x03" in data and data.strip(b"\x03"):
            return Judgement("deny", reason="an interrupt with more input: send the interrupt alone")
        if handle.runs and typed.strip(b"\x03"):
            # The input would be on the line that is deleted for the command, or that holds the command.
            message = f"session {record.session_id!r}: a command runs, and no program waits for input"
            raise NotNow(message, reason="SESSION_BUSY", retry_after=0.5)
        if data and status.drops_a_byte:
            handle.line = LineBuffer()  # `data` is typed on a new line, whichever replica typed before
        else:
            await self._check_line(record, handle, status, typed)
        result = self._rules.input(record, handle.line, typed, status.cwd)
        decision = result.decision
        typed_lines = tuple(text.rstrip("\r\n") for text in result.entered if text.strip())
        lines = tuple(_printable(text) for text in typed_lines)
        judged = Judgement(decision.verdict, lines, decision.location, decision.reason, result.buffer)
        if judged.verdict == "ask" and (not lines or judged.open or lines != typed_lines):
            # The operator must approve exactly what is typed.
            reason = f"{decision.reason}; it could not be held for an approval"
            return judged._replace(verdict="deny", reason=reason)
        return judged

    def _for_a_program(self, record: SessionRecord, status: BackendStatus, data: bytes) -> Judgement:
        """Decide on input for a program. Its first line is not a command; lines after it may reach the shell."""
        first, _, rest = data.replace(b"\r", b"\n").partition(b"\n")
        if any(key in first[:-1] for key in _LEAVING):
            reason = "keys that leave the program, with more input after them: send the keys alone"
            return Judgement("deny", reason=reason)
        lines = tuple(line for line in rest.decode("utf-8", "replace").split("\n") if line.strip())
        judged = self.strictest(record, status.cwd, lines)
        # By the time of an answer, another program may be in the foreground.
        return judged._replace(verdict="deny") if judged.verdict == "ask" else judged

    async def _check_line(
        self, record: SessionRecord, handle: SessionHandle, status: BackendStatus, typed: bytes
    ) -> None:
        """Refuse input on a line if this replica does not have the beginning of the line.

        If another replica typed since, its row has whether the line has text. A shell at a continuation prompt
        holds lines that this replica may not have sent.
        """
        await self._check_other_replicas(record, handle, typed)
        asks_for_rest = status.continuation and status.awaiting_input
        if asks_for_rest and not (handle.line.before or handle.line.lost or typed.startswith(b"\x03")):
            raise _line_unknown(record, "the shell waits for the rest of an unknown command")

    async def _check_other_replicas(self, record: SessionRecord, handle: SessionHandle, typed: bytes) -> None:
        kinds = ("input", "control", "command")
        last = await first_row(self._store, session_id=record.session_id, kinds=kinds, newest_first=True)
        if last is None or last.seq == handle.last_row:
            return
        if body_of(last).get("open") and not typed.startswith(b"\x03"):
            raise _line_unknown(record, "the text on the line was typed through another replica")
        handle.line = LineBuffer()

    def strictest(self, record: SessionRecord, cwd: str, commands: tuple[str, ...]) -> Judgement:
        if not self._rules.is_guarded(record):
            return Judgement("allow", commands)
        found = [self._rules.command(record, command, cwd) for command in commands]
        decision = max(found, key=lambda each: _STRICTNESS[each.verdict], default=None)
        if decision is None:
            return Judgement("allow", commands)
        return Judgement(decision.verdict, commands, decision.location, decision.reason)


def _line_unknown(record: SessionRecord, why: str) -> Denied:
    return Denied(f"{why}: send CTRL_C first", reason="LINE_UNKNOWN", session_id=record.session_id)


def _printable(text: str) -> str:
    """Return the text with bytes that are not UTF-8 as escapes."""
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")
