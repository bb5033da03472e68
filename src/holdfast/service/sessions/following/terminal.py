"""Follows a session with a terminal: appends the start and end of each command, and its end, to the audit log."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from holdfast.exec_api import ExecApi
from holdfast.service.api import AuditFilter
from holdfast.service.positions import Position, read_token, write_token
from holdfast.service.sessions.context import SessionContext
from holdfast.service.sessions.following.follower import END_POSITION, Ending, OnChange, SessionFollower
from holdfast.service.sessions.ports import MetricEvent, body_of
from holdfast.service.store.types import Page, SessionLease
from holdfast.service.types import AuditEntry, SessionRecord
from holdfast.types import TerminalEvent

#: Inputs that are kept until the shell starts their commands: more than any type-ahead.
_MOST_INPUTS: Final = 64


class TypedInput(NamedTuple):
    """An input with a line end, which may be a command."""

    command_id: str
    #: The position of the terminal at the time of the input.
    position: int
    lines: int


class _Running(NamedTuple):
    """A command that the shell started."""

    command_id: str
    start: Position
    at: float


class TypeAhead:
    """Maps commands to inputs. Both are in the same order, and some inputs are not commands."""

    def __init__(self) -> None:
        self._typed: deque[TypedInput] = deque(maxlen=_MOST_INPUTS)

    def add(self, typed: TypedInput) -> None:
        if typed.command_id not in {each.command_id for each in self._typed}:
            self._typed.append(typed)

    def discard(self, command_id: str) -> None:
        """Remove the input of a command that was run under its id."""
        if command_id and any(each.command_id == command_id for each in self._typed):
            left = [each for each in self._typed if each.command_id != command_id]
            self._typed = deque(left, maxlen=_MOST_INPUTS)

    def take(self, position: int, prompt: int) -> str:
        """Return the id of the input of a command at this position; `prompt` is the position of the last prompt.

        An input that was typed at the prompt comes first: earlier ones went to a program. Otherwise the command was
        typed ahead, and the oldest input is the one.
        """
        there = [each for each in self._typed if each.position <= position]
        if not there:
            return ""
        chosen = next((each for each in there if each.position >= prompt), there[0])
        while self._typed[0] is not chosen:
            self._typed.popleft()
        if chosen.lines > 1:
            self._typed[0] = chosen._replace(lines=chosen.lines - 1, position=position)
        else:
            self._typed.popleft()
        return chosen.command_id


class TerminalFollower(SessionFollower):
    """A session with a terminal."""

    def __init__(
        self, record: SessionRecord, lease: SessionLease, context: SessionContext, on_change: OnChange
    ) -> None:
        super().__init__(record, lease, context, on_change)
        self._type_ahead = TypeAhead()
        self._running: _Running | None = None
        #: The id of the last command that started; empty if its input is not known.
        self._last_id = ""
        #: The beginning of the running command's output, and the size of the output.
        self._excerpt = bytearray()
        self._printed = 0
        #: The position of the last prompt.
        self._prompt = 0
        self._ended: Ending | None = None

    def typed(self, command_id: str, position: int, lines: int) -> None:
        if lines:
            self._type_ahead.add(TypedInput(command_id, position, lines))

    async def follow(self) -> Ending:
        context, session_id = self.context, self.record.session_id
        settings = context.settings
        await self._resume()
        audited = 0 if self.record.audited_token >= END_POSITION else self.record.audited_token
        # The output of a running command is read again, for its excerpt.
        token = audited if self._running is None else min(audited, self._running.start.seq)
        async with context.pool.hold(self.record.sandbox) as api:
            await self._load_status(api)
            while True:
                # Events within a moment are read and written together.
                found = await api.read_terminal(
                    session_id,
                    since=token,
                    max_bytes=settings.follow_bytes,
                    wait=settings.follow_seconds,
                    gather=settings.gather_seconds,
                )
                entries = await self._take(found.events, audited)
                token = found.token
                if entries:
                    await self.write(entries, token, patient=self._ended is None)
                if self._ended is not None:
                    return self._ended
                self.read_to = token
                if found.closed:
                    status = await api.describe_terminal(session_id)
                    state = "ERROR" if status.state == "ERROR" else "CLOSED"
                    return Ending(state, status.reason, status.exit_code)  # type: ignore[arg-type]

    async def _load_status(self, api: ExecApi) -> None:
        status = await api.describe_terminal(self.record.session_id)
        self.last_exit_code = status.last_exit_code
        self.became(busy=status.state == "BUSY" and not status.continuation)

    async def _resume(self) -> None:
        """Continue a command of an earlier follower that has no end in the log."""
        last = await self.last_row("command_started", "command_ended")
        self._running, self._last_id = None, ""
        self._excerpt.clear()
        self._printed = 0
        if last is None:
            self.counted(0)
            return
        body = body_of(last)
        self._last_id = last.command_id
        self.counted(body["number"] - (last.kind == "command_started"))
        if last.kind == "command_started":
            self._running = _Running(last.command_id, read_token(last.session_id, body["start"]), last.at)

    # --- events --------------------------------------------------------------------------------------------------

    async def _take(self, events: Sequence[TerminalEvent], audited: int) -> list[AuditEntry]:
        entries: list[AuditEntry] = []
        session_id = self.record.session_id
        for event in events:
            position = Position(seq=event.token, printed=event.offset)
            if event.type == "output":
                self._print(event.payload)
                self.output_bytes = max(self.output_bytes, event.offset + len(event.payload))
            elif event.token <= audited:
                continue
            elif event.type == "gap":
                self._printed += max(0, event.offset - self.output_bytes)
                self.output_bytes = max(self.output_bytes, event.offset)
            elif event.type == "prompt":
                self._prompt = event.token
                self.became(busy=False)
            elif event.type == "command":
                command_id = self._last_id = event.run_id or await self._command_id(event.token)
                self._type_ahead.discard(event.run_id)
                self._running = _Running(command_id, position, event.timestamp)
                self._excerpt.clear()
                self._printed = 0
                token = write_token(session_id, position)
                number = self.record.commands_run + 1
                entries.append(
                    self.entry("command_started", command_id, event.timestamp, number=number, start=token)
                )
                self.became(busy=True)
            elif event.type == "ended" and self._running is not None:
                entries.append(self._end(self._running, event, position))
            elif event.type == "state" and event.state in ("CLOSED", "ERROR"):
                if self._running is not None:
                    entries.append(self._end(self._running, event, position))
                state = "ERROR" if event.state == "ERROR" else "CLOSED"
                self._ended = Ending(state, event.reason, event.exit_code)  # type: ignore[arg-type]
        if events and events[-1].token > audited:
            self.touched("output")
        return entries

    def _print(self, data: bytes) -> None:
        room = self.context.settings.audit_excerpt_bytes - len(self._excerpt)
        if self._running is not None:
            self._printed += len(data)
            if room > 0:
                self._excerpt += data[:room]
        self.context.emit(MetricEvent("output", "terminal", len(data)))

    def _end(self, running: _Running, event: TerminalEvent, position: Position) -> AuditEntry:
        session_id = self.record.session_id
        self._running = None
        self.last_exit_code = event.exit_code
        self.counted()
        duration = max(0.0, event.timestamp - running.at)
        self.context.emit(MetricEvent("command_ended", "terminal", duration))
        return self.entry(
            "command_ended",
            running.command_id,
            event.timestamp,
            number=self.record.commands_run,
            exit_code=event.exit_code,
            start=write_token(session_id, running.start),
            end=write_token(session_id, position),
            duration=round(duration, 6),
            **self.excerpt(bytes(self._excerpt), self._printed),
        )

    async def _command_id(self, position: int) -> str:
        """Return the id of the input of a command: from memory, or from the log after a restart."""
        found = self._type_ahead.take(position, self._prompt)
        if found:
            return found
        which = AuditFilter(session_id=self.record.session_id, kinds=("input", "command"), newest_first=True)
        rows, _ = await self.context.store.rows(which, Page(_MOST_INPUTS))
        # Inputs before the last started command are finished.
        newer = list(itertools.takewhile(lambda row: row.command_id != self._last_id, rows))
        for row in reversed(newer):
            body = body_of(row)
            if body.get("lines") and body.get("position", 0) <= position:
                self._type_ahead.add(TypedInput(row.command_id, body["position"], body["lines"]))
        return self._type_ahead.take(position, self._prompt)
