"""The events between the bytes of a terminal's output, and the times of the bytes. Pure.

A position counts one for each byte and one for each event before it. So a single number is the progress of a reader
in both, it only grows, a read can begin at every value, and the server keeps no state of readers:

    bytes    h e l l o          w o
    events            [prompt]      [resize]
    position 0 1 2 3 4 5        6 7 8        9
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from holdfast.errors import InvalidParams
from holdfast.types import TerminalEvent, TerminalEventType, TerminalRead, TerminalSize, TerminalState

if TYPE_CHECKING:
    from holdfast.runtime.durability.records import TerminalEventRecord

#: Times of output that are kept, 16 bytes each; beyond this number the older half gets coarser.
MAX_TIMES: Final = 32_768
#: Output within this many seconds has one time.
_TIME_STEP: Final = 0.001
#: The most events of one read.
_MAX_EVENTS: Final = 4_096


class ReadableLog(Protocol):
    """The part of `OutputLog` that a timeline reads."""

    end: int
    lost_start: int
    lost_end: int

    def read(self, offset: int, length: int) -> bytes: ...


class TimelineEvent(NamedTuple):
    """One event as it is kept."""

    #: The number of events and bytes before it.
    position: int
    offset: int
    timestamp: float
    type: TerminalEventType
    #: The state after it.
    state: TerminalState
    payload: bytes
    exit_code: int | None
    prompt: str | None
    size: TerminalSize | None
    reason: str
    cwd: str | None
    run_id: str


class Timeline:
    """The events of one terminal, the latest of them, by position."""

    __slots__ = ("_dropped", "_events", "_horizon", "_limit", "_now", "_offsets", "_times", "on_add", "state")

    def __init__(self, max_events: int) -> None:
        self._limit = max_events
        self._events: list[TimelineEvent] = []
        self._dropped = 0
        #: Events before this position were dropped, so earlier positions have no known offset.
        self._horizon = 0
        self._offsets = array("Q")
        self._times = array("d")
        #: The latest time; a clock that is set back does not reverse the order.
        self._now = 0.0
        self.state: TerminalState = "RUNNING"
        #: Called with each event, before it can be read.
        self.on_add: Callable[[TimelineEvent], None] | None = None

    @property
    def count(self) -> int:
        """The number of events so far."""
        return self._dropped + len(self._events)

    def after(self, count: int) -> list[TimelineEvent] | None:
        """The events after the first `count`; None if some of them were dropped."""
        return None if count < self._dropped else self._events[count - self._dropped :]

    def add(
        self,
        type: TerminalEventType,
        offset: int,
        timestamp: float,
        *,
        payload: bytes = b"",
        exit_code: int | None = None,
        prompt: str | None = None,
        size: TerminalSize | None = None,
        reason: str = "",
        cwd: str | None = None,
        run_id: str = "",
    ) -> int:
        """Add an event at this offset of the output; returns the position after it."""
        position = offset + self.count
        timestamp = self._now = max(timestamp, self._now)
        if self._times and timestamp > self._times[-1]:
            self._sample(offset, timestamp)  # output after the event is not older than the event
        event = TimelineEvent(
            position, offset, timestamp, type, self.state, payload, exit_code, prompt, size, reason, cwd, run_id
        )
        self._events.append(event)
        if self.on_add is not None:
            self.on_add(event)
        if len(self._events) > self._limit + self._limit // 8:
            surplus = len(self._events) - self._limit
            self._horizon = self._events[surplus - 1].position + 1
            del self._events[:surplus]
            self._dropped += surplus
        return position + 1

    def skip(self, count: int, horizon: int) -> None:
        """Begin after `count` events that are no longer kept, up to the position `horizon`."""
        self._dropped, self._horizon = count, horizon

    def replay(self, event: TerminalEventRecord) -> None:
        """Add an event that an earlier server recorded."""
        self.state = event.state
        self.add(
            event.type,
            event.offset,
            event.at,
            payload=event.payload,
            exit_code=event.exit_code,
            prompt=event.prompt,
            size=event.size,
            reason=event.reason,
            cwd=event.cwd,
            run_id=event.run_id,
        )

    def note_output(self, offset: int, timestamp: float) -> None:
        """Record the time of the output from this offset on."""
        timestamp = self._now = max(timestamp, self._now)
        if not self._times or timestamp - self._times[-1] >= _TIME_STEP:
            self._sample(offset, timestamp)

    def _sample(self, offset: int, timestamp: float) -> None:
        self._offsets.append(offset)
        self._times.append(timestamp)
        if len(self._times) > MAX_TIMES:
            half = MAX_TIMES // 2
            for samples in (self._offsets, self._times):
                del samples[1:half:2]

    def token(self, log: ReadableLog) -> int:
        """The position after everything so far."""
        return log.end + self.count

    def position_of(self, offset: int) -> int:
        """The position of the byte at this offset, before the events at the same offset."""
        return offset + self._dropped + bisect_left(self._events, offset, key=_offset)

    def offset_of(self, position: int) -> int:
        """The offset of the first byte after a position."""
        position = max(position, self._horizon)
        return position - self._dropped - bisect_left(self._events, position, key=_position)

    def unfinished_line(self, log: ReadableLog, max_bytes: int) -> bytes:
        """The output after the last line end, at most `max_bytes`; empty after a prompt or the end of a command."""
        start = max(0, log.end - max_bytes)
        for event in reversed(self._events):
            if event.offset < start:
                break
            if event.type in _LINE_BOUNDARIES or event.state in ("CLOSED", "ERROR"):
                start = event.offset
                break
        if start < log.lost_end:
            start = min(log.lost_end, log.end)
        return log.read(start, log.end - start).rpartition(b"\n")[2]

    def read(
        self, log: ReadableLog, since: int, max_bytes: int, *, timing: bool = False, marks: bool = False
    ) -> TerminalRead:
        """Output and events after `since`, up to `max_bytes` of output. `timing` gives each time its own event."""
        if since < 0:
            raise InvalidParams(f"since {since}: must not be negative")
        found: list[TerminalEvent] = []
        truncated = False
        position = min(since, self.token(log))
        if position < self._horizon:
            found.append(self._gap(position, self._horizon, self._horizon - self._dropped))
            position = self._horizon
            truncated = True
        number = self._dropped + bisect_left(self._events, position, key=_position)
        offset = position - number
        while len(found) < _MAX_EVENTS:
            event = self._events[number - self._dropped] if number < self.count else None
            stop = log.end if event is None else event.offset
            if offset >= stop:
                if event is None:
                    break
                number += 1
                found.append(_public_event(event, marks))
                continue
            if log.lost_start <= offset < log.lost_end:
                # Events within the lost range are kept: the gap ends at the next one.
                end = min(log.lost_end, stop)
                found.append(self._gap(offset + number, end + number, end))
                offset, truncated = end, True
                continue
            if max_bytes <= 0:
                break
            data = log.read(
                offset, min(stop, self._same_time_until(offset) if timing else stop, offset + max_bytes) - offset
            )
            if not data:
                break
            found.append(
                TerminalEvent(
                    token=offset + len(data) + number,
                    timestamp=self._time_of(offset),
                    type="output",
                    payload=data,
                    offset=offset,
                    state=self._state_before(number),
                )
            )
            max_bytes -= len(data)
            offset += len(data)
        return TerminalRead(tuple(found), offset + number, self.state, truncated)

    def _gap(self, start: int, end: int, offset: int) -> TerminalEvent:
        return TerminalEvent(
            token=end,
            timestamp=self._time_of(offset),
            type="gap",
            offset=offset,
            state=self.state,
            length=end - start,
        )

    def _state_before(self, number: int) -> TerminalState:
        index = number - self._dropped - 1
        if index >= 0:
            return self._events[index].state
        return self._events[0].state if self._dropped and self._events else "RUNNING"

    def _time_of(self, offset: int) -> float:
        index = bisect_right(self._offsets, offset) - 1
        return self._times[index] if index >= 0 else 0.0

    def _same_time_until(self, offset: int) -> int:
        index = bisect_right(self._offsets, offset)
        return self._offsets[index] if index < len(self._offsets) else (1 << 63)


def _position(event: TimelineEvent) -> int:
    return event.position


def _offset(event: TimelineEvent) -> int:
    return event.offset


#: Events after which the output begins a line of its own.
_LINE_BOUNDARIES: Final = ("ended", "prompt", "continuation")
#: The marks of OSC 133, for readers with `marks`.
_MARKS: Final[dict[str, bytes]] = {"promptStart": b"A", "prompt": b"B", "command": b"C"}


def _public_event(event: TimelineEvent, marks: bool) -> TerminalEvent:
    more: dict[str, Any] = {}
    if event.type == "prompt":
        more["prompt_detected"] = True
    if marks and event.type in _MARKS:
        more["payload"] = b"\x1b]133;" + _MARKS[event.type] + b"\x07"
    elif marks and event.type == "ended":
        more["payload"] = b"\x1b]133;D;%d\x07" % (event.exit_code or 0)
    else:
        more["payload"] = event.payload
    return TerminalEvent(
        token=event.position + 1,
        timestamp=event.timestamp,
        type=event.type,
        offset=event.offset,
        state=event.state,
        exit_code=event.exit_code,
        prompt=event.prompt,
        size=event.size,
        reason=event.reason,
        cwd=event.cwd,
        run_id=event.run_id,
        **more,
    )
