"""What happens in a session's terminal, as rows of the audit log: commands with their ids, their ends, its end.

Reads terminal events; types nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from holdfast.exec_api import ExecApi
from holdfast.service.api import AuditFilter
from holdfast.service.positions import Position, read_token, write_token
from holdfast.service.sessions.following.follower import END_POSITION, Ending, Follower, Surroundings
from holdfast.service.sessions.ports import Told
from holdfast.service.store.types import Page, SessionLease
from holdfast.service.types import AuditEntry, SessionRecord
from holdfast.types import TerminalEvent

#: Inputs that are remembered until the shell begins what they typed: nobody types so far ahead.
_REMEMBERED: Final = 64


class Typed(NamedTuple):
    """An input with a line end in it: what was typed may be a command."""

    command_id: str
    #: How far the terminal had come when it was typed.
    position: int
    lines: int


class _Running(NamedTuple):
    """A command that the shell began."""

    command_id: str
    start: Position
    at: float


class TypedAhead:
    """Which input a command came from: they come in their order, and some are no command at all."""

    def __init__(self) -> None:
        self._typed: deque[Typed] = deque(maxlen=_REMEMBERED)

    def add(self, typed: Typed) -> None:
        if typed.command_id not in {each.command_id for each in self._typed}:
            self._typed.append(typed)

    def take(self, position: int, prompt: int) -> str:
        """The id of the input that began a command at this position; `prompt` is where the last prompt was shown.

        One that was typed at that prompt, if there is one: what came before it went to a program. Else it was
        typed ahead, and the oldest is the one.
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


class TerminalFollower(Follower):
    """A session with a terminal."""

    def __init__(
        self,
        record: SessionRecord,
        lease: SessionLease,
        around: Surroundings,
        on_change: Callable[[Follower], None],
    ) -> None:
        super().__init__(record, lease, around, on_change)
        self.typed = TypedAhead()
        self._running: _Running | None = None
        #: The command that was begun last, if it is known who typed it.
        self._last_id = ""
        #: What the running command printed: its beginning, and how much it was.
        self._excerpt = bytearray()
        self._printed = 0
        #: Where the last prompt was shown.
        self._prompt = 0
        self._ended: Ending | None = None

    async def follow(self) -> Ending:
        around, session_id = self.around, self.record.session_id
        settings = around.settings
        await self._resume()
        audited = 0 if self.record.audited_token >= END_POSITION else self.record.audited_token
        # What a running command printed is read again: its excerpt begins there.
        token = audited if self._running is None else min(audited, self._running.start.seq)
        async with around.pool.hold(self.record.sandbox) as api:
            await self._look(api)
            while True:
                found = await api.read_terminal(
                    session_id, since=token, max_bytes=settings.follow_bytes, wait=settings.follow_seconds
                )
                if 0 < found.token - token < settings.follow_bytes and not found.closed:
                    # What comes within a moment is read and written together. Not while more is printed than one
                    # read takes: the terminal keeps only so much.
                    await asyncio.sleep(settings.gather_seconds)
                    found = await api.read_terminal(session_id, since=token, max_bytes=settings.follow_bytes)
                entries = await self._take(found.events, audited)
                token = found.token
                if entries:
                    await self.write(entries, token)
                if self._ended is not None:
                    return self._ended
                self.read_to = token
                if found.closed:
                    status = await api.describe_terminal(session_id)
                    state = "ERROR" if status.state == "ERROR" else "CLOSED"
                    return Ending(state, status.reason, status.exit_code)  # type: ignore[arg-type]

    async def _look(self, api: ExecApi) -> None:
        status = await api.describe_terminal(self.record.session_id)
        self.last_exit_code = status.last_exit_code
        self.became(busy=status.state == "BUSY" and not status.continuation)

    async def _resume(self) -> None:
        """What another follower began: a command whose end is not written down."""
        last = await self.last_row("command_started", "command_ended")
        self._running, self._last_id = None, ""
        self._excerpt.clear()
        self._printed = 0
        if last is None:
            self.counted(0)
            return
        body = _body(last.body)
        self._last_id = last.command_id
        self.counted(body["number"] - (last.kind == "command_started"))
        if last.kind == "command_started":
            self._running = _Running(last.command_id, read_token(last.session_id, body["start"]), last.at)

    # --- events --------------------------------------------------------------------------------------------------

    async def _take(self, events: Sequence[TerminalEvent], audited: int) -> list[AuditEntry]:
        entries: list[AuditEntry] = []
        session_id = self.record.session_id
        for event in events:
            place = Position(seq=event.token, printed=event.offset)
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
                command_id = self._last_id = await self._command_id(event.token)
                self._running = _Running(command_id, place, event.timestamp)
                self._excerpt.clear()
                self._printed = 0
                token = write_token(session_id, place)
                number = self.record.commands_run + 1
                entries.append(
                    self.entry("command_started", command_id, event.timestamp, number=number, start=token)
                )
                self.became(busy=True)
            elif event.type == "ended" and self._running is not None:
                entries.append(self._end(self._running, event, place))
            elif event.type == "state" and event.state in ("CLOSED", "ERROR"):
                if self._running is not None:
                    entries.append(self._end(self._running, event, place))
                state = "ERROR" if event.state == "ERROR" else "CLOSED"
                self._ended = Ending(state, event.reason, event.exit_code)  # type: ignore[arg-type]
        if events and events[-1].token > audited:
            self.touched("output")
        return entries

    def _print(self, data: bytes) -> None:
        room = self.around.settings.audit_excerpt_bytes - len(self._excerpt)
        if self._running is not None:
            self._printed += len(data)
            if room > 0:
                self._excerpt += data[:room]
        self.around.tell(Told("output", "terminal", len(data)))

    def _end(self, running: _Running, event: TerminalEvent, place: Position) -> AuditEntry:
        session_id = self.record.session_id
        self._running = None
        self.last_exit_code = event.exit_code
        self.counted()
        duration = max(0.0, event.timestamp - running.at)
        self.around.tell(Told("command_ended", "terminal", duration))
        return self.entry(
            "command_ended",
            running.command_id,
            event.timestamp,
            number=self.record.commands_run,
            exit_code=event.exit_code,
            start=write_token(session_id, running.start),
            end=write_token(session_id, place),
            duration=round(duration, 6),
            **self.excerpt(bytes(self._excerpt), self._printed),
        )

    async def _command_id(self, position: int) -> str:
        """Whose input it was: ours if we know it, else what the log has, by another replica or before a restart."""
        found = self.typed.take(position, self._prompt)
        if found:
            return found
        which = AuditFilter(session_id=self.record.session_id, kinds=("input", "command"), newest_first=True)
        rows, _ = await self.around.store.rows(which, Page(_REMEMBERED))
        # Those before the one that was begun last are done with.
        newer = list(itertools.takewhile(lambda row: row.command_id != self._last_id, rows))
        for row in reversed(newer):
            body = _body(row.body)
            if body.get("lines") and body.get("position", 0) <= position:
                self.typed.add(Typed(row.command_id, body["position"], body["lines"]))
        return self.typed.take(position, self._prompt)


def _body(text: str) -> dict[str, Any]:
    return msgspec.json.decode(text, type=dict[str, Any])
