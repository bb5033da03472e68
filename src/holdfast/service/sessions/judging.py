"""What the rules say of input: of a line at a prompt, of what is behind it for a program, of a command.

A `Desk` remembers what stands on a session's line in this replica. Reads the log to know whether another one typed
since; writes nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from holdfast.service.api import AuditFilter, Control
from holdfast.service.policy.profiles import Verdict
from holdfast.service.policy.typed_lines import LineBuffer
from holdfast.service.problems import Denied, NotNow
from holdfast.service.sessions.backend.shell import ShellLive, command_text
from holdfast.service.sessions.backend.terminal import Live, Now
from holdfast.service.sessions.ports import SessionStore
from holdfast.service.sessions.rulebook import Rulebook
from holdfast.service.store.types import Page
from holdfast.service.types import SessionRecord
from holdfast.types import KEPT_SHELL_COMMANDS

#: Keys that end or stop the program in the foreground: what is typed after one of them may reach the shell.
_LEAVING: Final = (b"\x03", b"\x04", b"\x1a", b"\x1c")
#: Commands of a shell that may be over before the follower has read the first of them.
UNREAD_COMMANDS: Final = KEPT_SHELL_COMMANDS - 1
_STRICTNESS: Final[dict[Verdict, int]] = {"allow": 0, "ask": 1, "deny": 2}


def interrupts(data: bytes, controls: Sequence[Control]) -> bool:
    """Whether input interrupts what is in the foreground."""
    return b"\x03" in data or any(control.type in ("CTRL_C", "SIGINT") for control in controls)


class Judged(NamedTuple):
    """What the rules say of one call's input."""

    verdict: Verdict
    #: The lines that it would run.
    commands: tuple[str, ...] = ()
    rule: str = ""
    reason: str = ""
    #: The line once it is typed.
    line: LineBuffer = LineBuffer()

    @property
    def open(self) -> bool:
        """Whether something stands on the line then."""
        return self.line != LineBuffer()


class Desk:
    """Where the callers of one session queue up in this replica."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.lock = asyncio.Lock()
        #: What stands on the command line, as far as the rules need to know it.
        self.line = LineBuffer()
        #: The row of the last input that we sent: if the log has a later one, another replica typed since.
        self.last_row = 0
        #: Commands that are about to be typed, or run, whatever stands on the line.
        self.runs = 0
        #: The rows of the last commands of a shell.
        self.recent: deque[int] = deque(maxlen=UNREAD_COMMANDS)


class Judge:
    """Asks the rules."""

    def __init__(self, store: SessionStore, rules: Rulebook) -> None:
        self._store = store
        self._rules = rules

    async def judge(
        self, record: SessionRecord, desk: Desk, now: Now, data: bytes, controls: Sequence[Control]
    ) -> Judged:
        if isinstance(desk.live, ShellLive):
            return self.strictest(record, now.cwd, (command_text(data),)) if data else Judged("allow")
        if not self._rules.is_guarded(record):
            return Judged("allow")
        typed = data + b"".join(b"\x03" for control in controls if control.type == "CTRL_C")
        if not typed:
            return Judged("allow", line=desk.line)
        if now.state == "BUSY" and now.awaiting_input and not now.continuation:
            return self._for_a_program(record, now, data)
        if b"\x03" in data and data.strip(b"\x03"):
            return Judged("deny", reason="an interrupt and more in one input: send the interrupt by itself")
        if desk.runs and typed.strip(b"\x03"):
            # It would stand on the line that is deleted for the command, or that the command stands on.
            raise NotNow(
                f"session {record.session_id!r}: a command is being run there, and nothing asks for input",
                reason="SESSION_BUSY",
                retry_after=0.5,
            )
        if data and now.drops_a_byte:
            desk.line = LineBuffer()  # `data` is typed on a new line, whichever replica typed before
        else:
            await self._know_the_line(record, desk, now, typed)
        result = self._rules.input(record, desk.line, typed, now.cwd)
        decision = result.decision
        typed_lines = tuple(text.rstrip("\r\n") for text in result.entered if text.strip())
        lines = tuple(_printable(text) for text in typed_lines)
        judged = Judged(decision.verdict, lines, decision.place, decision.reason, result.buffer)
        if judged.verdict == "ask" and (not lines or judged.open or lines != typed_lines):
            # What somebody allows must be all that is typed.
            return judged._replace(
                verdict="deny", reason=f"{decision.reason}; it could not be held for an approval"
            )
        return judged

    def _for_a_program(self, record: SessionRecord, now: Now, data: bytes) -> Judged:
        """A program waits for input: its line is not a command. What is behind that line may reach the shell."""
        first, _, rest = data.replace(b"\r", b"\n").partition(b"\n")
        if any(key in first[:-1] for key in _LEAVING):
            return Judged(
                "deny", reason="keys that leave the program, and more behind them: send them by themselves"
            )
        lines = tuple(line for line in rest.decode("utf-8", "replace").split("\n") if line.strip())
        judged = self.strictest(record, now.cwd, lines)
        # Nobody could tell what it would have been typed into by the time of an answer.
        return judged._replace(verdict="deny") if judged.verdict == "ask" else judged

    async def _know_the_line(self, record: SessionRecord, desk: Desk, now: Now, typed: bytes) -> None:
        """Refuse more of a line whose beginning is not known here.

        If another replica typed since we did, its row says whether something stands on the line. A shell that waits
        at a continuation prompt holds lines that this replica has sent, or does not know.
        """
        await self._know_of_other_replicas(record, desk, typed)
        asks_for_rest = now.continuation and now.awaiting_input
        if asks_for_rest and not (desk.line.before or desk.line.lost or typed.startswith(b"\x03")):
            raise Denied(
                "the shell asks for the rest of a command that is not known: send CTRL_C first",
                reason="LINE_UNKNOWN",
                session_id=record.session_id,
            )

    async def _know_of_other_replicas(self, record: SessionRecord, desk: Desk, typed: bytes) -> None:
        which = AuditFilter(session_id=record.session_id, kinds=("input", "control", "command"), newest_first=True)
        rows, _ = await self._store.rows(which, Page(1))
        if not rows or rows[0].seq == desk.last_row:
            return
        body = msgspec.json.decode(rows[0].body, type=dict[str, Any])
        if not body.get("open") or typed.startswith(b"\x03"):
            desk.line = LineBuffer()
            return
        raise Denied(
            "what stands on the line was typed elsewhere: send CTRL_C first",
            reason="LINE_UNKNOWN",
            session_id=record.session_id,
        )

    def strictest(self, record: SessionRecord, cwd: str, commands: tuple[str, ...]) -> Judged:
        if not self._rules.is_guarded(record):
            return Judged("allow", commands)
        found = [self._rules.command(record, command, cwd) for command in commands]
        decision = max(found, key=lambda each: _STRICTNESS[each.verdict], default=None)
        if decision is None:
            return Judged("allow", commands)
        return Judged(decision.verdict, commands, decision.place, decision.reason)


def _printable(text: str) -> str:
    """With bytes that are no UTF-8 as people can read them."""
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")
